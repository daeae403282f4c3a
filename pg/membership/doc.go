// Package membership decides who belongs to a job: which ranks are in, by which of their lives, as
// they die, are cut off from each other, come back, and as new ones arrive. It is the pure part: a
// state machine without I/O, clock or goroutine. A driver (package pg) tells it what happens, and
// does what it answers.
//
// # The story
//
// A job has slots 0..N-1, one for each rank, for ever: a rank that dies leaves a hole, and nobody
// is renumbered. A [View] says which slots are active in an epoch, and by which life (an
// incarnation: a random number that a process takes when it starts, and takes anew when it comes
// back). The truth is one key in the store, the encoded view, and it changes only by
// compare-and-swap of the whole value. So epochs grow one by one, there is one view of each epoch,
// and a minority that cannot reach the store decides nothing. Any member may propose a change.
// Whoever proposes can die before it, within it, or after it: the view has been changed or it has
// not, and if not, another proposes the same. There is no coordinator.
//
// Every rank runs one [Machine]. It is fed with an [Event] at a time, by [Machine.Step], and
// answers with [Action] values. What it does is derived from its state after each event, not from
// the event, so that it does not matter in which order things become known, or how often.
//
// # Evidence and verdict
//
// A verdict ([Dead], [Missed], [Evict]; and [Late], when there are enough) is somebody's certainty.
// Whoever hears of one proposes the view without that life, at once; all that are known go in one
// change. Where nobody would be left, the machine stays itself, whatever is said of its life: it is
// here, and somebody has to decide who comes in.
//
// Evidence is less. A link that breaks ([LinkDown]) is a reason to ask what became of the process:
// [Probe]. If that is gone, this is a verdict, and the survivors go on within moments. If it lives,
// or nobody can tell, two ranks which may both be alive cannot reach each other. The machine
// suspects, and says so to all ([Report]). For a window it waits: the link may come back ([LinkUp]
// takes the suspicion back), the lease may run out, others may tell what they see. Then every
// machine computes from the same reports who stays, with [Keep]: the largest set that it can find
// whose members all reach each other. A link counts as missing if either end says so. Nobody whose
// links are all there ever goes. Machines whose knowledge differs for a moment may propose
// different views; the store takes one of them, and the others think again. A rank that finds that
// it is the one to go proposes that, too.
//
// What is said of a life counts for that life only. Evidence about one that has left the view is
// dropped, and so are reports of one that has. A report stays good over a change of the view,
// because a link that was missing in one epoch is missing in the next; it is taken back by the next
// report of that life, and its number (Seq) tells which is later. Old views are dropped by their
// epoch.
//
// # Who decides about whom
//
//   - A process that has ended, a lease that has run out, a life whose slot another has taken:
//     whoever learns of it proposes the change. No quorum is asked, for the store decides: its key
//     changes once, whoever cannot reach it changes nothing, and what is said is certain.
//   - A link that is missing between two lives that are both registered: all machines compute from
//     the same reports, with [Keep], which of the two goes. Whoever goes misses a link to one who
//     stays. So of two that miss only each other exactly one goes, and of two that miss others too,
//     both may.
//   - Being late ([Late]): a rank that waits in vain for another knows only that the two are not at
//     the same place. It votes, in its report, for two windows or until it takes that back
//     ([OnTime]); a life goes when more than half of the lives in the view vote so. Only who votes
//     itself proposes that: once all have taken their votes back and have nothing proposed, none of
//     those votes removes anybody. A rank that is early and alone removes nobody. Two that do not
//     hear each other may both be late for most ranks, and both go. With [Missed] in its place,
//     which a program has to ask for, any rank decides.
//   - On demand ([Evict]): the program decides, at any rank.
//
// # Coming in
//
// A process that comes back, or a new one, is a joiner: a machine whose life is not in its view. It
// makes links with all that are active ([Warm]), while they go on undisturbed, and then asks to be
// let in ([AskJoin]). It never proposes. Members let it in when the program says so ([Admit]: all
// that wait, in one change, together with removals that are due), or at once (Config.AutoAdmit),
// and never into a slot that is taken: somebody must have found the old life dead, or out of reach,
// first. A slot is left in one epoch and entered in a later one. A life that was removed never
// comes back: what it asked is refused because a life has left the slot since, and if its process
// lives, it learns of it ([Evicted]) and may [Rejoin] as another life.
//
// # After a change
//
// [View.Subset] says what a view means for a subgroup. Package resync decides where the sequence of
// operations goes on in a new view.
//
// # The contract of the driver
//
// One Step at a time. Actions of one Step are done in their order; what takes time is answered
// later by an event.
//
//   - Propose: CompareAndSwap(Old.Encode(), New.Encode()) on the view's key, answered by exactly
//     one [Proposed]. On a conflict Current is what is there. An error is [OutcomeUnknown]; nobody
//     has to find out whether the write happened, since the same view never comes back.
//   - Probe: answered by exactly one [Probed] in bounded time. Dead must be certain: the peer's
//     machine answers and no such process is there. A refused connection is that, silence is not.
//   - Warm: answered by LinkUp or LinkDown; both ends of a link are told of it. While a link is
//     down between members the driver may try to make it anew, and says LinkUp if it can.
//   - Report, AskJoin, UnaskJoin: put under the rank's lease, in place of what was there; again
//     until the store has it, unless there is something newer to put.
//   - Enter: if Removed is not empty, end the running operation and whatever else belongs to the
//     old epoch. Then go to the view, as package resync says. If only Added, do so at a boundary
//     that all members agree on.
//   - Evicted: close the links, take the report, the wish to join and the record away. Isolated,
//     Reunited: tell the program.
//
// And it watches the store: the view's key, the records of ranks (a record that is gone, or has
// another incarnation, makes its life Dead), the reports and the wishes to join. At the beginning,
// and after the store was away, it tells the present state of all of that before it says
// [StoreBack]; of one key it reports changes in order. A lease must run out in less than
// Config.Window: a window is for two ranks that live, and one that died silently must be known to
// be dead before it is over, else the wrong one may be put out. Ticks come regularly; nothing but
// windows, retries and turns depends on them.
package membership
