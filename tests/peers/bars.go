//go:build linux

package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"

	"tutti/tests/internal/stats"
)

// confidence is that of the intervals of ratios.
const confidence = 0.95

// A verdict says which bars were reached.
type verdict struct {
	met      int      // comparisons
	missed   []miss   // worst first
	unjudged []string // bars that nothing was measured for
}

// A miss is something that was measured and is below its bar.
type miss struct {
	What  string  `json:"what"`
	Bar   string  `json:"bar"`
	Ratio float64 `json:"ratio"`
	Least float64 `json:"least"`
}

// sort puts the worst first.
func (v *verdict) sort() {
	slices.SortStableFunc(v.missed, func(a, b miss) int { return cmp.Compare(a.Ratio/a.Least, b.Ratio/b.Least) })
}

// print prints the bars that were missed.
func (v *verdict) print(out io.Writer) error {
	fmt.Fprintf(out, "\n%d comparisons meet their bar, %d miss it\n", v.met, len(v.missed))
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	if len(v.missed) > 0 {
		fmt.Fprint(t, "is\tat least\t\tbar\n")
	}
	for _, b := range v.missed {
		fmt.Fprintf(t, "%.2f\t%.2f\t%s\t%s\n", b.Ratio, b.Least, b.What, b.Bar)
	}
	for _, bar := range v.unjudged {
		fmt.Fprintf(t, "-\t-\t-\t%s: not measured\n", bar)
	}
	return t.Flush()
}

// err returns an error if a bar was missed.
func (v *verdict) err() error {
	if n := len(v.missed); n > 0 {
		return fmt.Errorf("%d comparisons miss their bar: see the list above; with --lenient that is no error", n)
	}
	return nil
}

// A bar is what the ratios of rows, of float32, are to reach: none is to be below 1 with its whole
// interval, and their geometric mean is to be mean, unless that is 0.
type bar struct {
	name       string
	registered bool
	mean       float64
	covers     func(l *line) bool
}

// Sizes in bytes that the bars speak of.
const (
	shortest = 512      // the longest short call
	few      = 32 << 10 // the longest call of many ranks
	long     = 24 << 10 // the shortest long call
)

var bars = []bar{
	{"shared memory, 2 ranks", false, 1.2, longCalls},
	{"registered memory, 2 ranks", true, 1.5, longCalls},
	{"short calls on shared memory, 2 and 4 ranks", false, 0, func(l *line) bool {
		return l.Transport == "shm" && l.Ranks <= 4 && l.Bytes <= shortest && l.Op != "put"
	}},
	{"allreduce of 8 and more ranks", false, 0, func(l *line) bool {
		return l.Transport == "shm" && l.Ranks >= 8 && l.Bytes <= few && l.Op == "allreduce"
	}},
	{"tcp, 2 ranks", false, 1.3, func(l *line) bool {
		return l.Transport == "tcp" && l.Ranks == 2 && l.Op != "put"
	}},
	{"puts", false, 0, func(l *line) bool { return l.Ranks == 2 && l.Op == "put" }},
}

func longCalls(l *line) bool {
	return l.Transport == "shm" && l.Ranks == 2 && l.Bytes >= long && l.Op != "put"
}

// judge compares the rows of a report with the bars. What was not measured is not missed.
func (r *report) judge() *verdict {
	v := &verdict{}
	for _, b := range bars {
		var ratios []float64
		for i := range r.Rows {
			m := &r.Rows[i]
			ratio, within := m.Ratio, m.Interval
			if b.registered {
				ratio, within = m.RatioReg, m.IntervalReg
			}
			if ratio == 0 || m.Dtype != "float32" || !b.covers(&m.line) {
				continue
			}
			ratios = append(ratios, ratio)
			if reached(ratio, within) {
				v.met++
			} else {
				v.missed = append(v.missed, miss{m.String(), b.name, ratio, 1})
			}
		}
		switch mean := stats.Geomean(ratios); {
		case len(ratios) == 0:
			v.unjudged = append(v.unjudged, b.name)
		case b.mean == 0:
		case mean >= b.mean:
			v.met++
		default:
			v.missed = append(v.missed, miss{fmt.Sprintf("mean of %d rows", len(ratios)), b.name, mean, b.mean})
		}
	}
	v.sort()
	return v
}

// reached reports whether a ratio is at least 1, or may be by its interval, which is nil if there
// were too few rounds for one.
func reached(ratio float64, interval []float64) bool {
	return ratio >= 1 || interval != nil && interval[1] >= 1
}

// ratio returns the ratio of the medians of the rounds, others to ours, and the interval of the
// median of the rounds' ratios: nil if there are too few rounds, or not as many of both.
func ratio(others, ours []float64) (median float64, interval []float64) {
	median = stats.Median(others) / stats.Median(ours)
	if len(others) != len(ours) {
		return median, nil
	}
	ratios := make([]float64, len(ours))
	for i := range ours {
		ratios[i] = others[i] / ours[i]
	}
	if lo, hi, err := stats.Interval(ratios, confidence); err == nil {
		interval = []float64{lo, hi}
	}
	return median, interval
}
