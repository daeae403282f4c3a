//go:build linux

// Command against compares this tree with another commit, and reports the rows that have become
// slower.
//
//	go run ./tests/against BASE                       everything: some half an hour on two cores
//	go run ./tests/against --rows shm --ops allreduce --sizes 64,32K,2M --faults="" BASE
//
// It builds ./cmd/tutti of BASE, in a worktree in a temporary directory, and of the working tree as
// it is. For each kind of row (links, memory, operation; or number of ranks of `tutti bench
// --faults`) both binaries take turns, in each round in another order, and the ratio new/old of a
// round is one sample: what disturbs the machine for longer than a turn disturbs both. A row's
// figure is the median ratio; its interval holds the true median with a probability of at least
// --confidence, whatever the distribution (order statistics, as in the sign test). A row whose
// interval lies above 1 is measured again, and has become slower if it does so both times: of many
// rows, some lie above 1 once by chance.
//
// Each build measures itself. Where the way of measuring has changed between them, as that of calls
// over tcp has with package internal/tick, rows with --tight are alike.
//
// The exit code is 1 if a row has become slower, and 2 if there is no result.
package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"tutti/tests/internal/command"
	"tutti/tests/internal/stats"
)

type options struct {
	base         string
	rows         []string // shm, reg, tcp
	ops          []string
	sizes        []int
	ranks        []int
	faults       []int
	rounds, reps int
	budget       time.Duration
	confidence   float64
	tight        bool
	old, new     string // binaries that are built already
}

func parseOptions(args []string) (o options, err error) {
	f := flag.NewFlagSet("against", flag.ContinueOnError)
	rows := f.String("rows", "shm,reg,tcp", "shm: plain memory over shared memory; reg: registered memory over it; tcp")
	ops := f.String("ops", "allreduce,reducescatter,allgather,alltoall,broadcast", "operations")
	sizes := f.String("sizes", "64,512,4K,32K,256K,2M,16M", "bytes, with K, M or G")
	ranks := f.String("ranks", "2", "numbers of ranks")
	faults := f.String("faults", "2,4", "numbers of ranks of the fault rows; empty: no such rows")
	f.IntVar(&o.rounds, "rounds", 12, "rounds, each of one turn for either binary")
	f.IntVar(&o.reps, "reps", 3, "repetitions in a turn; the best counts")
	f.DurationVar(&o.budget, "budget", 10*time.Millisecond, "time of one repetition")
	f.Float64Var(&o.confidence, "confidence", 0.95, "of a row's interval")
	f.BoolVar(&o.tight, "tight", false, "calls back to back, instead of writing inputs before and reading "+
		"results after each")
	f.StringVar(&o.old, "old", "", "a binary of the base that is built already")
	f.StringVar(&o.new, "new", "", "a binary of this tree that is built already")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	if o.base = f.Arg(0); f.NArg() > 1 || (o.base == "") == (o.old == "") {
		return o, errors.New("expected one commit to compare with (of make: BASE=COMMIT), or --old")
	}
	split := func(s string) []string {
		return strings.FieldsFunc(s, func(r rune) bool { return r == ',' })
	}
	number := func(what, s string) (n int) {
		n, e := strconv.Atoi(s)
		if e != nil || n < 2 || n > 4096 {
			err = fmt.Errorf("--%s: %q is no number of ranks, 2 or more", what, s)
		}
		return n
	}
	o.rows, o.ops = split(*rows), split(*ops)
	for _, r := range o.rows {
		if r != "shm" && r != "reg" && r != "tcp" {
			return o, fmt.Errorf("--rows: %q is none of shm, reg and tcp", r)
		}
	}
	for _, s := range split(*ranks) {
		o.ranks = append(o.ranks, number("ranks", s))
	}
	for _, s := range split(*faults) {
		o.faults = append(o.faults, number("faults", s))
	}
	for _, s := range split(*sizes) {
		shift := map[byte]int{'K': 10, 'M': 20, 'G': 30}[s[len(s)-1]]
		n, e := strconv.ParseUint(strings.TrimRight(s, "KMG"), 10, 31)
		if e != nil || n == 0 {
			return o, fmt.Errorf("--sizes: %q is no size such as 64, 4K or 2M", s)
		}
		o.sizes = append(o.sizes, int(n)<<shift)
	}
	switch _, few := stats.Bounds(o.rounds, o.confidence); {
	case err != nil:
	case few != nil:
		err = few
	case o.reps < 1 || o.budget <= 0:
		err = errors.New("--reps is 1 or more, --budget more than 0")
	}
	return o, err
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	o, err := parseOptions(os.Args[1:])
	worse := false
	if err == nil {
		worse, err = compare(ctx, os.Stdout, o)
	}
	stop()
	switch {
	case errors.Is(err, flag.ErrHelp):
	case err != nil:
		fmt.Fprintln(os.Stderr, "against:", err)
		os.Exit(2)
	case worse:
		os.Exit(1)
	}
}

