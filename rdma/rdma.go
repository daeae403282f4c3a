package rdma

import (
	"fmt"
	"net/netip"
	"strings"

	"tutti/mem"
)

// PollBatch is the most completions that one call of CQ.Poll returns.
const PollBatch = 64

// Provider finds and opens devices.
type Provider interface {
	// Devices returns the names of the devices that are present, in a stable order.
	Devices() ([]string, error)
	// Open opens a device. notify, if it is not nil, is called with every asynchronous event of the
	// device, after the event was acknowledged. Its calls follow each other, without a lock of the
	// provider held; the last one returns before Device.Close does.
	Open(name string, notify func(Event)) (Device, error)
}

// Device is an open device, with one protection domain. Its methods may be called from any
// goroutine.
type Device interface {
	Name() string
	// Attributes returns the device's limits, as they were when it was opened.
	Attributes() Attributes
	// Port returns the present state of a port, counted from 1.
	Port(port int) (Port, error)
	// GIDs returns the present addresses of a port. Their indexes may change while a port is down.
	GIDs(port int) ([]GIDEntry, error)
	// Register registers memory. The memory must stay allocated until MR.Close. Device memory needs
	// RegisterDMABuf.
	Register(m mem.Memory, access Access) (MR, error)
	// RegisterDMABuf registers n bytes at offset of a DMA buffer. Requests address them from
	// address on. It fails with errors.ErrUnsupported if the device or the system has no such call.
	// The descriptor may be closed afterwards.
	RegisterDMABuf(fd int, offset, n, address uint64, access Access) (MR, error)
	// NewCQ makes a completion queue for at least depth completions. wake, if it is not nil, is
	// called after CQ.Arm; see there.
	NewCQ(depth int, wake func()) (CQ, error)
	// NewQP makes a queue pair in the state Reset.
	NewQP(cfg QPConfig) (QP, error)
	// Close closes the device. Queue pairs, completion queues and memory regions must have been
	// closed before.
	Close() error
}

// MR is registered memory. Close must not be called while a request uses the memory; afterwards no
// peer can reach it.
type MR interface {
	LocalKey() uint32  // for Segment
	RemoteKey() uint32 // for the peers' SendRequest.RemoteKey
	Close() error
}

// CQ is a completion queue. One goroutine at a time calls Poll and Arm.
type CQ interface {
	// Poll moves up to min(len(out), PollBatch) completions to out and returns their number. An
	// error means that the queue is unusable, for example because it overflowed.
	Poll(out []Completion) (int, error)
	// Arm requests one call of wake when the next completion arrives. A completion that arrived
	// before Arm causes none: poll once more after Arm. The removal of the device calls it, too,
	// and it may also be called without need. It must not block.
	Arm() error
	Depth() int
	// Close fails while queue pairs use the queue.
	Close() error
}

// QP is a queue pair of a reliable connection. Its methods may be called from any goroutine, but
// Post must not be called at the same time as itself, nor PostRecv as itself.
type QP interface {
	Number() uint32
	// Limits returns what the queue pair really has, which may be more than was asked for.
	Limits() QPLimits
	State() (State, error)
	// Init moves the queue pair from Reset to Init: receives can be posted then.
	Init(port int, access Access) error
	// Connect moves the queue pair from Init to Ready. If it fails between, the queue pair has to
	// be reset or closed.
	Connect(r *Route) error
	// Fail moves the queue pair to Failed: what was posted completes, and what has not ended does
	// so with Flushed.
	Fail() error
	// Reset moves the queue pair to Reset. Requests that have not completed never do. It fails with
	// errors.ErrUnsupported if Quirks.NoReset is set.
	Reset() error
	// Post posts a chain of requests. It returns the number of those that were posted, all or with
	// an error the ones before the bad one.
	Post(chain []SendRequest) (int, error)
	// PostRecv is Post for receives.
	PostRecv(chain []RecvRequest) (int, error)
	// Close destroys the queue pair. Requests that have not completed never do.
	Close() error
}

