package verbs

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"tutti/mem"
	"tutti/p2p"
	"tutti/p2p/linktest"
	"tutti/rdma/soft"
)

// Sizes of a program's windows: slots, each of which one put or get at a time uses.
const (
	programSlots = 4
	slotBytes    = 300_000
)

// program is a random program of two sides: each puts to, gets from and signals windows of the
// other one, which withdraws them under way and exposes them again.
type program struct {
	t     *testing.T
	r     *rand.Rand
	sides [2]*linktest.Side
	wins  []*testWindow
	ops   []*testOp
	count map[string]int
}

// testWindow is memory of a side. The other side uses it.
type testWindow struct {
	owner   int
	region  *mem.Region
	words   *mem.Region
	flag    *mem.Remote
	to      *mem.Remote // nil: it is withdrawn
	slots   [programSlots]testSlot
	content []byte // since Withdraw
}

type testSlot struct {
	busy   bool
	known  []byte // what is there, nil: not known
	signal uint64 // the latest
}

// testOp is an operation under way.
type testOp struct {
	side, slot int
	id         uint64
	win        *testWindow
	get        bool
	cancelled  bool
	withdrawn  bool
	local      []byte
	want       []byte // what is put, or was there before the get; nil: not known
	signal     uint64 // 0: none
	strong     bool   // the signal is
}

func (p *program) fatalf(format string, args ...any) {
	p.t.Helper()
	p.t.Fatalf("after %v: %s", p.count, fmt.Sprintf(format, args...))
}

// run runs steps of the program, with a fault in one of so many, and ends what is under way. It
// runs more steps until the devices have moved data both ways.
func (p *program) run(steps, faults int, fault func()) {
	p.t.Helper()
	p.count = map[string]int{}
	for i := range 4 {
		owner := i % 2
		s := p.sides[owner]
		w := &testWindow{owner: owner, region: s.Alloc(p.t, programSlots*slotBytes)}
		w.words = s.Alloc(p.t, 8*programSlots)
		w.flag = s.Expose(p.t, w.words, 0, 8*programSlots, mem.Signal)
		p.wins = append(p.wins, w)
		p.expose(w)
	}
	var late time.Time // for more steps
	for step := 0; step < steps || !p.movedBoth() && (step == steps || time.Now().Before(late)); step++ {
		if step == steps {
			late = time.Now().Add(linktest.Patience)
		}
		if faults > 0 && step%faults == faults-1 {
			p.count["faults"]++
			fault()
		}
		w := p.wins[p.r.IntN(len(p.wins))]
		switch k := p.r.IntN(100); {
		case k < 25:
			p.begin(w, false)
		case k < 40:
			p.begin(w, true)
		case k < 43 && w.to != nil:
			p.withdraw(w)
		case k < 50 && w.to == nil:
			p.expose(w)
		case k < 51 && len(p.ops) > 0 && p.r.IntN(4) == 0: // each costs a lane
			o := p.ops[p.r.IntN(len(p.ops))]
			p.count["cancelled"]++
			o.cancelled = true
			p.sides[o.side].Rma.Cancel(o.id)
			clear(o.local) // nothing uses it any more
		default:
			p.turn(p.r.IntN(2), 1+p.r.IntN(8))
		}
	}
	for late = time.Now().Add(linktest.Patience); len(p.ops) > 0; {
		p.turn(0, 1)
		p.turn(1, 1)
		if time.Now().After(late) {
			p.fatalf("%d operations have not ended, such as %+v", len(p.ops), *p.ops[0])
		}
	}
	for _, w := range p.wins {
		if w.to != nil {
			p.withdraw(w)
		}
	}
	for _, w := range p.wins {
		p.unchanged(w)
	}
	put, got := p.bytesMoved()
	p.t.Logf("%v; the devices have put %d bytes and got %d", p.count, put, got)
	if !p.movedBoth() {
		p.t.Error("they have not moved data both ways")
	}
}

// bytesMoved counts what the devices have moved.
func (p *program) bytesMoved() (put, got uint64) {
	for _, s := range p.sides {
		a, b := bytesMoved(s)
		put, got = put+a, got+b
	}
	return put, got
}

