//go:build cgo && linux

package endpoint_test

import (
	"os"
	"testing"

	"tutti/rdma/endpoint"
	"tutti/rdma/endpoint/endpointtest"
	"tutti/rdma/verbs"
)

// devices returns the provider and the devices of the virtual machine of make test-rdma, without
// which the test is skipped.
func devices(t *testing.T) (*verbs.Provider, []string) {
	t.Helper()
	if os.Getenv("SOFTROCE") == "" {
		t.Skip("a test of make test-rdma, in a virtual machine with an RDMA device")
	}
	p, err := verbs.Load()
	if err != nil {
		t.Fatal(err)
	}
	names, err := p.Devices()
	if err != nil || len(names) == 0 {
		t.Fatalf("devices %q, %v", names, err)
	}
	return p, names
}

// leisurely leaves a slow virtual machine time for an answer.
func leisurely(cfg *endpoint.Config) {
	cfg.Route = endpoint.DefaultRoute()
	cfg.Route.Timeout = 16
}

func TestDeviceSimultaneousOpens(t *testing.T) {
	p, names := devices(t)
	t.Log(endpointtest.RunSimultaneous(t, p, names, 8, endpointtest.Faults{}, leisurely))
	t.Log(endpointtest.RunSimultaneous(t, p, names, 8, endpointtest.Faults{Lose: 0.1, Duplicate: 0.3}, leisurely))
}

func TestDeviceRestarts(t *testing.T) {
	p, names := devices(t)
	endpointtest.RunRestarts(t, p, names, 4, 8, endpointtest.Faults{Lose: 0.1, Duplicate: 0.3}, leisurely)
}
