package join

import (
	"encoding/binary"
	"hash/fnv"

	"golang.org/x/sys/unix"
)

// allowedCPUs returns a hash of the numbers of the processors that this process may run on.
func allowedCPUs() uint64 {
	h := fnv.New64a()
	var set unix.CPUSet
	if unix.SchedGetaffinity(0, &set) == nil {
		for _, w := range set {
			binary.Write(h, binary.LittleEndian, uint64(w))
		}
	}
	return h.Sum64()
}
