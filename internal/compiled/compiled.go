// Package compiled compiles C and C++ for tests. Results are kept in the repository's .build, so
// that the many processes of a test, each with a library of its own, compile nothing twice.
package compiled

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// A Source is what is compiled to one file.
type Source struct {
	Variable, Compiler string   // the environment variable that names the compiler, and its default
	Dir                string   // in which the compiler runs, below the repository's root
	Files              string   // a pattern of all files that the result is made of, below Dir
	Args               []string // of the compiler
	Name, Suffix       string   // of the result
}

// Build compiles s, unless the result is there already, and returns its path. The result is named
// after what it is made of. The test is skipped without a compiler.
func (s *Source) Build(tb testing.TB) (path string) {
	tb.Helper()
	compiler, err := exec.LookPath(cmp.Or(os.Getenv(s.Variable), s.Compiler))
	if err != nil {
		tb.Skipf("there is no compiler (make deps): %v", err)
	}
	root := repository(tb)
	dir := filepath.Join(root, s.Dir)
	sum := sha256.New()
	fmt.Fprintln(sum, compiler, s.Args)
	files, err := filepath.Glob(filepath.Join(dir, s.Files))
	if err != nil || len(files) == 0 {
		tb.Fatalf("no sources %s in %s: %v", s.Files, dir, err)
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			tb.Fatal(err)
		}
		fmt.Fprintf(sum, "%s %d\n%s", filepath.Base(f), len(text), text)
	}
	out := filepath.Join(root, ".build", "compiled")
	if err := os.MkdirAll(out, 0o755); err != nil {
		tb.Fatal(err)
	}
	result := filepath.Join(out, fmt.Sprintf("%s-%x%s", s.Name, sum.Sum(nil)[:8], s.Suffix))
	if _, err := os.Stat(result); err == nil {
		return result
	}
	temp, err := os.CreateTemp(out, "compiling-*")
	if err != nil {
		tb.Fatal(err)
	}
	temp.Close()
	defer os.Remove(temp.Name())
	cmd := exec.CommandContext(tb.Context(), compiler, append(s.Args[:len(s.Args):len(s.Args)], "-o", temp.Name())...)
	cmd.Dir = dir
	if text, err := cmd.CombinedOutput(); err != nil {
		tb.Fatalf("%v: %v\n%s", cmd, err, text)
	}
	if err := os.Rename(temp.Name(), result); err != nil { // other tests may be doing the same
		tb.Fatal(err)
	}
	return result
}

// repository returns the directory above the test's that has go.mod.
func repository(tb testing.TB) string {
	dir, err := os.Getwd()
	if err != nil {
		tb.Fatal(err)
	}
	for ; dir != filepath.Dir(dir); dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
	}
	tb.Fatal("no go.mod above the working directory of the test")
	return ""
}
