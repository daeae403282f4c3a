//go:build linux

package netns

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"tutti/bootstrap"
	"tutti/endpoint"
	"tutti/internal/proctest"
	"tutti/mem"
	"tutti/tests/internal/rig"
)

// order is what the test has an endpoint do.
type order struct {
	Verb    string // open, connect, work, close
	Secret  string // of open
	Seal    bool
	Info    string // of connect: the other endpoint
	Rounds  int    // of work
	Step    int    // there is an answer to work after so many rounds; 0: only at the end
	Seed    uint64
	Timeout time.Duration // of each operation
}

// answer is what it says to that.
type answer struct {
	Info  string
	Round int // of work; 0: its last answer
	Fault string
	Lost  bool // Fault is a timeout, or a lost connection
}

// slot is the bytes that each round writes; a region has room for some.
const (
	slot  = 20 << 10
	slots = 16
)

// remote is an endpoint in a process of its own: its side of the orders.
type remote struct {
	e    *endpoint.Endpoint
	peer *endpoint.Peer
	out  *json.Encoder
	mine []byte // the region "w", which the other end writes
}

// endpointMain is the rig.Part of this package.
func endpointMain(out *json.Encoder, in *json.Decoder) int {
	x := &remote{out: out}
	for {
		var o order
		if in.Decode(&o) != nil {
			return 1 // the test is over
		}
		var a answer
		if err := x.obey(o, &a); err != nil {
			a.Fault = err.Error()
			a.Lost = errors.Is(err, context.DeadlineExceeded) || errors.Is(err, endpoint.ErrBroken)
		}
		out.Encode(a)
		if o.Verb == "close" {
			return 0
		}
	}
}

func (x *remote) obey(o order, a *answer) error {
	ctx, cancel := context.WithTimeout(context.Background(), rig.Patience)
	defer cancel()
	switch o.Verb {
	case "open":
		c, err := endpoint.NewContext(endpoint.ContextConfig{})
		if err != nil {
			return err
		}
		x.e, err = endpoint.New(c, endpoint.Config{Secret: o.Secret, Seal: o.Seal, Conns: 2, Interfaces: "data",
			Timeout: rig.Patience})
		if err != nil {
			return err
		}
		x.mine = make([]byte, slots*slot)
		if _, err = x.e.Register("w", mem.Host(x.mine, mem.Anywhere),
			endpoint.RegionConfig{Rights: endpoint.Read | endpoint.Write}); err != nil {
			return err
		}
		_, err = x.e.Register("r", mem.Host(noise(1<<20, 1), mem.Anywhere), endpoint.RegionConfig{})
		a.Info = x.e.Info().String()
		return err
	case "connect":
		info, err := endpoint.ParseInfo(o.Info)
		if err == nil {
			x.peer, err = x.e.Connect(ctx, info)
		}
		return err
	case "work":
		return x.work(o)
	case "close":
		return x.e.Close()
	}
	return fmt.Errorf("unknown order %q", o.Verb)
}

// noise is n bytes that are the same for the same seed.
func noise(n int, seed uint64) []byte {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), byte(seed >> 16)})
	r.Read(b)
	return b
}

// work does rounds of operations of every kind with the peer, which does the same at the same time.
func (x *remote) work(o order) error {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	var err, came error
	wg.Go(func() { came = x.receive(ctx, o) })
	src := noise(1<<20, 1)
	for i := range o.Rounds {
		seed := o.Seed + uint64(i)
		want, got := noise(slot, seed), make([]byte, slot)
		read := make([]byte, []int{1, 1000, 50_000, 300_000}[i%4])
		from := i % 500 * 1000
		ops := []endpoint.Op{
			{Kind: endpoint.OpWrite, Local: mem.Host(want, mem.Anywhere), Region: "w", Offset: int64(i % slots * slot)},
			{Kind: endpoint.OpRead, Local: mem.Host(read, mem.Anywhere), Region: "r", Offset: int64(from)},
			{Kind: endpoint.OpSend, Local: mem.Host(message(seed), mem.Anywhere)},
		}
		for k := range ops {
			ops[k].Timeout = o.Timeout
		}
		if err = x.peer.Batch(ops).Wait(context.Background()); err != nil {
			break
		}
		back := endpoint.Op{Kind: endpoint.OpRead, Local: mem.Host(got, mem.Anywhere), Region: "w",
			Offset:  ops[0].Offset,
			Timeout: o.Timeout}
		if err = x.peer.Start(back).Wait(context.Background()); err != nil {
			break
		}
		if !bytes.Equal(got, want) || !bytes.Equal(read, src[from:][:len(read)]) {
			err = errors.New("a read found other bytes than it should have")
			break
		}
		if o.Step > 0 && (i+1)%o.Step == 0 {
			x.out.Encode(answer{Round: i + 1})
		}
	}
	if err != nil {
		cancel()
	}
	wg.Wait()
	cancel()
	return errors.Join(err, came)
}

