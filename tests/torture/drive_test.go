//go:build linux

package torture

import (
	"net"
	"os/exec"
	"testing"

	"tutti/internal/proctest"
)

// newCourse returns the progress of a program with these ranks.
func newCourse(t *testing.T, members ...*member) *course {
	s := &stage{t: t, members: map[int]*member{}}
	for _, m := range members {
		s.members[m.number] = m
	}
	return &course{session: &session{s: s, job: Job{Ranks: len(members)}, gone: map[int]bool{}},
		p: &Program{}, res: &Result{Faults: map[string]int{}}, gates: map[int]Gate{}, done: make(chan string, 1),
		began: map[int]bool{}, doomed: map[int]bool{}, asked: map[*member]int{}}
}

// A process that ends by itself before it is killed has crashed.
func TestCrashOfDoomedRankIsFound(t *testing.T) {
	for _, c := range []struct {
		name, script string
		crash        bool
	}{{"killed", "kill -9 $$", false}, {"crash", "echo panic >&2; exit 2", true}} {
		t.Run(c.name, func(t *testing.T) {
			conn, far := net.Pipe()
			defer far.Close()
			m := &member{number: 1, conn: conn, p: proctest.Run(t, exec.Command("/bin/sh", "-c", c.script))}
			x := newCourse(t, &member{}, m)
			x.doomed[1] = true
			x.running = 1
			x.hear(m, news{}, net.ErrClosed)
			got := x.res.Findings
			if len(got) > 0 != c.crash || c.crash && (got[0].Kind != "death" || got[0].Rank != 1) {
				t.Errorf("findings %+v", got)
			}
			if x.gone[1] == c.crash || x.s.members[1] != nil {
				t.Errorf("lost: %v, its process is still known: %v", x.gone[1], x.s.members[1] != nil)
			}
		})
	}
}

// The driver forgets members while faults are under way: the race detector watches.
func TestFaultsDoNotReadTheMembers(t *testing.T) {
	x := newCourse(t, &member{}, &member{number: 1}, &member{number: 2})
	x.begin(0, Fault{Kind: "deafen", Victim: 0, Other: 1}, x.s.members[0])
	delete(x.s.members, 2)
	x.faults.Wait()
}
