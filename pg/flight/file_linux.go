package flight

import (
	"os"

	"golang.org/x/sys/unix"

	"tutti/internal/files"
)

// mapFile makes a file of size zero bytes, accessible to its owner only, and maps it shared. Its
// blocks are allocated before it returns, so that a full disk is an error here and not a SIGBUS
// later.
func mapFile(path string, size int) ([]byte, error) {
	f, err := files.Create(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if _, err = f.Write(make([]byte, size)); err == nil {
		var mem []byte
		if mem, err = unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
			return mem, nil
		}
		err = &os.PathError{Op: "mmap", Path: path, Err: err}
	}
	os.Remove(path)
	return nil, err
}

func unmap(mem []byte) { unix.Munmap(mem) }
