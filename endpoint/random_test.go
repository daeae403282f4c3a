package endpoint

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"tutti/endpoint/internal/link"
	"tutti/internal/proctest"
	"tutti/mem"
	"tutti/rdma/soft"
)

var (
	randomSeed = flag.Uint64("seed", 0, "seed of the random programs; 0: another one each time")
	randomOps  = flag.Int("ops", 10000, "operations of a random program; -short: a tenth")
	// tests/netns sets it.
	randomHosts = flag.String("hosts", "", "network namespaces of TestRandomProcesses, separated by commas, in which "+
		"each process listens on the interface data; default: this one, loopback")
)

// world is a random program: what its members do, and what it has found wrong.
type world struct {
	t       testing.TB
	seed    uint64
	n       int      // members, also in other processes
	chaos   bool     // operations are cancelled, connections break, regions come and go
	closes  bool     // peers are closed, too: messages that were not received are lost
	kills   int      // connections to each other member that a member of a burst shuts down
	at      string   // interfaces, as of Config
	cfgs    []Config // what members ask for, in turn; nil: nothing
	longest int      // message, in bytes
	left    atomic.Int64
	stopped atomic.Bool // endpoints are being closed
	bad     atomic.Int32
	mu      sync.Mutex
	counts  map[string]int
}

func (w *world) errorf(format string, args ...any) {
	if w.bad.Add(1) <= 10 {
		w.t.Errorf(format, args...)
	}
	w.left.Store(0)
}

func (w *world) count(what string) {
	w.mu.Lock()
	w.counts[what]++
	w.mu.Unlock()
}

// breaks reports whether connections are shut down.
func (w *world) breaks() bool { return w.chaos || w.kills > 0 }

const (
	longest  = 3 << 20 // message
	lanes    = 2
	laneSize = 1<<20 + 300<<10
	gap      = 4096 // between two lanes
	gapByte  = 0xa5
	longTime = 60 * time.Second
	lastCall = 200 * time.Millisecond // for messages whose sends have ended: they are here
)

// member is an endpoint of a world with a region "r", in which each other member has lanes of its
// own.
type member struct {
	w     *world
	i     int
	e     *Endpoint
	c     *Context
	infos []Info
	mem   []byte
	lanes [][]*lane // of member j
	sent  [][]bool  // to member j: was it acknowledged
	got   []map[uint64]bool

	mu     sync.Mutex
	region *Region
	peers  []*Peer
}

// lane is a range of another member's region that only one goroutine writes.
type lane struct {
	off  int64
	cur  []byte
	alts []altered // from writes that failed: each byte may have that value
	zero []bool    // the byte may be 0: the rest of a frame of a write that was given up
}

// altered is bytes of a lane from an offset.
type altered struct {
	at int
	b  []byte
}

func newMember(w *world, i int, r *rand.Rand, conns int) (*member, error) {
	m := &member{w: w, i: i, mem: bytes.Repeat([]byte{gapByte}, w.n*lanes*(laneSize+gap)+gap), peers: make([]*Peer,
		w.n),
		lanes: make([][]*lane, w.n), sent: make([][]bool, w.n), got: make([]map[uint64]bool, w.n)}
	for j := range w.n {
		m.got[j] = map[uint64]bool{}
		for k := range lanes {
			m.lanes[j] = append(m.lanes[j], &lane{off: laneAt(i, k), cur: bytes.Repeat([]byte{0x11}, laneSize)})
		}
	}
	for i := range w.n {
		for k := range lanes {
			copy(m.mem[laneAt(i, k):], bytes.Repeat([]byte{0x11}, laneSize))
		}
	}
	var err error
	if m.c, err = NewContext(ContextConfig{Loops: 1 + r.IntN(2)}); err != nil {
		return nil, err
	}
	cfg := Config{Secret: testSecret, Interfaces: cmp.Or(w.at, "127.0.0.1"), Name: fmt.Sprint("m", i), Conns: conns,
		Timeout: longTime}
	if len(w.cfgs) > 0 {
		asked := w.cfgs[i%len(w.cfgs)]
		cfg.Seal, cfg.Checksum, cfg.RDMA = asked.Seal, asked.Checksum, asked.RDMA
		if _, ok := cfg.RDMA.Provider.(*soft.Fabric); ok { // a device for each
			cfg.RDMA.Devices = fmt.Sprint("soft", i)
		}
	}
	m.e, err = New(m.c, overRDMA(cfg))
	if err == nil {
		m.region, err = m.e.Register("r", mem.Host(m.mem, mem.Anywhere), RegionConfig{Rights: Read | Write})
	}
	return m, err
}

func laneAt(i, k int) int64 { return int64(gap + (i*lanes+k)*(laneSize+gap)) }

