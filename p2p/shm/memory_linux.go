package shm

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"tutti/p2p"
)

const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

func pages(n int) int {
	p := os.Getpagesize()
	return (n + p - 1) &^ (p - 1)
}

// newMemory returns the descriptor of fresh, zeroed shared memory of n bytes (whole pages), sealed at that size.
func newMemory(n int) (int, error) {
	const flags = unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate("tutti", flags|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3
		fd, err = unix.MemfdCreate("tutti", flags)
	}
	if err != nil {
		return -1, fmt.Errorf("memfd_create: %w", err)
	}
	if err = unix.Ftruncate(fd, int64(n)); err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
	}
	if err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("shared memory of %d bytes: %w", n, err)
	}
	return fd, nil
}

// checkMemory says whether a descriptor from a peer is memory of exactly n bytes that nobody can shrink: else touching a mapping of it could be a SIGBUS.
// (Memory from hugetlbfs could be one too, when the pool is empty.)
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
		return fmt.Errorf("%w: the peer passed memory with seals %#x of kind %#x, want %#x and %#x", p2p.ErrProtocol, has, fs.Type, seals, unix.TMPFS_MAGIC)
	case st.Size != int64(n):
		return fmt.Errorf("%w: the peer passed memory of %d bytes, want %d", p2p.ErrProtocol, st.Size, n)
	}
	return nil
}

// mapMemory maps n bytes (whole pages) of fd for reading and writing.
func mapMemory(fd, n int) ([]byte, error) {
	p, err := unix.MmapPtr(fd, 0, nil, uintptr(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("mapping %d bytes of shared memory: %w", n, err)
	}
	return unsafe.Slice((*byte)(p), n), nil
}

// unmap gives a mapping back, all its pages even if mem is cut short.
func unmap(mem []byte) error {
	return unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(mem)), uintptr(pages(len(mem))))
}

// blank replaces a mapping by untouched private pages: the shared memory is given up, and yet who still looks at the address finds zeros instead of a fault.
func blank(mem []byte) error {
	_, err := unix.MmapPtr(-1, 0, unsafe.Pointer(unsafe.SliceData(mem)), uintptr(len(mem)), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED|unix.MAP_NORESERVE)
	return err
}

// exports are the regions of one rank that its peers may map. Descriptors are passed and closed under the lock, so that a number is never
// passed after it was closed and has come to mean something else.
type exports struct {
	mu sync.Mutex
	m  map[uint64]export
}

// The generation is kept here too and changes with the descriptor, under the lock: Region.Generation follows a moment later.
type export struct {
	fd   int
	size int
	gen  uint32
}

// alloc implements p2p.Allocator.
func (x *exports) alloc(n int) (*p2p.Region, error) {
	if n < 1 || pages(n) < n {
		return nil, fmt.Errorf("shm: region of %d bytes, want at least 1", n)
	}
	fd, err := newMemory(pages(n))
	if err != nil {
		return nil, fmt.Errorf("shm: %w", err)
	}
	mem, err := mapMemory(fd, pages(n))
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("shm: %w", err)
	}
	unix.Madvise(mem, unix.MADV_HUGEPAGE) // where the system allows it
	var b [8]byte
	id := uint64(0)
	x.mu.Lock()
	for _, taken := x.m[id]; id == 0 || taken; _, taken = x.m[id] {
		rand.Read(b[:])
		id = binary.LittleEndian.Uint64(b[:])
	}
	if x.m == nil {
		x.m = map[uint64]export{}
	}
	x.m[id] = export{fd: fd, size: n}
	x.mu.Unlock()
	r := p2p.NewRegion(id, p2p.Anywhere, mem[:n:n], fd, func() error {
		x.mu.Lock()
		fd := x.m[id].fd
		delete(x.m, id)
		err := unix.Close(fd)
		x.mu.Unlock()
		return errors.Join(err, unmap(mem))
	})
	r.OnRenew(func() error {
		fd, err := x.renew(id, mem)
		if fd >= 0 {
			r.File = fd
		}
		return err
	})
	return r, nil
}

// renew puts fresh memory with the same contents behind the addresses of mem. Peers go on with the old memory, which is nobody else's from then on.
// It returns the new descriptor, negative if the old one stays.
func (x *exports) renew(id uint64, mem []byte) (int, error) {
	fd, err := newMemory(len(mem))
	if err != nil {
		return -1, err
	}
	fresh, err := mapMemory(fd, len(mem))
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	old, ok := x.m[id]
	if !ok {
		return -1, errors.Join(p2p.ErrNoRegion, unmap(fresh), unix.Close(fd))
	}
	copy(fresh, mem)
	if _, err := unix.MmapPtr(fd, 0, unsafe.Pointer(unsafe.SliceData(mem)), uintptr(len(mem)), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
		return -1, errors.Join(err, unmap(fresh), unix.Close(fd))
	}
	unix.Madvise(mem, unix.MADV_HUGEPAGE)
	x.m[id] = export{fd, old.size, old.gen + 1}
	return fd, errors.Join(unmap(fresh), unix.Close(old.fd))
}

// pass calls send with the descriptor of region id, if there is one of that size and generation.
func (x *exports) pass(id, size uint64, gen uint32, send func(fd int) error) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	e, ok := x.m[id]
	if !ok || uint64(e.size) != size || e.gen != gen {
		return p2p.ErrNoRegion
	}
	return send(e.fd)
}