func (p *program) movedBoth() bool {
	put, got := p.bytesMoved()
	return put > 0 && got > 0
}

func (p *program) expose(w *testWindow) {
	p.unchanged(w)
	b := w.region.Bytes()
	fill := byte(p.r.Uint32())
	for i := range b {
		b[i] = fill
	}
	for i := range w.slots {
		w.slots[i].known = b[i*slotBytes:][:slotBytes]
		if !w.slots[i].busy {
			w.slots[i].known = bytes.Clone(w.slots[i].known)
		} else { // of an operation on what was withdrawn, which does not change it
			w.slots[i].known = nil
		}
	}
	w.to = p.sides[w.owner].Expose(p.t, w.region, 0, len(b), mem.Read|mem.Write)
	w.content = nil
	p.count["exposed"]++
}

// withdraw withdraws a window: nothing changes its memory afterwards.
func (p *program) withdraw(w *testWindow) {
	p.t.Helper()
	if err := p.sides[w.owner].Withdraw(w.to); err != nil {
		p.fatalf("Withdraw: %v", err)
	}
	b := w.region.Bytes()
	for i := range b {
		b[i] ^= 0x5a
	}
	w.to, w.content = nil, bytes.Clone(b)
	for _, o := range p.ops {
		o.withdrawn = o.withdrawn || o.win == w
	}
	p.count["withdrawn"]++
}

// unchanged checks the memory of a window that is withdrawn.
func (p *program) unchanged(w *testWindow) {
	p.t.Helper()
	if w.content != nil && !bytes.Equal(w.content, w.region.Bytes()) {
		p.fatalf("memory has changed after Withdraw")
	}
}

// begin begins a put or a get.
func (p *program) begin(w *testWindow, get bool) {
	p.t.Helper()
	slot := p.r.IntN(programSlots)
	q := &w.slots[slot]
	if w.to == nil || q.busy {
		return
	}
	n := []int{8, 4096, leastMove - 1, leastMove, pieceBytes, pieceBytes + 1, slotBytes}[p.r.IntN(7)]
	o := &testOp{side: 1 - w.owner, slot: slot, win: w, get: get, local: make([]byte, n)}
	s := p.sides[o.side]
	var err error
	if get {
		if q.known != nil {
			o.want = q.known[:n]
		}
		o.id, err = s.GetFrom(o.local, w.to, uint64(slot*slotBytes))
	} else {
		r := byte(p.r.Uint32())
		for i := range o.local {
			o.local[i] = r + byte(i>>8)
		}
		o.want = bytes.Clone(o.local)
		sig := p2p.Signal{}
		if p.r.IntN(2) == 0 {
			o.signal = q.signal + 1
			o.strong = p.r.IntN(4) == 0
			sig = p2p.Signal{At: w.flag, Offset: uint64(8 * slot), Value: o.signal, Strong: o.strong}
		}
		o.id, err = s.PutTo(o.local, w.to, uint64(slot*slotBytes), sig)
	}
	if err != nil {
		p.fatalf("get %v of %d bytes: %v", get, n, err)
	}
	q.busy = true
	p.ops = append(p.ops, o)
	p.count[map[bool]string{true: "gets", false: "puts"}[get]]++
}

// turn makes progress on a side, and checks what has ended there.
func (p *program) turn(side, n int) {
	p.t.Helper()
	s := p.sides[side]
	for range n {
		if p.r.IntN(8) == 0 { // as before sleep
			s.Arm()
			s.Disarm()
		}
		if err := s.Turn(); err != nil {
			p.fatalf("%v", err)
		}
	}
	kept := p.ops[:0]
	for _, o := range p.ops {
		c, ended := p.sides[o.side].Ended[o.id]
		if !ended {
			kept = append(kept, o)
			continue
		}
		p.ended(o, c.Err)
	}
	p.ops = kept
}

