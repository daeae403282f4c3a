package launch

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"tutti/bootstrap"
	"tutti/cmd/tutti/internal/term"
	"tutti/internal/cpus"
	"tutti/internal/files"
	"tutti/pg/flight"
)

// Exit codes besides the ranks' own; a rank killed by signal s counts as 128+s, as in shells.
const (
	CodeLaunch   = 1   // the job could not be started or kept running
	CodeNoExec   = 126 // the program exists but cannot be run
	CodeNotFound = 127 // there is no such program
)

// dieBy bounds the time until a process disappears after SIGKILL. After that the launcher reports
// it and leaves the rest to the guard.
const dieBy = 10 * time.Second

// Options says what to run. Program, N and the files must be set; other zero values mean defaults.
type Options struct {
	Program string   // a program; a .go file or a directory of Go files is built first
	Args    []string // its arguments
	N       int      // ranks on this node

	Nodes, Node int    // number of nodes, 0 for one, and this one's number
	Rendezvous  string // HOST:PORT at which node 0 serves the store, if Nodes > 1 and no Store is given
	Store       string // address of an existing store; "" to serve one
	// Job is the name of the job; "" for a random one (one node) or "default" (several that share a
	// served store).
	Job string
	// Secret is the secret in textual form; "" for a random one, with several nodes only if Meet
	// passes it to the others.
	Secret string
	// Meet is how the nodes meet if another launcher has started them: instead of Rendezvous, and
	// without Store.
	Meet *bootstrap.Launch
	Env  []string

	Stdin          *os.File // for this node's first rank; nil: empty
	Stdout, Stderr *os.File
	NoPrefix       bool
	LogDir         string
	Bind           Binding
	Grace          time.Duration // between SIGTERM, or the user's signal, and SIGKILL

	// Elastic keeps the other ranks running when one dies: Env tells them to "shrink" or "retry".
	// The job begins to end with the first rank that succeeds. It has succeeded if all ranks that
	// were alive then do. If no rank succeeded, the first death counts.
	Elastic bool
	// MaxRestarts is how often each rank that died is started again before the job ends, if
	// Elastic; its environment then has TUTTI_RESTART.
	MaxRestarts int
	// Standby is the number of spare processes that wait to take the place of dead ranks, if
	// Elastic; unused ones end with the job.
	Standby int

	Verbose   bool // report the processors of each rank
	Quiet     bool // do not report how the ranks ended
	QuietCode int  // nor if the first failure had this exit code; 0: none
}

// An Error is a failure of the launch itself, with its exit code.
type Error struct {
	Code int
	Err  error
}

