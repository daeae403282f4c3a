package pg

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"tutti/bootstrap"
	"tutti/collectives"
	"tutti/internal/files"
	"tutti/p2p"
	"tutti/pg/flight"
	"tutti/pg/internal/exec"
)

// telemetry is a group's part in the flight recorder. Under the proxy's lock.
type telemetry struct {
	rec   *flight.Recorder
	tpl   flight.Record  // of the latest operation that was not bound
	cur   *flight.Record // of the operation that runs, or ran last
	since int64          // when the operation that is about to start was queued; 0: it was not
	err   error          // of the operation that failed last
}

// begin records that the current call starts, or starts again, as operation g.seq.
func (g *Group) begin() {
	t := &g.tel
	tpl := &t.tpl
	if b := g.run.Bound(); b == nil || b.Epoch != g.epoch {
		g.template()
	} else if tpl = &b.Record; tpl.Queued != 0 || t.since != 0 {
		tpl.Queued = t.queued()
	}
	t.cur = t.rec.Begin(tpl, g.seq)
}

// queued is how long the operation that is about to start was queued, for its record.
func (t *telemetry) queued() (n uint16) {
	if t.since != 0 {
		n, t.since = flight.QueuedSince(t.since), 0
	}
	return n
}

// end records how the operation ended, unless its failure has been recorded.
func (g *Group) end(err error) {
	if t := &g.tel; t.cur.State == flight.Running {
		o := flight.OK
		if err != nil {
			o = outcome(err)
		}
		t.rec.End(t.cur, o)
	}
}

// template describes the current call for the recorder.
func (g *Group) template() {
	c, t := g.run.Call(), &g.tel
	tok := c.Token(g.seq, collectives.Auto)
	call := flight.Pack(c.Kind, c.DType, c.Op, collectives.Auto, g.jobRank(c.Root))
	t.tpl = flight.Template(g.id(), g.epoch, call, tok.Count, uint64(c.Bytes(g.size)))
	t.tpl.Queued = t.queued()
	if b := g.run.Bound(); b != nil { // it was bound in an earlier view
		t.tpl.Call = t.tpl.Call.With(b.Algo())
		b.Record, b.Epoch = t.tpl, g.epoch
	}
}

// keep gives a call that has been bound its record.
func (g *Group) keep(b *exec.Bound) { b.Record, b.Epoch = g.tel.tpl, g.epoch }

// chosen notes how the operation is done, once that is known.
func (t *telemetry) chosen(a collectives.Algo) {
	t.tpl.Chosen(a)
	t.cur.Chosen(a)
}

// failed records how an operation failed, and keeps a snapshot where there is a directory for that.
// Called with the proxy's lock, which it gives up for a moment.
func (g *Group) failed(err error) {
	t, o := &g.tel, outcome(err)
	t.err = err
	if t.cur != nil && t.cur.State == flight.Running && t.cur.Number == g.seq && t.cur.Group == g.id() {
		t.rec.End(t.cur, o)
	} else { // it had not begun
		t.rec.Count(o)
	}
	g.job.obs.Load().failure(o, g.job.settings.OnFailure == Report)
}

// outcome is how the recorder calls an error of an operation.
func outcome(err error) flight.Outcome {
	var timeout *TimeoutError
	var rank *RankError
	var mismatch *MismatchError
	switch {
	case err == nil:
		return flight.OK
	case errors.Is(err, context.Canceled):
		return flight.Cancelled
	case errors.As(err, &timeout), errors.Is(err, context.DeadlineExceeded):
		return flight.TimedOut
	case errors.As(err, &rank):
		return flight.RankFailed
	case errors.As(err, &mismatch):
		return flight.Mismatched
	case errors.Is(err, ErrClosed):
		return flight.Closed
	}
	return flight.Failed
}

// beginMessage records a Send or Recv. Called with the proxy's lock, as what follows.
func (g *Group) beginMessage(m *message, async bool) {
	kind := flight.Send
	if m.recv {
		kind = flight.Recv
	}
	tpl := flight.Template(g.id(), g.epoch, flight.Pack(kind, m.x.DType, 0, collectives.Auto, g.rankOrAny(m.peer)),
		uint64(m.x.Count), uint64(m.x.Count*m.x.DType.Size()))
	if async {
		tpl.Flags = flight.Async
	}
	m.rec = g.tel.rec.Begin(&tpl, uint64(int64(m.tag)))
}

