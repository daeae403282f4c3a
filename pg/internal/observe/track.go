package observe

import (
	"tutti/collectives"
	"tutti/kernels"
	"tutti/p2p"
	"tutti/pg/flight"
	"tutti/pg/internal/exec"
)

// A Track is a group's part in the flight recorder. All of it is under the proxy's lock.
type Track struct {
	id    uint32 // of the group
	rec   *flight.Recorder
	tpl   flight.Record  // of the latest operation that was not bound
	cur   *flight.Record // of the operation that runs, or ran last
	since int64          // when the operation that is about to start was queued; 0: it was not
	epoch uint64         // in which the latest operation ran
	last  error          // of the operation that failed last
}

// Open has t record operations of a group, which has this rank in a slot and ranks of the job in all
// of them.
func (t *Track) Open(rec *flight.Recorder, id uint32, slot int, ranks []int) {
	t.id, t.rec = id, rec
	rec.AddGroup(id, slot, ranks)
}

// Queued says when the operation that is about to start was queued, by the recorder's clock; 0: it
// was not.
func (t *Track) Queued(since int64) { t.since = since }

// Begin records that run's current call starts, or starts again, as operation number of the group
// in the view epoch, with ranks of the job in its slots.
func (t *Track) Begin(run *exec.Runner, epoch, number uint64, ranks []int) {
	tpl := &t.tpl
	if b := run.Bound(); b == nil || b.Epoch != epoch {
		t.template(run, epoch, number, ranks)
	} else if tpl = &b.Record; tpl.Queued != 0 || t.since != 0 {
		tpl.Queued = t.queued()
	}
	t.epoch = epoch
	t.cur = t.rec.Begin(tpl, number)
}

// queued is how long the operation that is about to start was queued, for its record.
func (t *Track) queued() (n uint16) {
	if t.since != 0 {
		n, t.since = flight.QueuedSince(t.since), 0
	}
	return n
}

// template describes the current call for the recorder.
func (t *Track) template(run *exec.Runner, epoch, number uint64, ranks []int) {
	c := run.Call()
	root := c.Root
	if root < len(ranks) {
		root = ranks[root]
	}
	call := flight.Pack(c.Kind, c.DType, c.Op, collectives.Auto, root)
	count := c.Token(number, collectives.Auto).Count
	t.tpl = flight.Template(t.id, epoch, call, count, uint64(c.Bytes(len(ranks))))
	t.tpl.Queued = t.queued()
	if b := run.Bound(); b != nil { // it was bound in an earlier view
		t.tpl.Call = t.tpl.Call.With(b.Algo())
		b.Record, b.Epoch = t.tpl, epoch
	}
}

// Keep gives a call that has just been bound its record.
func (t *Track) Keep(b *exec.Bound) { b.Record, b.Epoch = t.tpl, t.epoch }

// Chosen notes how the operation is done, once that is known.
func (t *Track) Chosen(a collectives.Algo) {
	t.tpl.Chosen(a)
	t.cur.Chosen(a)
}

// Awaits notes for whom of the job the operation that runs sleeps: for whoever reads the file of a
// killed rank.
func (t *Track) Awaits(rank int) {
	if t.running() {
		t.cur.Awaited = uint32(rank) + 1
	}
}

func (t *Track) running() bool {
	return t.cur != nil && t.cur.State == flight.Running && t.cur.Group == t.id
}

// End records how the operation ended, unless its failure has been recorded.
func (t *Track) End(o flight.Outcome) {
	if t.cur.State == flight.Running {
		t.rec.End(t.cur, o)
	}
}

// Failed records that operation number failed with err, which o sums up, perhaps before it began.
func (t *Track) Failed(number uint64, o flight.Outcome, err error) {
	t.last = err
	if t.running() && t.cur.Number == number {
		t.rec.End(t.cur, o)
	} else {
		t.rec.Count(o)
	}
}

// A Message is a Send or Recv.
type Message struct {
	Kind  collectives.Kind // flight.Send or flight.Recv
	Rank  int              // of the job; negative: any
	DType kernels.DType
	Count int // elements
	Tag   int
}

// BeginMessage records that a message starts in the view epoch.
func (t *Track) BeginMessage(epoch uint64, m Message, async bool) *flight.Record {
	tpl := flight.Template(t.id, epoch, flight.Pack(m.Kind, m.DType, 0, collectives.Auto, m.Rank), uint64(m.Count),
		uint64(m.Count*m.DType.Size()))
	if async {
		tpl.Flags = flight.Async
	}
	return t.rec.Begin(&tpl, uint64(int64(m.Tag)))
}

// EndMessage records how a message ended.
func (t *Track) EndMessage(r *flight.Record, o flight.Outcome) { t.rec.End(r, o) }

// latest returns the record of operation number, if it is the latest.
func (t *Track) latest(number uint64) (r flight.Record, ok bool) {
	if t.cur == nil || t.cur.Group != t.id || t.cur.Number != number {
		return r, false
	}
	return *t.cur, true
}

// spellIn is exec.Spell with the root as a rank of the job, of which ranks are in the group's slots.
func spellIn(t p2p.Token, ranks []int) string {
	c := flight.Call(t.Call)
	if r := c.Root(); t != exec.EnterToken && r >= 0 && r < len(ranks) {
		c = flight.Pack(c.Kind(), c.DType(), c.Reduction(), c.Algorithm(), ranks[r])
	}
	return exec.Spell(p2p.Token{Seq: t.Seq, Call: uint64(c), Count: t.Count})
}
