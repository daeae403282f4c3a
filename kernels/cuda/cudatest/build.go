// Package cudatest runs the kernels of package kernels/cuda on the host, for tests: the same
// source, compiled as C++.
package cudatest

import (
	"strings"
	"testing"

	"tutti/internal/compiled"
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

// compile runs the compiler in the directory of package kernels/cuda.
func compile(tb testing.TB, name, suffix string, args ...string) string {
	tb.Helper()
	s := compiled.Source{Variable: "CXX", Compiler: "c++", Dir: "kernels/cuda", Files: "src/*",
		Args: append(flags[:len(flags):len(flags)], args...), Name: name, Suffix: suffix}
	return s.Build(tb)
}
