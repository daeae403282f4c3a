package nvlink

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// paths returns the rows of all GPUs' paths.
func paths(s System) []string {
	var rows []string
	for i := range s.GPUs {
		var row []string
		for j := range s.GPUs {
			row = append(row, s.Path(Spot{GPU: i}, Spot{GPU: j}).String())
		}
		rows = append(rows, strings.Join(row, " "))
	}
	return rows
}

// own returns the names of the cards that the GPUs use.
func own(s System) []string {
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
	change := func(s System, f func(s *System)) System { f(&s); return s }
	eight := strings.Fields("mlx5_0 mlx5_1 mlx5_2 mlx5_3 mlx5_4 mlx5_5 mlx5_6 mlx5_7")
	for name, c := range map[string]struct {
		s     System
		paths []string
		nics  []string
	}{
		"DGX A100": {dgxA100.system(), all("NVS12"),
			strings.Fields("mlx5_0 mlx5_1 mlx5_2 mlx5_3 mlx5_4 mlx5_5 mlx5_6 mlx5_7")},
		"DGX H100": {dgxH100.system(), all("NVS18"), eight},
		"the fabric manager does not run": {change(dgxH100.system(), func(s *System) {
			for i := range s.GPUs {
				s.GPUs[i].Fabric = Fabric{State: FabricInProgress}
			}
			s.Pairs = pairs(*s, func(_, _ int, p *Pair) { *p = Pair{p.Level, Yes, Yes, No, No, Yes} })
		}), []string{
			"same NODE NODE NODE SYS SYS SYS SYS", "NODE same NODE NODE SYS SYS SYS SYS",
			"NODE NODE same NODE SYS SYS SYS SYS", "NODE NODE NODE same SYS SYS SYS SYS",
			"SYS SYS SYS SYS same NODE NODE NODE", "SYS SYS SYS SYS NODE same NODE NODE",
			"SYS SYS SYS SYS NODE NODE same NODE", "SYS SYS SYS SYS NODE NODE NODE same"}, eight},
		"two cliques": {change(dgxH100.system(), func(s *System) {
			for i := range s.GPUs {
				s.GPUs[i].Fabric.Clique = uint32(i % 2)
			}
			s.Pairs = pairs(*s, func(i, j int, p *Pair) {
				if i%2 == j%2 {
					*p = Pair{p.Level, Yes, Yes, Yes, Yes, No}
				}
			})
		}), []string{
			"same host NVS18 host NVS18 host NVS18 host", "host same host NVS18 host NVS18 host NVS18",
			"NVS18 host same host NVS18 host NVS18 host", "host NVS18 host same host NVS18 host NVS18",
			"NVS18 host NVS18 host same host NVS18 host", "host NVS18 host NVS18 host same host NVS18",
			"NVS18 host NVS18 host NVS18 host same host", "host NVS18 host NVS18 host NVS18 host same"}, eight},
		"one link is down": {change(dgxH100.system(), func(s *System) { s.GPUs[1].Links[7].Up = false }), []string{
			"same NVS17 NVS18 NVS18 NVS18 NVS18 NVS18 NVS18", "NVS17 same NVS17 NVS17 NVS17 NVS17 NVS17 NVS17",
			"NVS18 NVS17 same NVS18 NVS18 NVS18 NVS18 NVS18", "NVS18 NVS17 NVS18 same NVS18 NVS18 NVS18 NVS18",
			"NVS18 NVS17 NVS18 NVS18 same NVS18 NVS18 NVS18", "NVS18 NVS17 NVS18 NVS18 NVS18 same NVS18 NVS18",
			"NVS18 NVS17 NVS18 NVS18 NVS18 NVS18 same NVS18", "NVS18 NVS17 NVS18 NVS18 NVS18 NVS18 NVS18 same"},
			eight},
		"a GPU that failed to register": {change(dgxH100.system(), func(s *System) {
			s.GPUs, s.Pairs = s.GPUs[:2], nil
			s.GPUs[1].Fabric.Problem = "insufficient resources"
		}), []string{"same host", "host same"}, []string{"mlx5_0", "mlx5_1"}},
		"a GPU that is lost": {change(dgxH100.system(), func(s *System) {
			s.GPUs = s.GPUs[:2]
			s.GPUs[1] = GPU{Problem: "lost", Place: Place{Node: -1}}
		}), []string{"same host", "host same"}, []string{"mlx5_0", "mlx5_1"}},
		"V100 cube mesh": {cubeMesh(), []string{
			"same NV1 NV1 NV2 NV2 host host host", "NV1 same NV2 NV1 host NV2 host host",
			"NV1 NV2 same NV2 host host NV1 host", "NV2 NV1 NV2 same host host host NV1",
			"NV2 host host host same NV1 NV1 NV2", "host NV2 host host NV1 same NV2 NV1",
			"host host NV1 host NV1 NV2 same NV2", "host host host NV1 NV2 NV1 NV2 same"}, eight},
		"a link of a cube mesh is down at one end": {change(cubeMesh(), func(s *System) {
			s.GPUs, s.Pairs = s.GPUs[:4], s.Pairs[:4]
			i := slices.IndexFunc(s.GPUs[3].Links, func(l Link) bool { return l.PCI == s.GPUs[0].PCI })
			s.GPUs[3].Links[i].Up = false
		}), []string{"same NV1 NV1 NV1", "NV1 same NV2 NV1", "NV1 NV2 same NV2", "NV1 NV1 NV2 same"}, eight[:4]},
		"one end does not tell where its links lead": {change(cubeMesh(), func(s *System) {
			s.GPUs, s.Pairs = s.GPUs[:2], s.Pairs[:2]
			for i := range s.GPUs[1].Links {
				s.GPUs[1].Links[i].Remote, s.GPUs[1].Links[i].PCI = RemoteUnknown, ""
			}
		}), []string{"same NV1", "NV1 same"}, eight[:2]},
		"links without remote ends": {change(cubeMesh(), func(s *System) {
			s.GPUs, s.Pairs = s.GPUs[:5], s.Pairs[:5]
			for g := range s.GPUs {
				for i := range s.GPUs[g].Links {
					s.GPUs[g].Links[i].Remote, s.GPUs[g].Links[i].PCI = RemoteUnknown, ""
				}
			}
		}), []string{"same NV? NV? NV? NV?", "NV? same NV? NV? host", "NV? NV? same NV? host", "NV? NV? NV? same host",
			"NV? host host host same"}, eight[:5]},
		"PCIe only": {pciOnly(), []string{"same PHB host host", "PHB same host host", "host host same PHB",
			"host host PHB same"}, []string{"mlx5_0", "mlx5_0", "mlx5_0", "mlx5_0"}},
		"PCIe one way": {change(pciOnly(), func(s *System) {
			s.GPUs = s.GPUs[:2]
			s.Pairs[1][0].Write = No
		}), []string{"same host", "host same"}, []string{"mlx5_0", "mlx5_0"}},
		"PCIe without levels": {change(pciOnly(), func(s *System) {
			s.GPUs, s.NICs = s.GPUs[:2], nil
			for i := range s.GPUs {
				s.GPUs[i].Place = Place{Node: -1}
			}
			s.Pairs = pairs(*s, func(_, _ int, p *Pair) { *p = Pair{Read: Yes, Write: Yes} })
		}), []string{"same P2P", "P2P same"}, []string{"-", "-"}},
		"MIG": {change(dgxH100.system(), func(s *System) {
			s.GPUs = s.GPUs[:3]
			s.GPUs[1].MIG, s.GPUs[1].Instances = Yes, []string{"MIG-1", "MIG-2"}
		}), []string{"same host NVS18", "host same host", "NVS18 host same"}, eight[:3]},
		"nothing is known": {System{GPUs: []GPU{{}, {}}, NICs: []NIC{{Name: "b"}, {Name: "a"}, {Name: "c", Up: No}}},
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

// TestInstances: the instances of one GPU are apart, an instance and itself are not.
func TestInstances(t *testing.T) {
	s := dgxH100.system()
	s.GPUs[1].MIG, s.GPUs[1].Instances = Yes, []string{"MIG-1", "MIG-2"}
	for _, c := range []struct {
		a, b Spot
		want Class
	}{
		{Spot{1, "MIG-1"}, Spot{1, "MIG-1"}, ClassSame}, {Spot{1, "MIG-1"}, Spot{1, "MIG-2"}, ClassHost},
		{Spot{1, "MIG-1"}, Spot{2, ""}, ClassHost}, {Spot{0, ""}, Spot{2, ""}, ClassNVSwitch},
	} {
		if got := s.Path(c.a, c.b); got.Class != c.want {
			t.Errorf("%v to %v: %v, want %v", c.a, c.b, got, c.want)
		}
	}
}

// TestAcross: NVSwitches of two machines are a way if they form one clique of one cluster.
func TestAcross(t *testing.T) {
	gpu := func(change func(*GPU)) GPU {
		g := dgxH100.system().GPUs[0]
		g.Fabric = Fabric{State: FabricCompleted, Cluster: "c", Clique: 7}
		change(&g)
		return g
	}
	a := gpu(func(*GPU) {})
	for name, c := range map[string]struct {
		change func(*GPU)
		want   string
	}{
		"one clique":       {func(*GPU) {}, "MNNVL18"},
		"a link is down":   {func(g *GPU) { g.Links[0].Up = false }, "MNNVL17"},
		"another clique":   {func(g *GPU) { g.Fabric.Clique = 8 }, "host"},
		"another cluster":  {func(g *GPU) { g.Fabric.Cluster = "d" }, "host"},
		"no cluster":       {func(g *GPU) { g.Fabric.Cluster = "" }, "host"},
		"in progress":      {func(g *GPU) { g.Fabric.State = FabricInProgress }, "host"},
		"failed":           {func(g *GPU) { g.Fabric.Problem = "x" }, "host"},
		"MIG":              {func(g *GPU) { g.MIG = Yes }, "host"},
		"no link is known": {func(g *GPU) { g.Links = nil }, "host"},
	} {
		b := gpu(c.change)
		if got, back := Across(a, b).String(), Across(b, a).String(); got != c.want || back != c.want {
			t.Errorf("%s: %s, and back %s; want %s", name, got, back, c.want)
		}
	}
	none := gpu(func(g *GPU) { g.Fabric = Fabric{State: FabricCompleted} })
	if got := Across(none, none); got.Class != ClassHost {
		t.Errorf("two machines with a fabric each: %v", got)
	}
}

func TestLevels(t *testing.T) {
	gpu := at(0, "pci0000:10", "0000:10:01.0", "0000:11:00.0", "0000:12:00.0", "0000:13:00.0")
	for name, c := range map[string]struct {
		b    Place
		want Level
	}{
		"itself":                       {gpu, LevelBoard},
		"another function":             {at(0, "pci0000:10", "0000:10:01.0", "0000:11:00.0", "0000:12:00.0", "0000:13:00.1"), LevelSwitch},
		"the same switch":              {at(0, "pci0000:10", "0000:10:01.0", "0000:11:00.0", "0000:12:01.0", "0000:14:00.0"), LevelSwitch},
		"a switch behind it":           {at(0, "pci0000:10", "0000:10:01.0", "0000:11:00.0", "0000:12:01.0", "0000:14:00.0", "0000:15:00.0", "0000:16:00.0"), LevelSwitches},
		"another port of the root":     {at(0, "pci0000:10", "0000:10:02.0", "0000:14:00.0"), LevelBridge},
		"another host bridge":          {at(0, "pci0000:20", "0000:20:01.0", "0000:21:00.0"), LevelNode},
		"another processor":            {at(1, "pci0000:20", "0000:20:01.0", "0000:21:00.0"), LevelSystem},
		"another bridge, no node":      {at(-1, "pci0000:20", "0000:20:01.0", "0000:21:00.0"), LevelUnknown},
		"only the node is known":       {Place{Node: 0}, LevelNode},
		"only another node is known":   {Place{Node: 1}, LevelSystem},
		"nothing is known":             {Place{Node: -1}, LevelUnknown},
		"the same bridges, other node": {at(1, "pci0000:10", "0000:10:02.0", "0000:14:00.0"), LevelBridge},
	} {
		if got, back := level(gpu, c.b), level(c.b, gpu); got != c.want || back != c.want {
			t.Errorf("%s: %v, and back %v; want %v", name, got, back, c.want)
		}
	}
}

// TestNICs: PCIe comes before the NUMA node, ties are shared evenly, and a card that is down is for
// nobody.
func TestNICs(t *testing.T) {
	change := func(s System, f func(s *System)) System { f(&s); return s }
	for name, c := range map[string]struct {
		s    System
		want string
	}{
		"two cards, one at each processor": {change(dgxH100.system(), func(s *System) { s.NICs = s.NICs[8:] }),
			"mlx5_8 mlx5_8 mlx5_8 mlx5_8 mlx5_9 mlx5_9 mlx5_9 mlx5_9"},
		"one of them is down": {change(dgxH100.system(), func(s *System) { s.NICs = s.NICs[8:]; s.NICs[0].Up = No }),
			"mlx5_9 mlx5_9 mlx5_9 mlx5_9 mlx5_9 mlx5_9 mlx5_9 mlx5_9"},
		"all are down": {change(dgxH100.system(), func(s *System) {
			for i := range s.NICs {
				s.NICs[i].Up = No
			}
		}), "- - - - - - - -"},
		"two at one processor": {change(dgxH100.system(), func(s *System) {
			s.NICs = s.NICs[8:]
			s.NICs[1].Node = 0
		}), "mlx5_8 mlx5_9 mlx5_8 mlx5_9 mlx5_8 mlx5_9 mlx5_8 mlx5_9"},
		"the order of CUDA, or of a listing, does not matter": {change(dgxH100.system(), func(s *System) {
			s.NICs = s.NICs[8:]
			s.NICs[1].Node = 0
			slices.Reverse(s.GPUs)
		}), "mlx5_9 mlx5_8 mlx5_9 mlx5_8 mlx5_9 mlx5_8 mlx5_9 mlx5_8"},
		"a card that one GPU alone is near to is left to it": {System{
			GPUs: []GPU{{Place: at(0, "pci0000:10", "0000:10:01.0", "0000:11:00.0")},
				{Place: at(0, "pci0000:10", "0000:10:01.0", "0000:12:00.0", "0000:13:00.0", "0000:14:00.0")}},
			NICs: []NIC{{Name: "a", Place: at(0, "pci0000:10", "0000:10:01.0", "0000:12:00.0", "0000:13:01.0",
				"0000:15:00.0")},
				{Name: "b", Place: at(0, "pci0000:10", "0000:10:01.0", "0000:12:00.0", "0000:13:02.0", "0000:16:00.0",
					"0000:17:00.0", "0000:18:00.0")}}}, "b a"},
		"Soft-RoCE": {change(dgxH100.system(), func(s *System) { s.NICs = []NIC{{Name: "rxe0", Place: Place{Node: -1}}} }),
			"rxe0 rxe0 rxe0 rxe0 rxe0 rxe0 rxe0 rxe0"},
		"none": {change(dgxH100.system(), func(s *System) { s.NICs = nil }), "- - - - - - - -"},
	} {
		if got := strings.Join(own(c.s), " "); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
	s := dgxA100.system()
	for g, nics := range s.NearestNICs() {
		if want := []int{g, g ^ 1}; !slices.Equal(nics, want) || s.NICLevel(g, g) != LevelSwitches {
			t.Errorf("GPU %d: %v at %v, want %v", g, nics, s.NICLevel(g, g), want)
		}
	}
}

func TestFind(t *testing.T) {
	s := dgxH100.system()
	s.GPUs[3].MIG, s.GPUs[3].Instances = Yes, []string{"MIG-aa", "MIG-Bb"}
	for _, c := range []struct {
		uuid, pci string
		want      Spot
		found     bool
	}{
		{s.GPUs[2].UUID, "", Spot{GPU: 2}, true},
		{strings.TrimPrefix(s.GPUs[2].UUID, "GPU-"), "", Spot{GPU: 2}, true},
		{"bb", s.GPUs[3].PCI, Spot{3, "MIG-Bb"}, true},
		{"MIG-AA", "", Spot{3, "MIG-aa"}, true},
		{"unknown", strings.ToUpper("0000" + s.GPUs[5].PCI), Spot{GPU: 5}, true},
		{"", s.GPUs[5].PCI, Spot{GPU: 5}, true},
		{"unknown", "0000:ff:1f.7", Spot{}, false},
		{"", "", Spot{}, false}, {"GPU-", "x", Spot{}, false},
	} {
		if got, found := s.Find(c.uuid, c.pci); got != c.want || found != c.found {
			t.Errorf("%q at %q: %v, %v; want %v, %v", c.uuid, c.pci, got, found, c.want, c.found)
		}
	}
	if _, found := (System{GPUs: []GPU{{}}}).Find("", ""); found {
		t.Error("nothing was found to be a GPU of which nothing is known")
	}
}

// TestHiddenGPUs: a process that CUDA_VISIBLE_DEVICES shows two GPUs, in the other order, finds them
// and their paths.
func TestHiddenGPUs(t *testing.T) {
	s := cubeMesh()
	var visible []Spot
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
		if got := address(text); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
	for target, want := range map[string]string{
		"../../devices/pci0000:00/0000:00:03.0/0000:04:00.0/infiniband/mlx5_0": "pci0000:00 0000:00:03.0 0000:04:00.0",
		"../../../devices/LNXSYSTM:00/VMBUS:01/0/pci0001:00/0001:00:00.0":      "pci0001:00 0001:00:00.0",
		"../../devices/virtual/infiniband/rxe0":                                "",
	} {
		if got := strings.Join(bridges(target), " "); got != want {
			t.Errorf("%s: %q, want %q", target, got, want)
		}
	}
}

// anySystem draws a machine of which anything may be unknown or inconsistent.
func anySystem(t *rapid.T) System {
	draw := func(name string, n int) int { return rapid.IntRange(0, n).Draw(t, name) }
	answer := func() Answer { return Answer(draw("answer", 2)) }
	used := 0
	place := func() Place {
		p := Place{Node: draw("node", 2) - 1}
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
	s := System{}
	for range draw("GPUs", 6) {
		s.GPUs = append(s.GPUs, GPU{Place: place(), MIG: answer(),
			Fabric: Fabric{State: FabricState(draw("state", 4)), Clique: uint32(draw("clique", 1))}})
	}
	for i := range s.GPUs {
		for l := range draw("links", 4) {
			k := Link{Number: l, Up: draw("up", 3) > 0, Remote: Remote(draw("remote", 3))}
			if k.Remote == RemoteGPU {
				k.PCI = s.GPUs[draw("peer", len(s.GPUs)-1)].PCI
			}
			s.GPUs[i].Links = append(s.GPUs[i].Links, k)
		}
	}
	s.Pairs = pairs(s, func(_, _ int, p *Pair) {
		*p = Pair{Level(draw("level", 6)), answer(), answer(), answer(), answer(), answer()}
	})
	for i := range draw("NICs", 4) {
		s.NICs = append(s.NICs, NIC{Name: fmt.Sprintf("mlx5_%d", i), Place: place(), Up: answer()})
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
				a, b := Spot{GPU: i}, Spot{GPU: j}
				p, back := s.Path(a, b), s.Path(b, a)
				if p.Class != back.Class || p.Links != back.Links {
					t.Fatalf("%d to %d: %v, and back %v", i, j, p, back)
				}
				if (p.Class == ClassSame) != (i == j) || p.Class == ClassMNNVL || p.String() == "" {
					t.Fatalf("%d to %d: %v", i, j, p)
				}
				if q := s.pair(i, j); p.Class != ClassHost && (q.Read == No || q.Write == No) {
					t.Fatalf("%d to %d: %v with %+v", i, j, p, q)
				}
				if x := Across(s.GPUs[i], s.GPUs[j]); x != Across(s.GPUs[j], s.GPUs[i]) {
					t.Fatalf("%d across %d: %v", i, j, x)
				}
			}
		}
		some := slices.ContainsFunc(s.NICs, func(n NIC) bool { return n.Up != No })
		users := make([]int, len(s.NICs))
		nearest := s.NearestNICs()
		for g, near := range nearest {
			if some != (len(near) > 0) {
				t.Fatalf("GPU %d: %v", g, near)
			}
			for n, c := range s.NICs {
				if c.Up != No && s.NICLevel(g, n).distance() < s.NICLevel(g, near[0]).distance() {
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
