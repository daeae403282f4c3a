package topology

import (
	"bytes"
	"cmp"
	"encoding/xml"
	"fmt"
	"maps"
	"slices"

	"tutti/cmd/tutti/internal/term"
	"tutti/nvlink"
)

// The colours are legible on white and on dark pages, like those of docs/plots.
const (
	ink         = "#777c84"
	nvlinkInk   = "#1c8a4c"
	nvswitchInk = "#1f7fd4"
	nicInk      = "#d05500"
)

// Sizes, in pixels.
const (
	boxWidth, boxHeight = 88, 40
	pitch               = boxWidth + 16 // from one box of a row to the next
	margin              = 16
	barHeight, barRoom  = 24, 44
	cardRoom            = 96 // between GPUs and cards
	lineHeight          = 18
)

// SVG draws the machine: GPUs and cards in the NUMA nodes that they are at, the NVSwitches and
// NVLinks above the GPUs, and the cards that each GPU uses below it. The same view gives the same
// bytes.
func (v View) SVG() []byte {
	d := drawing{View: v}
	d.place()
	d.text(margin, margin+lineHeight/2, "start", v.title())
	d.nodes()
	d.switches()
	d.arcs()
	d.cards()
	d.boxes()
	d.legend()
	var b bytes.Buffer
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %[1]d %[2]d" `+
		`font-family="'Liberation Sans',Arial,Helvetica,sans-serif" font-size="12" fill="%s">`+"\n",
		d.width, d.height, ink)
	b.Write(d.out.Bytes())
	b.WriteString("</svg>\n")
	return b.Bytes()
}

func (v View) title() string {
	if len(v.GPUs) == 0 {
		return "no GPU"
	}
	s := v.GPUs[0].Name
	for _, g := range v.GPUs {
		if g.Name != s {
			s = "different ones"
		}
	}
	return fmt.Sprintf("%s: %s; driver %s", term.Count(len(v.GPUs), "GPU"), or(s, "?"), or(v.Driver, "?"))
}

// drawing has where things are. Positions are those of centres, or of the edge that lines go to.
type drawing struct {
	View
	out           bytes.Buffer
	width, height int
	groups        []group
	gpuX, nicX    map[int]int
	gpuY, nicY    int     // upper edges of the rows
	fabrics       [][]int // GPUs that NVSwitches connect
	near          [][]int
	kinds         map[string]bool // of lines, that were drawn
}

// A group is the devices of a NUMA node.
type group struct {
	node       int
	x, width   int
	gpus, nics []int
}

// place decides where everything is.
func (d *drawing) place() {
	d.near, d.kinds = d.NearestNICs(), map[string]bool{}
	byNode := map[int]*group{}
	at := func(node int) *group {
		if byNode[node] == nil {
			byNode[node] = &group{node: node}
		}
		return byNode[node]
	}
	user := map[int]int{} // the first GPU that uses a card
	for i, g := range slices.Backward(d.GPUs) {
		if len(d.near[i]) > 0 {
			user[d.near[i][0]] = i
		}
		at(g.Node).gpus = append(at(g.Node).gpus, i)
	}
	for i, n := range d.NICs {
		at(n.Node).nics = append(at(n.Node).nics, i)
	}
	d.gpuX, d.nicX = map[int]int{}, map[int]int{}
	x := margin
	order := slices.SortedFunc(maps.Keys(byNode), func(a, b int) int {
		return cmp.Compare(uint(a), uint(b)) // unknown nodes last
	})
	for _, node := range order {
		g := byNode[node]
		slices.Sort(g.gpus)
		first := func(n int) int { // cards without a GPU last
			if u, ok := user[n]; ok {
				return u
			}
			return len(d.GPUs)
		}
		slices.SortStableFunc(g.nics, func(a, b int) int { return cmp.Compare(first(a), first(b)) })
		g.x, g.width = x, max(len(g.gpus), len(g.nics))*pitch+margin
		for i, n := range g.gpus {
			d.gpuX[n] = x + margin + i*pitch + boxWidth/2
		}
		for i, n := range g.nics {
			d.nicX[n] = x + margin + i*pitch + boxWidth/2
		}
		x += g.width + margin
		d.groups = append(d.groups, *g)
	}
	d.width = max(x, 480)
	d.fabrics = d.connected()
	arcs := 0
	for i := range d.GPUs {
		for j := range i {
			if c := d.path(i, j).Class; c == nvlink.ClassNVLink || c == nvlink.ClassPCIe {
				arcs = max(arcs, d.apex(i, j))
			}
		}
	}
	d.gpuY = margin + lineHeight + len(d.fabrics)*barRoom + arcs + 2*margin
	d.nicY = d.gpuY + boxHeight
	if len(d.NICs) > 0 {
		d.nicY += cardRoom
	}
}

