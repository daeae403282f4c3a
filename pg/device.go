package pg

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
	"unsafe"

	"tutti/device"
	"tutti/internal/backoff"
	"tutti/mem"
	"tutti/pg/internal/exec"
)

// Operations on a device's memory run on host memory, which the device copies from and to. The
// stream that an operation belongs to gets, at once:
//
//	copy the source to the host
//	tell that it is there (the first word)
//	wait until the operation is over (the second word)
//	copy the result back
//	tell that the operation has been passed (the third word)
//
// So the host waits for nothing in Start, and everything is in the order of the stream. No other
// stream is needed while it waits: streams may share a queue of the device, and then hold up each
// other.

// devices is what a group has of Config.Devices.
type devices struct {
	mu      sync.Mutex
	streams map[Location]device.Stream // for buffers without one
	berths  map[Location][]*berth
	closed  bool
}

// A berth is host memory with three words, for one operation at a time.
type berth struct {
	words []mem.Memory
	host  mem.Memory
	uses  uint64 // the value of all words after the latest use
	free  func() error
}

// Words of a berth.
const (
	wordArrived = iota
	wordOver
	wordPassed
	berthWords
)

// vacant reports whether the stream has passed the latest use.
func (b *berth) vacant() bool { return b.words[wordPassed].Word(0).Load() >= b.uses }

// A visit is one use of a berth. It is immutable.
type visit struct {
	words []mem.Memory
	at    uint64       // the value of the words
	event device.Event // when the stream has passed
}

func (v *visit) arrived() bool { return v.words[wordArrived].Word(0).Load() >= v.at }

// open lets the stream pass. It may be called again when the berth has its next visit.
func (v *visit) open() {
	w := v.words[wordOver].Word(0)
	for now := w.Load(); now < v.at && !w.CompareAndSwap(now, v.at); now = w.Load() {
	}
}

// berthUnit is the smallest size of a berth's memory. Sizes are powers of two.
const berthUnit = 64 << 10

// berth returns a vacant berth at d with room for n bytes, and a stream: s or, if that is nil, one
// of the group. With the lock.
func (x *devices) berth(d device.Device, n int, s device.Stream) (*berth, device.Stream, error) {
	loc := d.Location()
	if s == nil {
		if x.streams[loc] == nil {
			own, err := d.Stream()
			if err != nil {
				return nil, nil, err
			}
			if x.streams == nil {
				x.streams = map[Location]device.Stream{}
			}
			x.streams[loc] = own
		}
		s = x.streams[loc]
	}
	for _, b := range x.berths[loc] {
		if b.vacant() && b.host.Len() >= n && b.host.Len() <= max(4*n, berthUnit) {
			return b, s, nil
		}
	}
	size := berthUnit
	for size < n {
		size *= 2
	}
	words, free, err := device.Words(d, berthWords)
	if err != nil {
		return nil, nil, err
	}
	b := &berth{words: words, free: free}
	if a, ok := d.(device.HostAllocator); !ok {
		b.host = mem.Host(make([]byte, size), mem.Anywhere)
	} else if b.host, err = a.AllocHost(size); err != nil {
		return nil, nil, errors.Join(err, free())
	} else {
		b.free = func() error { return errors.Join(free(), a.FreeHost(b.host)) }
	}
	if x.berths == nil {
		x.berths = map[Location][]*berth{}
	}
	x.berths[loc] = append(x.berths[loc], b)
	return b, s, nil
}

// close frees everything after the last operation. What a stream of the caller has not passed yet
// remains until the device is closed.
func (x *devices) close() (err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.closed = true
	for _, s := range x.streams {
		err = errors.Join(err, s.Close())
	}
	for _, all := range x.berths {
		for _, b := range all {
			if b.vacant() {
				err = errors.Join(err, b.free())
			}
		}
	}
	x.streams, x.berths = nil, nil
	return err
}

