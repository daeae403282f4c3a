// Package rma is what transports share to reach the memory of peers.
//
// A [Table] is the target's side within one address space: what this rank has exposed, and who is
// in it. A [Copier] runs puts and gets where the peer's memory is mapped into this process, by
// copying (p2p/inproc, p2p/shm). [Frames] runs them as frames over any link (p2p/tcp): the peer's
// Frames checks each frame against its table and places it.
//
// Both engines keep at most p2p.MaxOutstanding operations of a link, in memory that does not depend
// on their size: 64 KiB at most. They move pieces of the operations in turn, so that a small one
// overtakes a large one, and stop after a share of work, so that the link's ordinary frames come to
// their turn.
package rma

// chunk is how much one access to a peer's memory moves at most, in bytes: Withdraw waits for one.
const chunk = 64 << 10

// share is how much an engine moves in one call at most, in bytes.
const share = 256 << 10
