package launch

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"tutti/internal/cpus"
	"tutti/internal/epoll"
	"tutti/internal/ident"
	"tutti/internal/lockdir"
)

// guardName is argv[0] of the guard, by which it recognizes itself and is shown in ps.
const guardName = "tutti-guard"

// maxMessage bounds one message between launcher and guard: arguments and environment of a process,
// which the kernel limits to less.
const maxMessage = 8 << 20

// Command is a program to run: Path as for exec, Args without the program's name, the whole
// environment, and the directory ("" for the launcher's).
type Command struct {
	Path string
	Args []string
	Env  []string
	Dir  string
	CPUs cpus.Set // the processors that it may run on; empty: those of the guard

	// Sweep kills the rest of the process group when the process fails: the job continues, and a
	// restarted process would find the children of the old one in its way.
	Sweep bool
}

// order is a message of the launcher to the guard: a directory to remove in the end, a process to
// start, processors to bind one to, or a signal for one (or all, ID < 0).
type order struct {
	Temp   string
	Start  *Command
	Bind   cpus.Set
	ID     int
	Signal syscall.Signal
}

// Event is a message of the guard about the process that was started as ID: it runs (PID), it could
// not be started (Error), it runs unbound (Unbound says why), or it has ended (Exited and Status).
// Lost means that the guard itself has ended, and the ranks with it.
type Event struct {
	ID      int
	PID     int
	Error   string
	Unbound string
	Exited  bool
	Status  syscall.WaitStatus
	Lost    bool
}

// Guard is the launcher's handle of its guard process.
type Guard struct {
	conn   *net.UnixConn
	proc   *os.Process
	events chan Event
	mu     sync.Mutex    // one message at a time
	temp   *lockdir.Held // the temporary directory, in use until this process ends
	stop   func()        // ends the wait for orphans; nil: there is none
}

// IsGuard reports whether this process was started as a guard; main must then call GuardMain before
// anything else.
func IsGuard() bool { return len(os.Args) > 0 && os.Args[0] == guardName }

// NewGuard starts a guard. The caller must Close it.
func NewGuard() (*Guard, error) {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("become a subreaper: %w", err)
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make the guard's sockets: %w", err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "guard")
	defer theirs.Close()
	conn, err := unixConn(fds[0])
	if err != nil {
		return nil, err
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		conn.Close()
		return nil, err
	}
	defer null.Close()
	// Its own process group: Ctrl-C at a terminal and a kill of the launcher's group do not reach
	// the guard.
	p, err := os.StartProcess("/proc/self/exe", []string{guardName}, &os.ProcAttr{
		Files: []*os.File{null, null, os.Stderr, theirs}, Sys: &syscall.SysProcAttr{Setpgid: true}})
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("start the guard process: %w", err)
	}
	g := &Guard{conn: conn, proc: p, events: make(chan Event)}
	go g.listen()
	if os.Getpid() == 1 {
		g.adopt()
	}
	return g, nil
}

// adopt begins to wait for the children of this process but the guard, until stop. The first
// process of a PID namespace inherits all orphans there, those of commands in a container (kubectl
// exec, probes) among them, and they stay as zombies until it waits for them.
func (g *Guard) adopt() {
	chld, end, ended := make(chan os.Signal, 1), make(chan struct{}), make(chan struct{})
	signal.Notify(chld, syscall.SIGCHLD)
	go func() {
		defer close(ended)
		for {
			for _, pid := range children() {
				if pid != g.proc.Pid {
					syscall.Wait4(pid, nil, syscall.WNOHANG, nil)
				}
			}
			select {
			case <-chld:
			case <-end:
				return
			}
		}
	}()
	g.stop = func() {
		signal.Stop(chld)
		close(end)
		<-ended
	}
}

// Events returns the events of the processes. They are kept until they are taken, so that the other
// methods do not wait for that. The channel is closed when the guard has ended. The caller must
// drain it.
func (g *Guard) Events() <-chan Event { return g.events }

// listen receives events at all times, because a guard that cannot send one reads no orders.
func (g *Guard) listen() {
	defer close(g.events)
	come := make(chan Event)
	go func() {
		defer close(come)
		for {
			var e Event
			if _, err := receive(g.conn, &e); err != nil {
				come <- Event{Lost: true}
				return
			}
			come <- e
		}
	}()
	var kept []Event
	for come != nil || len(kept) > 0 {
		var first Event
		var taken chan<- Event // nil: there is none to take
		if len(kept) > 0 {
			first, taken = kept[0], g.events
		}
		select {
		case e, ok := <-come:
			if ok {
				kept = append(kept, e)
			} else {
				come = nil
			}
		case taken <- first:
			kept = kept[1:]
		}
	}
}

