package shm

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"tutti/internal/trust"
	"tutti/p2p"
	"tutti/p2p/linktest"
	"tutti/p2p/ring"
)

// rogue is a rank that knows the secret and violates the protocol.
type rogue struct {
	id    p2p.Identity
	where endpoint
	t     *testing.T
}

// listen makes a rogue that authenticates to diallers and runs f on the connection.
func listen(t *testing.T, f func(conn *net.UnixConn)) rogue {
	t.Helper()
	machine, err := Identify()
	if err != nil {
		t.Fatal(err)
	}
	r := rogue{id: p2p.Identity{Rank: 1, Incarnation: 77}, where: endpoint{uid: uint32(os.Geteuid()), machine: machine},
		t: t}
	rand.Read(r.where.name[:])
	l, err := net.Listen("unix", r.where.address())
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() { l.Close(); <-done })
	a := trust.Acceptor{Secret: linktest.Secret, Purpose: purpose,
		Admit: func(net.Conn, trust.Hello) error { return nil }}
	go func() {
		defer close(done)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			conn.SetDeadline(time.Now().Add(linktest.Patience))
			if _, _, err := a.Handshake(conn); err == nil {
				f(conn.(*net.UnixConn))
			}
			conn.Close()
		}
	}()
	return r
}

func (r rogue) dialled(tb testing.TB, n *linktest.Node) (p2p.Link, error) {
	ctx, cancel := context.WithTimeout(context.Background(), linktest.Patience)
	defer cancel()
	return n.T.Dial(ctx, r.id, r.where.encode())
}

func node(t testing.TB, rank int) *linktest.Node {
	return linktest.Listen(t, New(Config{RingBytes: ring.MinData}), linktest.NewHost(rank))
}

// pass sends bytes with descriptors.
func pass(t testing.TB, conn *net.UnixConn, b []byte, fds ...int) {
	t.Helper()
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	conn.WriteMsgUnix(b, oob, nil) // fails if the victim has closed, which the victim's side shows
}

func encoded(m message) []byte { b := m.encode(); return b[:] }

func memory(t testing.TB, n int) int {
	t.Helper()
	fd, err := newMemory(n)
	if err == nil {
		err = seal(fd, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	return fd
}

// impostors returns descriptors that must not be taken for n bytes of memory; the caller closes
// them.
func impostors(t testing.TB, n int) map[string]int {
	t.Helper()
	fds := map[string]int{"short": memory(t, n-pages(1)), "long": memory(t, n+pages(1)), "empty": memory(t, 0)}
	for name, seal := range map[string]int{"unsealed": 0, "may shrink": unix.F_SEAL_GROW | unix.F_SEAL_SEAL,
		"may be sealed": unix.F_SEAL_GROW | unix.F_SEAL_SHRINK} {
		fd, err := unix.MemfdCreate("x", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		if err != nil {
			t.Fatal(err)
		}
		unix.Ftruncate(fd, int64(n))
		unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seal)
		fds[name] = fd
	}
	if fd, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0); err == nil {
		fds["device"] = fd
	}
	if fd, err := unix.Open(t.TempDir(), unix.O_RDWR|unix.O_TMPFILE|unix.O_CLOEXEC, 0o600); err == nil {
		unix.Ftruncate(fd, int64(n))
		fds["file"] = fd
	}
	if fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC); err == nil {
		fds["eventfd"] = fd
	}
	if fd, err := unix.MemfdCreate("x", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_HUGETLB); err == nil {
		unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
		fds["huge pages"] = fd
	}
	return fds
}

