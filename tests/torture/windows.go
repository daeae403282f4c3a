//go:build linux

package torture

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"tutti/p2p"
	"tutti/pg"
)

// A live is a window that outlives a step, on this rank. In every part each rank has an area of its
// own, and writes only there: to its even bytes the number of the signal that it sends next, and to
// the others what follows from their places. So a target knows from any byte whether it is older
// than a signal.
type live struct {
	w     *pg.Window
	h     *handle
	area  int
	to    []*pier // by slot
	due   []due   // by slot
	gone  []int   // slots that have had another rank since the last Refresh
	loose bool    // made during a disturbance: other ranks may lack it
	felt  bool    // used during the present disturbance
	stale bool    // its state is unknown until a Refresh
}

// A pier is what this rank has done to its area of a slot's part.
type pier struct {
	sent    uint64 // signals of counter 0
	halves  [2]half
	open    []*call // puts whose sources the window has until Flush
	err     error   // the first one since Refresh
	refused error   // says that a put was not placed: signals and Flush fail until Refresh
}

// due is the number of signals that a slot has sent, if none has failed.
type due struct {
	n    uint64
	held bool // some may have failed: the next one counts for them
}

// half is what is in a half of an area.
type half struct {
	state state
	stamp byte
}

// A state says what is known of a half.
type state int

const (
	void state = iota // nothing
	torn              // another put has failed since that of stamp: unless the window says so, nothing of it is there
	sure              // stamp
)

// mostSignals keeps stamps within a byte.
const mostSignals = 200

// Counters of a window.
const (
	stampCounter = 0
	probeCounter = 1
)

// stamped returns a byte of the area of a rank.
func stamped(rank, i int, stamp byte) byte {
	if i%2 == 0 {
		return stamp
	}
	return byte(hash(0x77, rank, i))
}

// half returns where half i of an area is.
func (l *live) half(i int) (from, to int) {
	cut := l.area / 2
	if i == 0 {
		return 0, cut
	}
	return cut, l.area
}

// around returns the slots that a rank puts to and receives from in a step.
func (l *live) around(s *Step) (to, from int) {
	n, me := l.h.g.Size(), l.h.slot()
	shift := s.Root % n
	return (me + shift) % n, (me + n - shift) % n
}

// pier returns what this rank has done to a slot's part.
func (l *live) pier(slot int) *pier {
	for len(l.to) <= slot {
		l.to, l.due = append(l.to, &pier{}), append(l.due, due{})
	}
	return l.to[slot]
}

// A port is a window during a step.
type port struct {
	*live
	r    *rank
	s    *Step
	part *Part
	ctx  context.Context
	long context.Context // without a deadline of ours, for which the job may remove ranks
	name string
	room time.Duration // of each call
}

// windowStep makes an operation on a window.
func (r *rank) windowStep(ctx context.Context, s *Step, part *Part) {
	l := r.windows[s.Win]
	if l == nil {
		switch h := r.group(s.Group); {
		case h == nil:
		case s.Op == WindowMake, s.Op == WindowRefresh && s.May == 0:
			r.makeWindow(ctx, s, part, h)
		case s.Op == WindowClose:
			r.meet(ctx, s, h)
		}
		return
	}
	l.felt = l.felt || s.May != 0
	if l.stale && s.Op != WindowRefresh && s.Op != WindowClose {
		return
	}
	w := &port{live: l, r: r, s: s, part: part, room: r.limit(part)}
	to, from := l.around(s)
	w.name = fmt.Sprintf("step %d: %s of window %d, areas of %d bytes, to %d from %d", r.now, s.Op, s.Win, l.area, to,
		from)
	limited := ctx
	if s.May != 0 { // a rank that it waits for may have failed before
		w.room = min(w.room, 500*time.Millisecond)
		brief, cancel := context.WithTimeout(ctx, w.room)
		defer cancel()
		limited = brief
	}
	var cancel, end context.CancelFunc
	w.ctx, cancel = part.within(limited)
	defer cancel()
	w.long, end = part.within(ctx)
	defer end()
	switch l.pier(max(to, from)); s.Op {
	case WindowPut:
		w.put(to)
	case WindowSignal:
		w.signal(to)
		l.due[from] = due{n: min(l.due[from].n+1, mostSignals)}
	case WindowWait:
		w.wait(from)
	case WindowGet:
		w.get(to)
	case WindowRefresh:
		w.refresh()
	case WindowClose:
		w.close(ctx)
	}
}

