package exec

import (
	"cmp"
	"runtime"
	"unsafe"

	"tutti/collectives"
	"tutti/kernels"
	"tutti/p2p"
)

// Memory is moved and reduced without the proxy's lock, so that other operations of this rank go on
// meanwhile. What makes that safe:
//
//   - The memories belong to the running call, or to the runner: no Recv that is posted may fill
//     them (collectives.Plan.Check sees to that), and nobody else runs this group's steps, for the
//     call has the turn.
//   - A message that a link lends is the exception: the link takes it back, under the lock, when
//     anybody needs the link. It is read with the lock, piece by piece, and found again whenever the
//     lock was given up between two pieces.
//   - A failure or a cancellation ends nothing that is under way. The operation learns of it at its
//     next wait, or between two long pieces, and so returns when nothing touches its memory any more.
//   - Mapped memory of a peer stays mapped while the operation holds its Mapping, whatever becomes of
//     the link.
const (
	// unlockedFrom is the number of bytes of a result from which on it is made without the lock. To
	// give the lock up and to take it again costs some 30 ns.
	unlockedFrom = 32 << 10
	// lockedFor is the number of bytes of lent messages that are read before others may get the lock
	// who want it.
	lockedFor = 64 << 10
	// turnEvery is the number of bytes of a result after which it is looked whether the operation may
	// go on.
	turnEvery = 2 << 20
	// cachedCopy is the longest copy that is likely to stay in a shared cache. A copy of more than
	// cachedPiece at once goes around the caches.
	cachedCopy  = 4 << 20
	cachedPiece = 256 << 10
)

// testHookUnlocked is called without the lock, before memory is moved.
var testHookUnlocked = func() {}

// pieces calls f for one piece after the other of n bytes, as long as the operation may go on.
// Between two it gives the processor up if that is the only one that Go uses. With several, those
// whom Gosched wakes to look for work take more time from other goroutines than they give them.
// Without the lock.
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

// copy moves n bytes, which may be the same.
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
	piece := turnEvery
	if n <= cachedCopy {
		piece = cachedPiece
	}
	return r.pieces(n, piece, func(at, n int) { kernels.Copy(unsafe.Add(dst, at), unsafe.Add(src, at), n) })
}

// convert is kernels.Widen or kernels.Narrow of n elements of size bytes, the larger of both types.
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

// A fold is a Combine step that runs.
type fold struct {
	reduce  kernels.Reducer
	dtype   kernels.DType
	size    int // of an element
	dst     unsafe.Pointer
	divisor int // 0: none
}

// do folds n bytes at offset at; srcs are there already.
func (f *fold) do(srcs []unsafe.Pointer, at, n int) {
	dst := unsafe.Add(f.dst, at)
	f.reduce(dst, srcs, n/f.size)
	if f.divisor > 0 {
		kernels.Scale(f.dtype, dst, n/f.size, f.divisor)
	}
}

// combine runs Combine step i.
func (r *Runner) combine(prog *program, i int, s *collectives.Step, dtype kernels.DType) error {
	n := s.Dst.Len
	if n == 0 {
		return nil
	}
	op := r.cur.Op
	f := fold{dtype: dtype, size: dtype.Size(), dst: r.at(&s.Dst)}
	if op == kernels.Avg && len(s.Srcs) != len(r.set.Active) {
		if op = kernels.Sum; s.Final {
			f.divisor = len(r.set.Active)
		}
	}
	var err error
	if f.reduce, err = kernels.Lookup(op, dtype); err != nil {
		return err
	}
	if !r.holds(prog.lent[i]) {
		return r.failed()
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

// unlockedFold folds n bytes at offset at of sources that are the call's own.
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

// sources finds the sources of step i, from offset at on, for r.ptrs. It reports whether a link
// lends any of them.
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

// failed says why messages that had come are not here any more.
func (r *Runner) failed() error { return cmp.Or(r.coll.Err(), p2p.ErrClosed) }

// holds reports whether the messages of these Recv steps (-1: none) are still here: a channel that
// is closed takes back what it lent.
func (r *Runner) holds(recvs []int32) bool {
	for _, n := range recvs {
		if n >= 0 && !r.recvs[n].Done() {
			return false
		}
	}
	return true
}
