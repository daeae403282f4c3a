package pg

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"tutti/device"
	"tutti/internal/backoff"
	"tutti/mem"
	"tutti/p2p"
	"tutti/pg/internal/exec"
)

// Operations on a device's memory run on host memory, which a stream copies from and to. The stream
// that an operation of Start belongs to gets, at once:
//
//	copy the source to the host, in pieces, and tell after each that it is there (the first word)
//	before each piece of the result, wait until the host has it (the second word),
//	copy it back, and tell that the operation has been passed so far (the third word)
//
// So the host waits for nothing in Start, and everything is in the order of the stream. No other
// stream is needed while it waits: streams may share a queue of the device, and then hold up each
// other. When an operation fails, the second word lets the stream pass: nothing can take back what
// it was given.
//
// No other code gives work to the stream of a blocking operation, or to those of the group (for
// buffers without a stream), before the operation has ended. They are given the copy of a piece
// when the host has it, and never wait: such visits are lazy. What a lazy visit has not been given
// is never done. The same holds for places in a stream of the caller, in which only that stream
// waits: see directly.

// devices is what a group has of Config.Devices.
type devices struct {
	piece int                    // bytes that are copied as a piece, at least; 0: leastPiece
	grace time.Duration          // of settle; 0: the constant
	says  atomic.Pointer[string] // how operations get at the memory of devices, for display
	blind atomic.Bool            // a device does not see what network cards write to its memory

	staging *staging      // the job's
	copies  atomic.Uint64 // operations that have used it

	mu      sync.Mutex
	own     map[Location]*ownStream        // for buffers without one
	waiting map[Location]*ownStream        // for those of operations in packets: kernels wait in them
	direct  []device.Device                // of direct visits
	late    map[device.Stream]device.Event // that settle has waited for in vain
	closed  bool

	// Under the proxy's lock.
	messages []*deviceMessage // that wait for their streams
	watching bool             // a goroutine polls their streams
}

// An ownStream is a stream of the group. Its work is short: it waits for nothing.
type ownStream struct {
	sync.Mutex
	device.Stream
	over chan struct{} // closed when the stream was
	err  error         // of Close then
}

// Close closes the stream, once.
func (s *ownStream) Close() error {
	s.err = s.Stream.Close()
	close(s.over)
	return s.err
}

const (
	// A copy of up to leastPiece bytes is one piece, and none is more than mostPieces: a stream of
	// the caller takes a thousand pieces of work before its calls wait. Both were chosen without a
	// measurement: the copy of a piece should take much longer than the three operations of the
	// stream that belong to it, some microseconds each.
	leastPiece = 4 << 20
	mostPieces = 8
	// grace bounds the wait for a stream when nothing else does.
	grace = time.Second
)

// streamLocked returns the stream of the group at d that is in all: x.own or x.waiting.
func (x *devices) streamLocked(all *map[Location]*ownStream, d device.Device) (*ownStream, error) {
	loc := d.Location()
	if s := (*all)[loc]; s != nil {
		return s, nil
	}
	s, err := d.Stream()
	if err != nil {
		return nil, err
	}
	if *all == nil {
		*all = map[Location]*ownStream{}
	}
	(*all)[loc] = &ownStream{Stream: s, over: make(chan struct{})}
	return (*all)[loc], nil
}

// close returns the group's streams after the last operation. The caller closes them.
func (x *devices) close() (all []device.Stream) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.closed = true
	for _, streams := range []map[Location]*ownStream{x.own, x.waiting} {
		for _, s := range streams {
			all = append(all, s)
		}
	}
	x.own, x.waiting = nil, nil
	return all
}

// closeStreams closes streams of a group, without the proxy's lock. Their work is short, but they
// may share a queue of the device with streams of the program that wait for another group: then
// they are closed when they have passed it.
func (j *job) closeStreams(all []device.Stream) (err error) {
	ended := make(chan error, len(all))
	for _, s := range all { // at once: one may be held up by another
		j.unmapping.Go(func() { ended <- s.Close() })
	}
	timer := time.NewTimer(grace)
	defer timer.Stop()
	for range all {
		select {
		case now := <-ended:
			err = errors.Join(err, now)
		case <-timer.C:
			j.log.Warn("a device has not done the work of a closed group yet: its streams are closed when it has")
			return err
		}
	}
	return err
}

