package launch

import (
	"fmt"
	"syscall"
	"time"
)

// What the launcher does if Options.GoOn: ranks that die leave the others running, are started
// again, and may find that a process on standby has taken their place.

// restartPause is how long a rank that died soon after its start waits for the next, doubled each
// time.
const restartPause = 100 * time.Millisecond

// death is how a rank ended badly; Code 0: none did.
type death struct {
	code int
	why  string
}

// ending says whether the job has begun to end: a rank has ended well, here or elsewhere. Nobody is
// started again any more.
func (l *launcher) ending() bool { return l.well > 0 || l.hold.wellElsewhere() }

// part says whether local process i is a rank of the job, rather than one that waits to be let in:
// of processes on standby and of ranks that were started again only those are that have been in a
// view. Where views are not used, or their lives cannot be told, a rank that was started again is
// one.
func (l *launcher) part(i int) bool {
	_, in := l.in[l.ranks[i].pid]
	return in || i < l.N && (l.ranks[i].restarts == 0 || !l.views.known())
}

// idle says whether all that run here wait to be let in. Ranks that were started again may be about
// to begin anew, all together, until the job has begun to end.
func (l *launcher) idle() bool {
	for i, r := range l.ranks {
		if !r.ended && (l.part(i) || i < l.N && !l.ending()) {
			return false
		}
	}
	return l.live > 0 && l.pending == 0
}

// settle plans no more lives once the job ends, and ends those that wait to be let in once nobody
// is left to do it.
func (l *launcher) settle() {
	if l.stopping || l.ending() {
		for i := range l.ranks {
			if r := &l.ranks[i]; r.due != nil {
				r.due.Stop() // or it is in l.again, and void
				r.due = nil
				l.pending--
				if !l.stopping {
					l.tell("%s is not started again: the job is ending", l.who(i))
				}
			}
		}
	}
	switch {
	case l.stopping || l.asked || l.views == nil || !l.idle():
	case l.Nodes == 1 && l.deaths == 0: // nobody can have taken a place
		l.dismiss()
	default:
		l.asked = true
		l.views.ask()
	}
}

// dismiss asks those that wait to be let in to end. That is no failure.
func (l *launcher) dismiss() {
	l.dismissed = true
	l.end(syscall.SIGTERM)
}

// goOn takes in that a process has ended while the others run on.
func (l *launcher) goOn(i, code int, how string) {
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
			pause := time.Duration(0)
			if r.restarts++; r.restarts > 1 && time.Since(r.since) < time.Minute {
				pause = restartPause << min(r.restarts-2, 8)
			}
			l.pending++
			r.due = time.AfterFunc(pause, func() { l.again <- i }) // which has room for all
			l.tell("%s; starting it again (%d of %d)", d.why, r.restarts, l.MaxRestarts)
		case l.live+l.pending > 0:
			if i < l.N {
				l.views.vacate(l.name(i))
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
		l.goOn(i, CodeNoExec, fmt.Sprintf("could not be started again: %v", err))
	}
}

// enter takes in that a process has been let into the group.
func (l *launcher) enter(e entry) {
	e.late = l.ending()
	l.in[e.group] = e
	for i, r := range l.ranks {
		if i >= l.N && r.started && !r.ended && r.pid == e.group {
			l.tell("standby %d has taken the place of rank %d", l.Node*l.Standby+i-l.N, e.slot)
		}
	}
}

// verdict is the exit code that the ranks' ends mean together, and the reason.
func (l *launcher) verdict() (int, string) {
	switch {
	case l.user != 0 && !l.dismissed:
		if l.well == 0 {
			return 128 + int(l.user), ""
		}
	case l.late.code != 0:
		return l.late.code, l.late.why + ", after other ranks had ended well"
	case !l.ending() && l.first.code != 0 && l.deaths == 1:
		return l.first.code, l.first.why
	case !l.ending() && l.first.code != 0:
		return l.first.code, l.first.why + " first; no rank ended well"
	}
	return 0, ""
}

// endsAll says whether a failure of this node is to end the others although they go on without
// ranks that die: somebody at the keyboard wants it, or the store goes with this node. A node that
// is told to end by its batch system, or whose ranks all died, leaves the others alone.
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

// tell says something about the ranks unless it is not wanted.
func (l *launcher) tell(format string, args ...any) {
	if !l.Quiet {
		l.say(fmt.Sprintf(format, args...))
	}
}
