package directory

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"tutti/bootstrap"
	"tutti/endpoint"
	"tutti/internal/backoff"
)

// Publication is an entry that this process keeps in the directory.
type Publication struct {
	d     *Directory
	name  string
	info  endpoint.Info
	value []byte
	life  context.Context // ends when it is to be withdrawn
	end   context.CancelFunc
	first chan struct{} // closed when the entry is there for the first time
	ended chan struct{}
	err   error // why; set before ended is closed
}

// slack is how much longer than a lease's time to live the store may take to end it.
const slack = 2 * time.Second

// Publish makes an entry, which exists until Withdraw or Close. It waits, until ctx ends, for the
// store, and for a publisher of the same name that may have been killed: see the package comment.
// The error is a *TakenError if another endpoint has the name. The endpoint must listen.
func (d *Directory) Publish(ctx context.Context, name string, info endpoint.Info) (*Publication, error) {
	if err := d.needs(ctx, "publish"); err != nil {
		return nil, err
	}
	err := CheckName(name)
	var value []byte
	if err == nil {
		value, err = encode(info)
	}
	if err != nil {
		return nil, fmt.Errorf("directory %s: %w", d.cfg.Job, err)
	}
	p := &Publication{d: d, name: name, info: info, value: value, first: make(chan struct{}),
		ended: make(chan struct{})}
	p.life, p.end = context.WithCancel(d.life)
	for {
		d.mu.Lock()
		old := d.held[name]
		if d.closed {
			d.mu.Unlock()
			p.end()
			return nil, d.fail(name, ErrClosed)
		}
		if old == nil {
			d.held[name] = p
			d.work.Go(p.run)
			d.mu.Unlock()
			break
		}
		d.mu.Unlock()
		if old.life.Err() == nil {
			p.end()
			return nil, d.fail(name, fmt.Errorf("this directory publishes it already: withdraw it first"))
		}
		select {
		case <-old.ended:
		case <-ctx.Done():
			p.end()
			return nil, d.fail(name, fmt.Errorf("its withdrawal is not over: %w", context.Cause(ctx)))
		}
	}
	select {
	case <-p.first:
		return p, nil
	case <-p.ended:
		return nil, d.fail(name, p.err)
	case <-ctx.Done():
		p.end() // what has reached the store nevertheless is removed
		return nil, d.fail(name, fmt.Errorf("not published: %w", context.Cause(ctx)))
	}
}

// Name returns the name.
func (p *Publication) Name() string { return p.name }

// Done returns a channel that is closed when the entry is kept no more: it was withdrawn, the
// directory closed, or the name taken by another endpoint while the store did not hear of this one.
func (p *Publication) Done() <-chan struct{} { return p.ended }

// Err returns why Done was closed: ErrWithdrawn, ErrClosed or a *TakenError; nil before.
func (p *Publication) Err() error {
	select {
	case <-p.ended:
		return p.err
	default:
		return nil
	}
}

// Withdraw removes the entry. If the store does not answer before ctx ends, Withdraw returns an
// error, and the entry is removed as soon as the store answers. Idempotent.
func (p *Publication) Withdraw(ctx context.Context) error {
	if err := p.d.needs(ctx, "withdraw"); err != nil {
		return err
	}
	p.end()
	select {
	case <-p.ended:
		return nil
	case <-ctx.Done():
		return p.d.fail(p.name, fmt.Errorf("not withdrawn yet: %w: %w", bootstrap.ErrStoreAway, context.Cause(ctx)))
	}
}

// run keeps the entry until life ends, and removes it.
func (p *Publication) run() {
	d := p.d
	for p.life.Err() == nil && p.err == nil {
		s, err := d.handle(p.life)
		if err == nil {
			err = p.keep(s)
		}
		if errors.As(err, new(*TakenError)) {
			p.err = err
			select {
			case <-p.first:
				d.log.Warn("directory: the entry of another endpoint stays", "err", err)
			default: // Publish returns the error
			}
		} else if p.life.Err() == nil {
			d.log.Debug("directory: an entry could not be kept", "name", p.name, "err", err)
			backoff.Sleep(p.life, retry)
		}
	}
	for p.err == nil && d.life.Err() == nil {
		s, err := d.handle(d.life)
		if err == nil {
			err = s.CompareAndSwap(d.life, keys+p.name, p.value, nil)
		}
		if err == nil || errors.Is(err, bootstrap.ErrConflict) {
			p.err = ErrWithdrawn
		} else {
			backoff.Sleep(d.life, retry)
		}
	}
	if p.err == nil {
		p.err = ErrClosed // the end of the lease removes it
	}
	p.end()
	d.mu.Lock()
	delete(d.held, p.name)
	d.mu.Unlock()
	close(p.ended)
}

// keep makes the entry under the lease of s, and makes it again whenever it is removed, until
// life ends, s does, or the name is another endpoint's.
func (p *Publication) keep(s bootstrap.Follower) error {
	if err := p.acquire(s); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(p.life)
	defer cancel()
	for e := range s.Watch(ctx, keys+p.name) {
		if e.Err != nil {
			return e.Err
		}
		if e.Exists && bytes.Equal(e.Value, p.value) {
			continue
		}
		var other *bootstrap.ConflictError
		err := s.Create(p.life, keys+p.name, p.value, true)
		if errors.As(err, &other) && !bytes.Equal(other.Current, p.value) {
			return p.taken(other.Current)
		} else if err != nil && other == nil {
			return err
		}
	}
	return context.Cause(p.life)
}

// acquire makes the entry. The first time, it waits for an entry that may be that of a dead
// publisher.
func (p *Publication) acquire(s bootstrap.Follower) error {
	err := p.create(s)
	select {
	case <-p.first:
		return err
	default:
	}
	if errors.As(err, new(*TakenError)) {
		ctx, cancel := context.WithTimeout(p.life, s.TTL()+slack)
		defer cancel()
		for e := range s.Watch(ctx, keys+p.name) {
			if e.Err != nil {
				return e.Err
			}
			if e.Exists {
				continue
			}
			if err = p.create(s); !errors.As(err, new(*TakenError)) {
				break
			}
		}
	}
	if err == nil {
		close(p.first)
	}
	return err
}

// create makes the entry under the lease of s. It takes the place of one that the same endpoint
// made under another lease.
func (p *Publication) create(s bootstrap.Follower) error {
	for {
		err := s.Create(p.life, keys+p.name, p.value, true)
		var other *bootstrap.ConflictError
		if !errors.As(err, &other) {
			return err
		}
		if info, perr := parse(other.Current); perr != nil || info.ID != p.info.ID {
			return p.taken(other.Current)
		}
		err = s.CompareAndSwap(p.life, keys+p.name, other.Current, nil)
		if err != nil && !errors.Is(err, bootstrap.ErrConflict) {
			return err
		}
	}
}

func (p *Publication) taken(by []byte) error {
	info, _ := parse(by) // malformed: zero
	return &TakenError{p.name, info}
}