// buffers returns the buffers of a collective, of which the second may be empty.
func buffers(op Operation) (dst, src Buffer) {
	switch o := op.(type) {
	case AllReduceOp:
		return o.Dst, o.Src
	case ReduceScatterOp:
		return o.Dst, o.Src
	case AllGatherOp:
		return o.Dst, o.Src
	case AllGatherVOp:
		return o.Dst, o.Src
	case AllToAllOp:
		return o.Dst, o.Src
	case AllToAllVOp:
		return o.Dst, o.Src
	case BroadcastOp:
		return o.X, Buffer{}
	case ReduceOp:
		return o.X, Buffer{}
	case GatherOp:
		return o.Dst, o.Src
	case ScatterOp:
		return o.Dst, o.Src
	}
	return Buffer{}, Buffer{}
}

// place returns the device and the stream of an operation's buffers: nil if the buffers are empty,
// or have no stream.
func (g *Group) place(op Operation, q *exec.Request) (d device.Device, s device.Stream, err error) {
	dst, src := buffers(op)
	bad := func(arg, got, want string) (device.Device, device.Stream, error) {
		return nil, nil, &ArgumentError{Call: q.Kind.String(), Arg: arg, Got: got, Want: want}
	}
	var loc Location
	used := false
	for _, b := range []Buffer{dst, src} {
		switch {
		case b.Count == 0:
			continue
		case used && loc != b.Location || b.Location == "" || b.Location.Host():
			return bad("the buffers' locations", fmt.Sprintf("%q and %q", dst.Location, src.Location), "one location")
		case used && s != b.Stream:
			return bad("the buffers' streams", "two streams", "one stream")
		}
		used, loc, s = true, b.Location, b.Stream
	}
	if !used {
		return nil, nil, nil
	}
	why := errors.New("there are none")
	if f := g.job.settings.Devices; f != nil {
		d, why = f.Find(loc)
	}
	if why != nil {
		return bad("a buffer's location", string(loc),
			fmt.Sprintf("host memory, or the memory of one of Config.Devices (%v)", why))
	}
	return d, s, nil
}

// visit begins the visit of the operation that q asks for, and makes q ask for it on host memory.
func (g *Group) visit(op Operation, q *exec.Request) (*visit, error) {
	d, s, err := g.place(op, q)
	if err != nil {
		return nil, err
	}
	q.Dst.Location, q.Src.Location = "", ""
	g.job.proxy.Lock()
	c, err := g.check(q)
	size, partial := g.v.Size, len(g.v.Active) < g.v.Size || g.job.settings.OnFailure != Report
	closed := g.closed.Load()
	g.job.proxy.Unlock()
	switch {
	case err != nil:
		return nil, err
	case closed:
		return nil, ErrClosed
	case d == nil: // all are empty
		return nil, nil
	}
	loc := d.Location()
	in, out, reads, writes := c.Extents(g.rank, size)
	first, at, total := layOut(uintptr(q.Src.Ptr), in, uintptr(q.Dst.Ptr), out)
	x := &g.devices
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.closed {
		return nil, ErrClosed
	}
	fail := func(err error) error {
		return fmt.Errorf("%s of %d bytes at %s: %w", q.Kind, in+out, loc, err)
	}
	b, s, err := x.berth(d, total, s)
	if err != nil {
		return nil, fail(err)
	}
	b.uses++
	v := &visit{words: b.words, at: b.uses}
	from, to := b.host.Slice(first, in), b.host.Slice(at, out)
	there := func(p unsafe.Pointer, n int) mem.Memory { return mem.Device(uint64(uintptr(p)), n, loc) }
	var steps []func() error
	do := func(when bool, step func() error) {
		if when {
			steps = append(steps, step)
		}
	}
	do(reads, func() error { return s.Copy(from, there(q.Src.Ptr, in)) })
	do(writes && partial && c.Kind.Layout().Out.Parted(), // the parts of inactive slots stay as they are
		func() error { return s.Copy(to, there(q.Dst.Ptr, out)) })
	do(true, func() error { return s.WriteValue(v.words[wordArrived], v.at) })
	do(true, func() error { return s.WaitValue(v.words[wordOver], v.at) })
	do(writes, func() error { return s.Copy(there(q.Dst.Ptr, out), to) })
	do(true, func() error { return s.WriteValue(v.words[wordPassed], v.at) })
	do(true, func() (err error) { v.event, err = s.Record(); return err })
	for _, step := range steps {
		if err := step(); err != nil { // the stream has failed, and may still come to what it has taken
			v.open()
			b.uses++ // so that it is never vacant
			return nil, fail(err)
		}
	}
	host := func(b *exec.Buffer, m mem.Memory) {
		if b.Ptr = nil; m.Len() > 0 && b.Count > 0 {
			b.Ptr = unsafe.Pointer(unsafe.SliceData(m.Bytes()))
		}
	}
	host(&q.Src, from)
	host(&q.Dst, to)
	return v, nil
}

