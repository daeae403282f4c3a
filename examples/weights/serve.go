package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"tutti/endpoint"
)

// server serves a part of the weights.
type server struct {
	part, parts int
	until       int
	site        *site
	trainers    map[int]*endpoint.Peer // by shard

	mu       sync.RWMutex // held for reading during a request
	serving  *model
	spare    *model // for the next version
	requests atomic.Int64
}

// model is a version of this server's part, which begins with weight from.
type model struct {
	manifest
	from    int
	weights []float32
}

func (s *server) setPart(text string) error {
	if _, err := fmt.Sscanf(text, "%d/%d", &s.part, &s.parts); err != nil || s.part < 0 || s.part >= s.parts {
		return errors.New("want the number of the part and of all parts, as 0/3")
	}
	return nil
}

// final is an error that other trainers would not change.
type final struct{ error }

func (s *server) run(ctx context.Context) (err error) {
	s.parts = max(s.parts, 1)
	if s.site, err = open(ctx, fmt.Sprintf("server %d/%d", s.part, s.parts), "none"); err != nil {
		return err
	}
	defer s.site.close()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	s.serving, s.spare = &model{}, &model{}
	go s.serve(ctx)
	return s.attend(ctx)
}

// attend follows the trainers. When they are lost it looks for them again.
func (s *server) attend(ctx context.Context) error {
	for {
		err := s.follow(ctx)
		var f final
		switch {
		case err == nil:
			return nil
		case errors.As(err, &f):
			return f.error
		case ctx.Err() != nil:
			return ctx.Err()
		}
		fmt.Fprintln(os.Stderr, "weights: looking for the trainers again:", err)
	}
}

// follow fetches versions until one of the trainers is lost. It returns nil after the last version.
func (s *server) follow(ctx context.Context) error {
	s.trainers = map[int]*endpoint.Peer{}
	defer func() { // those that follow may be other endpoints
		for _, p := range s.trainers {
			p.Close()
		}
	}()
	first, err := s.trainer(ctx, 0)
	if err != nil {
		return err
	}
	for m, err := range latest(ctx, first) {
		if err == nil {
			err = s.fetch(ctx, s.spare, m)
		}
		if errors.Is(err, endpoint.ErrStale) || errors.Is(err, endpoint.ErrNoRegion) {
			continue // there is a later version
		}
		if err != nil {
			return err
		}
		s.mu.Lock()
		s.serving, s.spare = s.spare, s.serving
		s.mu.Unlock()
		word := fmt.Sprintf("%d/%d %d", s.part, s.parts, m.Version)
		if err := first.Send([]byte(word)).Wait(ctx); err != nil {
			return err
		}
		if m.Version == s.until {
			return nil
		}
	}
	return endpoint.ErrBroken
}

// trainer returns the peer that has a shard.
func (s *server) trainer(ctx context.Context, shard int) (p *endpoint.Peer, err error) {
	if p = s.trainers[shard]; p == nil {
		if p, err = s.site.d.Connect(ctx, s.site.e, fmt.Sprintf("weights/%d", shard)); err != nil {
			return nil, final{err} // Connect tries again by itself
		}
		s.trainers[shard] = p
	}
	return p, nil
}

// latest returns the manifests of the versions that p publishes. Those that come while the caller
// is busy are passed over, but the last one. It ends with an error.
func latest(ctx context.Context, p *endpoint.Peer) func(yield func(manifest, error) bool) {
	return func(yield func(manifest, error) bool) {
		ctx, stop := context.WithCancel(ctx)
		defer stop()
		versions, ended := highest(p.Watch(ctx))
		seen := 0
		for {
			select {
			case version := <-versions:
				if version <= seen {
					continue
				}
				seen = version
				if !yield(read(ctx, p, fmt.Sprint(manifestPrefix, version))) {
					return
				}
			case err := <-ended:
				yield(manifest{}, err)
				return
			}
		}
	}
}

// highest has in versions the highest version that was published since one was last taken, and in
// ended the error that ends events. The versions that are there at first come in the order of their
// names: 10 before 9.
func highest(events iter.Seq2[endpoint.RegionEvent, error]) (versions <-chan int, ended <-chan error) {
	out, end := make(chan int, 1), make(chan error, 1)
	go func() {
		for e, err := range events {
			if err != nil {
				end <- err
				return
			}
			text, ok := strings.CutPrefix(e.Name, manifestPrefix)
			version, err := strconv.Atoi(text)
			if e.Gone || !ok || err != nil {
				continue
			}
			select {
			case earlier := <-out:
				version = max(version, earlier)
			default:
			}
			out <- version
		}
	}()
	return out, end
}

