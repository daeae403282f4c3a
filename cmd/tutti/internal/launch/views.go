package launch

import (
	"bytes"
	"context"
	"errors"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"tutti/bootstrap"
	"tutti/internal/backoff"
	"tutti/pg/membership"
)

const (
	viewPoll = 200 * time.Millisecond // interval of checks whether the group is over
	viewAway = time.Minute            // without the store, after which the group counts as over
	viewRead = 2 * time.Second        // see views.within
)

// entry says that a process of this node has been admitted to the job's group.
type entry struct {
	group       int // its process group, which is the pid of the guard's child: a script may run the rank
	slot        int
	incarnation uint64
	gone        bool // it has ended
	late        bool // the job was already ending
}

// views watches the members of the job's group, if its ranks use one. All methods except ask work
// on nil, which has no members.
type views struct {
	cfg     bootstrap.StoreConfig
	within  time.Duration // bounds the wait for the admissions that the store shows
	reading chan struct{} // of read
	in      chan entry
	asked   atomic.Bool
	hasty   atomic.Bool        // see hurry
	gone    chan struct{}      // receives the answer to ask
	short   atomic.Bool        // see setShort
	forlorn chan struct{}      // receives a token when the ranks wait in vain
	seen    atomic.Bool        // a view has been seen, and a process of it: it is of this job
	kick    chan struct{}      // holds a token when vacant has got more
	reads   chan chan struct{} // of read: has room for one
	ctx     context.Context
	stop    context.CancelFunc
	ended   chan struct{}

	mu     sync.Mutex
	vacant []int // ranks whose places are free although there is no view yet
}

// followViews starts the watch. The caller must close it.
func followViews(cfg bootstrap.StoreConfig) *views {
	v := &views{cfg: cfg, within: viewRead, in: make(chan entry), gone: make(chan struct{}, 1),
		forlorn: make(chan struct{}, 1), kick: make(chan struct{}, 1), reads: make(chan chan struct{}, 1),
		ended: make(chan struct{})}
	v.ctx, v.stop = context.WithCancel(context.Background())
	go v.follow()
	return v
}

func (v *views) close() {
	if v != nil {
		v.stop()
		<-v.ended
	}
}

// entries yields the processes of this node that are admitted, each once.
func (v *views) entries() <-chan entry {
	if v == nil {
		return nil
	}
	return v.in
}

// read returns a channel that is closed when entries has yielded all that the store shows now; nil:
// an earlier one still waits for the store. One goroutine may call it.
func (v *views) read() <-chan struct{} {
	if v.reading != nil {
		select {
		case <-v.reading:
		default:
			return nil
		}
	}
	v.reading = make(chan struct{})
	v.reads <- v.reading
	return v.reading
}

// known reports whether the ranks are known to use views.
func (v *views) known() bool { return v != nil && v.seen.Load() }

// markDead announces to processes on standby, in the store, that a rank is gone for good, unless
// this job has had a view, which shows it.
func (v *views) markDead(rank int) {
	if v == nil || v.known() {
		return
	}
	v.mu.Lock()
	v.vacant = append(v.vacant, rank)
	v.mu.Unlock()
	select {
	case v.kick <- struct{}{}:
	default:
	}
}

// ask makes over answer when the group is over: no incarnation of the present view is registered
// for longer than a loss of all leases, or there is no view for that long. The last ask must have
// been answered.
func (v *views) ask() { v.asked.Store(true) }

// hurry makes one look suffice for ask: the job is ending, and needs no replacements any more.
func (v *views) hurry() {
	if v != nil {
		v.hasty.Store(true)
	}
}

// setShort says whether the job has too few processes to begin.
func (v *views) setShort(short bool) {
	if v != nil {
		v.short.Store(short)
	}
}

// stuck receives tokens when the job has too few processes to begin, and there has been no view,
// although processes wait for it, for longer than a loss of all leases: a rank that died a moment
// ago may still be part of the first view.
func (v *views) stuck() <-chan struct{} {
	if v == nil {
		return nil
	}
	return v.forlorn
}

// over receives a token for each ask.
func (v *views) over() <-chan struct{} {
	if v == nil {
		return nil
	}
	return v.gone
}

func (v *views) answer() {
	if v.asked.CompareAndSwap(true, false) {
		v.gone <- struct{}{}
	}
}

// follow watches until v is closed.
func (v *views) follow() {
	defer close(v.ended)
	reported, there := map[uint64]bool{}, time.Now()
	for v.ctx.Err() == nil {
		if store, err := bootstrap.DialStore(v.ctx, v.cfg); err == nil {
			v.watch(store, reported)
			store.Close()
			there = time.Now()
		} else if time.Since(there) > viewAway {
			v.answer()
		}
		backoff.Sleep(v.ctx, time.Second) // the store was away, or this process was stopped until its lease ended
	}
}

