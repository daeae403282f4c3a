package shm

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"tutti/p2p"
	"tutti/p2p/linktest"
)

func init() {
	for role, f := range map[string]func() error{
		"plain":                 nil,
		"plain behind a filter": func() error { return linktest.Forbid(unix.SYS_PROCESS_VM_READV) },
		"plain as nobody":       func() error { return syscall.Setuid(65534) },
	} {
		roles[role] = plain
		before[role] = func() error {
			permit()
			if f == nil {
				return nil
			}
			return f()
		}
	}
}

// plain shares the address of 1 MiB of plain memory. For each frame it reads as much at the address
// that the frame names, if it can, and adds one to every byte of its own memory; it answers with
// whether it could, and the first byte that it has read. A frame without an address makes it
// another program.
func plain(s *linktest.Side) error {
	e := s.End
	mem, got := make([]byte, 1<<20), make([]byte, 1<<20)
	if err := e.Put(&p2p.Header{Seq: address(mem)}, nil); err != nil {
		return err
	}
	for {
		h, _, err := e.Wait()
		switch {
		case errors.Is(err, p2p.ErrPeerGone):
			return nil
		case err != nil:
			return err
		case h.Seq == 0:
			return unix.Exec("/bin/sleep", []string{"sleep", "300"}, os.Environ())
		}
		attested(e)
		answer := p2p.Header{Call: 1}
		if l := e.Link.(p2p.ProcessReader); !l.ReadsProcess() {
			answer.Call = 0
		} else if err := l.ReadProcess(got, h.Seq); err != nil {
			return err
		}
		answer.Count = uint64(got[0])
		for i := range mem {
			mem[i]++
		}
		if err := e.Put(&answer, nil); err != nil {
			return err
		}
	}
}

func address(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

// attested returns when e has handled the peer's witness: the peer sends it before it answers
// requests.
func attested(e *linktest.End) {
	if m, _ := linktest.Map(e, 12345); m != nil {
		panic("a region that does not exist")
	}
}

// shares returns the address of the child's memory, and whether this process can read it.
func shares(t *testing.T, p *linktest.Peer) (from uint64, reads bool) {
	t.Helper()
	h, _, err := p.Wait()
	if err != nil {
		t.Fatal(err)
	}
	attested(p.End)
	return h.Seq, p.Link.(p2p.ProcessReader).ReadsProcess()
}

// turn has the child read mine and change its own memory. It reports whether the child could.
func turn(t *testing.T, p *linktest.Peer, mine []byte) (reads bool) {
	t.Helper()
	if err := p.Put(&p2p.Header{Seq: address(mine)}, nil); err != nil {
		t.Fatal(err)
	}
	h, _, err := p.Wait()
	if err != nil {
		t.Fatal(err)
	}
	if h.Call == 1 && h.Count != uint64(mine[0]) {
		t.Errorf("the child has read %d, want %d", h.Count, mine[0])
	}
	return h.Call == 1
}

// permit lets all processes of this user read this one, where yama asks for that.
func permit() { unix.Prctl(unix.PR_SET_PTRACER, ^uintptr(0), 0, 0, 0) }

// TestReadProcess: both ends read plain memory of the other one, at once and without allocating.
func TestReadProcess(t *testing.T) {
	permit()
	linktest.NoLeaks(t, "All", func(t *testing.T) {
		p := start(t, "plain")
		from, reads := shares(t, p)
		if !reads {
			t.Fatal("it does not read the child")
		}
		l, got, mine := p.Link.(p2p.ProcessReader), make([]byte, 1<<20), make([]byte, 1<<20)
		for i := range 3 {
			mine[0] = byte(i + 1)
			if !turn(t, p, mine) {
				t.Fatal("the child does not read")
			}
			want := bytes.Repeat([]byte{byte(i) + 1}, 1<<20)
			if err := l.ReadProcess(got, from); err != nil || !bytes.Equal(got, want) {
				t.Fatalf("round %d: %v, and the first byte is %d", i, err, got[0])
			}
		}
		if n := testing.AllocsPerRun(20, func() {
			if err := l.ReadProcess(got, from); err != nil {
				t.Error(err)
			}
		}); n != 0 {
			t.Errorf("%v allocations a read", n)
		}
		if err := l.ReadProcess(nil, from); err != nil {
			t.Error(err)
		}
		for _, bad := range []uint64{8, 1 << 63, ^uint64(0) - 100} {
			if err := l.ReadProcess(got, bad); !errors.Is(err, p2p.ErrProtocol) {
				t.Errorf("reading at %#x: %v", bad, err)
			}
		}
		if err := l.ReadProcess(got, from); err != nil { // after all that
			t.Error(err)
		}
		p.Close()
		if err := l.ReadProcess(got, from); err == nil || l.ReadsProcess() {
			t.Errorf("over a closed link: %v", err)
		}
	})
}

// TestReadRefused: an end that the system does not permit to read notices that.
func TestReadRefused(t *testing.T) {
	permit()
	t.Run("filter", func(t *testing.T) {
		p := start(t, "plain behind a filter")
		if _, reads := shares(t, p); !reads {
			t.Error("this end is not refused, and does not read")
		}
		if turn(t, p, make([]byte, 1<<20)) {
			t.Error("the child has read")
		}
	})
	t.Run("later", func(t *testing.T) {
		p := start(t, "plain")
		from, _ := shares(t, p)
		l := p.Link.(*link)
		pid := l.pid
		l.pid = 1 << 30 // which no process has
		if err := l.ReadProcess(make([]byte, 10), from); !errors.Is(err, errors.ErrUnsupported) || l.ReadsProcess() {
			t.Errorf("%v, and it goes on: %v", err, l.ReadsProcess())
		}
		l.pid = pid
		if _, _, err := p.Recv(); err != nil {
			t.Errorf("the link has failed: %v", err)
		}
	})
	if os.Geteuid() != 0 {
		return // the other refusals take another user's or another namespace's process
	}
	t.Run("user", func(t *testing.T) {
		p := start(t, "plain as nobody")
		if _, reads := shares(t, p); !reads {
			t.Error("root does not read")
		}
		if turn(t, p, make([]byte, 1<<20)) {
			t.Error("nobody has read root's memory")
		}
	})
	t.Run("namespace", func(t *testing.T) {
		p := start(t, "plain", func(cmd *exec.Cmd) {
			cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Cloneflags: unix.CLONE_NEWPID}
		})
		if _, reads := shares(t, p); !reads {
			t.Error("a process of a namespace below is not read")
		}
		if turn(t, p, make([]byte, 1<<20)) {
			t.Error("the child has read a process that its namespace does not have")
		}
	})
}

