// Package plain makes the texts of other processes safe to show.
package plain

import (
	"strings"
	"unicode"
)

// Controls reports whether r controls a terminal, the direction of text or the lines.
func Controls(r rune) bool {
	return unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r) || r == '\u2028' || r == '\u2029'
}

// Text returns s as one line of UTF-8 that controls nothing: with spaces for characters that do.
// What is no UTF-8 becomes U+FFFD.
func Text(s string) string {
	return strings.Map(func(r rune) rune {
		if Controls(r) {
			return ' '
		}
		return r
	}, s)
}
