//go:build cgo && linux

package main

// #include "internal.h"
import "C"

import (
	"context"
	"unsafe"

	"tutti/bootstrap"
	"tutti/pg"
)

var members = table[pg.Member]{kind: C.KIND_MEMBER}

// findMember returns the member of a handle, or nil after describing the failure.
func findMember(h C.uint64_t, f *C.struct_failure) *pg.Member {
	m := members.get(uint64(h))
	if m == nil {
		invalid(f, "%#x is no member, or one that was closed", uint64(h))
	}
	return m
}

// newMember makes a member with the configuration c and returns its handle.
func newMember(ctx context.Context, c *C.tutti_config) (uint64, error) {
	moderate(c)
	cfg, err := config(c)
	if err != nil {
		return 0, err
	}
	if c.kv != nil {
		return 0, &coded{"tutti_config: kv is set, want NULL: members need no store", errInvalid}
	}
	m, err := pg.NewMember(ctx, cfg)
	if err != nil {
		return 0, err
	}
	return members.add(m), nil
}

// memberForm makes the call CALL_MEMBER_FORM.
func memberForm(ctx context.Context, c *C.struct_call) C.int {
	m := findMember(c.handle, c.failure)
	if m == nil {
		return C.TUTTI_EINVAL
	}
	if c.n > bootstrap.MaxMembers {
		return invalid(c.failure, "%d handles, want 1 to %d", uint64(c.n), bootstrap.MaxMembers)
	}
	texts := unsafe.Slice((**C.char)(c.arg), int(c.n))
	handles := make([]string, len(texts))
	for i, s := range texts {
		if s == nil {
			return invalid(c.failure, "handles[%d] is NULL", i)
		}
		handles[i] = C.GoString(s)
	}
	g, err := m.Form(ctx, C.GoString((*C.char)(c.data)), handles)
	if err == nil {
		c.out = C.uint64_t(groups.add(&group{g, nil}))
	}
	return failed(interrupted(ctx, err), c.failure)
}

//export goMemberHandle
func goMemberHandle(h C.uint64_t, to *C.char, room C.uint64_t, n *C.uint64_t, f *C.struct_failure) C.int {
	m := findMember(h, f)
	if m == nil {
		return C.TUTTI_EINVAL
	}
	give(m.Handle(), to, room, n)
	return C.TUTTI_OK
}

//export goMemberClose
func goMemberClose(h C.uint64_t, f *C.struct_failure) C.int {
	m := members.remove(uint64(h))
	if m == nil {
		return invalid(f, "%#x is no member, or one that was closed", uint64(h))
	}
	m.Close()
	return C.TUTTI_OK
}
