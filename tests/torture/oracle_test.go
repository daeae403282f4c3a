//go:build linux

package torture

import (
	"context"
	"errors"
	"fmt"
	"go/parser"
	"go/token"
	"go/types"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"tutti/internal/compiled"
	"tutti/pg"
	"tutti/tests/internal/rig"
)

// parts are the same way to do a step at all of n ranks.
func parts(n int, p Part) []Part { return slices.Repeat([]Part{p}, n) }

// someSteps are collectives that nothing disturbs.
func someSteps(n int) *Program {
	p := &Program{Seed: 7, Touch: -1, Steps: []Step{
		{Op: AllReduce, DType: pg.Float32, Red: pg.Sum, Count: 100, Ranks: parts(n, Part{How: AtOnce})},
		{Op: AllGather, DType: pg.Int16, Red: pg.Sum, Count: 33, Ranks: parts(n, Part{})},
		{Op: AllToAll, DType: pg.Uint8, Red: pg.Sum, Count: 65, Ranks: parts(n, Part{Dst: MemGuard, Src: MemGuard})},
		{Op: Reduce, DType: pg.Int32, Red: pg.Max, Root: 1, Count: 10, Ranks: parts(n, Part{})},
		{Op: AllGather, DType: pg.Int32, Red: pg.Sum, Count: 500, Ranks: parts(n, Part{Dst: MemDevice})},
		{Op: AllReduce, DType: pg.Float32, Red: pg.Sum, Count: 1001,
			Ranks: parts(n, Part{Dst: MemDevice, InPlace: true, How: AtOnce})},
		{Op: Message, DType: pg.Uint8, Count: 30_000, Ranks: parts(n, Part{Dst: MemDevice, Src: MemDevice})},
		{Op: Barrier, DType: pg.Uint8},
		{Op: ReduceScatter, DType: pg.BFloat16, Red: pg.Sum, Count: 9,
			Ranks: parts(n, Part{Dst: MemAlloc, Src: MemOffset})},
	}}
	p.normalize(Job{Ranks: n})
	return p
}

// unhurried is what operations take at most that nothing disturbs, on a busy machine.
const unhurried = 30 * time.Second

var smallJob = Job{Transport: "inproc", Ranks: 2, Timeout: unhurried, Pool: 1 << 20}

func TestRightProgramHasNoFinding(t *testing.T) {
	if res := runLocal(smallJob, someSteps(2), nil); len(res.Findings) > 0 {
		t.Errorf("%v", res.Findings)
	}
}

// TestProgramsOnGPUs runs a program whose operations are on GPUs of the fake driver, at all ranks
// or at some, for each way to give them to ranks. It is skipped without a compiler.
func TestProgramsOnGPUs(t *testing.T) {
	if _, err := makeGPUs(); errors.Is(err, compiled.ErrNoCompiler) {
		t.Skip(err)
	} else if err != nil {
		t.Fatal(err)
	}
	const n = 3
	on := Part{Dst: MemDevice, Src: MemDevice}
	held := Part{Dst: MemDevice, Src: MemDevice, How: Started, Hold: 200 * time.Microsecond}
	p := &Program{Seed: 7, Touch: -1, Steps: []Step{
		{Op: AllReduce, DType: pg.Float32, Red: pg.Sum, Count: 100, Ranks: parts(n, on)},
		{Op: AllReduce, DType: pg.Float32, Red: pg.Sum, Count: 101, Ranks: parts(n, on)},
		{Op: AllReduce, DType: pg.Float16, Red: pg.Avg, Count: 100, Ranks: []Part{{Dst: MemPlain}, on, held}},
		{Op: AllReduce, DType: pg.Int64, Red: pg.Max, Count: 5000, Ranks: parts(n, held)},
		{Op: AllReduce, DType: pg.Int64, Red: pg.Max, Count: 5000, Ranks: []Part{{Dst: MemAlloc}, on, held}},
		{Op: AllGather, DType: pg.Int32, Red: pg.Sum, Count: 20_000, Ranks: parts(n, on)},
		{Op: ReduceScatter, DType: pg.Int32, Red: pg.Sum, Count: 20_000, Ranks: parts(n, held)},
		{Op: Renew},
		{Op: AllReduce, DType: pg.Float32, Red: pg.Sum, Count: 50_000, Ranks: parts(n, on)},
		{Op: AllReduce, DType: pg.Float32, Red: pg.Sum, Count: 50_001, Ranks: parts(n, on)},
		{Op: Message, DType: pg.Uint8, Count: 30_000, Ranks: parts(n, held)},
		{Op: Message, DType: pg.Float32, Count: 70_001, Ranks: []Part{on, {Dst: MemPlain, Src: MemDevice}, held}},
		{Op: Window, DType: pg.Uint8, Count: 100_000, Root: 1, Ranks: parts(n, held)},
		{Op: Window, DType: pg.Uint8, Count: 300_001, Root: 2, Ranks: parts(n, on)},
		aGraph,
		{Op: Wait},
	}}
	for _, tr := range []string{"inproc", "soft", "shm"} {
		for _, gpus := range []GPUs{GPUsEach, GPUsApart, GPUsPairs, GPUsOne, GPUsSome} {
			if tr == "inproc" && gpus == GPUsSome {
				continue
			}
			for _, old := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, %s, kernels and IPC %v", tr, gpus, old), func(t *testing.T) {
					job := smallJob
					job.Transport, job.Ranks, job.Pool, job.GPUs, job.Kernels, job.IPC = tr, n, 2<<20, gpus, old, old
					Replay(t, job, p.clone(), p.clone())
				})
			}
		}
	}
}

