package exec

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"unsafe"

	"tutti/collectives"
	"tutti/kernels"
	"tutti/p2p"
	"tutti/p2p/inproc"
)

// drawTable makes a table with some rules for each reduction.
func drawTable(t *testing.T, r *rand.Rand) *collectives.Table {
	rules := map[collectives.Kind][]collectives.Rule{}
	for _, k := range collectives.Kinds() {
		if !k.Reduces() {
			continue
		}
		algos := collectives.Algorithms(k)
		for range r.IntN(6) {
			a := algos[r.IntN(len(algos))]
			rules[k] = append(rules[k], collectives.Rule{When: a.Requires(), MinRanks: r.IntN(33),
				MaxBytes: r.IntN(2) << (15 + r.IntN(6)), Algo: a})
		}
	}
	table, err := collectives.NewTable(rules)
	if err != nil {
		t.Fatal(err)
	}
	return table
}

// Whatever the table and the algorithm that is forced, a reduction that is sent has the order of
// one whose buffers are loaded, if these decide.
func TestSentReductionsHaveTheOrderOfLoadedOnes(t *testing.T) {
	r := rand.New(rand.NewPCG(31, 32))
	tables := []*collectives.Table{nil}
	for range 40 {
		tables = append(tables, drawTable(t, r))
	}
	forced := []collectives.Algo{}
	for a := collectives.Auto; a.Valid(); a++ {
		forced = append(forced, a)
	}
	asked := 0
	for n := 2; n <= 64; n++ {
		active := make([]int, n)
		for i := range active {
			active[i] = i
		}
		for i, table := range tables {
			algo := forced[r.IntN(len(forced))]
			caps := collectives.Caps{Mapped: true, SharedMemory: r.IntN(2) == 0, Cores: r.IntN(9)}
			x := New(Config{})
			x.Settle(Topology{Size: n, Active: active, Caps: caps, Asks: true, Algo: algo, Table: table})
			for _, kind := range collectives.Kinds() {
				for size := collectives.LoadStoreMin(kind); size <= 8<<20 && kind.Reduces(); size *= 2 {
					x.Adopt(Call{Kind: kind, DType: kernels.Float32, Slots: n, Count: size / 4, Root: r.IntN(n)})
					if x.choose(true) != collectives.LoadStore {
						continue
					}
					asked++
					if a := x.sendAlgo(); !a.OnePass() || !slices.Contains(collectives.Algorithms(kind), a) {
						t.Errorf("%v of %d bytes, %d ranks, table %d, forced %v: loaded by loadstore, sent by %v",
							kind, size, n, i, algo, a)
					}
				}
			}
		}
	}
	if asked == 0 {
		t.Error("no call asks")
	}
}

// A sum has the same bits whether the ranks send its buffers or load them, and whether calls came
// before.
func TestSumsOfAnyMemoryHaveTheSameBits(t *testing.T) {
	if !p2p.CanExpose {
		t.Skip("no rank loads memory of others on this processor")
	}
	const n, count = 4, 48 << 10 / 4
	values := [n]float32{1e8, 1, -1e8, 1} // the sum depends on the order
	all := ranksOver(t, n, 1, Config{}, collectives.Caps{Mapped: true, SharedMemory: true},
		func(tr *inproc.Transport) p2p.Transport { return tr })
	var plain, registered [n][]float32
	loaded := false
	for r, it := range all {
		region, err := it.proxy.Alloc(4 * count)
		if err != nil {
			t.Fatal(err)
		}
		plain[r] = make([]float32, count)
		registered[r] = unsafe.Slice((*float32)(unsafe.Pointer(&region.Bytes()[0])), count)
		x := it.runners[0]
		x.cfg.Region = func(ptr unsafe.Pointer, _ int) (*p2p.Region, int) {
			if ptr == unsafe.Pointer(&registered[r][0]) {
				return region, 0
			}
			return nil, 0
		}
		if r == 0 {
			x.cfg.Chosen = func(a collectives.Algo) { loaded = a == collectives.LoadStore }
		}
		it.proxy.Lock()
		err = x.Expose()
		it.proxy.Unlock()
		if err != nil {
			t.Fatal(err)
		}
	}
	var first []float32
	reduce := func(what string, bufs [n][]float32) {
		t.Helper()
		errs := make([]error, n)
		var wg sync.WaitGroup
		for r, it := range all {
			wg.Go(func() {
				for i := range bufs[r] {
					bufs[r][i] = values[r]
				}
				b := buffer(bufs[r], kernels.Float32)
				q := &Request{Kind: collectives.Reduce, Op: kernels.Sum, Src: b, Dst: b}
				errs[r] = it.runners[0].run(t.Context(), q, collectives.Auto)
			})
		}
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
		if first == nil {
			first = slices.Clone(bufs[0])
		}
		if !slices.Equal(bufs[0], first) {
			t.Fatalf("%s: the sum is %v, before %v", what, bufs[0][0], first[0])
		}
	}
	for i := range 8 {
		reduce(fmt.Sprint("plain memory, call ", i), plain)
	}
	for i := 0; i <= mostSent && !loaded; i++ {
		reduce(fmt.Sprint("registered memory, call ", i), registered)
	}
	if !loaded {
		t.Error("no registered memory is loaded")
	}
}
