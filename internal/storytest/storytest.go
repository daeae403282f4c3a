// Package storytest checks scripts of tests, stories of which each line is a command.
package storytest

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
)

// Command writes a line of d's input to out and runs the verb that is its first word with the other
// words. It fails t if there is no such verb, or it returns an error. An empty line is no command.
func Command[S any](t *testing.T, d *datadriven.TestData, line string, out io.Writer, s S,
	verbs map[string]func(s S, args []string) error) {
	t.Helper()
	f := strings.Fields(line)
	if len(f) == 0 {
		return
	}
	fmt.Fprintf(out, "> %s\n", strings.Join(f, " "))
	verb := verbs[f[0]]
	if verb == nil {
		d.Fatalf(t, "%s: unknown command", line)
	}
	if err := verb(s, f[1:]); err != nil {
		d.Fatalf(t, "%s: %v", line, err)
	}
}

// EveryVerbIsUsed fails t for each key of verbs that is the first word of no line in the files that
// match pattern.
func EveryVerbIsUsed[V any](t *testing.T, pattern string, verbs map[string]V) {
	t.Helper()
	stories, err := filepath.Glob(pattern)
	if err != nil {
		t.Fatal(err)
	}
	used := map[string]bool{}
	for _, path := range stories {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			verb, _, _ := strings.Cut(strings.TrimSpace(line), " ")
			used[verb] = true
		}
	}
	for verb := range verbs {
		if !used[verb] {
			t.Errorf("no story has the command %q", verb)
		}
	}
}