// message is a message of some length, which begins with its seed.
func message(seed uint64) []byte {
	return append(binary.LittleEndian.AppendUint64(nil, seed), noise(int(seed%1000)*100, seed)...)
}

// receive receives the peer's messages, behind what is left of earlier work.
func (x *remote) receive(ctx context.Context, o order) error {
	buf := make([]byte, 1<<20)
	for i := 0; i < o.Rounds; {
		f := x.peer.Start(endpoint.Op{Kind: endpoint.OpRecv, Local: mem.Host(buf, mem.Anywhere), Timeout: o.Timeout})
		err := f.Wait(ctx)
		if errors.Is(err, endpoint.ErrCancelled) && ctx.Err() == nil { // the peer gave up a send of earlier work
			continue
		}
		if err != nil {
			return err
		}
		got, seed := buf[:f.Result(0).N], o.Seed+uint64(i)
		switch {
		case bytes.Equal(got, message(seed)):
			i++
		case len(got) < 8 || binary.LittleEndian.Uint64(got) >= o.Seed:
			return fmt.Errorf("message %d is another one, of %d bytes", i, len(got))
		}
	}
	return nil
}

// far is an endpoint in a process of its own: the test's side.
type far struct {
	t    *testing.T
	conn net.Conn
	in   *json.Decoder
	proc *proctest.Child
}

func (f *far) tell(o order) {
	f.t.Helper()
	f.conn.SetWriteDeadline(time.Now().Add(rig.Patience))
	if err := json.NewEncoder(f.conn).Encode(o); err != nil {
		f.t.Fatal(err)
	}
}

func (f *far) hear() (a answer) {
	f.t.Helper()
	f.conn.SetReadDeadline(time.Now().Add(2 * rig.Patience)) // operations give up before that
	if err := f.in.Decode(&a); err != nil {
		f.t.Fatalf("an endpoint does not answer: %v", err)
	}
	return a
}

// do is tell and hear, without a fault.
func (f *far) do(o order) answer {
	f.t.Helper()
	f.tell(o)
	a := f.hear()
	if a.Fault != "" {
		f.t.Fatalf("%s: %s", o.Verb, a.Fault)
	}
	return a
}

// worked hears answers to work: of so many rounds, or 0: until the last one, which it returns.
func (f *far) worked(rounds int) (a answer) {
	f.t.Helper()
	for {
		if a = f.hear(); a.Round == 0 || a.Round == rounds {
			return a
		}
	}
}

// endpoints starts an endpoint on each host, and connects the first to the second, which connects
// back to the address that it is told.
func endpoints(t *testing.T, a, b *rig.Host, seal bool) (ends [2]*far) {
	t.Helper()
	s := rig.New(t)
	secret := bootstrap.NewSecret()
	var infos [2]string
	for i, h := range []*rig.Host{a, b} {
		p := s.StartIn(h.Enter(), []string{fmt.Sprint("RANK=", i)}, proctest.Self())
		conn, in := s.Next().Play()
		ends[i] = &far{t, conn, in, p}
		infos[i] = ends[i].do(order{Verb: "open", Secret: secret, Seal: seal && i == 0}).Info
	}
	for i, f := range ends {
		f.do(order{Verb: "connect", Info: infos[1-i]})
	}
	return ends
}

// both has the ends work.
func both(ends [2]*far, o order) {
	for _, f := range ends {
		f.t.Helper()
		f.tell(o)
	}
}

