package pg

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tutti/collectives"
	"tutti/internal/tuning"
	"tutti/p2p/registry"
	"tutti/pg/internal/exec"
	"tutti/pg/internal/join"
)

// TableHash lets tests of package pg_test see by which table a group chooses.
func TableHash(g *Group) uint64 { return g.v.Table.Hash() }

// ringTable is one that chooses Ring for every allreduce of n ranks on one host.
func ringTable(t *testing.T, n int) *collectives.Table {
	t.Helper()
	table, err := collectives.NewTable(map[collectives.Kind][]collectives.Rule{collectives.AllReduce: {
		{When: collectives.IfOneHost, MinRanks: n, MaxRanks: n, Algo: collectives.Ring}}})
	if err != nil {
		t.Fatal(err)
	}
	return table
}

func tuneFile(t *testing.T, m tuning.Machine, table *collectives.Table) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "tune.json")
	if err := tuning.New(m, table).Save(path); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestTunedSettings: where the path comes from, and what a rank says about a table that it refuses.
func TestTunedSettings(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("XDG_CONFIG_HOME", dir)
	here := tuning.Here(4, registry.Best(registry.Kinds(), registry.Options{}).Name)
	table := ringTable(t, 4)
	good := tuneFile(t, here, table)
	foreign := tuneFile(t, tuning.Here(3, registry.Best(registry.Kinds(), registry.Options{}).Name), table)
	broken := filepath.Join(dir, "broken")
	if err := os.WriteFile(broken, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	run := func(env, path string, localRank int) (*collectives.Table, string) {
		var log bytes.Buffer
		s, err := Config{Tuning: path, Logger: slog.New(slog.NewTextHandler(&log,
			nil))}.resolve(func(name string) string {
			return map[string]string{"TUTTI_RANK": fmt.Sprint(localRank), "TUTTI_SIZE": "8",
				"TUTTI_LOCAL_RANK": fmt.Sprint(localRank), "TUTTI_LOCAL_SIZE": "4", "TUTTI_TUNE": env}[name]
		})
		if err != nil {
			t.Fatal(err)
		}
		return s.tuned(), log.String()
	}
	for _, c := range []struct {
		env, path string
		localRank int
		used      bool
		says      string // in the one line
	}{
		{"", "", 0, false, ""}, // nothing in the default place
		{good, "", 0, true, ""},
		{foreign, good, 0, true, ""}, // Config wins
		{good, tuning.Off, 0, false, ""},
		{tuning.Off, "", 0, false, ""},
		{foreign, "", 0, false, "foreign: measured with 3 ranks on a machine, here are 4"},
		{foreign, "", 1, false, ""}, // said by the first rank of the machine
		{broken, "", 0, false, "malformed"},
		{filepath.Join(dir, "none"), "", 0, false, "unreadable"},
	} {
		got, log := run(c.env, c.path, c.localRank)
		if c.used != (got != nil && got.Hash() == table.Hash()) || !c.used && got != nil {
			t.Errorf("%+v: %v", c, got)
		}
		if lines := strings.Count(log, "\n"); !strings.Contains(log, c.says) || lines > 1 ||
			(lines == 1) != (c.says != "") {
			t.Errorf("%+v: log %q", c, log)
		}
	}
	for at, says := range map[string]string{foreign: "", broken: "malformed"} { // in the default place
		b, err := os.ReadFile(at)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(filepath.Dir(tuning.DefaultPath()), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(tuning.DefaultPath(), b, 0o600); err != nil {
			t.Fatal(err)
		}
		if got, log := run("", "", 0); got != nil || (log == "") != (says == "") || !strings.Contains(log, says) {
			t.Errorf("%s in the default place: %v, log %q", at, got, log)
		}
	}
	if err := tuning.New(here, table).Save(tuning.DefaultPath()); err != nil {
		t.Fatal(err)
	}
	if got, log := run("", "", 0); got.Hash() != table.Hash() || log != "" {
		t.Errorf("the default place: %v, log %q", got, log)
	}
	t.Setenv("XDG_CONFIG_HOME", os.DevNull)
	if got, log := run("", "", 0); got != nil || log != "" {
		t.Errorf("a user without a directory: %v, log %q", got, log)
	}
	if got, log := run(tuning.DefaultPath(), "", 0); got != nil || !strings.Contains(log, "unreadable") {
		t.Errorf("a path below a file: %v, log %q", got, log)
	}
}

// Measurements of other plans do not count. Builds that are not released have only tuning.Format to
// tell them apart.
func TestTuningFormatFollowsPlans(t *testing.T) {
	if got, want := [2]int{planFormat, tuning.Format}, [2]int{6, 6}; got != want {
		t.Errorf("planFormat and tuning.Format are %v, were %v: raise the second with the first, then both here",
			got, want)
	}
}

// TestSetAlgorithm: it is used, it is a collective setting, and it ends.
func TestSetAlgorithm(t *testing.T) {
	each(t, 3, Config{}, func(ctx context.Context, g *Group) error {
		for _, name := range []string{"ring", "oneshot", "auto", "doubling", "loadstore"} {
			if err := g.SetAlgorithm(name); err != nil {
				return err
			}
			for range 3 {
				x := []int64{int64(g.Rank()), 1}
				if err := AllReduce(ctx, g, x, Sum); err != nil {
					return err
				}
				if x[0] != 3 || x[1] != 3 {
					return fmt.Errorf("%s: %v", name, x)
				}
			}
			a, _ := collectives.ParseAlgo(name)
			if b := g.run.Bound(); (b == nil || b.Algo() != a) && name != "auto" && name != "loadstore" {
				return fmt.Errorf("%s: ran %+v", name, b)
			}
		}
		if err := g.SetAlgorithm("fast"); !errors.As(err, new(*ArgumentError)) {
			return fmt.Errorf("an algorithm that is none: %v, want an *ArgumentError", err)
		}
		return nil
	})
	each(t, 2, Config{}, func(ctx context.Context, g *Group) error {
		if err := g.SetAlgorithm([]string{"ring", "oneshot"}[g.Rank()]); err != nil {
			return err
		}
		var differ *MismatchError
		if err := AllReduce(ctx, g, []int64{1}, Sum); !errors.As(err, &differ) ||
			!strings.Contains(err.Error(), "ring") || !strings.Contains(err.Error(), "oneshot") {
			return fmt.Errorf("ranks with different algorithms: %v", err)
		}
		return nil
	})
}

// Ranks use their table if all have the same, and it was measured with as few or as many processors
// as they have; else the default one, and one line says so.
func TestDifferentTablesAreRefused(t *testing.T) {
	table := ringTable(t, 3)
	own, def := table.Hash(), collectives.DefaultTable().Hash()
	rules := map[collectives.Kind][]collectives.Rule{collectives.AllReduce: table.Rules(collectives.AllReduce)}
	measured := map[bool]*collectives.Table{}
	for _, oversubscribed := range []bool{false, true} {
		var err error
		if measured[oversubscribed], err = collectives.NewMeasuredTable(rules, oversubscribed); err != nil {
			t.Fatal(err)
		}
	}
	apart, shared := measured[false].Hash(), measured[true].Hash()
	for _, c := range []struct {
		hashes []uint64
		share  bool // all ranks have one processor
		used   bool
	}{{[]uint64{own, own, own}, true, true}, {[]uint64{own, own, def}, true, false},
		{[]uint64{def, own, own}, true, false}, {[]uint64{own, 1, 2}, true, false},
		{[]uint64{apart, apart, apart}, true, false}, {[]uint64{apart, apart, apart}, false, true},
		{[]uint64{shared, shared, shared}, true, true}, {[]uint64{shared, shared, shared}, false, false},
		{[]uint64{apart, shared, apart}, false, false}} {
		lines := 0
		n := len(c.hashes)
		for r, hash := range c.hashes {
			var log bytes.Buffer
			js := &join.Settings{Rank: r}
			for _, x := range []*collectives.Table{table, measured[false], measured[true]} {
				if hash == x.Hash() {
					js.Table = x
				}
			}
			j := &job{log: slog.New(slog.NewTextHandler(&log, nil)), session: join.New(js)}
			j.session.Here.Table = hash
			for i, h := range c.hashes {
				p := join.Place{Table: h, Cores: 1, Incarnation: uint64(i) + 1}
				if !c.share {
					p.CPUs = uint64(i)
				}
				j.places = append(j.places, p)
			}
			j.places = append(j.places, join.Place{Table: 3, Incarnation: 9}) // of a rank that is lost
			g := &Group{job: j, rank: r, v: &groupView{ranks: upTo(n), Topology: exec.Topology{Size: n,
				Active: upTo(n)}}}
			g.run = exec.New(exec.Config{})
			g.locate(j.places)
			g.warn()
			if want := map[bool]uint64{true: c.hashes[0], false: def}[c.used]; g.v.Table.Hash() != want {
				t.Errorf("%+v: rank %d has %x, want %x", c, r, g.v.Table.Hash(), want)
			}
			lines += strings.Count(log.String(), "\n")
		}
		if (lines == 0) != c.used || lines > 1 {
			t.Errorf("%+v: %d lines of log", c, lines)
		}
	}
}

// A replacement with another table than the others has makes the job use the default one: one line
// says so, at whichever rank, and only in the view in which that changes.
func TestReplacementWithAnotherTable(t *testing.T) {
	table := ringTable(t, 3)
	own, def := table.Hash(), collectives.DefaultTable().Hash()
	for replaced := range 3 {
		lines := 0
		for r := range 3 {
			var log bytes.Buffer
			js := &join.Settings{Rank: r, Table: table}
			j := &job{log: slog.New(slog.NewTextHandler(&log, nil)), session: join.New(js)}
			j.session.Here.Table = own
			g := &Group{job: j, rank: r, v: &groupView{ranks: upTo(3), Topology: exec.Topology{Size: 3,
				Active: upTo(3)}}}
			g.run = exec.New(exec.Config{})
			places := func() (all []join.Place) {
				for i := range uint64(3) {
					all = append(all, join.Place{Table: own, CPUs: i, Cores: 1, Incarnation: i + 1})
				}
				return all
			}
			if j.places = places(); r != replaced {
				g.locate(j.places)
				g.warn()
			} else {
				j.session = join.New(&join.Settings{Rank: r})
				j.session.Here.Table = def
			}
			if log.Len() > 0 {
				t.Errorf("rank %d: %s", r, log.String())
			}
			j.places = places()
			j.places[replaced].Table = def
			for range 2 {
				g.locate(j.places)
			}
			if g.v.Table.Hash() != def {
				t.Errorf("rank %d has %x", r, g.v.Table.Hash())
			}
			lines += strings.Count(log.String(), "TUTTI_TUNE")
		}
		if lines != 1 {
			t.Errorf("rank %d is replaced: %d lines of log", replaced, lines)
		}
	}
}
