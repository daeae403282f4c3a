//go:build cgo && linux

package pair

import (
	"testing"

	"tutti/endpoint"
	"tutti/rdma/rdmatest"
	"tutti/rdma/verbs"
)

// TestDeviceRDMA: the same over the device of the virtual machine of make test-rdma.
func TestDeviceRDMA(t *testing.T) {
	p, _ := rdmatest.Devices(t, verbs.Load)
	checkPaths(t, endpoint.RDMA{Provider: p}, endpoint.RDMA{Provider: p})
}
