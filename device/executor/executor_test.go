package executor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"tutti/collectives"
	"tutti/device"
	"tutti/device/devicetest"
	"tutti/internal/leaktest"
	"tutti/kernels"
	"tutti/mem"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// A node is one rank of a test: its device, its memories, its end of the network.
type node struct {
	net     *network
	i       int
	harness devicetest.Harness
	plan    *collectives.Plan
	base    [2][]int // where the parts of In and Out begin
	mem     [3]mem.Memory
	done    []int // steps that have completed, for Poll
}

// A network moves data between nodes in one process, late and in any order that an Exchange allows.
type network struct {
	mu    sync.Mutex
	rng   *rand.Rand
	nodes []*node
	links map[[2]int]*link
	ways  []*link
	puts  []*put
	err   error
}

type link struct {
	from, to *node
	sends    []message // begun, in order
	recvs    []message
	counter  int // of from at to
	waits    []message
	waited   int
}

// message is a Send, a Recv or a WaitSignal. got: a Send whose data was read.
type message struct {
	step int
	mem  mem.Memory
	got  []byte
}

type put struct {
	from *node
	step int
	dst  mem.Memory
	at   *node
	src  mem.Memory
}

func (n *network) link(from, to *node) *link {
	k := [2]int{from.i, to.i}
	if n.links[k] == nil {
		n.links[k] = &link{from: from, to: to}
		n.ways = append(n.ways, n.links[k])
	}
	return n.links[k]
}

func (n *node) peer(slot int) *node {
	return n.net.nodes[slices.Index(n.plan.Shape.Active, slot)]
}

// at resolves a range of this node's memories, or of a peer's.
func (n *node) at(r collectives.Ref) mem.Memory {
	if r.Len == 0 {
		return mem.Memory{}
	}
	if r.Buf.Remote() {
		owner := n.peer(int(r.Peer))
		r.Buf, r.Peer = r.Buf-collectives.PeerIn, 0
		return owner.at(r)
	}
	off := r.Off
	if r.Buf != collectives.Tmp {
		off += n.base[r.Buf][r.Part]
	}
	return n.mem[r.Buf].Slice(off, r.Len)
}

func (n *node) Send(step, peer int, src mem.Memory) {
	n.net.mu.Lock()
	defer n.net.mu.Unlock()
	l := n.net.link(n, n.peer(peer))
	l.sends = append(l.sends, message{step: step, mem: src})
}

func (n *node) Recv(step, peer int, dst mem.Memory) {
	n.net.mu.Lock()
	defer n.net.mu.Unlock()
	if dst.Len() > 0 {
		n.spoil(dst)
	}
	l := n.net.link(n.peer(peer), n)
	l.recvs = append(l.recvs, message{step: step, mem: dst})
}

func (n *node) spoil(m mem.Memory) {
	for i, b := 0, n.harness.Bytes(m); i < len(b); i++ {
		b[i] = byte(n.net.rng.Uint32())
	}
}

func (n *node) Put(step int, dst collectives.Ref, src mem.Memory) {
	n.net.mu.Lock()
	defer n.net.mu.Unlock()
	owner := n.peer(int(dst.Peer))
	to := n.at(dst)
	owner.spoil(to)
	n.net.puts = append(n.net.puts, &put{n, step, to, owner, src})
}

func (n *node) Signal(peer int) {
	n.net.mu.Lock()
	defer n.net.mu.Unlock()
	n.net.link(n, n.peer(peer)).counter++
}

func (n *node) WaitSignal(step, peer int) {
	n.net.mu.Lock()
	defer n.net.mu.Unlock()
	l := n.net.link(n.peer(peer), n)
	l.waits = append(l.waits, message{step: step})
}

func (n *node) Poll(done func(step int)) (bool, error) {
	n.net.mu.Lock()
	defer n.net.mu.Unlock()
	for range 1 + n.net.rng.IntN(4) {
		n.net.step()
	}
	ended := n.done
	n.done = nil
	for _, s := range ended {
		done(s)
	}
	return len(ended) > 0, n.net.err
}

func (n *node) Cancel() {
	n.net.mu.Lock()
	defer n.net.mu.Unlock()
	for _, l := range n.net.ways {
		if l.to == n {
			l.recvs, l.waits = nil, nil
		}
		if l.from == n {
			l.sends = slices.DeleteFunc(l.sends, func(m message) bool { return m.got == nil })
		}
	}
	n.net.puts = slices.DeleteFunc(n.net.puts, func(p *put) bool { return p.from == n || p.at == n })
	n.done = nil
}

