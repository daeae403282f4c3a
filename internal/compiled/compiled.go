// Package compiled compiles C and C++ for tests. Results are kept in the repository's .build, so
// that the many processes of a test, each with a library of its own, compile nothing twice.
package compiled

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
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

// Build is Make for a test, which is skipped without a compiler.
func (s *Source) Build(tb testing.TB) (path string) {
	tb.Helper()
	path, err := s.Make(tb.Context())
	switch {
	case errors.Is(err, ErrNoCompiler):
		tb.Skip(err)
	case err != nil:
		tb.Fatal(err)
	}
	return path
}

// ErrNoCompiler says that there is no compiler. It is wrapped.
var ErrNoCompiler = errors.New("there is no compiler (make deps)")

// Make compiles s, unless the result is there already, and returns its path. The result is named
// after what it is made of.
func (s *Source) Make(ctx context.Context) (path string, err error) {
	compiler, err := exec.LookPath(cmp.Or(os.Getenv(s.Variable), s.Compiler))
	if err != nil {
		return "", fmt.Errorf("%w: %w", ErrNoCompiler, err)
	}
	root, err := repository()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(root, s.Dir)
	sum := sha256.New()
	fmt.Fprintln(sum, compiler, s.Args)
	files, err := filepath.Glob(filepath.Join(dir, s.Files))
	if err != nil || len(files) == 0 {
		return "", fmt.Errorf("no sources %s in %s: %w", s.Files, dir, cmp.Or(err, os.ErrNotExist))
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(sum, "%s %d\n%s", filepath.Base(f), len(text), text)
	}
	out := filepath.Join(root, ".build", "compiled")
	if err := os.MkdirAll(out, 0o755); err != nil {
		return "", err
	}
	result := filepath.Join(out, fmt.Sprintf("%s-%x%s", s.Name, sum.Sum(nil)[:8], s.Suffix))
	if _, err := os.Stat(result); err == nil {
		return result, nil
	}
	temp, err := os.CreateTemp(out, "compiling-*")
	if err != nil {
		return "", err
	}
	temp.Close()
	defer os.Remove(temp.Name())
	cmd := exec.CommandContext(ctx, compiler, append(s.Args[:len(s.Args):len(s.Args)], "-o", temp.Name())...)
	cmd.Dir = dir
	if text, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%v: %w\n%s", cmd, err, text)
	}
	return result, os.Rename(temp.Name(), result) // other tests may be doing the same
}

// repository returns the directory above the working directory that has go.mod.
func repository() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for ; dir != filepath.Dir(dir); dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
	}
	return "", errors.New("no go.mod above the working directory")
}
