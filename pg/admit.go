package pg

import (
	"cmp"
	"context"
	"errors"

	"tutti/collectives"
	"tutti/pg/flight"
	"tutti/pg/internal/exec"
	"tutti/pg/membership"
)

// Admit admits the ranks that wait to join: replacements of lost ones, and new ones up to
// Config.MaxSize. It is a collective of all ranks, for a step boundary. When it returns, all ranks
// are in a view in which every rank that was waiting is active. It returns the number of ranks that
// came in, the same at every rank. The Join of an admitted rank returns meanwhile; the program then
// brings that rank up to date, for example by a Broadcast of the model's state.
//
// If the lowest rank cannot reach the store, or has no answer within two seconds, it logs that as a
// warning, and Admit returns without an error though ranks may still be waiting: a job does not
// stand still for want of its store. The next Admit asks again.
//
// In a job without a store, or over one without leases, nobody can come in. There Admit returns at
// once, with an error if the group cannot be used or ctx has ended.
func (g *Group) Admit(ctx context.Context) (int, error) {
	if g.incarnations != nil {
		return 0, &ArgumentError{Call: "admit", Arg: "the group", Got: "a subgroup",
			Want: "the group of all ranks: subgroups are made anew by Split"}
	}
	if g.job.roster == nil {
		return 0, g.usable(ctx, "admit")
	}
	if err := g.enter(ctx, "admit", func() { g.expired(admitCall, g.readyToAdmit) }); err != nil {
		return 0, err
	}
	defer g.leave()
	return g.admit(ctx, g.shown.Load().epoch)
}

// usable returns why a call that neither waits nor needs its turn cannot succeed, or nil.
func (g *Group) usable(ctx context.Context, what string) error {
	if ctx == nil {
		return noContext(what)
	}
	g.job.proxy.Lock()
	defer g.job.proxy.Unlock()
	if err := cmp.Or(g.halted(), g.err); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return &TimeoutError{Call: what, Reporter: g.rank, in: g.in, Err: err}
	}
	return nil
}

// Fields of the exchange in Admit. The maximum over all ranks counts.
const (
	goal   = iota // the view that the membership of the lowest rank has reached
	latest        // the latest view that a rank is in, and the complement of the earliest
	early
	arrived // ranks in the view that the program does not know of
	coming  // the same for goal
	agreed  // agreements so far
	admitFields
)

// admitCall is the exchange in Admit without its memory.
var admitCall = exec.Call{Kind: collectives.AllReduce, Op: Max, DType: Uint64, Count: admitFields, Uniform: true,
	For: flight.Call(flight.Admit)}

// readyToAdmit brings the group into a state in which the next operation of Admit can run. Those
// that other ranks have repeated, and this one has not begun, are passed over.
func (g *Group) readyToAdmit() error {
	for {
		g.run.Adopt(admitCall)
		if err := g.catchUp(); err != nil {
			return err
		}
		if s, ok := g.skip(); !ok {
			return nil
		} else if !s.loss {
			return s.why
		}
	}
}

// admit agrees with all other ranks, those that are coming in included, on a view that contains
// every waiting rank. since is the last view that this rank's program knows. All decisions depend
// only on the result of a uniform allreduce, and on what an exchange has told all ranks. The
// operation is repeated after the loss of a rank. If a rank gives up for another reason, all do.
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
		if err := g.readyToAdmit(); err != nil {
			return 0, err
		}
		said := []uint64{latest: g.v.job.Epoch, early: ^g.v.job.Epoch, arrived: news(g.v.job, since),
			agreed: g.ballot.count()}
		if g.v.Active[0] == g.rank {
			g.job.proxy.Unlock()
			v, err := g.job.roster.Admit(ctx)
			g.job.proxy.Lock()
			if err != nil { // the next call tries again
				g.job.log.Warn("could not admit waiting ranks", "err", err)
			} else {
				said[goal], said[coming] = v.Epoch, news(v, since)
			}
		}
		b := bufferOf(said)
		c, err := g.check(&exec.Request{Kind: collectives.AllReduce, Op: Max, Dst: b, Src: b})
		if err == nil {
			c.Uniform, c.For = true, admitCall.For
			g.run.Adopt(c)
			_, err = g.collective()
		}
		if err != nil {
			if _, other := g.reasons(g.seq); other == nil && errors.As(err, new(*RankError)) &&
				!errors.Is(err, errDeserted) && g.err == nil {
				continue
			}
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
				return 0, g.forgone(err)
			}
			if g.err != nil {
				return 0, g.refused()
			}
		}
		if g.sync.Aim(0); g.job.settings.AutoAdmit { // a rank that comes in does not call Admit
			return int(max(said[arrived], said[coming])), nil
		}
	}
}
