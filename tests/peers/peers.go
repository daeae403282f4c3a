//go:build linux

package main

import (
	"bytes"
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"tutti/internal/proctest"
	"tutti/internal/tick"
)

//go:embed src
var sources embed.FS

// A contestant is one column of the table: a library, a configuration of Tutti, or the memory
// limit.
type contestant string

const (
	openMPI  contestant = "openmpi"
	mpich    contestant = "mpich"
	openMPI5 contestant = "openmpi5"
	mpich5   contestant = "mpich5"
	gloo     contestant = "gloo"
	limit    contestant = "limit"
	tutti    contestant = "tutti"
	tuttiReg contestant = "tutti-reg"
)

// peerLibraries are the contestants that Tutti is compared with; the fastest counts.
var peerLibraries = []contestant{openMPI, mpich, openMPI5, mpich5, gloo}

func (c contestant) ours() bool { return c == tutti || c == tuttiReg }

// A heat is the work of a contestant in one turn: all sizes of one operation.
type heat struct {
	who                  contestant
	transport, op, dtype string
	ranks                int
}

func (h heat) String() string {
	return fmt.Sprintf("%s %s %s %s on %d ranks", h.who, h.transport, h.op, h.dtype, h.ranks)
}

// least returns the bytes below which an operation is not: where it divides its data, each rank has
// an element.
func (h heat) least() int64 {
	switch h.op {
	case "reduce_scatter", "allgather", "alltoall":
		return int64(4 * h.ranks)
	}
	return 0
}

// enters reports whether c can run h.
func (c contestant) enters(h heat) bool {
	switch {
	case !c.ours() && h.dtype != "float32":
		return false
	case h.op == "put":
		return c == tutti || c == openMPI || c == mpich || (c == openMPI5 || c == mpich5) && h.transport == "shm"
	case c == gloo:
		return h.transport == "tcp"
	case c == limit:
		return h.transport == "shm" && h.op == "allreduce"
	case c == tuttiReg:
		return h.transport == "shm" && h.op != barrier
	}
	return true
}

// How each contestant is built: its source, its compiler with leading arguments, the arguments
// after the source, the Debian packages of these, and the command that prints its version. Commands
// that begin with @ are in the folder of --mpi.
var recipes = map[contestant]struct {
	source         string
	compiler, libs []string
	needs          []string
	packages       string
	version        []string
}{
	openMPI: {"mpi.c", mpicc("mpicc.openmpi"), nil, []string{"mpirun.openmpi"}, "libopenmpi-dev openmpi-bin",
		[]string{"mpirun.openmpi", "--version"}},
	mpich: {"mpi.c", mpicc("mpicc.mpich"), nil, []string{"mpiexec.mpich"}, "libmpich-dev mpich",
		[]string{"mpichversion"}},
	openMPI5: {"mpi.c", mpicc("@openmpi/bin/mpicc"), nil, []string{"@openmpi/bin/mpirun"}, "",
		[]string{"@openmpi/bin/mpirun", "--version"}},
	mpich5: {"mpi.c", mpicc("@mpich/bin/mpicc"), nil, []string{"@mpich/bin/mpiexec"}, "",
		[]string{"@mpich/bin/mpichversion"}},
	gloo: {"gloo.cc", []string{"g++", "-std=c++17", "-w"}, []string{"-lgloo", "-lpthread"}, nil, "libgloo-dev g++",
		[]string{"dpkg-query", "-W", "libgloo-dev"}},
	limit: {"limit.c", []string{"gcc", "-std=gnu11"}, nil, nil, "gcc", nil},
}

// mpicc is a compiler of MPI programs with its arguments. The libraries are to find functions of
// mpi.c in the program.
func mpicc(command string) []string { return []string{command, "-std=gnu11", "-rdynamic"} }

// smallestLimit is the size from which the memory limit is shown.
const smallestLimit = 64 << 10

// A workshop holds the built programs and the temporary directories in which they run.
type workshop struct {
	o            options
	dir          string // programs
	tmp, shm     string // files of running peers: sockets and sessions; shared memory
	tutti        string
	fresh        int // counts rendezvous directories
	versions     map[string]string
	notes        []string
	moduleFolder string
	// Libraries whose large messages on shared memory do not count.
	copiesTwice map[contestant]bool
}

