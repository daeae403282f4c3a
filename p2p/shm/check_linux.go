package shm

import (
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

// checked is the result of Check, once it is known.
var checked struct {
	sync.Mutex
	known bool
	err   error
}

// Check returns why processes of this machine cannot share memory with this one, as far as that is
// known without a peer, or nil. It asks the system once, but again after a shortage, which is no
// reason: it may pass.
func Check() error {
	checked.Lock()
	defer checked.Unlock()
	if !checked.known {
		err := check()
		for _, shortage := range []error{unix.ENOMEM, unix.EAGAIN, unix.EMFILE, unix.ENFILE} {
			if errors.Is(err, shortage) {
				return nil
			}
		}
		checked.err, checked.known = err, true
	}
	return checked.err
}

// check makes a page of shared memory, with all that a link or a region needs of the system.
func check() error {
	if _, err := Identify(); err != nil {
		return err
	}
	fd, store, b, err := newWritable(pages(1))
	if err != nil {
		return fmt.Errorf("shm: %w", err)
	}
	unmap(b)
	unix.Close(fd)
	unix.Close(store)
	return nil
}
