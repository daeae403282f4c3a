package unixtest_test

import (
	"testing"

	"tutti/p2p"
	"tutti/p2p/linktest"
	"tutti/p2p/unixtest"
)

func TestConformance(t *testing.T) {
	linktest.Run(t, func(testing.TB) p2p.Transport { return unixtest.New() })
}
