//go:build linux

// Command peers compares Tutti with Open MPI, MPICH and Gloo on this machine, and prints how much
// faster or slower it is.
//
//	apt-get install libopenmpi-dev openmpi-bin libmpich-dev mpich libgloo-dev gcc g++
//	go run ./tests/peers                                        2 and 4 ranks: half an hour on two cores
//	go run ./tests/peers --quick                                few rounds, short repetitions: does it all work?
//	go run ./tests/peers --ops allreduce --ranks 2 --transports shm --sizes 64,4K,256K,2M,16M --json out.json
//
// It needs no cgo: the peers are small programs in src/ that it compiles into .build/peers
// (mpicc.openmpi, mpicc.mpich, g++ -lgloo); Tutti is ./cmd/tutti, built once and run as `tutti
// bench … --json`. Whatever cannot be built or crashes is named, with the Debian package that is
// missing, and the rest goes on.
//
// # Method
//
// Machines are noisy, so nothing is compared across time: for each (transport, ranks, operation)
// the contestants take turns, A B C D, A B C D, …, for --rounds rounds, and medians over rounds are
// compared. Within a turn every program does the same at every size: check the result of one call,
// warm up, find how many calls fill the time budget, then repeat that --reps times; a repetition
// that takes less than half of the budget, because something has disturbed that search, does not
// count. Each call is measured as programs use it: every rank writes its input, other numbers than
// for the call before; all meet in a barrier; each takes the time, calls, takes the time; and reads
// and checks its result. If each rank has a processor, the ranks begin together, at a tick of the
// machine's clock, and a call takes as long as its slowest rank. The interval of the ticks is that
// of internal/tick, the same for all contestants of a transport: long beside the time between the
// first and the last rank that leave a barrier. If ranks share processors, a call takes from the
// first rank's beginning to the last rank's end. A repetition's time is its median call, and the
// best repetition is the turn's figure.
//
// With --tight calls follow each other at once, as in the benchmarks of the libraries: a
// repetition's time is that of its slowest rank, divided by the calls. Part of the data then never
// leaves the core that wrote it last, and one-way operations of several calls overlap.
//
// # What bytes means
//
// As in nccl-tests, the largest buffer of one rank, equal for all contestants: allreduce, reduce,
// broadcast: the vector. reduce_scatter: the whole input, of which each rank keeps 1/N. allgather:
// the whole output, to which each rank adds 1/N. alltoall: the whole input, as long as the output.
// Sizes are rounded down to a multiple of N elements where the operation divides them. allreduce
// and reduce are in place (--out-of-place: not); the others have an input and an output; broadcast
// has one buffer. put: what a rank puts to the next one's window, with a signal, when it has seen
// what the rank before has put: the time is that until the target has seen it (MPI: a put, a flush,
// a put of a flag that the target polls, a flush).
//
// # Contestants
//
//	tutti      its memory is the caller's, as the peers' is
//	tutti-reg  bench --registered: memory that the group allocated (shm only)
//	openmpi    shm: btl vader; tcp: btl tcp over loopback. Cores are bound unless there are more ranks
//	           than cores: then it yields when idle.
//	mpich      Debian's is built on UCX: shm is its default; tcp is UCX_TLS=tcp with local shared
//	           memory turned off.
//	openmpi5   Open MPI 5 and MPICH 5 from PyPI, in the virtual environments of --mpi (make
//	mpich5     deps-peers), run likewise, MPICH over libfabric's tcp. They are built for all machines:
//	           rows from 64 KiB on shared memory count only if an alltoall of 1 MiB is seen to call
//	           process_vm_readv or process_vm_writev.
//	gloo       tcp only, for it has no shared memory; the fastest of its algorithms counts, including
//	           polling connections where cores suffice.
//	limit      no library: time in which N processes on shared memory do an allreduce's 2·S reads and
//	           2·S writes (for N = 2) with no waiting at all, by memcpy or by adding, whichever is
//	           faster: warm (the buffers of the last call again, in the same loop as the others; what
//	           "of limit" means), cross (all data last written by another core, as a real producer may
//	           leave them) and cold (out of cache).
//
// # Reading the table
//
// ratio = the best peer's median / tutti's, so above 1 Tutti is faster; reg = the same for
// tutti-reg. Beside each is the interval that holds the median of the rounds' ratios with a
// probability of 0.95, if there are at least 6 rounds. Rows are sorted by ratio, worst first;
// geometric means follow. "of limit" = tutti-reg's (else tutti's) time / limit's, 1 being perfect;
// shown from 64 KiB, since below it latency rules. The peers have no 16-bit floats: for --dtypes
// bfloat16,float16 the other side is Tutti's own float32 at the same bytes. A cell says "-" where
// nothing ran, and "fail" where the contestant crashed, was killed at its deadline or gave a wrong
// result in a round, behind the median of its other rounds; the notes say which. Shared memory with
// more ranks than cores makes MPICH spin through whole time slices and sometimes crash. broadcast
// and reduce are one-way: with --tight a library may overlap calls, and small ones then cost less
// than a trip from one rank to another.
//
// What misses a bar is listed, worst first, and the command fails unless --lenient is set. It fails
// in any case if Tutti does not build, or fails in a round. The bars: no row below 1 with its whole
// interval (without an interval: below 1) between 2 ranks from 24 KiB on, of short calls up to 512
// bytes and barriers between 2 and 4 ranks, of allreduces of up to 32 KiB among 8 and more ranks,
// over tcp, and of puts; a geometric mean of 1.2 on shared memory, 1.5 on registered memory, 1.3
// over tcp. A bar without a figure is listed as not measured.
//
// # Endpoints
//
// peers p2p compares package endpoint with a plain TCP connection of Go's package net, iperf3, UCX
// (ucx_perftest over tcp) and NIXL (over its own UCX, from Python): messages, reads, writes and
// batches of 64 reads of 4 KiB, one at a time and --depth at a time, all over loopback with one
// connection and their defaults. tutti and raw are the columns of `tutti bench --op p2p`; its
// package pair says what a call is. Buffers are written before a turn and read after it, except
// that ucx_perftest and iperf3 never look at theirs. UCX: the faster of tags and active messages,
// gets, and puts with a flush at the end; its ping-pongs count twice, for they print half of the
// round trip, and one of puts stands for an acknowledged write up to 4 KiB, because it has no
// other.
//
// What misses a bar is listed, worst first, and the command fails unless --lenient is set. The
// bars: no row slower than UCX or NIXL; from 1 MiB at least 0.95 of the bandwidth of plain TCP; one
// call of 64 bytes at a time at most 1.4 times that of plain TCP; 64 reads of 4 KiB in a batch at
// least 5 times as fast as one after another. A bar without a figure is listed as not measured.
//
// Every subprocess has a deadline (--deadline), a process group that is killed with it, and a mark
// in its environment by which what escaped the group is found; nothing is left behind.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