// makeWindow makes the window of a step.
func (r *rank) makeWindow(ctx context.Context, s *Step, part *Part, h *handle) {
	ctx, cancel := part.within(ctx)
	defer cancel()
	area := max(s.Count, 2) &^ 1
	name := fmt.Sprintf("step %d: %s %d with areas of %d bytes", r.now, s.Op, s.Win, area)
	l := &live{h: h, area: area, loose: s.May != 0}
	err := r.timed(name, r.limit(part), func() (err error) {
		l.w, err = pg.NewWindow(ctx, h.g, area*r.job.Ranks)
		return err
	})
	if r.judge(name, s.May, err); err != nil {
		return
	}
	if r.windows[s.Win] = l; s.Op == WindowRefresh { // the others' is older
		w := &port{live: l, r: r, s: s, part: part, ctx: ctx, name: name, room: r.job.Timeout}
		w.tell()
	}
}

// call makes a call on the window that concerns a slot, and judges its error.
func (w *port) call(slot int, what string, f func() error) error {
	what = w.name + ": " + what
	err := w.r.timed(what, w.room, f)
	if err == nil {
		return nil
	}
	p := w.pier(slot)
	may := w.s.May
	if may != 0 && w.ctx.Err() != nil {
		may |= Cancelled
	}
	after := errors.Is(err, p2p.ErrCancelled) || errors.Is(err, p2p.ErrUnplaced)
	if !after || p.err == nil {
		w.r.judge(what, may, err)
	}
	if p.err == nil {
		p.err = err
	}
	return err
}

// source makes the source of half i, or of the whole area if i is 2.
func (w *port) source(m Mem, i int, stamp byte) *call {
	from, to := 0, w.area
	if i < 2 {
		from, to = w.half(i)
	}
	c := &call{h: w.h, step: w.s, d: newDatum(pg.Uint8, pg.Sum, 0), name: w.name, device: w.r.device}
	b := w.r.take(m, to-from, 1, w.name)
	c.bufs, c.src = append(c.bufs, b), b.bytes()
	w.expect(c.src, from, stamp)
	return c
}

// expect writes a part of this rank's area, from an offset on, to b.
func (w *port) expect(b []byte, from int, stamp byte) {
	for i := range b {
		b[i] = stamped(w.r.me, from+i, stamp)
	}
}

// put puts the area in halves. Only a Flush between two puts to the same place orders them.
func (w *port) put(to int) bool {
	p := w.pier(to)
	if w.flush(to); p.sent >= mostSignals {
		return false
	}
	stamp, all := byte(p.sent+1), true
	for i, m := range []Mem{w.part.Src, w.part.Dst} {
		from, _ := w.half(i)
		c := w.source(m, i, stamp)
		at := w.h.slot()*w.area + from
		far := w.r.device.has(c.src)
		if c.stream = w.stream(c); far {
			w.r.bring(c, w.part, c.src)
		}
		err := w.call(to, fmt.Sprintf("put of half %d", i), func() error {
			if far {
				return w.w.PutBuffer(w.ctx, to, at, c.buffer(c.src))
			}
			return w.w.Put(w.ctx, to, at, c.src)
		})
		switch h := &p.halves[i]; {
		case err == nil:
			*h = half{sure, stamp}
		case h.state == sure:
			h.state = torn
		}
		all = all && err == nil
		if !far && err == nil {
			p.open = append(p.open, c)
			continue
		}
		if err := c.settle(w.r.job.Timeout); err != nil {
			w.r.find("error", "%v", err)
		}
		w.giveBack(c, from, stamp)
	}
	return all
}

// stream returns the stream of a call's buffer. There is none behind many operations, which may
// take longer than the call may wait.
func (w *port) stream(c *call) *deviceStream {
	if len(w.r.flight) > 2 {
		return nil
	}
	return w.r.stream(w.h, w.part, w.s.Win, c.dst, c.src) // windows of odd numbers have none
}

// giveBack returns the source of a put that has ended.
func (w *port) giveBack(c *call, from int, stamp byte) {
	want := make([]byte, len(c.src))
	w.expect(want, from, stamp)
	if text := c.d.compare(c.src, want); text != "" {
		w.r.find("wrong", "%s: a put has changed its source: %s", w.name, text)
	}
	w.r.giveBack(c)
}

// flush waits for the puts to a slot. Their sources are free then, and nothing reads them.
func (w *port) flush(to int) error {
	err := w.call(to, "flush", func() error { return w.w.Flush(w.ctx, to) })
	w.flushed(to, err)
	return err
}

// flushed looks at the outcome of a Flush.
func (w *port) flushed(to int, err error) {
	p := w.pier(to)
	if w.told(to, "flush", err); err != nil {
		p.halves = [2]half{}
	}
	for _, c := range p.open {
		w.r.giveBack(c)
	}
	p.open = nil
}

