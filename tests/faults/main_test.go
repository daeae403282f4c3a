//go:build linux

// Package faults tests whole jobs, as a user starts them, under faults: dead, stopped and hostile
// processes, a store that goes away, wrong settings and scarce resources. After each fault every
// rank continues or returns a precise error, in bounded time, and nothing is left behind.
package faults

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"tutti/bootstrap"
	"tutti/internal/proctest"
	"tutti/tests/internal/rig"
)

func TestMain(m *testing.M) { rig.Main(m, nil) }

var secret = bootstrap.NewSecret()

// startStore starts a store as a process of the stage.
func startStore(t *testing.T, s *rig.Stage, kind rig.StoreKind) (p *proctest.Child, address string) {
	t.Helper()
	return s.Store(nil, kind, secret, "")
}

// startRank starts a rank without a launcher. More settings override those that are usual.
func startRank(t *testing.T, s *rig.Stage, address string, rank, size int, more ...string) *proctest.Child {
	t.Helper()
	env := []string{"RANK=" + strconv.Itoa(rank), "WORLD_SIZE=" + strconv.Itoa(size), "TUTTI_JOB=faults",
		"TUTTI_STORE=" + address, "TUTTI_SECRET=" + secret}
	return s.Start(append(env, more...), proctest.Self())
}

// blames checks that every rank has a fault of this kind with a text that contains all of texts.
func blames(t *testing.T, all []rig.Reply, ranks []*rig.Rank, kind string, texts ...string) {
	t.Helper()
	for i, a := range all {
		if a.Fault == nil {
			t.Errorf("rank %d has no error", ranks[i].Number)
			continue
		}
		if kind != "" && a.Fault.Kind != kind {
			t.Errorf("rank %d: %v, want an error of kind %s", ranks[i].Number, a.Fault, kind)
		}
		for _, text := range texts {
			if !strings.Contains(a.Fault.Text, text) {
				t.Errorf("rank %d: %v, want %q in it", ranks[i].Number, a.Fault, text)
			}
		}
		if a.Took > time.Minute {
			t.Errorf("rank %d: it took %v", ranks[i].Number, a.Took.Round(time.Millisecond))
		}
	}
}

// without returns the ranks but one.
func without(ranks []*rig.Rank, but int) (others []*rig.Rank) {
	for _, r := range ranks {
		if r.Number != but {
			others = append(others, r)
		}
	}
	return others
}