func newWorkshop(o options) (*workshop, error) {
	out, err := exec.Command("go", "env", "GOMOD").Output()
	root := filepath.Dir(strings.TrimSpace(string(out)))
	if err != nil || root == "." || root == "/dev" {
		return nil, errors.New("this is to be run inside the module, for it builds ./cmd/tutti and uses .build/")
	}
	w := &workshop{o: o, dir: filepath.Join(root, ".build", "peers"), tutti: o.tuttiPath, versions: map[string]string{},
		moduleFolder: root, copiesTwice: map[contestant]bool{}}
	if err := os.MkdirAll(w.dir, 0o755); err != nil {
		return nil, err
	}
	if w.tmp, err = os.MkdirTemp("", "peers-"); err != nil {
		return nil, err
	}
	// Open MPI keeps its shared segments in named files. In a folder of ours they go away even when
	// it is killed.
	if w.shm, err = os.MkdirTemp("/dev/shm", "peers-"); err != nil {
		w.shm = w.tmp
	}
	return w, nil
}

func (w *workshop) close() {
	proctest.KillAll()
	os.RemoveAll(w.tmp)
	os.RemoveAll(w.shm)
}

// note records a remark for the end of the report, and prints it now if it is new.
func (w *workshop) note(format string, args ...any) {
	n := fmt.Sprintf(format, args...)
	if slices.Contains(w.notes, n) {
		return
	}
	w.notes = append(w.notes, n)
	w.progress("")
	fmt.Fprintln(os.Stderr, n)
}

// progress shows on a terminal what is running now, in the place of what was.
func (w *workshop) progress(format string, args ...any) {
	if st, err := os.Stderr.Stat(); err == nil && st.Mode()&os.ModeCharDevice != 0 {
		fmt.Fprintf(os.Stderr, "\r\033[K"+format, args...)
	}
}

// build makes a contestant's program. Its error says what to install.
func (w *workshop) build(ctx context.Context, name string) error {
	c := contestant(name)
	if c.ours() {
		if w.tutti != "" {
			return nil
		}
		path := filepath.Join(w.dir, "tutti")
		cmd := exec.CommandContext(ctx, "go", "build", "-o", path, "./cmd/tutti")
		cmd.Dir = w.moduleFolder
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("go build ./cmd/tutti: %w: %s", err, tail(out))
		}
		w.tutti = path
		return nil
	}
	r := recipes[c]
	install := "on Debian: apt-get install " + r.packages
	if r.packages == "" {
		install = "make deps-peers installs it"
	}
	for _, tool := range append([]string{r.compiler[0]}, r.needs...) {
		if _, err := exec.LookPath(w.tool(tool)); err != nil {
			return fmt.Errorf("%s is missing; %s", w.tool(tool), install)
		}
	}
	compiler := w.tool(r.compiler[0])
	// The sources are embedded in this binary, so that they match its version, wherever it is run.
	src := filepath.Join(w.tmp, "src")
	if err := os.MkdirAll(src, 0o755); err != nil {
		return err
	}
	err := fs.WalkDir(sources, "src", func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := sources.ReadFile(p)
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(src, d.Name()), b, 0o644)
	})
	if err != nil {
		return err
	}
	args := slices.Concat(r.compiler[1:], []string{"-O3", "-march=native", "-o", filepath.Join(w.dir, name),
		filepath.Join(src, r.source)}, r.libs)
	if out, err := exec.CommandContext(ctx, compiler, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s cannot compile %s (%w); %s: %s", compiler, r.source, err, install, tail(out))
	}
	if r.version != nil {
		if out, err := exec.CommandContext(ctx, w.tool(r.version[0]), r.version[1:]...).Output(); err == nil {
			line, _, _ := strings.Cut(string(out), "\n")
			w.versions[name] = strings.Join(strings.Fields(line), " ")
		}
	}
	return nil
}

// tool returns the path of a command of a recipe.
func (w *workshop) tool(name string) string {
	if inside, ok := strings.CutPrefix(name, "@"); ok {
		return filepath.Join(w.o.mpi, inside)
	}
	return name
}

// tryCopies finds out whether the kernel copies a build's large messages from process to process.
// Builds that are made for all machines may lack that. Then only their other rows count.
func (w *workshop) tryCopies(ctx context.Context, c contestant) error {
	if c != openMPI5 && c != mpich5 {
		return nil
	}
	o := w.o
	defer func() { w.o = o }()
	w.o.Sizes, w.o.Reps, w.o.Budget = []int64{1 << 20}, 1, time.Millisecond
	rows, err := w.turn(ctx, heat{c, "shm", "alltoall", "float32", 2})
	if err != nil {
		return err
	}
	if rows[0].SingleCopies == 0 {
		w.copiesTwice[c] = true
		w.note("%s has no single copy here: its messages of %s and more on shared memory do not count", c,
			sizeString(largeMessage))
	}
	return nil
}