// signal signals after a put of the whole area, if necessary.
func (w *port) signal(to int) {
	p := w.pier(to)
	fresh := half{sure, byte(p.sent + 1)}
	whole := w.part.InPlace && w.flush(to) == nil
	switch {
	case p.refused != nil:
		err := w.call(to, "signal after a put that was not placed", func() error {
			return w.w.Signal(w.ctx, to, probeCounter)
		})
		w.told(to, "signal", err)
	case p.sent >= mostSignals:
	case whole:
		c := w.source(MemPlain, 2, fresh.stamp)
		err := w.call(to, "put with a signal", func() error {
			return w.w.PutSignal(w.ctx, to, w.h.slot()*w.area, c.src, stampCounter)
		})
		if w.told(to, "signal", err); err == nil {
			p.sent++
			p.halves = [2]half{fresh, fresh}
			p.open = append(p.open, c)
			return
		}
		for i := range p.halves {
			if p.halves[i].state == sure {
				p.halves[i].state = torn
			}
		}
		w.giveBack(c, 0, fresh.stamp)
	case p.halves == [2]half{fresh, fresh}, w.put(to):
		err := w.call(to, "signal", func() error { return w.w.Signal(w.ctx, to, stampCounter) })
		if w.told(to, "signal", err); err == nil {
			p.sent++
		}
	default: // a put has failed: either signals fail, or nothing of it was placed
		ctx, cancel := context.WithTimeout(context.Background(), w.room)
		defer cancel()
		w.ctx = ctx
		err := w.call(to, "signal after a put that failed", func() error { return w.w.Signal(w.ctx, to, probeCounter) })
		if w.told(to, "signal", err); err == nil && w.flush(to) == nil {
			w.compare(to)
		}
	}
}

// told looks at the outcome of a signal or a Flush.
func (w *port) told(to int, what string, err error) {
	p := w.pier(to)
	if err == nil && p.refused != nil {
		w.r.find("wrong", "%s: a %s succeeds, though a put was not placed, and there was no Refresh since: %v", w.name,
			what, p.refused)
	}
	if p.refused == nil && (errors.Is(err, p2p.ErrUnplaced) || errors.Is(err, p2p.ErrCancelled)) {
		p.refused = err
	}
}

// wait waits for the last signal of a slot, and checks that what was put before it is there.
func (w *port) wait(from int) {
	n := w.due[from].n
	if w.due[from].held {
		return
	}
	err := w.call(from, "waiting for a signal", func() error { return w.w.WaitSignal(w.ctx, from, stampCounter, n) })
	if err != nil || n == 0 {
		return
	}
	got := w.w.Bytes()[from*w.area:][:w.area]
	bad, first := 0, 0
	for i, b := range got {
		if want := stamped(w.h.ranks[from], i, byte(n)); b != want && (i%2 != 0 || b < want) {
			if bad++; bad == 1 {
				first = i
			}
		}
	}
	if bad > 0 {
		w.r.find("wrong", "%s: after signal %d, %d bytes of the area are older, the first at %d: %#x", w.name, n, bad,
			first, got[first])
	}
}

// get compares this rank's area of a slot's part with what it has put.
func (w *port) get(to int) {
	if w.flush(to) == nil {
		w.compare(to)
	}
}

// compare is called after Flush has returned nil: all puts that have not failed are placed, and
// nothing of those that have.
func (w *port) compare(to int) {
	p := w.pier(to)
	c := &call{h: w.h, step: w.s, d: newDatum(pg.Uint8, pg.Sum, 0), name: w.name, device: w.r.device}
	b := w.r.take(w.part.Dst, w.area, 1, w.name)
	c.bufs, c.dst = append(c.bufs, b), b.bytes()
	c.stream = w.stream(c)
	at := w.h.slot() * w.area
	err := w.call(to, "get", func() error {
		if w.r.device.has(c.dst) {
			return w.w.GetBuffer(w.ctx, to, at, c.buffer(c.dst))
		}
		return w.w.Get(w.ctx, to, at, c.dst)
	})
	if err := c.settle(w.r.job.Timeout); err != nil {
		w.r.find("error", "%v", err)
	}
	for i, h := range p.halves {
		from, end := w.half(i)
		want := make([]byte, end-from)
		if w.expect(want, from, h.stamp); err != nil || h.state == void {
			continue
		}
		if text := c.d.compare(c.dst[from:end], want); text != "" {
			w.r.find("wrong", "%s: half %d, put to with stamp %d (another put failed since: %v): %s", w.name, i,
				h.stamp, h.state == torn, text)
		}
	}
	w.r.giveBack(c)
}