// TestHostileSetup: a link is made of valid memory only, and nothing is left open.
func TestHostileSetup(t *testing.T) {
	const data = ring.MinData
	n := linkBytes(data)
	good := message{kind: msgSetup, size: data, version: version}
	type attack struct {
		name string
		do   func(t *testing.T, conn *net.UnixConn)
		want error
	}
	attacks := []attack{
		{"no descriptor", func(t *testing.T, c *net.UnixConn) { pass(t, c, encoded(good)) }, p2p.ErrProtocol},
		{"closes", func(t *testing.T, c *net.UnixConn) {}, io.EOF},
		{"half a message", func(t *testing.T, c *net.UnixConn) { pass(t, c, encoded(good)[:9]) }, io.EOF},
		{"garbage", func(t *testing.T, c *net.UnixConn) { pass(t, c, make([]byte, 100)) }, p2p.ErrProtocol},
		{"many descriptors", func(t *testing.T, c *net.UnixConn) {
			fd := memory(t, n)
			pass(t, c, encoded(good), fd, fd, fd, fd, fd, fd, fd)
			unix.Close(fd)
		}, p2p.ErrProtocol},
		{"two descriptors", func(t *testing.T, c *net.UnixConn) {
			fd := memory(t, n)
			pass(t, c, encoded(good), fd, fd)
			unix.Close(fd)
		}, p2p.ErrProtocol},
		{"half a message with a descriptor", func(t *testing.T, c *net.UnixConn) {
			fd := memory(t, n)
			pass(t, c, encoded(good)[:9], fd)
			unix.Close(fd)
		}, io.EOF},
	}
	for name, m := range map[string]message{
		"other version": {kind: msgSetup, size: data, version: version + 1},
		"odd ring":      {kind: msgSetup, size: data + 64, version: version},
		"tiny ring":     {kind: msgSetup, size: 64, version: version}, "endless ring": {kind: msgSetup, size: 1 << 63,
			version: version},
		"other ring": {kind: msgSetup, size: 2 * data, version: version},
		"grant":      {kind: msgGrant, size: data, version: version},
	} {
		attacks = append(attacks, attack{name, func(t *testing.T, c *net.UnixConn) {
			fd := memory(t, n)
			pass(t, c, encoded(m), fd)
			unix.Close(fd)
		}, p2p.ErrProtocol})
	}
	for _, name := range []string{"short", "long", "empty", "unsealed", "may shrink", "may be sealed", "device", "file",
		"eventfd", "huge pages"} {
		attacks = append(attacks, attack{name, func(t *testing.T, c *net.UnixConn) {
			fds := impostors(t, n)
			fd, ok := fds[name]
			if !ok {
				fd = fds["unsealed"] // not supported by this system
			}
			pass(t, c, encoded(good), fd)
			for _, fd := range fds {
				unix.Close(fd)
			}
		}, p2p.ErrProtocol})
	}
	for _, a := range attacks {
		linktest.NoLeaks(t, a.name, func(t *testing.T) {
			r := listen(t, func(c *net.UnixConn) { a.do(t, c) })
			l, err := r.dialled(t, node(t, 0))
			if err == nil {
				l.Close()
			}
			if !errors.Is(err, a.want) {
				t.Errorf("%v, want %v", err, a.want)
			}
		})
	}
}

// captive returns a link whose peer is a rogue, with the rogue's connection and its view of the
// shared memory.
func captive(t *testing.T) (l *linktest.End, conn *net.UnixConn, mem []byte) {
	t.Helper()
	const data = ring.MinData
	n := linkBytes(data)
	fd := memory(t, n)
	defer unix.Close(fd)
	mem, err := mapMemory(fd, n, unix.PROT_READ|unix.PROT_WRITE)
	if err != nil {
		t.Fatal(err)
	}
	up, end := make(chan *net.UnixConn, 1), make(chan struct{})
	r := listen(t, func(c *net.UnixConn) {
		pass(t, c, encoded(message{kind: msgSetup, size: data, version: version}), fd)
		up <- c
		<-end
	})
	nd := node(t, 0)
	link, err := r.dialled(t, nd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		close(end)
		link.Close()
		unmap(mem)
	})
	return &linktest.End{Link: link, Host: nd.Host}, <-up, mem
}

// Close does not wait for an access that the peer claims to be this end's.
func TestCloseBesideForgedAccess(t *testing.T) {
	end, conn, mem := captive(t)
	words := words(mem[pages(ring.Bytes(ring.MinData)):])
	for side := range 2 {
		words.at(busyAt, side).Store(1)
	}
	conn.Close()
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		end.Link.Close()
	}()
	select {
	case <-closed:
	case <-time.After(20 * time.Second):
		t.Fatal("Close waits for the peer's word")
	}
}

