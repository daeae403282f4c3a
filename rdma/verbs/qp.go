//go:build cgo && linux

package verbs

/*
#cgo noescape tutti_post_send
#cgo nocallback tutti_post_send
#cgo noescape tutti_post_recv
#cgo nocallback tutti_post_recv
#include "verbs.h"
#include <stdlib.h>
*/
import "C"

import (
	"errors"
	"fmt"
	"sync"
	"syscall"
	"unsafe"

	"tutti/rdma"
)

// stage is how far the program has brought a queue pair. The device may have failed it since.
type stage int

const (
	fresh stage = iota
	initialized
	connected
	failed // by Fail
)

// qp is a queue pair.
type qp struct {
	d        *device
	c        *C.tutti_qp // memory of C
	number   uint32
	limits   rdma.QPLimits
	pkey     int
	sendCQ   *cq
	recvCQ   *cq
	sends    []C.tutti_request // memory of C, for a chain of each queue
	recvs    []C.tutti_request
	sendSegs []C.tutti_segment
	recvSegs []C.tutti_segment

	// A call that changes the stage holds all three, locked in this order, Post the second and
	// PostRecv the third.
	mu, sendMu, recvMu sync.Mutex
	stage              stage
	closed             bool
}

// NewQP implements rdma.Device.
func (d *device) NewQP(cfg rdma.QPConfig) (rdma.QP, error) {
	const call = "create a queue pair"
	invalid := func(why string) error {
		return &rdma.Error{Call: call, Device: d.name, Errno: syscall.EINVAL, Advice: why}
	}
	send, ok := cfg.Send.(*cq)
	recv, ok2 := cfg.Recv.(*cq)
	if !ok || !ok2 || send.d != d || recv.d != d {
		return nil, invalid("its completion queues have to be of this device")
	}
	segments := max(cfg.Segments, 1)
	switch {
	case cfg.SendDepth < 0 || cfg.RecvDepth < 0 || cfg.Segments < 0 || cfg.Inline < 0:
		return nil, invalid("no limit is negative")
	case cfg.SendDepth > d.attr.MaxQPDepth || cfg.RecvDepth > d.attr.MaxQPDepth:
		return nil, invalid(fmt.Sprintf("its queues hold at most %d requests", d.attr.MaxQPDepth))
	case cfg.PKey < 0 || cfg.PKey > 1<<16-1:
		return nil, invalid("a port has at most 65536 partition keys")
	case segments > d.attr.MaxSegments:
		return nil, invalid(fmt.Sprintf("a request has at most %d segments", d.attr.MaxSegments))
	}
	if err := d.enter(call); err != nil {
		return nil, err
	}
	defer d.leave()
	if err := hold(send, recv); err != nil {
		return nil, err
	}
	c := (*C.tutti_qp)(C.calloc(1, C.sizeof_tutti_qp))
	c.send_depth, c.recv_depth = C.uint32_t(cfg.SendDepth), C.uint32_t(cfg.RecvDepth)
	c.send_segments, c.recv_segments = C.uint32_t(segments), C.uint32_t(segments)
	c.inline_bytes = C.uint32_t(cfg.Inline)
	if errno := C.tutti_qp_create(d.c.pd, send.c.cq, recv.c.cq, c); errno != 0 {
		C.free(unsafe.Pointer(c))
		release(send, recv)
		return nil, d.wrong(callCreate, call, errno)
	}
	d.used.Add(1)
	l := rdma.QPLimits{SendDepth: int(c.send_depth), RecvDepth: int(c.recv_depth), SendSegments: int(c.send_segments),
		RecvSegments: int(c.recv_segments), Inline: int(c.inline_bytes)}
	return &qp{d: d, c: c, number: uint32(c.number), limits: l, pkey: cfg.PKey, sendCQ: send, recvCQ: recv,
		sends: unsafe.Slice(c.send, l.SendDepth), recvs: unsafe.Slice(c.recv, l.RecvDepth),
		sendSegs: unsafe.Slice(c.send_segment, l.SendDepth*l.SendSegments),
		recvSegs: unsafe.Slice(c.recv_segment, l.RecvDepth*l.RecvSegments)}, nil
}

