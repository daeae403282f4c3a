package mem

import "golang.org/x/sys/unix"

// sure is the size in bytes up to which Fits does not ask the system.
const sure = 1 << 20

// Fits returns an error that wraps unix.ENOMEM if the system does not give n bytes. The Go heap
// would end the process then, and the system would when shared memory is written. It is for sizes
// that a caller chooses.
func Fits(n int) error {
	if n <= sure {
		return nil
	}
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return err
	}
	return unix.Munmap(b)
}
