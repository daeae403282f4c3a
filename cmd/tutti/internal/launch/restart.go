package launch

import (
	"fmt"
	"slices"
	"syscall"
	"time"
)

// The launcher's behaviour with Options.Elastic: ranks that die leave the others running, are
// started again, and may be replaced by a process on standby.

// A rank is started again at once, unless its process and the one before it ended soon after their
// starts. Then restartPause comes first, doubled with each further one in a row, up to 25.6 s.
const (
	soon         = time.Minute
	restartPause = 100 * time.Millisecond
)

// death is how a rank failed; Code 0: none did.
type death struct {
	code int
	why  string
}

// ending reports whether the job has begun to end: a rank has succeeded, here or on another node.
// No rank is started again afterwards.
func (l *launcher) ending() bool { return l.well > 0 || l.hold.wellElsewhere() }

// part reports whether local process i is a rank of the job, as opposed to one that waits for
// admission: processes on standby and restarted ranks are ranks only after they have been in a
// view. If views are not used, or incarnations cannot be identified, a restarted rank is one.
func (l *launcher) part(i int) bool {
	_, in := l.in[l.ranks[i].pid]
	return in || i < l.N && (l.ranks[i].restarts == 0 || !l.views.known())
}

// idle reports whether all processes here wait for admission. Until the job has begun to end,
// restarted ranks may be about to begin the job anew, all together.
func (l *launcher) idle() bool {
	for i, r := range l.ranks {
		if !r.ended && (l.part(i) || i < l.N && !l.ending()) {
			return false
		}
	}
	return l.live > 0 && l.pending == 0
}

// settle cancels planned starts when the job ends, and ends processes that wait for admission when
// no rank is left to admit them.
func (l *launcher) settle() {
	if l.stopping || l.ending() {
		l.views.hurry()
		for i := range l.ranks {
			if r := &l.ranks[i]; r.due != nil {
				r.due.Stop() // or its token is in l.again, and void
				r.due = nil
				l.pending--
				if !l.stopping {
					l.tell("%s is not started again: the job is ending", l.who(i))
				}
			}
		}
	}
	l.views.setShort(!l.stopping && !l.ending() && l.short())
	switch {
	case l.stopping || l.asked || l.views == nil || !l.idle():
	case l.Nodes == 1 && l.deaths == 0: // no place has become free
		l.dismiss()
	default:
		l.asked = true
		l.views.ask()
	}
}

// hasAll reports whether no process of the job can come from elsewhere: this launcher serves the
// store to its own processes only.
func (l *launcher) hasAll() bool { return l.Nodes == 1 && l.Store == "" }

// short reports whether fewer processes are left than the job needs to begin.
func (l *launcher) short() bool {
	missing := 0
	for i, r := range l.ranks {
		switch {
		case i < l.N && r.fate.code != 0:
			missing++
		case i >= l.N && !r.ended:
			missing--
		}
	}
	return l.hasAll() && missing > 0
}

// giveUp ends the job, whose ranks wait for one that failed for good before there was a view: their
// own restarts would wait for it again. Without restarts and processes on standby, which views are
// watched for, Join tells the program which rank is missing.
func (l *launcher) giveUp() {
	if l.stopping || l.ending() || l.views.known() || !l.short() {
		return
	}
	for _, r := range l.ranks {
		if r.fate.code != 0 {
			l.fail(r.fate.code, r.fate.why+" for good before the job had begun, and it cannot begin without it")
			return
		}
	}
}

// dismiss asks the processes that wait for admission to end. That is no failure.
func (l *launcher) dismiss() {
	l.dismissed = true
	l.end(syscall.SIGTERM)
}

