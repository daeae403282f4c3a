// Package registry is the table of transports: the one place that knows which there are. A row says
// what a transport is called, how it is made, and what it can do; all else (flags, tuning, tutti
// doctor) is derived from the rows.
package registry

import (
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"tutti/internal/dial"
	"tutti/internal/ports"
	"tutti/p2p"
	"tutti/p2p/shm"
	"tutti/p2p/tcp"
)

// Options is what a rank says of its links, whatever transport makes them.
type Options struct {
	LocalRanks  int           // ranks that are likely to be on this machine; 0: unknown
	Interfaces  string        // that may be used, see tcp.Config
	Ports       string        // "0", "29500" or "29500-29600"
	PeerTimeout time.Duration // after which a host that answers nothing is noticed, where somebody waits for it
	IdleTimeout time.Duration // and elsewhere
	Dial        dial.Func     // makes the connections; nil: net.Dialer
	Logger      *slog.Logger
}

// Reach says which ranks a transport links.
type Reach int

// The reaches, from near to far.
const (
	Machine Reach = iota // those of one machine
	Network              // all that the network reaches
)

// A Kind is a row of the table.
type Kind struct {
	Name   string
	Reach  Reach
	Maps   bool   // peers can map memory that the transport allocates
	Advice string // what to do where it does not work, for people
	// Works reports whether this system has what the transport needs, as far as that is known
	// before it is tried.
	Works func() bool
	// New makes the transport, which does nothing before Listen.
	New func(o Options) (p2p.Transport, error)
}

var (
	mu   sync.Mutex
	rows = []Kind{ // in order of preference
		{Name: "shm", Reach: Machine, Maps: true, Works: func() bool { return runtime.GOOS == "linux" },
			Advice: "ranks on one machine share memory this way; a sandbox or seccomp profile may forbid it (use " +
				"--transport tcp)",
			New: func(o Options) (p2p.Transport, error) {
				return shm.New(shm.Config{RingBytes: ringBytes(o.LocalRanks), Logger: o.Logger}), nil
			}},
		{Name: "tcp", Reach: Network, Works: func() bool { return true },
			Advice: "a firewall may drop connections of this machine with itself",
			New: func(o Options) (p2p.Transport, error) {
				spec, err := ports.ParseSpec(o.Ports)
				if err != nil {
					return nil, err
				}
				return tcp.New(tcp.Config{Interfaces: o.Interfaces, Ports: spec.Next().String(), Logger: o.Logger,
					Dial: o.Dial, PeerTimeout: o.PeerTimeout, IdleTimeout: o.IdleTimeout}), nil
			}},
	}
)

// InProcess is the name of the transport that links the ranks of one process, which is in no row: it
// is for pg.Local alone.
const InProcess = "inproc"

// Auto stands for all transports that work here, where names are expected.
const Auto = "auto"

// Add adds a row, which is preferred to those that there are, and returns what removes it. It panics
// if the name is taken. It is for programs with a transport of their own, before they join.
func Add(k Kind) (remove func()) {
	mu.Lock()
	defer mu.Unlock()
	if k.Name == Auto || strings.ContainsAny(k.Name, ", ") || k.Name == "" ||
		slices.ContainsFunc(rows, func(o Kind) bool { return o.Name == k.Name }) {
		panic(fmt.Sprintf("registry: a transport cannot be called %q, or is already", k.Name))
	}
	rows = append([]Kind{k}, rows...)
	return func() {
		mu.Lock()
		defer mu.Unlock()
		rows = slices.DeleteFunc(slices.Clone(rows), func(o Kind) bool { return o.Name == k.Name })
	}
}

// Kinds returns all rows, in order of preference.
func Kinds() []Kind {
	mu.Lock()
	defer mu.Unlock()
	return slices.Clone(rows)
}

// Names lists the names for people: "shm or tcp".
func Names() string {
	var names []string
	for _, k := range Kinds() {
		names = append(names, k.Name)
	}
	if n := len(names); n > 1 {
		return strings.Join(names[:n-1], ", ") + " or " + names[n-1]
	}
	return strings.Join(names, "")
}

// ErrUnknown says that no transport has a name.
var ErrUnknown = errors.New("no such transport")

// Find returns the rows that text names: "auto", or names separated by commas. The error wraps
// ErrUnknown and says what there is. A transport that is named is returned whether it works here or
// not; "auto" names those that do.
func Find(text string) ([]Kind, error) {
	all := Kinds()
	if text == Auto {
		return slices.DeleteFunc(all, func(k Kind) bool { return !k.Works() }), nil
	}
	var found []Kind
	for name := range strings.SplitSeq(text, ",") {
		i := slices.IndexFunc(all, func(k Kind) bool { return k.Name == name })
		if i < 0 {
			return nil, fmt.Errorf("%w: %q; expected auto, or a list of %s", ErrUnknown, name, Names())
		}
		found = append(found, all[i])
	}
	return found, nil
}

// Best returns the first of kinds that links ranks of one machine and works here: what links the
// ranks of a machine that may use all of them.
func Best(kinds []Kind) Kind {
	for _, k := range kinds {
		if k.Works() {
			return k
		}
	}
	return kinds[0]
}

// ringBytes divides 64 MiB a rank among the links to n local ranks, both directions.
func ringBytes(n int) int { return min(max(32<<20/max(n-1, 1), 16<<10), 512<<10) }