func (e *Error) Error() string { return e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

// rank is the launcher's state of one process of the guard.
type rank struct {
	started, ended bool
	dying          bool // a signal was killing it when the launcher began to end the ranks
	pid            int
	restarts       int
	quick          int         // processes in a row that ended soon
	since          time.Time   // start of the present process
	due            *time.Timer // until the next start; nil: none is planned
	fate           death       // of the last process of a rank that failed for good; else zero
	flights        flight.Kept // the records of its failures
}

// launcher is one Run.
type launcher struct {
	Options
	base, world int  // number of this node's first rank, and of ranks
	unique      bool // no other job has this one's name
	guard       *Guard
	temp        string
	signals     chan os.Signal
	hold        *store // the store, or this node's part in it
	told        func() // ends the announcement of the store to other nodes
	out         *Output

	ranks    []rank
	live     int
	code     int            // of the first failure
	why      string         // its description
	exited   bool           // a rank exited, perhaps because another one was dying
	running  int            // ranks that were still running then
	stopping bool           // SIGTERM or the user's signal has been sent
	user     syscall.Signal // the user's signal, if any
	request  Request        // of signals that this process end
	beside   bool           // it came while the ranks were being ended, because one had failed
	killed   int            // ranks that had to be killed
	killedAt time.Time      // when SIGKILL was sent
	grace    <-chan time.Time
	overdue  <-chan time.Time // dieBy after SIGKILL

	command Command
	shares  []cpus.Set // by local rank: its processors; nil: the ranks are not bound
	env     func(int) []string
	failed  bool // the launcher ended the ranks: code is not their own result

	// If Elastic:
	again     chan int      // ranks whose next start is due
	pending   int           // the number of planned starts
	views     *views        // not nil if processes may wait for admission
	in        map[int]entry // by pid: the admitted ones of the ranks
	early     []entry       // of processes that are not known, while some start
	asked     bool          // views was asked whether the group is over
	well      int           // ranks that ended with code 0
	deaths    int           // ranks that failed
	first     death         // of them
	late      death         // the first of them after a rank had succeeded
	dismissed bool          // only processes that wait for admission are left, and they have been asked to end
}

// Run starts the ranks, shows their output, waits for their end and returns the job's exit code: 0,
// or that of the rank that failed first. If that one exited while a signal was killing another rank
// of this node, the killed one's code counts on this node. When Run returns, none of the ranks'
// processes and their descendants exists any more. It may be called once at a time, in a process
// without other children. The job ends when ctx does.
func Run(ctx context.Context, o Options) (int, error) {
	o.Nodes = max(o.Nodes, 1)
	l := &launcher{Options: o, base: o.Node * o.N, world: o.Nodes * o.N, ranks: make([]rank, o.N+o.Standby),
		signals: make(chan os.Signal, 8), again: make(chan int, o.N), in: map[int]entry{}}
	var caught []os.Signal
	for _, s := range []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1,
		syscall.SIGUSR2, syscall.SIGPIPE} {
		if !signal.Ignored(s) { // under nohup, or in the background of a script, it stays ignored
			caught = append(caught, s)
		}
	}
	if l.serves() && !signal.Ignored(syscall.SIGTSTP) {
		caught = append(caught, syscall.SIGTSTP)
	}
	signal.Notify(l.signals, caught...)
	defer signal.Stop(l.signals)

	var ranks []int
	for i := range l.ranks {
		ranks = append(ranks, l.name(i))
	}
	var err error
	if l.out, err = NewOutput(o.Stdout, o.Stderr, !o.NoPrefix, l.world, o.LogDir, ranks, l.say); err != nil {
		return CodeLaunch, err
	}
	defer l.unlessInterrupted(l.out.Flush)
	if l.guard, err = NewGuard(); err != nil {
		return CodeLaunch, err
	}
	err = l.run(ctx)
	gone, cerr := l.close()
	if err == nil {
		err = cerr
	}
	l.views.close()
	if l.hold != nil {
		code, why := l.code, l.why
		if err != nil && why == "" { // the guard was killed, or there still are processes
			code, why = cmp.Or(code, CodeLaunch), err.Error()
		}
		l.hold.finish(code, why, l.endsAll() || err != nil)
	}
	if gone { // else nobody knows when they close their ends of the pipes
		s := l.unlessInterrupted(l.out.Wait)
		if n := l.out.Dropped(); n > 0 {
			l.tell("dropped up to %s of output, which nobody has read", term.Count(n, "line"))
			if s = cmp.Or(l.user, s); l.code == 0 && s != 0 {
				l.code, l.user = 128+int(s), s
			}
		}
	}
	if err != nil {
		if e := (*Error)(nil); errors.As(err, &e) {
			return e.Code, err
		}
		return max(l.code, CodeLaunch), err
	}
	l.summary()
	return l.code, nil
}

// say prints a line of the launcher. It does not wait for who reads it.
func (l *launcher) say(text string) { l.out.Say(Tag(l.Stderr) + text) }

// unlessInterrupted runs wait, which waits for who reads the output. If the user interrupts it, it
// gives up what nobody reads, and returns the signal. After a signal beside a failure it does so
// from the beginning: another one need not come.
func (l *launcher) unlessInterrupted(wait func()) (by syscall.Signal) {
	if l.beside {
		l.out.Hurry()
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		wait()
	}()
	for {
		select {
		case <-done:
			return by
		case s := <-l.signals:
			if l.interrupts(s) {
				by = s.(syscall.Signal)
				l.out.Hurry()
			}
		}
	}
}

// close ends the remaining processes, in bounded time. gone reports whether there are none.
func (l *launcher) close() (gone bool, err error) {
	done := make(chan error, 1)
	go func() { done <- l.guard.Close() }()
	since, wait := time.Now(), dieBy
	if !l.killedAt.IsZero() && l.live > 0 {
		since = l.killedAt
		wait = max(dieBy-time.Since(since), time.Second) // the guard has work of its own
	}
	late := time.NewTimer(wait)
	defer late.Stop()
	select {
	case err := <-done:
		for range l.guard.Events() {
		}
		return true, err
	case <-late.C:
		var stuck []string
		for i, r := range l.ranks {
			if r.started && !r.ended {
				stuck = append(stuck, fmt.Sprintf("%s (pid %d)", l.who(i), r.pid))
			}
		}
		return false, fmt.Errorf("SIGKILL was sent %v ago and there still are processes, most likely waiting for a "+
			"device or a file system (%s); the guard process stays to wait for them",
			time.Since(since).Round(time.Second), strings.Join(stuck, ", "))
	}
}

