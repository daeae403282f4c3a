//go:build linux

package rig

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"slices"
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

// command is a command that runs on the host.
func (h *Host) command(name string, args ...string) *exec.Cmd {
	return exec.Command("ip", slices.Concat([]string{"netns", "exec", h.Name, name}, args)...)
}

// namespaces is the prefix of the names of namespaces. The number of the process that made them,
// and a count, follow; those of processes that have died are removed.
const namespaces = "tutti-test-"

var made atomic.Int32

// NewHosts makes n hosts without connections. It skips tests without the privilege.
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
	if err := h.ip(args...); err != nil {
		h.t.Fatal(err)
	}
}

func (h *Host) ip(args ...string) error {
	out, err := exec.Command("ip", append([]string{"-n", h.Name}, args...)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

// Address sets the addresses of an interface and takes it up.
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

// Decoy makes an interface without a connection.
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

// Switch connects hosts by an interface "data" each. Tests can move cables to another switch, also
// to one behind a slow cable, and drop what one host sends to another. What does that returns
// errors, so that any goroutine may call it.
type Switch struct {
	Hosts []*Host
	host  *Host  // where the bridges are
	slow  *cable // to the bridge of slow hosts; nil until LaySlow
}

// NewSwitch makes n hosts, the i-th with the address Address(i).
func NewSwitch(t *testing.T, n int) *Switch {
	t.Helper()
	all := NewHosts(t, n+1)
	s := &Switch{Hosts: all[:n], host: all[n]}
	for _, bridge := range bridges {
		s.host.IP("link", "add", bridge, "type", "bridge", "forward_delay", "0")
		s.host.IP("link", "set", bridge, "up")
	}
	for i, h := range s.Hosts {
		s.host.IP("link", "add", port(i), "type", "veth", "peer", "name", "data", "netns", h.Name)
		s.host.IP("link", "set", port(i), "up", "master", bridges[0])
		h.Address("data", s.Address(i)+"/24")
	}
	return s
}

var bridges = [3]string{"near", "far", "slow"}

// LaySlow lays the cable for Slow. It skips tests without the privilege to make TAP devices.
func (s *Switch) LaySlow() {
	s.host.t.Helper()
	s.slow = newCable(s.host, s.host, "slow0", "slow1")
	s.host.IP("link", "set", "slow0", "up", "master", "near")
	s.host.IP("link", "set", "slow1", "up", "master", "slow")
}

// Slow delays everything that a host sends and receives, and drops a part of it, until Part. As
// with Part, some frames are lost while the host's cable is moved.
func (s *Switch) Slow(host int, delay time.Duration, loss float64) error {
	s.slow.set(delay, loss)
	return s.host.ip("link", "set", port(host), "master", "slow")
}

// Lost returns the number of frames that Slow has dropped.
func (s *Switch) Lost() int64 { return s.slow.lost.Load() }

func port(i int) string { return fmt.Sprintf("port%d", i) }

// Address returns the address of the i-th host.
func (s *Switch) Address(i int) string { return fmt.Sprintf("10.77.1.%d", i+1) }

// Part connects these hosts to the other switch, and all others to the first. It tries all of them
// also when it fails.
func (s *Switch) Part(far ...int) error {
	var errs []error
	for i := range s.Hosts {
		bridge := bridges[0]
		if slices.Contains(far, i) {
			bridge = bridges[1]
		}
		errs = append(errs, s.host.ip("link", "set", port(i), "master", bridge))
	}
	return errors.Join(errs...)
}

// Deafen drops everything that one host sends to another, until Mend. The other direction is not
// affected.
func (s *Switch) Deafen(from, to int) error {
	return s.Hosts[from].ip("neigh", "replace", s.Address(to), "lladdr", "02:00:00:00:00:01", "nud", "permanent", "dev",
		"data")
}

// Mend ends Deafen.
func (s *Switch) Mend(from, to int) error {
	return s.Hosts[from].ip("neigh", "del", s.Address(to), "dev", "data")
}

// Netem makes what leaves by the interface slow and lossy. It reports whether the kernel has the
// emulator.
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

// SlowCable connects the hosts by a cable that delays every frame, and drops a part of them: for
// kernels without netem, and with the same losses in every run. Another part, late, comes half a
// delay after the others, out of order. It counts the lost frames.
func SlowCable(a, b *Host, device string, delay time.Duration, loss, late float64) (lost *atomic.Int64) {
	a.t.Helper()
	c := newCable(a, b, device, device)
	c.late.Store(math.Float64bits(late))
	c.set(delay, loss)
	return &c.lost
}

// cable carries frames between two TAP devices.
type cable struct {
	delay atomic.Int64  // in nanoseconds
	loss  atomic.Uint64 // of frames: the bits of a float64
	late  atomic.Uint64 // likewise
	lost  atomic.Int64  // frames
}

func (c *cable) set(delay time.Duration, loss float64) {
	c.delay.Store(int64(delay))
	c.loss.Store(math.Float64bits(loss))
}

// newCable makes the devices and connects them.
func newCable(a, b *Host, deviceA, deviceB string) *cable {
	a.t.Helper()
	c := new(cable)
	ends := [2]*os.File{}
	devices := []string{deviceA, deviceB}
	for i, h := range []*Host{a, b} {
		f, err := h.tap(devices[i])
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
				if rnd.Float64() < math.Float64frombits(c.loss.Load()) {
					c.lost.Add(1)
					continue
				}
				delay := time.Duration(c.delay.Load())
				data := append([]byte(nil), buf[:n]...)
				if rnd.Float64() < math.Float64frombits(c.late.Load()) {
					time.AfterFunc(delay+delay/2, func() { to.Write(data) })
					continue
				}
				select {
				case wire <- frame{time.Now().Add(delay), data}:
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
	return c
}

// tap makes an interface whose other end is a file.
func (h *Host) tap(device string) (*os.File, error) {
	type result struct {
		f   *os.File
		err error
	}
	done := make(chan result)
	lostThread(func() { // it is in another namespace by then
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
	})
	r := <-done
	return r.f, r.err
}

// lostThread runs f on a thread that ends with it. It is not the main thread, which would not end
// and whose namespaces /proc shows for the process.
func lostThread(f func()) {
	go func() {
		runtime.LockOSThread() // and not unlocked after f
		if unix.Gettid() != unix.Getpid() {
			f()
			return
		}
		done := make(chan struct{}) // while this goroutine has the main thread no other gets it
		lostThread(func() { defer close(done); f() })
		<-done
		runtime.UnlockOSThread()
	}()
}
