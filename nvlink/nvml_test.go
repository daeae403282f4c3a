//go:build cgo && linux

package nvlink_test

import (
	"cmp"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/dgxa100"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/dgxb200"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/dgxh100"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/dgxh200"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/server"
	"pgregory.net/rapid"

	"tutti/nvlink"
	"tutti/nvlink/nvlinktest"
)

// functions are those that read calls only if the library has them.
var functions = []string{"nvmlDeviceGetCpuAffinity", "nvmlDeviceGetMemoryAffinity", "nvmlDeviceGetGpuFabricInfo",
	"nvmlDeviceGetMigMode", "nvmlDeviceGetNvLinkState", "nvmlDeviceGetNvLinkRemotePciInfo",
	"nvmlDeviceGetNvLinkRemoteDeviceType", "nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetP2PStatus"}

// A library is a mock that tells what a System has, where the mock itself tells nothing.
type library struct {
	*server.Server
	missing map[string]bool        // of functions: an old library
	fails   map[string]nvml.Return // a library that does not tell
	lost    map[int]nvml.Return    // GPUs
}

func newLibrary(s *server.Server, m nvlink.System) *library {
	l := &library{s, map[string]bool{}, map[string]nvml.Return{}, map[int]nvml.Return{}}
	s.LookupSymbolFunc = func(name string) error {
		if l.missing[name] || !slices.Contains(functions, name) {
			return errors.New("undefined symbol: " + name)
		}
		return nil
	}
	handle := s.DeviceGetHandleByIndexFunc
	s.DeviceGetHandleByIndexFunc = func(i int) (nvml.Device, nvml.Return) {
		if ret := l.lost[i]; ret != nvml.SUCCESS {
			return nil, ret
		}
		return handle(i)
	}
	for i, d := range s.Devices {
		l.describe(d.(*server.Device), i, m)
	}
	return l
}

// ask returns what a call returns, ret unless the function fails. A missing one is not called.
func (l *library) ask(name string, ret nvml.Return) nvml.Return {
	if l.missing[name] {
		panic(name + " was called, which the library lacks")
	}
	return cmp.Or(l.fails[name], ret)
}

