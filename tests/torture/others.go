//go:build linux

package torture

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
	"unsafe"

	"tutti/p2p"
	"tutti/pg"
)

// message sends to one rank and receives from another.
func (r *rank) message(ctx context.Context, s *Step, part *Part, h *handle) {
	n, me := h.g.Size(), h.slot()
	if n == 1 {
		return
	}
	shift := 1 + s.Root%(n-1)
	to, from := (me+shift)%n, (me+n-shift)%n
	seed := r.p.Seed + uint64(r.now)*64
	d := newDatum(s.DType, pg.Sum, seed)
	tag := int(seed % pg.MaxTag)
	name := fmt.Sprintf("step %d: message (%v, %d elements) to %d from %d", r.now, s.DType, s.Count, to, from)
	c := &call{h: h, step: s, d: d, name: name, device: r.device}
	grab := func(m Mem) []byte {
		b := r.take(m, s.Count*d.size, d.size, name)
		if b != nil {
			c.bufs = append(c.bufs, b)
		}
		return b.bytes()
	}
	c.src, c.dst = grab(part.Src), grab(part.Dst)
	d.put(c.src, s.Count, func(i int) int64 { return d.value(r.me, i) })
	c.stream = r.stream(h, part, s.Count, c.dst, c.src)
	r.bring(c, part, c.src)
	send := h.g.Start(pg.SendOp{X: c.buffer(c.src), To: to, Tag: tag})
	cctx, cancel := part.within(ctx)
	defer cancel()
	who, may, within := from, s.May, r.job.Timeout
	if part.Any {
		who = pg.AnyRank
	}
	if part.Any && s.May&(Lost|Unheard) != 0 { // the sender may be lost, and any other rank could still send
		may, within = may|Cancelled, time.Second
		var end context.CancelFunc
		cctx, end = context.WithTimeout(cctx, within)
		defer end()
	}
	var got pg.Status
	there, typed := part.How == Blocking && r.device.has(c.dst), part.How == Blocking && s.DType == pg.Float32
	limit := r.limit(&Part{}) // a started recv knows no ctx
	if there || typed {
		limit = r.limit(part)
	}
	err := r.timed(name+": recv", limit, func() (err error) {
		switch {
		case there:
			got, err = h.g.DoRecv(cctx, pg.RecvOp{X: c.buffer(c.dst), From: who, Tag: tag})
		case typed:
			got, err = pg.Recv(cctx, h.g, as[float32](c.dst), who, tag)
		default:
			w := h.g.StartWithin(within, pg.RecvOp{X: c.buffer(c.dst), From: who, Tag: tag})
			<-w.Done()
			if err = w.Err(); err == nil {
				got = w.Status()
			}
		}
		return err
	})
	r.judge(name+": recv", may, err)
	if err == nil {
		want := slices.Clone(c.dst)
		d.put(want, s.Count, func(i int) int64 { return d.value(h.ranks[from], i) })
		if text := d.compare(c.dst, want); text != "" {
			r.find("wrong", "%s: recv: %s", name, text)
		}
		if got.From != from || got.Tag != tag || got.Count != s.Count {
			r.find("wrong", "%s: recv says %+v, want from %d, tag %d", name, got, from, tag)
		}
	}
	if err == nil {
		r.follow(c)
	}
	err = r.timed(name+": send", r.job.Timeout, func() error { <-send.Done(); return send.Err() })
	if r.judge(name+": send", s.May, err); c.stream != nil {
		if err := c.settle(r.limit(&Part{})); err != nil {
			r.find("error", "%v", err)
		}
		r.followed(c)
	}
	want := slices.Clone(c.src)
	d.put(want, s.Count, func(i int) int64 { return d.value(r.me, i) })
	if text := d.compare(c.src, want); text != "" {
		r.find("wrong", "%s: send has changed its input: %s", name, text)
	}
	r.giveBack(c)
}

