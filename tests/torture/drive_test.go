//go:build linux

package torture

import (
	"encoding/json"
	"io"
	"net"
	"os/exec"
	"strings"
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
		p: &Program{}, res: &Result{Faults: map[string]int{}}, gates: map[int]Gate{}, done: make(chan error, 1),
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

// A fault that cannot be injected is found by the driver, in a program that has ended, too.
func TestFailedFaultIsFound(t *testing.T) {
	ended := proctest.Run(t, exec.Command("/bin/true"))
	ended.Wait()
	for _, c := range []struct {
		name string
		at   []event // the ranks have said this when the program runs
	}{{"while the program runs", nil}, {"later", []event{{news: news{Report: &Report{}}}}}} {
		t.Run(c.name, func(t *testing.T) {
			conn, far := net.Pipe()
			defer far.Close()
			m := &member{conn: conn, out: json.NewEncoder(io.Discard)}
			x := newCourse(t, m)
			x.s.store, x.s.events = ended, make(chan event, 2)
			x.s.events <- event{m: m, news: news{At: new(int)}}
			for _, e := range c.at {
				e.m = m
				x.s.events <- e
			}
			res := x.session.run(&Program{Faults: []Fault{{Kind: "store"}}})
			if len(res.Findings) != 1 || !strings.Contains(res.Findings[0].Text, "the process has ended") {
				t.Errorf("findings %v, want the end of the store", res.Findings)
			}
		})
	}
}
