//go:build cgo && linux

package verbs

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"tutti/internal/files"
	"tutti/internal/proctest"
	"tutti/mem"
	"tutti/rdma"
	"tutti/rdma/rdmatest"
)

// network is the interface below the device in the virtual machine of make test-rdma.
const network = "d0"

// testDevice returns the provider and the first device, without which the test is skipped.
func testDevice(t *testing.T) (*Provider, string) {
	t.Helper()
	p, names := rdmatest.Devices(t, Load)
	return p, names[0]
}

// ip runs a command on the network interfaces of the virtual machine.
func ip(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		t.Fatalf("ip %q: %v: %s", args, err, out)
	}
}

func setPort(t *testing.T, up bool) {
	t.Helper()
	ip(t, "link", "set", network, map[bool]string{true: "up", false: "down"}[up])
}

func TestDeviceSuite(t *testing.T) {
	p, name := testDevice(t)
	rdmatest.Suite(t, func(*testing.T) rdmatest.Subject {
		return rdmatest.Subject{Provider: p, Device: name, SetPort: setPort}
	})
}

// TestDeviceWithoutReset: a provider that is told that the device cannot reset queue pairs passes
// the same suite, and refuses to reset them.
func TestDeviceWithoutReset(t *testing.T) {
	p, name := testDevice(t)
	p = p.WithQuirks(rdma.Quirks{NoReset: true})
	rdmatest.Suite(t, func(*testing.T) rdmatest.Subject {
		return rdmatest.Subject{Provider: p, Device: name, SetPort: setPort}
	})
	e := connect(t, p, name, 4)
	if got := e.d.Attributes().Quirks; !got.NoReset {
		t.Errorf("%+v", got)
	}
	if err := e.a.Reset(); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("reset: %v, want %v", err, errors.ErrUnsupported)
	}
}

// TestDeviceNeedsNoForkInit: the virtual machine's kernel copies pinned pages.
func TestDeviceNeedsNoForkInit(t *testing.T) {
	p, _ := testDevice(t)
	if got := p.ForkSupport(); got != ForkByKernel {
		t.Errorf("%q, want %q", got, ForkByKernel)
	}
}

// TestDeviceFilesOfCompletionQueues: completion queues have no descriptors of their own.
func TestDeviceFilesOfCompletionQueues(t *testing.T) {
	p, name := testDevice(t)
	d, err := p.Open(name, nil)
	if err != nil {
		t.Fatal(err)
	}
	before, ok := files.Open()
	var queues []rdma.CQ
	for range 8 {
		q, err := d.NewCQ(16, func() {})
		if err != nil {
			t.Fatal(err)
		}
		queues = append(queues, q)
	}
	if after, _ := files.Open(); !ok || after != before {
		t.Errorf("%d open files (known: %t), %d with 8 completion queues", before, ok, after)
	}
	for _, q := range queues {
		err = errors.Join(err, q.Close())
	}
	if err = errors.Join(err, d.Close()); err != nil {
		t.Error(err)
	}
}

