package launch

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"tutti/bootstrap"
	"tutti/bootstrap/storetest"
	"tutti/pg/membership"
)

// patience bounds every wait of these tests; none of them depends on its value.
const patience = 30 * time.Second

// dead is the number of no process.
const dead = 1 << 30

func get[T any](t *testing.T, what string, c <-chan T) (x T) {
	t.Helper()
	select {
	case x = <-c:
	case <-time.After(patience):
		t.Fatalf("%s: nothing came", what)
	}
	return x
}

// fake is a launcher of processes that are only numbers: i runs as pid 100+i.
type fake struct{ *launcher }

func newFake(t *testing.T, n, restarts, standby int) fake {
	l := &launcher{Options: Options{N: n, Nodes: 2, Elastic: true,
		MaxRestarts: restarts, Standby: standby, Quiet: true},
		ranks: make([]rank, n+standby),
		again: make(chan int, n), in: map[int]entry{}, hold: &store{}, live: n + standby}
	for i := range l.ranks {
		l.ranks[i] = rank{started: true, pid: 100 + i, since: time.Now()}
	}
	return fake{l}
}

// views has it know that views are used.
func (f fake) useViews() { f.launcher.views = &views{}; f.launcher.views.seen.Store(true) }

func (f fake) let(i, slot int) {
	f.enter(entry{group: f.ranks[i].pid, slot: slot, incarnation: uint64(f.ranks[i].pid)})
}

func (f fake) die(i, code int) {
	f.live--
	f.ranks[i].ended = true
	f.rankEnded(i, code, "exited with code "+strconv.Itoa(code))
	delete(f.in, f.ranks[i].pid)
}

// restart is what revive does when i is due.
func (f fake) restart(t *testing.T, i int) {
	t.Helper()
	if got := get(t, "a restart", f.again); got != i {
		t.Fatalf("%d is due, not %d", got, i)
	}
	r := &f.ranks[i]
	r.due, r.ended, r.pid = nil, false, r.pid+1000
	f.pending--
	f.live++
}

func (f fake) means(t *testing.T, code int) {
	t.Helper()
	if got, why := f.verdict(); got != code {
		t.Errorf("the job means %d (%s), want %d", got, why, code)
	}
}

func TestRestarts(t *testing.T) {
	t.Run("another node's good end begins the job's", func(t *testing.T) {
		f := newFake(t, 3, 5, 0)
		f.die(0, 9)
		if f.pending != 1 || f.ranks[0].due == nil {
			t.Fatal("it is not to be started again")
		}
		f.hold.well.Store(true)
		f.settle()
		if f.pending != 0 || f.ranks[0].due != nil {
			t.Error("it is still to be started again")
		}
		f.means(t, 0)
		f.revive(0) // was due already: void
		f.die(1, 3)
		if f.pending != 0 || f.live != 1 {
			t.Error("one that died at the end is to be started again")
		}
		f.means(t, 3)
		f.die(2, 0)
		f.means(t, 3)
	})
	t.Run("a restart whose place is taken", func(t *testing.T) {
		f := newFake(t, 2, 1, 1)
		f.useViews()
		f.let(0, 0)
		f.let(1, 1)
		f.die(1, 9)
		f.let(2, 1)
		f.restart(t, 1)
		if f.part(1) || !f.part(2) {
			t.Errorf("part of the job: the restart %v, the standby %v", f.part(1), f.part(2))
		}
		f.die(0, 0)
		if f.idle() {
			t.Error("the standby is a rank, and runs")
		}
		f.die(2, 0)
		if !f.idle() {
			t.Error("the restart is all there is, and can only wait")
		}
		f.means(t, 0)
		f.die(1, 7) // had no part in it
		f.means(t, 0)
	})
	t.Run("a restart that came back", func(t *testing.T) {
		for when, code := range map[string]int{"before the end began": 7, "after": 0} {
			f := newFake(t, 2, 1, 0)
			f.useViews()
			f.die(1, 9)
			f.restart(t, 1)
			if when == "after" {
				f.die(0, 0)
			}
			f.let(1, 1)
			if when != "after" {
				f.die(0, 0)
			}
			if f.idle() {
				t.Errorf("let in %s, it is taken for one that waits", when)
			}
			f.die(1, 7)
			f.means(t, code)
		}
	})
	t.Run("all restarts may begin anew", func(t *testing.T) {
		f := newFake(t, 2, 1, 0)
		f.useViews()
		for i := range 2 {
			f.die(i, 9)
			f.restart(t, i)
		}
		if f.idle() {
			t.Error("they are taken for what is left of a job")
		}
		f.means(t, 9)
		f.die(0, 0)
		f.means(t, 0)
	})
	t.Run("without views a restart is a rank", func(t *testing.T) {
		f := newFake(t, 2, 1, 0)
		f.die(1, 9)
		f.restart(t, 1)
		f.die(0, 0)
		if f.idle() {
			t.Error("it is taken for one that waits")
		}
		f.die(1, 7)
		f.means(t, 7)
	})
	t.Run("interrupted after a failure that counts", func(t *testing.T) {
		f := newFake(t, 3, 0, 0)
		f.die(0, 0)
		f.user = syscall.SIGINT
		f.means(t, 0)
		f.die(1, 7)
		f.means(t, 7)
		f.die(2, 0)
		f.means(t, 7)
	})
	t.Run("only spares are left", func(t *testing.T) {
		f := newFake(t, 1, 0, 2)
		f.useViews()
		f.die(1, 5) // no rank
		f.die(0, 9)
		if !f.idle() {
			t.Error("no rank is lost that the last could replace, and it runs on")
		}
		f.means(t, 9)
	})
}

