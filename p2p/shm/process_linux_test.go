package shm

import (
	"bufio"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"tutti/internal/lifeline"
	"tutti/internal/proctest"
	"tutti/mem"
	"tutti/p2p"
	"tutti/p2p/linktest"
)

// The tests below run this binary again as another rank.
const roleVariable = "SHM_TEST_ROLE"

// roles are those of children that take no link.
var roles = map[string]func() error{}

func TestMain(m *testing.M) {
	if role := os.Getenv(roleVariable); role != "" {
		if err := child(role); err != nil {
			fmt.Fprintln(os.Stderr, "child:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if err := proctest.Keep(); err != nil { // before a test counts descriptors
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// child is rank 1. It prints its identity and endpoint, accepts one link, and runs its role.
func child(role string) error {
	if f := roles[role]; f != nil {
		return f()
	}
	var life [2]int
	if role == "mortal" {
		if err := unix.Pipe2(life[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
			return err
		}
		lifeline.Set(os.NewFile(uintptr(life[0]), "lifeline"))
	}
	host, t := linktest.NewHost(1), New(Config{})
	defer t.Close()
	ep, err := t.Listen(context.Background(), host)
	if err != nil {
		return err
	}
	fmt.Println(host.ID.Incarnation, hex.EncodeToString(ep))
	in := <-host.In
	e := &linktest.End{Link: in.Link, Host: host}
	defer e.Close()
	switch role {
	case "echo":
		linktest.Echo(e, false)
	case "echo asleep":
		linktest.Echo(e, true)
	case "drain":
		linktest.Drain(e)
	case "some", "mortal": // a few frames, and a hang
		for i := range 20 {
			h, p := linktest.Frame(i, i*1000, nil)
			if err := e.Put(&h, p); err != nil {
				return err
			}
		}
		fmt.Println("sent")
		if role == "mortal" { // as the kernel does long before it closes the sockets of a large process
			unix.Close(life[1])
		}
		io.Copy(io.Discard, os.Stdin)
	case "heir": // a child inherits all sockets, and stays
		heir := exec.Command("sleep", "300")
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
				heir.ExtraFiles = append(heir.ExtraFiles, os.NewFile(uintptr(fd), "inherited"))
			}
		}
		if err := heir.Start(); err != nil {
			return err
		}
		fmt.Println(heir.Process.Pid)
		io.Copy(io.Discard, os.Stdin)
	case "flood": // frames until the end
		var buf []byte
		for i := 0; ; i++ {
			h, p := linktest.Frame(i, i*7919%30000, buf)
			buf = p
			if err := e.Put(&h, p); err != nil {
				return nil
			}
		}
	case "region": // shares memory, then adds its place and one to every byte for each frame that comes
		r, err := t.Alloc(3<<20 + 1)
		if err != nil {
			return err
		}
		host.Share(r.ID, r)
		h := p2p.Header{Seq: r.ID}
		if err := e.Put(&h, nil); err != nil {
			return err
		}
		for {
			h, _, err := e.Wait()
			if errors.Is(err, p2p.ErrPeerGone) {
				return nil
			} else if err != nil {
				return err
			}
			for i := range r.Bytes() {
				r.Bytes()[i] += byte(i) + 1
			}
			if err := e.Put(&h, nil); err != nil {
				return err
			}
		}
	case "storer": // puts to the memory that it is told of, until the end
		_, b, err := e.Wait()
		if err != nil {
			return err
		}
		var to mem.Remote
		if err := to.UnmarshalBinary(b); err != nil {
			return err
		}
		s := linktest.NewSide(e, &linktest.Node{Host: host, T: t, Endpoint: ep})
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
	default:
		return fmt.Errorf("no role %q", role)
	}
	return nil
}

// process is a child with the link to it.
type process struct {
	*linktest.End
	started *proctest.Process
	out     *bufio.Scanner
	name    string // of its socket
	node    *linktest.Node
}

func start(t testing.TB, role string) process { t.Helper(); return startIn(t, role, nil) }

// startIn is start with attributes of the process; nil: the usual ones.
func startIn(t testing.TB, role string, attributes *syscall.SysProcAttr) process {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.SysProcAttr = attributes
	cmd.Env = append(os.Environ(), roleVariable+"="+role)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, theirs, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { out.Close() })
	cmd.Stdout = theirs
	started, err := proctest.Start(cmd)
	theirs.Close()
	if err != nil {
		t.Fatal(err)
	}
	p := process{started: started, out: bufio.NewScanner(out)}
	t.Cleanup(func() {
		in.Close()
		p.kill()
	})
	to := p2p.Identity{Rank: 1}
	var ep string
	if !p.out.Scan() {
		t.Fatal("the child said nothing")
	}
	if _, err := fmt.Sscan(p.out.Text(), &to.Incarnation, &ep); err != nil {
		t.Fatal(err)
	}
	where, err := hex.DecodeString(ep)
	if err != nil {
		t.Fatal(err)
	}
	e, err := decodeEndpoint(where)
	if err != nil {
		t.Fatal(err)
	}
	p.name = e.address()
	n := linktest.Listen(t, New(Config{}), linktest.NewHost(0))
	ctx, cancel := context.WithTimeout(context.Background(), linktest.Patience)
	defer cancel()
	l, err := n.T.Dial(ctx, to, where)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	p.End, p.node = &linktest.End{Link: l, Host: n.Host}, n
	return p
}

// A child of a rank that has inherited its sockets does not keep the rank alive when it is killed.
func TestKilledWhileChildHasSocket(t *testing.T) {
	p := start(t, "heir")
	if !p.out.Scan() {
		t.Fatal("the child did not start another")
	}
	heir, err := strconv.Atoi(p.out.Text())
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Kill(heir, unix.SIGKILL)
	p.started.Signal(unix.SIGKILL) // it alone, not its process group
	p.started.Wait()
	if h, _, err := p.Wait(); !errors.Is(err, p2p.ErrPeerGone) {
		t.Errorf("%v, %v; want an error that wraps ErrPeerGone", h, err)
	}
	if err := unix.Kill(heir, 0); err != nil {
		t.Errorf("the one that inherited the socket had ended: %v", err)
	}
}

// kill ends the child and returns when it is gone.
func (p *process) kill() {
	p.started.Kill()
	p.started.Wait()
}

// traces lists what there is on the machine of a rank that listened as name, and the mappings of
// shared memory that are not among before.
func traces(t *testing.T, name, before string) string {
	t.Helper()
	var found []string
	files, _ := os.ReadDir("/dev/shm")
	for _, f := range files {
		if strings.Contains(f.Name(), "tutti") {
			found = append(found, "/dev/shm/"+f.Name())
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
	run := func(t *testing.T, role string) process {
		p := start(t, role)
		names = append(names, p.name)
		if !strings.Contains(traces(t, p.name, before), p.name) {
			t.Errorf("%s is not found while it is there", p.name)
		}
		return p
	}
	linktest.NoLeaks(t, "Some", func(t *testing.T) {
		p := run(t, "some")
		if !p.out.Scan() || p.out.Text() != "sent" {
			t.Fatal("the child did not send")
		}
		p.kill()
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
		p.kill()
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
		p.started.Kill()
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
				p.started.Kill()
			}
		}
	})
	for _, name := range names {
		if left := traces(t, name, before); left != "" {
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
		p.started.Kill()
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
