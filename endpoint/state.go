package endpoint

import (
	"context"
	"encoding/json"
	"fmt"

	"tutti/endpoint/internal/args"
	"tutti/endpoint/internal/link"
	"tutti/endpoint/internal/wire"
	"tutti/endpoint/stats"
)

// Stats returns the state and the counters of the peer's endpoint, of which this end is a peer,
// too. It connects if needed, and does not keep the connection from its IdleTimeout. It waits until
// ctx ends, or Config.Timeout. An end that has the credential of a client is refused: ErrRefused.
func (p *Peer) Stats(ctx context.Context) (stats.Endpoint, error) {
	if err := args.Context(ctx, p, "stats"); err != nil {
		return stats.Endpoint{}, err
	}
	q := &query{op: wire.Inquire}
	if err := p.ask(ctx, q); err != nil {
		return stats.Endpoint{}, fmt.Errorf("state of %v: %w", p, err)
	}
	return q.state, nil
}

// state returns the payload of State. Without locks but Conn.rx.
func (e *Endpoint) state() []byte {
	b, err := json.Marshal(e.Stats())
	if err != nil {
		panic("endpoint: " + err.Error()) // it has numbers and texts alone
	}
	return b
}

// denied explains wire.Denied.
const denied = "only those who have the job's secret may ask for the state, and this is the credential of a client"

// inquiredLocked answers an inquiry of the peer with the state, nil if the peer may not see it. The
// answer is made at once, as that to a Ping, so that the inquiry is never open.
func (s *session) inquiredLocked(c *link.Conn, id uint64, state []byte) error {
	if err := s.checkBacklog(c); err != nil {
		return err
	}
	if state == nil {
		s.peer.servedLocked(0, wire.Denied, 0)
		c.Later(done(nil, id, wire.Denied, 0, denied))
	} else {
		b := wire.Header{Size: uint64(len(state)), Address: id, Op: wire.State}.Append(nil)
		c.Later(append(b, state...))
	}
	s.peer.touchLocked(c)
	return nil
}

// inquiryLocked returns the inquiry of this end that has a number.
func (s *session) inquiryLocked(id uint64) (*query, error) {
	q := s.requests[id].query
	if q == nil || q.op != wire.Inquire {
		return nil, fmt.Errorf("%w: a state for request %d, which did not ask for it", wire.ErrFrame, id)
	}
	return q, nil
}

// stateLocked is the place of the peer's state.
func (s *session) stateLocked(id, n uint64) (link.Sink, error) {
	if _, err := s.inquiryLocked(id); err != nil {
		return link.Sink{}, err
	}
	return link.Sink{Buf: make([]byte, n), Token: inquiry{id}}, nil
}

// toldLocked ends an inquiry of this end.
func (s *session) toldLocked(id uint64, b []byte) error {
	q, err := s.inquiryLocked(id)
	if err != nil {
		return err
	}
	state, err := stats.Parse(b)
	switch {
	case err != nil:
	case state.ID != idText(s.peer.id):
		err = fmt.Errorf("the state of endpoint %s from endpoint %s", state.ID, idText(s.peer.id))
	case state.Name != "":
		err = checkName("endpoint", state.Name)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", wire.ErrFrame, err)
	}
	delete(s.requests, id)
	q.state = state
	s.endQueryLocked(q, nil)
	s.freedLocked()
	return nil
}

// idText is an identity as stats.Endpoint has it.
func idText(id uint64) string { return fmt.Sprintf("%016x", id) }
