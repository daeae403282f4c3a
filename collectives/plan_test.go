package collectives

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
)

func upTo(n int) []int {
	s := make([]int, n)
	for i := range s {
		s[i] = i
	}
	return s
}

func buildAll(t testing.TB, a Algo, s Shape) []*Plan {
	t.Helper()
	var plans []*Plan
	for _, slot := range s.Active {
		s.Rank = slot
		p, err := Build(a, s)
		if err != nil {
			t.Fatal(err)
		}
		plans = append(plans, p)
	}
	return plans
}

// TestGolden prints plans. Commands: "plan KIND ALGO key=value...", and "choose KIND ..." with
// caps, which prints the algorithm by total bytes.
func TestGolden(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			kind, err := ParseKind(d.CmdArgs[0].Key)
			if err != nil {
				d.Fatalf(t, "%v", err)
			}
			s := Shape{Kind: kind, Elem: 4, Count: 1, Size: 2}
			list := func(name string) (xs []int) {
				for _, a := range d.CmdArgs {
					for _, v := range a.Vals {
						if a.Key == name {
							x, err := strconv.Atoi(v)
							if err != nil {
								d.Fatalf(t, "%s: %v", name, err)
							}
							xs = append(xs, x)
						}
					}
				}
				return xs
			}
			one := func(name string, to *int) {
				if v := list(name); v != nil {
					*to = v[0]
				}
			}
			one("size", &s.Size)
			one("rank", &s.Rank)
			one("root", &s.Root)
			one("count", &s.Count)
			one("elem", &s.Elem)
			one("chunk", &s.Chunk)
			if s.Active = list("active"); s.Active == nil {
				s.Active = upTo(s.Size)
			}
			s.Counts, s.RecvCounts, s.Hosts = list("counts"), list("recvcounts"), list("hosts")
			if d.Cmd == "plan" {
				algo, err := ParseAlgo(d.CmdArgs[1].Key)
				if err != nil {
					return err.Error() + "\n"
				}
				p, err := Build(algo, s)
				if err != nil {
					return err.Error() + "\n"
				}
				return p.String()
			}
			c := Caps{Mapped: d.HasArg("mapped"), SharedMemory: d.HasArg("memory"), Puts: d.HasArg("puts")}
			one("cores", &c.Cores)
			var w strings.Builder
			last := Auto
			for bytes := 64; bytes <= 64<<20; bytes *= 2 {
				s.Elem, s.Count = 1, bytes
				if a := Choose(s, c); a != last {
					fmt.Fprintf(&w, "%8d %v\n", bytes, a)
					last = a
				}
			}
			return w.String()
		})
	})
}

func TestParseAcceptsEveryName(t *testing.T) {
	for a := Auto; a < numAlgos; a++ {
		if got, err := ParseAlgo(a.String()); err != nil || got != a {
			t.Errorf("ParseAlgo(%q) = %v, %v", a.String(), got, err)
		}
	}
	for _, k := range Kinds() {
		if got, err := ParseKind(k.String()); err != nil || got != k {
			t.Errorf("ParseKind(%q) = %v, %v", k.String(), got, err)
		}
		if len(Algorithms(k)) < 2 {
			t.Errorf("%v has only %v", k, Algorithms(k))
		}
	}
	if _, err := ParseAlgo("rings"); err == nil || !strings.Contains(err.Error(), "hierarchical") {
		t.Errorf("ParseAlgo(rings): %v", err)
	}
	if _, err := ParseKind(""); err == nil || !strings.Contains(err.Error(), "allgatherv") {
		t.Errorf("ParseKind: %v", err)
	}
	if Algorithms(0) != nil || Algorithms(200) != nil {
		t.Error("algorithms of no kind")
	}
}

