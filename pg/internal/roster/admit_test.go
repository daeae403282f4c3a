package roster

import (
	"context"
	"errors"
	"testing"

	"tutti/pg/membership"
)

// A call of Admit that is given up has no result, and the machine, which answers it later, does not
// write to what was returned.
func TestAdmitThatIsGivenUp(t *testing.T) {
	f := newFixture(t, 3)
	f.Start()
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for range 20 {
		var v membership.View
		var err error
		f.until("the machine answers", func() bool { // it has StoreWait for each answer
			v, err = f.Admit(t.Context())
			return !errors.Is(err, context.DeadlineExceeded)
		})
		if err != nil || !v.Has(0, self) {
			t.Fatal(v, err)
		}
		for range 200 {
			switch v, err := f.Admit(ended); {
			case err == nil:
			case !errors.Is(err, context.Canceled) || v.Epoch != 0:
				t.Fatal(v, err)
			}
		}
	}
}
