//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"tutti/internal/proctest"
	"tutti/internal/tick"
)

func TestParseOptions(t *testing.T) {
	o, err := parseOptions([]string{"--quick", "--rounds", "7", "--ops", "allreduce,allreduce", "--ranks", "3",
		"--sizes", "2M,64,4K,64"})
	if err != nil {
		t.Fatal(err)
	}
	if o.Rounds != 7 || o.Reps != 3 || o.Budget != 5*time.Millisecond {
		t.Errorf("rounds %d reps %d budget %v: --quick is to change what was not given, and only that", o.Rounds,
			o.Reps, o.Budget)
	}
	if !slices.Equal(o.Sizes, []int64{64, 4096, 2 << 20}) || !slices.Equal(o.Ops, []string{"allreduce"}) ||
		!slices.Equal(o.Ranks, []int{3}) {
		t.Errorf("sizes %v ops %v ranks %v", o.Sizes, o.Ops, o.Ranks)
	}
	for _, bad := range []string{"--ops=gather", "--transports=rdma", "--ranks=1", "--ranks=2,x", "--ranks=65",
		"--sizes=", "--sizes=63", "--sizes=-64", "--sizes=4KB",
		"--sizes=9G", "--dtypes=complex", "--peers=nccl", "--rounds=0", "--reps=0", "--budget=1us", "--deadline=0s",
		"allreduce"} {
		if _, err := parseOptions([]string{bad}); err == nil {
			t.Errorf("%s was accepted", bad)
		}
	}
}

func TestProgressionsNameExactlyTheSizes(t *testing.T) {
	want := []progression{{64, 16 << 20, 8}}
	if got := progressions([]int64{64, 512, 4096, 32768, 262144, 2 << 20, 16 << 20}); !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	rapid.Check(t, func(t *rapid.T) {
		sizes := rapid.SliceOfNDistinct(rapid.Int64Range(1, 1<<20), 0, 12, rapid.ID[int64]).Draw(t, "sizes")
		slices.Sort(sizes)
		var named []int64
		for _, p := range progressions(sizes) {
			if p.factor < 2 {
				t.Fatalf("%v never ends", p)
			}
			for s := p.min; s <= p.max; s *= p.factor {
				named = append(named, s)
			}
		}
		if !slices.Equal(named, sizes) {
			t.Fatalf("progressions %v name %v, not %v", progressions(sizes), named, sizes)
		}
	})
}

