//go:build cgo && linux

package verbs

/*
#cgo noescape tutti_poll
#cgo nocallback tutti_poll
#cgo noescape tutti_cq_arm
#cgo nocallback tutti_cq_arm
#include "verbs.h"
#include <stdlib.h>
*/
import "C"

import (
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"tutti/rdma"
)

// cq is a completion queue.
type cq struct {
	d          *device
	id         uint64
	c          *C.tutti_cq // memory of C
	out        []C.tutti_completion
	depth      int
	wake       func()       // nil: polled alone
	users      atomic.Int64 // queue pairs
	overflowed atomic.Bool

	mu     sync.Mutex // held during calls on c
	closed bool
}

// NewCQ implements rdma.Device.
func (d *device) NewCQ(depth int, wake func()) (rdma.CQ, error) {
	call := fmt.Sprintf("create a completion queue of %d", depth)
	if depth < 1 || depth > d.attr.MaxCQDepth {
		return nil, d.wrong(callCreate, call, C.int(syscall.EINVAL))
	}
	if err := d.enter(call); err != nil {
		return nil, err
	}
	defer d.leave()
	q := &cq{d: d, c: (*C.tutti_cq)(C.calloc(1, C.sizeof_tutti_cq)), wake: wake}
	d.cqsMu.Lock()
	d.ids++
	q.id = d.ids
	d.cqs[q.id] = q
	d.cqsMu.Unlock()
	var channel *C.struct_ibv_comp_channel
	if wake != nil {
		channel = d.c.channel
	}
	if errno := C.tutti_cq_create(d.c.context, C.int(depth), C.uint64_t(q.id), channel, q.c); errno != 0 {
		q.forget()
		return nil, d.wrong(callCreate, call, errno)
	}
	q.depth = int(q.c.depth)
	q.out = unsafe.Slice(q.c.out, C.TUTTI_POLL_BATCH)
	d.used.Add(1)
	return q, nil
}

// forget frees what is left of a queue that does not exist any more, when no call of wake is under
// way.
func (q *cq) forget() {
	q.d.cqsMu.Lock()
	delete(q.d.cqs, q.id)
	q.d.cqsMu.Unlock()
	C.free(unsafe.Pointer(q.c))
}

// Depth implements rdma.CQ.
func (q *cq) Depth() int { return q.depth }

// Poll implements rdma.CQ.
func (q *cq) Poll(out []rdma.Completion) (int, error) {
	n := min(len(out), rdma.PollBatch)
	if n == 0 {
		return 0, nil
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return 0, q.d.usable("poll", true)
	}
	got := int(C.tutti_poll(q.c, C.int(n)))
	if got <= 0 {
		return 0, q.why(got)
	}
	for i := range got {
		c, o := &q.out[i], &out[i]
		*o = rdma.Completion{ID: uint64(c.id), QP: uint32(c.qp), Status: min(rdma.Status(min(c.status, 255)),
			rdma.GeneralError), Vendor: uint32(c.vendor), Op: rdma.Opcode(c.op), Bytes: uint32(c.bytes),
			Imm: uint32(c.imm), HasImm: c.has_imm != 0}
	}
	return got, nil
}

// why returns the error of a poll that found nothing, if the queue is unusable.
func (q *cq) why(got int) error {
	switch {
	case q.d.removed.Load():
		return q.d.usable("poll", false)
	case q.overflowed.Load():
		return &rdma.Error{Call: "poll", Device: q.d.name, Errno: syscall.EOVERFLOW,
			Advice: fmt.Sprintf("its queue pairs had more than %d completions at once: make the queue anew, deeper",
				q.depth)}
	case got < 0:
		return q.d.wrong(callPost, "poll", C.int(got))
	}
	return nil
}

// Arm implements rdma.CQ.
func (q *cq) Arm() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if err := q.d.usable("arm a completion queue", q.closed); err != nil {
		return err
	}
	if q.wake == nil {
		return &rdma.Error{Call: "arm a completion queue", Device: q.d.name, Errno: syscall.EINVAL,
			Advice: "make the queue with a wake function"}
	}
	if errno := C.tutti_cq_arm(q.c); errno != 0 {
		return q.d.wrong(callPost, "arm a completion queue", errno)
	}
	return nil
}

// Close implements rdma.CQ. wake must not call it.
func (q *cq) Close() error {
	const call = "destroy a completion queue"
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return q.d.usable(call, true)
	}
	if n := q.users.Load(); n > 0 {
		return &rdma.Error{Call: call, Device: q.d.name, Errno: syscall.EBUSY,
			Advice: fmt.Sprintf("close its %d queue pairs first", n)}
	}
	if err := q.d.destroyed(call, C.tutti_cq_destroy(q.c)); err != nil {
		return err
	}
	q.closed = true
	C.tutti_cq_free(q.c)
	q.forget()
	q.d.used.Add(-1)
	return nil
}
