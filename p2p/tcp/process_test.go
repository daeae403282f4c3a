package tcp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tutti/internal/proctest"
	"tutti/p2p"
)

// children are what a test starts this binary again for; they read their orders from standard input
// and end with it.
var children = map[string]func(){"echo": childEcho, "rawecho": childRawEcho, "drain": childDrain,
	"rawdrain": childRawDrain, "last words": childLastWords, "few files": childFewFiles, "vanish": childVanish,
	"lost peers": childLostPeers}

// childVariable makes this binary a child; its value is the kind.
const childVariable = "TCP_TEST_CHILD"

// child starts one; its first line is its endpoint in hex, or its address.
func child(t testing.TB, kind string, prepare ...func(*exec.Cmd)) *proctest.Child {
	t.Helper()
	cmd := proctest.Again([]string{childVariable + "=" + kind})
	for _, f := range prepare {
		f(cmd)
	}
	return proctest.RunPiped(t, cmd)
}

// childLink listens as rank 1, says where, and returns the first link.
func childLink() p2p.Link {
	h := newHost(1)
	t := New(local(Config{MaxFrame: 1 << 20}))
	fmt.Println(hex.EncodeToString(must(t.Listen(context.Background(), h))))
	go func() { io.Copy(io.Discard, os.Stdin); os.Exit(0) }()
	return (<-h.links).link
}

func dialChild(t testing.TB, p *proctest.Child, n *node) p2p.Link {
	t.Helper()
	l, err := n.Dial(within(t), p2p.Identity{Rank: 1, Incarnation: 0xace1}, must(hex.DecodeString(p.Hear())))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// Polling and sleeping ranks notice a killed process, and the error names it.
func TestKilledPeerIsNoticed(t *testing.T) {
	for _, asleep := range []bool{false, true} {
		n := listen(t, 0, local(Config{}))
		p := child(t, "echo")
		l := dialChild(t, p, n)
		if ok, err := l.Send(header(5, 3), pattern(3, 0)); !ok || err != nil {
			t.Fatal(ok, err)
		}
		if h, _, err := take(l, 3); err != nil || h.Seq != 5 {
			t.Fatal(h, err)
		}
		if asleep && l.Arm() {
			t.Fatal("something to do on an idle link")
		}
		p.Kill()
		if asleep {
			select {
			case <-n.woken:
			case <-time.After(patience):
				t.Fatal("the end of the peer did not wake this end")
			}
		}
		var err error
		until(t, "the end of the link", func() bool { _, _, err = l.Recv(); return err != nil })
		if !errors.Is(err, p2p.ErrPeerGone) || !strings.Contains(err.Error(),
			"rank 1 (incarnation 000000000000ace1) at 127.0.0.1:") {
			t.Error(err)
		}
		if l.Err() == nil {
			t.Error("Err is nil")
		}
	}
}

const lastWords = 200

func childLastWords() {
	l := childLink()
	for i := range lastWords {
		for ok := false; !ok; {
			ok, _ = l.Send(header(uint64(i), 1000), pattern(1000, byte(i)))
		}
	}
	for ok := false; !ok; {
		ok, _ = l.Flush()
	}
	syscall.Kill(os.Getpid(), syscall.SIGKILL)
}

// Frames that a process had sent and flushed when it was killed are still delivered.
func TestFlushedFramesOutliveKilledProcess(t *testing.T) {
	p := child(t, "last words")
	l := dialChild(t, p, listen(t, 0, local(Config{})))
	p.End(-1)
	for i := range lastWords {
		if h, b, err := take(l, 1000); err != nil || h.Seq != uint64(i) || !bytes.Equal(b, pattern(1000, byte(i))) {
			t.Fatalf("frame %d: %+v, %v", i, h, err)
		}
	}
	if _, _, err := l.Recv(); !errors.Is(err, p2p.ErrPeerGone) {
		t.Error(err)
	}
}

func childFewFiles() {
	h := newHost(1)
	log := slog.New(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{Level: slog.LevelWarn}))
	t := New(local(Config{Logger: log}))
	endpoint := must(t.Listen(context.Background(), h))
	unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 48, Max: 48})
	var files []*os.File
	for {
		f, err := os.Open(os.DevNull)
		if err != nil {
			break
		}
		files = append(files, f)
	}
	fmt.Println(hex.EncodeToString(endpoint))
	_, err := New(local(Config{})).Listen(context.Background(), h)
	fmt.Println("Listen:", err)
	_, err = t.Dial(context.Background(), p2p.Identity{Rank: 0, Incarnation: 1}, endpoint)
	fmt.Println("Dial:", err)
	in := bufio.NewReader(os.Stdin)
	peer := must(hex.DecodeString(strings.TrimSpace(must(in.ReadString('\n')))))
	files[0].Close() // for a socket, but not for a second descriptor of it
	_, err = t.Dial(context.Background(), p2p.Identity{Rank: 0, Incarnation: 0xace0}, peer)
	files[0] = must(os.Open(os.DevNull))
	fmt.Println("Dial:", errors.Is(err, p2p.ErrShortage), errors.Is(err, p2p.ErrPeerGone), err)
	in.ReadString('\n')
	for _, f := range files {
		f.Close()
	}
	l := (<-h.links).link
	for ok := false; !ok; {
		ok, _ = l.Send(header(1, 0), nil)
	}
	in.ReadString('\n')
	runtime.KeepAlive(l) // the garbage collector closes unreachable connections
}

