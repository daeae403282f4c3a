package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"tutti/bootstrap"
	"tutti/cmd/tutti/internal/bench"
	"tutti/cmd/tutti/internal/launch"
	"tutti/kernels"
	"tutti/p2p/registry"
	"tutti/pg"
)

// Exit codes of a bench rank besides 0: wrong results, and no results.
const (
	codeWrong  = 1
	codeFailed = 3
)

type benchFlags struct {
	bind                       bool
	n                          int
	op, dtype, redop, min, max string
	factor, root               int
	iters, warmup, rounds      int
	transport                  string
	registered, check, noCheck bool
	touch                      bool
	queue                      int
	asJSON, emit, faulty       bool
	roundTime, timeout         time.Duration
}

func newBench() *cobra.Command {
	var f benchFlags
	c := &cobra.Command{
		Use:   "bench [-n N] [--op OP] [--min 64 --max 64M] [flags]",
		Short: "Measure collectives, and check their results",
		Long: `Measure collectives between ranks on this machine, or between the ranks of the job that a launcher
made this process part of.

Every result is compared with one computed by plain loops, on every rank and for every size. The
time is the slowest rank's, a call, in the best round; bandwidths are those of nccl-tests. Calls follow
each other at once, as in nccl-tests, so that part of the data stays in the core that wrote it last;
with --touch every rank writes its inputs before each call and reads its result after it, as programs
do. The exit code is 1 if a result is wrong, and 3 if a rank fails.

--op p2p measures instead what package endpoint does, between two processes here: messages, reads,
writes and batches of reads, beside the same bytes over a plain TCP connection of Go's package net.
The contestants take turns, and medians over the rounds are compared. With --transport rdma reads
and writes of 4 KiB or more go from memory to memory by an RDMA device.

Operations: ` + strings.Join(bench.Ops(), " ") + `
Types:      ` + joined(kernels.DTypes()) + `
Reductions: ` + joined(kernels.Ops()),
		Example: `  tutti bench                                  allreduce of float32 between 2 ranks
  tutti bench -n 4 --op all --registered       every operation, on registered memory
  tutti bench --op allreduce --dtype all --redop all --max 1M
  tutti bench --op p2p                         endpoints beside plain TCP connections
  tutti bench --faults                         kill -9, and the recovery of the others
  tutti bench --json > results.jsonl           one object a row`,
		DisableFlagsInUseLine: true, Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case f.faulty && f.emit:
				return faultRank(cmd.Context())
			case f.faulty:
				return f.faults(cmd)
			case f.op == p2pOp && f.emit:
				return f.p2pOther(cmd)
			case f.op == p2pOp:
				return f.p2p(cmd)
			}
			return f.run(cmd)
		},
	}
	fl := c.Flags()
	fl.IntVarP(&f.n, "ranks", "n", 2, "ranks to start here; without it, --faults takes 2, 4 and 8")
	fl.StringVar(&f.op, "op", "allreduce", "operations, separated by commas, or all; or p2p alone")
	fl.StringVar(&f.min, "min", "64", "smallest `size` in bytes; K, M and G are powers of 1024")
	fl.StringVar(&f.max, "max", "64M", "largest `size`")
	fl.IntVar(&f.factor, "factor", 8, "from one size to the next")
	fl.StringVar(&f.dtype, "dtype", "float32", "element types, separated by commas, or all")
	fl.StringVar(&f.redop, "redop", "sum", "reductions, separated by commas, or all")
	fl.IntVar(&f.root, "root", 0, "root rank, for the operations that have one")
	fl.IntVar(&f.iters, "iters", 0, "calls a round (default as many as fill --round-time)")
	fl.IntVar(&f.warmup, "warmup", 5, "calls before the first round")
	fl.IntVar(&f.rounds, "rounds", 5, "rounds, of which the best counts; of p2p, the median; without it, "+
		"--faults takes 20")
	fl.DurationVar(&f.roundTime, "round-time", 20*time.Millisecond, "duration of a round")
	fl.StringVar(&f.transport, "transport", "", "auto, "+registry.Names()+", or "+registry.InProcess+
		" (ranks are goroutines of one process) (default: TUTTI_TRANSPORT, else auto; of p2p, auto)")
	fl.BoolVar(&f.registered, "registered", false, "use memory that is registered with the transports")
	fl.BoolVar(&f.touch, "touch", false, "as programs use it: each rank writes its inputs before every call and "+
		"reads its result after it, off the clock; the median call counts")
	fl.IntVar(&f.queue, "queue", 0,
		"start `N` operations at a time and then wait for each, instead of blocking calls; 1 is what asynchrony "+
			"costs; p2p: calls under way in the rows with several (default 16)")
	fl.BoolVar(&f.check, "check", true, "check the results")
	fl.BoolVar(&f.noCheck, "no-check", false, "do not check the results")
	fl.BoolVar(&f.bind, "bind", true, "bind each rank to a core if there are enough, as mpirun does, else to its "+
		"share of them")
	fl.DurationVar(&f.timeout, "timeout", 0, "bound of every operation (default: TUTTI_TIMEOUT, else 5m)")
	fl.BoolVar(&f.asJSON, "json", false, "print one JSON object a row, and what is skipped on standard error")
	fl.BoolVar(&f.faulty, "faults", false, "measure instead how long ranks take to continue when one is killed, and "+
		"to take its replacement in (-n, --rounds, --transport, --json)")
	fl.BoolVar(&f.emit, "emit", false, "")
	fl.MarkHidden("emit") // a rank's output, for the process that started it
	return c
}