// rankOrAny is the rank in the job of a slot, or any.
func (g *Group) rankOrAny(slot int) int {
	if slot < 0 {
		return slot
	}
	return g.jobRank(slot)
}

// endMessage records how it ended, and returns that.
func (g *Group) endMessage(m *message, err error) error {
	o := outcome(err)
	g.tel.rec.End(m.rec, o)
	if o != flight.OK {
		g.job.obs.Load().failure(o, true)
	}
	return err
}

// observer answers for a rank: to those who ask what it does, to its files, to the metrics.
type observer struct {
	j       *job
	self    flight.Identity
	rec     *flight.Recorder
	dir     string // of dumps; "": none are made
	metrics *exporter

	dumping sync.Mutex
	dumps   int
	signals chan os.Signal
	done    chan struct{} // closed by unobserve
	mu      sync.Mutex    // of ended
	ended   bool
	wg      sync.WaitGroup
}

// aside runs f on a goroutine that unobserve waits for; not after that.
func (o *observer) aside(f func()) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.ended {
		o.wg.Go(f)
	}
	return !o.ended
}

const (
	maxDumps  = 64                     // of one life of a rank
	dumpAwait = 200 * time.Millisecond // how long a failing operation waits for its dump
)

// identity is this rank for its flight records.
func (j *job) identity() flight.Identity {
	return flight.Identity{Job: j.settings.Job, Rank: j.self.Rank, Size: max(j.settings.Size, j.self.Rank+1),
		Incarnation: j.self.Incarnation, Host: bootstrap.NewRecord(0, 1, 0, nil).Host}
}

// observe begins to keep the flight recorder, and to answer, for this rank.
func (j *job) observe() error {
	s := j.settings
	o := &observer{j: j, self: j.identity(), done: make(chan struct{})}
	var err error
	if !j.local {
		o.dir = s.LogDir
	}
	if o.dir != "" {
		if err = files.Directory(o.dir); err == nil {
			o.rec, err = flight.Open(o.dir, o.self)
		}
		if err != nil {
			j.log.Warn("no flight records are kept", "dir", o.dir, "err", err)
			o.dir = ""
		}
	}
	if o.rec == nil {
		if o.rec, err = flight.Open("", o.self); err != nil {
			return err
		}
	}
	if s.Metrics != "" && !j.local {
		if o.metrics, err = o.export(s.Metrics, max(s.launch.LocalRank, 0)); err != nil {
			o.rec.Close(false)
			return fmt.Errorf("metrics at %s: %w", s.Metrics, err)
		}
		j.log.Info("metrics are served", "url", "http://"+o.metrics.addr+"/metrics")
	}
	j.obs.Store(o)
	if o.dir != "" && dumpSignal != nil {
		o.signals = make(chan os.Signal, 1)
		signal.Notify(o.signals, dumpSignal)
		o.aside(func() {
			for {
				select {
				case <-o.signals:
					o.dump("signal")
				case <-o.done:
					return
				}
			}
		})
	}
	return nil
}

// unobserve ends what observe began, in bounded time.
func (j *job) unobserve() {
	o := j.obs.Load()
	if o == nil {
		return
	}
	o.mu.Lock()
	again := o.ended
	o.ended = true
	o.mu.Unlock()
	if again {
		return
	}
	if o.signals != nil {
		signal.Stop(o.signals)
	}
	close(o.done)
	if o.metrics != nil {
		o.metrics.close()
	}
	o.wg.Wait()
	if err := o.rec.Close(false); err != nil {
		j.log.Warn("the flight recorder's file could not be removed", "err", err)
	}
}

// watch takes a new group into account; the first one begins the recorder.
func (j *job) watch(g *Group) error {
	if j.obs.Load() == nil {
		if err := j.observe(); err != nil {
			return err
		}
	}
	j.proxy.Lock()
	defer j.proxy.Unlock()
	g.tel.rec = j.obs.Load().rec
	g.wait.OnSleep(func(rank int) { // for whoever reads the file of a killed rank
		if c := g.tel.cur; c != nil && c.State == flight.Running && c.Group == g.id() {
			c.Awaited = uint32(rank) + 1
		}
	})
	g.tel.rec.AddGroup(g.id(), g.rank, g.ranks)
	return nil
}

