// Package term has what commands need to know of the terminal that they write to.
package term

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"unicode"

	"golang.org/x/sys/unix"
)

// Size returns the columns and rows of the terminal f, 0 if it is none.
func Size(f *os.File) (columns, rows int) {
	w, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0, 0
	}
	return int(w.Col), int(w.Row)
}

// Width returns the columns of the terminal f, 0 if it is none.
func Width(f *os.File) int {
	w, _ := Size(f)
	return w
}

// Wrap breaks s between words into lines of width columns (0: any), each behind indent columns. If
// there is not enough room it returns s unchanged.
func Wrap(s string, indent, width int) string {
	room := width - indent
	if width == 0 || room < 20 {
		return s
	}
	var b strings.Builder
	used := 0
	for i, word := range strings.Fields(s) {
		n := len([]rune(word))
		switch {
		case i == 0:
		case used+1+n > room:
			b.WriteString("\n" + strings.Repeat(" ", indent))
			used = 0
		default:
			b.WriteByte(' ')
			used++
		}
		b.WriteString(word)
		used += n
	}
	return b.String()
}

// Clip shortens ASCII text so that a line of a terminal with so many columns (0: any) does not
// overflow.
func Clip(s string, columns int) string {
	if columns > 1 && len(s) >= columns {
		return s[:columns-1]
	}
	return s
}

// Progress shows ASCII text in the place of the line of the terminal f. What is written next, by
// whomever, begins at the start of that line.
func Progress(f *os.File, text string) {
	fmt.Fprintf(f, "\r\x1b[K%s\r", Clip(text, Width(f)))
}

// Shown returns a name as text for a terminal: in quotes, with escapes, if it has characters that
// cannot be seen or that change how others are shown.
func Shown(name string) string {
	if strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) || r == unicode.ReplacementChar }) {
		return strconv.Quote(name)
	}
	return name
}

// Count returns a number of things, whose plural ends with an s: "1 rank", "2 ranks".
func Count[N int | int64](n N, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
