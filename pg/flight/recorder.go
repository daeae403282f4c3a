package flight

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"tutti/collectives"
)

// Sizes of the ring and of its file.
const (
	Records  = 1024
	FileSize = ringAt + Records*recordSize

	recordSize = 64
	groupsAt   = 4 << 10
	ringAt     = 64 << 10
	tick       = 10 * time.Millisecond
)

const (
	magic   = "tuttiFR\n"
	version = 2
)

// Total counts the operations of one kind that succeeded, and their bytes.
type Total struct{ Operations, Bytes uint64 }

// liveHeader is the beginning of the file. The recorder's lock protects it, except Alive.
type liveHeader struct {
	header
	Alive int64 // when the process last ticked
}

type header struct {
	Magic       [8]byte
	Version     uint32
	RecordSize  uint32
	Records     uint32
	GroupBytes  uint32 // used in the groups' area
	Next        uint64 // records written so far: the next one is number Next modulo Records
	Incarnation uint64
	Rank, Size  uint32
	PID, Flags  uint32
	Opened      int64
	Failures    [outcomes]uint64
	Totals      [kinds]Total
	JobLen      uint32
	HostLen     uint32
	Job         [128]byte
	Host        [256]byte
}

// groupHead describes a group in the groups' area; Listed ranks follow, 4 bytes each. No ranks are
// listed if the slots are the job's ranks.
type groupHead struct{ ID, Slot, Size, Listed uint32 }

// GroupEntry is the entry of a group in the groups' area.
type GroupEntry struct {
	bytes  uint32
	closed bool
}

// Close allows the recorder to drop the entry when a later group needs its room. It needs the lock
// of the recorder's methods.
func (e *GroupEntry) Close() { e.closed = true }

// Identity names the rank of a recorder.
type Identity struct {
	Job         string
	Rank, Size  int
	Incarnation uint64
	Host        string
}

// Recorder is the flight recorder of one rank. Its methods, except Close, need the lock of the
// rank's proxy, or any other that protects the recorder.
type Recorder struct {
	head   *liveHeader
	ring   *[Records]Record
	async  int           // running messages that were started and have a record in the ring
	groups []*GroupEntry // in the order of the groups' area
	mem    []byte
	path   string
	once   sync.Once
}

// FileName returns the name of the file of one incarnation of a rank.
func FileName(rank int, incarnation uint64) string {
	return fmt.Sprintf("flight-rank%d-%016x.bin", rank, incarnation)
}

// Open makes a recorder. If dir is not empty the ring is in dir/FileName, else in this process's
// memory. The error wraps ErrCopies if the ring cannot be there, and other files can be. Close ends
// it.
func Open(dir string, id Identity) (*Recorder, error) {
	r := &Recorder{}
	if dir != "" {
		r.path = filepath.Join(dir, FileName(id.Rank, id.Incarnation))
		mem, err := mapFile(r.path, FileSize)
		if err != nil {
			return nil, fmt.Errorf("flight recorder: %w", err)
		}
		r.mem = mem
		// An operation that is still running when the job ends records its outcome later. So the
		// mapping is removed when the recorder is no longer reachable.
		runtime.AddCleanup(r, unmap, mem)
	} else {
		words := make([]uint64, FileSize/8) // aligned
		r.mem = unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), FileSize)
	}
	r.head = (*liveHeader)(unsafe.Pointer(&r.mem[0]))
	r.ring = (*[Records]Record)(unsafe.Pointer(&r.mem[ringAt]))
	h := r.head
	h.Version, h.RecordSize, h.Records = version, recordSize, Records
	h.Incarnation, h.Rank, h.Size, h.PID = id.Incarnation, uint32(id.Rank), uint32(id.Size), uint32(os.Getpid())
	h.Opened = origin.now()
	h.JobLen, h.HostLen = uint32(copy(h.Job[:], id.Job)), uint32(copy(h.Host[:], id.Host))
	copy(h.Magic[:], magic) // last: the file is invalid before
	coarse.join(r)
	return r, nil
}

// Path returns the file's path, "" if there is none.
func (r *Recorder) Path() string { return r.path }

