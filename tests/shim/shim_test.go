//go:build linux && cgo

// Package shim tests the C interface: programs in C and C++, which it compiles, as ranks.
package shim

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"tutti/device/cuda/fake"
	"tutti/kernels/cuda/cudatest"
	"tutti/pg/pgtest"
)

var root = func() string {
	dir, err := filepath.Abs("../..")
	if err != nil {
		panic(err)
	}
	return dir
}()

// command runs a command in the module's root and returns its output.
func command(argv ...string) (string, error) {
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Dir = root
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s: %w\n%s", strings.Join(argv, " "), err, out)
	}
	return string(out), err
}

var build struct {
	once sync.Once
	dir  string
	err  error
}

// built returns the directory of the library and the programs, which it builds once.
func built(t *testing.T) string {
	t.Helper()
	build.once.Do(func() {
		if build.dir, build.err = os.MkdirTemp("", "shim"); build.err == nil {
			build.err = compile(build.dir)
		}
	})
	if build.err != nil {
		t.Fatal(build.err)
	}
	return build.dir
}

func TestMain(m *testing.M) {
	code := m.Run()
	if build.dir != "" {
		os.RemoveAll(build.dir)
	}
	os.Exit(code)
}

// compile fills dir.
func compile(dir string) error {
	if _, err := command("make", "shim", "BIN="+dir); err != nil {
		return err
	}
	strict := []string{"-Wall", "-Wextra", "-Werror", "-g", "-I" + dir}
	linked := []string{"-L" + dir, "-ltutti", "-Wl,-rpath," + dir, "-lpthread"}
	var compilers errgroup.Group
	for name, argv := range map[string][]string{
		"allreduce":      {"gcc", "-std=c99", "-pedantic", "examples/c/allreduce.c"},
		"allreduce-asan": {"gcc", "-std=c99", "-fsanitize=address", "examples/c/allreduce.c"},
		"raii":           {"g++", "-std=c++14", "-pedantic", "examples/c/raii.cc"},
		"raii-asan":      {"g++", "-std=c++14", "-fsanitize=address", "examples/c/raii.cc"},
		"check":          {"gcc", "-std=gnu11", "tests/shim/testdata/check.c"},
		"check-asan":     {"gcc", "-std=gnu11", "-fsanitize=address", "tests/shim/testdata/check.c"},
		"gpu":            {"gcc", "-std=gnu11", "tests/shim/testdata/gpu.c", "-ldl"},
		"gpu-asan":       {"gcc", "-std=gnu11", "-fsanitize=address", "tests/shim/testdata/gpu.c", "-ldl"},
		"guest":          {"gcc", "-std=gnu11", "tests/shim/testdata/guest.c", "-ldl", "-lpthread"},
	} {
		argv = append(append(argv, strict...), "-o", filepath.Join(dir, name))
		if name != "guest" { // which opens the library itself
			argv = append(argv, linked...)
		}
		compilers.Go(func() error {
			_, err := command(argv...)
			return err
		})
	}
	return compilers.Wait()
}

// program returns the path of a built program, as arguments.
func program(t *testing.T, name string, args ...string) []string {
	return append([]string{filepath.Join(built(t), name)}, args...)
}

func guest(t *testing.T, part string) []string {
	return program(t, "guest", filepath.Join(built(t), "libtutti.so"), part)
}

// The leak checker stops all threads at the end, which needs a privilege that containers lack.
var sanitizer = pgtest.Env("ASAN_OPTIONS=detect_leaks=0:abort_on_error=0:exitcode=99")

func TestExamples(t *testing.T) {
	const n = 4
	for _, variant := range []string{"", "-asan"} {
		for r, out := range pgtest.Exec(t, n, program(t, "allreduce"+variant), sanitizer) {
			if want := fmt.Sprintf("rank %d of %d: %d\n", r, n, n*(n-1)/2+n*10); out != want {
				t.Errorf("allreduce%s: rank %d wrote %q, want %q", variant, r, out, want)
			}
		}
		for r, out := range pgtest.Exec(t, n, program(t, "raii"+variant), sanitizer) {
			if want := fmt.Sprintf("rank %d of %d: %d %d\n", r, n, n*(n-1)/2, 2*n*100); out != want {
				t.Errorf("raii%s: rank %d wrote %q, want %q", variant, r, out, want)
			}
		}
	}
}

