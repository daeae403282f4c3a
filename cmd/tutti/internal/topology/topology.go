// Package topology shows how a machine's GPUs and network cards are connected: as text, as a
// picture, and as data for other programs. It is pure.
package topology

import (
	"fmt"
	"slices"
	"strings"

	"tutti/cmd/tutti/internal/term"
	"tutti/nvlink"
)

// View is what is shown.
type View struct {
	nvlink.System
	// CUDA has the ordinals that CUDA knows the GPUs by, those of its instances if a GPU is
	// divided, none for GPUs that are hidden from this process. Nil: CUDA cannot be asked.
	CUDA [][]int
}

// Report is a View as data, with what follows from it. Paths and cards are for GPUs by their
// indices.
type Report struct {
	nvlink.System
	CUDA  [][]int         `json:"cuda_ordinals"`
	Paths [][]nvlink.Path `json:"paths"`
	Cards [][]string      `json:"nearest_nics"` // names, the GPU's own one first
}

// Report returns v as data.
func (v View) Report() Report {
	r := Report{System: v.System, CUDA: v.CUDA, Paths: make([][]nvlink.Path, len(v.GPUs))}
	for i := range v.GPUs {
		for j := range v.GPUs {
			r.Paths[i] = append(r.Paths[i], v.path(i, j))
		}
	}
	for _, near := range v.NearestNICs() {
		names := []string{}
		for _, n := range near {
			names = append(names, v.NICs[n].Name)
		}
		r.Cards = append(r.Cards, names)
	}
	return r
}

func (v View) path(i, j int) nvlink.Path { return v.Path(nvlink.Spot{GPU: i}, nvlink.Spot{GPU: j}) }

// Summary counts the pairs of GPUs by their paths.
func (v View) Summary() string {
	var kinds []string
	count := map[string]int{}
	for i := range v.GPUs {
		for j := range i {
			k := v.path(i, j).String()
			if count[k]++; count[k] == 1 {
				kinds = append(kinds, k)
			}
		}
	}
	slices.SortFunc(kinds, func(a, b string) int {
		if count[a] != count[b] {
			return count[b] - count[a]
		}
		return strings.Compare(a, b)
	})
	s := fmt.Sprintf("%s, %s", term.Count(len(v.GPUs), "GPU"), term.Count(len(v.NICs), "RDMA device"))
	for i, k := range kinds {
		s += map[bool]string{true: "; pairs: ", false: ", "}[i == 0] + fmt.Sprintf("%d %s", count[k], k)
	}
	return s
}

// Problems says what is worse than the hardware could be, and what to do about it.
func (v View) Problems() (problems, advice []string) {
	say := func(to *[]string, s string) {
		if !slices.Contains(*to, s) {
			*to = append(*to, s)
		}
	}
	for i, g := range v.GPUs {
		name := gpu(i)
		switch {
		case g.Problem != "":
			say(&problems, fmt.Sprintf("%s cannot be examined: %s", name, g.Problem))
			say(&advice, "look at dmesg, and at the devices that the container may use")
			continue
		case g.LinksUp() < len(g.Links):
			say(&problems, fmt.Sprintf("%s: %d of %s are up", name, g.LinksUp(), term.Count(len(g.Links), "NVLink")))
			say(&advice, "look at nvidia-smi nvlink -s and dmesg")
		}
		switch f := g.Fabric; {
		case f.Problem != "":
			say(&problems, fmt.Sprintf("%s could not enter the NVSwitch fabric: %s", name, f.Problem))
			say(&advice, "look at nvidia-smi -q and the log of nvidia-fabricmanager")
		case f.State == nvlink.FabricNotStarted || f.State == nvlink.FabricInProgress:
			say(&problems, fmt.Sprintf("%s: registration with the NVSwitch fabric is %s", name, f.State))
			say(&advice, "start nvidia-fabricmanager, of the driver's version")
		}
	}
	return problems, advice
}

