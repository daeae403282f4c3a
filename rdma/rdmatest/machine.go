package rdmatest

import (
	"os"
	"testing"

	"tutti/rdma"
)

// Devices loads the provider of the system's devices, and returns it with their names, of which
// there is at least one. Without a device the test is skipped; but not in the virtual machine of
// make test-rdma, which sets SOFTROCE.
func Devices[P rdma.Provider](t testing.TB, load func() (P, error)) (P, []string) {
	t.Helper()
	if os.Getenv("SOFTROCE") == "" {
		t.Skip("a test of make test-rdma, in a virtual machine with an RDMA device")
	}
	p, err := load()
	if err != nil {
		t.Fatal(err)
	}
	names, err := p.Devices()
	if err != nil || len(names) == 0 {
		t.Fatalf("devices %q, %v", names, err)
	}
	return p, names
}
