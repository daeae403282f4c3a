package endpoint

import (
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"hash/maphash"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"tutti/rdma"
)

// world is two ends and the network between them. Processes restart, and the network loses,
// duplicates and delays.
type world struct {
	sides   [2]side
	packets []packet
	err     error
	say     func(side int, a action) // may be nil
}

// side is one end: the present process, and its queue pairs.
type side struct {
	m    machine
	life uint64
	// The call that waits for the event ready, and the one that waits for a reply; 0: none.
	pausing, calling uint64
	weak             bool // the next call of the device fails
	// The queue pairs, as a device has them.
	live       bool
	generation uint64 // of them, or of the last
	any        bool   // there have been some
	joined     end    // 0: they are not connected
}

// packet is a request of a side's process, or the reply to it.
type packet struct {
	caller int
	life   uint64
	call   uint64
	reply  bool
	m      *message
}

func (p packet) String() string { return p.arrives().String() }

// does describes a move of side i.
func does(i int, after string) what { return what{name: names[i], after: after} }

// arrives describes that p arrives.
func (p packet) arrives() what { return what{name: names[p.to()], m: p.m} }

// names are those of the sides.
var names = [2]string{"a", "b"}

// what describes a move. Most are never printed.
type what struct {
	before string
	name   string   // of a side
	m      *message // that the side gets; nil: it does what after says
	after  string
}

func (w what) String() string {
	if w.m != nil {
		return fmt.Sprintf("%s%s gets %v%s", w.before, w.name, w.m, w.after)
	}
	return w.before + w.name + w.after
}

func (p packet) to() int {
	if p.reply {
		return p.caller
	}
	return 1 - p.caller
}

// sessionOf returns the session of a process.
func sessionOf(side int, life uint64) uint64 { return uint64(0xa0+0x10*side) + life }

func newWorld() *world {
	w := &world{}
	for i := range w.sides {
		w.sides[i].m = *newMachine(sessionOf(i, 0), 2)
	}
	return w
}

func (w *world) clone() *world {
	c := *w
	c.packets = slices.Clone(w.packets)
	return &c
}

func (w *world) wrong(i int, format string, args ...any) {
	if w.err == nil {
		w.err = fmt.Errorf("%s: "+format, append([]any{names[i]}, args...)...)
	}
}

// offerOf returns the offer of a side, which is the same for all processes and generations: the
// numbers of queue pairs repeat.
func offerOf(i int) offer {
	n := uint32(10 * (i + 1))
	return offer{link: rdma.RoCEv2, mtu: 1024, reads: 1, qps: []pair{{n, n}, {n + 1, n}}}
}

// holds reports whether the queue pairs of side i are connected, and those of the peer are
// connected with them, or wait to be.
func (w *world) holds(i int) bool {
	s, o := &w.sides[i], &w.sides[1-i]
	return s.live && o.live && s.joined == end{o.m.session, 2 * o.generation} &&
		(o.joined == end{s.m.session, 2 * s.generation} || o.joined == end{})
}

// matched reports whether the two ends are connected with each other.
func (w *world) matched() bool {
	a, b := &w.sides[0], &w.sides[1]
	return w.holds(0) && w.holds(1) && a.joined.session != 0 && b.joined.session != 0 && a.m.phase == connected &&
		b.m.phase == connected && a.m.isPeer(b.m.self()) && b.m.isPeer(a.m.self())
}