// watch follows the view and answers ask, until v is closed or the store does not answer.
func (v *views) watch(store bootstrap.Store, reported map[uint64]bool) {
	ctx, cancel := context.WithCancel(v.ctx)
	defer cancel()
	// Records disappear without a change of the view.
	changes, again := store.Watch(ctx, membership.ViewKey), time.NewTicker(viewPoll)
	defer again.Stop()
	var now bootstrap.Event
	var view membership.View
	// Looks, in a row, that found no member. Their number is the time for which this process has
	// looked: it does not look while it is stopped.
	vain := 0
	waits := 0 // looks, in a row, that found processes that wait for the first view in vain
	told := 0  // entries of vacant that were written; a new handle writes all again, because they are under its lease
	for {
		v.mu.Lock()
		news := v.vacant[told:]
		v.mu.Unlock()
		for _, rank := range news {
			if store.Put(ctx, bootstrap.VacantKeys+strconv.Itoa(rank), []byte("its process has ended"), true) != nil {
				return
			}
			told++
		}
		select {
		case <-v.kick:
		case e, open := <-changes:
			if !open || e.Err != nil {
				return
			}
			now, view = e, membership.View{}
			if e.Exists {
				var err error
				if view, err = v.report(ctx, store, e.Value, reported); err != nil {
					return
				}
			}
		case done := <-v.reads:
			b, err := store.Get(ctx, membership.ViewKey)
			if err == nil {
				_, err = v.report(ctx, store, b, reported)
			}
			if err != nil && !errors.Is(err, bootstrap.ErrNoKey) {
				v.reads <- done
				return
			}
			close(done)
		case <-again.C:
			inVain := false
			if now.Key != "" && !now.Exists && v.short.Load() && !v.known() {
				var err error
				if inVain, err = waiting(ctx, store); err != nil {
					return
				}
			}
			if waits++; !inVain {
				waits = 0
			} else if time.Duration(waits)*viewPoll > store.TTL()+2*time.Second {
				select {
				case v.forlorn <- struct{}{}:
				default:
				}
			}
			if now.Key == "" || !v.asked.Load() {
				continue
			}
			switch over, err := isOver(ctx, store, now, view); {
			case err != nil:
				return
			case !over:
				vain = 0
			default:
				if vain++; v.hasty.Load() || time.Duration(vain)*viewPoll > store.TTL()+2*time.Second {
					v.answer()
					vain = 0
				}
			}
		}
	}
}

// waiting reports whether processes are registered and there is no view.
func waiting(ctx context.Context, store bootstrap.Store) (bool, error) {
	records, err := store.List(ctx, bootstrap.RankKeys)
	if err != nil || len(records) == 0 {
		return false, err
	}
	_, err = store.Get(ctx, membership.ViewKey)
	if errors.Is(err, bootstrap.ErrNoKey) {
		return true, nil
	}
	return false, err
}

// isOver reports whether no incarnation of the view had is registered, and it is still the present
// view: only a member can have made another.
func isOver(ctx context.Context, store bootstrap.Store, had bootstrap.Event, view membership.View) (bool, error) {
	records, err := store.List(ctx, bootstrap.RankKeys)
	if err != nil {
		return false, err
	}
	for slot := range view.Slots {
		if r, err := bootstrap.DecodeRecord(records[bootstrap.RankKey(slot)]); err == nil &&
			view.Has(slot, r.Incarnation) {
			return false, nil
		}
	}
	b, err := store.Get(ctx, membership.ViewKey)
	if errors.Is(err, bootstrap.ErrNoKey) {
		return !had.Exists, nil
	}
	return err == nil && had.Exists && bytes.Equal(b, had.Value), err
}

// report reports the processes of this node that are in the stored view, each once, and returns the
// view.
func (v *views) report(ctx context.Context, store bootstrap.Store, stored []byte,
	reported map[uint64]bool) (membership.View, error) {
	_, view, err := membership.DecodeStored(stored)
	if err != nil {
		return view, err
	}
	news := false
	for _, s := range view.Slots {
		news = news || s.Incarnation != 0 && !reported[s.Incarnation]
	}
	if !news {
		return view, nil
	}
	all, err := store.List(ctx, bootstrap.RankKeys)
	if err != nil {
		return view, err
	}
	me := bootstrap.NewRecord(0, 1, 1, nil)
	for _, b := range all {
		r, err := bootstrap.DecodeRecord(b)
		if err != nil || !view.Has(r.Rank, r.Incarnation) {
			continue
		}
		v.seen.Store(true) // an earlier job's view has no process that is registered
		if reported[r.Incarnation] {
			continue
		}
		reported[r.Incarnation] = true
		// Containers share a machine, and perhaps its name, but not PIDs.
		if r.Machine != me.Machine || r.Processes != me.Processes || r.Processes == "" {
			continue
		}
		in := entry{slot: r.Rank, incarnation: r.Incarnation}
		if in.group, err = unix.Getpgid(r.PID); err != nil { // unless a script ran it, it led its group
			in.group, in.gone = r.PID, true
		}
		select {
		case v.in <- in:
		case <-ctx.Done():
			return view, ctx.Err()
		}
	}
	return view, nil
}