// TestPausesBeforeRestarts: the pauses grow with the processes in a row that ended soon, and not
// with all that a job of months has lost.
func TestPausesBeforeRestarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(t, 1, 1000, 0)
		dies := func(after, pause time.Duration) {
			t.Helper()
			time.Sleep(after)
			died := time.Now()
			f.die(0, 9)
			f.restart(t, 0)
			if got := time.Since(died); got != pause {
				t.Errorf("restart %d comes after %v, want %v", f.ranks[0].restarts, got, pause)
			}
			f.ranks[0].since = time.Now()
		}
		for range 2 {
			for range 20 {
				dies(soon, 0)
			}
			dies(0, 0)
			for n := range 10 {
				dies(soon-1, min(restartPause<<n, 256*restartPause))
			}
		}
		if got := f.ranks[0].restarts; got != 62 {
			t.Errorf("%d restarts are used up, want 62", got)
		}
	})
}

// TestRestartThatFails: where a rank cannot be started again, the pauses are those of one that ends
// soon, however long its last process had run.
func TestRestartThatFails(t *testing.T) {
	f := newFake(t, 1, 9, 0)
	f.env = func(int) []string { return nil }
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	null.Close()
	f.Stdin = null
	f.ranks[0].since = time.Now().Add(-time.Hour)
	f.ranks[0].due = time.NewTimer(0)
	f.live, f.pending = 0, 1
	if f.revive(0); f.ranks[0].quick != 1 || f.pending != 1 {
		t.Errorf("%+v: the start counts as that of a process that ran", f.ranks[0])
	}
}

// A rank that a signal kills may take longer to end than the ranks that exit because of it: it is
// named, and gives the exit code. One that is killed while the launcher ends the ranks does not.
func TestKilledRankIsNamedAfterItsVictims(t *testing.T) {
	exit := func(code int) syscall.WaitStatus { return syscall.WaitStatus(code << 8) }
	killed := func(s syscall.Signal) syscall.WaitStatus { return syscall.WaitStatus(s) }
	const ended = "; ended the 2 ranks still running"
	for name, c := range map[string]struct {
		first, then syscall.WaitStatus
		dying       bool
		code        int
		says        string
	}{
		"killed": {exit(1), killed(syscall.SIGKILL), true, 137,
			"rank 3 was killed by signal 9 (SIGKILL), and rank 0 exited with code 1" + ended},
		"crashed": {exit(1), killed(syscall.SIGSEGV), true, 139,
			"rank 3 was killed by signal 11 (SIGSEGV), and rank 0 exited with code 1" + ended},
		"killed since": {exit(1), killed(syscall.SIGKILL), false, 1,
			"rank 0 exited with code 1; ended the other 3 ranks"},
		"crashed as it ended": {exit(42), killed(syscall.SIGSEGV), false, 42,
			"rank 0 exited with code 42; ended the other 3 ranks"},
		"exited later": {exit(1), exit(2), true, 1, "rank 0 exited with code 1; ended the other 3 ranks"},
		"killed first": {killed(syscall.SIGKILL), killed(syscall.SIGSEGV), true, 137,
			"rank 0 was killed by signal 9 (SIGKILL); ended the other 3 ranks"},
	} {
		t.Run(name, func(t *testing.T) {
			file, err := os.Create(filepath.Join(t.TempDir(), "errors"))
			if err != nil {
				t.Fatal(err)
			}
			defer file.Close()
			f := newFake(t, 4, 0, 0)
			f.Elastic, f.Nodes, f.world, f.Quiet, f.Stderr = false, 1, 4, false, file
			f.stopping = true // it sends no signals
			if f.out, err = NewOutput(file, file, false, 4, "", nil, f.say); err != nil {
				t.Fatal(err)
			}
			for _, e := range []Event{{ID: 0, Exited: true, Status: c.first}, {ID: 1, Exited: true, Status: exit(1)},
				{ID: 3, Exited: true, Status: c.then}} {
				if f.event(e) != nil {
					t.Fatal("the guard is lost")
				}
				f.ranks[3].dying = c.dying
			}
			f.summary()
			f.out.Flush()
			text, err := os.ReadFile(file.Name())
			if err != nil || f.code != c.code || string(text) != "tutti: "+c.says+"\n" {
				t.Errorf("%d, %q (%v), want %d, %q", f.code, text, err, c.code, c.says)
			}
		})
	}
}