// step feeds side i an event and does what the machine asks for. The packet is the event's, if it
// has one.
func (w *world) step(i int, ev event, p *packet) {
	s := &w.sides[i]
	answers := 0
	held := w.holds(i)
	for queue := []event{ev}; len(queue) > 0; {
		e := queue[0]
		queue = queue[1:]
		for _, a := range s.m.step(e) {
			if w.say != nil {
				w.say(i, a)
			}
			switch a := a.(type) {
			case prepare:
				if s.live || s.any && a.generation <= s.generation {
					w.wrong(i, "%v after generation %d", a, s.generation)
				}
				if s.weak {
					s.weak = false
					queue = append(queue, prepared{err: errDevice})
					break
				}
				s.live, s.any, s.generation, s.joined = true, true, a.generation, end{}
				queue = append(queue, prepared{offer: offerOf(i)})
			case join:
				if !s.live || a.generation != s.generation || s.joined != (end{}) {
					w.wrong(i, "%v, but generation %d is connected with %v", a, s.generation, s.joined)
				}
				if want := offerOf(1 - i); !a.offer.equal(&want) {
					w.wrong(i, "%v by %v", a, a.offer)
				}
				if s.weak {
					s.weak = false
					queue = append(queue, joined{errDevice, true})
					break
				}
				s.joined = end{a.with.session, a.with.version &^ 1}
				queue = append(queue, joined{})
			case retire:
				if !s.live || a.generation != s.generation {
					w.wrong(i, "%v, not %d", a, s.generation)
				}
				if held && p != nil {
					w.wrong(i, "%v, which works, because %v", a, p)
				}
				s.live, s.joined, held = false, end{}, false
			case ask:
				s.pausing, s.calling = a.call, 0
			case send:
				s.calling = a.call
				w.packets = append(w.packets, packet{caller: i, life: s.life, call: a.call, m: a.message})
			case answer:
				answers++
				w.packets = append(w.packets,
					packet{caller: p.caller, life: p.life, call: p.call, reply: true, m: a.message})
			}
		}
	}
	if want := p != nil && !p.reply; (answers == 1) != want || answers > 1 {
		w.wrong(i, "%d answers to %T", answers, ev)
	}
	if s.live != (s.m.phase == connecting || s.m.phase == connected) ||
		(s.joined != end{}) != (s.m.phase == connected) {
		w.wrong(i, "the machine is %v, queue pairs: %t, connected with %v", s.m.phase, s.live, s.joined)
	}
	if !s.m.asking {
		s.pausing, s.calling = 0, 0
	}
}

// deliver has a packet arrive, and possibly remain on its way.
func (w *world) deliver(k int, again bool) {
	p := w.packets[k]
	if !again {
		w.packets = slices.Delete(w.packets, k, k+1)
	}
	to := &w.sides[p.to()]
	switch {
	case !p.reply:
		w.step(p.to(), requested{p.m}, &p)
	case p.life == to.life:
		w.step(p.to(), replied{p.call, p.m}, &p)
	}
}

func (w *world) ready(i int) {
	call := w.sides[i].pausing
	w.sides[i].pausing = 0
	w.step(i, ready{call}, nil)
}

// underWay reports whether the request or the reply of the present call of side i may arrive.
func (w *world) underWay(i int) bool {
	s := &w.sides[i]
	return slices.ContainsFunc(w.packets, func(p packet) bool {
		return p.caller == i && p.life == s.life && p.call == s.calling
	})
}

var (
	errLost   = errors.New("no reply")
	errDevice = errors.New("no resources")
)

func (w *world) timeout(i int) {
	call := w.sides[i].calling
	w.sides[i].calling = 0
	w.step(i, failed{call: call, err: errLost}, nil)
}

// restart has another process take the place of side i.
func (w *world) restart(i int) {
	life := w.sides[i].life + 1
	w.sides[i] = side{life: life, m: *newMachine(sessionOf(i, life), 2)}
}

// settle has everything happen that is under way, without faults.
func (w *world) settle() {
	for n := 0; w.err == nil; n++ {
		if n > 200 {
			w.wrong(0, "no end: %v", w.packets)
		}
		did := false
		for i := range w.sides {
			if w.sides[i].pausing != 0 {
				w.ready(i)
				did = true
			} else if w.sides[i].calling != 0 && !w.underWay(i) {
				w.timeout(i)
				did = true
			}
		}
		if len(w.packets) > 0 {
			w.deliver(0, false)
			did = true
		}
		if !did {
			return
		}
	}
}

// use has both ends need the connection. Queue pairs that do not match fail when they are used.
func (w *world) use() {
	for n := 0; w.err == nil && !w.matched(); n++ {
		if n > 6 {
			w.wrong(0, "%v and %v do not meet", w.sides[0].m.self(), w.sides[1].m.self())
		}
		for i := range w.sides {
			if s := &w.sides[i]; s.m.phase == connected {
				w.step(i, broken{s.generation}, nil)
			}
			w.step(i, open{}, nil)
		}
		w.settle()
	}
}

// rest tells what settle and use do.
func (w *world) rest() string {
	var b strings.Builder
	c := w.clone()
	c.say = func(i int, a action) { fmt.Fprintf(&b, "\n    %s: %v", names[i], a) }
	c.settle()
	c.use()
	return b.String()
}

