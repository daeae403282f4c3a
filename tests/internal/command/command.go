// Package command runs commands for measurements.
package command

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// Output runs a command in dir, with variables beside those of this process, and returns its
// standard output. The end of ctx sends it SIGTERM, at which tutti ends its ranks. An error has the
// last of what the command has written to standard error.
func Output(ctx context.Context, dir string, env []string, argv ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), env...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		said := strings.Join(strings.Fields(stderr.String()), " ")
		return nil, fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, said[max(0, len(said)-400):])
	}
	return stdout.Bytes(), nil
}
