package shm

import (
	"errors"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"tutti/internal/files"
	"tutti/internal/ident"
	"tutti/mem"
	"tutti/p2p"
)

const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

func pages(n int) int {
	p := os.Getpagesize()
	return (n + p - 1) &^ (p - 1)
}

// strict reports whether the system promises no more memory than it has (vm.overcommit_memory is
// 2). Tests replace it.
var strict = sync.OnceValue(func() bool {
	b, err := os.ReadFile("/proc/sys/vm/overcommit_memory")
	return err == nil && strings.TrimSpace(string(b)) == "2"
})

// newMemory returns the descriptor of new, zeroed shared memory of n bytes (whole pages), without
// seals. Its mode keeps other users who have a descriptor for reading from opening it again for
// writing. A process of the same user can change the mode.
//
// The system counts shared memory when it is written, and under strict accounting it may end the
// writer then (SIGBUS): so all of it is allocated here.
func newMemory(n int) (int, error) {
	const flags = unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate("tutti", flags|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3
		fd, err = unix.MemfdCreate("tutti", flags)
	}
	if err != nil {
		return -1, fmt.Errorf("memfd_create: %w", err)
	}
	if err = unix.Fchmod(fd, 0o400); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("mode of shared memory: %w", err)
	}
	err = unix.Ftruncate(fd, int64(n))
	if err == nil && n > 0 && strict() {
		err = reserve(fd, n)
	}
	if err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("shared memory of %d bytes: %w", n, err)
	}
	return fd, nil
}

// reserve allocates n bytes of shared memory, a part at a time: some kernels undo what a signal
// interrupts.
func reserve(fd, n int) error {
	const part = 4 << 20
	for at := 0; at < n; {
		switch err := unix.Fallocate(fd, 0, int64(at), int64(min(part, n-at))); err {
		case nil:
			at += part
		case unix.EINTR:
		case unix.ENOSPC: // there is no file system that could be full
			return unix.ENOMEM
		default:
			return err
		}
	}
	return nil
}

// inLargePages asks for large pages where b fills them, if the system gives them to those who ask.
// Kernels before 6.11 give one to any part of shared memory, also past its end: 64 KiB would take 2
// MiB, or 512 MiB where small pages have 64 KiB.
func inLargePages(b []byte) {
	if n := largePage(); n > 0 && len(b) >= n {
		unix.Madvise(b[:len(b)/n*n], unix.MADV_HUGEPAGE)
	}
}

// largePage returns the bytes of a large page, 0 if there are none.
var largePage = sync.OnceValue(func() int {
	text, _ := os.ReadFile("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
	n, _ := strconv.Atoi(strings.TrimSpace(string(text)))
	return max(n, 0)
})

// seal fixes the size of shared memory.
func seal(fd, more int) error {
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals|more); err != nil {
		return fmt.Errorf("sealing shared memory: %w", err)
	}
	return nil
}

// newRing returns shared memory of n bytes that both ends of a link write.
func newRing(n int) (fd int, mem []byte, err error) {
	if fd, err = newMemory(n); err != nil {
		return -1, nil, err
	}
	if err = seal(fd, 0); err == nil {
		mem, err = mapMemory(fd, n, unix.PROT_READ|unix.PROT_WRITE)
	}
	if err != nil {
		unix.Close(fd)
		return -1, nil, err
	}
	return fd, mem, nil
}

// newRegion returns shared memory of n bytes that only this process can write, through mem. Other
// processes can map the descriptor only for reading.
func newRegion(n int) (fd int, mem []byte, err error) {
	if fd, err = newMemory(n); err != nil {
		return -1, nil, err
	}
	if mem, err = mapMemory(fd, n, unix.PROT_READ|unix.PROT_WRITE); err != nil {
		unix.Close(fd)
		return -1, nil, err
	}
	if err = seal(fd, unix.F_SEAL_FUTURE_WRITE); errors.Is(err, unix.EINVAL) { // before Linux 5.1
		if err = seal(fd, 0); err == nil {
			var readOnly int
			if readOnly, err = unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_RDONLY|unix.O_CLOEXEC,
				0); err == nil {
				unix.Close(fd)
				fd = readOnly
			}
		}
	}
	if err != nil {
		unmap(mem)
		unix.Close(fd)
		return -1, nil, err
	}
	return fd, mem, nil
}

