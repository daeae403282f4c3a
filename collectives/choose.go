package collectives

// Caps are the capabilities of the links between the ranks of a call. Every rank must pass Choose
// the same Caps, so they contain only what all ranks know of all ranks.
type Caps struct {
	Mapped       bool // every active rank's In and Out can be loaded by all the others
	Puts         bool // every active rank's Out and scratch memory can be put into by all the others
	SharedMemory bool // all links use memory, none a network
	Cores        int  // processors that the ranks of one host share; 0: as many as ranks
}

// LoadStoreMin returns the size in bytes from which it pays that the ranks of a collective tell
// each other where their buffers are, so that these can be loaded. Below, rings are as fast. An
// allreduce takes one more round than the others, and ranks that share processors pay for each
// round with a switch to another process.
func LoadStoreMin(k Kind) int {
	if k == AllReduce {
		return 128 << 10
	}
	return 32 << 10
}

// defaults are the rules of DefaultTable: the first rule that holds decides. Their reasoning, in
// terms of the costs a (one message), B (one byte moved) and g (one byte reduced):
//   - oneshot has the fewest rounds, one, and moves and folds n-1 times the bytes: for a few KiB
//     among few ranks nothing beats it.
//   - loadstore moves the fewest bytes of all, but takes a round to enter, one to leave and in an
//     allreduce one between: worth it as soon as copying a message costs more than that (see
//     LoadStoreMin).
//   - doubling takes log2(n) rounds of all bytes: for short vectors of many ranks.
//   - twoshot takes two rounds, 2(n-1)/n of the bytes in and out, and each byte folded once; ring
//     has the same bytes in 2(n-1) rounds, but only two neighbours: it is for so many ranks that
//     n-1 peers at once choke a wire. halving is in between.
//   - star has one message each way for most ranks: among ranks that share processors every message
//     that a rank waits for costs a switch to another process, which takes longer than the center
//     needs for a short vector. Many ranks need a second level, because a center combines one
//     vector after the other.
//   - hierarchical moves a part of an allgather to each other host once, in a message of its own.
//     In a large job bruck's log2(n) messages, which move it there several times, are faster for
//     short parts. They also need fewer links, as halving does for short reduce-scatters.
//   - stars of up to 256 KiB are for the meeting of a job, where each rank tells 48 bytes: up to
//     5,461 ranks need few links.
//   - onesided moves as many bytes as oneshot, without the receiver's help and without a copy; but
//     all have to enter first.
//   - chain is the best broadcast of long vectors on links that carry both directions at once, tree
//     of short ones.
var defaults = [numKinds][]Rule{
	AllReduce: {
		{IfLevels, 0, 0, 8 << 10, Doubling},
		{IfLevels, 0, 0, 0, Hierarchical},
		{IfOversubscribed, 5, starRanks, 32 << 10, Star},
		{IfOversubscribed, 5, 0, 32 << 10, Stars},
		{IfMemory, 0, 4, 16 << 10, OneShot},
		{IfMemory, 0, 8, 4 << 10, OneShot},
		{IfMemory, 0, 2, 64 << 10, OneShot},
		{IfOversubscribed, 0, 0, 32 << 10, Doubling},
		{Always, 0, 2, 16 << 10, OneShot},
		{Always, 0, 4, 8 << 10, OneShot},
		{IfMapped, 0, 0, 2 << 10, Doubling},
		{IfMapped, 0, 0, 0, LoadStore},
		{Always, 0, 2, 128 << 10, OneShot},
		{Always, 0, 0, 16 << 10, Doubling},
		{Always, 0, 32, 0, TwoShot},
		{IfMemory, 0, 0, 0, TwoShot},
		{Always, 0, 0, 1 << 20, Halving},
		{Always, 0, 0, 0, Ring},
	},
	ReduceScatter: {
		{Always, 0, 8, 16 << 10, Pairwise},
		{IfMapped, 0, 0, 0, LoadStore},
		{Always, 0, 32, 0, Pairwise},
		{IfMemory, 0, 0, 0, Pairwise},
		{Always, 0, 64, 1 << 20, Pairwise},
		{Always, 0, 0, 1 << 20, Halving},
		{Always, 0, 0, 0, Ring},
	},
	AllGather: {
		{IfLevels, 65, 0, 64 << 10, Bruck},
		{IfLevels, 513, 0, 1 << 20, Bruck},
		{IfLevels, 0, 0, 0, Hierarchical},
		{Always, 0, 8, 16 << 10, OneShot},
		{IfOversubscribed, 0, starRanks, 64 << 10, Star},
		{IfOversubscribed, 0, 0, 64 << 10, Stars},
		{IfMapped, 0, 0, 0, LoadStore},
		{IfPuts, 0, 0, 0, OneSided},
		{Always, 0, 8, 0, OneShot},
		{IfOversubscribed, starRanks + 1, 0, 256 << 10, Stars},
		{Always, 0, 0, 64 << 10, Bruck},
		{Always, 0, 64, 0, Pairwise},
		{Always, 0, 0, 0, Ring},
	},
	AllGatherV: {
		{IfLevels, 0, 0, 0, Hierarchical},
		{Always, 0, 8, 16 << 10, OneShot},
		{IfMapped, 0, 0, 0, LoadStore},
		{IfPuts, 0, 0, 0, OneSided},
		{Always, 0, 8, 0, OneShot},
		{Always, 0, 64, 0, Pairwise},
		{Always, 0, 0, 0, Ring},
	},
	AllToAll: {
		{Always, 0, 8, 16 << 10, OneShot},
		{IfMapped, 0, 0, 0, LoadStore},
		{IfPuts, 0, 0, 0, OneSided},
		{Always, 0, 8, 0, OneShot},
		{Always, 0, 0, 16 << 10, Bruck},
		{Always, 0, 0, 0, Pairwise},
	},
	AllToAllV: {
		{Always, 0, 8, 0, OneShot},
		{Always, 0, 0, 0, Pairwise},
	},
	Broadcast: {
		{IfLevels, 0, 0, 0, Hierarchical},
		{Always, 0, 2, 16 << 10, OneShot},
		{Always, 0, 4, 8 << 10, OneShot},
		{IfMapped, 0, 0, 16 << 10, Tree},
		{IfMapped, 0, 0, 0, LoadStore},
		{Always, 0, 2, 0, Chain},
		{Always, 0, 0, 64 << 10, Tree},
		{Always, 0, 16, 0, TwoShot},
		{Always, 0, 0, 0, Chain},
	},
	Reduce: {
		{IfLevels, 0, 0, 0, Hierarchical},
		{Always, 0, 4, 16 << 10, OneShot},
		{IfMapped, 0, 0, 16 << 10, Tree},
		{IfMapped, 0, 0, 0, LoadStore},
		{Always, 0, 2, 0, OneShot},
		{Always, 0, 0, 64 << 10, Tree},
		{Always, 0, 32, 0, TwoShot},
		{Always, 0, 0, 0, Chain},
	},
	Gather: {
		{Always, 0, 8, 64 << 10, OneShot},
		{IfMapped, 0, 0, 0, LoadStore},
		{Always, 0, 32, 0, OneShot},
		{Always, 0, 0, 64 << 10, Tree},
		{Always, 0, 0, 0, OneShot},
	},
	Scatter: {
		{Always, 0, 8, 64 << 10, OneShot},
		{IfMapped, 0, 0, 0, LoadStore},
		{Always, 0, 32, 0, OneShot},
		{Always, 0, 0, 64 << 10, Tree},
		{Always, 0, 0, 0, OneShot},
	},
	Barrier: {
		{IfLevels, 0, 0, 0, Hierarchical},
		{Always, 0, 4, 0, OneShot},
		{IfOversubscribed, 0, starRanks, 0, Star},
		{IfOversubscribed, 0, 0, 0, Stars},
		{Always, 0, 0, 0, Dissemination},
	},
}

// Choose is DefaultTable().Choose.
func Choose(s Shape, c Caps) Algo { return DefaultTable().Choose(s, c) }