// failure keeps a snapshot of how an operation failed, unless somebody wanted it to end. It is
// written on its own. If wait is set, as where a program is likely to exit now, the caller waits
// for that, but not long, whatever the disk does. Called with the proxy's lock, which it gives up
// meanwhile.
func (o *observer) failure(why flight.Outcome, wait bool) {
	if o.dir == "" || why == flight.Cancelled || why == flight.Closed {
		return
	}
	reason := "failure"
	if why == flight.TimedOut {
		reason = "timeout"
	}
	written := make(chan struct{})
	if !o.aside(func() {
		defer close(written)
		o.dump(reason)
	}) || !wait {
		return
	}
	o.j.proxy.Unlock()
	late := time.NewTimer(dumpAwait)
	select {
	case <-written:
	case <-late.C:
	}
	late.Stop()
	o.j.proxy.Lock()
}

// dump writes a snapshot with all that is recorded into the directory, under a name that was free.
func (o *observer) dump(reason string) {
	s := o.snapshot(flight.Records, reason)
	o.dumping.Lock()
	defer o.dumping.Unlock()
	if o.dumps == maxDumps {
		return
	}
	o.dumps++
	base := filepath.Join(o.dir, fmt.Sprintf("flight-rank%d-%s", o.self.Rank, reason))
	path := base + ".json"
	for n := 2; n < 1000; n++ {
		if _, err := os.Lstat(path); errors.Is(err, os.ErrNotExist) {
			break
		}
		path = fmt.Sprintf("%s-%d.json", base, n)
	}
	if err := s.Write(path); err != nil {
		o.j.log.Warn("a flight record could not be written", "err", err)
		return
	}
	o.j.log.Info("flight record", "file", path)
}

// blank is the snapshot of a rank without groups.
func (j *job) blank(now time.Time, id flight.Identity) *flight.Snapshot {
	now = now.Round(time.Millisecond).UTC()
	return &flight.Snapshot{Version: flight.Version, Job: id.Job, Rank: id.Rank, Size: id.Size,
		Incarnation: fmt.Sprintf("%016x", id.Incarnation), PID: os.Getpid(), Host: id.Host,
		Time: now, Since: now, Groups: []flight.Group{}}
}