func (l *library) describe(d *server.Device, i int, m nvlink.System) {
	g := m.GPUs[i]
	d.GetPciInfoFunc = func() (nvml.PciInfo, nvml.Return) { return pciInfo(g.PCI), nvml.SUCCESS }
	d.GetCpuAffinityFunc = func(n int) ([]uint, nvml.Return) {
		return words(g.CPUs, n), l.ask("nvmlDeviceGetCpuAffinity", nvml.SUCCESS)
	}
	d.GetMemoryAffinityFunc = func(n int, scope nvml.AffinityScope) ([]uint, nvml.Return) {
		if scope != nvml.AFFINITY_SCOPE_NODE {
			return nil, nvml.ERROR_INVALID_ARGUMENT
		}
		return words([]int{g.Node}, n), l.ask("nvmlDeviceGetMemoryAffinity", nvml.SUCCESS)
	}
	d.GetGpuFabricInfoFunc = func() (nvml.GpuFabricInfo, nvml.Return) {
		info := nvml.GpuFabricInfo{State: map[nvlink.FabricState]uint8{
			nvlink.FabricNone:       nvml.GPU_FABRIC_STATE_NOT_SUPPORTED,
			nvlink.FabricNotStarted: nvml.GPU_FABRIC_STATE_NOT_STARTED,
			nvlink.FabricInProgress: nvml.GPU_FABRIC_STATE_IN_PROGRESS,
			nvlink.FabricCompleted:  nvml.GPU_FABRIC_STATE_COMPLETED}[g.Fabric.State], CliqueId: g.Fabric.Clique}
		if g.Fabric.Cluster != "" {
			raw, err := hex.DecodeString(strings.ReplaceAll(g.Fabric.Cluster, "-", ""))
			if err != nil {
				panic(err)
			}
			copy(info.ClusterUuid[:], raw)
		}
		if g.Fabric.Problem != "" {
			info.Status = uint32(nvml.ERROR_INSUFFICIENT_RESOURCES)
		}
		return info, l.ask("nvmlDeviceGetGpuFabricInfo", nvml.SUCCESS)
	}
	if g.MIG == nvlink.Yes {
		d.MigMode = nvml.DEVICE_MIG_ENABLE
	}
	mode := d.GetMigModeFunc
	d.GetMigModeFunc = func() (int, int, nvml.Return) {
		now, later, ret := mode()
		return now, later, l.ask("nvmlDeviceGetMigMode", ret)
	}
	d.GetMaxMigDeviceCountFunc = func() (int, nvml.Return) { return 7, nvml.SUCCESS }
	d.GetMigDeviceHandleByIndexFunc = func(k int) (nvml.Device, nvml.Return) {
		if k%2 == 0 || k/2 >= len(g.Instances) {
			return nil, nvml.ERROR_NOT_FOUND
		}
		return &mock.Device{GetUUIDFunc: func() (string, nvml.Return) { return g.Instances[k/2], nvml.SUCCESS }},
			nvml.SUCCESS
	}
	link := func(k int, name string) (nvlink.Link, nvml.Return) {
		switch at := slices.IndexFunc(g.Links, func(l nvlink.Link) bool { return l.Number == k }); {
		case len(g.Links) == 0:
			return nvlink.Link{}, nvml.ERROR_NOT_SUPPORTED
		case at < 0:
			return nvlink.Link{}, nvml.ERROR_INVALID_ARGUMENT
		default:
			return g.Links[at], l.ask(name, nvml.SUCCESS)
		}
	}
	d.GetNvLinkStateFunc = func(k int) (nvml.EnableState, nvml.Return) {
		k1, ret := link(k, "nvmlDeviceGetNvLinkState")
		if k1.Up {
			return nvml.FEATURE_ENABLED, ret
		}
		return nvml.FEATURE_DISABLED, ret
	}
	d.GetNvLinkRemotePciInfoFunc = func(k int) (nvml.PciInfo, nvml.Return) {
		k1, ret := link(k, "nvmlDeviceGetNvLinkRemotePciInfo")
		return pciInfo(k1.PCI), ret
	}
	d.GetNvLinkRemoteDeviceTypeFunc = func(k int) (nvml.IntNvLinkDeviceType, nvml.Return) {
		k1, ret := link(k, "nvmlDeviceGetNvLinkRemoteDeviceType")
		return map[nvlink.Remote]nvml.IntNvLinkDeviceType{nvlink.RemoteUnknown: nvml.NVLINK_DEVICE_TYPE_UNKNOWN,
			nvlink.RemoteGPU: nvml.NVLINK_DEVICE_TYPE_GPU, nvlink.RemoteSwitch: nvml.NVLINK_DEVICE_TYPE_SWITCH,
			nvlink.RemoteCPU: nvml.NVLINK_DEVICE_TYPE_IBMNPU}[k1.Remote], ret
	}
	pair := func(other nvml.Device) nvlink.Pair { return m.Pairs[i][other.(*server.Device).Index] }
	d.GetTopologyCommonAncestorFunc = func(other nvml.Device) (nvml.GpuTopologyLevel, nvml.Return) {
		return map[nvlink.Level]nvml.GpuTopologyLevel{nvlink.LevelBoard: nvml.TOPOLOGY_INTERNAL,
				nvlink.LevelSwitch:   nvml.TOPOLOGY_SINGLE,
				nvlink.LevelSwitches: nvml.TOPOLOGY_MULTIPLE, nvlink.LevelBridge: nvml.TOPOLOGY_HOSTBRIDGE,
				nvlink.LevelNode:   nvml.TOPOLOGY_NODE,
				nvlink.LevelSystem: nvml.TOPOLOGY_SYSTEM}[pair(other).Level],
			l.ask("nvmlDeviceGetTopologyCommonAncestor",
				nvml.SUCCESS)
	}
	d.GetP2PStatusFunc = func(other nvml.Device, kind nvml.GpuP2PCapsIndex) (nvml.GpuP2PStatus, nvml.Return) {
		p := pair(other)
		a := map[nvml.GpuP2PCapsIndex]nvlink.Answer{
			nvml.P2P_CAPS_INDEX_READ:    p.Read,
			nvml.P2P_CAPS_INDEX_WRITE:   p.Write,
			nvml.P2P_CAPS_INDEX_ATOMICS: p.Atomics, nvml.P2P_CAPS_INDEX_NVLINK: p.NVLink,
			nvml.P2P_CAPS_INDEX_PCI: p.PCIe}[kind]
		return map[nvlink.Answer]nvml.GpuP2PStatus{nvlink.Unknown: nvml.P2P_STATUS_UNKNOWN,
			nvlink.Yes: nvml.P2P_STATUS_OK,
			nvlink.No:  nvml.P2P_STATUS_CHIPSET_NOT_SUPPORTED}[a], l.ask("nvmlDeviceGetP2PStatus", nvml.SUCCESS)
	}
}