// lifelines passes ends of a pipe as lifelines, and returns its writing end.
func lifelines(t *testing.T, c *net.UnixConn, flags int, ends ...int) int {
	t.Helper()
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC|flags); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(pipe[0]); unix.Close(pipe[1]) })
	for _, end := range ends {
		pass(t, c, encoded(message{kind: msgLifeline}), pipe[end])
	}
	return pipe[1]
}

// TestHostilePeer: a peer that knows the secret can end its own link, and cause no other harm.
func TestHostilePeer(t *testing.T) {
	failed := func(t *testing.T, l *linktest.End, want error) {
		t.Helper()
		if h, _, err := l.Wait(); !errors.Is(err, want) {
			t.Fatalf("Recv: %+v, %v; want %v", h, err, want)
		}
	}
	for name, do := range map[string]func(t *testing.T, l *linktest.End, c *net.UnixConn, mem []byte){
		"grant unasked": func(t *testing.T, l *linktest.End, c *net.UnixConn, mem []byte) {
			fd := memory(t, pages(1))
			pass(t, c, encoded(message{kind: msgGrant, id: 1, size: 1}), fd)
			unix.Close(fd)
			failed(t, l, p2p.ErrProtocol)
		},
		"deny unasked": func(t *testing.T, l *linktest.End, c *net.UnixConn, mem []byte) {
			pass(t, c, encoded(message{kind: msgDeny, id: 3}))
			failed(t, l, p2p.ErrProtocol)
		},
		"grant of nothing": func(t *testing.T, l *linktest.End, c *net.UnixConn, mem []byte) {
			pass(t, c, encoded(message{kind: msgGrant, id: 1, size: 1}))
			failed(t, l, p2p.ErrProtocol)
		},
		"lifeline of nothing": func(t *testing.T, l *linktest.End, c *net.UnixConn, mem []byte) {
			pass(t, c, encoded(message{kind: msgLifeline}))
			failed(t, l, p2p.ErrProtocol)
		},
		"lifeline that is memory": func(t *testing.T, l *linktest.End, c *net.UnixConn, mem []byte) {
			fd := memory(t, pages(1))
			pass(t, c, encoded(message{kind: msgLifeline}), fd)
			unix.Close(fd)
			failed(t, l, p2p.ErrProtocol)
		},
		"lifeline that blocks": func(t *testing.T, l *linktest.End, c *net.UnixConn, mem []byte) {
			lifelines(t, c, 0, 0)
			failed(t, l, p2p.ErrProtocol)
		},
		"lifeline's writing end": func(t *testing.T, l *linktest.End, c *net.UnixConn, mem []byte) {
			lifelines(t, c, unix.O_NONBLOCK, 1)
			failed(t, l, p2p.ErrProtocol)
		},
		"two lifelines": func(t *testing.T, l *linktest.End, c *net.UnixConn, mem []byte) {
			lifelines(t, c, unix.O_NONBLOCK, 0, 0)
			failed(t, l, p2p.ErrProtocol)
		},
		"lifeline with data": func(t *testing.T, l *linktest.End, c *net.UnixConn, mem []byte) {
			unix.Write(lifelines(t, c, unix.O_NONBLOCK, 0), []byte("alive"))
			pass(t, c, encoded(message{kind: msgAsk, id: 5}))
			if _, err := io.ReadFull(c, make([]byte, messageSize)); err != nil || l.Err() != nil {
				t.Error(err, l.Err())
			}
		},
		"two witnesses": func(t *testing.T, l *linktest.End, c *net.UnixConn, mem []byte) {
			for range 2 {
				pass(t, c, encoded(message{kind: msgWitness, id: 8, size: 1}))
			}
			failed(t, l, p2p.ErrProtocol)
		},
		"setup again": func(t *testing.T, l *linktest.End, c *net.UnixConn, mem []byte) {
			fd := memory(t, pages(1))
			pass(t, c, encoded(message{kind: msgSetup, size: ring.MinData, version: version}), fd)
			unix.Close(fd)
			failed(t, l, p2p.ErrProtocol)
		},
		"bell with a descriptor": func(t *testing.T, l *linktest.End, c *net.UnixConn, mem []byte) {
			fd := memory(t, pages(1))
			pass(t, c, encoded(message{kind: msgBell}), fd)
			unix.Close(fd)
			failed(t, l, p2p.ErrProtocol)
		},
		"half a message": func(t *testing.T, l *linktest.End, c *net.UnixConn, mem []byte) {
			pass(t, c, encoded(message{kind: msgBell})[:5])
			c.CloseWrite()
			failed(t, l, p2p.ErrPeerGone)
		},
		"garbage": func(t *testing.T, l *linktest.End, c *net.UnixConn, mem []byte) {
			pass(t, c, []byte("GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n"))
			failed(t, l, p2p.ErrProtocol)
			if _, err := io.Copy(io.Discard, c); err != nil && !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("the connection is not closed: %v", err)
			}
		},
		"bad ring": func(t *testing.T, l *linktest.End, c *net.UnixConn, mem []byte) {
			for i := range mem[:ring.Bytes(ring.MinData)] {
				mem[i] = 0xff
			}
			if _, _, err := l.Recv(); !errors.Is(err, p2p.ErrProtocol) {
				t.Errorf("Recv: %v", err)
			}
			if ok, err := l.Send(&p2p.Header{}, nil); ok || !errors.Is(err, p2p.ErrProtocol) {
				t.Errorf("Send: %v, %v", ok, err)
			}
		},
		"bells": func(t *testing.T, l *linktest.End, c *net.UnixConn, mem []byte) { // many of them
			for range 5000 {
				pass(t, c, encoded(message{kind: msgBell}))
			}
			pass(t, c, encoded(message{kind: msgAsk, id: 5})) // answered when all were read
			answer := make([]byte, messageSize)
			if _, err := io.ReadFull(c, answer); err != nil {
				t.Fatal(err)
			}
			if m, err := decodeMessage((*[messageSize]byte)(answer)); err != nil ||
				m != (message{kind: msgDeny, id: 5}) {
				t.Errorf("%+v, %v", m, err)
			}
			if l.Err() != nil {
				t.Error(l.Err())
			}
		},
		// and never reads an answer
		"requests without end": func(t *testing.T, l *linktest.End, c *net.UnixConn, mem []byte) {
			for range 1 << 20 {
				if _, err := c.Write(encoded(message{kind: msgAsk, id: 5})); err != nil {
					failed(t, l, p2p.ErrProtocol)
					return
				}
			}
			t.Error("a million unread answers were kept")
		},
	} {
		linktest.NoLeaks(t, name, func(t *testing.T) {
			l, c, mem := captive(t)
			do(t, l, c, mem)
			if err := l.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestHostileRegions: a peer's grants are checked before they are mapped. Answers that come late or
// never affect only the caller that asked.
func TestHostileRegions(t *testing.T) {
	ask := func(t *testing.T, c *net.UnixConn) message {
		b := make([]byte, messageSize)
		if _, err := io.ReadFull(c, b); err != nil {
			t.Fatal(err)
		}
		m, err := decodeMessage((*[messageSize]byte)(b))
		if err != nil || m.kind != msgAsk {
			t.Fatal(m, err)
		}
		return m
	}
	grant := func(t *testing.T, c *net.UnixConn, size, bytes int) {
		m := ask(t, c)
		fd := memory(t, bytes)
		pass(t, c, encoded(message{kind: msgGrant, id: m.id, size: uint64(size)}), fd)
		unix.Close(fd)
	}
	linktest.NoLeaks(t, "Impostors", func(t *testing.T) {
		l, c, _ := captive(t)
		for name, fd := range impostors(t, 2*pages(1)) {
			done := make(chan struct{})
			go func() {
				defer close(done)
				pass(t, c, encoded(message{kind: msgGrant, id: ask(t, c).id, size: uint64(pages(1)) + 1}), fd)
			}()
			if _, err := linktest.Map(l, 1); !errors.Is(err, p2p.ErrProtocol) {
				t.Errorf("%s: %v", name, err)
			}
			<-done
			unix.Close(fd)
		}
	})
	linktest.NoLeaks(t, "Sizes", func(t *testing.T) {
		l, c, _ := captive(t)
		for i, size := range []int{0, pages(1) + 1, -1, math.MaxInt} {
			go grant(t, c, size, pages(1))
			if _, err := linktest.Map(l, uint64(i)); !errors.Is(err, p2p.ErrProtocol) {
				t.Errorf("%d bytes: %v", size, err)
			}
		}
	})
	linktest.NoLeaks(t, "NobodyWaits", func(t *testing.T) {
		before := mappings(t) // links of other tests that are not garbage yet have some
		l, c, _ := captive(t)
		if m, err := l.Link.(p2p.Mapper).Map(1); m != nil || err != nil {
			t.Fatal(m, err)
		}
		grant(t, c, 5, pages(1))
		pass(t, c, encoded(message{kind: msgDrop, id: 1}))
		go grant(t, c, 5, pages(1))
		m, err := linktest.Map(l, 3)
		if err != nil || len(m.Mem) != 5 || cap(m.Mem) != 5 {
			t.Fatal(m, err)
		}
		defer m.Release()
		if n := mappings(t); n > before+3 { // both ends' of the ring, and region 3
			t.Errorf("%d mappings, %d before, want 3 more: what was dropped is still mapped", n, before)
		}
	})
	linktest.NoLeaks(t, "Never", func(t *testing.T) {
		l, c, _ := captive(t)
		results := make(chan error, 4)
		for i := range 4 {
			go func() {
				_, err := linktest.Map(l, uint64(i))
				results <- err
			}()
		}
		ask(t, c)
		c.CloseWrite()
		for range 4 {
			if err := <-results; !errors.Is(err, p2p.ErrPeerGone) {
				t.Error(err)
			}
		}
	})
	linktest.NoLeaks(t, "Closed", func(t *testing.T) {
		l, c, _ := captive(t)
		result := make(chan error)
		go func() {
			_, err := linktest.Map(l, 1)
			result <- err
		}()
		ask(t, c)
		l.Close()
		if err := <-result; !errors.Is(err, p2p.ErrClosed) {
			t.Error(err)
		}
	})
	linktest.NoLeaks(t, "Full", func(t *testing.T) { // a peer that is stopped, and later reads all
		l, c, _ := captive(t)
		m := l.Link.(p2p.Mapper)
		for i := range 10_000 {
			if m, err := m.Map(uint64(i)); m != nil || err != nil {
				t.Fatal(i, m, err)
			}
		}
		for range maxAsking {
			grant(t, c, 1, pages(1))
		}
		for i := range maxAsking {
			m, err := linktest.Map(l, uint64(i))
			if err != nil {
				t.Fatal(err)
			}
			m.Release()
		}
	})
}

// mappings counts this process's mappings of shared memory of this package.
func mappings(t *testing.T) int {
	t.Helper()
	text, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(text), "memfd:tutti")
}

// TestRegionCannotBeWritten: the kernel lets only the owner of a region write to it.
func TestRegionCannotBeWritten(t *testing.T) {
	a, b := node(t, 0), node(t, 1)
	x, _ := linktest.Connect(t, a, b)
	tr := b.T.(*Transport)
	r, err := tr.Alloc(100)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Free()
	b.Share(r.ID, r)
	m, err := linktest.Map(x, r.ID)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Release()
	whole := unsafe.Slice(unsafe.SliceData(m.Mem), pages(100))
	if err := unix.Mprotect(whole, unix.PROT_READ|unix.PROT_WRITE); err == nil {
		t.Error("a mapping of a peer's region can be made writable")
	}
	fd := tr.exports.m[r.ID].fd
	if _, err := mapMemory(fd, pages(100), unix.PROT_READ|unix.PROT_WRITE); err == nil {
		t.Error("the descriptor of a region can be mapped for writing")
	}
	if _, err := unix.Pwrite(fd, []byte{1}, 0); err == nil {
		t.Error("the descriptor of a region can be written to")
	}
	again, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err == nil {
		defer unix.Close(again)
		if _, err := mapMemory(again, pages(100), unix.PROT_READ|unix.PROT_WRITE); err == nil {
			t.Error("the memory of a region can be opened again and mapped for writing")
		}
	}
	if r.Bytes()[0] = 5; m.Mem[0] != 5 {
		t.Error("the owner's stores are not seen")
	}
}

// TestMemoryCannotBeOpenedForWriting: a process of another user that has a descriptor for reading
// does not get one for writing by opening the memory again.
func TestMemoryCannotBeOpenedForWriting(t *testing.T) {
	n := pages(1)
	fd, store, b, err := newWritable(n)
	if err != nil {
		t.Fatal(err)
	}
	region, c, err := newRegion(n)
	if err != nil {
		t.Fatal(err)
	}
	for what, fd := range map[string]int{"memory that peers may write": fd,
		"of that, the descriptor for writing": store, "a region": region, "a ring": memory(t, n)} {
		f := os.NewFile(uintptr(fd), what)
		info, err := f.Stat()
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode().Perm() != 0o400 {
			t.Errorf("%s has %v, want mode 0400", what, info.Mode())
		}
		if os.Geteuid() == 0 {
			c := exec.Command("sh", "-c", ": <>/proc/self/fd/3")
			c.ExtraFiles = []*os.File{f}
			c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
			if out, err := c.CombinedOutput(); err == nil || !strings.Contains(string(out), "ermission denied") {
				t.Errorf("%s, opened by another user for writing: %v, %s", what, err, out)
			}
		}
		f.Close()
	}
	unmap(b)
	unmap(c)
}

// TestFreedRegionsAreUnmappedByPeers: allocating, mapping and freeing again and again does not add
// up at the peer, nor does it while the peer reads no messages.
func TestFreedRegionsAreUnmappedByPeers(t *testing.T) {
	a, b := node(t, 0), node(t, 1)
	x, _ := linktest.Connect(t, a, b)
	before := mappings(t)
	for range 200 {
		r, err := b.T.(p2p.Allocator).Alloc(100)
		if err != nil {
			t.Fatal(err)
		}
		b.Share(r.ID, r)
		m, err := linktest.Map(x, r.ID)
		if err != nil {
			t.Fatal(err)
		}
		m.Release()
		b.Share(r.ID, nil)
		if err := r.Free(); err != nil {
			t.Fatal(err)
		}
	}
	for deadline := time.Now().Add(linktest.Patience); mappings(t) > before; runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatalf("%d mappings, %d before", mappings(t), before)
		}
	}
}