// aGraph is a step with several launches of a graph.
var aGraph = Step{Op: Graph, Count: 3, Par: []Step{
	{Op: AllReduce, DType: pg.Int32, Red: pg.Max, Count: 33, Ranks: []Part{{InPlace: true}}},
	{Op: AllToAllV, DType: pg.Uint8, Red: pg.Sum, Count: 70},
	{Op: Scatter, DType: pg.BFloat16, Red: pg.Sum, Root: 1, Count: 5, Ranks: []Part{{}, {InPlace: true}}},
}}

// TestGraphsAreLaunched has graphs of ranks with GPUs that reach each other's memory, and of
// others, whose streams refuse.
func TestGraphsAreLaunched(t *testing.T) {
	if _, err := makeGPUs(); errors.Is(err, compiled.ErrNoCompiler) {
		t.Skip(err)
	}
	for gpus, want := range map[GPUs]map[string]int{
		NoGPUs: {}, GPUsEach: {"launches": 2 * aGraph.Count}, GPUsOne: {"launches": 2 * aGraph.Count},
		GPUsApart: {"refused": 2},
	} {
		job := smallJob
		job.GPUs = gpus
		p := &Program{Seed: 7, Touch: -1, Steps: []Step{aGraph}}
		p.normalize(job)
		if res := runLocal(job, p, nil); len(res.Findings) > 0 || !maps.Equal(res.Graphs, want) {
			t.Errorf("GPUs %q: %v, want %v (%v)", gpus, res.Graphs, want, res.Findings)
		}
	}
}

// TestOracleFinds has a library that is wrong in one way, once, and looks whether that is found.
func TestOracleFinds(t *testing.T) {
	first := func(c *call, op Op, slot int) bool { return c.op == op && c.h.slot() == slot }
	for _, test := range []struct {
		name, kind, text string
		conduct          func(ctx context.Context, c *call, how How) error
	}{
		{"a wrong result", "wrong", "1 of 100 elements", func(ctx context.Context, c *call, how How) error {
			err := conduct(ctx, c, how)
			if first(c, AllReduce, 1) {
				c.dst[17] ^= 1
			}
			return err
		}},
		{"a changed input", "wrong", "has changed its input", func(ctx context.Context, c *call, how How) error {
			err := conduct(ctx, c, how)
			if first(c, AllGather, 0) {
				c.src[len(c.src)-1] ^= 0x80
			}
			return err
		}},
		{"a store after the return", "store", "the buffer of step 5: allreduce",
			func() func(ctx context.Context, c *call, how How) error {
				var mu sync.Mutex
				var old []byte
				return func(ctx context.Context, c *call, how How) error {
					mu.Lock()
					defer mu.Unlock()
					if first(c, Barrier, 1) {
						old[3]++
					} else if first(c, AllReduce, 1) {
						old = c.dst
					}
					mu.Unlock()
					err := conduct(ctx, c, how)
					mu.Lock()
					return err
				}
			}()},
		{"a store beside a buffer", "store", "beside the buffer of step 2: alltoall",
			func(ctx context.Context, c *call, how How) error {
				if first(c, AllToAll, 0) {
					b := c.bufs[0]
					b.p.mem[b.at-1]++
				}
				return conduct(ctx, c, how)
			}},
		{"an error without a cause", "spurious", "RankError", func(ctx context.Context, c *call, how How) error {
			if err := conduct(ctx, c, how); err != nil || !first(c, Reduce, 1) {
				return err
			}
			return &pg.RankError{Rank: 0, Err: errors.New("planted")}
		}},
		{"an untyped error", "error", "untyped", func(ctx context.Context, c *call, how How) error {
			if err := conduct(ctx, c, how); err != nil || !first(c, Reduce, 1) {
				return err
			}
			return context.Canceled
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			res := runLocal(smallJob, someSteps(2), test.conduct)
			if len(res.Findings) == 0 || res.Findings[0].Kind != test.kind ||
				!strings.Contains(res.Findings[0].Text, test.text) {
				t.Errorf("findings %v, want one of kind %q with %q", res.Findings, test.kind, test.text)
			}
		})
	}
}