// hold counts a queue pair as a user of its completion queues, unless one is closed.
func hold(all ...*cq) error {
	for i, q := range all {
		q.mu.Lock()
		err := q.d.usable("create a queue pair with a closed completion queue", q.closed)
		if err == nil {
			q.users.Add(1)
		}
		q.mu.Unlock()
		if err != nil {
			release(all[:i]...)
			return err
		}
	}
	return nil
}

func release(all ...*cq) {
	for _, q := range all {
		q.users.Add(-1)
	}
}

// Number implements rdma.QP.
func (q *qp) Number() uint32 { return q.number }

// Limits implements rdma.QP.
func (q *qp) Limits() rdma.QPLimits { return q.limits }

// State implements rdma.QP.
func (q *qp) State() (rdma.State, error) {
	const call = "query a queue pair"
	q.mu.Lock()
	defer q.mu.Unlock()
	if err := q.d.usable(call, q.closed); err != nil {
		return 0, err
	}
	var state C.int
	if errno := C.tutti_qp_state(q.c, &state); errno != 0 {
		return 0, q.d.wrong(callQuery, call, errno)
	}
	return rdma.State(state), nil
}

func (q *qp) isClosed() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.closed
}

// move changes the state of the queue pair with do, which returns an errno, and its stage to next
// if do succeeds.
func (q *qp) move(call string, need func(stage) bool, next stage, do func() C.int) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if err := q.d.usable(call, q.closed); err != nil {
		return err
	}
	if !need(q.stage) {
		return q.d.wrong(callModify, call, C.int(syscall.EINVAL))
	}
	q.sendMu.Lock()
	defer q.sendMu.Unlock()
	q.recvMu.Lock()
	defer q.recvMu.Unlock()
	if errno := do(); errno != 0 {
		return q.d.wrong(callModify, call, errno)
	}
	q.stage = next
	return nil
}

// Init implements rdma.QP.
func (q *qp) Init(port int, access rdma.Access) error {
	call := fmt.Sprintf("initialize queue pair %d at port %d with partition key %d of its table", q.number, port,
		q.pkey)
	bits, _, _ := rights(access)
	if err := q.checkPort(call, port); err != nil {
		return err
	}
	return q.move(call, func(s stage) bool { return s == fresh }, initialized, func() C.int {
		return C.tutti_qp_init(q.c, C.int(port), C.int(q.pkey), C.uint32_t(bits))
	})
}

// checkPort refuses ports that the device does not have.
func (q *qp) checkPort(call string, port int) error {
	if port < 1 || port > q.d.attr.Ports {
		return &rdma.Error{Call: call, Device: q.d.name, Errno: syscall.EINVAL,
			Advice: fmt.Sprintf("it has ports 1 to %d", q.d.attr.Ports)}
	}
	return nil
}

// defaultHopLimit is that of a route without one.
const defaultHopLimit = 64

// Connect implements rdma.QP.
func (q *qp) Connect(r *rdma.Route) error {
	call := fmt.Sprintf("connect queue pair %d to queue pair %d at %v", q.number, r.Remote, r.GID)
	if !r.Global {
		call = fmt.Sprintf("connect queue pair %d to queue pair %d at LID %d", q.number, r.Remote, r.LID)
	}
	if r.Retries > 7 || r.RNRRetries > 7 || r.Timeout > 31 || r.ServiceLevel > 15 || r.Reads < 0 || r.Reads > 255 ||
		r.GIDIndex < 0 || r.GIDIndex > 255 || r.PSN >= 1<<24 || r.RemotePSN >= 1<<24 {
		return &rdma.Error{Call: call, Device: q.d.name, Errno: syscall.EINVAL,
			Advice: "Retries and RNRRetries are at most 7, ServiceLevel 15, Timeout 31, Reads and GIDIndex 255, and " +
				"a PSN has 24 bits"}
	}
	if err := q.checkPort(call, r.Port); err != nil {
		return err
	}
	c := C.tutti_route{port: C.int(r.Port), mtu: C.int(r.MTU), gid_index: C.int(r.GIDIndex), psn: C.uint32_t(r.PSN),
		remote: C.uint32_t(r.Remote), remote_psn: C.uint32_t(r.RemotePSN), lid: C.uint32_t(r.LID),
		reads: C.uint8_t(r.Reads), timeout: C.uint8_t(r.Timeout), retries: C.uint8_t(r.Retries),
		rnr_retries: C.uint8_t(r.RNRRetries), traffic_class: C.uint8_t(r.TrafficClass),
		hop_limit: C.uint8_t(r.HopLimit), service_level: C.uint8_t(r.ServiceLevel)}
	if r.Global {
		c.global = 1
	}
	if r.HopLimit == 0 {
		c.hop_limit = defaultHopLimit
	}
	*(*rdma.GID)(unsafe.Pointer(&c.gid)) = r.GID
	return q.move(call, func(s stage) bool { return s == initialized }, connected, func() C.int {
		return C.tutti_qp_connect(q.c, &c)
	})
}

