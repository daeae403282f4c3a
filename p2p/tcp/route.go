package tcp

import (
	"errors"
	"slices"
	"strings"

	"tutti/internal/route"
)

// machine is this machine, with the interfaces and the choice of addresses of the transport.
func (t *Transport) machine() route.Machine {
	t.mu.Lock()
	filter := t.filter
	t.mu.Unlock()
	return route.This(filter)
}

// whereIs says whether the peer on host, a hostID, shares this process's loopback interface.
func whereIs(host uint64) route.Where {
	switch {
	case host == 0 || hostID() == 0:
		return route.Unknown
	case host == hostID():
		return route.Here
	}
	return route.Elsewhere
}

// paths returns the paths from m to e, the endpoint of a peer there, best first, and why other
// addresses have none.
func (e endpoint) paths(m route.Machine, there route.Where) (found []route.Path, why []error) {
	for _, at := range e.at {
		p, err := m.Judge(at, there)
		if err != nil {
			why = append(why, err)
			continue
		}
		found = append(found, p)
	}
	slices.SortStableFunc(found, route.Compare)
	return found, why
}

// list joins several reasons in one line; errors.Is finds each of them.
type list []error

func (l list) Error() string {
	s := make([]string, len(l))
	for i, e := range l {
		s[i] = e.Error()
	}
	return strings.Join(s, "; ")
}

func (l list) Unwrap() []error { return l }

var errNoPath = errors.New("none of the peer's addresses can be reached from here")
