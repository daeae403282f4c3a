// Package lockdir keeps temporary directories that live as long as their process: each holds a file
// that is locked as long as its owner has it open, however the owner ends. So a later process can
// tell what a killed one left behind, and remove it.
package lockdir

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

const lockName = "lock"

// Lock marks dir, a fresh directory of this process, as in use until the returned file is closed.
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

// RemoveStale removes this user's directories below parent, of those whose names ours accepts,
// whose lock nobody holds. Between the making of a directory and that of its lock there is a
// moment: directories without a lock file, or with an empty one, are left alone.
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

// InUse reports whether dir is a directory of this user's whose lock is held.
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
	info, err := lock.Stat() // an empty one is about to be locked: it must not be touched
	return err == nil && info.Size() > 0 && unix.Flock(int(lock.Fd()), unix.LOCK_SH|unix.LOCK_NB) == unix.EWOULDBLOCK
}