func (l *launcher) run(ctx context.Context) error {
	limit, known := files.Limit()
	if need, what := l.descriptors(); known && limit < uint64(need) {
		return fmt.Errorf("this process may have %d open files (RLIMIT_NOFILE), and for %s it needs up to %d: "+
			"raise the limit (ulimit -n)", limit, what, need)
	}
	var err error
	if l.temp, err = l.guard.Temp(); err != nil {
		return err
	}
	cmd, err := l.program(ctx)
	if err != nil || l.stopping {
		return err
	}
	env, err := l.environment(ctx)
	if err != nil {
		return err
	}
	l.clearFlights()
	l.command, l.env = cmd, env
	l.divide()
	l.sayCrowded()
	for i := range l.ranks {
		if err := l.start(i); err != nil {
			return err
		}
	}
	return l.supervise(ctx)
}

// serves reports whether this launcher serves the job's store.
func (l *launcher) serves() bool { return l.Node == 0 && l.Store == "" }

// descriptors returns how many files this process may have to open, and for what.
func (l *launcher) descriptors() (need int, what string) {
	// Two pipes and a connection to the store for each rank, and another connection while it
	// starts.
	each := 4
	if l.LogDir != "" {
		each++
	}
	need, what = 40+each*len(l.ranks), term.Count(len(l.ranks), "rank")
	if l.serves() && l.Nodes > 1 { // their connections to the store
		need += 2 * (l.Nodes - 1) * (len(l.ranks) + 1)
		what += fmt.Sprintf(" here and on %s", term.Count(l.Nodes-1, "other node"))
	}
	return need, what
}

// name returns the number of a process in messages: its rank; for those on standby, numbers above
// all ranks.
func (l *launcher) name(i int) int {
	if i >= l.N {
		return l.world + l.Node*l.Standby + i - l.N
	}
	return l.base + i
}

// who describes local process i.
func (l *launcher) who(i int) string {
	if e, ok := l.in[l.ranks[i].pid]; ok && i >= l.N {
		return fmt.Sprintf("rank %d (standby %d)", e.slot, l.Node*l.Standby+i-l.N)
	}
	if i >= l.N {
		return fmt.Sprintf("standby %d", l.Node*l.Standby+i-l.N)
	}
	return fmt.Sprintf("rank %d", l.name(i))
}

// start starts local rank i with pipes to the output.
func (l *launcher) start(i int) error {
	l.ranks[i].since = time.Now()
	c := l.command
	c.Env, c.Sweep = l.env(i), l.Elastic
	if n := l.ranks[i].restarts; n > 0 {
		c.Env = append(c.Env, fmt.Sprintf("TUTTI_RESTART=%d", n))
	}
	in, feed, err := l.stdin(i)
	if err != nil {
		return err
	}
	defer in.Close()
	var w [2]*os.File
	for s := range w {
		r, pw, err := os.Pipe()
		if err != nil {
			return fmt.Errorf("make the pipes of %s: %w", l.who(i), err)
		}
		defer pw.Close()
		w[s] = pw
		l.out.Copy(l.name(i), s == 1, r)
	}
	if feed != nil {
		go func() {
			io.Copy(feed, l.Stdin)
			feed.Close()
		}()
	}
	if i < l.N && l.shares != nil {
		c.CPUs = l.shares[i]
	}
	if err := l.guard.Start(i, c, in, w[0], w[1]); err != nil {
		return err
	}
	l.live++
	r := &l.ranks[i]
	r.started, r.ended = false, false
	return nil
}

// stdin opens the standard input of local rank i. The launcher reads a terminal itself, since
// nothing would keep the ranks from reading it in the background, and writes to feed.
func (l *launcher) stdin(i int) (in, feed *os.File, err error) {
	switch {
	case i > 0 || l.ranks[i].restarts > 0 || l.Stdin == nil:
		in, err = os.Open(os.DevNull)
	case Terminal(l.Stdin):
		in, feed, err = os.Pipe()
	default:
		var fd int
		if fd, err = unix.FcntlInt(l.Stdin.Fd(), unix.F_DUPFD_CLOEXEC, 0); err == nil {
			in = os.NewFile(uintptr(fd), "stdin")
		}
	}
	return in, feed, err
}

