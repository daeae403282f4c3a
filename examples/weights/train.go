package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"tutti/endpoint"
	"tutti/mem"
	"tutti/pg"
)

// trainer is a rank of the training job.
type trainer struct {
	size     int
	versions int
	every    time.Duration
	wait     int
}

func (t *trainer) setSize(text string) (err error) {
	t.size, err = parseBytes(text)
	return err
}

// snapshot is the memory of one published version. There are two: while servers read one, the
// trainer fills the other.
type snapshot struct {
	weights []float32
	regions []*endpoint.Region
}

// withdraw takes the version back, so that the memory can be written again.
func (s *snapshot) withdraw() {
	for _, r := range s.regions {
		r.Unregister()
	}
	s.regions = nil
}

func (t *trainer) run(ctx context.Context) error {
	g, err := pg.Join(ctx, pg.Config{})
	if err != nil {
		return err
	}
	defer g.Close()
	s, err := open(ctx, fmt.Sprintf("trainer %d", g.Rank()), "")
	if err != nil {
		return err
	}
	defer s.close()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	if _, err := s.d.Publish(ctx, fmt.Sprintf("weights/%d", g.Rank()), s.e.Info()); err != nil {
		return err
	}
	words := make(chan word)
	if g.Rank() == 0 {
		fmt.Printf("servers find the trainers with TUTTI_STORE=%s\n", s.l.Store)
		if t.wait > 0 {
			go listen(ctx, s.e, words)
		}
	}
	if t.size == 0 {
		t.size = 1 << 30
	}
	m := manifest{Weights: t.size / 4 / g.Size() * g.Size(), Shards: g.Size()}
	if m.Weights == 0 {
		return fmt.Errorf("--size %d: %d shards of one weight take %d bytes", t.size, g.Size(), 4*g.Size())
	}
	from, to := m.span(g.Rank(), g.Size())
	weights := make([]float32, to-from)
	for i := range weights {
		weights[i] = weight(from+i, 0)
	}
	var snapshots [2]snapshot
	for m.Version = 1; m.Version <= t.versions; m.Version++ {
		change, err := step(ctx, g)
		if err != nil {
			return err
		}
		for i := range weights {
			weights[i] += change
		}
		now := &snapshots[m.Version%2]
		now.withdraw()
		if now.weights == nil {
			now.weights = make([]float32, len(weights))
		}
		copy(now.weights, weights)
		if err := t.publish(ctx, g, s.e, now, m); err != nil {
			return err
		}
		if g.Rank() == 0 {
			fmt.Printf("version %d: %s in %d shards\n", m.Version, bytesOf(float64(4*m.Weights)), m.Shards)
			if err := t.report(ctx, words, m.Version); err != nil {
				return err
			}
		}
		if err := pause(ctx, t.every); err != nil {
			return err
		}
	}
	return g.Barrier(ctx) // rank 0 has heard of all servers
}

// step is the training, of which only a sum over the ranks is left. It returns what each weight
// changes by: 1/64, whatever the number of ranks, as sums of small whole numbers are exact.
func step(ctx context.Context, g *pg.Group) (float32, error) {
	gradient := []float32{1}
	err := pg.AllReduce(ctx, g, gradient, pg.Sum)
	return gradient[0] / float32(64*g.Size()), err
}

// publish registers this rank's shard of a version and then, when all ranks have done so, the
// manifest.
func (t *trainer) publish(ctx context.Context, g *pg.Group, e *endpoint.Endpoint, now *snapshot, m manifest) error {
	r, err := e.Register(fmt.Sprint(m.Version), mem.Host(memory(now.weights), mem.Anywhere), endpoint.RegionConfig{})
	if err != nil {
		return err
	}
	now.regions = append(now.regions, r)
	if err := g.Barrier(ctx); err != nil || g.Rank() != 0 {
		return err
	}
	text, err := json.Marshal(m)
	if err != nil {
		return err
	}
	r, err = e.Register(fmt.Sprint(manifestPrefix, m.Version), mem.Host(text, mem.Anywhere), endpoint.RegionConfig{})
	now.regions = append(now.regions, r)
	return err
}

// word is what a server says: which version of its part it serves.
type word struct {
	server  uint64 // the identity of its endpoint
	part    string
	version int
}

// listen passes on what the programs say that connect, until ctx or the endpoint ends.
func listen(ctx context.Context, e *endpoint.Endpoint, words chan<- word) {
	for {
		p, err := e.Accept(ctx)
		if err != nil {
			return
		}
		go hear(ctx, p, words)
	}
}

// hear passes on what a program says, as long as it is connected. Servers say which versions they
// have. Others may look at the regions, or at the state, and say nothing.
func hear(ctx context.Context, p *endpoint.Peer, words chan<- word) {
	defer p.Close() // so that Accept returns it if it comes again
	for {
		text := make([]byte, 100)
		f := p.Recv(text)
		if f.Wait(ctx) != nil {
			// It has said nothing for long, or the connection is lost. Without one, a Recv waits
			// until the program comes again, which may be never. A program that is there answers.
			if _, err := p.Lookup(ctx, "any"); err != nil && !errors.Is(err, endpoint.ErrNoRegion) {
				return
			}
			continue
		}
		w := word{server: p.ID()}
		text = text[:f.Result(0).N]
		if _, err := fmt.Sscanf(string(text), "%s %d", &w.part, &w.version); err != nil {
			fmt.Fprintf(os.Stderr, "weights: %v is no server: it says %q\n", p, text)
			return
		}
		select {
		case words <- w:
		case <-ctx.Done():
			return
		}
	}
}

// report waits for t.wait servers that have a version. A server that is lost before is replaced by
// any other one.
func (t *trainer) report(ctx context.Context, words <-chan word, version int) error {
	have := map[uint64]bool{}
	for len(have) < t.wait {
		select {
		case w := <-words:
			if w.version == version && !have[w.server] {
				have[w.server] = true
				fmt.Fprintf(os.Stderr, "part %s serves version %d\n", w.part, w.version)
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
