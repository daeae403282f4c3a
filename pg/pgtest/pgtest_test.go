package pgtest

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"pgregory.net/rapid"

	"tutti/internal/leaktest"
	"tutti/pg"
)

var custom = flag.String("custom", "none", "a flag of the test binary's own")

// patience bounds the waits for the ends of processes.
const patience = 30 * time.Second

// sumOfRanks is what all ranks of a healthy group can do.
func sumOfRanks(t *testing.T, g *pg.Group) {
	t.Helper()
	n := g.Size()
	x := []int64{int64(g.Rank())}
	if err := pg.AllReduce(t.Context(), g, x, pg.Sum); err != nil || x[0] != int64(n*(n-1)/2) {
		t.Fatalf("sum is %d, %v; want %d", x[0], err, n*(n-1)/2)
	}
}

func TestRun(t *testing.T) {
	if self == nil {
		defer leaktest.Verify(t)
	}
	for _, n := range []int{1, 2, 4} {
		t.Run(strconv.Itoa(n), func(t *testing.T) {
			Run(t, n, func(t *testing.T, g *pg.Group) {
				if g.Size() != n {
					t.Fatalf("size is %d, want %d", g.Size(), n)
				}
				sumOfRanks(t, g)
				t.Run("inside", func(t *testing.T) { sumOfRanks(t, g) })
			})
			if self != nil {
				t.Error("a rank came to the code after its Run")
			}
		})
	}
}

func TestRunParallel(t *testing.T) {
	for range 3 {
		t.Run("same name", func(t *testing.T) {
			t.Parallel()
			Run(t, 2, sumOfRanks)
		})
	}
}

func TestRunOptions(t *testing.T) {
	t.Setenv("PGTEST_INHERITED", "yes")
	Run(t, 2, func(t *testing.T, g *pg.Group) {
		for name, want := range map[string]string{"PGTEST_INHERITED": "yes", "PGTEST_OWN": "a=b",
			"TUTTI_TRANSPORT": "tcp", "WORLD_SIZE": "2", markVariable: ""} {
			if got := os.Getenv(name); got != want {
				t.Errorf("%s is %q, want %q", name, got, want)
			}
		}
		if d, ok := t.Deadline(); !ok || time.Until(d) > 50*time.Second {
			t.Errorf("deadline is %v, want one within 50 s", d)
		}
		sumOfRanks(t, g)
	}, Env("PGTEST_OWN=a=b"), Transport("tcp"), Timeout(50*time.Second))
}

func TestExpectedDeath(t *testing.T) {
	Run(t, 3, func(t *testing.T, g *pg.Group) {
		sumOfRanks(t, g)
		if g.Rank() == 1 {
			for _, r := range []int{0, 2} { // a rank that has the sum tells the other of the death
				if _, err := pg.Recv(t.Context(), g, make([]byte, 1), r, 0); err != nil {
					t.Fatal(err)
				}
			}
			Kill(t)
		}
		if err := pg.Send(t.Context(), g, []byte{1}, 1, 0); err != nil {
			t.Fatal(err)
		}
		err := g.Barrier(t.Context())
		var dead *pg.RankError
		if !errors.As(err, &dead) || dead.Rank != 1 {
			t.Fatalf("barrier with a dead rank 1: %v", err)
		}
	}, Expect(1, syscall.SIGKILL))
}

// What ranks leave in their directory for temporary files is removed, unless the test has named
// another one.
func TestTemporaryFilesAreRemoved(t *testing.T) {
	mine := t.TempDir()
	for _, opts := range [][]Option{nil, {Env("TMPDIR=" + mine)}} {
		for rank, out := range Exec(t, 2, []string{"mktemp", "-d"}, opts...) {
			path := strings.TrimSpace(out)
			if _, err := os.Stat(path); (err == nil) != (opts != nil) || opts != nil && filepath.Dir(path) != mine {
				t.Errorf("rank %d's %q: %v", rank, path, err)
			}
		}
	}
}

