// Package nvlinktest has machines with GPUs, as data, for tests.
package nvlinktest

import (
	"fmt"
	"io/fs"
	"path"
	"strings"
	"testing/fstest"

	"tutti/internal/cpus"
	"tutti/nvlink"
)

// A board is a machine with GPUs that are connected by switches, as a test describes it.
type board struct {
	links   int           // of each GPU
	fabric  nvlink.Fabric // of each GPU
	sharing bool          // two GPUs and two cards share a switch; else each GPU has a card and a switch
}

// DGXA100 has eight GPUs with twelve links to NVSwitches each, a card for each, and two for
// storage. Two GPUs share PCIe switches with their two cards.
func DGXA100() nvlink.System {
	return board{links: 12, fabric: nvlink.Fabric{State: nvlink.FabricNone}, sharing: true}.system()
}

// DGXH100 has eight GPUs with 18 links to NVSwitches each, a card for each at the same PCIe switch,
// and two for storage. DGX H200 and B200 are alike.
func DGXH100() nvlink.System {
	return board{links: 18, fabric: nvlink.Fabric{State: nvlink.FabricCompleted}}.system()
}

// system makes the machine.
func (b board) system() nvlink.System {
	s := nvlink.System{Driver: "550.54.15", CUDA: "12.4"}
	for i := range 8 {
		node := i / 4
		g := nvlink.GPU{Name: "GPU of a test", UUID: fmt.Sprintf("GPU-00000000-0000-0000-0000-%012d", i),
			Memory: 80 << 30, CPUs: cpusOf(node), MIG: nvlink.No, Fabric: b.fabric, Place: b.place(i, 0, node)}
		for l := range b.links {
			g.Links = append(g.Links, nvlink.Link{Number: l, Up: true, Remote: nvlink.RemoteSwitch,
				PCI: fmt.Sprintf("0000:%02x:00.0", 0xf0+l%6)})
		}
		s.GPUs = append(s.GPUs, g)
		s.NICs = append(s.NICs, nvlink.NIC{Name: fmt.Sprintf("mlx5_%d", i), Up: nvlink.Yes,
			Place: b.place(i, 1, node)})
	}
	for node := range 2 { // on host bridges of their own
		s.NICs = append(s.NICs, nvlink.NIC{Name: fmt.Sprintf("mlx5_%d", 8+node), Up: nvlink.Yes,
			Place: At(node, fmt.Sprintf("pci0000:%02x", 0xe0+node), fmt.Sprintf("0000:%02x:01.0", 0xe0+node),
				fmt.Sprintf("0000:%02x:00.0", 0xe2+node))})
	}
	s.Pairs = Pairs(s, func(int, int) nvlink.Pair { return Access(nvlink.Yes, nvlink.Yes, nvlink.Yes) })
	return s
}

// place is that of GPU i (port 0), or of the card beside it (1).
func (b board) place(i, port, node int) nvlink.Place {
	if b.sharing { // a switch that leads to one of two GPUs and to one of their cards
		bus := 0x10 + 0x20*(i/2)
		return At(node, fmt.Sprintf("pci0000:%02x", bus), fmt.Sprintf("0000:%02x:01.0", bus),
			fmt.Sprintf("0000:%02x:00.0", bus+1), fmt.Sprintf("0000:%02x:%02x.0", bus+2, port),
			fmt.Sprintf("0000:%02x:00.0", bus+3+port), fmt.Sprintf("0000:%02x:%02x.0", bus+5+port, i%2),
			fmt.Sprintf("0000:%02x:00.0", bus+7+2*port+i%2))
	}
	bus := 0x10 + 0x10*i
	return At(node, fmt.Sprintf("pci0000:%02x", bus), fmt.Sprintf("0000:%02x:01.0", bus),
		fmt.Sprintf("0000:%02x:00.0", bus+1), fmt.Sprintf("0000:%02x:%02x.0", bus+2, port),
		fmt.Sprintf("0000:%02x:00.0", bus+3+port))
}

// At is the place of the last of bridges.
func At(node int, bridges ...string) nvlink.Place {
	return nvlink.Place{PCI: bridges[len(bridges)-1], Bridges: bridges, Node: node}
}

func cpusOf(node int) cpus.Set {
	var set cpus.Set
	for i := range 4 {
		set = append(set, 4*node+i)
	}
	return set
}

// Access is a pair with one answer for reading, writing and atomics, and those for the two ways.
func Access(any, byNVLink, byPCIe nvlink.Answer) nvlink.Pair {
	return nvlink.Pair{Read: any, Write: any, Atomics: any, NVLink: byNVLink, PCIe: byPCIe}
}