// refresh has the window forget failures, and takes in ranks that have come.
func (w *port) refresh() {
	for slot, p := range w.to {
		if !w.stale {
			w.flush(slot)
			continue
		}
		err := w.r.timed(w.name+": flush", w.room, func() error { return w.w.Flush(w.ctx, slot) })
		p.err = cmp.Or(p.err, err)
		if w.flushed(slot, err); err == nil {
			w.compare(slot)
		}
	}
	for _, slot := range w.gone { // nobody puts there before the Refresh
		clear(w.w.Bytes()[slot*w.area:][:w.area])
	}
	what := w.name + ": refresh"
	err := w.r.timed(what, w.r.limit(w.part), func() error { return w.w.Refresh(w.long) })
	may := w.s.May
	if may != 0 && w.long.Err() != nil {
		may |= Cancelled
	}
	if w.r.judge(what, may, err); err != nil {
		return
	}
	for _, p := range w.to {
		if p.err != nil {
			p.halves = [2]half{}
		}
		p.err, p.refused = nil, nil
	}
	for _, slot := range w.gone {
		if slot < len(w.to) {
			w.to[slot] = &pier{}
		}
	}
	if w.gone = nil; w.s.May == 0 {
		w.tell()
		for slot := range w.to {
			if slices.Contains(w.h.g.View().Active, slot) {
				w.flush(slot)
			}
		}
	}
}

// tell tells all ranks how many signals this one has sent to each.
func (w *port) tell() {
	g := w.h.g
	n := g.Size()
	w.pier(n - 1)
	mine, all := make([]uint64, n), make([]uint64, n*n)
	for slot := range n {
		mine[slot] = w.to[slot].sent
	}
	what := w.name + ": telling the signals"
	err := w.r.timed(what, w.r.limit(&Part{}), func() error { return pg.AllGather(context.Background(), g, all, mine) })
	if w.r.judge(what, w.s.May, err); err != nil {
		return
	}
	for slot := range n {
		w.due[slot] = due{all[slot*n+g.Rank()], true}
	}
	w.stale, w.felt = false, false
}

// close closes the window at all ranks, perhaps at one before the others have ended their use.
func (w *port) close(ctx context.Context) {
	meet := func() bool { return w.r.meet(ctx, w.s, w.h) }
	if !meet() {
		w.loose = true // it is closed at the end of the disturbance
		return
	}
	if owner := w.s.Root % w.h.g.Size(); w.part.No && w.s.May == 0 && !w.stale {
		if owner == w.h.slot() {
			w.r.endWindow(w.s.Win)
			meet()
			return
		}
		w.useClosed(owner, false)
		meet()
		w.useClosed(owner, true)
	}
	w.r.endWindow(w.s.Win)
}

// useClosed puts to a rank that closes its window, or has closed it.
func (w *port) useClosed(owner int, over bool) {
	src := w.source(MemPlain, 2, 0xff)
	at := w.h.slot() * w.area
	put := func() error {
		err := w.w.Put(w.ctx, owner, at, src.src)
		if e := w.w.Flush(w.ctx, owner); err == nil {
			err = e
		}
		return err
	}
	what := fmt.Sprintf("%s: a put to %d, which has closed it: %v", w.name, owner, over)
	err := w.r.timed(what, w.room, put)
	var lost *pg.RankError
	if (err != nil || over) && (!errors.As(err, &lost) || lost.Rank != owner) {
		w.r.find("wrong", "%s: %v, want a RankError that names it", what, err)
	}
	w.r.giveBack(src)
}

// endWindow closes a window, if there is one.
func (r *rank) endWindow(id int) {
	l := r.windows[id]
	if l == nil {
		return
	}
	delete(r.windows, id)
	what := fmt.Sprintf("closing window %d", id)
	err := r.timed(what, r.job.Timeout, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), r.job.Timeout)
		defer cancel()
		return l.w.Close(ctx)
	})
	if err != nil {
		r.find("error", "%s: %v", what, err)
	}
	for _, p := range l.to {
		for _, c := range p.open {
			r.giveBack(c)
		}
	}
}

// windowsOf lists the windows of a group, or all.
func (r *rank) windowsOf(h *handle) []int {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(r.windows)),
		func(id int) bool { return h != nil && r.windows[id].h != h })
}

// endWindows closes the windows of a group, or all.
func (r *rank) endWindows(h *handle) {
	for _, id := range r.windowsOf(h) {
		r.endWindow(id)
	}
}

// healWindows follows the end of a disturbance, after which gone are new ranks: no rank is in an
// earlier step.
func (r *rank) healWindows(faulty bool, gone []int) {
	for _, id := range r.windowsOf(nil) {
		l := r.windows[id]
		if l.loose {
			r.endWindow(id)
			continue
		}
		l.stale = l.stale || l.felt || faulty
		l.gone = append(l.gone, gone...)
	}
}

// meet has the ranks of a group meet before its windows are closed.
func (r *rank) meet(ctx context.Context, s *Step, h *handle) bool {
	what := fmt.Sprintf("step %d: barrier before closing windows", r.now)
	err := r.timed(what, r.limit(&Part{}), func() error { return h.g.Barrier(ctx) })
	r.judge(what, s.May, err)
	return err == nil
}