// Fail implements rdma.QP.
func (q *qp) Fail() error {
	return q.move(fmt.Sprintf("fail queue pair %d", q.number), func(stage) bool { return true }, failed,
		func() C.int { return C.tutti_qp_fail(q.c) })
}

// Reset implements rdma.QP.
func (q *qp) Reset() error {
	call := fmt.Sprintf("reset queue pair %d", q.number)
	if q.d.attr.Quirks.NoReset {
		if err := q.d.usable(call, q.isClosed()); err != nil {
			return err
		}
		return &rdma.Error{Call: call, Device: q.d.name, Errno: syscall.EOPNOTSUPP,
			Advice: "this device's queue pairs cannot be reset: close it and make another one"}
	}
	return q.move(call, func(stage) bool { return true }, fresh,
		func() C.int { return C.tutti_qp_reset(q.c) })
}

// Post implements rdma.QP.
func (q *qp) Post(chain []rdma.SendRequest) (int, error) {
	q.sendMu.Lock()
	defer q.sendMu.Unlock()
	if err := q.mayPost("post", connected, len(q.sends)); err != nil {
		return 0, err
	}
	posted := 0
	for posted < len(chain) {
		part := chain[posted:min(len(chain), posted+len(q.sends))]
		n, bad := q.stageSends(part)
		if n > 0 {
			r := C.tutti_post_send(q.c, C.uint32_t(n))
			posted += int(uint32(r))
			if errno := r >> 32; errno != 0 {
				return posted, q.d.wrong(callPost, fmt.Sprintf("post request %d of %d", posted+1, len(chain)),
					C.int(errno))
			}
		}
		if bad != nil {
			return posted, q.malformed(posted, bad)
		}
	}
	return posted, nil
}

// mayPost returns the error of posting in the present stage, which has to be need at least, to a
// queue for depth requests.
func (q *qp) mayPost(call string, need stage, depth int) error {
	if err := q.d.usable(call, q.closed); err != nil {
		return err
	}
	if q.stage < need {
		return &rdma.Error{Call: fmt.Sprintf("%s to queue pair %d", call, q.number), Device: q.d.name,
			Errno:  syscall.EINVAL,
			Advice: "initialize and connect it first"}
	}
	if depth == 0 {
		return &rdma.Error{Call: fmt.Sprintf("%s to queue pair %d", call, q.number), Device: q.d.name,
			Errno:  syscall.ENOMEM,
			Advice: "it was made without a queue for these requests"}
	}
	return nil
}

func (q *qp) malformed(i int, why error) error {
	return &rdma.Error{Call: fmt.Sprintf("post request %d to queue pair %d", i+1, q.number), Device: q.d.name,
		Errno: syscall.EINVAL, Advice: why.Error()}
}

// What is wrong with a request. They are made once, because no request may cost an allocation.
var (
	errOpcode   = errors.New("it has no opcode of a send queue")
	errSegments = errors.New("it has more segments than the queue pair's Limits allow")
	errInline   = errors.New("it has more inline data than the queue pair's Limits allow, or is a read")
)