// step moves something, if it finds anything.
func (n *network) step() {
	if k := len(n.puts); k > 0 && n.rng.IntN(2) == 0 {
		i := n.rng.IntN(k)
		p := n.puts[i]
		n.puts = append(n.puts[:i], n.puts[i+1:]...)
		copy(p.at.harness.Bytes(p.dst), p.from.harness.Bytes(p.src))
		p.from.done = append(p.from.done, p.step)
	}
	if len(n.ways) == 0 {
		return
	}
	for i, start := 0, n.rng.IntN(len(n.ways)); i < len(n.ways); i++ {
		l := n.ways[(start+i)%len(n.ways)]
		if len(l.waits) > 0 && l.counter > l.waited {
			l.waited++
			l.to.done = append(l.to.done, l.waits[0].step)
			l.waits = l.waits[1:]
			return
		}
		for j := range l.sends { // a Send may complete before its Recv is posted
			if m := &l.sends[j]; m.got == nil && n.rng.IntN(3) == 0 {
				m.got = []byte{}
				if m.mem.Len() > 0 {
					m.got = bytes.Clone(l.from.harness.Bytes(m.mem))
				}
				l.from.done = append(l.from.done, m.step)
				return
			}
		}
		if len(l.recvs) > 0 && len(l.sends) > 0 && l.sends[0].got != nil && n.rng.IntN(2) == 0 {
			m, r := l.sends[0], l.recvs[0]
			l.sends, l.recvs = l.sends[1:], l.recvs[1:]
			if len(m.got) != r.mem.Len() {
				n.err = fmt.Errorf("a message of %d bytes for a receive of %d", len(m.got), r.mem.Len())
				return
			}
			if r.mem.Len() > 0 {
				copy(l.to.harness.Bytes(r.mem), m.got)
			}
			l.to.done = append(l.to.done, r.step)
			return
		}
	}
}

// A trial is a call of all ranks, on devices and, as its oracle, in the proof interpreter.
type trial struct {
	algo  collectives.Algo
	shape collectives.Shape
	op    kernels.Op
	dtype kernels.DType
	alias bool
	on    string // kind of the devices
	seed  uint64
}

func (c trial) String() string {
	s := c.shape
	return fmt.Sprintf("%v %v %v of %v, active %v of %d, root %d, count %d %v %v, chunk %d, hosts %v, alias %v, "+
		"on %s, seed %d", s.Kind, c.algo, c.op, c.dtype, s.Active, s.Size, s.Root, s.Count, s.Counts, s.RecvCounts,
		s.Chunk, s.Hosts, c.alias, c.on, c.seed)
}

// devices are the kinds of devices. A seed makes a device of its own, where there are any number.
var devices = map[string]func(t *testing.T, rank int, seed uint64) devicetest.Harness{
	"host": func(*testing.T, int, uint64) devicetest.Harness {
		return devicetest.Harness{Device: device.NewHost(), Bytes: mem.Memory.Bytes}
	},
	"late": func(_ *testing.T, _ int, seed uint64) devicetest.Harness {
		d := devicetest.NewLate("cuda:0", seed, 30*time.Microsecond)
		return devicetest.Harness{Device: d, Bytes: d.Bytes}
	},
}

// kinds returns the names of the kinds, sorted.
func kinds() []string { return slices.Sorted(maps.Keys(devices)) }

func sizes(s collectives.Shape, buf collectives.Buf) (base []int) {
	base = []int{0}
	for part := range s.Parts(buf, s.Rank) {
		base = append(base, base[part]+s.PartBytes(buf, s.Rank, part))
	}
	return base
}

// inside returns where in Out In is if both are one memory, or where in In Out is; ok: they can be.
func inside(s collectives.Shape, base [2][]int) (outer collectives.Buf, off int, ok bool) {
	in, out := base[0][len(base[0])-1], base[1][len(base[1])-1]
	switch s.Kind {
	case collectives.AllReduce, collectives.Reduce:
		return collectives.Out, 0, out > 0 && in == out
	case collectives.AllGather, collectives.AllGatherV, collectives.Gather:
		return collectives.Out, base[1][min(s.Rank, len(base[1])-1)], out > 0
	case collectives.Scatter:
		return collectives.In, base[0][min(s.Rank, len(base[0])-1)], s.Rank == s.Root && in > 0
	}
	return 0, 0, false
}

