package main

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"image/color"
	"io"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// synthetic is a report as tests/peers writes it, with made-up figures.
func synthetic() report {
	rep := report{Machine: `Some "CPU" <at> 2 & 3 GHz, 2 cores`}
	for _, transport := range []string{"shm", "tcp"} {
		for _, op := range []string{"allreduce", "reduce_scatter"} {
			for _, ranks := range []int{2, 4} {
				for b := int64(64); b <= 16<<20; b *= 8 {
					m := map[string]float64{}
					for i, c := range []string{"openmpi", "mpich", "openmpi5", "mpich5", "gloo", "tutti",
						"tutti-reg", "limit", "limit-cold"} {
						m[c] = float64(i+1)*0.2 + float64(b)/4e3
					}
					if transport == "tcp" {
						delete(m, "tutti-reg")
						delete(m, "limit")
					}
					if b == 512 {
						m["mpich"] = 0 // failed there
					}
					for _, dtype := range []string{"float32", "bfloat16"} {
						rep.Rows = append(rep.Rows, row{transport, op, dtype, ranks, b, m})
					}
				}
			}
		}
	}
	return rep
}

func encode(t *testing.T, rep report) []byte {
	t.Helper()
	b, err := json.Marshal(rep)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// text is all that an SVG says, and how many paths of each colour it has.
func text(t *testing.T, svg []byte) (said string, strokes map[string]int) {
	t.Helper()
	strokes = map[string]int{}
	d := xml.NewDecoder(bytes.NewReader(svg))
	for {
		tok, err := d.Token()
		if errors.Is(err, io.EOF) {
			return said, strokes
		}
		if err != nil {
			t.Fatalf("no XML: %v", err)
		}
		switch e := tok.(type) {
		case xml.CharData:
			said += string(e) + "\n"
		case xml.StartElement:
			for _, a := range e.Attr {
				if e.Name.Local == "path" && a.Name.Local == "style" {
					if _, after, ok := strings.Cut(a.Value, "stroke:#"); ok {
						strokes[after[:6]]++
					}
				}
				if strings.Contains(strings.ToLower(a.Value), "fill:#ffffff") {
					t.Error("something white is filled: dark pages show it")
				}
			}
		}
	}
}

func TestRender(t *testing.T) {
	rep := synthetic()
	pictures, err := render(encode(t, rep))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"shm-allreduce-2.svg", "shm-allreduce-4.svg", "shm-reduce_scatter-2.svg",
		"shm-reduce_scatter-4.svg",
		"tcp-allreduce-2.svg", "tcp-allreduce-4.svg", "tcp-reduce_scatter-2.svg", "tcp-reduce_scatter-4.svg"}
	if got := slices.Sorted(maps.Keys(pictures)); !slices.Equal(got, want) {
		t.Fatalf("%v, want %v", got, want)
	}
	for name, svg := range pictures {
		if len(svg) > 100<<10 {
			t.Errorf("%s: %d bytes", name, len(svg))
		}
		said, strokes := text(t, svg)
		for _, s := range []string{"(µs)", "(bytes)", "64", "32 Ki", "16 Mi", "ranks", "Open MPI", "MPICH", "Gloo",
			"Tutti", `Some "CPU" <at> 2 & 3 GHz, 2 cores`} {
			if !strings.Contains(said, s) {
				t.Errorf("%s does not say %q", name, s)
			}
		}
		for _, s := range []string{"registered memory", "memory limit"} {
			if strings.Contains(said, s) != strings.HasPrefix(name, "shm") {
				t.Errorf("%s: %q: %v", name, s, strings.Contains(said, s))
			}
		}
		for _, c := range contestants {
			hex := fmt.Sprintf("%02X%02X%02X", c.color.R, c.color.G, c.color.B)
			if shm := strings.HasPrefix(name, "shm"); strokes[hex] == 0 &&
				(shm || c.from == 0 && c.column != "tutti-reg") {
				t.Errorf("%s: no line of %s (%s) in %v", name, c.name, hex, strokes)
			}
		}
	}
	// The same figures in another order are the same bytes; other figures are not.
	rand.Shuffle(len(rep.Rows), func(i, j int) { rep.Rows[i], rep.Rows[j] = rep.Rows[j], rep.Rows[i] })
	again, err := render(encode(t, rep))
	if err != nil {
		t.Fatal(err)
	}
	for name := range pictures {
		if !bytes.Equal(pictures[name], again[name]) {
			t.Errorf("%s differs from run to run", name)
		}
	}
	for i := range rep.Rows {
		rep.Rows[i].Median = map[string]float64{"tutti": 7}
	}
	if other, err := render(encode(t, rep)); err != nil || bytes.Equal(other[want[0]], pictures[want[0]]) {
		t.Errorf("other figures make the same picture (%v)", err)
	}
}

