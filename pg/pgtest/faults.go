package pgtest

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"tutti/pg"

	"tutti/pg/flight"
)

// Store stands for the job's store in a Rule.
const Store = pg.ToStore

// Rule is what the network does to bytes on their way from some ranks to others, between which it
// applies in this direction alone.
type Rule struct {
	From, To []int // ranks, or Store; nil: all, and the store
	// Cut: nothing arrives, until the rule is lifted, and no connection is made. Nobody is told:
	// connections stay open, but for Break.
	Cut bool
	// Break is how long a connection is cut before it breaks, as it does when the kernel has asked
	// the other host in vain; 0: never.
	Break time.Duration
	// Delay is how much later everything arrives. Of a store it is what a slow disk makes of it:
	// rule {From: []int{Store}, Delay: d}.
	Delay time.Duration
	// Loss is the part of packets, of some 1,400 bytes, that get lost, 0 to 1: those arrive when
	// they are sent again, a fifth of a second later, and what comes after them waits for them.
	Loss float64
}

// Control injects faults into the ranks of a Run or an Exec that has the option Faults. In the
// function of Run's ranks, InjectFaults returns it; in the test's own process, Faults gives it to a
// function. So a fault comes at the operation that the test chooses. Its methods fail the test if
// they cannot do what they are told.
type Control struct {
	t  *testing.T
	do func(order) error
}

// order is what a Control tells the test's process.
type order struct {
	Kind  string // kill, stop, network or await
	Rank  int
	For   time.Duration
	Rules []Rule
	Count uint64
}

// Faults allows faults to be injected. Links then go through the test's process, and are slower. If
// inject is not nil, it is called in the test's process beside the ranks, which may be programs
// that know nothing of it (Exec), but for Network: that is for programs with Dialer; the test waits
// for its end. RunLocal does not take it.
func Faults(inject func(c *Control)) Option {
	return func(o *options) { o.faults, o.inject = true, inject }
}

// InjectFaults is for the ranks of Run, with the option Faults.
func InjectFaults(t *testing.T) *Control {
	t.Helper()
	variable := os.Getenv(relayVariable)
	if self == nil || variable == "" {
		t.Fatal("pgtest: InjectFaults is for the ranks of Run with the option Faults")
	}
	return &Control{t, func(o order) error {
		b, err := json.Marshal(o)
		if err != nil {
			return err
		}
		c, err := askRelay(t.Context(), variable, request{Do: b})
		if err == nil {
			c.Close()
		}
		return err
	}}
}

func (c *Control) order(o order) {
	c.t.Helper()
	if err := c.do(o); err != nil && c.t.Context().Err() == nil {
		c.t.Errorf("pgtest: %s: %v", o.Kind, err)
	}
}

// Kill ends a rank as `kill -9` does. The test wants to know of it by Expect.
func (c *Control) Kill(rank int) { c.t.Helper(); c.order(order{Kind: "kill", Rank: rank}) }

// Stop has a rank stand still (SIGSTOP) and go on (SIGCONT) when d is over. It does not wait for
// that, unless the rank is the caller's.
func (c *Control) Stop(rank int, d time.Duration) {
	c.t.Helper()
	c.order(order{Kind: "stop", Rank: rank, For: d})
}

// Network replaces the rules, of which there are none at first, and holds when it returns. Without
// any, everything that was cut off arrives. Links over shared memory do not obey: give Run the
// option Transport("tcp").
func (c *Control) Network(rules ...Rule) {
	c.t.Helper()
	c.order(order{Kind: "network", Rules: rules})
}

// Partition cuts the network between the sides, one of which may have the Store; ranks that are on
// no side, and the store if it is on none, reach all. It replaces the rules; Network() mends it.
func (c *Control) Partition(sides ...[]int) {
	c.t.Helper()
	var rules []Rule
	for i, a := range sides {
		for j, b := range sides {
			if i != j {
				rules = append(rules, Rule{From: a, To: b, Cut: true})
			}
		}
	}
	c.Network(rules...)
}

// Await waits until a rank has begun that many collectives and messages, or its test is over.
func (c *Control) Await(rank int, operations uint64) {
	c.t.Helper()
	c.order(order{Kind: "await", Rank: rank, Count: operations})
}

// execute does it, in the test's process.
func (l *launch) execute(ctx context.Context, r *relay, o order) error {
	if o.Kind == "network" {
		r.set(o.Rules)
		return nil
	}
	p := l.process(o.Rank)
	if p == nil {
		return fmt.Errorf("there is no rank %d", o.Rank)
	}
	switch o.Kind {
	case "kill":
		return p.signal(syscall.SIGKILL)
	case "stop":
		if err := p.signal(syscall.SIGSTOP); err != nil {
			return err
		}
		p.stopped() // the signal may take its time
		r.after(o.For, func() { p.signal(syscall.SIGCONT) })
		return nil
	case "await":
		tick := time.NewTicker(2 * time.Millisecond)
		defer tick.Stop()
		for {
			files, err := filepath.Glob(filepath.Join(l.flights, fmt.Sprintf("flight-rank%d-*.bin", o.Rank)))
			if err != nil {
				return err
			}
			for _, f := range files { // of all its lives
				if s, err := flight.ReadFile(f); err == nil && s.Recorded >= o.Count {
					return nil
				}
			}
			select {
			case <-tick.C:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
	}
	return fmt.Errorf("unknown fault %q", o.Kind)
}

// signal sends a signal to a process that has not been reaped.
func (p *process) signal(s syscall.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.started == nil || p.started.Signal(s) != nil {
		return fmt.Errorf("rank %d is not running", p.rank)
	}
	return nil
}

// stopped returns when a process stands still that a signal was sent to.
func (p *process) stopped() {
	p.mu.Lock()
	started := p.started
	p.mu.Unlock()
	started.Stopped()
}