func (p *program) ended(o *testOp, err error) {
	p.t.Helper()
	w := o.win
	q := &w.slots[o.slot]
	q.busy = false
	there := w.region.Bytes()[o.slot*slotBytes:][:len(o.want)]
	if v := w.words.Word(8 * o.slot).Load(); v > q.signal && v != o.signal {
		p.fatalf("a signal is %d, of %d and %d", v, q.signal, o.signal)
	} else if v < q.signal {
		p.fatalf("a signal is %d after %d", v, q.signal)
	} else if err == nil && o.signal > 0 && v != o.signal {
		p.fatalf("a put has ended, and its signal is %d, not %d", v, o.signal)
	} else {
		q.signal = v
	}
	switch {
	case err == nil && o.cancelled, errors.Is(err, p2p.ErrCancelled) && o.cancelled:
		if !bytes.Equal(o.local, make([]byte, len(o.local))) && o.get {
			p.fatalf("a get has changed local memory after Cancel")
		}
		if !o.get {
			q.known = nil
		}
	case errors.Is(err, p2p.ErrRevoked) && o.withdrawn:
		p.count["revoked"]++
		if !o.get {
			q.known = nil
		}
	case errors.Is(err, p2p.ErrUnplaced) && o.strong && p.count["cancelled"]+p.count["withdrawn"] > 0:
		if p.count["unplaced"]++; q.signal == o.signal {
			p.fatalf("a signal was written, and its put ended with %v", err)
		}
		q.known = nil
	case err != nil:
		p.fatalf("get %v of %d bytes, withdrawn %v: %v", o.get, len(o.local), o.withdrawn, err)
	case o.get:
		if o.want != nil && !bytes.Equal(o.local, o.want) {
			p.fatalf("a get of %d bytes has other bytes (withdrawn: %v)", len(o.local), o.withdrawn)
		}
	case !o.withdrawn:
		if !bytes.Equal(there, o.want) {
			p.fatalf("a put of %d bytes has placed others", len(o.want))
		}
		if q.known != nil && len(o.want) > 0 {
			q.known = bytes.Clone(q.known)
			copy(q.known, o.want)
		}
		if q.known != nil && !bytes.Equal(w.region.Bytes()[o.slot*slotBytes:][:slotBytes], q.known) {
			p.fatalf("a slot has changed beside a put of %d bytes", len(o.want))
		}
		clear(o.local)
	}
}

// Random programs have the results that they have on memory of their own, whatever fails.
func TestPrograms(t *testing.T) {
	for seed := range uint64(6) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			var refuse atomic.Bool
			ends := []ports{{}, twoEach, {twoEach.devices, 2}}[seed%3]
			devices := []string{"soft0", "soft1", "soft2", "soft3"}
			f := soft.New(soft.Config{Seed: seed, Devices: len(devices), Late: int(seed) % 5,
				ReuseKeys: true, ReuseNumbers: true,
				Faults: soft.Faults{Call: func(_, call string) syscall.Errno {
					if strings.HasPrefix(call, "register") && refuse.CompareAndSwap(true, false) {
						return syscall.ENOMEM
					}
					return 0
				}}})
			t.Cleanup(f.Close)
			x, y := sidesOf(t, f, ends)
			p := &program{t: t, r: rand.New(rand.NewPCG(seed, 7)), sides: [2]*linktest.Side{x, y}}
			steps := 3000
			if testing.Short() {
				steps = 1000
			}
			p.run(steps, 100, func() {
				for _, d := range devices {
					f.SetPort(d, 1, true)
				}
				device := devices[p.r.IntN(len(devices))]
				raised(t, x.End, y.End)
				side := p.r.IntN(2)
				l := inner(p.sides[side].End)
				for _, s := range p.sides {
					l := inner(s.End)
					l.mu.Lock()
					l.pause = minPause
					l.mu.Unlock()
				}
				l.mu.Lock()
				n := l.lane
				up := n != nil && l.stageOf(n) >= probing
				l.mu.Unlock()
				switch p.r.IntN(5) {
				case 0:
					if up {
						r := n.bulk.rails[p.r.IntN(len(n.bulk.rails))]
						f.Break(r.Name(), r.qp.Number())
					}
				case 1:
					if up {
						f.Break(n.port.Name(), n.qp.Number())
					}
				case 2:
					f.SetPort(device, 1, false)
				case 3:
					refuse.Store(true)
				case 4:
					f.Remove(device)
					f.Restore(device)
				}
			})
		})
	}
}