func TestLateCallIsReported(t *testing.T) {
	w := newWatch(0, time.Hour, nil)
	defer w.close()
	late, err := w.call("a call", time.Nanosecond, func() error { time.Sleep(time.Millisecond); return nil })
	if err != nil || !strings.Contains(late, "a call returned after") {
		t.Errorf("%q, %v", late, err)
	}
	if late, _ := w.call("a call", time.Hour, func() error { return nil }); late != "" {
		t.Errorf("%q of a call in time", late)
	}
}

func TestHungCallIsReported(t *testing.T) {
	said, end := make(chan string, 1), make(chan struct{})
	w := newWatch(0, 0, func(text string) { said <- text; close(end) })
	defer w.close()
	w.call("a call", time.Nanosecond, func() error { <-end; return nil })
	if text := <-said; !strings.Contains(text, "a call has not returned") || !strings.Contains(text, "goroutine ") {
		t.Errorf("%q", text)
	}
}

func TestDisagreementIsFound(t *testing.T) {
	res := &Result{Errors: map[string]int{}}
	judge(res, map[int]*Report{
		0: {Rank: 0, Facts: map[string]string{"step 4: view": "a", "step 5: view": "x"}},
		1: {Rank: 1, Facts: map[string]string{"step 4: view": "b"}},
	}, nil)
	if len(res.Findings) != 1 || res.Findings[0].Kind != "disagreement" || res.Findings[0].Step != 4 ||
		res.Findings[0].Rank != 1 {
		t.Errorf("%v", res.Findings)
	}
}

// A rank that may differ in a fact excuses the others.
func TestRankMayDiffer(t *testing.T) {
	res := &Result{Errors: map[string]int{}}
	judge(res, map[int]*Report{
		0: {Rank: 0, Facts: map[string]string{"step 4: outcome": "true"}},
		1: {Rank: 1, Facts: map[string]string{"step 4: outcome": "false"}},
		2: {Rank: 2, Facts: map[string]string{"step 4: outcome": anything}},
	}, nil)
	if len(res.Findings) > 0 {
		t.Errorf("%v", res.Findings)
	}
}

