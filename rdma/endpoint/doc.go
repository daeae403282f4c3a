// Package endpoint connects queue pairs with those of peers: which end asks, which answers, and
// when a connection has to be replaced.
//
// A Table has at most one Connection to each peer: the queue pairs of one device, made together and
// connected together. Table.Open makes it when it is needed. A request goes to the peer by a
// remote procedure call that the program provides (Caller), and the peer's Table.Handle answers it.
// Both ends may do that at the same time. The state of one end is a machine without clock,
// goroutines or I/O; Table carries out what it decides.
//
// # Names
//
// An end is named by its session, the random id of one life of a process, and its version, which
// counts what happened to it: even while it is not connected, odd while it is. Version v has
// generation v/2 of the queue pairs. A generation is connected once, with one generation of the
// peer, and never used again. So a pair of names, one from each side, identifies a connection even
// if the numbers of queue pairs repeat.
//
// # The handshake
//
//	unconnected --open: make queue pairs, ask--> connecting --accepted, or a request--> connected
//	unconnected --a request: make queue pairs, connect, accept--> connected
//	connected --failed, or replaced: retire the queue pairs--> unconnected
//
// A request has the sender's name, what to connect with (addresses, and the numbers and first
// packet numbers of the queue pairs, in order), and the name of the receiver as the sender knows
// it, if it does. The receiver
//
//   - that is connected with exactly these queue pairs answers as before, and changes nothing;
//   - that is named with its present version, or has version 0 and is not named, connects: a
//     connecting end with the queue pairs that it has, a connected one with new ones in place of
//     its own, an unconnected one with new ones;
//   - does so too if it is connected with an older generation of the same session, which no
//     longer exists;
//   - otherwise answers with its present name (stale), and changes nothing. The sender asks again.
//
// So a request is a compare-and-swap of the receiver's version. A request that was delayed, or
// whose sender has ended, cannot take queue pairs away that work: it would have to name a version
// that did not exist when it was sent. A process that was started anew does not know its peer's
// version, and asks twice.
//
// An end that is connected by a request while its own call is under way is connected. If the reply
// says the same, that is all. If the call fails, or the reply is of other queue pairs, the
// connected end verifies: it asks with its odd version, and names the queue pairs that it is
// connected with. The peer confirms that, or connects if it waits, or answers stale; only the
// latter ends the connection. If these calls fail as well, the connection is kept: it may be that
// only the peer can call.
//
// What no message can tell is shown by the queue pairs: those of a peer that has ended, or has
// given up, do not answer. The program then calls Connection.Fail.
//
// # Retired queue pairs
//
// Queue pairs that are taken out of service are put to the state Failed and passed to
// Config.Retire. When the program has polled the completions of all their requests, it calls
// drained; the queue pairs are then reset and kept for another connection, or destroyed if the
// device cannot reset them (rdma.Quirks) or there are enough. While too many are not drained, no
// new ones are made: Open fails, and peers are told to ask later.
//
// # Waiting
//
// Table.Open waits, with the caller's context. All callers for one peer wait for one attempt, which
// repeats failed calls after random pauses that grow. It ends when it succeeds, when the peer or
// the device rules it out, or when a call has failed and no caller waits any more. The number of
// calls under way is limited. No lock is held during a call. Table.Handle waits for no peer.
//
// # Locks
//
// Each peer of a table has a lock, for its machine and the calls of its device. The table's lock
// may be taken with it. Config.Prepare is called with the peer's lock, Config.Retire without any.
package endpoint
