package endpoint

import (
	"fmt"

	"tutti/endpoint/internal/wire"
)

// Mode says what guards the data on the connections to a peer: each one against more than the one
// before.
type Mode uint8

// Modes.
const (
	Unconnected Mode = iota // there are no connections
	Plain                   // nothing but TCP's own checksum
	Checked                 // checksums: see Config.Checksum
	Sealed                  // encryption and authentication: see Config.Seal
)

// String returns "unconnected", "plain", "checked" or "sealed".
func (m Mode) String() string {
	if m > Sealed {
		return fmt.Sprintf("mode %d", uint8(m))
	}
	return [...]string{"unconnected", "plain", "checked", "sealed"}[m]
}

// modes has the modes of the wire.
var modes = [...]Mode{wire.Plain: Plain, wire.Checked: Checked, wire.Sealed: Sealed}

// Mode returns the mode of the connections to the peer: what the two ends have asked for. A session
// that takes the place of one that was lost may have another one, as its ends ask; that of this
// end's Config is the least.
func (p *Peer) Mode() Mode {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.session == nil || !p.session.up {
		return Unconnected
	}
	return p.session.modeLocked()
}

// modeLocked returns the lowest mode of the connections of a session that is up.
func (s *session) modeLocked() Mode {
	m := Sealed
	for _, c := range s.conns {
		m = min(m, modes[c.Mode()])
	}
	return m
}