func TestRunLocal(t *testing.T) {
	var mu sync.Mutex
	seen := map[int]bool{}
	RunLocal(t, 4, func(t *testing.T, g *pg.Group) {
		sumOfRanks(t, g)
		mu.Lock()
		defer mu.Unlock()
		seen[g.Rank()] = true
	})
	if len(seen) != 4 {
		t.Fatalf("ranks %v ran, want 4", seen)
	}
}

func TestExec(t *testing.T) {
	t.Setenv("RANK", "7")
	t.Setenv("TUTTI_SECRET_FILE", "/nowhere")
	out := Exec(t, 3, []string{"/bin/sh", "-c",
		`echo "$TUTTI_RANK/$RANK/$LOCAL_RANK of $TUTTI_SIZE $X${TUTTI_SECRET_FILE-}"; echo aside >&2`}, Env("X=y"))
	want := []string{"0/0/0 of 3 y\n", "1/1/1 of 3 y\n", "2/2/2 of 3 y\n"}
	if !reflect.DeepEqual(out, want) {
		t.Fatalf("output %q, want %q", out, want)
	}
}

// Scenarios are tests that TestScenarios runs, in a process of their own, to see them fail.
const (
	scenarioVariable = "PGTEST_SCENARIO"
	limitVariable    = "PGTEST_LIMIT" // for "hang": how long the ranks may run
)

