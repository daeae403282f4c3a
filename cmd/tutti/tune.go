package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"tutti/bootstrap"
	"tutti/cmd/tutti/internal/bench"
	"tutti/cmd/tutti/internal/launch"
	"tutti/cmd/tutti/internal/term"
	"tutti/collectives"
	"tutti/internal/tuning"
	"tutti/p2p/registry"
	"tutti/pg"
)

type tuneFlags struct {
	n              int
	transport, op  string
	min, max, out  string
	factor, rounds int
	cores          int
	time           time.Duration
	emit, asJSON   bool
}

// maxTuned is the most ranks on one machine: with more, plans of all algorithms at all sizes take
// too long.
const maxTuned = 64

// tunedRanks is how many ranks are tuned for by default on a machine with some processors.
func tunedRanks(cores int) int { return min(max(2, cores), maxTuned) }

// tuneEvent is a message of rank 0 to the process that started it: a step, or at the end the
// result.
type tuneEvent struct {
	bench.TuneEvent
	File *tuning.File `json:"file,omitempty"`
}

func newTune() *cobra.Command {
	var f tuneFlags
	c := &cobra.Command{
		Use:   "tune [-n N] [--transport T] [--op OP] [flags]",
		Short: "Measure the fastest algorithms on this machine",
		Long: `Measure every algorithm of every collective over sizes, in plain and in registered memory, and write
a table of the fastest ones. Groups of as many ranks, all on one machine like this one, use them, if
the job has as many ranks on each machine, with the same links, and shares processors likewise.

Algorithms take turns, medians count, and one takes the place of the built-in choice only if it is
clearly faster. Every result is checked. A machine that does other work meanwhile gives a bad table.

Operations: ` + joined(collectives.Kinds()),
		Example: `  tutti tune                       as many ranks as there are cores, shared memory
  tutti tune -n 8 --op allreduce,allgather
  tutti tune -n 4 -o node.json && TUTTI_TUNE=node.json tutti run -n 4 ./train`,
		DisableFlagsInUseLine: true, Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.run(cmd) },
	}
	fl := c.Flags()
	fl.IntVarP(&f.n, "ranks", "n", tunedRanks(runtime.NumCPU()), "ranks to start here, at most 64")
	fl.StringVar(&f.transport, "transport", registry.Best(registry.Kinds(), registry.Options{}).Name, registry.Names())
	fl.StringVar(&f.op, "op", "all", "operations, separated by commas, or all; others keep the built-in choices")
	fl.StringVar(&f.min, "min", "64", "smallest `size` in bytes; K, M and G are powers of 1024")
	fl.StringVar(&f.max, "max", "16M", "largest `size`; its fastest algorithm is used for all larger ones, "+
		"over shared memory only if it is at least 32K, of an allreduce 128K")
	fl.IntVar(&f.factor, "factor", 4, "from one size to the next; between two with different results it is "+
		"looked closer")
	fl.IntVar(&f.rounds, "rounds", 5, "rounds, of which the median counts")
	fl.DurationVar(&f.time, "time", 90*time.Second, "approximate duration; when one and a half of it have passed, "+
		"the operations that are left are not measured and keep the built-in choices")
	fl.StringVarP(&f.out, "output", "o", "",
		"`file` to write (default: TUTTI_TUNE, else tutti/tune.json in $XDG_CONFIG_HOME or ~/.config)")
	fl.BoolVar(&f.asJSON, "json", false, "print every measurement as a JSON object")
	fl.BoolVar(&f.emit, "emit", false, "")
	fl.MarkHidden("emit") // a rank's output, for the process that started it
	fl.IntVar(&f.cores, "cores", runtime.NumCPU(), "")
	fl.MarkHidden("cores") // of that process: a rank is bound to some of them
	return c
}

