package shm

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"tutti/kernels"
	"tutti/mem"
	"tutti/p2p"
	"tutti/p2p/ring"
	"tutti/p2p/rma"
)

// Puts and gets access the peer's memory through a mapping in this process. The owner ends the
// access without the peer's cooperation: before every access to a chunk, of at most nowMax bytes,
// the peer announces it in a word, and checks whether the memory is still granted.
//
// Words, 64 bits each:
//
//	busy   one for each direction of a link, in memory of the link that both ends write. The rank that
//	       accesses (the storer) writes it: odd while it accesses memory of the other, and each
//	       access has another odd number.
//	gate   one for each direction, beside it. The owner writes it: not 0 once it has closed the link.
//	grant  one for each exposure, in memory that its owner alone can write (a board, sealed). It
//	       holds the generation, or 0. Behind it are the region and the range.
//
// Protocol:
//
//	storer  1 busy becomes odd  2 look at gate and grant  3 access the chunk, if both allow it  4 busy becomes even
//	owner   1 grant becomes 0   2 look at busy of all links; where it is odd, until it changes  3 the memory is free
//
// Either the owner sees busy odd, and waits for the chunk, or the storer sees grant 0, and does not
// access the memory: each stores first and loads then (Dekker). Required orders, and what provides
// them:
//
//	storer  busy odd before the loads of gate and grant    amd64: XCHG is a full barrier; arm64: STLR, then LDAR
//	storer  these loads before the accesses of the chunk   amd64: loads are not passed; arm64: LDAR (acquire)
//	storer  the accesses before busy even                  amd64: stores stay in order; arm64: STLR (release)
//	owner   grant 0 before the loads of busy               amd64: XCHG; arm64: STLR, then LDAR
//	owner   these loads before it uses the memory          amd64: loads are not passed; arm64: LDAR (acquire)
//
// Loads and stores of words are those of sync/atomic, which are sequentially consistent on all
// processors; the table names their instructions. Only the store of the even busy is a release
// (ring.StoreRelease), which waits for no other store. String stores (REP MOVS) are ordered with
// discrete stores that follow them. TestWithdrawOrder explores all interleavings, and shows that
// each pair is necessary.
//
// A storer that dies during an access leaves busy odd. A peer closes its socket only between
// accesses, and the kernel closes it after the process's last thread has ended. So after the end of
// the peer's socket its word is ignored. If this end has closed the link first, the gate keeps the
// peer from beginning another chunk, and the link's words stay until the last chunk or the process
// (pidfd) has ended.

// The link's words, by side of the writer, each on a line of its own.
const (
	wordSpacing = 128
	busyAt      = 0 * wordSpacing // of side 0
	gateAt      = 2 * wordSpacing
	newsAt      = 4 * wordSpacing // counts the writer's stores of signals
)

// words is the page of a link with these words.
type words []byte

func (w words) at(off, side int) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(w.raw(off, side)))
}

func (w words) raw(off, side int) *uint64 { return (*uint64)(unsafe.Pointer(&w[off+side*wordSpacing])) }

// A grant is a record of a board:
//
//	0 generation | 8 region | 16 base | 24 length | 32 rights
const (
	recordSize = 64
	boardSize  = 64 << 10
	keySize    = 12 // board's region, offset of the record
)

type record []byte

func (r record) word(i int) *atomic.Uint64 { return (*atomic.Uint64)(unsafe.Pointer(&r[8*i])) }

// board is a region of records.
type board struct {
	region *mem.Region
	free   []int
}

// grant is an exposure of this rank.
type grant struct {
	board  *board
	off    int
	region uint64
	rights mem.Rights
	closed bool // withdrawn; its record is reused when no access uses it
}

func (g *grant) record() record { return record(g.board.region.Bytes()[g.off : g.off+recordSize]) }

