//go:build cgo && linux

package main

// #include <stdlib.h>
// #include "internal.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"tutti/internal/lifeline"
	"tutti/pg"
)

// bound is a limit of the Go runtime that the host may set once.
type bound struct {
	variable string // of the environment, which wins
	standard int64  // applies until the host sets the limit
	apply    func(n int64)

	used, given sync.Once
}

// set applies n if it is the first value above 0, and the standard if there has been none. The
// runtime has read its variables when the library was loaded, as os.Getenv has.
func (b *bound) set(n int64) {
	if os.Getenv(b.variable) != "" {
		return
	}
	b.used.Do(func() { b.apply(b.standard) })
	if n > 0 {
		b.given.Do(func() { b.apply(n) })
	}
}

// What max_procs and memory_limit set.
var (
	maxProcs = bound{variable: "GOMAXPROCS", standard: int64(min(4, runtime.NumCPU())),
		apply: func(n int64) { runtime.GOMAXPROCS(int(n)) }}
	memoryLimit = bound{variable: "GOMEMLIMIT", standard: 1 << 30, apply: func(n int64) { debug.SetMemoryLimit(n) }}
)

var setUp sync.Once

// moderate bounds what the Go runtime uses of the host's processors and memory. Every function that
// may be the first one that the host calls calls it.
func moderate(c *C.tutti_config) {
	maxProcs.set(int64(c.max_procs))
	memoryLimit.set(int64(c.memory_limit))
	setUp.Do(func() {
		watchDescriptors()
		if fd := C.tutti_lifeline(); fd >= 0 {
			lifeline.Set(os.NewFile(uintptr(fd), "lifeline")) // which Go's epoll instance watches
		}
	})
}

// getenv reads a variable of the host's environment as it is now: Go's copy is as old as the
// process, or as the library's loading.
func getenv(name string) string {
	key := C.CString(name)
	defer C.free(unsafe.Pointer(key))
	v := C.getenv(key)
	if v == nil {
		return ""
	}
	return C.GoString(v)
}

func text(s *C.char) string {
	if s == nil {
		return ""
	}
	return C.GoString(s)
}

// config returns the host's configuration. err is nil, or says which field is invalid.
func config(c *C.tutti_config) (cfg pg.Config, err error) {
	bad := func(field, got, want string) {
		err = &coded{fmt.Sprintf("tutti_config: %s is %s, want %s", field, got, want), errInvalid}
	}
	if c.on_failure < C.TUTTI_REPORT_ALWAYS || c.on_failure > C.TUTTI_RETRY {
		bad("on_failure", fmt.Sprint(c.on_failure), "TUTTI_REPORT, TUTTI_REPORT_ALWAYS, TUTTI_SHRINK or TUTTI_RETRY")
	}
	if c.on_timeout < C.TUTTI_TIMEOUT_REPORTS || c.on_timeout > C.TUTTI_TIMEOUT_EVICTS_ALONE {
		bad("on_timeout", fmt.Sprint(c.on_timeout), "TUTTI_TIMEOUT_REPORTS or another")
	}
	flag := func(field string, n C.int32_t) {
		if n != 0 && n != 1 {
			bad(field, fmt.Sprint(n), "0 or 1")
		}
	}
	flag("uniform", c.uniform)
	flag("auto_admit", c.auto_admit)
	flag("progress", c.progress)
	if c.max_procs < 0 {
		bad("max_procs", fmt.Sprint(c.max_procs), "a number of threads, or 0")
	}
	if c.memory_limit < 0 {
		bad("memory_limit", fmt.Sprint(c.memory_limit), "a number of bytes, or 0")
	}
	if c.kv != nil { // pg knows them by other names
		const fixed = ", as always with kv: a store of the program cannot tell which ranks are alive"
		switch {
		case c.on_failure == C.TUTTI_SHRINK:
			bad("on_failure", "TUTTI_SHRINK", "TUTTI_REPORT"+fixed)
		case c.on_failure == C.TUTTI_RETRY:
			bad("on_failure", "TUTTI_RETRY", "TUTTI_REPORT"+fixed)
		case c.auto_admit != 0:
			bad("auto_admit", fmt.Sprint(c.auto_admit), "0"+fixed)
		case c.size > 0 && c.max_size > c.size:
			bad("max_size", fmt.Sprint(c.max_size), fmt.Sprintf("0 or size, %d%s", c.size, fixed))
		}
	}
	if c.secret_len > math.MaxInt32 || c.secret == nil && c.secret_len > 0 {
		bad("secret", "missing", fmt.Sprintf("%d bytes", c.secret_len))
	}
	if err != nil {
		return cfg, err
	}
	cfg = pg.Config{
		Size: int(c.size), Rank: int(c.rank), MaxSize: int(c.max_size),
		Job: text(c.job), StoreAddr: text(c.store),
		StoreUser: text(c.store_user), StorePassword: text(c.store_password),
		Transport: text(c.transport), Interfaces: text(c.interfaces), Ports: text(c.ports),
		Algorithm: text(c.algorithm), Tuning: text(c.tuning), LogDir: text(c.log_dir), Metrics: text(c.metrics),
		Timeout: time.Duration(c.timeout_ns), Window: time.Duration(c.window_ns),
		LeaseTTL:  time.Duration(c.lease_ttl_ns),
		OnFailure: pg.OnFailure(max(c.on_failure, C.TUTTI_REPORT)), OnTimeout: pg.OnTimeout(c.on_timeout),
		Uniform: c.uniform != 0, AutoAdmit: c.auto_admit != 0, Progress: c.progress != 0,
		Getenv: getenv, Devices: &gpus, NoSignal: bool(C.tutti_handles_usr1()),
	}
	if c.on_failure == C.TUTTI_REPORT_ALWAYS {
		cfg.Getenv = func(name string) string {
			if name == "TUTTI_ON_FAILURE" {
				return ""
			}
			return getenv(name)
		}
	}
	if c.secret_len > 0 {
		cfg.Secret = C.GoBytes(c.secret, C.int(c.secret_len))
	}
	cfg.Logger, err = logger(text(c.log_level))
	return cfg, err
}

