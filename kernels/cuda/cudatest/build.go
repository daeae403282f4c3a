// Package cudatest runs the kernels of package kernels/cuda on the host, for tests: the same
// source, compiled as C++.
package cudatest

import (
	"context"
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
	return source("kernels", ".so", "-fPIC", "-shared", "src/kernels.cu").Build(tb)
}

// Make is Build for what is no test: without a C++ compiler the error wraps compiled.ErrNoCompiler.
func Make(ctx context.Context) (path string, err error) {
	return source("kernels", ".so", "-fPIC", "-shared", "src/kernels.cu").Make(ctx)
}

// BuildRaces compiles the program src/races.cc, which runs the kernels under ThreadSanitizer, and
// returns its path.
func BuildRaces(tb testing.TB) (path string) {
	tb.Helper()
	return source("races", "", "-fsanitize=thread", "src/races.cc").Build(tb)
}

// source is what the compiler makes in the directory of package kernels/cuda.
func source(name, suffix string, args ...string) *compiled.Source {
	return &compiled.Source{Variable: "CXX", Compiler: "c++", Dir: "kernels/cuda", Files: "src/*",
		Args: append(flags[:len(flags):len(flags)], args...), Name: name, Suffix: suffix}
}