// expose implements p2p.Exposer.
func (x *exports) expose(r *mem.Region, remote *mem.Remote) ([]byte, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	e := x.m[r.ID]
	writes := remote.Rights&(mem.Write|mem.Signal) != 0
	switch {
	case e == nil:
		return nil, fmt.Errorf("shm: region %#x is not shared memory: %w", r.ID, errors.ErrUnsupported)
	case writes && e.store < 0:
		return nil, fmt.Errorf("shm: region %#x cannot be written by peers (see AllocWritable): %w", r.ID,
			errors.ErrUnsupported)
	case remote.Base+remote.Len > uint64(e.size):
		return nil, fmt.Errorf("shm: %d bytes at %d of region %#x, which has %d: %w", remote.Len, remote.Base, r.ID,
			e.size, p2p.ErrBounds)
	}
	b, err := x.room()
	if err != nil {
		return nil, err
	}
	g := &grant{board: b, off: b.free[len(b.free)-1], region: r.ID, rights: remote.Rights}
	b.free = b.free[:len(b.free)-1]
	rec := g.record()
	for i, v := range []uint64{remote.ID, remote.Base, remote.Len, uint64(remote.Rights)} {
		rec.word(i + 1).Store(v)
	}
	rec.word(0).Store(remote.Generation)
	x.count(g, 1)
	x.grants[remote.Generation] = g
	key := binary.LittleEndian.AppendUint64(nil, b.region.ID)
	return binary.LittleEndian.AppendUint32(key, uint32(g.off)), nil
}

// count adds n to the exposures of the region of g.
func (x *exports) count(g *grant, n int) {
	e := x.m[g.region]
	if e == nil {
		return
	}
	if g.rights.Has(mem.Read) {
		e.readers += n
	}
	if g.rights&(mem.Write|mem.Signal) != 0 {
		e.writers += n
	}
}

// room returns a board with a free record.
func (x *exports) room() (*board, error) {
	for _, b := range x.boards {
		if len(b.free) > 0 {
			return b, nil
		}
	}
	e, mapped, err := newExport(boardSize, false)
	if err != nil {
		return nil, err
	}
	r := x.add(e, mapped)
	x.m[r.ID].board = true
	b := &board{region: r}
	for off := boardSize - recordSize; off >= 0; off -= recordSize {
		b.free = append(b.free, off)
	}
	x.boards = append(x.boards, b)
	return b, nil
}

// trim frees boards without a grant, except one while the transport is open.
func (x *exports) trim() error {
	var errs []error
	kept := x.boards[:0]
	for _, b := range x.boards {
		if len(b.free) < boardSize/recordSize || !x.closed && len(kept) == 0 {
			kept = append(kept, b)
			continue
		}
		errs = append(errs, x.freeLocked(b.region.ID), unmap(b.region.Bytes()))
	}
	clear(x.boards[len(kept):])
	x.boards = kept
	return errors.Join(errs...)
}

// close closes the exports with the transport.
func (x *exports) close() error {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.closed = true
	return x.end()
}

// end closes the grants and frees the boards when the transport and all links are closed. A grant
// stays as long as Withdraw has to wait for the access of a peer whose link is closed.
func (x *exports) end() error {
	if x.prune(); !x.closed || len(x.links) > 0 {
		return nil
	}
	for generation, g := range x.grants {
		x.shut(g)
		g.release()
		if len(x.leavers) == 0 {
			delete(x.grants, generation)
		}
	}
	return x.trim()
}

// shut lets no access begin under a grant.
func (x *exports) shut(g *grant) {
	if !g.closed {
		g.closed = true
		g.record().word(0).Store(0)
		x.count(g, -1)
	}
}

// release gives the record of a grant that is shut back to its board.
func (g *grant) release() {
	if g.board != nil {
		g.board.free = append(g.board.free, g.off)
		g.board = nil
	}
}

// storing is an access of a peer to a chunk of this rank's memory.
type storing struct {
	l    *link
	busy uint64
}

// over reports whether the access has ended.
func (s *storing) over() bool {
	return s.l.words.at(busyAt, 1-s.l.side).Load() != s.busy || s.l.ceased.Load()
}

// openProcess is replaced by tests.
var openProcess = unix.PidfdOpen

// gone reports whether the process with this number is known to have ended. It is not while another
// process has the number nor, where the system opens no processes, before the parent has waited for
// it.
func gone(pid int) bool {
	if pid <= 0 {
		return false
	}
	fd, err := openProcess(pid, 0)
	if err != nil {
		return unix.Kill(pid, 0) == unix.ESRCH
	}
	defer unix.Close(fd)
	return exited(fd)
}

