package pg

import (
	"context"
	"errors"

	"tutti/collectives"
	"tutti/pg/internal/exec"
	"tutti/pg/membership"
)

// Admit lets ranks in that wait to join: replacements of lost ones, and new ones up to
// Config.MaxSize. It is a collective, for a step boundary: all ranks call it, and when it returns
// all are in the view in which all that were waiting are active, if there were any. It returns how
// many came in, the same number at every rank. A rank that comes in returns from Join meanwhile;
// the program then brings it up to date, by a Broadcast of the model's state for example.
func (g *Group) Admit(ctx context.Context) (int, error) {
	if g.incarnations != nil {
		return 0, &ArgumentError{Call: "admit", Arg: "the group", Got: "a subgroup",
			Want: "the group of all ranks: subgroups are made anew by Split"}
	}
	if g.job.roster == nil {
		return 0, nil
	}
	late := exec.Call{Kind: collectives.AllReduce, DType: Uint64, Op: Max, Count: admitFields}
	if err := g.enter(ctx, "admit", func() { g.expired(late) }); err != nil {
		return 0, err
	}
	defer g.leave()
	return g.admit(ctx, g.shown.Load().epoch)
}

// What the ranks tell each other in Admit. The largest of each counts.
const (
	goal   = iota // the view that the lowest rank's membership has come to
	latest        // the latest view that a rank is in, and the complement of the earliest
	early
	arrived // how many lives are in it that a program does not know of
	coming  // and will be in the goal
	agreed  // agreements so far
	admitFields
)

// admit agrees with all other ranks, those that come in meanwhile included, that everybody is in
// who is to be. since is the view up to which this rank's program knows who is there. All that
// decides what becomes of it, and the outcome, is in the result of a uniform allreduce: none of it
// is what this rank happens to know.
func (g *Group) admit(ctx context.Context, since uint64) (int, error) {
	news := func(v membership.View, since uint64) (n uint64) {
		for _, s := range v.Slots {
			if s.Since > since {
				n++
			}
		}
		return n
	}
	for {
		var lost *RankError
		if err := g.ready(); errors.As(err, &lost) && g.err == nil {
			continue // the others are past an operation that this rank did not begin
		} else if err != nil {
			return 0, err
		}
		said := []uint64{latest: g.v.job.Epoch, early: ^g.v.job.Epoch, arrived: news(g.v.job, since), agreed: g.ballot.count()}
		if g.v.Active[0] == g.rank {
			g.job.proxy.Unlock()
			v, err := g.job.roster.Admit(ctx)
			g.job.proxy.Lock()
			if err != nil {
				g.job.log.Warn("nobody could be admitted", "err", err)
			} else {
				said[goal], said[coming] = v.Epoch, news(v, since)
			}
		}
		b := bufferOf(said)
		c, err := g.check(&exec.Request{Kind: collectives.AllReduce, Op: Max, Dst: b, Src: b})
		if err == nil {
			c.Uniform = true
			g.run.Adopt(c)
			_, err = g.collective()
		}
		if errors.As(err, &lost) && g.err == nil { // all survivors see it alike
			continue
		}
		if err != nil {
			return 0, err
		}
		g.job.log.Debug("admit", "seq", g.seq, "epoch", g.v.job.Epoch, "attempt", g.sync.At().Attempt,
			"since", since, "said", said)
		there := said[goal] <= said[latest] && said[latest] == ^said[early]
		if there {
			g.join(said[agreed])
			return int(said[arrived]), nil
		}
		if to := max(said[goal], said[latest]); to > g.v.epoch {
			g.sync.Aim(to)
			if err := g.move(g.standing(), false); err != nil {
				g.fails(err)
				return 0, err
			}
			if g.err != nil {
				return 0, g.err
			}
		}
		if g.sync.Aim(0); g.job.settings.AutoAdmit { // who comes in does not know that there was an Admit
			return int(max(said[arrived], said[coming])), nil
		}
	}
}