func (f *tuneFlags) spec(cmd *cobra.Command) (s bench.TuneSpec, err error) {
	if s.Kinds, err = choose(cmd, "op", f.op, collectives.Kinds()); err != nil {
		return s, err
	}
	slices.Sort(s.Kinds)
	s.Kinds = slices.Compact(s.Kinds)
	if s.Min, err = parseSize(f.min); err != nil {
		return s, usagef(cmd, "--min %v", err)
	}
	if s.Max, err = parseSize(f.max); err != nil {
		return s, usagef(cmd, "--max %v", err)
	}
	kinds, kerr := registry.Find(f.transport, registry.Options{})
	switch {
	case f.n < 2 || f.n > maxTuned:
		return s, usagef(cmd, "-n %d: expected 2 to %d ranks", f.n, maxTuned)
	case kerr != nil || len(kinds) != 1 || f.transport == registry.Auto:
		return s, usagef(cmd, "--transport %s: expected %s", f.transport, registry.Names())
	case s.Max < s.Min:
		return s, usagef(cmd, "--max %s is less than --min %s", f.max, f.min)
	case s.Max > 1<<30:
		return s, usagef(cmd, "--max %s: expected at most 1G", f.max)
	case f.factor < 2:
		return s, usagef(cmd, "--factor %d: expected 2 or more", f.factor)
	case f.rounds < 1:
		return s, usagef(cmd, "--rounds %d: expected 1 or more", f.rounds)
	case f.time <= 0:
		return s, usagef(cmd, "--time %v: expected more than 0", f.time)
	}
	s.Factor, s.Rounds, s.Time, s.Memory, s.Cores = f.factor, f.rounds, f.time, kinds[0].Maps, f.cores
	return s, nil
}