// pciInfo is an address as the library returns it; "" is one of a device that it does not show.
func pciInfo(address string) (p nvml.PciInfo) {
	if address == "" {
		return nvml.PciInfo{Domain: 0xffffffff, Bus: 0xff, Device: 0xff}
	}
	fmt.Sscanf(address, "%x:%x:%x.0", &p.Domain, &p.Bus, &p.Device)
	return p
}

// words is a set of numbers below n as bits in words of 64.
func words(set []int, n int) []uint {
	w := make([]uint, (n+63)/64)
	for _, i := range set {
		if i >= 0 {
			w[i/64] |= 1 << (i % 64)
		}
	}
	return w
}

// named gives the GPUs of m the names that a mock has for its own.
func named(m nvlink.System, s *server.Server) nvlink.System {
	m.GPUs = slices.Clone(m.GPUs)
	for i, d := range s.Devices {
		v := d.(*server.Device)
		m.GPUs[i].Name, m.GPUs[i].UUID, m.GPUs[i].Memory = v.Config.Name, v.UUID, v.MemoryInfo.Total
	}
	m.Driver, m.CUDA = s.DriverVersion, fmt.Sprintf("%d.%d", s.CudaDriverVersion/1000, s.CudaDriverVersion%1000/10)
	return m
}

// TestWholeMachinesAreRead reads whole machines: what the library and the kernel tell is there, and
// gives each pair of ranks its path, and each GPU its card.
func TestWholeMachinesAreRead(t *testing.T) {
	for name, c := range map[string]struct {
		server  *server.Server
		machine nvlink.System
		links   int
	}{
		"A100": {dgxa100.New(), nvlinktest.DGXA100(), 12}, "H100": {dgxh100.New(), nvlinktest.DGXH100(), 18},
		"H200": {dgxh200.New(), nvlinktest.DGXH100(), 18}, "B200": {dgxb200.New(), nvlinktest.DGXH100(), 18},
	} {
		t.Run(name, func(t *testing.T) {
			want := named(c.machine, c.server)
			shut := 0
			c.server.ShutdownFunc = func() nvml.Return { shut++; return nvml.SUCCESS }
			s, err := nvlink.ReadFrom(newLibrary(c.server, want), nvlinktest.Sysfs(want))
			if err != nil {
				t.Fatal(err)
			}
			if shut != 1 {
				t.Errorf("the library was shut down %d times", shut)
			}
			if !strings.Contains(s.GPUs[0].Name, name) || len(s.GPUs) != 8 || s.GPUs[0].LinksUp() != c.links {
				t.Errorf("%d GPUs, the first is %+v", len(s.GPUs), s.GPUs[0])
			}
			for i := range want.GPUs {
				if !reflect.DeepEqual(s.GPUs[i], want.GPUs[i]) {
					t.Errorf("GPU %d: %+v\nwant %+v", i, s.GPUs[i], want.GPUs[i])
				}
			}
			if !reflect.DeepEqual(s.Pairs, want.Pairs) || !slices.Equal(paths(s), paths(want)) {
				t.Errorf("pairs %+v\nwant %+v", s.Pairs, want.Pairs)
			}
			for i, row := range paths(s) {
				if want := fmt.Sprintf("NVS%d", c.links); strings.Count(row+" ", want+" ") != 7 {
					t.Errorf("GPU %d: paths %s, want 7 of %s", i, row, want)
				}
			}
			for g, n := range s.NearestNICs() {
				if got, want := s.NICs[n[0]].Name, fmt.Sprintf("mlx5_%d", g); got != want {
					t.Errorf("GPU %d uses %s, want %s", g, got, want)
				}
			}
			if got, want := fmt.Sprintf("%+v", s.NICs), fmt.Sprintf("%+v", want.NICs); len(s.NICs) != 10 ||
				got != want {
				t.Errorf("cards %s\nwant %s", got, want)
			}
		})
	}
}