// TestSummary: how many ranks were ended, and how many of them by SIGKILL.
func TestSummary(t *testing.T) {
	for _, c := range []struct {
		n, running, killed int
		says               string
	}{
		{1, 0, 0, ""},
		{2, 1, 0, "; ended the other rank"},
		{2, 1, 1, "; ended the other rank, by SIGKILL"},
		{3, 1, 0, "; ended the rank still running"},
		{3, 1, 1, "; ended the rank still running, by SIGKILL"},
		{3, 2, 0, "; ended the other 2 ranks"},
		{3, 2, 1, "; ended the other 2 ranks, 1 of them by SIGKILL"},
		{3, 2, 2, "; ended the other 2 ranks, all by SIGKILL"},
		{4, 2, 0, "; ended the 2 ranks still running"},
	} {
		said := saidBy(t, func(l *launcher) {
			l.Nodes, l.world, l.code, l.why, l.running, l.killed = 1, c.n, 7, "it failed", c.running, c.killed
			l.summary()
		})
		if said != "tutti: it failed"+c.says+"\n" {
			t.Errorf("%+v: %q", c, said)
		}
	}
}

// TestInterruptWithoutRanks: while all ranks wait for their restarts, no rank gets the signal.
func TestInterruptWithoutRanks(t *testing.T) {
	for live, want := range map[int]string{0: "SIGINT: no rank is running; the job ends\n",
		1: "SIGINT: passed on to 1 rank; what has not ended in "} {
		said := saidBy(t, func(l *launcher) {
			l.live, l.guard = live, newTestGuard(t)
			l.signal(syscall.SIGINT)
		})
		if !strings.HasPrefix(said, "tutti: "+want) {
			t.Errorf("%d ranks: %q", live, said)
		}
	}
}