// cut returns where the pieces of n bytes end.
func (x *devices) cut(n int) (ends []int) {
	piece := x.piece
	if piece == 0 {
		piece = leastPiece
	}
	piece = max(piece, (n+mostPieces-1)/mostPieces)
	piece = (piece + 63) &^ 63
	for at := piece; at < n; at += piece {
		ends = append(ends, at)
	}
	if n > 0 {
		ends = append(ends, n)
	}
	return ends
}

// whole is cut for a single piece.
func whole(n int) []int {
	if n == 0 {
		return nil
	}
	return []int{n}
}

// A visit is one use of a staging buffer, by an operation: its stream brings the source, and
// fetches the result. Its methods may be called by any goroutine.
type visit struct {
	words    []mem.Memory
	base     uint64         // the value of the words before
	at       uint64         // and after
	in       []int          // where pieces of the source end: see cut
	out      []int          // of the destination
	buffer   *stagingBuffer // nil in tests
	stream   device.Stream
	own      *ownStream  // stream, if it is the group's
	lazy     bool        // the stream is given the result when it is there
	reserved bool        // stream is places in one of the caller's
	from     mem.Memory  // of the source, on the host
	to       mem.Memory  // of the destination
	dst      mem.Memory  // on the device; empty: nothing is written there
	merges   bool        // parts of the destination stay as they are
	unfit    *unfitError // nil: it has begun; else why the operation fails when it has the turn
	launch   *launch     // nil: the operation is not one in packets
	direct   *direct     // nil: it has copied from the beginning
	staged   bool        // it copies

	bereaved bereaved // under the proxy's lock

	mu    sync.Mutex
	steps int          // that the stream was given
	given int          // lazy: pieces of the result that the stream was given
	ended bool         // the operation is
	event device.Event // when the stream has done what it was given
	err   error        // it was not given something, because it has failed
}

// value returns the value of a word when piece i of ends is done. The first word has base+1 when
// the stream has come to the operation.
func (v *visit) value(ends []int, i int) uint64 {
	if i == len(ends)-1 {
		return v.at
	}
	return v.base + uint64(i) + 2
}

func (v *visit) word(i int) uint64 { return v.words[i].Word(0).Load() }

// here returns how many bytes of the source are on the host.
func (v *visit) here() (n int) {
	for i, now := 0, v.word(wordArrived); i < len(v.in) && now >= v.value(v.in, i); i++ {
		n = v.in[i]
	}
	return n
}

// came reports whether the stream has come to the operation, and arrived whether all of the source
// is here as well.
func (v *visit) came() bool    { return v.word(wordArrived) > v.base }
func (v *visit) arrived() bool { return v.word(wordArrived) >= v.at }

// passed reports whether the stream has nothing more to do for the operation.
func (v *visit) passed() bool { return v.word(wordPassed) >= v.at }

// give gives the stream work. It waits while a stream of the caller has as many operations as its
// driver takes, which may last until other operations of the group are over. So it is called
// without the proxy's lock and that of devices, unless the stream has come to the operation or is
// the group's. An error says that the stream has failed; it may still do what it has been given
// before. With the lock.
func (v *visit) give(steps ...func(s device.Stream) error) {
	if v.own != nil {
		v.own.Lock()
		defer v.own.Unlock()
	}
	for _, step := range steps {
		if v.err == nil {
			v.err = step(v.stream)
			v.steps++
		}
	}
}

func copyTo(dst, src mem.Memory) func(device.Stream) error {
	return func(s device.Stream) error { return s.Copy(dst, src) }
}

func (v *visit) write(word int, n uint64) func(device.Stream) error {
	return func(s device.Stream) error { return s.WriteValue(v.words[word], n) }
}

func (v *visit) await(word int, n uint64) func(device.Stream) error {
	return func(s device.Stream) error { return s.WaitValue(v.words[word], n) }
}

func (v *visit) record(s device.Stream) (err error) {
	v.event, err = s.Record()
	return err
}

