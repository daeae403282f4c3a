//go:build linux

package torture

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unsafe"

	"tutti/device"
	"tutti/pg"
)

// A tape is a stream of the program's own, and a graph that is captured on it.
type tape interface {
	stream() device.Stream
	capture(f func() error) error // once
	launch() error
	finish(limit time.Duration) error // waits until the stream has done its work
	close() error
}

// graph captures the collectives of a step and launches the graph, each time with other data, if it
// could be captured at all ranks. Ranks whose streams cannot be captured, and groups whose
// collectives cannot, have no graph: package pg says when.
func (r *rank) graph(ctx context.Context, s *Step, h *handle) {
	r.landOn(ctx, h) // their kernels are on other streams
	g := &graph{r: r, h: h, s: s}
	has := g.warm(ctx) && r.device.d != nil
	if has {
		var err error
		if g.tape, err = r.device.d.tape(); err != nil {
			if has = false; !errors.Is(err, errors.ErrUnsupported) {
				g.fail("a stream of the program: %v", err)
			}
		} else {
			defer g.close()
			has = g.capture(ctx)
		}
	}
	if s.May == 0 {
		r.fact(fmt.Sprintf("%s of %v", g.name(), h.ranks), "captured %v", has)
	}
	all := false
	err := r.timed("agreeing on a graph", r.limit(&Part{}), func() (err error) {
		all, err = h.g.Agree(ctx, has)
		return err
	})
	r.judge("agreeing on a graph", s.May, err)
	launches := err == nil && all
	if s.May != 0 {
		g.disturbed(ctx, launches)
		return
	}
	for i := 0; i < s.Count && launches; i++ {
		if was, ok := g.launch(ctx, i); !ok || !g.right(was) {
			return
		}
	}
}

// disturbed launches the graph once, unless this rank has none. The operation after it, which is
// the same at all ranks, tells whether there is a result.
func (g *graph) disturbed(ctx context.Context, launches bool) {
	r := g.r
	var was [][]byte
	if launches {
		was, launches = g.launch(ctx, 0)
	}
	what := g.name() + ": the barrier after it"
	err := r.timed(what, r.limit(&Part{}), func() error { return g.h.g.Barrier(ctx) })
	if r.judge(what, g.s.May, err); err == nil && launches {
		g.count("disturbed launches with a result")
		g.right(was)
	}
}

// A graph is a step of that kind on a rank.
type graph struct {
	r     *rank
	h     *handle
	s     *Step
	tape  tape
	view  pg.View // of the capture
	calls []*call
}

// viewKey names a view of a group. Groups that Split makes end with their program.
type viewKey struct {
	program uint64 // 0 for the group of all ranks
	group   int
	epoch   uint64
	heals   int
}

func (g *graph) viewKey() viewKey {
	k := viewKey{g.r.p.Seed, g.s.Group, g.view.Epoch, g.r.heals}
	if k.group == 0 {
		k.program = 0
	}
	return k
}

func (g *graph) name() string { return fmt.Sprintf("step %d: graph", g.r.now) }

func (g *graph) fail(format string, args ...any) {
	g.r.find("error", "%s: %s", g.name(), fmt.Sprintf(format, args...))
}

// warm has the group make what a graph needs.
func (g *graph) warm(ctx context.Context) bool {
	r := g.r
	what := g.name() + ": the allreduce before it"
	b := r.take(graphDevice, 4, 4, what)
	defer r.giveBack(&call{bufs: []*buffer{b}})
	c := &call{d: newDatum(pg.Uint32, pg.Sum, 0), device: r.device}
	word := (*uint32)(unsafe.Pointer(&b.bytes()[0]))
	*word = 1
	err := r.timed(what, r.limit(&Part{}), func() error {
		return g.h.g.Do(ctx, pg.AllReduceOp{Dst: c.buffer(b.bytes()), Op: pg.Sum})
	})
	if n := len(g.h.g.View().Active); err == nil && g.s.May == 0 && *word != uint32(n) {
		r.find("wrong", "%s gives %d, want %d", what, *word, n)
	}
	r.judge(what, g.s.May, err)
	return err == nil
}