// saidBy returns what a launcher of nothing prints while f runs.
func saidBy(t *testing.T, f func(*launcher)) string {
	t.Helper()
	file, err := os.Create(filepath.Join(t.TempDir(), "errors"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	l := &launcher{Options: Options{Stderr: file}}
	if l.out, err = NewOutput(file, file, false, 1, "", nil, l.say); err != nil {
		t.Fatal(err)
	}
	f(l)
	l.out.Flush()
	text, err := os.ReadFile(file.Name())
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestDying(t *testing.T) {
	for script, want := range map[string]bool{"kill -9 $$": true, "kill -15 $$": true, "exit 1": false} {
		c := exec.Command("sh", "-c", script)
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		err := unix.EINTR
		for err == unix.EINTR {
			err, _ = unix.Waitid(unix.P_PID, c.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil).(unix.Errno)
		}
		if got := dying(c.Process.Pid); err != 0 || got != want { // it has ended, and nothing has waited for it
			t.Errorf("%s: %v, %v", script, got, err)
		}
		c.Wait()
	}
	for pid, want := range map[int]bool{os.Getpid(): false, dead: true} {
		if dying(pid) != want {
			t.Errorf("%d is dying: %v, want %v", pid, !want, want)
		}
	}
}

// register puts a record of this process as slot into the store, changed by change.
func register(t *testing.T, s bootstrap.Store, slot int, incarnation uint64, change func(*bootstrap.Record)) {
	t.Helper()
	r := bootstrap.NewRecord(slot, 4, incarnation, []string{"127.0.0.1:1"})
	if change != nil {
		change(&r)
	}
	b, err := r.Encode()
	if err == nil {
		err = s.Put(t.Context(), bootstrap.RankKey(slot), b, true)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func setView(t *testing.T, s bootstrap.Store, view membership.View) bootstrap.Event {
	t.Helper()
	b := append(make([]byte, 8), view.Encode()...)
	if err := s.Put(t.Context(), membership.ViewKey, b, false); err != nil {
		t.Fatal(err)
	}
	return bootstrap.Event{Key: membership.ViewKey, Value: b, Exists: true}
}

// watchViews watches the views in s until the end of the test.
func watchViews(t *testing.T, s bootstrap.Store) *views {
	v := &views{within: patience, in: make(chan entry), gone: make(chan struct{}, 1),
		forlorn: make(chan struct{}, 1), kick: make(chan struct{}, 1), reads: make(chan chan struct{}, 1)}
	v.ctx, v.stop = context.WithCancel(t.Context())
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		v.watch(s, map[uint64]bool{})
	}()
	t.Cleanup(func() {
		v.stop()
		get(t, "the end of the watch", watched)
	})
	return v
}

func TestViews(t *testing.T) {
	m := storetest.NewMemory()
	defer m.Close()
	s, lives := m.Open(), m.Open()
	defer s.Close()
	v := watchViews(t, s)

	group, err := unix.Getpgid(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	register(t, lives, 0, 10, nil)
	register(t, lives, 1, 11, func(r *bootstrap.Record) { r.Machine = "another" })
	register(t, lives, 2, 12, func(r *bootstrap.Record) { r.Processes = "pid:[1]" })
	register(t, lives, 3, 13, func(r *bootstrap.Record) { r.PID = dead })
	setView(t, lives, membership.First([]uint64{10, 11, 12, 13}))
	in := map[int]entry{}
	for range 2 {
		e := get(t, "who is in", v.in)
		in[e.slot] = e
	}
	if in[0] != (entry{group: group, slot: 0, incarnation: 10}) ||
		in[3] != (entry{group: dead, slot: 3, incarnation: 13, gone: true}) {
		t.Errorf("%+v", in)
	}
	register(t, lives, 1, 21, nil) // waits
	register(t, lives, 2, 22, nil)
	setView(t, lives, membership.First([]uint64{10, 11, 22, 13}))
	if e := get(t, "who is in now", v.in); e != (entry{group: group, slot: 2, incarnation: 22}) {
		t.Errorf("%+v", e)
	}
	if !v.known() {
		t.Error("there have been views")
	}
	v.hurry()
	for range 2 { // the store may be asked again
		v.ask()
		lives.Close()
		get(t, "the end of the group", v.gone)
	}
}

// TestNumbersOfOtherNamespaces: containers of one machine may have the same host name, or several,
// and each has PIDs of its own.
func TestNumbersOfOtherNamespaces(t *testing.T) {
	m := storetest.NewMemory()
	defer m.Close()
	s := m.Open()
	defer s.Close()
	v := watchViews(t, s)
	register(t, s, 0, 10, func(r *bootstrap.Record) { r.Processes = "pid:[1]" })
	register(t, s, 1, 11, func(r *bootstrap.Record) { r.Processes = "" }) // an older build
	register(t, s, 2, 12, func(r *bootstrap.Record) { r.Host = "another name" })
	setView(t, s, membership.First([]uint64{10, 11, 12}))
	if e := get(t, "who is in", v.in); e.slot != 2 {
		t.Errorf("%+v", e)
	}
	get(t, "the end of the entries", v.read())
}

// TestGroupOutlivesItsLeases: a store that was away has ended all leases, and the ranks register
// again a little later. Processes on standby are not dismissed meanwhile.
func TestGroupOutlivesItsLeases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := storetest.NewMemory()
		defer m.Close()
		s, rank := m.Open(), m.Open()
		enter := func() {
			register(t, rank, 0, 10, func(r *bootstrap.Record) { r.Machine = "another" })
		}
		enter()
		setView(t, rank, membership.First([]uint64{10}))
		v := watchViews(t, s)
		v.ask()
		over := func(after time.Duration) bool {
			time.Sleep(after)
			synctest.Wait()
			return len(v.gone) > 0
		}
		for range 2 { // what was seen in the first outage does not count in the second
			m.Expire(rank)
			if over(s.TTL()) {
				t.Fatal("the group counts as over before its rank can be back")
			}
			rank = m.Open()
			if enter(); over(time.Minute) {
				t.Fatal("the group counts as over although its rank is back")
			}
		}
		m.Expire(rank)
		if !over(s.TTL() + 3*time.Second) {
			t.Error("the group does not count as over")
		}
	})
}

// TestViewOfAnEarlierJob: a view that an earlier job of the same name has left does not show which
// ranks are lost.
func TestViewOfAnEarlierJob(t *testing.T) {
	m := storetest.NewMemory()
	defer m.Close()
	s, other := m.Open(), m.Open()
	setView(t, other, membership.First([]uint64{10, 11}))
	register(t, other, 0, 20, nil) // waits for rank 1
	v := watchViews(t, s)
	v.hurry()
	v.ask()
	get(t, "an answer, and so the view", v.gone)
	v.markDead(1)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := other.Wait(ctx, bootstrap.VacantKeys+"1"); err != nil {
		t.Errorf("processes on standby are not told: %v", err)
	}
}

// TestRanksThatWaitInVain: a rank fails for good before the first view, and the others wait for it.
func TestRanksThatWaitInVain(t *testing.T) {
	for name, c := range map[string]struct {
		nodes, restarts, standby int
		registered, view, ends   bool
	}{
		"they wait":                  {1, 0, 0, true, false, true},
		"one restart":                {1, 1, 0, true, false, true},
		"a standby can take it":      {1, 0, 1, true, false, false},
		"they have not joined":       {1, 0, 0, false, false, false},
		"there is a view":            {1, 0, 0, true, true, false},
		"other nodes may have spare": {2, 0, 0, true, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := storetest.NewMemory()
				defer m.Close()
				s, rank := m.Open(), m.Open()
				f := newFake(t, 2, c.restarts, c.standby)
				f.Nodes = c.nodes
				f.launcher.views = watchViews(t, s)
				if c.registered {
					register(t, rank, 0, 10, func(r *bootstrap.Record) { r.Machine = "another" })
				}
				if c.view {
					setView(t, rank, membership.First([]uint64{10, 11}))
				}
				stuck := func() bool {
					f.settle()
					time.Sleep(time.Minute)
					synctest.Wait()
					return len(f.views.forlorn) > 0
				}
				f.die(1, 9)
				if c.restarts > 0 {
					if stuck() {
						t.Error("they wait for a restart, and not in vain")
					}
					f.restart(t, 1)
					f.die(1, 9)
				}
				if got := stuck(); got != c.ends {
					t.Errorf("they wait in vain: %v, want %v", got, c.ends)
				}
				if !c.ends {
					return
				}
				f.stopping = true
				if f.giveUp(); f.code != 0 {
					t.Error("it has failed as it was ending")
				}
				f.stopping, f.guard = false, newTestGuard(t)
				if f.giveUp(); f.code != 9 || !strings.HasPrefix(f.why, "rank 1 exited with code 9 for good") {
					t.Errorf("%d, %s", f.code, f.why)
				}
			})
		})
	}
}

