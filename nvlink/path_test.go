package nvlink_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"tutti/nvlink"
	"tutti/nvlink/nvlinktest"
)

// at is nvlinktest.At.
var at = nvlinktest.At

// whole is the whole of a GPU.
func whole(gpu int) nvlink.Spot { return nvlink.Spot{GPU: gpu} }

// paths returns the rows of all GPUs' paths.
func paths(s nvlink.System) []string {
	var rows []string
	for i := range s.GPUs {
		var row []string
		for j := range s.GPUs {
			row = append(row, s.Path(whole(i), whole(j)).String())
		}
		rows = append(rows, strings.Join(row, " "))
	}
	return rows
}

// own returns the names of the cards that the GPUs use.
func own(s nvlink.System) []string {
	var names []string
	for _, n := range s.NearestNICs() {
		if len(n) == 0 {
			names = append(names, "-")
			continue
		}
		names = append(names, s.NICs[n[0]].Name)
	}
	return names
}

func TestPaths(t *testing.T) {
	all := func(way string) []string {
		var rows []string
		for i := range 8 {
			row := strings.Fields(strings.Repeat(way+" ", 8))
			row[i] = "same"
			rows = append(rows, strings.Join(row, " "))
		}
		return rows
	}
	change := func(s nvlink.System, f func(s *nvlink.System)) nvlink.System { f(&s); return s }
	eight := strings.Fields("mlx5_0 mlx5_1 mlx5_2 mlx5_3 mlx5_4 mlx5_5 mlx5_6 mlx5_7")
	for name, c := range map[string]struct {
		s     nvlink.System
		paths []string
		nics  []string
	}{
		"DGX A100": {nvlinktest.DGXA100(), all("NVS12"),
			strings.Fields("mlx5_0 mlx5_1 mlx5_2 mlx5_3 mlx5_4 mlx5_5 mlx5_6 mlx5_7")},
		"DGX H100": {nvlinktest.DGXH100(), all("NVS18"), eight},
		"the fabric manager does not run": {change(nvlinktest.DGXH100(), func(s *nvlink.System) {
			for i := range s.GPUs {
				s.GPUs[i].Fabric = nvlink.Fabric{State: nvlink.FabricInProgress}
			}
			s.Pairs = nvlinktest.Pairs(*s, func(int, int) nvlink.Pair {
				return nvlinktest.Access(nvlink.Yes, nvlink.No, nvlink.Yes)
			})
		}), []string{
			"same NODE NODE NODE SYS SYS SYS SYS", "NODE same NODE NODE SYS SYS SYS SYS",
			"NODE NODE same NODE SYS SYS SYS SYS", "NODE NODE NODE same SYS SYS SYS SYS",
			"SYS SYS SYS SYS same NODE NODE NODE", "SYS SYS SYS SYS NODE same NODE NODE",
			"SYS SYS SYS SYS NODE NODE same NODE", "SYS SYS SYS SYS NODE NODE NODE same"}, eight},
		"two cliques": {change(nvlinktest.DGXH100(), func(s *nvlink.System) {
			for i := range s.GPUs {
				s.GPUs[i].Fabric.Clique = uint32(i % 2)
			}
			s.Pairs = nvlinktest.Pairs(*s, func(i, j int) nvlink.Pair {
				if i%2 != j%2 {
					return nvlink.Pair{}
				}
				return nvlinktest.Access(nvlink.Yes, nvlink.Yes, nvlink.No)
			})
		}), []string{
			"same host NVS18 host NVS18 host NVS18 host", "host same host NVS18 host NVS18 host NVS18",
			"NVS18 host same host NVS18 host NVS18 host", "host NVS18 host same host NVS18 host NVS18",
			"NVS18 host NVS18 host same host NVS18 host", "host NVS18 host NVS18 host same host NVS18",
			"NVS18 host NVS18 host NVS18 host same host", "host NVS18 host NVS18 host NVS18 host same"}, eight},
		"one link is down": {change(nvlinktest.DGXH100(), func(s *nvlink.System) { s.GPUs[1].Links[7].Up = false }),
			[]string{
				"same NVS17 NVS18 NVS18 NVS18 NVS18 NVS18 NVS18", "NVS17 same NVS17 NVS17 NVS17 NVS17 NVS17 NVS17",
				"NVS18 NVS17 same NVS18 NVS18 NVS18 NVS18 NVS18", "NVS18 NVS17 NVS18 same NVS18 NVS18 NVS18 NVS18",
				"NVS18 NVS17 NVS18 NVS18 same NVS18 NVS18 NVS18", "NVS18 NVS17 NVS18 NVS18 NVS18 same NVS18 NVS18",
				"NVS18 NVS17 NVS18 NVS18 NVS18 NVS18 same NVS18", "NVS18 NVS17 NVS18 NVS18 NVS18 NVS18 NVS18 same"},
			eight},
		"a GPU that failed to register": {change(nvlinktest.DGXH100(), func(s *nvlink.System) {
			s.GPUs, s.Pairs = s.GPUs[:2], nil
			s.GPUs[1].Fabric.Problem = "insufficient resources"
		}), []string{"same host", "host same"}, []string{"mlx5_0", "mlx5_1"}},
		"a GPU that is lost": {change(nvlinktest.DGXH100(), func(s *nvlink.System) {
			s.GPUs = s.GPUs[:2]
			s.GPUs[1] = nvlink.GPU{Problem: "lost", Place: nvlink.Place{Node: -1}}
		}), []string{"same host", "host same"}, []string{"mlx5_0", "mlx5_1"}},
		"V100 cube mesh": {nvlinktest.CubeMesh(), []string{
			"same NV1 NV1 NV2 NV2 host host host", "NV1 same NV2 NV1 host NV2 host host",
			"NV1 NV2 same NV2 host host NV1 host", "NV2 NV1 NV2 same host host host NV1",
			"NV2 host host host same NV1 NV1 NV2", "host NV2 host host NV1 same NV2 NV1",
			"host host NV1 host NV1 NV2 same NV2", "host host host NV1 NV2 NV1 NV2 same"}, eight},
		"a link of a cube mesh is down at one end": {change(nvlinktest.CubeMesh(), func(s *nvlink.System) {
			s.GPUs, s.Pairs = s.GPUs[:4], s.Pairs[:4]
			i := slices.IndexFunc(s.GPUs[3].Links, func(l nvlink.Link) bool { return l.PCI == s.GPUs[0].PCI })
			s.GPUs[3].Links[i].Up = false
		}), []string{"same NV1 NV1 NV1", "NV1 same NV2 NV1", "NV1 NV2 same NV2", "NV1 NV1 NV2 same"}, eight[:4]},
		"one end does not tell where its links lead": {change(nvlinktest.CubeMesh(), func(s *nvlink.System) {
			s.GPUs, s.Pairs = s.GPUs[:2], s.Pairs[:2]
			for i := range s.GPUs[1].Links {
				s.GPUs[1].Links[i].Remote, s.GPUs[1].Links[i].PCI = nvlink.RemoteUnknown, ""
			}
		}), []string{"same NV1", "NV1 same"}, eight[:2]},
		"links without remote ends": {change(nvlinktest.CubeMesh(), func(s *nvlink.System) {
			s.GPUs, s.Pairs = s.GPUs[:5], s.Pairs[:5]
			for g := range s.GPUs {
				for i := range s.GPUs[g].Links {
					s.GPUs[g].Links[i].Remote, s.GPUs[g].Links[i].PCI = nvlink.RemoteUnknown, ""
				}
			}
		}), []string{"same NV? NV? NV? NV?", "NV? same NV? NV? host", "NV? NV? same NV? host", "NV? NV? NV? same host",
			"NV? host host host same"}, eight[:5]},
		"PCIe only": {nvlinktest.PCIeOnly(), []string{"same PHB host host", "PHB same host host", "host host same PHB",
			"host host PHB same"}, []string{"mlx5_0", "mlx5_0", "mlx5_0", "mlx5_0"}},
		"NVLink is disabled": {change(nvlinktest.CubeMesh(), func(s *nvlink.System) {
			s.GPUs, s.Pairs[0][1].NVLink = s.GPUs[:3], nvlink.No
			s.Pairs[0][1].PCIe, s.Pairs[1][0].PCIe = nvlink.Yes, nvlink.Unknown
			s.Pairs[2][1].NVLink = nvlink.No
		}), []string{"same NODE NV1", "NODE same host", "NV1 host same"}, eight[:3]},
		"PCIe one way": {change(nvlinktest.PCIeOnly(), func(s *nvlink.System) {
			s.GPUs = s.GPUs[:2]
			s.Pairs[1][0].Write = nvlink.No
		}), []string{"same host", "host same"}, []string{"mlx5_0", "mlx5_0"}},
		"PCIe without levels": {change(nvlinktest.PCIeOnly(), func(s *nvlink.System) {
			s.GPUs, s.NICs = s.GPUs[:2], nil
			for i := range s.GPUs {
				s.GPUs[i].Place = nvlink.Place{Node: -1}
			}
			s.Pairs = nvlinktest.Pairs(*s, func(int, int) nvlink.Pair {
				return nvlink.Pair{Read: nvlink.Yes, Write: nvlink.Yes}
			})
		}), []string{"same P2P", "P2P same"}, []string{"-", "-"}},
		"MIG": {change(nvlinktest.DGXH100(), func(s *nvlink.System) {
			s.GPUs = s.GPUs[:3]
			s.GPUs[1].MIG, s.GPUs[1].Instances = nvlink.Yes, []string{"MIG-1", "MIG-2"}
		}), []string{"same host NVS18", "host same host", "NVS18 host same"}, eight[:3]},
		"nothing is known": {nvlink.System{GPUs: []nvlink.GPU{{}, {}}, NICs: []nvlink.NIC{{Name: "b"}, {Name: "a"},
			{Name: "c", Up: nvlink.No}}},
			[]string{"same host", "host same"}, []string{"a", "b"}},
	} {
		if got := paths(c.s); !slices.Equal(got, c.paths) {
			t.Errorf("%s: paths\n%s\nwant\n%s", name, strings.Join(got, "\n"), strings.Join(c.paths, "\n"))
		}
		if got := own(c.s); !slices.Equal(got, c.nics) {
			t.Errorf("%s: cards %v, want %v", name, got, c.nics)
		}
	}
}