// status answers whoever asks over the handshake RPC. It ends with ctx, also if the proxy's lock
// cannot be had.
func (j *job) status(ctx context.Context, ops int) ([]byte, error) {
	o := j.obs.Load()
	if o == nil { // it is joining
		return j.blank(time.Now(), j.identity()).JSON(false)
	}
	type answer struct {
		text []byte
		err  error
	}
	got := make(chan answer, 1)
	if !o.aside(func() { // ends when it has had the lock, which Close must have too
		text, err := o.snapshot(ops, "").JSON(false)
		got <- answer{text, err}
	}) {
		return nil, ErrClosed
	}
	select {
	case a := <-got:
		return a.text, a.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// glance is what is read of a group under the lock, before anything is made of it.
type glance struct {
	id       uint32
	slot     int
	ranks    []int // of each slot
	active   []int // slots
	epoch    uint64
	seq      uint64
	record   flight.Record
	has      bool
	awaits   []int // slots
	entering uint64
	waited   time.Duration
	queued   int
	peers    []peerGlance
	err      error
	last     error
}

type peerGlance struct {
	slot        int
	seen, waits p2p.Token
	hasSeen     bool
	hasWaits    bool
	waitsFor    []int
}

// awaits lists the slots that the operation under way waits for.
func (g *Group) awaits() (slots []int) {
	if g.sync.Pending() {
		return g.sync.Missing()
	}
	if g.between {
		return g.unvoted
	}
	return g.run.Awaits()
}

func (g *Group) glance() glance {
	v := glance{id: g.id(), slot: g.rank, active: slices.Clone(g.active), epoch: g.epoch, seq: g.seq,
		queued: g.line.calls, err: g.err, last: g.tel.err}
	if g.aborted != nil {
		v.err = g.aborted
	}
	for slot := range g.size {
		v.ranks = append(v.ranks, g.jobRank(slot))
	}
	if c := g.tel.cur; c != nil && c.Group == g.id() && c.Number == g.seq {
		if v.record, v.has = *c, true; c.State == flight.Running {
			v.awaits = g.awaits()
		}
	}
	if g.busy && (g.sync.Pending() || g.sync.Behind(g.must)) {
		v.entering, v.waited, v.awaits = max(g.sync.Now().Epoch, g.must), g.wait.Waited(), g.awaits()
	}
	for slot := range g.size {
		if slot == g.rank {
			continue
		}
		p := peerGlance{slot: slot}
		p.seen, p.hasSeen = g.coll.Seen(slot)
		p.waits, p.waitsFor, p.hasWaits = g.coll.Waiting(slot)
		if p.hasSeen || p.hasWaits {
			v.peers = append(v.peers, p)
		}
	}
	return v
}

// snapshot describes the rank, with at most ops of the operations that have ended. It takes the
// proxy's lock for a moment.
func (o *observer) snapshot(ops int, reason string) *flight.Snapshot {
	j := o.j
	j.proxy.Lock()
	now := time.Now()
	im := o.rec.Copy(ops)
	counts := j.proxy.Counts()
	var seen []glance
	for g := range j.groups {
		seen = append(seen, g.glance())
	}
	j.proxy.Unlock()

	slices.SortFunc(seen, func(a, b glance) int { return int(a.id) - int(b.id) })
	s := j.blank(now, o.self)
	s.Reason, s.Joined = reason, len(seen) > 0 && (j.local || j.settings.MaxSize == 1 || j.met.Load())
	if o.metrics != nil {
		s.Metrics = o.metrics.addr
	}
	im.Fill(s)
	for i := range seen {
		v := &seen[i]
		if i == 0 { // the group of all ranks, unless it is closed
			s.View = flight.View{Epoch: v.epoch, Active: v.toRanks(v.active)}
			if v.id == 1 {
				s.Size = max(s.Size, len(v.ranks))
			}
		}
		s.Groups = append(s.Groups, v.describe(s.Time))
	}
	for _, c := range counts {
		l := flight.Link{Rank: c.Rank, Up: c.Up, Transport: c.Transport, BytesSent: c.BytesSent,
			BytesReceived: c.BytesReceived, FramesSent: c.FramesSent,
			FramesReceived: c.FramesReceived, Waited: c.Waited.Seconds()}
		if c.Err != nil {
			l.Error = c.Err.Error()
		}
		s.Links = append(s.Links, l)
	}
	return s
}

// toRanks are the ranks in the job of slots, ascending.
func (v *glance) toRanks(slots []int) (all []int) {
	for _, s := range slots {
		if s < len(v.ranks) {
			all = append(all, v.ranks[s])
		}
	}
	slices.Sort(all)
	return all
}

// spell is spell with the root as a rank of the job.
func (v *glance) spell(t p2p.Token) string {
	c := flight.Call(t.Call)
	if r := c.Root(); t != enterToken && r >= 0 && r < len(v.ranks) {
		c = flight.Pack(c.Kind(), c.DType(), c.Reduction(), c.Algorithm(), v.ranks[r])
	}
	return spell(p2p.Token{Seq: t.Seq, Call: uint64(c), Count: t.Count})
}

// describe makes a group's part of a snapshot.
func (v *glance) describe(now time.Time) flight.Group {
	out := flight.Group{ID: v.id, Slot: v.slot, Size: len(v.ranks), Epoch: v.epoch, Number: v.seq, Finished: v.seq,
		Queued: v.queued}
	for slot, r := range v.ranks {
		if r != slot {
			out.Ranks = v.ranks
			break
		}
	}
	if len(v.active) < len(v.ranks) {
		out.Active = v.toRanks(v.active)
	}
	if v.err != nil {
		out.Error = v.err.Error()
	}
	if v.last != nil {
		out.LastError = v.last.Error()
	}
	if v.has {
		op := v.record.Operation()
		if v.record.State == flight.Running {
			op.WaitsFor = v.toRanks(v.awaits)
			out.Running = &op
			out.Finished--
		} else {
			out.Last = &op
		}
	}
	if v.entering > 0 {
		out.Running = &flight.Operation{Group: v.id, Number: v.entering, Kind: flight.Entering,
			Call: fmt.Sprintf("entering epoch %d", v.entering), Root: -1, Epoch: v.entering,
			Started: now.Add(-v.waited), Outcome: flight.Running.String(), WaitsFor: v.toRanks(v.awaits)}
	}
	for _, p := range v.peers {
		peer := flight.Peer{Rank: v.ranks[p.slot]}
		if p.hasSeen {
			peer.Seen, peer.Number = v.spell(p.seen), p.seen.Seq
		}
		if p.hasWaits {
			peer.Waits, peer.WaitsFor = v.spell(p.waits), v.toRanks(p.waitsFor)
		}
		out.Peers = append(out.Peers, peer)
	}
	return out
}