// Temp makes a directory, empty except for a lock, which the guard removes in the end. It removes
// those of launchers that were killed with their guards.
func (g *Guard) Temp() (string, error) {
	removeStale(os.TempDir())
	for {
		dir := filepath.Join(os.TempDir(), fmt.Sprintf("tutti-%016x", ident.New()))
		// The guard is told first, so that a launcher that dies in between leaves nothing.
		if _, err := os.Lstat(dir); err == nil {
			continue
		}
		if err := g.tell(order{Temp: dir}); err != nil {
			return "", err
		}
		var err error
		if g.temp, err = makeTemp(dir); err != nil {
			return "", fmt.Errorf("make a temporary directory (TMPDIR says where): %w", err)
		}
		return dir, nil
	}
}

// Start makes the guard start a process with these files as its standard input, output and error;
// the caller keeps them. The process's Events have this id.
func (g *Guard) Start(id int, c Command, stdin, stdout, stderr *os.File) error {
	return g.tell(order{Start: &c, ID: id}, int(stdin.Fd()), int(stdout.Fd()), int(stderr.Fd()))
}

// Bind restricts the process group of process id to the processors of s.
func (g *Guard) Bind(id int, s cpus.Set) error { return g.tell(order{ID: id, Bind: s}) }

// Signal sends sig to the process group of process id, or of every process if id < 0. Processes
// that have ended are skipped, and for SIGUSR1 and SIGUSR2 those that do not expect it.
func (g *Guard) Signal(id int, sig syscall.Signal) error { return g.tell(order{ID: id, Signal: sig}) }

func (g *Guard) tell(o order, files ...int) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := send(g.conn, o, files...); err != nil {
		return fmt.Errorf("the guard process is gone: %w", err)
	}
	return nil
}

// Close makes the guard kill every remaining process and its descendants, and waits for its end. It
// waits as long as a process takes to die, which only the kernel can delay.
func (g *Guard) Close() error {
	g.conn.CloseWrite()
	state, err := g.proc.Wait()
	if g.stop != nil {
		g.stop()
	}
	g.conn.Close()
	if err == nil && state.Success() {
		return nil
	}
	// Another process killed the guard. The ranks die with it; their children are now this
	// process's.
	chld := make(chan os.Signal, 1)
	signal.Notify(chld, syscall.SIGCHLD)
	defer signal.Stop(chld)
	killChildren(chld, nil, func(int, syscall.WaitStatus) {})
	return fmt.Errorf("the guard process ended early (%v)", state)
}

func unixConn(fd int) (*net.UnixConn, error) {
	f := os.NewFile(uintptr(fd), "guard")
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("use the guard's socket: %w", err)
	}
	return c.(*net.UnixConn), nil
}

// send writes one message: its length, with the files attached, and then JSON.
func send(c *net.UnixConn, v any, files ...int) error {
	body, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if len(body) > maxMessage {
		return fmt.Errorf("%d bytes of arguments and environment; at most %d", len(body), maxMessage)
	}
	var rights []byte
	if len(files) > 0 {
		rights = unix.UnixRights(files...)
	}
	if _, _, err := c.WriteMsgUnix(binary.LittleEndian.AppendUint32(nil, uint32(len(body))), rights, nil); err != nil {
		return err
	}
	_, err = c.Write(body)
	return err
}