var scenarios = map[string]func(t *testing.T){
	"error": func(t *testing.T) {
		Run(t, 2, func(t *testing.T, g *pg.Group) {
			if g.Rank() == 1 {
				t.Error("what rank 1 says")
			}
			sumOfRanks(t, g)
		})
	},
	"panic": func(t *testing.T) {
		Run(t, 2, func(t *testing.T, g *pg.Group) {
			if g.Rank() == 1 {
				panic("what rank 1 says")
			}
			if err := g.Barrier(t.Context()); err == nil {
				t.Error("no error though rank 1 is gone")
			}
		})
	},
	"killed": func(t *testing.T) {
		Run(t, 2, func(t *testing.T, g *pg.Group) {
			if g.Rank() == 1 {
				Kill(t)
			}
			g.Barrier(t.Context())
		})
	},
	"failed before death": func(t *testing.T) {
		Run(t, 2, func(t *testing.T, g *pg.Group) {
			if g.Rank() == 1 {
				t.Run("inside", func(t *testing.T) { t.Error("what rank 1 says") })
				Kill(t)
			}
		}, Expect(1, syscall.SIGKILL))
	},
	"killed after failure": func(t *testing.T) {
		Run(t, 1, func(t *testing.T, g *pg.Group) {
			t.Cleanup(func() { syscall.Kill(os.Getpid(), syscall.SIGKILL); select {} })
			t.Fatal("what rank 0 says")
		}, Expect(0, syscall.SIGKILL))
	},
	"awaited in vain": func(t *testing.T) {
		awaited := filepath.Join(t.TempDir(), "awaited")
		Exec(t, 2, []string{"/bin/sh", "-c", `[ $RANK = 0 ] || until [ -e "$AWAITED" ]; do sleep 0.01; done`},
			Env("AWAITED="+awaited), Faults(func(c *Control) {
				c.Await(0, 1) // it does not wait for the other rank's end
				if err := os.WriteFile(awaited, nil, 0o600); err != nil {
					t.Error(err)
				}
			}))
	},
	"survivor": func(t *testing.T) {
		Run(t, 2, func(t *testing.T, g *pg.Group) {}, Expect(1, syscall.SIGKILL))
	},
	"hang": func(t *testing.T) {
		limit, err := time.ParseDuration(os.Getenv(limitVariable))
		if err != nil {
			t.Fatal(err)
		}
		Run(t, 2, func(t *testing.T, g *pg.Group) {
			if g.Rank() == 1 {
				hangHere()
			}
		}, Timeout(limit))
	},
	"stubborn": func(t *testing.T) {
		Run(t, 2, func(t *testing.T, g *pg.Group) {
			syscall.Kill(os.Getpid(), syscall.SIGSTOP)
			hangHere() // the signal may take its time
		}, Timeout(time.Second))
	},
	"stubborn first": func(t *testing.T) {
		Run(t, 3, func(t *testing.T, g *pg.Group) {
			sumOfRanks(t, g)
			switch g.Rank() {
			case 0:
				syscall.Kill(os.Getpid(), syscall.SIGSTOP)
			case 2:
				t.Fatal("what rank 2 says")
			}
			hangHere()
		})
	},
	"exit 0": func(t *testing.T) {
		Run(t, 2, func(t *testing.T, g *pg.Group) { os.Exit(0) })
	},
	"unreached": func(t *testing.T) {
		if os.Getenv("TUTTI_RANK") != "1" {
			Run(t, 2, func(t *testing.T, g *pg.Group) {})
		}
	},
	"nested": func(t *testing.T) {
		Run(t, 1, func(t *testing.T, g *pg.Group) { Run(t, 1, sumOfRanks) })
	},
	"skip": func(t *testing.T) {
		Run(t, 2, func(t *testing.T, g *pg.Group) { t.Skip("what is missing") })
	},
	"skip of one": func(t *testing.T) {
		Run(t, 2, func(t *testing.T, g *pg.Group) {
			if g.Rank() == 1 {
				t.Skip("what is missing")
			}
		})
	},
	"names": func(t *testing.T) {
		for _, name := range []string{"a b", "a b", "c/d", "(e|f)[g/h]+$", "", "é\x01"} {
			t.Run(name, func(t *testing.T) {
				for call := range 2 {
					Run(t, 1, func(t *testing.T, g *pg.Group) {
						t.Logf("%q ran, call %d, %s", t.Name(), call,
							*custom)
					})
				}
			})
		}
	},
	"children": func(t *testing.T) {
		Run(t, 1, func(t *testing.T, g *pg.Group) {
			c := exec.Command("/bin/sleep", "1000")
			c.Stdout = os.Stdout // and so holds the output open
			if err := c.Start(); err != nil {
				t.Fatal(err)
			}
			t.Logf("pid %d.", c.Process.Pid)
		})
	},
	"for ever": func(t *testing.T) {
		Run(t, 2, func(t *testing.T, g *pg.Group) {
			t.Logf("pid %d. store %s.", os.Getpid(), os.Getenv("TUTTI_STORE"))
			hangHere()
		})
	},
	"local": func(t *testing.T) {
		RunLocal(t, 2, func(t *testing.T, g *pg.Group) {
			sumOfRanks(t, g)
			if g.Rank() == 1 {
				t.Fatal("what rank 1 says")
			}
			if err := g.Barrier(t.Context()); err == nil {
				t.Error("no error though rank 1 is gone")
			}
		})
	},
	"local hang": func(t *testing.T) {
		RunLocal(t, 2, func(t *testing.T, g *pg.Group) {
			if _, err := pg.Recv(t.Context(), g, make([]byte, 1), 1-g.Rank(), 0); err == nil {
				t.Error("a message without a sender was received")
			}
		}, Timeout(time.Second))
	},
	"exec": func(t *testing.T) {
		Exec(t, 2, []string{"/bin/sh", "-c", "echo PASS; exit $TUTTI_RANK"})
	},
	"no program": func(t *testing.T) {
		Exec(t, 2, []string{"/nonexistent/program"})
	},
}

func hangHere() { time.Sleep(time.Hour) }

func TestScenario(t *testing.T) {
	name, ok := os.LookupEnv(scenarioVariable)
	if ok { // else there is nothing to do: TestScenarios runs it
		scenarios[name](t)
	}
}