func TestEveryOperation(t *testing.T) {
	pgtest.Exec(t, 2, program(t, "check-asan", "ops"), sanitizer)
	pgtest.Exec(t, 3, program(t, "check", "ops"), pgtest.Env("TUTTI_TRANSPORT=tcp"))
}

func TestManyOperationsAtATime(t *testing.T) {
	pgtest.Exec(t, 2, program(t, "check-asan", "overlap"), sanitizer)
}

func TestInvalidCallsAreRefused(t *testing.T) {
	pgtest.Exec(t, 1, program(t, "check-asan", "bad"), sanitizer)
}

func TestArbitraryOperationsDoNoHarm(t *testing.T) {
	pgtest.Exec(t, 1, program(t, "check-asan", "fuzz"), sanitizer)
}

func TestThreadsShareGroups(t *testing.T) {
	pgtest.Exec(t, 1, program(t, "check-asan", "concurrent"), sanitizer)
}

func TestMismatchNamesBothRanks(t *testing.T) {
	pgtest.Exec(t, 2, program(t, "check", "mismatch"))
}

func TestTimeoutNamesTheMissingRank(t *testing.T) {
	pgtest.Exec(t, 2, program(t, "check", "late"))
}

// The lease is longer than the operations' timeout, and the machine answers: only the ends of links
// tell of the death. Children of the dead rank inherited its descriptors and live.
func TestDeathOfARankWithForkedChildrenIsNoticedAtOnce(t *testing.T) {
	for _, transport := range []string{"shm", "tcp"} {
		t.Run(transport, func(t *testing.T) {
			pgtest.Exec(t, 3, program(t, "check", "lost"), pgtest.Expect(1, syscall.SIGKILL),
				pgtest.Env("TUTTI_TRANSPORT="+transport, "TUTTI_TIMEOUT=30s", "TUTTI_LEASE=60s"))
		})
	}
}

// Two ranks have a GPU each. The driver is the fake one, which the linker finds first.
func TestDeviceBuffersInTheOrderOfStreams(t *testing.T) {
	driver := fake.New(t, fake.Config{})
	environment := []string{"LD_LIBRARY_PATH=" + filepath.Dir(driver.Path), "KERNELS=" + cudatest.Build(t)}
	for _, transport := range []string{"shm", "tcp"} {
		t.Run(transport, func(t *testing.T) {
			pgtest.Exec(t, 2, program(t, "gpu-asan"), sanitizer, pgtest.Env(environment...),
				pgtest.Env("TUTTI_TRANSPORT="+transport))
			pgtest.Exec(t, 3, program(t, "gpu"), pgtest.Env(environment...), pgtest.Env("TUTTI_TRANSPORT="+transport))
		})
	}
}

func TestStoreOfTheHost(t *testing.T) {
	for name, more := range map[string]string{"with wait": "A=", "without wait": "WITHOUT_WAIT=1"} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "store")
			pgtest.Exec(t, 3, program(t, "check-asan", "kv"), sanitizer,
				pgtest.Env("STORE_FILE="+file, "LOGS="+t.TempDir(), more))
		})
	}
}

func TestMembers(t *testing.T) {
	pgtest.Exec(t, 3, program(t, "check-asan", "members"), sanitizer)
}

func TestStoreOfTheJob(t *testing.T) {
	pgtest.Exec(t, 2, program(t, "check-asan", "jobstore"), sanitizer)
}

func TestForkedChildren(t *testing.T) {
	for _, transport := range []string{"shm", "tcp"} {
		t.Run(transport, func(t *testing.T) {
			pgtest.Exec(t, 2, guest(t, "fork"), pgtest.Env("TUTTI_TRANSPORT="+transport, "TUTTI_LOG_DIR="+t.TempDir()))
		})
	}
}

// run runs a part of guest.c as a process without a launcher, and returns its output.
func run(t *testing.T, part string, variables ...string) string {
	t.Helper()
	argv := guest(t, part)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH")}, variables...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%s: %v\n%s", part, err, out)
	}
	return string(out)
}

func TestSignalsReachTheHost(t *testing.T) { run(t, "signals", "LOGS="+t.TempDir()) }

func TestThreadsKeepTheirSignalMasks(t *testing.T) { run(t, "masks") }

func TestLimitOfOpenFilesStays(t *testing.T) { run(t, "files") }

func TestFaultsOfTheHostStayItsOwn(t *testing.T) { run(t, "faults") }