// A launch is the commands of one turn, which run concurrently.
type launch struct {
	argv [][]string
	env  []string
}

// launches returns the commands for h: usually one launch; one for each size if Tutti's --min,
// --max and --factor cannot express them all.
func (w *workshop) launches(h heat, cores int) ([]launch, error) {
	sizes := w.o.sizes(h.op)
	if h.who == limit {
		sizes = slices.DeleteFunc(slices.Clone(sizes), func(s int64) bool { return s < smallestLimit })
		if len(sizes) == 0 {
			return nil, nil
		}
	}
	if h.who.ours() {
		var ls []launch
		for _, p := range progressions(sizes) {
			argv := []string{w.tutti, "bench", "-n", strconv.Itoa(h.ranks), "--op", strings.ReplaceAll(h.op, "_", ""),
				"--min", strconv.FormatInt(p.min, 10), "--max", strconv.FormatInt(p.max, 10),
				"--factor", strconv.FormatInt(p.factor, 10), "--dtype", h.dtype, "--transport", h.transport,
				"--rounds", strconv.Itoa(w.o.Reps), "--round-time", w.o.Budget.String(), "--json"}
			if h.who == tuttiReg {
				argv = append(argv, "--registered")
			}
			if !w.o.Tight {
				argv = append(argv, "--touch")
			}
			ls = append(ls, launch{argv: [][]string{argv}})
		}
		return ls, nil
	}
	var list []string
	for _, s := range sizes {
		list = append(list, strconv.FormatInt(s, 10))
	}
	n, fits, spin := strconv.Itoa(h.ranks), h.ranks <= cores, "0"
	if fits {
		spin = "1"
	}
	inPlace, touch := "1", "1"
	switch {
	case w.o.Tight:
		touch = "0"
	case !fits:
		touch = "2"
	}
	if w.o.OutOfPlace {
		inPlace = "0"
	}
	program := []string{filepath.Join(w.dir, string(h.who)), h.op, strings.Join(list, ","), inPlace,
		strconv.Itoa(w.o.Reps),
		strconv.FormatInt(w.o.Budget.Microseconds(), 10), strconv.Itoa(int(w.o.Deadline.Seconds()) + 5), touch,
		strconv.FormatInt(tick.Of(h.transport).Microseconds(), 10)}
	switch h.who {
	case limit:
		return []launch{{argv: [][]string{append(program, n)}}}, nil
	case gloo:
		w.fresh++
		dir := filepath.Join(w.tmp, "store"+strconv.Itoa(w.fresh))
		if err := os.Mkdir(dir, 0o700); err != nil {
			return nil, err
		}
		var l launch
		for r := range h.ranks {
			l.argv = append(l.argv, append(slices.Clone(program), strconv.Itoa(r), n, dir, spin))
		}
		return []launch{l}, nil
	case openMPI, openMPI5:
		mpirun, memory, oversubscribe := "mpirun.openmpi", "vader", []string{"--oversubscribe"}
		if h.who == openMPI5 {
			mpirun, memory, oversubscribe = w.tool("@openmpi/bin/mpirun"), "sm", []string{"--map-by", ":OVERSUBSCRIBE"}
		}
		argv := []string{mpirun, "-n", n, "--mca", "pml", "ob1", "--mca", "btl_" + memory + "_backing_directory", w.shm}
		if h.transport == "shm" {
			argv = append(argv, "--mca", "btl", memory+",self")
		} else {
			argv = append(argv, "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo")
			if h.who == openMPI {
				argv = append(argv, "--mca", "osc", "pt2pt") // other components put through shared memory
			}
		}
		if fits {
			argv = append(argv, "--bind-to", "core")
		} else {
			argv = append(append(argv, oversubscribe...), "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1")
		}
		if os.Geteuid() == 0 {
			argv = append(argv, "--allow-run-as-root")
		}
		return []launch{{argv: [][]string{append(argv, program...)}}}, nil
	case mpich, mpich5:
		argv := []string{"mpiexec.mpich", "-n", n}
		if h.who == mpich5 {
			argv[0] = w.tool("@mpich/bin/mpiexec")
		}
		if fits {
			argv = append(argv, "-bind-to", "core")
		}
		l := launch{argv: [][]string{append(argv, program...)}}
		switch {
		case h.transport == "shm":
		case h.who == mpich:
			l.env = []string{"UCX_TLS=tcp,self", "UCX_NET_DEVICES=lo", "MPIR_CVAR_NOLOCAL=1"}
		default: // its UCX does not use the loopback device
			l.env = []string{"MPIR_CVAR_CH4_NETMOD=ofi", "FI_PROVIDER=tcp", "FI_TCP_IFACE=lo", "MPIR_CVAR_NOLOCAL=1"}
		}
		return []launch{l}, nil
	}
	return nil, fmt.Errorf("no contestant is called %q", h.who)
}