// logger returns the logger for a level, "" for the environment's.
func logger(name string) (*slog.Logger, error) {
	fixed := name != ""
	if !fixed {
		name = getenv("TUTTI_LOG")
	}
	level := slog.LevelWarn
	switch {
	case name == "off":
		return slog.New(slog.DiscardHandler), nil
	case name == "":
	case level.UnmarshalText([]byte(name)) != nil && fixed:
		return nil, &coded{fmt.Sprintf("tutti_config: log_level is %q, want debug, info, warn, error or off", name),
			errInvalid}
	}
	return slog.New(slog.NewTextHandler(standardError{}, &slog.HandlerOptions{Level: level})), nil
}

// standardError writes to the host's standard error. Package os ends the process when that is a
// broken pipe.
type standardError struct{}

func (standardError) Write(b []byte) (int, error) { return syscall.Write(2, b) }

// joinGroup joins the job that c describes and returns the handle of its group.
func joinGroup(ctx context.Context, c *C.tutti_config) (uint64, error) {
	moderate(c)
	s := newStore(c.kv)
	defer s.leave()
	cfg, err := config(c)
	if err != nil {
		return 0, err
	}
	if s != nil {
		cfg.Store = s
	}
	if cfg.Job != "" { // a process may have several groups
		cfg.Logger = cfg.Logger.With("job", cfg.Job)
	}
	if cfg.Size > 0 { // else the environment has the rank
		cfg.Logger = cfg.Logger.With("rank", cfg.Rank)
	}
	g, err := pg.Join(ctx, cfg)
	if err != nil {
		return 0, err
	}
	s.retain()
	return groups.add(&group{g, s}), nil
}

//export goLocal
func goLocal(n C.uint32_t, c *C.tutti_config, out *C.uint64_t, f *C.struct_failure) C.int {
	moderate(c)
	if n < 1 || n > 4096 {
		return invalid(f, "n is %d, want 1 to 4096 ranks", n)
	}
	cfg, err := config(c)
	if err != nil {
		return failed(err, f)
	}
	all, err := pg.Local(int(n), cfg)
	if err != nil {
		return failed(err, f)
	}
	handles := unsafe.Slice(out, n)
	for i, g := range all {
		handles[i] = C.uint64_t(groups.add(&group{g, nil}))
	}
	return C.TUTTI_OK
}

//export goClose
func goClose(h C.uint64_t, f *C.struct_failure) C.int {
	g := groups.remove(uint64(h))
	if g == nil {
		return invalid(f, "%#x is no group, or one that was closed", uint64(h))
	}
	defer g.store.leave()
	return failed(g.Close(), f)
}

