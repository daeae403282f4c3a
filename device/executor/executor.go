// Package executor runs plans of package collectives on the streams of a device. It is the test of
// plans, and of the contract of streams, in every order in which a device may do its work: group
// operations do not use it, because the runner of package pg drives their streams itself.
//
// A plan's Copy and ReduceInto steps are enqueued on a stream, all at once and in the plan's order.
// All others are steps of the network, represented by an [Exchange]: it moves data between the
// memories of ranks while the stream works. If a step of one kind needs one of the other, they
// synchronize by a word of host memory: the stream waits for a value that says that the network has
// completed a step, and writes one when the network may begin. So the host only polls words between
// two steps, and a stream never waits for the host.
package executor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"tutti/collectives"
	"tutti/device"
	"tutti/internal/backoff"
	"tutti/kernels"
	"tutti/mem"
)

// An Exchange is the network of one rank during one call. Steps are named by their index in the
// plan. Its methods are called by one goroutine and do not block.
//
// Send, Recv, Put and WaitSignal begin steps of the verbs in package collectives; Poll reports
// their completion. Steps of one verb and one peer are begun in the plan's order.
type Exchange interface {
	Send(step, peer int, src mem.Memory)
	Recv(step, peer int, dst mem.Memory)
	// Put writes src into dst, memory of a peer.
	Put(step int, dst collectives.Ref, src mem.Memory)
	// Signal adds one to this rank's counter at peer.
	Signal(peer int)
	// WaitSignal begins to wait until peer's counter at this rank is one more than for the last
	// WaitSignal.
	WaitSignal(step, peer int)
	// Poll makes progress and calls done for each step that has completed. An error ends the call.
	Poll(done func(step int)) (progress bool, err error)
	// Cancel cancels all steps under way: after it has returned, they access no memory of this
	// rank.
	Cancel()
}

// A Call holds the parameters of one run of a plan.
type Call struct {
	Stream   device.Stream
	Exchange Exchange
	// At returns the memory of a range: In, Out or Tmp; in a LoadStore plan also PeerIn and
	// PeerOut, as mapped for the device.
	At func(collectives.Ref) mem.Memory
	// Op and DType are the parameters of ReduceInto steps. Avg over the active ranks is a Sum that
	// the last step over a range divides.
	Op    kernels.Op
	DType kernels.DType
}

// A Program is a plan with what its execution on streams needs. One goroutine at a time uses it.
type Program struct {
	plan  *collectives.Plan
	local []bool       // by step: it runs on the stream
	tells []bool       // by step of the stream: a network step needs it
	lanes [][]int32    // network steps that begin in order
	words []mem.Memory // by step: the number of the latest run that has completed it
	free  func() error // words
	runs  uint64
}

// New returns the Program of a plan for streams of a device. The caller closes it.
func New(d device.Device, plan *collectives.Plan) (*Program, error) {
	n := len(plan.Steps)
	words, free, err := device.Words(d, n)
	if err != nil {
		return nil, fmt.Errorf("executor: %w", err)
	}
	p := &Program{plan: plan, local: make([]bool, n), tells: make([]bool, n), words: words, free: free}
	type lane struct {
		verb collectives.Verb
		peer int32
	}
	index := map[lane]int{}
	for i := range plan.Steps {
		s := &plan.Steps[i]
		if s.Verb == collectives.Copy || s.Verb == collectives.ReduceInto {
			p.local[i] = true
			continue
		}
		for _, d := range s.Needs {
			p.tells[d] = p.local[d]
		}
		l := lane{s.Verb, s.Peer}
		at, known := index[l]
		if !known {
			at = len(p.lanes)
			index[l] = at
			p.lanes = append(p.lanes, nil)
		}
		p.lanes[at] = append(p.lanes[at], int32(i))
	}
	return p, nil
}

// Close frees what New has allocated. No Run may be running.
func (p *Program) Close() error { return p.free() }

// yields and nap pace the wait for the network.
const (
	yields = 200
	nap    = 50 * time.Microsecond
)

// Run runs the plan once and returns when all its steps have completed, or with an error. After an
// error the results are undefined, nothing accesses the call's memory any more, and the stream can
// be used again. ctx bounds the wait for peers. After ctx has ended Run still waits for work that
// the stream has begun. The stream is one of New's device.
func (p *Program) Run(ctx context.Context, c Call) error {
	p.runs++
	err := p.enqueue(&c)
	var end device.Event
	if err == nil {
		end, err = c.Stream.Record()
	}
	if err == nil {
		err = p.drive(ctx, &c, end)
	}
	if err != nil {
		return p.stop(&c, err)
	}
	if err := end.Wait(ctx); err != nil {
		return p.stop(&c, err)
	}
	return nil
}