// stuck is a host whose Region waits.
type stuck struct {
	*linktest.Host
	entered, leave chan struct{}
}

func (s stuck) Region(uint64) (*p2p.Region, error) {
	close(s.entered)
	<-s.leave
	return nil, p2p.ErrNoRegion
}

// TestCloseUnderLock: Close returns although the reader waits in Host.Region for a lock that
// Close's caller holds.
func TestCloseUnderLock(t *testing.T) {
	a := node(t, 0)
	host := stuck{linktest.NewHost(1), make(chan struct{}), make(chan struct{})}
	tr := New(Config{})
	ep, err := tr.Listen(context.Background(), host)
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	x, err := a.T.Dial(context.Background(), host.ID, ep)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	y := (<-host.In).Link
	result := make(chan error)
	go func() {
		_, err := linktest.Map(&linktest.End{Link: x}, 1)
		result <- err
	}()
	<-host.entered
	if err := y.Close(); err != nil {
		t.Error(err)
	}
	if err := <-result; !errors.Is(err, p2p.ErrPeerGone) {
		t.Error(err)
	}
	close(host.leave)
}

// TestClientsAreRefused: a client's key makes no link.
func TestClientsAreRefused(t *testing.T) {
	b := node(t, 1)
	b.Allow(func(from p2p.Identity) error { t.Errorf("Admit was asked about %v", from); return nil })
	e, err := decodeEndpoint(b.Endpoint)
	if err != nil {
		t.Fatal(err)
	}
	key, err := trust.Derive(linktest.Secret, "someone")
	if err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("unix", e.address())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(linktest.Patience))
	self := b.Host.Self()
	_, err = trust.Client(c, key, purpose, trust.Hello{Client: "someone", FromIncarnation: 7, ToRank: self.Wire(),
		ToIncarnation: self.Incarnation}, false)
	if !errors.As(err, new(*trust.Refusal)) || !strings.Contains(err.Error(), "client someone opens endpoints") {
		t.Errorf("%v, want a refusal that names endpoints", err)
	}
}