// Attributes are the limits and the identity of a device.
type Attributes struct {
	Ports        int
	MaxQPs       int
	MaxQPDepth   int // requests of a queue of a queue pair
	MaxSegments  int // of a request
	MaxCQDepth   int
	MaxMRs       int
	MaxMRBytes   uint64
	MaxReads     int // that a queue pair has under way, or serves, at a time
	Vendor, Part uint32
	Firmware     string
	GUID         uint64
	NUMANode     int // -1: unknown
	Quirks       Quirks
}

// Quirks are deviations of a device from the verbs standard.
type Quirks struct {
	NoReset bool // a queue pair cannot return to Reset: it has to be destroyed and made anew
}

// PortState is the state of a port.
type PortState uint8

// States of a port. Traffic flows only in PortActive.
const (
	PortUnknown PortState = iota
	PortDown
	PortInit
	PortArmed
	PortActive
)

func (s PortState) String() string {
	return name(int(s), "unknown", "down", "initializing", "armed", "active")
}

// Port is the state of a port.
type Port struct {
	State    PortState
	Ethernet bool   // RoCE: routed by GID; else InfiniBand
	MTU      int    // bytes of payload of a packet
	LID      uint16 // of an InfiniBand port
	// GRHRequired says that packets of an InfiniBand port have to have an address, also within a
	// subnet: see Route.Lead.
	GRHRequired bool
	GIDs        int    // entries of the table of addresses, used or not
	MaxBytes    uint64 // of a request
	Gbps        float64
}

// GID is an address of a port: an IPv6 address, or an IPv4 address mapped to one.
type GID [16]byte

// Addr returns the address; of a mapped one the IPv4 address.
func (g GID) Addr() netip.Addr { return netip.AddrFrom16(g).Unmap() }

func (g GID) String() string { return g.Addr().String() }

// GIDType is the protocol of an address.
type GIDType uint8

// Protocols.
const (
	InfiniBand GIDType = iota
	RoCEv1             // Ethernet frames, not routed
	RoCEv2             // UDP
)

func (t GIDType) String() string { return name(int(t), "InfiniBand", "RoCE v1", "RoCE v2") }

// GIDEntry is an entry of a port's table of addresses.
type GIDEntry struct {
	Index     int
	GID       GID
	Type      GIDType
	Interface string // network interface, if there is one
}

// Access is a set of rights to registered memory, and of what a queue pair serves.
type Access uint32

// Rights. Local memory can always be read. RemoteWrite and RemoteAtomic need LocalWrite.
const (
	LocalWrite Access = 1 << iota
	RemoteWrite
	RemoteRead
	RemoteAtomic
	RelaxedOrdering // writes may be placed in any order: for bulk data, never for words that are polled
)

// State is the state of a queue pair.
type State uint8

// States. Ready is RTS in the verbs standard, Failed is ERR; RTR, Paused (SQD) and Broken (SQE) are
// passing states.
const (
	StateReset State = iota
	StateInit
	StateRTR
	StateReady
	StatePaused
	StateBroken
	StateFailed
)

func (s State) String() string {
	return name(int(s), "reset", "init", "ready to receive", "ready", "paused", "send queue broken", "failed")
}

// QPConfig is what a queue pair is to have at least.
type QPConfig struct {
	Send, Recv           CQ // of completions; they may be the same
	SendDepth, RecvDepth int
	Segments             int // of a request; 0 means 1
	Inline               int // bytes of SendRequest.Inline
	PKey                 int // index of its partition key in the port's table
}

// QPLimits is what a queue pair has.
type QPLimits struct {
	SendDepth, RecvDepth int
	SendSegments         int
	RecvSegments         int
	Inline               int
}

