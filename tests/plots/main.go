// Command plots draws the results of tests/peers and of shim/torch/bench.py: time against size, one
// picture for each transport, operation and number of ranks.
//
//	make bench-peers bench-torch plots                       measure, then draw
//	go run ./tests/plots [-o docs/plots] [FILE ...]          .build/peers.json without files
//
// A picture is docs/plots/TRANSPORT-OPERATION-RANKS.svg, such as shm-allreduce-2.svg. Its colours
// are chosen to be legible on white and on dark pages, lines differ in their marks too, and the
// same figures give the same bytes.
package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"image/color"
	"maps"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// A report is the part of the output of tests/peers that is drawn.
type report struct {
	Machine string `json:"machine"`
	Rows    []row  `json:"rows"`
}

// A row holds the medians of all contestants at one size; 0: there is none.
type row struct {
	Transport string             `json:"transport"`
	Op        string             `json:"op"`
	Dtype     string             `json:"dtype"`
	Ranks     int                `json:"ranks"`
	Bytes     int64              `json:"bytes"`
	Median    map[string]float64 `json:"median_us"`
}

// A key identifies a picture.
type key struct {
	transport, op string
	ranks         int
}

func (k key) file() string { return fmt.Sprintf("%s-%s-%d.svg", k.transport, k.op, k.ranks) }

func (k key) title() string {
	how := map[string]string{"shm": "shared memory", "tcp": "TCP over loopback", "pytorch": "from PyTorch"}[k.transport]
	return fmt.Sprintf("%s, %d ranks, %s", k.op, k.ranks, cmp.Or(how, k.transport))
}

// A contestant is one line of a picture.
type contestant struct {
	column, name string
	from         int64 // bytes from which it is meaningful
	color        color.RGBA
	glyph        draw.GlyphDrawer
	dashes       []vg.Length
	width        vg.Length
}

// smallestLimit is the size from which the memory limit is worth showing: below it latency rules.
// tests/peers has the same.
const smallestLimit = 64 << 10

// ink is the colour of everything except lines of figures. It and the lines' colours have about 4
// times the luminance contrast with white and with dark pages; a test checks it.
var ink = color.RGBA{0x77, 0x7c, 0x84, 0xff}

var contestants = []contestant{
	{column: "tutti", name: "Tutti", color: color.RGBA{0xd0, 0x55, 0x00, 0xff}, glyph: draw.CircleGlyph{}, width: 2},
	{column: "tutti-reg", name: "Tutti, registered memory", color: color.RGBA{0xe0, 0x3e, 0x6a, 0xff},
		glyph: draw.BoxGlyph{}, width: 2},
	{column: "openmpi", name: "Open MPI", color: color.RGBA{0x1f, 0x7f, 0xd4, 0xff}, glyph: draw.TriangleGlyph{},
		width: 1},
	{column: "mpich", name: "MPICH", color: color.RGBA{0x1c, 0x8a, 0x4c, 0xff}, glyph: draw.CrossGlyph{}, width: 1},
	{column: "openmpi5", name: "Open MPI 5", color: color.RGBA{0x2a, 0x83, 0xa8, 0xff}, glyph: draw.TriangleGlyph{},
		dashes: []vg.Length{6, 2}, width: 1},
	{column: "mpich5", name: "MPICH 5", color: color.RGBA{0x6a, 0x86, 0x1c, 0xff}, glyph: draw.CrossGlyph{},
		dashes: []vg.Length{6, 2}, width: 1},
	{column: "gloo", name: "Gloo", color: color.RGBA{0x9b, 0x5f, 0xd0, 0xff}, glyph: draw.PlusGlyph{}, width: 1},
	{column: "limit", name: "memory limit", from: smallestLimit, color: ink, glyph: draw.RingGlyph{},
		dashes: []vg.Length{4, 3}, width: 1},
}

func main() {
	out := flag.String("o", "docs/plots", "`directory` for the pictures")
	flag.Parse()
	paths := flag.Args()
	if len(paths) == 0 {
		paths = []string{".build/peers.json"}
	}
	if err := run(*out, paths...); err != nil {
		fmt.Fprintln(os.Stderr, "plots:", err)
		os.Exit(1)
	}
}

