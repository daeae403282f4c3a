package launch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"tutti/bootstrap"
	"tutti/pg/membership"
)

// viewKey is where the ranks keep the job's view, see package pg: eight bytes that name the job's
// life, and the view.
const viewKey = "membership/view"

const (
	viewPoll = 200 * time.Millisecond // between two looks whether the group is over
	viewAway = time.Minute            // without the store, after which the group is taken for over
)

// entry says that a process of this node has been let into the job's group.
type entry struct {
	group       int // its process group, which is the pid of what the guard started: a rank may be run by a script
	slot        int
	incarnation uint64
	late        bool // when the job was ending already
}

// views watches who is in the job's group, as far as its ranks use one. All methods but ask work on
// nil, which nobody is in.
type views struct {
	cfg   bootstrap.StoreConfig
	in    chan entry
	asked atomic.Bool
	gone  chan struct{} // gets the answer to ask
	seen  atomic.Bool   // a view
	kick  chan struct{} // holds a token when vacant has got more
	ctx   context.Context
	stop  context.CancelFunc
	ended chan struct{}

	mu     sync.Mutex
	vacant []int // ranks whose places are free although there was no view yet
}

// followViews begins to watch. The caller must close.
func followViews(cfg bootstrap.StoreConfig) *views {
	v := &views{cfg: cfg, in: make(chan entry), gone: make(chan struct{}, 1), kick: make(chan struct{}, 1),
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

// entries yields the processes of this node that are let in, each once.
func (v *views) entries() <-chan entry {
	if v == nil {
		return nil
	}
	return v.in
}

// known reports whether the ranks are known to use views.
func (v *views) known() bool { return v != nil && v.seen.Load() }

// vacate says in the store that a rank is gone for good, for a process on standby, unless there has
// been a view, which says so itself.
func (v *views) vacate(rank int) {
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

// ask has over answer when the group is over: no life of the present view is registered any more,
// or there is no view. It must have answered the last one.
func (v *views) ask() { v.asked.Store(true) }

// over yields a token for each ask.
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
		pause(v.ctx, time.Second) // the store was away, or this process stopped for so long that its lease ended
	}
}

// watch follows the view and answers, until v is closed or the store does not answer.
func (v *views) watch(store bootstrap.Store, reported map[uint64]bool) {
	ctx, cancel := context.WithCancel(v.ctx)
	defer cancel()
	changes, again := store.Watch(ctx, viewKey), time.NewTicker(viewPoll) // records go without a change of the view
	defer again.Stop()
	var now bootstrap.Event
	var view membership.View
	told := 0 // of vacant: all again in a new store handle, for they are under its lease
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
				if view, err = decodeView(e.Value); err != nil {
					return
				}
				v.seen.Store(true)
			}
			if v.report(ctx, store, view, reported) != nil {
				return
			}
		case <-again.C:
			if now.Key == "" || !v.asked.Load() {
				continue
			}
			switch over, err := isOver(ctx, store, now, view); {
			case err != nil:
				return
			case over:
				v.answer()
			}
		}
	}
}

// isOver says whether no life of the view that the store had is registered, and it still is the
// view: only one who was in it can have made another.
func isOver(ctx context.Context, store bootstrap.Store, had bootstrap.Event, view membership.View) (bool, error) {
	for slot, s := range view.Slots {
		if s.Incarnation == 0 {
			continue
		}
		b, err := store.Get(ctx, bootstrap.RankKey(slot))
		if errors.Is(err, bootstrap.ErrNoKey) {
			continue
		}
		if err != nil {
			return false, err
		}
		if r, err := bootstrap.DecodeRecord(b); err == nil && view.Has(slot, r.Incarnation) {
			return false, nil
		}
	}
	b, err := store.Get(ctx, viewKey)
	if errors.Is(err, bootstrap.ErrNoKey) {
		return !had.Exists, nil
	}
	return err == nil && had.Exists && bytes.Equal(b, had.Value), err
}

// report reports the processes of this node that are in view, each once.
func (v *views) report(ctx context.Context, store bootstrap.Store, view membership.View,
	reported map[uint64]bool) error {
	news := false
	for _, s := range view.Slots {
		news = news || s.Incarnation != 0 && !reported[s.Incarnation]
	}
	if !news {
		return nil
	}
	all, err := store.List(ctx, "ranks/")
	if err != nil {
		return err
	}
	me := bootstrap.NewRecord(0, 1, 1, nil)
	for _, b := range all {
		r, err := bootstrap.DecodeRecord(b)
		if err != nil || !view.Has(r.Rank, r.Incarnation) || reported[r.Incarnation] {
			continue
		}
		reported[r.Incarnation] = true
		if r.Machine != me.Machine || r.Host != me.Host { // containers share a machine, but not its process numbers
			continue
		}
		if group, err := unix.Getpgid(r.PID); err == nil {
			select {
			case v.in <- entry{group: group, slot: r.Rank, incarnation: r.Incarnation}:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
	return nil
}

func decodeView(b []byte) (membership.View, error) {
	if len(b) < 8 {
		return membership.View{}, fmt.Errorf("key %s: %d bytes, want at least 8", viewKey, len(b))
	}
	return membership.DecodeView(b[8:])
}
