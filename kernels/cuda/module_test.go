package cuda_test

import (
	"bytes"
	"compress/gzip"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"tutti/kernels/cuda"
)

// modules are the devices that get a module of their own, as major and minor.
var modules = map[string][2]int{"sm_70": {7, 0}, "sm_90": {9, 0}}

func module(t *testing.T, major, minor int) string {
	t.Helper()
	ptx, err := cuda.Module(major, minor)
	if err != nil {
		t.Fatal(err)
	}
	return string(ptx)
}

func TestModuleIsTheNewestThatTheDeviceRuns(t *testing.T) {
	for device, want := range map[[2]int]string{{7, 0}: "sm_70", {7, 5}: "sm_70", {8, 9}: "sm_70", {9, 0}: "sm_90",
		{10, 0}: "sm_90", {12, 1}: "sm_90"} {
		if ptx := module(t, device[0], device[1]); !strings.Contains(ptx, "\n.target "+want+"\n") {
			t.Errorf("the module for %v is not for %s", device, want)
		}
	}
	if _, err := cuda.Module(6, 1); err == nil || !strings.Contains(err.Error(), "6.1") {
		t.Errorf("a module for a device of 2016: %v", err)
	}
}

var entry = regexp.MustCompile(`(?s)\.entry (\w+)\(\s*\.param \.align 8 \.b8 \w+\[(\d+)\]\s*\)(.*?)\n}\n`)

// TestKernels reads the PTX: all kernels are there, load and store vectors, keep their numbers in
// registers and round after every operation.
func TestKernels(t *testing.T) {
	inexact := regexp.MustCompile(`\.ftz|\bfma\.|\bmad\.\w+\.f|approx|\b(add|sub|mul|div)\.f(32|64)|\b(div|sqrt)\.full`)
	for name, device := range modules {
		ptx := module(t, device[0], device[1])
		var functions []string
		for _, m := range entry.FindAllStringSubmatch(ptx, -1) {
			kernel, body := m[1], m[3]
			functions = append(functions, kernel)
			if strings.Contains(body, ".local") {
				t.Errorf("%s: %s uses local memory", name, kernel)
			}
			if bad := inexact.FindString(body); bad != "" {
				t.Errorf("%s: %s has %q, which rounds in another way", name, kernel, bad)
			}
			if strings.HasPrefix(kernel, "tutti_w") || kernel == "tutti_tell" { // the words
				continue
			}
			if kernel == "tutti_copy_placed" {
				if !strings.Contains(body, "call") {
					t.Errorf("%s: %s calls nothing that copies", name, kernel)
				}
				continue
			}
			if strings.HasSuffix(kernel, "_packets") {
				for _, whole := range []string{"ld.volatile.global.v4.u32", "st.volatile.global.v4.u32"} {
					if !strings.Contains(body, whole) {
						t.Errorf("%s: %s has no %s: packets would come in parts", name, kernel, whole)
					}
				}
				continue
			}
			loads := len(regexp.MustCompile(`ld\.global\.v(4\.[bfu]32|2\.[bfu]64)`).FindAllString(body, -1))
			stores := len(regexp.MustCompile(`st\.global\.v(4\.[bfu]32|2\.[bfu]64)`).FindAllString(body, -1))
			if loads < 4 || stores < 1 {
				t.Errorf("%s: %s has %d loads and %d stores of 16 bytes, want at least 4 and 1", name, kernel, loads,
					stores)
			}
		}
		slices.Sort(functions)
		if want := cuda.Functions(); !slices.Equal(functions, want) {
			t.Errorf("%s has the kernels %q, want %q", name, functions, want)
		}
		for _, exact := range []string{"ld.acquire.sys.", "st.release.sys.", "cvt.rn.f16.f32", "div.rn.f32",
			"div.rn.f64"} {
			if !strings.Contains(ptx, exact) {
				t.Errorf("%s has no %s", name, exact)
			}
		}
	}
}

func unpack(t *testing.T, file string) []byte {
	t.Helper()
	packed, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	r, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// TestModulesAreCurrent compiles the kernels and compares.
func TestModulesAreCurrent(t *testing.T) {
	if _, err := exec.LookPath("clang-19"); err != nil {
		t.Skipf("there is no compiler for CUDA (make deps-cuda): %v", err)
	}
	dir := t.TempDir()
	gen := exec.CommandContext(t.Context(), "go", "run", "./internal/gen", "-out", dir)
	if text, err := gen.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	for name := range modules {
		file := name + ".ptx.gz"
		if !bytes.Equal(unpack(t, filepath.Join(dir, file)), unpack(t, filepath.Join("ptx", file))) {
			t.Errorf("ptx/%s is not what internal/gen writes: run make generate", file)
		}
	}
}

// assembler returns NVIDIA's ptxas, which make deps-cuda puts into the user's cache.
func assembler(t *testing.T) string {
	t.Helper()
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Skipf("there is no directory where ptxas could be (make deps-cuda): %v", err)
	}
	pattern := filepath.Join(cache, "tutti", "ptxas", "lib", "python*", "site-packages", "nvidia", "*", "bin", "ptxas")
	found, err := filepath.Glob(pattern)
	if err != nil || len(found) == 0 {
		t.Skipf("there is no ptxas in %s (make deps-cuda)", pattern)
	}
	return found[0]
}

// TestModulesAssemble assembles the modules for devices of four generations. No kernel spills
// registers.
func TestModulesAssemble(t *testing.T) {
	ptxas := assembler(t)
	spill := regexp.MustCompile(`properties for (\w+)\n\s+(\d+) bytes stack frame, (\d+) bytes spill`)
	used := regexp.MustCompile(`Used (\d+) registers`)
	for name, devices := range map[string][]string{
		"sm_70": {"sm_75", "sm_80"},
		"sm_90": {"sm_90", "sm_100"},
	} {
		file := filepath.Join(t.TempDir(), "kernels.ptx")
		if err := os.WriteFile(file, []byte(module(t, modules[name][0], modules[name][1])), 0o600); err != nil {
			t.Fatal(err)
		}
		if testing.Short() {
			devices = devices[:1]
		}
		for _, device := range devices {
			args := []string{"-v", "-arch=" + device, file, "-o", filepath.Join(t.TempDir(), "kernels.cubin")}
			text, err := exec.CommandContext(t.Context(), ptxas, args...).CombinedOutput()
			if err != nil {
				t.Errorf("%s: %v\n%s", device, err, text)
				continue
			}
			kernels := make(map[string]bool)
			for _, m := range spill.FindAllStringSubmatch(string(text), -1) {
				if strings.HasPrefix(m[1], "tutti_") {
					kernels[m[1]] = true
				}
				if m[2] != "0" || m[3] != "0" {
					t.Errorf("%s: %s has %s bytes of stack and spills %s", device, m[1], m[2], m[3])
				}
			}
			if !slices.Equal(slices.Sorted(maps.Keys(kernels)), cuda.Functions()) {
				t.Errorf("%s: ptxas describes %d kernels, want all %d", device, len(kernels), len(cuda.Functions()))
			}
			most := 0
			for _, m := range used.FindAllStringSubmatch(string(text), -1) {
				n, _ := strconv.Atoi(m[1])
				most = max(most, n)
			}
			t.Logf("%s: %d kernels, at most %d registers", device, len(kernels), most)
		}
	}
}
