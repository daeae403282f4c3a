package launch

import (
	"os"

	"tutti/cmd/tutti/internal/term"
	"tutti/internal/cpus"
)

// Binding says which processors a rank may run on, of those that the launcher itself may run on: a
// cgroup and another launcher that has bound this one are respected.
type Binding int

// The bindings. A rank that is started again has the processors of its predecessor. A process on
// standby may run on all, until it takes the place of a rank of this node: then it has those of
// that rank. A rank that cannot be bound runs unbound, which is reported.
const (
	BindNone   Binding = iota // all processors
	BindShare                 // its share of them: see cpus.Share
	BindSingle                // one processor of its own; N must not be above their number
)

// divide decides which processors each rank gets.
func (l *launcher) divide() {
	if l.Bind == BindNone {
		return
	}
	machine, err := Processors()
	if err != nil {
		l.tell("the ranks are not bound to processors: %v", err)
		return
	}
	if l.Bind == BindSingle {
		l.shares = cpus.Single(machine, l.N)
	} else {
		l.shares = cpus.Share(machine, l.N)
	}
	for i := range l.shares {
		l.sayBound(i, i)
	}
}

// Processors returns the processors that this process may run on.
func Processors() ([]cpus.CPU, error) {
	allowed, err := cpus.Allowed()
	if err != nil {
		return nil, err
	}
	return cpus.Read(os.DirFS("/sys/devices/system"), allowed)
}

// sayCrowded says that the ranks have to share processors although the machine has more: a launcher
// may have bound this one to a core, as mpirun does.
func (l *launcher) sayCrowded() {
	allowed, err := cpus.Allowed()
	online, oerr := cpus.Online(os.DirFS("/sys/devices/system"))
	if err == nil && oerr == nil && l.N > len(allowed) && len(online) > len(allowed) {
		l.tell("%s on %s of %d: what started this command has bound it there (mpirun: --bind-to none; srun: -c)",
			term.Count(l.N, "rank"), term.Count(len(allowed), "processor"), len(online))
	}
}

// bindTo gives local process i the processors of a slot, if that is of this node.
func (l *launcher) bindTo(i, slot int) {
	at := slot - l.base
	if at < 0 || at >= len(l.shares) {
		return
	}
	if l.guard.Bind(i, l.shares[at]) == nil { // or the guard is gone, which is noticed elsewhere
		l.sayBound(i, at)
	}
}

// sayBound reports that local process i has the processors of local rank at.
func (l *launcher) sayBound(i, at int) {
	if l.Verbose {
		l.tell("%s runs on processors %v", l.who(i), l.shares[at])
	}
}