// stop ends a failed run: it cancels the network's steps, then waits for the stream.
func (p *Program) stop(c *Call, why error) error {
	c.Exchange.Cancel()
	for _, w := range p.words {
		w.Word(0).Store(p.runs)
	}
	end, err := c.Stream.Record()
	if err == nil {
		err = end.Wait(context.Background()) // bounded: nothing blocks the stream any more
	}
	if err != nil && !errors.Is(err, device.ErrClosed) {
		return errors.Join(why, fmt.Errorf("executor: ending the work: %w", err))
	}
	return why
}

// enqueue enqueues all steps of the stream.
func (p *Program) enqueue(c *Call) error {
	waited := make([]bool, len(p.plan.Steps))
	for i := range p.plan.Steps {
		if !p.local[i] {
			continue
		}
		s := &p.plan.Steps[i]
		for _, d := range s.Needs {
			if !p.local[d] && !waited[d] {
				waited[d] = true
				if err := c.Stream.WaitValue(p.words[d], p.runs); err != nil {
					return err
				}
			}
		}
		if err := p.work(c, s); err != nil {
			return fmt.Errorf("executor: %v %v: step %d (%v): %w", p.plan.Algo, p.plan.Shape.Kind, i, s, err)
		}
		if p.tells[i] {
			if err := c.Stream.WriteValue(p.words[i], p.runs); err != nil {
				return err
			}
		}
	}
	return nil
}

// work enqueues one step on the stream.
func (p *Program) work(c *Call, s *collectives.Step) error {
	dst := c.At(s.Dst)
	if s.Verb == collectives.Copy {
		src := c.At(s.Src)
		if src == dst {
			return nil
		}
		return c.Stream.Copy(dst, src)
	}
	srcs := make([]mem.Memory, len(s.Srcs))
	for i, r := range s.Srcs {
		srcs[i] = c.At(r)
	}
	op, divisor := c.Op, 0
	if op == kernels.Avg && len(srcs) != len(p.plan.Shape.Active) {
		if op = kernels.Sum; s.Final {
			divisor = len(p.plan.Shape.Active)
		}
	}
	return c.Stream.Reduce(op, c.DType, dst, srcs, divisor)
}

// drive begins the network's steps when their needs are met, until all have completed. end is done
// when the stream's steps are.
func (p *Program) drive(ctx context.Context, c *Call, end device.Event) error {
	left := 0
	next := make([]int, len(p.lanes))
	for _, l := range p.lanes {
		left += len(l)
	}
	done := func(step int) {
		p.words[step].Word(0).Store(p.runs)
		left--
	}
	pace := backoff.Backoff{Yields: yields, Nap: nap}
	defer pace.Stop()
	for left > 0 {
		progress, err := c.Exchange.Poll(done)
		if err != nil {
			return err
		}
		end.Done() // a stream of the host works in Done
		for i, l := range p.lanes {
			for next[i] < len(l) && p.ready(l[next[i]]) {
				p.begin(c, int(l[next[i]]), done)
				next[i]++
				progress = true
			}
		}
		if progress {
			pace.Reset()
		} else if err := pace.Wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

// ready reports whether all that a step needs has completed.
func (p *Program) ready(step int32) bool {
	for _, d := range p.plan.Steps[step].Needs {
		if p.words[d].Word(0).Load() < p.runs {
			return false
		}
	}
	return true
}

// begin begins a step of the network.
func (p *Program) begin(c *Call, step int, done func(step int)) {
	s := &p.plan.Steps[step]
	peer := int(s.Peer)
	switch s.Verb {
	case collectives.Send:
		c.Exchange.Send(step, peer, c.At(s.Src))
	case collectives.Recv:
		c.Exchange.Recv(step, peer, c.At(s.Dst))
	case collectives.Put:
		c.Exchange.Put(step, s.Dst, c.At(s.Src))
	case collectives.Signal:
		c.Exchange.Signal(peer)
		done(step)
	case collectives.WaitSignal:
		c.Exchange.WaitSignal(step, peer)
	}
}