// key identifies the state, but for numbers that do not matter.
func (w *world) key(b []byte) []byte {
	number := binary.AppendUvarint
	flag := func(b []byte, f bool) []byte {
		if f {
			return append(b, 1)
		}
		return append(b, 0)
	}
	for i := range w.sides {
		s := &w.sides[i]
		m := &s.m
		b = number(append(b, byte(m.phase), byte(s.life)), m.version)
		for _, e := range []end{m.with, m.peer} {
			b = number(number(b, e.session), e.version)
		}
		for _, f := range []bool{m.offered, m.asking, m.wanted, m.doubt, s.pausing != 0, s.calling != 0, s.weak} {
			b = flag(b, f)
		}
		if m.asking {
			b = number(b, m.sent)
		}
		if m.phase == connected {
			b = append(b, byte(m.tries))
		}
	}
	var ps []string
	for _, p := range w.packets {
		s := &w.sides[p.caller]
		c := flag([]byte{byte(p.caller), byte(p.m.kind), byte(p.life)}, p.reply)
		c = flag(c, p.life == s.life && p.call == s.m.call && s.m.asking)
		for _, e := range []end{p.m.from, p.m.to} {
			c = number(number(c, e.session), e.version)
		}
		ps = append(ps, string(c))
	}
	slices.Sort(ps)
	for _, p := range ps {
		b = append(append(b, 0xff), p...)
	}
	return b
}

// faults are how many there may be, of both sides together or of each.
type faults struct {
	lose, duplicate, hurry         uint8 // hurry: calls that fail although a packet is under way
	restart, sever, cancel, weaken [2]uint8
	open                           [2]uint8 // no fault: how often a caller begins to wait
}

// gentle reports whether no end has lost or given up its queue pairs, if there were at first as
// many faults left as of has.
func (f *faults) gentle(of *faults) bool {
	return f.restart == of.restart && f.sever == of.sever && f.cancel == of.cancel && f.weaken == of.weaken
}

func (f *faults) key(b []byte) []byte {
	b = append(b, f.lose, f.duplicate, f.hurry)
	for _, a := range [][2]uint8{f.restart, f.sever, f.cancel, f.weaken, f.open} {
		b = append(b, a[:]...)
	}
	return b
}

type modelState struct {
	w     *world
	left  faults
	story *storyLine
}

type storyLine struct {
	what   what
	before *storyLine
}

func (s *storyLine) String() string {
	if s == nil {
		return ""
	}
	return s.before.String() + "\n    " + s.what.String()
}

// move is something that can happen: a step of a process, of the network or of a device.
type move struct {
	what  what
	spend func(f *faults) *uint8 // what it uses up; nil: nothing
	act   func(w *world)
}

// opens reports whether m is no fault, although there may be only so many of it.
func (m move) opens(f *faults) bool {
	return m.spend != nil && (m.spend(f) == &f.open[0] || m.spend(f) == &f.open[1])
}

// moves returns what can happen next.
func (w *world) moves() (all []move) {
	all = make([]move, 0, 16+3*len(w.packets))
	try := func(is what, spend func(f *faults) *uint8, act func(w *world)) {
		all = append(all, move{is, spend, act})
	}
	for i := range w.sides {
		p := &w.sides[i]
		if p.m.phase == unconnected || p.m.phase == connecting && !p.m.wanted {
			try(does(i, " opens"), func(f *faults) *uint8 { return &f.open[i] },
				func(w *world) { w.step(i, open{}, nil) })
		}
		if p.pausing != 0 {
			try(does(i, " asks"), nil, func(w *world) { w.ready(i) })
		}
		if p.calling != 0 {
			if w.underWay(i) {
				try(does(i, " is impatient"), func(f *faults) *uint8 { return &f.hurry },
					func(w *world) { w.timeout(i) })
			} else {
				try(does(i, " has no reply"), nil, func(w *world) { w.timeout(i) })
			}
		}
		if p.m.wanted {
			try(does(i, " does not wait any more"), func(f *faults) *uint8 { return &f.cancel[i] },
				func(w *world) { w.step(i, cancel{}, nil) })
		}
		if !p.weak {
			try(what{before: "the device of ", name: names[i], after: " fails once"},
				func(f *faults) *uint8 { return &f.weaken[i] }, func(w *world) { w.sides[i].weak = true })
		}
		if p.m.phase == connected {
			try(what{before: "queue pairs of ", name: names[i], after: " fail"},
				func(f *faults) *uint8 { return &f.sever[i] }, func(w *world) { w.step(i, broken{p.generation}, nil) })
		}
		if p.any || p.m.peer.session != 0 {
			try(does(i, " restarts"), func(f *faults) *uint8 { return &f.restart[i] }, func(w *world) { w.restart(i) })
		}
	}
	for k, p := range w.packets {
		arrives, again, lost := p.arrives(), p.arrives(), p.arrives()
		again.after, lost.before = ", and will again", "lost: "
		try(arrives, nil, func(w *world) { w.deliver(k, false) })
		try(again, func(f *faults) *uint8 { return &f.duplicate },
			func(w *world) { w.deliver(k, true) })
		try(lost, func(f *faults) *uint8 { return &f.lose },
			func(w *world) { w.packets = slices.Delete(w.packets, k, k+1) })
	}
	return all
}

