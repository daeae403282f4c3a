package verbs

import (
	"context"
	"errors"
	"math"
	"runtime"
	"sync/atomic"
	"testing"

	"tutti/p2p"
	"tutti/p2p/linktest"
	"tutti/p2p/tcp"
	"tutti/rdma"
	"tutti/rdma/soft"
)

// stranger returns a node that knows the job's secret and speaks the protocol frame by frame.
func stranger(t *testing.T, rank int) *linktest.Node {
	t.Helper()
	cfg := tcp.Config{Interfaces: "127.0.0.1", MaxFrame: ringBytes(0) / 4, Plain: true}
	return linktest.Listen(t, tcp.New(cfg), linktest.NewHost(rank))
}

// frame returns a control frame.
func frame(kind uint8, gen uint64, payload []byte) control {
	return control{p2p.Header{Kind: kind, Service: service, Seq: gen, Len: uint32(len(payload))}, payload}
}

// with returns an encoded setup, of a queue pair that is not there, with one byte changed.
func with(at int, b byte) []byte {
	s := setup{ring: ringBytes(0), address: 1 << 20, key: 9,
		frames: path{link: rdma.RoCEv2, mtu: 1024, qp: 1 << 20, psn: 5, reads: 1},
		rails:  []path{{link: rdma.RoCEv2, mtu: 1024, qp: 1<<20 + 1, psn: 5, reads: 1}, {}}}
	e := s.encode()
	e[at] = b
	return e
}

// good is with without a change.
func good() []byte { return with(0, wireVersion) }

// fewer is good with one rail of two.
func fewer() []byte { return with(2, 1)[:setupHead+2*pathSize] }

// still fails the test unless frames pass both ways between a link and a stranger.
func still(t *testing.T, x, e *linktest.End) {
	t.Helper()
	for _, d := range [][2]*linktest.End{{x, e}, {e, x}} {
		h, p := linktest.Frame(1, 100, nil)
		if err := d[0].Put(&h, p); err != nil {
			t.Fatal(err)
		}
		for {
			got, b, err := d[1].Wait()
			if err != nil {
				t.Fatal(err)
			}
			if got.Service == service {
				continue
			}
			if err := linktest.Check(1, 100, got, b); err != nil {
				t.Fatal(err)
			}
			break
		}
	}
}

// idle fails the test unless the fabric has no objects.
func idle(t *testing.T, f *soft.Fabric) {
	t.Helper()
	if qps, cqs, mrs := f.Objects(); qps+cqs+mrs > 0 {
		t.Fatalf("%d queue pairs, %d completion queues and %d memory regions are left", qps, cqs, mrs)
	}
}