// peer returns member j, connected if that is possible.
func (m *member) peer(j int) *Peer {
	m.mu.Lock()
	p := m.peers[j]
	m.mu.Unlock()
	if p != nil {
		return p
	}
	ctx, cancel := context.WithTimeout(context.Background(), longTime)
	defer cancel()
	for ctx.Err() == nil {
		p, err := m.e.Connect(ctx, m.infos[j])
		if err == nil {
			m.mu.Lock()
			m.peers[j] = p
			m.mu.Unlock()
			return p
		}
		if m.w.stopped.Load() || m.w.chaos && m.w.left.Load() < 0 {
			return nil
		}
		if !m.w.breaks() {
			m.w.errorf("member %d connects to %d: %v", m.i, j, err)
			return nil
		}
		m.w.count("connect: " + reason(err))
	}
	m.w.errorf("member %d cannot connect to %d", m.i, j)
	return nil
}

func reason(err error) string {
	var te *TimeoutError
	if errors.As(err, &te) {
		return "timeout"
	}
	for _, e := range []error{ErrCancelled, ErrClosed, ErrStale, ErrNoRegion, ErrBroken, ErrRefused, ErrSize} {
		if errors.Is(err, e) {
			return e.Error()
		}
	}
	return "?" + err.Error()
}

// disturb breaks something, now and then.
func (m *member) disturb(r *rand.Rand, j int) {
	if !m.w.chaos {
		return
	}
	switch x := r.IntN(1000); {
	case x < 12:
		m.cut(r, j)
	case x < 16 && m.w.closes:
		m.mu.Lock()
		p := m.peers[j]
		m.peers[j] = nil
		m.mu.Unlock()
		if p != nil {
			p.Close()
			m.w.count("peer closed")
		}
	case x < 22:
		m.mu.Lock()
		defer m.mu.Unlock()
		m.region.Unregister()
		before := bytes.Clone(m.mem)
		runtime.Gosched()
		if !bytes.Equal(before, m.mem) {
			m.w.errorf("member %d: the region changes after Unregister", m.i)
		}
		var err error
		if m.region, err = m.e.Register("r", mem.Host(m.mem, mem.Anywhere),
			RegionConfig{Rights: Read | Write}); err != nil && !m.w.stopped.Load() {
			m.w.errorf("register again: %v", err)
		}
		m.w.count("registered again")
	}
}

// cut shuts one of the connections to member j down.
func (m *member) cut(r *rand.Rand, j int) {
	m.mu.Lock()
	p := m.peers[j]
	m.mu.Unlock()
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if s := p.session; s != nil {
		if c := s.conns[r.IntN(len(s.conns))]; c != nil && c.Err() == nil {
			cut(c)
			m.w.count("cut")
		}
	}
}

// descriptor returns that of a connection's socket.
func descriptor(c *link.Conn) int {
	return int(reflect.ValueOf(c).Elem().FieldByName("fd").Int())
}

// cut shuts a connection's socket down.
func cut(c *link.Conn) { unix.Shutdown(descriptor(c), unix.SHUT_RDWR) }

// stalled reports whether a connection waits for room in its socket, and has not got it since.
func stalled(c *link.Conn) bool {
	v := reflect.ValueOf(c).Elem().FieldByName("stalled").FieldByName("v")
	if atomic.LoadInt32((*int32)(unsafe.Pointer(v.UnsafeAddr()))) != 1 { // full
		return false
	}
	room := []unix.PollFd{{Fd: int32(descriptor(c)), Events: unix.POLLOUT}} // as the loop asks
	n, err := unix.Poll(room, 0)
	return n == 0 && err == nil
}

// job is an operation under way.
type job struct {
	op    Op
	buf   []byte // with a canary at both ends; op.Local is in between
	lane  *lane
	at    int // of the range in the lane
	seq   uint64
	brief bool // its timeout is short
}

const canary = 64

// canaries returns memory full of canaries, and what an operation may use of it.
func canaries(n int) (buf, inner []byte) {
	buf = bytes.Repeat([]byte{0xc7}, n+2*canary)
	return buf, buf[canary:][:n:n]
}

func intact(b []byte) bool { return bytes.Count(b, []byte{0xc7}) == len(b) }

// noise is what fill takes bytes from: the race detector makes everything slow that looks at single
// bytes.
var noise = pattern(5<<20, 1)

func fill(b []byte, seed uint64) { copy(b, noise[seed*0x9e3779b97f4a7c15%(1<<20):]) }

var around = []int{0, 1, 64, 1000, 16 << 10, 64 << 10, 256 << 10, 1 << 20}

func size(r *rand.Rand, limit int) int {
	n := around[r.IntN(len(around))]
	if r.IntN(4) > 0 {
		n = around[r.IntN(6)]
	}
	return min(max(n+r.IntN(65)-32, 0), limit)
}