func receive(c *net.UnixConn, v any) (files []int, err error) {
	var head [4]byte
	oob := make([]byte, unix.CmsgSpace(3*4))
	n, oobn, _, _, err := c.ReadMsgUnix(head[:], oob)
	if err != nil {
		return nil, err
	}
	if n == 0 {
		return nil, io.EOF
	}
	if msgs, err := unix.ParseSocketControlMessage(oob[:oobn]); err == nil {
		for _, m := range msgs {
			if fds, err := unix.ParseUnixRights(&m); err == nil {
				files = append(files, fds...)
			}
		}
	}
	for _, fd := range files {
		unix.CloseOnExec(fd)
	}
	if _, err = io.ReadFull(c, head[n:]); err == nil {
		size := binary.LittleEndian.Uint32(head[:])
		if size > maxMessage {
			err = fmt.Errorf("message of %d bytes; at most %d", size, maxMessage)
		} else {
			body := make([]byte, size)
			if _, err = io.ReadFull(c, body); err == nil {
				err = json.Unmarshal(body, v)
			}
		}
	}
	if err != nil {
		closeAll(files)
		return nil, err
	}
	return files, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

// GuardMain runs a guard. It returns the process's exit code.
func GuardMain() int {
	// The ranks' parent-death signal is bound to the thread that starts them: this one, which this
	// function keeps alive until the process ends.
	runtime.LockOSThread()
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		fmt.Fprintln(os.Stderr, "tutti: guard: become a subreaper:", err)
		return 1
	}
	// The ranks inherit that this process has no terminal: in its background, they would be stopped
	// when they read it. They stay in its session, since the kernel divides processors between
	// sessions: a rank in one of its own could not yield to the others.
	if tty, err := unix.Open("/dev/tty", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0); err == nil {
		unix.IoctlSetInt(tty, unix.TIOCNOTTY, 0)
		unix.Close(tty)
	}
	// Caught and dropped instead of ignored, because the ranks would inherit that.
	dropped := make(chan os.Signal, 1)
	signal.Notify(dropped, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGPIPE,
		syscall.SIGTTOU, syscall.SIGTTIN, syscall.SIGTSTP)
	chld := make(chan os.Signal, 1)
	signal.Notify(chld, syscall.SIGCHLD)
	unix.CloseOnExec(3)
	conn, err := unixConn(3)
	if err != nil {
		fmt.Fprintln(os.Stderr, "tutti: guard:", err)
		return 1
	}
	type delivery struct {
		order
		files []int
	}
	orders := make(chan delivery)
	go func() {
		defer close(orders)
		for {
			var d delivery
			var err error
			if d.files, err = receive(conn, &d.order); err != nil {
				return // the launcher is done, or dead
			}
			orders <- d
		}
	}()

	var temps []string
	var queue ends
	running := map[int]int{} // pid -> id; the started children that have not been waited for
	sweep := map[int]bool{}  // those whose process group ends with them
	exited := func(pid int, s syscall.WaitStatus) {
		if id, ok := running[pid]; ok {
			if sweep[pid] && s != 0 {
				killGroup(pid)
			}
			delete(running, pid)
			delete(sweep, pid)
			queue.forget(pid)
			send(conn, Event{ID: id, PID: pid, Exited: true, Status: s})
		}
	}
	for {
		select {
		case d, ok := <-orders:
			switch {
			case !ok:
				for pid := range running {
					unix.Kill(-pid, unix.SIGKILL)
				}
				killChildren(chld, &queue, exited)
				for _, dir := range temps {
					os.RemoveAll(dir)
				}
				return 0
			case d.Temp != "":
				temps = append(temps, d.Temp)
			case d.Start != nil:
				e := Event{ID: d.ID}
				var unbound error
				if e.PID, unbound, err = start(d.Start, d.files); err != nil {
					e.Error = err.Error()
				} else {
					running[e.PID] = d.ID
					queue.watch(e.PID)
					if d.Start.Sweep {
						sweep[e.PID] = true
					}
				}
				send(conn, e)
				if err == nil && unbound != nil {
					send(conn, Event{ID: d.ID, PID: e.PID, Unbound: unbound.Error()})
				}
			case len(d.Bind) > 0:
				for pid, id := range running {
					if id != d.ID {
						continue
					}
					if err := cpus.BindGroup(pid, d.Bind); err != nil {
						send(conn, Event{ID: id, PID: pid, Unbound: err.Error()})
					}
				}
			default:
				var groups []int
				for pid, id := range running {
					if d.ID < 0 || d.ID == id {
						groups = append(groups, pid)
					}
				}
				signalGroups(groups, d.Signal)
			}
			closeAll(d.files)
		case <-chld:
			reap(&queue, exited)
		}
	}
}

// ends tells in which order children have ended. The end of a rank that dies, and those of others
// that go on without it and succeed, may be noticed together, and wait4 returns the oldest child
// first.
type ends struct {
	epoll  int         // an instance, if pidfds has been made
	pidfds map[int]int // by pid
}

// watch adds a child. If that fails, the child's place among others that have ended is unknown.
func (e *ends) watch(pid int) {
	if e.pidfds == nil {
		fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
		if err != nil {
			return
		}
		e.epoll, e.pidfds = fd, map[int]int{}
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return
	}
	ev := epoll.Event(unix.EPOLLIN, uint64(pid))
	if unix.EpollCtl(e.epoll, unix.EPOLL_CTL_ADD, fd, &ev) != nil {
		unix.Close(fd)
		return
	}
	e.pidfds[pid] = fd
}

// forget ends the watch of a child.
func (e *ends) forget(pid int) {
	if fd, ok := e.pidfds[pid]; ok {
		unix.Close(fd)
		delete(e.pidfds, pid)
	}
}

// next lists children that have ended, in the order in which they did: that in which the kernel
// has queued them.
func (e *ends) next() (pids []int) {
	if e == nil || len(e.pidfds) == 0 {
		return nil
	}
	var evs [64]unix.EpollEvent
	n, err := unix.EpollWait(e.epoll, evs[:], 0)
	if err != nil { // EINTR: SIGCHLD comes again for a later child, and wait4 knows this one
		return nil
	}
	for _, ev := range evs[:n] {
		pids = append(pids, int(ev.Fd))
	}
	return pids
}

