package torture

import (
	"slices"
	"time"

	"tutti/pg"
)

// A Job is a configured set of ranks. It runs many programs.
type Job struct {
	Transport string // shm, tcp, hosts (two ranks on each of several hosts), soft or inproc
	Ranks     int
	OnFailure pg.OnFailure
	Uniform   bool
	AutoAdmit bool
	Algorithm string        // "": chosen
	Timeout   time.Duration // Config.Timeout
	OnTimeout pg.OnTimeout
	Pool      int // bytes of each of a rank's memories
	Later     int // number of ranks, the last ones, that join the running job
	Standby   int // processes that wait in Join for a rank to be lost; there is no AutoAdmit then
	Block     int // see grain.Sizes
	Piece     int
	GPUs      GPUs
	Kernels   bool   // the streams of GPUs wait for words by kernels
	IPC       bool   // memory of GPUs has IPC handles only
	Progress  bool   // Config.Progress
	Copy      string // Config.SingleCopy
	Staging   int    // Config.StagingLimit
}

// GPUs says which GPUs of the fake CUDA driver (device/cuda/fake) the ranks of a job have.
type GPUs string

// The ways to give GPUs to ranks. A replacement has the GPU of the rank that was lost, a process on
// standby the first one.
const (
	NoGPUs    GPUs = ""      // none: each rank has a devicetest.Late
	GPUsEach  GPUs = "each"  // one a rank
	GPUsApart GPUs = "apart" // one a rank, without access to each other's memory
	GPUsPairs GPUs = "pairs" // two ranks share one
	GPUsOne   GPUs = "one"   // all ranks share one
	GPUsSome  GPUs = "some"  // the ranks with an even number have one each
)

// of returns the number of a rank's GPU, -1 if it has none.
func (g GPUs) of(rank int) int {
	rank = max(rank, 0)
	switch {
	case g == NoGPUs, g == GPUsSome && rank%2 != 0:
		return -1
	case g == GPUsOne:
		return 0
	case g == GPUsPairs:
		return rank / 2
	}
	return rank
}

// A Program is the sequence of steps of all ranks of a job.
type Program struct {
	Seed   uint64 // of the data
	Touch  int    // the rank that stores to another part of its registered memory meanwhile; -1: none
	Steps  []Step
	Faults []Fault `json:",omitempty"`
}

// Op is the operation of a step.
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
	Message       Op = "message"    // each rank sends to one and receives from another
	Window        Op = "window"     // each rank puts to a window of another, and gets it back
	WindowMake    Op = "windowmake" // of window Win, which outlives the step
	WindowPut     Op = "windowput"
	WindowSignal  Op = "windowsignal"
	WindowWait    Op = "windowwait"
	WindowGet     Op = "windowget"
	WindowRefresh Op = "windowrefresh"
	WindowClose   Op = "windowclose" // by Root before the others end their use, if a part says No
	Agree         Op = "agree"
	Split         Op = "split"
	Close         Op = "close" // of a subgroup
	Abort         Op = "abort" // of a subgroup, by Root
	Admit         Op = "admit"
	Alloc         Op = "alloc" // renews the registered memory of number Root
	Free          Op = "free"
	Renew         Op = "renew"    // the memory of a device, after waiting for all started operations
	Graph         Op = "graph"    // Par, captured, and launched Count times
	Chain         Op = "chain"    // Par, started one after the other on the same buffers: see chain
	Argument      Op = "argument" // an invalid call; Root selects the error
	Wait          Op = "wait"     // for all started operations
	Together      Op = "together" // Par concurrently, on different groups
	Brace         Op = "brace"    // waits for all started operations and for all ranks
	Heal          Op = "heal"     // the end of a disturbance: all groups recover, lost ranks come back
)

var collectiveOps = []Op{AllReduce, ReduceScatter, AllGather, AllGatherV, AllToAll, AllToAllV, Broadcast, Reduce,
	Gather, Scatter, Barrier}

func (o Op) collective() bool { return slices.Contains(collectiveOps, o) }

// windows are the operations on a window that outlives them.
var windows = []Op{WindowMake, WindowPut, WindowSignal, WindowWait, WindowGet, WindowRefresh, WindowClose}

func (o Op) window() bool { return slices.Contains(windows, o) }

func (o Op) reduces() bool { return o == AllReduce || o == ReduceScatter || o == Reduce }

func (o Op) rooted() bool { return o == Broadcast || o == Reduce || o == Gather || o == Scatter }

// Mem is the kind of memory of a buffer.
type Mem string

// The kinds of memory.
const (
	MemAlloc  Mem = "alloc"  // registered
	MemOffset Mem = "offset" // registered, at an odd place between other buffers
	MemPlain  Mem = "plain"
	MemOdd    Mem = "odd"   // plain, not aligned to a cache line
	MemGuard  Mem = "guard" // plain, the last bytes before an inaccessible page
	MemDevice Mem = "device"
)