// scenario is the command that runs one.
func scenario(t *testing.T, name string, args ...string) *exec.Cmd {
	c := exec.Command(executable(t), append([]string{"-test.run=^TestScenario$", "-test.v", "-test.timeout=5m"},
		args...)...)
	c.Env = append(os.Environ(), scenarioVariable+"="+name)
	return c
}

func TestScenarios(t *testing.T) {
	for name, want := range map[string]struct {
		status string // PASS, FAIL or SKIP
		says   []string
	}{
		"error": {"FAIL", []string{`rank 1\|.*pgtest_test.go:\d+: what rank 1 says`,
			`rank 1 failed: exit status 1`}},
		"panic": {"FAIL", []string{`rank 1\| panic: what rank 1 says`, `rank 1\| goroutine \d+`,
			`rank 1 failed: exit status 2`}},
		"killed": {"FAIL", []string{`rank 1 was killed by SIGKILL`}},
		"failed before death": {"FAIL", []string{`rank 1\|.*what rank 1 says`,
			`rank 1 failed before it was killed by SIGKILL`}},
		"killed after failure": {"FAIL", []string{`rank 0 failed before it was killed by SIGKILL`}},
		"awaited in vain":      {"FAIL", []string{`await: rank 0 has ended before that`}},
		"survivor":             {"FAIL", []string{`rank 1 passed, where it was expected to be killed by SIGKILL`}},
		"hang": {"FAIL", []string{`rank 1\| .*hangHere`,
			`rank 1 was still running after [.\d]+s and was ended`}},
		"stubborn first": {"FAIL", []string{`rank 1\| .*hangHere`,
			`rank 0 was still running when rank 2 had failed`}},
		"stubborn":    {"FAIL", []string{`rank 0 was still running after`, `rank 1 was still running after`}},
		"exit 0":      {"FAIL", []string{`rank 0 ended with status 0 before its function returned`}},
		"unreached":   {"FAIL", []string{`rank 1 ended without coming to this call`}},
		"nested":      {"FAIL", []string{`rank 0\|.*Run is called in a rank of Run`}},
		"skip":        {"SKIP", []string{`rank 0\|.*what is missing`, `skipped by rank 0, 1 of 2`}},
		"skip of one": {"SKIP", []string{`rank 1\|.*what is missing`, `skipped by rank 1 of 2`}},
		"local": {"FAIL", []string{`what rank 1 says`, `--- FAIL: TestScenario/rank_1`,
			`--- PASS: TestScenario/rank_0`}},
		"local hang": {"FAIL", []string{`ranks were still running after 1s`}},
		"exec":       {"FAIL", []string{`rank 0\| PASS`, `rank 1 failed: exit status 1`}},
		"no program": {"FAIL", []string{`rank 0 could not be started: .*no such file`}},
		"names": {"PASS", []string{`"TestScenario/a_b" ran, call 0, thing`, `"TestScenario/a_b" ran, call 1`,
			`"TestScenario/a_b#01" ran, call 1`,
			`"TestScenario/c/d" ran, call 1`, `"TestScenario/\(e\|f\)\[g/h\]\+\$" ran, call 1`,
			`"TestScenario/#00" ran, call 1`, `"TestScenario/é\\\\x01" ran, call 1`}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			limits := []string{""}
			if name == "hang" { // it holds from before the ranks join, which takes longer on a busy machine
				limits = []string{"3s", "10s", "30s"}
			}
			var began time.Time
			var out []byte
			var err error
			for _, limit := range limits {
				c := scenario(t, name, "-custom", "thing")
				c.Env = append(c.Env, limitVariable+"="+limit)
				began = time.Now()
				if out, err = c.CombinedOutput(); bytes.Contains(out, []byte("hangHere")) {
					break
				}
			}
			if (err != nil) != (want.status == "FAIL") {
				t.Errorf("it ended with %v, want %s", err, want.status)
			}
			for _, re := range append(want.says, `(?m)^--- `+want.status+`: TestScenario `) {
				if !regexp.MustCompile(re).Match(out) {
					t.Errorf("its output has no %q", re)
				}
			}
			framed := regexp.MustCompile(`rank \d\| *(===|PASS\n.*PASS|coverage|--- (PASS|SKIP))`)
			if name != "exec" && framed.Match(out) {
				t.Error("its output has the testing package's framing of a rank")
			}
			if regexp.MustCompile(`(?m)^panic: test timed out`).Match(out) {
				t.Errorf("it did not end by itself, in %v", time.Since(began))
			}
			if t.Failed() {
				t.Logf("output:\n%s", out)
			}
		})
	}
}

