//go:build cgo && linux

package nvlink

import (
	"fmt"
	"io/fs"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"tutti/internal/cpus"
)

// Read lists the machine's GPUs and RDMA devices. It asks the driver, which may take a second if no
// other process uses it. sys is the kernel's /sys. An error that wraps ErrUnavailable means that
// there is no driver; a machine with a driver and without GPUs is no error.
func Read(sys fs.FS) (System, error) { return read(nvml.New(), sys) }

func read(lib nvml.Interface, sys fs.FS) (s System, err error) {
	if ret := lib.Init(); ret != nvml.SUCCESS {
		return s, fmt.Errorf("%w: %s", ErrUnavailable, explain(ret))
	}
	defer lib.Shutdown()
	if v, ret := lib.SystemGetDriverVersion(); ret == nvml.SUCCESS {
		s.Driver = v
	}
	if v, ret := lib.SystemGetCudaDriverVersion(); ret == nvml.SUCCESS {
		s.CUDA = fmt.Sprintf("%d.%d", v/1000, v%1000/10)
	}
	n, ret := lib.DeviceGetCount()
	if ret != nvml.SUCCESS {
		return s, fmt.Errorf("count the GPUs: %v", ret)
	}
	r := reader{lib: lib, known: map[string]bool{}}
	for i := range n {
		d, ret := lib.DeviceGetHandleByIndex(i)
		if ret != nvml.SUCCESS { // the GPU is lost, or withheld from this process
			r.handles = append(r.handles, nil)
			s.GPUs = append(s.GPUs, GPU{Place: Place{Node: -1}, Problem: ret.Error()})
			continue
		}
		r.handles = append(r.handles, d)
		s.GPUs = append(s.GPUs, r.gpu(d, sys))
	}
	ours := map[string]bool{}
	for _, g := range s.GPUs {
		ours[g.PCI] = g.PCI != ""
	}
	for i, d := range r.handles {
		if d != nil {
			s.GPUs[i].Links = r.links(d, ours)
		}
	}
	s.Pairs = r.pairs()
	s.NICs = nics(sys)
	return s, nil
}

// reader asks a library of any version.
type reader struct {
	lib     nvml.Interface
	known   map[string]bool // functions of the library
	handles []nvml.Device   // of GPUs, nil for those that cannot be asked
}

// has reports whether the library has a function. A call of one that an old library lacks would end
// the process.
func (r *reader) has(function string) bool {
	has, asked := r.known[function]
	if !asked {
		has = r.lib.Extensions().LookupSymbol(function) == nil
		r.known[function] = has
	}
	return has
}

// gpu describes a GPU except for its links. Properties that are not supported stay unknown.
func (r *reader) gpu(d nvml.Device, sys fs.FS) GPU {
	var g GPU
	g.Name, _ = d.GetName()
	g.UUID, _ = d.GetUUID()
	pci := ""
	if p, ret := d.GetPciInfo(); ret == nvml.SUCCESS {
		pci = busID(p)
	}
	g.Place, g.CPUs = placeOf(sys, pci)
	if m, ret := d.GetMemoryInfo(); ret == nvml.SUCCESS {
		g.Memory = m.Total
	}
	if r.has("nvmlDeviceGetCpuAffinity") {
		if words, ret := d.GetCpuAffinity(cpus.Max); ret == nvml.SUCCESS && len(bits(words)) > 0 {
			g.CPUs = bits(words)
		}
	}
	if g.Node < 0 && r.has("nvmlDeviceGetMemoryAffinity") {
		words, ret := d.GetMemoryAffinity(maxNodes, nvml.AFFINITY_SCOPE_NODE)
		if nodes := bits(words); ret == nvml.SUCCESS && len(nodes) == 1 {
			g.Node = nodes[0]
		}
	}
	g.Fabric = r.fabric(d)
	if r.has("nvmlDeviceGetMigMode") {
		switch mode, _, ret := d.GetMigMode(); {
		case ret == nvml.ERROR_NOT_SUPPORTED || ret == nvml.SUCCESS && mode == nvml.DEVICE_MIG_DISABLE:
			g.MIG = No
		case ret == nvml.SUCCESS:
			g.MIG = Yes
			g.Instances = r.instances(d)
		}
	}
	return g
}

// maxNodes is the number of NUMA nodes that a kernel is built for.
const maxNodes = 1024

// bits returns the numbers of the bits that are set, in words of 64 bits.
func bits(words []uint) []int {
	var set []int
	for i, w := range words {
		for b := range 64 {
			if w>>b&1 != 0 {
				set = append(set, 64*i+b)
			}
		}
	}
	return set
}

func (r *reader) instances(d nvml.Device) []string {
	n, ret := d.GetMaxMigDeviceCount()
	if ret != nvml.SUCCESS {
		return nil
	}
	var all []string
	for i := range n {
		m, ret := d.GetMigDeviceHandleByIndex(i)
		if ret != nvml.SUCCESS {
			continue // there is none of this number
		}
		if uuid, ret := m.GetUUID(); ret == nvml.SUCCESS {
			all = append(all, uuid)
		}
	}
	return all
}

