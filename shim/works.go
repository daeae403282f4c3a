//go:build cgo && linux

package main

// #include "internal.h"
import "C"

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"tutti/pg"
)

// work is an entry of the table of works: what Go keeps of it. It is reused when the host has
// released its handle and the operation has ended.
type work struct {
	c     *C.struct_work
	index uint32
	at    atomic.Pointer[pg.Work]
	ended func(error) // for OnEnd
	users atomic.Int32
}

var works struct {
	mu   sync.Mutex
	all  atomic.Pointer[[]*work]
	free []*work
}

// newWork returns a free work, nil if there is no memory for one.
func newWork() *work {
	works.mu.Lock()
	defer works.mu.Unlock()
	if len(works.free) == 0 && !moreWorksLocked() {
		return nil
	}
	n := len(works.free) - 1
	w := works.free[n]
	works.free = works.free[:n]
	w.users.Store(2)
	atomic.StoreUint32(w.word(), 0)
	atomic.StoreUint32(w.generation(), (atomic.LoadUint32(w.generation())+1)%(1<<generationBits))
	return w
}

func moreWorksLocked() bool {
	var all []*work
	if old := works.all.Load(); old != nil {
		all = append(all, *old...)
	}
	if len(all) == C.WORK_CHUNKS*C.WORKS_IN_CHUNK {
		return false
	}
	chunk := C.tutti_add_works(C.uint32_t(len(all) / C.WORKS_IN_CHUNK))
	if chunk == nil {
		return false
	}
	for i := range unsafe.Slice(chunk, C.WORKS_IN_CHUNK) {
		w := &work{c: (*C.struct_work)(unsafe.Add(unsafe.Pointer(chunk), i*int(unsafe.Sizeof(*chunk)))),
			index: uint32(len(all))}
		w.ended = w.end
		all, works.free = append(all, w), append(works.free, w)
	}
	works.all.Store(&all)
	return true
}

// The completion word, and the generation, in memory of C.
func (w *work) word() *uint32       { return (*uint32)(unsafe.Pointer(&w.c.word)) }
func (w *work) generation() *uint32 { return (*uint32)(unsafe.Pointer(&w.c.generation)) }

func (w *work) handle() uint64 {
	return handle(C.KIND_WORK, atomic.LoadUint32(w.generation()), w.index)
}

// findWork returns the work of a handle and its operation, or nil after describing the failure.
func findWork(h C.uint64_t, f *C.struct_failure) (*work, *pg.Work) {
	if all := works.all.Load(); all != nil && int(uint32(h)) < len(*all) {
		w := (*all)[uint32(h)]
		if at := w.at.Load(); at != nil && w.handle() == uint64(h) {
			return w, at
		}
	}
	invalid(f, "%#x is no work, or one that was released", uint64(h))
	return nil, nil
}

// end runs when the operation has ended, with a lock of package pg held.
func (w *work) end(err error) {
	atomic.StoreUint32(w.word(), uint32(1+code(err)))
	w.leave()
}

// leave ends the use by the host or by the operation. The last one frees the entry.
func (w *work) leave() {
	if w.users.Add(-1) > 0 {
		return
	}
	w.at.Store(nil)
	works.mu.Lock()
	defer works.mu.Unlock()
	works.free = append(works.free, w)
}

// unused undoes newWork.
func (w *work) unused() {
	atomic.StoreUint32(w.generation(), (atomic.LoadUint32(w.generation())+1)%(1<<generationBits))
	works.mu.Lock()
	defer works.mu.Unlock()
	works.free = append(works.free, w)
}

// start starts an operation for w, which is nil after a failure.
func start(h C.uint64_t, in *C.tutti_op, f *C.struct_failure) (w *work, at *pg.Work, c C.int) {
	g := findGroup(h, f)
	if g == nil {
		return nil, nil, C.TUTTI_EINVAL
	}
	var o operation
	if c := o.read(in, g.Rank(), f); c != C.TUTTI_OK {
		return nil, nil, c
	}
	if w = newWork(); w == nil {
		return nil, nil, failed(&coded{"no memory for another work", errNoMemory}, f)
	}
	return w, o.start(g.Group, time.Duration(in.timeout_ns)), C.TUTTI_OK
}

