package link

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"tutti/endpoint/internal/wire"
	"tutti/internal/epoll"
	"tutti/internal/yield"
)

// Durations of polling, in nanoseconds.
const (
	spin = int64(50 * time.Microsecond)  // an idle connection stays active for so long
	late = int64(500 * time.Microsecond) // a thread that others keep from its processor is away longer
	soon = int64(4 * time.Millisecond)   // two absences are near each other within this and
	// soonTimes times the second: where others compute, each absence takes as long as their turns.
	soonTimes = 3
	doze      = int64(time.Millisecond)       // then no thread polls for so long, and twice as long the next time
	snooze    = int64(time.Second)            // but no longer than this
	calm      = 16                            // a part of that time without an absence halves it
	tend      = int64(100 * time.Microsecond) // the loop serves attended connections so often
	rounds    = 8                             // polls between two looks at the clock
	seldom    = 64                            // polls between two looks whether a waiter has given up
	patier    = 5                             // polling in vain shortens spin at most so many times by half
)

// Loop serves connections with one goroutine.
type Loop struct {
	poll *epoll.Instance
	done chan struct{}
	contention
	own, waiting yield.Poller // of the loop, and of waiters that poll
	tend         int64        // the constant, or that of a test

	mu      sync.Mutex
	conns   map[uint64]*Conn // those that are not released
	kicked  []*Conn          // to be served at once
	last    atomic.Uint64
	woken   bool // the loop is about to wake up
	closing bool
}

// NewLoop starts a loop. Close ends it.
func NewLoop() (*Loop, error) {
	p, err := epoll.New()
	if err != nil {
		return nil, err
	}
	l := &Loop{poll: p, done: make(chan struct{}), conns: map[uint64]*Conn{}, tend: tend}
	go l.run()
	return l, nil
}

// contention knows whether other programs need the processors. Then threads sleep and do not poll:
// one that wakes up gets a processor sooner than one that has used its share.
type contention struct {
	until  atomic.Int64 // no polling
	pause  atomic.Int64 // how long the last time; 0: there was none, or it is long over
	absent atomic.Int64 // the end of the last long absence
}

// present reports whether polling is to be avoided at a time.
func (c *contention) present(at int64) bool { return at < c.until.Load() }

// yield leaves the processor to other threads that are ready, one of which may be the peer's. It
// returns the time after that, and whether it was long after before, when the thread ran last.
func (c *contention) yield(p *yield.Poller, before int64) (at int64, long bool) {
	p.Yield()
	at = now()
	return at, c.note(before, at)
}

// note records that a thread has run at before and at, and yielded between. A single long absence
// changes nothing: the Go collector of this process or of the peer, for example, takes a processor
// for a millisecond. A second one soon after stops the polling for a while. Each that follows soon
// doubles the time, and a part of the time without any halves it.
func (c *contention) note(before, at int64) (long bool) {
	pause, away := c.pause.Load(), at-before
	switch {
	case away > late:
		last := c.absent.Swap(at)
		if pause == 0 && before-last > soon+soonTimes*away {
			return false
		}
		pause = min(max(2*pause, doze), snooze)
		c.pause.Store(pause)
		c.until.Store(at + pause)
		return true
	case pause != 0 && at-c.until.Load() > pause/calm:
		if pause /= 2; pause < doze {
			pause = 0
		}
		c.pause.Store(pause)
		c.until.Store(at)
	}
	return false
}

var errLoopClosed = errors.New("the loop is closed")

