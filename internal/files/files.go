// Package files reports and raises the limits on open files.
package files

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
)

// Explain adds to an error that a limit on open files has caused which limit it was and how to
// raise it. It returns other errors, and explained ones, unchanged.
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

// Limit returns how many files this process may have open; known is false if the system does not
// tell.
func Limit() (limit uint64, known bool) {
	soft, _, err := limits()
	return soft, err == nil
}

// Ceiling returns up to how many files Limit can be raised without privilege.
func Ceiling() (uint64, error) {
	_, hard, err := limits()
	return hard, err
}

// Raise raises Limit to n, or to Ceiling if that is lower. It never lowers Limit, and leaves it if
// the system refuses.
func Raise(n uint64) {
	if soft, hard, err := limits(); err == nil && soft < min(n, hard) {
		syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: min(n, hard), Max: hard})
	}
}

func limits() (soft, hard uint64, err error) {
	var r syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &r); err != nil {
		return 0, 0, os.NewSyscallError("getrlimit", err)
	}
	return uint64(r.Cur), uint64(r.Max), nil
}

// Full reports whether this process has as many open files as it may, or one less.
func Full() bool {
	limit, _ := Limit()
	n, known := Open() // which opens one, and so fails if there are as many
	return !known || uint64(n) >= limit
}

// Open returns how many files this process has open; known is false if the system does not tell.
func Open() (n int, known bool) {
	entries, err := os.ReadDir("/proc/self/fd")
	return len(entries), err == nil
}
