package p2p

import (
	"testing"

	"tutti/mem"
)

func TestPathFollowsFromLocationsAndSize(t *testing.T) {
	const both = HostMemory | DeviceMemory
	frames := PathSpec{Name: "tcp", Local: HostMemory, Remote: HostMemory}
	mapped := PathSpec{Name: "shm", Local: HostMemory, Remote: HostMemory}
	nvlink := PathSpec{Name: "nvlink", Local: DeviceMemory, Remote: DeviceMemory, Device: true}
	verbs := PathSpec{Name: "verbs", Local: HostMemory, Remote: HostMemory, Least: 4096}
	gdr := PathSpec{Name: "gdr", Local: both, Remote: both, Device: true, Least: 8192}
	staged := PathSpec{Name: "staged", Local: both, Remote: both, Device: true}
	for _, c := range []struct {
		paths         []PathSpec
		local, remote mem.Location
		n             int
		want          string
	}{
		{nil, "*", "*", 8, ""},
		{[]PathSpec{mapped}, "*", "*", 0, "shm"},
		{[]PathSpec{mapped, frames}, "cpu:0", "cpu:1", 1 << 20, "shm"},
		{[]PathSpec{frames, mapped}, "cpu:0", "*", 1 << 20, "tcp"},
		{[]PathSpec{nvlink, mapped}, "*", "*", 1 << 20, "shm"},
		{[]PathSpec{nvlink, mapped}, "cuda:0", "cuda:1", 64, "nvlink"},
		{[]PathSpec{nvlink, mapped}, "cuda:0", "cpu:0", 64, ""},
		{[]PathSpec{nvlink, mapped, staged}, "cuda:0", "cpu:0", 64, "staged"},
		{[]PathSpec{verbs, frames}, "*", "*", 4095, "tcp"},
		{[]PathSpec{verbs, frames}, "*", "*", 4096, "verbs"},
		{[]PathSpec{verbs}, "*", "*", 8, "verbs"}, // nothing else is there
		{[]PathSpec{gdr, verbs}, "cpu:0", "cpu:0", 8, "verbs"},
		{[]PathSpec{gdr, verbs}, "cpu:0", "cpu:0", 8192, "gdr"},
		{[]PathSpec{gdr, verbs}, "*", "cpu:0", 8192, "verbs"},
		{[]PathSpec{gdr, verbs}, "cuda:0", "cpu:0", 8, "gdr"},
		{[]PathSpec{staged}, "*", "*", 8, ""}, // rather none than a GPU
		{[]PathSpec{staged}, "cpu:0", "*", 8, ""},
		{[]PathSpec{frames}, "cuda:0", "cuda:0", 8, ""},
	} {
		got := ""
		if i := ChoosePath(c.paths, c.local, c.remote, c.n); i >= 0 {
			got = c.paths[i].Name
		}
		if got != c.want {
			t.Errorf("%d bytes from %s to %s over %+v: %q, want %q", c.n, c.local, c.remote, c.paths, got, c.want)
		}
	}
}

// Memory at Anywhere, as all control memory is, takes no path that depends on a device, whatever
// paths there are, in whatever order.
func TestControlMemoryTakesNoDevicePath(t *testing.T) {
	var kinds []PathSpec
	for _, k := range []LocationKinds{HostMemory, DeviceMemory, HostMemory | DeviceMemory} {
		for _, device := range []bool{false, true} {
			for _, least := range []int{0, 100} {
				kinds = append(kinds, PathSpec{Local: k, Remote: k, Device: device, Least: least})
			}
		}
	}
	for _, a := range kinds {
		for _, b := range kinds {
			for _, c := range kinds {
				paths := []PathSpec{a, b, c}
				for _, n := range []int{0, 99, 100} {
					i := ChoosePath(paths, mem.Anywhere, mem.Anywhere, n)
					usable := false
					for _, p := range paths {
						usable = usable || !p.Device && p.Local&HostMemory != 0
					}
					if i >= 0 && (paths[i].Device || paths[i].Local&HostMemory == 0) || (i >= 0) != usable {
						t.Fatalf("%d bytes over %+v: path %d", n, paths, i)
					}
				}
			}
		}
	}
}