func (f *tuneFlags) run(cmd *cobra.Command) error {
	s, err := f.spec(cmd)
	if err != nil {
		return err
	}
	l, err := bootstrap.FromEnv(os.Getenv)
	if err != nil {
		return err
	}
	if f.emit {
		return f.rank(cmd.Context(), s, l)
	}
	if l.Size > 1 {
		return usagef(cmd, "this process is one of %d ranks that a launcher started (%s), but tutti tune starts "+
			"its own", l.Size, l.Source)
	}
	path := f.out
	if path == "" {
		if path = l.Tuning; path == tuning.Off {
			return usagef(cmd, "TUTTI_TUNE is off: say where to write with -o FILE")
		}
	}
	if path == "" {
		if path = tuning.DefaultPath(); path == "" {
			return usagef(cmd, "HOME and XDG_CONFIG_HOME name no directory by an absolute path: say where to "+
				"write with -o FILE")
		}
	}
	if err := tuning.CheckWritable(path); err != nil {
		return fmt.Errorf("cannot write the table: %w", err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	o := launch.Options{N: f.n, Stdout: w, Stderr: os.Stderr,
		Args:     rankArgs("--emit", fmt.Sprint("--cores=", f.cores)),
		NoPrefix: true, Bind: bound(true, f.n), Grace: time.Second,
		Env: []string{"TUTTI_TRANSPORT=" + f.transport}}
	if o.Program, err = os.Executable(); err != nil {
		return err
	}
	v := tuneView{out: stdout, json: f.asJSON}
	if launch.Terminal(os.Stderr) {
		v.progress = os.Stderr
	}
	done := make(chan error, 1)
	go func() { done <- v.show(r) }()
	began := time.Now()
	code, err := launch.Run(cmd.Context(), o)
	w.Close()
	serr := <-done
	r.Close()
	if err != nil || code != 0 {
		return launched(code, err)
	}
	if serr != nil {
		return serr
	}
	if v.file == nil {
		return fmt.Errorf("rank 0 ended without a result")
	}
	if err := v.file.Save(path); err != nil {
		return fmt.Errorf("writing the table: %w", err)
	}
	notes := io.Writer(stdout)
	if f.asJSON {
		notes = os.Stderr
	} else {
		v.summary(&s)
	}
	if v.leftOut != nil {
		fmt.Fprintf(notes, "# not measured, --time is over: %s; they keep the built-in choices\n", joined(v.leftOut))
	}
	if f.asJSON {
		return nil
	}
	if abs, err := filepath.Abs(path); err == nil {
		path = abs
	}
	m := v.file.Machine
	fmt.Fprintf(stdout, "# %d s; wrote %s\n# groups of %d ranks, all on one machine like this one (%d cores, %s), "+
		"linked by %s, use it", int(time.Since(began).Seconds()+0.5), path, m.LocalRanks, m.Cores, m.CPU, m.Transport)
	if path != tuning.DefaultPath() {
		fmt.Fprintf(stdout, " with TUTTI_TUNE=%s", path)
	}
	fmt.Fprintln(stdout)
	return nil
}

// rank runs a rank of the measurement.
func (f *tuneFlags) rank(ctx context.Context, s bench.TuneSpec, l bootstrap.Launch) error {
	g, err := pg.Join(ctx, pg.Config{Transport: f.transport, Tuning: tuning.Off, Algorithm: "auto",
		SingleCopy: "off"})
	if err != nil {
		return &launch.Error{Code: codeFailed, Err: err}
	}
	enc := json.NewEncoder(stdout)
	rules, err := bench.Tune(ctx, g, s, func(e bench.TuneEvent) { enc.Encode(tuneEvent{TuneEvent: e}) })
	if cerr := g.Close(); err == nil {
		err = cerr
	}
	if err == nil && g.Rank() == 0 {
		var table *collectives.Table
		if table, err = collectives.NewMeasuredTable(rules, g.Size() > s.Cores); err == nil {
			err = enc.Encode(tuneEvent{File: tuning.New(tuning.Here(g.Size(), f.transport), table)})
		}
	}
	if err != nil {
		return &launch.Error{Code: codeFailed, Err: fmt.Errorf("rank %d: %w", l.Rank, err)}
	}
	return nil
}

// tuneView shows rank 0's messages, and keeps the result.
type tuneView struct {
	out      io.Writer
	progress *os.File // a terminal; nil: none
	json     bool
	points   []*bench.TunePoint
	leftOut  []collectives.Kind
	file     *tuning.File
}

func (v *tuneView) show(r io.Reader) error {
	in := bufio.NewScanner(r)
	in.Buffer(nil, 4<<20)
	for in.Scan() {
		var e tuneEvent
		if err := json.Unmarshal(in.Bytes(), &e); err != nil {
			io.Copy(io.Discard, r)
			return fmt.Errorf("rank 0 printed %q: %w", in.Text(), err)
		}
		switch {
		case e.File != nil:
			v.file = e.File
		case e.LeftOut != nil:
			v.leftOut = e.LeftOut
		case e.Point != nil:
			if v.points = append(v.points, e.Point); v.json {
				if b, err := json.Marshal(e.Point); err == nil {
					fmt.Fprintf(v.out, "%s\n", b)
				}
			}
		case v.progress != nil:
			term.Progress(v.progress, fmt.Sprintf("%3d%%  %s", e.Percent, e.Next))
		}
	}
	if v.progress != nil {
		term.Progress(v.progress, "")
	}
	return in.Err()
}

// summary prints a line for each collective and kind of memory: the best algorithms by size, and
// the gain over the built-in choices.
func (v *tuneView) summary(s *bench.TuneSpec) {
	fmt.Fprintf(v.out, "%-14s %-11s %6s  %s\n", "# collective", "memory", "gain",
		"algorithms, each up to the size after it")
	for _, k := range s.Kinds {
		for _, registered := range []bool{false, true} {
			gain, n := 0.0, 0
			for _, p := range v.points {
				if p.Kind != k || p.Registered != registered {
					continue
				}
				algo := s.Choose(v.file.Table, k, v.file.Machine.LocalRanks, p.Bytes, registered)
				if us := p.All[algo]; us > 0 && p.DefaultTime > 0 {
					gain += math.Log(p.DefaultTime / us)
					n++
				}
			}
			if n == 0 {
				continue
			}
			memory, own := "plain", ""
			if registered {
				memory = "registered"
			}
			for _, r := range v.file.Table.Rules(k) {
				if r.MinRanks == v.file.Machine.LocalRanks && r.MaxRanks == r.MinRanks &&
					registered == (r.When == collectives.IfMapped) {
					if own += " " + r.Algo.String(); r.MaxBytes > 0 {
						own += fmt.Sprintf(" %s", sizeText(r.MaxBytes))
					}
				}
			}
			if own == "" {
				own = " as in plain memory"
			}
			fmt.Fprintf(v.out, "%-14v %-11s %5.2fx %s\n", k, memory, math.Exp(gain/float64(n)), own)
		}
	}
}

func sizeText(b int) string {
	switch {
	case b >= 10<<20:
		return fmt.Sprintf("%dM", b>>20)
	case b >= 10<<10:
		return fmt.Sprintf("%dK", b>>10)
	}
	return fmt.Sprint(b)
}
