package membership

import (
	"slices"
	"strings"
	"testing"
)

func newMachine(t *testing.T, cfg Config) *Machine {
	t.Helper()
	m, _, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestNewRefuses(t *testing.T) {
	v := First([]uint64{1, 2})
	for name, cfg := range map[string]Config{
		"epoch":       {Incarnation: 1},
		"view":        {Incarnation: 1, View: View{Epoch: 1, Slots: []Slot{{Incarnation: 1}}}},
		"large view":  {Incarnation: 1, View: View{Epoch: 1, Slots: make([]Slot, MaxSlots+1)}},
		"incarnation": {View: v},
		"negative":    {Slot: -1, Incarnation: 1, View: v},
		"slot":        {Slot: 2, Incarnation: 1, View: v},
		"size":        {Incarnation: 1, View: v, MaxSize: MaxSlots + 1},
		"window":      {Incarnation: 1, View: v, Window: -1},
		"proposers":   {Incarnation: 1, View: v, Proposers: -1},
	} {
		if m, _, err := New(cfg); err == nil || m != nil || !strings.Contains(err.Error(), "epoch") &&
			!strings.Contains(err.Error(), "expected") {
			t.Errorf("%s: got %v", name, err)
		}
	}
	m := newMachine(t, Config{Slot: 1, Incarnation: 2, View: v})
	if !m.Member() || m.Self() != (Peer{1, 2}) || !m.View().Equal(v) || m.Pending() || m.Why(Peer{0, 9}) != "" {
		t.Errorf("a new machine: %+v", m)
	}
	if newMachine(t, Config{Slot: 1, Incarnation: 3, View: v}).Member() {
		t.Error("another incarnation is a member")
	}
}

// A rank that removes itself knows why, also if it sees the view before it knows that its proposal
// has won.
func TestOwnRemovalHasReason(t *testing.T) {
	for _, seen := range []bool{false, true} {
		m := newMachine(t, Config{Incarnation: 1, View: First([]uint64{1, 2, 3}), Window: 3})
		for i := range 2 {
			p := Peer{1 + i, uint64(2 + i)}
			m.Step(LinkDown{p, "x"})
			m.Step(Probed{p, VerdictAlive})
		}
		var p *Propose
		for range 100 {
			for _, a := range m.Step(Tick{}) {
				if is, ok := a.(Propose); ok {
					p = &is
				}
			}
			if p != nil {
				break
			}
		}
		if p == nil || p.New.Has(0, 1) {
			t.Fatalf("it proposes %v", p)
		}
		ends := Event(Proposed{Epoch: p.New.Epoch, Outcome: OutcomeWon})
		if seen {
			ends = ViewSeen{p.New}
		}
		m.Step(ends)
		if got, want := m.Why(Peer{0, 1}), "it and ranks 1-2 could not reach each other"; m.Member() || got != want {
			t.Errorf("seen before %v: member %v, because %q, want %q", seen, m.Member(), got, want)
		}
	}
}

// Invalid events, and events about unknown ranks, change nothing.
func TestInvalidEventsAreIgnored(t *testing.T) {
	v := First([]uint64{1, 2, 3})
	me := Peer{0, 1}
	for _, ev := range []Event{
		LinkUp{}, LinkDown{}, Dead{}, Probed{}, Reported{}, JoinAsked{}, JoinGone{}, Missed{}, Evict{-1}, Evict{3},
		Evict{1 << 40},
		LinkUp{me}, LinkDown{me, "x"}, Missed{me}, Probed{me, VerdictAlive},
		Reported{Peer{1, 9}, Report{Seq: 1, Unreachable: []Peer{{2, 3}}}},
		Reported{Peer{1, 2}, Report{Seq: 1, Unreachable: []Peer{{1, 2}, {-4, 1}, {9, 9}, {2, 77}}}},
		LinkDown{Peer{-1, 5}, "x"}, Dead{Peer{3, 5}, "x"}, Dead{Peer{1 << 40, 5}, "x"}, Missed{Peer{1, 99}},
		Probed{Peer{1, 2}, VerdictAlive},
		ViewSeen{}, ViewSeen{View{Epoch: 9, Slots: v.Slots[:2]}},
		ViewSeen{View{Epoch: 9, Slots: make([]Slot, MaxSlots+1)}},
		ViewSeen{View{Epoch: 9, Slots: []Slot{{Incarnation: 1, Since: 10}, {}, {}}}},
		ViewSeen{View{Epoch: 9, Slots: []Slot{{Incarnation: 1}, {}, {}}}},
		Proposed{}, Proposed{Epoch: 2, Outcome: OutcomeWon}, Proposed{Epoch: 2, Outcome: OutcomeLost,
			Current: v.Remove(0)},
		JoinAsked{Peer{1, 2}, 1}, JoinAsked{Peer{1, 9}, 1}, JoinAsked{Peer{3, 9}, 1}, JoinAsked{Peer{-1, 9}, 1},
		Rejoin{5}, Rejoin{}, Admit{}, StoreBack{},
	} {
		m := newMachine(t, Config{Incarnation: 1, View: v, AutoAdmit: true})
		acts := m.Step(ev)
		for range 5 {
			acts = append(acts, m.Step(Tick{})...)
		}
		if len(acts) != 0 || !m.View().Equal(v) || !m.Member() {
			t.Errorf("%T%+v: %v, %v", ev, ev, m.View(), acts)
		}
	}
}

func TestNoActionsAfterClose(t *testing.T) {
	v := First([]uint64{1, 2})
	m := newMachine(t, Config{Incarnation: 1, View: v})
	m.Step(Dead{Peer{1, 2}, "gone"})
	for _, ev := range []Event{Close{}, Tick{}, ViewSeen{v.Remove(1)}, Proposed{Epoch: 2, Outcome: OutcomeWon},
		Close{}} {
		if acts := m.Step(ev); len(acts) != 0 || m.Member() || m.View().Epoch != 1 {
			t.Fatalf("%T after Close: %v", ev, acts)
		}
	}
}

// The incarnations remembered of a slot are bounded, even if thousands are invented, and the one in
// the view is not forgotten.
func TestIncarnationsAreBounded(t *testing.T) {
	v := First([]uint64{1, 2})
	for _, active := range []View{v, v.Remove(1).Add(Peer{1, 5000})} {
		m := newMachine(t, Config{Incarnation: 1, View: v})
		for i := range 1000 {
			m.Step(LinkUp{Peer{1, uint64(100 + i)}})
			if i == 500 {
				m.Step(ViewSeen{active})
			}
		}
		if len(m.incarnations[1]) > maxIncarnations {
			t.Errorf("%d incarnations are remembered", len(m.incarnations[1]))
		}
		for range 10 {
			m.Step(Tick{})
		}
		if acts := m.Step(Dead{Peer{1, active.Slots[1].Incarnation}, "gone"}); len(acts) != 1 {
			t.Errorf("the active incarnation was forgotten: %v", acts)
		}
	}
}

// A machine keeps nothing of what the caller may change, and gives away nothing of its own.
func TestMachineSharesNoMemoryWithCaller(t *testing.T) {
	v := First([]uint64{1, 2, 3})
	m := newMachine(t, Config{Incarnation: 1, View: v})
	unreachable := []Peer{{2, 3}}
	m.Step(Reported{Peer{1, 2}, Report{Seq: 1, Unreachable: unreachable}})
	unreachable[0] = Peer{0, 1}
	m.Step(Tick{})
	if acts := m.Step(Tick{}); len(acts) != 0 && !acts[0].(Propose).New.Has(0, 1) {
		t.Errorf("a report changed afterwards: %v", acts)
	}
	if l := m.find(Peer{1, 2}); !slices.Equal(l.report.Unreachable, []Peer{{2, 3}}) {
		t.Errorf("a report changed afterwards: %v", l.report)
	}
	m.Step(LinkDown{Peer{1, 2}, "x"})
	for _, a := range m.Step(Probed{Peer{1, 2}, VerdictAlive}) {
		if r, ok := a.(Report); ok {
			r.Unreachable[0] = Peer{2, 3}
		}
	}
	if acts := m.Step(StoreBack{}); slices.ContainsFunc(acts, func(a Action) bool { _, ok := a.(Report); return ok }) {
		t.Errorf("it publishes again what it has published: %v", acts)
	}
}

// Tries to reach what stays away become rarer, so that a job at rest is at rest: the first 2**10
// ticks bring ten of them, and 2**9 more ticks one more.
func TestRetriesBecomeRare(t *testing.T) {
	v := First([]uint64{1, 2})
	joiner := newMachine(t, Config{Slot: 2, MaxSize: 3, Incarnation: 3, View: v})
	warm := 0
	for range 1 << 12 {
		for _, a := range joiner.Step(LinkDown{Peer{0, 1}, "refused"}) {
			if w, ok := a.(Warm); ok && w.Peer == (Peer{0, 1}) {
				warm++
			}
		}
		joiner.Step(LinkUp{Peer{1, 2}})
		for _, a := range joiner.Step(Tick{}) {
			if w, ok := a.(Warm); ok && w.Peer == (Peer{0, 1}) {
				warm++
			}
		}
	}
	if warm < 8 || warm > 16 {
		t.Errorf("%d tries in 4096 ticks", warm)
	}
	m := newMachine(t, Config{Incarnation: 1, View: v, Retry: 3})
	proposals, answer := 0, m.Step(Dead{Peer{1, 2}, "gone"})
	for range 10 * 3 * 64 {
		for _, a := range answer {
			if _, ok := a.(Propose); ok {
				proposals++
				m.Step(Proposed{Epoch: 2, Outcome: OutcomeUnknown})
			}
		}
		answer = m.Step(Tick{})
	}
	if proposals < 12 || proposals > 17 {
		t.Errorf("%d proposals in %d ticks: expected 7 in the first 64*3, and one in 64*3 from then on", proposals,
			10*3*64)
	}
}

// Isolated has the newest reason: the store may give another one than it gave first.
func TestIsolatedHasNewestReason(t *testing.T) {
	m := newMachine(t, Config{Incarnation: 1, View: First([]uint64{1, 2})})
	got := []string{}
	step := func(ev Event) (proposes bool) {
		for _, a := range m.Step(ev) {
			switch a := a.(type) {
			case Propose:
				proposes = true
			case Isolated:
				got = append(got, a.Why)
			case Reunited:
				got = append(got, "")
			}
		}
		return proposes
	}
	proposes := step(Dead{Peer{1, 2}, "gone"})
	for _, cause := range []string{"slow", "slow", "slow", "full", "full", "slow"} {
		for !proposes {
			proposes = step(Tick{})
		}
		proposes = step(Proposed{Epoch: 2, Cause: cause})
	}
	step(StoreAway{"away"})
	step(StoreBack{})
	const of = "cannot remove ranks 1 from the view: "
	if want := []string{of + "slow", of + "full", of + "slow", of + "away", ""}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// However long a link was down, a rank that waits for admission tries it every 2**9 ticks at least.
func TestPausesAreBounded(t *testing.T) {
	v := First([]uint64{1})
	m := newMachine(t, Config{Slot: 1, MaxSize: 2, Incarnation: 2, View: v})
	last := 0
	for tick := range 1 << 14 {
		m.Step(LinkDown{Peer{0, 1}, "refused"})
		if slices.Contains(m.Step(Tick{}), Action(Warm{Peer{0, 1}})) {
			last = tick
		} else if tick-last >= 1<<9 {
			t.Fatalf("tick %d: it has tried in tick %d last", tick, last)
		}
	}
}

// After an outage of the store, links that are missing have a window to come back. They are probed
// at once.
func TestWindowsBeginAnewWithStore(t *testing.T) {
	const window = 4
	peer := Peer{1, 2}
	for _, heal := range []int{0, 1, window, 4 * window} { // the tick in which the link comes back
		m := newMachine(t, Config{Incarnation: 1, View: First([]uint64{1, 2, 3}), Window: window})
		step := func(ev Event) (probed, proposed bool) {
			acts := m.Step(ev)
			if probed = slices.Contains(acts, Action(Probe{peer})); probed {
				acts = append(acts, m.Step(Probed{peer, VerdictUnknown})...)
			}
			return probed, slices.ContainsFunc(acts, func(a Action) bool { _, ok := a.(Propose); return ok })
		}
		step(LinkDown{peer, "no answer"})
		step(StoreAway{"no route to the store"})
		for range 10 * window {
			step(Tick{})
		}
		probed, proposed := step(StoreBack{})
		if !probed || proposed {
			t.Errorf("at once: it probes: %t, it proposes: %t", probed, proposed)
		}
		for tick := range 2 * window {
			if tick == heal {
				step(LinkUp{peer})
			}
			if _, proposed := step(Tick{}); proposed != (tick == window && heal > window) {
				t.Errorf("the link comes back in tick %d: in tick %d it proposes: %t", heal, tick, proposed)
			}
		}
	}
}

// A rank that waits for admission asks for a missing link again if it has heard nothing of it for a
// window.
func TestUnansweredWarmIsRepeated(t *testing.T) {
	const window = 4
	m, acts, err := New(Config{Slot: 1, Incarnation: 9, Window: window, View: First([]uint64{1, 2})})
	if err != nil || len(acts) != 1 || acts[0] != (Warm{Peer{0, 1}}) {
		t.Fatal(acts, err)
	}
	for tick := 1; tick <= 2*window; tick++ {
		acts := m.Step(Tick{})
		if again := slices.Contains(acts, Action(Warm{Peer{0, 1}})); again != (tick%window == 0) || len(acts) > 1 {
			t.Errorf("tick %d: %v", tick, acts)
		}
	}
}
