// Package portstest reserves ports for tests.
package portstest

import (
	"strconv"
	"testing"

	"tutti/internal/ports"
)

// Port reserves a port of 127.0.0.1 until the test ends. No other process receives it from the
// kernel, also when its listener has ended.
func Port(t testing.TB) string { return strconv.Itoa(int(reserve(t).Port)) }

// Address reserves a port as Port does, and returns it with its host.
func Address(t testing.TB) string { return reserve(t).Address() }

func reserve(t testing.TB) *ports.Reservation {
	t.Helper()
	r, err := ports.Reserve()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return r
}
