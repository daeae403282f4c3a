package rdmatest

import (
	"errors"
	"slices"
	"syscall"
	"testing"
	"time"

	"tutti/mem"
	"tutti/rdma"
)

func closed(err error) bool { return errors.Is(err, rdma.ErrClosed) }

// devices: they are listed in a stable order, and an open one has limits and an active port.
func devices(t *testing.T, s Subject) {
	names, err := s.Provider.Devices()
	again, err2 := s.Provider.Devices()
	if err != nil || err2 != nil || !slices.Equal(names, again) || !slices.Contains(names, s.Device) {
		t.Fatalf("devices %q (%v), then %q (%v); want the same, with %s", names, err, again, err2, s.Device)
	}
	if d, err := s.Provider.Open("no-such-device", nil); !errors.Is(err, rdma.ErrNoDevice) || d != nil {
		t.Errorf("open a device that is not there: %v, %v", d, err)
	}
	r := newRig(t, s)
	a := r.Attributes()
	if r.Name() != s.Device || a.Ports < 1 || a.MaxQPs < 1 || a.MaxQPDepth < 1 || a.MaxSegments < 1 ||
		a.MaxCQDepth < 1 ||
		a.MaxMRs < 1 || a.MaxMRBytes < 1<<20 || a.MaxReads < 1 || a.NUMANode < -1 {
		t.Errorf("%s: %+v", r.Name(), a)
	}
	p, err := r.Port(1)
	if err != nil || p.State != rdma.PortActive || p.MTU < 256 || p.MTU > 4096 || p.MTU&(p.MTU-1) != 0 ||
		p.MaxBytes < 1<<20 || p.GIDs < 1 {
		t.Errorf("port 1: %+v, %v", p, err)
	}
	for _, port := range []int{-1, 0, a.Ports + 1, 256, 257} {
		if p, err := r.Port(port); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("port %d: %+v, %v", port, p, err)
		}
		if g, err := r.GIDs(port); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("addresses of port %d: %v, %v", port, g, err)
		}
	}
	other, err := s.Provider.Open(s.Device, nil) // beside the first
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Close(); err != nil {
		t.Error(err)
	}
}

// address: the table has no empty entries and ascending indexes, and one can be chosen.
func address(t *testing.T, s Subject) {
	r := newRig(t, s)
	p, err := r.Port(1)
	if err != nil {
		t.Fatal(err)
	}
	gids, err := r.GIDs(1)
	if err != nil || len(gids) == 0 {
		t.Fatalf("addresses %v (%v)", gids, err)
	}
	last := -1
	for _, e := range gids {
		if e.GID == (rdma.GID{}) || e.Index <= last || e.Index >= p.GIDs || p.Ethernet == (e.Type == rdma.InfiniBand) {
			t.Errorf("%+v of %v, port %+v", e, gids, p)
		}
		last = e.Index
	}
	if g, err := rdma.ChooseGID(gids, ""); err != nil {
		t.Error(err)
	} else if p.Ethernet && (g.Type != rdma.RoCEv2 || !g.GID.Addr().IsGlobalUnicast()) {
		t.Errorf("%v of %v", g, gids)
	}
}

