package shm

import (
	"errors"
	"net"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"tutti/internal/files"
	"tutti/p2p"
	"tutti/p2p/linktest"
	"tutti/p2p/ring"
)

// fill uses up the descriptors of this process except for left of them. free ends that.
func fill(t *testing.T, left int) (free func()) {
	t.Helper()
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	few := limit
	few.Cur = min(few.Cur, 256)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &few); err != nil {
		t.Fatal(err)
	}
	var all []int
	for {
		fd, err := unix.Open(os.DevNull, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			break
		}
		all = append(all, fd)
	}
	for _, fd := range all[:left] {
		unix.Close(fd)
	}
	return func() {
		for _, fd := range all[left:] {
			unix.Close(fd)
		}
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
			t.Error(err)
		}
	}
}

// setUp answers diallers with memory for rings of size bytes.
func setUp(t *testing.T, size int) rogue {
	fd := memory(t, linkBytes(size))
	t.Cleanup(func() { unix.Close(fd) })
	return listen(t, func(c *net.UnixConn) {
		pass(t, c, encoded(message{kind: msgSetup, size: uint64(size), version: version}), fd)
		c.Read(make([]byte, 1))
	})
}

// A dialler that lacks memory or descriptors after the peer has accepted says that it does.
func TestDiallersShortage(t *testing.T) {
	linktest.NoLeaks(t, "Memory", func(t *testing.T) {
		r, a := setUp(t, ring.MaxData), node(t, 0)
		var limit unix.Rlimit
		if err := unix.Getrlimit(unix.RLIMIT_AS, &limit); err != nil {
			t.Fatal(err)
		}
		few := limit
		few.Cur = uint64(used(t)) + ring.MaxData
		if err := unix.Setrlimit(unix.RLIMIT_AS, &few); err != nil {
			t.Fatal(err)
		}
		l, err := r.dialled(t, a)
		if err := unix.Setrlimit(unix.RLIMIT_AS, &limit); err != nil {
			t.Fatal(err)
		}
		if err == nil {
			l.Close()
		}
		if !errors.Is(err, p2p.ErrShortage) || !errors.Is(err, unix.ENOMEM) {
			t.Errorf("%v, want %v and %v", err, p2p.ErrShortage, unix.ENOMEM)
		}
	})
	linktest.NoLeaks(t, "Descriptors", func(t *testing.T) {
		r, a := setUp(t, ring.MinData), node(t, 0)
		free := fill(t, 2) // for both ends of the connection
		l, err := r.dialled(t, a)
		free()
		if err == nil {
			l.Close()
		}
		if !errors.Is(err, p2p.ErrShortage) || !errors.Is(err, unix.EMFILE) {
			t.Errorf("%v, want %v and %v", err, p2p.ErrShortage, unix.EMFILE)
		}
	})
}

// used returns the size of this process's addresses in bytes.
func used(t *testing.T) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Fatal(err)
	}
	var n int
	for _, c := range strings.Fields(string(b))[0] {
		n = 10*n + int(c-'0')
	}
	return n * os.Getpagesize()
}

// A peer without descriptors is not mistaken for this process, and can be dialled again.
func TestPeersShortage(t *testing.T) {
	linktest.NoLeaks(t, "All", func(t *testing.T) {
		fd := memory(t, linkBytes(ring.MinData))
		defer unix.Close(fd)
		answers := make(chan message, 2)
		answers <- message{kind: msgFail, size: uint64(unix.EMFILE)}
		answers <- message{kind: msgSetup, size: ring.MinData, version: version}
		r := listen(t, func(c *net.UnixConn) {
			if m := <-answers; m.hasFile() {
				pass(t, c, encoded(m), fd)
			} else {
				pass(t, c, encoded(m))
			}
		})
		a := node(t, 0)
		_, err := r.dialled(t, a)
		if err = files.Explain(err); err == nil || errors.Is(err, p2p.ErrShortage) ||
			strings.Contains(err.Error(), "this process") || !strings.Contains(err.Error(), unix.EMFILE.Error()) {
			t.Errorf("the peer has no descriptors: %v", err)
		}
		l, err := r.dialled(t, a)
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
	})
}

// A link whose end has no descriptor for what comes does without the lifeline, and maps no region
// until it has one.
func TestDescriptorsThatCannotBeTaken(t *testing.T) {
	linktest.NoLeaks(t, "All", func(t *testing.T) {
		l, c, _ := captive(t)
		fd := memory(t, pages(1))
		defer unix.Close(fd)
		m := l.Link.(p2p.Mapper)
		if m, err := m.Map(1); m != nil || err != nil { // it asks
			t.Fatal(m, err)
		}
		grant := encoded(message{kind: msgGrant, id: 1, size: 8})
		end := lifelines(t, c, unix.O_NONBLOCK)
		free := fill(t, 0)
		pass(t, c, encoded(message{kind: msgLifeline}), end)
		pass(t, c, grant, fd)
		_, err := linktest.Map(l, 1)
		free()
		if !errors.Is(err, unix.EMFILE) || !errors.Is(err, p2p.ErrShortage) || l.Err() != nil {
			t.Errorf("Map: %v; the link: %v", err, l.Err())
		}
		if m, err := m.Map(1); m != nil || err != nil { // it asks again
			t.Fatal(m, err)
		}
		pass(t, c, grant, fd)
		region, err := linktest.Map(l, 1)
		if err != nil {
			t.Fatal(err)
		}
		region.Release()
		if err := l.Link.Close(); err != nil {
			t.Error(err)
		}
	})
}

// Under strict accounting all of the memory is allocated at once.
func TestStrictAccounting(t *testing.T) {
	defer func(f func() bool) { strict = f }(strict)
	for _, yes := range []bool{false, true} {
		strict = func() bool { return yes }
		fd := memory(t, 8*pages(1))
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			t.Fatal(err)
		}
		unix.Close(fd)
		if n := st.Blocks * 512; (n == st.Size) != yes || !yes && n != 0 {
			t.Errorf("strict: %v: %d of %d bytes are allocated", yes, n, st.Size)
		}
	}
}

// Memory needs descriptors, for which the limit is raised.
func TestMemoryRaisesLimit(t *testing.T) {
	defer fill(t, 0)()
	limit, _ := files.Limit()
	x := newExports()
	for range limit {
		r, err := x.alloc(1, true)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Free()
	}
}
