package epoll

import (
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// pair returns two connected sockets.
func pair(t *testing.T) (a, b int) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fds[0]); unix.Close(fds[1]) })
	return fds[0], fds[1]
}

func watch(t *testing.T, p *Instance, fd int, id uint64) {
	t.Helper()
	e := Event(unix.EPOLLIN, id)
	if err := p.Control(unix.EPOLL_CTL_ADD, fd, &e); err != nil {
		t.Fatal(err)
	}
}

func TestWaitReportsTheIDsOfReadySockets(t *testing.T) {
	p, err := New()
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	const first, second = 1, 1<<40 + 2 // all bits of an id count
	a, b := pair(t)
	c, _ := pair(t)
	watch(t, p, a, first)
	watch(t, p, c, 3)
	d, e := pair(t)
	watch(t, p, d, second)
	for _, fd := range []int{b, e} {
		if _, err := unix.Write(fd, []byte("x")); err != nil {
			t.Fatal(err)
		}
	}
	ids, err := p.Wait(nil)
	slices.Sort(ids)
	if err != nil || !slices.Equal(ids, []uint64{first, second}) {
		t.Errorf("%v, %v", ids, err)
	}
	if err := p.Control(unix.EPOLL_CTL_DEL, a, nil); err != nil {
		t.Fatal(err)
	}
	if ids, err := p.Wait(ids[:0]); err != nil || !slices.Equal(ids, []uint64{second}) {
		t.Errorf("after a socket was removed: %v, %v", ids, err)
	}
}

func TestWakeAtCountsOnce(t *testing.T) {
	p, err := New()
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	p.WakeAt(time.Now())
	if ids, err := p.Wait(nil); err != nil || len(ids) > 0 {
		t.Errorf("%v, %v", ids, err)
	}
	a, b := pair(t)
	watch(t, p, a, 7)
	if _, err := unix.Write(b, []byte("x")); err != nil {
		t.Fatal(err)
	}
	if ids, err := p.Wait(nil); err != nil || !slices.Equal(ids, []uint64{7}) {
		t.Errorf("after the wake-up: %v, %v", ids, err)
	}
}

func TestControlConnWatchesAConnection(t *testing.T) {
	p, err := New()
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	conn, err := r.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	e := Event(unix.EPOLLIN, 9)
	if err := p.ControlConn(unix.EPOLL_CTL_ADD, conn, &e); err != nil {
		t.Fatal(err)
	}
	w.Close()
	if ids, err := p.Wait(nil); err != nil || !slices.Equal(ids, []uint64{9}) {
		t.Errorf("%v, %v", ids, err)
	}
	r.Close()
	if err := p.ControlConn(unix.EPOLL_CTL_DEL, conn, nil); err == nil {
		t.Error("a connection that is closed was removed")
	}
}

func TestCloseEndsWait(t *testing.T) {
	p, err := New()
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error)
	go func() {
		_, err := p.Wait(nil)
		ended <- err
	}()
	p.Close()
	if err := <-ended; err == nil {
		t.Error("Wait returned no error")
	}
}