// TestWindowsAreChecked has a window that is wrong in one way.
func TestWindowsAreChecked(t *testing.T) {
	for _, test := range []struct {
		text  string
		wrong func(ctx context.Context, l *live) error
		op    Op
	}{
		{"after signal 2, 50 bytes of the area are older", func(ctx context.Context, l *live) error {
			l.due[0].n++
			return l.w.Signal(ctx, 0, stampCounter)
		}, WindowWait},
		{"half 1, put to with stamp 1", func(ctx context.Context, l *live) error {
			return l.w.Put(ctx, 0, 60, []byte{7})
		}, WindowGet},
		{"a signal succeeds, though a put was not placed", func(_ context.Context, l *live) error {
			l.to[0].refused = errors.New("planted")
			return nil
		}, WindowSignal},
	} {
		t.Run(test.text, func(t *testing.T) {
			ctx, job := t.Context(), smallJob
			job.Ranks = 1
			groups, err := pg.Local(1, pg.Config{Timeout: job.Timeout})
			if err != nil {
				t.Fatal(err)
			}
			r, err := newRank(job, 0, localGuide{make(chan Finding, 1)}, nil, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer r.close()
			r.p = &Program{}
			r.enter(groups[0])
			defer r.leave()
			for _, op := range []Op{WindowMake, WindowPut, WindowSignal, WindowWait, WindowGet} {
				r.do(ctx, &Step{Op: op, Win: 1, Count: 100}, 0)
			}
			if len(r.rep.Findings) > 0 {
				t.Fatal(r.rep.Findings)
			}
			if err := test.wrong(ctx, r.windows[1]); err != nil {
				t.Fatal(err)
			}
			r.do(ctx, &Step{Op: test.op, Win: 1}, 0)
			if len(r.rep.Findings) == 0 || !strings.Contains(r.rep.Findings[0].Text, test.text) {
				t.Errorf("findings %v, want one with %q", r.rep.Findings, test.text)
			}
		})
	}
}

// errorsOf collects the errors of a test.
type errorsOf struct {
	testing.TB
	all []string
}

func (e *errorsOf) Error(args ...any) { e.all = append(e.all, fmt.Sprint(args...)) }
func (e *errorsOf) Errorf(format string, args ...any) {
	e.all = append(e.all, fmt.Sprintf(format, args...))
}

// A finding fails the test, wherever its program goes. What cannot be written is printed.
func TestFindingFails(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "missing")
	for _, test := range []struct {
		out     string
		on      bool // the run continues
		printed bool
	}{{"", false, true}, {t.TempDir(), true, false}, {missing, true, true}} {
		e := &errorsOf{TB: t}
		o := Options{Out: test.out}
		on := o.report(e, &Summary{}, map[string]bool{}, &Found{Finding: Finding{Kind: "wrong"}, Source: "its program"})
		if on != test.on || len(e.all) != 1 || strings.Contains(e.all[0], "its program") != test.printed {
			t.Errorf("directory %q: the run continues %v, errors %q", test.out, on, e.all)
		}
	}
}

func TestDirectoryOfFindingsIsMade(t *testing.T) {
	out := filepath.Join(t.TempDir(), "a", "b")
	Run(t, Options{Transport: "inproc", Duration: 1, Out: out})
	if _, err := os.Stat(out); err != nil {
		t.Error(err)
	}
}

func TestGrowthIsFound(t *testing.T) {
	x := &session{first: map[int]*rig.Usage{0: {Files: 10, Maps: 10, Goroutines: 10, Heap: 1 << 20}}, progs: 50}
	res := &Result{Errors: map[string]int{}}
	judge(res, map[int]*Report{0: {Use: &rig.Usage{Files: 11, Maps: 60, Goroutines: 10, Heap: 1 << 20}}}, x)
	if len(res.Findings) != 1 || res.Findings[0].Kind != "resources" {
		t.Errorf("%v", res.Findings)
	}
}

func TestSeedGivesTheSamePrograms(t *testing.T) {
	other := newGenerator(5, 0, "tcp", 0.5).job()
	if other.Transport = "shm"; other == newGenerator(5, 0, "shm", 0.5).job() {
		t.Error("two transports have the same job")
	}
	for _, transport := range []string{"shm", "tcp", "hosts", "soft", "inproc"} {
		a, b := newGenerator(5, 0, transport, 0.5), newGenerator(5, 0, transport, 0.5)
		for range 20 {
			j, k := a.job(), b.job()
			p, q := a.program(j), b.program(k)
			if !reflect.DeepEqual(j, k) || !reflect.DeepEqual(p, q) {
				t.Fatal("two programs of one seed")
			}
			if len(p.Steps) < 30 {
				t.Errorf("a program of %d steps", len(p.Steps))
			}
			c := p.clone()
			c.normalize(j)
			if !reflect.DeepEqual(p.Steps, c.Steps) {
				t.Error("normalizing a program again changes it")
			}
		}
	}
}

// record is a place that runs nothing.
type record struct {
	jobs     []Job
	programs [][]*Program // of each job
	fails    func(job int) bool
	loses    func(job, program int) bool
}

func (r *record) start(job Job) (work, *Finding) {
	r.jobs, r.programs = append(r.jobs, job), append(r.programs, []*Program{})
	if r.fails(len(r.jobs) - 1) {
		return nil, &Finding{Kind: "stuck"}
	}
	return r, nil
}

func (r *record) run(p *Program) *Result {
	job := len(r.jobs) - 1
	r.programs[job] = append(r.programs[job], p)
	return &Result{Ops: 1, Lost: r.loses(job, len(r.programs[job])-1)}
}

func (r *record) finish() *Finding { return nil }

func (r *record) reduce(Job, []*Program, Finding, Options, *Found) string { return "" }