// stageSends writes the chain to the memory of C, up to the first request that is malformed.
func (q *qp) stageSends(chain []rdma.SendRequest) (n int, bad error) {
	for i := range chain {
		r := &chain[i]
		switch {
		case r.Op < rdma.Write || r.Op > rdma.Read:
			return i, errOpcode
		case len(r.Segments) > q.limits.SendSegments:
			return i, errSegments
		}
		total, segs := uint64(0), q.sendSegs[i*q.limits.SendSegments:]
		for j, s := range r.Segments {
			segs[j] = C.tutti_segment{address: C.uint64_t(s.Address), len: C.uint32_t(s.Len), key: C.uint32_t(s.Key)}
			total += uint64(s.Len)
		}
		flags := C.uint32_t(0)
		if r.Signaled {
			flags |= C.TUTTI_SIGNALED
		}
		if r.Fence {
			flags |= C.TUTTI_FENCE
		}
		if r.Inline {
			if total > uint64(q.limits.Inline) || r.Op == rdma.Read {
				return i, errInline
			}
			flags |= C.TUTTI_INLINE
		}
		q.sends[i] = C.tutti_request{id: C.uint64_t(r.ID), remote: C.uint64_t(r.RemoteAddress),
			rkey: C.uint32_t(r.RemoteKey), imm: C.uint32_t(r.Imm), op: C.uint32_t(r.Op), flags: flags,
			segments: C.uint32_t(len(r.Segments))}
	}
	return len(chain), nil
}

// PostRecv implements rdma.QP.
func (q *qp) PostRecv(chain []rdma.RecvRequest) (int, error) {
	q.recvMu.Lock()
	defer q.recvMu.Unlock()
	if err := q.mayPost("post receives", initialized, len(q.recvs)); err != nil {
		return 0, err
	}
	posted := 0
	for posted < len(chain) {
		part := chain[posted:min(len(chain), posted+len(q.recvs))]
		n, bad := q.stageRecvs(part)
		if n > 0 {
			r := C.tutti_post_recv(q.c, C.uint32_t(n))
			posted += int(uint32(r))
			if errno := r >> 32; errno != 0 {
				return posted, q.d.wrong(callPost, fmt.Sprintf("post receive %d of %d", posted+1, len(chain)),
					C.int(errno))
			}
		}
		if bad != nil {
			return posted, q.malformed(posted, bad)
		}
	}
	// Some devices look for receives of a failed queue pair only when it is failed.
	if q.stage == failed && posted > 0 {
		if errno := C.tutti_qp_fail(q.c); errno != 0 {
			return posted, q.d.wrong(callModify, fmt.Sprintf("flush queue pair %d", q.number), errno)
		}
	}
	return posted, nil
}

// stageRecvs is stageSends for receives.
func (q *qp) stageRecvs(chain []rdma.RecvRequest) (n int, bad error) {
	for i := range chain {
		r := &chain[i]
		if len(r.Segments) > q.limits.RecvSegments {
			return i, errSegments
		}
		segs := q.recvSegs[i*q.limits.RecvSegments:]
		for j, s := range r.Segments {
			segs[j] = C.tutti_segment{address: C.uint64_t(s.Address), len: C.uint32_t(s.Len), key: C.uint32_t(s.Key)}
		}
		q.recvs[i] = C.tutti_request{id: C.uint64_t(r.ID), segments: C.uint32_t(len(r.Segments))}
	}
	return len(chain), nil
}

// Close implements rdma.QP.
func (q *qp) Close() error {
	const call = "destroy a queue pair"
	q.mu.Lock()
	defer q.mu.Unlock()
	q.sendMu.Lock()
	defer q.sendMu.Unlock()
	q.recvMu.Lock()
	defer q.recvMu.Unlock()
	if q.closed {
		return q.d.usable(call, true)
	}
	if err := q.d.destroyed(call, C.tutti_qp_destroy(q.c)); err != nil {
		return err
	}
	q.closed = true
	q.sends, q.recvs, q.sendSegs, q.recvSegs = nil, nil, nil, nil
	C.free(unsafe.Pointer(q.c))
	release(q.sendCQ, q.recvCQ)
	q.d.used.Add(-1)
	return nil
}