// read reads a manifest.
func read(ctx context.Context, p *endpoint.Peer, name string) (m manifest, err error) {
	r, err := p.Lookup(ctx, name)
	if err != nil {
		return m, err
	}
	text := make([]byte, r.Len)
	if err := p.Read(text, name, 0).Wait(ctx); err != nil {
		return m, err
	}
	return m, json.Unmarshal(text, &m)
}

// A read fetches a piece of so many weights. So many reads are under way at a time: all at once
// would also end at once, and show no progress.
const (
	piece = 1 << 20
	depth = 16
)

// fetch reads this server's part of a version, from all shards that have some of it at the same
// time, and checks it.
func (s *server) fetch(ctx context.Context, to *model, m manifest) error {
	from, end := m.span(s.part, s.parts)
	if s.part == s.parts-1 {
		end = m.Weights
	}
	if cap(to.weights) < end-from {
		to.weights = make([]float32, end-from)
	}
	to.manifest, to.from, to.weights = m, from, to.weights[:end-from]
	var reads []*endpoint.Future // under way
	defer func() {               // a failed one ends the others
		for _, f := range reads {
			f.Cancel()
		}
	}()
	began, done := time.Now(), 0.0
	await := func(most int) error {
		for len(reads) > most {
			if err := reads[0].Wait(ctx); err != nil {
				return err
			}
			done += float64(reads[0].Result(0).N)
			reads = reads[1:]
			s.progress(m, "\r", done, float64(4*len(to.weights)), began)
		}
		return nil
	}
	for _, p := range pieces(m, from, end) {
		trainer, err := s.trainer(ctx, p.shard)
		if err != nil {
			return err
		}
		if err := await(depth - 1); err != nil {
			return err
		}
		reads = append(reads, trainer.Read(memory(to.weights[p.from-from:p.to-from]), fmt.Sprint(m.Version), 4*p.off))
	}
	if err := await(0); err != nil {
		return err
	}
	s.progress(m, "\n", done, done, began)
	for i, w := range to.weights {
		if want := weight(from+i, m.Version); w != want {
			return final{fmt.Errorf("weight %d of version %d is %v, want %v", from+i, m.Version, w, want)}
		}
	}
	return nil
}

// part is a range of the weights, and where it is: so many weights behind the beginning of a shard.
type part struct {
	from, to, shard int
	off             int64
}

// pieces cuts a range of the weights along the shards of m. Pieces of different shards follow each
// other, so that all trainers send at the same time.
func pieces(m manifest, from, to int) (all []part) {
	for at := 0; ; at += piece {
		more := false
		for shard := range m.Shards {
			a, b := m.span(shard, m.Shards)
			first := max(a, from)
			if begin, end := first+at, min(first+at+piece, b, to); begin < end {
				all = append(all, part{begin, end, shard, int64(begin - a)})
				more = true
			}
		}
		if !more {
			return all
		}
	}
}

// progress prints a line: for a terminal that is overwritten until it is complete.
func (s *server) progress(m manifest, end string, done, all float64, began time.Time) {
	if info, err := os.Stdout.Stat(); end == "\r" && (err != nil || info.Mode()&os.ModeCharDevice == 0) {
		return
	}
	fmt.Printf("part %d/%d, version %d: %s of %s, %s/s, %d requests served%s", s.part, s.parts, m.Version,
		bytesOf(done), bytesOf(all), bytesOf(done/time.Since(began).Seconds()), s.requests.Load(), end)
}

// serve answers requests until ctx ends: here it makes them, too. One needs all of its weights to
// be of one version.
func (s *server) serve(ctx context.Context) {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for at := 0; ; at++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		s.answer(at)
	}
}

func (s *server) answer(request int) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	m := s.serving
	if len(m.weights) == 0 { // none has come yet
		return
	}
	i := request * 7919 % len(m.weights)
	if w := m.weights[i]; w != weight(m.from+i, m.Version) {
		panic(fmt.Sprintf("weight %d of version %d is %v while it is served", m.from+i, m.Version, w))
	}
	s.requests.Add(1)
}
