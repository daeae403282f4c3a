package queue

import (
	"context"
	"testing"
	"time"
	"unsafe"

	"tutti/mem"
	"tutti/rdma"
	"tutti/rdma/soft"
)

// end is one end of a connection over rdma/soft.
type end struct {
	t      testing.TB
	f      *soft.Fabric
	name   string
	d      rdma.Device
	mr     rdma.MR
	b      []byte
	p      *Poller
	s      *Set
	qps    []rdma.QP
	cfg    Config
	queues int
	depth  int
}

const rights = rdma.LocalWrite | rdma.RemoteWrite | rdma.RemoteRead

func addressOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

// open opens the device and registers the memory.
func (e *end) open() {
	e.t.Helper()
	must := func(err error) {
		if err != nil {
			e.t.Fatal(err)
		}
	}
	var err error
	e.d, err = e.f.Open(e.name, nil)
	must(err)
	e.mr, err = e.d.Register(mem.Host(e.b, mem.Anywhere), rights)
	must(err)
	e.p, err = NewPoller(e.d, 3*e.queues*e.depth)
	must(err)
}

// close closes everything.
func (e *end) close() {
	e.t.Helper()
	for _, c := range []func() error{e.s.Close, e.p.Close, e.mr.Close, e.d.Close} {
		if err := c(); err != nil {
			e.t.Fatal(err)
		}
	}
}

// join makes sets of fresh queue pairs at both ends.
func join(a, b *end) error {
	for _, e := range []*end{a, b} {
		e.qps = nil
		for range e.queues {
			q, err := e.d.NewQP(rdma.QPConfig{Send: e.p.CQ(), Recv: e.p.CQ(), SendDepth: e.depth, RecvDepth: e.depth,
				Segments: 3})
			if err != nil {
				return err
			}
			e.qps = append(e.qps, q)
		}
	}
	for _, x := range [][2]*end{{a, b}, {b, a}} {
		for i, q := range x[0].qps {
			if err := x[0].connect(x[1], i, q); err != nil {
				return err
			}
		}
	}
	var err error
	if a.s, err = New(a.p, a.qps, a.cfg); err != nil {
		return err
	}
	b.s, err = New(b.p, b.qps, b.cfg)
	return err
}

// connect moves a queue pair to Ready.
func (e *end) connect(o *end, i int, q rdma.QP) error {
	own, err := e.d.GIDs(1)
	if err != nil {
		return err
	}
	other, err := o.d.GIDs(1)
	if err != nil {
		return err
	}
	if err := q.Init(1, rights); err != nil {
		return err
	}
	return q.Connect(&rdma.Route{Port: 1, GIDIndex: own[2].Index, Global: true, MTU: 4096, PSN: q.Number(),
		Remote: o.qps[i].Number(), RemotePSN: o.qps[i].Number(), GID: other[2].GID, Reads: 4, Timeout: 1, Retries: 7,
		RNRRetries: 7})
}

// op is a write or read of n bytes at off here, from or to off there.
func (e *end) op(o *end, kind rdma.Opcode, off, to, n uint64) Op {
	return Op{Kind: kind, Local: addressOf(e.b) + off, Key: e.mr.LocalKey(), Remote: addressOf(o.b) + to,
		RemoteKey: o.mr.RemoteKey(), Len: n}
}

// soon is a context for what must not take long.
func soon(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// newEnds returns two connected ends.
func newEnds(t testing.TB, f *soft.Fabric, queues, depth, bytes int, cfg Config) (a, b *end) {
	t.Helper()
	a = &end{t: t, f: f, name: "soft0", b: make([]byte, bytes), cfg: cfg, queues: queues, depth: depth}
	b = &end{t: t, f: f, name: "soft1", b: make([]byte, bytes), cfg: cfg, queues: queues, depth: depth}
	a.open()
	b.open()
	if err := join(a, b); err != nil {
		t.Fatal(err)
	}
	return a, b
}
