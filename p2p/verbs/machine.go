package verbs

import (
	"fmt"
	"slices"
)

// stage is how far a lane has come at one end. The dialler's goes through making, proposed,
// connecting, probing, shown and up; the acceptor's through connecting, accepted, probing, shown
// and up.
type stage uint8

const (
	making     stage = iota // a task makes its objects
	proposed                // the peer is asked for its end
	connecting              // a task connects the queue pairs, and at the acceptor makes them before
	accepted                // the dialler is told
	probing                 // requests of this end are under way, which show that data passes
	shown                   // they have passed; the dialler waits until those of the acceptor have, too
	up                      // frames are sent over it, or over one that has followed it
)

// busy reports whether a task uses the lane.
func (s stage) busy() bool { return s == making || s == connecting }

// course is what a machine knows of a lane.
type course struct {
	gen    uint64
	stage  stage
	told   bool // the peer knows of it
	agreed bool // the peer sends frames over it, or has
	ends   bool // the peer has said where its frames end, and the newer lane's begin
	passed bool // that has been read
	idle   bool // this end has left it: it has passed, and nothing of this end is under way
	left   bool // the peer has
	down   bool // the peer has given it up, and said what it has taken
	again  bool // what the peer has not taken is being sent again over TCP
}

// machine is one end of a link's lanes as a state machine, without clock, goroutines or I/O. The
// link carries out its acts, in their order, before anything else happens.
//
// In each direction, frames go over TCP or over a ring at any time. There are at most two lanes. As
// long as the newer one is not up, it is an attempt, and the older one carries frames. When both
// ends have shown that data passes the newer one, the acceptor and then the dialler say where their
// frames in the older ring end, and go on in the newer one. A lane that has been followed is closed
// when both ends have left it. If the older lane fails, the newer one is made all the same. If the
// newer one fails after an end has gone over to it, both are given up.
type machine struct {
	dialler bool
	gen     uint64   // of the newest lane there has been
	lanes   []course // the older one first
	lost    []course // given up, with frames that the peer may not have taken, the oldest first
	tx, rx  uint64   // the lane that frames are sent over, and read from; 0: TCP
	owed    bool     // the peer has to be told that frames go on in the ring of tx
	wanted  bool     // the dialler is to make a better lane beside the one that is up
	acts    []act
}

// verb is what the link does for a machine.
type verb uint8

const (
	doMake    verb = iota // make the objects of a lane, of the acceptor for the proposal that has come
	doConnect             // connect them with those of the acceptance that has come
	doProbe               // show that data passes
	doTell                // send a control frame
	doEnd                 // note where the peer's frames in the ring end, by the frame that has come
	doResend              // send again over TCP what the peer has not taken, then call resent
	doClose               // close its objects when no task uses them
)

// act is a task for the link.
type act struct {
	do       verb
	gen      uint64 // of the lane
	kind     uint8  // doTell: of the frame
	follows  uint64 // frameReady: the lane whose ring has the frames before; 0: those went over TCP
	followed bool   // frameDown: what is in the ring was read up to where the newer lane's frames begin
	beside   bool   // doMake: another lane is up
	stage    stage  // doClose and frameDown: that the lane had come to
}

func (m *machine) do(a act) { m.acts = append(m.acts, a) }

func (m *machine) tell(kind uint8, gen uint64) { m.do(act{do: doTell, gen: gen, kind: kind}) }

// find returns a lane, nil if it is not there any more.
func (m *machine) find(gen uint64) *course {
	for i := range m.lanes {
		if m.lanes[i].gen == gen {
			return &m.lanes[i]
		}
	}
	return nil
}

// newest returns the newest lane, nil if there is none.
func (m *machine) newest() *course {
	if len(m.lanes) == 0 {
		return nil
	}
	return &m.lanes[len(m.lanes)-1]
}

// use returns the lane that is in use or, as long as none is, the only one; nil if there is none.
func (m *machine) use() *course {
	c := m.newest()
	if len(m.lanes) == 2 && c.stage < up {
		c = &m.lanes[0]
	}
	return c
}

// sentOver reports whether frames were sent over a lane that the peer may not have taken.
func (m *machine) sentOver(gen uint64) bool {
	c := m.find(gen)
	return c != nil && c.stage == up || slices.ContainsFunc(m.lost, func(c course) bool { return c.gen == gen })
}

