package membership

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
)

// TestScripts plays the stories of testdata. A story begins with
//
//	job n=3 [window=2] [auto] [max=4] [proposers=1]
//
// and goes on with "do", whose input has one command in a line; lives are written 1/21 (slot 1,
// first life; 1/22 is the second), or as the slot of its last one:
//
//	kill P            the process ends, and everything says so: broken links, the lease, later
//	sever P Q [P]     the link breaks; only the one named notices          heal P Q
//	start P           a new life, which knows what the store holds         rejoin P  an evicted process goes on as another life
//	get P [WORD]      P gets the first letter that has WORD in it          twice P [WORD]  and the letter stays, to come again
//	cas P [FATE]      its proposal meets the store: answer mute lost late  late  what was late reaches the store
//	verdict P WHAT    its oldest probe is answered: alive dead unknown
//	tick P... [xN]    time passes at P ("all": everywhere)
//	away P, back P    the store cannot be reached, and can
//	expire P          its lease runs out, though it lives
//	admit P, missed P Q, waits P Q, ontime P Q, evict P SLOT, dead P Q, down P Q,
//	report P Q [SEQ UNREACHABLE...]   P is told so
//	flush             all letters arrive, all questions are answered, no time passes
//	settle            and time passes, until nobody has anything to do
//	mail P, why P Q, state
//
// The output is what machines want to have done, and at the end who is in which view.
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		var s *script
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "job":
				cfg, n := Config{Window: 2}, 0
				d.ScanArgs(t, "n", &n)
				d.MaybeScanArgs(t, "window", &cfg.Window)
				d.MaybeScanArgs(t, "max", &cfg.MaxSize)
				d.MaybeScanArgs(t, "proposers", &cfg.Proposers)
				d.MaybeScanArgs(t, "retry", &cfg.Retry)
				cfg.AutoAdmit = d.HasArg("auto")
				s = &script{}
				s.w = newSim(n, cfg, func(who Peer, what string) { fmt.Fprintf(&s.out, "%v: %s\n", who, what) })
				s.w.flush()
			case "do":
				for line := range strings.Lines(d.Input) {
					if f := strings.Fields(line); len(f) > 0 && s.w.err == nil {
						fmt.Fprintf(&s.out, "> %s\n", strings.Join(f, " "))
						if err := s.do(f[0], f[1:]); err != nil {
							d.Fatalf(t, "%s: %v", line, err)
						}
					}
				}
			default:
				d.Fatalf(t, "unknown verb %q", d.Cmd)
			}
			if s.w.err != nil {
				d.Fatalf(t, "%v", s.w.err)
			}
			s.state()
			out := s.out.String()
			s.out.Reset()
			return out
		})
	})
}

type script struct {
	w   *sim
	out strings.Builder
}

// state says which processes have which view, and what is under way.
func (s *script) state() {
	fmt.Fprintf(&s.out, "store: %v\n", s.w.current())
	for _, p := range s.w.procs {
		if !p.alive {
			continue
		}
		role := [...]string{"joiner", "member", "evicted", "closed"}[p.m.role]
		fmt.Fprintf(&s.out, "  %v: %s in epoch %d", p.me, role, p.m.View().Epoch)
		if p.m.Pending() {
			s.out.WriteString(", wants a change")
		}
		if p.cas != nil {
			s.out.WriteString(", proposal under way")
		}
		if n := len(p.mail); n > 0 {
			fmt.Fprintf(&s.out, ", %d letters", n)
		}
		s.out.WriteByte('\n')
	}
}

func parseLife(word string) (Peer, error) {
	slot, inc, ok := strings.Cut(word, "/")
	n, err := strconv.Atoi(slot)
	if err != nil || !ok {
		return Peer{n, 0}, err
	}
	x, err := strconv.ParseUint(inc, 16, 64)
	return Peer{n, x}, err
}

// proc finds a process by its life, or the last that began in its slot.
func (s *script) proc(word string) (*proc, error) {
	me, err := parseLife(word)
	if err != nil {
		return nil, err
	}
	for _, p := range slices.Backward(s.w.procs) {
		if p.me == me || me.Incarnation == 0 && p.me.Slot == me.Slot {
			return p, nil
		}
	}
	return nil, fmt.Errorf("no process %s", word)
}