func TestThreadsLeaveNothing(t *testing.T) { run(t, "threads") }

// Sums do not depend on the floating-point mode of the thread that opens the library or calls it.
func TestSubnormalsOfThreadsThatFlushThem(t *testing.T) { pgtest.Exec(t, 2, guest(t, "subnormals")) }

// Threads that the Go runtime starts within a call do not inherit that mode.
func TestThreadsThatFlushSubnormalsEnterGoInItsMode(t *testing.T) { run(t, "entries-keep") }

func TestJoiningAndClosingLeavesNothing(t *testing.T) { t.Log(run(t, "cycles")) }

// Each round has four calls that run operations. An operation that was started leaves some bytes of
// garbage; a few allocations a call would be ten times as many collections.
func TestWarmCallsLeaveLittleGarbage(t *testing.T) {
	out := run(t, "hot", "GODEBUG=gctrace=1", "GOGC=100")
	_, out, _ = strings.Cut(out, "begin\n")
	calls, rest, ended := strings.Cut(out, "end: ")
	if n := strings.Count(calls, "gc "); !ended || n > 4 {
		t.Errorf("%d garbage collections:\n%s", n, calls)
	}
	t.Log(strings.SplitN(rest, "\n", 2)[0])
}

var shrinks = pgtest.Env("TUTTI_ON_FAILURE=shrink")

func TestKilledRankIsReplaced(t *testing.T) {
	pgtest.Exec(t, 3, program(t, "check", "replace"), pgtest.Expect(2, syscall.SIGKILL), pgtest.Replace(2), shrinks)
}

func TestEvictedRankRejoins(t *testing.T) {
	pgtest.Exec(t, 3, program(t, "check", "evict"), shrinks)
}

func TestSecondGoRuntimeIsNamed(t *testing.T) {
	other := filepath.Join(t.TempDir(), "libother.so")
	if _, err := command("go", "build", "-buildmode=c-shared", "-o", other, "./tests/shim/testdata/other"); err != nil {
		t.Fatal(err)
	}
	if out := run(t, "second", "OTHER="+other); strings.Count(out, other+" brings a second Go runtime") != 1 {
		t.Errorf("the output does not name %s once:\n%s", other, out)
	}
	if out := run(t, "single"); out != "" {
		t.Errorf("without another library the output is %q", out)
	}
}

func TestLibraryThatCannotBeUsedIsExplained(t *testing.T) {
	dir := t.TempDir()
	imposter := func(name string, flags ...string) {
		t.Helper()
		argv := []string{"gcc", "-shared", "-fPIC", "-o", filepath.Join(dir, name), "tests/shim/testdata/imposter.c"}
		if _, err := command(append(argv, flags...)...); err != nil {
			t.Fatal(err)
		}
	}
	imposter("old.so", "-DVERSION=7")
	imposter("small.so", "-DVERSION=1<<16|255")
	for size := 2048; size >= 8; size /= 2 { // together they use up glibc's reserve, some 1.7 kB
		imposter(fmt.Sprintf("greedy-%d.so", size), "-DVERSION=1<<16|255", fmt.Sprintf("-DGREEDY=%d", size))
	}
	imposter("greedy-4.so", "-DVERSION=1<<16|255", "-DGREEDY=8")
	run(t, "refused", "IMPOSTERS="+dir)
}

// Only the functions of the header are visible, and the header's list of them is complete.
func TestOnlyTheInterfaceIsExported(t *testing.T) {
	out, err := command("nm", "-D", "--defined-only", filepath.Join(built(t), "libtutti.so"))
	if err != nil {
		t.Fatal(err)
	}
	header, err := os.ReadFile(filepath.Join(root, "shim", "tutti.h"))
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for line := range strings.Lines(out) {
		fields := strings.Fields(line)
		name := fields[len(fields)-1]
		if n++; !strings.Contains(string(header), "X("+name+")") {
			t.Errorf("%s is exported, but not in TUTTI_FUNCTIONS", name)
		}
	}
	if want := strings.Count(string(header), "X(tutti_"); n != want {
		t.Errorf("%d functions are exported, want the %d of TUTTI_FUNCTIONS", n, want)
	}
}

// withCommand is built, and the directory has the tutti command.
func withCommand(t *testing.T) string {
	t.Helper()
	dir := built(t)
	if _, err := command("go", "build", "-o", filepath.Join(dir, "tutti"), "./cmd/tutti"); err != nil {
		t.Fatal(err)
	}
	return dir
}

