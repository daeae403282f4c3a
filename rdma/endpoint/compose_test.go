package endpoint

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"
	"testing"

	"tutti/rdma"
	"tutti/rdma/queue"
)

// joint is a world whose sides write to each other over sets of package queue: the machine and the
// ledger as they are, between them what the users of both packages do. A set that has failed has
// its connection fail, the queue pairs of a generation that is retired go to the state Failed, the
// set is drained and closed later, and the next generation has another set of the same poller.
type joint struct {
	*world
	t    testing.TB
	ends [2]jointEnd
	left jointFaults
	err  error
}

// jointFaults are how many may happen, beside batches.
type jointFaults struct {
	faults
	fail, batches [2]uint8 // requests that fail although the peer is there; batches
}

// jointEnd is what a process has beside its machine.
type jointEnd struct {
	device  *jointDevice
	poller  *queue.Poller
	present *jointSet
	retired []*jointSet // that were not drained
	batches []*jointBatch
	placed  int // requests that the peers have placed, of the present process
}

// jointSet is a set of a generation.
type jointSet struct {
	set    *queue.Set
	qp     *jointQP
	failed bool // Config.Failed was called
}

// jointBatch is a batch under way.
type jointBatch struct {
	t    *queue.Transfer
	qp   *jointQP
	from uint64 // its memory
	done int    // requests that were placed
	to   end    // of the queue pairs that its own were connected with
}

// Shape of what is explored: a batch fills the send queue.
const (
	jointDepth = 2
	jointOps   = 2
)

func newJoint(t testing.TB, may jointFaults) *joint {
	j := &joint{world: newWorld(), t: t, left: may}
	j.say = j.did
	for i := range j.ends {
		j.start(i)
	}
	return j
}

// start begins the life of a process.
func (j *joint) start(i int) {
	e := &j.ends[i]
	*e = jointEnd{device: &jointDevice{}}
	var err error
	if e.poller, err = queue.NewPoller(e.device, 8*jointDepth); err != nil {
		j.t.Fatal(err)
	}
}

func (j *joint) bad(i int, format string, args ...any) {
	if j.err == nil {
		j.err = fmt.Errorf("%s: "+format, append([]any{names[i]}, args...)...)
	}
}

// did follows an action of side i's machine, before the world does.
func (j *joint) did(i int, a action) {
	e := &j.ends[i]
	switch a := a.(type) {
	case prepare:
		if j.sides[i].weak {
			return
		}
		if e.present != nil {
			j.bad(i, "%v, and there is a set", a)
			return
		}
		s := &jointSet{qp: &jointQP{device: e.device, number: uint32(10 * (i + 1))}} // the number repeats
		var err error
		s.set, err = queue.New(e.poller, []rdma.QP{s.qp}, queue.Config{Timeout: -1, Chunk: 1,
			Failed: func(error) { s.failed = true }})
		if err != nil {
			j.bad(i, "%v", err)
			return
		}
		e.present = s
	case join:
		if !j.sides[i].weak {
			e.present.qp.state = rdma.StateReady
		}
	case retire:
		_ = e.present.qp.Fail()
		e.retired = append(e.retired, e.present)
		e.present = nil
	}
}

// submit begins a batch of side i, over the present connection.
func (j *joint) submit(i int) {
	e := &j.ends[i]
	b := queue.Batch{}
	from := uint64(1000 * (1 + len(e.batches)))
	for k := range uint64(jointOps) {
		b.Ops = append(b.Ops, queue.Op{Kind: rdma.Write, Local: from + 10*k, Remote: 10 * k, Len: 1})
	}
	t, err := e.present.set.Submit(context.Background(), &b)
	var full *rdma.QueueFullError
	switch {
	case err == nil:
		e.batches = append(e.batches, &jointBatch{t: t, qp: e.present.qp, from: from, to: j.sides[i].joined})
	case errors.Is(err, queue.ErrFailed) == !e.present.failed && !errors.As(err, &full):
		j.bad(i, "submit: %v", err)
	}
}

// answers reports whether the queue pairs of side i reach those that they are connected with.
func (j *joint) answers(i int) bool {
	s, o := &j.sides[i], &j.sides[1-i]
	return s.live && o.live && s.joined == end{o.m.session, 2 * o.generation} &&
		o.joined == end{s.m.session, 2 * s.generation}
}

