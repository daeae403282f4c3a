package term

import (
	"strings"
	"testing"
)

func TestWrap(t *testing.T) {
	for _, c := range []struct {
		s             string
		indent, width int
		want          string
	}{
		{"a b", 2, 0, "a b"},
		{"one two three four five", 2, 24, "one two three four\n  five"},
		{"one two three four fi", 2, 24, "one two three four fi"},
		{strings.Repeat("x", 40) + " y", 2, 24, strings.Repeat("x", 40) + "\n  y"},
		{"a b", 20, 24, "a b"},
	} {
		if got := Wrap(c.s, c.indent, c.width); got != c.want {
			t.Errorf("Wrap(%q, %d, %d) = %q, want %q", c.s, c.indent, c.width, got, c.want)
		}
	}
}

func TestShown(t *testing.T) {
	for name, want := range map[string]string{"weights": "weights", "a b": "a b", "é": "é", "\u009b2J": `"\u009b2J"`,
		"\xff": `"\xff"`, "\u202e": `"\u202e"`} {
		if got := Shown(name); got != want {
			t.Errorf("%q: %s, want %s", name, got, want)
		}
	}
}

func TestFrame(t *testing.T) {
	for _, c := range []struct {
		what, text string
		want       string
	}{
		{"short lines", "ab\nc\n", "\x1b[Hab\x1b[K\r\nc\x1b[K\r\n\x1b[J"},
		{"nothing", "", "\x1b[H\x1b[J"},
		{"an erasure would take the last character of a full line", "abcd\nc\n", "\x1b[Habcd\r\nc\x1b[K\r\n\x1b[J"},
		{"a longer line", "abcdef\n", "\x1b[Habcd\r\n\x1b[J"},
		{"colours", "a\x1b[31mbcdef\x1b[0m\n", "\x1b[Ha\x1b[31mbcd\x1b[0m\x1b[0m\r\n\x1b[J"},
		{"as many lines as rows do not scroll", "a\nb\nc\n", "\x1b[Ha\x1b[K\r\nb\x1b[K\r\nc\x1b[K"},
		{"more lines", "a\nb\nc\nd\n", "\x1b[Ha\x1b[K\r\nb\x1b[K\r\nc\x1b[K"},
	} {
		if got := frame(c.text, 4, 3); got != c.want {
			t.Errorf("%s: %q, want %q", c.what, got, c.want)
		}
	}
}
