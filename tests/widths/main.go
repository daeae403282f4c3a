// Program widths finds lines that are too wide: comments beyond 100 columns, code beyond 120, in
// the files of Go, C, C++, Python and shell below a directory, the current one by default, and
// prose beyond 160 in Markdown. Tables and code in Go's documentation, which a tab begins, count as
// code. Tables, code and lines without a blank to wrap at are exempt in Markdown. A tab goes to the
// next multiple of four. Data of tests and generated files are not looked at.
//
//	go run ./tests/widths [DIR]
package main

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

const (
	maxComment = 100
	maxCode    = 120
	maxProse   = 160
	tab        = 4
)

func main() {
	dir := "."
	if len(os.Args) > 1 {
		dir = os.Args[1]
	}
	wide, err := find(dir)
	for _, line := range wide {
		fmt.Println(line)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	if err != nil || len(wide) > 0 {
		os.Exit(1)
	}
}

// passedOver are directories of what is built, or made up for tests.
var passedOver = []string{".git", ".build", "bin", "build", "testdata", "__pycache__"}

// find returns the wide lines of all files below a directory.
func find(dir string) (wide []string, err error) {
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && slices.Contains(passedOver, d.Name()):
			return fs.SkipDir
		case !d.Type().IsRegular():
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		wide = append(wide, check(path, text)...)
		return nil
	})
	return wide, err
}

// marks begin the lines that are comments, by the ending of the file's name.
var marks = map[string]string{".go": "//", ".c": "//", ".h": "//", ".cc": "//", ".cpp": "//", ".py": "#", ".sh": "#",
	".sbatch": "#"}

var (
	generated = regexp.MustCompile(`(?m)^(//|#) Code generated .* DO NOT EDIT\.$`)
	// What a tool reads, and the tables and code of Go's documentation, are no text that is
	// wrapped.
	literal = regexp.MustCompile(`^(//go:|//\t|#!)`)
	script  = regexp.MustCompile(`^#!.*\b(sh|bash|python3?)\n`)
)

// check returns the wide lines of a file, as PATH:LINE: and what is wrong; none if it is in another
// language.
func check(path string, text []byte) (wide []string) {
	if filepath.Ext(path) == ".md" {
		return checkMarkdown(path, text)
	}
	mark := marks[filepath.Ext(path)]
	if mark == "" && script.Match(text) {
		mark = "#"
	}
	if mark == "" || generated.Match(text[:min(len(text), 1000)]) {
		return nil
	}
	inside := false // a comment that does not end on its first line
	n := 0
	for line := range bytes.Lines(text) {
		n++
		s := strings.TrimSuffix(string(line), "\n")
		begun := strings.TrimLeft(s, " \t")
		opens := mark == "//" && strings.HasPrefix(begun, "/*")
		what, limit := "code", maxCode
		if inside || opens || strings.HasPrefix(begun, mark) && !literal.MatchString(begun) {
			what, limit = "comment", maxComment
		}
		if inside || opens {
			inside = !strings.Contains(s, "*/")
		}
		if w := columns(s); w > limit {
			wide = append(wide, fmt.Sprintf("%s:%d: %d columns of %s, at most %d are allowed", path, n, w, what, limit))
		}
	}
	return wide
}

// exempt are lines of Markdown that are not wrapped: rows of tables, indented code, and what has no
// blank but that of a list's mark.
var exempt = regexp.MustCompile(`^(\||    |\t|\s*([-*+]|\d+\.)? *\S+$)`)

// checkMarkdown returns the wide lines of prose.
func checkMarkdown(path string, text []byte) (wide []string) {
	fenced := false
	n := 0
	for line := range bytes.Lines(text) {
		n++
		s := strings.TrimSuffix(string(line), "\n")
		if strings.HasPrefix(strings.TrimLeft(s, " "), "```") {
			fenced = !fenced
			continue
		}
		if w := columns(s); w > maxProse && !fenced && !exempt.MatchString(s) {
			wide = append(wide, fmt.Sprintf("%s:%d: %d columns of prose, at most %d are allowed", path, n, w, maxProse))
		}
	}
	return wide
}

// columns is the width of a line.
func columns(line string) (n int) {
	for _, r := range line {
		if r == '\t' {
			n += tab - n%tab
		} else {
			n++
		}
	}
	return n
}