// registration: exactly the memory that was asked for is registered, at any address.
func registration(t *testing.T, s Subject) {
	r := newRig(t, s)
	for _, c := range []struct {
		name   string
		n, off int
		access rdma.Access
	}{
		{"a page", 4096, 0, all}, {"a byte", 1, 1, all}, {"unaligned", 10001, 4095, all}, {"for reading", 4096, 8,
			rdma.RemoteRead},
		{"local", 64, 0, rdma.LocalWrite}, {"nothing but reading here", 64, 0, 0}, {"relaxed", 8192, 0,
			all | rdma.RelaxedOrdering},
		{"large", 16 << 20, 3, all},
	} {
		m := r.memory(c.n, c.off, c.access)
		again, err := r.Register(mem.Host(m.b, "cpu:0"), c.access) // the same memory once more
		if err != nil {
			t.Errorf("%s: twice: %v", c.name, err)
			continue
		}
		if again.LocalKey() == m.LocalKey() {
			t.Errorf("%s: two regions have the key %#x", c.name, m.LocalKey())
		}
		for _, m := range []rdma.MR{m, again} {
			if err := m.Close(); err != nil {
				t.Errorf("%s: close: %v", c.name, err)
			}
			if err := m.Close(); !closed(err) {
				t.Errorf("%s: close again: %v, want %v", c.name, err, rdma.ErrClosed)
			}
		}
	}
	b := make([]byte, 4096)
	for name, c := range map[string]struct {
		m      mem.Memory
		access rdma.Access
	}{
		"nothing":                     {mem.Memory{}, all},
		"an empty slice":              {mem.Host(b[:0], mem.Anywhere), all},
		"memory of a GPU":             {mem.Device(0x7f0000000000, 4096, "cuda:0"), all},
		"peers write, but not we":     {mem.Host(b, mem.Anywhere), rdma.RemoteWrite},
		"peers add, but we write not": {mem.Host(b, mem.Anywhere), rdma.RemoteAtomic | rdma.RemoteRead},
	} {
		if m, err := r.Register(c.m, c.access); !errors.Is(err, syscall.EINVAL) || m != nil {
			t.Errorf("%s: %v, %v; want %v", name, m, err, syscall.EINVAL)
		}
	}
}

// dmaBuf: a descriptor that is none is refused, whether or not the device has the call. Exactly the
// bytes of a buffer that was asked for are registered, from the address that was given.
func dmaBuf(t *testing.T, s Subject) {
	r := newRig(t, s)
	if m, err := r.RegisterDMABuf(-1, 0, 4096, 0x10000, all); err == nil || m != nil {
		t.Errorf("descriptor -1: %v, %v", m, err)
	}
	if s.DMABuf == nil {
		return
	}
	const size, address = 64 << 10, 0x7e0000001000
	fd, b := s.DMABuf(t, size)
	for name, c := range map[string][2]uint64{"nothing": {0, 0}, "behind the end": {size - 4096, 4097},
		"far behind the end": {1 << 63, 4096}, "too much": {0, 1 << 63}} {
		if m, err := r.RegisterDMABuf(fd, c[0], c[1], address, all); err == nil || m != nil {
			t.Errorf("%s: %v, %v", name, m, err)
		}
	}
	x, _ := r.connected(rdma.QPConfig{}, nil)
	for i, offset := range []int{0, 100, 4096, 5000} { // the descriptor is not used up
		n := size - 4096 - offset
		m, err := r.RegisterDMABuf(fd, uint64(offset), uint64(n), address, all)
		if err != nil {
			t.Fatal(err)
		}
		src, back := r.memory(n, 0, 0), r.memory(n, 0, all)
		src.fill(i)
		want := slices.Clone(b)
		copy(want[offset:], src.b)
		w := rdma.SendRequest{ID: 1, Op: rdma.Write, Segments: src.segs(), RemoteAddress: address,
			RemoteKey: m.RemoteKey(), Signaled: true}
		x.post(w)
		x.done(1, rdma.Write)
		same(t, "what was written", b, want)
		b[offset+n-1]++
		w.ID, w.Op, w.Segments = 2, rdma.Read, back.segs()
		x.post(w)
		x.done(2, rdma.Read)
		same(t, "what was read", back.b, b[offset:][:n])
		// As local memory, too.
		local := rdma.Segment{Address: address, Key: m.LocalKey(), Len: uint32(n)}
		back.fill(i + 100)
		w = rdma.SendRequest{ID: 3, Op: rdma.Read, Segments: []rdma.Segment{local}, RemoteAddress: back.at(0),
			RemoteKey: back.RemoteKey(), Signaled: true}
		x.post(w)
		x.done(3, rdma.Read)
		same(t, "local memory", b[offset:][:n], back.b)
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
	}
	m, err := r.RegisterDMABuf(fd, 0, 4096, address, all)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	x.post(rdma.SendRequest{ID: 4, Op: rdma.Read, Segments: r.memory(2, 0, all).segs(), RemoteAddress: address + 4095,
		RemoteKey: m.RemoteKey(), Signaled: true})
	x.failed(4, rdma.RemoteAccess)
}

