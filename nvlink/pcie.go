package nvlink

import (
	"fmt"
	"io/fs"
	"path"
	"strconv"
	"strings"

	"tutti/internal/cpus"
)

// Level says what two devices have in common on the way from their processors: how far they are
// from each other by PCIe. The names are those of `nvidia-smi topo -m`.
type Level uint8

// The levels, the nearest first.
const (
	LevelUnknown  Level = iota
	LevelBoard          // a board
	LevelSwitch         // a PCIe switch
	LevelSwitches       // a PCIe switch, with further ones between
	LevelBridge         // a host bridge
	LevelNode           // a NUMA node
	LevelSystem         // the machine
)

// String returns nvidia-smi's name.
func (l Level) String() string {
	return [...]string{"?", "PSB", "PIX", "PXB", "PHB", "NODE", "SYS"}[l]
}

// MarshalText implements encoding.TextMarshaler.
func (l Level) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// distance orders levels. What is not known is nearer than what is known to be the farthest.
func (l Level) distance() int {
	if l == LevelUnknown {
		return 2*int(LevelSystem) - 1
	}
	return 2 * int(l)
}

// Level returns how near two devices are by their bridges and NUMA nodes.
func (a Place) Level(b Place) Level {
	common := 0
	for common < min(len(a.Bridges), len(b.Bridges)) && a.Bridges[common] == b.Bridges[common] {
		common++
	}
	// Bridges of a switch: one to the root, which all of its devices share, and one to each device.
	below := max(len(a.Bridges), len(b.Bridges)) - common
	switch {
	case common > 1 && below == 0:
		return LevelBoard
	case common > 1 && below <= 2:
		return LevelSwitch
	case common > 1:
		return LevelSwitches
	case common == 1:
		return LevelBridge
	case a.Node < 0 || b.Node < 0:
		return LevelUnknown
	case a.Node == b.Node:
		return LevelNode
	}
	return LevelSystem
}

// address returns a PCI address as the kernel writes it, with a domain of at least four digits, ""
// if text is none: other interfaces write domains of eight digits, or capital letters.
func address(text string) string {
	f := strings.FieldsFunc(strings.ToLower(strings.TrimSpace(text)), func(r rune) bool { return r == ':' || r == '.' })
	if len(f) != 4 {
		return ""
	}
	var n [4]uint64
	for i, limit := range []int{32, 8, 5, 3} {
		v, err := strconv.ParseUint(f[i], 16, limit)
		if err != nil {
			return ""
		}
		n[i] = v
	}
	return fmt.Sprintf("%04x:%02x:%02x.%x", n[0], n[1], n[2], n[3])
}

// bridges returns the devices on a path of /sys/devices from the host bridge on.
func bridges(target string) []string {
	var all []string
	for part := range strings.SplitSeq(target, "/") {
		switch {
		case len(all) == 0 && strings.HasPrefix(part, "pci") && strings.Contains(part, ":"):
			all = append(all, part)
		case len(all) > 0 && address(part) == part:
			all = append(all, part)
		case len(all) > 0:
			return all // the device's own directories
		}
	}
	return all
}

// number returns the number in a file of the kernel, -1 if there is none, or a negative one.
func number(sys fs.FS, name string) int {
	b, err := fs.ReadFile(sys, name)
	if err != nil {
		return -1
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil || n < 0 {
		return -1
	}
	return n
}

// placeOf returns where the kernel has the device with a PCI address, and the processors near it.
func placeOf(sys fs.FS, pci string) (Place, cpus.Set) {
	p := Place{PCI: pci, Node: -1}
	if pci == "" {
		return p, nil
	}
	dir := path.Join("bus/pci/devices", pci)
	if target, err := fs.ReadLink(sys, dir); err == nil {
		p.Bridges = bridges(target)
	}
	p.Node = number(sys, dir+"/numa_node")
	b, _ := fs.ReadFile(sys, dir+"/local_cpulist")
	near, _ := cpus.Parse(string(b))
	return p, near
}

// nics lists the RDMA devices of the kernel.
func nics(sys fs.FS) []NIC {
	const class = "class/infiniband"
	entries, _ := fs.ReadDir(sys, class)
	var all []NIC
	for _, e := range entries {
		n := NIC{Name: e.Name(), Place: Place{Node: number(sys, path.Join(class, e.Name(), "device/numa_node"))}}
		if target, err := fs.ReadLink(sys, path.Join(class, e.Name())); err == nil {
			n.Bridges = bridges(target)
		}
		if last := len(n.Bridges) - 1; last > 0 {
			n.PCI = n.Bridges[last]
		}
		states, _ := fs.Glob(sys, path.Join(class, e.Name(), "ports/*/state"))
		for _, f := range states {
			b, err := fs.ReadFile(sys, f)
			switch {
			case err != nil:
			case strings.HasSuffix(strings.TrimSpace(string(b)), "ACTIVE"):
				n.Up = Yes
			case n.Up == Unknown:
				n.Up = No
			}
		}
		all = append(all, n)
	}
	return all
}