func joined[T fmt.Stringer](all []T) string {
	var names []string
	for _, x := range all {
		names = append(names, x.String())
	}
	return strings.Join(names, " ")
}

// choose reads a list of names, or "all".
func choose[T fmt.Stringer](cmd *cobra.Command, flag, text string, all []T) ([]T, error) {
	if text == "all" {
		return all, nil
	}
	var out []T
next:
	for name := range strings.SplitSeq(text, ",") {
		for _, x := range all {
			if x.String() == name {
				out = append(out, x)
				continue next
			}
		}
		also := ""
		if flag == "op" && cmd.Name() == "bench" {
			also = ", or " + p2pOp + " alone"
		}
		return nil, usagef(cmd, "--%s %s: expected all, or some of %s%s", flag, name,
			strings.ReplaceAll(joined(all), " ", ","), also)
	}
	return out, nil
}

type named string

func (n named) String() string { return string(n) }

// parseSize reads 64, 64K, 64KiB, 1M, 2G.
func parseSize(s string) (int, error) {
	digits := strings.TrimRight(s, "KMGiBkmgb")
	shift, ok := map[string]int{"": 0, "b": 0, "k": 10, "kib": 10, "kb": 10, "m": 20, "mib": 20, "mb": 20, "g": 30,
		"gib": 30, "gb": 30}[strings.ToLower(s[len(digits):])]
	n, err := strconv.ParseUint(digits, 10, 40)
	if err != nil || !ok || n == 0 || n > 1<<40>>shift {
		return 0, fmt.Errorf("%q: expected a size such as 64, 64K, 1M or 2G", s)
	}
	return int(n) << shift, nil
}

