package membership

import (
	"fmt"
	"strings"
)

// Event is an argument of Machine.Step: one of the types of this file that implement it. A machine
// keeps no memory of the caller except the Slots of views, which are immutable.
type Event interface{ event() }

// LinkUp says that the link to this incarnation works (again). Events of links come from this
// process's own transports, in order.
type LinkUp struct{ Peer }

// LinkDown says that the link to this incarnation broke, or could not be made. It is evidence.
type LinkDown struct {
	Peer
	Cause string
}

// Dead says that this incarnation has ended: its lease expired, its record was removed, its process
// is known to have ended, or it left. It is a verdict: it must be certain, and the incarnation is
// removed at once.
type Dead struct {
	Peer
	Cause string
}

// Verdict is the answer to a Probe.
type Verdict uint8

// Verdicts. VerdictDead requires certainty (the machine answers, the process is not there); silence
// is VerdictUnknown.
const (
	VerdictUnknown Verdict = iota
	VerdictAlive
	VerdictDead
)

// Probed answers a Probe, once.
type Probed struct {
	Peer
	Verdict Verdict
}

// ViewSeen is a view that is or was in the store. Views may come in any order, repeatedly.
type ViewSeen struct{ View View }

// Outcome is the result of a proposal.
type Outcome uint8

// Outcomes. OutcomeUnknown: the store did not answer, so that the write may have happened, may not
// have, or may still happen. OutcomeHeld: it does not happen, since a rank in Propose.Stay has no
// record.
const (
	OutcomeUnknown Outcome = iota
	OutcomeWon
	OutcomeLost
	OutcomeHeld
)

// Proposed answers a Propose, once. Epoch is that of its New; Current, with OutcomeLost, is the
// view that is in the store; Cause, with OutcomeUnknown, is the store's error.
type Proposed struct {
	Epoch   uint64
	Outcome Outcome
	Current View
	Cause   string
}

// Reported is what a peer published with its Report. Reports may be repeated and late; the last one
// of each incarnation counts.
type Reported struct {
	Peer
	Report Report
}

// JoinAsked says that a new incarnation published AskJoin: it is linked with all that are active in
// Epoch, and waits for admission.
type JoinAsked struct {
	Peer
	Epoch uint64
}

// JoinGone ends JoinAsked: the incarnation gave up waiting, or published UnaskJoin.
type JoinGone struct{ Peer }

// Admit says that the program is at a step boundary: all joiners that wait, and can be admitted,
// are.
type Admit struct{}

// Missed says that this incarnation is alive but stuck, and that the program's policy lets any rank
// evict it. It is a verdict.
type Missed struct{ Peer }

// Late says that an operation of this rank has waited in vain for this incarnation, whose process
// may be healthy. It is this rank's vote, for some time or until OnTime; see Report.
type Late struct{ Peer }

// OnTime withdraws Late: this rank has had a message of the incarnation, or does not wait for
// others' votes any longer.
type OnTime struct{ Peer }

// Evict removes the active incarnation in Slot, at a program's request. It has no effect on the
// only active one, and none any more on the machine's own one when that has become the only one.
type Evict struct{ Slot int }

// Rejoin makes an evicted machine a joiner, for the same slot with a new incarnation. All links
// count as down: they belonged to the old incarnation.
type Rejoin struct{ Incarnation uint64 }

// StoreAway says that the store cannot be reached; nothing is proposed until StoreBack.
type StoreAway struct{ Cause string }

// StoreBack ends StoreAway. The windows of missing links begin anew.
type StoreBack struct{}

// Tick is the passing of one unit of time.
type Tick struct{}

// Close ends the machine. Later events have no effect.
type Close struct{}

func (LinkUp) event()    {}
func (LinkDown) event()  {}
func (Dead) event()      {}
func (Probed) event()    {}
func (ViewSeen) event()  {}
func (Proposed) event()  {}
func (Reported) event()  {}
func (JoinAsked) event() {}
func (JoinGone) event()  {}
func (Admit) event()     {}
func (Missed) event()    {}
func (Late) event()      {}
func (OnTime) event()    {}
func (Evict) event()     {}
func (Rejoin) event()    {}
func (StoreAway) event() {}
func (StoreBack) event() {}
func (Tick) event()      {}
func (Close) event()     {}