// Close ends the recorder. keep leaves its file in place. Records may still be written afterwards.
// Idempotent, and needs no lock.
func (r *Recorder) Close(keep bool) error {
	var err error
	r.once.Do(func() {
		coarse.leave(r)
		if r.path != "" && !keep {
			if err = os.Remove(r.path); errors.Is(err, os.ErrNotExist) {
				err = nil
			}
		}
	})
	return err
}

// Begin records the start of an operation: t is its record without number and time, in State
// Running. End takes the record that Begin returns, which may be changed until then. At most half
// of the ring belongs to started messages that are running: the records of further ones are not in
// the ring.
func (r *Recorder) Begin(t *Record, number uint64) *Record {
	var s *Record
	if t.Flags&Async != 0 && r.async >= Records/2 {
		s = new(Record)
	} else {
		if s = &r.ring[r.head.Next%Records]; s.State == Running {
			s = r.vacant()
		}
		r.head.Next++
		r.async += int(t.Flags & Async)
	}
	*s = *t
	s.Number, s.Started = number, coarse.now.Load()
	return s
}

// vacant skips records of running operations, which must not be overwritten. There are at most as
// many as groups, messages that a goroutine waits for, and half of the ring. If these fill the
// ring, the oldest is overwritten.
func (r *Recorder) vacant() *Record {
	for range Records {
		if s := &r.ring[r.head.Next%Records]; s.State != Running {
			return s
		}
		r.head.Next++
	}
	s := &r.ring[r.head.Next%Records]
	r.forget(s)
	return s
}

// forget counts one less running message, if s is the record of one and in the ring.
func (r *Recorder) forget(s *Record) {
	at := uintptr(unsafe.Pointer(s)) - uintptr(unsafe.Pointer(r.ring))
	if s.Flags&Async != 0 && at < unsafe.Sizeof(*r.ring) {
		r.async = max(0, r.async-1)
	}
}

// Count counts a failure of an operation that never began.
func (r *Recorder) Count(o Outcome) { r.head.Failures[o]++ }

// End records the outcome of an operation. s is Begin's.
func (r *Recorder) End(s *Record, o Outcome) {
	r.end(s, o)
	if o != OK {
		r.Count(o)
		return
	}
	t := &r.head.Totals[s.Call.Kind()%kinds]
	t.Operations++
	t.Bytes += s.Bytes
}

// EndUncounted is End for an operation that has succeeded and that the program has not called: it
// is not in the totals.
func (r *Recorder) EndUncounted(s *Record) { r.end(s, OK) }

func (r *Recorder) end(s *Record, o Outcome) {
	r.forget(s)
	s.Ended, s.State = coarse.now.Load(), o
}

// AddGroup records the members of a group, by slot. If its entry needs more room than there is,
// entries of closed groups are dropped, the earliest first. If even that is not enough, none is
// dropped and the group is not recorded.
func (r *Recorder) AddGroup(id uint32, slot int, ranks []int) *GroupEntry {
	head := groupHead{ID: id, Slot: uint32(slot), Size: uint32(len(ranks))}
	const fixed = uint32(unsafe.Sizeof(head))
	for i, rank := range ranks {
		if i != rank {
			head.Listed = uint32(len(ranks))
		}
	}
	e := &GroupEntry{bytes: fixed + 4*head.Listed}
	if !r.makeRoom(e.bytes) {
		return e
	}
	at := groupsAt + r.head.GroupBytes
	*(*groupHead)(unsafe.Pointer(&r.mem[at])) = head
	for i := range head.Listed {
		*(*uint32)(unsafe.Pointer(&r.mem[at+fixed+4*i])) = uint32(ranks[i])
	}
	r.groups = append(r.groups, e)
	atomic.AddUint32(&r.head.GroupBytes, e.bytes) // last, when the entry is complete
	return e
}