// explore visits every state that two ends can come to. From each of them they have to meet when
// they are used, and without that if no queue pairs were lost that worked.
func explore(t *testing.T, may faults, bound int) {
	seed := maphash.MakeSeed()
	seen := map[uint64]bool{}
	queue := []modelState{{w: newWorld(), left: may}}
	met, alone, astray := 0, 0, 0
	var buf []byte
	for len(queue) > 0 {
		s := queue[len(queue)-1]
		queue = queue[:len(queue)-1]
		end := s.w.clone()
		end.settle()
		a, b := &end.sides[0], &end.sides[1]
		switch {
		case end.matched():
			met++
		case a.m.phase != connected && b.m.phase != connected:
		case a.m.phase != b.m.phase:
			if alone++; s.left.gentle(&may) {
				end.wrong(0, "%v %v, and %v %v", a.m.phase, a.m.with, b.m.phase, b.m.with)
			}
		default: // without a reply from a process that has ended, no process can know that it has
			if astray++; s.left.restart == may.restart {
				end.wrong(0, "connected with %v, and %v", a.m.with, b.m.with)
			}
		}
		end.use()
		if end.err != nil {
			t.Fatalf("%v, after%v\nand then%s", end.err, s.story, s.w.rest())
		}
		for _, m := range s.w.moves() {
			left := s.left
			if m.spend != nil {
				at := m.spend(&left)
				if *at == 0 {
					continue
				}
				*at--
			}
			w := s.w.clone()
			m.act(w)
			if w.err != nil {
				t.Fatalf("%v, after%v\n    %s", w.err, s.story, m.what)
			}
			buf = w.key(buf[:0])
			buf = left.key(buf)
			if key := maphash.Bytes(seed, buf); !seen[key] {
				seen[key] = true
				queue = append(queue, modelState{w, left, &storyLine{m.what, s.story}})
			}
		}
		if len(seen) > bound {
			t.Fatalf("more than %d states", bound)
		}
	}
	t.Logf("%d states; at rest the ends are connected with each other in %d, one is alone in %d, each is connected "+
		"with queue pairs that are gone in %d", len(seen), met, alone, astray)
	if met == 0 {
		t.Error("the ends were never connected")
	}
}

// TestModel visits all interleavings of two ends.
func TestModel(t *testing.T) {
	one, two := [2]uint8{1, 1}, [2]uint8{2, 2}
	for _, c := range []struct {
		name string
		may  faults
		long bool
	}{
		{"no faults", faults{open: two}, false},
		{"a loss and a duplicate", faults{open: one, lose: 1, duplicate: 1, hurry: 1}, false},
		{"two losses and duplicates", faults{open: one, lose: 2, duplicate: 2, hurry: 1}, true},
		{"a restart a side", faults{open: two, restart: one}, false},
		{"a loss, a duplicate, a restart a side", faults{open: one, lose: 1, duplicate: 1, hurry: 1, restart: one},
			true},
		{"two restarts of one side", faults{open: two, duplicate: 1, restart: [2]uint8{2, 0}}, true},
		{"failures", faults{open: two, lose: 1, sever: one}, false},
		{"failures and a duplicate", faults{open: two, duplicate: 1, sever: one}, true},
		{"failures and a restart", faults{open: [2]uint8{2, 1}, hurry: 1, sever: one, restart: [2]uint8{1, 0}}, true},
		{"devices fail", faults{open: two, lose: 1, weaken: one}, false},
		{"devices fail, and a duplicate", faults{open: two, duplicate: 1, weaken: one}, true},
		{"devices fail, and a restart", faults{open: two, weaken: one, restart: [2]uint8{1, 0}}, true},
		{"no caller waits", faults{open: two, lose: 1, cancel: one}, false},
		{"no caller waits, and calls are late", faults{open: two, lose: 1, duplicate: 1, hurry: 1, cancel: one}, true},
	} {
		if c.long && testing.Short() {
			continue
		}
		t.Run(c.name, func(t *testing.T) { explore(t, c.may, 3_000_000) })
	}
}

var (
	walkSteps = flag.Int("walk.steps", 0, "random steps; 0: a million, fewer with the race detector or -short")
	walkSeed  = flag.Uint64("walk.seed", 0, "seed of the first walk")
)