// layOut returns offsets in host memory for two ranges of a device, and the length of that memory.
// Ranges that overlap do so there, too.
func layOut(in uintptr, n int, out uintptr, m int) (from, to, total int) {
	if n > 0 && m > 0 && in < out+uintptr(m) && out < in+uintptr(n) {
		base := min(in, out)
		from, to = int(in-base), int(out-base)
		return from, to, max(from+n, to+m)
	}
	to = (n + 63) &^ 63
	return 0, to, to + m
}

// startOnDevice is begin for buffers of which one may be in a device's memory. q is a value, so
// that the requests of other operations need no memory.
func (g *Group) startOnDevice(op Operation, q exec.Request, limit time.Duration) *Work {
	v, err := g.visit(op, &q)
	g.job.proxy.Lock()
	defer g.job.proxy.Unlock()
	w := g.newWork()
	if err != nil {
		w.end(false, err)
		return w
	}
	if v != nil {
		w.at.Store(&progress{g: g, visit: v})
	}
	g.start(w, &q, limit)
	return w
}

// doOnDevice is Do for buffers of which one may be in a device's memory.
func (g *Group) doOnDevice(ctx context.Context, op Operation, q exec.Request) error {
	v, err := g.visit(op, &q)
	if err != nil {
		return err
	}
	err = g.operate(ctx, &q, v)
	if v != nil {
		v.open()
	}
	return err
}

// across runs the current call, between enter and leave, after its data has arrived, and returns
// when the stream has the result. v may be nil. here is as in collective.
func (g *Group) across(v *visit) (here bool, err error) {
	if v == nil {
		return g.collective()
	}
	if err := g.arrive(v); err != nil {
		return false, g.miss(err)
	}
	here, err = g.collective()
	v.open()
	if err != nil {
		return here, err
	}
	g.job.proxy.Leave()
	defer g.job.proxy.Return()
	// It waits for nothing but the copy.
	if err := v.event.Wait(g.ctx); err != nil {
		return false, fmt.Errorf("copying the result to the device: %w", err)
	}
	return here, nil
}

// arrive waits until the data of a visit is here, as long as for a peer. Without the stream's data
// the operation cannot begin.
func (g *Group) arrive(v *visit) error {
	pace := backoff.Backoff{Yields: 200, Nap: 50 * time.Microsecond}
	defer pace.Stop()
	if g.wait.Waited() == 0 {
		g.wait.Since(time.Now())
	}
	for !v.arrived() {
		if err := g.coll.Err(); err != nil {
			return nil // the operation finds it
		}
		if g.closed.Load() || g.wait.Err() != nil {
			return nil
		}
		g.job.proxy.Leave()
		failed := v.event.Done() && !v.arrived() // Done also moves some streams
		pace.Wait(context.Background())
		g.job.proxy.Return()
		if failed {
			return fmt.Errorf("its stream has failed: %w", v.event.Wait(g.ctx))
		}
	}
	return nil
}
