package exec

import (
	"cmp"
	"runtime"
	"unsafe"

	"tutti/collectives"
	"tutti/kernels"
	"tutti/p2p"
)

// Memory is moved and reduced without the proxy's lock, so that other operations of this rank
// progress meanwhile. This is safe because:
//
//   - The memory belongs to the running call, or to the runner. No posted Recv may fill it
//     (collectives.Plan.Check proves that), and only the call that has the turn runs this group's
//     steps.
//   - Messages that a link lends are the exception: the link takes them back, under the lock,
//     when another operation needs the link. They are read under the lock, piece by piece, and
//     looked up again whenever the lock was released between two pieces.
//   - A failure or a cancellation does not interrupt a move. The operation notices it at its next
//     wait, or between two long pieces, so that it returns when nothing touches its memory.
//   - Mapped memory of a peer stays mapped while the operation holds its Mapping, even if the
//     link has ended.
const (
	// unlockedFrom is the size of a result in bytes from which on it is made without the lock. To
	// release the lock and take it again costs some 30 ns.
	unlockedFrom = 32 << 10
	// lockedFor is the number of bytes of a piece of lent messages, behind which Proxy.Moved may
	// offer the lock to other goroutines.
	lockedFor = 64 << 10
	// turnEvery is the number of bytes of a result between two checks whether the operation has
	// failed.
	turnEvery = 2 << 20
	// cachedFills is the number of bytes that a call may write, to memory that it has not read, so
	// that they are likely to stay in a shared cache: kernels.CopyShared of pieces of cachedPiece
	// is fastest then. Beyond, longer copies than cachedCopy are left to Go's, which bypasses the
	// caches with pieces of more than 1 MiB on amd64.
	cachedFills = 8 << 20
	cachedCopy  = 1 << 20
	cachedPiece = 256 << 10
	// stagedBytes is the size of the memory for pieces of the peers' plain memory that a step
	// folds. A piece has stagedLeast bytes or more.
	stagedBytes = 256 << 10
	stagedLeast = 32 << 10
)

// testHookUnlocked is called without the lock, before memory is moved.
var testHookUnlocked = func() {}

// pieces calls f for consecutive pieces of n bytes until the operation fails. Between two pieces it
// yields the processor if Go uses only one. With several, Gosched wakes idle processors, which
// takes more time from other goroutines than it gives them. Without the lock.
func (r *Runner) pieces(n, piece int, f func(at, n int)) error {
	testHookUnlocked()
	for at := 0; at < n; at += piece {
		if at > 0 && at%turnEvery == 0 {
			if r.single {
				runtime.Gosched()
			}
			if err := r.wait.Err(); err != nil {
				return err
			}
		}
		f(at, min(piece, n-at))
	}
	return nil
}

// copy moves n bytes. dst and src may be equal.
func (r *Runner) copy(dst, src unsafe.Pointer, n int) error {
	if dst == src || n == 0 {
		return nil
	}
	if n < unlockedFrom {
		kernels.Copy(dst, src, n)
		r.proxy.Moved(n)
		return nil
	}
	r.proxy.Leave()
	defer r.proxy.Return()
	piece, move := cachedPiece, kernels.CopyShared
	if n > cachedCopy && r.fills(r.prog) > cachedFills {
		piece, move = turnEvery, kernels.Copy
	}
	return r.pieces(n, piece, func(at, n int) { move(unsafe.Add(dst, at), unsafe.Add(src, at), n) })
}

// convert runs kernels.Widen or kernels.Narrow on n elements of size bytes, the larger of both
// types.
func (r *Runner) convert(f func(dt kernels.DType, dst, src unsafe.Pointer, n int), dst, src unsafe.Pointer, n int,
	toSize, fromSize int) error {
	dt, size := r.cur.DType, max(toSize, fromSize)
	if n*size < unlockedFrom {
		f(dt, dst, src, n)
		r.proxy.Moved(n * size)
		return nil
	}
	r.proxy.Leave()
	defer r.proxy.Return()
	return r.pieces(n*size, turnEvery, func(at, n int) {
		at, n = at/size, n/size
		f(dt, unsafe.Add(dst, at*toSize), unsafe.Add(src, at*fromSize), n)
	})
}