// Pairs is a table for s: what of says, with the levels of its places.
func Pairs(s nvlink.System, of func(i, j int) nvlink.Pair) [][]nvlink.Pair {
	all := make([][]nvlink.Pair, len(s.GPUs))
	for i, a := range s.GPUs {
		all[i] = make([]nvlink.Pair, len(s.GPUs))
		for j, b := range s.GPUs {
			if i != j {
				all[i][j] = of(i, j)
				all[i][j].Level = a.Level(b.Place)
			}
		}
	}
	return all
}

// CubeMesh has eight V100 of six links each: two squares, whose corners are connected. Some pairs
// have two links, some have none, and no other way.
func CubeMesh() nvlink.System {
	s := board{fabric: nvlink.Fabric{State: nvlink.FabricNone}}.system()
	edges := map[[2]int]int{{0, 1}: 1, {0, 2}: 1, {0, 3}: 2, {0, 4}: 2, {1, 2}: 2, {1, 3}: 1, {1, 5}: 2, {2, 3}: 2,
		{2, 6}: 1, {3, 7}: 1, {4, 5}: 1, {4, 6}: 1, {4, 7}: 2, {5, 6}: 2, {5, 7}: 1, {6, 7}: 2}
	for i := range 8 {
		for j := range 8 {
			for range edges[[2]int{min(i, j), max(i, j)}] {
				s.GPUs[i].Links = append(s.GPUs[i].Links, nvlink.Link{Number: len(s.GPUs[i].Links), Up: true,
					Remote: nvlink.RemoteGPU, PCI: s.GPUs[j].PCI})
			}
		}
	}
	s.Pairs = Pairs(s, func(i, j int) nvlink.Pair {
		a := nvlink.No
		if edges[[2]int{min(i, j), max(i, j)}] > 0 {
			a = nvlink.Yes
		}
		return Access(a, a, nvlink.No)
	})
	return s
}

// PCIeOnly has four GPUs, two at each processor. GPUs of one processor access each other's memory.
func PCIeOnly() nvlink.System {
	s := nvlink.System{}
	for i := range 4 {
		bus := 0x10 + 0x40*(i/2)
		s.GPUs = append(s.GPUs, nvlink.GPU{UUID: fmt.Sprintf("GPU-%d", i), MIG: nvlink.No,
			Fabric: nvlink.Fabric{State: nvlink.FabricNone},
			Place: At(i/2, fmt.Sprintf("pci0000:%02x", bus), fmt.Sprintf("0000:%02x:%02x.0", bus, 1+i%2),
				fmt.Sprintf("0000:%02x:00.0", bus+1+i%2))})
	}
	s.NICs = []nvlink.NIC{{Name: "mlx5_0", Up: nvlink.Yes, Place: At(1, "pci0000:90", "0000:90:01.0", "0000:91:00.0")}}
	s.Pairs = Pairs(s, func(i, j int) nvlink.Pair {
		a := nvlink.No
		if i/2 == j/2 {
			a = nvlink.Yes
		}
		return Access(a, nvlink.No, a)
	})
	return s
}

// Sysfs is the kernel's /sys of s.
func Sysfs(s nvlink.System) fstest.MapFS {
	sys := fstest.MapFS{}
	file := func(name, text string) { sys[name] = &fstest.MapFile{Data: []byte(text + "\n"), Mode: 0o444} }
	link := func(name, target string) {
		sys[name] = &fstest.MapFile{Data: []byte(target), Mode: fs.ModeSymlink | 0o777}
	}
	device := func(p nvlink.Place) string {
		dir := "devices/" + strings.Join(p.Bridges, "/")
		file(dir+"/numa_node", fmt.Sprint(p.Node))
		if p.PCI != "" {
			link("bus/pci/devices/"+p.PCI, "../../../"+dir)
		}
		return dir
	}
	for _, g := range s.GPUs {
		if g.PCI != "" {
			file(device(g.Place)+"/local_cpulist", g.CPUs.String())
		}
	}
	for _, n := range s.NICs {
		dir := "devices/virtual"
		if n.PCI != "" {
			dir = device(n.Place)
			link(path.Join(dir, "infiniband", n.Name, "device"), "../../../"+n.PCI)
		}
		dir = path.Join(dir, "infiniband", n.Name)
		link("class/infiniband/"+n.Name, "../../"+dir)
		switch n.Up {
		case nvlink.Yes:
			file(dir+"/ports/1/state", "1: DOWN")
			file(dir+"/ports/2/state", "4: ACTIVE")
		case nvlink.No:
			file(dir+"/ports/1/state", "1: DOWN")
		}
	}
	return sys
}