// leaving returns the lane that this end may leave when nothing of it is under way any more, nil if
// there is none.
func (m *machine) leaving() *course {
	if len(m.lanes) == 2 && m.newest().stage == up && m.lanes[0].passed && !m.lanes[0].idle {
		return &m.lanes[0]
	}
	return nil
}

// steady reports whether one lane carries frames both ways, and nothing is lost.
func (m *machine) steady() bool {
	return len(m.lanes) == 1 && m.lanes[0].stage == up && m.tx == m.rx && m.tx == m.lanes[0].gen &&
		len(m.lost) == 0 && !m.owed
}

// settle does what the state allows, after every step.
func (m *machine) settle() {
	for len(m.lost) > 0 && m.lost[0].down && !m.lost[0].again {
		c := &m.lost[0]
		if !c.left {
			c.again = true
			m.do(act{do: doResend, gen: c.gen})
			break
		}
		m.lost = slices.Delete(m.lost, 0, 1)
	}
	c := m.newest()
	if c != nil && c.stage == shown && (!m.dialler || c.agreed) && len(m.lost) == 0 {
		c.stage = up
		m.do(act{do: doTell, gen: c.gen, kind: frameReady, follows: m.tx})
		m.tx, m.owed, m.wanted = c.gen, false, false
	}
	if m.owed && len(m.lost) == 0 {
		m.owed = false
		m.tell(frameReady, m.tx)
	}
	switch {
	case !m.dialler:
	case len(m.lanes) == 0:
		m.wanted = false
		m.begin(false)
	case m.wanted && m.steady():
		m.begin(true)
	}
}

// begin begins to make a lane.
func (m *machine) begin(beside bool) {
	m.gen++
	m.lanes = append(m.lanes, course{gen: m.gen})
	m.do(act{do: doMake, gen: m.gen, beside: beside})
}

// want says that a lane beside the one in use could be better.
func (m *machine) want() {
	if m.dialler {
		m.wanted = true
	} else if m.steady() {
		m.tell(frameWish, m.tx)
	}
	m.settle()
}

// made says that the objects of a lane of the dialler are there.
func (m *machine) made(gen uint64) {
	c := m.find(gen)
	c.stage, c.told = proposed, true
	m.tell(frameProposal, gen)
}

// connected says that the queue pairs of a lane are.
func (m *machine) connected(gen uint64) {
	c := m.find(gen)
	if m.dialler {
		c.stage = probing
		m.do(act{do: doProbe, gen: gen})
		return
	}
	c.stage = accepted
	m.tell(frameAcceptance, gen)
}

// proved says that requests of this end have passed a lane.
func (m *machine) proved(gen uint64) {
	m.find(gen).stage = shown
	if m.dialler {
		m.tell(frameShown, gen)
	}
	m.settle()
}

// fail gives up a lane.
func (m *machine) fail(gen uint64) {
	m.drop(gen)
	m.settle()
}

// refuse gives up a lane that cannot be made, or connected. The dialler is told why before.
func (m *machine) refuse(gen uint64) {
	m.find(gen).stage = accepted // of which no task is under way
	if !m.dialler {
		m.tell(frameRefusal, gen)
	}
	m.fail(gen)
}

// passedEnd says that frames of the lane that they are read from end here.
func (m *machine) passedEnd() {
	m.find(m.rx).passed = true
	m.rx = m.newest().gen
}

// drained says that nothing of this end is under way on the lane that it is leaving.
func (m *machine) drained() {
	c := m.leaving()
	c.idle = true
	m.tell(frameLeft, c.gen)
	m.retire(c)
	m.settle()
}

// resent says that what the peer had not taken of the oldest lost lane was sent again.
func (m *machine) resent() {
	m.lost = slices.Delete(m.lost, 0, 1)
	m.owed = m.tx != 0
	m.settle()
}

// retire closes a lane that both ends have left.
func (m *machine) retire(c *course) {
	if c.idle && c.left {
		m.do(act{do: doClose, gen: c.gen, stage: c.stage})
		m.lanes = slices.Delete(m.lanes, 0, 1)
	}
}