// supervise waits until all ranks have ended, and ends them when one fails, another node does, or
// the user interrupts.
func (l *launcher) supervise(ctx context.Context) error {
	cancelled, broken := ctx.Done(), l.out.Broken()
	for {
		if l.Elastic {
			l.settle()
		}
		if l.live+l.pending == 0 {
			break
		}
		select {
		case e := <-l.guard.Events():
			if err := l.event(e); err != nil {
				return err
			}
		case s := <-l.signals:
			l.signal(s.(syscall.Signal))
		case i := <-l.again:
			l.revive(i)
		case e := <-l.views.entries():
			l.enter(e)
		case <-l.views.stuck():
			l.giveUp()
		case <-l.views.over():
			if l.asked = false; l.idle() && !l.stopping {
				l.dismiss()
			}
		case <-l.hold.elsewhere(): // the job has begun to end
		case <-l.grace:
			l.kill()
		case <-l.overdue: // close says which processes are left
			if l.Elastic && l.code == 0 {
				l.code, l.why = l.verdict()
			}
			if l.code == 0 && l.user != 0 {
				l.code = 128 + int(l.user)
			}
			return nil
		case <-broken:
			broken = nil
			l.fail(128+int(syscall.SIGPIPE), "the output has no reader any more")
		case f := <-l.hold.failed():
			l.fail(f.code, f.why)
		case <-cancelled:
			cancelled = nil
			l.fail(CodeLaunch, context.Cause(ctx).Error())
		}
	}
	if l.Elastic && l.code == 0 {
		l.code, l.why = l.verdict()
	}
	err := l.hold.others(ctx, l) // the store of node 0 serves all nodes until they are done
	if l.Elastic && !l.failed {
		l.code, l.why = l.verdict() // again: ranks of another node may have succeeded meanwhile
	}
	return err
}

func (l *launcher) event(e Event) error {
	switch r := &l.ranks[max(e.ID, 0)]; {
	case e.Lost:
		return errors.New("the guard process was killed; the ranks are killed with it")
	case e.ID < 0: // an event of the build, late
	case e.Error != "":
		l.live--
		r.ended = true
		l.enterEarly()
		if r.restarts > 0 && !l.stopping {
			l.rankEnded(e.ID, CodeNoExec, "could not be started again: "+e.Error)
		} else {
			l.fail(CodeNoExec, fmt.Sprintf("%s could not be started: %s", l.who(e.ID), e.Error))
		}
	case e.Unbound != "":
		l.tell("%s is not bound: %s", l.who(e.ID), e.Unbound)
	case !e.Exited:
		r.started, r.pid = true, e.PID
		l.enterEarly()
	default:
		l.learn(e.ID)
		l.live--
		r.ended = true
		code, how := outcome(e.Status)
		slot, incarnation := l.name(e.ID), uint64(0)
		if in, ok := l.in[e.PID]; ok {
			slot, incarnation = in.slot, in.incarnation
		}
		var records []string
		if code != 0 {
			records = l.left(slot, e.PID, r.since)
		}
		r.flights.Add(append(records, l.landed(slot, e.PID, incarnation, code, how)...)...)
		switch {
		case l.Elastic && !l.stopping:
			l.rankEnded(e.ID, code, how)
		case l.exited && r.dying && e.Status.Signaled(): // its memory was freed first
			l.code, l.why, l.exited = code, fmt.Sprintf("%s %s, and %s", l.who(e.ID), how, l.why), false
			l.running--
		case code != 0 && !l.dismissed:
			l.exited = l.exited || l.code == 0 && e.Status.Exited()
			l.fail(code, fmt.Sprintf("%s %s", l.who(e.ID), how))
		case code == 0 && e.ID < l.N:
			l.well++
		}
		delete(l.in, e.PID)
	}
	return nil
}

