package shm

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tutti/internal/lifeline"
	"tutti/internal/proctest"
	"tutti/mem"
	"tutti/p2p"
	"tutti/p2p/linktest"
)

// roles are what peers of the tests below do.
var roles = map[string]linktest.Role{"some": some, "mortal": mortal, "heir": heir, "flood": flood, "region": region,
	"storer": storer}

// before is what peers do before they listen.
var before = map[string]func() error{"mortal": makeLifeline}

func TestMain(m *testing.M) {
	linktest.PeerMain(func(role string) (p2p.Transport, error) {
		if f := before[role]; f != nil {
			if err := f(); err != nil {
				return nil, err
			}
		}
		return New(Config{}), nil
	}, roles)
	if err := proctest.Keep(); err != nil { // before a test counts descriptors
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// life is the lifeline of this process, if it has one.
var life [2]int

func makeLifeline() error {
	err := unix.Pipe2(life[:], unix.O_CLOEXEC|unix.O_NONBLOCK)
	if err == nil {
		lifeline.Set(os.NewFile(uintptr(life[0]), "lifeline"))
	}
	return err
}

// some sends a few frames and hangs.
func some(s *linktest.Side) error {
	for i := range 20 {
		h, p := linktest.Frame(i, i*1000, nil)
		if err := s.Put(&h, p); err != nil {
			return err
		}
	}
	fmt.Println("sent")
	io.Copy(io.Discard, os.Stdin)
	return nil
}

// mortal does the same, and begins to end: the kernel closes the lifeline long before it closes the
// sockets of a large process.
func mortal(s *linktest.Side) error {
	for i := range 20 {
		h, p := linktest.Frame(i, i*1000, nil)
		if err := s.Put(&h, p); err != nil {
			return err
		}
	}
	unix.Close(life[1])
	io.Copy(io.Discard, os.Stdin)
	return nil
}

// heir has a child that inherits all sockets and stays.
func heir(*linktest.Side) error {
	child := exec.Command("sleep", "300")
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err
	}
	for _, f := range all {
		if to, _ := os.Readlink("/proc/self/fd/" + f.Name()); strings.HasPrefix(to, "socket:") {
			fd, err := strconv.Atoi(f.Name())
			if err == nil {
				fd, err = unix.Dup(fd)
			}
			if err != nil {
				return err
			}
			child.ExtraFiles = append(child.ExtraFiles, os.NewFile(uintptr(fd), "inherited"))
		}
	}
	if err := child.Start(); err != nil {
		return err
	}
	fmt.Println(child.Process.Pid)
	io.Copy(io.Discard, os.Stdin)
	return nil
}

// flood sends frames until the end.
func flood(s *linktest.Side) error {
	var buf []byte
	for i := 0; ; i++ {
		h, p := linktest.Frame(i, i*7919%30000, buf)
		buf = p
		if err := s.Put(&h, p); err != nil {
			return nil
		}
	}
}

// region shares memory, and then adds its place and one to every byte for each frame that comes.
func region(s *linktest.Side) error {
	r, err := s.Node.T.(*Transport).Alloc(3<<20 + 1)
	if err != nil {
		return err
	}
	s.Host.Share(r.ID, r)
	h := p2p.Header{Seq: r.ID}
	if err := s.Put(&h, nil); err != nil {
		return err
	}
	for {
		h, _, err := s.Wait()
		if errors.Is(err, p2p.ErrPeerGone) {
			return nil
		} else if err != nil {
			return err
		}
		for i := range r.Bytes() {
			r.Bytes()[i] += byte(i) + 1
		}
		if err := s.Put(&h, nil); err != nil {
			return err
		}
	}
}

// storer puts to the memory that it is told of, until the end.
func storer(s *linktest.Side) error {
	_, b, err := s.Wait()
	if err != nil {
		return err
	}
	var to mem.Remote
	if err := to.UnmarshalBinary(b); err != nil {
		return err
	}
	local := make([]byte, to.Len)
	for i := byte(1); ; i++ {
		for k := range local {
			local[k] = i
		}
		if _, err := s.PutTo(local, &to, 0, p2p.Signal{}); err != nil {
			return nil
		}
		if err := s.Turn(); err != nil {
			return nil
		}
		clear(s.Ended)
	}
}

// start starts a peer.
func start(t testing.TB, role string, prepare ...func(*exec.Cmd)) *linktest.Peer {
	t.Helper()
	return linktest.StartPeer(t, linktest.Listen(t, New(Config{}), linktest.NewHost(0)), role, prepare...)
}

func TestKilledPeers(t *testing.T) {
	for name, cfg := range map[string]Config{"Default": {}, "Smallest": {RingBytes: 1}} {
		t.Run(name, func(t *testing.T) {
			linktest.RunKilled(t, func(testing.TB) p2p.Transport { return New(cfg) })
		})
	}
}

// A child of a rank that has inherited its sockets does not keep the rank alive when it is killed.
func TestKilledWhileChildHasSocket(t *testing.T) {
	p := start(t, "heir")
	heir, err := strconv.Atoi(p.Proc.Hear())
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Kill(heir, unix.SIGKILL)
	p.Proc.Kill() // it alone, not its process group
	if h, _, err := p.Wait(); !errors.Is(err, p2p.ErrPeerGone) {
		t.Errorf("%v, %v; want an error that wraps ErrPeerGone", h, err)
	}
	if err := unix.Kill(heir, 0); err != nil {
		t.Errorf("the one that inherited the socket had ended: %v", err)
	}
}

// traces lists what there is on the machine of a rank that listened as name, and the files and
// mappings of shared memory, without what is among before.
func traces(t *testing.T, name, before string) string {
	t.Helper()
	var found []string
	files, _ := os.ReadDir("/dev/shm")
	for _, f := range files {
		if path := "/dev/shm/" + f.Name(); strings.Contains(path, "tutti") && !strings.Contains(before, path) {
			found = append(found, path)
		}
	}
	for file, what := range map[string]string{"/proc/net/unix": name, "/proc/self/maps": "memfd:tutti"} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, line := range strings.Split(string(text), "\n") {
			if strings.Contains(line, what) && !strings.Contains(before, line) {
				found = append(found, line)
			}
		}
	}
	return strings.Join(found, "\n")
}

