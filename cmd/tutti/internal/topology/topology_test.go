package topology

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"tutti/nvlink"
	"tutti/nvlink/nvlinktest"
)

var update = flag.Bool("update", false, "write testdata anew")

// views are machines to show.
func views() map[string]View {
	change := func(s nvlink.System, f func(s *nvlink.System)) nvlink.System { f(&s); return s }
	return map[string]View{
		"dgx-a100": {System: nvlinktest.DGXA100(),
			CUDA: [][]int{{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}}},
		"dgx-h100":  {System: nvlinktest.DGXH100()},
		"cube-mesh": {System: nvlinktest.CubeMesh(), CUDA: [][]int{{1}, nil, nil, nil, {0}, nil, nil, nil}},
		"pcie-only": {System: nvlinktest.PCIeOnly()},
		"two-cliques": {System: change(nvlinktest.DGXH100(), func(s *nvlink.System) {
			for i := range s.GPUs {
				s.GPUs[i].Fabric.Clique = uint32(i % 2)
			}
			s.Pairs = nvlinktest.Pairs(*s, func(int, int) nvlink.Pair { return nvlink.Pair{} })
			s.GPUs[2].Links[0].Up, s.NICs[9].Up = false, nvlink.No
		})},
		"mig": {System: change(nvlinktest.DGXH100(), func(s *nvlink.System) {
			s.GPUs, s.NICs = s.GPUs[:3], s.NICs[8:]
			s.GPUs[1].MIG, s.GPUs[1].Instances = nvlink.Yes, []string{"MIG-1", "MIG-2"}
			s.GPUs[2] = nvlink.GPU{Problem: "GPU is lost", Place: nvlink.Place{Node: -1}}
			s.NICs[0].Node, s.NICs[1].Node = 0, 0
			s.NICs[0].Name = "<&\">"
		}), CUDA: [][]int{nil, {0, 1}, nil}},
		"one": {System: nvlink.System{GPUs: []nvlink.GPU{{Name: "GPU", Place: nvlink.Place{Node: -1}}}}},
	}
}

// TestText compares the tables with files: go test ./cmd/tutti/internal/topology -update writes
// them.
func TestText(t *testing.T) {
	for name, v := range views() {
		problems, advice := v.Problems()
		got := v.Summary() + "\n" + strings.Join(append(problems, advice...), "\n") + "\n" +
			strings.Join(v.Text(), "\n") + "\n"
		file := filepath.Join("testdata", name+".txt")
		if *update {
			if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if got != string(want) {
			t.Errorf("%s:\n%s\nwant\n%s", name, got, want)
		}
	}
}

// TestSVG: a picture is XML, names every device once, stays within its frame, has no colour that a
// dark or a white page hides, and is the same every time.
func TestSVG(t *testing.T) {
	point := regexp.MustCompile(`-?\d+`)
	for name, v := range views() {
		svg := v.SVG()
		if dir := os.Getenv("TOPOLOGY_PICTURES"); dir != "" {
			if err := os.WriteFile(filepath.Join(dir, name+".svg"), svg, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if !bytes.Equal(svg, v.SVG()) {
			t.Errorf("%s differs from time to time", name)
		}
		var said []string
		paths := map[string]int{}
		width, height := 0, 0
		for d := xml.NewDecoder(bytes.NewReader(svg)); ; {
			token, err := d.Token()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatalf("%s: no XML: %v", name, err)
			}
			switch e := token.(type) {
			case xml.CharData:
				said = append(said, strings.TrimSpace(string(e)))
			case xml.StartElement:
				a := map[string]string{}
				for _, at := range e.Attr {
					a[at.Name.Local] = at.Value
				}
				if e.Name.Local == "svg" {
					width, height = atoi(t, a["width"]), atoi(t, a["height"])
					continue
				}
				paths[e.Name.Local+" "+a["stroke"]]++
				if c := a["stroke"]; c != "" && !slices.Contains([]string{ink, nvlinkInk, nvswitchInk, nicInk}, c) ||
					e.Name.Local == "rect" && a["fill"] != "none" {
					t.Errorf("%s: %v", name, e)
				}
				x, y := []int{}, []int{}
				for i, n := range point.FindAllString(a["d"], -1) {
					if i%2 == 0 {
						x = append(x, atoi(t, n))
					} else {
						y = append(y, atoi(t, n))
					}
				}
				if a["d"] == "" {
					x, y = append(x, atoi(t, a["x"])), append(y, atoi(t, a["y"]))
				}
				if e.Name.Local == "rect" {
					x, y = append(x, x[0]+atoi(t, a["width"])), append(y, y[0]+atoi(t, a["height"]))
				}
				if slices.Min(x) < 0 || slices.Max(x) > width || slices.Max(y) > height ||
					slices.Min(y) < 0 && !strings.Contains(a["d"], "Q") {
					t.Errorf("%s: outside of %d x %d: %v", name, width, height, e)
				}
			}
		}
		for i := range v.GPUs {
			if n := count(said, gpu(i)); n != 1 {
				t.Errorf("%s: GPU %d is there %d times", name, i, n)
			}
		}
		for _, n := range v.NICs {
			if count(said, n.Name) != 1 {
				t.Errorf("%s: %s is there %d times in %q", name, n.Name, count(said, n.Name), said)
			}
		}
		arcs := 0
		for i := range v.GPUs {
			for j := range i {
				if v.path(i, j).Class == nvlink.ClassNVLink {
					arcs++
				}
			}
		}
		if arcs > 0 {
			arcs++ // in the legend
		}
		if got := paths["path "+nvlinkInk]; got != arcs {
			t.Errorf("%s: %d arcs, want %d", name, got, arcs)
		}
	}
}

func count(all []string, s string) int {
	n := 0
	for _, x := range all {
		if x == s {
			n++
		}
	}
	return n
}

func atoi(t *testing.T, s string) int {
	t.Helper()
	n := 0
	if err := json.Unmarshal([]byte(s), &n); err != nil {
		t.Fatalf("%q: %v", s, err)
	}
	return n
}

// TestReport: the data have the devices, how they are connected, and what follows from that.
func TestReport(t *testing.T) {
	b, err := json.Marshal(views()["two-cliques"].Report())
	if err != nil {
		t.Fatal(err)
	}
	var r struct {
		Driver string
		GPUs   []struct {
			UUID  string
			PCI   string
			Node  int `json:"numa_node"`
			Links []struct {
				Up     bool
				Remote string
			}
			Fabric struct{ State string }
			MIG    string
		}
		NICs  []struct{ Name, PCI, Up string }
		Pairs [][]struct{ Level, Read string }
		Paths [][]string
		Cards [][]string `json:"nearest_nics"`
		CUDA  [][]int    `json:"cuda_ordinals"`
	}
	if err := json.Unmarshal(b, &r); err != nil {
		t.Fatal(err)
	}
	if r.Driver == "" || len(r.GPUs) != 8 || r.GPUs[5].Node != 1 || len(r.GPUs[2].Links) != 18 ||
		r.GPUs[2].Links[0].Up ||
		r.GPUs[2].Links[1].Remote != "NVSwitch" || r.GPUs[0].Fabric.State != "completed" || r.GPUs[0].MIG != "no" ||
		r.NICs[9].Up != "no" || r.Pairs[0][1].Level != "NODE" || r.Pairs[0][1].Read != "unknown" ||
		!slices.Equal(r.Paths[0], []string{"same", "host", "NVS17", "host", "NVS18", "host", "NVS18", "host"}) ||
		!slices.Equal(r.Cards[3], []string{"mlx5_3"}) || r.CUDA != nil {
		t.Errorf("%s", b)
	}
}