// window makes a window, puts to a rank's part, with a signal, and gets the same back.
func (r *rank) window(ctx context.Context, s *Step, part *Part, h *handle) {
	n, me := h.g.Size(), h.slot()
	if s.Count == 0 {
		return
	}
	shift := s.Root % n
	to, from := (me+shift)%n, (me+n-shift)%n
	d := newDatum(s.DType, pg.Sum, r.p.Seed+uint64(r.now)*64)
	bytes := s.Count * d.size
	name := fmt.Sprintf("step %d: window of %d bytes, to %d from %d", r.now, n*bytes, to, from)
	c := &call{h: h, step: s, d: d, name: name, device: r.device}
	grab := func(m Mem) []byte {
		b := r.take(m, bytes, d.size, name)
		c.bufs = append(c.bufs, b)
		return b.bytes()
	}
	src, dst := grab(part.Src), grab(part.Dst)
	fill := func(b []byte, slot int) { d.put(b, s.Count, func(i int) int64 { return d.value(h.ranks[slot], i) }) }
	fill(src, me)
	c.stream = r.stream(h, part, s.Count, dst, src)
	limit := r.job.Timeout
	if s.May != 0 { // the rank that it waits for may have failed before
		limit = time.Second
	}
	failed := false
	step := func(what string, f func(ctx context.Context) error) bool {
		if failed {
			return false
		}
		ctx, cancel := context.WithTimeout(ctx, limit)
		defer cancel()
		err := r.timed(name+": "+what, limit, func() error { return f(ctx) })
		if failed = err != nil; failed && (s.May == 0 || ctx.Err() == nil) {
			r.judge(name+": "+what, s.May, err)
		}
		return !failed
	}
	check := func(what string, got []byte, slot int) {
		want := slices.Clone(got)
		fill(want, slot)
		if text := d.compare(got, want); text != "" {
			r.find("wrong", "%s: %s: %s", name, what, text)
		}
	}
	var w *pg.Window
	err := r.timed(name, r.job.Timeout, func() (err error) { w, err = pg.NewWindow(ctx, h.g, n*bytes); return err })
	if r.judge(name, s.May, err); err != nil {
		failed = true
	}
	r.bring(c, part, src)
	if r.device.has(src) {
		step("put", func(ctx context.Context) error { return w.PutBuffer(ctx, to, me*bytes, c.buffer(src)) })
		step("the put's signal", func(ctx context.Context) error { return w.Signal(ctx, to, 3) })
	} else {
		step("put", func(ctx context.Context) error { return w.PutSignal(ctx, to, me*bytes, src, 3) })
	}
	if step("signal", func(ctx context.Context) error { return w.WaitSignal(ctx, from, 3, 1) }) {
		check("put", w.Bytes()[from*bytes:][:bytes], from)
	}
	step("flush", func(ctx context.Context) error { return w.Flush(ctx, to) })
	if step("get", func(ctx context.Context) error {
		if r.device.has(dst) {
			return w.GetBuffer(ctx, to, me*bytes, c.buffer(dst))
		}
		return w.Get(ctx, to, me*bytes, dst)
	}) {
		check("get", dst, me)
	}
	if err := c.settle(r.limit(&Part{})); err != nil {
		r.find("error", "%v", err)
	}
	check("the source", src, me)
	err = r.timed(name+": barrier", r.job.Timeout, func() error { return h.g.Barrier(ctx) })
	r.judge(name+": barrier", s.May, err)
	if w != nil {
		if err := r.timed(name+": close", r.job.Timeout, func() error { return w.Close(ctx) }); err != nil {
			r.find("error", "%s: close: %v", name, err)
		}
	}
	r.giveBack(c)
}

