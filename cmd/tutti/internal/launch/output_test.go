package launch

import (
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"

	"pgregory.net/rapid"
)

// sink is a file whose contents can be had in the end.
func sink(t *testing.T) (w *os.File, contents func() string) {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f, func() string {
		b, err := os.ReadFile(f.Name())
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
}

// TestOutputLinesAreNotMixed has ranks write lines in random pieces at the same time.
func TestOutputLinesAreNotMixed(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(1, 12).Draw(rt, "ranks")
		prefix := rapid.Bool().Draw(rt, "prefix")
		lines := make([][]string, n)
		cuts := make([][]int, n)
		for r := range n {
			lines[r] = rapid.SliceOfN(rapid.StringMatching(`[a-z ]{0,40}`), 0, 30).Draw(rt, "lines")
			cuts[r] = rapid.SliceOfN(rapid.IntRange(1, 60), 1, 20).Draw(rt, "cuts")
		}
		out, contents := sink(t)
		errw, _ := sink(t)
		o, err := NewOutput(out, errw, prefix, n, "", nil, func(s string) { t.Error(s) })
		if err != nil {
			t.Fatal(err)
		}
		for r := range n {
			pr, pw := io.Pipe()
			o.Copy(r, false, pr)
			go func() {
				text := strings.Join(lines[r], "\n")
				if len(lines[r]) > 0 {
					text += "\n"
				}
				for i := 0; len(text) > 0; i++ {
					k := min(cuts[r][i%len(cuts[r])], len(text))
					io.WriteString(pw, text[:k])
					text = text[k:]
				}
				pw.Close()
			}()
		}
		o.Wait()
		got := map[string][]string{}
		for line := range strings.Lines(contents()) {
			line = strings.TrimSuffix(line, "\n")
			key := ""
			if prefix {
				if len(line) < 4 || line[0] != '[' {
					rt.Fatalf("line %q has no prefix", line)
				}
				var ok bool
				if key, line, ok = strings.Cut(line[1:], "] "); !ok {
					rt.Fatalf("line %q has no prefix", line)
				}
			}
			got[strings.TrimSpace(key)] = append(got[strings.TrimSpace(key)], line)
		}
		if !prefix { // only their number and the set can be told
			all := map[string]int{}
			for _, ls := range lines {
				for _, s := range ls {
					all[s]++
				}
			}
			for _, s := range got[""] {
				all[s]--
			}
			for s, k := range all {
				if k != 0 {
					rt.Fatalf("line %q: %d too few", s, k)
				}
			}
			return
		}
		for r := range n {
			if fmt.Sprint(got[fmt.Sprint(r)]) != fmt.Sprint(lines[r]) {
				rt.Fatalf("rank %d: %q, want %q", r, got[fmt.Sprint(r)], lines[r])
			}
		}
	})
}

func TestOutputCutsLongLines(t *testing.T) {
	out, contents := sink(t)
	errw, _ := sink(t)
	dir := t.TempDir()
	o, err := NewOutput(out, errw, true, 1, dir, []int{0}, func(s string) { t.Error(s) })
	if err != nil {
		t.Fatal(err)
	}
	long := strings.Repeat("x", 3*maxLine+10)
	o.Copy(0, false, io.NopCloser(strings.NewReader(long+"\nshort\nno newline")))
	o.Wait()
	want := strings.Repeat("[0] "+long[:maxLine]+"\n", 3) + "[0] " + long[:10] + "\n[0] short\n[0] no newline\n"
	if got := contents(); got != want {
		t.Errorf("got %d bytes, want %d; the end is %q", len(got), len(want), got[max(0, len(got)-60):])
	}
	if b, _ := os.ReadFile(dir + "/rank-0.log"); string(b) != long+"\nshort\nno newline" {
		t.Errorf("the log has %d bytes", len(b))
	}
}

// TestOutputThatNobodyReads: Hurry gives it up, the logs have it, and Say reaches who does read.
func TestOutputThatNobodyReads(t *testing.T) {
	r, w := io.Pipe()
	defer r.Close()
	errw, said := sink(t)
	dir := t.TempDir()
	o, err := NewOutput(errw, errw, false, 2, dir, []int{0, 1}, func(s string) { t.Error(s) })
	if err != nil {
		t.Fatal(err)
	}
	o.out.w = w
	text := strings.Repeat("line\n", 100_000)
	for rank := range 2 {
		o.Copy(rank, false, io.NopCloser(strings.NewReader(text)))
	}
	r.Read(make([]byte, 1)) // a write is in progress
	o.Hurry()
	o.Wait()
	if n := o.Dropped(); n != 200_000 {
		t.Errorf("%d lines were dropped, want 200000", n)
	}
	o.Say("done")
	o.Flush()
	if got := said(); got != "done\n" {
		t.Errorf("it says %q", got)
	}
	for _, name := range []string{"rank-0.log", "rank-1.log"} {
		if b, _ := os.ReadFile(dir + "/" + name); string(b) != text {
			t.Errorf("%s has %d bytes, want %d", name, len(b), len(text))
		}
	}
}

func TestOutcome(t *testing.T) {
	for status, want := range map[uint32]string{
		0x0000: "0 exited with code 0", 0x0300: "3 exited with code 3", 0xff00: "255 exited with code 255",
		9: "137 was killed by signal 9 (SIGKILL)", 0x8b: "139 was killed by signal 11 (SIGSEGV) and dumped core",
		40: "168 was killed by signal 40 (a real-time signal)",
	} {
		if code, how := outcome(syscall.WaitStatus(status)); fmt.Sprint(code, " ", how) != want {
			t.Errorf("status %#x: %d %s, want %s", status, code, how, want)
		}
	}
}