// message is what member i sends to j as number seq, of n bytes.
func message(b []byte, i, j int, seq uint64) {
	binary.LittleEndian.PutUint64(b, uint64(i)<<32|uint64(j))
	binary.LittleEndian.PutUint64(b[8:], seq)
	fill(b[16:], seq*64+uint64(i*8+j))
}

// work operates on member j until the program ends.
func (m *member) work(j int) {
	w := m.w
	r := rand.New(rand.NewPCG(w.seed, uint64(m.i*100+j)))
	var kept []*job // that have ended, and whose memory must not change
	check := func() {
		for _, x := range kept {
			if !intact(x.buf) {
				w.errorf("member %d: the memory of a %v changed after its end", m.i, x.op.Kind)
				return
			}
		}
		kept = kept[:0]
	}
	defer func() { check() }()
	for w.left.Load() > 0 {
		m.disturb(r, j)
		p := m.peer(j)
		if p == nil {
			return
		}
		n := 1
		if r.IntN(4) == 0 {
			n = 2 + r.IntN(6)
		}
		var jobs []*job
		free := slices.Clone(m.lanes[j])
		for range n {
			x := &job{op: Op{Kind: Kind(1 + r.IntN(3))}}
			if x.op.Kind != OpSend && len(free) == 0 {
				x.op.Kind = OpSend
			}
			switch x.op.Kind {
			case OpRead, OpWrite:
				x.lane = free[0]
				free = free[1:]
				k := size(r, laneSize)
				x.at = r.IntN(laneSize - k + 1)
				x.op.Region, x.op.Offset = "r", x.lane.off+int64(x.at)
				var inner []byte
				x.buf, inner = canaries(k)
				if x.op.Kind == OpWrite {
					fill(inner, r.Uint64())
				}
				x.op.Local = mem.Host(inner, mem.Anywhere)
			case OpSend:
				var inner []byte
				x.buf, inner = canaries(max(size(r, w.longest), 16))
				x.seq = uint64(len(m.sent[j]))
				m.sent[j] = append(m.sent[j], false)
				message(inner, m.i, j, x.seq)
				x.op.Local = mem.Host(inner, mem.Anywhere)
			}
			if w.chaos && r.IntN(10) == 0 {
				x.op.Timeout, x.brief = time.Duration(1+r.IntN(3000))*time.Microsecond, true
			}
			jobs = append(jobs, x)
		}
		w.left.Add(int64(-n))
		var f *Future
		if n == 1 {
			f = p.Start(jobs[0].op)
		} else {
			ops := make([]Op, n)
			for i, x := range jobs {
				ops[i] = x.op
			}
			f = p.Batch(ops)
		}
		cancelled := w.chaos && r.IntN(12) == 0
		if cancelled {
			ctx, cancel := context.WithTimeout(context.Background(), time.Duration(r.IntN(2000))*time.Microsecond)
			if r.IntN(2) == 0 {
				f.Wait(ctx)
			} else {
				<-ctx.Done()
				f.Cancel()
			}
			cancel()
			if !f.Ended() {
				w.errorf("a future has not ended after it was cancelled")
				return
			}
		} else if r.IntN(2) == 0 {
			f.Wait(context.Background())
		} else {
			select {
			case <-f.Done():
			case <-time.After(longTime + 30*time.Second):
				w.errorf("member %d: an operation does not end", m.i)
				return
			}
		}
		for i, x := range jobs {
			m.ended(j, x, f.Result(i), cancelled)
			copy(x.buf, bytes.Repeat([]byte{0xc7}, len(x.buf)))
			kept = append(kept, x)
		}
		if len(kept) > 20 {
			check()
		}
	}
}