// TestSilentAndInvalidConnectionsAreClosed: connections that send nothing, or garbage, are closed
// in time and keep no peer out.
func TestSilentAndInvalidConnectionsAreClosed(t *testing.T) {
	linktest.NoLeaks(t, "All", func(t *testing.T) {
		tr := New(Config{RingBytes: 1})
		tr.timeout = 4 * time.Second
		b := linktest.Listen(t, tr, linktest.NewHost(1))
		b.Allow(func(from p2p.Identity) error {
			if from.Rank != 0 {
				t.Errorf("Admit was asked about %v", from)
			}
			return nil
		})
		e, err := decodeEndpoint(b.Endpoint)
		if err != nil {
			t.Fatal(err)
		}
		var silent []net.Conn
		for i := range 1500 {
			c, err := net.Dial("unix", e.address())
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			c.SetDeadline(time.Now().Add(linktest.Patience))
			switch i % 4 {
			case 1:
				c.Write([]byte("nonsense that is has the wrong magic"))
			case 2:
				c.Write([]byte("tutti/3\n")) // and no more
			}
			silent = append(silent, c)
		}
		a := node(t, 0)
		linktest.Connect(t, a, b)
		for _, c := range silent {
			if _, err := io.Copy(io.Discard, c); err != nil && !errors.Is(err, syscall.ECONNRESET) {
				t.Fatalf("a silent connection is still open: %v", err)
			}
		}
		if len(b.In) != 0 {
			t.Error("a stranger became a link")
		}
	})
}