// Add makes a Conn of a connected socket, which belongs to it from then on, as g does, also if
// there is an error. prepare is called, without locks, before anything can arrive.
func (l *Loop) Add(fd int, g wire.Guard, h Handler, prepare func(*Conn)) (*Conn, error) {
	c := &Conn{handler: h, loop: l, fd: fd, mode: g.Mode()}
	if g != (wire.Guard{}) {
		c.guard, c.in = &guard{Guard: g}, make([]byte, guardIn)
	} else {
		c.in = make([]byte, inSize)
	}
	c.quiet.L = &c.mu
	c.id = l.last.Add(1)
	prepare(c)
	l.mu.Lock()
	defer l.mu.Unlock()
	err := errLoopClosed
	if !l.closing {
		e := epoll.Event(unix.EPOLLIN|unix.EPOLLRDHUP|unix.EPOLLONESHOT, c.id)
		err = l.poll.Control(unix.EPOLL_CTL_ADD, fd, &e)
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("watch a connection: %w", err)
	}
	l.conns[c.id] = c
	if c.Err() != nil { // whom prepare has told of c has closed it
		l.kicked = append(l.kicked, c)
		l.wakeLocked()
	}
	return c, nil
}

// Close closes the connections and ends the loop, and waits for it.
func (l *Loop) Close(why error) {
	l.mu.Lock()
	l.closing = true
	for _, c := range l.conns {
		c.failure.CompareAndSwap(nil, &failure{why})
		l.kicked = append(l.kicked, c)
	}
	l.wakeLocked()
	l.mu.Unlock()
	<-l.done
}

// kick has the loop serve c at once, unless a waiter does.
func (l *Loop) kick(c *Conn) {
	l.mu.Lock()
	l.kicked = append(l.kicked, c)
	l.wakeLocked()
	l.mu.Unlock()
}

func (l *Loop) wakeLocked() {
	if !l.woken {
		l.woken = true
		l.poll.WakeAt(time.Unix(1, 0))
	}
}

// run is the loop's goroutine.
func (l *Loop) run() {
	defer close(l.done)
	defer l.poll.Close()
	var ids []uint64
	var active []*Conn
	yielded := now()
	for pause := rest; ; {
		var err error
		if pause == busy {
			// Other goroutines get a turn, but seldom: if a processor is idle a thread is woken to
			// look for them.
			if at := now(); at-yielded > spin {
				yielded = at
				runtime.Gosched()
			}
		}
		if ids, err = l.await(ids[:0], pause); err != nil {
			panic(fmt.Sprintf("link: epoll: %v", err)) // only this goroutine closes it
		}
		l.mu.Lock()
		for _, id := range ids {
			active = l.conns[id].list(active)
		}
		for _, c := range l.kicked {
			active = l.conns[c.id].list(active) // Add may not be done with it
		}
		clear(l.kicked)
		l.kicked, l.woken = l.kicked[:0], false
		l.mu.Unlock()
		active, pause = l.serve(active)
		l.mu.Lock()
		over := l.closing && len(l.conns) == 0
		l.mu.Unlock()
		if over {
			return
		}
	}
}

// What the loop does before it serves again.
type pause int

const (
	rest  pause = iota // it sleeps until there is an event
	watch              // it sleeps for tend at most
	busy               // it does not sleep
)

func (l *Loop) await(ids []uint64, p pause) ([]uint64, error) {
	if p == busy {
		return l.poll.Look(ids)
	}
	l.mu.Lock()
	if l.woken {
		l.mu.Unlock()
		return l.poll.Look(ids)
	}
	if p == watch {
		l.poll.WakeAt(time.Now().Add(time.Duration(l.tend)))
	}
	l.mu.Unlock()
	return l.poll.Wait(ids)
}

// list adds c to the connections that the loop serves, unless it is one of them.
func (c *Conn) list(active []*Conn) []*Conn {
	if c == nil || c.released || c.listed.Swap(true) {
		return active
	}
	c.until = 0
	return append(active, c)
}

// serve serves the active connections, and returns those that remain so.
func (l *Loop) serve(active []*Conn) (remain []*Conn, p pause) {
	did := true
	for i := 0; i < rounds && did; i++ {
		did = false
		for _, c := range active {
			if c.waiters.Load() == 0 && c.Err() == nil && c.Poll() {
				did, c.until = true, -1
			}
		}
	}
	at := now()
	if !did && !l.present(at) {
		at, _ = l.yield(&l.own, at)
	}
	remain = active[:0]
	for _, c := range active {
		switch keep := l.look(c, at); {
		case keep == rest:
		default:
			p = max(p, keep)
			remain = append(remain, c)
		}
	}
	clear(active[len(remain):])
	return remain, p
}

