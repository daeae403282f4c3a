package launch

import (
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

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

// slow is a file that takes single bytes.
type slow struct{ *os.File }

func (s slow) Write(b []byte) (int, error) {
	for i := range b {
		if _, err := s.File.Write(b[i : i+1]); err != nil {
			return i, err
		}
	}
	return len(b), nil
}

// TestOutputLinesAreNotMixed has ranks write lines in random pieces at the same time, to their
// standard outputs and errors, which are one file.
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
		o, err := NewOutput(out, out, prefix, n, "", nil, func(s string) { t.Error(s) })
		if err != nil {
			t.Fatal(err)
		}
		o.out.w, o.err.w = slow{out}, slow{out}
		for r := range n {
			pr, pw := io.Pipe()
			o.Copy(r, r%2 == 1, pr)
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

// A pair is the two ends of a pipe.
type pair struct {
	t    *testing.T
	r, w *os.File
}

func newPair(t *testing.T) pair {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close(); w.Close() })
	return pair{t, r, w}
}

func (p pair) write(text string) {
	p.t.Helper()
	if _, err := io.WriteString(p.w, text); err != nil {
		p.t.Fatal(err)
	}
}

// reads waits until text comes.
func (p pair) reads(text string) {
	p.t.Helper()
	p.r.SetReadDeadline(time.Now().Add(patience))
	b := make([]byte, len(text))
	if n, err := io.ReadFull(p.r, b); err != nil || string(b) != text {
		p.t.Fatalf("%q comes (%v), want %q", b[:n], err, text)
	}
}

// newTestOutput returns an output to a pipe, and two ranks that write to it.
func newTestOutput(t *testing.T, prefix bool, wait time.Duration) (o *Output, out pair, ranks [2]pair) {
	t.Helper()
	out = newPair(t)
	o, err := NewOutput(out.w, out.w, prefix, 2, "", nil, func(s string) { t.Error(s) })
	if err != nil {
		t.Fatal(err)
	}
	o.wait = wait
	for i := range ranks {
		ranks[i] = newPair(t)
		o.Copy(i, i == 1, ranks[i].r)
	}
	return o, out, ranks
}

// TestOutputShowsUnfinishedLines: a progress bar moves, and a prompt is there before the answer.
func TestOutputShowsUnfinishedLines(t *testing.T) {
	o, out, ranks := newTestOutput(t, true, time.Hour)
	ranks[0].write("\r1%")
	out.reads("[0] \r[0] 1%")
	ranks[0].write("\r")
	out.reads("\r")
	ranks[0].write("2%")
	out.reads("[0] 2%")
	ranks[1].write("whole\r\nname? ")
	out.reads("\n[1] whole\r\n[1] name? ")
	ranks[1].write("x")
	out.reads("x")
	ranks[0].write("\nnext\n")
	out.reads("\n[0] next\n")
	ranks[1].write("y")
	out.reads("[1] y")
	o.Say("said")
	out.reads("\nsaid\n")
	ranks[1].write("\nz\n")
	out.reads("[1] z\n")
	ranks[1].write("end")
	out.reads("[1] end")
	for _, p := range ranks {
		p.w.Close()
	}
	o.Wait()
	out.reads("\n")
	out.w.Close()
	if rest, err := io.ReadAll(out.r); err != nil || len(rest) > 0 {
		t.Errorf("%q, %v in the end", rest, err)
	}
}

// TestOutputWithoutPrefixIsUnchanged: it has the bytes of the ranks, and no others.
func TestOutputWithoutPrefixIsUnchanged(t *testing.T) {
	long := strings.Repeat("x", maxLine)
	for _, text := range []string{"a\nb", long + "\n", long[1:] + "\n", long + long + long + "y\n\nz", "\r1%\r2%\r\n"} {
		out, contents := sink(t)
		errw, _ := sink(t)
		o, err := NewOutput(out, errw, false, 1, "", nil, func(s string) { t.Error(s) })
		if err != nil {
			t.Fatal(err)
		}
		o.Copy(0, false, io.NopCloser(strings.NewReader(text)))
		o.Wait()
		if got := contents(); got != text {
			t.Errorf("%.20q… of %d bytes becomes %d bytes", text, len(text), len(got))
		}
	}
}