// complete ends the oldest request of side i's present queue pair.
func (j *joint) complete(i int, status rdma.Status) {
	q := j.ends[i].present.qp
	if status == rdma.Success {
		for _, b := range j.ends[i].batches {
			if at := q.sends[0].Segments[0].Address; b.qp == q && at >= b.from && at < b.from+10*jointOps {
				b.done++
				if o := &j.sides[1-i]; b.to != (end{o.m.session, 2 * o.generation}) {
					j.bad(i, "a request for %v is placed by generation %d of %x", b.to, o.generation, o.m.session)
				}
			}
		}
		j.ends[1-i].placed++
	}
	q.end(status)
}

// moves returns what can happen next.
func (j *joint) moves() (all []jointMove) {
	moves := j.world.moves()
	all = make([]jointMove, 0, 16+len(moves))
	try := func(is what, spend *uint8, act func()) {
		if spend == nil || *spend > 0 {
			all = append(all, jointMove{is, func() {
				if spend != nil {
					*spend--
				}
				act()
			}})
		}
	}
	for _, m := range moves {
		var spend *uint8
		if m.spend != nil {
			spend = m.spend(&j.left.faults)
		}
		try(m.what, spend, func() { m.act(j.world) })
	}
	for i := range j.sides {
		e := &j.ends[i]
		if s := e.present; s != nil && j.sides[i].m.phase == connected {
			// Submit waits when it has posted a part.
			if n := s.set.Usage()[0].InUse; n == 0 || n == jointDepth && len(e.device.ready) == 0 {
				try(does(i, " submits"), &j.left.batches[i], func() { j.submit(i) })
			}
			if len(s.qp.sends) > 0 && s.qp.state == rdma.StateReady {
				if j.answers(i) {
					try(does(i, "'s request is placed"), nil, func() { j.complete(i, rdma.Success) })
					try(does(i, "'s request fails"), &j.left.fail[i], func() { j.complete(i, rdma.RetryExceeded) })
				} else if j.sides[1-i].joined != (end{}) || !j.sides[1-i].live { // else it is repeated
					try(does(i, "'s request has no answer"), nil, func() { j.complete(i, rdma.RetryExceeded) })
				}
			}
			if s.failed {
				try(does(i, "'s connection fails"), nil, func() { j.step(i, broken{j.sides[i].generation}, nil) })
			}
		}
		if len(e.device.ready) > 0 {
			try(does(i, " polls"), nil, func() {
				if _, err := e.poller.Poll(); err != nil {
					j.bad(i, "%v", err)
				}
			})
		}
		for k, s := range e.retired {
			try(does(i, fmt.Sprintf(" drains a set, of %d", len(e.retired))), nil, func() {
				e.retired = slices.Delete(e.retired, k, k+1)
				if err := errors.Join(s.set.Drain(context.Background()), s.set.Close()); err != nil {
					j.bad(i, "%v", err)
				}
			})
		}
	}
	return all
}

type jointMove struct {
	what what
	act  func()
}

// follow takes note of a restart, which is a move of the world.
func (j *joint) follow(lives [2]uint64) {
	for i := range j.sides {
		if j.sides[i].life != lives[i] {
			j.start(i)
		}
	}
}

// check returns the first rule that does not hold.
func (j *joint) check() error {
	if err := errors.Join(j.err, j.world.err); err != nil {
		return err
	}
	for i := range j.ends {
		e := &j.ends[i]
		sets := slices.Clone(e.retired)
		if (e.present != nil) != j.sides[i].live {
			j.bad(i, "queue pairs: %t, a set: %t", j.sides[i].live, e.present != nil)
		} else if e.present != nil {
			sets = append(sets, e.present)
		}
		for _, s := range sets {
			u := s.set.Usage()[0]
			if u.InUse != u.Recorded+u.Reserved || u.InUse > jointDepth || u.InUse < len(s.qp.sends) {
				j.bad(i, "%+v, and the device has %d requests", u, len(s.qp.sends))
			}
		}
		for _, b := range e.batches {
			if !b.t.Ended() {
				continue
			}
			if b.t.Err() == nil && b.done != jointOps {
				j.bad(i, "a batch has ended well, and %d of %d requests were placed", b.done, jointOps)
			}
			for _, r := range b.qp.sends {
				if at := r.Segments[0].Address; at >= b.from && at < b.from+10*jointOps {
					j.bad(i, "a batch has ended with %v, and its memory is in use", b.t.Err())
				}
			}
		}
		if len(e.device.ready) > 4*jointDepth {
			j.bad(i, "%d completions", len(e.device.ready))
		}
	}
	return j.err
}

