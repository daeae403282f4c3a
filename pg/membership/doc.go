// Package membership decides which ranks belong to a job, and by which incarnation, while ranks
// die, are cut off from each other, come back, and join. It is the pure part: a state machine
// without I/O, clock or goroutine. A driver (package pg) feeds it events and carries out its
// actions.
//
// # Overview
//
// A job has slots 0..N-1, one for each rank. A rank that dies leaves a hole; ranks are never
// renumbered. A [View] lists the slots that are active in an epoch, each with an incarnation: a
// random number that a process takes when it starts, and a new one when it comes back. The truth is
// one key in the store, the encoded view, which changes only by compare-and-swap of the whole
// value. So epochs grow one by one, there is one view of each epoch, and a minority that cannot
// reach the store decides nothing. Any member may propose a change. If a proposer dies, the view
// has changed or it has not; if not, another member proposes the same. There is no coordinator.
//
// Every rank runs one [Machine]. [Machine.Step] feeds it one [Event] and returns [Action] values.
// Actions follow from the machine's state after the event, not from the event itself, so that the
// order and the number of events do not matter.
//
// # Evidence and verdict
//
// A verdict ([Dead], [Missed], [Evict]; and [Late], when there are enough) is certain. A machine
// that learns of one proposes the view without that incarnation at once; all known verdicts go into
// one change. If no member would be left, the machine keeps its own incarnation, whatever the
// verdicts say, because a member has to decide on joiners. Nor does that incarnation leave later,
// if the only verdict on it was [Evict].
//
// Evidence is uncertain. After a broken link ([LinkDown]) the machine asks for the state of the
// process: [Probe]. If the process is gone, this is a verdict, and the survivors continue within
// milliseconds. If it is alive, or its state is unknown, two ranks that may both be alive cannot
// reach each other. The machine suspects the peer, and publishes that ([Report]). It waits for a
// window: the link may come back ([LinkUp] ends the suspicion), the lease may run out, other ranks
// may publish what they see. Then every machine computes from the same reports which ranks stay,
// with [Keep]: the largest set that it can find whose members all reach each other. A link counts
// as missing if either end says so. A rank without missing links always stays. Machines whose
// knowledge differs for a moment may propose different views; the store takes one of them, and the
// others compute again. A rank that finds itself outside of the set proposes its own removal, too.
// A rank that has no record any more is not preferred to one that lives ([Propose]).
//
// When the store comes back ([StoreBack]), all windows begin anew, and missing links are probed at
// once: an outage of the network takes away both, and the store is often back before the links.
// Verdicts do not wait. While the store never stays for a window, no rank is removed because of a
// missing link: such a decision needs the reports of the others.
//
// Events apply to one incarnation only. Evidence about an incarnation that has left the view is
// dropped, and so are its reports. A report stays valid over a change of the view, because a link
// that was missing in one epoch is missing in the next. The next report of that incarnation
// replaces it; their numbers (Seq) tell which is later. Old views are dropped by their epoch.
//
// # Which rank decides about which
//
//   - A process that has ended, a lease that has run out, an incarnation whose slot another has
//     taken: any machine that learns of it proposes the change. No quorum is needed: the
//     information is certain, and the store changes its key once.
//   - A missing link between two registered incarnations: all machines compute from the same
//     reports, with [Keep], which of the two is removed. A removed rank has no link to one that
//     stays. So of two that miss only each other exactly one is removed; of two that miss others
//     too, both may be.
//   - Being late ([Late]): a rank that waits in vain for another knows only that the two are not
//     at the same operation. It votes, in its report, for two windows or until it withdraws the
//     vote ([OnTime]). An incarnation is removed when more than half of the incarnations in the
//     view vote so. Only a machine that votes itself proposes that: after all have withdrawn
//     their votes and have no proposal under way, none of those votes removes a rank. A rank that
//     is early and alone removes no other. Two that do not hear each other may both be late for
//     most ranks, and both be removed. With [Missed] in its place, which a program has to ask
//     for, any single rank decides.
//   - On demand ([Evict]): the program decides, at any rank.
//
// # Joining
//
// A process that comes back, or a new one, is a joiner: a machine whose incarnation is not in its
// view. It links with all active ranks ([Warm]), which continue undisturbed, and then asks to be
// admitted ([AskJoin]). It never proposes. Members admit it when the program says so ([Admit]: all
// that wait, in one change, together with removals that are due), or at once (Config.AutoAdmit).
// They never admit it into a slot that is taken: the old incarnation must have been found dead, or
// unreachable, first. A slot is left in one epoch and entered in a later one. An incarnation that
// was removed never comes back: its request is refused because an incarnation has left the slot
// since. If its process is alive, it learns of that ([Evicted]) and may [Rejoin] as another
// incarnation.
//
// # After a change
//
// [View.Subset] says what a view means for a subgroup. Package resync decides where the sequence of
// operations continues in a new view.
//
// # The contract of the driver
//
// The driver calls one Step at a time, and carries out the actions of a Step in their order. If an
// action takes time, an event answers it later.
//
//   - Propose: CompareAndSwap(Old.Encode(), New.Encode()) on the view's key, answered by exactly
//     one [Proposed]. On a conflict Current is the present view. An error is [OutcomeUnknown]; it
//     need not be found out whether the write happened, since the same view never comes back.
//     Before that the driver looks for the records of Stay. If one is gone, or has another
//     incarnation, it does not write: the answer is [OutcomeHeld] after Dead, or without it if
//     that proves nothing yet, because the ranks may have lost their leases together.
//   - Probe: answered by exactly one [Probed] in bounded time. Dead must be certain: the peer's
//     machine answers and no such process is there. A refused connection is certain, silence is
//     not.
//   - Warm: answered by LinkUp or LinkDown, at both ends. While a link between members is down
//     the driver may try to make it again, and says LinkUp if it succeeds.
//   - Report, AskJoin, UnaskJoin: written under the rank's lease, in place of the last value;
//     repeated until the store has it, unless there is a newer value.
//   - Enter: if Removed is not empty, end the running operation and all other state of the old
//     epoch. Then enter the view, as package resync says. If there is only Added, do so at a
//     boundary that all members agree on.
//   - Evicted: close the links, remove the record. The report and the request to join have no
//     effect any more, and end with the lease. Isolated, Reunited: tell the program.
//
// The driver also watches the store: the view's key, the reports and the requests to join. At the
// beginning, and after the store was away, it feeds the present state of all of these, before
// [StoreBack] or soon after it; changes of one key it feeds in order. It need not watch the records
// of ranks: probes ask for them, and proposals for those of Stay. A lease must run out in less than
// Config.Window: a window is for two ranks that are alive, and one that died silently must have no
// record when it ends, else the wrong one may be removed. Ticks come regularly; only windows,
// retries and turns depend on them.
package membership