// ended looks at the result of an operation.
func (m *member) ended(j int, x *job, res Result, cancelled bool) {
	w := m.w
	inner := x.buf[canary : len(x.buf)-canary]
	if !intact(x.buf[:canary]) || !intact(x.buf[len(x.buf)-canary:]) {
		w.errorf("member %d: a %v of %d bytes wrote beyond its memory", m.i, x.op.Kind, len(inner))
	}
	if err := res.Err; err != nil {
		why := reason(err)
		w.count(x.op.Kind.String() + ": " + why)
		fine := w.stopped.Load() || cancelled && why == ErrCancelled.Error() || x.brief && why == "timeout"
		fine = fine || w.breaks() && why == ErrBroken.Error()
		if w.chaos {
			switch {
			case why == ErrStale.Error(), why == ErrNoRegion.Error(),
				why == ErrClosed.Error(),
				x.op.Kind == OpSend && why == ErrCancelled.Error():
				fine = true
			}
		}
		if !fine {
			w.errorf("member %d, %v of %d bytes with %d: %v", m.i, x.op.Kind, len(inner), j, err)
		}
	} else if res.N != int64(len(inner)) {
		w.errorf("member %d: a %v of %d bytes ended with %d", m.i, x.op.Kind, len(inner), res.N)
	} else {
		w.count(x.op.Kind.String())
	}
	l := x.lane
	switch {
	case x.op.Kind == OpSend:
		m.sent[j][x.seq] = res.Err == nil
	case x.op.Kind == OpRead && res.Err == nil:
		l.check(w, fmt.Sprintf("member %d reads from %d", m.i, j), inner, x.at)
	case x.op.Kind == OpWrite && res.Err == nil:
		copy(l.cur[x.at:], inner)
		l.alts = slices.DeleteFunc(l.alts, func(alt altered) bool {
			from, to := max(x.at, alt.at), min(x.at+len(inner), alt.at+len(alt.b))
			if from < to {
				copy(alt.b[from-alt.at:to-alt.at], inner[from-x.at:])
			}
			return to-from == len(alt.b)
		})
		if l.zero != nil {
			clear(l.zero[x.at:][:len(inner)])
		}
	case x.op.Kind == OpWrite:
		if l.zero == nil {
			l.zero = make([]bool, laneSize)
		}
		l.alts = append(l.alts, altered{x.at, bytes.Clone(inner)})
		copy(l.zero[x.at:], yes[:len(inner)])
	}
}

var yes = slices.Repeat([]bool{true}, laneSize)

// check compares bytes of a lane with what they may be.
func (l *lane) check(w *world, what string, got []byte, at int) {
	if bytes.Equal(got, l.cur[at:][:len(got)]) {
		return
	}
	skip := 0
next:
	for i, b := range got {
		if i%4096 == 0 && len(got)-i >= 4096 && bytes.Equal(got[i:i+4096], l.cur[at+i:][:4096]) {
			skip = i + 4096
		}
		if i < skip || b == l.cur[at+i] || l.zero != nil && l.zero[at+i] && b == 0 {
			continue
		}
		for _, alt := range l.alts {
			if k := at + i - alt.at; k >= 0 && k < len(alt.b) && b == alt.b[k] {
				continue next
			}
		}
		w.errorf("%s: byte %d of the lane, %d of %d, is %#x, want %#x or one of %d others", what, at+i, i, len(got), b,
			l.cur[at+i], len(l.alts))
		return
	}
}

// receive receives from member j until done is closed and nothing more comes.
func (m *member) receive(j int, done <-chan struct{}) {
	w := m.w
	r := rand.New(rand.NewPCG(w.seed, uint64(m.i*100+j+50)))
	last := int64(-1)
	var late [][]byte // of recvs that have ended
	for {
		p := m.peer(j)
		if p == nil {
			return
		}
		ended := false
		select {
		case <-done:
			ended = true
		default:
		}
		n := 1 + r.IntN(3)
		ops, bufs := make([]Op, n), make([][]byte, n)
		for i := range ops {
			k := w.longest
			if r.IntN(4) == 0 {
				k = 16 + size(r, min(w.longest, 1<<20))
			}
			var inner []byte
			bufs[i], inner = canaries(k)
			ops[i] = Op{Kind: OpRecv, Local: mem.Host(inner, mem.Anywhere), Timeout: longTime}
			if w.chaos {
				ops[i].Timeout = time.Duration(1+r.IntN(30)) * time.Millisecond
			}
			if ended {
				ops[i].Timeout = lastCall
			}
		}
		f := p.Batch(ops)
		if !w.chaos && !ended {
			select {
			case <-f.Done():
			case <-done:
				select {
				case <-f.Done():
				case <-time.After(lastCall):
				}
				f.Cancel()
			}
		} else if w.chaos && r.IntN(5) == 0 {
			runtime.Gosched()
			f.Cancel()
		} else {
			f.Wait(context.Background())
		}
		none := true
		for i := range ops {
			res := f.Result(i)
			if res.Err != nil {
				why := reason(res.Err)
				w.count("recv: " + why)
				none = none && (why == "timeout" || why == ErrClosed.Error()) // else there may be more
				if why == ErrClosed.Error() {
					m.mu.Lock()
					if m.peers[j] == p {
						m.peers[j] = nil
					}
					m.mu.Unlock()
				}
				fine := w.chaos || w.stopped.Load() || ended || errors.Is(res.Err, ErrCancelled) ||
					w.breaks() && why == ErrBroken.Error()
				if strings.HasPrefix(why, "?") || !fine {
					w.errorf("member %d, recv from %d: %v", m.i, j, res.Err)
				}
				continue
			}
			none = false
			w.count("recv")
			got := bufs[i][canary:][:res.N]
			from, seq := binary.LittleEndian.Uint64(got), binary.LittleEndian.Uint64(got[8:])
			want := make([]byte, res.Total)
			message(want, j, m.i, seq)
			switch {
			case from != uint64(j)<<32|uint64(m.i):
				w.errorf("member %d has a message of member %d to %d", m.i, from>>32, uint32(from))
			case int64(seq) <= last:
				w.errorf("member %d: message %d of member %d after %d", m.i, seq, j, last)
			case !bytes.Equal(got, want[:res.N]):
				w.errorf("member %d: message %d of member %d is corrupted", m.i, seq, j)
			case res.N != min(res.Total, int64(ops[i].Local.Len())):
				w.errorf("member %d: %d bytes of a message of %d, there is room for %d", m.i, res.N, res.Total,
					ops[i].Local.Len())
			case !intact(bufs[i][:canary]) || !intact(bufs[i][canary+res.N:]):
				w.errorf("member %d: a recv of %d bytes wrote beyond", m.i, res.N)
			}
			last = int64(seq)
			m.got[j][seq] = true
		}
		for _, b := range late {
			if !intact(b) {
				w.errorf("member %d: the memory of a recv changed after its end", m.i)
			}
		}
		for _, b := range bufs {
			copy(b, bytes.Repeat([]byte{0xc7}, len(b)))
		}
		late = bufs
		if ended && none || w.stopped.Load() {
			return
		}
	}
}

