package plain

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func TestText(t *testing.T) {
	for s, want := range map[string]string{
		"": "", "rank 0 has ended": "rank 0 has ended", "é 世界 \u200b": "é 世界 \u200b",
		"a\r\n\tb": "a   b", "\x1b[2J": " [2J", "\u009b2J": " 2J", "\x7f\x00": "  ",
		"\u202e\u2066\u200f\u061c": "    ", "\u2028\u2029": "  ", "\x9b2J": "\ufffd2J", "a\xff\xfeb": "a\ufffd\ufffdb",
	} {
		if got := Text(s); got != want {
			t.Errorf("Text(%q) = %q, want %q", s, got, want)
		}
	}
}

func FuzzText(f *testing.F) {
	f.Add("a\x1b[2J\u009b\u202e\u2028\x9b")
	f.Fuzz(func(t *testing.T, s string) {
		got := Text(s)
		if !utf8.ValidString(got) || strings.ContainsFunc(got, Controls) || Text(got) != got {
			t.Errorf("%q becomes %q", s, got)
		}
		if utf8.ValidString(s) && !strings.ContainsFunc(s, Controls) && got != s {
			t.Errorf("%q becomes %q, and is fine", s, got)
		}
	})
}