// capture makes the graph. It returns false if there is none.
func (g *graph) capture(ctx context.Context) bool {
	r := g.r
	for i := range g.s.Par {
		c := g.call(i, 0)
		r.lay(c, r.part(&g.s.Par[i]), graphDevice, graphDevice)
		g.calls = append(g.calls, c)
	}
	g.view = g.h.g.View()
	on := &deviceStream{Stream: g.tape.stream()}
	err := r.timed(g.name()+": capture", r.limit(&Part{}), func() error {
		return g.tape.capture(func() error {
			for _, c := range g.calls {
				c.device, c.stream = r.device, on
				if err := g.h.g.Start(c.operation()).Wait(ctx); err != nil {
					return fmt.Errorf("%s: %w", c.name, err)
				}
			}
			return nil
		})
	})
	if errors.Is(err, errors.ErrUnsupported) {
		g.count("refused")
	} else {
		r.recorded[g.viewKey()] = true // at least a part, perhaps
		r.judge(g.name()+": capture", g.s.May, err)
	}
	return err == nil
}

// call returns the call that repeats number i in a launch. Its parts are of equal length.
func (g *graph) call(i, launch int) *call {
	s := &g.s.Par[i]
	seed := g.r.p.Seed + uint64(g.r.now)*64 + uint64(i)*8 + uint64(launch)<<32
	c := newCall(s, seed, g.r.me, g.h)
	all := slices.Repeat([]int{c.count}, c.n)
	switch c.op {
	case AllGatherV:
		c.counts = all
	case AllToAllV:
		c.counts, c.recv = all, all
	}
	c.name = fmt.Sprintf("%s, launch %d: %s", g.name(), launch, c.name)
	return c
}

// launch repeats the graph, and waits for its end. In some launches the hosts do a collective
// meanwhile, and some have the work done twice. It returns what was in the destinations, and false
// if the launch has failed.
func (g *graph) launch(ctx context.Context, n int) (was [][]byte, ok bool) {
	r := g.r
	was = make([][]byte, len(g.calls))
	for i, first := range g.calls {
		c := g.call(i, n)
		c.dst, c.src, c.bufs, c.inPlace = first.dst, first.src, first.bufs, first.inPlace
		c.before = g.view
		c.fill(r.me)
		was[i], g.calls[i] = slices.Clone(c.dst), c
	}
	if late := r.part(g.s).Late; late > 0 { // every time
		time.Sleep(late)
	}
	choice := hash(r.p.Seed, r.now, n)
	err := g.tape.launch()
	if err == nil && choice&1 != 0 && !slices.ContainsFunc(g.s.Par, accumulates) {
		err = g.tape.launch()
	}
	if err == nil && choice&2 != 0 && g.s.May == 0 {
		err = r.timed(g.name()+": barrier beside it", r.limit(&Part{}), func() error { return g.h.g.Barrier(ctx) })
	}
	err = errors.Join(err, r.timed(g.name()+": its end", r.job.Timeout, func() error {
		return g.tape.finish(r.job.Timeout + 2*hung) // the process may be stopped meanwhile
	}))
	if err != nil {
		g.fail("launch %d: %v", n, err)
		return nil, false
	}
	g.count("launches")
	return was, true
}

// right checks the results of a launch.
func (g *graph) right(was [][]byte) bool {
	r, ok := g.r, true
	for i, c := range g.calls {
		if text, _ := c.result(c.dst, was[i], g.view); text != "" {
			r.find("wrong", "%s in place %v (%s): %s", c.name, c.inPlace, g.kinds(), text)
			ok = false
		}
		if text := c.changed(r.me); text != "" {
			r.find("wrong", "%s has changed its input: %s", c.name, text)
		}
	}
	return ok
}

func (g *graph) count(what string) {
	g.r.mu.Lock()
	defer g.r.mu.Unlock()
	if g.r.rep.Graphs == nil {
		g.r.rep.Graphs = map[string]int{}
	}
	g.r.rep.Graphs[what]++
}

// accumulates reports whether a collective has another result if it is repeated, at some rank.
func accumulates(s Step) bool {
	return s.Op == Reduce || s.Op == AllReduce && slices.ContainsFunc(s.Ranks, func(p Part) bool { return p.InPlace })
}

// kinds lists what the graph has.
func (g *graph) kinds() string {
	var all []string
	for _, c := range g.calls {
		all = append(all, string(c.op))
	}
	return strings.Join(all, ", ")
}

func (g *graph) close() {
	if err := g.r.timed("closing a graph", 0, g.tape.close); err != nil {
		g.fail("closing it: %v", err)
	}
	for _, c := range g.calls {
		g.r.giveBack(c)
	}
}
