package bench

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"pgregory.net/rapid"

	"tutti/internal/cpus"
	"tutti/kernels"
	"tutti/pg"
)

// runLocal measures with n ranks in this process and returns rank 0's rows and what every rank says
// is wrong.
func runLocal(t *testing.T, n int, s Spec) (rows []Row, skip []string, wrong []int64) {
	t.Helper()
	gs, err := pg.Local(n, pg.Config{})
	if err != nil {
		t.Fatal(err)
	}
	wrong = make([]int64, n)
	var wg sync.WaitGroup
	for i, g := range gs {
		wg.Go(func() {
			defer g.Close()
			var err error
			if wrong[i], err = Run(t.Context(), g, s, func(e Event) {
				if e.Row != nil {
					rows = append(rows, *e.Row)
				}
				if e.Skip != "" {
					skip = append(skip, e.Skip)
				}
			}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	return rows, skip, wrong
}

func quick(ops []string, dts ...kernels.DType) Spec {
	return Spec{Ops: ops, DTypes: dts, RedOps: []kernels.Op{kernels.Sum}, Min: 8, Max: 1 << 15, Factor: 61, Iters: 1,
		Rounds: 1, Check: true}
}

func TestCorrectResultsPassCheck(t *testing.T) {
	ranks := []int{1, 2, 3, 5}
	if testing.Short() {
		ranks = []int{3}
	}
	for _, n := range ranks {
		for _, registered := range []bool{false, true} {
			s := quick(Ops(), kernels.DTypes()...)
			s.RedOps, s.Root, s.Registered, s.Max = kernels.Ops(), n-1, registered, 8*61
			s.Touch = registered == (n%2 == 0)
			if n > 2 { // few types and one size for each further number of ranks
				s.Min = 8 * 61
				s.DTypes = []kernels.DType{kernels.Bool, kernels.Int16, kernels.Float32, kernels.BFloat16}
			}
			rows, skip, wrong := runLocal(t, n, s)
			if w := slices.Max(wrong); w != 0 {
				for _, r := range rows {
					if r.Wrong != 0 {
						t.Errorf("%d ranks: %+v", n, r)
					}
				}
			}
			seen := map[string]bool{}
			for _, r := range rows {
				seen[r.Op] = true
				if r.Ranks != n || r.Wrong < 0 || math.IsNaN(r.Time) || r.Time <= 0 {
					t.Errorf("row %+v", r)
				}
			}
			for _, o := range operations {
				if seen[o.name] != (n >= o.minRanks) {
					t.Errorf("%d ranks: %s measured: %v", n, o.name, seen[o.name])
				}
			}
			if !slices.Contains(skip, "allreduce of avg bool: not defined") ||
				slices.Contains(skip, "allreduce of sum bool: not defined") {
				t.Errorf("skipped: %q", skip)
			}
		}
	}
}

// TestWrongResultsAreReported spoils one byte of one rank's result, of every operation: every rank
// must learn of it.
func TestWrongResultsAreReported(t *testing.T) {
	for _, o := range operations {
		testWrongResults(t, o, false)
		testWrongResults(t, o, true)
	}
}

// testWrongResults: without touch every row's two checked calls are seen to be wrong; with it, also
// the timed ones, if anything in the result itself is.
func testWrongResults(t *testing.T, o *operation, touch bool) {
	if o.name == "barrier" {
		return
	}
	const iters, rounds = 3, 2
	types, victims := []kernels.DType{kernels.Float32, kernels.Bool, kernels.BFloat16}, []int{0, 1, 2}
	if testing.Short() {
		types, victims = types[2:], victims[1:2]
	}
	for _, dt := range types {
		for _, victim := range victims {
			for _, where := range []string{"first", "last", "before", "behind"} {
				s := quick([]string{o.name}, dt)
				s.Min, s.Max, s.Touch, s.Iters, s.Rounds = 4096, 4096, touch, iters, rounds
				spoiled := false
				s.corrupt = func(op string, rank int, output []byte) {
					if rank != victim || len(output) == 0 {
						return
					}
					spoiled = true
					p := unsafe.Pointer(unsafe.SliceData(output))
					switch where {
					case "first":
						output[0] ^= 1
					case "last":
						output[len(output)-1] ^= 1
					case "before": // a write just outside
						*(*byte)(unsafe.Add(p, -1)) ^= 1
					case "behind":
						*(*byte)(unsafe.Add(p, len(output))) ^= 1
					}
				}
				rows, _, wrong := runLocal(t, 3, s)
				sum := int64(0)
				for _, r := range rows {
					sum += r.Wrong
				}
				want := int64(0)
				if spoiled {
					want = int64(2 * len(rows)) // each row is checked twice
					if inside := where == "first" || where == "last"; touch && inside &&
						!(o.name == "reduce" && victim != s.Root) {
						want += int64(iters * rounds * len(rows))
					}
				}
				if sum != want || slices.Min(wrong) != want || slices.Max(wrong) != want {
					t.Errorf("%s of %v, touch %v, %s byte of rank %d: %d wrong in the rows, %v at the ranks; want %d",
						o.name, dt, touch, where, victim, sum, wrong, want)
				}
			}
		}
	}
}

// With Touch each call follows a write of inputs that no call had before, and is followed by a read
// of its result.
func TestTouchWritesAndReadsAroundEveryCall(t *testing.T) {
	const n, calls = 2, 5
	gs, err := pg.Local(n, pg.Config{})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for _, g := range gs {
		wg.Go(func() {
			defer g.Close()
			var did []string
			in := &instance{calls: 1}
			in.write = func() { did = append(did, fmt.Sprintf("write %d", in.first)) }
			in.call = func(context.Context) error { did = append(did, "call"); return nil }
			in.result = func() int64 { did = append(did, "read"); return 1 }
			r := &run{Spec: Spec{Touch: true}, g: g}
			if call, all, err := r.round(t.Context(), in, calls); err != nil || call <= 0 || all < call {
				t.Errorf("%v, %v, %v", call, all, err)
			}
			var want []string
			for i := range calls {
				want = append(want, fmt.Sprintf("write %d", i+1), "call", "read")
			}
			if !slices.Equal(did, want) {
				t.Errorf("%q", did)
			}
			if r.touched != calls {
				t.Errorf("%d of %d wrong elements were counted", r.touched, calls)
			}
		})
	}
	wg.Wait()
}

// What holds up a call, wherever in the calibration, does not make the rounds that count shorter.
func TestDisturbedCalibration(t *testing.T) {
	const goal, call = 5e-3, 2e-6 // seconds
	for _, touch := range []bool{false, true} {
		for _, hold := range []float64{0.7e-3, 3e-3} {
			for held := range 20 { // the round in which something does
				r := &run{Spec: Spec{Touch: touch, Rounds: 3, RoundTime: 5 * time.Millisecond}}
				var rounds []int
				best, err := r.best(func(n int) (float64, float64, error) {
					all := call * float64(n)
					if len(rounds) == held {
						all += hold
					}
					rounds = append(rounds, n)
					return float64(n), all, nil // the shortest round would be the best
				})
				if err != nil || best*call < goal/2 {
					t.Errorf("round %d takes %v s longer: the best of the rounds that count has %v calls, %v", held,
						hold, best, err)
				}
				last := rounds[len(rounds)-3:]
				if float64(slices.Min(last)) != best {
					t.Errorf("round %d takes %v s longer: rounds of %v calls, and the best has %v", held, hold, rounds,
						best)
				}
			}
		}
	}
}

// A number of calls that is asked for is kept, however short a round is.
func TestCallsThatAreAskedFor(t *testing.T) {
	r := &run{Spec: Spec{Iters: 3, Rounds: 4, RoundTime: time.Second}}
	var rounds []int
	_, err := r.best(func(n int) (float64, float64, error) {
		rounds = append(rounds, n)
		return 1, 1e-6, nil
	})
	if err != nil || !slices.Equal(rounds, []int{3, 3, 3, 3}) {
		t.Errorf("rounds of %v calls, %v", rounds, err)
	}
}

// The processors that count are those that the ranks may run on, not all of the machine: ranks that
// are bound to fewer than they are share them, and ranks with one each do not.
func TestProcessorsOfTheRanks(t *testing.T) {
	allowed, err := cpus.Allowed()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range [][2]cpus.Set{{allowed[:1], allowed[:1]}, {allowed[:1], allowed[len(allowed)-1:]}} {
		gs, err := pg.Local(2, pg.Config{})
		if err != nil {
			t.Fatal(err)
		}
		want := 1
		if c[0][0] != c[1][0] {
			want = 2
		}
		var wg sync.WaitGroup
		for i, g := range gs {
			wg.Go(func() {
				defer g.Close()
				runtime.LockOSThread() // and the thread ends with this goroutine
				if err := cpus.Bind(0, c[i]); err != nil {
					t.Error(err)
				}
				s := Spec{Ops: []string{"barrier"}, Min: 8, Max: 8, Factor: 2, Iters: 1, Rounds: 1, Touch: true}
				_, err := Run(t.Context(), g, s, func(e Event) {
					if e.Header != nil && e.Header.Cores != want {
						t.Errorf("ranks on processors %v: %d, want %d", c, e.Header.Cores, want)
					}
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	}
}

// A call that does nothing is seen, for the next call's result is another one.
func TestTouchDetectsStaleResults(t *testing.T) {
	gs, err := pg.Local(1, pg.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer gs[0].Close()
	r := &run{Spec: Spec{Touch: true, Max: 4096}, g: gs[0]}
	if err := r.allocate(); err != nil {
		t.Fatal(err)
	}
	for _, o := range operations {
		if o.name == "barrier" || o.minRanks > 1 || !o.out { // in place, one rank's input is its result
			continue
		}
		rx := newReduction(kernels.Sum, kernels.Float32, 1)
		in := newInstance(gs[0], o, kernels.Float32, kernels.Sum, &rx, r.mem, 4096, 0, false)
		in.fill()
		if err := in.call(t.Context()); err != nil || in.wrong() != 0 {
			t.Fatalf("%s: %v, or a wrong result", o.name, err)
		}
		in.call = func(context.Context) error { return nil }
		r.touched = 0
		if _, _, err := r.round(t.Context(), in, 1); err != nil || r.touched == 0 {
			t.Errorf("%s: %v, %d elements are wrong", o.name, err, r.touched)
		}
	}
}

// TestWrongReductionsDiffer: the results of wrong reductions differ from the right one, whichever
// rank is left out, doubled or taken for another.
func TestWrongReductionsDiffer(t *testing.T) {
	for _, n := range []int{2, 3, 4, 8} {
		for _, op := range kernels.Ops() {
			for _, dt := range kernels.DTypes() {
				if !kernels.Supported(op, dt) {
					continue
				}
				r := newReduction(op, dt, n)
				for a := range n {
					if got := r.result.wrong(r.inputs[a], 0, dt.Size()); got == 0 {
						t.Errorf("%v of %v, %d ranks: the result is rank %d's input", op, dt, n, a)
					}
					for b := range a {
						if string(r.inputs[a]) == string(r.inputs[b]) {
							t.Errorf("%v of %v, %d ranks: ranks %d and %d have the same input", op, dt, n, a, b)
						}
					}
				}
				if r.result.wrong(r.result, 0, dt.Size()) != 0 {
					t.Error("a table differs from itself")
				}
			}
		}
	}
}

// TestReductionAgainstKernels compares the expected results with the library's kernels, written by
// others from the same definition.
func TestReductionAgainstKernels(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 40).Draw(t, "ranks")
		op := rapid.SampledFrom(kernels.Ops()).Draw(t, "op")
		dt := rapid.SampledFrom(kernels.DTypes()).Draw(t, "dtype")
		if !kernels.Supported(op, dt) {
			return
		}
		r := newReduction(op, dt, n)
		srcs := make([][]byte, n)
		for i := range srcs {
			srcs[i] = r.inputs[i]
		}
		got := make([]byte, len(r.result))
		if err := kernels.Reduce(op, dt, got, srcs...); err != nil {
			t.Fatal(err)
		}
		if w := r.result.wrong(got, 0, dt.Size()); w != 0 {
			t.Fatalf("%v of %v, %d ranks: %d elements differ", op, dt, n, w)
		}
	})
}

func TestTableRepeats(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		dt := rapid.SampledFrom(kernels.DTypes()).Draw(t, "dtype")
		size := dt.Size()
		table := bitsTable(dt, rapid.IntRange(0, 9).Draw(t, "from"), rapid.IntRange(0, 9).Draw(t, "part"))
		first, count := rapid.IntRange(0, 20000).Draw(t, "first"), rapid.IntRange(1, 10000).Draw(t, "count")
		mem := make([]byte, count*size)
		table.fill(mem, first, size)
		for _, i := range []int{0, count / 2, count - 1} {
			k := (first + i) % period
			if string(mem[i*size:(i+1)*size]) != string(table[k*size:(k+1)*size]) {
				t.Fatalf("element %d", i)
			}
		}
		if w := table.wrong(mem, first, size); w != 0 {
			t.Fatalf("%d wrong", w)
		}
		mem[rapid.IntRange(0, len(mem)-1).Draw(t, "at")] ^= 1
		if w := table.wrong(mem, first, size); w != 1 {
			t.Fatalf("%d wrong after one change", w)
		}
	})
}

func TestEncode(t *testing.T) {
	for _, dt := range kernels.DTypes() {
		if dt.Class() != kernels.Float {
			continue
		}
		f := dt.Format()
		limit := min(16, math.Ldexp(1, 1<<(f.Exponent-1)-1))
		for v := -limit; v <= limit; v++ {
			if math.Abs(v) >= float64(int(2)<<f.Fraction) && int(math.Abs(v))%4 != 0 {
				continue
			}
			got := encode(f, v)
			back := math.Float64frombits(got)
			if dt != kernels.Float64 {
				var wide float32
				kernels.Widen(dt, unsafe.Pointer(&wide), unsafe.Pointer(&got), 1)
				back = float64(wide)
			}
			if back != v {
				t.Errorf("%v: %v becomes %#x, which is %v", dt, v, got, back)
			}
		}
	}
	defer func() {
		if recover() == nil {
			t.Error("17 is no e5m2")
		}
	}()
	encode(kernels.Float8E5M2.Format(), 17)
}

func TestBusBandwidth(t *testing.T) {
	// From nccl-tests' PERFORMANCE.md.
	for op, want := range map[string]float64{"allreduce": 1.5, "reducescatter": .75, "allgather": .75, "alltoall": .75,
		"broadcast": 1, "reduce": 1, "gather": .75, "scatter": .75, "sendrecv": 1, "put": 1} {
		if got := find(op).factor(4); got != want {
			t.Errorf("%s between 4 ranks: factor %v, want %v", op, got, want)
		}
	}
}

// What leaves nothing to measure is known before ranks are started.
func TestNothingToMeasure(t *testing.T) {
	put := Spec{Ops: []string{"put", "allreduce"}, DTypes: []kernels.DType{kernels.Bool},
		RedOps: []kernels.Op{kernels.Avg}}
	if err := put.Measurable(1); err == nil || err.Error() !=
		"nothing to measure: put: needs 2 ranks; allreduce of avg bool: not defined" {
		t.Errorf("one rank: %v", err)
	}
	if err := put.Measurable(2); err != nil {
		t.Errorf("two ranks: %v", err)
	}
}

func TestPrinter(t *testing.T) {
	show := func(p *Printer, events ...Event) string {
		var b strings.Builder
		p.Out = &b
		for _, e := range events {
			p.Show(e)
		}
		p.Close()
		return b.String()
	}
	row := func(inPlace bool, wrong int64) Event {
		return Event{Row: &Row{Op: "allreduce", DType: "float32", RedOp: "sum", Root: -1, Ranks: 2, Count: 16,
			Bytes: 64, Time: 12.3456, AlgBW: 1, BusBW: 2, InPlace: inPlace, Wrong: wrong}}
	}
	table := show(&Printer{}, Event{Header: &Header{Ranks: 2, Rows: 1}}, Event{Skip: "x: not defined"}, row(false, 0),
		row(true, 3))
	for _, want := range []string{"# skipped: x: not defined\n",
		"        64          16     float32     sum   -1       12.35    1.00    2.00      0       12.35    1.00  " +
			"  2.00      3\n",
		"# average bus bandwidth  2.000 GB/s\n", "# wrong elements         3\n"} {
		if !strings.Contains(table, want) {
			t.Errorf("table lacks %q:\n%s", want, table)
		}
	}
	if p := (&Printer{}); !strings.Contains(show(p, row(false, -1), row(true, -1)), "not checked") || p.Wrong != 0 {
		t.Error("unchecked results are shown as checked")
	}
	var notes strings.Builder
	js := show(&Printer{JSON: true, Notes: &notes}, Event{Header: &Header{}}, Event{Skip: "x: not defined"},
		row(false, 0), Event{Next: "y"}, row(true, 1))
	if got := notes.String(); got != "skipped: x: not defined\n" {
		t.Errorf("beside JSON: %q", got)
	}
	if n := strings.Count(js, "\n"); n != 2 || !strings.Contains(js,
		`"in_place":true,"time_us":12.3456,"algbw_gbs":1,"busbw_gbs":2,"wrong":1}`) {
		t.Errorf("JSON: %s", js)
	}
	widths := map[int]bool{}
	for line := range strings.Lines(table) {
		if !strings.HasPrefix(line, "#") {
			widths[len(line)] = true
		}
	}
	if len(widths) != 1 {
		t.Errorf("lines of widths %v", fmt.Sprint(widths))
	}
}