// TestOtherMachines: shapes that NVIDIA's mocks do not have.
func TestOtherMachines(t *testing.T) {
	mig := nvlinktest.DGXH100()
	mig.GPUs[2].MIG, mig.GPUs[2].Instances = nvlink.Yes, []string{"MIG-1", "MIG-2", "MIG-3"}
	clique := nvlinktest.DGXH100()
	for i := range clique.GPUs {
		clique.GPUs[i].Fabric = nvlink.Fabric{State: nvlink.FabricCompleted,
			Cluster: "01020304-0506-0708-090a-0b0c0d0e0f10",
			Clique:  uint32(i / 4)}
	}
	clique.GPUs[7].Fabric.Problem = nvml.ERROR_INSUFFICIENT_RESOURCES.Error()
	clique.GPUs[6].Links[3].Up = false
	hidden := nvlinktest.CubeMesh()
	hidden.GPUs = slices.Delete(hidden.GPUs, 4, 8) // by the container
	hidden.Pairs = nvlinktest.Pairs(hidden, func(i, j int) nvlink.Pair { return nvlinktest.CubeMesh().Pairs[i][j] })
	bus := nvlinktest.PCIeOnly()
	for name, want := range map[string]nvlink.System{"MIG": mig, "two cliques of a cluster": clique,
		"a cube mesh": nvlinktest.CubeMesh(),
		"half of one": hidden, "PCIe only": bus} {
		mocks := dgxh100.New()
		mocks.Devices = mocks.Devices[:len(want.GPUs)]
		want = named(want, mocks)
		s, err := nvlink.ReadFrom(newLibrary(mocks, want), nvlinktest.Sysfs(want))
		if err != nil || !reflect.DeepEqual(s, want) {
			t.Errorf("%s: %+v, %v\nwant %+v", name, s, err, want)
		}
	}
}

// TestOldLibraries: no function that is missing is called, and without all of them the list is
// still there, with what the kernel tells.
func TestOldLibraries(t *testing.T) {
	mocks := dgxh100.New()
	want := named(nvlinktest.DGXH100(), mocks)
	l := newLibrary(mocks, want)
	for _, f := range functions {
		l.missing[f] = true
	}
	s, err := nvlink.ReadFrom(l, nvlinktest.Sysfs(want))
	if err != nil {
		t.Fatal(err)
	}
	for i, g := range s.GPUs {
		w := want.GPUs[i]
		w.Links, w.Fabric, w.MIG = nil, nvlink.Fabric{}, nvlink.Unknown
		if !reflect.DeepEqual(g, w) {
			t.Errorf("GPU %d: %+v, want %+v", i, g, w)
		}
	}
	if p := s.Path(whole(0), whole(1)); p.Class != nvlink.ClassHost || p.Level != nvlink.LevelNode {
		t.Errorf("%+v", p)
	}
	// Nor does the kernel tell anything: virtual machines, containers without /sys.
	if s, err = nvlink.ReadFrom(l, fstest.MapFS{}); err != nil {
		t.Fatal(err)
	}
	for i, g := range s.GPUs {
		if g.PCI != want.GPUs[i].PCI || g.Node != -1 || g.CPUs != nil || g.Bridges != nil {
			t.Errorf("GPU %d: %+v", i, g)
		}
	}
	// A library that says which processors and memory are near needs no kernel.
	clear(l.missing)
	if s, err = nvlink.ReadFrom(l, fstest.MapFS{}); err != nil || s.GPUs[5].Node != 1 ||
		s.GPUs[5].CPUs.String() != "4-7" {
		t.Errorf("%+v, %v", s.GPUs[5], err)
	}
	// One that knows no kinds of remote devices still shows which of them are GPUs.
	l = newLibrary(mocks, nvlinktest.CubeMesh())
	l.missing["nvmlDeviceGetNvLinkRemoteDeviceType"] = true
	if s, err = nvlink.ReadFrom(l, fstest.MapFS{}); err != nil || !slices.Equal(paths(s),
		paths(nvlinktest.CubeMesh())) {
		t.Errorf("%v, %v", paths(s), err)
	}
}

