package queue

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"tutti/rdma"
)

type place struct {
	key     uint32
	address uint64
}

// move is what becomes of one byte.
type move struct {
	kind          rdma.Opcode
	remote, local place
}

// moves returns what operations do with each byte.
func moves(ops []Op) map[move]int {
	all := map[move]int{}
	for _, o := range ops {
		for i := range o.Len {
			all[move{o.Kind, place{o.RemoteKey, o.Remote + i}, place{o.Key, o.Local + i}}]++
		}
	}
	return all
}

// overlap reports whether operations of a kind have a remote byte in common.
func overlap(ops []Op) bool {
	type use struct {
		kind rdma.Opcode
		at   place
	}
	used := map[use]bool{}
	for _, o := range ops {
		for i := range o.Len {
			u := use{o.Kind, place{o.RemoteKey, o.Remote + i}}
			if used[u] {
				return true
			}
			used[u] = true
		}
	}
	return false
}

// random returns operations of few bytes, many of which are contiguous.
func random(r *rand.Rand, n int) (ops []Op) {
	for range n {
		o := Op{Kind: rdma.Write, Local: r.Uint64N(200), Key: r.Uint32N(2), Remote: r.Uint64N(4000),
			RemoteKey: r.Uint32N(2),
			Len:       r.Uint64N(20)}
		if r.IntN(4) == 0 {
			o.Kind = rdma.Read
		}
		if len(ops) > 0 && r.IntN(3) > 0 {
			last := ops[len(ops)-1]
			o.Kind, o.Remote, o.RemoteKey = last.Kind, last.Remote+last.Len, last.RemoteKey
			if r.IntN(2) == 0 {
				o.Local, o.Key = last.Local+last.Len, last.Key
			}
		}
		ops = append(ops, o)
	}
	r.Shuffle(len(ops), func(i, j int) { ops[i], ops[j] = ops[j], ops[i] })
	return ops
}

// chunks runs a submission without posting, and calls each for the chunks of all queue pairs.
func chunks(x *submission, each func(p *part)) {
	for _, p := range x.using {
		for {
			each(p)
			if p.last {
				break
			}
			x.fill(p)
		}
	}
}

func TestRequestsMoveEveryByteOnce(t *testing.T) {
	for seed := range uint64(3000) {
		r := rand.New(rand.NewPCG(seed, 1))
		queues, segments := 1+r.IntN(3), 1+r.IntN(4)
		cfg := Config{MaxBytes: 1 + r.Uint64N(40), Chunk: 1 + r.IntN(8), Spread: 1}
		_, _, s := newModel(t, queues, 1+r.IntN(20), segments, cfg)
		b := Batch{Ops: random(r, r.IntN(30)), Notify: r.IntN(2) == 0, ID: 5}
		x := newSubmission(s)
		if err := x.plan(&b); err != nil {
			if len(moves(b.Ops)) > 0 || b.Notify {
				t.Fatal(seed, err)
			}
			continue
		}
		overlaps := overlap(b.Ops)
		got, notified := map[move]int{}, map[*part]int{}
		var before rdma.SendRequest
		var of *part
		chunks(x, func(p *part) {
			if of != p {
				of, before = p, rdma.SendRequest{}
			}
			if n := len(p.requests); n == 0 || n > p.chunk {
				t.Fatal(seed, "a chunk of", n)
			}
			for i, q := range p.requests {
				if q.Op == rdma.WriteImm {
					notified[p]++
					if !p.last || i < len(p.requests)-1 || len(q.Segments) > 0 || p.kind != notification {
						t.Fatal(seed, "a notification is not the last request")
					}
					continue
				}
				at := q.RemoteAddress
				for _, g := range q.Segments {
					if g.Len == 0 {
						t.Fatal(seed, "an empty segment")
					}
					for k := range uint64(g.Len) {
						got[move{q.Op, place{q.RemoteKey, at}, place{g.Key, g.Address + k}}]++
						at++
					}
				}
				if n := at - q.RemoteAddress; n == 0 || n > cfg.MaxBytes || len(q.Segments) > segments {
					t.Fatal(seed, q)
				}
				if !overlaps && (q.Op < before.Op || q.Op == before.Op && (q.RemoteKey < before.RemoteKey ||
					q.RemoteKey == before.RemoteKey && q.RemoteAddress < before.RemoteAddress)) {
					t.Fatal(seed, "not sorted", before, q)
				}
				before = q
			}
		})
		want := moves(b.Ops)
		for m, n := range want {
			if got[m] != n {
				t.Fatalf("seed %d: %+v %d times, not %d", seed, m, got[m], n)
			}
		}
		if len(got) != len(want) {
			t.Fatal(seed, len(got), len(want))
		}
		for _, p := range x.using {
			if b.Notify != (notified[p] == 1) {
				t.Fatal(seed, "notifications", notified)
			}
		}
		if spread := x.imm&spreadBit != 0; spread && b.Notify && len(x.using) != queues || !spread &&
			len(x.using) != 1 {
			t.Fatal(seed, "queue pairs", len(x.using))
		}
	}
}

