package pg

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"tutti/collectives"
	"tutti/internal/tuning"
	"tutti/p2p/registry"
	"tutti/pg/internal/join"
)

// tuned returns the measured table of algorithms of this rank, or nil if it has none that fits. One
// rank of each machine logs why a table does not fit, since they usually read the same file. One
// that nobody has named and that is for other ranks is no reason for a warning.
func (s *settings) tuned() *collectives.Table {
	t, err := tuning.Find(s.Tuning, tuning.Here(s.localRanks(), registry.Best(s.kinds, s.rdmaOptions()).Name))
	if err != nil {
		level := slog.LevelWarn
		if s.launch.LocalRank > 0 || s.Tuning == "" && errors.Is(err, tuning.ErrForeign) {
			level = slog.LevelDebug
		}
		s.Logger.Log(context.Background(), level, "algorithms are chosen by the default table, not by the measured one",
			"err", err)
		return nil
	}
	if t != nil {
		s.Logger.Debug("algorithms are chosen by a measured table", "hash", fmt.Sprintf("%016x", t.Hash()))
	}
	return t
}

// warn is untuned for a new job, at rank 0.
func (g *Group) warn() {
	if g.job.session.Self.Rank == 0 {
		g.untuned(g.job.places)
	}
}

// untuned warns if the group uses the default table because this rank's does not fit all ranks.
func (g *Group) untuned(places []join.Place) {
	j := g.job
	name := func(hash uint64) string {
		if hash == collectives.DefaultTable().Hash() {
			return "the default table"
		}
		return fmt.Sprintf("table %016x", hash)
	}
	if slot := g.differ(places); slot >= 0 {
		j.log.Warn("ranks differ in their tables of algorithms: all use the default one; give all ranks the same "+
			"TUTTI_TUNE", fmt.Sprintf("rank %d", j.session.Self.Rank), name(j.session.Here.Table),
			fmt.Sprintf("rank %d", g.v.ranks[slot]), name(places[g.v.ranks[slot]].Table))
	} else if !j.session.Table().Fits(len(g.v.Active), g.v.Hosts, g.v.Caps) {
		j.log.Warn("either these ranks share processors, or those did with which the table of algorithms was "+
			"measured: all use the default one; measure again with tutti tune on as many processors as the job has",
			"table", name(j.session.Here.Table))
	}
}

// SetAlgorithm forces an algorithm for the group's later collectives, where they have it, as
// Config.Algorithm does for a job; "auto" ends that. LoadStore applies to registered memory; other
// calls choose by size as before. All ranks must call it at the same point of the order of
// collectives, with no started operation in flight; ranks that differ get a *MismatchError. A rank
// that comes in later begins with Config.Algorithm, the same as the job's others at their start,
// and calls SetAlgorithm before its first collective. It is for measurements: by default the
// library chooses the fastest algorithm.
func (g *Group) SetAlgorithm(name string) error {
	a, err := collectives.ParseAlgo(name)
	if err != nil {
		return unreadable("setalgorithm", "the name", name, err)
	}
	if err := g.enter(context.Background(), "setalgorithm", nil); err != nil {
		return err
	}
	defer g.leave()
	g.replace(func(v *groupView) { v.Algo = a })
	g.run.Settle(g.v.Topology)
	return nil
}