// TestCallsFail: whatever the driver does not tell, the list is complete, what it tells is right,
// and paths are still symmetric.
func TestCallsFail(t *testing.T) {
	mocks := dgxa100.New()
	want := named(nvlinktest.DGXA100(), mocks)
	l, sys := newLibrary(mocks, want), nvlinktest.Sysfs(want)
	rapid.Check(t, func(t *rapid.T) {
		clear(l.missing)
		clear(l.fails)
		clear(l.lost)
		for _, f := range functions {
			switch rapid.IntRange(0, 3).Draw(t, f) {
			case 0:
				l.missing[f] = true
			case 1:
				l.fails[f] = rapid.SampledFrom([]nvml.Return{nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_UNKNOWN,
					nvml.ERROR_NO_PERMISSION, nvml.ERROR_GPU_IS_LOST}).Draw(t, "how")
			}
		}
		for i := range 8 {
			if rapid.IntRange(0, 9).Draw(t, "lost") == 0 {
				l.lost[i] = nvml.ERROR_GPU_IS_LOST
			}
		}
		var view fs.FS = fstest.MapFS{}
		if rapid.Bool().Draw(t, "/sys") {
			view = sys
		}
		s, err := nvlink.ReadFrom(l, view)
		if err != nil || len(s.GPUs) != 8 || len(s.Pairs) != 8 {
			t.Fatalf("%d GPUs, %v", len(s.GPUs), err)
		}
		for i, g := range s.GPUs {
			w := want.GPUs[i]
			if (g.Problem != "") != (l.lost[i] != nvml.SUCCESS) {
				t.Fatalf("GPU %d: problem %q", i, g.Problem)
			}
			if g.Problem == "" && (g.Name != w.Name || g.UUID != w.UUID || g.PCI != w.PCI) {
				t.Fatalf("GPU %d: %+v", i, g)
			}
			if g.Node != -1 && g.Node != w.Node || len(g.Links) != 0 && len(g.Links) != 12 ||
				g.CPUs != nil && !slices.Equal(g.CPUs, w.CPUs) || g.MIG == nvlink.Yes {
				t.Fatalf("GPU %d: %+v, want %+v", i, g, w)
			}
			for j := range s.GPUs {
				p, q := s.Path(whole(i), whole(j)), want.Path(whole(i), whole(j))
				if p.Class > q.Class || p.Class != s.Path(whole(j), whole(i)).Class && i != j {
					// Better than all is known to allow: only if it is by links whose ends are not
					// known.
					if p.Class != nvlink.ClassNVLink || p.Links != 0 {
						t.Fatalf("%d to %d: %v, want at most %v", i, j, p, q)
					}
				}
			}
		}
	})
}

func TestWithoutDriver(t *testing.T) {
	for ret, want := range map[nvml.Return]string{
		nvml.ERROR_LIBRARY_NOT_FOUND: "libnvidia-ml.so.1", nvml.ERROR_DRIVER_NOT_LOADED: "kernel driver",
		nvml.ERROR_UNKNOWN: "999",
	} {
		_, err := nvlink.ReadFrom(&mock.Interface{InitFunc: func() nvml.Return { return ret }}, fstest.MapFS{})
		if !errors.Is(err, nvlink.ErrUnavailable) || !strings.Contains(err.Error(), want) {
			t.Errorf("Init %d: %v; want nvlink.ErrUnavailable with %q", ret, err, want)
		}
	}
}

// TestThisMachine calls the real library, or finds that there is none, which must not crash.
func TestThisMachine(t *testing.T) {
	s, err := nvlink.Read(os.DirFS("/sys"))
	if err != nil && !errors.Is(err, nvlink.ErrUnavailable) {
		t.Fatal(err)
	}
	t.Logf("%+v, %v", s, err)
}