// TestSmallReports: little is drawn too, and nothing is no picture.
func TestSmallReports(t *testing.T) {
	one := row{"shm", "barrier", "float32", 2, 8, map[string]float64{"tutti": 0.25}}
	// the limit means nothing that far down
	none := row{"shm", "broadcast", "float32", 2, 8, map[string]float64{"tutti": 0, "limit": 5}}
	pictures, err := render(encode(t, report{Rows: []row{one, none}}))
	if err != nil || len(pictures) != 1 || pictures["shm-barrier-2.svg"] == nil {
		t.Fatalf("%v, %v", slices.Collect(maps.Keys(pictures)), err)
	}
	if said, _ := text(t, pictures["shm-barrier-2.svg"]); !strings.Contains(said, "0.1") ||
		strings.Contains(said, "Gloo") {
		t.Error(said)
	}
}

func TestRefuses(t *testing.T) {
	for name, b := range map[string][]byte{
		"no JSON": []byte("{"), "nothing": []byte("{}"),
		"a path":   encode(t, report{Rows: []row{{"../x", "allreduce", "float32", 2, 8, nil}}}),
		"no size":  encode(t, report{Rows: []row{{"shm", "allreduce", "float32", 2, 0, nil}}}),
		"no ranks": encode(t, report{Rows: []row{{"shm", "allreduce", "float32", 0, 8, nil}}}),
	} {
		if p, err := render(b); err == nil {
			t.Errorf("%s: %v", name, p)
		}
	}
}

func TestRun(t *testing.T) {
	dir := t.TempDir()
	in, out := filepath.Join(dir, "peers.json"), filepath.Join(dir, "docs", "plots")
	if err := run(out, in); err == nil || !strings.Contains(err.Error(), "make bench-peers") {
		t.Error(err)
	}
	if err := os.WriteFile(in, encode(t, synthetic()), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := run(out, in); err != nil {
			t.Fatal(err)
		}
	}
	if all, err := os.ReadDir(out); err != nil || len(all) != 8 {
		t.Errorf("%v, %v", all, err)
	}
	// and those of another file
	torch := filepath.Join(dir, "torch.json")
	times := map[string]float64{"tutti": 1, "gloo": 2}
	if err := os.WriteFile(torch, encode(t, report{Rows: []row{{"pytorch", "all_reduce", "float32", 2, 64, times},
		{"pytorch", "all_reduce", "float32", 2, 4096, times}}}), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := run(out, in, torch); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(out, "pytorch-all_reduce-2.svg")); err != nil {
		t.Error(err)
	}
}

// TestColoursContrast: every colour stands out from white and from dark pages.
func TestColoursContrast(t *testing.T) {
	luminance := func(c color.RGBA) float64 { // of WCAG 2
		lin := func(v uint8) float64 {
			if x := float64(v) / 255; x > 0.04045 {
				return math.Pow((x+0.055)/1.055, 2.4)
			} else {
				return x / 12.92
			}
		}
		return 0.2126*lin(c.R) + 0.7152*lin(c.G) + 0.0722*lin(c.B)
	}
	contrast := func(a, b color.RGBA) float64 {
		x, y := luminance(a), luminance(b)
		return (max(x, y) + 0.05) / (min(x, y) + 0.05)
	}
	colors := map[color.RGBA]string{ink: "ink"}
	for _, c := range contestants {
		if other := colors[c.color]; other != "" && c.dashes == nil {
			t.Errorf("%s has the colour of %s", c.name, other)
		}
		colors[c.color] = c.name
	}
	for c, name := range colors {
		for page, bg := range map[string]color.RGBA{"white": {255, 255, 255, 255}, "dark": {0x0d, 0x11, 0x17, 255}} {
			if r := contrast(c, bg); r < 3.8 {
				t.Errorf("%s on %s: contrast %.2f, want 3.8", name, page, r)
			}
		}
	}
}

func TestSizeLabels(t *testing.T) {
	for b, want := range map[int64]string{64: "64", 4096: "4 Ki", 2 << 20: "2 Mi", 1 << 30: "1 Gi", 1500: "1500"} {
		if got := sizeLabel(b); got != want {
			t.Errorf("%d: %q", b, got)
		}
	}
	labels := ""
	for _, tick := range (decadeTicks{}).Ticks(-1, 6) {
		if tick.Label != "" {
			labels += tick.Label + " "
		}
		if tick.Value > 6 || tick.Value < -1 {
			t.Errorf("tick at %v", tick.Value)
		}
	}
	if labels != "0.1 1 10 100 1000 10000 100000 1000000 " {
		t.Error(labels)
	}
}
