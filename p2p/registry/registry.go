// Package registry is the table of transports, the only place that lists them. A row has the name
// of a transport, its constructor, and its capabilities. Flags, tuning and tutti doctor follow from
// the rows.
package registry

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"tutti/device"
	"tutti/internal/cpus"
	"tutti/internal/dial"
	"tutti/internal/ports"
	"tutti/mem"
	"tutti/p2p"
	"tutti/p2p/shm"
	"tutti/p2p/tcp"
	"tutti/p2p/verbs"
	"tutti/rdma"
	rdmaverbs "tutti/rdma/verbs"
)

// Options are a rank's settings for links of any transport.
type Options struct {
	LocalRanks  int           // ranks that are likely to be on this machine; 0: unknown
	Interfaces  string        // that may be used, see tcp.Config
	RDMADevices string        // that may be used, see rdma.ParseDevices
	RDMAGID     string        // address of an RDMA port that peers are given, see rdma.ChooseGID
	RDMAPairs   int           // queue pairs for data on each port and link; 0: the default
	RDMA        rdma.Settings // of the network
	Ports       string        // "0", "29500" (tcp then has the next port, rdma the one after) or "29500-29600"
	PeerTimeout time.Duration // bounds the silence of a host that an operation waits for
	IdleTimeout time.Duration // bounds it otherwise
	Dial        dial.Func     // makes the connections; nil: net.Dialer
	Devices     device.Finder // of the memory that is put and got; nil: there are none
	Logger      *slog.Logger
}

// Reach says which ranks a transport links.
type Reach int

// Values of Reach, from near to far.
const (
	Machine Reach = iota // those of one machine
	Network              // all that the network reaches
)

// A Kind is a row of the table.
type Kind struct {
	Name   string
	Reach  Reach
	Maps   bool   // peers can map memory of the transport's Alloc
	Advice string // what to do if it does not work, for users
	// Works returns what this system lacks that the transport needs with these settings, of which
	// only those of RDMA count, as far as that is known without making a link, or nil. After an
	// error that wraps ErrSettings a rank does not join with other transports.
	Works func(o Options) error
	// New makes the transport, which is idle until Listen.
	New func(o Options) (p2p.Transport, error)
}

var (
	mu   sync.Mutex
	rows = []Kind{ // in order of preference
		{Name: "shm", Reach: Machine, Maps: true, Works: func(Options) error { return shm.Check() },
			Advice: "ranks on one machine share memory this way; a sandbox or seccomp profile may forbid it (use " +
				"--transport tcp)",
			New: func(o Options) (p2p.Transport, error) {
				return shm.New(shm.Config{RingBytes: ringBytes(o.LocalRanks), Logger: o.Logger}), nil
			}},
		{Name: verbs.Name, Reach: Network, Works: rdmaWorks,
			Advice: "a container may lack the device or the right to lock memory: see the lines of devices and " +
				"limits (use --transport shm,tcp)",
			New: func(o Options) (p2p.Transport, error) {
				p, err := rdmaverbs.Load()
				if err != nil {
					return nil, err
				}
				return newVerbs(p, o)
			}},
		{Name: "tcp", Reach: Network, Works: func(Options) error { return nil },
			Advice: "a firewall may drop connections of this machine with itself",
			New: func(o Options) (p2p.Transport, error) {
				t, err := tcpConfig(o, tcpPort)
				if err != nil {
					return nil, err
				}
				return tcp.New(t), nil
			}},
	}
)

// Exporter returns a function that finds the exporters of devices, nil without devices.
func Exporter(f device.Finder) func(loc mem.Location) (rdma.Exporter, error) {
	if f == nil {
		return nil
	}
	return func(loc mem.Location) (rdma.Exporter, error) {
		d, err := f.Find(loc)
		if err != nil {
			return nil, err
		}
		e, ok := d.(device.Exporter)
		if !ok {
			return nil, fmt.Errorf("the device at %s has no DMA buffers: %w", loc, errors.ErrUnsupported)
		}
		return e, nil
	}
}

// The ports of listeners after an explicit one, which the rank itself listens on.
const (
	tcpPort = 1 + iota
	rdmaPort
)

// newVerbs makes the transport over RDMA devices of p.
func newVerbs(p rdma.Provider, o Options) (p2p.Transport, error) {
	t, err := tcpConfig(o, rdmaPort)
	if err != nil {
		return nil, err
	}
	return verbs.New(verbs.Config{Provider: p, Devices: o.RDMADevices, GID: o.RDMAGID, QueuePairs: o.RDMAPairs,
		Settings: o.RDMA, Nodes: nodes(), Exporter: Exporter(o.Devices), TCP: t}), nil
}