// closeOrder: what is in use is not closed.
func closeOrder(t *testing.T, s Subject) {
	r := newRig(t, s)
	busy := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, syscall.EBUSY) {
			t.Errorf("close %s in use: %v, want %v", what, err, syscall.EBUSY)
		}
	}
	send, recv := r.cq(8, nil), r.cq(8, nil)
	busy("a device", r.Close())
	q := r.qp(rdma.QPConfig{Send: send, Recv: recv, SendDepth: 1, RecvDepth: 1})
	busy("a completion queue", send.Close())
	busy("a completion queue", recv.Close())
	if n, err := send.Poll(make([]rdma.Completion, 1)); n != 0 || err != nil {
		t.Errorf("it is not usable any more: %v", err)
	}
	for i, end := range []func() error{q.Close, send.Close, recv.Close} {
		if err := end(); err != nil {
			t.Errorf("%d: %v", i, err)
		}
	}
	m := r.memory(1, 0, all)
	busy("a device", r.Close())
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
}

// afterClose: every method of what is closed fails with ErrClosed.
func afterClose(t *testing.T, s Subject) {
	r := newRig(t, s)
	c := r.cq(8, func() {})
	q := r.qp(rdma.QPConfig{Send: c, Recv: c, SendDepth: 1, RecvDepth: 1})
	if err := q.Close(); err != nil {
		t.Fatal(err)
	}
	check := func(what string, err error) {
		t.Helper()
		if !closed(err) {
			t.Errorf("%s after Close: %v, want %v", what, err, rdma.ErrClosed)
		}
	}
	_, err := q.State()
	check("State", err)
	check("Init", q.Init(1, all))
	check("Connect", q.Connect(&rdma.Route{Port: 1, MTU: 1024}))
	check("Fail", q.Fail())
	check("Reset", q.Reset())
	_, err = q.Post(make([]rdma.SendRequest, 1))
	check("Post", err)
	_, err = q.PostRecv(make([]rdma.RecvRequest, 1))
	check("PostRecv", err)
	check("Close of a queue pair", q.Close())
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	_, err = c.Poll(make([]rdma.Completion, 1))
	check("Poll", err)
	check("Arm", c.Arm())
	check("Close of a completion queue", c.Close())
	if q, err := r.NewQP(rdma.QPConfig{Send: c, Recv: c, SendDepth: 1, RecvDepth: 1}); err == nil {
		t.Errorf("a queue pair with a closed completion queue: %v", q)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	_, err = r.Port(1)
	check("Port", err)
	_, err = r.GIDs(1)
	check("GIDs", err)
	_, err = r.Register(mem.Host(make([]byte, 1), mem.Anywhere), all)
	check("Register", err)
	_, err = r.NewCQ(1, nil)
	check("NewCQ", err)
	check("Close of a device", r.Close())
}

// states: a queue pair goes from Reset by Init and Connect to Ready, and from any state to Failed.
func states(t *testing.T, s Subject) {
	r := newRig(t, s)
	a, b := r.pair(rdma.QPConfig{})
	m := r.memory(8, 0, all)
	invalid := func(what string, n int, err error) {
		t.Helper()
		if n != 0 || !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%s: %d, %v; want 0, %v", what, n, err, syscall.EINVAL)
		}
	}
	a.reaches(rdma.StateReset)
	n, err := a.PostRecv([]rdma.RecvRequest{{ID: 1, Segments: m.segs()}})
	invalid("a receive before Init", n, err)
	invalid("Connect before Init", 0, a.Connect(r.route(a, b, nil)))
	invalid("Init at port 0", 0, a.Init(0, all))
	invalid("Init at port 77", 0, a.Init(77, all))
	invalid("Init at port 257", 0, a.Init(257, all))
	if err := a.Init(1, all); err != nil {
		t.Fatal(err)
	}
	a.reaches(rdma.StateInit)
	invalid("Init twice", 0, a.Init(1, all))
	a.receive(rdma.RecvRequest{ID: 2, Segments: m.segs()})
	n, err = a.Post([]rdma.SendRequest{sendOf(3, m)})
	invalid("a request before Connect", n, err)
	for name, change := range map[string]func(*rdma.Route){
		"MTU 0":              func(o *rdma.Route) { o.MTU = 0 },
		"MTU 1000":           func(o *rdma.Route) { o.MTU = 1000 },
		"another port":       func(o *rdma.Route) { o.Port = 257 },
		"a PSN of 25 bits":   func(o *rdma.Route) { o.PSN = 1 << 24 },
		"8 retries":          func(o *rdma.Route) { o.Retries = 8 },
		"8 retries of RNR":   func(o *rdma.Route) { o.RNRRetries = 8 },
		"service level 16":   func(o *rdma.Route) { o.ServiceLevel = 16 },
		"an absent address":  func(o *rdma.Route) { o.GIDIndex = 250 },
		"an address of 1000": func(o *rdma.Route) { o.GIDIndex = 1000 },
	} {
		a, b := r.pair(rdma.QPConfig{})
		if err := a.Init(1, all); err != nil {
			t.Fatal(err)
		}
		if _, ok := errors.AsType[*rdma.Error](a.Connect(r.route(a, b, change))); !ok {
			t.Errorf("connect with %s: no *rdma.Error", name)
		}
	}
	if err := a.Connect(r.route(a, b, nil)); err != nil {
		t.Fatal(err)
	}
	a.reaches(rdma.StateReady)
	invalid("Connect twice", 0, a.Connect(r.route(a, b, nil)))
	for range 2 {
		if err := a.Fail(); err != nil {
			t.Fatal(err)
		}
		a.reaches(rdma.StateFailed)
	}
	a.failed(2, rdma.Flushed)
	if s := a.State; r.Attributes().Quirks.NoReset {
		if err := a.Reset(); !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("reset: %v, want %v", err, errors.ErrUnsupported)
		}
		return
	} else if err := a.Reset(); err != nil {
		t.Fatal(err)
	} else if got, err := s(); got != rdma.StateReset || err != nil {
		t.Errorf("state after Reset: %v, %v", got, err)
	}
}

