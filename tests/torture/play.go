//go:build linux

package torture

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"tutti/bootstrap"
	"tutti/device/cuda/fake"
	"tutti/internal/grain"
	"tutti/pg"
	"tutti/tests/internal/rig"
)

// order is a message to a rank's process.
type order struct {
	Setup   *setup   `json:",omitempty"` // join a job
	Program *Program `json:",omitempty"` // run it
	From    int      `json:",omitempty"` // from this step on
	Back    *Go      `json:",omitempty"` // after joining again
	Go      *Go      `json:",omitempty"` // through the gate
	Evict   *int     `json:",omitempty"` // evict that rank, at once
	End     bool     `json:",omitempty"` // of the job
}

type setup struct {
	Job           Job
	Name          string
	Store, Secret string
	Number        int  // of the rank, or spare
	Late          bool // the job is running: join by the program
	Driver        fake.Files
}

// news is a message of a rank's process.
type news struct {
	Ready  bool       `json:",omitempty"` // it has joined
	Error  string     `json:",omitempty"` // joining failed or, with Did, the error of Evict
	At     *int       `json:",omitempty"`
	Gate   *Gate      `json:",omitempty"`
	Slot   *int       `json:",omitempty"` // it was on standby, and is this rank now
	Did    bool       `json:",omitempty"` // an order to be carried out at once was
	Found  *Finding   `json:",omitempty"` // at once: the program continues, but need not come to its end
	Hang   *Finding   `json:",omitempty"`
	Report *Report    `json:",omitempty"`
	Ended  *rig.Usage `json:",omitempty"`
}

const (
	lease  = 4 * time.Second // how long a silent rank counts as alive: the machine may be busy
	window = lease + 500*time.Millisecond
)

func (s *setup) config(me int) pg.Config {
	secret, _ := bootstrap.ParseSecret(s.Secret) // Join returns the error
	return pg.Config{Size: s.Job.Ranks - s.Job.Later, MaxSize: s.Job.Ranks, Rank: me,
		Job: s.Name, StoreAddr: s.Store, Secret: secret, Transport: s.Job.transport(), Algorithm: s.Job.Algorithm,
		Timeout: s.Job.Timeout, OnTimeout: s.Job.OnTimeout, OnFailure: s.Job.OnFailure, Uniform: s.Job.Uniform,
		AutoAdmit: s.Job.AutoAdmit, LeaseTTL: lease, Window: window, Tuning: "off", Progress: s.Job.Progress,
		SingleCopy: s.Job.Copy, StagingLimit: s.Job.Staging}
}

func (j *Job) transport() string {
	if j.Transport == "hosts" {
		return "auto"
	}
	return j.Transport
}

// player is the process of a rank.
type player struct {
	mu    sync.Mutex
	out   *json.Encoder
	gates chan Go
	world atomic.Pointer[pg.Group]
}

func (p *player) say(n news) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.out.Encode(n)
}

func (p *player) At(step int) { p.say(news{At: &step}) }

func (p *player) Gate(g Gate) Go {
	p.say(news{Gate: &g})
	return <-p.gates
}

func (p *player) Found(f Finding) { p.say(news{Found: &f}) }

func (p *player) Hang(f Finding) { p.say(news{Hang: &f}) }

// Play runs a rank's process.
func Play(out *json.Encoder, in *json.Decoder) int {
	play(out, in, nil, func(*player) { os.Exit(0) })
	return 0
}

