// Package collectives turns a collective operation into a plan: the graph of steps (send, recv,
// copy, reduce, put, signal over byte ranges) that one rank carries out. It is pure: no I/O, no
// clock, no goroutine, no shared memory. Build is a function of an algorithm and a Shape, which
// holds what the ranks of a call agree on, and this rank's number. Ranks that agree get matching
// plans without communication. A plan is data: a process group runs it over any link, Interpret
// runs it in memory for every size up to 64 ranks, Cost estimates its time, and String prints it.
//
// # The contract of a plan
//
// A plan is a graph; see Step and Verb. A Send may block until its Recv is posted; plans are free
// of deadlock even then, and even if the steps run one by one: they post a Recv before the Send
// that a peer's matching progress could wait for. Between two ranks, the n-th Send meets the n-th
// Recv, of the same length. Data for the caller's Out arrives there, and uses scratch memory only
// to be combined or passed on in bulk. In is never written, and if Kind allows In and Out to be one
// memory, a range of Out is overwritten only after the last use of the same range of In. The size
// of scratch memory (Plan.Tmp) is at most the number of ranks times a few Shape.Chunk (bruck: times
// log2(n)), for any length of the vector. The number of steps depends on the vector's length only
// by the number of chunks, and MaxSteps bounds it: longer vectors are cut into blocks, with one run
// of the plan per block. Offsets are relative to a part, so that a block of parts needs no plan of
// its own. Steps without data are omitted, with two exceptions that detect ranks with different
// calls: a call without data (Shape.Empty) is a barrier, with any algorithm; and an empty part of
// an AllGatherV or AllToAllV is sent as a signal.
//
// LoadStore plans load the peers' In and Out (PeerIn, PeerOut) and never store to them. They
// require that every rank has entered the operation before the first step. A rank that has loaded
// sends a message afterwards, and signals at the end keep every rank in the operation while a peer
// still uses its memory. One-sided plans put into the peers' Out and Tmp (PeerOut, PeerTmp), under
// the same requirement. A rank may leave when its Puts have completed and it has received all
// signals that are due to it.
//
// # Order of reduction
//
// The result is a function of the contributions alone, and does not depend on timing. In an
// AllReduce every element is either computed by one rank and copied, or computed by several in the
// same order, so that all ranks end with the same bits. With x0 ... x(n-1) the contributions of the
// active ranks in slot order, a ReduceInto combines its sources from left to right, and
//
//   - oneshot, loadstore, twoshot, pairwise, onesided: ((x0 + x1) + x2) + ... + x(n-1), in one
//     ReduceInto;
//   - star: the same;
//   - stars: each star of about sqrt(n) consecutive ranks in that order, then their results;
//   - tree: the balanced tree over aligned blocks, (x0 + x1) + (x2 + x3) and so on, lower block
//     first, whatever the root;
//   - doubling, halving: the same, after the first n-2^k neighbours have been folded in pairs,
//     where 2^k is the largest power of two up to n;
//   - chain: ((x0 + x1) + ... + x(root)) + (x(root+1) + (... + x(n-1)));
//   - ring: part p, of n parts cut as split does, is (x(p+1) + x(p+2)) + ... + x(p), indices modulo
//     n. This is the one order that is rotated;
//   - hierarchical: on each host in slot order (in a Reduce: as tree), then between hosts, ordered
//     by their lowest slot, from left to right if a lane of the vector is longer than a chunk, else
//     as doubling (in a Reduce: as tree).
//
// Types that a ReduceInto accumulates in a wider format are rounded between ReduceIntos, at points
// that the algorithm and the shape determine. Final marks the last ReduceInto over a range: an
// average divides there.
//
// # The algorithms
//
// Costs are in messages (a) and bytes (B) of one rank for a vector of S bytes, or parts of S bytes,
// and n ranks.
//
//   - oneshot: every rank sends all others what they need; one round, (n-1) a, S(n-1) B. For what
//     is so short that only the number of rounds counts, and for two ranks, where no algorithm
//     sends less.
//   - loadstore: each rank loads what it needs from where it is. In an allreduce it folds its n-th
//     of all vectors and then loads the other parts of the result from the ranks that folded them:
//     loads for each of the n, and S(n-1)/n more; nothing is copied on the way.
//   - onesided: as oneshot, by Puts into the receivers' memory. An allreduce is a two-shot whose
//     contributions go to scratch memory for two chunks, with results for acknowledgements. For
//     links that write into a peer's memory, as RDMA's do.
//   - twoshot: reduce-scatter, then allgather, each by messages straight between the two concerned;
//     2(n-1) a per chunk, 2S(n-1)/n B, each element folded once. Round c of the software pipeline
//     sends contribution c, folds c-1, and sends result c-1. For a broadcast it is van de Geijn's
//     scatter and allgather; for a reduce, reduce-scatter and gather.
//   - pairwise: one part from and to each peer, in n-1 rotated rounds, few at a time.
//   - doubling, halving: log2(n) a; n's that are no powers of two fold their excess first. Halving
//     splits what remains in each round, nearest neighbours first, so that blocks stay in slot
//     order: 2S(n-1)/n B, or S(n-1) B for a reduce-scatter, its first half. R. Thakur,
//     R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH",
//     IJHPCA 19 (2005); R. Rabenseifner, "Optimization of collective reduction operations", ICCS
//     2004.
//   - ring: 2(n-1) a to one neighbour only, 2S(n-1)/n B. P. Patarasuk, X. Yuan, "Bandwidth optimal
//     all-reduce algorithms for clusters of workstations", JPDC 69 (2009); known to many from NCCL.
//   - tree: binomial, log2(n) deep, chunks in a pipeline. Gather and scatter pack a subtree's parts
//     into one message.
//   - star: to the lowest rank and back, 2 a for the others. stars: groups of about sqrt(n)
//     consecutive ranks around the lowest of each, and these around the lowest of all. For ranks
//     that share processors, and with n-1 links in all.
//   - chain: n-1 deep, chunks in a pipeline; each rank sends and receives every byte once.
//   - bruck: ceil(log2 n) a. J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal, D. Weathersby, "Efficient
//     algorithms for all-to-all communications in multiport message-passing systems", IEEE TPDS 8
//     (1997).
//   - dissemination: ceil(log2 n) rounds of signals. D. Hensgen, R. Finkel, U. Manber, "Two
//     algorithms for barrier synchronization", IJPP 17 (1988).
//   - hierarchical: what crosses between hosts crosses once per pair of hosts, and all ranks of a
//     host share the load: an AllReduce runs in as many lanes as the smallest host has ranks, an
//     AllGather spreads the incoming parts over the host's ranks.
//
// Choose selects an algorithm by a table of rules, DefaultTable or a measured one (Table):
// conditions, number of ranks, bytes.
package collectives
