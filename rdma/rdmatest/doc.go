// Package rdmatest checks that a provider of RDMA devices does what package rdma says.
package rdmatest

import (
	"testing"

	"tutti/rdma"
)

// Subject is what Suite tests.
type Subject struct {
	Provider rdma.Provider
	Device   string // it connects queue pairs with each other, at port 1
	// SetPort takes the network of port 1 down and brings it back, nil if the test cannot.
	SetPort func(t *testing.T, up bool)
	// Remove removes the device while it is open, nil if the test cannot.
	Remove func(t *testing.T)
	// DMABuf returns a descriptor that the device takes for a DMA buffer of n bytes, and its
	// contents; nil if there is none.
	DMABuf func(t *testing.T, n int) (fd int, b []byte)
}

// Suite checks a provider. open is called at the beginning of each test, and what it returns is
// used by that test alone.
func Suite(t *testing.T, open func(t *testing.T) Subject) {
	for _, c := range []struct {
		name string
		run  func(t *testing.T, s Subject)
	}{
		{"Devices", devices},
		{"Address", address},
		{"Registration", registration},
		{"DMABuf", dmaBuf},
		{"CloseOrder", closeOrder},
		{"AfterClose", afterClose},
		{"States", states},
		{"Limits", limits},
		{"Write", write},
		{"WriteImm", writeImm},
		{"Send", send},
		{"Read", read},
		{"BothDirections", bothDirections},
		{"Segments", segments},
		{"Inline", inline},
		{"Unsignaled", unsignaled},
		{"UnsignaledFailure", unsignaledFailure},
		{"Chains", chains},
		{"MalformedRequest", malformedRequest},
		{"FullQueue", fullQueue},
		{"FullReceiveQueue", fullReceiveQueue},
		{"DataBeforeSend", dataBeforeSend},
		{"Fence", fence},
		{"RemoteAccess", remoteAccess},
		{"LocalProtection", localProtection},
		{"LongMessage", longMessage},
		{"NoReceive", noReceive},
		{"LateReceive", lateReceive},
		{"NoAnswer", noAnswer},
		{"FailFlushes", failFlushes},
		{"FlushAfterError", flushAfterError},
		{"ResetAndReuse", resetAndReuse},
		{"CloseUnderWay", closeUnderWay},
		{"SharedQueue", sharedQueue},
		{"NoLostWakeUp", noLostWakeUp},
		{"WakeEndsWithClose", wakeEndsWithClose},
		{"Overflow", overflow},
		{"Concurrency", concurrency},
		{"PortEvents", portEvents},
		{"RemovalWakes", removalWakes},
	} {
		t.Run(c.name, func(t *testing.T) { c.run(t, open(t)) })
	}
}
