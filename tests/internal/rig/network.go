//go:build linux

package rig

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
)

// Host is a network namespace: interfaces, addresses and ports of its own.
type Host struct {
	t    *testing.T
	Name string
}

// Enter is the prefix of a command that runs on the host: see Stage.StartIn.
func (h *Host) Enter() []string { return []string{"ip", "netns", "exec", h.Name} }

// Names of namespaces are this, the number of the process that made them, and a count: those of processes that have died are removed.
const namespaces = "tutti-test-"

var made atomic.Int32

// NewHosts makes n hosts that are not connected. Tests without the right to are skipped.
func NewHosts(t *testing.T, n int) []*Host {
	t.Helper()
	NeedRoot(t, "it makes network namespaces")
	Need(t, "ip", "unshare")
	removeStale(t)
	hosts := make([]*Host, n)
	for i := range hosts {
		h := &Host{t, fmt.Sprintf("%s%d-%d", namespaces, os.Getpid(), made.Add(1))}
		if out, err := exec.Command("ip", "netns", "add", h.Name).CombinedOutput(); err != nil {
			t.Skipf("needs network namespaces: ip netns add: %v: %s", err, out)
		}
		t.Cleanup(func() { exec.Command("ip", "netns", "del", h.Name).Run() })
		h.IP("link", "set", "lo", "up")
		hosts[i] = h
	}
	return hosts
}

func removeStale(t *testing.T) {
	t.Helper()
	out, err := exec.Command("ip", "netns", "list").Output()
	if err != nil {
		t.Skipf("needs network namespaces: ip netns list: %v", err)
	}
	for line := range strings.Lines(string(out)) {
		name, _, _ := strings.Cut(strings.TrimSpace(line), " ")
		rest, ours := strings.CutPrefix(name, namespaces)
		number, _, _ := strings.Cut(rest, "-")
		if pid, err := strconv.Atoi(number); ours && err == nil && errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
			exec.Command("ip", "netns", "del", name).Run()
		}
	}
}

// IP runs the command ip on the host.
func (h *Host) IP(args ...string) {
	h.t.Helper()
	if out, err := exec.Command("ip", append([]string{"-n", h.Name}, args...)...).CombinedOutput(); err != nil {
		h.t.Fatalf("ip %s: %v: %s", strings.Join(args, " "), err, out)
	}
}

// Address gives an interface its addresses and takes it up.
func (h *Host) Address(device string, addresses ...string) {
	h.t.Helper()
	for _, a := range addresses {
		args := []string{"address", "add", a, "dev", device}
		if strings.Contains(a, ":") {
			args = append(args, "nodad")
		}
		h.IP(args...)
	}
	h.IP("link", "set", device, "up")
}

// Decoy is an interface that leads nowhere.
func (h *Host) Decoy(device string, addresses ...string) {
	h.t.Helper()
	h.IP("link", "add", device, "type", "veth", "peer", "name", "x"+device)
	h.IP("link", "set", "x"+device, "up")
	h.Address(device, addresses...)
}

// Connect connects the hosts by a link: interfaces of this name, without addresses.
func Connect(a, b *Host, device string) {
	a.t.Helper()
	a.IP("link", "add", device, "type", "veth", "peer", "name", device, "netns", b.Name)
}

// Netem makes what leaves by the interface slow and lossy.
// It reports whether the kernel has the emulator.
func (h *Host) Netem(device string, quality ...string) bool {
	h.t.Helper()
	Need(h.t, "tc")
	args := append([]string{"-n", h.Name, "qdisc", "add", "dev", device, "root", "netem"}, quality...)
	if out, err := exec.Command("tc", args...).CombinedOutput(); err != nil {
		if strings.Contains(string(out), "qdisc kind is unknown") {
			return false
		}
		h.t.Fatalf("tc: %v: %s", err, out)
	}
	return true
}

// SlowCable connects the hosts by a cable of our own, which delays every frame and loses some: for kernels without netem, and the same losses in every run.
// It counts the frames that it loses.
func SlowCable(a, b *Host, device string, delay time.Duration, loss float64) (lost *atomic.Int64) {
	a.t.Helper()
	lost = new(atomic.Int64)
	ends := [2]*os.File{}
	for i, h := range []*Host{a, b} {
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
func (h *Host) tap(device string) (*os.File, error) {
	type result struct {
		f   *os.File
		err error
	}
	done := make(chan result)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread, which is in another namespace by then, ends with the goroutine
		f, err := func() (*os.File, error) {
			ns, err := os.Open("/run/netns/" + h.Name)
			if err != nil {
				return nil, err
			}
			defer ns.Close()
			if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
				return nil, fmt.Errorf("enter %s: %w", h.Name, err)
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
