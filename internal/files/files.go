// Package files knows the limits on open files, and tells a person about them.
package files

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
)

// Explain adds to an error that a limit on open files has caused which limit that was and how to
// raise it. Other errors, and those that it has explained before, it returns as they are.
func Explain(err error) error {
	switch {
	case errors.Is(err, syscall.EMFILE) && !strings.Contains(err.Error(), "RLIMIT_NOFILE"):
		limit, _ := Limit()
		return fmt.Errorf("%w: this process may have %d open files (RLIMIT_NOFILE) and has them: raise the limit "+
			"(ulimit -n)", err, limit)
	case errors.Is(err, syscall.ENFILE) && !strings.Contains(err.Error(), "fs.file-max"):
		return fmt.Errorf("%w: this machine has as many open files as it may (fs.file-max): raise the limit", err)
	}
	return err
}

// Limit returns how many files this process may have open; false: not known here.
func Limit() (limit uint64, known bool) {
	var r syscall.Rlimit
	err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &r)
	return uint64(r.Cur), err == nil
}

// Open returns how many files this process has open; false: not known here.
func Open() (n int, known bool) {
	entries, err := os.ReadDir("/proc/self/fd")
	return len(entries), err == nil
}