var allOps = []string{"allreduce", "reduce_scatter", "allgather", "alltoall", "broadcast", "reduce", "put",
	barrier}

var allPeers = []string{"openmpi", "mpich", "openmpi5", "mpich5", "gloo", "limit", "tutti", "tutti-reg"}

// options are the flags, parsed.
type options struct {
	Ops        []string      `json:"ops"`
	Sizes      []int64       `json:"sizes"`
	Ranks      []int         `json:"ranks"`
	Transports []string      `json:"transports"`
	Dtypes     []string      `json:"dtypes"`
	Peers      []string      `json:"peers"`
	Rounds     int           `json:"rounds"`
	Reps       int           `json:"reps"`
	Budget     time.Duration `json:"budget_ns"`
	Deadline   time.Duration `json:"deadline_ns"`
	OutOfPlace bool          `json:"out_of_place"`
	Tight      bool          `json:"tight"`
	lenient    bool
	jsonPath   string
	tuttiPath  string
	mpi        string // the folder of the builds of Open MPI 5 and MPICH 5
}

func parseOptions(args []string) (options, error) {
	o := options{}
	f := flag.NewFlagSet("peers", flag.ContinueOnError)
	ops := f.String("ops", "allreduce,reduce_scatter,allgather,alltoall,broadcast,barrier", "operations; also reduce "+
		"and put")
	sizes := f.String("sizes", "8,64,512,4K,24K,32K,192K,256K,1536K,2M,12M,16M", "bytes, with K, M or G")
	ranks := f.String("ranks", "2,4", "numbers of ranks")
	transports := f.String("transports", "shm,tcp", "shm and tcp")
	dtypes := f.String("dtypes", "float32", "float32, and others of Tutti alone, compared with its float32")
	peers := f.String("peers", strings.Join(allPeers, ","), "who takes part")
	quick := f.Bool("quick", false, "2 rounds of 3 repetitions of 5 ms at 64,4K,256K,2M, unless the flags for "+
		"these say otherwise")
	f.IntVar(&o.Rounds, "rounds", 7, "rounds; the median counts; with 6 and more ratios have an interval")
	f.BoolVar(&o.lenient, "lenient", false, "do not end with an error if a bar is missed")
	f.IntVar(&o.Reps, "reps", 3, "repetitions at each size in a round; the best counts")
	f.DurationVar(&o.Budget, "budget", 8*time.Millisecond, "time of one repetition")
	f.DurationVar(&o.Deadline, "deadline", 60*time.Second, "time after which a contestant's turn is ended")
	f.BoolVar(&o.OutOfPlace, "out-of-place", false, "allreduce and reduce from one buffer into another")
	f.BoolVar(&o.Tight, "tight", false, "calls follow each other at once; ranks neither write inputs before them nor "+
		"read results after them")
	f.StringVar(&o.jsonPath, "json", "", "also write everything, with each round's figures, to this file")
	f.StringVar(&o.mpi, "mpi", cached("mpi"), "folder with the virtual environments openmpi and mpich")
	f.StringVar(&o.tuttiPath, "tutti", "", "a tutti that is built already; default: build ./cmd/tutti")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	if f.NArg() > 0 {
		return o, fmt.Errorf("unexpected argument %q: everything is a flag", f.Arg(0))
	}
	if *quick {
		given := map[string]bool{}
		f.Visit(func(g *flag.Flag) { given[g.Name] = true })
		for name, v := range map[string]string{"rounds": "2", "reps": "3", "budget": "5ms", "sizes": "64,4K,256K,2M"} {
			if !given[name] {
				if err := f.Set(name, v); err != nil {
					return o, err
				}
			}
		}
	}
	choose := func(what, list string, from ...string) (picked []string, err error) {
		for _, s := range strings.Split(list, ",") {
			if !slices.Contains(from, s) {
				return nil, fmt.Errorf("--%s: %q is none of %s", what, s, strings.Join(from, ", "))
			}
			if !slices.Contains(picked, s) {
				picked = append(picked, s)
			}
		}
		return picked, nil
	}
	var errs [5]error
	o.Ops, errs[0] = choose("ops", *ops, allOps...)
	o.Transports, errs[1] = choose("transports", *transports, "shm", "tcp")
	o.Peers, errs[2] = choose("peers", *peers, allPeers...)
	o.Dtypes, errs[3] = choose("dtypes", *dtypes, "float32", "bfloat16", "float16", "float64", "int32", "int64")
	o.Sizes, errs[4] = parseSizes(*sizes)
	if err := errors.Join(errs[:]...); err != nil {
		return o, err
	}
	for _, s := range strings.Split(*ranks, ",") {
		n, err := strconv.Atoi(s)
		if err != nil || n < 2 || n > 64 {
			return o, fmt.Errorf("--ranks: %q is not a number from 2 to 64", s)
		}
		o.Ranks = append(o.Ranks, n)
	}
	if o.Rounds < 1 || o.Reps < 1 || o.Budget < time.Millisecond || o.Deadline < time.Second {
		return o, errors.New("--rounds and --reps are to be at least 1, --budget at least 1ms, --deadline at least 1s")
	}
	return o, nil
}

