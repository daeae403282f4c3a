package torture

import (
	"slices"
	"time"

	"tutti/pg"
)

// A Job is a set of ranks and how they are configured. It runs many programs.
type Job struct {
	Transport string // shm, tcp, hosts (two ranks on each of several hosts) or inproc
	Ranks     int
	OnFailure pg.OnFailure
	Uniform   bool
	AutoAdmit bool
	Algorithm string        // "": chosen
	Timeout   time.Duration // Config.Timeout
	OnTimeout pg.OnTimeout
	Pool      int // bytes of each of a rank's memories
	Later     int // so many of the ranks, the last, come when the job runs: it grows
	Standby   int // processes that wait in Join for a rank to be lost; there is no AutoAdmit then
}

// A Program is what all ranks of a job do, step by step.
type Program struct {
	Seed   uint64 // of the data
	Touch  int    // the rank that stores to another part of its registered memory meanwhile; -1: none
	Steps  []Step
	Faults []Fault `json:",omitempty"`
}

// Op is what a step does.
type Op string

// The operations.
const (
	AllReduce     Op = "allreduce"
	ReduceScatter Op = "reducescatter"
	AllGather     Op = "allgather"
	AllGatherV    Op = "allgatherv"
	AllToAll      Op = "alltoall"
	AllToAllV     Op = "alltoallv"
	Broadcast     Op = "broadcast"
	Reduce        Op = "reduce"
	Gather        Op = "gather"
	Scatter       Op = "scatter"
	Barrier       Op = "barrier"
	Message       Op = "message" // each rank sends to one and receives from another
	Agree         Op = "agree"
	Split         Op = "split"
	Close         Op = "close" // of a subgroup
	Abort         Op = "abort" // of a subgroup, by Root
	Admit         Op = "admit"
	Alloc         Op = "alloc" // renews the registered memory of number Root
	Free          Op = "free"
	Argument      Op = "argument" // a call that is wrong by itself; Root says how
	Wait          Op = "wait"     // for all that was started
	Together      Op = "together" // Par at the same time, on different groups
	Brace         Op = "brace"    // all that was started is waited for, and all ranks have come here
	Heal          Op = "heal"     // the end of a disturbance: all groups recover, who was lost comes back
)

var collectiveOps = []Op{AllReduce, ReduceScatter, AllGather, AllGatherV, AllToAll, AllToAllV, Broadcast, Reduce,
	Gather, Scatter, Barrier}

func (o Op) collective() bool { return slices.Contains(collectiveOps, o) }

func (o Op) reduces() bool { return o == AllReduce || o == ReduceScatter || o == Reduce }

func (o Op) rooted() bool { return o == Broadcast || o == Reduce || o == Gather || o == Scatter }

// Mem is where a buffer is.
type Mem string

// The kinds of memory.
const (
	MemAlloc  Mem = "alloc"  // registered
	MemOffset Mem = "offset" // registered, at an odd place between other buffers
	MemPlain  Mem = "plain"
	MemOdd    Mem = "odd"   // plain, not aligned to a cache line
	MemGuard  Mem = "guard" // plain, the last bytes before a page that must not be touched
)

var mems = []Mem{MemAlloc, MemOffset, MemPlain, MemOdd, MemGuard}

// How a collective is called.
type How string

// The ways.
const (
	Blocking How = "blocking"
	AtOnce   How = "at once" // started and waited for
	Started  How = "started" // and waited for by a later step
)

// A Step is one operation of a program.
type Step struct {
	Op    Op
	Group int          `json:",omitempty"` // 0: all ranks; others are the New of a Split
	DType pg.DType     `json:",omitempty"`
	Red   pg.Reduction `json:",omitempty"`
	Root  int          `json:",omitempty"` // a slot of the group, modulo its size
	Count int          `json:",omitempty"`
	New   int          `json:",omitempty"` // Split: the number of the group that it makes
	Par   []Step       `json:",omitempty"` // Together
	Alt   *Alt         `json:",omitempty"`
	Ranks []Part       `json:",omitempty"` // what each rank of the job does in its own way

	// What follows from the rest of the program: see normalize.
	May Causes `json:",omitempty"` // disturbances that this step may feel
}

// Alt is a rank that calls something else.
type Alt struct {
	Rank  int
	What  string // count, zero, dtype, reduction, root or kind
	Count int    `json:",omitempty"`
}

