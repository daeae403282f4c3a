//go:build linux

package torture

import (
	"slices"
	"testing"

	"tutti/rdma"
)

// A rank can join while one of its devices is removed, and has none of the others'.
func TestRanksHaveTheirDevices(t *testing.T) {
	for rank := range maxRanks {
		allowed, err := rdma.ParseDevices(of(rank))
		if err != nil {
			t.Fatal(err)
		}
		for removed := range devicesOf {
			var there, want []rdma.DevicePort
			for r := range maxRanks {
				for i := range devicesOf {
					p := rdma.DevicePort{Device: name(r, i), Port: 1}
					if r == rank && i == removed {
						continue
					}
					if there = append(there, p); r == rank {
						want = append(want, p)
					}
				}
			}
			if got, err := allowed.Choose(there); err != nil || !slices.Equal(got, want) {
				t.Errorf("rank %d without its device %d: %v, %v, want %v", rank, removed, got, err, want)
			}
		}
	}
}
