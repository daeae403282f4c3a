//go:build amd64 && !race

package shm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"tutti/internal/proctest"
	"tutti/p2p/linktest"
)

// listenOnly makes this binary a process that listens once and has no link.
const listenOnly = "SHM_TEST_LISTEN_ONLY"

func init() {
	if os.Getenv(listenOnly) == "" {
		return
	}
	if err := listens(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Registering for barriers takes the kernel some 10 ms, so it must be done before the ranks of a
// view have met.
func TestListenRegistersForBarriers(t *testing.T) {
	if _, err := registrations(); err != nil {
		t.Skipf("the kernel does not tell for which barriers a process has registered: %v", err)
	}
	if out, err := proctest.Again([]string{listenOnly + "=1"}).CombinedOutput(); err != nil {
		t.Fatalf("a fresh process that listens: %v\n%s", err, out)
	}
}

// listens tells whether Listen registers.
func listens() error {
	tr := New(Config{})
	if _, err := tr.Listen(context.Background(), linktest.NewHost(1)); err != nil {
		return err
	}
	if err := tr.Close(); err != nil { // which waits for what Listen began
		return err
	}
	got, err := registrations()
	if err == nil && got == 0 {
		err = errors.New("Listen has not registered for any barrier")
	}
	return err
}

// registrations tells for which barriers this process has registered.
func registrations() (uintptr, error) {
	const cmdGetRegistrations = 1 << 9
	got, _, e := unix.Syscall(unix.SYS_MEMBARRIER, cmdGetRegistrations, 0, 0)
	if e != 0 {
		return 0, e
	}
	return got, nil
}