// A process that has run out of descriptors says so, with the limit, also if its peer has accepted
// by then. Its listener accepts again when there are some.
func TestFewFiles(t *testing.T) {
	p := child(t, "few files")
	n := listen(t, 0, local(Config{}))
	endpoint := must(hex.DecodeString(p.Hear()))
	for _, op := range []string{"Listen:", "Dial:"} {
		if line := p.Hear(); !strings.HasPrefix(line, op) || !strings.Contains(line, "48 open files (RLIMIT_NOFILE)") {
			t.Errorf("%s", line)
		}
	}
	p.Tell(hex.EncodeToString(n.endpoint))
	if line := p.Hear(); !strings.HasPrefix(line, "Dial: true false") ||
		!strings.Contains(line, "48 open files (RLIMIT_NOFILE)") {
		t.Errorf("after the peer has accepted: %s", line)
	}
	(<-n.links).link.Close()
	type result struct {
		l   p2p.Link
		err error
	}
	done := make(chan result, 1)
	go func() {
		l, err := n.Dial(within(t), p2p.Identity{Rank: 1, Incarnation: 0xace1}, endpoint)
		done <- result{l, err}
	}()
	if line := p.Hear(); !strings.Contains(line, "cannot accept") || !strings.Contains(line, "RLIMIT_NOFILE") {
		t.Errorf("log: %s", line)
	}
	p.Tell("free")
	r := <-done
	if r.err != nil {
		t.Fatal(r.err)
	}
	defer r.l.Close()
	if h, _, err := take(r.l, 1); err != nil || h.Seq != 1 {
		t.Error(h, err)
	}
}

// loopback switches the only interface of a child with a network of its own on or off. Off, the
// network is one whose hosts vanished to TCP: nothing says so, only nothing answers.
func loopback(on bool) {
	s := must(unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0))
	r := must(unix.NewIfreq("lo"))
	if err := unix.IoctlIfreq(s, unix.SIOCGIFFLAGS, r); err != nil {
		panic(err)
	}
	r.SetUint16(r.Uint16() &^ unix.IFF_UP)
	if on {
		r.SetUint16(r.Uint16() | unix.IFF_UP)
	}
	if err := unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, r); err != nil {
		panic(err)
	}
}

// apart gives a child a network of its own.
func apart(c *exec.Cmd) {
	c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if uid := os.Getuid(); uid != 0 {
		c.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		c.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: uid, Size: 1}}
	}
}

// childVanish has hosts vanish under three links: one idle, one with data under way, and one with a
// closed window.
func childVanish() {
	loopback(true)
	ctx := context.Background()
	a, b := newHost(0), newHost(1)
	ta, tb := New(local(Config{PeerTimeout: time.Second})), tight(64<<10, Config{})
	must(ta.Listen(ctx, a))
	at := must(tb.Listen(ctx, b))
	var links []p2p.Link
	for range 3 {
		links = append(links, must(ta.Dial(ctx, b.self, at)))
	}
	full := links[2]
	for ok := true; ok; {
		ok = must(full.Send(header(0, 10000), make([]byte, 10000)))
	}
	fmt.Println("ready")
	loopback(false)
	// After a stall the link may have noticed already.
	if ok, err := links[1].Send(header(1, 1), []byte{1}); !ok && !errors.Is(err, p2p.ErrPeerGone) {
		panic(fmt.Sprint("busy link: ", ok, err))
	}
	start := time.Now()
	for _, l := range links {
		for l.Err() == nil && time.Since(start) < patience {
			if _, _, err := l.Recv(); err == nil && !l.Arm() {
				select {
				case <-a.woken:
				case <-time.After(patience):
				}
			}
		}
		fmt.Println(l.Err())
	}
	io.Copy(io.Discard, os.Stdin)
}

// A host that vanishes is noticed although it sends nothing more.
func TestSilentHostIsLost(t *testing.T) {
	p := child(t, "vanish", apart)
	if line := p.Hear(); line != "ready" {
		t.Fatal(line)
	}
	for _, link := range []string{"idle", "busy", "full"} {
		line := p.Hear()
		t.Logf("%s: %s", link, line)
		if !strings.Contains(line, p2p.ErrPeerGone.Error()) || !strings.Contains(line, "rank 1 (") {
			t.Errorf("%s link: %s", link, line)
		}
	}
}
