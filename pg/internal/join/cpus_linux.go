package join

import (
	"encoding/binary"
	"hash/fnv"

	"tutti/internal/cpus"
)

// allowedCPUs returns a hash of the numbers of the processors that this process may run on.
func allowedCPUs() uint64 {
	h := fnv.New64a()
	set, _ := cpus.Allowed() // if it is not known, as if the ranks of this machine had the same
	for _, cpu := range set {
		binary.Write(h, binary.LittleEndian, uint32(cpu))
	}
	return h.Sum64()
}
