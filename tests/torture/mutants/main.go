// Command mutants plants bugs in the library, one at a time, and measures how long tests/torture
// takes to find each. It fails if one is not found, or if there is a finding without a bug.
//
//	go run ./tests/torture/mutants -limit 3m
//	go run ./tests/torture/mutants -run 'key-.*' -seed 7 -keep /tmp/mutants
//
// A bug is planted by go test -overlay: the source tree does not change.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"
)

var (
	which     = flag.String("run", "", "mutants whose names match; all")
	limit     = flag.Duration("limit", 3*time.Minute, "how long a mutant is looked for")
	seed      = flag.Uint64("seed", 1, "of the programs; 0: by chance")
	transport = flag.String("transport", "", "instead of the mutant's own")
	avoid     = flag.String("avoid", "", "instead of what programs do without by default: -torture.avoid")
	list      = flag.Bool("list", false, "list the mutants")
	keep      = flag.String("keep", "", "a directory for what the torture prints")
)

func main() {
	flag.Parse()
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	match, err := regexp.Compile("^(" + *which + ")$")
	if err != nil {
		return err
	}
	root, err := moduleRoot()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "mutants")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	var missed []string
	for i := range mutants {
		m := &mutants[i]
		if *which != "" && !match.MatchString(m.name) {
			continue
		}
		if *list {
			fmt.Printf("%-18s %s\n", m.name, m.what)
			continue
		}
		binary, err := m.build(root, dir)
		if err != nil {
			return err
		}
		took, text, err := m.find(root, binary)
		if err != nil {
			return err
		}
		switch {
		case m.edits == nil && text != "":
			return fmt.Errorf("without a mistake the torture finds %s", text)
		case m.edits == nil:
			text = "nothing"
		case text == "":
			missed = append(missed, m.name)
			text = "not found"
		}
		fmt.Printf("| %s | %s | %s | %v | %s |\n", m.name, m.what, m.on(), took.Round(time.Second), text)
	}
	if missed != nil {
		return fmt.Errorf("within %v the torture does not find: %s", *limit, strings.Join(missed, ", "))
	}
	return nil
}

func moduleRoot() (string, error) {
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return "", fmt.Errorf("the module's source is needed: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}

func (m *mutant) on() string {
	if *transport != "" {
		return *transport
	}
	return m.transport
}

// build builds the torture test with the mutant and returns the binary's path.
func (m *mutant) build(root, dir string) (string, error) {
	files, err := m.apply(root)
	if err != nil {
		return "", err
	}
	var overlay struct{ Replace map[string]string }
	overlay.Replace = map[string]string{}
	for path, text := range files {
		own := filepath.Join(dir, fmt.Sprintf("%s-%d.go", m.name, len(overlay.Replace)))
		if err := os.WriteFile(own, text, 0o600); err != nil {
			return "", err
		}
		overlay.Replace[path] = own
	}
	b, err := json.Marshal(overlay)
	if err != nil {
		return "", err
	}
	table := filepath.Join(dir, m.name+".json")
	if err := os.WriteFile(table, b, 0o600); err != nil {
		return "", err
	}
	binary := filepath.Join(dir, m.name+".test")
	cmd := exec.Command("go", "test", "-c", "-overlay", table, "-o", binary, "./tests/torture")
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building the mutant %s: %w\n%s", m.name, err, out)
	}
	return binary, nil
}

// find runs the torture test until its first finding. It returns the time and the finding, "" if
// there was none.
func (m *mutant) find(root, binary string) (took time.Duration, text string, err error) {
	args := []string{"-test.run", "^TestTorture$", "-test.timeout", "0", "-torture.transport", m.on(),
		"-torture.duration", limit.String(), "-torture.shrink", "0", "-torture.seed", fmt.Sprint(*seed)}
	args = append(args, m.flags...)
	if *avoid != "" {
		args = append(args, "-torture.avoid", *avoid)
	}
	ctx, cancel := context.WithTimeout(context.Background(), *limit+3*time.Minute) // the last program may hang
	defer cancel()
	cmd := exec.CommandContext(ctx, binary, args...)
	cmd.Dir = filepath.Join(root, "tests", "torture")
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGQUIT) }
	cmd.WaitDelay = 10 * time.Second
	began := time.Now()
	out, err := cmd.CombinedOutput()
	took = time.Since(began)
	if *keep != "" {
		if err := os.WriteFile(filepath.Join(*keep, m.name+".txt"), out, 0o600); err != nil {
			return 0, "", err
		}
	}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return 0, "", err
	}
	if err == nil {
		return took, "", nil
	}
	found := findings.FindSubmatch(out)
	if found == nil {
		return 0, "", fmt.Errorf("the torture fails with the mutant %s, but not with a finding:\n%s", m.name, out)
	}
	return took, strings.ReplaceAll(string(found[1]), "|", "/"), nil
}

// findings matches the findings in the output of the torture test.
var findings = regexp.MustCompile(`(?m)^\s+torture\.go:\d+: ([a-z]+: rank \d+, step \d+: .{0,100})`)
