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
	for late := time.Now().Add(patience); code == 0; {
		err := goleak.Find() // it waits for a while
		if err == nil {
			break
		}
		if time.Now().After(late) {
			fmt.Fprintf(os.Stderr, "the tests have passed and leave goroutines: %v\n", err)
			code = 1
		}
	}
	os.Exit(code)
}