// cached returns the path of what make deps-peers installs in the user's cache.
func cached(name string) string {
	dir, err := os.UserCacheDir()
	if err != nil {
		dir = "."
	}
	return filepath.Join(dir, "tutti", name)
}

// parseSizes reads "64,4K,2M" as bytes, ascending and without repetitions.
func parseSizes(list string) ([]int64, error) {
	var sizes []int64
	for _, s := range strings.Split(list, ",") {
		num, shift := s, 0
		if i := strings.IndexAny(s, "KMG"); i >= 0 && i == len(s)-1 {
			num, shift = s[:i], map[byte]int{'K': 10, 'M': 20, 'G': 30}[s[i]]
		}
		n, err := strconv.ParseInt(num, 10, 32)
		if err != nil || n <= 0 || n<<shift%4 != 0 || n<<shift > 1<<32 {
			return nil, fmt.Errorf("--sizes: %q is not a multiple of 4 bytes, up to 4G, such as 64, 4K or 2M", s)
		}
		sizes = append(sizes, n<<shift)
	}
	slices.Sort(sizes)
	return slices.Compact(sizes), nil
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := run(ctx, os.Args[1:])
	switch {
	case errors.Is(err, flag.ErrHelp):
	case err != nil:
		fmt.Fprintln(os.Stderr, "peers:", err)
		stop()
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) > 0 && args[0] == "p2p" {
		o, err := parseP2P(args[1:])
		if err != nil {
			return err
		}
		return compareP2P(ctx, o)
	}
	o, err := parseOptions(args)
	if err != nil {
		return err
	}
	return compare(ctx, o)
}

