// Package leaktest finds goroutines that the tests of a package leave behind.
package leaktest

import (
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// patience bounds how long goroutines may take to end. It is long enough for a loaded machine, on
// which goleak alone gives up too early; only a failure uses it up.
const patience = 30 * time.Second

// Main runs the tests of a package and ends the process. They have failed if goroutines are left
// that do not end. TestMain calls it last.
func Main(m *testing.M) {
	code := m.Run()
	if code == 0 {
		if err := find(); err != nil {
			fmt.Fprintf(os.Stderr, "the tests have passed and leave goroutines: %v\n", err)
			code = 1
		}
	}
	os.Exit(code)
}

// Verify fails t if goroutines are left that do not end. A test that must leave none defers it.
func Verify(t testing.TB) {
	t.Helper()
	if err := find(); err != nil {
		t.Error(err)
	}
}

// find waits until no goroutines are left. The error names those that do not end.
func find() error {
	for late := time.Now().Add(patience); ; {
		err := goleak.Find() // it waits for a while
		if err == nil || time.Now().After(late) {
			return err
		}
	}
}
