package pg

import (
	"context"
	"fmt"
	"log/slog"

	"tutti/collectives"
	"tutti/internal/tuning"
)

// tuned returns the measured table of algorithms that this rank would use, nil if it has none that fits. Of a machine's ranks, which mostly read the same
// file, one says why not.
func (s *settings) tuned() *collectives.Table {
	t, err := tuning.Find(s.Tuning, tuning.Here(s.localRanks(), s.kinds))
	if err != nil {
		level := slog.LevelWarn
		if s.launch.LocalRank > 0 {
			level = slog.LevelDebug
		}
		s.Logger.Log(context.Background(), level, "algorithms are chosen by the default table, not by the measured one", "err", err)
		return nil
	}
	if t != nil {
		s.Logger.Debug("algorithms are chosen by a measured table", "hash", fmt.Sprintf("%016x", t.Hash()))
	}
	return t
}

// agree makes this rank's table the job's if all ranks have it: they must choose alike. It is called once all have met, on every rank with the same outcome, and when
// others come in.
func (j *job) agree() {
	j.table = nil
	first := j.here.table
	for r, p := range j.places {
		if p.table == first || p.incarnation == 0 {
			continue
		}
		if j.self.Rank == 0 { // once a job
			name := func(hash uint64) string {
				if hash == collectives.DefaultTable().Hash() {
					return "the default table"
				}
				return fmt.Sprintf("table %016x", hash)
			}
			j.log.Warn("ranks differ in their tables of algorithms: all use the default one; give all ranks the same TUTTI_TUNE", "rank 0", name(first), fmt.Sprintf("rank %d", r), name(p.table))
		}
		return
	}
	j.table = j.tuned
}

// SetAlgorithm forces an algorithm for the group's collectives from now on, where it exists for the collective, as Config.Algorithm does for a whole job;
// "auto" ends that. Direct is for registered memory, all else goes by size as before. Every rank calls it at the same point of the order of collectives, with
// nothing that Start began under way; ranks that differ get a *MismatchError. It is for measurements: the library chooses well by itself.
func (g *Group) SetAlgorithm(name string) error {
	a, err := collectives.ParseAlgo(name)
	if err != nil {
		return err
	}
	g.enter()
	defer g.leave()
	g.run.algo, g.run.hot = a, hot{}
	return nil
}
