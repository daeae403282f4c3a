package files

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func TestLinksAreNotFollowed(t *testing.T) {
	dir := t.TempDir()
	victim, link := filepath.Join(dir, "victim"), filepath.Join(dir, "link")
	if err := os.WriteFile(victim, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, to := range []string{victim, filepath.Join(dir, "new")} {
		if err := os.Symlink(to, link); err != nil {
			t.Fatal(err)
		}
		if f, err := Create(link); !errors.Is(err, fs.ErrExist) {
			f.Close()
			t.Errorf("Create of a link to %s: %v", to, err)
		}
		if f, err := Read(link); err == nil {
			f.Close()
			t.Errorf("Read of a link to %s works", to)
		}
		if os.Geteuid() == 0 && os.Lchown(link, 12345, 12345) == nil { // root can have links of others
			f, err := Replace(link, 0o644)
			if err != nil {
				t.Fatal(err)
			}
			f.WriteString("log")
			f.Close()
			if info, err := os.Lstat(link); err != nil || !info.Mode().IsRegular() {
				t.Errorf("Replace left %v, %v", info, err)
			}
		}
		if err := os.Remove(link); err != nil {
			t.Fatal(err)
		}
	}
	if b, err := os.ReadFile(victim); err != nil || string(b) != "precious" {
		t.Errorf("a file that a link led to has %q, %v", b, err)
	}
	if _, err := os.Lstat(filepath.Join(dir, "new")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a file was made through a link: %v", err)
	}
	// A log's link of this user's own is meant.
	if err := os.Symlink(filepath.Join(dir, "new"), link); err != nil {
		t.Fatal(err)
	}
	f, err := Replace(link, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	if _, err := os.Lstat(filepath.Join(dir, "new")); err != nil {
		t.Error(err)
	}
}

// A log may be rotated by copying and truncating it.
func TestReplacedFileMayBeTruncated(t *testing.T) {
	dir := t.TempDir()
	path, link := filepath.Join(dir, "log"), filepath.Join(dir, "link")
	if err := os.Symlink(filepath.Join(dir, "elsewhere"), link); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{path, link} {
		f, err := Replace(name, 0o644)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		_, err1 := f.WriteString("first line\n")
		err2 := os.Truncate(name, 0)
		_, err3 := f.WriteString("second\n")
		b, err4 := os.ReadFile(name)
		if err := errors.Join(err1, err2, err3, err4); err != nil || string(b) != "second\n" {
			t.Errorf("%s has %q, %v", filepath.Base(name), b, err)
		}
	}
}

func TestCreateIsReadableByOwnerOnly(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0))
	path := filepath.Join(t.TempDir(), "f")
	f, err := Create(path)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	info, err := os.Lstat(path)
	if err != nil || info.Mode().Perm() != 0o600 || !Own(info) {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	if f, err := Create(path); !errors.Is(err, fs.ErrExist) {
		f.Close()
		t.Errorf("Create of what is there: %v", err)
	}
}

func TestReadOfPipeDoesNotBlock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	if f, err := Read(path); err == nil || !strings.Contains(err.Error(), "regular") {
		f.Close()
		t.Errorf("a pipe: %v", err)
	}
	if info, err := os.Lstat(path); err != nil || Own(info) {
		t.Errorf("a pipe counts as a file: %v", err)
	}
}

func TestDirectory(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0))
	dir := t.TempDir()
	if err := Directory(filepath.Join(dir, "a", "b")); err != nil {
		t.Error(err)
	}
	for mode, fine := range map[fs.FileMode]bool{0o700: true, 0o775: true, 0o777 | fs.ModeSticky: true, 0o777: false,
		0o702: false} {
		own := filepath.Join(dir, mode.String())
		if err := os.Mkdir(own, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(own, mode); err != nil {
			t.Fatal(err)
		}
		if err := Directory(own); (err == nil) != fine {
			t.Errorf("mode %v: %v", mode, err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Directory(filepath.Join(dir, "file")); err == nil {
		t.Error("a file is taken for a directory")
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink(filepath.Join(dir, "a"), link); err != nil {
		t.Fatal(err)
	}
	if err := Directory(link); err != nil {
		t.Errorf("a link of this user's: %v", err)
	}
	if os.Geteuid() != 0 {
		return
	}
	if err := os.Lchown(link, 12345, 12345); err != nil { // root can have links of others
		t.Fatal(err)
	}
	if err := Directory(link); err == nil || !strings.Contains(err.Error(), "another user") {
		t.Errorf("a link of another user's: %v", err)
	}
	sticky := filepath.Join(dir, (0o777 | fs.ModeSticky).String())
	if err := os.Chown(sticky, 12345, 12345); err != nil { // and directories
		t.Fatal(err)
	}
	if err := Directory(sticky); err == nil || !strings.Contains(err.Error(), "another user") {
		t.Errorf("a directory of another user's, like /tmp: %v", err)
	}
}