// begin gives the stream what it can have now. src is the source on the device.
func (v *visit) begin(src mem.Memory) error {
	var steps []func(device.Stream) error
	if !v.lazy && len(v.in) > 0 {
		steps = append(steps, v.write(wordArrived, v.base+1))
	}
	if v.merges {
		steps = append(steps, copyTo(v.to, v.dst))
	}
	start := 0
	for i, end := range v.in {
		steps = append(steps, copyTo(v.from.Slice(start, end-start), src.Slice(start, end-start)),
			v.write(wordArrived, v.value(v.in, i)))
		start = end
	}
	if len(v.in) == 0 {
		steps = append(steps, v.write(wordArrived, v.at))
	}
	if !v.lazy {
		for i := range v.out {
			steps = append(steps, v.await(wordOver, v.value(v.out, i)))
			steps = append(steps, v.fetch(i)...)
		}
	}
	if len(v.out) == 0 {
		steps = append(steps, v.write(wordPassed, v.at))
	}
	steps = append(steps, v.record)
	v.mu.Lock()
	v.give(steps...)
	err := v.err
	if err != nil && v.steps == 1 { // it has taken nothing; else the staging buffer is never vacant
		v.words[wordPassed].Word(0).Store(v.at)
	}
	v.mu.Unlock()
	if err != nil {
		v.end()
	}
	return err
}

// fetch returns the steps that copy piece i of the result.
func (v *visit) fetch(i int) []func(device.Stream) error {
	start := 0
	if i > 0 {
		start = v.out[i-1]
	}
	n := v.out[i] - start
	return []func(device.Stream) error{copyTo(v.dst.Slice(start, n), v.to.Slice(start, n)),
		v.write(wordPassed, v.value(v.out, i))}
}

// release says that the first n bytes of the result are on the host, and do not change any more.
func (v *visit) release(n int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.ended || v.apart() {
		return
	}
	k := 0
	for k < len(v.out) && v.out[k] <= n {
		k++
	}
	switch {
	case k == 0:
	case !v.lazy:
		v.raise(v.value(v.out, k-1))
	case k > v.given:
		var steps []func(device.Stream) error
		for ; v.given < k; v.given++ {
			steps = append(steps, v.fetch(v.given)...)
		}
		v.give(append(steps, v.record)...)
	}
}

// released reports whether release had the stream copy something.
func (v *visit) released() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.given > 0 || v.word(wordOver) > v.base
}

// raise sets the word that the stream waits for.
func (v *visit) raise(n uint64) {
	w := v.words[wordOver].Word(0)
	for now := w.Load(); now < n && !w.CompareAndSwap(now, n); now = w.Load() {
	}
}

// end ends the operation: it does not use the staging buffer any more, and the stream passes. It
// may be called again, and when the staging buffer has its next visit.
func (v *visit) end() {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.ended {
		return
	}
	v.ended = true
	if v.reserved {
		v.stream.Close()
	}
	if l := v.launch; l != nil && l.given.Load() && (v.event == nil || !v.event.Done()) {
		l.x.Stop()
	}
	if v.apart() {
		return
	}
	if !v.lazy {
		v.raise(v.at)
	}
	if v.buffer != nil {
		if v.lazy && v.given < len(v.out) && v.err == nil { // the stream will not say that it has passed
			v.buffer.left = v.event
		}
		v.buffer.busy.Store(false)
	}
}

// over reports whether the operation has ended.
func (v *visit) over() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.ended
}

// lost returns why the stream does not do what it was given, or nil. It also moves some streams.
func (v *visit) lost() error {
	v.mu.Lock()
	e, err := v.event, v.err
	v.mu.Unlock()
	if err != nil {
		return fmt.Errorf("its stream has failed: %w", err)
	}
	if e == nil || !e.Done() || !v.apart() && v.arrived() && !v.using(false) {
		return nil
	}
	if err = e.Wait(context.Background()); err == nil {
		return nil // it has been given more since
	}
	return fmt.Errorf("its stream has failed: %w", err)
}

// using reports whether the stream uses the memory on the device, or will. If closed is true, the
// group is closed: a stream that has not come to the operation does not count then.
func (v *visit) using(closed bool) bool {
	switch {
	case v.launch != nil:
		return v.running()
	case v.apart(): // the runner has waited for the stream
		return false
	}
	v.mu.Lock()
	given := v.given
	v.mu.Unlock()
	reads := (len(v.in) > 0 || v.merges) && !v.arrived()
	writes := !v.lazy && len(v.out) > 0 && !v.passed() ||
		given > 0 && v.word(wordPassed) < v.value(v.out, given-1)
	return (reads || writes) && (v.came() || !closed)
}

