package directory

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"tutti/bootstrap"
	"tutti/endpoint"
	"tutti/endpoint/internal/args"
	"tutti/internal/backoff"
)

// Config configures a Directory.
type Config struct {
	// Store says where the store is, and how to prove who this is. Its Job is the name of the
	// directory, of which a store has any number; default DefaultName. LeaseTTL is how long entries
	// outlive a process that was killed; default bootstrap.DefaultLeaseTTL.
	Store bootstrap.StoreConfig
	// Logger gets what is no error of a method: that the store was away, and malformed entries.
	// Default: none.
	Logger *slog.Logger
}

// DefaultName is the name of a directory without another one.
const DefaultName = "endpoints"

// Directory is a handle on a directory in a store. Its methods may be called from any goroutine.
type Directory struct {
	cfg  bootstrap.StoreConfig
	log  *slog.Logger
	life context.Context // ends at Close
	end  context.CancelFunc
	work sync.WaitGroup

	mu     sync.Mutex
	closed bool
	store  bootstrap.Follower // nil: its lease was lost, and there is no other one yet
	back   chan struct{}      // closed when there is one; nil: no goroutine waits
	held   map[string]*Publication
	err    error // of the last store's Close
}

// retry is the pause before what has failed for want of the store, or of a peer, is tried again.
const retry = 100 * time.Millisecond

// Open connects to the store, within Config.Store.DialTimeout. Errors are those of
// bootstrap.DialStore. Close ends the Directory.
func Open(ctx context.Context, cfg Config) (*Directory, error) {
	d := &Directory{cfg: cfg.Store, log: cfg.Logger, held: map[string]*Publication{}}
	d.cfg.Secret = slices.Clone(cfg.Store.Secret) // the program may overwrite its own
	d.cfg.Job = cmp.Or(d.cfg.Job, DefaultName)
	if err := d.needs(ctx, "open"); err != nil {
		return nil, err
	}
	if d.cfg.OpTimeout <= 0 {
		d.cfg.OpTimeout = bootstrap.DefaultOpTimeout
	}
	if d.log == nil {
		d.log = slog.New(slog.DiscardHandler)
	}
	s, err := d.dial(ctx)
	if err != nil {
		return nil, fmt.Errorf("directory %s: %w", d.cfg.Job, err)
	}
	d.store = s
	d.life, d.end = context.WithCancel(context.Background())
	d.work.Go(func() { d.keep(s) })
	return d, nil
}

// needs returns an error if ctx, of a call, is nil.
func (d *Directory) needs(ctx context.Context, call string) error {
	return args.Context(ctx, "directory "+d.cfg.Job, call)
}

func (d *Directory) dial(ctx context.Context) (bootstrap.Follower, error) {
	s, err := bootstrap.DialStore(ctx, d.cfg)
	if err != nil {
		return nil, err
	}
	return s.(bootstrap.Follower), nil
}

// Close withdraws what is published, and releases the handle on the store. It takes bounded time:
// an error says that the store does not answer, and that the entries go when their lease ends.
// Idempotent.
func (d *Directory) Close() error {
	d.mu.Lock()
	d.closed = true
	d.mu.Unlock()
	d.end()
	d.work.Wait()
	return d.err
}

// keep replaces the handle on the store when its lease was lost.
func (d *Directory) keep(s bootstrap.Follower) {
	for {
		select {
		case <-s.Lost():
		case <-d.life.Done():
			d.err = s.Close()
			return
		}
		d.mu.Lock()
		d.store = nil
		held := len(d.held)
		d.mu.Unlock()
		if held > 0 {
			d.log.Warn("directory: entries of this process are gone until the store answers", "err", s.Err())
		} else {
			d.log.Debug("directory: the store is away", "err", s.Err())
		}
		s.Close()
		for {
			var err error
			if s, err = d.dial(d.life); err == nil {
				break
			}
			d.log.Debug("directory: the store does not answer", "err", err)
			if !backoff.Sleep(d.life, retry) {
				return
			}
		}
		d.log.Info("directory: the store answers again")
		d.mu.Lock()
		d.store = s
		if d.back != nil {
			close(d.back)
			d.back = nil
		}
		d.mu.Unlock()
	}
}

