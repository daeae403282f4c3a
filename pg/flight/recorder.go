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

// Sizes of the ring and of the file that it may lie in.
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
	version = 1
)

// Total counts the operations of one kind that ended well, and their bytes.
type Total struct{ Operations, Bytes uint64 }

// header is the beginning of the file, written under the recorder's lock but for Alive.
type liveHeader struct {
	header
	Alive int64 // when the process last ticked
}

type header struct {
	Magic       [8]byte
	Version     uint32
	RecordSize  uint32
	Records     uint32
	GroupBytes  uint32 // used of the groups' area
	Next        uint64 // records written so far: the next one goes to Next modulo Records
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

// groupHead describes a group in the groups' area; Listed ranks follow, 4 bytes each. None are
// listed where the slots are the job's ranks, nor where there is no room.
type groupHead struct{ ID, Slot, Size, Listed uint32 }

// Identity says whose recorder it is.
type Identity struct {
	Job         string
	Rank, Size  int
	Incarnation uint64
	Host        string
}

// Recorder is the flight recorder of one rank. But for Close, its methods need the lock of the
// rank's proxy, or any that serves the same end.
type Recorder struct {
	head *liveHeader
	ring *[Records]Record
	mem  []byte
	path string
	once sync.Once
}

// FileName is the name of the file of one life of a rank.
func FileName(rank int, incarnation uint64) string {
	return fmt.Sprintf("flight-rank%d-%016x.bin", rank, incarnation)
}

// Open makes a recorder. If dir is not empty the ring lies in dir/FileName, else in this process's
// memory. Close ends it.
func Open(dir string, id Identity) (*Recorder, error) {
	r := &Recorder{}
	if dir != "" {
		r.path = filepath.Join(dir, FileName(id.Rank, id.Incarnation))
		mem, err := mapFile(r.path, FileSize)
		if err != nil {
			return nil, fmt.Errorf("flight recorder: %w", err)
		}
		r.mem = mem
		// Whoever still has an operation under way when the job ends writes its outcome later: the
		// mapping goes when nothing can reach the recorder any more.
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
	h.Opened = time.Now().UnixNano()
	h.JobLen, h.HostLen = uint32(copy(h.Job[:], id.Job)), uint32(copy(h.Host[:], id.Host))
	copy(h.Magic[:], magic) // last: before this it is no file of ours
	coarse.join(r)
	return r, nil
}

// Path returns the file's path, "" if there is none.
func (r *Recorder) Path() string { return r.path }

// Close gives the recorder up. keep says that its file is to stay, for whoever wants to know how it
// ended. Records may still be written afterwards. Idempotent, and needs no lock.
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

// Begin records that an operation starts: t is all of it but number and time, with State Running.
// The record returned is for End and may be changed until then.
func (r *Recorder) Begin(t *Record, number uint64) *Record {
	s := &r.ring[r.head.Next%Records]
	if s.State == Running {
		s = r.vacant()
	}
	r.head.Next++
	*s = *t
	s.Number, s.Started = number, coarse.now.Load()
	return s
}

// vacant passes over operations that still run, so that none is overwritten. There are at most as
// many as groups and messages under way; if these fill the ring, the oldest is lost.
func (r *Recorder) vacant() *Record {
	for range Records {
		if s := &r.ring[r.head.Next%Records]; s.State != Running {
			return s
		}
		r.head.Next++
	}
	return &r.ring[r.head.Next%Records]
}

// Count counts an outcome that is not OK, of an operation that never began.
func (r *Recorder) Count(o Outcome) { r.head.Failures[o]++ }

// End records how an operation ended. s is Begin's.
func (r *Recorder) End(s *Record, o Outcome) {
	s.Ended, s.State = coarse.now.Load(), o
	if o != OK {
		r.Count(o)
		return
	}
	t := &r.head.Totals[s.Call.Kind()%kinds]
	t.Operations++
	t.Bytes += s.Bytes
}

// Written returns how many records were written so far.
func (r *Recorder) Written() uint64 { return r.head.Next }

// AddGroup notes the members of a group, by slot, for whoever reads the file.
func (r *Recorder) AddGroup(id uint32, slot int, ranks []int) {
	head := groupHead{ID: id, Slot: uint32(slot), Size: uint32(len(ranks))}
	const fixed = uint32(unsafe.Sizeof(head))
	at, room := groupsAt+r.head.GroupBytes, uint32(ringAt-groupsAt)-r.head.GroupBytes
	if fixed > room {
		return
	}
	for i, rank := range ranks {
		if i != rank {
			head.Listed = uint32(len(ranks))
		}
	}
	if fixed+4*head.Listed > room {
		head.Listed = 0
	}
	*(*groupHead)(unsafe.Pointer(&r.mem[at])) = head
	for i := range head.Listed {
		*(*uint32)(unsafe.Pointer(&r.mem[at+fixed+4*i])) = uint32(ranks[i])
	}
	r.head.GroupBytes += fixed + 4*head.Listed // last, when all of it is there
}

// Copy returns what is recorded, for decoding without the lock. n bounds the finished operations:
// the last ones; negative: all. Those that run are all there.
func (r *Recorder) Copy(n int) *Image {
	im := &Image{header: r.head.header}
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

// Now returns the time by the coarse clock, which stands still while there is no recorder in the
// process.
func Now() int64 { return coarse.now.Load() }

// coarse is the process's coarse clock. It runs while there are recorders.
var coarse clock

type clock struct {
	now  atomic.Int64
	_    [56]byte // who reads now is not disturbed by the rest
	mu   sync.Mutex
	used []*Recorder
	stop chan struct{}
	done chan struct{}
}

// join keeps the clock going, and r told of it, until leave.
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
	now := time.Now().UnixNano()
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

// Chosen notes which algorithm it has come to be.
func (s *Record) Chosen(a collectives.Algo) { s.Call = s.Call.With(a) }

// QueuedSince is how long something that was queued at a time by the coarse clock has waited, as
// Record.Queued has it.
func QueuedSince(t int64) uint16 { return uint16(min(max(0, Now()-t)/int64(tick), 1<<16-1)) }