// TestStandbyEndsAtOnce: a process on standby is admitted, and its end is noticed first.
func TestStandbyEndsAtOnce(t *testing.T) {
	for _, admitted := range []bool{true, false} {
		m := storetest.NewMemory()
		defer m.Close()
		s := m.Open()
		f := newFake(t, 1, 0, 1)
		f.launcher.views = watchViews(t, s)
		f.die(0, 9)
		f.ranks[1].pid = dead
		register(t, s, 0, 11, func(r *bootstrap.Record) { r.PID = dead })
		view := membership.First([]uint64{10})
		if admitted {
			view = membership.First([]uint64{11})
		}
		setView(t, s, view)
		if err := f.event(Event{ID: 1, PID: dead, Exited: true}); err != nil {
			t.Fatal(err)
		}
		f.means(t, map[bool]int{true: 0, false: 9}[admitted])
	}
}

// TestEndsWhileTheStoreIsAway: the launcher waits once for the admissions that the store shows, and
// again when it has been told, and a signal ends the wait.
func TestEndsWhileTheStoreIsAway(t *testing.T) {
	m := storetest.NewMemory()
	defer m.Close()
	s := m.Open()
	f := newFake(t, 1, 0, 3)
	v := &views{within: patience, in: make(chan entry), gone: make(chan struct{}, 1),
		reads: make(chan chan struct{}, 1)}
	f.launcher.views, f.signals = v, make(chan os.Signal, 1)
	f.signals <- syscall.SIGPIPE // means nothing
	f.learn(1)
	if len(f.signals) > 0 {
		t.Error("nobody has looked at the signals")
	}
	f.learn(2) // does not wait: nothing would end that but time
	first := v.reading
	v.ctx, v.stop = context.WithCancel(t.Context())
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		v.watch(s, map[uint64]bool{})
	}()
	get(t, "what the store shows", first)
	if done := v.read(); done == nil {
		t.Error("the store is there, and is not asked")
	} else {
		get(t, "what the store shows now", done)
	}
	v.stop()
	get(t, "the end of the watch", watched)
}

// TestEntriesOfEndedProcesses: the admission of a process whose end was judged changes nothing.
func TestEntriesOfEndedProcesses(t *testing.T) {
	f := newFake(t, 1, 0, 1)
	f.enter(entry{group: 100, slot: 0, incarnation: 7, gone: true})
	f.enter(entry{group: 4000, slot: 3, incarnation: 8, gone: true})
	f.enter(entry{group: 101, slot: 2, incarnation: 9, gone: true})
	if len(f.in) != 1 || f.in[101].slot != 2 {
		t.Errorf("%+v are in, want the one on standby, whose end is to be judged", f.in)
	}
}

// TestEntriesOfStrangers: a rank that is started again may get the number of an admitted process
// that another launcher has started on this machine. The store may show its own admission before
// the guard has told its number.
func TestEntriesOfStrangers(t *testing.T) {
	f := newFake(t, 2, 4, 0)
	f.useViews()
	failed := false
	starts := func(pid int, early ...int) { // 0: it does not
		t.Helper()
		if !failed {
			f.die(0, 9)
		}
		failed = pid == 0
		if got := get(t, "a restart", f.again); got != 0 {
			t.Fatalf("%d is due", got)
		}
		r := &f.ranks[0]
		r.due, r.started, r.ended = nil, false, false
		f.pending--
		f.live++
		for slot, pid := range early {
			f.enter(entry{group: pid, slot: slot, incarnation: uint64(pid)})
		}
		e := Event{ID: 0, PID: pid}
		if failed {
			e.Error = "no such file"
		}
		if err := f.event(e); err != nil {
			t.Fatal(err)
		}
	}
	f.enter(entry{group: 4000, slot: 2, incarnation: 7})
	if starts(4000); f.part(0) {
		t.Error("a stranger's admission counts for the rank that got its number")
	}
	if starts(4001, 4001, 4002); !f.part(0) || f.in[4001].incarnation != 4001 {
		t.Error("the rank was admitted before its number was known, and does not count")
	}
	if len(f.in) != 1 || len(f.early) != 0 {
		t.Errorf("%+v are in, and %+v kept, want the rank alone", f.in, f.early)
	}
	starts(0, 4003)
	if starts(4003); f.part(0) || len(f.early) != 0 {
		t.Errorf("a stranger's admission beside a start that failed counts for the next process; %+v kept", f.early)
	}
}

