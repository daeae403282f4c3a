//go:build linux

package main

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"text/tabwriter"

	"tutti/tests/internal/stats"
)

// A row is one line of a contestant's output. Other fields are ignored.
type row struct {
	Op      string  `json:"op"`
	Dtype   string  `json:"dtype"`
	Ranks   int     `json:"ranks"`
	Bytes   int64   `json:"bytes"`
	TimeUs  float64 `json:"time_us"`
	InPlace *bool   `json:"in_place"`
	Touch   bool    `json:"touch"`
	Variant string  `json:"variant"`
	Wrong   int64   `json:"wrong"` // elements; below 0: not checked
	// Calls of process_vm_readv and process_vm_writev, by the rank that made most.
	SingleCopies int64 `json:"single_copies"`

	Transport string `json:"transport"`
}

// parseRows returns the rows of heat h in a program's output. It skips lines that are not JSON
// objects, that have no time, or that belong to another heat, or to another loop than touch says.
func parseRows(out []byte, h heat, touch bool) (rows []row) {
	sc := bufio.NewScanner(bytes.NewReader(out))
	sc.Buffer(nil, 1<<20)
	for sc.Scan() {
		line := bytes.TrimSpace(sc.Bytes())
		var r row
		if len(line) == 0 || line[0] != '{' || json.Unmarshal(line, &r) != nil {
			continue
		}
		op := h.op
		if h.who == limit {
			op = "limit"
		}
		if h.op == barrier { // it has no bytes
			r.Bytes, r.Dtype = barrierBytes, ""
		}
		if r.Op = strings.ReplaceAll(r.Op, "_", ""); r.Op != strings.ReplaceAll(op, "_", "") ||
			(r.Dtype != "" && r.Dtype != h.dtype) || (r.Ranks != 0 && r.Ranks != h.ranks) ||
			(r.Transport != "" && r.Transport != h.transport) ||
			r.Touch != touch || r.Bytes <= 0 || !(r.TimeUs > 0) || math.IsInf(r.TimeUs, 0) {
			continue
		}
		rows = append(rows, r)
	}
	return rows
}

// A barrier is measured as if it had one element.
const (
	barrier      = "barrier"
	barrierBytes = 4
)

// sizes returns the sizes at which an operation is measured.
func (o *options) sizes(op string) []int64 {
	if op == barrier {
		return []int64{barrierBytes}
	}
	return o.Sizes
}

// largeMessage is the size from which builds for all machines count only with their single copy.
const largeMessage = 64 << 10

// A progression is the sizes min, min*factor, … up to max.
type progression struct{ min, max, factor int64 }

// progressions covers ascending sizes by progressions, as few as a greedy search finds.
func progressions(sizes []int64) (ps []progression) {
	for i := 0; i < len(sizes); {
		p, j := progression{sizes[i], sizes[i], 2}, i+1
		if j < len(sizes) && sizes[j]%sizes[i] == 0 {
			for p.factor = sizes[j] / sizes[i]; j < len(sizes) && sizes[j] == p.max*p.factor; j++ {
				p.max = sizes[j]
			}
		}
		ps = append(ps, p)
		i = j
	}
	return ps
}

// A cell identifies the samples of one contestant: a line of the table and a column. The memory
// limit has three columns: warm, which is just "limit", "limit-cold" and "limit-cross".
type cell struct {
	line
	column string
}

// A line of the table.
type line struct {
	Transport string `json:"transport"`
	Op        string `json:"op"`
	Dtype     string `json:"dtype"`
	Ranks     int    `json:"ranks"`
	Bytes     int64  `json:"bytes"`
}

func (l line) String() string {
	if l.Op == barrier {
		return fmt.Sprintf("%s %s, %d ranks", l.Transport, l.Op, l.Ranks)
	}
	return fmt.Sprintf("%s %s of %s, %d ranks", l.Transport, l.Op, sizeString(l.Bytes), l.Ranks)
}