// withdraw implements p2p.Exposer.
func (x *exports) withdraw(ctx context.Context, remote *mem.Remote) error {
	x.mu.Lock()
	g := x.grants[remote.Generation]
	if g == nil || g.region != remote.ID {
		x.mu.Unlock()
		return nil // withdrawn before
	}
	x.shut(g)
	var wait []storing
	look := func(l *link) {
		s := storing{l, l.words.at(busyAt, 1-l.side).Load()}
		if s.busy%2 == 1 && !l.ceased.Load() {
			wait = append(wait, s)
		}
	}
	for l := range x.links {
		look(l)
	}
	x.prune()
	for _, l := range x.leavers {
		look(l)
	}
	x.mu.Unlock()
	for i := range wait {
		if err := wait[i].wait(ctx); err != nil {
			return fmt.Errorf("shm: %v is in the middle of an access to region %#x, and has not ended it: %w",
				wait[i].l.peer, remote.ID, err)
		}
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.grants[remote.Generation] != g { // a concurrent Withdraw came first
		return nil
	}
	delete(x.grants, remote.Generation)
	g.release()
	x.prune()
	return x.trim()
}

// prune removes leavers whose access has ended.
func (x *exports) prune() {
	x.leavers = slices.DeleteFunc(x.leavers, func(l *link) bool {
		s := storing{l, l.words.at(busyAt, 1-l.side).Load()}
		return s.busy%2 == 0 || s.over() || gone(l.pid)
	})
}

// wait returns when the access has ended.
func (s *storing) wait(ctx context.Context) error {
	for range 1000 {
		if s.over() {
			return nil
		}
		runtime.Gosched()
	}
	t := time.NewTimer(0)
	defer t.Stop()
	for pause := 50 * time.Microsecond; ; pause = min(2*pause, 5*time.Millisecond) {
		t.Reset(pause)
		select {
		case <-t.C:
			if s.over() || gone(s.l.pid) {
				return nil
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// target is the peer's memory of one operation. It implements rma.Target.
type target struct {
	l           *link
	data, board *p2p.Mapping
	record      record
	id          uint64
	generation  uint64

	// Read from the record at the first access. They stay as long as the record has the generation.
	rights  mem.Rights
	granted []byte // part of data; nil: not read yet
}

// Reach implements rma.Reach.
func (l *link) Reach(x *mem.Remote, rights mem.Rights) (rma.Target, error) {
	key, ok := x.Key(name)
	if !ok {
		return nil, fmt.Errorf("region %#x of %v has no key for shm: %w", x.ID, l.peer, errors.ErrUnsupported)
	}
	if len(key) != keySize {
		return nil, fmt.Errorf("%w: a key of %d bytes, want %d", mem.ErrRemote, len(key), keySize)
	}
	at := uint64(binary.LittleEndian.Uint32(key[8:]))
	data, err := l.mapping(importKey{x.ID, rights != mem.Read})
	if err != nil {
		return nil, err
	}
	b, err := l.mapping(importKey{binary.LittleEndian.Uint64(key), false})
	switch {
	case err == nil && b != nil && (at%recordSize != 0 || at+recordSize > uint64(len(b.Mem))):
		b.Release()
		err = fmt.Errorf("%w: a record at %d of %d bytes", mem.ErrRemote, at, len(b.Mem))
	case err == nil && b != nil && data != nil:
		var t *target
		if n := len(l.spare); n > 0 {
			t, l.spare = l.spare[n-1], l.spare[:n-1]
		} else {
			t = new(target)
		}
		*t = target{l: l, data: data, board: b, record: b.Mem[at : at+recordSize], id: x.ID, generation: x.Generation}
		return t, nil
	case b != nil:
		b.Release()
	}
	if data != nil {
		data.Release()
	}
	return nil, err
}

// Drop implements rma.Reach.
func (l *link) Drop(t rma.Target) {
	if t, ok := t.(*target); ok {
		t.data.Release()
		t.board.Release()
		*t = target{}
		l.spare = append(l.spare, t)
	}
}

// Enter implements rma.Target.
func (t *target) Enter(rights mem.Rights, off, n uint64) ([]byte, error) {
	if !t.l.raise() {
		return nil, t.l.over()
	}
	m, err := t.look(rights, off, n)
	if err != nil {
		t.Leave()
	}
	return m, err
}

// look checks the owner's words for an access to n bytes at off.
func (t *target) look(rights mem.Rights, off, n uint64) ([]byte, error) {
	if t.l.gated() {
		return nil, fmt.Errorf("%v closed its link: %w", t.l.peer, p2p.ErrPeerGone)
	}
	if !t.valid() {
		return nil, p2p.ErrRevoked
	}
	if t.granted == nil {
		if err := t.read(); err != nil {
			return nil, err
		}
	}
	if !t.rights.Has(rights) {
		return nil, p2p.ErrRights
	}
	m := t.part(rights, off, n)
	if m == nil {
		return nil, p2p.ErrBounds
	}
	return m, nil
}

// gated reports whether the peer has closed the link.
func (l *link) gated() bool { return l.words.at(gateAt, 1-l.side).Load() != 0 }

// valid reports whether the owner still grants the access.
func (t *target) valid() bool { return t.record.word(0).Load() == t.generation }

// read takes the range and the rights from the record.
func (t *target) read() error {
	id, base, length := t.record.word(1).Load(), t.record.word(2).Load(), t.record.word(3).Load()
	switch size := uint64(len(t.data.Mem)); {
	case id != t.id:
		return p2p.ErrRevoked
	case length > size || base > size-length:
		return fmt.Errorf("%w: %v exposes %d bytes at %d of a region of %d", p2p.ErrProtocol, t.l.peer, length,
			base, size)
	}
	t.granted, t.rights = t.data.Mem[base:base+length:base+length], mem.Rights(t.record.word(4).Load())
	return nil
}

// part returns n bytes at off of the range, or nil if they are not in it, or not the word of a
// signal.
func (t *target) part(rights mem.Rights, off, n uint64) []byte {
	m := t.granted
	if n > uint64(len(m)) || off > uint64(len(m))-n {
		return nil
	}
	m = m[off:][:n]
	if rights == mem.Signal && uintptr(unsafe.Pointer(unsafe.SliceData(m)))%mem.WordSize != 0 {
		return nil
	}
	return m
}

// Leave implements rma.Target.
func (t *target) Leave() { t.l.lower() }

// raise begins an access to a chunk of the peer's memory, unless this end has ceased.
func (l *link) raise() bool {
	ring.StoreRelease(&l.raised, l.raised+1) // first, for cease
	l.words.at(busyAt, l.side).Store(l.raised)
	if l.stopped.Load() {
		l.lower()
		return false
	}
	return true
}

// lower ends the access: a store ordered after all accesses.
func (l *link) lower() {
	ring.StoreRelease(l.words.raw(busyAt, l.side), l.raised+1)
	ring.StoreRelease(&l.raised, l.raised+1)
}

// nowMax is the largest put of PutNow in bytes, and bounds one access to the peer's memory. The
// caller holds the lock meanwhile: for 20 to 40 us, and up to 0.4 ms where the copy takes its lines
// from a core with which this one shares no cache.
const nowMax = 1 << 20

// PutNow implements p2p.Immediate.
func (l *link) PutNow(local []byte, to *mem.Remote, offset uint64, s *p2p.Signal) bool {
	if len(local) > nowMax || len(local) == 0 && s == nil || l.Ready() {
		return false
	}
	if l.stale.Load() {
		l.forget()
	}
	for known := false; ; known = true {
		if !l.raise() {
			return false
		}
		if l.place(local, to, offset, s) {
			l.lower()
			if s != nil {
				l.Signalled()
			}
			return true
		}
		l.lower()
		if known || len(local) > 0 && !l.know(to) || s != nil && !l.know(s.At) {
			return false // Put returns the error
		}
	}
}

// Near implements p2p.Immediate.
func (l *link) Near(to *mem.Remote) uintptr {
	l.knowing.Lock()
	defer l.knowing.Unlock()
	if t := l.known(to); t != nil {
		return uintptr(unsafe.Pointer(unsafe.SliceData(t.granted)))
	}
	return 0
}

// place copies src to offset of to, and then writes s, if both targets are known and their owner
// grants the access. The caller has raised the busy word.
func (l *link) place(src []byte, to *mem.Remote, offset uint64, s *p2p.Signal) bool {
	var data, word []byte
	if len(src) > 0 {
		if data = l.recall(to, mem.Write, offset, uint64(len(src))); data == nil {
			return false
		}
	}
	if s != nil {
		if word = l.recall(s.At, mem.Signal, s.Offset, mem.WordSize); word == nil {
			return false
		}
	}
	if l.gated() {
		return false
	}
	if s != nil { // the owner polls the word; this processor has its line by the time of the store
		kernels.Acquire(uintptr(unsafe.Pointer(unsafe.SliceData(word))), mem.WordSize)
	}
	kernels.CopyOut(unsafe.Pointer(unsafe.SliceData(data)), unsafe.Pointer(unsafe.SliceData(src)), len(src), len(src))
	if s != nil {
		ring.StoreRelease((*uint64)(unsafe.Pointer(unsafe.SliceData(word))), s.Value)
	}
	return true
}

// recall returns n bytes at off of x if its target is known and its owner grants the access, else
// nil. The caller has raised the busy word, so that Close does not forget the targets meanwhile.
func (l *link) recall(x *mem.Remote, rights mem.Rights, off, n uint64) []byte {
	t := l.known(x)
	if t == nil || !t.valid() || !t.rights.Has(rights) {
		return nil
	}
	return t.part(rights, off, n)
}

// known returns the recent target of x, nil if there is none. The caller has raised the busy word,
// or holds knowing.
func (l *link) known(x *mem.Remote) *target {
	for _, t := range &l.recent {
		if t != nil && t.generation == x.Generation && t.id == x.ID {
			return t
		}
	}
	return nil
}

// know makes the target of x known to recall, if that is quick and its owner grants an access.
func (l *link) know(x *mem.Remote) bool {
	l.knowing.Lock()
	defer l.knowing.Unlock()
	if l.known(x) != nil {
		return true
	}
	r, err := l.Reach(x, mem.Write)
	if err != nil || r == nil {
		return false
	}
	t := r.(*target)
	if !t.valid() || t.read() != nil || l.stopped.Load() {
		l.Drop(t)
		return false
	}
	at := &l.recent[l.next%len(l.recent)]
	l.next++
	if *at != nil {
		l.Drop(*at)
	}
	*at = t
	return true
}

// forget releases the recent targets.
func (l *link) forget() {
	l.knowing.Lock()
	defer l.knowing.Unlock()
	l.stale.Store(false)
	for i, t := range l.recent {
		if t != nil {
			t.data.Release()
			t.board.Release()
			l.recent[i] = nil
		}
	}
}

// cease ends this end's access to the peer's memory. It waits for a chunk under way: an access
// raises the busy word before it looks at stopped. The peer can write the word itself.
func (l *link) cease() {
	l.stopped.Store(true)
	for atomic.LoadUint64(&l.raised)%2 == 1 {
		runtime.Gosched()
	}
}

// Signalled implements rma.Reach. A sleeping peer reads news after it has armed the link.
func (l *link) Signalled() {
	l.told++
	l.Nudge(l.words.raw(newsAt, l.side), l.told)
}

// over returns why puts and gets are not possible any more, or nil.
func (l *link) over() error {
	if err := l.Err(); err != nil {
		return err
	}
	if l.stopped.Load() {
		return fmt.Errorf("%v: %w", l.peer, p2p.ErrPeerGone)
	}
	return nil
}

// Arm implements p2p.Link.
func (l *link) Arm() bool {
	if l.stale.Load() {
		l.forget()
	}
	if l.Ready() || l.End.Arm() {
		return true
	}
	if n := l.words.at(newsAt, 1-l.side).Load(); n != l.heard {
		l.heard = n
		l.Disarm()
		return true
	}
	return false
}