// compare builds the contestants, lets them take turns and prints the tables. On cancellation what
// was measured so far is printed.
func compare(ctx context.Context, o options) error {
	work, err := newWorkshop(o)
	if err != nil {
		return err
	}
	defer work.close()
	var contestants []contestant
	var broken []error // what Tutti failed at; --lenient is for bars
	for _, name := range o.Peers {
		err := work.build(ctx, name)
		if err == nil {
			err = work.tryCopies(ctx, contestant(name))
		}
		if err != nil {
			work.note("%s does not take part: %v", name, err)
			if contestant(name).ours() {
				broken = append(broken, fmt.Errorf("%s: %w", name, err))
			}
			continue
		}
		contestants = append(contestants, contestant(name))
	}
	if len(contestants) == 0 {
		return fmt.Errorf("no peer can take part:\n%s", strings.Join(work.notes, "\n"))
	}
	if slices.Max(o.Ranks) > runtime.NumCPU() && (slices.Contains(contestants, mpich) || slices.Contains(contestants,
		mpich5)) {
		work.note("MPICH does not yield: with more ranks than the %d cores each of its calls takes scheduler "+
			"time slices", runtime.NumCPU())
	}
	res := newResults()
	failures := map[string]int{} // by heat: a peer that crashed twice or hung once is not run again
	for _, transport := range o.Transports {
		for _, ranks := range o.Ranks {
			for _, op := range o.Ops {
				for round := range o.Rounds {
					for _, c := range contestants {
						for _, dtype := range o.Dtypes {
							h := heat{c, transport, op, dtype, ranks}
							if !c.enters(h) || failures[h.String()] >= 2 || ctx.Err() != nil {
								continue
							}
							work.progress("round %d/%d  %s", round+1, o.Rounds, h)
							rows, err := work.turn(ctx, h)
							res.add(h, rows, o)
							if errors.Is(err, errEnding) {
								work.note("%s: %v", h, err)
								continue
							}
							if err != nil && ctx.Err() == nil {
								if c.ours() && failures[h.String()] == 0 {
									broken = append(broken, fmt.Errorf("%s: %w", h, err))
								}
								failures[h.String()]++
								if errors.Is(err, context.DeadlineExceeded) {
									failures[h.String()]++
								}
								res.fail(h, rows, o)
								work.note("%s, after %d rows: %v", h, len(rows), err)
							}
						}
					}
				}
			}
		}
	}
	work.progress("")
	rep := res.report(o)
	rep.Machine = machine()
	rep.Versions, rep.Notes = work.versions, work.notes
	v := rep.judge()
	rep.Missed = v.missed
	if err := errors.Join(rep.print(os.Stdout), v.print(os.Stdout)); err != nil {
		return err
	}
	if o.jsonPath != "" {
		b, err := json.MarshalIndent(rep, "", " ")
		if err != nil {
			return err
		}
		if err := os.WriteFile(o.jsonPath, append(b, '\n'), 0o644); err != nil {
			return fmt.Errorf("writing the results: %w", err)
		}
	}
	if err := context.Cause(ctx); err != nil {
		return err
	}
	if !o.lenient {
		broken = append(broken, v.err())
	}
	return errors.Join(broken...)
}

// machine describes the machine of the measurement.
func machine() string {
	model := runtime.GOARCH
	if b, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(b)) {
			if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == "model name" {
				model = strings.TrimSpace(v)
				break
			}
		}
	}
	return fmt.Sprintf("%s, %d cores", model, runtime.NumCPU())
}