// dying reports whether a signal may be killing process pid, or has killed it: SIGKILL is pending,
// the process is past the point from which it only ends, or there is none any more, and how it has
// ended is not known yet. It reports false if that cannot be known.
func dying(pid int) bool {
	const signaled = 0x400 // PF_SIGNALED
	dir := fmt.Sprintf("/proc/%d/", pid)
	status, err := os.ReadFile(dir + "status")
	if errors.Is(err, fs.ErrNotExist) {
		_, err := os.Stat("/proc/self")
		return err == nil
	}
	if hasSignal(status, syscall.SIGKILL, "SigPnd", "ShdPnd") {
		return true
	}
	stat, _ := os.ReadFile(dir + "stat") // after status: the flag follows the pending signal
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 7 {
		return false
	}
	flags, _ := strconv.ParseUint(fields[6], 10, 64)
	return flags&signaled != 0
}

// hasSignal reports whether s is in one of these sets of a process's status.
func hasSignal(status []byte, s syscall.Signal, sets ...string) bool {
	for line := range strings.Lines(string(status)) {
		name, text, _ := strings.Cut(line, ":")
		set, _ := strconv.ParseUint(strings.TrimSpace(text), 16, 64)
		if slices.Contains(sets, name) && set&(1<<(s-1)) != 0 {
			return true
		}
	}
	return false
}

// outcome returns the exit code and the description of a status.
func outcome(s syscall.WaitStatus) (code int, how string) {
	if s.Signaled() {
		name := unix.SignalName(s.Signal())
		if name == "" {
			name = "a real-time signal"
		}
		how = fmt.Sprintf("was killed by signal %d (%s)", int(s.Signal()), name)
		if s.CoreDump() {
			how += " and dumped core"
		}
		return 128 + int(s.Signal()), how
	}
	return s.ExitStatus(), fmt.Sprintf("exited with code %d", s.ExitStatus())
}

// fail records the first failure and ends the ranks.
func (l *launcher) fail(code int, why string) {
	if l.code != 0 {
		return
	}
	l.code, l.why, l.running, l.failed = code, why, l.live, true
	for i := range l.ranks {
		r := &l.ranks[i]
		r.dying = l.exited && !l.stopping && r.started && !r.ended && dying(r.pid)
	}
	l.hold.report(code, why, l.endsAll())
	l.end(syscall.SIGTERM)
}

// end sends s to all ranks and, after the grace, kills the remaining ones, unless they are being
// ended already. It continues stopped ranks, so that they handle the signal.
func (l *launcher) end(s syscall.Signal) {
	if l.stopping {
		return
	}
	l.stopping = true
	l.guard.Signal(-1, s)
	l.guard.Signal(-1, syscall.SIGCONT)
	l.grace = time.After(l.Grace)
}

// echo is how long after a signal another one may be the same request.
const echo = 500 * time.Millisecond

// Request is what signals ask of a command: to end, and then to end at once.
type Request struct {
	by    syscall.Signal // the first of them; 0: none has come
	since time.Time      // when it came
}

// Asks notes a signal, and reports whether it asks the command to end or, if it was asked before,
// to end at once. One request may come as two signals: timeout signals its child and then its
// process group, when a terminal hangs up both the shell and the kernel send SIGHUP, and sudo and
// systemd send SIGHUP beside SIGTERM.
func (r *Request) Asks(s syscall.Signal) bool {
	if r.by == 0 {
		r.by, r.since = s, time.Now()
		return true
	}
	same := s == r.by || s == syscall.SIGTERM && r.by == syscall.SIGHUP
	return s != syscall.SIGHUP && (!same || time.Since(r.since) >= echo)
}

// interrupts reports whether s asks the launcher to end, or to end at once. It answers SIGTSTP.
// SIGUSR1 and SIGUSR2 are for the ranks, while there are any; SIGPIPE says what writing to the
// broken pipe reports, too.
func (l *launcher) interrupts(s os.Signal) bool {
	switch s {
	case syscall.SIGTSTP:
		l.say("SIGTSTP: it does not stop, since the job's store is in this process; Ctrl-C ends the job")
		return false
	case syscall.SIGPIPE, syscall.SIGUSR1, syscall.SIGUSR2:
		return false
	}
	return l.request.Asks(s.(syscall.Signal))
}

