// Package resync decides how the ranks of a group go from one view to the next: which of them have
// to meet, where each of them stands, and with which operation all go on. It is the pure part,
// without I/O, clock or goroutine; package pg carries its messages and does what it says.
//
// # Exchanges
//
// The ranks of a group run numbered operations, one at a time, in order, in an epoch of the group's
// channel. When a rank is lost, or the channel is broken, or the program calls Recover, they go to
// a new epoch, and for that they take part in an exchange: every member of the view tells all
// others where it stands (a [Standing]), once. Who has all standings of an exchange has completed
// it, and computes its [Outcome]; all compute the same. An exchange is named by a [Point]: the
// epoch of the view, and an attempt, because one that cannot be completed is followed by another.
//
// A standing is told as a value that every peer keeps, not as a message that somebody has to
// receive. So a rank whose program does something else at the time, in another group perhaps, takes
// part as well: whoever is between two operations and sees that others wait for it (Asked) answers.
// No rank waits for the progress of another's program but in Recover.
//
// # Failed groups
//
// A group has failed when its program is to call Recover before anything else: after a timeout, a
// call that differs, or, with Report, a loss. A rank that has seen it says so in its standing
// (Failed). If there is one such standing in an exchange, all members have to have called Recover
// (Calls), or the group fails at all of them: nobody is taken over a failure of which its program
// does not know.
package resync