// Action is a task for the driver: one of the types below. Actions of one Step are independent, and
// carried out in their order. Their memory belongs to the driver, except the Slots of views, which
// are immutable.
type Action interface {
	action()
	String() string
}

// Propose asks for a compare-and-swap of the view in the store, from Old.Encode() to New.Encode().
// Proposed answers it. At most one is unanswered.
//
// Stay are other ranks that stay, while some that have no link to them leave for that reason. Such
// a choice is between ranks that live, so the driver first looks for the records of Stay.
type Propose struct {
	Old, New View
	Stay     []Peer
}

// Enter says that this view is now current. Removed are the slots that an incarnation has left
// since the last view, Added those that one has entered. A slot may be in both; an incarnation that
// came and left in between is in Removed. If Removed is not empty, the running epoch is aborted;
// else the program enters the view at a boundary of operations. For a joiner it is the beginning:
// Removed is empty, and Added has its own slot.
type Enter struct {
	View           View
	Removed, Added []int
}

// Probe asks whether the process of this incarnation is alive. Probed answers it, after bounded
// time.
type Probe struct{ Peer }

// Report is a rank's evidence: the active incarnations that it cannot reach, ascending by slot. As
// an action it asks to publish it to all ranks, in place of the last one; an empty list withdraws
// it. Seq orders the reports of one incarnation; Epoch, that of its view, is for display.
//
// Late are its votes: the incarnations that its operations wait for in vain. One is removed when
// more than half of the incarnations in the view vote so.
type Report struct {
	Epoch, Seq  uint64
	Unreachable []Peer
	Late        []Peer
}

// Warm asks for a link with this incarnation. LinkUp or LinkDown answers it; after LinkDown it is
// repeated, after pauses that grow to 512 ticks.
type Warm struct{ Peer }

// AskJoin asks to publish that this incarnation is linked with all active ones of Epoch and waits
// for admission, in place of its last request.
type AskJoin struct {
	Peer
	Epoch uint64
}

// UnaskJoin withdraws AskJoin: a link broke, or another incarnation has the slot.
type UnaskJoin struct{ Peer }

// Evicted says that this incarnation was removed, or may have been, although it is alive. Only
// Rejoin follows.
type Evicted struct{ View View }

// Isolated says that this rank needs to remove others and cannot: the store is away, and this rank
// possibly on the minority side of a partition, or the store does not accept the change. Another
// Isolated follows when the reason changes. Reunited ends it.
type Isolated struct{ Why string }

// Reunited ends Isolated: the store answers, or there is nothing to decide.
type Reunited struct{}

func (Propose) action()   {}
func (Enter) action()     {}
func (Probe) action()     {}
func (Report) action()    {}
func (Warm) action()      {}
func (AskJoin) action()   {}
func (UnaskJoin) action() {}
func (Evicted) action()   {}
func (Isolated) action()  {}
func (Reunited) action()  {}

func (a Propose) String() string {
	left, entered := a.New.Diff(a.Old.Epoch)
	return "propose " + a.New.String() + changes(left, entered)
}

func (a Enter) String() string { return "enter " + a.View.String() + changes(a.Removed, a.Added) }
func (a Probe) String() string { return "probe " + a.Peer.String() }
func (a Warm) String() string  { return "warm " + a.Peer.String() }
func (a AskJoin) String() string {
	return fmt.Sprintf("ask to join as %s, linked with epoch %d", a.Peer, a.Epoch)
}
func (a UnaskJoin) String() string { return "take back the wish to join as " + a.Peer.String() }
func (a Evicted) String() string   { return "evicted: " + a.View.String() }
func (a Isolated) String() string  { return "isolated: " + a.Why }
func (a Reunited) String() string  { return "reunited" }

func (r Report) String() string {
	list := func(peers []Peer) string {
		who := make([]string, len(peers))
		for i, p := range peers {
			who[i] = p.String()
		}
		if len(who) == 0 {
			who = []string{"none"}
		}
		return strings.Join(who, " ")
	}
	s := fmt.Sprintf("report #%d in epoch %d: cannot reach %s", r.Seq, r.Epoch, list(r.Unreachable))
	if len(r.Late) > 0 {
		s += ", waits in vain for " + list(r.Late)
	}
	return s
}

func changes(removed, added []int) string {
	s := ""
	if len(removed) > 0 {
		s += "; out " + ranges(removed)
	}
	if len(added) > 0 {
		s += "; in " + ranges(added)
	}
	return s
}
