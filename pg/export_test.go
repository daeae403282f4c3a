package pg

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"tutti/pg/flight"
)

func init() {
	testHookChanged = func(g *Group) {
		if what := g.illegal(); what != "" {
			panic(fmt.Sprintf("rank %d, operation %d, %+v: %s", g.rank, g.seq, g.passage, what))
		}
	}
}

// illegal returns what contradicts the comment of passage, "" if nothing does. With the proxy's
// lock.
func (g *Group) illegal() string {
	switch {
	case g.between && !g.busy:
		return "a call is in Agree, and none has the turn"
	case g.parts && !g.closed.Load():
		return "the rank waits in Close, and the group is not closed"
	case g.joins && g.incarnations != nil:
		return "the rank comes into a subgroup"
	case g.joins && g.seq > 0:
		return "operations have run before the rank was in a view"
	case g.hint && !g.job.settings.AutoAdmit:
		return "the ranks are told that the job has grown, without AutoAdmit"
	case g.seq+1 < g.begins() && (len(g.skips) == 0 || g.skips[len(g.skips)-1].last+1 < g.begins()):
		return "an operation has ended before it was called, for no reason"
	case g.given != nil && !g.sync.Pending():
		return "an exchange is complete, and was given up"
	case !g.rough && g.sync.Pending():
		return "an exchange is under way, and the next operation does not look"
	case !g.rough && g.sync.Lost():
		return "a rank is lost, and the next operation does not look"
	}
	return ""
}

// SetTimeout has d bound the calls of this process from now on, in place of Config.Timeout. None is
// under way.
func (g *Group) SetTimeout(d time.Duration) { g.job.timeout = d }

// Stopped reports whether the channel of messages has failed, which only an abort makes it do.
func (g *Group) Stopped() bool {
	g.job.proxy.Lock()
	defer g.job.proxy.Unlock()
	return g.msgs.Err() != nil
}

// ForgetAbort has the group know no more of an abort than its channels do, as before the first call
// that asks them.
func (g *Group) ForgetAbort() {
	g.job.proxy.Lock()
	defer g.job.proxy.Unlock()
	g.aborted = nil
}

// SetStorePause has closed groups of this process ask the store again after d, until the test ends.
func SetStorePause(t *testing.T, d time.Duration) {
	before := storePause
	t.Cleanup(func() { storePause = before })
	storePause = d
}

// Awaited lists the ranks that the call under way waits for.
func (g *Group) Awaited() (ranks []int) {
	g.job.proxy.Lock()
	defer g.job.proxy.Unlock()
	if !g.busy {
		return nil
	}
	for _, m := range g.run.Missing(g.unheard()) {
		ranks = append(ranks, m.Rank)
	}
	return ranks
}

// Sent returns the number of bytes that this rank has sent to others.
func (g *Group) Sent(t *testing.T) (n uint64) {
	t.Helper()
	text, err := g.job.status(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	s, err := flight.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range s.Links {
		n += l.BytesSent
	}
	return n
}

// SentPast returns the number of bytes that this rank has sent to others past its caches.
func (g *Group) SentPast() (n uint64) {
	g.job.proxy.Lock()
	defer g.job.proxy.Unlock()
	for _, c := range g.job.proxy.Counts() {
		n += c.BytesPast
	}
	return n
}

// MakeAlone makes a subgroup of this rank as Split does when all ranks have met.
func (g *Group) MakeAlone() (*Group, error) {
	name := g.job.proxy.Reserve(2)
	defer g.job.proxy.Settle(name)
	self := g.job.session.Self
	g.job.proxy.Lock()
	view := g.job.view()
	g.job.proxy.Unlock()
	return newGroup(g.job, []int{self.Rank}, 0, name, []uint64{self.Incarnation}, []uint64{name.Number}, view, 0)
}

// JobView returns the slots that are active in the job's view; the group may not have entered it.
func (g *Group) JobView() []int {
	g.job.proxy.Lock()
	defer g.job.proxy.Unlock()
	return g.job.view().Active()
}

// Verdict returns the loss of rank, which reporter noticed, after the membership has decided on it.
func (g *Group) Verdict(rank, reporter int) RankError {
	g.job.proxy.Lock()
	defer g.job.proxy.Unlock()
	e := RankError{Rank: rank, Epoch: g.v.epoch, Reporter: reporter}
	g.verdict(&e)
	return e
}

// Loss is loss.
type Loss = loss

// LossOf makes a Loss.
func LossOf(slot int, epoch uint64, closed bool) Loss { return Loss{slot, epoch, closed} }

// Culprit is culprit.
func Culprit(slot, reporter int, losses []Loss) int { return culprit(slot, reporter, losses) }

// Down returns why rank cannot be reached.
func (g *Group) Down(rank int) error {
	g.job.proxy.Lock()
	defer g.job.proxy.Unlock()
	return g.job.proxy.Down(rank)
}

// JobEpoch returns the epoch of the job's view.
func (g *Group) JobEpoch() uint64 {
	g.job.proxy.Lock()
	defer g.job.proxy.Unlock()
	return g.job.view().Epoch
}

// Decides reports whether a call of Agree has all votes of agreement n, and asks the store.
func (g *Group) Decides(n uint64) bool {
	g.job.proxy.Lock()
	defer g.job.proxy.Unlock()
	return g.ballot.n == n && len(g.unvoted) == 0
}

// HearsOfView reports whether the rank in slot has said that it is in a later exchange.
func (g *Group) HearsOfView(slot int) bool {
	g.job.proxy.Lock()
	defer g.job.proxy.Unlock()
	to, told := g.sync.Heard(slot)
	return told && g.sync.At().Before(to.At)
}

// Skips returns the number of operations that exchanges have ended and the program has not called.
func (g *Group) Skips() int {
	g.job.proxy.Lock()
	defer g.job.proxy.Unlock()
	return max(0, int(g.begins())-1-int(g.seq))
}

// Called reports whether all other ranks of the group's view are in Recover, in a later exchange
// than this one.
func (g *Group) Called() bool {
	g.job.proxy.Lock()
	defer g.job.proxy.Unlock()
	active, _ := g.members(g.job.view())
	return !slices.ContainsFunc(active, func(slot int) bool {
		s, ok := g.sync.Heard(slot)
		return slot != g.rank && !(ok && s.Calls && g.sync.At().Before(s.At))
	})
}

// Copies returns how many visits of the group have used a staging buffer.
func (g *Group) Copies() uint64 {
	return g.devices.copies.Load()
}

// Direct returns how the group's calls use the memory of devices: see exec.Runner.Direct.
func (g *Group) Direct() (path string, err error) {
	g.job.proxy.Lock()
	defer g.job.proxy.Unlock()
	return g.run.Direct()
}