// give makes w the host's, with the operation at.
func (w *work) give(at *pg.Work) C.uint64_t {
	w.at.Store(at)
	h := w.handle()
	at.OnEnd(w.ended)
	return C.uint64_t(h)
}

//export goStart
func goStart(h C.uint64_t, in *C.tutti_op, out *C.uint64_t, f *C.struct_failure) C.int {
	w, at, c := start(h, in, f)
	if w != nil {
		*out = w.give(at)
	}
	return c
}

//export goRun
func goRun(h C.uint64_t, in *C.tutti_op, wait C.int64_t, out *C.uint64_t, f *C.struct_failure) C.int {
	w, at, c := start(h, in, f)
	if w == nil {
		return c
	}
	ended := false
	if wait < 0 {
		ended = at.Wait(context.Background()) == nil
	} else if wait > 0 {
		l := within(time.Duration(wait))
		ended = at.Wait(l) == nil
		l.release()
	}
	if ended {
		w.unused()
		return C.TUTTI_OK
	}
	*out = w.give(at)
	return C.TUTTI_EBUSY
}

// outcome describes the outcome of at in f.
func outcome(at *pg.Work, f *C.struct_failure) C.int { return failed(at.Err(), f) }

//export goWait
func goWait(h C.uint64_t, timeout C.int64_t, f *C.struct_failure) C.int {
	w, at := findWork(h, f)
	if w == nil {
		return C.TUTTI_EINVAL
	}
	var err error
	switch {
	case timeout < 0:
		err = at.Wait(context.Background())
	case timeout == 0:
		select {
		case <-at.Done():
			return outcome(at, f)
		default:
			return C.TUTTI_EBUSY
		}
	default:
		l := within(time.Duration(timeout))
		defer l.release()
		if err = at.Wait(l); err != nil && err == l.Err() {
			select {
			case <-at.Done():
				return outcome(at, f)
			default:
				return C.TUTTI_EBUSY
			}
		}
	}
	for w.handle() == uint64(h) && atomic.LoadUint32(w.word()) == 0 {
		runtime.Gosched() // end is about to run
	}
	return failed(err, f)
}

// goOutcome describes the outcome of a work; TUTTI_EBUSY if it runs.
//
//export goOutcome
func goOutcome(h C.uint64_t, f *C.struct_failure) C.int {
	w, at := findWork(h, f)
	if w == nil {
		return C.TUTTI_EINVAL
	}
	if atomic.LoadUint32(w.word()) == 0 {
		return C.TUTTI_EBUSY
	}
	return outcome(at, f)
}

//export goResult
func goResult(h C.uint64_t, received *C.tutti_status, here *C.int32_t, f *C.struct_failure) C.int {
	w, at := findWork(h, f)
	if w == nil {
		return C.TUTTI_EINVAL
	}
	if atomic.LoadUint32(w.word()) == 0 {
		return C.TUTTI_EBUSY
	}
	if here != nil {
		*here = 0
		if at.LocalSuccess() {
			*here = 1
		}
		return C.TUTTI_OK
	}
	if err := at.Err(); err != nil {
		return failed(err, f)
	}
	*received = status(at.Status())
	return C.TUTTI_OK
}

//export goRelease
func goRelease(h C.uint64_t, f *C.struct_failure) C.int {
	w, _ := findWork(h, f)
	if w == nil {
		return C.TUTTI_EINVAL
	}
	now := uint32(h>>32) & (1<<generationBits - 1)
	if !atomic.CompareAndSwapUint32(w.generation(), now, (now+1)%(1<<generationBits)) {
		return invalid(f, "%#x is no work, or one that was released", uint64(h))
	}
	w.leave()
	return C.TUTTI_OK
}
