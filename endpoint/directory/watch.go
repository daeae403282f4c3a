package directory

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"sync"

	"tutti/bootstrap"
	"tutti/internal/backoff"
)

// maxChanges bounds the changes that a program has not taken from Watch.
const maxChanges = 64 << 10

// Watch returns the entries, in the order of their names, and then every change, in the order in
// which the store made them, until ctx ends, the directory is closed or the caller stops. The last
// pair has the error. Watch goes on through a store that is away, or has forgotten its changes by
// compaction, and for a program that is more than 64 Ki changes behind: then it returns what
// differs from what it returned before, and so every name has its last state. Entries that are
// malformed count as none.
func (d *Directory) Watch(ctx context.Context) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		if err := d.needs(ctx, "watch"); err != nil {
			yield(Event{}, err)
			return
		}
		ctx, cancel := context.WithCancel(ctx)
		f := &feed{more: make(chan struct{}, 1)}
		var err error // of the goroutine, when done is closed
		done := make(chan struct{})
		go func() {
			defer close(done)
			err = d.feed(ctx, f)
		}()
		defer func() {
			cancel()
			<-done
		}()
		known := map[string]Event{}
		report := func(key string, value []byte, exists bool) bool {
			name := strings.TrimPrefix(key, keys)
			e := Event{Gone: true}
			if exists {
				x, err := entryOf(key, value)
				if err != nil {
					d.log.Warn("directory: an entry is passed over", "err", err)
				} else {
					e = Event{Entry: x}
				}
			}
			before, was := known[name]
			switch {
			case e.Gone && !was, was && !e.Gone && e.Info.String() == before.Info.String():
				return true
			case e.Gone:
				e.Entry = before.Entry
				delete(known, name)
			default:
				known[name] = e
			}
			return yield(e, nil)
		}
		for {
			for _, c := range f.take() {
				if c.state == nil {
					if !report(c.Key, c.Value, c.Exists) {
						return
					}
					continue
				}
				for _, name := range slices.Sorted(maps.Keys(known)) {
					if _, ok := c.state[keys+name]; !ok && !report(keys+name, nil, false) {
						return
					}
				}
				for _, key := range slices.Sorted(maps.Keys(c.state)) {
					if !report(key, c.state[key], true) {
						return
					}
				}
			}
			select {
			case <-f.more:
			case <-done:
				yield(Event{}, fmt.Errorf("directory %s: watch: %w", d.cfg.Job, err))
				return
			}
		}
	}
}

// feed gives f what the store reports, until ctx ends or the directory.
func (d *Directory) feed(ctx context.Context, f *feed) error {
	for {
		s, err := d.handle(ctx)
		if err == nil {
			fctx, cancel := context.WithCancel(ctx)
			err = s.Follow(fctx, keys, func(state map[string][]byte) {
				f.put(change{state: state})
			}, func(e bootstrap.Event) {
				if !f.put(change{Event: e}) {
					cancel()
				}
			})
			cancel()
			d.log.Debug("directory: a watch begins again", "err", err)
		}
		switch {
		case d.life.Err() != nil:
			return ErrClosed
		case !backoff.Sleep(ctx, retry):
			return context.Cause(ctx)
		}
	}
}

// feed has the changes that the program has not taken.
type feed struct {
	mu     sync.Mutex
	todo   []change
	behind bool          // changes were dropped: a state comes next
	more   chan struct{} // holds a value if there may be some
}

// change is an event, or all there is.
type change struct {
	bootstrap.Event
	state map[string][]byte
}

// put adds a change; false: the program is too slow, and what it has not taken was dropped.
func (f *feed) put(c change) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case c.state != nil:
		if f.behind || slices.ContainsFunc(f.todo, func(c change) bool { return c.state != nil }) {
			f.todo = nil // it has them all
		}
		f.behind = false
	case f.behind:
		return false
	case len(f.todo) >= maxChanges:
		f.todo, f.behind = nil, true
		return false
	}
	f.todo = append(f.todo, c)
	select {
	case f.more <- struct{}{}:
	default:
	}
	return true
}

func (f *feed) take() []change {
	f.mu.Lock()
	defer f.mu.Unlock()
	todo := f.todo
	f.todo = nil
	return todo
}