// TestInstancesOfOneGPUAreApart: the instances of one GPU are apart, an instance and itself are
// not.
func TestInstancesOfOneGPUAreApart(t *testing.T) {
	s := nvlinktest.DGXH100()
	s.GPUs[1].MIG, s.GPUs[1].Instances = nvlink.Yes, []string{"MIG-1", "MIG-2"}
	first, second := nvlink.Spot{GPU: 1, MIG: "MIG-1"}, nvlink.Spot{GPU: 1, MIG: "MIG-2"}
	for _, c := range []struct {
		a, b nvlink.Spot
		want nvlink.Class
	}{
		{whole(0), whole(2), nvlink.ClassNVSwitch}, {first, first, nvlink.ClassSame}, {first, second, nvlink.ClassHost},
		{first, whole(2), nvlink.ClassHost}, {whole(2), second, nvlink.ClassHost},
	} {
		if got := s.Path(c.a, c.b); got.Class != c.want {
			t.Errorf("%v to %v: %v, want %v", c.a, c.b, got, c.want)
		}
	}
}

func TestDistanceOverPCIe(t *testing.T) {
	gpu := at(0, "pci0000:10", "0000:10:01.0", "0000:11:00.0", "0000:12:00.0", "0000:13:00.0")
	for name, c := range map[string]struct {
		b    nvlink.Place
		want nvlink.Level
	}{
		"itself": {gpu, nvlink.LevelBoard},
		"another function": {at(0, "pci0000:10", "0000:10:01.0", "0000:11:00.0", "0000:12:00.0",
			"0000:13:00.1"), nvlink.LevelSwitch},
		"the same switch": {at(0, "pci0000:10", "0000:10:01.0", "0000:11:00.0", "0000:12:01.0",
			"0000:14:00.0"), nvlink.LevelSwitch},
		"a switch behind it": {at(0, "pci0000:10", "0000:10:01.0", "0000:11:00.0", "0000:12:01.0",
			"0000:14:00.0", "0000:15:00.0", "0000:16:00.0"), nvlink.LevelSwitches},
		"another port of the root":     {at(0, "pci0000:10", "0000:10:02.0", "0000:14:00.0"), nvlink.LevelBridge},
		"another host bridge":          {at(0, "pci0000:20", "0000:20:01.0", "0000:21:00.0"), nvlink.LevelNode},
		"another processor":            {at(1, "pci0000:20", "0000:20:01.0", "0000:21:00.0"), nvlink.LevelSystem},
		"another bridge, no node":      {at(-1, "pci0000:20", "0000:20:01.0", "0000:21:00.0"), nvlink.LevelUnknown},
		"only the node is known":       {nvlink.Place{Node: 0}, nvlink.LevelNode},
		"only another node is known":   {nvlink.Place{Node: 1}, nvlink.LevelSystem},
		"nothing is known":             {nvlink.Place{Node: -1}, nvlink.LevelUnknown},
		"the same bridges, other node": {at(1, "pci0000:10", "0000:10:02.0", "0000:14:00.0"), nvlink.LevelBridge},
	} {
		if got, back := gpu.Level(c.b), c.b.Level(gpu); got != c.want || back != c.want {
			t.Errorf("%s: %v, and back %v; want %v", name, got, back, c.want)
		}
	}
}