// A Part is one rank's way to do a step.
type Part struct {
	How     How           `json:",omitempty"`
	Dst     Mem           `json:",omitempty"`
	Src     Mem           `json:",omitempty"`
	InPlace bool          `json:",omitempty"`
	Late    time.Duration `json:",omitempty"` // it begins so much later
	Cancel  time.Duration `json:",omitempty"` // ctx is cancelled so long after the beginning; <0: before
	Limit   time.Duration `json:",omitempty"` // ctx's deadline
	Color   int           `json:",omitempty"` // Split
	Key     int           `json:",omitempty"` // Split
	No      bool          `json:",omitempty"` // Agree
	Any     bool          `json:",omitempty"` // Message: from AnyRank
	Last    bool          `json:",omitempty"` // Wait: the latest first
}

// A Fault comes from outside, some time after a rank has come to a step.
type Fault struct {
	Step   int
	At     int // the rank
	After  time.Duration
	Kind   string // kill, stop, part, deafen, store, evict, leave, slow
	Victim int
	Other  int           `json:",omitempty"` // deafen: the rank that does not hear the victim
	For    time.Duration `json:",omitempty"`
	Delay  time.Duration `json:",omitempty"` // slow: of every frame
	Loss   float64       `json:",omitempty"` // slow: of frames, 0 to 1

	// Joining has the fault come while those are coming in who were lost at the step, or come later:
	// After they were started.
	Joining bool `json:",omitempty"`
}

// causes are what a fault explains. A slow link, and what happens while ranks come in, is over so
// soon that nobody may notice.
func (f *Fault) causes() Causes {
	switch {
	case f.Joining, f.Kind == "slow":
		return 0
	case f.Kind == "kill", f.Kind == "evict", f.Kind == "leave":
		return Lost
	}
	return Lost | Unheard | Cancelled
}

// Causes are the kinds of disturbance that an error may come from.
type Causes uint16

// The causes.
const (
	Cancelled Causes = 1 << iota // a ctx that ends
	Lost                         // ranks that are lost
	Differing                    // ranks that call different things
	Aborted
	Unheard // a network or a store that does not answer
	Opaque  // results of this step are not checked: ranks called different things
)

// Labels of faults in the coverage.
const faultNone = "none"

// label names what disturbs the step most.
func (s *Step) label() string {
	switch {
	case s.Alt != nil:
		return "mismatch"
	case s.May&Unheard != 0:
		return "network"
	case s.May&Lost != 0:
		return "lost"
	case s.May&Differing != 0:
		return "mismatch"
	case s.May&Aborted != 0:
		return "abort"
	}
	for _, p := range s.Ranks {
		if p.Cancel != 0 {
			return "cancel"
		}
		if p.Limit != 0 {
			return "deadline"
		}
	}
	if s.May&Cancelled != 0 {
		return "after"
	}
	return faultNone
}

// normalize makes a whole of a program whose steps were put together or taken out: it says of each
// step what it may feel of disturbances, and ends these by a Heal. A rank that is ahead may disturb
// one that is still in an earlier step, but none that has passed the Brace before.
func (p *Program) normalize(job Job) {
	ranks := job.Ranks
	p.Faults = slices.DeleteFunc(p.Faults, func(f Fault) bool {
		return f.Step >= len(p.Steps) || f.At >= ranks || f.Victim >= ranks || f.Other >= ranks
	})
	from, may := 0, Causes(0)
	mark := func(to int) {
		for i := from; i < to; i++ {
			p.Steps[i].mark(may)
		}
	}
	for i := range p.Steps {
		s := &p.Steps[i]
		if s.Alt != nil && s.Alt.Rank >= ranks {
			s.Alt = nil
		}
		if s.Op == Brace && may == 0 {
			mark(i)
			from = i
		}
		for _, f := range p.Faults {
			if f.Step == i {
				may |= f.causes()
			}
		}
		may |= s.disturbs(job.OnTimeout != pg.TimeoutReports)
		if s.Op == Heal {
			mark(i + 1)
			from, may = i+1, 0
		}
	}
	if may != 0 {
		p.Steps = append(p.Steps, Step{Op: Heal})
	}
	mark(len(p.Steps))
}

func (s *Step) mark(may Causes) {
	s.May = may
	if s.Alt != nil {
		s.May |= Opaque
	}
	for i := range s.Par {
		s.Par[i].mark(may)
	}
}

// disturbs says what this step itself makes others feel, where a deadline may end memberships or
// not.
func (s *Step) disturbs(evicts bool) (c Causes) {
	for _, p := range s.Ranks {
		if p.Cancel != 0 || p.Limit != 0 {
			c |= Cancelled
		}
		if p.Limit != 0 && evicts {
			c |= Lost
		}
	}
	if s.Alt != nil {
		c |= Differing
	}
	if s.Op == Abort {
		c |= Aborted
	}
	for i := range s.Par {
		c |= s.Par[i].disturbs(evicts)
	}
	return c
}