func (r *reader) fabric(d nvml.Device) (f Fabric) {
	if !r.has("nvmlDeviceGetGpuFabricInfo") {
		return f
	}
	info, ret := d.GetGpuFabricInfo()
	if ret == nvml.ERROR_NOT_SUPPORTED {
		return Fabric{State: FabricNone}
	}
	if ret != nvml.SUCCESS {
		return f
	}
	switch int(info.State) {
	case nvml.GPU_FABRIC_STATE_NOT_SUPPORTED:
		f.State = FabricNone
	case nvml.GPU_FABRIC_STATE_NOT_STARTED:
		f.State = FabricNotStarted
	case nvml.GPU_FABRIC_STATE_IN_PROGRESS:
		f.State = FabricInProgress
	case nvml.GPU_FABRIC_STATE_COMPLETED:
		f.State = FabricCompleted
		f.Clique = info.CliqueId
		if c := info.ClusterUuid; c != ([16]uint8{}) {
			f.Cluster = fmt.Sprintf("%x-%x-%x-%x-%x", c[:4], c[4:6], c[6:8], c[8:10], c[10:])
		}
		if status := nvml.Return(info.Status); status != nvml.SUCCESS {
			f.Problem = status.Error()
		}
	}
	return f
}

// links lists the NVLinks of a GPU. ours has the addresses of the GPUs here.
func (r *reader) links(d nvml.Device, ours map[string]bool) []Link {
	if !r.has("nvmlDeviceGetNvLinkState") {
		return nil
	}
	var all []Link
	for i := range nvml.NVLINK_MAX_LINKS {
		state, ret := d.GetNvLinkState(i)
		if ret != nvml.SUCCESS {
			continue
		}
		l := Link{Number: i, Up: state == nvml.FEATURE_ENABLED}
		if r.has("nvmlDeviceGetNvLinkRemotePciInfo") {
			if p, ret := d.GetNvLinkRemotePciInfo(i); ret == nvml.SUCCESS {
				l.PCI = busID(p)
			}
		}
		if r.has("nvmlDeviceGetNvLinkRemoteDeviceType") {
			if kind, ret := d.GetNvLinkRemoteDeviceType(i); ret == nvml.SUCCESS {
				l.Remote = map[nvml.IntNvLinkDeviceType]Remote{nvml.NVLINK_DEVICE_TYPE_GPU: RemoteGPU,
					nvml.NVLINK_DEVICE_TYPE_SWITCH: RemoteSwitch, nvml.NVLINK_DEVICE_TYPE_IBMNPU: RemoteCPU}[kind]
			}
		}
		if l.Remote == RemoteUnknown && ours[l.PCI] {
			l.Remote = RemoteGPU
		}
		all = append(all, l)
	}
	return all
}

// pairs asks about each GPU and each other one.
func (r *reader) pairs() [][]Pair {
	all := make([][]Pair, len(r.handles))
	for i, a := range r.handles {
		all[i] = make([]Pair, len(r.handles))
		for j, b := range r.handles {
			if i == j || a == nil || b == nil {
				continue
			}
			p := &all[i][j]
			if r.has("nvmlDeviceGetTopologyCommonAncestor") {
				if l, ret := a.GetTopologyCommonAncestor(b); ret == nvml.SUCCESS {
					p.Level = map[nvml.GpuTopologyLevel]Level{nvml.TOPOLOGY_INTERNAL: LevelBoard,
						nvml.TOPOLOGY_SINGLE: LevelSwitch, nvml.TOPOLOGY_MULTIPLE: LevelSwitches,
						nvml.TOPOLOGY_HOSTBRIDGE: LevelBridge, nvml.TOPOLOGY_NODE: LevelNode,
						nvml.TOPOLOGY_SYSTEM: LevelSystem}[l]
				}
			}
			if !r.has("nvmlDeviceGetP2PStatus") {
				continue
			}
			for kind, to := range map[nvml.GpuP2PCapsIndex]*Answer{nvml.P2P_CAPS_INDEX_READ: &p.Read,
				nvml.P2P_CAPS_INDEX_WRITE: &p.Write, nvml.P2P_CAPS_INDEX_ATOMICS: &p.Atomics,
				nvml.P2P_CAPS_INDEX_NVLINK: &p.NVLink, nvml.P2P_CAPS_INDEX_PCI: &p.PCIe} {
				switch status, ret := a.GetP2PStatus(b, kind); {
				case ret != nvml.SUCCESS || status == nvml.P2P_STATUS_UNKNOWN:
				case status == nvml.P2P_STATUS_OK:
					*to = Yes
				default:
					*to = No
				}
			}
		}
	}
	return all
}

// explain describes a failed Init.
func explain(ret nvml.Return) string {
	switch ret {
	case nvml.ERROR_LIBRARY_NOT_FOUND:
		return "libnvidia-ml.so.1 was not found"
	case nvml.ERROR_DRIVER_NOT_LOADED:
		return "the kernel driver is not loaded"
	case nvml.ERROR_NO_PERMISSION:
		return "no permission to use /dev/nvidiactl"
	case nvml.ERROR_LIB_RM_VERSION_MISMATCH:
		return "libnvidia-ml and the kernel driver have different versions"
	}
	return fmt.Sprintf("its initialisation returned %d", ret)
}

// busID returns the address of a PCI device, "" if p has none: drivers that do not show a device
// give zeros or ones.
func busID(p nvml.PciInfo) string {
	if p.Bus == 0 && p.Device == 0 {
		return ""
	}
	return address(fmt.Sprintf("%x:%x:%x.0", p.Domain, p.Bus, p.Device))
}
