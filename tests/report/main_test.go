package main

import (
	"strings"
	"testing"
)

func TestSummary(t *testing.T) {
	var out strings.Builder
	s := &summary{out: &out, text: map[key]*strings.Builder{}}
	for _, e := range []event{
		{Action: "output", Package: "p", Test: "A", Output: "noise\n"}, {Action: "pass", Package: "p", Test: "A"},
		{Action: "output", Package: "p", Test: "B", Output: "    b_test.go:3: wrong\n"},
		{Action: "fail", Package: "p", Test: "B"},
		{Action: "output", Package: "p", Test: "C", Output: "    c_test.go:3: needs a GPU\n"},
		{Action: "output", Package: "p", Test: "C", Output: "--- SKIP: C\n"}, {Action: "skip", Package: "p", Test: "C"},
		{Action: "output", Package: "p", Test: "D", Output: "panic: it hung\n"},
		{Action: "output", Package: "p", Output: "FAIL\n"}, {Action: "fail", Package: "p"},
	} {
		s.add(e)
	}
	if code := s.finish(true, 0); code != 1 {
		t.Errorf("exit code %d with a failed test", code)
	}
	for _, want := range []string{"wrong", "panic: it hung",
		"skip  p C: c_test.go:3: needs a GPU\nFAIL  p B: b_test.go:3: wrong\nFAIL  p: FAIL\n" +
			"1 passed, 1 failed, 1 skipped"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is missing in:\n%s", want, out.String())
		}
	}
	if strings.Contains(out.String(), "noise") {
		t.Error("output of a passed test is shown")
	}
}

// A skip passes CI by the test's name alone, whatever its reason says.
func TestUnlistedSkipFailsCI(t *testing.T) {
	for _, c := range []struct {
		pkg, test, why string
		code           int
	}{
		{"p", "TestPeerMapping", "needs a GPU", 0},
		{"p", "TestPeerMapping", "no reason at all", 0},
		{"p", "TestPeerMapping/small", "needs a GPU", 1},
		{"q", "TestPeerMapping", "needs a GPU", 1},
		{"p", "TestLaunch", "needs a GPU", 1},
		{"p", "TestLaunch", "needs root", 1},
	} {
		s := &summary{out: &strings.Builder{}, text: map[key]*strings.Builder{},
			mayskip: map[string]bool{"p TestPeerMapping": true}}
		s.add(event{Action: "output", Package: c.pkg, Test: c.test, Output: "    c_test.go:3: " + c.why + "\n"})
		s.add(event{Action: "skip", Package: c.pkg, Test: c.test})
		if got := s.finish(true, 0); got != c.code {
			t.Errorf("%+v: exit code %d", c, got)
		}
		if got := s.finish(false, 0); got != 0 {
			t.Errorf("%+v: exit code %d outside of CI", c, got)
		}
	}
}
