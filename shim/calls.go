//go:build cgo && linux

package main

// #include "internal.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"
	"unsafe"

	"tutti/pg"
)

// goEnter does nothing in Go: see enter in entry.c.
//
//export goEnter
func goEnter() {}

// goCall makes a call that may wait.
//
//export goCall
func goCall(c *C.struct_call) C.int {
	c.code = C.int32_t(call(context.Background(), c))
	return C.int(c.code)
}

// begun are the calls that goBegin has begun and that have not ended.
var begun struct {
	mu   sync.Mutex
	last uint64
	ends map[uint64]context.CancelCauseFunc
}

// goBegin makes a call on a goroutine, and returns its number. c.done tells the end.
//
//export goBegin
func goBegin(c *C.struct_call) C.uint64_t {
	ctx, cancel := context.WithCancelCause(context.Background())
	begun.mu.Lock()
	defer begun.mu.Unlock()
	begun.last++
	id := begun.last
	if begun.ends == nil {
		begun.ends = map[uint64]context.CancelCauseFunc{}
	}
	begun.ends[id] = cancel
	go func() {
		c.code = C.int32_t(call(ctx, c))
		begun.mu.Lock()
		delete(begun.ends, id)
		begun.mu.Unlock()
		cancel(nil)
		C.tutti_wake(unsafe.Pointer(&c.done))
	}()
	return C.uint64_t(id)
}

// goCancel ends a call that goBegin began, if it has not ended.
//
//export goCancel
func goCancel(id C.uint64_t) {
	begun.mu.Lock()
	defer begun.mu.Unlock()
	if cancel := begun.ends[uint64(id)]; cancel != nil {
		cancel(errCancelled)
	}
}

// interrupted returns err, marked if it is a consequence of goCancel: it says so, or is an error
// without a type, such as that of a connection whose time a cancelled context has ended.
func interrupted(ctx context.Context, err error) error {
	if err != nil && context.Cause(ctx) == errCancelled &&
		(errors.Is(err, context.Canceled) || code(err) == C.TUTTI_EINTERNAL) {
		return &coded{err.Error(), errCancelled}
	}
	return err
}

// call makes a call. Its timeout is c's, or none if that is not above 0.
func call(ctx context.Context, c *C.struct_call) C.int {
	f := c.failure
	if c.kind != C.CALL_DO && c.timeout_ns > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(c.timeout_ns))
		defer cancel()
	}
	if c.kind == C.CALL_JOIN {
		h, err := joinGroup(ctx, (*C.tutti_config)(c.arg))
		c.out = C.uint64_t(h)
		return failed(interrupted(ctx, err), f)
	}
	if c.kind == C.CALL_MEMBER_NEW {
		h, err := newMember(ctx, (*C.tutti_config)(c.arg))
		c.out = C.uint64_t(h)
		return failed(interrupted(ctx, err), f)
	}
	if c.kind == C.CALL_MEMBER_FORM {
		return memberForm(ctx, c)
	}
	if c.kind == C.CALL_STORE_OPEN {
		h, err := openStore(ctx, (*C.tutti_config)(c.arg))
		c.out = C.uint64_t(h)
		return failed(interrupted(ctx, err), f)
	}
	if c.kind >= C.CALL_WINDOW_MAP {
		return windowCall(ctx, c)
	}
	g := findGroup(c.handle, f)
	if g == nil {
		return C.TUTTI_EINVAL
	}
	var err error
	switch c.kind {
	case C.CALL_DO:
		return perform(ctx, g, (*C.tutti_op)(c.arg), f)
	case C.CALL_SPLIT:
		var sub *pg.Group
		if sub, err = g.Split(ctx, int(c.a), int(c.b)); err == nil && sub != nil {
			g.store.retain()
			c.out = C.uint64_t(groups.add(&group{sub, g.store}))
		}
	case C.CALL_RECOVER:
		err = g.Recover(ctx)
	case C.CALL_ADMIT:
		var n int
		n, err = g.Admit(ctx)
		c.out = C.uint64_t(n)
	case C.CALL_EVICT:
		err = g.Evict(ctx, int(c.a))
	case C.CALL_REJOIN:
		var again *pg.Group
		if again, err = g.Rejoin(ctx); err == nil {
			g.store.retain()
			c.out = C.uint64_t(groups.add(&group{again, g.store}))
		}
	case C.CALL_AGREE:
		var all bool
		if all, err = g.Agree(ctx, c.a != 0); all {
			c.out = 1
		}
	case C.CALL_WINDOW_NEW:
		var w *pg.Window
		size := int(min(c.n, math.MaxInt)) // too large, too: pg tells the other ranks
		if w, err = pg.NewWindow(ctx, g.Group, size); err == nil {
			c.out = C.uint64_t(windows.add(w))
		} else if bad := new(*pg.ArgumentError); c.n > math.MaxInt && errors.As(err, bad) {
			(*bad).Got = fmt.Sprintf("%d bytes", uint64(c.n))
		}
	}
	return failed(interrupted(ctx, err), f)
}

// windowCall makes a call on a window.
func windowCall(ctx context.Context, c *C.struct_call) C.int {
	w := windows.get(uint64(c.handle))
	if w == nil {
		return invalid(c.failure, "%#x is no window, or one that was closed", uint64(c.handle))
	}
	if c.n > math.MaxInt && c.kind != C.CALL_WINDOW_WAIT_SIGNAL || c.offset > math.MaxInt {
		return invalid(c.failure, "%d bytes at %d are beyond the window", uint64(c.n), uint64(c.offset))
	}
	rank, offset, counter := int(c.a), int(c.offset), int(c.b)
	data := func() []byte { return unsafe.Slice((*byte)(c.data), int(c.n)) }
	var err error
	switch c.kind {
	case C.CALL_WINDOW_MAP:
		var part []byte
		if part, err = w.Map(ctx, rank); err == nil {
			c.out = C.uint64_t(uintptr(unsafe.Pointer(unsafe.SliceData(part))))
		}
	case C.CALL_WINDOW_PUT:
		err = w.Put(ctx, rank, offset, data())
	case C.CALL_WINDOW_PUT_SIGNAL:
		err = w.PutSignal(ctx, rank, offset, data(), counter)
	case C.CALL_WINDOW_GET:
		err = w.Get(ctx, rank, offset, data())
	case C.CALL_WINDOW_SIGNAL:
		err = w.Signal(ctx, rank, counter)
	case C.CALL_WINDOW_WAIT_SIGNAL:
		err = w.WaitSignal(ctx, rank, counter, uint64(c.n))
	case C.CALL_WINDOW_FLUSH:
		err = w.Flush(ctx, rank)
	case C.CALL_WINDOW_REFRESH:
		err = w.Refresh(ctx)
	case C.CALL_WINDOW_CLOSE:
		if err = w.Close(ctx); err == nil {
			windows.remove(uint64(c.handle))
		}
	}
	return failed(interrupted(ctx, err), c.failure)
}

//export goWindowBytes
func goWindowBytes(h C.uint64_t, data, bytes *C.uint64_t, f *C.struct_failure) C.int {
	w := windows.get(uint64(h))
	if w == nil {
		return invalid(f, "%#x is no window, or one that was closed", uint64(h))
	}
	part := w.Bytes()
	if part == nil {
		return failed(&coded{"the window is closed", pg.ErrClosed}, f)
	}
	if data != nil {
		*data = C.uint64_t(uintptr(unsafe.Pointer(unsafe.SliceData(part))))
	}
	if bytes != nil {
		*bytes = C.uint64_t(w.Size())
	}
	return C.TUTTI_OK
}