//export goPlace
func goPlace(h C.uint64_t, rank, size, localRank, localSize *C.int32_t, f *C.struct_failure) C.int {
	g := findGroup(h, f)
	if g == nil {
		return C.TUTTI_EINVAL
	}
	give := func(to *C.int32_t, of func() int) {
		if to != nil {
			*to = C.int32_t(of())
		}
	}
	give(rank, g.Rank)
	give(size, g.Size)
	give(localRank, g.LocalRank)
	give(localSize, g.LocalSize)
	return C.TUTTI_OK
}

//export goView
func goView(h C.uint64_t, epoch *C.uint64_t, ranks *C.int32_t, room C.uint32_t, n *C.uint32_t,
	f *C.struct_failure) C.int {
	g := findGroup(h, f)
	if g == nil {
		return C.TUTTI_EINVAL
	}
	v := g.View()
	if epoch != nil {
		*epoch = C.uint64_t(v.Epoch)
	}
	to := unsafe.Slice(ranks, room)
	for i := range min(len(v.Active), len(to)) {
		to[i] = C.int32_t(v.Active[i])
	}
	if n != nil {
		*n = C.uint32_t(len(v.Active))
	}
	return C.TUTTI_OK
}

//export goTopology
func goTopology(h C.uint64_t, to *C.char, room C.uint64_t, n *C.uint64_t, f *C.struct_failure) C.int {
	g := findGroup(h, f)
	if g == nil {
		return C.TUTTI_EINVAL
	}
	give(g.Topology(), to, room, n)
	return C.TUTTI_OK
}

// give writes a text to the host's memory, cut if need be, and its whole length to n.
func give(s string, to *C.char, room C.uint64_t, n *C.uint64_t) {
	if n != nil {
		*n = C.uint64_t(len(s))
	}
	if room > 0 {
		b := unsafe.Slice((*byte)(unsafe.Pointer(to)), int(min(room, math.MaxInt32)))
		b[copy(b[:len(b)-1], s)] = 0
	}
}

//export goSetAlgorithm
func goSetAlgorithm(h C.uint64_t, name *C.char, f *C.struct_failure) C.int {
	g := findGroup(h, f)
	if g == nil {
		return C.TUTTI_EINVAL
	}
	return failed(g.SetAlgorithm(text(name)), f)
}

//export goAbort
func goAbort(h C.uint64_t, reason *C.char, f *C.struct_failure) C.int {
	g := findGroup(h, f)
	if g == nil {
		return C.TUTTI_EINVAL
	}
	why := text(reason)
	if why == "" {
		why = "no reason was given"
	}
	g.Abort(errors.New(why))
	return C.TUTTI_OK
}

// allocated are the pieces of memory of goAlloc.
var allocated struct {
	mu  sync.Mutex
	all map[uintptr]piece
}

type piece struct {
	memory []byte
	of     *pg.Group
}

//export goAlloc
func goAlloc(h C.uint64_t, n C.uint64_t, out *C.uint64_t, f *C.struct_failure) C.int {
	*out = 0
	g := findGroup(h, f)
	if g == nil {
		return C.TUTTI_EINVAL
	}
	if n == 0 || n > math.MaxInt {
		return invalid(f, "%d bytes, want 1 or more that fit in memory", uint64(n))
	}
	b, err := pg.Alloc[byte](g.Group, int(n))
	if err != nil {
		return failed(err, f)
	}
	at := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	allocated.mu.Lock()
	defer allocated.mu.Unlock()
	if allocated.all == nil {
		allocated.all = map[uintptr]piece{}
	}
	allocated.all[at] = piece{b, g.Group}
	*out = C.uint64_t(at)
	return C.TUTTI_OK
}

//export goFree
func goFree(at C.uint64_t, f *C.struct_failure) C.int {
	allocated.mu.Lock()
	p, ok := allocated.all[uintptr(at)]
	delete(allocated.all, uintptr(at))
	allocated.mu.Unlock()
	if !ok {
		return invalid(f, "%#x is not from tutti_alloc, or was freed before", uint64(at))
	}
	return failed(pg.Free(p.of, p.memory), f)
}

// watchDescriptors tells C which epoll instance watches the connections of Go.
func watchDescriptors() {
	r, w, err := os.Pipe()
	if err != nil {
		return
	}
	defer r.Close()
	defer w.Close()
	conn, err := r.SyscallConn()
	if err != nil {
		return
	}
	conn.Control(func(fd uintptr) {
		if epoll, ok := watcher(int(fd)); ok {
			C.tutti_watch(C.int(epoll))
		}
	})
}