func (r *rank) agree(ctx context.Context, s *Step, part *Part, h *handle, lane int) {
	cctx, cancel := part.within(ctx)
	defer cancel()
	var got bool
	err := r.timed("agree", r.limit(part), func() (err error) { got, err = h.g.Agree(cctx, !part.No); return err })
	r.judge("agree", s.May, err)
	if err != nil {
		return
	}
	if r.job.Transport != "inproc" || s.May == 0 {
		r.fact(fmt.Sprintf("%d.%d agreed %v", r.now, lane, h.ranks), "%v", got)
	}
	if s.May == 0 {
		want := true
		for _, slot := range h.g.View().Active {
			want = want && (len(s.Ranks) == 0 || !s.Ranks[h.ranks[slot]].No)
		}
		if got != want {
			r.find("wrong", "agree: %v, want %v", got, want)
		}
	}
	if got && part.No {
		r.find("wrong", "agree: true, though this rank said no")
	}
}

func (r *rank) split(ctx context.Context, s *Step, part *Part, h *handle) {
	cctx, cancel := part.within(ctx)
	defer cancel()
	var sub *pg.Group
	err := r.timed("split", r.limit(part),
		func() (err error) { sub, err = h.g.Split(cctx, part.Color, part.Key); return err })
	r.judge("split", s.May, err)
	if err != nil {
		return
	}
	if (sub == nil) != (part.Color < 0) {
		r.find("wrong", "split with color %d made %v", part.Color, sub)
		return
	}
	if sub == nil {
		return
	}
	var slots []int
	for _, slot := range h.g.View().Active {
		if s.Ranks[h.ranks[slot]].Color == part.Color {
			slots = append(slots, slot)
		}
	}
	slices.SortStableFunc(slots,
		func(a, b int) int { return cmp.Compare(s.Ranks[h.ranks[a]].Key, s.Ranks[h.ranks[b]].Key) })
	n := &handle{g: sub, loose: s.May != 0}
	for _, slot := range slots {
		n.ranks = append(n.ranks, h.ranks[slot])
	}
	if s.May == 0 && (sub.Size() != len(n.ranks) || n.ranks[sub.Rank()] != r.me) {
		r.find("wrong", "split made rank %d of %d, want %v", sub.Rank(), sub.Size(), n.ranks)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if sub.Size() != len(n.ranks) { // ranks were lost meanwhile
		go sub.Close()
		return
	}
	r.groups[s.New] = n
}

func (r *rank) abort(ctx context.Context, s *Step, part *Part, h *handle) {
	if !part.No {
		r.landOn(ctx, h)
	}
	if h.slot() == s.Root%h.g.Size() {
		h.g.Abort(errors.New("on purpose"))
	}
	err := r.timed("barrier of an aborted group", r.job.Timeout, func() error { return h.g.Barrier(ctx) })
	if r.judge("barrier of an aborted group", s.May|Aborted, err); err == nil {
		r.find("wrong", "a barrier of an aborted group succeeds")
	}
	r.landOn(ctx, h)
	r.drop(s.Group)
}

// argument makes an invalid call.
func (r *rank) argument(ctx context.Context, s *Step, h *handle) {
	n := h.g.Size()
	x := make([]float32, 8*n)
	b := func(from, to int) pg.Buffer { return pg.BufferOf(x[from:to]) }
	calls := []struct {
		name string
		f    func() error
	}{
		{"a negative root", func() error { return pg.Broadcast(ctx, h.g, x, -1) }},
		{"a root beyond the group", func() error { return pg.Reduce(ctx, h.g, x, n, pg.Sum) }},
		{"an overlapping alltoall", func() error { return pg.AllToAll(ctx, h.g, x, x) }},
		{"an overlapping reducescatter", func() error { return pg.ReduceScatter(ctx, h.g, x[1:9], x, pg.Sum) }},
		{"a destination too short", func() error { return pg.AllGather(ctx, h.g, x[:n*8-1], x[:8]) }},
		{"a negative count",
			func() error { return h.g.Start(pg.BroadcastOp{X: pg.Buffer{Count: -1, DType: pg.Int8}}).Wait(ctx) }},
		{"elements nowhere",
			func() error { return h.g.Start(pg.BroadcastOp{X: pg.Buffer{Count: 1, DType: pg.Int8}}).Wait(ctx) }},
		{"no data type", func() error {
			return h.g.Start(pg.BroadcastOp{X: pg.Buffer{Ptr: unsafe.Pointer(&x[0]), Count: 1}}).Wait(ctx)
		}},
		{"a reduction that does not exist", func() error { return pg.AllReduce(ctx, h.g, x, pg.BitAnd) }},
		{"a negative tag", func() error { return pg.Send(ctx, h.g, x, (h.slot()+1)%n, -1) }},
		{"a message to itself", func() error { return pg.Send(ctx, h.g, x, h.slot(), 0) }},
		{"a partly overlapping allreduce",
			func() error { return h.g.Start(pg.AllReduceOp{Dst: b(0, 7), Src: b(1, 8), Op: pg.Sum}).Wait(ctx) }},
		{"a count that overflows", func() error {
			return h.g.Start(pg.BroadcastOp{X: pg.Buffer{Ptr: unsafe.Pointer(&x[0]), Count: 1<<62 + 1,
				DType: pg.Float32}}).Wait(ctx)
		}},
	}
	k := calls[s.Root%len(calls)]
	if s.May != 0 && (s.Root%len(calls) == 11 || s.Root%len(calls) == 12) {
		return
	}
	err := r.timed(k.name, r.job.Timeout, k.f)
	var bad *pg.ArgumentError
	if !errors.As(err, &bad) {
		if s.May != 0 && err != nil {
			r.judge(k.name, s.May, err)
			return
		}
		r.find("wrong", "%s: %v, want an ArgumentError", k.name, err)
	}
}

// recovery bounds the time of recovering, and of joining.
const recovery = 25 * time.Second

// heal ends a disturbance.
func (r *rank) heal(ctx context.Context, s *Step) {
	r.land(ctx, false)
	r.heals++
	later := r.later
	r.later = nil
	faulty := s.May&(Lost|Unheard) != 0 && r.job.Transport != "inproc"
	if s.May&^Opaque == Differing && r.differs && !r.told {
		r.find("error", "ranks called different things, and this rank was not told")
	}
	r.differs, r.told = false, false
	if r.job.Transport == "inproc" { // such groups do not recover
		return
	}
	if faulty && !r.outlast(ctx, s) {
		r.comeBack(ctx, r.guide.Gate(Gate{Step: r.now, State: "out"}))
		return
	}
	if !faulty {
		for _, id := range r.ids() {
			if id != 0 && r.groups[id].loose {
				r.drop(id)
			}
		}
		rctx, cancel := context.WithTimeout(ctx, recovery)
		defer cancel()
		for _, id := range r.ids() {
			err := r.timed(fmt.Sprintf("recover of group %d", id), recovery,
				func() error { return r.groups[id].g.Recover(rctx) })
			if err != nil {
				r.find("error", "recover of group %d: %v", id, err)
			}
		}
		r.healWindows(false, nil)
	}
	h := r.groups[0]
	if h == nil { // it could not join again, and has reported that
		return
	}
	for _, f := range later {
		r.fact(f[0], "%s", f[1])
	}
	if !faulty {
		r.fact(fmt.Sprintf("%d recovered", r.now), "%s", view(h.g.View()))
		return
	}
	to := r.guide.Gate(Gate{Step: r.now, State: "recovered"})
	v := h.g.View()
	if !slices.Equal(v.Active, to.Stay) {
		r.find("disagreement", "after recovering the view is %s, and ranks %v have recovered", view(v), to.Stay)
	}
	r.gather(ctx, h.g, to, false)
	if s.May&Unheard != 0 {
		r.hearLosses(h, to.Stay)
	}
	for _, id := range r.ids() {
		if id != 0 && !r.groups[id].loose {
			r.probe(s, id, to)
		}
	}
	r.endOld(ctx)
	r.healWindows(true, to.Back)
}

// hearLosses exchanges messages with the ranks that stayed in the group of all ranks. A link that
// broke may have lost messages that no receive waits for any more: the next receive is told so, and
// without this it would be one of an undisturbed step.
func (r *rank) hearLosses(h *handle, stay []int) {
	const tag = pg.MaxTag // no step has it
	var sends []*pg.Work
	for _, to := range stay {
		if to != h.slot() {
			sends = append(sends, h.g.StartWithin(slack,
				pg.SendOp{X: pg.BufferOf([]int64{int64(r.now)}), To: to, Tag: tag}))
		}
	}
	for _, from := range stay {
		if from == h.slot() {
			continue
		}
		x, err := []int64{0}, p2p.ErrLost
		for errors.Is(err, p2p.ErrLost) {
			err = r.timed("receiving after broken links", slack, func() error {
				w := h.g.StartWithin(slack, pg.RecvOp{X: pg.BufferOf(x), From: from, Tag: tag})
				<-w.Done()
				return w.Err()
			})
		}
		if err != nil || x[0] != int64(r.now) {
			r.find("spurious", "receiving from rank %d, which has stayed, after broken links: %d, %v", from, x[0], err)
		}
	}
	for _, w := range sends {
		if <-w.Done(); w.Err() != nil {
			r.find("spurious", "sending to a rank that has stayed, after broken links: %v", w.Err())
		}
	}
}

// probe exchanges messages on a subgroup that is older than a disturbance: those that stayed reach
// each other, and none of the ranks that were lost, in whose place there are others now.
func (r *rank) probe(s *Step, id int, to Go) {
	h := r.groups[id]
	seed := r.p.Seed + uint64(r.now)*64 + uint64(id)
	d := newDatum(pg.Int32, pg.Sum, seed)
	count := []int{1, 1000, 50_000}[seed%3]
	var works []*pg.Work // of each slot a send and a receive
	c := &call{h: h, step: s, d: d, device: r.device}
	var got [][]byte
	for slot := range h.ranks {
		name := fmt.Sprintf("step %d: probe of group %d, slot %d", r.now, id, slot)
		src, dst := r.take(MemPlain, count*d.size, d.size, name), r.take(MemPlain, count*d.size, d.size, name)
		c.bufs, got = append(c.bufs, src, dst), append(got, dst.bytes())
		d.put(src.bytes(), count, func(i int) int64 { return d.value(r.me, i) })
		if slot == h.slot() {
			works = append(works, nil, nil)
			continue
		}
		works = append(works, h.g.StartWithin(slack, pg.SendOp{X: c.buffer(src.bytes()), To: slot}),
			h.g.StartWithin(slack, pg.RecvOp{X: c.buffer(dst.bytes()), From: slot}))
	}
	for i, w := range works {
		if w == nil {
			continue
		}
		slot, kind := i/2, []string{"send", "recv"}[i%2]
		what := fmt.Sprintf("group %d, from before the disturbance: %s, slot %d", id, kind, slot)
		err := r.timed(what, slack, func() error { <-w.Done(); return w.Err() })
		var lost *pg.RankError
		switch stays := slices.Contains(to.Stay, h.ranks[slot]); {
		case !stays && (!errors.As(err, &lost) || lost.Rank != slot):
			r.find("wrong", "%s, whose rank was lost: %v, want a RankError that names it", what, err)
		case stays && err != nil && s.May&Unheard == 0: // else the link may have broken, and another be made
			r.find("spurious", "%s, whose rank has stayed: %v", what, err)
		case stays && err == nil && i%2 != 0:
			want := slices.Clone(got[slot])
			d.put(want, count, func(i int) int64 { return d.value(h.ranks[slot], i) })
			if text := d.compare(got[slot], want); text != "" {
				r.find("wrong", "%s: %s", what, text)
			}
		}
	}
	r.giveBack(c)
}

// endOld drops all subgroups after no rank uses them any more.
func (r *rank) endOld(ctx context.Context) {
	if h := r.groups[0]; h != nil {
		err := r.timed("barrier before closing old groups", r.job.Timeout, func() error { return h.g.Barrier(ctx) })
		r.judge("barrier before closing old groups", 0, err)
	}
	for _, id := range r.ids() {
		if id != 0 {
			r.drop(id)
		}
	}
}

// outlast runs operations of all ranks, like a program, until all faults from outside have ended
// and all members know it. A rank that waited outside of calls would delay ranks that need it. It
// returns false if this rank is no longer a member.
func (r *rank) outlast(ctx context.Context, s *Step) bool {
	over := make(chan struct{})
	go func() {
		r.guide.Gate(Gate{Step: r.now})
		close(over)
	}()
	h := r.groups[0]
	if h == nil { // it has left
		<-over
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, patience/2)
	defer cancel()
	for {
		x := []uint8{0}
		select {
		case <-over:
			x[0] = 1
		default:
		}
		err := r.timed("allreduce until all faults are over", r.job.Timeout,
			func() error { return pg.AllReduce(ctx, h.g, x, pg.Min) })
		if err == nil && x[0] == 1 {
			return true
		}
		if r.judge("allreduce until all faults are over", s.May, err); err == nil {
			time.Sleep(time.Millisecond)
			continue
		}
		if !r.goesOn(err) {
			err = r.timed("recover", r.job.Timeout, func() error { return h.g.Recover(ctx) })
			r.judge("recover", s.May, err)
		}
		if errors.Is(err, pg.ErrEvicted) || errors.Is(err, pg.ErrIsolated) || errors.Is(err, pg.ErrClosed) {
			<-over
			return false
		}
		if ctx.Err() != nil {
			r.find("stuck", "the group does not go on: %v", err)
			<-over
			return false
		}
	}
}

// goesOn reports whether the group continues after an error without Recover.
func (r *rank) goesOn(err error) bool {
	var lost *pg.RankError
	var late *pg.TimeoutError
	switch {
	case r.job.OnFailure == pg.Report:
		return false
	case errors.As(err, &lost):
		return true
	}
	return r.job.OnTimeout != pg.TimeoutReports && errors.As(err, &late) && errors.Is(late, context.DeadlineExceeded)
}

// comeBack makes a rank that is no longer a member join again, at the step of the others.
func (r *rank) comeBack(ctx context.Context, to Go) {
	old := r.groups[0]
	r.endWindows(nil)
	for _, id := range r.ids() {
		if id != 0 {
			r.drop(id)
		}
	}
	r.untouch()
	for i := range r.alloc {
		r.free(i)
	}
	jctx, cancel := context.WithTimeout(ctx, recovery)
	defer cancel()
	var g *pg.Group
	err := r.timed("coming in", recovery, func() (err error) {
		if old != nil {
			g, err = old.g.Rejoin(jctx)
		} else {
			g, err = r.join(jctx)
		}
		for to.Rough && r.job.OnFailure == pg.Report && errors.As(err, new(*pg.RankError)) && jctx.Err() == nil {
			g, err = r.join(jctx) // another rank was lost meanwhile: with Report, joining fails too
		}
		return err
	})
	r.groups = map[int]*handle{}
	if err != nil {
		r.find("error", "coming in again: %v", err)
		return
	}
	r.enter(g)
	r.gather(ctx, g, to, true)
	r.endOld(ctx)
}

// gather admits waiting ranks until all are there.
func (r *rank) gather(ctx context.Context, g *pg.Group, to Go, fresh bool) {
	if len(to.Back) == 0 {
		return
	}
	defer func() { r.groups[0].grow() }()
	all := slices.Concat(to.Stay, to.Back)
	slices.Sort(all)
	if to.Rough {
		r.gatherRough(ctx, g, all, fresh)
		return
	}
	where := int64(r.now)
	tell := func() bool {
		x := []int64{where}
		if fresh {
			x[0] = -1
		}
		err := r.timed("telling who came in", r.job.Timeout,
			func() error { return pg.Broadcast(ctx, g, x, slices.Min(to.Stay)) })
		if err != nil {
			r.find("spurious", "telling who came in: %v", err)
			return false
		}
		if x[0] != where {
			r.find("wrong", "who came in is told of step %d, want %d", x[0], where)
		}
		fresh = false
		return true
	}
	stayed := !fresh
	until := time.Now().Add(recovery)
	if fresh && !r.job.AutoAdmit && !tell() {
		return
	}
	for turn := 0; ; turn++ {
		if !r.job.AutoAdmit {
			if slices.Equal(g.View().Active, all) {
				break
			}
			in := 0
			err := r.timed("admit", r.job.Timeout, func() (err error) { in, err = g.Admit(ctx); return err })
			if err != nil {
				r.find("spurious", "admit: %v", err)
				return
			}
			if stayed {
				r.fact(fmt.Sprintf("%d admitted in turn %d", r.now, turn), "%d", in)
			}
			if in > 0 && !tell() {
				return
			}
		} else {
			x := make([]int64, len(all))
			x[slices.Index(all, r.me)] = 1
			err := r.timed("allreduce until all are in", r.job.Timeout,
				func() error { return pg.AllReduce(ctx, g, x, pg.Sum) })
			if err != nil {
				r.find("spurious", "allreduce until all are in: %v", err)
				return
			}
			if !slices.Contains(x, 0) {
				break
			}
		}
		if time.Now().After(until) {
			r.find("stuck", "ranks %v do not come in: the view is %s", to.Back, view(g.View()))
			return
		}
		time.Sleep(2 * time.Millisecond)
	}
	r.fact(fmt.Sprintf("%d gathered", r.now), "%s", view(g.View()))
}

// gatherRough is gather while some of the joining ranks are lost, and join again. After an error
// ranks continue with the same operation, whether they have recovered or continued.
func (r *rank) gatherRough(ctx context.Context, g *pg.Group, all []int, fresh bool) {
	over := make(chan struct{})
	go func() {
		r.guide.Gate(Gate{Step: r.now, State: "joining"})
		close(over)
	}()
	defer func() { <-over }()
	ctx, cancel := context.WithTimeout(ctx, patience/2)
	defer cancel()
	admit := !fresh
	may := Lost
	if !r.job.Uniform { // a rank with the result of an operation that failed elsewhere continues with another one
		may |= Differing
	}
	for {
		x := make([]uint8, len(all)+1) // the ranks that are here, and how many know that all faults have ended
		x[slices.Index(all, r.me)] = 1
		select {
		case <-over:
			x[len(all)] = 1
		default:
		}
		what, call := "allreduce while ranks come in", func() error { return pg.AllReduce(ctx, g, x, pg.Sum) }
		if admit = admit && !r.job.AutoAdmit; admit {
			what, call = "admit while ranks come in", func() error { _, err := g.Admit(ctx); return err }
		}
		err := r.timed(what, r.job.Timeout, call)
		if r.judge(what, may, err); err == nil {
			if !admit && int(x[len(all)]) == len(all) && !slices.Contains(x, 0) {
				break
			}
			admit = !admit
			time.Sleep(time.Millisecond)
			continue
		}
		admit = false
		if !r.goesOn(err) {
			err = r.timed("recover", r.job.Timeout, func() error { return g.Recover(ctx) })
			r.judge("recover", Lost, err)
		}
		if errors.Is(err, pg.ErrEvicted) || errors.Is(err, pg.ErrIsolated) || errors.Is(err, pg.ErrClosed) ||
			ctx.Err() != nil {
			r.find("stuck", "ranks do not come in: %v", err)
			return
		}
	}
	r.fact(fmt.Sprintf("%d gathered", r.now), "%s", view(g.View()))
}