// burst starts n operations on member j, half of them with one Future, and waits for none of them
// before all have started. Each write has a range of the first lane for itself; reads are from the
// last one, which is not written. If connections are killed while they are under way, it starts
// those that have failed again, all at once.
func (m *member) burst(j, n int) {
	w := m.w
	r := rand.New(rand.NewPCG(w.seed, uint64(m.i*100+j)))
	slot := laneSize / n
	// next makes operation i, with other bytes each time.
	next := func(i int, kind Kind) *job {
		x := &job{op: Op{Kind: kind}}
		var inner []byte
		switch x.op.Kind {
		case OpRead:
			k := size(r, 16<<10)
			x.lane, x.at = m.lanes[j][lanes-1], r.IntN(laneSize-k+1)
			x.buf, inner = canaries(k)
		case OpWrite:
			x.lane, x.at = m.lanes[j][0], i*slot
			k := slot // of one that is repeated nothing is left
			if w.kills == 0 {
				k = size(r, slot)
			}
			x.buf, inner = canaries(k)
			fill(inner, r.Uint64())
		case OpSend:
			x.buf, inner = canaries(max(size(r, w.longest), 16))
			x.seq = uint64(len(m.sent[j]))
			m.sent[j] = append(m.sent[j], false)
			message(inner, m.i, j, x.seq)
		}
		if x.lane != nil {
			x.op.Region, x.op.Offset = "r", x.lane.off+int64(x.at)
		}
		x.op.Local = mem.Host(inner, mem.Anywhere)
		return x
	}
	var left []int // operations
	kinds := map[int]Kind{}
	for i := range n {
		left, kinds[i] = append(left, i), Kind(1+r.IntN(3))
	}
	for kills := w.kills; len(left) > 0 && w.bad.Load() == 0; kills-- {
		p := m.peer(j)
		if p == nil {
			return
		}
		var jobs []*job
		var ops []Op
		for _, i := range left {
			x := next(i, kinds[i])
			jobs, ops = append(jobs, x), append(ops, x.op)
		}
		half := (len(ops) + 1) / 2
		var fs []*Future
		for _, op := range ops[:half] {
			fs = append(fs, p.Start(op))
		}
		fs = append(fs, p.Batch(ops[half:]))
		if kills > 0 {
			<-fs[r.IntN(half)].Done()
			m.cut(r, j)
		}
		var failed []int
		k := 0
		for _, f := range fs {
			f.Wait(context.Background())
			for at := range f.Len() {
				m.ended(j, jobs[k], f.Result(at), false)
				if f.Result(at).Err != nil {
					failed = append(failed, left[k])
				}
				k++
			}
		}
		left = failed
	}
	for k, l := range m.lanes[j] {
		if got := m.read(j, l.off); got != nil {
			l.check(w, fmt.Sprintf("lane %d of %d at %d", k, m.i, j), got, 0)
		}
	}
}

// read reads a lane at member j, again if the connections break; nil: it could not.
func (m *member) read(j int, off int64) []byte {
	got := make([]byte, laneSize)
	for {
		p := m.peer(j)
		if p == nil {
			return nil
		}
		err := p.Read(got, "r", off).Wait(context.Background())
		if err == nil {
			return got
		}
		if !m.w.breaks() || !errors.Is(err, ErrBroken) {
			m.w.errorf("member %d reads from %d: %v", m.i, j, err)
			return nil
		}
	}
}

// program runs the members of this process, and returns when all operations have ended.
func (w *world) program(members []*member) {
	done := make(chan struct{})
	var work, recv sync.WaitGroup
	for _, m := range members {
		for j := range w.n {
			if j != m.i {
				work.Go(func() { m.work(j) })
				recv.Go(func() { m.receive(j, done) })
			}
		}
	}
	work.Wait()
	close(done)
	recv.Wait()
}