// settle waits until the stream does not use the memory on the device any more, or grace is over.
// It does not wait for a stream that has yet to pass another operation of the group, which has
// waited so long: operations that end one after the other, because the group cannot be used any
// more, wait once. If the stream does not come to the operation, it uses the memory later.
func (g *Group) settle(v *visit) {
	pace := backoff.Backoff{Yields: 200, Nap: 50 * time.Microsecond}
	defer pace.Stop()
	ctx, cancel := context.WithTimeout(context.Background(), cmp.Or(g.devices.grace, grace))
	defer cancel()
	x := &g.devices
	for v.using(g.closed.Load()) && v.lost() == nil && (v.launch == nil && v.came() || !x.abandoned(v.stream)) {
		if pace.Wait(ctx) != nil {
			x.abandon(v)
			break
		}
	}
	if v.launch != nil {
		v.account()
	}
}

// abandon says that grace was over before a visit's stream has passed it.
func (x *devices) abandon(v *visit) {
	v.mu.Lock()
	e := v.event
	v.mu.Unlock()
	x.mu.Lock()
	defer x.mu.Unlock()
	maps.DeleteFunc(x.late, func(_ device.Stream, e device.Event) bool { return e.Done() })
	if x.late == nil {
		x.late = map[device.Stream]device.Event{}
	}
	x.late[v.stream] = e
}

// abandoned reports whether a stream has yet to pass a visit that was abandoned.
func (x *devices) abandoned(s device.Stream) bool {
	x.mu.Lock()
	e := x.late[s]
	x.mu.Unlock()
	return e != nil && !e.Done()
}

// A place is where the elements of a buffer are, and the stream to which they belong.
type place struct {
	count  int
	loc    Location
	stream device.Stream
}