// gone waits until a process has ended. Init reaps an orphan at some time, so a zombie counts as
// gone.
func gone(t *testing.T, pid string) {
	t.Helper()
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		status, err := os.ReadFile(filepath.Join("/proc", pid, "status"))
		if err != nil || regexp.MustCompile(`(?m)^State:\s+[ZX]`).Match(status) {
			return
		}
	}
	t.Errorf("process %s is still there", pid)
}

func needProc(t *testing.T) {
	t.Helper()
	if _, err := os.Stat("/proc/self/status"); err != nil {
		t.Skip("no /proc to see processes in")
	}
}

var pids = regexp.MustCompile(`pid (\d+)\.`)

func TestChildrenOfRanksEnd(t *testing.T) {
	needProc(t)
	out, err := scenario(t, "children").CombinedOutput()
	m := pids.FindSubmatch(out)
	if err != nil || m == nil {
		t.Fatalf("%v\n%s", err, out)
	}
	gone(t, string(m[1]))
}

// A test binary that is killed takes its ranks and its store along.
func TestProcessesEndWithTestBinary(t *testing.T) {
	needProc(t)
	c := scenario(t, "for ever")
	c.Env = append(c.Environ(), "TMPDIR="+t.TempDir()) // it cannot remove its files
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	var ranks []string
	var store string
	for lines := bufio.NewScanner(out); len(ranks) < 2 && lines.Scan(); {
		if m := pids.FindStringSubmatch(lines.Text()); m != nil {
			ranks = append(ranks, m[1])
			store = regexp.MustCompile(`store tutti://(\S+)\.`).FindStringSubmatch(lines.Text())[1]
		}
	}
	c.Process.Kill()
	c.Wait()
	if len(ranks) < 2 {
		t.Fatal("the ranks did not start")
	}
	for _, pid := range ranks {
		gone(t, pid)
	}
	for deadline := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		conn, err := net.Dial("tcp", store)
		if err != nil {
			break
		}
		conn.Close()
		if time.Now().After(deadline) {
			t.Fatalf("the store at %s is still there", store)
		}
	}
}

// A store that died is replaced.
func TestStoreIsReplaced(t *testing.T) {
	if self == nil {
		before, _ := sharedStore(t)
		store.life.Close()
		const every = 10 * time.Millisecond
		for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(every) {
			c, err := net.Dial("tcp", strings.TrimPrefix(before, "tutti://"))
			if err != nil {
				break
			}
			c.Close()
		}
	}
	Run(t, 2, sumOfRanks)
}

// What a pipe holds can be read although a child of the rank has its other end.
func TestWritten(t *testing.T) {
	reader, writer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	defer writer.Close()
	for _, want := range []string{"", "one two"} {
		for _, part := range strings.SplitAfter(want, " ") {
			writer.WriteString(part)
		}
		if got := written(reader); got != want {
			t.Errorf("it holds %q, want %q", got, want)
		}
	}
}

// A rank that is replaced has a directory for each process.
func TestCoverageOfReplacedRank(t *testing.T) {
	c := &coverage{t.TempDir(), t.TempDir()}
	for range 2 {
		name := filepath.Join(c.directory(t, 1), "cov")
		if err := os.WriteFile(name+rand.Text(), nil, 0o600); err != nil {
			t.Error(err)
		}
	}
	c.collect(t)
	if files, err := os.ReadDir(c.into); err != nil || len(files) != 2 {
		t.Errorf("files %v were collected, %v; want two", files, err)
	}
}