// TestKilledPeerDeliversWhatItCommitted: after kill -9 what the peer had committed is delivered,
// then it is gone, and nothing of it is left.
func TestKilledPeerDeliversWhatItCommitted(t *testing.T) {
	var names []string
	before := traces(t, "no rank", "") // an earlier test's, until its links are garbage
	run := func(t *testing.T, role string) *linktest.Peer {
		p := start(t, role)
		e, err := decodeEndpoint(p.Endpoint)
		if err != nil {
			t.Fatal(err)
		}
		name := e.address() // of its socket
		names = append(names, name)
		if !strings.Contains(traces(t, name, before), name) {
			t.Errorf("%s is not found while it is there", name)
		}
		return p
	}
	linktest.NoLeaks(t, "Some", func(t *testing.T) {
		p := run(t, "some")
		if got := p.Proc.Hear(); got != "sent" {
			t.Fatal(got)
		}
		p.Proc.Kill()
		for i := range 20 {
			h, b, err := p.Wait()
			if err != nil {
				t.Fatalf("frame %d, sent before the end: %v", i, err)
			}
			if err := linktest.Check(i, i*1000, h, b); err != nil {
				t.Fatal(err)
			}
		}
		if h, _, err := p.Wait(); !errors.Is(err, p2p.ErrPeerGone) {
			t.Fatal(h, err)
		}
	})
	linktest.NoLeaks(t, "Ending", func(t *testing.T) {
		p := run(t, "mortal")
		for i := range 20 {
			h, b, err := p.Wait()
			if err != nil {
				t.Fatalf("frame %d, sent before the end: %v", i, err)
			}
			if err := linktest.Check(i, i*1000, h, b); err != nil {
				t.Fatal(err)
			}
		}
		if h, _, err := p.Wait(); !errors.Is(err, p2p.ErrPeerEnds) || !errors.Is(err, p2p.ErrPeerGone) {
			t.Fatal(h, err)
		}
		l := p.Link.(*link)
		if l.ceased.Load() {
			t.Error("a process that is ending counts as one that has ended")
		}
		p.Proc.Kill()
		<-l.down
		if !l.ceased.Load() {
			t.Error("the end of the process was not noticed")
		}
	})
	linktest.NoLeaks(t, "Asleep", func(t *testing.T) {
		p := run(t, "echo asleep")
		h, b := linktest.Frame(1, 100, nil)
		if err := p.Put(&h, b); err != nil {
			t.Fatal(err)
		}
		if _, _, err := p.Wait(); err != nil {
			t.Fatal(err)
		}
		for p.Arm() {
		}
		p.Proc.Signal(unix.SIGKILL)
		if err := p.Host.Sleep(); err != nil {
			t.Fatal(err)
		}
		if _, _, err := p.Wait(); !errors.Is(err, p2p.ErrPeerGone) {
			t.Fatal(err)
		}
	})
	linktest.NoLeaks(t, "Midway", func(t *testing.T) {
		p := run(t, "flood")
		for i := 0; ; i++ {
			h, b, err := p.Wait()
			if err != nil {
				if !errors.Is(err, p2p.ErrPeerGone) || i < 500 {
					t.Fatalf("after %d frames: %v", i, err)
				}
				break
			}
			if err := linktest.Check(i, i*7919%30000, h, b); err != nil {
				t.Fatal(err)
			}
			if i == 500 {
				p.Proc.Signal(unix.SIGKILL)
			}
		}
	})
	for _, name := range names {
		left := traces(t, name, before)
		// Files of other programs come and go.
		for late := time.Now().Add(linktest.Patience); left != "" && time.Now().Before(late); {
			time.Sleep(10 * time.Millisecond)
			left = traces(t, name, before)
		}
		if left != "" {
			t.Errorf("left behind:\n%s", left)
		}
	}
}