// site returns the device and the stream of an operation's buffers: nil if the buffers are empty,
// or have no stream. call is the operation's name.
func (g *Group) site(call string, all ...place) (d device.Device, s device.Stream, err error) {
	bad := func(arg, got, want string) (device.Device, device.Stream, error) {
		return nil, nil, &ArgumentError{Call: call, Arg: arg, Got: got, Want: want}
	}
	var loc Location
	used := false
	for _, b := range all {
		switch {
		case b.count == 0:
			continue
		case used && loc != b.loc || b.loc == "" || b.loc.Host():
			return bad("the buffers' locations", fmt.Sprintf("%q and %q", all[0].loc, all[len(all)-1].loc),
				"one location")
		case used && s != b.stream:
			return bad("the buffers' streams", "two streams", "one stream")
		}
		used, loc, s = true, b.loc, b.stream
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

// stay is what an operation asks of a visit: the memory on the device, which is empty where it is
// not used, and what is done with it.
type stay struct {
	call          string
	device        device.Device
	stream        device.Stream // nil: one of the group
	lazy          bool
	src, dst      span
	reads, writes bool
	merges        bool          // parts of the destination stay as they are
	direct        bool          // ranks may load from each other's devices
	places        device.Places // that the stream reserves for that; none: it is the visit's
	spare         int           // of them, for another run of the operation
}

// A span is n bytes at an address of a device.
type span struct {
	addr uintptr
	n    int
}

func (s span) at(loc Location) mem.Memory { return mem.Device(uint64(s.addr), s.n, loc) }

// visit begins a visit. beyond is as in staging.take. It may wait: see visit.give.
func (x *devices) visit(o *stay, beyond bool) (*visit, error) {
	v, err := x.newVisit(o)
	switch {
	case err != nil:
		return nil, err
	case o.direct:
		return v, v.approach()
	}
	return v, x.board(v, o, beyond)
}

// newVisit returns a visit that has not begun.
func (x *devices) newVisit(o *stay) (*visit, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.closed {
		return nil, ErrClosed
	}
	v := &visit{stream: o.stream, lazy: o.lazy || o.stream == nil, merges: o.writes && o.merges}
	var err error
	if v.stream == nil {
		if v.own, err = x.streamLocked(&x.own, o.device); err != nil {
			return nil, o.failure(err)
		}
		v.stream = v.own
	}
	if o.direct {
		v.direct, err = x.directLocked(o)
	}
	return v, err
}

// failure returns the error of an operation that a device refuses.
func (o *stay) failure(err error) error {
	return fmt.Errorf("%s of %d bytes at %s: %w", o.call, o.src.n+o.dst.n, o.device.Location(), err)
}

// board gives v a staging buffer, and begins to copy.
func (x *devices) board(v *visit, o *stay, beyond bool) (err error) {
	first, second, total := layOut(o.src.addr, o.src.n, o.dst.addr, o.dst.n)
	if v.buffer, err = x.staging.take(o.device, total, beyond); err != nil {
		return o.failure(err)
	}
	x.copies.Add(1)
	loc := o.device.Location()
	v.from, v.to = v.buffer.host.Slice(first, o.src.n), v.buffer.host.Slice(second, o.dst.n)
	cut := x.cut
	if v.reserved { // in one piece: places are few
		cut = whole
	}
	if o.reads {
		v.in = cut(o.src.n)
	}
	if o.writes {
		v.dst, v.out = o.dst.at(loc), cut(o.dst.n)
	}
	v.words, v.base = v.buffer.words, v.buffer.uses
	v.buffer.uses += uint64(max(len(v.in), len(v.out))) + 1
	v.at = v.buffer.uses
	if err := v.begin(o.src.at(loc)); err != nil {
		return o.failure(err)
	}
	return nil
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

// pointer returns the address of host memory, nil if it is empty.
func pointer(m mem.Memory) unsafe.Pointer {
	if m.Len() == 0 {
		return nil
	}
	return unsafe.Pointer(unsafe.SliceData(m.Bytes()))
}

// visit begins the visit of the collective that q asks for, and makes q ask for it on host memory.
// ctx and limit bound what has to be done before, waits says that its caller waits for it. There is
// no visit if all buffers are empty, or if the stream has recorded the operation.
func (g *Group) visit(ctx context.Context, q *request, limit time.Duration, waits bool) (v *visit, recorded bool,
	err error) {
	d, s, err := g.site(q.Kind.String(), place{q.Dst.Count, q.Dst.Location, q.dst},
		place{q.Src.Count, q.Src.Location, q.src})
	if err != nil {
		return nil, false, err
	}
	q.Dst.Location, q.Src.Location = "", ""
	g.job.proxy.Lock()
	c, err := g.check(&q.Request)
	size, partial := g.v.Size, len(g.v.Active) < g.v.Size || g.job.settings.OnFailure != Report
	direct := err == nil && d != nil && g.directly(&c, d)
	var places device.Places
	spare := 0
	if direct && !waits && s != nil {
		places, spare, direct = g.places(&c, d)
	}
	short := err == nil && d != nil && g.short(&c, d)
	closed := g.closed.Load()
	g.job.proxy.Unlock()
	switch {
	case err != nil:
		return nil, false, err
	case closed:
		return nil, false, ErrClosed
	case d == nil: // all are empty
		return nil, false, nil
	}
	switch recorded, err = capturing(s); {
	case err != nil:
		return &visit{unfit: &unfitError{err}}, false, nil
	case recorded:
		return nil, true, g.record(&c, d, s, limit, waits)
	}
	if short {
		if v, err = g.packetVisit(ctx, &c, d, s, waits); v != nil || err != nil {
			return v, false, err
		}
	}
	in, out, reads, writes := c.Extents(g.rank, size)
	o := &stay{call: q.Kind.String(), device: d, stream: s, lazy: waits, src: span{uintptr(q.Src.Ptr), in},
		dst: span{uintptr(q.Dst.Ptr), out}, reads: reads, writes: writes,
		merges: writes && partial && c.Kind.Layout().Out.Parted(), direct: direct, places: places, spare: spare}
	if direct = direct && (places.N == 0 || o.shared()); !direct {
		o.direct, o.places = false, device.Places{}
	}
	v, err = g.board(ctx, limit, o, waits)
	switch {
	case errors.Is(err, ErrClosed), errors.Is(err, errors.ErrUnsupported): // a stream that is captured
		return nil, false, err
	case err != nil:
		return &visit{unfit: &unfitError{err}}, false, nil
	case direct:
		return v, false, nil
	}
	host := func(b *exec.Buffer, m mem.Memory) {
		if b.Ptr = nil; b.Count > 0 {
			b.Ptr = pointer(m)
		}
	}
	host(&q.Src, v.from)
	host(&q.Dst, v.to)
	return v, false, nil
}

// An unfitError is why an operation could not be given to its device. It has its place among the
// group's operations all the same, so that the other ranks hear of it.
type unfitError struct{ error }

func (e *unfitError) Unwrap() error { return e.error }

// startOnDevice is begin for buffers of which one may be in a device's memory. q is a value, so
// that the requests of other operations need no memory.
func (g *Group) startOnDevice(q request, limit time.Duration) *Work {
	v, recorded, err := g.visit(g.ctx, &q, limit, false)
	if recorded && err == nil {
		return &Work{}
	}
	w := g.startVisit(v, err, &q.Request, limit)
	if now := w.at.Load(); v != nil && now != nil && now.over && now.err != nil {
		g.settle(v)
	}
	return w
}

func (g *Group) startVisit(v *visit, err error, q *exec.Request, limit time.Duration) *Work {
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
	g.start(w, q, limit)
	return w
}

// doOnDevice is Do for buffers of which one may be in a device's memory.
func (g *Group) doOnDevice(ctx context.Context, q request) error {
	if ctx == nil {
		return noContext(q.Kind.String())
	}
	v, _, err := g.visit(ctx, &q, g.job.timeout, true)
	if err != nil {
		return err
	}
	err = g.operate(ctx, &q.Request, v)
	if v != nil {
		v.end()
		g.settle(v)
	}
	return err
}

// across runs the current call, between enter and leave, after its data has arrived, and returns
// when the stream has the result, or, after a failure, does not use its memory any more.
// v may be nil. here reports whether the destination has the result, even if there is an error.
func (g *Group) across(v *visit) (here bool, err error) {
	if v == nil {
		return g.collective()
	}
	if v.unfit != nil {
		if err := g.refusal(); err != nil {
			return false, err
		}
		return false, g.miss(v.unfit)
	}
	if !v.apart() {
		first := exec.All
		if len(v.in) > 0 {
			first = v.in[0]
		}
		if err := g.arrive(v, first); err != nil {
			return false, g.miss(err)
		}
	}
	if g.run.Feed(&feed{g, v}); v.launch != nil {
		g.run.Feed(&packetFeed{g: g, v: v})
	}
	here, err = g.collective()
	g.run.Feed(nil)
	if v.direct != nil {
		g.say()
	}
	if err == nil || here { // also a result that was not confirmed: see Work.LocalSuccess
		v.release(v.to.Len())
	}
	v.end()
	if err == nil {
		if err = g.deliver(v); err == nil {
			return here, nil
		}
		here, err = false, fmt.Errorf("copying the result to the device: %w", err)
	}
	g.job.proxy.Leave()
	defer g.job.proxy.Return()
	g.settle(v)
	return here && (v.apart() || v.passed()), err
}

// deliver waits until the stream of the operation that runs has the result, as long as for a peer,
// unless the group ends. A failure of a rank does not end the wait: this rank has its data.
func (g *Group) deliver(v *visit) error {
	g.beginWait()
	var look lookout
	return g.holdLocked(func() (bool, error) {
		if had, err := v.had(); had || err != nil {
			return had, err
		}
		if look.due(time.Now()) {
			g.job.proxy.Look() // a peer may have aborted the group
			if err := g.halted(); err != nil {
				return false, err
			}
		}
		if err := g.wait.Err(); err != nil {
			return false, &TimeoutError{Call: exec.Spell(g.run.Token()) + ", whose stream is held up,",
				After: g.wait.Waited(), Reporter: g.rank, in: g.in, Err: expiry(err)}
		}
		return false, nil
	})
}

// beginWait has the time of the operation that runs count from now, unless it has waited before.
func (g *Group) beginWait() {
	if g.wait.Waited() == 0 {
		g.wait.Since(time.Now())
	}
}

// holdLocked is hold with the proxy's lock, which it gives up between the calls of done. It waits
// until done returns true or an error.
func (g *Group) holdLocked(done func() (bool, error)) error {
	pace := backoff.Backoff{Yields: 200, Nap: 50 * time.Microsecond}
	defer pace.Stop()
	for {
		if ok, err := done(); ok || err != nil {
			return err
		}
		g.job.proxy.Leave()
		pace.Wait(context.Background())
		g.job.proxy.Return()
	}
}

// had reports whether the stream has done what it was given, or returns why it does not.
func (v *visit) had() (bool, error) {
	v.mu.Lock()
	e, err := v.event, v.err
	v.mu.Unlock()
	if err != nil {
		return false, err
	}
	return reached(e)
}

// reached reports whether a stream has reached an event, or returns why it does not.
func reached(e device.Event) (bool, error) {
	if !e.Done() {
		return false, nil
	}
	return true, e.Wait(context.Background())
}

// A feed brings a visit's data to the runner, which uses the first pieces of long vectors while the
// others come, and takes its result.
type feed struct {
	g *Group
	v *visit
}

func (f *feed) Need(n int) error {
	g := f.g
	if err := g.arrive(f.v, n); err != nil || f.v.has(n) {
		return err
	}
	return g.hopeless(f.v)
}

// Have releases what the device may have now: not if the operation may run again, or counts only
// if others have it too.
func (f *feed) Have(n int) {
	if f.g.job.settings.OnFailure == Report && !f.g.uniform() {
		f.v.release(n)
	}
}

// has reports whether the first n bytes of the source are here, or on the device that ranks load
// them from.
func (v *visit) has(n int) bool {
	if v.apart() {
		return v.direct.come.Done()
	}
	return v.arrived() || v.here() >= n
}

// arrive waits until the first n bytes of a visit's source are here, as long as for a peer. Without
// the stream's data the operation cannot begin, or go on.
func (g *Group) arrive(v *visit, n int) error {
	if v.has(n) {
		return nil
	}
	pace := backoff.Backoff{Yields: 200, Nap: 50 * time.Microsecond}
	defer pace.Stop()
	g.beginWait()
	for !v.has(n) {
		g.job.proxy.Look() // a peer may have failed the operation
		if g.err != nil || g.hopeless(v) != nil {
			return nil // the operation finds it
		}
		g.job.proxy.Leave()
		err := v.lost()
		pace.Wait(context.Background())
		g.job.proxy.Return()
		if err != nil {
			return err
		}
	}
	return nil
}

// stopped returns why the operation that runs must stop, or nil: a rank has failed it, the group
// was closed, or its time is over.
func (g *Group) stopped() error {
	if err := g.coll.Err(); err != nil {
		return err
	}
	if g.closed.Load() {
		return ErrClosed
	}
	return g.wait.Err()
}

// hopeless returns why a visit's operation, which waits for its stream, will not have a result, or
// nil.
func (g *Group) hopeless(v *visit) error {
	if err := g.stopped(); err != nil {
		return err
	}
	if !g.run.Call().Synchronizes() { // a rank that is gone may have done its part
		return nil
	}
	return g.bereft(v)
}

// A bereaved records since when ranks of a view have been gone.
type bereaved struct {
	epoch uint64
	since map[int]time.Time // by slot, of those that are
	err   error             // nil: they may still have done their parts
}

// bereft returns why a visit's operation lacks a rank of the view, or nil: also while the operation
// waits for its stream, and no rank for a message. It stays so in this view.
func (g *Group) bereft(v *visit) error {
	b := &v.bereaved
	if b.epoch != g.v.epoch {
		*b = bereaved{epoch: g.v.epoch}
	}
	if b.err == nil {
		b.err = g.lacks(b)
	}
	return b.err
}

// lacks is bereft, which remembers in b what it has seen. It names a rank that was lost rather than
// one that has closed the group, perhaps because of the loss: it waits until it knows which ranks
// are lost.
func (g *Group) lacks(b *bereaved) error {
	if g.job.roster != nil && g.moved() && g.sync.Lost() {
		return errMoved
	}
	var left, lost error
	doubtful := false
	for _, slot := range g.v.Active {
		if slot == g.rank {
			continue
		}
		err, closed := g.job.proxy.Down(g.jobRank(slot)), g.coll.Closed(slot)
		if err == nil && !closed {
			delete(b.since, slot)
			continue
		}
		since, known := b.since[slot]
		if !known {
			if b.since == nil {
				b.since = map[int]time.Time{}
			}
			since = time.Now()
			b.since[slot] = since
		}
		switch {
		case time.Since(since) <= grace:
			doubtful = doubtful || !closed
		case closed:
			left = &p2p.PeerError{Rank: g.v.ranks[slot], Err: cmp.Or(err, p2p.ErrPeerGone)}
		default:
			lost = &p2p.PeerError{Rank: g.v.ranks[slot], Err: err}
		}
	}
	if lost == nil && doubtful {
		return nil
	}
	return cmp.Or(lost, left)
}
