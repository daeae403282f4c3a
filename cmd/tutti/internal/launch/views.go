package launch

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"tutti/bootstrap"
	"tutti/pg/membership"
)

// viewKey is where the ranks keep the job's view, see package pg: eight bytes that name the job's life, and the view.
const viewKey = "membership/view"

const (
	viewPoll  = 200 * time.Millisecond // between two looks whether the group is over
	viewTries = 50                     // looks that the store may leave unanswered before it is taken for over
)

// entry says that a process of this node has been let into the job's group.
type entry struct {
	group       int // its process group, which is the pid of what the guard started: a rank may be run by a script
	slot        int
	incarnation uint64
	late        bool // when the job was ending already
}

// views watches who is in the job's group, as far as its ranks use one. All methods work on nil, which nobody is in.
type views struct {
	cfg     bootstrap.StoreConfig
	in      chan entry
	gone    chan struct{} // gets the answers to ask
	seen    atomic.Bool   // a view
	ctx     context.Context
	stop    context.CancelFunc
	workers sync.WaitGroup
}

// followViews begins to watch. The caller must close.
func followViews(cfg bootstrap.StoreConfig) *views {
	v := &views{cfg: cfg, in: make(chan entry), gone: make(chan struct{}, 1)}
	v.ctx, v.stop = context.WithCancel(context.Background())
	v.workers.Go(v.follow)
	return v
}

func (v *views) close() {
	if v != nil {
		v.stop()
		v.workers.Wait()
	}
}

// entries yields the processes of this node that are let in.
func (v *views) entries() <-chan entry {
	if v == nil {
		return nil
	}
	return v.in
}

// known reports whether the ranks are known to use views.
func (v *views) known() bool { return v != nil && v.seen.Load() }

// over yields a token for each ask, when the group is over: no life of the present view is registered any more, or there is no view.
func (v *views) over() <-chan struct{} {
	if v == nil {
		return nil
	}
	return v.gone
}

// ask has over answer. It must have answered the last one.
func (v *views) ask() {
	v.workers.Go(func() {
		failures := 0
		for v.ctx.Err() == nil {
			over, err := v.look(&failures)
			if err == nil && over || failures > viewTries {
				v.gone <- struct{}{}
				return
			}
			pause(v.ctx, viewPoll)
		}
	})
}

// look looks once whether the group is over.
func (v *views) look(failures *int) (over bool, err error) {
	ctx, cancel := context.WithTimeout(v.ctx, bootstrap.DefaultOpTimeout)
	defer cancel()
	defer func() {
		if *failures++; err == nil {
			*failures = 0
		}
	}()
	store, err := bootstrap.DialStore(ctx, v.cfg)
	if err != nil {
		return false, err
	}
	defer store.Close()
	b, err := store.Get(ctx, viewKey)
	if errors.Is(err, bootstrap.ErrNoKey) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	view, err := decodeView(b)
	if err != nil {
		return false, err
	}
	alive, err := records(ctx, store, view)
	return len(alive) == 0, err
}

// follow reports each process of this node once, when it is in a view, until v is closed.
func (v *views) follow() {
	reported := map[uint64]bool{}
	for v.ctx.Err() == nil {
		if store, err := bootstrap.DialStore(v.ctx, v.cfg); err == nil {
			for e := range store.Watch(v.ctx, viewKey) {
				if view, err := decodeView(e.Value); err == nil && e.Exists {
					v.seen.Store(true)
					v.report(store, view, reported)
				}
			}
			store.Close()
		}
		pause(v.ctx, time.Second) // the store was away, or this process stopped for so long that its lease ended
	}
}

func (v *views) report(store bootstrap.Store, view membership.View, reported map[uint64]bool) {
	news := false
	for _, s := range view.Slots {
		news = news || s.Incarnation != 0 && !reported[s.Incarnation]
	}
	if !news {
		return
	}
	machine := bootstrap.NewRecord(0, 1, 1, nil).Machine
	alive, err := records(v.ctx, store, view)
	if err != nil {
		return // the next view tells
	}
	for _, r := range alive {
		if reported[r.Incarnation] {
			continue
		}
		reported[r.Incarnation] = true
		if group, err := unix.Getpgid(r.PID); r.Machine == machine && err == nil {
			select {
			case v.in <- entry{group: group, slot: r.Rank, incarnation: r.Incarnation}:
			case <-v.ctx.Done():
				return
			}
		}
	}
}

// records returns those of the ranks that are in view.
func records(ctx context.Context, store bootstrap.Store, view membership.View) ([]bootstrap.Record, error) {
	all, err := store.List(ctx, "ranks/")
	if err != nil {
		return nil, err
	}
	var in []bootstrap.Record
	for _, b := range all {
		if r, err := bootstrap.DecodeRecord(b); err == nil && view.Has(r.Rank, r.Incarnation) {
			in = append(in, r)
		}
	}
	return in, nil
}

func decodeView(b []byte) (membership.View, error) {
	if len(b) < 8 {
		return membership.View{}, fmt.Errorf("key %s: %d bytes, want at least 8", viewKey, len(b))
	}
	return membership.DecodeView(b[8:])
}