func (s *script) do(verb string, args []string) error {
	w := s.w
	at := func(i int) string {
		if i < len(args) {
			return args[i]
		}
		return ""
	}
	var p, q *proc
	var err error
	switch verb {
	case "late", "flush", "settle", "state", "tick", "start":
	default:
		if p, err = s.proc(at(0)); err != nil {
			return err
		}
		if !p.alive {
			return fmt.Errorf("%v is dead", p.me)
		}
	}
	switch verb {
	case "sever", "heal", "missed", "waits", "ontime", "dead", "down", "report", "why":
		if q, err = s.proc(at(1)); err != nil {
			return err
		}
	}
	switch verb {
	case "kill":
		w.kill(p)
	case "expire":
		w.expire(p)
	case "sever":
		w.sever(p, q, at(2) == "" || at(2) == at(0), at(2) == "" || at(2) == at(1))
	case "heal":
		w.heal(p, q)
	case "start":
		me, err := parseLife(at(0))
		if err != nil || me.Incarnation == 0 {
			return fmt.Errorf("start %s: want slot/incarnation (%v)", at(0), err)
		}
		w.start(me, w.current())
	case "rejoin":
		w.rejoin(p, int(p.me.Incarnation%16)+1)
	case "get", "twice":
		for _, i := range p.deliverable() {
			if what := letter(p.mail[i]); strings.Contains(what, at(1)) {
				fmt.Fprintf(&s.out, "  (%v gets %s)\n", p.me, what)
				w.deliver(p, i, verb == "twice")
				return nil
			}
		}
		return fmt.Errorf("%v has no letter with %q", p.me, at(1))
	case "cas":
		if p.cas == nil {
			return fmt.Errorf("%v has no proposal", p.me)
		}
		w.cas(p, max(slices.Index([]string{"answer", "mute", "lost", "late"}, at(1)), 0))
	case "late":
		for _, c := range w.limbo {
			fmt.Fprintf(&s.out, "  (%v: %t)\n", c, w.write(c))
		}
		w.limbo = nil
	case "verdict":
		if len(p.probes) == 0 {
			return fmt.Errorf("%v has no probe", p.me)
		}
		w.answer(p, Verdict(max(slices.Index([]string{"unknown", "alive", "dead"}, at(1)), 0)))
	case "tick":
		times := 1
		for _, a := range args {
			if n, ok := strings.CutPrefix(a, "x"); ok {
				if times, err = strconv.Atoi(n); err != nil {
					return err
				}
			}
		}
		for range times {
			for _, p := range w.procs {
				named := slices.ContainsFunc(args, func(a string) bool {
					x, err := s.proc(a)
					return err == nil &&
						x == p
				})
				if p.alive && (at(0) == "all" || named) {
					w.tick(p)
				}
			}
		}
	case "away":
		w.storeAway(p)
	case "back":
		w.storeBack(p)
	case "admit":
		w.step(p, Admit{})
	case "missed":
		q.condemned = true
		w.step(p, Missed{q.me})
	case "waits":
		q.condemned = true
		w.step(p, Late{q.me})
	case "ontime":
		w.step(p, OnTime{q.me})
	case "dead":
		q.condemned = true
		w.step(p, Dead{q.me, "somebody said so"})
	case "evict":
		slot, err := strconv.Atoi(at(1))
		if err != nil {
			return err
		}
		if x := w.life(Peer{slot, p.m.View().at(slot).Incarnation}); x != nil {
			x.condemned = true
		}
		w.step(p, Evict{slot})
	case "down":
		w.missed[w.pair(p, q)] = true
		w.step(p, LinkDown{q.me, "connection lost"})
	case "report":
		seq, err := strconv.ParseUint(at(2), 10, 64)
		if err != nil {
			return err
		}
		r := Report{Epoch: 1, Seq: seq}
		for _, a := range args[3:] {
			x, err := parseLife(a)
			if err != nil {
				return err
			}
			r.Unreachable = append(r.Unreachable, x)
			if l := w.life(x); l != nil && l != q {
				w.missed[w.pair(l, q)] = true
			}
		}
		w.step(p, Reported{q.me, r})
	case "flush":
		w.flush()
	case "settle":
		w.settle(2*w.cfg.Window + 3)
	case "mail":
		for _, m := range p.mail {
			fmt.Fprintf(&s.out, "  %s\n", letter(m))
		}
	case "why":
		fmt.Fprintf(&s.out, "  %q\n", p.m.Why(q.me))
	case "state":
		s.state()
	default:
		return fmt.Errorf("unknown command %q", verb)
	}
	return nil
}

// letter describes mail in a line.
func letter(m mail) string {
	name := strings.TrimPrefix(fmt.Sprintf("%T", m.ev), "membership.")
	switch e := m.ev.(type) {
	case Proposed:
		return name + " " + [...]string{"unknown", "won", "lost"}[e.Outcome]
	case Reported:
		return fmt.Sprintf("%s %v: %v", name, e.Peer, e.Report)
	default:
		return name + " " + strings.Trim(fmt.Sprint(m.ev), "{}")
	}
}