// TestNICs: PCIe comes before the NUMA node, ties are shared evenly, and a card that is down is not
// used.
func TestNICs(t *testing.T) {
	change := func(s nvlink.System, f func(s *nvlink.System)) nvlink.System { f(&s); return s }
	for name, c := range map[string]struct {
		s    nvlink.System
		want string
	}{
		"two cards, one at each processor": {change(nvlinktest.DGXH100(), func(s *nvlink.System) {
			s.NICs = s.NICs[8:]
		}),
			"mlx5_8 mlx5_8 mlx5_8 mlx5_8 mlx5_9 mlx5_9 mlx5_9 mlx5_9"},
		"one of them is down": {change(nvlinktest.DGXH100(), func(s *nvlink.System) {
			s.NICs = s.NICs[8:]
			s.NICs[0].Up = nvlink.No
		}),
			"mlx5_9 mlx5_9 mlx5_9 mlx5_9 mlx5_9 mlx5_9 mlx5_9 mlx5_9"},
		"all are down": {change(nvlinktest.DGXH100(), func(s *nvlink.System) {
			for i := range s.NICs {
				s.NICs[i].Up = nvlink.No
			}
		}), "- - - - - - - -"},
		"two at one processor": {change(nvlinktest.DGXH100(), func(s *nvlink.System) {
			s.NICs = s.NICs[8:]
			s.NICs[1].Node = 0
		}), "mlx5_8 mlx5_9 mlx5_8 mlx5_9 mlx5_8 mlx5_9 mlx5_8 mlx5_9"},
		"the order of CUDA, or of a listing, does not matter": {change(nvlinktest.DGXH100(), func(s *nvlink.System) {
			s.NICs = s.NICs[8:]
			s.NICs[1].Node = 0
			slices.Reverse(s.GPUs)
		}), "mlx5_9 mlx5_8 mlx5_9 mlx5_8 mlx5_9 mlx5_8 mlx5_9 mlx5_8"},
		"a card whose node is not known": {change(nvlinktest.DGXH100(), func(s *nvlink.System) {
			s.NICs = append(s.NICs[9:], nvlink.NIC{Name: "unknown", Place: nvlink.Place{Node: -1}})
		}), "unknown unknown unknown unknown mlx5_9 mlx5_9 mlx5_9 mlx5_9"},
		"a card that one GPU alone is near to is left to it": {nvlink.System{
			GPUs: []nvlink.GPU{{Place: at(0, "pci0000:10", "0000:10:01.0", "0000:11:00.0")},
				{Place: at(0, "pci0000:10", "0000:10:01.0", "0000:12:00.0", "0000:13:00.0", "0000:14:00.0")}},
			NICs: []nvlink.NIC{{Name: "a", Place: at(0, "pci0000:10", "0000:10:01.0", "0000:12:00.0", "0000:13:01.0",
				"0000:15:00.0")},
				{Name: "b", Place: at(0, "pci0000:10", "0000:10:01.0", "0000:12:00.0", "0000:13:02.0", "0000:16:00.0",
					"0000:17:00.0", "0000:18:00.0")}}}, "b a"},
		"Soft-RoCE": {change(nvlinktest.DGXH100(), func(s *nvlink.System) {
			s.NICs = []nvlink.NIC{{Name: "rxe0",
				Place: nvlink.Place{Node: -1}}}
		}),
			"rxe0 rxe0 rxe0 rxe0 rxe0 rxe0 rxe0 rxe0"},
		"none": {change(nvlinktest.DGXH100(), func(s *nvlink.System) { s.NICs = nil }), "- - - - - - - -"},
	} {
		if got := strings.Join(own(c.s), " "); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
	s := nvlinktest.DGXA100()
	for g, nics := range s.NearestNICs() {
		if want := []int{g, g ^ 1}; !slices.Equal(nics, want) || s.NICLevel(g, g) != nvlink.LevelSwitches {
			t.Errorf("GPU %d: %v at %v, want %v", g, nics, s.NICLevel(g, g), want)
		}
	}
}

// Only GPUs that the fabric has taken in have a clique, and only those of the same one its name.
func TestClique(t *testing.T) {
	s := nvlinktest.DGXH100()
	s.GPUs[1].Fabric.Clique = 7
	s.GPUs[2].Fabric.Cluster = "c"
	s.GPUs[3].Fabric.State = nvlink.FabricInProgress
	s.GPUs[4].Fabric.Problem = "no switch"
	s.GPUs[5].MIG, s.GPUs[5].Instances = nvlink.Yes, []string{"MIG-aa"}
	names := map[string][]int{}
	for i, g := range s.GPUs {
		name := s.Clique(g.UUID, "")
		names[name] = append(names[name], i)
	}
	if got := fmt.Sprint(names); got != "map[:[3 4] /0:[0 5 6 7] /7:[1] c/0:[2]]" {
		t.Errorf("the cliques are %s", got)
	}
	for _, uuid := range []string{"MIG-aa", "unknown"} {
		if name := s.Clique(uuid, ""); name != "" {
			t.Errorf("%s is in clique %q", uuid, name)
		}
	}
	a100 := nvlinktest.DGXA100()
	if name := a100.Clique(a100.GPUs[0].UUID, ""); name != "" {
		t.Errorf("a GPU that is not registered is in clique %q", name)
	}
}

func TestFindGPUOrInstance(t *testing.T) {
	s := nvlinktest.DGXH100()
	s.GPUs[3].MIG, s.GPUs[3].Instances = nvlink.Yes, []string{"MIG-aa", "MIG-Bb"}
	for _, c := range []struct {
		uuid, pci string
		want      nvlink.Spot
		found     bool
	}{
		{s.GPUs[2].UUID, "", whole(2), true},
		{strings.TrimPrefix(s.GPUs[2].UUID, "GPU-"), "", whole(2), true},
		{"bb", s.GPUs[3].PCI, nvlink.Spot{GPU: 3, MIG: "MIG-Bb"}, true},
		{"MIG-AA", "", nvlink.Spot{GPU: 3, MIG: "MIG-aa"}, true},
		{"unknown", strings.ToUpper("0000" + s.GPUs[5].PCI), whole(5), true},
		{"", s.GPUs[5].PCI, whole(5), true},
		{"unknown", "0000:ff:1f.7", nvlink.Spot{}, false},
		{"", "", nvlink.Spot{}, false}, {"GPU-", "x", nvlink.Spot{}, false},
	} {
		if got, found := s.Find(c.uuid, c.pci); got != c.want || found != c.found {
			t.Errorf("%q at %q: %v, %v; want %v, %v", c.uuid, c.pci, got, found, c.want, c.found)
		}
	}
	if _, found := (nvlink.System{GPUs: []nvlink.GPU{{}}}).Find("", ""); found {
		t.Error("nothing was found to be a GPU of which nothing is known")
	}
}

// TestHiddenGPUs: a process that CUDA_VISIBLE_DEVICES shows two GPUs, in the other order, finds
// them and their paths.
func TestHiddenGPUs(t *testing.T) {
	s := nvlinktest.CubeMesh()
	var visible []nvlink.Spot
	for _, ordinal := range []int{4, 0} { // CUDA_VISIBLE_DEVICES=4,0
		spot, ok := s.Find(strings.TrimPrefix(s.GPUs[ordinal].UUID, "GPU-"), "")
		if !ok {
			t.Fatal("not found")
		}
		visible = append(visible, spot)
	}
	nics := s.NearestNICs()
	if p := s.Path(visible[0], visible[1]); p.String() != "NV2" || s.NICs[nics[visible[0].GPU][0]].Name != "mlx5_4" {
		t.Errorf("%v, %v", p, nics)
	}
}

func TestAddresses(t *testing.T) {
	for text, want := range map[string]string{"0000:3b:00.0": "0000:3b:00.0", "00000000:3B:00.0": "0000:3b:00.0",
		"10000:01:1f.7": "10000:01:1f.7", " 0:3b:0.0\n": "0000:3b:00.0", "": "", "3b:00.0": "", "0000:3b:00": "",
		"0000:100:00.0": "", "0000:3b:20.0": "", "0000:3b:00.8": "", "x:3b:00.0": ""} {
		if got := nvlink.Address(text); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
	for target, want := range map[string]string{
		"../../devices/pci0000:00/0000:00:03.0/0000:04:00.0/infiniband/mlx5_0": "pci0000:00 0000:00:03.0 0000:04:00.0",
		"../../../devices/LNXSYSTM:00/VMBUS:01/0/pci0001:00/0001:00:00.0":      "pci0001:00 0001:00:00.0",
		"../../devices/virtual/infiniband/rxe0":                                "",
	} {
		if got := strings.Join(nvlink.Bridges(target), " "); got != want {
			t.Errorf("%s: %q, want %q", target, got, want)
		}
	}
}

// anySystem draws a machine of which anything may be unknown or inconsistent.
func anySystem(t *rapid.T) nvlink.System {
	draw := func(name string, n int) int { return rapid.IntRange(0, n).Draw(t, name) }
	answer := func() nvlink.Answer { return nvlink.Answer(draw("answer", 2)) }
	used := 0
	place := func() nvlink.Place {
		p := nvlink.Place{Node: draw("node", 2) - 1}
		used++
		if draw("known", 3) == 0 {
			return p
		}
		p.Bridges = []string{fmt.Sprintf("pci0000:%02x", 0x10*draw("host", 1))}
		for depth := range draw("depth", 3) {
			p.Bridges = append(p.Bridges, fmt.Sprintf("0000:%02x:%02x.0", depth, draw("port", 1)))
		}
		p.PCI = fmt.Sprintf("0000:%02x:00.0", 0x20+used)
		p.Bridges = append(p.Bridges, p.PCI)
		return p
	}
	s := nvlink.System{}
	for range draw("GPUs", 6) {
		s.GPUs = append(s.GPUs, nvlink.GPU{Place: place(), MIG: answer(),
			Fabric: nvlink.Fabric{State: nvlink.FabricState(draw("state", 4)), Clique: uint32(draw("clique", 1))}})
	}
	for i := range s.GPUs {
		for l := range draw("links", 4) {
			k := nvlink.Link{Number: l, Up: draw("up", 3) > 0, Remote: nvlink.Remote(draw("remote", 3))}
			if k.Remote == nvlink.RemoteGPU {
				k.PCI = s.GPUs[draw("peer", len(s.GPUs)-1)].PCI
			}
			s.GPUs[i].Links = append(s.GPUs[i].Links, k)
		}
	}
	s.Pairs = nvlinktest.Pairs(s, func(int, int) nvlink.Pair {
		return nvlink.Pair{Read: answer(), Write: answer(), Atomics: answer(), NVLink: answer(), PCIe: answer()}
	})
	for i := range s.Pairs {
		for j := range s.Pairs[i] {
			s.Pairs[i][j].Level = nvlink.Level(draw("level", 6))
		}
	}
	for i := range draw("NICs", 4) {
		s.NICs = append(s.NICs, nvlink.NIC{Name: fmt.Sprintf("mlx5_%d", i), Place: place(), Up: answer()})
	}
	return s
}

// TestProperties: paths are symmetric, refusals are respected, and every GPU has a card if there is
// one that is not down: one of the nearest, and no card has two more users than another card that
// the same GPUs could use.
func TestProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := anySystem(t)
		for i := range s.GPUs {
			for j := range s.GPUs {
				a, b := whole(i), whole(j)
				p, back := s.Path(a, b), s.Path(b, a)
				if p.Class != back.Class || p.Links != back.Links {
					t.Fatalf("%d to %d: %v, and back %v", i, j, p, back)
				}
				if (p.Class == nvlink.ClassSame) != (i == j) || p.String() == "" {
					t.Fatalf("%d to %d: %v", i, j, p)
				}
				if q := s.Pairs[i][j]; p.Class != nvlink.ClassHost && (q.Read == nvlink.No || q.Write == nvlink.No) {
					t.Fatalf("%d to %d: %v with %+v", i, j, p, q)
				}
			}
		}
		some := slices.ContainsFunc(s.NICs, func(n nvlink.NIC) bool { return n.Up != nvlink.No })
		users := make([]int, len(s.NICs))
		nearest := s.NearestNICs()
		for g, near := range nearest {
			if some != (len(near) > 0) {
				t.Fatalf("GPU %d: %v", g, near)
			}
			for n, c := range s.NICs {
				if c.Up != nvlink.No && nvlink.Distance(s.NICLevel(g, n)) < nvlink.Distance(s.NICLevel(g, near[0])) {
					t.Fatalf("GPU %d uses %d, %d is nearer", g, near[0], n)
				}
			}
			if some {
				users[near[0]]++
			}
		}
		for g, near := range nearest {
			same := true
			for _, other := range nearest {
				a, b := slices.Sorted(slices.Values(near)), slices.Sorted(slices.Values(other))
				same = same && slices.Equal(a, b)
			}
			for _, n := range near {
				if same && users[near[0]] > users[n]+1 {
					t.Fatalf("GPU %d: %d users of %d, %d of %d", g, users[near[0]], near[0], users[n], n)
				}
			}
		}
	})
}