// Text returns tables of the paths between GPUs and of the distances to network cards, and what
// their words mean, in lines.
func (v View) Text() []string {
	used := map[string]bool{}
	use := func(s string) string { used[s] = true; return s }
	paths := [][]string{{""}}
	for i := range v.GPUs {
		paths[0] = append(paths[0], gpu(i))
	}
	paths[0] = append(paths[0], "NUMA", "CPUs")
	if v.CUDA != nil {
		paths[0] = append(paths[0], "CUDA")
	}
	for i, g := range v.GPUs {
		row := []string{gpu(i)}
		for j := range v.GPUs {
			if i == j {
				row = append(row, "-")
			} else {
				row = append(row, use(v.path(i, j).String()))
			}
		}
		row = append(row, nodeName(g.Node), or(g.CPUs.String(), "?"))
		if v.CUDA != nil {
			var names []string
			for _, n := range v.CUDA[i] {
				names = append(names, fmt.Sprintf("cuda:%d", n))
			}
			row = append(row, or(strings.Join(names, " "), "hidden"))
		}
		paths = append(paths, row)
	}
	lines := table(paths)
	if len(v.NICs) > 0 {
		cards := [][]string{{""}}
		for _, n := range v.NICs {
			cards[0] = append(cards[0], n.Name)
		}
		for g, near := range v.NearestNICs() {
			row := []string{gpu(g)}
			for n, c := range v.NICs {
				cell := use(v.NICLevel(g, n).String())
				switch {
				case c.Up == nvlink.No:
					cell = use("down")
				case near[0] == n:
					cell += use("*")
				case slices.Contains(near, n):
					cell += use("=")
				}
				row = append(row, cell)
			}
			cards = append(cards, row)
		}
		nodes := []string{"NUMA"}
		for _, n := range v.NICs {
			nodes = append(nodes, nodeName(n.Node))
		}
		lines = append(append(lines, ""), table(append(cards, nodes))...)
	}
	var legend [][]string
	for _, g := range v.Report().Paths {
		for _, p := range g {
			s := p.String()
			if !used[s] || p.Class == nvlink.ClassPCIe || p.Class == nvlink.ClassHost {
				continue
			}
			used[s] = false
			legend = append(legend, []string{s, links(p)})
		}
	}
	for _, w := range words {
		if used[w.word] {
			legend = append(legend, []string{w.word, w.meaning})
		}
	}
	return append(append(lines, ""), table(legend)...)
}

// links says what a path by NVLinks is.
func links(p nvlink.Path) string {
	n := "an unknown number of NVLinks"
	if p.Links > 0 {
		n = term.Count(p.Links, "NVLink")
	}
	if p.Class == nvlink.ClassNVSwitch {
		return "through NVSwitches, by " + n + " of each"
	}
	return n + " between the two"
}

// words are those that tables have, with their meaning.
var words = []struct{ word, meaning string }{
	{"P2P", "by PCIe, how near is not known"},
	{"PSB", "on one board"},
	{"PIX", "at one PCIe switch"},
	{"PXB", "below one PCIe switch, behind further ones"},
	{"PHB", "at one host bridge"},
	{"NODE", "at one NUMA node"},
	{"SYS", "at different NUMA nodes"},
	{"?", "not known"},
	{"host", "no access to the other's memory: through the host"},
	{"down", "no port is active"},
	{"*", "what this GPU uses first"},
	{"=", "as near"},
}

func gpu(i int) string { return fmt.Sprintf("GPU%d", i) }

func nodeName(n int) string {
	if n < 0 {
		return "?"
	}
	return fmt.Sprint(n)
}

func or(s, other string) string {
	if s == "" {
		return other
	}
	return s
}

// table aligns the columns of rows, with two spaces between them.
func table(rows [][]string) []string {
	var width []int
	for _, r := range rows {
		for i, c := range r {
			if i == len(width) {
				width = append(width, 0)
			}
			width[i] = max(width[i], len(c))
		}
	}
	var lines []string
	for _, r := range rows {
		var b strings.Builder
		for i, c := range r {
			fmt.Fprintf(&b, "%-*s", width[i]+2, c)
		}
		lines = append(lines, strings.TrimRight(b.String(), " "))
	}
	return lines
}