// print appends everything that the future depends on.
func (j *joint) print(b []byte) []byte {
	b = j.left.key(j.key(b))
	b = append(append(b, j.left.fail[:]...), j.left.batches[:]...)
	flag := func(f bool) byte {
		if f {
			return 1
		}
		return 0
	}
	for i := range j.ends {
		e := &j.ends[i]
		sets := slices.Clone(e.retired)
		b = append(b, 0xfe, flag(e.present != nil), byte(len(sets)))
		if e.present != nil {
			sets = append(sets, e.present)
		}
		for _, s := range sets {
			u := s.set.Usage()[0]
			b = append(b, byte(s.qp.state), byte(len(s.qp.sends)), byte(u.InUse), flag(s.failed), flag(u.Failed),
				flag(s.set.Err() != nil))
			for _, x := range e.batches {
				if x.qp == s.qp {
					b = append(b, byte(x.done), flag(x.t.Ended()), flag(x.t.Ended() && x.t.Err() != nil))
				}
			}
		}
		for _, c := range e.device.ready { // in their order, with the set that each is of
			at := slices.IndexFunc(sets, func(s *jointSet) bool { return s.qp == c.of })
			b = append(b, byte(at), byte(c.Status))
			if at >= 0 {
				b = binary.AppendUvarint(b, c.of.posted-c.number)
			}
		}
	}
	return b
}

// rest has everything happen that is under way, without faults. Then both sides need a connection,
// and a batch of each is placed.
func (j *joint) rest() error {
	j.left = jointFaults{}
	quiet := func() error {
		for n := 0; ; n++ {
			if n > 1000 {
				return errors.New("no end")
			}
			// Packets first: what the world does without faults.
			j.settle()
			all := j.moves()
			all = slices.DeleteFunc(all, func(m jointMove) bool { return m.act == nil })
			if err := j.check(); err != nil || len(all) == 0 {
				return err
			}
			all[0].act()
			if err := j.check(); err != nil {
				return fmt.Errorf("%s: %w", all[0].what, err)
			}
		}
	}
	if err := quiet(); err != nil {
		return fmt.Errorf("at rest: %w", err)
	}
	j.use()
	for i := range j.ends {
		j.left.batches[i] = 1
	}
	if err := quiet(); err != nil {
		return fmt.Errorf("in use: %w", err)
	}
	for i := range j.ends {
		e := &j.ends[i]
		for k, b := range e.batches {
			if !b.t.Ended() {
				return fmt.Errorf("%s: batch %d has not ended", names[i], k)
			}
		}
		if n := len(e.batches); n == 0 || e.batches[n-1].t.Err() != nil {
			return fmt.Errorf("%s: the last of %d batches was not placed", names[i], n)
		}
		if u := e.present.set.Usage()[0]; u.InUse != 0 || u.Degraded || u.Failed {
			return fmt.Errorf("%s: at rest the ledger has %+v", names[i], u)
		}
	}
	return nil
}

// TestMachineAndLedger visits all interleavings of two ends, the network, their devices and who
// polls and drains. Every state comes to rest, and then a batch of each side is placed.
func TestMachineAndLedger(t *testing.T) {
	one := [2]uint8{1, 1}
	for _, c := range []struct {
		name string
		may  jointFaults
		long bool
	}{
		{"no faults", jointFaults{faults{open: one}, [2]uint8{}, one}, false},
		{"a request fails", jointFaults{faults{open: one}, [2]uint8{1, 0}, one}, false},
		{"a request fails, and the connection is made again", jointFaults{faults{open: [2]uint8{2, 1}},
			[2]uint8{1, 0}, [2]uint8{2, 1}}, true},
		{"a loss", jointFaults{faults{open: one, lose: 1}, [2]uint8{}, one}, false},
		{"a restart", jointFaults{faults{open: one, restart: [2]uint8{1, 0}}, [2]uint8{}, one}, false},
		{"a loss, a request fails and a restart", jointFaults{faults{open: one, lose: 1, restart: [2]uint8{1, 0}},
			[2]uint8{0, 1}, one}, true},
	} {
		if c.long && (testing.Short() || raceEnabled) {
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			states, moves := exploreJoint(t, c.may)
			t.Logf("%d states, %d moves", states, moves)
		})
	}
}

