//go:build cgo && linux

package endpoint_test

import (
	"testing"

	"tutti/rdma/endpoint"
	"tutti/rdma/endpoint/endpointtest"
	"tutti/rdma/rdmatest"
	"tutti/rdma/verbs"
)

// leisurely leaves a slow virtual machine time for an answer.
func leisurely(cfg *endpoint.Config) {
	cfg.Route = endpoint.DefaultRoute()
	cfg.Route.Timeout = 16
}

func TestDeviceSimultaneousOpens(t *testing.T) {
	p, names := rdmatest.Devices(t, verbs.Load)
	t.Log(endpointtest.RunSimultaneous(t, p, names, 8, endpointtest.Faults{}, leisurely))
	t.Log(endpointtest.RunSimultaneous(t, p, names, 8, endpointtest.Faults{Lose: 0.1, Duplicate: 0.3}, leisurely))
}

func TestDeviceRestarts(t *testing.T) {
	p, names := rdmatest.Devices(t, verbs.Load)
	endpointtest.RunRestarts(t, p, names, 4, 8, endpointtest.Faults{Lose: 0.1, Duplicate: 0.3}, leisurely)
}