func (f *benchFlags) spec(cmd *cobra.Command) (s bench.Spec, err error) {
	var ops []named
	for _, o := range bench.Ops() {
		ops = append(ops, named(o))
	}
	if ops, err = choose(cmd, "op", f.op, ops); err != nil {
		return s, err
	}
	for _, o := range ops {
		s.Ops = append(s.Ops, string(o))
	}
	if s.DTypes, err = choose(cmd, "dtype", f.dtype, kernels.DTypes()); err != nil {
		return s, err
	}
	if s.RedOps, err = choose(cmd, "redop", f.redop, kernels.Ops()); err != nil {
		return s, err
	}
	if s.Min, s.Max, err = f.sizes(cmd); err != nil {
		return s, err
	}
	if slices.ContainsFunc(s.Ops, func(op string) bool { return op != "barrier" }) {
		for _, t := range s.DTypes {
			if s.Max < t.Size() {
				return s, usagef(cmd, "--max %s is less than one element of %s, %d bytes", f.max, t, t.Size())
			}
		}
	}
	switch {
	case f.queue*s.Max > 1<<30:
		return s, usagef(cmd, "--queue %d operations of --max %s: expected no more than 1G in all", f.queue, f.max)
	case f.transport != "" && f.transport != registry.InProcess && !transports(f.transport):
		return s, usagef(cmd, "--transport %s: expected auto, %s, or %s", f.transport, registry.Names(),
			registry.InProcess)
	case f.n < 1 || f.n > 1<<12:
		return s, usagef(cmd, "-n %d: expected 1 to %d ranks", f.n, 1<<12)
	}
	s.Factor, s.Root, s.Iters, s.Warmup, s.Rounds, s.RoundTime = f.factor, f.root, f.iters, f.warmup, f.rounds,
		f.roundTime
	s.Registered, s.Check, s.Touch, s.Queue = f.registered, f.check && !f.noCheck, f.touch, f.queue
	return s, nil
}

// sizes returns the smallest and the largest size, and checks the flags that any measurement has.
func (f *benchFlags) sizes(cmd *cobra.Command) (smallest, largest int, err error) {
	if smallest, err = parseSize(f.min); err != nil {
		return 0, 0, usagef(cmd, "--min %v", err)
	}
	if largest, err = parseSize(f.max); err != nil {
		return 0, 0, usagef(cmd, "--max %v", err)
	}
	switch {
	case largest < smallest:
		return 0, 0, usagef(cmd, "--max %s is less than --min %s", f.max, f.min)
	case f.factor < 2:
		return 0, 0, usagef(cmd, "--factor %d: expected 2 or more", f.factor)
	case f.iters < 0 || f.warmup < 0 || f.rounds < 1:
		return 0, 0, usagef(cmd, "--iters and --warmup are 0 or more, --rounds 1 or more")
	case f.queue < 0 || f.queue > 1024:
		return 0, 0, usagef(cmd, "--queue %d: expected 0 to 1024 operations", f.queue)
	case f.roundTime <= 0:
		return 0, 0, usagef(cmd, "--round-time %v: expected more than 0", f.roundTime)
	}
	return smallest, largest, nil
}

func (f *benchFlags) run(cmd *cobra.Command) error {
	s, err := f.spec(cmd)
	if err != nil {
		return err
	}
	check := func(n int) error {
		if f.root < 0 || f.root >= n {
			return usagef(cmd, "--root %d: expected 0..%d", f.root, n-1)
		}
		if err := s.Measurable(n); err != nil {
			return usagef(cmd, "%v", err)
		}
		return nil
	}
	l, err := bootstrap.FromEnv(os.Getenv)
	if err != nil {
		return err
	}
	s.Transport = cmp.Or(f.transport, l.Transport, registry.Auto)
	if l.Size > 1 || f.emit { // a single rank, like an interactive Slurm step, is no job to take part in
		if cmd.Flags().Changed("ranks") && f.n != l.Size && !f.emit {
			return usagef(cmd, "-n %d, but this process is one of the %d ranks that a launcher started (%s)", f.n,
				l.Size, l.Source)
		}
		if f.transport == registry.InProcess {
			return usagef(cmd, "--transport inproc is for ranks of one process, but this is a rank that a "+
				"launcher started (%s)", l.Source)
		}
		if err := check(l.Size); err != nil {
			return err
		}
		return f.rank(cmd.Context(), s, l.Rank)
	}
	if err := check(f.n); err != nil {
		return err
	}
	p := f.printer()
	if launch.Terminal(os.Stderr) {
		p.Progress = os.Stderr
	}
	if f.transport == registry.InProcess {
		return f.inProcess(cmd.Context(), s, p, cmp.Or(f.timeout, l.Timeout))
	}
	return f.processes(cmd.Context(), p)
}