// The coverage of the ranks counts, and their files do not clash.
func TestCoverage(t *testing.T) {
	if testing.Short() {
		t.Log("not in short mode: builds a test binary with -cover")
		return
	}
	tool, err := exec.LookPath("go")
	if err != nil {
		t.Skip("no go command")
	}
	profile := filepath.Join(t.TempDir(), "profile")
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	c := exec.CommandContext(ctx, tool, "test", "-count=1", "-run=^TestRunParallel$", "-coverprofile="+profile, ".")
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	text, err := os.ReadFile(profile)
	if err != nil {
		t.Fatal(err)
	}
	ran := false // a block of the ranks' side
	for line := range strings.Lines(string(text)) {
		ran = ran || strings.Contains(line, "rank.go") && !strings.HasSuffix(strings.TrimSpace(line), " 0") &&
			coversJoin(t, line)
	}
	if !ran {
		t.Fatalf("the profile does not have what the ranks ran:\n%s", text)
	}
}

// coversJoin says whether a line of a profile is the block of rank.go that calls pg.Join.
func coversJoin(t *testing.T, line string) bool {
	source, err := os.ReadFile("rank.go")
	if err != nil {
		t.Fatal(err)
	}
	at := 1 + bytes.Count(source[:bytes.Index(source, []byte("pg.Join("))], []byte("\n"))
	m := regexp.MustCompile(`:(\d+)\.\d+,(\d+)\.`).FindStringSubmatch(line)
	if m == nil {
		return false
	}
	from, _ := strconv.Atoi(m[1])
	to, _ := strconv.Atoi(m[2])
	return from <= at && at <= to
}

func TestOtherArguments(t *testing.T) {
	for args, want := range map[string]string{
		"":                                      "",
		"-test.run=X -custom=a -test.v":         "-custom=a",
		"-test.run X -custom a -test.short b c": "-custom a b c",
		"--test.timeout 3s --custom=a -- -test.v": "--custom=a -- -test.v",
		"-test.v file -test.run=X":                "file -test.run=X",
		"-custom -test.v":                         "-custom -test.v", // custom's value
		"-custom":                                 "-custom",
		"-test.run":                               "",
	} {
		if got := strings.Join(otherArguments(strings.Fields(args)), " "); got != want {
			t.Errorf("of %q it kept %q, want %q", args, got, want)
		}
	}
}

// A line is written whole and once, marked, however it comes.
func TestLineWriter(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		lines := rapid.SliceOf(rapid.SampledFrom([]string{"x", "--- PASS: T (0.1s)", "    === RUN   T/a", "PASS",
			"PASSED", "--- FAIL: T", "a\tb", "coverage: 3%"})).Draw(t, "lines")
		text := strings.Join(lines, "\n")
		var got, want strings.Builder
		w := &lineWriter{to: &got, prefix: "p| ", framed: true}
		for rest := text; rest != ""; {
			n := rapid.IntRange(1, len(rest)).Draw(t, "n")
			w.Write([]byte(rest[:n]))
			rest = rest[n:]
		}
		w.flush()
		for _, l := range lines {
			if l == "x" || l == "PASSED" || l == "--- FAIL: T" || l == "a\tb" {
				fmt.Fprintf(&want, "p| %s\n", l)
			}
		}
		if got.String() != want.String() {
			t.Fatalf("of %q it wrote %q, want %q", text, got.String(), want.String())
		}
	})
}

func TestLineWriterBoundsLines(t *testing.T) {
	var got bytes.Buffer
	w := &lineWriter{to: &got, prefix: "p| "}
	for range 3 {
		w.Write(bytes.Repeat([]byte("x"), longestLine))
	}
	if cap(w.part) > 4*longestLine || got.Len() < longestLine {
		t.Fatalf("it holds %d bytes and wrote %d", cap(w.part), got.Len())
	}
}
