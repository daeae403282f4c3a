package resync

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"tutti/internal/storytest"
)

// verbs are the commands of scripts. Each has a file of its own, script_VERB_test.go.
var verbs = map[string]func(s *script, args []string) error{
	"aim":     (*script).aim,
	"ask":     (*script).ask,
	"enter":   (*script).enter,
	"fresh":   (*script).fresh,
	"hear":    (*script).hear,
	"join":    (*script).join,
	"kill":    (*script).kill,
	"lose":    (*script).lose,
	"recover": (*script).recover,
	"settle":  (*script).settle,
	"view":    (*script).view,
}

// TestScripts runs the scripts of testdata. A script begins with
//
//	group n=3
//
// which makes ranks 0 to n-1 in view 1, and continues with "do", whose input has one command in a
// line. Exchanges are written VIEW.ATTEMPT. The output is what the machines decide, and at the end
// where each rank is.
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		var s *script
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "group":
				if s != nil {
					d.Fatalf(t, "a second story")
				}
				n := 0
				d.ScanArgs(t, "n", &n)
				s = newScript(n)
			case "do":
				for line := range strings.Lines(d.Input) {
					storytest.Command(t, d, line, &s.out, s, verbs)
				}
			default:
				d.Fatalf(t, "unknown verb %q", d.Cmd)
			}
			s.state()
			out := s.out.String()
			s.out.Reset()
			return out
		})
	})
}

func TestEveryVerbIsInAStory(t *testing.T) { storytest.EveryVerbIsUsed(t, "testdata/*.txt", verbs) }

// script has a machine for each rank that lives, and the letters between them.
type script struct {
	ranks        map[int]*Machine
	incarnations map[int]uint64 // of each slot, the last one
	letters      []letter       // in the order in which they were sent
	out          strings.Builder
}

type letter struct {
	from, to int
	Told
}

func newScript(n int) *script {
	s := &script{ranks: map[int]*Machine{}, incarnations: map[int]uint64{}}
	var members []int
	for r := range n {
		members = append(members, r)
		s.incarnations[r] = 1
	}
	for r := range n {
		s.ranks[r] = New(r, s.viewOf(1, members))
	}
	return s
}

func (s *script) viewOf(epoch uint64, members []int) View {
	v := View{Epoch: epoch, Members: members}
	for _, slot := range members {
		v.Incarnations = append(v.Incarnations, s.incarnations[slot])
	}
	return v
}

// rank finds the rank that argument i names.
func (s *script) rank(args []string, i int) (int, *Machine, error) {
	if i >= len(args) {
		return 0, nil, fmt.Errorf("expected a rank as argument %d", i+1)
	}
	r, err := strconv.Atoi(args[i])
	if err != nil {
		return 0, nil, err
	}
	if s.ranks[r] == nil {
		return 0, nil, fmt.Errorf("rank %d does not live", r)
	}
	return r, s.ranks[r], nil
}

// number reads argument i.
func number(args []string, i int) (uint64, error) {
	if i >= len(args) {
		return 0, fmt.Errorf("expected a number as argument %d", i+1)
	}
	return strconv.ParseUint(args[i], 10, 64)
}

// parseView reads an epoch and members, "0,2", from argument i on.
func (s *script) parseView(args []string, i int) (v View, err error) {
	epoch, err := number(args, i)
	if err != nil {
		return v, err
	}
	if i+1 >= len(args) {
		return v, fmt.Errorf("expected the members, for example 0,2")
	}
	var members []int
	for w := range strings.SplitSeq(args[i+1], ",") {
		slot, err := strconv.Atoi(w)
		if err != nil {
			return v, err
		}
		members = append(members, slot)
	}
	return s.viewOf(epoch, members), nil
}

func (p Point) String() string { return fmt.Sprintf("%d.%d", p.View, p.Attempt) }

// standing describes a standing in a line.
func standing(s Standing) string {
	words := []string{fmt.Sprintf("over=%d", s.Over)}
	for _, f := range []struct {
		is   bool
		name string
	}{{s.Has, "has"}, {s.Intact, "intact"}, {s.Joins, "joins"}, {s.Failed, "failed"}, {s.Calls, "calls"}} {
		if f.is {
			words = append(words, f.name)
		}
	}
	if s.Given > 0 {
		words = append(words, fmt.Sprintf("given=%d", s.Given))
	}
	if s.Since > 0 {
		words = append(words, fmt.Sprintf("since=%d", s.Since))
	}
	if s.Last.At != (Point{}) {
		words = append(words, fmt.Sprintf("last=%v", s.Last.At))
	}
	return strings.Join(words, " ")
}

// completed prints the outcome of the exchange that rank r has just completed, and what becomes of
// the rank's operation at hand.
func (s *script) completed(r int) {
	m := s.ranks[r]
	o, failed := m.Outcome()
	k := m.mine.Over + 1
	fate := fmt.Sprintf("operation %d runs in this view", k)
	switch {
	case m.mine.Joins:
		fate = fmt.Sprintf("it begins with operation %d", o.Start)
	case k <= o.Confirmed && m.mine.Has:
		fate = fmt.Sprintf("the result of operation %d counts", k)
	case k < o.Start:
		fate = fmt.Sprintf("operation %d ends with an error", k)
	}
	if failed {
		fate += "; the group has failed"
	}
	fmt.Fprintf(&s.out, "%d: completes %v, start=%d confirmed=%d: %s\n", r, o.At, o.Start, o.Confirmed, fate)
}

// deliver delivers letter i.
func (s *script) deliver(i int) {
	l := s.letters[i]
	s.letters = slices.Delete(s.letters, i, i+1)
	fmt.Fprintf(&s.out, "  (%d hears %d in %v: %s)\n", l.to, l.from, l.At, standing(l.Standing))
	if s.ranks[l.to].Hear(l.from, l.Told) {
		s.completed(l.to)
	}
}

// oldest finds the oldest letter to one rank from another.
func (s *script) oldest(to, from int) (int, error) {
	i := slices.IndexFunc(s.letters, func(l letter) bool { return l.to == to && l.from == from })
	if i < 0 {
		return 0, fmt.Errorf("rank %d has no letter of rank %d", to, from)
	}
	return i, nil
}

// state prints where the ranks are.
func (s *script) state() {
	for _, r := range slices.SortedFunc(maps.Keys(s.ranks), cmp.Compare[int]) {
		m := s.ranks[r]
		fmt.Fprintf(&s.out, "%d: in %v with %v", r, m.At(), m.In().Members)
		if missing := m.Missing(); m.Pending() {
			fmt.Fprintf(&s.out, ", misses %v", missing)
		}
		if !m.Member() {
			s.out.WriteString(", evicted")
		}
		if m.Lost() {
			s.out.WriteString(", a member is lost")
		}
		if m.Behind() {
			s.out.WriteString(", behind")
		}
		s.out.WriteByte('\n')
	}
	for _, l := range s.letters {
		fmt.Fprintf(&s.out, "  letter %d to %d in %v\n", l.from, l.to, l.At)
	}
}
