package endpoint

import "fmt"

type phase uint8

const (
	unconnected phase = iota
	connecting        // there are queue pairs, and the peer is asked
	connected
	retired // for ever
)

func (p phase) String() string {
	return [...]string{"unconnected", "connecting", "connected", "retired"}[p]
}

// doubts is the number of calls that verify a connection which the peer has made.
const doubts = 4

// machine is the state of one end of a connection. It is not safe for concurrent use, and acts only
// in step.
type machine struct {
	session uint64 // of this process
	qps     int    // of a generation, at both ends
	phase   phase
	// version counts what happened to this end. It is odd while the end is connected, and even
	// otherwise. Generation version/2 of the queue pairs is the present one, or the next one to be
	// made. It is connected once, with one generation of the peer, and never used again afterwards.
	version uint64
	offer   offer // of the present queue pairs
	with    end   // what they are connected to
	theirs  offer // and by what
	peer    end   // the peer as of its last message: requests name it, and never a version to come

	call    uint64 // number of the last call
	asking  bool   // it is unanswered
	sent    uint64 // version when its request was sent
	tries   int    // calls that failed in a row
	wanted  bool   // a caller waits
	offered bool   // a request with the present queue pairs was sent
	doubt   bool   // the connection has to be verified

	request *message // that make or connect is under way for; nil: none of the peer's
	acts    []action
}

func newMachine(session uint64, qps int) *machine { return &machine{session: session, qps: qps} }

// self returns the present version of this end.
func (m *machine) self() end { return end{m.session, m.version} }

func (m *machine) do(a action) { m.acts = append(m.acts, a) }

// step feeds the machine an event and returns its actions.
func (m *machine) step(ev event) []action {
	m.acts = nil
	switch e := ev.(type) {
	case open:
		m.open()
	case cancel:
		m.wanted = false
	case prepared:
		m.prepared(e)
	case joined:
		m.joined(e)
	case ready:
		m.ready(e)
	case replied:
		if e.call == m.call && m.asking {
			m.asking = false
			m.replied(e.reply)
		}
	case failed:
		if e.call == m.call && m.asking {
			m.asking = false
			m.failed(e)
		}
	case requested:
		m.requested(e.request)
	case broken:
		if m.phase == connected && e.generation == m.version/2 {
			m.drop()
		}
	case shut:
		m.shut()
	}
	return m.acts
}

func (m *machine) open() {
	if m.phase != unconnected && m.phase != connecting {
		return
	}
	m.wanted = true
	if m.phase == unconnected {
		m.phase, m.tries = connecting, 0
		m.do(prepare{m.version / 2})
	}
}

func (m *machine) prepared(e prepared) {
	switch {
	case e.err != nil:
		m.phase = unconnected
		m.unable(e.err, e.final)
	case m.request != nil:
		m.offer, m.phase = e.offer, connecting
		m.join(m.request)
	default:
		m.offer = e.offer
		m.ask()
	}
}

// unable tells those concerned that queue pairs cannot be made or connected: the peer, if that was
// for its request, and the callers that wait here.
func (m *machine) unable(err error, final bool) {
	if m.request != nil {
		k := busy
		if final {
			k = refused
		}
		m.reply(k, m.request, err.Error())
		m.request = nil
	}
	m.giveUp(err)
}

// giveUp ends waiting.
func (m *machine) giveUp(err error) {
	if m.wanted {
		m.wanted = false
		m.do(fail{err})
	}
}

// join connects the queue pairs with those of a request or an accepted.
func (m *machine) join(to *message) {
	m.with, m.theirs = to.from, to.offer
	m.do(join{m.version / 2, to.from, to.offer})
}

func (m *machine) joined(e joined) {
	if e.err != nil {
		m.drop()
		m.unable(e.err, e.final)
		return
	}
	m.version++
	m.phase, m.tries, m.doubt, m.offered = connected, 0, false, m.offered && m.request != nil
	m.peer = m.with
	if m.request != nil {
		m.reply(accepted, m.request, "")
		m.request = nil
	}
	m.wanted = false
	m.do(up{})
}

// drop retires the queue pairs. A call goes on: its reply may say that the peer has connected them.
func (m *machine) drop() {
	m.do(retire{m.version / 2})
	m.version = m.version&^1 + 2
	m.phase, m.doubt = unconnected, false
	m.offer, m.theirs, m.with = offer{}, offer{}, end{}
}

// ask begins a call.
func (m *machine) ask() {
	m.call++
	m.asking = true
	m.do(ask{m.call, m.tries})
}

