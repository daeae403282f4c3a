// Package status asks all ranks of a job for their states, and shows the answers on one screen.
package status

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"tutti/bootstrap"
	"tutti/internal/ident"
	"tutti/internal/plain"
	"tutti/pg/flight"
)

const (
	within   = time.Second // bounds a rank's answer
	maxAsked = 64          // ranks at once
	maxSize  = 1 << 20     // of a job
)

// ErrNoRanks says that the store has no record of a rank of the job.
var ErrNoRanks = errors.New("no rank of it is registered")

// Sampler asks the ranks of one job.
type Sampler struct {
	job    string
	store  bootstrap.Store
	client *bootstrap.Client
	within time.Duration
	size   int           // what the job may grow to
	first  int           // ranks that it begins with; 0: no record says
	view   *flight.View  // the latest that a rank has told; nil: the ranks have not met, or none has told it
	reads  chan struct{} // bounds the answers that are read at once: one may become much memory
}

// Dial connects to a job's store. It blocks until ctx ends at most. The caller closes the sampler.
func Dial(ctx context.Context, cfg bootstrap.StoreConfig) (*Sampler, error) {
	cfg.Rank, cfg.Observer = -1, true
	store, err := bootstrap.DialStore(ctx, cfg)
	if err != nil {
		return nil, err
	}
	return New(cfg.Job, store, cfg.Secret), nil
}

// New samples a job by a handle of its store, which the sampler owns.
func New(job string, store bootstrap.Store, secret []byte) *Sampler {
	self := bootstrap.NewRecord(-1, 0, ident.New(), nil) // not a rank, only a client with the secret
	return &Sampler{job: job, store: store, client: bootstrap.NewClient(bootstrap.ClientConfig{Self: self,
		Secret: secret}), within: within, reads: make(chan struct{}, runtime.GOMAXPROCS(0))}
}

// Close closes the store's handle.
func (s *Sampler) Close() error { return s.store.Close() }

// Sample holds the states of a job's ranks at about the same time: each answers when it is asked.
type Sample struct {
	Job   string
	Time  time.Time
	Ranks []flight.Rank // by rank
}

// Sample asks all ranks, each for at most ops operations. It takes as long as the store and then
// the slowest rank, at most a second for each 64 of them. An error means that the store could
// not be asked, or (ErrNoRanks) has no records; a rank that does not answer is no error.
func (s *Sampler) Sample(ctx context.Context, ops int) (*Sample, error) {
	records, err := s.store.List(ctx, bootstrap.RankKeys)
	if err != nil {
		return nil, err
	}
	if b, err := s.store.Get(ctx, bootstrap.SizeKey); err == nil {
		if n, err := strconv.Atoi(string(b)); err == nil && n > 0 && n <= maxSize {
			s.size = max(s.size, n)
		}
	}
	out := &Sample{Job: s.job, Time: time.Now()}
	found := map[int]*flight.Rank{}
	asked, actx := errgroup.WithContext(ctx)
	asked.SetLimit(maxAsked)
	for key, b := range records {
		rec, err := bootstrap.DecodeRecord(b)
		slot, nerr := strconv.Atoi(strings.TrimPrefix(key, bootstrap.RankKeys))
		if nerr != nil || slot < 0 || slot >= maxSize {
			continue
		}
		r := &flight.Rank{Rank: slot, Presence: flight.Silent}
		found[slot] = r
		if err != nil || rec.Rank != slot {
			r.Detail = fmt.Sprintf("its record in the store cannot be read (%v)", err)
			continue
		}
		s.size, s.first = max(s.size, rec.Size), max(s.first, cmp.Or(rec.First, rec.Size))
		r.Where, r.Addrs = fmt.Sprintf("pid %d on %s", rec.PID, rec.Host), rec.Addrs
		asked.Go(func() error {
			s.ask(actx, r, rec, ops)
			return nil
		})
	}
	asked.Wait()
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if len(found) == 0 {
		return nil, ErrNoRanks
	}
	var view *flight.View // the latest of all ranks
	for _, r := range found {
		if r.Snapshot != nil && r.Snapshot.Joined {
			if v := &r.Snapshot.View; view == nil || v.Epoch > view.Epoch {
				view = v
			}
		}
	}
	if view != nil {
		v := *view // without its snapshot
		s.view = &v
	}
	first := cmp.Or(s.first, s.size)
	for slot := range max(s.size, slices.Max(slices.Collect(maps.Keys(found)))+1) {
		r := found[slot]
		if r == nil {
			r = &flight.Rank{Rank: slot, Presence: flight.Absent}
			switch {
			case s.view == nil && slot >= first, s.view != nil && !slices.Contains(s.view.Active, slot):
				r.Presence = flight.Vacant
			case s.view != nil:
				r.Presence, r.Detail = flight.Silent, "its lease has ended (stopped, or dead)"
			}
		}
		out.Ranks = append(out.Ranks, *r)
	}
	return out, nil
}

// ask asks a rank and stores its answer in r.
func (s *Sampler) ask(ctx context.Context, r *flight.Rank, rec bootstrap.Record, ops int) {
	late := fmt.Errorf("no answer within %v", s.within)
	reading := ctx
	ctx, cancel := context.WithTimeoutCause(ctx, s.within, late)
	defer cancel()
	b, err := s.client.Status(ctx, rec, ops)
	var refused syscall.Errno
	silent := err != nil && ctx.Err() != nil
	var snap *flight.Snapshot
	if err == nil {
		select {
		case s.reads <- struct{}{}:
			snap, err = flight.Parse(b)
			<-s.reads
		case <-reading.Done():
			err = context.Cause(reading)
		}
	}
	if err == nil && snap.Rank != r.Rank {
		err = fmt.Errorf("it takes itself for rank %d", snap.Rank)
	}
	switch {
	case err == nil:
		r.Presence, r.Addrs, r.Snapshot = flight.Present, nil, snap
	case silent:
		r.Detail = context.Cause(ctx).Error() + ", yet the store takes it for alive"
	case errors.Is(err, os.ErrDeadlineExceeded): // the connection's deadline, which is that of ctx
		r.Detail = late.Error() + ", yet the store takes it for alive"
	case errors.Is(err, bootstrap.ErrVersion), errors.Is(err, flight.ErrVersion):
		r.Presence, r.Detail = flight.Unreadable, plain.Text(err.Error())
	case errors.Is(err, bootstrap.ErrAuth):
		r.Detail = "it has another secret"
	case errors.Is(err, bootstrap.ErrStale):
		r.Detail = "another process has taken its place"
	case errors.As(err, &refused): // of many ranks this is one finding, so it does not say where
		r.Detail = refused.Error()
	default:
		r.Detail = plain.Text(err.Error())
	}
}