// rankEnded handles the end of a process while the others continue.
func (l *launcher) rankEnded(i, code int, how string) {
	r := &l.ranks[i]
	e, in := l.in[r.pid]
	switch {
	case code == 0 && (i < l.N || in):
		l.well++
	case code == 0:
		l.tell("%s has ended", l.who(i))
	case i >= l.N && !in || l.ending() && (!l.part(i) || e.late):
		l.tell("%s %s; it had not taken a rank's place", l.who(i), how)
	default:
		l.deaths++
		d := death{code, l.who(i) + " " + how}
		if l.first.code == 0 {
			l.first = d
		}
		switch {
		case l.ending():
			if l.late.code == 0 {
				l.late = d
			}
			l.tell("%s; the others go on", d.why)
		case i < l.N && r.restarts < l.MaxRestarts:
			r.restarts++
			if r.quick++; time.Since(r.since) >= soon {
				r.quick = 0
			}
			pause := time.Duration(0)
			if r.quick > 1 {
				pause = restartPause << min(r.quick-2, 8)
			}
			l.pending++
			r.due = time.AfterFunc(pause, func() { l.again <- i }) // the channel has room for all
			l.tell("%s; starting it again (%d of %d)", d.why, r.restarts, l.MaxRestarts)
		case l.live+l.pending > 0:
			if i < l.N {
				r.fate = d
				l.views.markDead(l.name(i))
			}
			l.tell("%s; the others go on", d.why)
		}
	}
}

// revive starts rank i again.
func (l *launcher) revive(i int) {
	if l.ranks[i].due == nil {
		return // the job has begun to end
	}
	l.ranks[i].due = nil
	l.pending--
	if err := l.start(i); err != nil {
		l.ranks[i].pid = 0
		l.rankEnded(i, CodeNoExec, fmt.Sprintf("could not be started again: %v", err))
	}
}

// enterEarly handles the admissions that came before a process was known, which has started now, or
// has not.
func (l *launcher) enterEarly() {
	early := l.early
	l.early = nil
	for _, in := range early {
		l.enter(in)
	}
}

// enter handles the admission of a process to the group. Processes that are not the launcher's, or
// have ended, are ignored: their numbers may come again.
func (l *launcher) enter(e entry) {
	i := slices.IndexFunc(l.ranks, func(r rank) bool { return r.started && !r.ended && r.pid == e.group })
	if i < 0 {
		if slices.ContainsFunc(l.ranks, func(r rank) bool { return !r.started && !r.ended }) {
			l.early = append(l.early, e) // the number of one that starts is not known yet
		}
		return
	}
	if e.gone && i < l.N {
		return // its end is judged without
	}
	e.late = l.ending()
	l.in[e.group] = e
	if i >= l.N {
		l.tell("standby %d has taken the place of rank %d", l.Node*l.Standby+i-l.N, e.slot)
		l.bindTo(i, e.slot)
	}
}

// learn takes, in bounded time, the admissions that the store shows when process i has ended, if it
// was on standby: its own may not have been reported.
func (l *launcher) learn(i int) {
	if _, in := l.in[l.ranks[i].pid]; in || i < l.N || l.views == nil || l.stopping {
		return
	}
	done := l.views.read()
	if done == nil {
		return
	}
	late := time.NewTimer(l.views.within)
	defer late.Stop()
	for {
		select {
		case e := <-l.views.entries():
			l.enter(e)
		case s := <-l.signals:
			l.signal(s.(syscall.Signal))
			return
		case <-done:
			return
		case <-late.C:
			return
		}
	}
}

// verdict returns the exit code that follows from the ends of all ranks, and the reason.
func (l *launcher) verdict() (int, string) {
	switch {
	case l.late.code != 0:
		return l.late.code, l.late.why + ", after other ranks had ended well"
	case l.user != 0 && !l.dismissed && l.well == 0:
		return 128 + int(l.user), ""
	case !l.ending() && l.first.code != 0 && l.deaths == 1:
		return l.first.code, l.first.why
	case !l.ending() && l.first.code != 0:
		return l.first.code, l.first.why + " first; no rank ended well"
	}
	return 0, ""
}

// endsAll reports whether a failure of this node ends the others even if they continue without lost
// ranks: the user has interrupted, or the store ends with this node. A node that its batch system
// ends, or whose ranks all died, leaves the others alone.
func (l *launcher) endsAll() bool {
	served := l.hold != nil && l.hold.server != nil
	switch l.user {
	case 0:
		return l.failed
	case syscall.SIGINT, syscall.SIGQUIT:
		return true
	}
	return served
}

// tell prints a message about the ranks unless Quiet is set.
func (l *launcher) tell(format string, args ...any) {
	if !l.Quiet {
		l.say(fmt.Sprintf(format, args...))
	}
}