// makeRoom drops closed groups until n bytes of the groups' area are free. It returns false, and
// drops none, if there cannot be as many.
//
// The entries behind a dropped one are moved. GroupBytes never includes an entry that is being
// moved, so the file of a process that is killed meanwhile is valid: it lacks the groups that were
// still to be moved. The stores of GroupBytes are atomic because the compiler may drop or reorder
// others.
func (r *Recorder) makeRoom(n uint32) bool {
	area := r.mem[groupsAt:ringAt]
	free := uint32(len(area)) - r.head.GroupBytes
	if n <= free {
		return true
	}
	most := free
	for _, e := range r.groups {
		if e.closed {
			most += e.bytes
		}
	}
	if n > most {
		return false
	}
	kept := r.groups[:0]
	var from, to uint32 // where an entry is, and where it belongs
	for _, e := range r.groups {
		switch {
		case e.closed && free < n:
			free += e.bytes
			atomic.StoreUint32(&r.head.GroupBytes, to)
		case from == to:
			kept, to = append(kept, e), to+e.bytes
		default:
			copy(area[to:], area[from:from+e.bytes])
			kept, to = append(kept, e), to+e.bytes
			atomic.StoreUint32(&r.head.GroupBytes, to)
		}
		from += e.bytes
	}
	clear(r.groups[len(kept):])
	r.groups = kept
	return true
}

// Copy copies the records for decoding without the lock: all of running operations, and the last n
// of finished ones, all if n is negative.
func (r *Recorder) Copy(n int) *Image {
	im := &Image{header: r.head.header, alive: origin.now()}
	if n < 0 {
		n = Records
	}
	next := r.head.Next
	for back := uint64(1); back <= min(next, Records); back++ {
		s := &r.ring[(next-back)%Records]
		switch s.State {
		case none:
		case Running:
			im.records = append(im.records, *s)
		default:
			if n > 0 {
				n--
				im.records = append(im.records, *s)
			}
		}
	}
	return im
}

// origin is where the clock of this process's records begins: at the time of the wall clock then.
// Later settings of the wall clock do not change it, so that ages of operations are right. The
// clocks of two ranks differ by as much as their wall clocks were wrong when they began.
var origin = begin(time.Now())

type beginning struct {
	wall int64 // Unix time in nanoseconds
	at   time.Time
}

func begin(at time.Time) beginning { return beginning{at.UnixNano(), at} }

func (b beginning) now() int64 { return b.wall + int64(time.Since(b.at)) }

// Now returns the time by the coarse clock, which stands still while the process has no recorder.
func Now() int64 { return coarse.now.Load() }

// coarse is the process's coarse clock. It runs while there are recorders.
var coarse clock

type clock struct {
	now  atomic.Int64
	_    [56]byte // keeps now on a cache line of its own
	mu   sync.Mutex
	used []*Recorder
	stop chan struct{}
	done chan struct{}
}

// join keeps the clock ticking, and r.Alive up to date, until leave.
func (c *clock) join(r *Recorder) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.used = append(c.used, r)
	c.set()
	if len(c.used) > 1 {
		return
	}
	c.stop, c.done = make(chan struct{}), make(chan struct{})
	go func(stop, done chan struct{}) {
		defer close(done)
		t := time.NewTicker(tick)
		defer t.Stop()
		for {
			select {
			case <-stop:
				return
			case <-t.C:
				c.mu.Lock()
				c.set()
				c.mu.Unlock()
			}
		}
	}(c.stop, c.done)
}

func (c *clock) set() {
	now := origin.now()
	c.now.Store(now)
	for _, r := range c.used {
		atomic.StoreInt64(&r.head.Alive, now)
	}
}

func (c *clock) leave(r *Recorder) {
	c.mu.Lock()
	for i, o := range c.used {
		if o == r {
			c.used = append(c.used[:i:i], c.used[i+1:]...)
			break
		}
	}
	var done chan struct{}
	if len(c.used) == 0 {
		close(c.stop)
		done = c.done
	}
	c.mu.Unlock()
	if done != nil {
		<-done
	}
}

// Template returns a record for Begin.
func Template(group uint32, epoch uint64, call Call, count, bytes uint64) Record {
	return Record{Group: group, Epoch: uint32(epoch), Call: call, Count: count, Bytes: bytes, State: Running}
}

// Chosen records the algorithm of the operation, unless it prepares one in packets.
func (s *Record) Chosen(a collectives.Algo) {
	if !s.Call.Packets() {
		s.Call = s.Call.With(a)
	}
}

// QueuedSince returns the time since t of the coarse clock in the unit of Record.Queued.
func QueuedSince(t int64) uint16 { return uint16(min(max(0, Now()-t)/int64(tick), 1<<16-1)) }