// A job that is lost, or that cannot be started, changes none of those after it. A run that begins
// at a job has the same from there on.
func TestLostJobChangesNoOther(t *testing.T) {
	o := Options{Transport: "shm", Seed: 5, Ops: 150, Faults: 0.5, Avoid: "gpus", Ignore: regexp.MustCompile("")}
	all := &record{fails: func(int) bool { return false }, loses: func(int, int) bool { return false }}
	run(t, o, all)
	some := &record{fails: func(job int) bool { return job%3 == 1 },
		loses: func(job, program int) bool { return job%3 == 0 && program == 2 }}
	run(t, o, some)
	later := &record{fails: all.fails, loses: all.loses}
	o.Job = 2
	run(t, o, later)
	same := func(a, b *record, from int) {
		n := min(len(a.jobs)-from, len(b.jobs))
		if n < 3 {
			t.Fatalf("%d jobs, want more to compare", n)
		}
		for i := range n {
			p, q := a.programs[from+i], b.programs[i]
			if k := min(len(p), len(q)); a.jobs[from+i] != b.jobs[i] || !reflect.DeepEqual(p[:k], q[:k]) {
				t.Errorf("job %d, or one of %d programs, differs", from+i, k)
			}
		}
	}
	same(all, some, 0)
	same(all, later, 2)
}

// TestEveryPairIsGenerated looks at what a run of some minutes consists of.
func TestEveryPairIsGenerated(t *testing.T) {
	for _, transport := range []string{"shm", "tcp", "soft", "inproc"} {
		cov := newCover()
		for number := range 40 {
			g := newGenerator(1, number, transport, 0.3)
			job := g.job()
			for range 50 {
				cov.add(g.program(job))
			}
		}
		var rare []string
		for _, k := range wanted(transport) {
			if cov.pairs[k] < 50 {
				rare = append(rare, k[0]+" with "+k[1])
			}
		}
		if rare != nil {
			t.Errorf("%s: in 2,000 programs less than 50 times: %q", transport, rare)
		}
	}
}

func TestProgramIsReduced(t *testing.T) {
	g := newGenerator(3, 0, "shm", 1)
	job := g.job()
	p := g.program(job)
	at := slices.IndexFunc(p.Steps, func(s Step) bool { return s.Op == AllReduce })
	dtype := p.Steps[at].DType
	job, small, _ := shrink(job, p, func(_ Job, p *Program) bool {
		return slices.ContainsFunc(p.Steps, func(s Step) bool { return s.Op == AllReduce && s.DType == dtype })
	}, time.Now().Add(time.Minute))
	if len(small.Steps) != 1 || len(small.Faults) != 0 || small.Touch != -1 || job.Ranks != 2 {
		t.Errorf("%d steps, %d faults, %d ranks: %+v", len(small.Steps), len(small.Faults), job.Ranks, small)
	}
}

// TestPrintedProgramIsGo has programs of each transport printed, and checks their names against
// those that the package declares.
func TestPrintedProgramIsGo(t *testing.T) {
	declared := map[string]bool{}
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for name := range file.Scope.Objects {
			declared[name] = true
		}
	}
	for _, transport := range []string{"inproc", "shm", "tcp", "hosts", "soft"} {
		for seed := range uint64(40) {
			g := newGenerator(seed, 0, transport, 1)
			job := g.job()
			text := source("TestFound", job, []*Program{g.program(job)}, "It found something.")
			file, err := parser.ParseFile(token.NewFileSet(), "found_test.go", text, parser.AllErrors)
			if err != nil {
				t.Fatalf("%v\n%s", err, text)
			}
			for _, use := range file.Unresolved {
				if _, local := file.Scope.Objects[use.Name]; !declared[use.Name] && !local && use.Name != "testing" &&
					use.Name != "pg" && use.Name != "time" && types.Universe.Lookup(use.Name) == nil {
					t.Fatalf("%s, seed %d: %s is not declared:\n%s", transport, seed, use.Name, text)
				}
			}
		}
	}
}

