// Package examples tests the example programs, as processes.
package examples

import (
	"bufio"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"

	"tutti/internal/proctest"
	"tutti/pg/pgtest"
)

// build builds the example programs and returns their directory.
func build(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	out, err := exec.CommandContext(t.Context(), "go", "build", "-o", dir+"/", "./hello", "./train",
		"./infer", "./weights", "../cmd/tutti").CombinedOutput()
	if err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	return dir
}

func TestExamples(t *testing.T) {
	dir := build(t)
	t.Run("hello", func(t *testing.T) { hello(t, filepath.Join(dir, "hello")) })
	t.Run("train", func(t *testing.T) { train(t, filepath.Join(dir, "train")) })
	t.Run("infer", func(t *testing.T) { infer(t, filepath.Join(dir, "infer")) })
	t.Run("weights", func(t *testing.T) { weights(t, filepath.Join(dir, "tutti"), filepath.Join(dir, "weights")) })
}

func hello(t *testing.T, program string) {
	for _, n := range []int{1, 2, 4} {
		for r, out := range pgtest.Exec(t, n, []string{program}) {
			if want := fmt.Sprintf("rank %d of %d: the ranks sum to %d\n", r, n, n*(n-1)/2); out != want {
				t.Errorf("rank %d of %d wrote %q, want %q", r, n, out, want)
			}
		}
	}
}

// run is what a run of train shows.
type run struct {
	losses []float64
	apart  float64
	hash   string
}

var (
	stepLine  = regexp.MustCompile(`(?m)^step +\d+/\d+  loss ([\d.]+) `)
	apartLine = regexp.MustCompile(`(?m)^loss on text kept apart: ([\d.]+)$`)
	proofLine = regexp.MustCompile(`(?m)^weights are bit-identical on all (\d+) ranks: sha256 ([0-9a-f]{64})$`)
)

func train(t *testing.T, program string) {
	const steps = 40
	once := func(n int, args ...string) (r run) {
		t.Helper()
		argv := append([]string{program, "--steps", strconv.Itoa(steps), "--batch", "8", "--seq", "16", "--dim", "32",
			"--heads", "2", "--every", "1",
			"--sample", "20", "--bytes", "200000"}, args...)
		outs := pgtest.Exec(t, n, argv)
		for _, m := range stepLine.FindAllStringSubmatch(outs[0], -1) {
			loss, err := strconv.ParseFloat(m[1], 64)
			if err != nil {
				t.Fatal(err)
			}
			r.losses = append(r.losses, loss)
		}
		apart, proof := apartLine.FindStringSubmatch(outs[0]), proofLine.FindStringSubmatch(outs[0])
		if len(r.losses) != steps || apart == nil || proof == nil || proof[1] != strconv.Itoa(n) ||
			!strings.Contains(outs[0], "func ") {
			t.Fatalf("%d ranks: rank 0 wrote\n%s", n, outs[0])
		}
		for rank, out := range outs[1:] {
			if out != "" {
				t.Errorf("rank %d wrote %q", rank+1, out)
			}
		}
		r.apart, _ = strconv.ParseFloat(apart[1], 64)
		r.hash = proof[2]
		return r
	}
	one := once(1)
	if first, last := one.losses[0], one.losses[steps-1]; math.Abs(first-math.Log(97)) > 0.1 || last > 3.5 ||
		one.apart > 3.7 {
		t.Errorf("the loss went from %g to %g, and is %g on other text: it should begin at ln 97 and fall", first, last,
			one.apart)
	}
	for _, n := range []int{2, 4} {
		several := once(n)
		for i, want := range one.losses {
			if got := several.losses[i]; math.Abs(got-want) > 1e-4*want {
				t.Errorf("step %d: the loss of %d ranks is %g, of one %g", i+1, n, got, want)
			}
		}
		if again := once(n); again.hash != several.hash {
			t.Errorf("two runs of %d ranks end in different bits", n)
		}
	}
	if over := once(2, "--seed", "2"); over.hash == one.hash || over.losses[0] == one.losses[0] {
		t.Error("another seed gives the same run")
	}
	if wide := once(4, "--dtype", "float64"); math.Abs(wide.losses[steps-1]-one.losses[steps-1]) > 1e-3 {
		t.Errorf("float64 ends at a loss of %g, float32 at %g", wide.losses[steps-1], one.losses[steps-1])
	}
}