// run runs a trial and compares all ranks' results with the interpreter's.
func (c trial) run(t *testing.T) error {
	rng := rand.New(rand.NewPCG(c.seed, 3))
	net := &network{rng: rng, links: map[[2]int]*link{}}
	var plans []*collectives.Plan
	var oracle []collectives.Memory
	for i, slot := range c.shape.Active {
		s := c.shape
		s.Rank = slot
		if s.Kind == collectives.AllToAllV { // what i sends to j is as long as what j receives of it
			s.Counts, s.RecvCounts = make([]int, s.Size), make([]int, s.Size)
			for _, o := range s.Active {
				s.Counts[o], s.RecvCounts[o] = (slot*3+o)%5, (o*3+slot)%5
			}
		}
		plan, err := collectives.Build(c.algo, s)
		if err != nil {
			return err
		}
		n := &node{net: net, i: i, plan: plan}
		if i > 0 && plan.LoadStore { // peers' memory is loaded where it is: one device for all
			n.harness = net.nodes[0].harness
		} else {
			n.harness = devices[c.on](t, i, rng.Uint64())
		}
		n.base = [2][]int{sizes(s, collectives.In), sizes(s, collectives.Out)}
		var host collectives.Memory
		for b, to := range []*[]byte{&host.In, &host.Out} {
			*to = make([]byte, n.base[b][len(n.base[b])-1])
			for k := range *to {
				(*to)[k] = byte(rng.Uint32())
			}
			if c.dtype == kernels.Float32 { // small whole numbers: no NaN has to be compared
				for k := range *to {
					(*to)[k] = []byte{0, 0, 0x80 * byte(rng.Uint32()%2), 0x40}[k%4]
				}
			}
		}
		outer, off, can := inside(s, n.base)
		alias := c.alias && can
		if alias {
			if outer == collectives.Out {
				copy(host.Out[off:], host.In)
				host.In = host.Out[off : off+len(host.In) : off+len(host.In)]
			} else {
				host.Out = host.In[off : off+len(host.Out) : off+len(host.Out)]
			}
		}
		for b, from := range [][]byte{host.In, host.Out, make([]byte, plan.Tmp)} {
			if n.mem[b], err = n.harness.Device.Alloc(len(from)); err != nil {
				return err
			}
			if b < 2 {
				copy(n.harness.Bytes(n.mem[b]), from)
			}
		}
		if alias && outer == collectives.Out {
			n.mem[0] = n.mem[1].Slice(off, len(host.In))
		} else if alias {
			n.mem[1] = n.mem[0].Slice(off, len(host.Out))
		}
		net.nodes, plans, oracle = append(net.nodes, n), append(plans, plan), append(oracle, host)
	}
	if err := collectives.Interpret(plans, oracle, collectives.Schedule{Seed: c.seed, Late: c.seed%2 == 0,
		Fold: func(dst []byte, srcs [][]byte, final bool) {
			op, divisor := c.op, 0
			if op == kernels.Avg && len(srcs) != len(c.shape.Active) {
				if op = kernels.Sum; final {
					divisor = len(c.shape.Active)
				}
			}
			if err := devicetest.Fold(op, c.dtype, dst, srcs, divisor); err != nil {
				panic(err)
			}
		}}); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	errs := make([]error, len(plans))
	got := make([][]byte, len(plans))
	var wg sync.WaitGroup
	for i, n := range net.nodes {
		wg.Go(func() {
			s, err := n.harness.Device.Stream()
			if err != nil {
				errs[i] = err
				return
			}
			defer s.Close()
			p, err := New(n.harness.Device, n.plan)
			if err != nil {
				errs[i] = err
				return
			}
			defer p.Close()
			errs[i] = p.Run(ctx, Call{Stream: s, Exchange: n, At: n.at, Op: c.op, DType: c.dtype})
			if errs[i] != nil {
				return
			}
			net.mu.Lock() // the memory is the caller's again, and must not be accessed
			defer net.mu.Unlock()
			got[i] = bytes.Clone(n.harness.Bytes(n.mem[1]))
			for _, m := range n.mem {
				n.spoil(m)
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for i := range got {
		for k := range got[i] {
			if got[i][k] != oracle[i].Out[k] {
				return fmt.Errorf("rank %d: Out differs from byte %d of %d: %#x, want %#x\n%v", c.shape.Active[i], k,
					len(got[i]), got[i][k], oracle[i].Out[k], plans[i])
			}
		}
	}
	return nil
}

// Every plan, for up to eight ranks, has the interpreter's results on every kind of device.
func TestPlansOnStreams(t *testing.T) {
	for _, k := range collectives.Kinds() {
		for _, a := range collectives.Algorithms(k) {
			t.Run(k.String()+"/"+a.String(), func(t *testing.T) {
				t.Parallel()
				r := rand.New(rand.NewPCG(uint64(k), uint64(a)))
				tries := 6
				if testing.Short() {
					tries = 1
				}
				for n := 1; n <= 8; n++ {
					for range tries {
						c := trial{algo: a, op: kernels.Sum, dtype: kernels.Int64, alias: r.IntN(2) == 0,
							on: kinds()[r.IntN(len(devices))], seed: r.Uint64()}
						switch r.IntN(3) {
						case 0:
							c.op = kernels.Avg
						case 1:
							c.dtype = kernels.Float32
						}
						s := collectives.Shape{Kind: k, Elem: c.dtype.Size(), Size: n + r.IntN(3),
							Chunk: []int{0, 64, 128}[r.IntN(3)], Count: r.IntN(1 + []int{4, 40, 120}[r.IntN(3)])}
						s.Active = r.Perm(s.Size)[:n]
						slices.Sort(s.Active)
						s.Root = s.Active[r.IntN(n)]
						s.Counts = make([]int, s.Size)
						for i := range s.Counts {
							s.Counts[i] = r.IntN(9)
						}
						if a == collectives.Hierarchical {
							for i := range s.Active {
								s.Hosts = append(s.Hosts, i*(1+r.IntN(2))/3)
							}
						}
						c.shape = s
						if err := c.run(t); err != nil {
							t.Fatalf("%v\n%v", c, err)
						}
					}
				}
			})
		}
	}
}

// pair is two ranks of an allreduce of which the second never comes.
func pair(t *testing.T, on string) (*node, device.Stream) {
	t.Helper()
	net := &network{rng: rand.New(rand.NewPCG(1, 1)), links: map[[2]int]*link{}}
	for i := range 2 {
		plan, err := collectives.Build(collectives.TwoShot, collectives.Shape{Kind: collectives.AllReduce, Size: 2,
			Active: []int{0, 1}, Rank: i, Elem: 4, Count: 256, Chunk: 64})
		if err != nil {
			t.Fatal(err)
		}
		n := &node{net: net, i: i, plan: plan, base: [2][]int{{0, 1024}, {0, 1024}}}
		n.harness = devices[on](t, i, 1)
		for b, size := range []int{1024, 1024, plan.Tmp} {
			if n.mem[b], err = n.harness.Device.Alloc(size); err != nil {
				t.Fatal(err)
			}
		}
		net.nodes = append(net.nodes, n)
	}
	s, err := net.nodes[0].harness.Device.Stream()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return net.nodes[0], s
}

// A run whose peer does not come ends with its context, one whose network fails with the reason.
// Then nothing touches the memory any more, and the stream can be used again.
func TestFailedRunReleasesMemory(t *testing.T) {
	broken := errors.New("broken")
	for _, on := range kinds() {
		for _, want := range []error{context.DeadlineExceeded, broken} {
			n, s := pair(t, on)
			p, err := New(n.harness.Device, n.plan)
			if err != nil {
				t.Fatal(err)
			}
			for round := range 3 {
				if n.net.err = nil; want == broken {
					n.net.err = broken
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(1+round)*time.Millisecond)
				err := p.Run(ctx, Call{Stream: s, Exchange: n, At: n.at, Op: kernels.Sum, DType: kernels.Float32})
				cancel()
				if !errors.Is(err, want) {
					t.Fatalf("%s, round %d: %v, want %v", on, round, err, want)
				}
				var before [][]byte
				for _, m := range n.mem {
					before = append(before, bytes.Clone(n.harness.Bytes(m)))
				}
				e, err := s.Record()
				if err == nil {
					err = e.Wait(t.Context())
				}
				if err != nil {
					t.Fatalf("%s, round %d: the stream afterwards: %v", on, round, err)
				}
				for range 100 { // the network continues
					n.net.mu.Lock()
					n.net.step()
					n.net.mu.Unlock()
				}
				for b, m := range n.mem {
					if !bytes.Equal(n.harness.Bytes(m), before[b]) {
						t.Fatalf("%s, round %d: memory %d was written after the run had failed", on, round, b)
					}
				}
			}
			s.Close()
			err = p.Run(t.Context(), Call{Stream: s, Exchange: n, At: n.at, Op: kernels.Sum, DType: kernels.Float32})
			if !errors.Is(err, device.ErrClosed) {
				t.Errorf("a run on a stream that is closed: %v", err)
			}
			if err := p.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}