// TestMembershipFaultsHappen runs a program with each fault that needs more than a signal.
func TestMembershipFaultsHappen(t *testing.T) {
	kill := Fault{Step: 1, At: 0, Kind: "kill", Victim: 1}
	for _, test := range []struct {
		want   string
		job    Job
		faults []Fault
	}{
		{"came later", Job{Ranks: 3, Later: 1}, []Fault{{Step: 1, Kind: "stop", Victim: 1, For: time.Millisecond}}},
		{"stood by", Job{Ranks: 2, Standby: 1, OnFailure: pg.Shrink}, []Fault{kill}},
		{"kill while joining", Job{Ranks: 3, OnFailure: pg.Retry}, []Fault{kill,
			{Step: 2, Kind: "kill", Joining: true}}},
		{"kill while joining", Job{Ranks: 3, AutoAdmit: true},
			[]Fault{kill, {Step: 2, Kind: "kill", Joining: true, After: 100 * time.Millisecond}}},
		{"store while joining", Job{Ranks: 2}, []Fault{kill, {Step: 2, Kind: "store", Joining: true,
			For: time.Second}}},
	} {
		t.Run(test.want, func(t *testing.T) {
			job := test.job
			job.Transport, job.Timeout, job.Pool = "shm", unhurried, 1<<20
			p := &Program{Seed: 1, Touch: -1, Steps: []Step{
				{Op: AllReduce, DType: pg.Float32, Red: pg.Sum, Count: 5000},
				{Op: Barrier, DType: pg.Uint8},
				{Op: Heal},
				{Op: AllGather, DType: pg.Int64, Red: pg.Sum, Count: 10},
			}, Faults: test.faults}
			p.normalize(job)
			w, f := open(t, job.Transport).start(job)
			if f != nil {
				t.Fatal(f)
			}
			res := w.run(p)
			for _, f := range res.Findings {
				t.Error(f.String())
			}
			if res.Faults[test.want] == 0 {
				t.Errorf("faults %v, want one %q", res.Faults, test.want)
			}
			if res.Lost {
				return
			}
			if f := w.finish(); f != nil {
				t.Error(f)
			}
		})
	}
}

// TestReplay runs programs as they are printed. In the first one a rank is replaced while a window
// and a subgroup exist.
func TestReplay(t *testing.T) {
	busy := []Part{{How: Started}, {How: Started}, {How: Started}}
	Replay(t, Job{Transport: "shm", Ranks: 3, OnFailure: pg.Shrink, Timeout: unhurried, Pool: 1 << 20},
		&Program{Seed: 1, Touch: -1, Steps: []Step{
			{Op: Split, New: 1, Ranks: make([]Part, 3)},
			{Op: Barrier, Group: 1, DType: pg.Uint8},
			{Op: WindowMake, Win: 1, Count: 5000},
			{Op: WindowSignal, Win: 1, Root: 1},
			{Op: WindowWait, Win: 1, Root: 1},
			{Op: Brace},
			{Op: AllReduce, DType: pg.Float32, Red: pg.Sum, Count: 5000, Ranks: []Part{
				{How: AtOnce, Dst: MemAlloc, Src: MemAlloc},
				{Dst: MemAlloc, Src: MemAlloc, InPlace: true},
				{Dst: MemAlloc, Src: MemAlloc, InPlace: true},
			}},
			{Op: Message, DType: pg.Uint8, Count: 100},
			{Op: Heal},
			{Op: WindowRefresh, Win: 1, Count: 5000},
			{Op: WindowSignal, Win: 1, Root: 1},
			{Op: WindowWait, Win: 1, Root: 1},
			{Op: WindowGet, Win: 1, Root: 1},
			{Op: WindowClose, Win: 1, Ranks: []Part{{No: true}, {No: true}, {No: true}}},
		}, Faults: []Fault{{Step: 6, At: 0, Kind: "kill", Victim: 1}}},
		&Program{Seed: 2, Touch: -1, Steps: []Step{
			{Op: Split, New: 1, Ranks: make([]Part, 3)},
			{Op: Chain, DType: pg.Uint16, Count: 700, Par: []Step{
				{Op: AllReduce, Red: pg.Sum, Root: 1},
				{Op: AllToAll, New: 1},
				{Op: ReduceScatter, Red: pg.Max},
				{Op: AllGather, New: 1},
				{Op: Scatter, Root: 2},
				{Op: Reduce, Red: pg.BitXor, Root: 1},
				{Op: Gather},
				{Op: Broadcast},
			}},
			{Op: Brace},
			{Op: AllReduce, Group: 1, DType: pg.Int32, Red: pg.Sum, Count: 50_000, Ranks: busy},
			{Op: AllGather, Group: 1, DType: pg.Int32, Red: pg.Sum, Count: 20_000, Ranks: busy},
			{Op: Close, Group: 1, Ranks: []Part{{No: true}, {}, {}}},
			{Op: Heal},
		}})
}
