// Package card moves memory over the queue pairs of an RDMA device, for one session of an endpoint
// at a time.
//
// A [Card] is a port of a device. A [Domain] is a protection domain on it: keys of memory that is
// registered in one domain are of no use in another. A [Line] leads to one peer. Line.Open and
// Line.Handle agree on queue pairs with the line at the other end, over a call that the session
// carries, and make a [Conn] of them. Conn.Move reads and writes memory of the peer.
//
// # Failure
//
// A Conn fails as a whole. What was under way ends with an error when nothing accesses its memory
// any more, and the next Open makes another Conn. The status of a request does not say whether the
// key, the peer or the network was at fault: the user of a Conn asks the peer by other means.
//
// # Keys
//
// A device may give the key of memory that was deregistered to other memory. A peer that has not
// learnt of the end of the first would reach the second. So the domain has the keys that peers may
// still use (Withhold), and registers nothing under them.
//
// # Locks
//
// Card.mu and Line.mu are leaves. Line.moving is held during a Move. Config.Last and
// LineConfig.Lost are called without locks.
package card
