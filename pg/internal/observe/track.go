package observe

import (
	"tutti/collectives"
	"tutti/kernels"
	"tutti/p2p"
	"tutti/pg/flight"
	"tutti/pg/internal/exec"
)

// A Track records the operations of a group in the flight recorder. With the proxy's lock.
type Track struct {
	id    uint32 // of the group
	rec   *flight.Recorder
	entry *flight.GroupEntry
	tpl   flight.Record  // of the latest operation that was not bound
	cur   *flight.Record // of the running or the last operation
	since int64          // when the next operation was queued; 0: it was not
	epoch uint64         // of the latest operation
	last  error          // of the last operation that failed
	// Uncounted: the program has not called the operations that run now. Those that succeed are not
	// in the totals.
	Uncounted bool
}

// Open makes t record operations of a group in which this rank has slot, and ranks are the job's
// ranks of all slots.
func (t *Track) Open(rec *flight.Recorder, id uint32, slot int, ranks []int) {
	t.id, t.rec, t.entry = id, rec, rec.AddGroup(id, slot, ranks)
}

// Close allows the recorder to forget the group, in which no operation begins any more.
func (t *Track) Close() { t.entry.Close() }

// Queued sets when the next operation was queued, by the recorder's clock; 0: it was not.
func (t *Track) Queued(since int64) { t.since = since }

// Begin records that run's current call starts, or starts again, as operation number of the group
// in the view epoch; ranks are the job's ranks of its slots.
func (t *Track) Begin(run *exec.Runner, epoch, number uint64, ranks []int) {
	tpl := &t.tpl
	if b := run.Bound(); b == nil || b.Epoch != epoch || run.Whole() {
		t.template(run, epoch, number, ranks)
	} else if tpl = &b.Record; tpl.Queued != 0 || t.since != 0 {
		tpl.Queued = t.queued()
	}
	t.epoch = epoch
	t.cur = t.rec.Begin(tpl, number)
}

// queued returns how long the next operation was queued, in the record's unit.
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
	switch {
	case c.For != 0:
		call = c.For
	case run.Whole():
		call = call.InPackets()
	}
	count := c.Token(number, collectives.Auto).Count
	t.tpl = flight.Template(t.id, epoch, call, count, uint64(c.Bytes(len(ranks))))
	t.tpl.Queued = t.queued()
	if b := run.Bound(); b != nil && !run.Whole() { // bound in an earlier view
		t.tpl.Call = t.tpl.Call.With(b.Algo())
		b.Record, b.Epoch = t.tpl, epoch
	}
}

// Keep stores the record of a call that has just been bound in it.
func (t *Track) Keep(b *exec.Bound) { b.Record, b.Epoch = t.tpl, t.epoch }

// Chosen records the algorithm of the operation, once it is known.
func (t *Track) Chosen(a collectives.Algo) {
	t.tpl.Chosen(a)
	t.cur.Chosen(a)
}

// Awaits records the rank of the job that the running operation waits for, for readers of a killed
// rank's file.
func (t *Track) Awaits(rank int) {
	if t.running() {
		t.cur.Awaited = uint32(rank) + 1
	}
}

func (t *Track) running() bool {
	return t.cur != nil && t.cur.State == flight.Running && t.cur.Group == t.id
}

// End records the outcome of the operation, unless its failure has been recorded.
func (t *Track) End(o flight.Outcome) {
	switch {
	case t.cur.State != flight.Running:
	case t.Uncounted && o == flight.OK:
		t.rec.EndUncounted(t.cur)
	default:
		t.rec.End(t.cur, o)
	}
}

// Failed records that operation number failed with err, whose kind is o, possibly before it began.
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

// BeginMessage records the start of a message in the view epoch.
func (t *Track) BeginMessage(epoch uint64, m Message, async bool) *flight.Record {
	tpl := flight.Template(t.id, epoch, flight.Pack(m.Kind, m.DType, 0, collectives.Auto, m.Rank), uint64(m.Count),
		uint64(m.Count*m.DType.Size()))
	if async {
		tpl.Flags = flight.Async
	}
	return t.rec.Begin(&tpl, uint64(int64(m.Tag)))
}

// EndMessage records the outcome of a message.
func (t *Track) EndMessage(r *flight.Record, o flight.Outcome) { t.rec.End(r, o) }

// latest returns the record of operation number, if it is the latest.
func (t *Track) latest(number uint64) (r flight.Record, ok bool) {
	if t.cur == nil || t.cur.Group != t.id || t.cur.Number != number {
		return r, false
	}
	return *t.cur, true
}

// spellIn is exec.Spell with the root as a rank of the job; ranks are the job's ranks of the
// group's slots.
func spellIn(t p2p.Token, ranks []int) string {
	c := flight.Call(t.Call)
	if r := c.Root(); t != exec.EnterToken && r >= 0 && r < len(ranks) {
		c = flight.Pack(c.Kind(), c.DType(), c.Reduction(), c.Algorithm(), ranks[r])
	}
	return exec.Spell(p2p.Token{Seq: t.Seq, Call: uint64(c), Count: t.Count})
}