// tcpConfig returns the configuration of TCP connections. The listener has the port after o.Ports
// that after says, if that is one port.
func tcpConfig(o Options, after int) (tcp.Config, error) {
	spec, err := ports.ParseSpec(o.Ports)
	if err == nil {
		spec, err = spec.After(after)
	}
	if err != nil {
		return tcp.Config{}, err
	}
	return tcp.Config{Interfaces: o.Interfaces, Ports: spec.String(), Logger: o.Logger, Dial: o.Dial,
		PeerTimeout: o.PeerTimeout, IdleTimeout: o.IdleTimeout}, nil
}

// nodes returns the NUMA nodes of this process's processors, none if they are not known.
func nodes() []int {
	allowed, err := cpus.Allowed()
	if err != nil {
		return nil
	}
	machine, err := cpus.Read(os.DirFS("/sys/devices/system"), allowed)
	if err != nil {
		return nil
	}
	return cpus.Nodes(machine)
}

// checked are the results of rdmaWorks, by the settings.
var checked struct {
	sync.Mutex
	results map[rdmaSettings]error
}

// rdmaSettings are those of Options that decide whether a link can be made.
type rdmaSettings struct {
	devices, gid string
	network      rdma.Settings
}

// rdmaWorks returns why no link can be made over an RDMA device of this machine that o allows. It
// asks once in a process, but again after an error that wraps ErrSettings, so that a later Join may
// find a port active.
func rdmaWorks(o Options) error {
	s := rdmaSettings{o.RDMADevices, o.RDMAGID, o.RDMA}
	checked.Lock()
	defer checked.Unlock()
	err, known := checked.results[s]
	if !known {
		if checked.results == nil {
			checked.results = map[rdmaSettings]error{}
		}
		err = checkRDMA("/sys/class/infiniband", func() (rdma.Provider, error) { return rdmaverbs.Load() }, s)
		if !errors.Is(err, ErrSettings) {
			checked.results[s] = err
		}
	}
	return err
}

// checkRDMA is rdmaWorks of a machine with the kernel's devices in a directory, and the provider
// that load returns.
func checkRDMA(dir string, load func() (rdma.Provider, error), s rdmaSettings) error {
	if devices, err := os.ReadDir(dir); err != nil || len(devices) == 0 {
		return errors.New("this machine has no RDMA device")
	}
	p, err := load()
	if err != nil {
		return err
	}
	check := func(s rdmaSettings) error {
		return verbs.Check(verbs.Config{Provider: p, Devices: s.devices, GID: s.gid, Settings: s.network,
			Nodes: nodes()})
	}
	if err = check(s); err == nil || s == (rdmaSettings{}) || check(rdmaSettings{}) != nil {
		return err
	}
	if err = check(s); err != nil { // again: a port may have become active between
		err = fmt.Errorf("%w: %w", ErrSettings, err)
	}
	return err
}

// InProcess is the name of the transport between the ranks of one process. It has no row, because
// only pg.Local uses it.
const InProcess = "inproc"

// Auto stands for all transports that work here, in lists of names.
const Auto = "auto"

// Add adds a row, before all others in the order of preference, and returns a function that removes
// it. It panics if the name is taken. It is for programs with their own transport, before they
// join.
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

// Names lists the names for messages: "shm or tcp".
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

// ErrSettings says that an RDMA device of this machine works, but not as the user has set.
var ErrSettings = errors.New("TUTTI_RDMA_* are set, and RDMA works on this machine without them only " +
	"(correct or unset them)")

// Find returns the rows that text names: "auto", or names separated by commas. The error wraps
// ErrUnknown and lists the known names. A named transport is returned even if it does not work
// here; "auto" selects those that do, with the settings o, or fail with ErrSettings.
func Find(text string, o Options) ([]Kind, error) {
	all := Kinds()
	if text == Auto {
		return slices.DeleteFunc(all, func(k Kind) bool {
			err := k.Works(o)
			return err != nil && !errors.Is(err, ErrSettings)
		}), nil
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

// Best returns the first of kinds that links ranks of one machine and works here, with the settings
// o.
func Best(kinds []Kind, o Options) Kind {
	for _, k := range kinds {
		if k.Works(o) == nil {
			return k
		}
	}
	return kinds[0]
}

// ringBytes divides 64 MiB a rank among the links to n local ranks, both directions.
func ringBytes(n int) int { return min(max(32<<20/max(n-1, 1), 16<<10), 512<<10) }
