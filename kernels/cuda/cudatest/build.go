// Package cudatest runs the kernels of package kernels/cuda on the host, for tests: the same
// source, compiled as C++.
package cudatest

import (
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// flags are those of every host compilation. The arithmetic is that of the device.
var flags = strings.Fields("-std=c++17 -O1 -g -Wall -Wextra -Wno-unknown-pragmas -ffp-contract=off -pthread " +
	"-x c++ -include src/host.h")

// Build compiles the kernels to a shared object, unless that is there already, and returns its
// path. It exports the table tutti_host_kernels (src/host.h). It skips the test without a C++
// compiler.
func Build(tb testing.TB) (path string) {
	tb.Helper()
	return compile(tb, "kernels", ".so", "-fPIC", "-shared", "src/kernels.cu")
}

// BuildRaces compiles the program src/races.cc, which runs the kernels under ThreadSanitizer, and
// returns its path.
func BuildRaces(tb testing.TB) (path string) {
	tb.Helper()
	return compile(tb, "races", "", "-fsanitize=thread", "src/races.cc")
}

// compile runs the compiler in the directory of package kernels/cuda. The result is named after
// what it is made of, and kept in .build.
func compile(tb testing.TB, name, suffix string, args ...string) string {
	tb.Helper()
	cxx := os.Getenv("CXX")
	if cxx == "" {
		cxx = "c++"
	}
	cxx, err := exec.LookPath(cxx)
	if err != nil {
		tb.Skipf("there is no C++ compiler (make deps): %v", err)
	}
	root := repository(tb)
	dir := filepath.Join(root, "kernels", "cuda")
	args = append(append([]string{}, flags...), args...)
	sum := sha256.New()
	fmt.Fprintln(sum, cxx, args)
	sources, err := filepath.Glob(filepath.Join(dir, "src", "*"))
	if err != nil || len(sources) == 0 {
		tb.Fatalf("no sources of the kernels in %s: %v", dir, err)
	}
	for _, s := range sources {
		text, err := os.ReadFile(s)
		if err != nil {
			tb.Fatal(err)
		}
		fmt.Fprintf(sum, "%s %d\n%s", filepath.Base(s), len(text), text)
	}
	out := filepath.Join(root, ".build", "cuda")
	if err := os.MkdirAll(out, 0o755); err != nil {
		tb.Fatal(err)
	}
	result := filepath.Join(out, fmt.Sprintf("%s-%x%s", name, sum.Sum(nil)[:8], suffix))
	if _, err := os.Stat(result); err == nil {
		return result
	}
	temp, err := os.CreateTemp(out, "compiling-*")
	if err != nil {
		tb.Fatal(err)
	}
	temp.Close()
	defer os.Remove(temp.Name())
	cmd := exec.CommandContext(tb.Context(), cxx, append(args, "-o", temp.Name())...)
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