// The file has the prefix, the library and the version of the interface. A package has the prefix,
// and not the directory in which it is made.
func TestPkgConfigFile(t *testing.T) {
	dest := t.TempDir()
	if _, err := command("make", "install", "BIN="+withCommand(t), "DESTDIR="+dest, "PREFIX=/usr"); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"bin/tutti", "lib/libtutti.so", "include/tutti.h", "include/tutti_dl.h"} {
		if _, err := os.Stat(filepath.Join(dest, "usr", name)); err != nil {
			t.Error(err)
		}
	}
	text, err := os.ReadFile(filepath.Join(dest, "usr/lib/pkgconfig/tutti.pc"))
	if err != nil {
		t.Fatal(err)
	}
	header, err := os.ReadFile(filepath.Join(root, "shim", "tutti.h"))
	if err != nil {
		t.Fatal(err)
	}
	version := regexp.MustCompile(`(?s)TUTTI_ABI_MAJOR (\d+)\n#define TUTTI_ABI_MINOR (\d+)\n`).FindSubmatch(header)
	if version == nil {
		t.Fatal("tutti.h has no version")
	}
	for _, want := range []string{"prefix=/usr\n", "-ltutti\n",
		fmt.Sprintf("Version: %s.%s\n", version[1], version[2])} {
		if !strings.Contains(string(text), want) {
			t.Errorf("tutti.pc has no %q:\n%s", want, text)
		}
	}
}

// code returns the lines of a file, up to a line, that begin with a prefix, without it.
func code(t *testing.T, name, end, prefix string) []string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		t.Fatal(err)
	}
	head, _, found := strings.Cut(string(text), end)
	var lines []string
	for line := range strings.Lines(head) {
		if after, ok := strings.CutPrefix(line, prefix); ok {
			lines = append(lines, strings.TrimSpace(after))
		}
	}
	if !found || len(lines) == 0 {
		t.Fatalf("%s has no line with %q before %q", name, prefix, end)
	}
	return lines
}

// The commands of docs/c.md and of the examples work as they are written. They run in a tree that
// has been built, with a home of their own.
func TestDocumentedCommands(t *testing.T) {
	if _, err := exec.LookPath("pkg-config"); err != nil {
		t.Skipf("skipped: there is no pkg-config: %v", err)
	}
	tree, home := t.TempDir(), t.TempDir()
	for name, to := range map[string]string{"Makefile": root + "/Makefile", "shim": root + "/shim",
		"examples": root + "/examples", "bin": withCommand(t)} {
		if err := os.Symlink(to, filepath.Join(tree, name)); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"allreduce.c", "raii.cc"} {
		if err := os.Symlink(filepath.Join(root, "examples", "c", name), filepath.Join(tree, name)); err != nil {
			t.Fatal(err)
		}
	}
	const build, install = "make build shim", "make install "
	doc := code(t, "docs/c.md", "\n## ", "    ")
	if !strings.HasPrefix(doc[0], build+" ") {
		t.Fatalf("the first command of docs/c.md is %q", doc[0])
	}
	doc = doc[1:] // it is done
	at := slices.IndexFunc(doc, func(line string) bool { return strings.HasPrefix(line, install) })
	if at < 0 {
		t.Fatalf("docs/c.md does not say %q", install)
	}
	installed := append(doc[at:], code(t, "examples/c/allreduce.c", "*/", " *     ")...)
	installed = append(installed, code(t, "examples/c/raii.cc", "#include", "//     ")...)
	const n = 4
	run := func(lines []string, want map[string]int) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "sh", "-exc", strings.Join(lines, "\n"))
		cmd.Dir, cmd.Env = tree, append(os.Environ(), "HOME="+home)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		for line, times := range want {
			if strings.Count(string(out), line+"\n") != times {
				t.Errorf("want %d times %q:\n%s", times, line, out)
			}
		}
	}
	want := func(allreduce, raii int) map[string]int {
		lines := map[string]int{}
		for r := range n {
			lines[fmt.Sprintf("rank %d of %d: %d", r, n, n*(n-1)/2+n*10)] = allreduce
			lines[fmt.Sprintf("rank %d of %d: %d %d", r, n, n*(n-1)/2, 2*n*100)] = raii
		}
		return lines
	}
	run(doc[:at], want(1, 0))
	run(installed, want(2, 1))
}