func (l *launcher) signal(s syscall.Signal) {
	first := l.request.by == 0
	switch {
	case s == syscall.SIGUSR1 || s == syscall.SIGUSR2:
		l.guard.Signal(-1, s)
	case !l.interrupts(s):
	case first && l.code != 0 && (s == syscall.SIGTERM || s == syscall.SIGHUP):
		// The ranks are being ended because one has failed, which may be why the signal comes: srun
		// ends a step like that.
		l.beside = true
	case l.user != 0 || l.code != 0:
		l.kill()
		l.out.Hurry()
	default:
		l.user = s
		l.end(s)
		if l.live == 0 { // all that is left are planned starts
			l.tell("%s: no rank is running; the job ends", unix.SignalName(s))
			return
		}
		l.tell("%s: passed on to %s; what has not ended in %v is killed, and at once if SIGINT or SIGTERM follows",
			unix.SignalName(s), term.Count(l.live, "rank"), l.Grace)
	}
}

func (l *launcher) kill() {
	l.grace = nil
	if l.killedAt.IsZero() {
		l.killed, l.killedAt, l.overdue = l.live, time.Now(), time.After(dieBy)
		l.guard.Signal(-1, syscall.SIGKILL)
	}
}

// summary prints how the job failed, if it did.
func (l *launcher) summary() {
	if l.code == 0 || l.Quiet || l.code == l.QuietCode {
		return
	}
	text := l.why
	switch others := l.world/l.Nodes - 1; {
	case l.user != 0:
		text = "interrupted by " + unix.SignalName(l.user)
		if l.killed > 0 {
			text += fmt.Sprintf("; killed %s that had not ended", term.Count(l.killed, "rank"))
		}
	case l.running == 0:
	default:
		switch {
		case l.running == others && others == 1:
			text += "; ended the other rank"
		case l.running == others:
			text += fmt.Sprintf("; ended the other %s", term.Count(others, "rank"))
		case l.running == 1:
			text += "; ended the rank still running"
		default:
			text += fmt.Sprintf("; ended the %s still running", term.Count(l.running, "rank"))
		}
		switch {
		case l.killed == 0:
		case l.running == 1:
			text += ", by SIGKILL"
		case l.killed == l.running:
			text += ", all by SIGKILL"
		default:
			text += fmt.Sprintf(", %d of them by SIGKILL", l.killed)
		}
	}
	l.say(text)
}

// program finds the program, and builds it if it is Go source.
func (l *launcher) program(ctx context.Context) (Command, error) {
	c := Command{Path: l.Program, Args: l.Args}
	info, err := os.Stat(l.Program)
	dir := err == nil && info.IsDir()
	switch {
	case dir:
		if files, _ := filepath.Glob(filepath.Join(l.Program, "*.go")); len(files) > 0 {
			return l.build(ctx, c)
		}
	case err == nil && strings.HasSuffix(l.Program, ".go") && info.Mode().IsRegular():
		return l.build(ctx, c)
	}
	path, err := exec.LookPath(l.Program)
	switch {
	case err != nil && dir:
		return c, &Error{CodeNotFound, fmt.Errorf("%s is a directory without Go files: give a program, a .go file or "+
			"the directory of a Go program", l.Program)}
	case errors.Is(err, exec.ErrDot):
		return c, &Error{CodeNotFound, fmt.Errorf("program %q is only in the current directory: write ./%s", l.Program,
			l.Program)}
	case errors.Is(err, fs.ErrPermission):
		return c, &Error{CodeNoExec, fmt.Errorf("program %q cannot be executed: permission denied", l.Program)}
	case err != nil && strings.Contains(l.Program, "/"):
		return c, &Error{CodeNotFound, fmt.Errorf("program %q: no such file", l.Program)}
	case err != nil:
		hint := ""
		if _, err := os.Stat(l.Program); err == nil {
			hint = fmt.Sprintf("; for the file here write ./%s", l.Program)
		}
		return c, &Error{CodeNotFound, fmt.Errorf("program %q is not in PATH%s", l.Program, hint)}
	}
	if c.Path, err = filepath.Abs(path); err != nil {
		return c, err
	}
	return c, nil
}