func TestShapeErrors(t *testing.T) {
	good := Shape{Kind: AllGatherV, Size: 3, Active: []int{0, 2}, Rank: 2, Elem: 4, Counts: []int{1, 2, 3}}
	if err := good.Validate(); err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func(s *Shape){
		"kind":        func(s *Shape) { s.Kind = 77 },
		"size":        func(s *Shape) { s.Size = 0 },
		"huge size":   func(s *Shape) { s.Size = MaxSize + 1 },
		"none active": func(s *Shape) { s.Active = nil },
		"descending":  func(s *Shape) { s.Active = []int{2, 0} },
		"twice":       func(s *Shape) { s.Active = []int{2, 2} },
		"slot":        func(s *Shape) { s.Active = []int{2, 3} },
		"negative":    func(s *Shape) { s.Active = []int{-1, 2} },
		"rank":        func(s *Shape) { s.Rank = 1 },
		"root":        func(s *Shape) { s.Kind, s.Root = Gather, 1 },
		"chunk":       func(s *Shape) { s.Chunk = -1 },
		"huge chunk":  func(s *Shape) { s.Chunk = MaxChunk + 1 },
		"hosts":       func(s *Shape) { s.Hosts = []int{1} },
		"elem":        func(s *Shape) { s.Elem = 0 },
		"counts":      func(s *Shape) { s.Counts = s.Counts[:2] },
		"count":       func(s *Shape) { s.Counts[1] = -1 },
		"huge counts": func(s *Shape) { s.Counts = []int{math.MaxInt / 4, math.MaxInt / 4, math.MaxInt / 4} },
		"huge count":  func(s *Shape) { s.Kind, s.Count = AllReduce, math.MaxInt/4 },
		"minus count": func(s *Shape) { s.Kind, s.Count = AllReduce, -1 },
		"recvcounts":  func(s *Shape) { s.Kind = AllToAllV },
		"to itself":   func(s *Shape) { s.Kind, s.RecvCounts = AllToAllV, []int{1, 2, 4} },
	} {
		s := good
		s.Counts = append([]int{}, good.Counts...)
		spoil(&s)
		for a := Auto; a < numAlgos; a++ {
			if p, err := Build(a, s); p != nil || !errors.Is(err, ErrShape) {
				t.Errorf("%s: Build(%v) = %v, want ErrShape", name, a, err)
			}
		}
	}
	if _, err := Build(Chain, good); err == nil || !strings.Contains(err.Error(), "ring") {
		t.Errorf("Build(Chain) of an allgatherv: %v; want the algorithms that it has", err)
	}
	if _, err := Build(99, good); err == nil {
		t.Error("Build(99) worked")
	}
}

func TestTooLong(t *testing.T) {
	s := Shape{Size: 4, Active: upTo(4), Elem: 1, Count: 1 << 50, Chunk: 1}
	for k := range numKinds {
		s.Kind = Kind(k)
		for _, a := range Algorithms(s.Kind) {
			if s.Kind == AllGatherV && a == Ring {
				continue // see TestLongPartsFitIntoAPlan
			}
			s.Counts = []int{1 << 50, 1 << 50, 1 << 50, 1 << 50}
			s.RecvCounts = s.Counts
			if p, err := Build(a, s); err == nil && len(p.Steps) > 100 || err != nil && !errors.Is(err, ErrTooLong) {
				t.Errorf("%v %v: %v", s.Kind, a, err)
			}
		}
	}
}

// TestLongPartsFitIntoAPlan: AllGatherV is not cut into blocks, and one rank may give much.
func TestLongPartsFitIntoAPlan(t *testing.T) {
	for _, n := range []int{4, 65, 128, 1024} {
		for _, chunk := range []int{64 << 10, 512 << 10} {
			s := Shape{Kind: AllGatherV, Size: n, Active: upTo(n), Elem: 4, Chunk: chunk, Counts: make([]int, n)}
			s.Counts[0] = 1 << 32
			for _, a := range []Algo{Choose(s, Caps{}), Ring} {
				if _, err := Build(a, s); err != nil {
					t.Error(err)
				}
			}
		}
	}
}

// TestChooseAgrees: the choice is buildable, the same on all ranks, and loadstore only where memory
// is mapped.
func TestChooseAgrees(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	seen := map[Algo]bool{}
	for range 20000 {
		n := 1 + r.IntN(1+r.IntN(100))
		c := draw(r, Kinds()[r.IntN(len(Kinds()))], Algo(r.IntN(int(numAlgos))), n)
		c.shape.Count, c.shape.Elem = 1<<r.IntN(20), 4
		caps := Caps{r.IntN(3) == 0, r.IntN(3) == 0, r.IntN(2) == 0, r.IntN(9)}
		first := c.rank(0)
		a := Choose(first, caps)
		seen[a] = true
		if algos[a].makers[first.Kind] == nil {
			t.Fatalf("%v has no %v", first.Kind, a)
		}
		if a == LoadStore && !caps.Mapped || a == OneSided && !caps.Puts {
			t.Fatalf("%v: %v with %+v", c, a, caps)
		}
		if b := Choose(c.rank(n-1), caps); b != a {
			t.Fatalf("%v: rank %d chooses %v, another %v", c, n-1, b, a)
		}
	}
	for a := OneShot; a < numAlgos; a++ {
		if !seen[a] {
			t.Errorf("%v is never chosen", a)
		}
	}
	if Choose(Shape{}, Caps{}) != Auto {
		t.Error("a choice for no kind")
	}
}