// What a dialler asks for ends its link, or is refused and frames go on over TCP; it costs nothing
// afterwards.
func TestHostileDialler(t *testing.T) {
	f := soft.New(soft.Config{Seed: 7})
	t.Cleanup(f.Close)
	n := linktest.Listen(t, New(over(f, 0)), linktest.NewHost(0))
	at, err := decodeEndpoint(n.Endpoint)
	if err != nil {
		t.Fatal(err)
	}
	const rail = setupHead + pathSize // where the first one is in a setup
	proposal := func(b []byte) []control { return []control{frame(frameProposal, 1, b)} }
	// What comes too soon for a lane is right if that has failed by then, so it comes for many.
	hasty := func(kinds ...uint8) (all []control) {
		for gen := range uint64(20) {
			all = append(all, frame(frameProposal, gen+1, good()))
			for _, kind := range kinds {
				all = append(all, frame(kind, gen+1, nil))
			}
		}
		return all
	}
	for name, c := range map[string]struct {
		frames []control
		want   string // the text of the violation, "" if the link goes on
	}{
		"wrong end":        {[]control{frame(frameAcceptance, 1, good())}, "wrong end"},
		"unknown kind":     {append(proposal(good()), frame(200, 1, nil)), "kind 200"},
		"unknown lane":     {[]control{frame(frameReady, 9, nil)}, "lane 9 after 0"},
		"lane 0":           {[]control{frame(frameProposal, 0, good())}, "lane 0 after 0"},
		"empty":            {proposal(nil), "at least 16"},
		"short":            {proposal(good()[:len(good())-1]), "2 rails"},
		"more rails":       {proposal(with(2, 3)), "3 rails"},
		"too many rails":   {proposal(with(2, maxRails+1)), "at most 16"},
		"no rails":         {proposal(with(2, 0)[:setupHead+pathSize]), "0 rails"},
		"long":             {proposal(make([]byte, maxText+1)), "at most 1024"},
		"another version":  {proposal(with(0, 9)), "format 9"},
		"reserved":         {proposal(with(3, 1)), "rails"},
		"protocol":         {proposal(with(setupHead, 77)), "protocol 77"},
		"MTU":              {proposal(with(setupHead+1, 255)), "MTU code 255"},
		"no reads":         {proposal(with(setupHead+2, 0)), "0 reads"},
		"huge ring":        {proposal(with(1, 31)), "a ring of"},
		"tiny ring":        {proposal(with(1, 0)), "a ring of"},
		"ring code":        {proposal(with(1, 200)), "ring code 200"},
		"queue pair":       {proposal(with(setupHead+7, 0xff)), "path of frames: queue pair"},
		"other queue pair": {proposal(with(rail+7, 0xff)), "rail 0: queue pair"},
		"rail":             {proposal(with(rail+14, 2)), "rail 0"},
		"unused rail":      {proposal(with(rail+pathSize+16, 1)), "rail 1"},
		"memory too soon":  {hasty(frameClaim), " in stage"},
		"no lane's memory": {[]control{frame(frameClaim, 1, nil)}, "lane 1 after 0"},
		"address":          {proposal(with(8, 1)), "address"},
		"two at once":      {hasty(), " is not in use"},
		// The first one may come when the lane is accepted already.
		"ready too soon":   {hasty(frameReady, frameReady), " after 0 in stage"},
		"another ring":     {proposal(with(1, 16)), ""},
		"InfiniBand":       {proposal(with(setupHead, byte(rdma.InfiniBand))), ""},
		"InfiniBand data":  {proposal(with(rail, byte(rdma.InfiniBand))), ""},
		"any port":         {proposal(with(rail+3, 255)), ""},
		"given up at once": {append(proposal(good()), frame(frameDown, 1, nil)), ""},
		"no queue pair":    {proposal(good()), ""},
	} {
		t.Run(name, func(t *testing.T) {
			x := stranger(t, 1)
			ctx, cancel := context.WithTimeout(t.Context(), linktest.Patience)
			defer cancel()
			l, err := x.T.Dial(ctx, n.ID, at.tcp)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			e := &linktest.End{Link: l, Host: x.Host}
			for _, c := range c.frames {
				if err := e.Put(&c.h, c.payload); err != nil {
					t.Fatal(err)
				}
			}
			b := &linktest.End{Link: n.Next(t).Link, Host: n.Host}
			defer b.Close()
			if c.want == "" {
				still(t, e, b)
			} else {
				ends(t, b, p2p.ErrProtocol, c.want, "rank 1")
			}
			b.Close()
			idle(t, f)
		})
	}
}

// Frames over TCP while the ring carries them end the link.
func TestFramesBesideTheRing(t *testing.T) {
	f := soft.New(soft.Config{Seed: 12})
	t.Cleanup(f.Close)
	a, b := pair(t, f)
	raised(t, a, b)
	l := inner(b)
	l.mu.Lock()
	l.out = append(l.out, control{h: p2p.Header{Kind: 3}})
	l.pumpLocked()
	l.mu.Unlock()
	ends(t, a, p2p.ErrProtocol, "beside the ring", "rank 1")
}

// Whatever answers a proposal, the dialler goes on over TCP or ends the link.
func TestHostileAcceptor(t *testing.T) {
	f := soft.New(soft.Config{Seed: 8})
	t.Cleanup(f.Close)
	n := linktest.Listen(t, New(over(f, 0)), linktest.NewHost(0))
	for name, c := range map[string]struct {
		answer []control
		want   string // the text of the violation, "" if the link goes on
	}{
		"wrong end":      {[]control{frame(frameProposal, 2, good())}, "wrong end"},
		"empty":          {[]control{frame(frameAcceptance, 1, nil)}, "at least 16"},
		"another lane":   {[]control{frame(frameAcceptance, 1<<40, good())}, "about lane"},
		"ready":          {[]control{frame(frameReady, 1, nil)}, "lane 1 after 0 in stage"},
		"long text":      {[]control{frame(frameRefusal, 1, make([]byte, maxText+1))}, "at most 1024"},
		"another ring":   {[]control{frame(frameAcceptance, 1, with(1, 16))}, ""},
		"other protocol": {[]control{frame(frameAcceptance, 1, with(setupHead, byte(rdma.InfiniBand)))}, ""},
		"fewer rails":    {[]control{frame(frameAcceptance, 1, fewer())}, ""},
		"refusal":        {[]control{frame(frameRefusal, 1, []byte("\x00no\n"))}, ""},
		"given up":       {[]control{frame(frameDown, 1, nil)}, ""},
		"given up twice": {[]control{frame(frameDown, 1, nil), frame(frameDown, 1, nil)}, ""},
		"no queue pair":  {[]control{frame(frameAcceptance, 1, good())}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			x := stranger(t, 1)
			ctx, cancel := context.WithTimeout(t.Context(), linktest.Patience)
			defer cancel()
			l, err := n.T.Dial(ctx, x.ID, endpoint{1 << rdma.RoCEv2, x.Endpoint}.encode())
			if err != nil {
				t.Fatal(err)
			}
			a := &linktest.End{Link: l, Host: n.Host}
			defer a.Close()
			e := &linktest.End{Link: x.Next(t).Link, Host: x.Host}
			defer e.Close()
			for asked := false; !asked; {
				if h, _, err := a.Recv(); h != nil || err != nil {
					t.Fatal(h, err)
				}
				h, b, ok, err := e.Take()
				if err != nil {
					t.Fatal(err)
				}
				if asked = ok; ok && (h.Kind != frameProposal || h.Seq != 1 || len(b) != len(good())) {
					t.Fatal(h, b)
				}
				runtime.Gosched()
			}
			for _, c := range c.answer {
				if err := e.Put(&c.h, c.payload); err != nil {
					t.Fatal(err)
				}
			}
			if c.want == "" {
				still(t, e, a)
			} else {
				ends(t, a, p2p.ErrProtocol, c.want, "rank 1")
			}
			a.Close()
			idle(t, f)
		})
	}
}