// drop gives up a lane, and those that cannot do without it.
func (m *machine) drop(gen uint64) {
	i := slices.IndexFunc(m.lanes, func(c course) bool { return c.gen == gen })
	if i < 0 {
		return
	}
	if i == 1 && m.lanes[1].stage == up { // frames have ended in the older one
		m.drop(m.lanes[0].gen)
		i = 0
	}
	c := m.lanes[i]
	m.lanes = slices.Delete(m.lanes, i, i+1)
	if c.told {
		m.do(act{do: doTell, gen: gen, kind: frameDown, followed: c.passed, stage: c.stage})
	}
	if m.rx == gen {
		m.rx = 0
	}
	if m.tx == gen {
		m.tx = 0
	}
	if c.stage == up && !c.left {
		m.lost = append(m.lost, c)
	}
	m.do(act{do: doClose, gen: gen, stage: c.stage})
	if n := m.newest(); n != nil && n.stage == making { // another one need not wait for a pause
		m.drop(n.gen)
	}
}

// errStage is the error of a control frame that may not come now.
func errStage(kind uint8, gen uint64, at string) error {
	return fmt.Errorf("frame of kind %d about lane %d %s", kind, gen, at)
}

// heard takes a control frame about lanes. Follows and followed are those of act. The error is a
// violation of the protocol.
func (m *machine) heard(kind uint8, gen, follows uint64, followed bool) error {
	asks := kind == frameProposal
	switch {
	case m.dialler && (asks || kind == frameShown) ||
		!m.dialler && (kind == frameAcceptance || kind == frameRefusal || kind == frameWish):
		return errStage(kind, gen, "from the wrong end")
	case asks == (gen <= m.gen):
		return errStage(kind, gen, fmt.Sprintf("after %d", m.gen))
	}
	c := m.find(gen)
	wrong := func() error { return errStage(kind, gen, fmt.Sprintf("in stage %d", c.stage)) }
	switch {
	case asks:
		if len(m.lanes) > 0 && (len(m.lanes) > 1 || m.lanes[0].stage < up || m.rx != m.lanes[0].gen) {
			return errStage(kind, gen, fmt.Sprintf("while lane %d is not in use", m.gen))
		}
		m.gen = gen
		m.lanes = append(m.lanes, course{gen: gen, stage: connecting, told: true})
		m.do(act{do: doMake, gen: gen, beside: len(m.lanes) > 1})
	case kind == frameDown:
		m.drop(gen)
		if i := slices.IndexFunc(m.lost, func(c course) bool { return c.gen == gen }); i >= 0 {
			m.lost[i].down, m.lost[i].left = true, m.lost[i].left || followed
		}
	case kind == frameLeft:
		if i := slices.IndexFunc(m.lost, func(c course) bool { return c.gen == gen }); i >= 0 {
			m.lost[i].down, m.lost[i].left = true, true
		}
		if c == nil {
			break
		}
		if len(m.lanes) < 2 || c != &m.lanes[0] || m.newest().stage < up || c.left {
			return wrong()
		}
		c.left = true
		m.retire(c)
	case kind == frameReady:
		return m.ready(c, gen, follows)
	case c == nil: // it is given up here, and the peer will know
	case kind == frameAcceptance:
		if c.stage != proposed {
			return wrong()
		}
		c.stage = connecting
		m.do(act{do: doConnect, gen: gen})
	case kind == frameRefusal:
		if c.stage != proposed {
			return wrong()
		}
		m.drop(gen)
	case kind == frameShown:
		if c.stage != accepted {
			return wrong()
		}
		c.stage = probing
		m.do(act{do: doProbe, gen: gen})
	case kind == frameWish:
		m.wanted = m.wanted || c == m.use() && c.stage == up
	}
	m.settle()
	return nil
}

// ready takes frameReady.
func (m *machine) ready(c *course, gen, follows uint64) error {
	old := m.find(follows)
	switch {
	case c == nil:
		if old != nil && m.rx == follows { // its frames end, and the others are lost
			m.drop(follows)
		}
		m.settle()
		return nil
	case m.dialler && c.stage < shown || !m.dialler && c.stage < up || follows == 0 && m.rx != 0 ||
		old != nil && (m.rx != follows || old.ends || len(m.lanes) < 2 || old != &m.lanes[0]):
		return errStage(frameReady, gen, fmt.Sprintf("after %d in stage %d", follows, c.stage))
	}
	c.agreed = true
	switch {
	case follows == 0:
		m.rx = gen
	case old != nil:
		old.ends = true
		m.do(act{do: doEnd, gen: follows})
	}
	m.settle()
	return nil
}