func finish(ends [2]*far) {
	for _, f := range ends {
		f.t.Helper()
		f.do(order{Verb: "close"})
		f.proc.End(0)
	}
}

// modes runs a test with plain connections and with sealed ones.
func modes(t *testing.T, test func(t *testing.T, seal bool)) {
	for _, seal := range []bool{false, true} {
		t.Run(map[bool]string{false: "plain", true: "sealed"}[seal], func(t *testing.T) {
			t.Parallel()
			test(t, seal)
		})
	}
}

// TestEndpointsOverASlowLink: operations between two hosts whose link is slow, loses frames and has
// others arrive out of order.
func TestEndpointsOverASlowLink(t *testing.T) {
	const rounds = 24
	run := func(t *testing.T, a, b *rig.Host, seal bool) {
		ends := endpoints(t, a, b, seal)
		both(ends, order{Verb: "work", Rounds: rounds, Seed: 1, Timeout: rig.Patience})
		for i, f := range ends {
			if last := f.worked(0); last.Fault != "" {
				t.Errorf("endpoint %d: %s", i, last.Fault)
			}
		}
		finish(ends)
	}
	modes(t, func(t *testing.T, seal bool) {
		t.Run("netem", func(t *testing.T) {
			t.Parallel()
			a, b := pair(t)
			for _, h := range []*rig.Host{a, b} {
				if !h.Netem("data", "delay", "20ms", "3ms", "loss", "2%", "reorder", "5%") {
					t.Log("this kernel has no sch_netem: the cable beside this test does what it would have done")
					return
				}
			}
			run(t, a, b, seal)
		})
		t.Run("cable", func(t *testing.T) {
			t.Parallel()
			a, b := hosts(t)
			lost := rig.SlowCable(a, b, "data", 20*time.Millisecond, 0.02, 0.05)
			a.Address("data", "10.77.1.1/24")
			b.Address("data", "10.77.1.2/24")
			run(t, a, b, seal)
			if lost.Load() == 0 {
				t.Error("the cable lost no frame")
			}
		})
	})
}

// TestEndpointsSurvivePulledCable: operations outlast a link that is down for less than their
// timeout. Otherwise they end with an error, and the endpoints work again when the link is back.
func TestEndpointsSurvivePulledCable(t *testing.T) {
	t.Run("and put back", func(t *testing.T) {
		modes(t, func(t *testing.T, seal bool) {
			a, b := pair(t)
			ends := endpoints(t, a, b, seal)
			const step, times = 200, 3
			both(ends, order{Verb: "work", Rounds: (times + 1) * step, Step: step, Seed: 1, Timeout: rig.Patience})
			for i := range times {
				if last := ends[0].worked((i + 1) * step); last.Fault != "" {
					t.Fatal(last.Fault)
				}
				a.IP("link", "set", "data", "down")
				time.Sleep(time.Second) // what the link is down
				a.IP("link", "set", "data", "up")
			}
			for i, f := range ends {
				if last := f.worked(0); last.Fault != "" {
					t.Errorf("endpoint %d: %s", i, last.Fault)
				}
			}
			finish(ends)
		})
	})
	t.Run("for too long", func(t *testing.T) {
		modes(t, func(t *testing.T, seal bool) {
			a, b := pair(t)
			ends := endpoints(t, a, b, seal)
			both(ends, order{Verb: "work", Rounds: 1_000_000, Step: 1000, Seed: 1, Timeout: 6 * time.Second})
			ends[0].worked(1000)
			a.IP("link", "set", "data", "down")
			for i, f := range ends {
				if last := f.worked(0); !last.Lost || !strings.Contains(last.Fault, "endpoint") {
					t.Errorf("endpoint %d: %q, want a timeout or a lost connection", i, last.Fault)
				}
			}
			a.IP("link", "set", "data", "up")
			both(ends, order{Verb: "work", Rounds: 20, Seed: 2_000_000, Timeout: rig.Patience})
			for i, f := range ends {
				if last := f.worked(0); last.Fault != "" {
					t.Errorf("endpoint %d, when the link is back: %s", i, last.Fault)
				}
			}
			finish(ends)
		})
	})
}
