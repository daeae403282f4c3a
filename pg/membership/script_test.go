package membership

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"tutti/internal/storytest"
)

// verbs are the commands of scripts. Each has a file of its own, script_VERB_test.go.
var verbs = map[string]func(s *script, args []string) error{
	"admit":   (*script).admit,
	"away":    (*script).away,
	"back":    (*script).back,
	"cas":     (*script).cas,
	"dead":    (*script).dead,
	"down":    (*script).down,
	"evict":   (*script).evict,
	"expire":  (*script).expire,
	"flush":   (*script).flush,
	"get":     (*script).get,
	"heal":    (*script).heal,
	"kill":    (*script).kill,
	"late":    (*script).late,
	"mail":    (*script).mail,
	"missed":  (*script).missed,
	"ontime":  (*script).ontime,
	"rejoin":  (*script).rejoin,
	"report":  (*script).report,
	"settle":  (*script).settle,
	"sever":   (*script).sever,
	"silence": (*script).silence,
	"start":   (*script).start,
	"state":   (*script).state,
	"tick":    (*script).tick,
	"twice":   (*script).twice,
	"verdict": (*script).verdict,
	"waits":   (*script).waits,
	"why":     (*script).why,
}

// TestScripts runs the scripts of testdata. A script begins with
//
//	job n=3 [window=2] [auto] [max=4] [proposers=1] [retry=2]
//
// and continues with "do", whose input has one command in a line. Incarnations are written 1/21
// (slot 1, first incarnation; 1/22 is the second), or as the slot of the last one. The output is
// the actions of the machines, and at the end the view of each.
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		var s *script
		jobs := 0
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "job":
				if jobs++; jobs > 1 {
					d.Fatalf(t, "a second story")
				}
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
					if s.w.err == nil {
						storytest.Command(t, d, line, &s.out, s, verbs)
					}
				}
			default:
				d.Fatalf(t, "unknown verb %q", d.Cmd)
			}
			if s.w.err != nil {
				d.Fatalf(t, "%v", s.w.err)
			}
			s.state(nil)
			out := s.out.String()
			s.out.Reset()
			return out
		})
	})
}

func TestEveryVerbIsInAStory(t *testing.T) { storytest.EveryVerbIsUsed(t, "testdata/*/*.txt", verbs) }

type script struct {
	w   *sim
	out strings.Builder
}

// parsePeer reads an incarnation or a slot.
func parsePeer(word string) (Peer, error) {
	slot, inc, ok := strings.Cut(word, "/")
	n, err := strconv.Atoi(slot)
	if err != nil || !ok {
		return Peer{n, 0}, err
	}
	x, err := strconv.ParseUint(inc, 16, 64)
	return Peer{n, x}, err
}

// proc finds a process by its incarnation, or the last that began in its slot.
func (s *script) proc(word string) (*proc, error) {
	me, err := parsePeer(word)
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

// word returns argument i, or "" if there are fewer.
func word(args []string, i int) string {
	if i < len(args) {
		return args[i]
	}
	return ""
}

// choice returns which of the words w is, the first for none.
func choice(w string, words ...string) (int, error) {
	if w == "" {
		return 0, nil
	}
	i := slices.Index(words, w)
	if i < 0 {
		return 0, fmt.Errorf("%q is none of %q", w, words)
	}
	return i, nil
}

// live finds the process that argument i names, which has to be alive.
func (s *script) live(args []string, i int) (*proc, error) {
	p, err := s.proc(word(args, i))
	if err == nil && !p.alive {
		err = fmt.Errorf("%v is dead", p.me)
	}
	return p, err
}

// two finds the processes that the first two arguments name. The first has to be alive.
func (s *script) two(args []string) (p, q *proc, err error) {
	if p, err = s.live(args, 0); err == nil {
		q, err = s.proc(word(args, 1))
	}
	return p, q, err
}

// deliver delivers the first letter that has a word in it.
func (s *script) deliver(args []string, again bool) error {
	p, err := s.live(args, 0)
	if err != nil {
		return err
	}
	for _, i := range p.deliverable() {
		if what := letter(p.mail[i]); strings.Contains(what, word(args, 1)) {
			fmt.Fprintf(&s.out, "  (%v gets %s)\n", p.me, what)
			s.w.deliver(p, i, again)
			return nil
		}
	}
	return fmt.Errorf("%v has no letter with %q", p.me, word(args, 1))
}

// letter describes mail in a line.
func letter(m mail) string {
	name := strings.TrimPrefix(fmt.Sprintf("%T", m.ev), "membership.")
	switch e := m.ev.(type) {
	case Proposed:
		return name + " " + [...]string{"unknown", "won", "lost", "held"}[e.Outcome]
	case Reported:
		return fmt.Sprintf("%s %v: %v", name, e.Peer, e.Report)
	default:
		return name + " " + strings.Trim(fmt.Sprint(m.ev), "{}")
	}
}
