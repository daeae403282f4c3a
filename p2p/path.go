package p2p

import "tutti/mem"

// PathSpec says what a path of a peer can carry. It is data, so that the choice among paths is a
// pure function.
type PathSpec struct {
	Name string // of the key in a mem.Remote
	// Local and Remote say at which kinds of location memory may be at this side and at the peer's.
	Local, Remote LocationKinds
	// Device says that the path depends on a device even for host memory, as one that stages through
	// a GPU does. It never carries memory at Anywhere.
	Device bool
	// Least is how many bytes are worth it: a smaller transfer takes another path, if there is one.
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

// carries reports whether the path leads from local to remote at all.
func (s *PathSpec) carries(local, remote mem.Location) bool {
	return s.Local&kindOf(local) != 0 && s.Remote&kindOf(remote) != 0 &&
		!(s.Device && (local == mem.Anywhere || remote == mem.Anywhere))
}

// ChoosePath returns the index of the path for a transfer of n bytes between memory at local on this
// side and at remote on the peer's, -1 if none carries it. paths are in order of preference. Memory
// at Anywhere takes no path that depends on a device.
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