// errEnding says that a program failed after it had printed all results.
var errEnding = errors.New("all results were there, but its end was bad")

// turn runs h once and returns its rows, including those before an error.
func (w *workshop) turn(ctx context.Context, h heat) ([]row, error) {
	launches, err := w.launches(h, runtime.NumCPU())
	if err != nil {
		return nil, err
	}
	var rows []row
	for _, l := range launches {
		out, err := w.run(ctx, l)
		for _, r := range parseRows(out, h, !w.o.Tight) {
			if r.Bytes < largeMessage || h.transport != "shm" || !w.copiesTwice[h.who] {
				rows = append(rows, r)
			}
		}
		switch {
		case err != nil && !h.who.ours() && ctx.Err() == nil && complete(rows, w.o.sizes(h.op), h.least()):
			return rows, fmt.Errorf("%w: %w", errEnding, err)
		case err != nil:
			return rows, err
		}
	}
	if sizes := len(w.o.sizes(h.op)); len(launches) > 0 && len(rows) == 0 || h.who.ours() && len(rows) < sizes {
		return rows, fmt.Errorf("it ended well but printed %d results for %d sizes", len(rows), sizes)
	}
	for _, r := range rows {
		if r.Wrong > 0 {
			return rows, fmt.Errorf("%d wrong elements at %d bytes", r.Wrong, r.Bytes)
		}
	}
	return rows, nil
}

// run starts all commands of l and waits for them. At the deadline, on cancellation, or when one
// fails, it kills them all with their process groups. It returns their outputs, in order.
func (w *workshop) run(ctx context.Context, l launch) ([]byte, error) {
	// Launchers put their ranks into separate process groups and sessions, which killing the
	// launcher's group does not reach.
	defer proctest.KillAll()
	ctx, cancel := context.WithTimeout(ctx, w.o.Deadline)
	defer cancel()
	outs, errs := make([]bytes.Buffer, len(l.argv)), make([]error, len(l.argv))
	var wg sync.WaitGroup
	for i, argv := range l.argv {
		cmd := command(ctx, argv)
		cmd.Env = append(append(os.Environ(), "TMPDIR="+w.tmp), l.env...)
		cmd.Dir = w.tmp // where a crashing peer may drop its core
		var stderr bytes.Buffer
		cmd.Stdout, cmd.Stderr = &outs[i], &stderr
		p, err := proctest.Start(cmd)
		if err != nil {
			errs[i] = err
			cancel()
			break
		}
		wg.Go(func() {
			err := end(p)
			if err != nil && ctx.Err() != nil {
				err = context.Cause(ctx)
			}
			if err != nil {
				errs[i] = fmt.Errorf("%w %s", err, tail(stderr.Bytes()))
				cancel()
			}
		})
	}
	wg.Wait()
	var all []byte
	for i := range outs {
		all = append(all, outs[i].Bytes()...)
	}
	// Commands that were killed because another had failed are not reported.
	var first error
	for _, err := range errs {
		if err != nil && (first == nil || errors.Is(first, context.Canceled)) {
			first = err
		}
	}
	if errors.Is(first, context.DeadlineExceeded) {
		first = fmt.Errorf("killed at the deadline of %v (--deadline): %w", w.o.Deadline, first)
	}
	return all, first
}

// leftFor is how long the ranks of a launcher that has ended may still hold its output open.
const leftFor = 2 * time.Second

// end waits until p and its output have ended. It kills the ranks that p has left.
func end(p *proctest.Process) error {
	p.Stopped() // returns at its end: nobody stops it
	select {
	case <-p.Done():
		return p.Wait()
	case <-time.After(leftFor):
	}
	left := p.KillTree()
	err := p.Wait()
	if err == nil && left > 0 {
		err = fmt.Errorf("it had left %d processes", left)
	}
	return err
}

// tail returns the end of a program's output, on one line.
func tail(b []byte) string {
	s := strings.Join(strings.Fields(string(b)), " ")
	if len(s) > 400 {
		s = "…" + s[len(s)-400:]
	}
	return s
}

// command returns a command in its own process group, which is killed as a whole when ctx ends.
func command(ctx context.Context, argv []string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 30 * time.Second // for pipes that processes hold although they were killed
	return cmd
}