// limits: a queue pair and a completion queue have at least what was asked for.
func limits(t *testing.T, s Subject) {
	r := newRig(t, s)
	c := r.cq(100, nil)
	if c.Depth() < 100 {
		t.Errorf("depth %d, want 100", c.Depth())
	}
	cfg := rdma.QPConfig{Send: c, Recv: c, SendDepth: 33, RecvDepth: 17, Segments: 3, Inline: 50}
	q := r.qp(cfg)
	if l := q.Limits(); l.SendDepth < 33 || l.RecvDepth < 17 || l.SendSegments < 3 || l.RecvSegments < 3 ||
		l.Inline < 50 {
		t.Errorf("%+v, want at least %+v", l, cfg)
	}
	if other := r.qp(cfg); other.Number() == q.Number() {
		t.Errorf("two queue pairs have the number %d", q.Number())
	}
	a := r.Attributes()
	for name, change := range map[string]func(*rdma.QPConfig){
		"too many sends":      func(c *rdma.QPConfig) { c.SendDepth = a.MaxQPDepth + 1 },
		"too many receives":   func(c *rdma.QPConfig) { c.RecvDepth = a.MaxQPDepth + 1 },
		"too many segments":   func(c *rdma.QPConfig) { c.Segments = a.MaxSegments + 1 },
		"a negative depth":    func(c *rdma.QPConfig) { c.RecvDepth = -1 },
		"partition key 65536": func(c *rdma.QPConfig) { c.PKey = 1 << 16 },
		"no completion queue": func(c *rdma.QPConfig) { c.Send = nil },
	} {
		changed := cfg
		change(&changed)
		if q, err := r.NewQP(changed); !errors.Is(err, syscall.EINVAL) || q != nil {
			t.Errorf("%s: %v, %v; want %v", name, q, err, syscall.EINVAL)
		}
	}
	for _, depth := range []int{-1, 0, a.MaxCQDepth + 1} {
		if q, err := r.NewCQ(depth, nil); !errors.Is(err, syscall.EINVAL) || q != nil {
			t.Errorf("completion queue of %d: %v, %v; want %v", depth, q, err, syscall.EINVAL)
		}
	}
	if n, err := c.Poll(nil); n != 0 || err != nil {
		t.Errorf("poll into nothing: %d, %v", n, err)
	}
}

