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

	"tutti/mem"
	"tutti/p2p"
	"tutti/p2p/ring"
	"tutti/p2p/rma"
)

// Puts and gets access the memory of a peer where it is mapped into this process. The owner ends
// that without asking the peer's program: every access of a chunk, 64 KiB at most, is announced in a
// word, and asks whether the memory is still granted.
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
// Either the owner sees busy odd, and waits for the chunk, or the storer sees grant 0, and accesses
// nothing: each stores first and looks then (Dekker). What must be ordered, and by what:
//
//	storer  busy odd before the loads of gate and grant    amd64: XCHG is a full barrier; arm64: STLR, then LDAR
//	storer  these loads before the accesses of the chunk   amd64: loads are not passed; arm64: LDAR (acquire)
//	storer  the accesses before busy even                  amd64: stores stay in order; arm64: STLR (release)
//	owner   grant 0 before the loads of busy               amd64: XCHG; arm64: STLR, then LDAR
//	owner   these loads before it uses the memory          amd64: loads are not passed; arm64: LDAR (acquire)
//
// Loads and stores of words are those of sync/atomic, which are sequentially consistent on every
// processor that Go knows; the instructions are what they become. Only busy even is a store with
// release (ring.StoreRelease), which has to wait for nothing. String stores (REP MOVS) are in
// order with discrete stores that follow them. TestWithdrawOrder explores all interleavings, and
// finds that no pair can be left out.
//
// A storer that dies in the middle leaves busy odd. A peer closes its socket when it is in no chunk,
// and the kernel closes it when the process's last thread has ended: so when the socket's end has
// come from the peer, it does not access anything, and its word does not count. Where this end has
// closed the link first, the gate keeps the peer from beginning another chunk, and the link's words
// stay until the last one has ended, or the process has (pidfd).

// The link's words, by side of the writer; a line each, and spacing between.
const (
	wordSpacing = 128
	busyAt      = 0 * wordSpacing // of side 0
	gateAt      = 2 * wordSpacing
	newsAt      = 4 * wordSpacing // counts the times that the writer has stored signals
)

// words is the page of a link that holds them.
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
	closed bool // withdrawn; its record is used again when nobody looks at it
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

// count notes that region of g is exposed once more, or less.
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
	r, err := x.add(boardSize, false)
	if err != nil {
		return nil, err
	}
	x.m[r.ID].board = true
	b := &board{region: r}
	for off := boardSize - recordSize; off >= 0; off -= recordSize {
		b.free = append(b.free, off)
	}
	x.boards = append(x.boards, b)
	return b, nil
}

// trim frees boards without a grant, all but one unless the transport is closed.
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

// close says that the transport is.
func (x *exports) close() error {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.closed = true
	return x.end()
}

// end gives up the grants when the transport is closed and no peer is left that might use one.
func (x *exports) end() error {
	if x.prune(); !x.closed || len(x.links)+len(x.leavers) > 0 {
		return nil
	}
	for _, g := range x.grants {
		if !g.closed {
			x.count(g, -1)
		}
		g.board.free = append(g.board.free, g.off)
	}
	clear(x.grants)
	return x.trim()
}

// storing is a peer that accesses a chunk of this rank's memory.
type storing struct {
	l    *link
	busy uint64
}

// over reports whether the access has ended.
func (s *storing) over() bool {
	return s.l.words.at(busyAt, 1-s.l.side).Load() != s.busy || s.l.ceased.Load()
}

// gone reports whether a process has ended, as far as can be told.
func gone(pid int) bool {
	if pid <= 0 {
		return false
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return errors.Is(err, unix.ESRCH)
	}
	defer unix.Close(fd)
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
	return err == nil && n > 0
}

// withdraw implements p2p.Exposer.
func (x *exports) withdraw(ctx context.Context, remote *mem.Remote) error {
	x.mu.Lock()
	g := x.grants[remote.Generation]
	if g == nil || g.region != remote.ID {
		x.mu.Unlock()
		return nil // it was withdrawn before
	}
	if !g.closed {
		g.closed = true
		g.record().word(0).Store(0)
		x.count(g, -1)
	}
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
	if x.grants[remote.Generation] != g { // a second Withdraw at the same time was sooner
		return nil
	}
	delete(x.grants, remote.Generation)
	g.board.free = append(g.board.free, g.off)
	x.prune()
	return x.trim()
}

// prune forgets leavers whose access has ended.
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

// target is memory of the peer for one operation. It implements rma.Target.
type target struct {
	l           *link
	data, board *p2p.Mapping
	record      record
	id          uint64
	generation  uint64
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
		*t = target{l, data, b, b.Mem[at : at+recordSize], x.ID, x.Generation}
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
	l := t.l
	l.storing.Lock()
	if l.stopped {
		l.storing.Unlock()
		return nil, l.over()
	}
	l.raised++
	l.words.at(busyAt, l.side).Store(l.raised)
	m, err := t.look(rights, off, n)
	if err != nil {
		t.Leave()
	}
	return m, err
}

