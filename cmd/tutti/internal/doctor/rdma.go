package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"tutti/internal/cpus"
	"tutti/p2p/registry"
	"tutti/rdma"
	"tutti/rdma/verbs"
)

// infiniband is the kernel's directory of RDMA devices.
const infiniband = "/sys/class/infiniband"

// rdmaOptions returns the settings of RDMA devices.
func rdmaOptions(h *Host) registry.Options {
	s, _ := rdma.ParseSettings(h.Getenv) // rdmaDevice says what is wrong
	return registry.Options{RDMADevices: h.Getenv("TUTTI_RDMA_DEVICES"), RDMAGID: h.Getenv("TUTTI_RDMA_GID"), RDMA: s}
}

// rdmaDevices returns the names of the RDMA devices that the kernel has.
func (h *Host) rdmaDevices() []string { return h.list(infiniband) }

// verbsLibrary examines what programs use RDMA devices with.
func verbsLibrary(_ context.Context, h *Host) outcome {
	lib := h.library("libibverbs.so.1")
	devices := strings.Join(h.rdmaDevices(), ", ")
	switch {
	case lib == "" && devices == "":
		return missing("no libibverbs, no device", "")
	case lib == "":
		return warn(devices+", but no libibverbs.so.1", "install it (libibverbs1 and ibverbs-providers, or rdma-core)")
	case devices == "":
		detail := lib + ", no device"
		if h.Root == "" {
			if _, err := verbs.Load(); err != nil {
				detail += "; " + err.Error()
			}
		}
		return missing(detail, "without a card: modprobe rdma_rxe; rdma link add rxe0 type rxe netdev IFACE")
	case !strings.Contains(strings.Join(h.list("/dev/infiniband"), " "), "uverbs"):
		return warn(devices+", but no /dev/infiniband/uverbs*", "modprobe ib_uverbs, or give the container the device")
	case h.Root != "":
		return found(devices + ", " + lib + h.rdmaOrder(h.rdmaDevices()))
	}
	p, err := verbs.Load()
	if err != nil {
		return warn(devices+", but "+err.Error(), "install what is missing; the header is needed only to build tutti")
	}
	usable, err := openable(p)
	switch {
	case len(usable) > 0:
		detail := fmt.Sprintf("%s, %s%s; in a fork %s", strings.Join(usable, ", "), lib, h.rdmaOrder(usable),
			p.ForkSupport())
		if err != nil {
			detail += "; not used: " + oneLine(err)
		}
		return found(detail)
	case err != nil:
		return warn(devices+", but "+oneLine(err), "look at the rights of /dev/infiniband/uverbs*")
	}
	return warn(devices+", but libibverbs has no driver for them", "install ibverbs-providers, or the vendor's package")
}

// openable returns the devices that can be opened, and why others cannot: links use those that can.
func openable(p rdma.Provider) (names []string, why error) {
	all, err := p.Devices()
	if err != nil {
		return nil, err
	}
	for _, name := range all {
		d, err := p.Open(name, nil)
		if err != nil {
			why = errors.Join(why, err)
			continue
		}
		d.Close()
		names = append(names, name)
	}
	return names, why
}

// oneLine returns the text of an error in a line.
func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

// rdmaOrder says which ports of devices the links of a rank use, the nearest first, "" if there is
// none.
func (h *Host) rdmaOrder(devices []string) string {
	o, root := rdmaOptions(h), filepath.Join("/", h.Root, infiniband)
	filter, err := rdma.ParseDevices(o.RDMADevices)
	if err != nil {
		return "" // rdmaDevice says it
	}
	var ports []rdma.Place
	for _, d := range devices {
		for _, p := range h.list(filepath.Join(infiniband, d, "ports")) {
			number, err := strconv.Atoi(p)
			at := rdma.DevicePort{Device: d, Port: number}
			if err != nil || !filter.Allows(at) || !strings.HasSuffix(h.read(filepath.Join(infiniband, d, "ports", p,
				"state")), "ACTIVE") {
				continue
			}
			gids, _ := verbs.KernelGIDs(root, d, number)
			if _, err := rdma.ChooseGID(gids, o.RDMAGID); err == nil {
				ports = append(ports, rdma.Place{DevicePort: at, Node: verbs.KernelNUMANode(root, d)})
			}
		}
	}
	if len(ports) == 0 {
		return ""
	}
	var nodes []int // of this process, none if they are not known
	if allowed, err := cpus.Allowed(); err == nil {
		if machine, err := cpus.Read(os.DirFS(filepath.Join("/", h.Root, "sys/devices/system")), allowed); err == nil {
			nodes = cpus.Nodes(machine)
		}
	}
	rdma.Nearest(ports, nodes)
	var names []string
	for _, p := range ports {
		name := p.String()
		if p.Node >= 0 {
			name += fmt.Sprintf(" (NUMA node %d)", p.Node)
		}
		names = append(names, name)
	}
	return "; links use " + strings.Join(names, ", ")
}

