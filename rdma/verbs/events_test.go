//go:build cgo && linux

package verbs

import (
	"slices"
	"testing"

	"tutti/rdma"
)

// TestRemovalWakes: no completion follows the removal of a device, so that it wakes all who may
// wait for one. They, and then the device's user, find that nothing can be used any more.
func TestRemovalWakes(t *testing.T) {
	var calls []string
	d := &device{name: "d"}
	note := func(what string) {
		if d.usable("poll", false) == nil {
			what += " of a device that looks well"
		}
		calls = append(calls, what)
	}
	d.notify = func(e rdma.Event) { note(e.Kind.String()) }
	d.cqs = map[uint64]*cq{1: {wake: func() { note("wake") }}, 2: {}, 3: {wake: func() { note("wake") }}}
	d.report(rdma.Event{Kind: rdma.PortLost, Port: 1})
	d.report(rdma.Event{Kind: rdma.DeviceRemoved})
	want := []string{"port down of a device that looks well", "wake", "wake", "device removed"}
	if !slices.Equal(calls, want) {
		t.Errorf("%q, want %q", calls, want)
	}
}
