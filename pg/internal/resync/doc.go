// Package resync decides how the ranks of a group move from one view to the next: which of them
// take part, where each of them stands, and with which operation all continue. It is the pure part,
// without I/O, clock or goroutine; package pg sends its messages and carries out its decisions.
//
// # Exchanges
//
// The ranks of a group run numbered operations, one at a time, in order, in an epoch of the group's
// channel. When a rank is lost, the channel is broken, or the program calls Recover, they move to a
// new epoch by an exchange: every member of the view tells all others once where it stands (a
// [Standing]). A rank that has all standings of an exchange has completed it, and computes its
// [Outcome], which is the same at all ranks. A [Point] names an exchange: the epoch of the view,
// and an attempt, because an exchange that cannot be completed is followed by another.
//
// A standing is a value that every peer keeps, not a message that has to be received. So a rank
// whose program is busy elsewhere, in another group perhaps, takes part as well: a rank between two
// operations answers when others wait for it (Asked). Only Recover waits for the progress of
// another rank's program.
//
// # Failed groups
//
// A group has failed when its program has to call Recover before anything else: after a timeout, a
// call that differs, or, with Report, a loss. A rank whose group has failed says so in its standing
// (Failed). If an exchange has such a standing, all members must have called Recover (Calls), or
// the group fails at all of them. So no program continues past a failure that it has not seen.
//
// A failure is that of an operation. It ends with an exchange that ends the operation and in which
// the group has failed at no rank, also if the rank gave the operation up after it had told its
// standing: the others know nothing of a failure, and need not call Recover. Whether they are told
// of what a rank has given up in an exchange is known when the exchange is complete: only if they
// run that operation then.
//
// # Late calls of Recover
//
// If the group has failed on no rank, a rank may return from Recover, call operations and give them
// up before another rank has called Recover. The view then begins after these operations. The call
// of the late rank ends nevertheless where that of the first one ended: a standing says which
// operation followed a rank's latest Recover (Since), and what it knows of others (Stops). So what
// the programs call in one place has the same number at all ranks, or ends with an error. A late
// call waits for no program: its rank may be what the others wait for, in an agreement on the
// operation that they have called since. Ranks between two operations answer it, and a failure of
// the group that came after the others' call is one for the program's next operation.
package resync