func (m *machine) ready(e ready) {
	if e.call != m.call || !m.asking {
		return
	}
	r := &message{kind: request, from: m.self(), to: m.peer, offer: m.offer}
	switch {
	case m.phase == connecting && m.wanted:
	case m.phase == connected && (m.doubt || m.offered):
		// It names the queue pairs that these are connected with, and not those that the peer may
		// have since.
		r.to = end{m.with.session, m.with.version &^ 1}
	default: // no caller waits, or only the peer has asked
		m.asking = false
		if m.phase == connecting {
			m.drop()
		}
		return
	}
	m.sent, m.offered = m.version, true
	m.do(send{m.call, r})
}

// isPeer reports whether e has the queue pairs that those of this end are connected with.
func (m *machine) isPeer(e end) bool {
	return m.phase == connected && e.session == m.with.session && e.generation() == m.with.generation()
}

func (m *machine) replied(r *message) {
	if r.to != (end{m.session, m.sent}) {
		m.failed(failed{err: fmt.Errorf("rdma: the peer replies to %v, expected %v", r.to, end{m.session, m.sent})})
		return
	}
	switch {
	case r.kind == busy || r.kind == refused:
		m.failed(failed{err: &RefusedError{r.text, r.kind == refused}, final: r.kind == refused})
	case m.phase == connecting && r.kind == accepted:
		if len(r.offer.qps) != m.qps {
			m.failed(failed{err: m.miscounted(r), final: true})
			return
		}
		m.join(r)
	case m.phase == connecting:
		m.peer = r.from
		m.tries++
		m.ask()
	case r.kind == accepted && m.isPeer(r.from):
		m.doubt, m.offered = false, false
	case m.phase != connected:
	case m.sent == m.version:
		// The request was sent by this connected end, so the reply was made after the peer's own
		// request which connected it: the peer is not at the other end any more.
		m.drop()
		m.peer = r.from
	default:
		// One of this reply and the peer's request, which has come first, is of a process that has
		// ended. It is not known which.
		m.doubt, m.tries = true, 0
		m.ask()
	}
}

func (m *machine) failed(e failed) {
	m.tries++
	switch {
	case m.phase == unconnected:
	case m.phase == connecting && (e.final || !m.wanted):
		m.drop()
		m.giveUp(e.err)
	case m.phase == connecting:
		m.ask()
	case e.final || m.tries > doubts:
		// The peer has connected these queue pairs, and a call that fails proves nothing against
		// it.
		m.doubt, m.offered = false, false
	default:
		m.doubt = true
		m.ask()
	}
}

func (m *machine) miscounted(r *message) error {
	return fmt.Errorf("rdma: %d queue pairs there and %d here: both ends need the same number", len(r.offer.qps), m.qps)
}

// reply answers a request.
func (m *machine) reply(k kind, to *message, text string) {
	r := &message{kind: k, from: m.self(), to: to.from, text: text}
	if k == accepted {
		r.offer = m.offer
	}
	m.do(answer{r})
}

// requested decides on a request. One that is late, or was sent by a process that has ended, must
// not take queue pairs away that work. So the request has to name the present version of this end,
// like a compare-and-swap, unless it proves that they do not work: the peer has newer ones, or says
// that its own are connected with others.
func (m *machine) requested(r *message) {
	named := r.to == m.self() || r.to == end{} && m.version == 0
	newer := m.phase == connected && r.from.session == m.with.session && r.from.generation() > m.with.generation()
	switch {
	case m.phase == retired:
		m.reply(refused, r, "the endpoint is closed")
	case len(r.offer.qps) != m.qps:
		m.reply(refused, r, m.miscounted(r).Error())
	case m.isPeer(r.from) && r.from.bound() && r.to != end{m.session, m.version &^ 1}:
		m.drop()
		m.reply(stale, r, "")
	case m.isPeer(r.from) && !r.offer.equal(&m.theirs):
		m.reply(refused, r, fmt.Sprintf("two lists of queue pairs for %v", r.from))
	case m.isPeer(r.from):
		m.reply(accepted, r, "")
	case r.from.bound() && m.phase != connecting || !named && !newer:
		// Queue pairs that are connected can only be joined by those that they are connected with.
		m.reply(stale, r, "")
	case m.phase == connecting:
		m.request = r
		m.join(r)
	default:
		if m.phase == connected {
			m.drop()
		}
		m.request = r
		m.do(prepare{m.version / 2})
	}
}

func (m *machine) shut() {
	if m.phase == connecting || m.phase == connected {
		m.drop()
	}
	m.phase, m.asking = retired, false
	m.giveUp(ErrClosed)
}
