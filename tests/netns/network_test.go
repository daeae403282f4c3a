//go:build linux

package netns

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tutti/tests/internal/rig"
)

// host is a network namespace: interfaces, addresses and ports of its own.
type host struct {
	t    *testing.T
	name string
}

// Names of namespaces are prefix, the number of the process that made them, and a count: those of processes that have died are removed.
const prefix = "tutti-test-"

var made atomic.Int32

// newHosts makes two hosts that are not connected.
func newHosts(t *testing.T) (a, b *host) {
	t.Helper()
	rig.NeedRoot(t, "it makes network namespaces")
	rig.Need(t, "ip", "unshare")
	removeStale(t)
	hosts := [2]*host{}
	for i := range hosts {
		h := &host{t, fmt.Sprintf("%s%d-%d", prefix, os.Getpid(), made.Add(1))}
		if out, err := exec.Command("ip", "netns", "add", h.name).CombinedOutput(); err != nil {
			t.Skipf("needs network namespaces: ip netns add: %v: %s", err, out)
		}
		t.Cleanup(func() { exec.Command("ip", "netns", "del", h.name).Run() })
		h.ip("link", "set", "lo", "up")
		hosts[i] = h
	}
	return hosts[0], hosts[1]
}

func removeStale(t *testing.T) {
	t.Helper()
	out, err := exec.Command("ip", "netns", "list").Output()
	if err != nil {
		t.Skipf("needs network namespaces: ip netns list: %v", err)
	}
	for line := range strings.Lines(string(out)) {
		name, _, _ := strings.Cut(strings.TrimSpace(line), " ")
		rest, ours := strings.CutPrefix(name, prefix)
		number, _, _ := strings.Cut(rest, "-")
		if pid, err := strconv.Atoi(number); ours && err == nil && errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
			exec.Command("ip", "netns", "del", name).Run()
		}
	}
}

// ip runs the command ip on the host.
func (h *host) ip(args ...string) {
	h.t.Helper()
	if out, err := exec.Command("ip", append([]string{"-n", h.name}, args...)...).CombinedOutput(); err != nil {
		h.t.Fatalf("ip %s: %v: %s", strings.Join(args, " "), err, out)
	}
}

// address gives an interface its addresses and takes it up.
func (h *host) address(device string, addresses ...string) {
	h.t.Helper()
	for _, a := range addresses {
		args := []string{"address", "add", a, "dev", device}
		if strings.Contains(a, ":") {
			args = append(args, "nodad")
		}
		h.ip(args...)
	}
	h.ip("link", "set", device, "up")
}

// decoy is an interface that leads nowhere.
func (h *host) decoy(device string, addresses ...string) {
	h.t.Helper()
	h.ip("link", "add", device, "type", "veth", "peer", "name", "x"+device)
	h.ip("link", "set", "x"+device, "up")
	h.address(device, addresses...)
}

// connect connects the hosts by a link: interfaces of this name, without addresses.
func connect(a, b *host, device string) {
	a.t.Helper()
	a.ip("link", "add", device, "type", "veth", "peer", "name", device, "netns", b.name)
}

// netem makes what leaves by the interface slow and lossy.
// It reports whether the kernel has the emulator.
func (h *host) netem(device string, quality ...string) bool {
	h.t.Helper()
	rig.Need(h.t, "tc")
	args := append([]string{"-n", h.name, "qdisc", "add", "dev", device, "root", "netem"}, quality...)
	if out, err := exec.Command("tc", args...).CombinedOutput(); err != nil {
		if strings.Contains(string(out), "qdisc kind is unknown") {
			return false
		}
		h.t.Fatalf("tc: %v: %s", err, out)
	}
	return true
}

// slowCable connects the hosts by a cable of our own, which delays every frame and loses some: for kernels without netem, and the same losses in every run.
// It counts the frames that it loses.
func slowCable(a, b *host, device string, delay time.Duration, loss float64) (lost *atomic.Int64) {
	a.t.Helper()
	lost = new(atomic.Int64)
	ends := [2]*os.File{}
	for i, h := range []*host{a, b} {
		f, err := h.tap(device)
		if err != nil {
			h.t.Skipf("needs TAP devices: %v", err)
		}
		h.t.Cleanup(func() { f.Close() })
		ends[i] = f
	}
	type frame struct {
		due  time.Time
		data []byte
	}
	for i := range ends {
		from, to := ends[i], ends[1-i]
		rnd := rand.New(rand.NewPCG(uint64(i), 7))
		wire := make(chan frame, 4096)
		go func() {
			defer close(wire)
			buf := make([]byte, 65536)
			for {
				n, err := from.Read(buf)
				if errors.Is(err, os.ErrClosed) {
					return
				}
				if err != nil { // EIO: the interface is down
					runtime.Gosched()
					continue
				}
				if rnd.Float64() < loss {
					lost.Add(1)
					continue
				}
				select {
				case wire <- frame{time.Now().Add(delay), append([]byte(nil), buf[:n]...)}:
				default: // a full buffer drops, as a switch does
				}
			}
		}()
		go func() {
			for f := range wire {
				time.Sleep(time.Until(f.due))
				to.Write(f.data)
			}
		}()
	}
	return lost
}

// tap makes an interface whose other end is a file.
func (h *host) tap(device string) (*os.File, error) {
	type result struct {
		f   *os.File
		err error
	}
	done := make(chan result)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread, which is in another namespace by then, ends with the goroutine
		f, err := func() (*os.File, error) {
			ns, err := os.Open("/run/netns/" + h.name)
			if err != nil {
				return nil, err
			}
			defer ns.Close()
			if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
				return nil, fmt.Errorf("enter %s: %w", h.name, err)
			}
			fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
			if err != nil {
				return nil, fmt.Errorf("open /dev/net/tun: %w", err)
			}
			req, err := unix.NewIfreq(device)
			if err == nil {
				req.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI)
				err = unix.IoctlIfreq(fd, unix.TUNSETIFF, req)
			}
			if err != nil {
				unix.Close(fd)
				return nil, fmt.Errorf("make %s: %w", device, err)
			}
			return os.NewFile(uintptr(fd), device), nil
		}()
		done <- result{f, err}
	}()
	r := <-done
	return r.f, r.err
}