// newWritable returns shared memory of n bytes with two descriptors: fd can be mapped for reading
// only, store for writing too.
func newWritable(n int) (fd, store int, b []byte, err error) {
	if store, b, err = newRing(n); err != nil {
		return -1, -1, nil, err
	}
	fd, err = unix.Open(fmt.Sprintf("/proc/self/fd/%d", store), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		unmap(b)
		unix.Close(store)
		return -1, -1, nil, fmt.Errorf("opening shared memory for reading: %w", err)
	}
	return fd, store, b, nil
}

// checkMemory checks that a descriptor from a peer is memory of exactly n bytes that cannot shrink:
// otherwise access to a mapping of it could raise SIGBUS. (Memory from hugetlbfs could, too, when
// the pool is empty.)
func checkMemory(fd, n int) error {
	var st unix.Stat_t
	var fs unix.Statfs_t
	has, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err == nil {
		err = unix.Fstat(fd, &st)
	}
	if err == nil {
		err = unix.Fstatfs(fd, &fs)
	}
	switch {
	case err != nil:
		return fmt.Errorf("%w: the peer passed a descriptor that is no shared memory: %w", p2p.ErrProtocol, err)
	case has&seals != seals || fs.Type != unix.TMPFS_MAGIC:
		return fmt.Errorf("%w: the peer passed memory with seals %#x of kind %#x, want %#x and %#x", p2p.ErrProtocol,
			has, fs.Type, seals, unix.TMPFS_MAGIC)
	case st.Size != int64(n):
		return fmt.Errorf("%w: the peer passed memory of %d bytes, want %d", p2p.ErrProtocol, st.Size, n)
	}
	return nil
}

// mapMemory maps n bytes (whole pages) of fd.
func mapMemory(fd, n, prot int) ([]byte, error) {
	p, err := unix.MmapPtr(fd, 0, nil, uintptr(n), prot, unix.MAP_SHARED)
	if errors.Is(err, unix.ENOMEM) || errors.Is(err, unix.EAGAIN) { // EAGAIN: of memory that is locked
		err = fmt.Errorf("%w: %w", p2p.ErrShortage, err)
	}
	if err != nil {
		return nil, fmt.Errorf("mapping %d bytes of shared memory: %w", n, err)
	}
	return unsafe.Slice((*byte)(p), n), nil
}

// unmap unmaps all pages of a mapping, even if mem is a prefix of it.
func unmap(mem []byte) error {
	return unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(mem)), uintptr(pages(len(mem))))
}

// blank replaces a mapping by private zero pages: it releases the shared memory, and late readers
// of the address get zeros instead of a fault.
func blank(mem []byte) error {
	_, err := unix.MmapPtr(-1, 0, unsafe.Pointer(unsafe.SliceData(mem)), uintptr(len(mem)),
		unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED|unix.MAP_NORESERVE)
	return err
}

// exports lists the regions of one rank that its peers may map. Descriptors are passed and closed
// under the lock, so that a number is never passed after it was closed and reused.
//
// It also lists the grants for puts and gets, and the links whose peers may use them.
type exports struct {
	mu      sync.Mutex
	m       map[uint64]*export
	grants  map[uint64]*grant // by generation
	boards  []*board
	links   map[*link]struct{} // open ones
	leavers []*link            // closed ones whose peers were in the middle of an access
	witness *witness
	closed  bool // the transport is closed
}

func newExports() *exports {
	return &exports{m: map[uint64]*export{}, grants: map[uint64]*grant{}, links: map[*link]struct{}{},
		witness: newWitness()}
}

type export struct {
	fd, size         int
	store            int                // the descriptor for writing, -1: peers cannot write
	board            bool               // it holds grants; every peer may read it
	readers, writers int                // exposures with rights to read, and to write
	granted          map[*link]struct{} // the links on which it was passed
}

