package soft

import (
	"testing"

	"tutti/rdma/rdmatest"
)

func TestSuite(t *testing.T) {
	rdmatest.Suite(t, func(t *testing.T) rdmatest.Subject {
		f := New(Config{Seed: 1})
		t.Cleanup(f.Close)
		return rdmatest.Subject{Provider: f, Device: "soft0", SetPort: func(_ *testing.T, up bool) {
			f.SetPort("soft0",
				1, up)
		}}
	})
}