// A peer that says that it has taken frames which were not sent, or a part of one, ends the link.
func TestHostilePosition(t *testing.T) {
	for name, c := range map[string]struct {
		pos, seq uint64
		want     string
	}{
		"beyond the end": {1 << 40, 1, "it has taken"},
		"within a frame": {unit, 1, "it has taken"},
		"another number": {0, 7, "it has taken"},
		"within a unit":  {unit + 1, 1, "it has taken"},
	} {
		t.Run(name, func(t *testing.T) {
			f := soft.New(soft.Config{Seed: 11})
			t.Cleanup(f.Close)
			a, b := pair(t, f)
			raised(t, a, b)
			for i := range 3 {
				h, p := linktest.Frame(i, 1000, nil)
				if ok, err := a.Send(&h, p); !ok || err != nil {
					t.Fatal(ok, err)
				}
			}
			l := inner(b)
			l.mu.Lock()
			l.out = append(l.out, control{h: p2p.Header{Kind: frameDown, Service: service, Seq: l.m.gen, Off: c.pos,
				Count: c.seq}})
			l.pumpLocked()
			l.mu.Unlock()
			ends(t, a, p2p.ErrProtocol, c.want, "rank 1")
		})
	}
}

// FuzzRing: whatever is in a ring, the consumer takes only frames that lie in it.
func FuzzRing(f *testing.F) {
	whole := producer{data: make([]byte, minRing)}
	whole.compose(&p2p.Header{Kind: 1, Len: 3}, []byte("abc"))
	f.Add(whole.data[minRing-2*unit:], uint64(1), uint64(0))
	f.Add([]byte{6}, uint64(1), uint64(unit))
	f.Fuzz(func(t *testing.T, end []byte, seq, units uint64) {
		c := consumer{data: make([]byte, minRing), seq: max(seq%(1<<60), 1), pos: units % (1 << 40) * unit}
		off := offset(c.pos, minRing)
		// The bytes before the place of the commit word, which has the expected number sometimes.
		n := min(len(end), int(off))
		copy(c.data[int(off)-n:off], end[len(end)-n:])
		if len(end)%2 == 1 {
			atomic.StoreUint64(word(c.data, off), commitWord(c.seq, uint64(end[0]&3)))
		}
		for range minRing / unit {
			begin := c.pos
			if err := c.next(); err != nil {
				if !errors.Is(err, p2p.ErrProtocol) {
					t.Fatal(err)
				}
				return
			}
			if n := len(c.payload); n != int(c.hdr.Len) || n > maxFrame(minRing) || cap(c.payload) != n {
				t.Fatalf("payload of %d bytes for %+v", len(c.payload), c.hdr)
			}
			c.release()
			moved := c.pos - begin
			if moved == 0 || moved > minRing+minRing/4 || c.pos%unit != 0 || c.untold > math.MaxInt64 {
				t.Fatalf("the position moved by %d to %d", moved, c.pos)
			}
		}
	})
}

// FuzzEndpoint: what is accepted is what encode writes.
func FuzzEndpoint(f *testing.F) {
	f.Add(endpoint{1<<rdma.RoCEv2 | 1<<rdma.InfiniBand, []byte("tcp")}.encode())
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		if e, err := decodeEndpoint(b); err == nil && string(e.encode()) != string(b) {
			t.Fatalf("%x is accepted as %+v", b, e)
		}
	})
}
