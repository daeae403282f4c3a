// Package lockdir manages temporary directories of processes. Each holds a file that its owner has
// locked while it runs, so that a later process can find and remove what a killed one left behind.
package lockdir

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

const lockName = "lock"

// Lock marks dir, a new directory of this process, as in use until the returned file is closed.
func Lock(dir string) (*os.File, error) {
	lock, err := os.OpenFile(filepath.Join(dir, lockName), os.O_CREATE|os.O_EXCL|os.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	if err = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == nil {
		_, err = fmt.Fprintf(lock, "pid %d\n", os.Getpid())
	}
	if err != nil {
		lock.Close()
		return nil, err
	}
	return lock, nil
}

// RemoveStale removes this user's directories below parent whose names ours accepts and whose lock
// is free. Directories without a lock file, or with an empty one, are left alone, because their
// owner may be about to lock them.
func RemoveStale(parent string, ours func(name string) bool) {
	entries, err := os.ReadDir(parent)
	if err != nil {
		return
	}
	for _, e := range entries {
		if !e.IsDir() || !ours(e.Name()) {
			continue
		}
		path := filepath.Join(parent, e.Name())
		var st unix.Stat_t
		if unix.Lstat(path, &st) != nil || int(st.Uid) != os.Getuid() {
			continue
		}
		lock, err := os.OpenFile(filepath.Join(path, lockName), os.O_RDWR|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			continue
		}
		if info, err := lock.Stat(); err == nil && info.Size() > 0 &&
			unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			os.RemoveAll(path)
		}
		lock.Close()
	}
}

// InUse reports whether dir is a directory of this user whose lock is held.
func InUse(dir string) bool {
	var st unix.Stat_t
	if unix.Lstat(dir, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR || int(st.Uid) != os.Getuid() {
		return false
	}
	lock, err := os.OpenFile(filepath.Join(dir, lockName), os.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer lock.Close()
	info, err := lock.Stat() // an empty file is about to be locked
	return err == nil && info.Size() > 0 && unix.Flock(int(lock.Fd()), unix.LOCK_SH|unix.LOCK_NB) == unix.EWOULDBLOCK
}