func (f *benchFlags) printer() *bench.Printer {
	return &bench.Printer{Out: stdout, Notes: os.Stderr, JSON: f.asJSON, Colour: launch.Colour(os.Stdout)}
}

// bound returns how n ranks that are measured are bound, if they are: like mpirun's, to a core each
// if there are enough.
func bound(bind bool, n int) launch.Binding {
	switch {
	case !bind:
		return launch.BindNone
	case n <= runtime.NumCPU():
		return launch.BindSingle
	}
	return launch.BindShare
}

// rankArgs returns this process's arguments with flags added. They follow the command's name,
// because what follows -- are no flags.
func rankArgs(flags ...string) []string {
	return slices.Concat(os.Args[1:2], flags, os.Args[2:])
}

// processes starts the ranks, which run this command again, and prints the reports of rank 0.
func (f *benchFlags) processes(ctx context.Context, p *bench.Printer) error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	o := launch.Options{Program: "/proc/self/exe", Args: rankArgs("--emit"), N: f.n, Stdout: w, Stderr: os.Stderr,
		NoPrefix: true, Bind: bound(f.bind, f.n), Grace: time.Second, QuietCode: codeWrong}
	if o.Program, err = os.Executable(); err != nil {
		return err
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	done := make(chan error, 1)
	go func() {
		err := show(r, p)
		if err != nil {
			stop(err) // ends the ranks
			io.Copy(io.Discard, r)
		}
		done <- err
	}()
	code, err := launch.Run(ctx, o)
	w.Close()
	serr := <-done
	r.Close()
	p.Close()
	if err == nil {
		err = serr
	}
	return launched(code, err)
}

// show prints the events that a rank emits.
func show(r io.Reader, p *bench.Printer) error {
	in := bufio.NewScanner(r)
	in.Buffer(nil, 1<<20)
	for in.Scan() {
		var e bench.Event
		if err := json.Unmarshal(in.Bytes(), &e); err != nil {
			return fmt.Errorf("rank 0 printed %q: %w", in.Text(), err)
		}
		p.Show(e)
		if err := stdout.lost(); err != nil {
			return err
		}
	}
	return in.Err()
}

// rank runs the rank of the environment. Rank 0 prints, or emits events for the process that
// started it.
func (f *benchFlags) rank(ctx context.Context, s bench.Spec, rank int) error {
	report := func(bench.Event) {}
	var p *bench.Printer
	switch {
	case rank != 0:
	case f.emit:
		enc := json.NewEncoder(os.Stdout)
		report = func(e bench.Event) { enc.Encode(e) }
	default:
		p = f.printer()
		report = p.Show
	}
	g, err := pg.Join(ctx, pg.Config{Timeout: f.timeout, Transport: f.transport})
	if err != nil {
		return &launch.Error{Code: codeFailed, Err: err}
	}
	wrong, err := bench.Run(ctx, g, s, report)
	if cerr := g.Close(); err == nil {
		err = cerr
	}
	if p != nil {
		p.Close()
	}
	switch {
	case err != nil:
		return &launch.Error{Code: codeFailed, Err: fmt.Errorf("rank %d: %w", rank, err)}
	case wrong > 0:
		return exit(codeWrong)
	}
	return nil
}

// inProcess runs all ranks in this process.
func (f *benchFlags) inProcess(ctx context.Context, s bench.Spec, p *bench.Printer, timeout time.Duration) error {
	gs, err := pg.Local(f.n, pg.Config{Timeout: timeout})
	if err != nil {
		return err
	}
	errs := make([]error, f.n)
	var wg sync.WaitGroup
	for i, g := range gs {
		wg.Go(func() {
			_, errs[i] = bench.Run(ctx, g, s, p.Show)
			if err := g.Close(); errs[i] == nil {
				errs[i] = err
			}
		})
	}
	wg.Wait()
	p.Close()
	if err := errors.Join(errs...); err != nil {
		return &launch.Error{Code: codeFailed, Err: err}
	}
	if p.Wrong > 0 {
		return exit(codeWrong)
	}
	return nil
}
