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

// end is one end of a connection.
type end struct {
	t      testing.TB
	f      rdma.Provider
	name   string
	wait   uint8 // Route.Timeout
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
	var at [2]rdma.GIDEntry
	for j, x := range []*end{e, o} {
		all, err := x.d.GIDs(1)
		if err != nil {
			return err
		}
		if at[j], err = rdma.ChooseGID(all, ""); err != nil {
			return err
		}
	}
	if err := q.Init(1, rights); err != nil {
		return err
	}
	return q.Connect(&rdma.Route{Port: 1, GIDIndex: at[0].Index, Global: true, MTU: 1024, PSN: q.Number(),
		Remote: o.qps[i].Number(), RemotePSN: o.qps[i].Number(), GID: at[1].GID, Reads: 4, Timeout: e.wait, Retries: 7,
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

// newEnds returns two connected ends over rdma/soft.
func newEnds(t testing.TB, f *soft.Fabric, queues, depth, bytes int, cfg Config) (a, b *end) {
	t.Helper()
	return newEndsOver(t, f, [2]string{"soft0", "soft1"}, 1, queues, depth, bytes, cfg)
}

// newEndsOver returns two connected ends.
func newEndsOver(t testing.TB, p rdma.Provider, names [2]string, wait uint8, queues, depth, bytes int,
	cfg Config) (a, b *end) {
	t.Helper()
	var ends [2]*end
	for i, name := range names {
		ends[i] = &end{t: t, f: p, name: name, wait: wait, b: make([]byte, bytes), cfg: cfg, queues: queues,
			depth: depth}
		ends[i].open()
	}
	if err := join(ends[0], ends[1]); err != nil {
		t.Fatal(err)
	}
	return ends[0], ends[1]
}
