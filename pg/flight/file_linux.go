package flight

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"tutti/internal/files"
)

// ErrCopies says that a recorder cannot be in a file of a directory.
var ErrCopies = errors.New("its file system (Btrfs, bcachefs or NILFS) takes new blocks for what is written again, " +
	"and kills the process that writes to a mapped file when there are none")

// copies reports whether the file systems of a type, as of statfs, are those of ErrCopies.
func copies(magic uint32) bool {
	return magic == unix.BTRFS_SUPER_MAGIC || magic == unix.BCACHEFS_SUPER_MAGIC || magic == unix.NILFS_SUPER_MAGIC
}

// mapFile makes a file of size zero bytes, accessible to its owner only, and maps it shared. Its
// blocks are allocated before it returns, so that a full disk is an error here and not a SIGBUS
// later. Where that does not help it returns ErrCopies.
func mapFile(path string, size int) ([]byte, error) {
	f, err := files.Create(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var fs unix.Statfs_t
	if unix.Fstatfs(int(f.Fd()), &fs) == nil && copies(uint32(fs.Type)) {
		err = &os.PathError{Op: "mmap", Path: path, Err: ErrCopies}
	} else if _, err = f.Write(make([]byte, size)); err == nil {
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