func TestJobIsOver(t *testing.T) {
	m := storetest.NewMemory()
	defer m.Close()
	s := m.Open()
	defer s.Close()
	is := func(want bool, had bootstrap.Event, view membership.View) {
		t.Helper()
		if over, err := isOver(t.Context(), s, had, view); over != want || err != nil {
			t.Errorf("over: %v, %v; want %v", over, err, want)
		}
	}
	is(true, bootstrap.Event{Key: membership.ViewKey}, membership.View{})
	first := membership.First([]uint64{10, 11})
	had := setView(t, s, first)
	is(false, bootstrap.Event{Key: membership.ViewKey}, membership.View{}) // it has begun meanwhile
	is(true, had, first)
	register(t, s, 1, 21, nil) // waits for the place of 11
	is(true, had, first)
	register(t, s, 0, 10, nil)
	is(false, had, first)
	setView(t, s, membership.First([]uint64{10, 21})) // lets it in,
	if err := s.Delete(t.Context(), bootstrap.RankKey(0)); err != nil {
		t.Fatal(err) // and goes
	}
	is(false, had, first)
	s.Close()
	if over, err := isOver(t.Context(), s, had, first); over || err == nil {
		t.Errorf("%v, %v", over, err)
	}
}

// twoNodes returns node 0's part in a job of two nodes, which watches until the end of the test. If
// nodes is nil, it watches what there is in m.
func twoNodes(t *testing.T, m *storetest.Memory, nodes <-chan bootstrap.Event, change func(*store)) *store {
	s := &store{handle: m.Open(), nodes: 2, failc: make(chan broken, 1), alone: make(chan struct{}),
		wake: make(chan struct{}, 1), watched: make(chan struct{}), say: func(string) {}, record: []byte("{}"),
		open: func(context.Context) (bootstrap.Store, error) { return m.Open(), nil }}
	change(s)
	ctx, cancel := context.WithCancel(t.Context())
	if nodes == nil {
		nodes = s.handle.Watch(ctx, nodeKeys)
		if e := get(t, "the other's record", nodes); !e.Exists {
			t.Fatalf("%+v", e)
		}
	}
	go s.watch(ctx, nodes, map[int]uint64{})
	t.Cleanup(func() {
		cancel()
		get(t, "the end of the watch", s.watched)
		s.handle.Close()
	})
	return s
}

// putNode puts an empty record of node 1, or how it ended.
func putNode(t *testing.T, s bootstrap.Store, end *failure) {
	t.Helper()
	err := error(nil)
	if end == nil {
		err = s.Put(t.Context(), nodeKeys+"1", []byte("{}"), true)
	} else if b, merr := json.Marshal(end); merr == nil {
		err = s.Put(t.Context(), doneKeys+"1", b, false)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestOtherNodes: how other nodes' ends matter here.
func TestOtherNodes(t *testing.T) {
	for _, c := range []struct {
		name    string
		elastic bool
		end     *failure // nil: its launcher vanishes
		why     string   // that this node fails
		code    int
		well    bool
	}{
		{"well", true, &failure{}, "", 0, true},
		{"its ranks died, and this goes on", true, &failure{Code: 9, Why: "x"}, "", 0, false},
		{"its ranks died", false, &failure{Code: 9, Why: "x"}, "node 1: x", 9, false},
		{"it ends all", true, &failure{Code: 255, Why: "x", End: true}, "node 1: x", 255, false},
		{"it vanishes, and this goes on", true, nil, "", 0, false},
		{"it vanishes", false, nil, "node 1: its launcher is gone", CodeLaunch, false},
		{"a reason that controls the terminal", false, &failure{Code: 9, Why: "\x1b[2J\r\u009b\u202ex"},
			"node 1:  [2J   x", 9, false},
		{"no exit status", false, &failure{Code: 256, Why: "x"}, "node 1: unreadable record", CodeLaunch, false},
		{"no exit status, and this goes on", true, &failure{Code: -1, Why: "x"}, "", 0, false},
		{"a reason of a success", false, &failure{Why: "x"}, "node 1: unreadable record", CodeLaunch, false},
		{"a success that ends all", false, &failure{End: true}, "node 1: unreadable record", CodeLaunch, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := storetest.NewMemory()
			defer m.Close()
			other := m.Open()
			putNode(t, other, nil)
			s := twoNodes(t, m, nil, func(s *store) { s.elastic = c.elastic })
			if c.end != nil {
				putNode(t, other, c.end)
			}
			other.Close()
			get(t, "its end", s.alone)
			if s.wellElsewhere() != c.well || len(s.elsewhere()) != map[bool]int{true: 1}[c.well] {
				t.Errorf("ended well: %v", s.wellElsewhere())
			}
			if c.why == "" && len(s.failed()) > 0 ||
				c.why != "" && get(t, "the failure", s.failed()) != (broken{c.code, c.why}) {
				t.Errorf("it does not end this node as it should")
			}
		})
	}
}

// TestNodesOfAnEarlierJob: what a job of the same name left in the store is not of this one's
// nodes.
func TestNodesOfAnEarlierJob(t *testing.T) {
	for name, left := range map[string]struct {
		key  string
		end  failure
		late bool // it ends when this node has entered
	}{
		"a third node fails":       {doneKeys + "2", failure{Code: 9, Why: "x"}, false},
		"a third node ends well":   {doneKeys + "2", failure{}, false},
		"a third node":             {nodeKeys + "2", failure{}, false},
		"a negative node":          {doneKeys + "-1", failure{Code: 9, Why: "x"}, false},
		"another spelling":         {doneKeys + "01", failure{Code: 9, Why: "x"}, false},
		"this job's second node":   {doneKeys + "1", failure{Code: 9, Why: "x", Incarnation: 5}, false},
		"the second node was well": {doneKeys + "1", failure{Incarnation: 5}, false},
		"the second node is late":  {doneKeys + "1", failure{Code: 9, Why: "x", Incarnation: 5}, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := storetest.NewMemory()
				defer m.Close()
				old, other := m.Open(), m.Open()
				leave := func() {
					b, err := json.Marshal(left.end)
					if err == nil {
						err = old.Put(t.Context(), left.key, b, strings.HasPrefix(left.key, nodeKeys))
					}
					if err != nil {
						t.Fatal(err)
					}
				}
				if !left.late {
					leave()
				}
				putNode(t, other, nil)
				s := twoNodes(t, m, nil, func(s *store) {
					if err := s.enter(t.Context(), "j"); err != nil {
						t.Fatal(err)
					}
				})
				if left.late {
					leave()
				}
				synctest.Wait()
				old.Close() // its leases end
				time.Sleep(time.Minute)
				select {
				case f := <-s.failed():
					t.Errorf("it ends this node: %s", f.why)
				case <-s.alone:
					t.Error("the other node has ended")
				default:
				}
				if s.wellElsewhere() {
					t.Error("the other node has ended well")
				}
				// Node 1's launcher goes, and may or may not have said how it ended.
				if left.key == doneKeys+"1" {
					other.Close()
					if f := get(t, "the failure", s.failed()); f.why != "node 1: its launcher is gone" {
						t.Errorf("it ends this node: %s", f.why)
					}
					return
				}
				putNode(t, other, &failure{})
				get(t, "its end", s.alone)
				if len(s.failed()) > 0 || !s.wellElsewhere() {
					t.Error("the other node has not ended well")
				}
			})
		})
	}
}

