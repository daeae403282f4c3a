package queue

import (
	"fmt"
	"testing"

	"tutti/rdma"
)

// instant is a queue pair whose requests complete at once, so that a benchmark measures this
// package alone.
type instant struct {
	modelQP
	out []rdma.Completion
}

func (q *instant) Post(chain []rdma.SendRequest) (int, error) {
	for i := range chain {
		if r := &chain[i]; r.Signaled {
			q.out = append(q.out, rdma.Completion{ID: r.ID, QP: q.number, Op: r.Op})
		}
	}
	return len(chain), nil
}

// Poll is that of a completion queue with the completions of one queue pair.
func (q *instant) Poll(out []rdma.Completion) (int, error) {
	n := copy(out, q.out)
	q.out = q.out[:copy(q.out, q.out[n:])]
	return n, nil
}

type instantCQ struct {
	modelCQ
	q *instant
}

func (c *instantCQ) Poll(out []rdma.Completion) (int, error) { return c.q.Poll(out) }

type instantDevice struct {
	world
	cq *instantCQ
}

func (d *instantDevice) NewCQ(int, func()) (rdma.CQ, error) { return d.cq, nil }

func newInstant(b testing.TB) *Set {
	q := &instant{modelQP: modelQP{number: 1, limits: rdma.QPLimits{SendDepth: 256, SendSegments: 8}}}
	d := &instantDevice{cq: &instantCQ{modelCQ: modelCQ{depth: 1024}, q: q}}
	p, err := NewPoller(d, 1024)
	if err != nil {
		b.Fatal(err)
	}
	s, err := New(p, []rdma.QP{q}, Config{})
	if err != nil {
		b.Fatal(err)
	}
	return s
}

// A batch costs one allocation, its transfer, however many requests it has.
func TestAllocations(t *testing.T) {
	s := newInstant(t)
	for _, n := range []int{1, 100} {
		batch, ctx := writes(n), t.Context()
		run := func() {
			tr, err := s.Submit(ctx, batch)
			if err == nil {
				err = tr.Wait(ctx)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		run()
		if got := testing.AllocsPerRun(200, run); got > 1 && !raceEnabled { // its pools forget on purpose
			t.Errorf("%v allocations for %d requests", got, n)
		}
	}
}

func BenchmarkSubmit(b *testing.B) {
	for _, n := range []int{1, 16, 256} {
		for name, gap := range map[string]uint64{"apart": 8, "contiguous": 0} {
			b.Run(fmt.Sprint(n, " ", name), func(b *testing.B) {
				s, batch, ctx := newInstant(b), &Batch{}, b.Context()
				for i := range uint64(n) {
					batch.Ops = append(batch.Ops, Op{Kind: rdma.Write, Local: i * (8 + gap), Remote: i * (8 + gap),
						Len: 8})
				}
				b.ReportAllocs()
				for b.Loop() {
					tr, err := s.Submit(ctx, batch)
					if err == nil {
						err = tr.Wait(ctx)
					}
					if err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