// TestOutputWithoutPrefixWaitsForUnfinishedLines, but not for ever.
func TestOutputWithoutPrefixWaitsForUnfinishedLines(t *testing.T) {
	_, out, ranks := newTestOutput(t, false, time.Hour)
	ranks[0].write("un")
	out.reads("un")
	ranks[1].write("other\n")
	ranks[0].write("finished\n")
	out.reads("finished\nother\n")
	ranks[0].write("last")
	out.reads("last")
	ranks[1].write("other\n")
	ranks[0].w.Close()
	out.reads("\nother\n")

	_, out, ranks = newTestOutput(t, false, 0)
	ranks[0].write("un")
	out.reads("un")
	ranks[1].write("other\n")
	out.reads("\nother\n")
	ranks[0].write("finished\n")
	out.reads("finished\n")
}

// TestOutputHasNoReader: it is noticed by either stream if both are one pipe.
func TestOutputHasNoReader(t *testing.T) {
	o, out, ranks := newTestOutput(t, true, 0)
	out.r.Close()
	ranks[1].write("line\n") // to its standard error
	get(t, "the loss of the reader", o.Broken())
}

func TestOutputKeepsLongLines(t *testing.T) {
	out, contents := sink(t)
	errw, _ := sink(t)
	dir := t.TempDir()
	o, err := NewOutput(out, errw, true, 1, dir, []int{0}, func(s string) { t.Error(s) })
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Repeat("x", 3*maxLine+10) + "\nshort\n" + strings.Repeat("y", maxLine) + "\nno newline"
	o.Copy(0, false, io.NopCloser(strings.NewReader(text)))
	o.Wait()
	if got, want := contents(), "[0] "+strings.ReplaceAll(text, "\n", "\n[0] ")+"\n"; got != want {
		t.Errorf("got %d bytes, want %d; the end is %q", len(got), len(want), got[max(0, len(got)-60):])
	}
	if b, _ := os.ReadFile(dir + "/rank-0.log"); string(b) != text {
		t.Errorf("the log has %d bytes", len(b))
	}
}

// TestOutputThatNobodyReads: Hurry gives it up, the logs have it, and Say reaches who does read.
func TestOutputThatNobodyReads(t *testing.T) {
	r, w := io.Pipe()
	defer r.Close()
	out, _ := sink(t)
	errw, said := sink(t)
	dir := t.TempDir()
	o, err := NewOutput(out, errw, false, 2, dir, []int{0, 1}, func(s string) { t.Error(s) })
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

// full is a file on a disk that is full at times: its next writes have room for so many bytes, and
// later ones for all.
type full struct {
	*os.File
	room []int
}

func (f *full) Write(b []byte) (int, error) {
	if len(f.room) == 0 {
		return f.File.Write(b)
	}
	n := min(f.room[0], len(b))
	f.room = f.room[1:]
	if _, err := f.File.Write(b[:n]); err != nil || n == len(b) {
		return n, err
	}
	return n, syscall.ENOSPC
}

// TestOutputOfAFullDisk: what is lost is reported once, and later lines are lines of their own.
func TestOutputOfAFullDisk(t *testing.T) {
	const all = 1000
	for _, isErr := range []bool{false, true} {
		out, outText := sink(t)
		errw, errText := sink(t)
		var reports []string
		o, err := NewOutput(out, errw, true, 1, "", nil, func(s string) { reports = append(reports, s) })
		if err != nil {
			t.Fatal(err)
		}
		s, file, contents := o.out, out, outText
		if isErr {
			s, file, contents = o.err, errw, errText
		}
		s.w = &full{file, []int{all, len("[0] tw"), 0, all, all, all, 0, all, len("[0]")}}
		p := &source{to: s, head: []byte("[0] ")}
		for _, text := range []string{"one\n", "two\n", "three\n", "fo", "ur\n", "fi", "ve\n", "six\n", "se", "ven\n"} {
			o.show(p, []byte(text))
		}
		if got, want := contents(), "[0] one\n[0] tw\n[0] four\n[0] fi\n[0] six\n[0]\n[0] ven\n"; got != want {
			t.Errorf("standard error: %t: %q, want %q", isErr, got, want)
		}
		if len(reports) != 1 || !strings.Contains(reports[0], syscall.ENOSPC.Error()) {
			t.Errorf("standard error: %t: reports %q", isErr, reports)
		}
	}

	file, contents := sink(t)
	reports := 0
	l := &ranksLog{report: func(string) { reports++ },
		files: map[int]*rankLog{0: {WriteCloser: &full{file, []int{all, len("tw"), 0}}}}}
	for _, text := range []string{"one\n", "two\n", "three\n", "four\n"} {
		l.write(0, []byte(text))
	}
	if got, want := contents(), "one\ntw\nfour\n"; got != want || reports != 1 {
		t.Errorf("the log has %q, want %q; %d reports", got, want, reports)
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