func TestParseRows(t *testing.T) {
	h := heat{tutti, "shm", "allreduce", "float32", 2}
	out := `# size count type
{"op":"allreduce","dtype":"float32","ranks":2,"bytes":64,"time_us":0.4,"in_place":true,` +
		`"transport":"shm","wrong":0,"algbw":0.16,"new":{"x":[1]}}
  {"op":"allreduce","bytes":128,"time_us":5e-1}
{"op":"allgather","bytes":64,"time_us":1}
{"op":"allreduce","dtype":"bfloat16","bytes":64,"time_us":1}
{"op":"allreduce","ranks":4,"bytes":64,"time_us":1}
{"op":"allreduce","transport":"tcp","bytes":64,"time_us":1}
{"op":"allreduce","bytes":64}
{"op":"allreduce","bytes":64,"time_us":-1}
{"op":"allreduce","bytes":0,"time_us":1}
{"op":"allreduce","bytes":64,"time_us":"1"}
{"op":"allreduce","bytes":256,"time_us":1,"wrong":3}
[]
{`
	rows := parseRows([]byte(out), h, false)
	var got []string
	for _, r := range rows {
		got = append(got, fmt.Sprint(r.Bytes, r.TimeUs, r.Wrong, r.InPlace != nil))
	}
	if want := []string{"64 0.4 0 true", "128 0.5 0 false", "256 1 3 false"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if rows := parseRows([]byte(`{"op":"reducescatter","bytes":64,"time_us":1}`),
		heat{tutti, "shm", "reduce_scatter", "float32", 2}, false); len(rows) != 1 {
		t.Errorf("reduce_scatter by its other name: %v", rows)
	}
	if rows := parseRows([]byte(`{"op":"limit","bytes":64,"time_us":1}`), heat{limit, "shm", "allreduce", "float32", 2},
		false); len(rows) != 1 {
		t.Errorf("the limit's rows: %v", rows)
	}
	for _, touch := range []bool{false, true} {
		if rows := parseRows([]byte(`{"op":"allreduce","bytes":64,"time_us":1,"touch":true}`), h,
			touch); len(rows) != map[bool]int{true: 1}[touch] {
			t.Errorf("a row of the loop that touches, where touch is %v: %v", touch, rows)
		}
	}
	for _, bytes := range []string{"0", "4"} { // Tutti's, and the others'
		rows := parseRows([]byte(`{"op":"barrier","dtype":"uint8","bytes":`+bytes+`,"time_us":1}`),
			heat{tutti, "shm", barrier, "float32", 2}, false)
		if len(rows) != 1 || rows[0].Bytes != barrierBytes {
			t.Errorf("a barrier of %s bytes: %+v", bytes, rows)
		}
	}
	rapid.Check(t, func(t *rapid.T) { // whatever a crashing program writes
		out := rapid.StringMatching(
			`(\{"op":"allreduce","bytes":-?[0-9]{1,30},"time_us":-?[0-9e.]{1,6}\}|[{}"\n]){0,5}`).Draw(t, "out")
		for _, r := range parseRows([]byte(out), h, false) {
			if r.Bytes <= 0 || !(r.TimeUs > 0) {
				t.Fatalf("row %+v", r)
			}
		}
	})
}

func TestNearest(t *testing.T) {
	sizes := []int64{64, 512, 4096}
	for b, want := range map[int64]int64{64: 64, 60: 64, 504: 512, 512: 512, 4092: 4096, 16: 0, 1 << 20: 0} {
		if got, ok := nearest(b, sizes, 0); got != want || ok != (want != 0) {
			t.Errorf("nearest(%d) = %d, %v; want %d", b, got, ok, want)
		}
	}
}

// 8 bytes of an operation that gives each of 4 ranks an element are 16.
func TestNearestOfFewerBytesThanRanks(t *testing.T) {
	h := heat{tutti, "shm", "allgather", "float32", 4}
	for b, want := range map[int64]int64{16: 8, 64: 64} {
		if got, ok := nearest(b, []int64{8, 64}, h.least()); got != want || !ok {
			t.Errorf("nearest(%d) = %d, %v; want %d", b, got, ok, want)
		}
	}
}

func TestComplete(t *testing.T) {
	sizes := []int64{64, 512}
	for _, c := range []struct {
		rows []row
		want bool
	}{
		{nil, false},
		{[]row{{Bytes: 64}}, false},
		{[]row{{Bytes: 64}, {Bytes: 4096}}, false},
		{[]row{{Bytes: 504}, {Bytes: 64}, {Bytes: 64}}, true},
		{[]row{{Bytes: 512}, {Bytes: 64, Wrong: 1}}, false},
	} {
		if got := complete(c.rows, sizes, 0); got != c.want {
			t.Errorf("%+v: %v", c.rows, got)
		}
	}
}

// feed gives each contestant one sample per round.
func feed(res *results, o options, h heat, bytes int64, samples ...float64) {
	for _, us := range samples {
		res.add(h, []row{{Op: h.op, Bytes: bytes, TimeUs: us, Variant: "sum-warm"}}, o)
	}
}

func TestReport(t *testing.T) {
	o := options{Sizes: []int64{64, 4096, 1 << 20}}
	res := newResults()
	h := func(c contestant, transport, dtype string) heat { return heat{c, transport, "allreduce", dtype, 2} }
	feed(res, o, h(openMPI, "shm", "float32"), 64, 9, 1, 2) // median 2
	feed(res, o, h(mpich, "shm", "float32"), 64, 3, 3, 1)   // median 3
	feed(res, o, h(tutti, "shm", "float32"), 64, 1, 1, 8)   // ratio 2
	feed(res, o, h(tuttiReg, "shm", "float32"), 64, 0.5)    // ratio 4
	feed(res, o, h(openMPI, "tcp", "float32"), 64, 5)
	feed(res, o, h(tutti, "tcp", "float32"), 64, 10)   // ratio 0.5: the worst
	feed(res, o, h(tutti, "shm", "bfloat16"), 64, 0.5) // ratio 2 over float32
	feed(res, o, h(openMPI, "shm", "float32"), 4096, 7)
	feed(res, o, h(tutti, "shm", "float32"), 1<<20, 30)
	feed(res, o, h(tuttiReg, "shm", "float32"), 1<<20, 24)
	feed(res, o, h(limit, "shm", "float32"), 1<<20, 20)
	for _, v := range []string{"cold", "cross"} {
		res.add(h(limit, "shm", "float32"), []row{{Bytes: 1 << 20, TimeUs: 40, Variant: "copy-" + v},
			{Bytes: 1 << 20, TimeUs: 50, Variant: "sum-" + v}}, o)
	}
	res.fail(h(mpich, "tcp", "float32"), nil, o)
	res.fail(h(tutti, "tcp", "float32"), []row{{Bytes: 64, Wrong: 1}, {Bytes: 4096}, {Bytes: 1 << 20}}, o) // in a round
	rep := res.report(o)

	first := rep.Rows[0]
	if first.Transport != "tcp" || first.Bytes != 64 || first.Ratio != 0.5 ||
		!slices.Equal(first.Failed, []string{"mpich", "tutti"}) {
		t.Errorf("the worst row is %+v", first)
	}
	if !slices.IsSortedFunc(rep.Rows, func(a, b comparison) int {
		if b.Ratio != 0 && (a.Ratio == 0 || a.Ratio > b.Ratio) {
			return 1
		}
		return 0
	}) {
		t.Error("rows are not worst first")
	}
	rows := map[line]comparison{}
	for _, r := range rep.Rows {
		rows[r.line] = r
	}
	shm := line{"shm", "allreduce", "float32", 2, 64}
	if r := rows[shm]; r.BestPeer != "openmpi" || r.Ratio != 2 || r.RatioReg != 4 || r.OfLimit != 0 ||
		len(r.Samples["openmpi"]) != 3 {
		t.Errorf("64 bytes: %+v", r)
	}
	shm.Dtype = "bfloat16"
	if r := rows[shm]; r.BestPeer != "tutti float32" || r.Ratio != 2 || r.RatioReg != 0 {
		t.Errorf("bfloat16: %+v", r)
	}
	shm.Dtype, shm.Bytes = "float32", 4096
	if r := rows[shm]; r.Ratio != 0 || r.BestPeer != "openmpi" {
		t.Errorf("without ours: %+v", r)
	}
	shm.Bytes = 1 << 20
	if r := rows[shm]; math.Abs(r.OfLimit-1.2) > 1e-12 || r.Ratio != 0 {
		t.Errorf("of limit: %+v", r)
	}
	for g, want := range map[string]float64{"all float32": 1, "shm float32": 2, "tcp float32": 0.5,
		"shm allreduce ranks=2 float32 reg": 4, "all bfloat16": 2} {
		if got := rep.Geomeans[g]; math.Abs(got-want) > 1e-12 {
			t.Errorf("geometric mean of %s: %v, want %v; all: %v", g, got, want, rep.Geomeans)
		}
	}
	var s strings.Builder
	if err := rep.print(&s); err != nil {
		t.Fatal(err)
	}
	var table [][]string
	for l := range strings.Lines(s.String()) {
		table = append(table, strings.Fields(l))
	}
	for _, want := range []string{
		"tcp allreduce float32 2 64 5.00 fail - - - 10.00 fail - 0.50 - - - - -",
		"tcp allreduce float32 2 4K - fail - - - - - - - - - - -",
		"shm allreduce float32 2 64 2.00 3.00 - - - 1.00 0.50 2.00 - 4.00 - - -",
		"shm allreduce float32 2 1M - - - - - 30.00 24.00 - - - - 20.00 1.20",
		"0.50 tcp float32",
		"2 1M 20.0 209.7 40.0 104.9 40.0 104.9",
	} {
		if !slices.ContainsFunc(table, func(f []string) bool { return slices.Equal(f, strings.Fields(want)) }) {
			t.Errorf("%q is missing from\n%s", want, s.String())
		}
	}
	if _, err := json.Marshal(rep); err != nil {
		t.Errorf("as JSON: %v", err)
	}
}

// Bars are missed by rows that lie below 1 with their whole interval, and by means.
func TestBarsOfCollectives(t *testing.T) {
	type cell struct {
		line
		peer, ours string // times of the rounds
	}
	at := func(transport, op string, ranks int, bytes int64) line {
		return line{transport, op, "float32", ranks, bytes}
	}
	const seven = "10 10 10 10 10 10 10"
	for _, c := range []struct {
		name   string
		who    contestant
		rows   []cell
		met    int
		missed []string // bars, worst first
	}{
		{"nothing", tutti, nil, 0, nil},
		{"no bar", tutti, []cell{{at("shm", "allreduce", 4, 4096), "1", "2"}}, 0, nil},
		{"fast", tutti, []cell{{at("shm", "barrier", 4, 4), "10", "9"}}, 1, nil},
		{"slow, too few rounds for an interval", tutti, []cell{{at("shm", "allreduce", 2, 64), "9 9", "10 10"}}, 0,
			[]string{"short calls on shared memory, 2 and 4 ranks"}},
		{"slow, perhaps", tutti, []cell{{at("shm", "allreduce", 2, 64), "9 9 9 9 9 9 11", seven}}, 1, nil},
		{"slow beyond its interval", tutti, []cell{{at("shm", "allreduce", 64, 32<<10), "9 9 9 9 9 9 9", seven}}, 0,
			[]string{"allreduce of 8 and more ranks"}},
		{"mean", tutti, []cell{{at("tcp", "allgather", 2, 64), "15", "10"}, {at("tcp", "alltoall", 2, 64), "10", "10"}},
			2, []string{"tcp, 2 ranks"}},
		{"registered", tuttiReg, []cell{{at("shm", "allgather", 2, 1<<20), "16", "10"},
			{at("shm", "alltoall", 2, 1<<20), "9", "10"}}, 1, []string{"registered memory, 2 ranks",
			"registered memory, 2 ranks"}},
		{"puts", tutti, []cell{{at("shm", "put", 2, 64), "8", "10"}}, 0, []string{"puts"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			res, o := newResults(), options{}
			for _, x := range c.rows {
				o.Sizes = []int64{x.Bytes}
				for who, times := range map[contestant]string{openMPI: x.peer, c.who: x.ours} {
					for _, us := range strings.Fields(times) {
						f, err := strconv.ParseFloat(us, 64)
						if err != nil {
							t.Fatal(err)
						}
						feed(res, o, heat{who, x.Transport, x.Op, x.Dtype, x.Ranks}, x.Bytes, f)
					}
				}
			}
			v := res.report(o).judge()
			var missed []string
			for _, m := range v.missed {
				missed = append(missed, m.Bar)
			}
			if v.met != c.met || !slices.Equal(missed, c.missed) || (v.err() == nil) != (len(missed) == 0) {
				t.Errorf("%d meet their bar, %q miss it: %v; want %d and %q", v.met, missed, v.err(), c.met, c.missed)
			}
			judged := map[string]bool{}
			for _, b := range bars {
				judged[b.name] = !slices.Contains(v.unjudged, b.name)
			}
			for _, m := range missed {
				if !judged[m] {
					t.Errorf("%q is missed and not measured", m)
				}
			}
		})
	}
}

func TestAddTakesFastestVariant(t *testing.T) {
	yes, no := true, false
	o := options{Sizes: []int64{64}}
	h := heat{gloo, "tcp", "allreduce", "float32", 2}
	for _, c := range []struct {
		name       string
		outOfPlace bool
		op         string
		rows       []row
		want       []float64
	}{
		{"variants", false, "allreduce", []row{{Bytes: 64, TimeUs: 3}, {Bytes: 64, TimeUs: 2}, {Bytes: 64, TimeUs: 4}},
			[]float64{2}},
		{"in place", false, "allreduce", []row{{Bytes: 64, TimeUs: 3, InPlace: &yes},
			{Bytes: 64, TimeUs: 2, InPlace: &no}}, []float64{3}},
		{"out of place", true, "allreduce", []row{{Bytes: 64, TimeUs: 3, InPlace: &yes},
			{Bytes: 64, TimeUs: 4, InPlace: &no}}, []float64{4}},
		{"only the other place", true, "allreduce", []row{{Bytes: 64, TimeUs: 3, InPlace: &yes}}, []float64{3}},
		{"input and output", false, "alltoall", []row{{Bytes: 64, TimeUs: 2, InPlace: &yes},
			{Bytes: 64, TimeUs: 3, InPlace: &no}}, []float64{3}},
		{"one buffer", false, "broadcast", []row{{Bytes: 64, TimeUs: 2, InPlace: &yes},
			{Bytes: 64, TimeUs: 3, InPlace: &no}}, []float64{2}},
		{"unchecked", false, "allreduce", []row{{Bytes: 64, TimeUs: 2, Wrong: -1}}, []float64{2}},
		{"wrong", false, "allreduce", []row{{Bytes: 64, TimeUs: 3}, {Bytes: 64, TimeUs: 2, Wrong: 1}}, []float64{3}},
		{"another size", false, "allreduce", []row{{Bytes: 4096, TimeUs: 3}}, nil},
	} {
		o.OutOfPlace, h.op = c.outOfPlace, c.op
		res := newResults()
		res.add(h, c.rows, o)
		if got := res.samples[cell{line{"tcp", c.op, "float32", 2, 64}, "gloo"}]; !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

func TestLaunches(t *testing.T) {
	w := testWorkshop(t)
	w.o.Sizes, w.tutti = []int64{64, 512, 4096}, "TUTTI"
	argv := func(h heat, cores int) string {
		ls, err := w.launches(h, cores)
		if err != nil {
			t.Fatalf("%s: %v", h, err)
		}
		var s []string
		for _, l := range ls {
			s = append(s, strings.Join(l.env, " "))
			for _, a := range l.argv {
				s = append(s, strings.Join(a, " "))
			}
		}
		return strings.Join(s, "\n")
	}
	if got := argv(heat{tutti, "tcp", "reduce_scatter", "float32", 4}, 2); !strings.Contains(got,
		"--op reducescatter ") {
		t.Errorf("tutti bench spells it otherwise: %s", got)
	}
	got := argv(heat{tuttiReg, "shm", "allreduce", "float32", 4}, 2)
	if want := "\nTUTTI bench -n 4 --op allreduce --min 64 --max 4096 --factor 8 --dtype float32 --transport shm " +
		"--rounds 1 --round-time 1ms --json --registered --touch"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	for _, c := range []struct {
		h        heat
		cores    int
		has, not string
	}{
		{heat{openMPI, "shm", "allreduce", "float32", 2}, 2, "--bind-to core", "--oversubscribe"},
		{heat{openMPI, "shm", "allreduce", "float32", 4}, 2, "--oversubscribe", "core"},
		{heat{openMPI, "tcp", "allreduce", "float32", 2}, 2, "tcp,self", "vader,"},
		{heat{mpich, "tcp", "allreduce", "float32", 2}, 2, "UCX_TLS=tcp,self", "?"},
		{heat{mpich, "shm", "allreduce", "float32", 4}, 2, "64,512,4096 1 ", "UCX_TLS"},
	} {
		if got := argv(c.h, c.cores); !strings.Contains(got, c.has) || strings.Contains(got, c.not) {
			t.Errorf("%s: %q is to have %q and not %q", c.h, got, c.has, c.not)
		}
	}
	if a, b := argv(heat{gloo, "tcp", "allreduce", "float32", 2}, 2),
		argv(heat{gloo, "tcp", "allreduce", "float32", 2}, 1); a == b || strings.Count(a, "\n") != 2 {
		t.Errorf("gloo: %q and %q", a, b)
	}
	// A rank that is bound cannot see whether all share processors.
	interval := strconv.FormatInt(tick.Network.Microseconds(), 10)
	for cores, touch := range map[int]string{2: " 65 1 ", 1: " 65 2 "} {
		if got := argv(heat{gloo, "tcp", "allreduce", "float32", 2}, cores); !strings.Contains(got,
			touch+interval+" 0 2 ") {
			t.Errorf("2 ranks, cores: %d: %s", cores, got)
		}
	}
	// All contestants of a transport begin their calls at the same ticks.
	for transport, want := range map[string]time.Duration{"shm": tick.Memory, "tcp": tick.Network} {
		for _, who := range []contestant{openMPI, mpich, openMPI5, mpich5} {
			got := argv(heat{who, transport, "allreduce", "float32", 2}, 2)
			if want := " 1 " + strconv.FormatInt(want.Microseconds(), 10); !strings.HasSuffix(got, want) {
				t.Errorf("%s over %s: %q does not end with %q", who, transport, got, want)
			}
		}
	}
	if ls, err := w.launches(heat{limit, "shm", "allreduce", "float32", 2}, 2); err != nil || ls != nil {
		t.Errorf("the limit of small sizes: %v, %v", ls, err)
	}
}

func testWorkshop(t *testing.T) *workshop {
	w, err := newWorkshop(options{Rounds: 1, Reps: 1, Budget: time.Millisecond, Deadline: time.Minute,
		Sizes: []int64{64}, mpi: cached("mpi")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		w.close()
		for _, dir := range []string{w.tmp, w.shm} {
			if _, err := os.Stat(dir); !os.IsNotExist(err) {
				t.Errorf("%s is still there", dir)
			}
		}
	})
	return w
}

// dead waits until process pid has ended; zombies have.
func dead(t *testing.T, pid string) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); runtime.Gosched() {
		b, err := os.ReadFile("/proc/" + pid + "/stat")
		if err != nil || strings.Contains(string(b), ") Z ") {
			return
		}
	}
	t.Errorf("process %s still runs", pid)
}

func TestRunLeavesNothing(t *testing.T) {
	if _, err := os.Stat("/bin/sh"); err != nil {
		t.Skip(err)
	}
	w := testWorkshop(t)
	// A rank in its own session, which the launcher's process group does not contain, and one that
	// runs for long; then the launcher fails.
	const escape = `setsid sh -c 'echo $$ >PID.tmp; mv PID.tmp PID; exec sleep 1000' & ` +
		`until [ -s PID ]; do :; done; cat PID; `
	pid := filepath.Join(w.tmp, "PID")
	out, err := w.run(t.Context(), launch{argv: [][]string{{"sh", "-c", escape + "echo broken >&2; exit 3"},
		{"sleep", "1000"}}})
	if err == nil || !strings.Contains(err.Error(), "exit status 3 broken") {
		t.Errorf("got %v, not the failure of the launcher", err)
	}
	dead(t, strings.TrimSpace(string(out)))
	if err := os.Remove(pid); err != nil {
		t.Fatal(err)
	}
	// The same without a failure: the deadline ends it, or the caller's cancellation.
	w.o.Deadline = time.Second
	out, err = w.run(t.Context(), launch{argv: [][]string{{"sh", "-c", escape + "exec sleep 1000"}}})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want the deadline", err)
	}
	if s := strings.TrimSpace(string(out)); s != "" {
		dead(t, s)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := w.run(ctx, launch{argv: [][]string{{"sleep", "1000"}}}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want the cancellation", err)
	}
	if _, err := w.run(t.Context(), launch{argv: [][]string{{"/does/not/exist"}}}); err == nil {
		t.Error("a program that does not exist ran")
	}
	if n := proctest.KillAll(); n != 0 {
		t.Errorf("%d processes were left", n)
	}
}

// Rows of a build for all machines count from 64 KiB on only if the kernel copies for it.
func TestTryCopies(t *testing.T) {
	for copies, want := range map[int]int{0: 1, 3: 2} {
		w := testWorkshop(t)
		w.o.mpi = t.TempDir()
		w.o.Sizes = []int64{64, 256 << 10}
		bin := filepath.Join(w.o.mpi, "mpich", "bin")
		if err := os.MkdirAll(bin, 0o755); err != nil {
			t.Fatal(err)
		}
		launcher := fmt.Sprintf("#!/bin/sh\nfor size in 64 262144; do echo \"{\\\"op\\\":\\\"alltoall\\\","+
			"\\\"bytes\\\":$size,\\\"time_us\\\":1,\\\"touch\\\":true,\\\"single_copies\\\":%d}\"; done\n", copies)
		if err := os.WriteFile(filepath.Join(bin, "mpiexec"), []byte(launcher), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := w.tryCopies(t.Context(), mpich5); err != nil {
			t.Fatal(err)
		}
		rows, err := w.turn(t.Context(), heat{mpich5, "shm", "alltoall", "float32", 2})
		if err != nil || len(rows) != want || len(w.notes) != 2-want {
			t.Errorf("%d copies: rows %+v, %v, notes %q", copies, rows, err, w.notes)
		}
		rows, err = w.turn(t.Context(), heat{mpich5, "tcp", "alltoall", "float32", 2})
		if err != nil || len(rows) != 2 {
			t.Errorf("tcp: rows %+v, %v", rows, err)
		}
	}
}

// A tutti that answers as the contract says: 2 us plus a microsecond for each KiB; half that for
// registered memory. It cannot do alltoall, one allgather is wrong, and a broadcast lacks sizes.
const fakeTutti = `#!/bin/sh
[ "$1" = bench ] || exit 9
shift
div=1 touch=false
while [ $# -gt 0 ]; do
  case $1 in
    --registered) div=2; shift;;
    --touch) touch=true; shift;;
    --json) shift;;
    -n) n=$2; shift 2;; --op) op=$2; shift 2;; --min) min=$2; shift 2;; --max) max=$2; shift 2;;
    --factor) factor=$2; shift 2;; --dtype) dtype=$2; shift 2;; --transport) transport=$2; shift 2;;
    --rounds|--round-time) shift 2;;
    *) echo "unknown $1" >&2; exit 9;;
  esac
done
echo "# a comment"
[ $op = alltoall ] && { echo "no such luck" >&2; exit 7; }
wrong=0
[ $op = allgather ] && [ ! -e "$0.spoilt" ] && { : >"$0.spoilt"; wrong=1; }
[ $op = broadcast ] && max=$((max / factor))
while [ $min -le $max ]; do
  echo "{\"op\":\"$op\",\"dtype\":\"$dtype\",\"ranks\":$n,\"bytes\":$min,\"count\":1,` +
	`\"time_us\":$(( (2 + min / 1024) * 10 / div ))e-1,\"in_place\":true,\"touch\":$touch,` +
	`\"transport\":\"$transport\",\"wrong\":$wrong}"
  min=$((min * factor))
done
`

// compareFake compares the fake with itself, and returns what was written.
func compareFake(t *testing.T, ops string, more ...string) (rep report, failure error) {
	t.Helper()
	dir := t.TempDir()
	o, err := parseOptions(append([]string{"--tutti", filepath.Join(dir, "tutti"), "--json",
		filepath.Join(dir, "out.json"), "--peers", "tutti,tutti-reg", "--ops", ops,
		"--ranks", "2", "--transports", "shm", "--sizes", "64,4K,12K", "--rounds", "3", "--deadline", "30s"}, more...))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(o.tuttiPath, []byte(fakeTutti), 0o755); err != nil {
		t.Fatal(err)
	}
	failure = compare(t.Context(), o)
	b, err := os.ReadFile(o.jsonPath)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &rep); err != nil {
		t.Fatal(err)
	}
	return rep, failure
}

func TestCompareWithFakeTutti(t *testing.T) {
	if _, err := compareFake(t, "allreduce"); err != nil {
		t.Fatal(err)
	}
	rep, err := compareFake(t, "allreduce,alltoall")
	if err == nil || strings.Count(err.Error(), "no such luck") != 2 { // one for each contestant
		t.Errorf("alltoall fails, and this is said of it: %v", err)
	}
	seen := 0
	for _, r := range rep.Rows {
		if r.Op == "alltoall" {
			if !slices.Equal(r.Failed, []string{"tutti", "tutti-reg"}) || len(r.Median) != 0 {
				t.Errorf("alltoall: %+v", r)
			}
			continue
		}
		seen++
		us := float64(2 + r.Bytes/1024)
		if want := (map[string][]float64{"tutti": {us, us, us}, "tutti-reg": {us / 2, us / 2,
			us / 2}}); !reflect.DeepEqual(r.Samples, want) {
			t.Errorf("%d bytes: %v, want %v", r.Bytes, r.Samples, want)
		}
	}
	if seen != 3 {
		t.Errorf("%d rows of allreduce, want 3", seen)
	}
	// one for each contestant
	if n := strings.Join(rep.Notes, "\n"); strings.Count(n, "exit status 7 no such luck") != 2 {
		t.Errorf("notes:\n%s", n)
	}
}

// A wrong result in one round of several is a failure, and so are results that are not there, also
// where bars may be missed.
func TestTuttiFailsInARound(t *testing.T) {
	rep, err := compareFake(t, "allgather", "--lenient")
	if err == nil || !strings.Contains(err.Error(),
		"tutti shm allgather float32 on 2 ranks: 1 wrong elements at 64 bytes") {
		t.Errorf("a wrong result: %v", err)
	}
	for _, r := range rep.Rows {
		wrong, samples := r.Bytes != 12<<10, 3 // the others were measured by the same process
		if wrong {
			samples = 2
		}
		if slices.Contains(r.Failed, "tutti") != wrong || len(r.Samples["tutti"]) != samples {
			t.Errorf("a wrong result: %+v", r)
		}
	}
	if rep, err = compareFake(t, "broadcast", "--lenient"); err == nil || !strings.Contains(err.Error(),
		"1 results for 3 sizes") {
		t.Errorf("missing results: %v: %+v", err, rep.Rows)
	}
}

// A comparison without Tutti, because it does not build, is a failure.
func TestTuttiDoesNotBuild(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	bin := filepath.Join(dir, "mpi", "mpich", "bin")
	for _, err := range []error{
		os.MkdirAll(bin, 0o755), os.MkdirAll("cmd/tutti", 0o755),
		os.WriteFile("go.mod", []byte("module tutti\n\ngo 1.24\n"), 0o644),
		os.WriteFile("cmd/tutti/main.go", []byte("package main\n\nfunc main() { broken }\n"), 0o644),
		os.WriteFile(filepath.Join(bin, "mpicc"), []byte("#!/bin/sh\n"), 0o755),
		os.WriteFile(filepath.Join(bin, "mpiexec"), []byte(`#!/bin/sh
for op in alltoall allreduce; do
  echo "{\"op\":\"$op\",\"bytes\":64,\"time_us\":1,\"touch\":true,\"single_copies\":1}"
done
`), 0o755),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	o, err := parseOptions([]string{"--mpi", filepath.Join(dir, "mpi"), "--peers", "mpich5,tutti", "--ops", "allreduce",
		"--ranks", "2", "--transports", "shm", "--sizes", "64", "--rounds", "1", "--lenient"})
	if err != nil {
		t.Fatal(err)
	}
	if err := compare(t.Context(), o); err == nil || !strings.Contains(err.Error(), "go build ./cmd/tutti") {
		t.Errorf("got %v", err)
	}
}

// Every peer that is installed computes the right thing, in every operation that it has.
func TestInstalledPeers(t *testing.T) {
	if testing.Short() {
		t.Skip("starts many processes; not with -short")
	}
	for _, c := range []contestant{openMPI, mpich, openMPI5, mpich5, gloo, limit} {
		t.Run(string(c), func(t *testing.T) {
			w := testWorkshop(t)
			w.o.Sizes = []int64{64, 128 << 10}
			if err := w.build(t.Context(), string(c)); err != nil {
				t.Skip(err)
			}
			for _, w.o.Tight = range []bool{false, true} {
				for _, transport := range []string{"shm", "tcp"} {
					for _, op := range allOps {
						h := heat{c, transport, op, "float32", 2}
						if !c.enters(h) || w.o.Tight && transport != "shm" { // the loop does not know the transport
							continue
						}
						rows, err := w.turn(t.Context(), h)
						if err != nil && !errors.Is(err, errEnding) { // mpiexec of MPICH 4 sometimes aborts then
							t.Fatalf("%s, tight %v: %v", h, w.o.Tight, err)
						}
						seen := map[int64]bool{}
						for _, r := range rows {
							seen[r.Bytes] = true
						}
						sizes := w.o.sizes(op)
						if !seen[sizes[len(sizes)-1]] || (c != limit && !seen[sizes[0]]) {
							t.Errorf("%s, tight %v: rows %+v", h, w.o.Tight, rows)
						}
					}
				}
			}
		})
	}
}

// A library that does what MODE says and tells on stderr what it was asked for.
const fakeLibrary = `#include "measure.h"
static task t;
static const char *mode;
static void call(void *a) {
  (void)a;
  fputs("call ", stderr);
  if (strcmp(mode, "idle") != 0)
    for (size_t i = 0; i < t.count; i++) t.dst[i] = t.src[i];
  if (strcmp(mode, "spoil") == 0) t.dst[t.count - 1] += 1;
}
static double slowest(void *a, double x) { (void)a; return x; }
static void write_one(void *a, long nr) { (void)a; fprintf(stderr, "write%ld ", nr); write_input(&t, nr); }
static long read_one(void *a, long nr) { (void)a; fprintf(stderr, "read%ld ", nr); return wrong(&t, t.dst, nr); }
static void barrier(void *a) { (void)a; fputs("barrier ", stderr); }
static void maxima(void *a, double *x, size_t n) { /* another rank began a second before this one */
  (void)a;
  for (size_t i = 0; i < n; i++)
    if (x[i] < 0) x[i] += 1;
}
int main(int argc, char **argv) {
  settings s = parse(argc, argv);
  mode = argv[9];
  t = prepare(&s, s.sizes[0], 0, 1);
  subject b = {call, slowest, write_one, read_one, barrier, maxima, NULL};
  call(&t);
  timing r = measure(&b, &s);
  report(&s, "allreduce", "fake", 0, 1, t.count * sizeof(float), r, r.wrong);
  return 0;
}
`

// buildFake compiles a program that includes measure.h.
func buildFake(t *testing.T, source string) (program string) {
	t.Helper()
	dir := t.TempDir()
	header, err := sources.ReadFile("src/measure.h")
	if err == nil {
		err = errors.Join(os.WriteFile(filepath.Join(dir, "measure.h"), header, 0o600),
			os.WriteFile(filepath.Join(dir, "fake.c"), []byte(source), 0o600))
	}
	if err != nil {
		t.Fatal(err)
	}
	program = filepath.Join(dir, "fake")
	if out, err := exec.Command("gcc", "-std=gnu11", "-O3", "-Wall", "-Werror", "-o", program,
		filepath.Join(dir, "fake.c")).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return program
}

// A library whose calls take 2 us, one of which something holds up, by a clock of its own that goes
// on when it is read. It prints how much of the budget the calls of a repetition fill that counts,
// in the worst case, and, if they are to begin at ticks, how far behind one a call began.
const fakeClock = `#include <sched.h>
#include <time.h>
static double at = 1;
static int read_clock(clockid_t id, struct timespec *t) {
  (void)id;
  at += 1e-7;
  t->tv_sec = (time_t)at;
  t->tv_nsec = (long)((at - (double)t->tv_sec) * 1e9);
  return 0;
}
static int stay(void) { return 0; }
#define clock_gettime read_clock
#define sched_yield stay
#include "measure.h"
static settings s;
static long calls, held;
static double hold, behind;
static void call(void *a) {
  (void)a;
  double ticks = at / s.tick, rest = (ticks - (double)(long)ticks) * s.tick;
  if (rest > behind) behind = rest;
  at += 2e-6;
  if (++calls == held) at += hold;
}
static long all[100], rounds; /* calls until the end of each repetition */
static double slowest(void *a, double x) {
  (void)a;
  if (x > 0) all[++rounds] = calls;
  return x;
}
static void write_one(void *a, long nr) { (void)a; (void)nr; }
static long read_one(void *a, long nr) { (void)a; (void)nr; return 0; }
static void barrier(void *a) { (void)a; at += 5e-6; }
static void maxima(void *a, double *x, size_t n) { /* calls of one repetition, their beginnings, or its time */
  if (n == 1 && all[rounds] < calls) slowest(a, *x);
}
int main(int argc, char **argv) {
  s = parse(argc, argv);
  subject b = {call, slowest, write_one, read_one, barrier, maxima, NULL};
  double least = 1e9;
  for (int i = 0; i < 2; i++) {
    hold = i ? 3e-3 : 0.7e-3;
    for (held = 1; held < 4000; held += 1 + held / 8) {
      calls = rounds = 0;
      double began = at;
      timing r = measure(&b, &s);
      double each = (at - began - (held <= calls ? hold : 0)) / (double)calls;
      for (int last = 0; last < r.reps; last++) {
        double filled = (double)(all[rounds - last] - all[rounds - last - 1]) * each / s.budget;
        if (filled < least) least = filled;
      }
    }
  }
  printf("{\"filled\":%f,\"behind_us\":%f}\n", least, behind * 1e6);
  return 0;
}
`

// What holds up one call does not make the repetitions that count shorter, also if there is one.
func TestPeersFillTheBudget(t *testing.T) {
	program := buildFake(t, fakeClock)
	for _, touch := range []string{"0", "1"} {
		for _, reps := range []string{"1", "3"} {
			for _, interval := range []string{"2", "64"} {
				out, err := exec.Command(program, "allreduce", "64", "0", reps, "5000", "60", touch, interval).Output()
				var r struct {
					Filled float64 `json:"filled"`
					Behind float64 `json:"behind_us"`
				}
				if err != nil || json.Unmarshal(out, &r) != nil {
					t.Fatalf("%v: %s", err, out)
				}
				if r.Filled < 0.4 { // half, but for what is around the calls
					t.Errorf("touch %s, %s repetitions: the calls that count fill %v of the budget", touch, reps,
						r.Filled)
				}
				if touch == "1" && r.Behind > 0.5 {
					t.Errorf("a call began %v us behind a tick of %s us", r.Behind, interval)
				}
			}
		}
	}
}

// Each call of a peer's follows a write of another input and a barrier, and its result is read and
// checked.
func TestPeersTouchTheirBuffers(t *testing.T) {
	program := buildFake(t, fakeLibrary)
	measure := func(mode, touch string) (row, string) {
		t.Helper()
		cmd := exec.Command(program, "allreduce", "16400", "0", "2", "100000", "60", touch, "2", mode)
		var stderr strings.Builder
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		var r row
		if err != nil || json.Unmarshal(out, &r) != nil || r.TimeUs <= 0 || r.Touch != (touch != "0") {
			t.Fatalf("%s, touch %s: %v: %s", mode, touch, err, out)
		}
		return r, stderr.String()
	}
	r, did := measure("work", "1")
	if r.Wrong != 0 {
		t.Errorf("%d wrong elements", r.Wrong)
	}
	var want strings.Builder
	calls := strings.Count(did, "call ") - 1 // one comes before
	want.WriteString("call ")
	for nr := range calls {
		fmt.Fprintf(&want, "write%d barrier call read%d ", nr+1, nr+1)
	}
	if did != want.String() || calls < 4 {
		t.Errorf("it did %.300s…", did)
	}
	if r, did = measure("work", "0"); strings.Contains(did, "write") || strings.Contains(did, "read") {
		t.Errorf("the tight loop did %.300s…", did)
	}
	if r, _ = measure("work", "1"); r.TimeUs >= 1e6 {
		t.Errorf("a rank with a processor: %v us, expected its own time", r.TimeUs)
	}
	if r, _ = measure("work", "2"); r.TimeUs < 1e6 {
		t.Errorf("ranks that share processors: %v us, expected the time from the first one's beginning", r.TimeUs)
	}
	// idle: what is there is the result of no call, or of the one before
	for _, mode := range []string{"idle", "spoil"} {
		if r, _ = measure(mode, "1"); r.Wrong == 0 {
			t.Errorf("%s: no wrong elements", mode)
		}
	}
}