// TestReadOfAnother: what was read counts only if the process was the peer's after it.
func TestReadOfAnother(t *testing.T) {
	permit()
	t.Run("Dead", func(t *testing.T) {
		p := start(t, "plain")
		from, _ := shares(t, p)
		l := p.Link.(*link)
		p.Proc.Kill()
		l.reading.works.Store(true)
		l.pid = os.Getpid() // as if its number were used again, and the memory were there
		b := []byte{42}
		if err := l.ReadProcess(make([]byte, 1), address(b)); !errors.Is(err, p2p.ErrPeerGone) {
			t.Errorf("a dead process is read: %v", err)
		}
		if err := l.ReadProcess(make([]byte, 1), from); err == nil {
			t.Error("it goes on")
		}
	})
	t.Run("Executed", func(t *testing.T) {
		p := start(t, "plain")
		shares(t, p)
		if err := p.Put(&p2p.Header{}, nil); err != nil {
			t.Fatal(err)
		}
		if h, _, err := p.Wait(); !errors.Is(err, p2p.ErrPeerGone) {
			t.Fatal(h, err)
		}
		l := p.Link.(*link)
		if unix.Kill(l.pid, 0) != nil {
			t.Fatal("the process has ended")
		}
		l.pid = os.Getpid() // as if the new program had memory there
		b := []byte{42}
		if err := l.ReadProcess(make([]byte, 1), address(b)); !errors.Is(err, p2p.ErrPeerGone) {
			t.Errorf("memory of another program is read: %v", err)
		}
	})
	t.Run("Witness", func(t *testing.T) {
		p := start(t, "plain")
		shares(t, p)
		l := p.Link.(*link)
		l.reading.works.Store(false)
		word := []byte("12345678")
		l.reading.attested = false
		if err := l.attest(message{kind: msgWitness, id: address(word), size: 1}); err != nil || l.ReadsProcess() {
			t.Errorf("a wrong witness is believed: %v", err)
		}
		if err := l.attest(message{kind: msgWitness, id: address(word), size: 1}); !errors.Is(err, p2p.ErrProtocol) {
			t.Errorf("a second witness: %v", err)
		}
	})
}

// TestReadable: an end knows which memory of its process the system gives to no other one.
func TestReadable(t *testing.T) {
	permit()
	p := start(t, "plain")
	shares(t, p)
	l := p.Link.(p2p.ProcessReader)
	mem := make([]byte, 3*os.Getpagesize())
	for _, b := range [][]byte{mem, mem[:1], nil} {
		if !l.Readable(b) {
			t.Errorf("%d bytes of plain memory are not readable", len(b))
		}
	}
	if n := testing.AllocsPerRun(20, func() { l.Readable(mem) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
	fd, err := unix.MemfdSecret(0)
	if err != nil {
		t.Skipf("the system has no secret memory: %v", err)
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, int64(os.Getpagesize())); err != nil {
		t.Fatal(err)
	}
	secret, err := unix.Mmap(fd, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Skipf("mapping secret memory: %v", err)
	}
	defer unix.Munmap(secret)
	secret[0] = 1
	if l.Readable(secret) {
		t.Error("secret memory is readable")
	}
}