// exploreJoint visits every state. Sets cannot be copied: each path is gone again from the
// beginning.
func exploreJoint(t *testing.T, may jointFaults) (states, moves int) {
	seed, seen := maphash.MakeSeed(), map[uint64]bool{}
	var path []int // of the moves taken
	var of []int   // how many there were
	var buf []byte
	var story []what
	for {
		j := newJoint(t, may)
		story = story[:0]
		take := func(m jointMove) {
			moves++
			story = append(story, m.what)
			lives := [2]uint64{j.sides[0].life, j.sides[1].life}
			m.act()
			j.follow(lives)
		}
		for _, k := range path { // all but the last were checked before
			take(j.moves()[k])
		}
		err := j.check()
		for err == nil {
			buf = j.print(buf[:0])
			key := maphash.Bytes(seed, buf)
			if seen[key] {
				break
			}
			seen[key] = true
			all := j.moves()
			if len(all) == 0 {
				break
			}
			path, of = append(path, 0), append(of, len(all))
			take(all[0])
			err = j.check()
		}
		if err == nil {
			err = j.rest()
		}
		if err != nil {
			t.Fatalf("%v, after %v", err, story)
		}
		for len(path) > 0 && path[len(path)-1] == of[len(of)-1]-1 {
			path, of = path[:len(path)-1], of[:len(of)-1]
		}
		if len(path) == 0 {
			return len(seen), moves
		}
		if len(seen) > 1_000_000 {
			t.Fatalf("more than %d states", len(seen))
		}
		path[len(path)-1]++
	}
}

// jointDevice is a device in memory that does nothing by itself.
type jointDevice struct {
	rdma.Device
	ready []jointCompletion
}

type jointCompletion struct {
	rdma.Completion
	of     *jointQP
	number uint64 // of the request
}

func (d *jointDevice) Name() string                               { return "joint" }
func (d *jointDevice) NewCQ(depth int, _ func()) (rdma.CQ, error) { return &jointCQ{d, depth}, nil }

type jointCQ struct {
	d     *jointDevice
	depth int
}

func (c *jointCQ) Poll(out []rdma.Completion) (int, error) {
	n := min(len(out), len(c.d.ready))
	for i, x := range c.d.ready[:n] {
		out[i] = x.Completion
	}
	c.d.ready = c.d.ready[n:]
	return n, nil
}
func (c *jointCQ) Arm() error   { return nil }
func (c *jointCQ) Depth() int   { return c.depth }
func (c *jointCQ) Close() error { return nil }

// jointQP keeps what was posted.
type jointQP struct {
	device *jointDevice
	number uint32
	state  rdma.State
	sends  []rdma.SendRequest
	posted uint64
}

func (q *jointQP) Number() uint32 { return q.number }
func (q *jointQP) Limits() rdma.QPLimits {
	return rdma.QPLimits{SendDepth: jointDepth, SendSegments: 1}
}
func (q *jointQP) State() (rdma.State, error)               { return q.state, nil }
func (q *jointQP) Init(int, rdma.Access) error              { return nil }
func (q *jointQP) Connect(*rdma.Route) error                { return nil }
func (q *jointQP) PostRecv([]rdma.RecvRequest) (int, error) { return 0, nil }

func (q *jointQP) Post(chain []rdma.SendRequest) (int, error) {
	for _, r := range chain {
		r.Segments = slices.Clone(r.Segments)
		q.sends = append(q.sends, r)
		q.posted++
		if q.state == rdma.StateFailed {
			q.end(rdma.Flushed)
		}
	}
	return len(chain), nil
}

// end ends the oldest request.
func (q *jointQP) end(status rdma.Status) {
	r := q.sends[0]
	number := q.posted - uint64(len(q.sends))
	q.sends = q.sends[1:]
	if status == rdma.Success && !r.Signaled {
		return
	}
	q.device.ready = append(q.device.ready, jointCompletion{rdma.Completion{ID: r.ID, Status: status, Op: r.Op,
		QP: q.number}, q, number})
	if status != rdma.Success {
		_ = q.Fail()
	}
}

func (q *jointQP) Fail() error {
	q.state = rdma.StateFailed
	for len(q.sends) > 0 {
		q.end(rdma.Flushed)
	}
	return nil
}

func (q *jointQP) Reset() error {
	q.state, q.sends = rdma.StateReset, nil
	return nil
}

func (q *jointQP) Close() error {
	q.sends = nil
	return nil
}