func seedOf(t testing.TB) uint64 {
	seed := *randomSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-seed %d", seed)
	return seed
}

func opsOf() int64 {
	if testing.Short() {
		return int64(*randomOps / 10)
	}
	return int64(*randomOps)
}

// TestRandom: random programs of several endpoints in one process.
func TestRandom(t *testing.T) {
	type mode struct {
		name          string
		chaos, closes bool
		cfgs          []Config
		ops           int64
	}
	var all []mode
	for i, g := range guards {
		ops := opsOf() / 3
		if i > 0 {
			ops = opsOf() / 12
		}
		for _, m := range []mode{{name: "calm"}, {name: "chaos", chaos: true},
			{name: "closes", chaos: true, closes: true}} {
			all = append(all, mode{g.name + " " + m.name, m.chaos, m.closes, []Config{g.cfg}, ops})
		}
	}
	all = append(all, mode{"devices fail", true, false, nil, opsOf() / 2})
	for _, mode := range all {
		t.Run(mode.name, func(t *testing.T) {
			fault := func(*rand.Rand) {}
			if mode.cfgs == nil {
				f, rdma := newFabric(t, soft.Config{Devices: 3, Late: 3, ReuseKeys: true, ReuseNumbers: true})
				mode.cfgs = []Config{{RDMA: rdma}}
				fault = func(r *rand.Rand) { failDevice(f, fmt.Sprint("soft", r.IntN(3)), r) }
			}
			w := &world{t: t, seed: seedOf(t), n: 3, chaos: mode.chaos, closes: mode.closes, cfgs: mode.cfgs,
				longest: longest, counts: map[string]int{}}
			w.left.Store(mode.ops)
			overRDMA(Config{}) // the fabric's goroutine stays
			routines, files := runtime.NumGoroutine(), proctest.Descriptors()
			r := rand.New(rand.NewPCG(w.seed, 0))
			var members []*member
			var infos []Info
			for i := range w.n {
				m, err := newMember(w, i, r, 1+r.IntN(4))
				if err != nil {
					t.Fatal(err)
				}
				members, infos = append(members, m), append(infos, m.e.Info())
			}
			for _, m := range members {
				m.infos = infos
			}
			over := make(chan struct{})
			var faults sync.WaitGroup
			faults.Go(func() {
				for r := rand.New(rand.NewPCG(w.seed, 9)); ; {
					select {
					case <-over:
						return
					case <-time.After(time.Duration(50+r.IntN(200)) * time.Millisecond):
						fault(r)
					}
				}
			})
			w.program(members)
			close(over)
			faults.Wait()
			count := func() (direct, messages, detours uint64) {
				for _, m := range members {
					s := m.e.Stats()
					direct, detours = direct+s.Direct["read"].N+s.Direct["write"].N, detours+s.Detours
					messages += s.Direct["recv"].N
				}
				return direct, messages, detours
			}
			may := (*allDirect || mode.cfgs[0].RDMA.Provider != nil) && !mode.cfgs[0].Seal && !mode.cfgs[0].Checksum
			if may { // on a busy machine the program may end before the devices have connected
				until(t, "RDMA", func() bool {
					direct, _, _ := count()
					if p := members[0].peer(1); direct == 0 && p != nil {
						if err := p.Read(make([]byte, 1), "r", 0).Wait(t.Context()); err != nil && !w.chaos {
							t.Fatal(err)
						}
					}
					return direct > 0
				})
			}
			talks := may && !w.chaos && !testing.Short()
			if talks { // so may its messages
				until(t, "a message by RDMA", func() bool {
					_, messages, _ := count()
					if p, q := members[0].peer(1), members[1].peer(0); messages == 0 && p != nil && q != nil {
						f, g := p.Send(make([]byte, 4*long)), q.Recv(make([]byte, 4*long))
						wait(t, f)
						wait(t, g)
					}
					return messages > 0
				})
			}
			direct, messages, detours := count()
			for _, m := range members {
				m.region.Unregister()
			}
			for _, m := range members {
				for i := range w.n {
					if i == m.i {
						continue
					}
					for k, l := range members[i].lanes[m.i] {
						l.check(w, fmt.Sprintf("lane %d of %d in the region of %d", k, i, m.i),
							m.mem[l.off:][:laneSize], 0)
					}
					for seq, ok := range members[i].sent[m.i] {
						if ok && !m.got[i][uint64(seq)] && !w.closes {
							w.errorf("message %d of %d to %d was sent, and not received", seq, i, m.i)
							break
						}
					}
				}
				for at := int64(0); at < int64(len(m.mem)); at += laneSize + gap {
					if bytes.Count(m.mem[at:][:gap], []byte{gapByte}) != gap {
						w.errorf("member %d: the gap at %d has changed", m.i, at)
					}
				}
			}
			w.finish(members)
			eventually(t, "no goroutine and no descriptor is left", func() bool {
				return runtime.NumGoroutine() <= routines && proctest.Descriptors() <= files
			})
			t.Log(w.counts, "by RDMA:", direct, "and messages:", messages, "paths that failed:", detours)
			if (direct > 0) != may || !may && messages > 0 || talks && messages == 0 {
				t.Errorf("%d operations and %d messages went by RDMA", direct, messages)
			}
		})
	}
}