func run(dir string, paths ...string) error {
	for _, path := range paths {
		if err := drawFile(dir, path); err != nil {
			return err
		}
	}
	return nil
}

// drawFile draws the pictures of one file of figures.
func drawFile(dir, path string) error {
	b, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("%w: make bench-peers writes it", err)
	}
	if err != nil {
		return err
	}
	pictures, err := render(b)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(pictures)) {
		if err := os.WriteFile(filepath.Join(dir, name), pictures[name], 0o644); err != nil {
			return err
		}
		fmt.Println(filepath.Join(dir, name))
	}
	return nil
}

var word = regexp.MustCompile(`^[a-z0-9_]{1,32}$`)

// render draws every picture that a report of tests/peers gives, by file name.
func render(b []byte) (map[string][]byte, error) {
	var rep report
	if err := json.Unmarshal(b, &rep); err != nil {
		return nil, fmt.Errorf("no report of tests/peers: %w", err)
	}
	groups := map[key][]row{}
	for i, r := range rep.Rows {
		// They become file names and positions on logarithmic axes.
		if !word.MatchString(r.Transport) || !word.MatchString(r.Op) || r.Ranks < 1 || r.Bytes < 1 {
			return nil, fmt.Errorf("row %d: %.40q of %.40q, %d ranks, %d bytes: no such measurement", i, r.Op,
				r.Transport, r.Ranks, r.Bytes)
		}
		if r.Dtype == "float32" { // others are compared with it, not with the peers
			k := key{r.Transport, r.Op, r.Ranks}
			groups[k] = append(groups[k], r)
		}
	}
	if len(groups) == 0 {
		return nil, errors.New("no rows of float32")
	}
	pictures := map[string][]byte{}
	for k, rows := range groups {
		slices.SortFunc(rows, func(a, b row) int { return cmp.Compare(a.Bytes, b.Bytes) })
		svg, err := picture(k, rows, rep.Machine)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", k.file(), err)
		}
		if svg != nil {
			pictures[k.file()] = svg
		}
	}
	return pictures, nil
}