var mems = []Mem{MemAlloc, MemOffset, MemPlain, MemOdd, MemGuard, MemDevice}

// How a collective is called.
type How string

// The ways.
const (
	Blocking How = "blocking"
	AtOnce   How = "at once" // started, and waited for at once
	Started  How = "started" // started; a later step waits for it
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
	Win   int          `json:",omitempty"` // the number of a window
	Par   []Step       `json:",omitempty"` // Together, Graph, Chain
	Alt   *Alt         `json:",omitempty"`
	Ranks []Part       `json:",omitempty"` // the part of each rank of the job

	// Computed from the rest of the program: see normalize.
	May Causes `json:",omitempty"` // disturbances that this step may feel
}

// Alt is a rank that makes a different call.
type Alt struct {
	Rank  int
	What  string // count, zero, dtype, reduction, root or kind
	Count int    `json:",omitempty"`
}

// A Part is one rank's way to run a step.
type Part struct {
	How     How           `json:",omitempty"`
	Dst     Mem           `json:",omitempty"`
	Src     Mem           `json:",omitempty"`
	InPlace bool          `json:",omitempty"`
	Late    time.Duration `json:",omitempty"` // it begins so much later
	Hold    time.Duration `json:",omitempty"` // the stream of its buffers comes to it so much later
	Other   bool          `json:",omitempty"` // the other of its group's two streams
	Cancel  time.Duration `json:",omitempty"` // ctx is cancelled so long after the beginning; <0: before
	Limit   time.Duration `json:",omitempty"` // ctx's deadline; of a started operation its own
	Color   int           `json:",omitempty"` // Split
	Key     int           `json:",omitempty"` // Split
	No      bool          `json:",omitempty"` // Agree, WindowClose; Close, Abort: not after the group's calls
	Any     bool          `json:",omitempty"` // Message: from AnyRank
	Last    bool          `json:",omitempty"` // Wait: the latest first
}

// A Fault comes from outside, some time after a rank has come to a step.
type Fault struct {
	Step   int
	At     int // the rank
	After  time.Duration
	Kind   string // kill, stop, part, deafen, store, evict, leave, slow, or one of deviceFaults
	Victim int
	// Other is of deafen the rank that does not hear the victim, and of deviceFaults the number of
	// the victim's device.
	Other int           `json:",omitempty"`
	For   time.Duration `json:",omitempty"`
	Delay time.Duration `json:",omitempty"` // slow: of every frame
	Loss  float64       `json:",omitempty"` // slow: of frames, 0 to 1

	// Joining makes the fault occur while the ranks that were lost at the step, or come later, are
	// joining: After they were started.
	Joining bool `json:",omitempty"`
}

// deviceFaults are faults of an RDMA device of the victim, which no operation feels: its port
// goes down, the same with other addresses afterwards, it is removed, its queue pairs fail, or it
// refuses calls that make objects and register memory.
var deviceFaults = []string{"port", "move", "remove", "break", "refuse"}

// causes returns the disturbances of a fault. A slow link, and faults while ranks join, are so
// short that they may have no effect.
func (f *Fault) causes() Causes {
	switch {
	case f.Joining, f.Kind == "slow", slices.Contains(deviceFaults, f.Kind):
		return 0
	case f.Kind == "kill", f.Kind == "evict", f.Kind == "leave":
		return Lost
	}
	return Lost | Unheard | Cancelled
}

// Causes are the disturbances that explain an error.
type Causes uint16

// The causes.
const (
	Cancelled Causes = 1 << iota // a ctx that ends
	Lost                         // ranks that are lost
	Differing                    // ranks that call different things
	Aborted
	Unheard // an unreachable network or store
	Opaque  // results of this step are not checked: ranks made different calls
	Shut    // a subgroup that a rank closes before its operations have ended
)

// Labels of faults in the coverage.
const faultNone = "none"

// label names the main disturbance of the step.
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
	case s.May&(Aborted|Shut) != 0:
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

// normalize completes a program whose steps were combined or removed: it computes the disturbances
// that each step may feel, and ends these by a Heal. A rank that is ahead may disturb one in an
// earlier step, but none that has passed the Brace before.
func (p *Program) normalize(job Job) {
	ranks := job.Ranks
	p.Faults = slices.DeleteFunc(p.Faults, func(f Fault) bool {
		return f.Step >= len(p.Steps) || f.At >= ranks || f.Victim >= ranks ||
			f.Kind == "deafen" && f.Other >= ranks
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

// disturbs returns the disturbances that this step causes itself, depending on whether a timeout
// may evict ranks.
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
	if s.Op == Close && slices.ContainsFunc(s.Ranks, func(p Part) bool { return p.No }) {
		c |= Shut
	}
	for i := range s.Par {
		c |= s.Par[i].disturbs(evicts)
	}
	return c
}