// rdmaDevice examines the ports of a device: their states, and the address that peers are given.
func rdmaDevice(name string) func(context.Context, *Host) outcome {
	return func(_ context.Context, h *Host) outcome {
		usable, excluded := 0, 0
		var ports, advice []string
		o := rdmaOptions(h)
		filter, err := rdma.ParseDevices(o.RDMADevices)
		if err != nil {
			return broken("TUTTI_RDMA_DEVICES: "+err.Error(), "correct it or unset it")
		}
		if _, err := rdma.ParseSettings(h.Getenv); err != nil {
			return broken(err.Error(), "correct it or unset it")
		}
		for _, p := range h.list(filepath.Join(infiniband, name, "ports")) {
			base := filepath.Join(infiniband, name, "ports", p)
			_, state, _ := strings.Cut(h.read(base+"/state"), ": ")
			layer := cmpOr(h.read(base+"/link_layer"), "?")
			text := fmt.Sprintf("port %s %s, %s, %s", p, strings.ToLower(cmpOr(state, "unknown")), layer,
				cmpOr(h.read(base+"/rate"), "?"))
			number, err := strconv.Atoi(p)
			if err != nil {
				continue
			}
			if !filter.Allows(rdma.DevicePort{Device: name, Port: number}) {
				ports = append(ports, text+", excluded by TUTTI_RDMA_DEVICES="+o.RDMADevices)
				excluded++
				continue
			}
			gids, _ := verbs.KernelGIDs(filepath.Join("/", h.Root, infiniband), name, number)
			g, err := rdma.ChooseGID(gids, o.RDMAGID)
			switch {
			case state != "ACTIVE":
				advice = append(advice,
					fmt.Sprintf("port %s: set its network interface up, or look at the cable and the subnet "+
						"manager", p))
			case err != nil:
				text += ", no address"
				advice = append(advice, fmt.Sprintf("port %s: give its network interface an IP address", p))
				if o.RDMAGID != "" {
					text += " " + o.RDMAGID + " (TUTTI_RDMA_GID)"
				}
			default:
				usable++
				text += fmt.Sprintf(", address %v: %s", g, cmpOr(chosenGID(o.RDMAGID), whyGID(g)))
				if w := weakGID(g); w != "" {
					advice = append(advice, fmt.Sprintf("port %s: %s", p, w))
				}
			}
			ports = append(ports, text)
		}
		detail := cmpOr(strings.Join(ports, "; "), "no port")
		switch {
		case excluded > 0 && len(ports) == excluded:
			return missing(detail, "")
		case usable == 0:
			return warn(detail, cmpOr(strings.Join(advice, "; "), "look at the driver's messages: dmesg"))
		case len(advice) > 0:
			return warn(detail, strings.Join(advice, "; "))
		}
		return found(detail)
	}
}

// chosenGID says that an address is the best of its port because of TUTTI_RDMA_GID, if that is set.
func chosenGID(want string) string {
	if want == "" {
		return ""
	}
	return "TUTTI_RDMA_GID=" + want
}

// whyGID says why an address is the best of its port.
func whyGID(g rdma.GIDEntry) string {
	switch a := g.GID.Addr(); {
	case g.Type == rdma.InfiniBand:
		return "the first one"
	case weakGID(g) != "":
		return "there is no better one"
	case a.Is4():
		return "routed, RoCE v2, IPv4"
	}
	return "routed, RoCE v2, and there is none with IPv4"
}

// weakGID says what to do about an address that not all peers reach, "" if it is a good one.
func weakGID(g rdma.GIDEntry) string {
	switch {
	case g.Type == rdma.InfiniBand:
		return ""
	case g.Type == rdma.RoCEv1:
		return "RoCE v1 is not routed: have the card use RoCE v2"
	case !g.GID.Addr().IsGlobalUnicast():
		return "the address is not routed: give the network interface another IP address"
	}
	return ""
}

// gpuMemory examines whether RDMA devices can access the memory of GPUs.
func gpuMemory(_ context.Context, h *Host) outcome {
	if h.Root != "" {
		return gpuAccess(h, false)
	}
	p, err := verbs.Load()
	return gpuAccess(h, err == nil && p.DMABuf())
}

// gpuAccess is gpuMemory if libibverbs has DMA buffers, or has not. Nothing else is used:
// nvidia_peermem is not.
func gpuAccess(h *Host, buffers bool) outcome {
	switch {
	case len(h.rdmaDevices()) == 0:
		return missing("no RDMA device that could access it", "")
	case !h.exists("/sys/module/nvidia"):
		return missing("no NVIDIA driver", "")
	case buffers:
		return found("RDMA devices access it by DMA buffers, if their driver and the GPUs' (the open one) have them")
	}
	return warn("libibverbs has no DMA buffers: RDMA devices cannot access it, and data is copied through the host",
		"install rdma-core 35 or later")
}
