// Package verbs makes p2p links over RDMA devices. Users know the transport as "rdma".
//
// # Connections
//
// A link is made, authenticated and ended by a TCP connection, a link of p2p/tcp. Frames go over it
// at first, and whenever the devices do not carry them. Beside it the link has one lane in use: a
// reliable connection of queue pairs for frames, with a ring at each end, and others for the data
// of puts and gets, its rails. While it changes from one lane to a better one it has two. The TCP
// connection ends with the peer's process, and p2p/tcp notices hosts that fall silent.
//
// # Ports
//
// The transport opens all ports that it may use, those of devices near to the process's processors
// first (rdma.Nearest). A lane uses all that are active when it is made: its frames go over the
// nearest one, and it has Config.QueuePairs rails on each, at most 16 in all. The acceptor finds a
// port for each queue pair of the dialler (propose and accept in device.go): ports are paired in
// the order of their names, which machines that are alike have in common, so that two ends with as
// many ports use disjoint pairs. A rail that one end cannot make is left out.
//
// When a port comes back, or its addresses change, or a device that was removed can be opened
// again, a lane that could use more ports than it does is followed by another one. The frames'
// queue pair returns to the nearest port then. While lanes do not come up, it goes from port to
// port.
//
// # Lanes
//
// Control frames on the TCP connection agree on lanes (setup.go). What an end does when, machine.go
// decides. The dialler makes the objects of a lane and proposes it; the acceptor makes and connects
// its own, and accepts; the dialler connects. Each end sends a request over the lane, the dialler
// first, which says by frameShown that its own has completed: a path that loses everything is never
// used. When that of the acceptor has completed, the acceptor and then the dialler say by
// frameReady that their frames go on in the ring. Each rail has such a request of its own, and data
// only after it: one that fails before is not used, and the lane is made again after a while.
// Objects are made, connected and closed by tasks in goroutines, because these calls take long. All
// else happens in the calls of the link's user.
//
// A better lane is made beside the one in use, which carries everything until both ends have shown
// that data passes the other one. The acceptor asks for it by frameWish. In each direction,
// frameReady has the place where the frames in the old ring end: the consumer reads until there,
// and goes on in the other ring. Data that was not requested yet goes over the new lane. An end
// that has read the old ring to its end, and has no request for data under way, says so by
// frameLeft; when both have, the old lane is closed. If a better lane fails before an end has gone
// over to it, or does not have more rails that work, the one in use goes on. If it fails later,
// before the old lane is closed, both are given up.
//
// A lane is given up when a request fails, the requests of a queue pair do not move for some
// seconds (lateTime), a port goes down that it uses, a device is removed, or the peer gives it up.
// This is so for its rails, too: one that fails takes the lane with it. Each end says by frameDown
// what it has taken from its ring, and reads no more of it. The other end sends the rest again over
// TCP: the copy of the ring still has all frames that the consumer has not freed. So every frame
// arrives once and in order. The dialler then makes the next lane, after a pause that grows while
// lanes do not last, and at once when a port comes back. It never gives up while the link lives. A
// failed request says nothing against the peer: it writes only to memory of the lane itself, or to
// memory that the peer may have withdrawn meanwhile. Only a violation of the protocol ends the
// link, and the end of the TCP connection.
//
// # Frames
//
// Each end has a ring, which only the peer writes, by RDMA. A frame is contiguous, a multiple of
// unit long, and ends with its header and a commit word:
//
//	payload, padding | p2p.Header as the machine lays it out (48) | commit word (8)
//
// Frames follow each other from the ring's end to its beginning. So the consumer knows where the
// next commit word will be, and polls it, which costs no call of the device. But the word says only
// that a frame is coming. A device may place the data of one write in any order (Soft-RoCE does),
// and that of a write before that of an earlier one: packets may take several paths, and a bus may
// reorder what is written. All of it is there when the device has completed the receive of the last
// write of the frame, which has an immediate value. A consumer that sees anything at the word's
// place therefore takes completions, up to rdma.PollBatch with one call, and then as many frames as
// these say. When it frees a frame, it clears all places in it where a commit word may be. Nothing
// is written twice before it was freed, so that the order of writes changes nothing. A frame that
// does not fit before the ring's beginning is placed at its end, and a skip mark follows, at the
// place where the consumer polls.
//
// The producer composes frames in a copy of the peer's ring. Those that may wait (p2p.Gatherer) are
// posted together. The producer writes over a frame when the device has completed its write and the
// consumer has freed it. The consumer tells the position up to which it has freed the ring as an
// immediate value of an empty write, each time that this is another quarter. As no frame is larger
// than a quarter, a producer always finds room when the consumer has read everything.
//
// # Memory
//
// Puts, gets and signals are operations of rma.Frames. It offers the data of each to the link
// (rma.Mover), which moves data of leastMove bytes and more by RDMA (bulk.go): writes directly into
// the peer's exposed memory, reads directly from it, in pieces, of all operations in turn. Each
// piece goes over the rail with the fewest bytes under way. A put has ended when the peer's devices
// have acknowledged all its pieces. Signals are frames, which are sent after that. Shorter data is
// frames, too.
//
// An acknowledgement says that the device has the data, not that it is visible. A device makes
// visible what it receives in its order, so that a frame in the ring of the same device comes after
// the data. For data in the memory of a GPU, and where a host has several devices, the peer names
// with the key a byte to be read: of the host's memory, or of the same memory of the GPU, so that
// the read takes the way of the data. The writing end reads it behind the pieces on each such
// rail, and the put has ended when these reads have, too. A GPU's memory that must not be read is
// written in frames.
//
// The local memory may be a GPU's (Config.Exporter). Frames do not carry that: what is not moved
// ends with errors.ErrUnsupported, and the caller copies it to the host.
//
// A request needs a key of the device that it reaches. The first operation on exposed memory asks
// for the keys (frameClaim). The peer registers the memory with each device of the lane, exactly
// its bytes with exactly its rights, and answers with the key of each rail (frameKey); every lane
// keeps its keys (expose.go). Whatever they do not allow goes in frames, which end with the reason.
// Withdraw deregisters the memory everywhere, so that no peer reaches it any more, and tells those
// that have keys (frameRevoke). They answer when no request with any of them is under way
// (frameRevoked). Until then, or until the lane's queue pairs are closed, no device gives its key
// to other memory. A request that comes too late fails its lane. Memory for which a device has no
// other key is refused for now (askAgain): its data goes in frames, and the next operation asks
// again.
//
// A request that fails costs its lane. If its status says nothing against the request
// (rdma.Status.Recoverable), later data of the memory is moved over the next lane; if it does
// (rdma.Fatal), that data goes in frames from then on, and no more lanes are lost by it.
//
// An operation with requests under way on a lane that is given up may still change memory. It waits
// until all queue pairs of both ends are closed, which each end says (frameFenced), and is repeated
// in frames then. An end whose device refuses to close one tries again until then. A request cannot
// be taken back: to cancel an operation with requests under way closes the queue pairs. If the
// device refuses that, the cancelling call fails them instead, and waits until the requests have
// completed: a device uses no memory of these any more. If the device does neither for as long as
// Close would wait, the call returns, and the operation's memory may still be used until the queue
// pairs are closed; that is logged as an error. Later puts wait until the peer's queue pairs are
// closed, too: what the network has of the cancelled one could be placed over their data.
//
// # Sleeping
//
// A processor learns of a write to its memory only by polling, and cannot ask the other end
// beforehand whether a write is under way, without a message there and back. But the last write of
// each frame, and that for a position, uses up a posted receive, and its completion wakes an end
// that sleeps. There are as many receives as the ring has units, and spare ones. Those that have
// completed are posted again with one call when they are half as many as the spare ones. The other
// half is enough for the positions under way, so that no write waits for a receive.
//
// When the TCP connection has ended, frames that have arrived are still delivered. Some of their
// completions may be under way. So the consumer fails the queue pair, which flushes the receives
// that are left: no frame comes after these. For a device that does not flush them it waits no
// longer than for requests under way.
//
// Beside a ring the TCP connection stays armed, so that a control frame wakes the end as well.
// Beside requests for data their completions wake it.
//
// A device may forget a request. Beside requests under way a timer wakes an end that sleeps, so
// that it sees when they do not move. Most of those for frames have no completion: an end that has
// heard of none for half of lateTime posts an empty one that has, and its time begins then. When
// that has completed, nothing is under way, and a link that stays idle sets no timer. It does not
// depend on the peer's process, which may be stopped, whether requests move: a write needs nothing
// but the peer's device and, for a frame or a position, one of the receives above.
//
// # Trust
//
// The peer has proved the job's secret before its queue pairs are known here. It is told how to
// reach its ring, and exposed memory that it asks for, with the rights of the exposure. It may
// write anything to its ring at any time: what is read is copied first and checked then. It may
// also send any control frame at any time. A wrong key that it gives concerns only its own memory.
//
// All links over a port share one protection domain. So a peer that guesses a key, which has 32
// bits, and an address, reaches the memory of this rank that another peer has this key for: it can
// write frames in the name of that peer to its ring. A wrong guess costs the lane. Those that know
// the job's secret, ranks and programs that are none (p2p.RoleClient), are therefore one principal.
// Clients with a key of their own (package trust) get no links of this transport.
package verbs
