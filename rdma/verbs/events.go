//go:build cgo && linux

package verbs

// #include "verbs.h"
import "C"

import (
	"syscall"

	"tutti/rdma"
)

// listen reports the device's asynchronous events until Close.
func (d *device) listen() {
	for {
		var e C.tutti_event
		errno, ok := d.async.next(func() syscall.Errno { return syscall.Errno(C.tutti_get_event(d.c.context, &e)) })
		switch {
		case !ok:
			return
		case errno != 0: // the kernel has taken the device away
			if !d.removed.Load() {
				d.report(rdma.Event{Kind: rdma.DeviceRemoved})
			}
			return
		}
		v := rdma.Event{Kind: eventKind(int(e._type)), Port: int(e.port), QP: uint32(e.qp), Code: int(e._type)}
		if v.Kind == rdma.CQFailed {
			d.cqsMu.Lock()
			if q := d.cqs[uint64(e.cq)]; q != nil {
				q.overflowed.Store(true)
			}
			d.cqsMu.Unlock()
		}
		d.report(v)
	}
}

// wakes calls the wake function of a completion queue for each of its events, until Close.
func (d *device) wakes() {
	for {
		var id C.uint64_t
		errno, ok := d.completions.next(func() syscall.Errno {
			return syscall.Errno(C.tutti_cq_event(d.c.channel, &id))
		})
		if !ok || errno != 0 { // errno: the device was removed, and report wakes all
			return
		}
		d.cqsMu.Lock()
		if q := d.cqs[uint64(id)]; q != nil { // it may be closed meanwhile
			q.wake()
		}
		d.cqsMu.Unlock()
	}
}

func (d *device) report(e rdma.Event) {
	if e.Kind == rdma.DeviceRemoved {
		d.removed.Store(true)
		d.cqsMu.Lock()
		for _, q := range d.cqs { // no completions may follow, so nothing else wakes those who wait
			if q.wake != nil {
				q.wake()
			}
		}
		d.cqsMu.Unlock()
	}
	if d.notify != nil {
		d.notify(e)
	}
}
