package observe

import (
	"testing"

	"tutti/collectives"
	"tutti/kernels"
	"tutti/p2p"
	"tutti/pg/flight"
)

// What a peer of a subgroup was seen in has the root as a rank of the job, and is said to be in
// packets as it is.
func TestCallsOfSubgroups(t *testing.T) {
	pack := func(k collectives.Kind, root int) flight.Call {
		return flight.Pack(k, kernels.Float32, 0, collectives.Auto, root)
	}
	sum, packets := pack(collectives.AllReduce, 0), "allreduce #3 (float32, 4 elements, on devices, in packets"
	for want, call := range map[string]flight.Call{
		"broadcast #3 (float32, 4 elements, root 5)": pack(collectives.Broadcast, 1),
		packets + ")":                         sum.InPackets(),
		packets + ", being prepared: step 1)": sum.PreparesPackets(0),
		packets + ", being prepared: step 2)": sum.PreparesPackets(1),
	} {
		if got := spellIn(p2p.Token{Seq: 3, Call: uint64(call), Count: 4}, []int{2, 5, 7}); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