// Route says how the queue pairs of a connection reach each other. Both ends use the same MTU, and
// each end's PSN is the other's RemotePSN.
type Route struct {
	Port      int // of this end
	GIDIndex  int // of this end; not used on InfiniBand if Global is false
	Global    bool
	MTU       int // 256, 512, 1024, 2048 or 4096
	PSN       uint32
	Remote    uint32 // number of the peer's queue pair
	RemotePSN uint32
	LID       uint16
	GID       GID
	Reads     int // at a time in each direction
	// A packet without an answer is repeated after 4.096 us * 2^Timeout, Retries times (at most 7;
	// Soft-RoCE takes 7 for ever, too). With a Timeout of 0 it is waited for, for ever. A peer
	// without a posted receive is asked again RNRRetries times (7: for ever).
	Timeout, Retries, RNRRetries uint8
	TrafficClass, HopLimit       uint8 // HopLimit 0 means 64
	ServiceLevel                 uint8
}

// Opcode is the kind of a request.
type Opcode uint8

// Requests. With Imm the target's next posted receive completes with SendRequest.Imm.
const (
	Write Opcode = iota + 1
	WriteImm
	Send
	SendImm
	Read
	Recv // in completions only
	RecvWriteImm
)

func (o Opcode) String() string {
	return name(int(o), "no request", "write", "write with immediate", "send", "send with immediate", "read", "receive",
		"receive of a write with immediate")
}

// Segment is local registered memory.
type Segment struct {
	Address uint64
	Key     uint32 // MR.LocalKey
	Len     uint32
}

// SendRequest is a request for a send queue. The segments belong to the queue pair until Post
// returns, the memory that they describe until the request has completed; that of an inline request
// until Post returns.
type SendRequest struct {
	ID            uint64
	Op            Opcode
	Segments      []Segment
	RemoteAddress uint64 // of Write, WriteImm and Read
	RemoteKey     uint32
	Imm           uint32
	Signaled      bool
	Inline        bool // the data is copied by Post; its Segment.Key is not used
	Fence         bool // begins after all earlier reads have ended
}

// RecvRequest is a request for a receive queue: the place of one Send. A WriteImm uses up one, and
// none of its memory.
type RecvRequest struct {
	ID       uint64
	Segments []Segment
}

// Completion is the end of a request. Of one that failed only ID, Status, Vendor and QP are valid.
type Completion struct {
	ID     uint64
	QP     uint32 // number of the queue pair
	Status Status
	Vendor uint32 // the device's own error code
	Op     Opcode // of WriteImm it is Write, of SendImm Send
	Bytes  uint32 // received
	Imm    uint32 // of Recv with HasImm and of RecvWriteImm
	HasImm bool
}

// EventKind is the kind of an Event.
type EventKind uint8

// Events.
const (
	OtherEvent    EventKind = iota
	PortUp                  // Event.Port is active again; its GIDs may have moved
	PortLost                // Event.Port is down
	GIDsChanged             // of Event.Port
	QPFailed                // Event.QP went to Failed by itself; not every device says so
	CQFailed                // a completion queue overflowed
	DeviceRemoved           // nothing works any more; Close must still be called
)

func (k EventKind) String() string {
	return name(int(k), "other event", "port up", "port down", "addresses changed", "queue pair failed",
		"completion queue failed", "device removed")
}

// Event is an asynchronous event of a device.
type Event struct {
	Kind EventKind
	Port int
	QP   uint32
	Code int // the verbs number
}

func (e Event) String() string {
	var b strings.Builder
	b.WriteString(e.Kind.String())
	switch e.Kind {
	case PortUp, PortLost, GIDsChanged:
		fmt.Fprintf(&b, " (port %d)", e.Port)
	case QPFailed:
		fmt.Fprintf(&b, " (queue pair %d)", e.QP)
	case OtherEvent:
		fmt.Fprintf(&b, " %d", e.Code)
	}
	return b.String()
}

func name(i int, names ...string) string {
	if i < len(names) {
		return names[i]
	}
	return fmt.Sprintf("%d", i)
}