// start starts a process. It runs unbound if it cannot be bound: the error says why.
func start(c *Command, files []int) (pid int, unbound, err error) {
	if len(files) != 3 {
		return 0, nil, fmt.Errorf("guard got %d files, want 3", len(files))
	}
	if len(c.CPUs) > 0 { // a process inherits the processors of the thread that forks it
		var all cpus.Set
		if all, unbound = cpus.Allowed(); unbound == nil {
			unbound = cpus.Bind(0, c.CPUs)
			defer cpus.Bind(0, all)
		}
	}
	pid, err = syscall.ForkExec(c.Path, append([]string{c.Path}, c.Args...), &syscall.ProcAttr{
		Dir: c.Dir, Env: c.Env, Files: []uintptr{uintptr(files[0]), uintptr(files[1]), uintptr(files[2])},
		Sys: &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}})
	if err != nil {
		err = notStarted(c.Path, err)
	}
	return pid, unbound, err
}

// notStarted adds to the error of a start what is wrong with the program.
func notStarted(path string, err error) error {
	f, oerr := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // it may be a FIFO
	if oerr != nil {
		return fmt.Errorf("%w: %s", err, path)
	}
	defer f.Close()
	head := make([]byte, 256)
	n, _ := io.ReadFull(f, head)
	first, _, _ := strings.Cut(string(head[:n]), "\n")
	by, script := strings.CutPrefix(first, "#!")
	switch {
	case errors.Is(err, unix.ENOENT) && script:
		return fmt.Errorf("%w: the interpreter of %s, after #! in its first line, is %q", err, path,
			strings.Trim(by, " \t"))
	case errors.Is(err, unix.ENOENT):
		return fmt.Errorf("%w: the dynamic loader that %s names", err, path)
	case errors.Is(err, unix.ENOEXEC) && !script:
		return fmt.Errorf("%w: %s is no program for this machine, nor a script with #! in its first line", err, path)
	}
	return fmt.Errorf("%w: %s", err, path)
}

// reap waits for the children that have ended, in the order of first, and reports whether there are
// others. first may be nil.
func reap(first *ends, exited func(pid int, s syscall.WaitStatus)) (more bool) {
	for {
		var s syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &s, syscall.WNOHANG, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil:
			return false // no children
		case pid == 0:
			return true
		default:
			for _, earlier := range first.next() { // pid has its place there until it is forgotten
				var of syscall.WaitStatus
				if earlier == pid {
					break
				} else if n, _ := syscall.Wait4(earlier, &of, syscall.WNOHANG, nil); n == earlier {
					exited(n, of)
				}
			}
			exited(pid, s)
		}
	}
}

// signalGroups sends sig to process groups. SIGUSR1 and SIGUSR2, which end a process that does
// nothing about them, are for those alone that handle them, or block them to wait for them: a rank
// may be run by a script, and have helpers.
func signalGroups(groups []int, sig syscall.Signal) {
	if sig != syscall.SIGUSR1 && sig != syscall.SIGUSR2 {
		for _, g := range groups {
			unix.Kill(-g, sig)
		}
		return
	}
	for _, pid := range processes() {
		if g, err := unix.Getpgid(pid); err != nil || !slices.Contains(groups, g) {
			continue
		}
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err == nil && hasSignal(status, sig, "SigCgt", "SigBlk") {
			unix.Kill(pid, sig)
		}
	}
}

// killGroup kills the process group of a leader that has just been waited for. While a child of
// this process is in the group, its number is not reused; without one the leader left no process
// behind, and the number may belong to a stranger.
func killGroup(leader int) {
	for _, pid := range children() {
		if group, err := unix.Getpgid(pid); err == nil && group == leader {
			unix.Kill(-leader, unix.SIGKILL)
			return
		}
	}
}

// killChildren kills the children of this process, and those that it inherits from them, until
// there are none. It looks again after each death, which is when children are inherited.
func killChildren(chld <-chan os.Signal, first *ends, exited func(pid int, s syscall.WaitStatus)) {
	for reap(first, exited) {
		for _, pid := range children() {
			unix.Kill(pid, unix.SIGKILL)
		}
		<-chld
	}
}

// processes lists all processes.
func processes() (pids []int) {
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// children lists the processes whose parent is this one.
func children() (pids []int) {
	self := strconv.Itoa(os.Getpid())
	for _, pid := range processes() {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			continue
		}
		// "pid (name) state ppid …"; the name may contain anything.
		if i := strings.LastIndexByte(string(stat), ')'); i >= 0 {
			if f := strings.Fields(string(stat[i+1:])); len(f) > 1 && f[1] == self {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}