// build builds the Go program c.Path into the temporary directory. It shows the compiler's messages
// unchanged.
func (l *launcher) build(ctx context.Context, c Command) (Command, error) {
	tool, err := exec.LookPath("go")
	if err != nil {
		return c, &Error{CodeNotFound, fmt.Errorf("%s must be built, but the go command is not in PATH", c.Path)}
	}
	what, dir, err := buildFrom(c.Path)
	if err != nil {
		return c, err
	}
	abs, err := filepath.Abs(c.Path)
	if err != nil {
		return c, err
	}
	name := strings.TrimSuffix(filepath.Base(abs), ".go") // programs show it in their messages
	if name == "" || name == "/" {
		name = "program"
	}
	bin := filepath.Join(l.temp, "bin", name)
	if err := os.MkdirAll(filepath.Dir(bin), 0o700); err != nil {
		return c, err
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return c, err
	}
	defer null.Close()
	if err := l.guard.Start(-1, Command{Path: tool, Args: []string{"build", "-o", bin, what}, Env: os.Environ(),
		Dir: dir}, null, l.Stderr, l.Stderr); err != nil {
		return c, err
	}
	cancelled := ctx.Done()
	for ended := false; !ended; {
		select {
		case e := <-l.guard.Events():
			switch {
			case e.Lost:
				return c, errors.New("the guard process was killed")
			case e.Error != "":
				return c, fmt.Errorf("start %s: %s", tool, e.Error)
			case e.Exited:
				ended = true
				if code, how := outcome(e.Status); code != 0 && !l.stopping {
					return c, &Error{CodeLaunch, fmt.Errorf("cannot build %s: go build %s", c.Path, how)}
				}
			}
		case s := <-l.signals:
			if l.interrupts(s) {
				l.stopping, l.user, l.code = true, s.(syscall.Signal), 128+int(s.(syscall.Signal))
				l.guard.Signal(-1, syscall.SIGKILL)
			}
		case <-cancelled:
			cancelled = nil
			l.stopping, l.code, l.why = true, CodeLaunch, context.Cause(ctx).Error()
			l.guard.Signal(-1, syscall.SIGKILL)
		}
	}
	if l.stopping {
		return c, nil
	}
	// A package that is not main builds too, into an archive.
	if info, err := os.Stat(bin); err != nil || info.Mode()&0o111 == 0 || isArchive(bin) {
		return c, &Error{CodeNoExec, fmt.Errorf("%s is a Go package, but no program: package main is needed", c.Path)}
	}
	return Command{Path: bin, Args: c.Args}, nil
}

func isArchive(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	var head [8]byte
	_, err = io.ReadFull(f, head[:])
	return err == nil && string(head[:]) == "!<arch>\n"
}

// buildFrom returns the arguments for go build, and its directory: the present one, so that
// messages name files as the user does, unless the source is part of another module.
func buildFrom(path string) (what, dir string, err error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", "", err
	}
	here, err := os.Getwd()
	if err != nil {
		return "", "", err
	}
	home := abs
	if strings.HasSuffix(path, ".go") {
		home = filepath.Dir(abs)
	}
	if rel, err := filepath.Rel(here, abs); err == nil && module(home) == module(here) {
		return "." + string(filepath.Separator) + rel, "", nil
	}
	if home == abs {
		return ".", home, nil
	}
	return filepath.Base(abs), home, nil
}

// module returns the directory of the go.mod for dir, "" if there is none.
func module(dir string) string {
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
		up := filepath.Dir(dir)
		if up == dir {
			return ""
		}
		dir = up
	}
}

// inherit returns the launcher's environment without variables that a rank must not inherit, and
// without those that it gets instead: programs differ in how they handle duplicates. If the
// launcher serves the store, the credentials of a site's store are removed.
func inherit(own []string, siteStore bool, instead []string) []string {
	drop := []string{"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
		"TORCHELASTIC_RUN_ID", "TUTTI_RANK", "TUTTI_SIZE",
		"TUTTI_LOCAL_RANK", "TUTTI_LOCAL_SIZE", "TUTTI_STANDBY", "TUTTI_RESTART", "TUTTI_JOB", "TUTTI_STORE",
		"TUTTI_SECRET", "TUTTI_SECRET_FILE",
		// a connection of this process, which may have been used
		"PMI_FD", "PMI_PORT", "PMI_ID", "PMI_RANK", "PMI_SIZE"}
	if !siteStore {
		drop = append(drop, "TUTTI_STORE_USER", "TUTTI_STORE_PASSWORD", "TUTTI_STORE_CA", "TUTTI_STORE_CERT",
			"TUTTI_STORE_KEY")
	}
	for _, kv := range instead {
		name, _, _ := strings.Cut(kv, "=")
		drop = append(drop, name)
	}
	return slices.DeleteFunc(slices.Clone(own), func(kv string) bool {
		name, _, _ := strings.Cut(kv, "=")
		return slices.Contains(drop, name)
	})
}