// compare builds what is missing, measures, and prints the table. worse: a row has become slower.
func compare(ctx context.Context, out io.Writer, o options) (worse bool, err error) {
	dir, err := os.MkdirTemp("", "against-")
	if err != nil {
		return false, err
	}
	defer os.RemoveAll(dir)
	if o.old == "" {
		if o.old, err = buildCommit(ctx, dir, o.base); err != nil {
			return false, err
		}
	}
	if o.new == "" {
		o.new = filepath.Join(dir, "new")
		if err := build(ctx, "", o.new); err != nil {
			return false, err
		}
	}
	if !o.tight && !touches(ctx, o.old) {
		fmt.Fprintln(out, "the base cannot touch buffers around each call: calls follow each other at once, in both")
		o.tight = true
	}
	var all []verdict
	for _, s := range o.series() {
		vs, err := judge(ctx, o, s)
		if err != nil {
			return false, fmt.Errorf("%s: %w", s.name, err)
		}
		if slices.ContainsFunc(vs, verdict.slower) {
			again, err := judge(ctx, o, s)
			if err != nil {
				return false, fmt.Errorf("%s, again: %w", s.name, err)
			}
			for i, v := range vs {
				if j := slices.IndexFunc(again, func(a verdict) bool { return a.row == v.row }); v.slower() && j >= 0 {
					vs[i], vs[i].confirmed = again[j], again[j].slower()
				}
			}
		}
		all = append(all, vs...)
	}
	if len(all) == 0 {
		return false, errors.New("no rows were measured")
	}
	return report(out, o, all), nil
}

// run runs a command and returns its output.
func run(ctx context.Context, dir string, argv ...string) ([]byte, error) {
	return command.Output(ctx, dir, []string{"CGO_ENABLED=0"}, argv...)
}

func build(ctx context.Context, dir, path string) error {
	_, err := run(ctx, dir, "go", "build", "-o", path, "./cmd/tutti")
	return err
}

// buildCommit builds the binary of a commit of this repository.
func buildCommit(ctx context.Context, dir, commit string) (path string, err error) {
	tree := filepath.Join(dir, "tree")
	if _, err := run(ctx, "", "git", "worktree", "add", "--quiet", "--detach", tree, commit); err != nil {
		return "", err
	}
	defer func() {
		_, rerr := run(context.WithoutCancel(ctx), "", "git", "worktree", "remove", "--force", tree)
		err = cmp.Or(err, rerr)
	}()
	path = filepath.Join(dir, "old")
	return path, build(ctx, tree, path)
}

// touches reports whether a binary has bench --touch.
func touches(ctx context.Context, binary string) bool {
	help, err := run(ctx, "", binary, "bench", "--help")
	return err == nil && bytes.Contains(help, []byte("--touch"))
}

// A series is the rows that one run of a binary measures.
type series struct {
	name string // of its rows, but for what tells them apart
	args [][]string
	read func(out []byte) (map[row]float64, error)
}

// row names a row: its series, and which of it.
type row struct{ series, of string }

func (o options) series() (all []series) {
	for _, kind := range o.rows {
		for _, n := range o.ranks {
			for _, op := range o.ops {
				s := series{name: fmt.Sprintf("%s %s ranks=%d", kind, op, n)}
				transport := kind
				if kind == "reg" {
					transport = "shm"
				}
				for _, size := range o.sizes {
					args := []string{"bench", "-n", strconv.Itoa(n), "--op", op, "--min", strconv.Itoa(size), "--max",
						strconv.Itoa(size), "--transport", transport,
						"--rounds", strconv.Itoa(o.reps), "--round-time", o.budget.String(), "--json"}
					if kind == "reg" {
						args = append(args, "--registered")
					}
					if !o.tight {
						args = append(args, "--touch")
					}
					s.args = append(s.args, args)
				}
				s.read = func(out []byte) (map[row]float64, error) { return readBench(s.name, out) }
				all = append(all, s)
			}
		}
	}
	for _, n := range o.faults {
		s := series{name: fmt.Sprintf("faults ranks=%d", n),
			args: [][]string{{"bench", "--faults", "-n", strconv.Itoa(n), "--rounds", "1", "--json"}}}
		s.read = func(out []byte) (map[row]float64, error) { return readFaults(s.name, out) }
		all = append(all, s)
	}
	return all
}

// readBench reads the rows of tutti bench, microseconds.
func readBench(series string, out []byte) (map[row]float64, error) {
	rows := map[row]float64{}
	for line := range bytes.Lines(out) {
		var r struct {
			Bytes   int     `json:"bytes"`
			InPlace bool    `json:"in_place"`
			Time    float64 `json:"time_us"`
			Wrong   int64   `json:"wrong"`
		}
		if err := json.Unmarshal(line, &r); err != nil {
			return nil, fmt.Errorf("it printed %q: %w", line, err)
		}
		if r.Wrong != 0 || !(r.Time > 0) {
			return nil, fmt.Errorf("%d wrong elements, %v us: %s", r.Wrong, r.Time, line)
		}
		of := strconv.Itoa(r.Bytes) + " B"
		if r.InPlace {
			of += " in place"
		}
		rows[row{series, of}] = r.Time
	}
	return rows, nil
}