// look decides on a connection at a time; rest: it is not active any more.
func (l *Loop) look(c *Conn, at int64) pause {
	if c.Err() != nil {
		l.mu.Lock()
		delete(l.conns, c.id)
		l.mu.Unlock()
		c.released = true
		c.release()
		return rest
	}
	c.Flush()
	if c.waiters.Load() > 0 || at-c.polled.Load() < l.tend && c.parked.Load() == 0 {
		return watch
	}
	switch {
	case l.present(at):
	case c.until < 0: // it was busy
		c.until = at + spin>>c.vain
		if c.vain > 0 {
			c.vain--
		}
		return busy
	case at < c.until:
		return busy
	}
	if c.until > 0 && c.vain < patier {
		c.vain++
	}
	c.listed.Store(false)
	if c.waiters.Load() > 0 { // it has come meanwhile, and may have seen that the loop serves c
		c.listed.Store(true)
		return watch
	}
	// From here on, a goroutine that leaves work to the loop sees that it does not serve c.
	c.Flush()
	if err := c.arm(); err != nil {
		c.Close(err)
	}
	return rest
}

// Waiting is what Await waits for.
type Waiting interface {
	// Ended reports whether it has come.
	Ended() bool
}

// Await polls connections, of which there is at least one, until w is done; false: polling does not
// pay any more, another goroutine does it, or ctx has ended. Then the caller has to sleep until it
// is woken by whatever makes w done, and to call Woken with the same connections.
func Await(ctx context.Context, conns []*Conn, w Waiting) bool {
	if w.Ended() {
		return true
	}
	c := conns[0]
	if c.loop.present(now()) { // the loop does it all
		for _, c := range conns {
			c.parked.Add(1)
			c.Flush()
			if c.listed.Load() { // it may sleep, because there was a waiter
				c.loop.kick(c)
			}
		}
		ok := w.Ended()
		if ok {
			Woken(conns)
		}
		return ok
	}
	alone := c.waiters.Add(1) == 1
	for _, c := range conns[1:] {
		c.waiters.Add(1)
	}
	for _, c := range conns {
		c.Flush()
		if !c.listed.Load() { // an event does not come to the loop if a waiter takes what it is about
			c.loop.kick(c)
		}
	}
	ok := alone && poll(ctx, conns, w)
	if !ok {
		for _, c := range conns {
			c.parked.Add(1)
		}
		ok = w.Ended()
		if ok {
			Woken(conns)
		}
	}
	at := int64(0)
	if ok {
		at = now()
	}
	for _, c := range conns {
		c.polled.Store(at)
		if c.waiters.Add(-1) == 0 && c.parked.Load() > 0 && c.listed.Load() {
			c.loop.kick(c)
		}
	}
	return ok
}

// Woken ends what Await began when it returned false.
func Woken(conns []*Conn) {
	for _, c := range conns {
		c.parked.Add(-1)
	}
}

// poll polls until w is done, ctx has ended, or nothing has come for a while. It yields to other
// threads, but not to other goroutines, because that wakes a thread if a P is idle.
func poll(ctx context.Context, conns []*Conn, w Waiting) bool {
	c := conns[0]
	var since, last int64 // when polling in vain began, and the last look at the clock; 0: there was none
	for i := 1; ; i++ {
		did := false
		for _, c := range conns {
			did = c.Poll() || did
		}
		if w.Ended() {
			if since == 0 || now()-since < spin {
				c.misses.Store(0)
			}
			return true
		}
		if i%seldom == 0 && ctx.Err() != nil { // what comes may all be for others
			return false
		}
		if did {
			since, last = 0, 0
			continue
		}
		if i%rounds != 0 {
			continue
		}
		if last == 0 {
			last = now()
		}
		at, long := c.loop.yield(&c.loop.waiting, last)
		if last = at; since == 0 {
			since = at
		}
		if long || at-since > spin>>min(c.misses.Load(), patier) {
			c.misses.Add(1)
			return false
		}
	}
}
