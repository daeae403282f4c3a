// Package link moves frames over connected sockets.
//
// A [Conn] sends control frames, and transfers of any length that it cuts into frames, and gives
// each frame that arrives to its [Handler], which says where the payload goes: long payloads go
// from the socket to their place without another copy. A [Loop] is a goroutine that serves many
// connections.
//
// # Who moves the bytes
//
// No call blocks, so any goroutine can do the work. Sending is done by the goroutine that has
// something to send, until the socket is full. Receiving is done by a goroutine that waits for a
// result (see [Await]), and by the loop otherwise. A connection is in one of three states:
//
//   - armed: it is in the loop's epoll set, once, and an event wakes the loop;
//   - active: the loop polls it, for a short while after it was last busy, because more usually
//     follows, and an armed connection costs a thread's wake-up for each packet;
//   - attended: a waiter polls it, and the loop leaves it alone. The waiter arms nothing when it
//     has what it waited for: it leaves the connection to the loop, which looks at it after tend,
//     and again as long as waiters come back. Acknowledgements may wait that long too, and travel
//     with what the program sends next.
//
// A thread that polls in vain yields to other threads, one of which may be the peer's. If it is
// away for long, other programs need the processors: then no thread polls for a while, and every
// connection is armed whenever it is idle, because the kernel prefers threads that wake up.
//
// # Guards
//
// A connection with a guard carries records, with checksums or sealed: see package wire. They are
// between the frames and the socket, and everything else is as without. Only then is a payload
// copied, once at each end: what is sent has to stay as it was when the record was made, and what
// arrives must not be seen before the record was found right. A file is read instead of given to
// the kernel. Such a connection needs up to 128 KiB more memory.
//
// # Locks
//
// Conn.rx is held while a goroutine receives, and during calls of the Handler. Conn.mu guards the
// queue of what is to be sent, for moments; the goroutine that set flushing owns the fields below
// it, and the records that wait. A handler may send, and must not call Await. The order is rx, then
// a handler's own locks, then mu, then Loop.mu.
package link