// TestLoadStoreStepsAreFew: a rank reduces once at most, before it copies, and it copies from each
// rank once at most. Streams of devices are given room for that.
func TestLoadStoreStepsAreFew(t *testing.T) {
	r := rand.New(rand.NewPCG(8, 1))
	for n := 1; n <= 20; n++ {
		for _, k := range Kinds() {
			if !slices.Contains(Algorithms(k), LoadStore) {
				continue
			}
			c := draw(r, k, LoadStore, n)
			for i := range n {
				p, err := Build(LoadStore, c.rank(i))
				if err != nil {
					t.Fatal(err)
				}
				reductions, copies := 0, 0
				for _, s := range p.Steps {
					switch s.Verb {
					case ReduceInto:
						if reductions++; copies > 0 {
							t.Errorf("%v: it reduces after it has copied", c)
						}
					case Copy:
						copies++
					}
				}
				if reductions > 1 || copies > n {
					t.Errorf("%v: %d reductions and %d copies of %d ranks", c, reductions, copies, n)
				}
			}
		}
	}
}

// TestPlansStaySmall: what the documentation says about sizes of plans.
func TestPlansStaySmall(t *testing.T) {
	for _, k := range Kinds() {
		for _, a := range Algorithms(k) {
			if k == AllGatherV || k == AllToAllV {
				continue
			}
			s := Shape{Kind: k, Size: 8, Active: upTo(8), Rank: 3, Elem: 4, Count: 1 << 20}
			p, err := Build(a, s)
			if err != nil {
				t.Fatal(err)
			}
			chunks := s.Count * s.Elem / DefaultChunk
			if len(p.Steps) > chunks*8*4 {
				t.Errorf("%v %v: %d steps for %d chunks", k, a, len(p.Steps), chunks)
			}
			if p.Tmp > 16*DefaultChunk {
				t.Errorf("%v %v: %d bytes of scratch memory", k, a, p.Tmp)
			}
			if q, _ := Build(a, s); !reflect.DeepEqual(p, q) {
				t.Errorf("%v %v: Build is not a function", k, a)
			}
		}
	}
	// The shortest possible plans where they matter most.
	s := Shape{Kind: AllReduce, Size: 2, Active: upTo(2), Elem: 4, Count: 16}
	for a, want := range map[Algo]int{OneShot: 3, LoadStore: 6, Doubling: 3} {
		if p, _ := Build(a, s); len(p.Steps) != want {
			t.Errorf("%v allreduce of two ranks has %d steps, want %d", a, len(p.Steps), want)
		}
	}
	// LoadStore moves the least: of two ranks each loads the peer's half to fold it, and the other
	// half's result.
	s.Count = 1 << 20
	for _, p := range buildAll(t, LoadStore, s) {
		loads, stores := 0, 0
		for _, st := range p.Steps {
			for _, r := range append([]Ref{st.Src}, st.Srcs...) {
				if r.Buf == PeerIn || r.Buf == PeerOut {
					loads += r.Len
				}
			}
			if st.Verb == ReduceInto || st.Verb == Copy {
				stores += st.Dst.Len
			}
		}
		if v := s.Count * s.Elem; loads != v || stores != v {
			t.Errorf("rank %d loads %d bytes of its peer and stores %d, want %d each", p.Shape.Rank, loads, stores, v)
		}
	}
}

func TestSplit(t *testing.T) {
	for _, elem := range []int{1, 2, 3, 4, 8, 16, 48, 64, 100} {
		for n := 1; n < 20; n++ {
			for count := range 700 {
				b := split(count, n, elem)
				if len(b) != n+1 || b[0] != 0 || b[n] != count*elem {
					t.Fatalf("split(%d, %d, %d) = %v", count, n, elem, b)
				}
				unit := lcm(elem, 64)
				for p := 1; p <= n; p++ {
					if b[p] < b[p-1] || b[p]%elem != 0 {
						t.Fatalf("split(%d, %d, %d) = %v", count, n, elem, b)
					}
					if count*elem/unit >= n && p < n && b[p]%unit != 0 {
						t.Fatalf("split(%d, %d, %d) = %v: not in whole cache lines", count, n, elem, b)
					}
				}
				if w := widest(b); w > count*elem/n+2*max(unit, elem) {
					t.Fatalf("split(%d, %d, %d) = %v: uneven", count, n, elem, b)
				}
			}
		}
	}
}

