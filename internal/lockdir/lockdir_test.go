package lockdir

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"tutti/internal/ident"
)

// What killed processes of this host left behind goes. The rest stays, and so does what another
// host has: its locks may not be seen here.
func TestRemoveStale(t *testing.T) {
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	here, err := ident.Here()
	if err != nil {
		t.Fatal(err)
	}
	const elsewhere, before = "host-of-another-machine", "11111111-2222-3333-4444-555555555555"
	parent := t.TempDir()
	stays := map[string]bool{}
	add := func(name string, stay bool, lock func(path string) error) {
		stays[name] = stay
		path := filepath.Join(parent, name)
		if err := os.Mkdir(path, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := lock(path); err != nil {
			t.Fatal(err)
		}
	}
	written := func(text string) func(string) error {
		return func(path string) error { return os.WriteFile(filepath.Join(path, lockName), []byte(text), 0o600) }
	}
	of := func(host, boot string) func(string) error {
		return written(fmt.Sprintf("pid 1\nhost %s\nboot %s\n", host, boot))
	}
	var held *Held
	add("held", true, func(path string) (err error) {
		held, err = Lock(path)
		return err
	})
	defer func() { held.Close() }()
	add("left", false, func(path string) error {
		lock, err := Lock(path)
		if err == nil {
			err = lock.Close()
		}
		return err
	})
	add("other", true, of(elsewhere, before))
	add("other-container", false, of(elsewhere, here.Boot))
	add("before-reboot", false, of(host, before))
	add("no-host", false, written("pid 1\n"))
	add("empty", true, written(""))
	add("no-lock", true, func(string) error { return nil })
	add("not-ours", true, written("pid 1\n"))
	RemoveStale(parent, func(name string) bool { return name != "not-ours" })
	for name, stay := range stays {
		if _, err := os.Stat(filepath.Join(parent, name)); (err == nil) != stay {
			t.Errorf("%s: %v, want that it stays: %v", name, err, stay)
		}
	}
}

// systemd-tmpfiles locks each directory like this before it removes what is old there, and leaves
// it if that fails.
func TestCleanersLeaveALockedDirectory(t *testing.T) {
	dir := t.TempDir()
	held, err := Lock(dir)
	if err != nil {
		t.Fatal(err)
	}
	cleaner, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer cleaner.Close()
	if err := unix.Flock(int(cleaner.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != unix.EWOULDBLOCK {
		t.Errorf("a cleaner locks a directory in use: %v", err)
	}
	if err := held.Close(); err != nil {
		t.Fatal(err)
	}
	if err := unix.Flock(int(cleaner.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		t.Errorf("a cleaner cannot lock a directory that is not in use: %v", err)
	}
}
