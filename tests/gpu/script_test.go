//go:build cgo && linux

package gpu

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"tutti/device/cuda"
)

// script runs run.sh, which leaves its files in a folder, and returns what it prints.
func script(t *testing.T, out, binary string, args ...string) (string, error) {
	cmd := exec.CommandContext(t.Context(), "./run.sh", append(args, "--binary", binary)...)
	cmd.Env = append(os.Environ(), "OUT="+out)
	text, err := cmd.CombinedOutput()
	return string(text), err
}

func read(t *testing.T, path ...string) string {
	text, err := os.ReadFile(filepath.Join(path...))
	if err != nil {
		t.Error(err)
	}
	return string(text)
}

// The script runs the tests that make its table on the fake driver, prints the table last, and
// fails without a GPU.
func TestScript(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	out := t.TempDir()
	text, err := script(t, out, self, "--fake", "--table")
	table := read(t, out, "gpu", "table.txt")
	if err != nil || !strings.HasSuffix(text, "\n\n"+table) {
		t.Errorf("run.sh --fake --table: %v\n%s", err, text)
	}
	for _, row := range []string{"sum of 8, bfloat16", "copy, device to pinned host", "allreduce of 4 ranks",
		"16384 bytes, graph", "first after Join", "staging 1 MiB"} {
		if !strings.Contains(table, row) {
			t.Errorf("the table has no row %q:\n%s", row, table)
		}
	}
	if _, err := cuda.Load(); err == nil {
		return // the script runs on a GPU, which this test leaves alone
	}
	if text, err := script(t, t.TempDir(), self); err == nil || !strings.Contains(text, "no GPU can be used") {
		t.Errorf("run.sh without a GPU: %v\n%s", err, text)
	}
}

// A test that hangs is ended, and costs nothing but its own rows: those before it and those of the
// others are in the table.
func TestScriptEndsWhatHangs(t *testing.T) {
	binary, out := filepath.Join(t.TempDir(), "gpu.test"), t.TempDir()
	// It takes the arguments of the script: the 4th is that of -test.run, the 11th of -gpu.table.
	err := os.WriteFile(binary, []byte(`#!/bin/sh
echo "row of $4, $CUDA_DEVICE_MAX_CONNECTIONS" >>"${11}"
echo "output of $4"
case $4 in
*Staging*) sleep 1000 & exec sleep 1000 ;;
*Handles*) exit 3 ;;
esac
`), 0o777)
	if err != nil {
		t.Fatal(err)
	}
	text, err := script(t, out, binary, "--limit", "15")
	if err == nil {
		t.Error("a test hangs, and the script ends well")
	}
	for _, want := range []string{"Staging-32: no end within 15 s", "Handles-32: failed", "\nFAIL\n"} {
		if !strings.Contains(text, want) {
			t.Errorf("the script does not say %q:\n%s", want, text)
		}
	}
	table := read(t, out, "gpu", "table.txt")
	for _, row := range []string{"TestReductions$/^GPU$, 32", "TestGraphReplay$/^GPU$, 32", "TestGraphReplay$/^GPU$, 8",
		"TestStaging$/^GPU$, 32", "TestDeadProcess$/^GPU$, 32"} {
		if !strings.Contains(table, "row of ^"+row) {
			t.Errorf("the table has no row of %s:\n%s", row, table)
		}
	}
	if got := read(t, out, "gpu", "Staging-32.txt"); !strings.Contains(got, "output of ^TestStaging") {
		t.Errorf("the output of the test that hangs is %q", got)
	}
	text, err = script(t, out, filepath.Join(out, "none"))
	if err == nil || !strings.Contains(text, "there are no tests") {
		t.Errorf("run.sh without tests: %v\n%s", err, text)
	}
}