// A fold is a running ReduceInto step.
type fold struct {
	reduce  kernels.Reducer
	dtype   kernels.DType
	size    int // of an element
	dst     unsafe.Pointer
	divisor int // 0: none
}

// do folds n bytes at offset at of srcs.
func (f *fold) do(srcs []unsafe.Pointer, at, n int) {
	dst := unsafe.Add(f.dst, at)
	f.reduce(dst, srcs, n/f.size)
	if f.divisor > 0 {
		kernels.Scale(f.dtype, dst, n/f.size, f.divisor)
	}
}

// combination returns the operation of a ReduceInto step, and what its result is divided by, 0 for
// nothing.
func (r *Runner) combination(s *collectives.Step) (op kernels.Op, divisor int) {
	if op = r.cur.Op; op == kernels.Avg && len(s.Srcs) != len(r.set.Active) {
		if op = kernels.Sum; s.Final {
			divisor = len(r.set.Active)
		}
	}
	return op, divisor
}

// reduce runs ReduceInto step i.
func (r *Runner) reduce(prog *program, i int, s *collectives.Step, dtype kernels.DType) error {
	n := s.Dst.Len
	if n == 0 {
		return nil
	}
	f := fold{dtype: dtype, size: dtype.Size(), dst: r.at(&s.Dst)}
	var op kernels.Op
	var err error
	op, f.divisor = r.combination(s)
	if f.reduce, err = kernels.Lookup(op, dtype); err != nil {
		return err
	}
	if !r.holds(prog.lent[i]) {
		return r.failed()
	}
	for j := range s.Srcs {
		if len(prog.loads) == 0 {
			break
		}
		if _, reader := r.far(&s.Srcs[j]); reader != nil {
			return r.foldFar(f, s)
		}
	}
	if n < unlockedFrom {
		r.sources(prog, i, s, 0)
		f.do(r.ptrs, 0, n)
		r.worked = n
		return nil
	}
	piece := max(lockedFor/len(s.Srcs)&^63, 64) / f.size * f.size
	for at := 0; at < n; at += piece {
		if !r.sources(prog, i, s, at) {
			return r.unlockedFold(f, at, n-at)
		}
		k := min(piece, n-at)
		f.do(r.ptrs, at, k)
		if r.proxy.Moved(k*len(s.Srcs)) && at+k < n && !r.holds(prog.lent[i]) {
			return r.failed()
		}
	}
	return nil
}

// unlockedFold folds n bytes at offset at. The sources belong to the call.
func (r *Runner) unlockedFold(f fold, at, n int) error {
	r.proxy.Leave()
	defer r.proxy.Return()
	return r.pieces(n, turnEvery, func(from, n int) {
		for j := range r.ptrs {
			if from > 0 { // never past the end of a memory
				r.ptrs[j] = unsafe.Add(r.ptrs[j], turnEvery)
			}
		}
		f.do(r.ptrs, at+from, n)
	})
}

// sources sets r.ptrs to the sources of step i, from offset at on. It reports whether a link lends
// any of them.
func (r *Runner) sources(prog *program, i int, s *collectives.Step, at int) (lent bool) {
	r.ptrs = r.ptrs[:0]
	for j := range s.Srcs {
		own := r.at(&s.Srcs[j])
		p := own
		if n := prog.lent[i][j]; n >= 0 {
			p = unsafe.Pointer(unsafe.SliceData(r.recvs[n].View()))
			lent = lent || p != own
		}
		r.ptrs = append(r.ptrs, unsafe.Add(p, at))
	}
	return lent
}

// failed returns why lent messages have been taken back.
func (r *Runner) failed() error { return cmp.Or(r.coll.Err(), p2p.ErrClosed) }

// holds reports whether the messages of these Recv steps (-1: none) are still lent: a channel that
// is closed takes them back.
func (r *Runner) holds(recvs []int32) bool {
	for _, n := range recvs {
		if n >= 0 && !r.recvs[n].Done() {
			return false
		}
	}
	return true
}