// TestDeviceAddressesAreThoseOfSysfs: both ways to read addresses have the same result.
func TestDeviceAddressesAreThoseOfSysfs(t *testing.T) {
	p, name := testDevice(t)
	d, err := p.Open(name, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	got, err := d.GIDs(1)
	if err != nil {
		t.Fatal(err)
	}
	want, err := KernelGIDs(sysfs, name, 1)
	if err != nil {
		t.Fatal(err)
	}
	if len(got) == 0 || len(got) != len(want) {
		t.Fatalf("%v, and from sysfs %v", got, want)
	}
	for i := range got {
		if got[i] != want[i] {
			t.Errorf("%v, and from sysfs %v", got[i], want[i])
		}
	}
}

// ends are two connected queue pairs of a device, with their memory, for tests that count.
type ends struct {
	d        rdma.Device
	a, b     rdma.QP
	ca, cb   rdma.CQ
	src, dst rdma.MR
	from, to []byte
}

// connect makes a pair on a device for depth requests.
func connect(t *testing.T, p *Provider, name string, depth int) *ends {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	e := &ends{from: make([]byte, 4096), to: make([]byte, 4096)}
	var err error
	e.d, err = p.Open(name, nil)
	must(err)
	close := func(what interface{ Close() error }) {
		t.Cleanup(func() {
			if err := what.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	close(e.d)
	const access = rdma.LocalWrite | rdma.RemoteWrite
	e.src, err = e.d.Register(mem.Host(e.from, mem.Anywhere), access)
	must(err)
	close(e.src)
	e.dst, err = e.d.Register(mem.Host(e.to, mem.Anywhere), access)
	must(err)
	close(e.dst)
	for _, c := range []*rdma.CQ{&e.ca, &e.cb} {
		*c, err = e.d.NewCQ(4*depth, nil)
		must(err)
		close(*c)
	}
	for i, q := range []*rdma.QP{&e.a, &e.b} {
		c := []rdma.CQ{e.ca, e.cb}[i]
		*q, err = e.d.NewQP(rdma.QPConfig{Send: c, Recv: c, SendDepth: depth, RecvDepth: depth})
		must(err)
		close(*q)
	}
	for i, q := range []rdma.QP{e.a, e.b} {
		must(q.Init(1, access))
		must(q.Connect(routeTo(t, e.d, []rdma.QP{e.b, e.a}[i].Number())))
	}
	return e
}

// routeTo returns the route to a queue pair of the same port.
func routeTo(t *testing.T, d rdma.Device, remote uint32) *rdma.Route {
	t.Helper()
	gids, err := d.GIDs(1)
	if err != nil {
		t.Fatal(err)
	}
	g, err := rdma.ChooseGID(gids, "")
	if err != nil {
		t.Fatal(err)
	}
	return &rdma.Route{Port: 1, GIDIndex: g.Index, Global: true, GID: g.GID, MTU: 1024, Remote: remote, Reads: 1,
		Timeout: 17,
		Retries: 7, RNRRetries: 7}
}

func addressOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

// chain returns n writes, of which the last one completes.
func (e *ends) chain(n int) []rdma.SendRequest {
	chain := make([]rdma.SendRequest, n)
	segments := []rdma.Segment{{Address: addressOf(e.from), Key: e.src.LocalKey(), Len: 64}}
	for i := range chain {
		chain[i] = rdma.SendRequest{ID: uint64(i), Op: rdma.Write, Segments: segments, RemoteAddress: addressOf(e.to),
			RemoteKey: e.dst.RemoteKey(), Signaled: i == n-1}
	}
	return chain
}

// TestDeviceCallsPerMessage: a stream of chains costs at most a call of cgo for 16 messages,
// polling included.
func TestDeviceCallsPerMessage(t *testing.T) {
	p, name := testDevice(t)
	const length, chains = 64, 200
	e := connect(t, p, name, 2*length)
	chain, out := e.chain(length), make([]rdma.Completion, rdma.PollBatch)
	done, polls, late := 0, 0, time.Now().Add(time.Minute)
	before := runtime.NumCgoCall()
	for posted := 0; done < chains; {
		if posted < chains && posted-done < 2 {
			if n, err := e.a.Post(chain); n != length || err != nil {
				t.Fatal(n, err)
			}
			posted++
			continue
		}
		if time.Now().After(late) {
			t.Fatalf("%d of %d chains in a minute", done, chains)
		}
		n, err := e.ca.Poll(out)
		if err != nil {
			t.Fatal(err)
		}
		if done += n; n == 0 { // what a waiting program does with its time is its own matter
			polls++
		}
	}
	calls := int(runtime.NumCgoCall()-before) - polls
	if calls < 2 || calls > chains*length/16 {
		t.Errorf("%d calls of cgo for %d messages, want at most one for 16", calls, chains*length)
	}
	t.Logf("%d messages: %d calls of cgo, and %d polls without a completion", chains*length, calls, polls)
}

// TestDeviceTrafficAllocatesNothing: neither posting nor polling does.
func TestDeviceTrafficAllocatesNothing(t *testing.T) {
	p, name := testDevice(t)
	e := connect(t, p, name, 16)
	chain, out := e.chain(8), make([]rdma.Completion, rdma.PollBatch)
	recvs := []rdma.RecvRequest{{ID: 1, Segments: []rdma.Segment{{Address: addressOf(e.to), Key: e.dst.LocalKey(),
		Len: 64}}}}
	chain[7].Op = rdma.SendImm
	wait := func(c rdma.CQ) {
		for late := time.Now().Add(time.Minute); ; {
			n, err := c.Poll(out)
			if err != nil || n == 1 && out[0].Status != rdma.Success || time.Now().After(late) {
				t.Fatal(n, err, out[0])
			}
			if n == 1 {
				return
			}
		}
	}
	if got := testing.AllocsPerRun(100, func() {
		if _, err := e.b.PostRecv(recvs); err != nil {
			t.Fatal(err)
		}
		if _, err := e.a.Post(chain); err != nil {
			t.Fatal(err)
		}
		wait(e.ca)
		wait(e.cb)
	}); got != 0 {
		t.Errorf("%v allocations a round", got)
	}
}

// TestDeviceReportsChangedAddresses: a program learns that a port has another address.
func TestDeviceReportsChangedAddresses(t *testing.T) {
	p, name := testDevice(t)
	events := make(chan rdma.Event, 100)
	d, err := p.Open(name, func(e rdma.Event) { events <- e })
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	const address = "10.99.7.7"
	has := func() bool {
		gids, err := d.GIDs(1)
		if err != nil {
			t.Fatal(err)
		}
		_, err = rdma.ChooseGID(gids, address)
		return err == nil
	}
	for _, add := range []bool{true, false} {
		ip(t, "addr", map[bool]string{true: "add", false: "del"}[add], address+"/32", "dev", network)
		for late := time.After(time.Minute); has() != add; {
			select {
			case e := <-events:
				if e.Kind != rdma.GIDsChanged || e.Port != 1 {
					t.Errorf("%v, want %v of port 1", e, rdma.GIDsChanged)
				}
			case <-late:
				t.Fatalf("no event; added: %v", add)
			}
		}
	}
}

// TestDeviceRefusesMemory: memory that cannot be used as asked is refused with a reason.
func TestDeviceRefusesMemory(t *testing.T) {
	p, name := testDevice(t)
	d, err := p.Open(name, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	b, err := unix.Mmap(-1, 0, 8192, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Mprotect(b, unix.PROT_READ); err != nil {
		t.Fatal(err)
	}
	refused := func(what string, access rdma.Access) {
		t.Helper()
		m, err := d.Register(mem.Host(b, mem.Anywhere), access)
		if e, ok := errors.AsType[*rdma.Error](err); !ok || e.Errno != syscall.EFAULT || e.Advice == "" || m != nil {
			t.Errorf("%s: %v, %v; want %v with advice", what, m, err, syscall.EFAULT)
		}
	}
	refused("memory that cannot be written", rdma.LocalWrite)
	if m, err := d.Register(mem.Host(b, mem.Anywhere), rdma.RemoteRead); err != nil {
		t.Errorf("the same for reading: %v", err)
	} else if err := m.Close(); err != nil {
		t.Error(err)
	}
	if err := unix.Munmap(b); err != nil {
		t.Fatal(err)
	}
	refused("memory that is not mapped", 0)
	if m, err := d.RegisterDMABuf(0, 0, 4096, 0, rdma.LocalWrite); m != nil || err == nil {
		t.Errorf("standard input as a DMA buffer: %v, %v", m, err)
	}
}

// peerVariable holds the description of a queue pair, for the other process of
// TestDeviceTwoProcesses.
const peerVariable = "SOFTROCE_PEER"

// TestDeviceTwoProcesses: a process writes to the memory of another one, and says so with a number.
func TestDeviceTwoProcesses(t *testing.T) {
	p, name := testDevice(t)
	d, err := p.Open(name, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	b := make([]byte, 1<<20)
	m, err := d.Register(mem.Host(b, mem.Anywhere), rdma.LocalWrite|rdma.RemoteWrite)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	rung := make(chan struct{}, 1)
	c, err := d.NewCQ(16, func() {
		select {
		case rung <- struct{}{}:
		default:
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	q, err := d.NewQP(rdma.QPConfig{Send: c, Recv: c, SendDepth: 4, RecvDepth: 4})
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	if err := q.Init(1, rdma.LocalWrite|rdma.RemoteWrite); err != nil {
		t.Fatal(err)
	}
	wait := func() rdma.Completion {
		var out [1]rdma.Completion
		for late := time.After(time.Minute); ; {
			if err := c.Arm(); err != nil {
				t.Fatal(err)
			}
			if n, err := c.Poll(out[:]); err != nil {
				t.Fatal(err)
			} else if n == 1 {
				return out[0]
			}
			select {
			case <-rung:
			case <-late:
				t.Fatal("no completion")
			}
		}
	}
	var remote, key uint32
	var address uint64
	if peer := os.Getenv(peerVariable); peer != "" { // the other process, which writes
		if _, err := fmt.Sscan(peer, &remote, &key, &address); err != nil {
			t.Fatal(err)
		}
		if err := q.Connect(routeTo(t, d, remote)); err != nil {
			t.Fatal(err)
		}
		os.NewFile(3, "number").WriteString(fmt.Sprintln(q.Number()))
		for i := range b {
			b[i] = byte(i * 7)
		}
		if _, err := q.Post([]rdma.SendRequest{{ID: 1, Op: rdma.WriteImm, Imm: 77, Signaled: true,
			RemoteAddress: address,
			RemoteKey:     key, Segments: []rdma.Segment{{Address: addressOf(b), Key: m.LocalKey(),
				Len: uint32(len(b))}}}}); err != nil {
			t.Fatal(err)
		}
		if got := wait(); got.Status != rdma.Success {
			t.Fatalf("%+v (%v)", got, got.Status)
		}
		return
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	cmd := proctest.Again([]string{fmt.Sprintf("%s=%d %d %d", peerVariable, q.Number(), m.RemoteKey(), addressOf(b))},
		"-test.run=^TestDeviceTwoProcesses$", "-test.timeout=2m")
	cmd.ExtraFiles = []*os.File{w}
	other := proctest.Run(t, cmd)
	w.Close()
	if _, err := fmt.Fscan(r, &remote); err != nil {
		t.Fatal(err)
	}
	if _, err := q.PostRecv([]rdma.RecvRequest{{ID: 5}}); err != nil {
		t.Fatal(err)
	}
	if err := q.Connect(routeTo(t, d, remote)); err != nil {
		t.Fatal(err)
	}
	got := wait()
	if got.ID != 5 || got.Status != rdma.Success || got.Imm != 77 || int(got.Bytes) != len(b) {
		t.Errorf("%+v", got)
	}
	for i := range b {
		if b[i] != byte(i*7) {
			t.Fatalf("byte %d is %d, want %d", i, b[i], byte(i*7))
		}
	}
	other.End(0)
}

// TestDeviceHoldsNoThreads: devices and completion queues that wait for events hold no thread each.
func TestDeviceHoldsNoThreads(t *testing.T) {
	p, name := testDevice(t)
	threads := func() int {
		tasks, err := os.ReadDir("/proc/self/task")
		if err != nil {
			t.Fatal(err)
		}
		return len(tasks)
	}
	before, goroutines := threads(), runtime.NumGoroutine()
	var all []interface{ Close() error }
	for range 40 {
		d, err := p.Open(name, func(rdma.Event) {})
		if err != nil {
			t.Fatal(err)
		}
		c, err := d.NewCQ(16, func() {})
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Arm(); err != nil {
			t.Fatal(err)
		}
		all = append(all, c, d)
	}
	if more := threads() - before; more > 20 {
		t.Errorf("80 waits hold %d threads", more)
	}
	for _, o := range all {
		if err := o.Close(); err != nil {
			t.Error(err)
		}
	}
	for late := time.Now().Add(time.Minute); runtime.NumGoroutine() > goroutines; runtime.Gosched() {
		if time.Now().After(late) { // Close has waited for all but their last instructions
			t.Fatalf("%d goroutines are left", runtime.NumGoroutine()-goroutines)
		}
	}
}

// TestBuildsWithoutHeader: a machine without libibverbs' header compiles every function all the
// same.
func TestBuildsWithoutHeader(t *testing.T) {
	text, err := os.ReadFile("verbs.c")
	if err != nil {
		t.Fatal(err)
	}
	absent := strings.ReplaceAll(string(text), "<infiniband/verbs.h>", "<no-such-header.h>")
	object := filepath.Join(t.TempDir(), "verbs.o")
	cc := exec.CommandContext(t.Context(), "gcc", "-I.", "-x", "c", "-c", "-Wall", "-Werror", "-o", object, "-")
	cc.Stdin = strings.NewReader(absent)
	if out, err := cc.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	symbols, err := exec.CommandContext(t.Context(), "nm", object).Output()
	if err != nil {
		t.Fatal(err)
	}
	header, err := os.ReadFile("verbs.h")
	if err != nil {
		t.Fatal(err)
	}
	declared := regexp.MustCompile(`\btutti_\w+\(`).FindAllString(string(header), -1)
	if len(declared) < 20 {
		t.Fatalf("%d functions in verbs.h", len(declared))
	}
	for _, f := range declared {
		if name := strings.TrimSuffix(f, "("); !strings.Contains(string(symbols), " T "+name+"\n") {
			t.Errorf("%s is missing without the header", name)
		}
	}
}
