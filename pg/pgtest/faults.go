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

// Store is the job's store in a Rule.
const Store = pg.ToStore

// Rule is a fault of the network between some ranks. It applies in one direction.
type Rule struct {
	From, To []int // ranks, or Store; nil: all, and the store
	// Cut: nothing arrives, until the rule is lifted, and no connection is made. Neither end is
	// told: connections stay open, except after Break.
	Cut bool
	// Break is how long a connection is cut before it breaks, as when the kernel's probes of the
	// other host have failed; 0: never.
	Break time.Duration
	// Delay is added to the way of everything. Rule{From: []int{Store}, Delay: d} acts like a
	// store with a slow disk.
	Delay time.Duration
	// Loss is the share of packets, of some 1,400 bytes, that get lost, 0 to 1. A lost packet is
	// sent again a fifth of a second later, and delays what comes after it.
	Loss float64
}

// Control injects faults into the ranks of a Run or an Exec with the option Faults. The ranks of
// Run get it from InjectFaults; in the test's own process, Faults passes it to a function. So a
// fault comes at the operation that the test chooses. Its methods fail the test if they cannot
// inject the fault.
type Control struct {
	t  *testing.T
	do func(order) error
}

// order is a request of a Control to the test's process.
type order struct {
	Kind  string // kill, stop, network or await
	Rank  int
	For   time.Duration
	Rules []Rule
	Count uint64
}

// Faults enables the injection of faults. Links then go through the test's process, and are slower.
// If inject is not nil, it is called in the test's process beside the ranks, and the test waits for
// its end. The ranks may be programs that do not import this package (Exec); Network works only for
// programs with Dialer. RunLocal does not support it.
func Faults(inject func(c *Control)) Option {
	return func(o *options) { o.faults, o.inject = true, inject }
}

// InjectFaults returns the Control of a rank of Run with the option Faults.
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

// Kill ends a rank as `kill -9` does. The test must Expect it.
func (c *Control) Kill(rank int) { c.t.Helper(); c.order(order{Kind: "kill", Rank: rank}) }

// Stop stops a rank (SIGSTOP), and continues it (SIGCONT) after d. It returns when the rank is
// stopped; for the calling rank, when it continues.
func (c *Control) Stop(rank int, d time.Duration) {
	c.t.Helper()
	c.order(order{Kind: "stop", Rank: rank, For: d})
}

// Network replaces the rules, initially none. They apply when it returns. Without rules, everything
// that was cut off arrives. Links over shared memory are not affected: use the option
// Transport("tcp").
func (c *Control) Network(rules ...Rule) {
	c.t.Helper()
	c.order(order{Kind: "network", Rules: rules})
}

// Partition cuts the network between the sides, one of which may have the Store. Ranks that are on
// no side, and the store if it is on none, reach all. It replaces the rules; Network() removes
// them.
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

// Await waits until a process of a rank has begun that many collectives and messages. It fails when
// the last one has ended before.
func (c *Control) Await(rank int, operations uint64) {
	c.t.Helper()
	c.order(order{Kind: "await", Rank: rank, Count: operations})
}

// execute carries out an order, in the test's process.
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
		return l.await(ctx, o.Rank, o.Count)
	}
	return fmt.Errorf("unknown fault %q", o.Kind)
}

// await carries out Control.Await.
func (l *launch) await(ctx context.Context, rank int, operations uint64) error {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		gone, over := l.gone(rank), ctx.Err() != nil // before it looks for what was recorded until then
		files, err := filepath.Glob(filepath.Join(l.flights, fmt.Sprintf("flight-rank%d-*.bin", rank)))
		if err != nil {
			return err
		}
		for _, f := range files { // of all its incarnations
			if s, err := flight.ReadFile(f); err == nil && s.Recorded >= operations {
				return nil
			}
		}
		if gone {
			return fmt.Errorf("rank %d has ended before that", rank)
		}
		if over {
			return context.Cause(ctx)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
}

// gone reports whether a rank's process has ended, and none is to replace it.
func (l *launch) gone(rank int) bool {
	p := l.process(rank)
	select {
	case <-p.done:
		return p.second || !l.o.replace[rank]
	default:
		return false
	}
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

// stopped returns when a process that was sent a signal has stopped.
func (p *process) stopped() {
	p.mu.Lock()
	started := p.started
	p.mu.Unlock()
	started.Stopped()
}
