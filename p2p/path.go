package p2p

import "tutti/mem"

// PathSpec describes what a path to a peer can carry. It is plain data, so that ChoosePath is a
// pure function.
type PathSpec struct {
	Name string // of the key in a mem.Remote
	// Local and Remote are the kinds of location that memory may have on this side and on the
	// peer's.
	Local, Remote LocationKinds
	// Device says that the path depends on a device even for host memory, for example because it
	// stages through a GPU. It never carries memory at Anywhere.
	Device bool
	// Least is the size from which the path is preferred: smaller transfers take another path, if
	// there is one.
	Least int
}

// LocationKinds is a set of kinds of locations.
type LocationKinds uint8

// The kinds.
const (
	HostMemory LocationKinds = 1 << iota
	DeviceMemory
)

func kindOf(l mem.Location) LocationKinds {
	if l.Host() {
		return HostMemory
	}
	return DeviceMemory
}

// carries reports whether the path can carry transfers from local to remote.
func (s *PathSpec) carries(local, remote mem.Location) bool {
	return s.Local&kindOf(local) != 0 && s.Remote&kindOf(remote) != 0 &&
		!(s.Device && (local == mem.Anywhere || remote == mem.Anywhere))
}

// ChoosePath returns the index of the path for a transfer of n bytes between memory at local on
// this side and at remote on the peer's, -1 if none carries it. paths are in order of preference.
// Memory at Anywhere takes no path that depends on a device.
func ChoosePath(paths []PathSpec, local, remote mem.Location, n int) int {
	fallback := -1
	for i := range paths {
		s := &paths[i]
		if !s.carries(local, remote) {
			continue
		}
		if n >= s.Least {
			return i
		}
		if fallback < 0 || s.Least < paths[fallback].Least {
			fallback = i
		}
	}
	return fallback
}