func TestContiguousOperationsBecomeOneRequest(t *testing.T) {
	_, _, s := newModel(t, 1, 64, 3, Config{})
	w := func(local, remote, n uint64) Op {
		return Op{Kind: rdma.Write, Local: local, Key: 1, Remote: remote, RemoteKey: 2, Len: n}
	}
	other := w(0, 30, 10)
	other.RemoteKey = 3
	for name, c := range map[string]struct {
		ops      []Op
		segments []int // of each request
	}{
		"one":                 {[]Op{w(0, 0, 10)}, []int{1}},
		"both sides":          {[]Op{w(10, 10, 10), w(0, 0, 10), w(20, 20, 10)}, []int{1}},
		"remote side":         {[]Op{w(500, 10, 10), w(0, 0, 10), w(700, 20, 10)}, []int{3}},
		"too many segments":   {[]Op{w(500, 10, 10), w(0, 0, 10), w(700, 20, 10), w(900, 30, 10)}, []int{3, 1}},
		"a gap":               {[]Op{w(0, 0, 10), w(11, 11, 10)}, []int{1, 1}},
		"another key":         {[]Op{w(0, 20, 10), other}, []int{1, 1}},
		"the same byte twice": {[]Op{w(0, 0, 10), w(9, 9, 10)}, []int{1, 1}},
		"empty ones":          {[]Op{w(0, 0, 10), w(5, 5, 0), w(10, 10, 10)}, []int{1}},
	} {
		t.Run(name, func(t *testing.T) {
			x := newSubmission(s)
			if err := x.plan(&Batch{Ops: c.ops}); err != nil {
				t.Fatal(err)
			}
			got := []int{}
			chunks(x, func(p *part) {
				for _, q := range p.requests {
					got = append(got, len(q.Segments))
				}
			})
			if !slices.Equal(got, c.segments) {
				t.Errorf("requests with %v segments, not %v", got, c.segments)
			}
		})
	}
}

func TestLongOperationsAreCut(t *testing.T) {
	_, _, s := newModel(t, 2, 64, 3, Config{MaxBytes: math.MaxUint64})
	x := newSubmission(s)
	const n = 5<<32 + 77
	if err := x.plan(&Batch{Ops: []Op{{Kind: rdma.Write, Local: 1 << 40, Remote: 1 << 50, Len: n}}}); err != nil {
		t.Fatal(err)
	}
	total, longest := uint64(0), uint64(0)
	chunks(x, func(p *part) {
		for _, q := range p.requests {
			for _, g := range q.Segments {
				total += uint64(g.Len)
				longest = max(longest, uint64(g.Len))
			}
		}
	})
	if total != n || longest > maxRequest || len(x.using) != 2 {
		t.Fatal(total, longest, len(x.using))
	}
}

func TestBatchesThatAreRefused(t *testing.T) {
	_, _, s := newModel(t, 1, 4, 1, Config{})
	for name, b := range map[string]Batch{
		"empty":        {},
		"no bytes":     {Ops: []Op{{Kind: rdma.Write}}},
		"a send":       {Ops: []Op{{Kind: rdma.Send, Len: 1}}},
		"no kind":      {Ops: []Op{{Len: 1}}},
		"local end":    {Ops: []Op{{Kind: rdma.Write, Local: math.MaxUint64, Len: 2}}},
		"remote end":   {Ops: []Op{{Kind: rdma.Read, Remote: math.MaxUint64 - 5, Len: 7}}},
		"too much":     {Ops: []Op{{Kind: rdma.Read, Len: 1 << 62}}},
		"large number": {Notify: true, ID: MaxID + 1},
	} {
		if tr, err := s.Submit(t.Context(), &b); err == nil {
			t.Errorf("%s: %v", name, tr)
		}
	}
}