// picture draws rows, which ascend by size; nil if they hold no figures.
func picture(k key, rows []row, machine string) ([]byte, error) {
	p := plot.New()
	p.BackgroundColor = nil // the page's
	sans := font.Font{Typeface: "Liberation", Variant: "Sans"}
	for _, s := range []struct {
		font  *font.Font
		color *color.Color
		size  vg.Length
	}{
		{&p.Title.TextStyle.Font, &p.Title.TextStyle.Color, 13}, {&p.Legend.TextStyle.Font, &p.Legend.TextStyle.Color,
			11},
		{&p.X.Label.TextStyle.Font, &p.X.Label.TextStyle.Color, 11},
		{&p.Y.Label.TextStyle.Font, &p.Y.Label.TextStyle.Color, 11},
		{&p.X.Tick.Label.Font, &p.X.Tick.Label.Color, 10}, {&p.Y.Tick.Label.Font, &p.Y.Tick.Label.Color, 10},
	} {
		*s.font, *s.color = font.From(sans, s.size), ink
	}
	for _, s := range []*draw.LineStyle{&p.X.LineStyle, &p.Y.LineStyle, &p.X.Tick.LineStyle, &p.Y.Tick.LineStyle} {
		s.Color = ink
	}
	p.Title.Text = k.title()
	if machine != "" {
		p.Title.Text += "\n" + machine
	}
	p.Title.Padding = 6
	p.X.Label.Text, p.Y.Label.Text = "largest buffer of one rank (bytes)", "time of one call (µs)"
	p.Legend.Top, p.Legend.Left, p.Legend.Padding = true, true, 3
	faint := draw.LineStyle{Color: color.RGBA{ink.R / 4, ink.G / 4, ink.B / 4, 0x40}, Width: 0.5} // premultiplied
	grid := plotter.NewGrid()
	grid.Vertical, grid.Horizontal = faint, faint
	p.Add(grid)

	sizes := map[int64]bool{}
	low, high := math.Inf(1), 0.0
	var entries []func()
	for _, c := range slices.Backward(contestants) { // ours on top
		var points plotter.XYs
		for _, r := range rows {
			if us := r.Median[c.column]; us > 0 && !math.IsInf(us, 0) && r.Bytes >= c.from {
				points = append(points, plotter.XY{X: math.Log2(float64(r.Bytes)), Y: math.Log10(us)})
				sizes[r.Bytes] = true
				low, high = min(low, us), max(high, us)
			}
		}
		if len(points) == 0 {
			continue
		}
		line, marks, err := plotter.NewLinePoints(points)
		if err != nil {
			return nil, err
		}
		line.LineStyle = draw.LineStyle{Color: c.color, Width: c.width, Dashes: c.dashes}
		marks.GlyphStyle = draw.GlyphStyle{Color: c.color, Radius: 3, Shape: c.glyph}
		p.Add(line, marks)
		entries = append(entries, func() { p.Legend.Add(c.name, line, marks) })
	}
	if len(sizes) == 0 {
		return nil, nil
	}
	x := slices.Sorted(maps.Keys(sizes))
	// The axes are linear in logarithms: plot's own logarithmic scale leaves room for labels in the
	// wrong places.
	p.X.Min, p.X.Max = math.Log2(float64(x[0]))-0.4, math.Log2(float64(x[len(x)-1]))+0.4
	p.X.Tick.Marker = bytesTicks(x)
	p.Y.Min, p.Y.Max = math.Floor(math.Log10(low)), math.Floor(math.Log10(high))+1 // whole decades
	p.Y.Tick.Marker = decadeTicks{}

	for _, add := range slices.Backward(entries) {
		add()
	}
	legend := p.Legend
	p.Legend = plot.NewLegend()
	const width, beside = 8 * vg.Inch, 2.2 * vg.Inch
	canvas := vgsvg.NewWith(vgsvg.UseWH(width, 4*vg.Inch))
	all := draw.New(canvas)
	p.Draw(draw.Crop(all, 0, -beside, 0, 0))
	legend.Draw(draw.Crop(all, width-beside+8, 0, 0, -40))
	var svg bytes.Buffer
	if _, err := canvas.WriteTo(&svg); err != nil {
		return nil, err
	}
	return generic(svg.Bytes()), nil
}

var family = regexp.MustCompile(`font-family:[^;"]*`)

// generic makes text come out without serifs where Liberation is not installed.
func generic(svg []byte) []byte {
	return family.ReplaceAll(svg, []byte("font-family:'Liberation Sans',Arial,Helvetica,sans-serif"))
}

// bytesTicks marks the sizes that were measured, on an axis of their binary logarithms.
type bytesTicks []int64

func (t bytesTicks) Ticks(_, _ float64) []plot.Tick {
	var ticks []plot.Tick
	for _, b := range t {
		ticks = append(ticks, plot.Tick{Value: math.Log2(float64(b)), Label: sizeLabel(b)})
	}
	return ticks
}

func sizeLabel(b int64) string {
	for _, u := range []struct {
		shift int
		name  string
	}{{30, "Gi"}, {20, "Mi"}, {10, "Ki"}} {
		if b >= 1<<u.shift && b%(1<<u.shift) == 0 {
			return fmt.Sprintf("%d %s", b>>u.shift, u.name)
		}
	}
	return fmt.Sprint(b)
}

// decadeTicks marks powers of ten on an axis of decimal logarithms, and without labels what lies
// between.
type decadeTicks struct{}

func (decadeTicks) Ticks(low, high float64) []plot.Tick {
	var ticks []plot.Tick
	for e := math.Ceil(low); e <= high; e++ {
		ticks = append(ticks, plot.Tick{Value: e, Label: strconv.FormatFloat(math.Pow10(int(e)), 'f', -1, 64)})
		for m := 2.0; m < 10 && e < high; m++ {
			ticks = append(ticks, plot.Tick{Value: e + math.Log10(m)})
		}
	}
	return ticks
}
