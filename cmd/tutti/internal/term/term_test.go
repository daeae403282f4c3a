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
