// Package rma implements access to remote memory for transports.
//
// A [Table] is the target's side within one address space: this rank's exposed memory, and the
// accesses to it. A [Copier] runs puts and gets by copying if the peer's memory is mapped into this
// process (p2p/inproc, p2p/shm). [Frames] runs them as frames over any link (p2p/tcp): the peer's
// Frames checks each frame against its table and places it. A link that is a [Mover] moves the data
// of operations itself (p2p/verbs); their order, signals and ends stay with Frames. Only such a
// link takes local memory of a device. If it does not move the data, the operation ends with
// errors.ErrUnsupported.
//
// Both engines keep at most p2p.MaxOutstanding operations of a link, in memory that does not depend
// on their size: 64 KiB at most. They move pieces of the operations in turn, so that a small one
// overtakes a large one, and stop after a share of work, so that the link's ordinary frames
// progress.
package rma

// chunk bounds one access of an engine to a peer's memory, in bytes: Withdraw waits for one.
const chunk = 256 << 10

// putFrame bounds the data of a frame of a put, in bytes: frames of other operations wait for one.
const putFrame = 512 << 10

// share bounds the bytes that an engine moves in one call.
const share = 256 << 10