// results collects the rounds.
type results struct {
	samples map[cell][]float64 // one per round: the best variant's
	failed  map[cell]bool
}

func newResults() *results { return &results{map[cell][]float64{}, map[cell]bool{}} }

// add adds the rows of one turn. Of several rows for one cell, the fastest is the round's sample.
// Rows with the other place (in or out of it) than requested count only if no row is as requested,
// because not every contestant supports, or reports, both.
func (s *results) add(h heat, rows []row, o options) {
	type found struct {
		us    float64
		asked bool
	}
	best := map[cell]found{}
	for _, r := range rows {
		size, ok := nearest(r.Bytes, o.sizes(h.op), h.least())
		if !ok || r.Wrong > 0 {
			continue
		}
		c := cell{line{h.transport, h.op, h.dtype, h.ranks, size}, string(h.who)}
		if _, cache, _ := strings.Cut(r.Variant, "-"); h.who == limit && cache != "warm" {
			c.column = "limit-" + cache
		}
		asked := !o.OutOfPlace && (h.op == "allreduce" || h.op == "reduce") // in place
		f := found{r.TimeUs, r.InPlace == nil || *r.InPlace == asked || h.op == "broadcast"}
		if b, seen := best[c]; !seen || (f.asked && !b.asked) || (f.asked == b.asked && f.us < b.us) {
			best[c] = f
		}
	}
	for c, f := range best {
		s.samples[c] = append(s.samples[c], f.us)
	}
}

// fail records that h failed in a turn that gave these rows, for cells without a right figure.
func (s *results) fail(h heat, rows []row, o options) {
	for _, size := range o.sizes(h.op) {
		of := slices.DeleteFunc(slices.Clone(rows), func(r row) bool {
			at, ok := nearest(r.Bytes, o.sizes(h.op), h.least())
			return !ok || at != size
		})
		if len(of) == 0 || slices.ContainsFunc(of, func(r row) bool { return r.Wrong > 0 }) {
			s.failed[cell{line{h.transport, h.op, h.dtype, h.ranks, size}, string(h.who)}] = true
		}
	}
}

// nearest returns the requested size of a measurement of b: b itself, or the next above it, since
// operations round down. Sizes below least stand for that.
func nearest(b int64, sizes []int64, least int64) (size int64, ok bool) {
	var best int64
	for _, s := range sizes {
		if d := abs(max(s, least) - b); d <= max(s, least)/2 && (!ok || d < best) {
			size, best, ok = s, d, true
		}
	}
	return size, ok
}

// complete reports whether rows are right and have a figure for each of sizes; least as in nearest.
func complete(rows []row, sizes []int64, least int64) bool {
	seen := map[int64]bool{}
	for _, r := range rows {
		size, ok := nearest(r.Bytes, sizes, least)
		if seen[size] = ok; r.Wrong > 0 {
			return false
		}
	}
	return !slices.ContainsFunc(sizes, func(s int64) bool { return !seen[s] })
}

func abs(x int64) int64 { return max(x, -x) }

// A comparison is one line of the table with its figures; zero stands for none.
type comparison struct {
	line
	Median   map[string]float64   `json:"median_us"`
	Samples  map[string][]float64 `json:"samples_us"`
	Failed   []string             `json:"failed,omitempty"`
	BestPeer string               `json:"best_peer,omitempty"`
	Ratio    float64              `json:"ratio,omitempty"`     // best peer / tutti
	RatioReg float64              `json:"ratio_reg,omitempty"` // best peer / tutti-reg
	// Intervals of the two, from and to; nil if there were too few rounds.
	Interval    []float64 `json:"interval,omitempty"`
	IntervalReg []float64 `json:"interval_reg,omitempty"`
	OfLimit     float64   `json:"of_limit,omitempty"` // tutti-reg, else tutti / limit, warm
}

