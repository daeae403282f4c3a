//go:build linux

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestParseOptions(t *testing.T) {
	o, err := parseOptions([]string{"--rows", "reg", "--sizes", "64,4K", "--faults", "", "HEAD~3"})
	if err != nil || o.base != "HEAD~3" || fmt.Sprint(o.sizes, o.faults, o.rows) != "[64 4096] [] [reg]" {
		t.Errorf("%+v, %v", o, err)
	}
	for _, bad := range []string{"", "A B", "--old x A", "--rows rdma A", "--sizes x A", "--sizes 0 A", "--ranks 1 A",
		"--faults 1 A", "--rounds 5 A", "--confidence 1 A", "--reps 0 A"} {
		if _, err := parseOptions(strings.Fields(bad)); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

// fake writes a tutti whose rows take 100 us for each size, times what the shell expression factor
// says; in it, n counts its runs from 0, size is the size in bytes.
func fake(t *testing.T, factor string) string {
	t.Helper()
	dir := t.TempDir()
	script := `#!/bin/sh
[ "$2" = --help ] && { echo "--touch"; exit 0; }
case " $* " in *" --touch "*|*" --faults "*) ;; *) exit 9;; esac
runs=` + dir + `/runs
n=$(cat $runs 2>/dev/null || echo 0)
echo $((n + 1)) >$runs
while [ $# -gt 0 ]; do
  case $1 in --min) size=$2;; --faults) faults=1;; esac
  shift
done
percent=$((` + factor + `))
if [ "$faults" ]; then
  for leader in false true; do
    echo "{\"ranks\":2,\"leader_killed\":$leader,\"detected_ms\":[$percent,1],\"next_ms\":[$percent,1],` +
		`\"admitted_ms\":[20,1]}"
  done
else
  echo "{\"bytes\":$size,\"in_place\":false,\"time_us\":$percent,\"wrong\":0}"
  echo "{\"bytes\":$size,\"in_place\":true,\"time_us\":50,\"wrong\":0}"
fi
`
	path := filepath.Join(dir, "tutti")
	if err := os.WriteFile(path, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestCompare(t *testing.T) {
	for _, c := range []struct {
		name, old, new string
		slower         []string // rows
	}{
		{"the same", "100", "100", nil},
		{"faster", "100", "90", nil},
		{"one size is slower", "100", "size == 64 ? 103 : 100", []string{"shm allreduce ranks=2 64 B: 1.030",
			"reg allreduce ranks=2 64 B: 1.030"}},
		{"noise is no difference", "100 + n % 3", "100 + (n + 1) % 3", nil},
		{"slower within the noise", "100 + n % 7 * 10", "102 + n % 5 * 10", nil},
		// 2 sizes, 6 rounds: until the first kind of rows is measured again
		{"slower at first", "100", "n < 12 ? 200 : 100", nil},
		{"faults are slower", "100", "faults ? 130 : 100", []string{"faults ranks=2 detected: 1.300",
			"faults ranks=2 next: 1.300", "faults ranks=2 detected, etcd's leader killed: 1.300"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			o, err := parseOptions([]string{"--rows", "shm,reg", "--ops", "allreduce", "--sizes", "64,4K", "--faults",
				"2", "--rounds", "6", "--old", fake(t, c.old), "--new", fake(t, c.new)})
			if err != nil {
				t.Fatal(err)
			}
			var out strings.Builder
			worse, err := compare(t.Context(), &out, o)
			if err != nil {
				t.Fatal(err)
			}
			if worse != (c.slower != nil) {
				t.Errorf("slower: %v\n%s", worse, out.String())
			}
			for _, want := range c.slower {
				if !strings.Contains(out.String(), "slower: "+want) {
					t.Errorf("%q is missing:\n%s", want, out.String())
				}
			}
		})
	}
}

// Missing or invalid measurements are an error, never a pass.
func TestCompareFails(t *testing.T) {
	write := func(script string) string {
		path := filepath.Join(t.TempDir(), "tutti")
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script), 0o755); err != nil {
			t.Fatal(err)
		}
		return path
	}
	good := fake(t, "100")
	for name, bad := range map[string]string{
		"it fails":        write("echo no such flag >&2; exit 2"),
		"wrong elements":  write(`echo '{"bytes":64,"time_us":1,"wrong":3}'`),
		"no time":         write(`echo '{"bytes":64,"wrong":0}'`),
		"no rows":         write(""),
		"other rows":      write(`echo '{"bytes":65,"time_us":1,"wrong":0}'`),
		"it prints words": write("echo hello"),
	} {
		for _, args := range [][]string{{"--old", good, "--new", bad}, {"--old", bad, "--new", good}} {
			o, err := parseOptions(append([]string{"--rows", "shm", "--ops", "allreduce", "--sizes", "64", "--faults",
				"", "--rounds", "6"}, args...))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := compare(t.Context(), &strings.Builder{}, o); err == nil {
				t.Errorf("%s: no error", name)
			}
		}
	}
}

// The base is built from its commit, this tree as it is, and nothing is left in the repository.
func TestBuildsBothTrees(t *testing.T) {
	repo := t.TempDir()
	t.Chdir(repo)
	git := func(args ...string) string {
		t.Helper()
		out, err := exec.Command("git", append([]string{"-c", "user.name=a", "-c", "user.email=a@b", "-c",
			"commit.gpgsign=false"}, args...)...).CombinedOutput()
		if err != nil {
			t.Fatalf("git %v: %v: %s", args, err, out)
		}
		return string(out)
	}
	tutti := func(us int) {
		t.Helper()
		text := fmt.Sprintf("package main\n\nimport \"os\"\n\nfunc main() { "+
			"os.Stdout.WriteString(`{\"bytes\":64,\"time_us\":%d,\"wrong\":0}`) }\n", us)
		if err := os.WriteFile(filepath.Join(repo, "cmd/tutti/main.go"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.MkdirAll("cmd/tutti", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile("go.mod", []byte("module tutti\n\ngo 1.24\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	tutti(100)
	git("init", "--quiet")
	git("add", ".")
	git("commit", "--quiet", "-m", "base")
	tutti(200) // not committed
	o, err := parseOptions([]string{"--rows", "tcp", "--ops", "allreduce", "--sizes", "64", "--faults", "", "--rounds",
		"6", "HEAD"})
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	worse, err := compare(t.Context(), &out, o)
	if err != nil || !worse || !strings.Contains(out.String(), "slower: tcp allreduce ranks=2 64 B: 2.000") ||
		!strings.Contains(out.String(), "cannot touch") {
		t.Errorf("%v, %v:\n%s", worse, err, out.String())
	}
	if left := git("worktree", "list"); strings.Count(left, "\n") != 1 {
		t.Errorf("worktrees are left: %s", left)
	}
	o.base = "no-such-commit"
	if _, err := compare(t.Context(), &out, o); err == nil {
		t.Error("a commit that does not exist was built")
	}
}