// handle returns a handle on the store. It waits for one until ctx ends, or the directory.
func (d *Directory) handle(ctx context.Context) (bootstrap.Follower, error) {
	for {
		d.mu.Lock()
		s, closed := d.store, d.closed
		if s == nil && d.back == nil {
			d.back = make(chan struct{})
		}
		back := d.back
		d.mu.Unlock()
		switch {
		case closed:
			return nil, ErrClosed
		case s != nil:
			return s, nil
		}
		select {
		case <-back:
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %w", bootstrap.ErrStoreAway, context.Cause(ctx))
		case <-d.life.Done():
			return nil, ErrClosed
		}
	}
}

// soon is handle for a method that answers at once.
func (d *Directory) soon(ctx context.Context) (bootstrap.Follower, error) {
	ctx, cancel := context.WithTimeout(ctx, d.cfg.OpTimeout)
	defer cancel()
	return d.handle(ctx)
}

// Lookup returns the entry of a name, or ErrNoName, as the store has it now.
func (d *Directory) Lookup(ctx context.Context, name string) (Entry, error) {
	if err := d.needs(ctx, "lookup"); err != nil {
		return Entry{}, err
	}
	if err := CheckName(name); err != nil {
		return Entry{}, fmt.Errorf("directory %s: %w", d.cfg.Job, err)
	}
	s, err := d.soon(ctx)
	if err != nil {
		return Entry{}, d.fail(name, err)
	}
	value, err := s.Get(ctx, keys+name)
	switch {
	case errors.Is(err, bootstrap.ErrNoKey):
		return Entry{}, d.fail(name, ErrNoName)
	case err != nil:
		return Entry{}, d.fail(name, err)
	}
	x, err := entryOf(keys+name, value)
	if err != nil {
		return Entry{}, fmt.Errorf("directory %s: %w", d.cfg.Job, err)
	}
	return x, nil
}

// fail is the error of a method for a name.
func (d *Directory) fail(name string, err error) error {
	if taken := (*TakenError)(nil); errors.As(err, &taken) { // it has the name
		return fmt.Errorf("directory %s: %w", d.cfg.Job, err)
	}
	return fmt.Errorf("directory %s: name %s: %w", d.cfg.Job, name, d.reason(err))
}

// reason is an error for the program, which does not know of handles on the store.
func (d *Directory) reason(err error) error {
	switch {
	case !errors.Is(err, bootstrap.ErrStoreClosed):
		return err
	case d.life.Err() != nil:
		return ErrClosed
	}
	return fmt.Errorf("%w: its lease was lost", bootstrap.ErrStoreAway)
}

// Wait returns the entry of a name as soon as there is one. It waits until ctx ends, also for a
// store that is away.
func (d *Directory) Wait(ctx context.Context, name string) (Entry, error) {
	if err := d.needs(ctx, "wait"); err != nil {
		return Entry{}, err
	}
	if err := CheckName(name); err != nil {
		return Entry{}, fmt.Errorf("directory %s: %w", d.cfg.Job, err)
	}
	wctx, cancel := context.WithCancel(ctx)
	entries := d.follow(wctx, name)
	x, ok := <-entries
	cancel()
	for range entries {
	}
	switch {
	case ok:
		return x, nil
	case ctx.Err() != nil:
		return Entry{}, d.fail(name, fmt.Errorf("%w: %w", ErrNoName, context.Cause(ctx)))
	}
	return Entry{}, d.fail(name, ErrClosed)
}

// follow returns a channel of the entries of a name: the present one, if there is one, and each
// that takes its place. Of those that were not taken it has the last. It is closed when ctx ends,
// or the directory.
func (d *Directory) follow(ctx context.Context, name string) <-chan Entry {
	out := make(chan Entry, 1)
	go func() {
		defer close(out)
		for {
			s, err := d.handle(ctx)
			if err != nil {
				return
			}
			wctx, cancel := context.WithCancel(ctx)
			for e := range s.Watch(wctx, keys+name) {
				if e.Err != nil {
					break
				}
				if !e.Exists {
					continue
				}
				x, err := entryOf(e.Key, e.Value)
				if err != nil {
					d.log.Warn("directory: an entry is passed over", "err", err)
					continue
				}
				select {
				case <-out:
				default:
				}
				out <- x
			}
			cancel()
			if !backoff.Sleep(ctx, retry) {
				return
			}
		}
	}()
	return out
}