// failDevice has a device of f fail, for some milliseconds at most.
func failDevice(f *soft.Fabric, device string, r *rand.Rand) {
	switch r.IntN(4) {
	case 0:
		f.BreakAll(device)
	case 1:
		f.SetPort(device, 1, false)
		time.Sleep(time.Duration(r.IntN(5)) * time.Millisecond)
		f.SetPort(device, 1, true)
	case 2:
		f.SetPort(device, 1, false)
		f.MoveGIDs(device, 1, 1)
		f.SetPort(device, 1, true)
	case 3:
		f.MoveGIDs(device, 1, 1)
	}
}

// finish closes endpoints while operations run.
func (w *world) finish(members []*member) {
	w.stopped.Store(true)
	w.left.Store(1 << 40)
	var wg sync.WaitGroup
	for _, m := range members {
		for j := range w.n {
			if j == m.i || m.peers[j] == nil {
				continue
			}
			p := m.peers[j]
			wg.Go(func() {
				buf := make([]byte, 1<<20)
				for {
					err := p.Batch([]Op{{Kind: OpSend, Local: mem.Host(buf, mem.Anywhere)}, {Kind: OpRecv,
						Local: mem.Host(make([]byte, 1<<20), mem.Anywhere)},
						{Kind: OpRead, Region: "r", Local: mem.Host(make([]byte, 300<<10),
							mem.Anywhere)}}).Wait(context.Background())
					if errors.Is(err, ErrClosed) {
						return
					}
				}
			})
		}
	}
	for _, m := range members {
		wg.Go(func() { m.e.Close() })
	}
	ended := make(chan bool)
	go func() { wg.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(longTime):
		buf := make([]byte, 1<<20)
		w.t.Fatalf("operations do not end with their endpoint:\n%s", buf[:runtime.Stack(buf, true)])
	}
	for _, m := range members {
		if err := m.c.Close(); err != nil {
			w.t.Error(err)
		}
	}
}

// TestConnectFromBothSides: two endpoints that connect to each other at the same time can work at
// once.
func TestConnectFromBothSides(t *testing.T) {
	seed := seedOf(t)
	r := rand.New(rand.NewPCG(seed, 3))
	rounds := 200
	if testing.Short() {
		rounds = 40
	}
	ca, cb := newContext(t), newContext(t)
	bad := 0
	for i := range rounds {
		conns := 1 + r.IntN(4)
		a := newEndpoint(t, ca, Config{Name: "a", Conns: conns, Timeout: patience})
		b := newEndpoint(t, cb, Config{Name: "b", Conns: 1 + r.IntN(4), Timeout: patience})
		var wg sync.WaitGroup
		errs := make([]error, 2)
		for _, e := range []*Endpoint{a, b} {
			if _, err := e.Register("r", mem.Host(make([]byte, 64), mem.Anywhere),
				RegionConfig{Rights: Read | Write}); err != nil {
				t.Fatal(err)
			}
		}
		for k, x := range [][2]*Endpoint{{a, b}, {b, a}} {
			spin := r.IntN(200)
			wg.Go(func() {
				for range spin {
					runtime.Gosched()
				}
				ctx, cancel := context.WithTimeout(context.Background(), patience)
				defer cancel()
				p, err := x[0].Connect(ctx, x[1].Info())
				for range 20 {
					if err == nil {
						err = p.Read(make([]byte, 64), "r", 0).Wait(ctx)
					}
				}
				errs[k] = err
			})
		}
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			if bad++; bad <= 3 {
				t.Errorf("round %d, %d connections: %v", i, conns, err)
			}
		}
		a.Close()
		b.Close()
	}
	if bad > 0 {
		t.Errorf("%d of %d rounds failed", bad, rounds)
	}
}

// allGuards are what the members of a world ask for that has every mix of guards.
func allGuards() (cfgs []Config) {
	for _, g := range guards {
		cfgs = append(cfgs, g.cfg)
	}
	return cfgs
}

const childVariable = "TUTTI_ENDPOINT_RANDOM"