// A report is the result of the measurement.
type report struct {
	Machine  string            `json:"machine"`
	Versions map[string]string `json:"versions"`
	Options  options           `json:"options"`
	Rows     []comparison      `json:"rows"`
	// by "transport op ranks=N dtype", "transport" and "all"; with " reg" for registered memory
	Geomeans map[string]float64 `json:"geomeans"`
	Missed   []miss             `json:"missed"` // bars, worst first
	Notes    []string           `json:"notes"`
}

// report compares medians. Rows are worst first: by ratio, then those without one.
func (s *results) report(o options) *report {
	rep := &report{Options: o, Geomeans: map[string]float64{}}
	lines := map[line]*comparison{}
	get := func(l line) *comparison {
		if lines[l] == nil {
			lines[l] = &comparison{line: l, Median: map[string]float64{}, Samples: map[string][]float64{}}
		}
		return lines[l]
	}
	for c, xs := range s.samples {
		m := get(c.line)
		m.Samples[c.column], m.Median[c.column] = xs, stats.Median(xs)
	}
	for c := range s.failed {
		m := get(c.line)
		m.Failed = append(m.Failed, c.column)
		slices.Sort(m.Failed)
	}
	groups := map[string][]float64{}
	for l, m := range lines {
		var best float64
		for _, p := range peerLibraries {
			if v := m.Median[string(p)]; v > 0 && (best == 0 || v < best) {
				best, m.BestPeer = v, string(p)
			}
		}
		others := m.Samples[m.BestPeer]
		for _, column := range []contestant{tutti, tuttiReg} {
			if l.Dtype != "float32" { // no peer has it: compared with Tutti's float32 in the same kind of memory
				others, m.BestPeer = nil, ""
				if f32 := lines[line{l.Transport, l.Op, "float32", l.Ranks, l.Bytes}]; f32 != nil {
					others, m.BestPeer = f32.Samples[string(column)], "tutti float32"
				}
			}
			ours := m.Samples[string(column)]
			if len(ours) == 0 || len(others) == 0 {
				continue
			}
			to, interval, suffix := &m.Ratio, &m.Interval, ""
			if column == tuttiReg {
				to, interval, suffix = &m.RatioReg, &m.IntervalReg, " reg"
			}
			*to, *interval = ratio(others, ours)
			for _, g := range []string{fmt.Sprintf("%s %s ranks=%d %s", l.Transport, l.Op, l.Ranks, l.Dtype),
				l.Transport + " " + l.Dtype, "all " + l.Dtype} {
				groups[g+suffix] = append(groups[g+suffix], *to)
			}
		}
		if floor := m.Median["limit"]; floor > 0 && l.Bytes >= smallestLimit {
			if v := cmp.Or(m.Median["tutti-reg"], m.Median["tutti"]); v > 0 {
				m.OfLimit = v / floor
			}
		}
		rep.Rows = append(rep.Rows, *m)
	}
	for g, xs := range groups {
		rep.Geomeans[g] = stats.Geomean(xs)
	}
	slices.SortFunc(rep.Rows, func(a, b comparison) int {
		none := func(x float64) float64 {
			if x == 0 {
				return math.Inf(1)
			}
			return x
		}
		return cmp.Or(cmp.Compare(none(a.Ratio), none(b.Ratio)), cmp.Compare(a.Transport, b.Transport),
			cmp.Compare(a.Op, b.Op),
			cmp.Compare(a.Dtype, b.Dtype), cmp.Compare(a.Ranks, b.Ranks), cmp.Compare(a.Bytes, b.Bytes))
	})
	return rep
}