// alloc implements the allocators of p2p.
func (x *exports) alloc(n int, writable bool) (*p2p.Region, error) {
	e, b, err := newExport(n, writable)
	if err != nil {
		return nil, err
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.add(e, b), nil
}

// newExport returns shared memory of n bytes that can be exported, and its pages.
func newExport(n int, writable bool) (e *export, b []byte, err error) {
	if n < 1 || pages(n) < n {
		return nil, nil, fmt.Errorf("shm: region of %d bytes, want at least 1", n)
	}
	e = &export{size: n, store: -1, granted: map[*link]struct{}{}}
	try := func() {
		if writable {
			e.fd, e.store, b, err = newWritable(pages(n))
		} else {
			e.fd, b, err = newRegion(pages(n))
		}
	}
	if try(); errors.Is(err, unix.EMFILE) { // the limit of a C program is often 1024
		limit, _ := files.Limit()
		files.Raise(2 * limit)
		try()
	}
	if err != nil {
		return nil, nil, fmt.Errorf("shm: %w", files.Explain(err))
	}
	inLargePages(b)
	return e, b, nil
}

// add makes a region of what newExport has returned. With the lock.
func (x *exports) add(e *export, b []byte) *p2p.Region {
	n, id := e.size, ident.New()
	x.m[id] = e
	free := func() error { return errors.Join(x.free(id), unmap(b)) }
	return mem.NewRegion(id, mem.Host(b[:n:n], mem.Anywhere), true, e.store >= 0, free)
}

// free removes a region and tells the peers that have it.
func (x *exports) free(id uint64) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.freeLocked(id)
}

func (x *exports) freeLocked(id uint64) error {
	e := x.m[id]
	delete(x.m, id)
	for l := range e.granted {
		l.retract(id)
	}
	err := unix.Close(e.fd)
	if e.store >= 0 {
		err = errors.Join(err, unix.Close(e.store))
	}
	return err
}

// readable reports whether every peer may read region id: it is exposed for reading, or holds
// grants.
func (x *exports) readable(id uint64) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	e := x.m[id]
	return e != nil && (e.board || e.readers > 0)
}

// pass calls send with the descriptor and the size of region id, if it exists, and records that the
// peer of l has it. With store it passes the descriptor for writing, which requires an exposure for
// writing. The other one of memory that can be written requires an exposure for reading.
func (x *exports) pass(l *link, id uint64, store bool, send func(fd, size int) error) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	e := x.m[id]
	if e == nil || store && (e.writers == 0 || e.store < 0) || !store && e.store >= 0 && e.readers == 0 {
		return p2p.ErrNoRegion
	}
	fd := e.fd
	if store {
		fd = e.store
	}
	if err := send(fd, e.size); err != nil {
		return err
	}
	e.granted[l] = struct{}{}
	return nil
}

// join adds a link whose peer may access exposed memory.
func (x *exports) join(l *link) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.links[l] = struct{}{}
}

// leave removes a closed link, after its gate was set. It returns false if the link's words have to
// stay, because the peer is in the middle of an access.
func (x *exports) leave(l *link) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.links, l)
	if l.words.at(busyAt, 1-l.side).Load()%2 == 0 || l.ceased.Load() {
		x.end()
		return true
	}
	x.leavers = append(x.leavers, l)
	return false
}

// forget removes a closed link.
func (x *exports) forget(l *link) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, e := range x.m {
		delete(e.granted, l)
	}
}

// imported maps n bytes of a peer's region from the descriptor that the peer has passed.
func imported(fd int, n uint64, store bool) (*p2p.Mapping, error) {
	if n == 0 || n > math.MaxInt-uint64(pages(1)) {
		return nil, fmt.Errorf("%w: the peer passed a region of %d bytes", p2p.ErrProtocol, n)
	}
	if err := checkMemory(fd, pages(int(n))); err != nil {
		return nil, err
	}
	prot := unix.PROT_READ
	if store {
		prot |= unix.PROT_WRITE
	}
	mem, err := mapMemory(fd, pages(int(n)), prot)
	if err != nil {
		return nil, err
	}
	inLargePages(mem)
	return p2p.NewMapping(mem[:n:n], func(mem []byte) { unmap(mem) }), nil
}