// look asks the owner's words for an access to n bytes at off.
func (t *target) look(rights mem.Rights, off, n uint64) ([]byte, error) {
	if t.l.words.at(gateAt, 1-t.l.side).Load() != 0 {
		return nil, fmt.Errorf("%v closed its link: %w", t.l.peer, p2p.ErrPeerGone)
	}
	if t.record.word(0).Load() != t.generation || t.record.word(1).Load() != t.id {
		return nil, p2p.ErrRevoked
	}
	base, length := t.record.word(2).Load(), t.record.word(3).Load()
	switch size := uint64(len(t.data.Mem)); {
	case !mem.Rights(t.record.word(4).Load()).Has(rights):
		return nil, p2p.ErrRights
	case n > length || off > length-n || rights == mem.Signal && (base+off)%mem.WordSize != 0:
		return nil, p2p.ErrBounds
	case length > size || base > size-length:
		return nil, fmt.Errorf("%w: %v exposes %d bytes at %d of a region of %d", p2p.ErrProtocol, t.l.peer, length,
			base, size)
	}
	return t.data.Mem[base+off:][:n], nil
}

// Leave implements rma.Target.
func (t *target) Leave() {
	l := t.l
	l.lower()
	l.storing.Unlock()
}

// lower says that the access has ended: a store behind all accesses before it.
func (l *link) lower() {
	l.raised++
	ring.StoreRelease(l.words.raw(busyAt, l.side), l.raised)
}

// nowMax is up to how many bytes PutNow puts.
const nowMax = 4 << 10

// PutNow implements p2p.Immediate.
func (l *link) PutNow(local mem.Memory, to *mem.Remote, offset uint64, s p2p.Signal) bool {
	n := local.Len()
	if n > nowMax || n == 0 && s.At == nil || !local.Loc().Host() || l.Ready() ||
		n > 0 && p2p.CheckAccess("put", to, mem.Write, offset, uint64(n)) != nil ||
		s.At != nil && p2p.CheckAccess("signal", s.At, mem.Signal, s.Offset, mem.WordSize) != nil {
		return false
	}
	if l.stale.Load() {
		l.forget()
	}
	l.storing.Lock()
	for known := false; ; known = true {
		if l.stopped {
			l.storing.Unlock()
			return false
		}
		if (n == 0 || l.recall(to) != nil) && (s.At == nil || l.recall(s.At) != nil) {
			break
		}
		l.storing.Unlock()
		if known || !l.know(to, n > 0) || !l.know(s.At, s.At != nil) {
			return false
		}
		l.storing.Lock()
	}
	defer l.storing.Unlock()
	l.raised++
	l.words.at(busyAt, l.side).Store(l.raised)
	defer l.lower()
	var data, word []byte
	var err error
	if n > 0 {
		if data, err = l.recall(to).look(mem.Write, offset, uint64(n)); err != nil {
			return false // Put finds the same, and says so
		}
	}
	if s.At != nil {
		if word, err = l.recall(s.At).look(mem.Signal, s.Offset, mem.WordSize); err != nil {
			return false
		}
	}
	copy(data, local.Bytes())
	if word != nil {
		ring.StoreRelease((*uint64)(unsafe.Pointer(unsafe.SliceData(word))), s.Value)
		l.Signalled()
	}
	return true
}

// recall returns the target of x among those that were used last, nil if it is not there. Under
// storing.
func (l *link) recall(x *mem.Remote) *target {
	for _, t := range &l.recent {
		if t != nil && t.generation == x.Generation && t.id == x.ID {
			return t
		}
	}
	return nil
}

// know has recall find the target of x, if that is needed, unless it takes time.
func (l *link) know(x *mem.Remote, needed bool) bool {
	if !needed {
		return true
	}
	l.storing.Lock()
	known := l.recall(x) != nil
	l.storing.Unlock()
	if known {
		return true
	}
	t, err := l.Reach(x, mem.Write)
	if err != nil || t == nil {
		return false
	}
	l.storing.Lock()
	defer l.storing.Unlock()
	if l.stopped {
		l.Drop(t)
		return false
	}
	at := &l.recent[l.next%len(l.recent)]
	l.next++
	if *at != nil {
		l.Drop(*at)
	}
	*at = t.(*target)
	return true
}

// forget lets go of what recall would find.
func (l *link) forget() {
	l.storing.Lock()
	defer l.storing.Unlock()
	l.stale.Store(false)
	for i, t := range l.recent {
		if t != nil {
			t.data.Release()
			t.board.Release()
			l.recent[i] = nil
		}
	}
}

// cease has this end access nothing of the peer any more. It waits for a chunk that is under way.
func (l *link) cease() {
	l.storing.Lock()
	l.stopped = true
	l.storing.Unlock()
}

// Signalled implements rma.Reach. A peer that sleeps looks at news after it has armed the link.
func (l *link) Signalled() {
	l.told++
	l.Nudge(l.words.raw(newsAt, l.side), l.told)
}

// over says why nothing may be put or got any more, nil while it may.
func (l *link) over() error {
	if err := l.Err(); err != nil {
		return err
	}
	l.storing.Lock()
	defer l.storing.Unlock()
	if l.stopped {
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