// Entries returns all entries, in the order of their names, as the store has them now.
func (d *Directory) Entries(ctx context.Context) ([]Entry, error) {
	if err := d.needs(ctx, "entries"); err != nil {
		return nil, err
	}
	s, err := d.soon(ctx)
	var values map[string][]byte
	if err == nil {
		values, err = s.List(ctx, keys)
	}
	if err != nil {
		return nil, fmt.Errorf("directory %s: %w", d.cfg.Job, d.reason(err))
	}
	all := make([]Entry, 0, len(values))
	for _, key := range slices.Sorted(maps.Keys(values)) {
		x, err := entryOf(key, values[key])
		if err != nil {
			d.log.Warn("directory: an entry is passed over", "err", err)
			continue
		}
		all = append(all, x)
	}
	return all, nil
}

// Connect returns the peer that is published under a name, connected: see endpoint.Connect. While
// there is none, or it cannot be reached, Connect tries again until ctx ends: also at another
// address if the entry changes, as that of a publisher that was started again. A caller that calls
// it after an operation has failed with endpoint.ErrBroken thus follows the name. A publisher that
// was started again is another Peer; the former one is the caller's to close. An endpoint that has
// another secret, or is of another build, is an error at once. One that refuses this one
// (endpoint.ErrRefused), because it has no room or another endpoint has the address now, is tried
// again like one that cannot be reached: ctx should have a deadline.
func (d *Directory) Connect(ctx context.Context, e *endpoint.Endpoint, name string) (*endpoint.Peer, error) {
	if err := d.needs(ctx, "connect"); err != nil {
		return nil, err
	}
	if err := CheckName(name); err != nil {
		return nil, fmt.Errorf("directory %s: %w", d.cfg.Job, err)
	}
	wctx, cancel := context.WithCancel(ctx)
	entries := d.follow(wctx, name)
	defer func() {
		cancel()
		for range entries {
		}
	}()
	why, of := ErrNoName, uint64(0) // the endpoint that why is about
	x, ok := <-entries
	for ok {
		p, next, err := attempt(ctx, e, x, entries)
		if err == nil {
			return p, nil
		}
		if ctx.Err() == nil || of != x.Info.ID { // else the attempt ended with ctx, and says less than the one before
			why, of = err, x.Info.ID
		}
		if errors.Is(err, endpoint.ErrAuth) || errors.Is(err, endpoint.ErrVersion) ||
			errors.Is(err, endpoint.ErrClosed) || x.Info.ID == e.Info().ID {
			return nil, d.fail(name, err)
		}
		if next != nil {
			x = *next
			continue
		}
		again := time.NewTimer(retry)
		select {
		case y, more := <-entries:
			if ok = more; ok {
				x = y
			}
		case <-again.C:
		}
		again.Stop()
	}
	if ctx.Err() != nil {
		return nil, d.fail(name, fmt.Errorf("%w: %w", why, context.Cause(ctx)))
	}
	return nil, d.fail(name, ErrClosed)
}

// attempt connects to an endpoint. It gives up when the name has another entry, which it returns.
func attempt(ctx context.Context, e *endpoint.Endpoint, x Entry, entries <-chan Entry) (p *endpoint.Peer,
	next *Entry, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan struct{})
	go func() {
		defer close(done)
		p, err = e.Connect(ctx, x.Info)
	}()
	for {
		select {
		case <-done:
			return p, next, err
		case y, ok := <-entries:
			if ok && y.Info.String() == x.Info.String() {
				continue
			}
			if ok {
				next = &y
			}
			cancel()
			<-done
			return p, next, err
		}
	}
}
