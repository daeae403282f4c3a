package launch

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"

	"golang.org/x/sys/unix"
)

// tempName is what launchers call their temporary directories, and lockName a file in each, which is locked as long as the launcher lives.
var tempName = regexp.MustCompile(`^tutti-[0-9a-f]{16}$`)

const lockName = "lock"

// makeTemp makes a launcher's temporary directory. The lock is to be kept open.
func makeTemp(dir string) (lock *os.File, err error) {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	lock, err = os.OpenFile(filepath.Join(dir, lockName), os.O_CREATE|os.O_EXCL|os.O_RDWR|unix.O_CLOEXEC, 0o600)
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

// removeStale removes this user's directories of launchers that were killed together with their guards, as batch systems do it. One whose lock is empty is being made.
func removeStale(parent string) {
	entries, err := os.ReadDir(parent)
	if err != nil {
		return
	}
	for _, e := range entries {
		if !e.IsDir() || !tempName.MatchString(e.Name()) {
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
		if info, err := lock.Stat(); err == nil && info.Size() > 0 && unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			os.RemoveAll(path)
		}
		lock.Close()
	}
}