func infer(t *testing.T, program string) {
	verdict := regexp.MustCompile(`(?m)^\d+ logits of up to [\d.]+ differ by at most ([-+e\d.]+)$`)
	for _, n := range []int{1, 2, 4} {
		outs := pgtest.Exec(t, n, []string{program, "--dim", "64", "--layers", "2", "--tokens", "20"})
		m := verdict.FindStringSubmatch(outs[0])
		if m == nil || n == 1 && m[1] != "0" {
			t.Errorf("%d ranks: rank 0 wrote\n%s", n, outs[0])
		}
	}
}

// Three servers get every version of what four ranks train, each its third of it.
func weights(t *testing.T, tutti, program string) {
	secret, err := exec.CommandContext(t.Context(), tutti, "secret").Output()
	if err != nil {
		t.Fatal(err)
	}
	begin := func(env []string, argv ...string) (*proctest.Process, *bufio.Scanner) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), argv[0], argv[1:]...)
		cmd.Env = append(append(os.Environ(), "TUTTI_SECRET="+strings.TrimSpace(string(secret))), env...)
		r, w := io.Pipe()
		cmd.Stdout, cmd.Stderr = w, w
		p, err := proctest.StartGroup(cmd)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			p.Kill()
			r.Close() // else its last words, which nobody reads, would hold up its end
			p.Wait()
		})
		go func() {
			p.Wait()
			w.Close()
		}()
		return p, bufio.NewScanner(r)
	}
	_, trainers := begin(nil, tutti, "run", "-n", "4", "--", program, "train", "--wait", "3", "--versions", "4",
		"--size", "64M", "--every", "0s")
	const address = "servers find the trainers with "
	store := ""
	for store == "" && trainers.Scan() {
		if _, after, ok := strings.Cut(trainers.Text(), address); ok {
			store = after
		}
	}
	if store == "" {
		t.Fatal("the trainers say nothing of their store")
	}
	var group errgroup.Group
	for part := range 3 {
		_, out := begin([]string{store}, program, "serve", "--part", fmt.Sprintf("%d/3", part), "--until", "4")
		group.Go(func() error {
			for version := 1; out.Scan(); version++ {
				want := fmt.Sprintf("part %d/3, version %d: 21.33 MiB of 21.33 MiB, ", part, version)
				if !strings.HasPrefix(out.Text(), want) || version > 4 {
					return fmt.Errorf("part %d wrote %q, want %q", part, out.Text(), want)
				}
			}
			return out.Err()
		})
	}
	var served []string
	for trainers.Scan() {
		if _, after, ok := strings.Cut(trainers.Text(), "part "); ok {
			served = append(served, after)
		}
	}
	if err := group.Wait(); err != nil {
		t.Error(err)
	}
	slices.Sort(served)
	var want []string
	for part := range 3 {
		for version := range 4 {
			want = append(want, fmt.Sprintf("%d/3 serves version %d", part, version+1))
		}
	}
	if !slices.Equal(served, want) {
		t.Errorf("the trainers heard of %q, want %q", served, want)
	}
}

// Programs of ranks link the store's client, and not its server.
func TestNoServerIsLinked(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "./hello", "./train", "./infer",
		"./weights").Output()
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(out), "go.etcd.io/etcd/client/v3\n") ||
		strings.Contains(string(out), "go.etcd.io/etcd/server/") {
		t.Errorf("the examples depend on\n%s", out)
	}
}

// Programs with endpoints link the store's client only for the directory of names.
func TestStoreIsLinkedForNames(t *testing.T) {
	for pkg, want := range map[string]bool{"tutti/endpoint": false, "tutti/endpoint/directory": true} {
		out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", pkg).Output()
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(out), "go.etcd.io/etcd/client/v3\n") != want ||
			strings.Contains(string(out), "go.etcd.io/etcd/server/") {
			t.Errorf("%s depends on\n%s", pkg, out)
		}
	}
}

// Packages whose names end in "test" are for tests. The command and programs of ranks link none.
func TestNoTestPackageIsLinked(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "tutti/cmd/tutti", "./hello", "./train",
		"./infer").Output()
	if err != nil {
		t.Fatal(err)
	}
	deps := string(out)
	if !strings.Contains(deps, "tutti/bootstrap\n") {
		t.Errorf("bootstrap is not among the dependencies:\n%s", deps)
	}
	for dep := range strings.FieldsSeq(deps) {
		if strings.HasPrefix(dep, "tutti/") && strings.HasSuffix(dep, "test") {
			t.Errorf("%s is linked", dep)
		}
	}
}