// TestHugePages: memory of hugetlbfs, sealed and of the right size, may still be a SIGBUS when the
// pool is empty.
func TestHugePages(t *testing.T) {
	fd, err := unix.MemfdCreate("x", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_HUGETLB|unix.MFD_HUGE_2MB)
	if err != nil {
		t.Skipf("this kernel makes no memory of huge pages: %v", err)
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, 2<<20); err != nil {
		t.Skip(err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		t.Skip(err)
	}
	if err := checkMemory(fd, 2<<20); !errors.Is(err, p2p.ErrProtocol) {
		t.Errorf("%v, want %v", err, p2p.ErrProtocol)
	}
}

// TestFullBacklog: Dial waits for a listener that does not accept until the context ends.
func TestFullBacklog(t *testing.T) {
	r := rogue{id: p2p.Identity{Rank: 1, Incarnation: 77}, where: endpoint{uid: uint32(os.Geteuid())}}
	var err error
	if r.where.machine, err = Identify(); err != nil {
		t.Fatal(err)
	}
	rand.Read(r.where.name[:])
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: r.where.address()}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	for {
		c, err := net.Dial("unix", r.where.address())
		if errors.Is(err, unix.EAGAIN) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	a := node(t, 0)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if l, err := a.T.Dial(ctx, r.id, r.where.encode()); !errors.Is(err, context.DeadlineExceeded) ||
		errors.Is(err, unix.EAGAIN) {
		if err == nil {
			l.Close()
		}
		t.Errorf("Dial: %v", err)
	}
}

// TestSilentAcceptor: Dial ends with its context when the other side accepts and says nothing.
func TestSilentAcceptor(t *testing.T) {
	linktest.NoLeaks(t, "All", func(t *testing.T) {
		a := node(t, 0)
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		r := listen(t, func(c *net.UnixConn) { // proves itself, and then no memory comes
			cancel()
			io.Copy(io.Discard, c)
		})
		if l, err := a.T.Dial(ctx, r.id, r.where.encode()); !errors.Is(err, context.Canceled) {
			if err == nil {
				l.Close()
			}
			t.Errorf("Dial: %v", err)
		}
	})
}

// A rank that cannot make the memory of a link reports it at both ends: the dialler may dial again.
func TestLinkWithoutMemoryIsLost(t *testing.T) {
	tr := New(Config{RingBytes: ring.MinData})
	tr.cfg.RingBytes = -1 << 20
	a, b := node(t, 0), linktest.Listen(t, tr, linktest.NewHost(1))
	if _, err := a.Dial(b); err == nil || !strings.Contains(err.Error(), "could not make the shared memory") {
		t.Errorf("dialling: %v", err)
	}
	select {
	case from := <-b.Out:
		if from != a.ID {
			t.Errorf("%v is lost", from)
		}
	case <-time.After(linktest.Patience):
		t.Error("nothing is lost")
	}
}