// apex is the height of the arc between two GPUs.
func (d *drawing) apex(i, j int) int { return margin + max(d.gpuX[i]-d.gpuX[j], d.gpuX[j]-d.gpuX[i])/3 }

// connected returns the sets of GPUs that NVSwitches connect.
func (d *drawing) connected() [][]int {
	var sets [][]int
	for i := range d.GPUs {
		in := slices.IndexFunc(sets, func(s []int) bool {
			return slices.ContainsFunc(s, func(j int) bool { return d.path(i, j).Class == nvlink.ClassNVSwitch })
		})
		if in < 0 {
			sets = append(sets, []int{i})
			continue
		}
		sets[in] = append(sets[in], i)
	}
	return slices.DeleteFunc(sets, func(s []int) bool { return len(s) < 2 })
}

func (d *drawing) text(x, y int, anchor, s string) {
	fmt.Fprintf(&d.out, `<text x="%d" y="%d" text-anchor="%s" dominant-baseline="middle">`, x, y, anchor)
	xml.EscapeText(&d.out, []byte(s))
	d.out.WriteString("</text>\n")
}

func (d *drawing) rect(x, y, w, h int, style string) {
	fmt.Fprintf(&d.out, `<rect x="%d" y="%d" width="%d" height="%d" rx="4" fill="none" %s/>`+"\n", x, y, w, h, style)
}

func (d *drawing) line(x1, y1, x2, y2 int, style string) {
	fmt.Fprintf(&d.out, `<path d="M%d %dL%d %d" fill="none" %s/>`+"\n", x1, y1, x2, y2, style)
}

// The lines, by what they stand for.
var lineKinds = []struct{ kind, style, meaning string }{
	{"nvlink", `stroke="` + nvlinkInk + `"`, "NVLinks between two GPUs, as wide as they are many"},
	{"nvswitch", `stroke="` + nvswitchInk + `"`, "NVLinks to NVSwitches"},
	{"pcie", `stroke="` + ink + `" stroke-dasharray="4 3"`, "access by PCIe"},
	{"nic", `stroke="` + nicInk + `" stroke-width="2"`, "the card that a GPU uses first"},
	{"tie", `stroke="` + nicInk + `" stroke-dasharray="2 4"`, "a card as near"},
}

// style returns that of a kind of lines.
func (d *drawing) style(kind string) string {
	d.kinds[kind] = true
	for _, k := range lineKinds {
		if k.kind == kind {
			return k.style
		}
	}
	return ""
}

// nodes draws the frames of NUMA nodes.
func (d *drawing) nodes() {
	bottom := d.nicY + margin
	if len(d.NICs) > 0 {
		bottom += boxHeight
	}
	for _, g := range d.groups {
		name := "NUMA node " + nodeName(g.node)
		if g.node < 0 {
			name = "at an unknown NUMA node"
		} else if len(g.gpus) > 0 && len(d.GPUs[g.gpus[0]].CPUs) > 0 {
			name += ", CPUs " + d.GPUs[g.gpus[0]].CPUs.String()
		}
		d.rect(g.x, d.gpuY-margin, g.width, bottom+lineHeight-d.gpuY+margin,
			`stroke="`+ink+`" stroke-opacity="0.4"`)
		d.text(g.x+margin, bottom+lineHeight/2-4, "start", name)
	}
	d.height = bottom + lineHeight + margin
}