func TestRecordsOfNodesArePlain(t *testing.T) {
	r, err := readNode([]byte(`{"Host":"a\u001b[2J","Failure":"\u009bend","Refusal":"no\u202e\n"}`))
	if want := (nodeRecord{Host: "a [2J", Failure: " end", Refusal: "no  "}); err != nil || r != want {
		t.Errorf("%+v, %v", r, err)
	}
}

// TestNodesLoseLeases: a node whose launcher was stopped, or could not reach the store, is no dead
// one.
func TestNodesLoseLeases(t *testing.T) {
	goesOn := func(t *testing.T, s *store, other bootstrap.Store, incarnation uint64) {
		t.Helper()
		putNode(t, other, &failure{Incarnation: incarnation})
		select {
		case f := <-s.failed():
			t.Fatalf("it ends this node: %s", f.why)
		case <-s.alone:
		case <-time.After(patience):
			t.Fatal("the other's good end is not noticed")
		}
		if len(s.failed()) > 0 || !s.wellElsewhere() {
			t.Error("the other has not ended well")
		}
	}
	long := func(s *store) { s.back = time.Hour }
	t.Run("the other comes back", func(t *testing.T) {
		m := storetest.NewMemory()
		defer m.Close()
		other, nodes := m.Open(), make(chan bootstrap.Event)
		s := twoNodes(t, m, nodes, long)
		nodes <- bootstrap.Event{Key: nodeKeys + "1"}
		nodes <- bootstrap.Event{Key: nodeKeys + "1", Exists: true, Value: []byte("{}")}
		goesOn(t, s, other, 0)
	})
	t.Run("the other is back before the event that says so", func(t *testing.T) {
		m := storetest.NewMemory()
		defer m.Close()
		other, nodes, asked := m.Open(), make(chan bootstrap.Event), make(chan struct{}, 1)
		putNode(t, other, nil)
		s := twoNodes(t, m, nodes, func(s *store) { s.handle = asking{s.handle, doneKeys + "1", asked} })
		nodes <- bootstrap.Event{Key: nodeKeys + "1"}
		get(t, "the check", asked)
		goesOn(t, s, other, 0)
	})
	t.Run("the other comes back late", func(t *testing.T) {
		for _, end := range []failure{{}, {Code: 9, Why: "x", End: true}} {
			synctest.Test(t, func(t *testing.T) {
				m := storetest.NewMemory()
				defer m.Close()
				other, nodes, said := m.Open(), make(chan bootstrap.Event), make(chan string, 1)
				s := twoNodes(t, m, nodes, func(s *store) {
					s.elastic, s.say = true, func(text string) { said <- text }
				})
				nodes <- bootstrap.Event{Key: nodeKeys + "1"}
				if text := get(t, "its loss", said); text != "node 1: its launcher is gone; the others go on" {
					t.Errorf("said %q", text)
				}
				get(t, "that it is gone", s.alone)
				nodes <- bootstrap.Event{Key: nodeKeys + "1", Exists: true, Value: []byte("{}")}
				if text := get(t, "its return", said); text != "node 1: its launcher is back" {
					t.Errorf("said %q", text)
				}
				synctest.Wait()
				select {
				case <-s.alone:
					t.Error("the store ends although the other is back")
				default:
				}
				if end.End {
					putNode(t, other, &end)
					if f := get(t, "the failure", s.failed()); f.why != "node 1: x" {
						t.Errorf("it ends this node: %s", f.why)
					}
					return
				}
				goesOn(t, s, other, 0)
			})
		}
	})
	t.Run("another launcher takes its place", func(t *testing.T) {
		m := storetest.NewMemory()
		defer m.Close()
		nodes := make(chan bootstrap.Event)
		s := twoNodes(t, m, nodes, func(*store) {})
		nodes <- bootstrap.Event{Key: nodeKeys + "1", Exists: true, Value: []byte(`{"Incarnation": 7}`)}
		if f := get(t, "the failure", s.failed()); f.why != "node 1: its launcher is gone" {
			t.Errorf("it ends this node: %s", f.why)
		}
	})
	t.Run("another launcher has taken its place", func(t *testing.T) {
		m := storetest.NewMemory()
		defer m.Close()
		other, nodes := m.Open(), make(chan bootstrap.Event)
		s := twoNodes(t, m, nodes, long)
		nodes <- bootstrap.Event{Key: nodeKeys + "1"} // that of a dead one
		nodes <- bootstrap.Event{Key: nodeKeys + "1", Exists: true, Value: []byte(`{"Incarnation": 7}`)}
		goesOn(t, s, other, 7)
	})
	t.Run("this one comes back", func(t *testing.T) {
		m := storetest.NewMemory()
		defer m.Close()
		other := m.Open()
		putNode(t, other, nil)
		s := twoNodes(t, m, nil, long)
		m.Expire(s.handle)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		if b, err := other.Wait(ctx, nodeKeys+"0"); err != nil || string(b) != "{}" {
			t.Errorf("its record is now %q, %v", b, err)
		}
		goesOn(t, s, other, 0)
	})
	t.Run("only this one comes back", func(t *testing.T) {
		m := storetest.NewMemory()
		defer m.Close()
		s := twoNodes(t, m, make(chan bootstrap.Event), func(*store) {})
		m.Expire(s.handle)
		if f := get(t, "the failure", s.failed()); f.why != "node 1: its launcher is gone" {
			t.Errorf("it ends this node: %s", f.why)
		}
	})
	t.Run("the store has ended with its node", func(t *testing.T) {
		m := storetest.NewMemory()
		defer m.Close()
		s := twoNodes(t, m, make(chan bootstrap.Event), func(s *store) { s.served = true; s.refused.Store(true) })
		m.Expire(s.handle)
		const why = "the job's store, which node 0 serves, is gone: lease lost"
		if f := get(t, "the failure", s.failed()); !strings.HasPrefix(f.why, why) {
			t.Errorf("it ends this node: %s", f.why)
		}
	})
}