// TestCost: the model gives the textbook formulas, and pipelining pays.
func TestCost(t *testing.T) {
	cost := func(a Algo, k Kind, n, count, chunk int, net Net) float64 {
		s := Shape{Kind: k, Size: n, Active: upTo(n), Elem: 4, Count: count, Chunk: chunk}
		c, err := Cost(buildAll(t, a, s), net)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	near := func(name string, got, want float64) {
		if math.Abs(got-want) > 1e-9*want {
			t.Errorf("%s: %g, want %g", name, got, want)
		}
	}
	for n, log := 2, 1.0; n <= 64; n, log = n*2, log+1 {
		near("dissemination", cost(Dissemination, Barrier, n, 0, 0, Net{Latency: 1}), log)
		near("doubling", cost(Doubling, AllReduce, n, 256, 0, Net{Latency: 1}), log)
		near("halving", cost(Halving, AllReduce, n, 256, 0, Net{Latency: 1}), 2*log)
		near("half of halving", cost(Halving, ReduceScatter, n, 256, 0, Net{Latency: 1}), log)
		near("ring", cost(Ring, AllReduce, n, 256, 0, Net{Latency: 1}), 2*float64(n-1))
		near("twoshot", cost(TwoShot, AllReduce, n, 256, 0, Net{Latency: 1}), 2)
		near("oneshot", cost(OneShot, AllReduce, n, 256, 0, Net{Latency: 1}), 1)
		near("tree", cost(Tree, Broadcast, n, 256, 0, Net{Latency: 1}), log)
		// A part is loaded from n ranks and stored, then the others' parts are loaded and stored.
		near("loadstore", cost(LoadStore, AllReduce, n, 1<<13*n, 0, Net{Memory: 1}), 4*(1<<13)*float64(n+1+2*(n-1)))
		// A byte out and in again, for all but the own part; in an allreduce twice.
		near("half of halving bytes", cost(Halving, ReduceScatter, n, 64, 0, Net{Byte: 1}), 2*256*float64(n-1))
		near("ring bytes", cost(Ring, AllReduce, n, 64*n, 0, Net{Byte: 1}), 4*256*float64(n-1))
		near("twoshot bytes", cost(TwoShot, AllReduce, n, 64*n, 0, Net{Byte: 1}), 4*256*float64(n-1))
	}
	// 8 hops of 1 MiB: whole, every hop takes all its time; in chunks the hops overlap.
	whole, cut := cost(Chain, Broadcast, 9, 1<<18, 1<<20, Net{Byte: 1}),
		cost(Chain, Broadcast, 9, 1<<18, 1<<14, Net{Byte: 1})
	if cut > whole/3 {
		t.Errorf("a pipelined chain takes %g, a plain one %g", cut, whole)
	}
}

func FuzzBuild(f *testing.F) {
	f.Add(uint8(1), uint8(3), 4, uint64(0xf), 0, 0, 4, 1000, 64, []byte{1, 2, 3, 4}, []byte{0, 0, 1, 1})
	f.Add(uint8(11), uint8(4), 3, uint64(0x5), 2, 0, 1, 0, 0, []byte{9, 0, 3}, []byte{})
	f.Add(uint8(10), uint8(7), 70, uint64(1)<<63|1, 63, 0, 8, math.MaxInt, 1, []byte{255}, []byte{1})
	f.Add(uint8(2), uint8(9), 1<<20, uint64(6), 1, 1, 1<<30, 1<<40, 1<<30, []byte{}, []byte{3, 3})
	f.Fuzz(func(t *testing.T, kind, algo uint8, size int, active uint64, rank, root, elem, count, chunk int, counts,
		hosts []byte) {
		s := Shape{Kind: Kind(kind), Size: size, Rank: rank, Root: root, Elem: elem, Count: count, Chunk: chunk}
		for i := range 64 {
			if active>>i&1 == 1 {
				s.Active = append(s.Active, i)
			}
		}
		for _, h := range hosts {
			s.Hosts = append(s.Hosts, int(h))
		}
		for i, c := range counts {
			s.Counts = append(s.Counts, int(c)<<(i%60))
			s.RecvCounts = append(s.RecvCounts, int(c)<<(i%60))
		}
		Choose(s, Caps{Mapped: count&1 == 0, Cores: size & 7})
		p, err := Build(Algo(algo), s)
		if err != nil {
			if p != nil {
				t.Fatal("a plan with an error")
			}
			return
		}
		if len(p.Steps) > MaxSteps {
			t.Fatalf("%d steps", len(p.Steps))
		}
		if err := p.Check(); err != nil {
			t.Fatal(err)
		}
		if len(p.Steps) < 1000 {
			_ = p.String()
		}
	})
}

func BenchmarkBuild(b *testing.B) {
	for _, n := range []int{2, 64} {
		for _, a := range []Algo{OneShot, TwoShot, LoadStore, Ring} {
			b.Run(fmt.Sprintf("%v/%d", a, n), func(b *testing.B) {
				s := Shape{Kind: AllReduce, Size: n, Active: upTo(n), Elem: 4, Count: 1 << 20}
				b.ReportAllocs()
				for b.Loop() {
					if _, err := Build(a, s); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