// readFaults reads the rows of tutti bench --faults, milliseconds.
func readFaults(series string, out []byte) (map[row]float64, error) {
	rows := map[row]float64{}
	for line := range bytes.Lines(out) {
		var r struct {
			Leader   bool       `json:"leader_killed"`
			Detected [2]float64 `json:"detected_ms"`
			Next     [2]float64 `json:"next_ms"`
			Admitted [2]float64 `json:"admitted_ms"`
		}
		if err := json.Unmarshal(line, &r); err != nil {
			return nil, fmt.Errorf("it printed %q: %w", line, err)
		}
		store := ""
		if r.Leader {
			store = ", etcd's leader killed"
		}
		for of, ms := range map[string]float64{"detected": r.Detected[0], "next": r.Next[0],
			"admitted": r.Admitted[0]} {
			if !(ms > 0) {
				return nil, fmt.Errorf("%s after %v ms: %s", of, ms, line)
			}
			rows[row{series, of + store}] = ms
		}
	}
	return rows, nil
}

// turn runs one binary.
func turn(ctx context.Context, binary string, s series) (map[row]float64, error) {
	all := map[row]float64{}
	for _, args := range s.args {
		out, err := run(ctx, "", append([]string{binary}, args...)...)
		if err != nil {
			return nil, err
		}
		rows, err := s.read(out)
		if err != nil {
			return nil, fmt.Errorf("%s %s: %w", binary, strings.Join(args, " "), err)
		}
		for r, v := range rows {
			all[r] = v
		}
	}
	return all, nil
}

// A verdict is the result for one row.
type verdict struct {
	row
	old, new      float64 // medians
	ratio, lo, hi float64 // median of new/old, and its interval
	confirmed     bool    // slower in both measurements
}

func (v verdict) slower() bool { return v.lo > 1 }

// judge runs both binaries in turns on one series.
func judge(ctx context.Context, o options, s series) ([]verdict, error) {
	samples := [2]map[row][]float64{{}, {}}
	for round := range o.rounds {
		for i := range 2 {
			who := (round + i) % 2
			rows, err := turn(ctx, []string{o.old, o.new}[who], s)
			if err != nil {
				return nil, err
			}
			for r, v := range rows {
				samples[who][r] = append(samples[who][r], v)
			}
		}
	}
	var all []verdict
	for r, olds := range samples[0] {
		news := samples[1][r]
		if len(olds) != o.rounds || len(news) != o.rounds {
			return nil, fmt.Errorf("%s: %d figures of the base and %d of this tree in %d rounds", r.of, len(olds),
				len(news), o.rounds)
		}
		ratios := make([]float64, o.rounds)
		for i := range ratios {
			ratios[i] = news[i] / olds[i]
		}
		v := verdict{row: r, old: stats.Median(olds), new: stats.Median(news), ratio: stats.Median(ratios)}
		var err error
		if v.lo, v.hi, err = stats.Interval(ratios, o.confidence); err != nil {
			return nil, err
		}
		all = append(all, v)
	}
	for r := range samples[1] {
		if samples[0][r] == nil {
			return nil, fmt.Errorf("%s: the base does not measure it", r.of)
		}
	}
	slices.SortFunc(all, func(a, b verdict) int {
		return cmp.Or(cmp.Compare(b.ratio, a.ratio),
			cmp.Compare(a.of, b.of))
	})
	return all, nil
}

// report prints all rows, geometric means by kind, and the rows that have become slower.
func report(out io.Writer, o options, all []verdict) (worse bool) {
	loop := "inputs written before and results read after each call"
	if o.tight {
		loop = "calls back to back"
	}
	fmt.Fprintf(out, "%d rounds; %s; microseconds, faults milliseconds; ratio new/old with its interval (%v)\n\n",
		o.rounds, loop, o.confidence)
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "row\t\told\tnew\tratio\tinterval\t")
	kinds, means := []string{}, map[string][]float64{}
	for _, v := range all {
		mark := ""
		if v.confirmed {
			mark, worse = "slower", true
		}
		fmt.Fprintf(t, "%s\t%s\t%.4g\t%.4g\t%.3f\t%.3f to %.3f\t%s\n", v.series, v.of, v.old, v.new, v.ratio, v.lo,
			v.hi, mark)
		kind, _, _ := strings.Cut(v.series, " ")
		if means[kind] == nil {
			kinds = append(kinds, kind)
		}
		means[kind] = append(means[kind], v.ratio)
	}
	t.Flush()
	fmt.Fprintln(out, "\ngeometric means of the ratio (above 1: slower)")
	for _, k := range kinds {
		fmt.Fprintf(out, "%8.3f  %s\n", stats.Geomean(means[k]), k)
	}
	fmt.Fprintln(out)
	for _, v := range all {
		if v.confirmed {
			fmt.Fprintf(out, "slower: %s %s: %.3f (%.3f to %.3f)\n", v.series, v.of, v.ratio, v.lo, v.hi)
		}
	}
	if !worse {
		fmt.Fprintln(out, "no row is slower beyond its interval")
	}
	return worse
}