// portEvents: a port that goes down and comes back says so, and works with the address that it has
// then.
func portEvents(t *testing.T, s Subject) {
	if s.SetPort == nil {
		t.Log("this provider's ports cannot be taken down")
		return
	}
	r := newRig(t, s)
	s.SetPort(t, false)
	up := false
	t.Cleanup(func() {
		if !up {
			s.SetPort(t, true)
		}
	})
	if e := r.event(rdma.PortLost); e.Port != 1 {
		t.Errorf("%+v", e)
	}
	if p, err := r.Port(1); err != nil || p.State == rdma.PortActive {
		t.Errorf("a port that is down: %+v, %v", p, err)
	}
	s.SetPort(t, true)
	up = true
	if e := r.event(rdma.PortUp); e.Port != 1 {
		t.Errorf("%+v", e)
	}
	for late := time.Now().Add(patience); ; {
		p, err := r.Port(1)
		gids, err2 := r.GIDs(1)
		if err == nil && err2 == nil && p.State == rdma.PortActive {
			if g, err := rdma.ChooseGID(gids, ""); err == nil && g.GID.Addr().IsGlobalUnicast() {
				break
			}
		}
		if time.Now().After(late) {
			t.Fatalf("the port came back as %+v (%v) with %v (%v)", p, err, gids, err2)
		}
	}
	a, b := r.connected(rdma.QPConfig{}, nil)
	src, dst := r.memory(64, 0, all), r.memory(64, 0, all)
	src.fill(1)
	a.post(writeOf(1, src, dst, 0))
	a.done(1, rdma.Write)
	same(t, "after the port came back", dst.b, src.b)
	_ = b
}

// removalWakes: the removal of the device wakes who waits for completions, whether requests are
// posted or not.
func removalWakes(t *testing.T, s Subject) {
	if s.Remove == nil {
		t.Log("this provider's devices cannot be removed")
		return
	}
	r := newRig(t, s)
	var bells [3]*bell
	var queues [3]rdma.CQ
	for i := range queues {
		bells[i] = newBell()
		queues[i] = r.cq(8, bells[i].ring)
	}
	for i, c := range queues[1:] { // queues[0] has no queue pair
		q := r.qp(rdma.QPConfig{Send: c, Recv: c, SendDepth: 1, RecvDepth: 1})
		r.join(q, q, all, nil)
		if i == 0 { // that of the other one has no request
			if _, err := q.PostRecv([]rdma.RecvRequest{{ID: 1}}); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, c := range queues {
		if err := c.Arm(); err != nil {
			t.Fatal(err)
		}
	}
	s.Remove(t)
	for i, b := range bells {
		if err := b.wait(); err != nil {
			t.Errorf("queue %d: %v", i, err)
		}
	}
	if _, err := queues[0].Poll(make([]rdma.Completion, 1)); !errors.Is(err, rdma.ErrRemoved) {
		t.Errorf("poll after the removal: %v", err)
	}
}