// asking is a store that says when it has been asked for a key.
type asking struct {
	bootstrap.Store
	key   string
	asked chan struct{} // has room for one
}

func (a asking) Get(ctx context.Context, key string) ([]byte, error) {
	b, err := a.Store.Get(ctx, key)
	if key == a.key {
		select {
		case a.asked <- struct{}{}:
		default:
		}
	}
	return b, err
}

// watching is a store that says when it is watched.
type watching struct {
	bootstrap.Store
	watched chan struct{}
}

func (w watching) Watch(ctx context.Context, key string) <-chan bootstrap.Event {
	c := w.Store.Watch(ctx, key)
	close(w.watched)
	return c
}

// TestNodeIsStartedAgain: a node's record is that of its killed launcher until the lease has ended.
func TestNodeIsStartedAgain(t *testing.T) {
	m := storetest.NewMemory()
	defer m.Close()
	killed, w := m.Open(), watching{m.Open(), make(chan struct{})}
	putNode(t, killed, nil)
	s := &store{handle: w, node: 1, nodes: 2, me: 1, record: []byte("new")}
	entered := make(chan error, 1)
	go func() { entered <- s.enter(t.Context(), "x") }()
	get(t, "the wait for the lease's end", w.watched)
	m.Expire(killed)
	if err := get(t, "its record", entered); err != nil {
		t.Error(err)
	}
	if b, err := m.Open().Get(t.Context(), nodeKeys+"1"); err != nil || string(b) != "new" {
		t.Errorf("the record is %q, %v", b, err)
	}
}
