package membership

import (
	"fmt"
	"strings"
)

// Event is something that happened, told to Machine.Step: one of the types of this file that say
// so. A machine keeps no memory of the caller's but the Slots of views, which nobody changes.
type Event interface{ event() }

// LinkUp says that the link to this life works (again). Events of links come from this process's
// own transports, in the order in which things happened.
type LinkUp struct{ Peer }

// LinkDown says that the link to this life broke, or could not be made. It is evidence.
type LinkDown struct {
	Peer
	Cause string
}

// Dead says that this life is over: its lease expired, its record was removed, its process is known
// to have ended, it left in good order. It is a verdict: whoever says so is sure, and the life goes
// at once.
type Dead struct {
	Peer
	Cause string
}

// Verdict is the answer to a Probe.
type Verdict uint8

// Verdicts. VerdictDead is for certainty only (the machine answers, the process is not there);
// silence is VerdictUnknown.
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

// ViewSeen is a view that is or was in the store. They may come in any order, again and again.
type ViewSeen struct{ View View }

// Outcome is what became of a proposal.
type Outcome uint8

// Outcomes. OutcomeUnknown: the store did not answer, so that the write may or may not have
// happened, or may yet happen.
const (
	OutcomeUnknown Outcome = iota
	OutcomeWon
	OutcomeLost
)

// Proposed answers a Propose, once. Epoch is that of its New; Current, with OutcomeLost, is the
// view that is in the store; Cause, with OutcomeUnknown, is why nothing is known.
type Proposed struct {
	Epoch   uint64
	Outcome Outcome
	Current View
	Cause   string
}

// Reported is what a peer published with its Report. They may come again, and late; what counts of
// each life is its last.
type Reported struct {
	Peer
	Report Report
}

// JoinAsked says that a new life published AskJoin: it is linked with all that are active in Epoch,
// and waits to be let in.
type JoinAsked struct {
	Peer
	Epoch uint64
}

// JoinGone says that what JoinAsked said holds no more: the life gave up waiting, or published
// UnaskJoin.
type JoinGone struct{ Peer }

// Admit says that the program is at a step boundary: all that wait now, and can be let in now, are.
type Admit struct{}

// Missed says that this life is alive but stuck, and that the program's policy is that any rank
// evicts such a life by itself. It is a verdict.
type Missed struct{ Peer }

// Late says that an operation of this rank has waited in vain for this life, whose process may be
// well. It is this rank's vote, for some time or until OnTime; see Report.
type Late struct{ Peer }

// OnTime takes Late back: this rank has heard of the life, or will not wait for others' votes any
// longer.
type OnTime struct{ Peer }

// Evict puts the life out that is now active in Slot: somebody wants it so.
type Evict struct{ Slot int }

// Rejoin makes an evicted machine a joiner, for the same slot with a new incarnation. All links
// count as not made: they belonged to the old life.
type Rejoin struct{ Incarnation uint64 }

// StoreAway says that the store cannot be reached; nothing is proposed until StoreBack.
type StoreAway struct{ Cause string }

// StoreBack ends StoreAway.
type StoreBack struct{}

// Tick is the passing of one unit of time.
type Tick struct{}

// Close ends the machine: it does nothing any more.
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

// Action is something that the driver is to do: one of the types below. Actions of one Step are
// independent, and done in their order. What they hold belongs to the driver, except the Slots of
// views, which nobody changes.
type Action interface {
	action()
	String() string
}

// Propose asks for a compare-and-swap of the view in the store, from Old.Encode() to New.Encode().
// Proposed answers it. There is never more than one unanswered.
type Propose struct{ Old, New View }

// Enter says that this view is the present one. Removed are the slots that a life has left since
// the view before, Added those that a life has entered; a slot may be in both, and a life that came
// and went unseen is in Removed. If Removed is not empty, the running epoch is aborted; else the
// program goes over at a boundary of operations. For a joiner it is the beginning: Removed is
// empty, and Added has its own slot.
type Enter struct {
	View           View
	Removed, Added []int
}

// Probe asks whether the process of this life lives. Probed answers it, after bounded time.
type Probe struct{ Peer }

// Report is a rank's evidence: the active lives that it cannot reach, ascending by slot. As an
// action it asks to publish it where all ranks see it, in place of the one before; none unreachable
// takes it back. Seq orders the reports of one life; Epoch is that of its view, for people.
//
// Late are its votes: the lives that its operations wait for in vain. A life goes when more than
// half of the lives in the view vote so.
type Report struct {
	Epoch, Seq  uint64
	Unreachable []Peer
	Late        []Peer
}

// Warm asks to make a link with this life. LinkUp or LinkDown answers it; after LinkDown it is
// asked for again, later and later.
type Warm struct{ Peer }

// AskJoin asks to publish that this life is linked with all active lives of Epoch and wants to be
// let in, in place of what it asked before.
type AskJoin struct {
	Peer
	Epoch uint64
}

// UnaskJoin asks to take AskJoin back: a link broke, or another life has the slot.
type UnaskJoin struct{ Peer }

// Evicted says that this life was put out, or may have been, though it is alive. It is final, but
// for Rejoin.
type Evicted struct{ View View }

// Isolated says that this rank wants to remove others and cannot: the store is away, and this rank
// possibly on the minority side of a partition, or it does not take the change. Reunited ends it.
type Isolated struct{ Why string }

// Reunited says that Isolated does not hold any more: the store answers, or there is nothing to
// decide.
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
			who = []string{"nobody"}
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
