package files

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"

	"tutti/internal/ident"
)

// Directory makes dir if it does not exist, and checks that it is safe to keep files in it: if
// others may write to it, it must be one like /tmp, where they cannot replace files of others, and
// belong to this user or root, or to one that this process's user namespace does not have, as the
// root of a container's host. It must not be a symbolic link of another user. Directory does not
// look at the directories above it: who may write to these may exchange it.
func Directory(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	link, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	if link.Mode()&fs.ModeSymlink != 0 && !trusted(link) {
		return fmt.Errorf("%s is a link that another user has made: give a directory of your own", dir)
	}
	info, err := os.Stat(dir)
	switch {
	case err != nil:
		return err
	case !info.IsDir():
		return &os.PathError{Op: "open", Path: dir, Err: syscall.ENOTDIR}
	case info.Mode().Perm()&0o002 != 0 && info.Mode()&fs.ModeSticky == 0:
		return fmt.Errorf("every user may replace files in %s (mode %v): give a directory of your own, take that "+
			"right away (chmod o-w) or set the sticky bit (chmod +t)",
			dir, info.Mode())
	case info.Mode().Perm()&0o002 != 0 && !trusted(info) && !foreign(info):
		return fmt.Errorf("%s belongs to another user, who may replace files in it: give a directory of your own", dir)
	}
	return nil
}

// trusted reports whether a file belongs to this user or to root.
func trusted(info fs.FileInfo) bool {
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && (int(st.Uid) == os.Geteuid() || st.Uid == 0)
}

// foreign reports whether the owner of a file may be one whom this process's user namespace does
// not have.
func foreign(info fs.FileInfo) bool {
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && ident.StandsForOthers(st.Uid)
}

// Own reports whether info, of os.Lstat, is that of a regular file of this user.
func Own(info fs.FileInfo) bool {
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && info.Mode().IsRegular() && int(st.Uid) == os.Geteuid()
}

// Create makes a file that only its owner can read. An existing file or symbolic link of that name
// is an error.
func Create(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR|syscall.O_NOFOLLOW, 0o600)
}

// Replace makes a new file in the place of any old one. A symbolic link is followed if it belongs
// to this user or root, else replaced. Each write appends, also after others have truncated the
// file.
func Replace(path string, mode fs.FileMode) (*os.File, error) {
	if info, err := os.Lstat(path); err == nil && info.Mode()&fs.ModeSymlink != 0 && trusted(info) {
		return os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY|os.O_APPEND, mode)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	return os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY|os.O_APPEND|syscall.O_NOFOLLOW, mode)
}

// Read opens a regular file for reading. It neither follows symbolic links nor blocks on pipes.
func Read(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = &os.PathError{Op: "open", Path: path, Err: errors.New("not a regular file")}
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}
