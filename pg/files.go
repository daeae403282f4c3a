package pg

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
)

// What a rank opens: a store connection, listeners, a few while it joins, and one for each peer that it links with; of large jobs, links with some only.
const (
	joinFiles = 12
	linkFiles = 32
)

// roomForFiles returns an error if this process may not open the files that a rank of size ranks needs: better than operations that fail later, at ranks that cannot say why.
func roomForFiles(size int) error {
	var r syscall.Rlimit
	open, err := os.ReadDir("/proc/self/fd")
	if err != nil || syscall.Getrlimit(syscall.RLIMIT_NOFILE, &r) != nil {
		return nil // not known here
	}
	need := joinFiles + min(size-1, linkFiles)
	if uint64(len(open)+need) <= uint64(r.Cur) {
		return nil
	}
	return fmt.Errorf("this process may have %d open files (RLIMIT_NOFILE) and has %d, a rank of %d ranks needs %d more: raise the limit (ulimit -n)", r.Cur, len(open), size, need)
}

// explainLimit adds to an error that the limit on open files has caused what to do about it.
func explainLimit(err error) error {
	var r syscall.Rlimit
	if !errors.Is(err, syscall.EMFILE) || strings.Contains(err.Error(), "RLIMIT_NOFILE") || syscall.Getrlimit(syscall.RLIMIT_NOFILE, &r) != nil {
		return err
	}
	return fmt.Errorf("%w: this process may have %d open files (RLIMIT_NOFILE) and has them: raise the limit (ulimit -n)", err, r.Cur)
}
