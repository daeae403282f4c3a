// Command gen compiles the kernels to PTX: gen [-out DIRECTORY], in the directory of package
// kernels/cuda. It needs clang of the version that Debian calls clang-19, and nothing of CUDA. The
// same clang writes the same files on every machine.
package main

import (
	"bytes"
	"compress/gzip"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// compiler and flags are part of what the PTX is: another version writes other code.
const compiler = "clang-19"

var flags = strings.Fields("-x cuda --cuda-device-only -nocudainc -nocudalib -std=c++17 -O3 -ffp-contract=off " +
	"-Wall -Wextra -Werror -S -o - src/kernels.cu")

// targets are the oldest devices that a module runs on, each with its own file, and the versions of
// PTX, which an old driver may not know.
var targets = []struct{ device, version string }{{"sm_70", "ptx63"}, {"sm_90", "ptx78"}}

func main() {
	out := flag.String("out", "ptx", "the directory of the files")
	flag.Parse()
	for _, target := range targets {
		if err := generate(target.device, target.version, filepath.Join(*out, target.device+".ptx.gz")); err != nil {
			fmt.Fprintln(os.Stderr, "gen:", err)
			os.Exit(1)
		}
	}
}

func generate(device, version, file string) error {
	cmd := exec.Command(compiler, append([]string{"--cuda-gpu-arch=" + device,
		"-Xclang", "-target-feature", "-Xclang", "+" + version}, flags...)...)
	var ptx, problems bytes.Buffer
	cmd.Stdout, cmd.Stderr = &ptx, &problems
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s for %s (make deps-cuda installs it): %w\n%s", compiler, device, err, problems.Bytes())
	}
	var packed bytes.Buffer
	w, err := gzip.NewWriterLevel(&packed, gzip.BestCompression)
	if err != nil {
		return err
	}
	if _, err := w.Write(ptx.Bytes()); err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	return os.WriteFile(file, packed.Bytes(), 0o644)
}
