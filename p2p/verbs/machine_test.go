package verbs

import (
	"encoding/binary"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

var (
	walkSteps = flag.Int("walk.steps", 300_000, "steps of TestLaneWalks")
	walkSeed  = flag.Uint64("walk.seed", 1, "seed of TestLaneWalks")
)

// scene is what may happen in a world.
type scene struct {
	name    string
	frames  int  // that each end sends
	wants   int  // wishes for a better lane, of either end
	refused int  // lanes that cannot be made or connected
	broken  int  // lanes that fail at an end after they were connected
	attempt bool // of these, only lanes that no end can have gone over to
}

// worldLane is a lane at one end.
type worldLane struct {
	gen   uint64
	task  bool // its objects are being made or connected
	probe bool // its request is under way
	open  bool
	out   []uint8 // frames that this end has sent over it
	taken int     // of the peer's
	end   int     // where the peer's end; -1: not known
	from  int     // where this end's are to be sent again
}

// worldSide is one end of a world.
type worldSide struct {
	m         machine
	lanes     []worldLane
	sent, got uint8
	resend    uint64 // the lane whose frames are to be sent again; 0: none
}

// worldFrame is a frame on the TCP connection.
type worldFrame struct {
	kind         uint8 // 0: data
	gen, follows uint64
	followed     bool
	at           int // data: the number of the frame
}

// world is both ends of a link, its rings, and its TCP connection.
type world struct {
	scene
	sides [2]worldSide
	tcp   [2][]worldFrame // to the side
	hit   bool            // a lane has failed that an end may have gone over to
	err   error
	say   func(format string, args ...any) // may be nil
}

func newWorld(s scene) *world {
	w := &world{scene: s}
	w.sides[0].m.dialler = true
	w.sides[0].m.settle()
	w.carry(0, worldFrame{})
	return w
}

func (w *world) clone() *world {
	c := *w
	for i := range c.sides {
		s := &c.sides[i]
		s.m.lanes, s.m.lost, s.m.acts = slices.Clone(s.m.lanes), slices.Clone(s.m.lost), nil
		s.lanes = slices.Clone(s.lanes)
		for j := range s.lanes {
			s.lanes[j].out = slices.Clip(s.lanes[j].out)
		}
		c.tcp[i] = slices.Clip(c.tcp[i])
	}
	return &c
}

func (w *world) wrong(format string, args ...any) {
	if w.err == nil {
		w.err = fmt.Errorf(format, args...)
	}
}

func (s *worldSide) lane(gen uint64) *worldLane {
	for i := range s.lanes {
		if s.lanes[i].gen == gen {
			return &s.lanes[i]
		}
	}
	return nil
}

// step has an end's machine do something, and carries out what it decides. The frame is the one
// that has come, if there is one.
func (w *world) step(i int, f worldFrame, do func(m *machine) error) {
	m := &w.sides[i].m
	tx, rx := m.tx, m.rx
	if err := do(m); err != nil {
		w.wrong("end %d: %v", i, err)
	}
	w.carry(i, f)
	if !w.hit && (tx != 0 && m.tx == 0 || rx != 0 && m.rx == 0) {
		w.wrong("end %d goes from lanes %d and %d to %d and %d, and nothing that carries frames has failed", i, tx, rx,
			m.tx, m.rx)
	}
}

// carry carries out the acts of an end's machine.
func (w *world) carry(i int, f worldFrame) {
	s := &w.sides[i]
	acts := s.m.acts
	s.m.acts = nil
	for _, a := range acts {
		if w.say != nil {
			w.say("  end %d: %+v", i, a)
		}
		l := s.lane(a.gen)
		switch a.do {
		case doMake:
			if l != nil {
				w.wrong("end %d makes lane %d twice", i, a.gen)
			}
			s.lanes = append(s.lanes, worldLane{gen: a.gen, task: true, open: true, end: -1})
		case doConnect:
			l.task = true
		case doProbe:
			l.probe = true
		case doTell:
			t := worldFrame{kind: a.kind, gen: a.gen, follows: a.follows, followed: a.followed}
			switch {
			case a.kind == frameReady && a.follows != 0:
				t.at = len(s.lane(a.follows).out)
			case a.kind == frameDown:
				t.at = l.taken
			}
			w.tcp[1-i] = append(w.tcp[1-i], t)
		case doEnd:
			if l.end = f.at; l.taken > l.end {
				w.wrong("end %d has taken %d of the %d frames of lane %d", i, l.taken, l.end, a.gen)
			}
		case doResend:
			if s.resend != 0 {
				w.wrong("end %d sends frames of two lanes again", i)
			}
			s.resend = a.gen
		case doClose:
			if !l.open {
				w.wrong("end %d closes lane %d twice", i, a.gen)
			}
			l.open, l.probe = false, false
		}
	}
	if len(s.m.lanes) > 2 {
		w.wrong("end %d has %d lanes", i, len(s.m.lanes))
	}
	for _, c := range s.m.lanes {
		if l := s.lane(c.gen); l == nil || !l.open {
			w.wrong("end %d has no objects of lane %d", i, c.gen)
		}
	}
	s.lanes = slices.DeleteFunc(s.lanes, func(l worldLane) bool {
		return !l.open && !l.task && !slices.ContainsFunc(s.m.lost, func(c course) bool { return c.gen == l.gen })
	})
	if l := s.lane(s.m.rx); l != nil && l.taken == l.end {
		w.step(i, f, func(m *machine) error { m.passedEnd(); return nil })
	}
}

// event is something that can happen.
type worldEvent struct {
	name string
	rare bool // it is not needed for the ends to come to rest
	do   func(w *world)
}

// arrive has a frame come to an end.
func (w *world) arrive(i int, n uint8, from string) {
	s := &w.sides[i]
	if s.got++; n != s.got {
		w.wrong("end %d gets frame %d by %s, want %d", i, n, from, s.got)
	}
}

// events returns what can happen next.
func (w *world) events() (list []worldEvent) {
	add := func(rare bool, name string, i int, gen uint64, do func(w *world)) {
		list = append(list, worldEvent{fmt.Sprintf("%s at end %d, lane %d", name, i, gen), rare, do})
	}
	for i := range w.sides {
		s := &w.sides[i]
		if len(w.tcp[i]) > 0 {
			f := w.tcp[i][0]
			add(false, fmt.Sprintf("frame %+v", f), i, f.gen, func(w *world) {
				w.tcp[i] = w.tcp[i][1:]
				if f.kind == 0 {
					if w.sides[i].m.rx != 0 {
						w.wrong("end %d gets frame %d over TCP beside the ring of lane %d", i, f.at, w.sides[i].m.rx)
					}
					w.arrive(i, uint8(f.at), "TCP")
					return
				}
				w.step(i, f, func(m *machine) error {
					err := m.heard(f.kind, f.gen, f.follows, f.followed)
					if l := w.sides[i].lane(f.gen); f.kind == frameDown && l != nil {
						l.from = f.at
					}
					return err
				})
			})
		}
		if from := w.sides[1-i].lane(s.m.rx); s.m.rx != 0 && from != nil {
			if l := s.lane(s.m.rx); l.taken < len(from.out) {
				n := from.out[l.taken]
				add(false, "frame from the ring", i, l.gen, func(w *world) {
					l := w.sides[i].lane(w.sides[i].m.rx)
					l.taken++
					w.arrive(i, n, "a ring")
					w.carry(i, worldFrame{})
				})
			}
		}
		if int(s.sent) < w.frames && (s.m.tx != 0 || len(s.m.lost) == 0) {
			add(false, "frame is sent", i, s.m.tx, func(w *world) {
				s := &w.sides[i]
				s.sent++
				if l := s.lane(s.m.tx); l != nil {
					l.out = append(slices.Clone(l.out), s.sent)
				} else {
					w.tcp[1-i] = append(w.tcp[1-i], worldFrame{at: int(s.sent)})
				}
			})
		}
		if gen := s.resend; gen != 0 {
			add(false, "frames are sent again", i, gen, func(w *world) {
				s := &w.sides[i]
				l := s.lane(gen)
				for _, n := range l.out[l.from:] {
					w.tcp[1-i] = append(w.tcp[1-i], worldFrame{at: int(n)})
				}
				s.resend = 0
				w.step(i, worldFrame{}, func(m *machine) error { m.resent(); return nil })
			})
		}
		if c := s.m.leaving(); c != nil {
			add(false, "nothing is under way", i, c.gen, func(w *world) {
				w.step(i, worldFrame{}, func(m *machine) error { m.drained(); return nil })
			})
		}
		if w.wants > 0 && s.m.steady() {
			add(true, "a better lane is wanted", i, s.m.tx, func(w *world) {
				w.wants--
				w.step(i, worldFrame{}, func(m *machine) error { m.want(); return nil })
			})
		}
		for j := range s.lanes {
			w.laneEvents(i, &s.lanes[j], add)
		}
	}
	return list
}

// laneEvents adds what can happen to a lane of an end.
func (w *world) laneEvents(i int, l *worldLane,
	add func(rare bool, name string, i int, gen uint64, do func(w *world))) {
	gen := l.gen
	c := w.sides[i].m.find(gen)
	switch {
	case l.task && c == nil:
		add(false, "the task ends", i, gen, func(w *world) {
			w.sides[i].lane(gen).task = false
			w.carry(i, worldFrame{})
		})
	case l.task:
		add(false, "the task ends", i, gen, func(w *world) {
			w.sides[i].lane(gen).task = false
			w.step(i, worldFrame{}, func(m *machine) error {
				if c := m.find(gen); c.stage == making {
					m.made(gen)
				} else {
					m.connected(gen)
				}
				return nil
			})
		})
		if w.refused > 0 {
			add(true, "the task fails", i, gen, func(w *world) {
				w.refused--
				w.sides[i].lane(gen).task = false
				w.step(i, worldFrame{}, func(m *machine) error { m.refuse(gen); return nil })
			})
		}
	}
	if l.probe {
		add(false, "data passes", i, gen, func(w *world) {
			w.sides[i].lane(gen).probe = false
			w.step(i, worldFrame{}, func(m *machine) error { m.proved(gen); return nil })
		})
	}
	if c == nil || c.stage < probing || w.broken == 0 {
		return
	}
	there := w.sides[1-i].m.find(gen)
	// When the dialler has said that data passes, the acceptor may go over to the lane.
	used := c.stage == up || there != nil && there.stage == up || i == 0 && c.stage == shown
	if used && w.attempt {
		return
	}
	add(true, "the lane fails", i, gen, func(w *world) {
		w.broken--
		w.hit = w.hit || used
		w.step(i, worldFrame{}, func(m *machine) error { m.fail(gen); return nil })
	})
}

// key returns what distinguishes the state.
func (w *world) key(b []byte) string {
	b = b[:0]
	num := func(v uint64) { b = binary.AppendUvarint(b, v) }
	bit := func(all ...bool) {
		v := uint64(0)
		for _, x := range all {
			v <<= 1
			if x {
				v |= 1
			}
		}
		num(v)
	}
	num(uint64(w.wants<<8 | w.refused<<4 | w.broken))
	bit(w.hit)
	for i := range w.sides {
		s := &w.sides[i]
		m := &s.m
		num(m.gen)
		num(m.tx)
		num(m.rx)
		bit(m.owed, m.wanted)
		for _, list := range [][]course{m.lanes, m.lost} {
			num(uint64(len(list)))
			for _, c := range list {
				num(c.gen)
				num(uint64(c.stage))
				bit(c.told, c.agreed, c.ends, c.passed, c.idle, c.left, c.down, c.again)
			}
		}
		num(uint64(len(s.lanes)))
		for _, l := range s.lanes {
			num(l.gen)
			bit(l.task, l.probe, l.open)
			num(uint64(len(l.out)))
			b = append(b, l.out...)
			num(uint64(l.taken))
			num(uint64(l.end + 1))
			num(uint64(l.from))
		}
		b = append(b, s.sent, s.got)
		num(s.resend)
		num(uint64(len(w.tcp[i])))
		for _, f := range w.tcp[i] {
			b = append(b, f.kind)
			num(f.gen)
			num(f.follows)
			bit(f.followed)
			num(uint64(f.at))
		}
	}
	return string(b)
}

// rested returns what is missing when nothing but a fault can happen any more, or nil.
func (w *world) rested() error {
	for i := range w.sides {
		s := &w.sides[i]
		if !s.m.steady() || s.m.tx != w.sides[1-i].m.tx || len(s.lanes) != 1 || int(s.got) != w.frames {
			return fmt.Errorf("end %d rests with %+v and %d lanes after %d frames of %d", i, s.m, len(s.lanes), s.got,
				w.frames)
		}
	}
	return nil
}

// comesToRest has the ends go on without faults, and returns why they do not come to rest. It stops
// at a state that is known to do so.
func (w *world) comesToRest(good map[string]bool) error {
	var path []string
	for w = w.clone(); ; {
		key := w.key(nil)
		if good[key] {
			break
		}
		path = append(path, key)
		list := slices.DeleteFunc(w.events(), func(e worldEvent) bool { return e.rare })
		if len(list) == 0 {
			if err := w.rested(); err != nil {
				return err
			}
			break
		}
		list[len(path)%len(list)].do(w)
		if w.err != nil {
			return w.err
		}
		if len(path) > 2000 {
			return fmt.Errorf("no rest after %d steps", len(path))
		}
	}
	for _, k := range path {
		good[k] = true
	}
	return nil
}

// step is one on the way to a state.
type worldStep struct {
	w    *world
	name string
	from *worldStep
}

// story returns how a state has come about.
func (s *worldStep) story() string {
	var names []string
	for ; s != nil; s = s.from {
		names = append(names, s.name)
	}
	slices.Reverse(names)
	return strings.Join(names, "\n")
}

// explore visits all states of a scene.
func explore(t *testing.T, s scene) int {
	t.Helper()
	seen, good := map[string]bool{}, map[string]bool{}
	first := newWorld(s)
	seen[first.key(nil)] = true
	for todo := []*worldStep{{w: first, name: "begin"}}; len(todo) > 0; {
		at := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		if err := at.w.comesToRest(good); err != nil {
			t.Fatalf("%v, after\n%s", err, at.story())
		}
		for _, e := range at.w.events() {
			w := at.w.clone()
			next := &worldStep{w: w, name: e.name, from: at}
			if e.do(w); w.err != nil {
				t.Fatalf("%v, after\n%s", w.err, next.story())
			}
			if key := w.key(nil); !seen[key] {
				seen[key] = true
				todo = append(todo, next)
			}
		}
		at.w = nil // its story stays
	}
	return len(seen)
}

// Whatever the order of events: every frame arrives once and in order, no honest end breaks the
// protocol, frames leave a ring for TCP only if a lane that carries them fails, and both ends come
// to use one lane.
func TestEveryLaneChange(t *testing.T) {
	scenes := []scene{
		{name: "a first lane", frames: 2},
		{name: "lanes that cannot be made", frames: 1, refused: 2},
		{name: "lanes that fail", frames: 1, broken: 2},
		{name: "a better lane", frames: 3, wants: 1},
		{name: "two better lanes", frames: 2, wants: 2},
		{name: "attempts that cannot be made", frames: 2, wants: 1, refused: 2},
		{name: "attempts that fail", frames: 2, wants: 1, broken: 2, attempt: true},
		{name: "a better lane and one that fails", frames: 2, wants: 1, broken: 1},
		{name: "a better lane and two that fail", frames: 1, wants: 1, broken: 2},
	}
	if testing.Short() { // the last ones have most of the states
		scenes = scenes[:len(scenes)-2]
	}
	total := 0
	for _, s := range scenes {
		n := explore(t, s)
		t.Logf("%s: %d states", s.name, n)
		total += n
	}
	t.Logf("%d states", total)
}

// Longer stories have the same properties.
func TestLaneWalks(t *testing.T) {
	r := rand.New(rand.NewPCG(*walkSeed, 3))
	for steps := 0; steps < *walkSteps; {
		w := newWorld(scene{frames: 30, wants: r.IntN(5), refused: r.IntN(4), broken: r.IntN(5),
			attempt: r.IntN(3) == 0})
		var names []string
		for {
			list := w.events()
			if r.IntN(8) > 0 {
				list = slices.DeleteFunc(list, func(e worldEvent) bool { return e.rare })
			}
			if len(list) == 0 {
				break
			}
			e := list[r.IntN(len(list))]
			names = append(names, e.name)
			if e.do(w); w.err != nil {
				t.Fatalf("%v, after\n%s", w.err, strings.Join(names, "\n"))
			}
			steps++
		}
		if err := w.comesToRest(map[string]bool{}); err != nil {
			t.Fatalf("%v, after\n%s", err, strings.Join(names, "\n"))
		}
	}
}
