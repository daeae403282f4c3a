//go:build cgo && linux

package main

// #include "internal.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"unsafe"

	"tutti/bootstrap"
	"tutti/pg"
)

var (
	errUnsupported = errors.New("unsupported")
	errNoMemory    = errors.New("no memory")
	errInvalid     = errors.New("invalid")
)

// failed describes err, which may be nil, in f and returns its code.
func failed(err error, f *C.struct_failure) C.int {
	if err == nil {
		return C.TUTTI_OK
	}
	f.info = C.tutti_error_info{struct_size: C.uint32_t(unsafe.Sizeof(f.info)), reporter: -1}
	info := &f.info
	info.code = C.int32_t(code(err))
	var lost *pg.RankError
	var late *pg.TimeoutError
	var differ *pg.MismatchError
	switch {
	case errors.As(err, &lost):
		info.reporter, info.epoch = C.int32_t(lost.Reporter), C.uint64_t(lost.Epoch)
		if lost.Overwritten {
			info.overwritten = 1
		}
		list(info, lost.Rank)
		for _, r := range lost.Also {
			list(info, r)
		}
	case errors.As(err, &late):
		info.reporter = C.int32_t(late.Reporter)
		for _, m := range late.Missing {
			list(info, m.Rank)
		}
	case errors.As(err, &differ):
		list(info, differ.RankA)
		list(info, differ.RankB)
	}
	text := unsafe.Slice((*byte)(unsafe.Pointer(&f.text[0])), len(f.text))
	text[copy(text[:len(text)-1], err.Error())] = 0
	return C.int(info.code)
}

func list(info *C.tutti_error_info, rank int) {
	info.ranks_total++
	if n := info.ranks_listed; n < C.TUTTI_MAX_LISTED {
		info.ranks[n] = C.int32_t(rank)
		info.ranks_listed++
	}
}

// code returns the code for err.
func code(err error) int {
	var lost *pg.RankError
	switch {
	case err == nil:
		return C.TUTTI_OK
	case errors.Is(err, errCancelled):
		return C.TUTTI_ECANCELED
	case errors.Is(err, pg.ErrClosed):
		return C.TUTTI_ECLOSED
	case errors.Is(err, pg.ErrAborted):
		return C.TUTTI_EABORTED
	case errors.Is(err, pg.ErrEvicted):
		return C.TUTTI_EEVICTED
	case errors.Is(err, pg.ErrIsolated):
		return C.TUTTI_EISOLATED
	case errors.Is(err, errUnsupported), errors.Is(err, errors.ErrUnsupported):
		return C.TUTTI_EUNSUPPORTED
	case errors.Is(err, errNoMemory):
		return C.TUTTI_ENOMEM
	case errors.Is(err, errInvalid), errors.As(err, new(*pg.ArgumentError)):
		return C.TUTTI_EINVAL
	case errors.As(err, new(*pg.MismatchError)):
		return C.TUTTI_EMISMATCH
	case errors.As(err, new(*pg.TimeoutError)):
		return C.TUTTI_ETIMEOUT
	case errors.As(err, &lost):
		return C.TUTTI_ERANK
	case errors.As(err, new(*bootstrap.SlotError)), errors.As(err, new(*bootstrap.SizeError)),
		errors.As(err, new(*bootstrap.TermsError)):
		return C.TUTTI_EINVAL
	case errors.Is(err, context.DeadlineExceeded):
		return C.TUTTI_ETIMEOUT
	case errors.Is(err, syscall.ENOMEM): // of this rank: that of another one is in a RankError
		return C.TUTTI_ENOMEM
	}
	return C.TUTTI_EINTERNAL
}

// coded is an error with a code of its own: it wraps what, whose text it does not show.
type coded struct {
	text string
	what error
}

func (e *coded) Error() string { return e.text }
func (e *coded) Unwrap() error { return e.what }

// invalid describes an invalid argument.
func invalid(f *C.struct_failure, format string, args ...any) C.int {
	return failed(&coded{fmt.Sprintf(format, args...), errInvalid}, f)
}
