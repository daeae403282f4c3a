package endpoint

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"tutti/internal/storytest"
)

// script is a world, and what is said in it.
type script struct {
	w   *world
	out strings.Builder
}

// verbs are the commands of scripts. The argument of most is a side, a or b.
var verbs = map[string]func(s *script, arg string) error{
	"open":    onSide(func(w *world, i int) { w.step(i, open{}, nil) }),
	"cancel":  onSide(func(w *world, i int) { w.step(i, cancel{}, nil) }),
	"shut":    onSide(func(w *world, i int) { w.step(i, shut{}, nil) }),
	"break":   onSide(func(w *world, i int) { w.step(i, broken{w.sides[i].generation}, nil) }),
	"restart": onSide((*world).restart),
	"timeout": onSide((*world).timeout),
	// The next call of the side's device fails.
	"weaken": onSide(func(w *world, i int) { w.sides[i].weak = true }),
	// "ask" sends the request that the side is about to send.
	"ask": onSide((*world).ready),
	// "get" delivers the oldest packet with the words of the argument: "get b gets request".
	"get": onPacket(func(w *world, k int) { w.deliver(k, false) }),
	// "again" does so too, and leaves another one on its way.
	"again": onPacket(func(w *world, k int) { w.deliver(k, true) }),
	"lose":  onPacket(func(w *world, k int) { w.packets = slices.Delete(w.packets, k, k+1) }),
	// "settle" has everything happen that is under way.
	"settle": func(s *script, _ string) error { s.w.settle(); return nil },
}

func onSide(do func(w *world, i int)) func(*script, string) error {
	return func(s *script, arg string) error {
		if arg != "a" && arg != "b" {
			return fmt.Errorf("no side %q", arg)
		}
		do(s.w, int(arg[0]-'a'))
		return nil
	}
}

func onPacket(do func(w *world, k int)) func(*script, string) error {
	return func(s *script, arg string) error {
		k := slices.IndexFunc(s.w.packets, func(p packet) bool { return strings.Contains(p.String(), arg) })
		if k < 0 {
			return fmt.Errorf("no packet %q among %v", arg, s.w.packets)
		}
		do(s.w, k)
		return nil
	}
}

// TestScripts runs the scripts of testdata, each a story of two ends. Its commands, one in a line,
// are the input of "do"; the output is the actions of the machines, and the state of both ends.
// Sessions are a0, a1, ... of the processes of a, and b0, b1, ... of b.
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata/scripts", func(t *testing.T, path string) {
		s := &script{w: newWorld()}
		s.w.say = func(i int, a action) { fmt.Fprintf(&s.out, "%s: %v\n", names[i], a) }
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			if d.Cmd != "do" {
				d.Fatalf(t, "unknown verb %q", d.Cmd)
			}
			for line := range strings.Lines(d.Input) {
				verb, arg, _ := strings.Cut(strings.TrimSpace(line), " ")
				fmt.Fprintf(&s.out, "> %s\n", strings.TrimSpace(line))
				run := verbs[verb]
				if run == nil {
					d.Fatalf(t, "%s: unknown command", line)
				}
				if err := run(s, arg); err != nil {
					d.Fatalf(t, "%s: %v", line, err)
				}
			}
			if s.w.err != nil {
				d.Fatalf(t, "%v", s.w.err)
			}
			for i := range s.w.sides {
				m := &s.w.sides[i].m
				fmt.Fprintf(&s.out, "  %s: %v is %v", names[i], m.self(), m.phase)
				if m.phase == connected {
					fmt.Fprintf(&s.out, " with %v", m.with)
				}
				s.out.WriteString("\n")
			}
			out := s.out.String()
			s.out.Reset()
			return out
		})
	})
}

func TestEveryVerbIsInAStory(t *testing.T) { storytest.EveryVerbIsUsed(t, "testdata/scripts/*", verbs) }
