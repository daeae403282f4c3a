package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"tutti/mem"
	"tutti/rdma"
	"tutti/rdma/queue"
	"tutti/rdma/verbs"
)

// place is what one end tells the other.
type place struct {
	QP      uint32   `json:"qp"`
	GID     rdma.GID `json:"gid"`
	Address uint64   `json:"address"`
	Key     uint32   `json:"key"`
}

// streamBatch is the writes of a batch of the stream.
const streamBatch = 16

// end is a process of Tutti's.
type end struct {
	settings
	b     []byte
	mr    rdma.MR
	set   *queue.Set
	there place
}

const rights = rdma.LocalWrite | rdma.RemoteWrite

// runEnd is the program of a process of Tutti's. It reads the settings, the place of the other end
// and whether that is connected, and prints its place, that it is connected, and a result. It ends
// when its input does.
func runEnd(name string) (err error) {
	e := &end{}
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	if err := in.Decode(&e.settings); err != nil {
		return err
	}
	run, ok := map[string]func(context.Context, *json.Encoder) error{
		"bandwidth server": func(context.Context, *json.Encoder) error { return nil },
		"bandwidth client": e.stream,
		"latency server":   e.echo,
		"latency client":   e.trips,
	}[name]
	if !ok {
		return fmt.Errorf("no end %q", name)
	}
	p, err := verbs.Load()
	if err != nil {
		return err
	}
	d, err := p.Open(e.Device, nil)
	if err != nil {
		return err
	}
	done := func(what interface{ Close() error }) { err = errors.Join(err, what.Close()) }
	defer done(d)
	e.b = make([]byte, e.Size+2*8)
	if e.mr, err = d.Register(mem.Host(e.b, mem.Anywhere), rights); err != nil {
		return err
	}
	defer done(e.mr)
	poller, err := queue.NewPoller(d, 2*e.Depth)
	if err != nil {
		return err
	}
	defer done(poller)
	q, err := d.NewQP(rdma.QPConfig{Send: poller.CQ(), Recv: poller.CQ(), SendDepth: e.Depth})
	if err != nil {
		return err
	}
	if e.set, err = queue.New(poller, []rdma.QP{q}, queue.Config{}); err != nil {
		return errors.Join(err, q.Close())
	}
	defer done(e.set)
	gids, err := d.GIDs(1)
	if err != nil {
		return err
	}
	g, err := rdma.ChooseGID(gids, "")
	if err != nil {
		return err
	}
	here := place{q.Number(), g.GID, uint64(uintptr(unsafe.Pointer(&e.b[0]))), e.mr.RemoteKey()}
	if err := errors.Join(out.Encode(here), in.Decode(&e.there)); err != nil {
		return err
	}
	port, err := d.Port(1)
	if err != nil {
		return err
	}
	if err := errors.Join(q.Init(1, rights), q.Connect(&rdma.Route{Port: 1, GIDIndex: g.Index, Global: true,
		MTU: port.MTU, PSN: q.Number(), Remote: e.there.QP, RemotePSN: e.there.QP, GID: e.there.GID, Reads: 1,
		Timeout: 14, Retries: 7, RNRRetries: 7})); err != nil {
		return err
	}
	var ready bool
	if err := errors.Join(out.Encode(true), in.Decode(&ready)); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), e.Deadline)
	defer cancel()
	if err := run(ctx, out); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// stream writes e.Size bytes again and again, to the same place, with e.Depth writes under way, and
// prints MiB/s.
func (e *end) stream(ctx context.Context, out *json.Encoder) error {
	var b queue.Batch
	for range streamBatch {
		b.Ops = append(b.Ops, e.write(0, 0, e.Size))
	}
	under := make([]*queue.Transfer, e.Depth/streamBatch)
	n := (e.Writes + streamBatch - 1) / streamBatch
	begin := time.Now()
	for i := range n + len(under) {
		t := &under[i%len(under)]
		if *t != nil {
			if err := (*t).Wait(ctx); err != nil {
				return err
			}
			*t = nil
		}
		if i < n {
			var err error
			if *t, err = e.set.Submit(ctx, &b); err != nil {
				return err
			}
		}
	}
	bytes := float64(n * streamBatch * e.Size)
	return out.Encode(bytes / time.Since(begin).Seconds() / (1 << 20))
}

// write is a write of n bytes from here to the other end's to.
func (e *end) write(from, to, n int) queue.Op {
	return queue.Op{Kind: rdma.Write, Local: uint64(uintptr(unsafe.Pointer(&e.b[from]))), Key: e.mr.LocalKey(),
		Remote: e.there.Address + uint64(to), RemoteKey: e.there.Key, Len: uint64(n)}
}

// words returns the word that is written from, and the one that is written to.
func (e *end) words() (from, to *uint64) {
	w := unsafe.Slice((*uint64)(unsafe.Pointer(&e.b[0])), 2)
	return &w[0], &w[1]
}

// pass writes number i to the other end.
func (e *end) pass(ctx context.Context, b *queue.Batch, i uint64) (*queue.Transfer, error) {
	from, _ := e.words()
	atomic.StoreUint64(from, i)
	return e.set.Submit(ctx, b)
}

// await waits until the other end has written number i.
func (e *end) await(ctx context.Context, i uint64) error {
	_, to := e.words()
	for spins := 1; atomic.LoadUint64(to) != i; spins++ {
		if spins%(1<<16) == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
	}
	return nil
}

// trips has numbers go to the other end and back, and prints the median time of one way, in us.
func (e *end) trips(ctx context.Context, out *json.Encoder) error {
	b := queue.Batch{Ops: []queue.Op{e.write(0, 8, 8)}}
	times := make([]time.Duration, 0, e.Trips)
	for i := range uint64(e.Trips) {
		begin := time.Now()
		t, err := e.pass(ctx, &b, i+1)
		if err != nil {
			return err
		}
		// As in ib_write_lat, the completion is polled while the number is on its way.
		if err := errors.Join(t.Wait(ctx), e.await(ctx, i+1)); err != nil {
			return err
		}
		times = append(times, time.Since(begin))
	}
	slices.Sort(times)
	return out.Encode(times[len(times)/2].Seconds() * 1e6 / 2)
}

// echo is the other end of trips.
func (e *end) echo(ctx context.Context, _ *json.Encoder) error {
	b := queue.Batch{Ops: []queue.Op{e.write(0, 8, 8)}}
	for i := range uint64(e.Trips) {
		if err := e.await(ctx, i+1); err != nil {
			return err
		}
		t, err := e.pass(ctx, &b, i+1)
		if err != nil {
			return err
		}
		if err := t.Wait(ctx); err != nil {
			return err
		}
	}
	return nil
}