// TestRandomWalks: two ends keep their promises over many more faults and restarts than all
// interleavings can be visited of, and after each walk they meet when they are used.
func TestRandomWalks(t *testing.T) {
	steps := *walkSteps
	if steps == 0 {
		if steps = 1_000_000; raceEnabled || testing.Short() {
			steps = 60_000
		}
	}
	const each = 500
	hash, seen := maphash.MakeSeed(), map[uint64]bool{}
	taken, opens, given := 0, 0, faults{}
	var buf []byte
	for seed := *walkSeed; steps > 0; seed++ {
		rng := rand.New(rand.NewPCG(seed, 3))
		faulty := 1 + rng.IntN(20) // one step of so many, at most, is a fault
		w := newWorld()
		var story *storyLine
		for range min(steps, each) {
			taken++
			all := w.moves()
			// Packets do not pile up: with many, only they and processes move.
			isFault := rng.IntN(faulty) == 0 && len(w.packets) < 6
			var fit []move
			for _, m := range all {
				if isFault || m.spend == nil || m.opens(&given) {
					fit = append(fit, m)
				}
			}
			if len(fit) == 0 { // both are at rest
				fit = all
			}
			m := fit[rng.IntN(len(fit))]
			if story = (&storyLine{m.what, story}); m.spend != nil {
				if m.opens(&given) {
					opens++
				}
				*m.spend(&given) |= 1
			}
			m.act(w)
			if w.err != nil {
				t.Fatalf("seed %d: %v, after%v", seed, w.err, story)
			}
			buf = w.key(buf[:0])
			seen[maphash.Bytes(hash, buf)] = true
		}
		w.settle()
		if w.use(); w.err != nil {
			t.Fatalf("seed %d: %v, after%v\nand then%s", seed, w.err, story, w.rest())
		}
		steps -= each
	}
	t.Logf("%d steps, %d opens, %d states", taken, opens, len(seen))
	both := [2]uint8{1, 1}
	if want := (faults{lose: 1, duplicate: 1, hurry: 1, restart: both, sever: both, cancel: both, weaken: both,
		open: both}); given != want {
		t.Errorf("not every fault has happened: %+v", given)
	}
}

// A machine keeps its promises whatever the peer sends.
func TestAnyMessages(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	ups := 0
	for range 20000 {
		w := newWorld()
		s := &w.sides[0]
		who := func(of ...uint64) end { return end{of[rng.IntN(len(of))], uint64(rng.IntN(6))} }
		for range 30 {
			switch rng.IntN(6) {
			case 0:
				w.step(0, open{}, nil)
			case 1:
				if s.pausing != 0 {
					w.ready(0)
				}
			case 2:
				if s.m.phase == connected {
					before := s.m.self()
					if w.step(0, broken{s.generation - 1}, nil); s.m.self() != before {
						t.Fatal("queue pairs of an earlier generation have failed, and the present ones are retired")
					}
					w.step(0, broken{s.generation}, nil)
				}
			default:
				p := packet{caller: rng.IntN(2), life: s.life, call: s.m.call, m: &message{kind: request,
					offer: offerOf(1),
					from:  who(7, 8), to: who(sessionOf(0, 0), 9)}}
				if rng.IntN(8) == 0 {
					p.m.to = end{}
				}
				if p.reply = p.caller == 0; p.reply {
					if p.m.kind = accepted + kind(rng.IntN(4)); p.m.kind != accepted {
						p.m.offer = offer{}
					}
					if rng.IntN(2) == 0 {
						p.m.to = end{s.m.session, s.m.sent}
					}
				}
				w.packets = w.packets[:0]
				w.packets = append(w.packets, p)
				w.deliver(0, false)
			}
			if w.err != nil {
				t.Fatal(w.err)
			}
			if s.m.phase == connected {
				ups++
			}
		}
	}
	if ups == 0 {
		t.Error("never connected")
	}
}

// The reply to another request than the one of the call is a call that has failed.
func TestReplyHasToNameTheRequest(t *testing.T) {
	m := newMachine(1, 2)
	m.step(open{})
	m.step(prepared{offer: offerOf(0)})
	m.step(ready{m.call})
	for _, to := range []end{{1, 2}, {2, 0}} {
		call := m.call
		m.step(replied{m.call, &message{kind: accepted, from: end{3, 1}, to: to, offer: offerOf(1)}})
		if m.phase != connecting || m.call != call+1 || m.tries == 0 {
			t.Fatalf("accepted to %v: %v after %d calls", to, m.phase, m.call)
		}
		m.step(ready{m.call})
	}
	m.step(replied{m.call, &message{kind: accepted, from: end{3, 1}, to: m.self(), offer: offerOf(1)}})
	if acts := m.step(joined{}); m.phase != connected || len(acts) != 1 {
		t.Fatalf("%v, %v", m.phase, acts)
	}
}