// TestProcesses: frames between processes that sleep at every chance.
func TestProcesses(t *testing.T) {
	p := start(t, "echo asleep")
	for i := range 300 {
		n := i * 7919 % (p.MaxFrame() + 1)
		h, b := linktest.Frame(i, n, nil)
		if err := p.Put(&h, b); err != nil {
			t.Fatal(err)
		}
		got, q, err := p.Wait()
		if err != nil {
			t.Fatal(err)
		}
		if err := linktest.Check(i, n, got, q); err != nil {
			t.Fatal(err)
		}
	}
}

// TestRegionOfProcess: a peer's region is the same memory here, and stays when the peer is killed.
func TestRegionOfProcess(t *testing.T) {
	linktest.NoLeaks(t, "All", func(t *testing.T) {
		p := start(t, "region")
		h, _, err := p.Wait()
		if err != nil {
			t.Fatal(err)
		}
		m, err := linktest.Map(p.End, h.Seq)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Release()
		mem := m.Mem
		if err := p.Put(&p2p.Header{}, nil); err != nil {
			t.Fatal(err)
		}
		if _, _, err := p.Wait(); err != nil {
			t.Fatal(err)
		}
		p.Proc.Signal(unix.SIGKILL)
		if _, _, err := p.Wait(); !errors.Is(err, p2p.ErrPeerGone) {
			t.Fatal(err)
		}
		for i := range mem {
			if mem[i] != byte(i)+1 {
				t.Fatalf("byte %d is %d", i, mem[i])
			}
		}
	})
}

// TestDescriptors: a link costs one descriptor, a region one, and a mapping none.
func TestDescriptors(t *testing.T) {
	count := func() int {
		dir, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(dir)
	}
	a, b := node(t, 0), node(t, 1)
	linktest.Connect(t, a, b)
	before := count()
	for range 10 {
		linktest.Connect(t, a, b)
	}
	if n := count() - before; n != 20 {
		t.Errorf("10 links with both ends here take %d descriptors, want 20", n)
	}
	x, _ := linktest.Connect(t, a, b)
	before = count()
	for range 10 {
		r, err := b.T.(p2p.Allocator).Alloc(100)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Free()
		b.Share(r.ID, r)
		if _, err := linktest.Map(x, r.ID); err != nil {
			t.Fatal(err)
		}
	}
	if n := count() - before; n != 10 {
		t.Errorf("10 regions and mappings take %d descriptors, want 10", n)
	}
}

func BenchmarkProcesses(b *testing.B) {
	for _, n := range []int{0, 8, 64, 1024} {
		b.Run(fmt.Sprintf("PingPong/%d", n), func(b *testing.B) {
			linktest.Ping(b, start(b, "echo").End, n)
		})
	}
	b.Run("PingPongAsleep/64", func(b *testing.B) {
		p := start(b, "echo asleep")
		h, q := linktest.Frame(0, 64, nil)
		b.ReportAllocs()
		for b.Loop() {
			if err := p.Put(&h, q); err != nil {
				b.Fatal(err)
			}
			if _, _, err := p.Wait(); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("Stream/64K", func(b *testing.B) { linktest.Stream(b, start(b, "drain").End, 64<<10) })
}
