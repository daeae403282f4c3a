// Package storytest checks scripts of tests, stories of which each line is a command.
package storytest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

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