// play runs a rank. change, if it is not nil, completes its configuration; other ranks share the
// process then. over is called when the test is over.
func play(out *json.Encoder, in *json.Decoder, change func(*pg.Config), over func(*player)) {
	p := &player{out: out, gates: make(chan Go, 4)}
	orders := make(chan order, 4)
	go func() {
		for {
			var o order
			if in.Decode(&o) != nil {
				over(p)
				close(p.gates)
				close(orders)
				return
			}
			switch {
			case o.Go != nil:
				p.gates <- *o.Go
			case o.Evict != nil:
				go func() {
					n := news{Did: true}
					ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
					defer cancel()
					if g := p.world.Load(); g != nil {
						began := time.Now()
						err := g.Evict(ctx, *o.Evict)
						if err != nil && !typed(err) {
							n.Error = "evict: untyped: " + err.Error()
						}
						if time.Since(began) > 10*time.Second+slack {
							n.Error = "evict returned late"
						}
					}
					p.say(n)
				}()
			default:
				orders <- o
			}
		}
	}()
	var r *rank
	var at *seat
	var by *standby
	for o := range orders {
		switch {
		case o.Setup != nil:
			me := o.Setup.Number
			cfg := o.Setup.config(me)
			grain.Set(grain.Sizes{Block: o.Setup.Job.Block, Piece: o.Setup.Job.Piece})
			var err error
			if at, err = o.Setup.Job.sit(me, uint64(me), o.Setup.Driver); err == nil {
				cfg.Devices = at.list()
				if change != nil {
					change(&cfg)
				}
				r, err = newRank(o.Setup.Job, me, p, at.memory,
					func(ctx context.Context) (*pg.Group, error) { return pg.Join(ctx, cfg) })
			}
			if err == nil {
				r.entered = func(g *pg.Group) { p.world.Store(g) }
				r.shared = change != nil
			}
			if err == nil && me == spare {
				by = standBy(cfg, p)
			}
			if err == nil && !o.Setup.Late {
				ctx, cancel := context.WithTimeout(context.Background(), recovery)
				var g *pg.Group
				if g, err = r.join(ctx); err == nil {
					r.enter(g)
				}
				cancel()
			}
			n := news{Ready: err == nil}
			if err != nil {
				n.Error = err.Error()
			}
			p.say(n)
		case o.Program != nil:
			if r.me == spare {
				g := <-by.came
				r.me, r.join = g.Rank(), func(context.Context) (*pg.Group, error) { return g, nil }
			}
			p.say(news{Report: r.run(o.Program, o.From, o.Back)})
		case o.End:
			p.world.Store(nil)
			if by != nil {
				by.end()
				by = nil
			}
			r.leave()
			r.close()
			n := news{Ended: &rig.Usage{}}
			if err := errors.Join(r.unmap(), at.end()); err != nil {
				n.Error = err.Error()
			}
			r = nil
			if change == nil {
				n.Ended = rig.Use()
			}
			p.say(n)
		}
	}
	if r != nil {
		r.leave()
		r.close()
		r.unmap()
		at.end()
	}
}

// A standby is a process that waits in Join for a rank to be lost.
type standby struct {
	came   chan *pg.Group // receives the group after it has joined
	cancel context.CancelFunc
	over   chan struct{}
}

func standBy(cfg pg.Config, p *player) *standby {
	ctx, cancel := context.WithCancel(context.Background())
	s := &standby{make(chan *pg.Group, 1), cancel, make(chan struct{})}
	os.Setenv("TUTTI_STANDBY", "0")
	os.Setenv("TUTTI_SIZE", strconv.Itoa(cfg.Size))
	go func() {
		defer close(s.over)
		g, err := pg.Join(ctx, cfg)
		switch {
		case err == nil:
			s.came <- g
			slot := g.Rank()
			p.say(news{Slot: &slot})
		case ctx.Err() == nil:
			p.say(news{Error: "standing by: " + err.Error()})
		}
	}()
	return s
}

// end ends the wait. The variables stay until then, as those of a launcher do: a process that has
// joined has them when it is evicted and rejoins.
func (s *standby) end() {
	s.cancel()
	<-s.over
	os.Unsetenv("TUTTI_STANDBY")
	os.Unsetenv("TUTTI_SIZE")
}

// typed reports whether an error is one that package pg promises.
func typed(err error) bool {
	var lost *pg.RankError
	var late *pg.TimeoutError
	var differ *pg.MismatchError
	var bad *pg.ArgumentError
	return errors.As(err, &lost) || errors.As(err, &late) || errors.As(err, &differ) || errors.As(err, &bad) ||
		errors.Is(err, pg.ErrClosed) ||
		errors.Is(err, pg.ErrEvicted) || errors.Is(err, pg.ErrIsolated) || errors.Is(err, pg.ErrAborted)
}