// switches draws a bar for the switches of each set of GPUs, and their links.
func (d *drawing) switches() {
	for n, set := range d.fabrics {
		y := margin + lineHeight + margin/2 + n*barRoom
		left, right := d.gpuX[set[0]], d.gpuX[set[0]]
		for _, i := range set {
			left, right = min(left, d.gpuX[i]), max(right, d.gpuX[i])
		}
		name := "NVSwitches"
		if f := d.GPUs[set[0]].Fabric; f.State == nvlink.FabricCompleted && (f.Cluster != "" || len(d.fabrics) > 1) {
			name += fmt.Sprintf(", clique %d", f.Clique)
			if f.Cluster != "" {
				name += " of cluster " + f.Cluster
			}
		}
		d.rect(left-boxWidth/2, y, right-left+boxWidth, barHeight, d.style("nvswitch"))
		d.text((left+right)/2, y+barHeight/2, "middle", name)
		for _, i := range set {
			links := 0
			for _, l := range d.GPUs[i].Links {
				if l.Up && l.Remote == nvlink.RemoteSwitch {
					links++
				}
			}
			d.line(d.gpuX[i]+8*n, y+barHeight, d.gpuX[i]+8*n, d.gpuY, d.style("nvswitch"))
			d.text(d.gpuX[i]+8*n+4, d.gpuY-10, "start", fmt.Sprint(links))
		}
	}
}

// arcs draws the ways that lead from one GPU to another.
func (d *drawing) arcs() {
	for i := range d.GPUs {
		for j := range i {
			p := d.path(i, j)
			style, label := "", ""
			switch p.Class {
			case nvlink.ClassNVLink:
				style, label = d.style("nvlink")+fmt.Sprintf(` stroke-width="%d"`, min(1+p.Links, 8)),
					fmt.Sprint(p.Links)
				if p.Links == 0 {
					label = "?"
				}
			case nvlink.ClassPCIe:
				style, label = d.style("pcie"), p.Level.String()
			default:
				continue
			}
			// The curve is half as high as its control point.
			x, y, h := (d.gpuX[i]+d.gpuX[j])/2, d.gpuY, d.apex(i, j)
			fmt.Fprintf(&d.out, `<path d="M%d %dQ%d %d %d %d" fill="none" %s/>`+"\n", d.gpuX[j], y, x, y-2*h, d.gpuX[i],
				y, style)
			d.text(x, y-h-8, "middle", label)
		}
	}
}

// cards draws which cards the GPUs use.
func (d *drawing) cards() {
	for g, near := range d.near {
		for k, n := range near {
			kind := "tie"
			if k == 0 {
				kind = "nic"
			}
			d.line(d.gpuX[g], d.gpuY+boxHeight, d.nicX[n], d.nicY, d.style(kind))
			if k == 0 {
				d.text((3*d.gpuX[g]+d.nicX[n])/4+6, d.gpuY+boxHeight+cardRoom/4, "start", d.NICLevel(g, n).String())
			}
		}
	}
}

// boxes draws the GPUs and the cards.
func (d *drawing) boxes() {
	for i, g := range d.GPUs {
		d.rect(d.gpuX[i]-boxWidth/2, d.gpuY, boxWidth, boxHeight, `stroke="`+ink+`" stroke-width="1.5"`)
		second := g.PCI
		switch {
		case g.Problem != "":
			second = "not known"
		case g.MIG == nvlink.Yes:
			second = term.Count(len(g.Instances), "instance")
		case d.CUDA != nil && len(d.CUDA[i]) > 0:
			second = fmt.Sprintf("cuda:%d", d.CUDA[i][0])
		case d.CUDA != nil:
			second = "hidden"
		}
		d.text(d.gpuX[i], d.gpuY+13, "middle", gpu(i))
		d.text(d.gpuX[i], d.gpuY+28, "middle", second)
	}
	for i, n := range d.NICs {
		d.rect(d.nicX[i]-boxWidth/2, d.nicY, boxWidth, boxHeight, `stroke="`+ink+`" stroke-width="1.5"`)
		second := n.PCI
		if n.Up == nvlink.No {
			second = "down"
		}
		d.text(d.nicX[i], d.nicY+13, "middle", n.Name)
		d.text(d.nicX[i], d.nicY+28, "middle", second)
	}
}

// legend says what lines mean, those that were drawn.
func (d *drawing) legend() {
	for _, k := range lineKinds {
		if d.kinds[k.kind] {
			d.line(margin, d.height, margin+40, d.height, k.style)
			d.text(margin+48, d.height, "start", k.meaning)
			d.height += lineHeight
		}
	}
}
