package unixtest_test

import (
	"testing"

	"tutti/p2p"
	"tutti/p2p/linktest"
	"tutti/p2p/unixtest"
)

func TestConformance(t *testing.T) {
	// "Allocations" polls both ends on one processor, which the goroutines of the links then get
	// only when the runtime preempts it.
	linktest.RunExcept(t, func(testing.TB) p2p.Transport { return unixtest.New() }, "Allocations")
}