// print prints the tables.
func (r *report) print(w io.Writer) error {
	loop := "inputs written before and results read after each call"
	if r.Options.Tight {
		loop = "calls back to back"
	}
	fmt.Fprintf(w, "%s; %s; %d rounds, best of %d repetitions of %v; microseconds, medians over rounds\n", r.Machine,
		loop, r.Options.Rounds, r.Options.Reps, r.Options.Budget)
	for _, name := range slices.Sorted(maps.Keys(r.Versions)) {
		fmt.Fprintf(w, "%s: %s\n", name, r.Versions[name])
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	var columns []string
	for _, c := range append(slices.Clone(peerLibraries), tutti, tuttiReg) {
		columns = append(columns, string(c))
	}
	fmt.Fprintf(t, "\ntransport\top\tdtype\tranks\tsize\t%s\tratio\t95 %%\treg\t95 %%\tlimit\tof limit\t\n",
		strings.Join(columns, "\t"))
	num := func(x float64) string {
		if x == 0 {
			return "-"
		}
		if x < 0.1 {
			return fmt.Sprintf("%.4f", x)
		}
		return fmt.Sprintf("%.2f", x)
	}
	span := func(x []float64) string {
		if x == nil {
			return "-"
		}
		return fmt.Sprintf("%.2f-%.2f", x[0], x[1])
	}
	anyLimit := false
	for _, m := range r.Rows {
		anyLimit = anyLimit || m.Median["limit"] > 0
		fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%s\t", m.Transport, m.Op, m.Dtype, m.Ranks, sizeString(m.Bytes))
		for _, c := range columns {
			switch failed := slices.Contains(m.Failed, c); {
			case failed && m.Median[c] == 0:
				fmt.Fprint(t, "fail\t")
			case failed:
				fmt.Fprintf(t, "%s fail\t", num(m.Median[c]))
			default:
				fmt.Fprintf(t, "%s\t", num(m.Median[c]))
			}
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t\n", num(m.Ratio), span(m.Interval), num(m.RatioReg),
			span(m.IntervalReg), num(m.Median["limit"]), num(m.OfLimit))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if len(r.Geomeans) > 0 {
		fmt.Fprintln(w, "\ngeometric means of the ratio (above 1: tutti is faster)")
		for _, g := range slices.SortedFunc(maps.Keys(r.Geomeans), func(a, b string) int {
			return cmp.Or(cmp.Compare(r.Geomeans[a], r.Geomeans[b]), cmp.Compare(a, b))
		}) {
			fmt.Fprintf(w, "%8.2f  %s\n", r.Geomeans[g], g)
		}
	}
	if anyLimit {
		fmt.Fprintln(w, "\nmemory limit of allreduce: S read and S written by every rank at once")
		t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
		fmt.Fprint(t, "ranks\tsize\twarm us\tGB/s\tcross us\tGB/s\tcold us\tGB/s\t\n")
		for _, m := range slices.SortedFunc(slices.Values(r.Rows), func(a, b comparison) int {
			return cmp.Or(cmp.Compare(a.Ranks, b.Ranks), cmp.Compare(a.Bytes, b.Bytes))
		}) {
			if m.Median["limit"] == 0 {
				continue
			}
			fmt.Fprintf(t, "%d\t%s\t", m.Ranks, sizeString(m.Bytes))
			for _, c := range []string{"limit", "limit-cross", "limit-cold"} {
				if us := m.Median[c]; us > 0 {
					fmt.Fprintf(t, "%.1f\t%.1f\t", us, float64(2*int64(m.Ranks)*m.Bytes)/us/1e3)
				} else {
					fmt.Fprint(t, "-\t-\t")
				}
			}
			fmt.Fprintln(t)
		}
		if err := t.Flush(); err != nil {
			return err
		}
	}
	if len(r.Notes) > 0 {
		fmt.Fprintln(w, "\nnotes")
		for _, n := range r.Notes {
			fmt.Fprintf(w, "- %s\n", n)
		}
	}
	return nil
}

func sizeString(b int64) string {
	for _, u := range []struct {
		shift int
		name  string
	}{{30, "G"}, {20, "M"}, {10, "K"}} {
		if b >= 1<<u.shift && b%(1<<u.shift) == 0 {
			return fmt.Sprintf("%d%s", b>>u.shift, u.name)
		}
	}
	return fmt.Sprint(b)
}
