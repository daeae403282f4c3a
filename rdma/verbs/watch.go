//go:build cgo && linux

package verbs

import (
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// watch waits for a descriptor of the library in the Go runtime's poller. It has a duplicate, so
// that the library closes its own.
type watch struct {
	file *os.File
	raw  syscall.RawConn
}

func newWatch(fd int, name string) (*watch, error) {
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate the descriptor of %s: %w", name, err)
	}
	if err = unix.SetNonblock(dup, true); err != nil { // for the library's descriptor too
		unix.Close(dup)
		return nil, fmt.Errorf("set up the descriptor of %s: %w", name, err)
	}
	w := &watch{file: os.NewFile(uintptr(dup), name)}
	if w.raw, err = w.file.SyscallConn(); err == nil {
		err = w.file.SetReadDeadline(time.Time{}) // fails unless the poller took the descriptor
	}
	if err != nil {
		w.file.Close()
		return nil, fmt.Errorf("poll %s: %w", name, err)
	}
	return w, nil
}

// next calls take, which must not block, until it returns another errno than EAGAIN. It returns
// false after close.
func (w *watch) next(take func() syscall.Errno) (errno syscall.Errno, ok bool) {
	err := w.raw.Read(func(uintptr) bool {
		for {
			if errno = take(); errno != syscall.EINTR {
				return errno != syscall.EAGAIN
			}
		}
	})
	return errno, err == nil
}

// close ends next, also one under way.
func (w *watch) close() { w.file.Close() }
