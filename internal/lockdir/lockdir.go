// Package lockdir manages temporary directories of processes. Each holds a file that its owner has
// locked while it runs, so that a later process can find and remove what a killed one left behind.
package lockdir

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"tutti/internal/ident"
)

const lockName = "lock"

// lockForm is the form of a lock file: process, host name and boot id.
const lockForm = "pid %d\nhost %s\nboot %s\n"

// here returns host name and boot id, "" if they are unknown.
func here() (host, boot string) {
	host, _ = os.Hostname()
	place, _ := ident.Here()
	return host, place.Boot
}

// elsewhere reports whether a lock file was written on another machine. The name of a machine
// outlasts its boot id, and containers of one machine share its boot id. A file that does not tell
// counts as one of this machine.
func elsewhere(lock *os.File) bool {
	var pid int
	var host, boot string
	if _, err := fmt.Fscanf(lock, lockForm, &pid, &host, &boot); err != nil {
		return false
	}
	ownHost, ownBoot := here()
	return host != ownHost && boot != ownBoot
}

// A Held is a directory that is in use until Close.
type Held struct {
	Dir  *os.File // the directory
	lock *os.File
}

// Lock marks dir, a new directory of this process, as in use, and keeps systemd-tmpfiles from
// removing what gets old in it: it leaves alone a directory that it cannot lock itself.
func Lock(dir string) (*Held, error) {
	d, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	unix.Flock(int(d.Fd()), unix.LOCK_SH) // not every file system locks directories
	lock, err := os.OpenFile(filepath.Join(dir, lockName), os.O_CREATE|os.O_EXCL|os.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		d.Close()
		return nil, err
	}
	if err = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == nil {
		host, boot := here()
		_, err = fmt.Fprintf(lock, lockForm, os.Getpid(), host, boot)
	}
	h := &Held{d, lock}
	if err != nil {
		h.Close()
		return nil, err
	}
	return h, nil
}

// Close ends the use of the directory. It leaves the directory in place.
func (h *Held) Close() error { return errors.Join(h.lock.Close(), h.Dir.Close()) }

// RemoveStale removes this user's directories below parent whose names ours accepts and whose lock
// is free. Directories without a lock file, or with an empty one, are left alone, because their
// owner may be about to lock them. So are those of other machines, which may share parent by a file
// system whose locks do not reach here.
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
		if info, err := lock.Stat(); err == nil && info.Size() > 0 && !elsewhere(lock) &&
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