// TestRandomChild is a member of TestRandomProcesses in a process of its own, and nothing else.
func TestRandomChild(t *testing.T) {
	spec := strings.Fields(os.Getenv(childVariable))
	if len(spec) == 0 {
		return
	}
	number := func(i int) uint64 { n, _ := strconv.ParseUint(spec[i], 10, 64); return n }
	w := &world{t: t, seed: number(0), n: int(number(1)), chaos: spec[2] == "chaos", closes: true,
		longest: longest, counts: map[string]int{}}
	burst := spec[2] == "burst" || spec[2] == "killed"
	if burst {
		w.longest = 66 << 10 // some are too long to go at once
	}
	if spec[2] == "killed" {
		w.kills = 3
	}
	if *randomHosts != "" {
		w.at = "data"
	}
	i := int(number(3))
	w.left.Store(int64(number(4)))
	if spec[5] == "true" {
		w.cfgs = allGuards()
	}
	m, err := newMember(w, i, rand.New(rand.NewPCG(w.seed, uint64(i))), 1+i%4)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Printf("INFO %v\n", m.e.Info())
	in := bufio.NewReader(os.Stdin)
	for range w.n {
		line, err := in.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		info, err := ParseInfo(strings.TrimSpace(line))
		if err != nil {
			t.Fatal(err)
		}
		m.infos = append(m.infos, info)
	}
	var work sync.WaitGroup
	stop := make(chan struct{})
	var recv sync.WaitGroup
	for j := range w.n {
		if j != m.i {
			if burst {
				work.Go(func() { m.burst(j, int(number(4))/(w.n-1)) })
			} else {
				work.Go(func() { m.work(j) })
			}
			recv.Go(func() { m.receive(j, stop) })
		}
	}
	work.Wait()
	fmt.Println("DONE")
	in.ReadString('\n') // the others may still work
	w.stopped.Store(true)
	close(stop)
	recv.Wait()
	fmt.Println("STOPPED")
	io.Copy(io.Discard, in) // the others may still receive
	m.e.Close()
	if err := m.c.Close(); err != nil {
		t.Error(err)
	}
	fmt.Println("COUNTS", w.counts)
}

// TestRandomProcesses: random programs of endpoints in four processes. Those of a burst start all
// of their operations at once, and not fewer of them if the test has to be short. Those that are
// killed do so, too, and their connections are shut down meanwhile.
func TestRandomProcesses(t *testing.T) {
	for _, x := range []struct {
		kind    string
		guarded bool
		ops     int64
	}{
		{"calm", false, opsOf() / 2}, {"chaos", false, opsOf() / 2}, {"burst", false, int64(*randomOps)},
		{"killed", false, opsOf()},
		{"calm", true, opsOf() / 2}, {"chaos", true, opsOf() / 2}, {"burst", true, int64(*randomOps)},
		{"killed", true, opsOf()},
	} {
		name := x.kind
		if x.guarded {
			name = "guarded " + name
		}
		t.Run(name, func(t *testing.T) {
			seed := seedOf(t)
			const n = 4
			var hosts []string
			if *randomHosts != "" {
				if hosts = strings.Split(*randomHosts, ","); len(hosts) != n {
					t.Fatalf("-hosts %s: want %d of them", *randomHosts, n)
				}
			}
			var all []*proctest.Child
			var infos strings.Builder
			for i := range n {
				argv := []string{os.Args[0], "-test.run=^TestRandomChild$", "-test.v", "-test.timeout=300s",
					"-hosts=" + *randomHosts}
				if hosts != nil {
					argv = append([]string{"ip", "netns", "exec", hosts[i]}, argv...)
				}
				cmd := exec.Command(argv[0], argv[1:]...)
				cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d %d %s %d %d %v", childVariable, seed, n, x.kind, i,
					x.ops/n, x.guarded))
				c := proctest.RunPiped(t, cmd)
				c.Patience = 5 * time.Minute
				all = append(all, c)
			}
			until := func(c *proctest.Child, word string) string {
				for {
					line := c.Hear()
					if rest, ok := strings.CutPrefix(line, word); ok {
						return strings.TrimSpace(rest)
					}
					if s := strings.TrimSpace(line); !strings.HasPrefix(s, "===") {
						t.Log(s)
					}
				}
			}
			for _, c := range all {
				infos.WriteString(until(c, "INFO ") + "\n")
			}
			for _, c := range all {
				c.Tell(strings.TrimSuffix(infos.String(), "\n"))
			}
			for _, c := range all {
				until(c, "DONE")
			}
			for _, c := range all {
				c.Tell("stop")
			}
			for _, c := range all {
				until(c, "STOPPED")
			}
			for _, c := range all {
				c.In.Close()
			}
			for i, c := range all {
				c.End(0)
				_, rest, _ := strings.Cut(c.Out.String(), "STOPPED\n")
				t.Logf("member %d: %s", i, rest)
			}
		})
	}
}
