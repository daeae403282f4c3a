//go:build linux

package main

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestMain(m *testing.M) {
	if os.Getenv(rankVariable) != "" { // the jobs of a test run its binary
		main()
		return
	}
	os.Exit(m.Run())
}

// Every figure of every part is measured, with few ranks and messages.
func TestAllFigures(t *testing.T) {
	if testing.Short() {
		t.Skip("runs jobs for some seconds")
	}
	file := filepath.Join(t.TempDir(), "scale.json")
	o, err := parseOptions([]string{"--ranks", "4", "--receives", "100", "--sends", "1000", "--rounds", "1",
		"--json", file})
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(filepath.Join(dir, "../..")) // the repository, whose tutti is built
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	var out strings.Builder
	if _, err := run(ctx, &out, o); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var rows []row
	if err := json.Unmarshal(b, &rows); err != nil {
		t.Fatal(err)
	}
	for _, p := range parts {
		for _, b := range p.bars {
			i := slices.IndexFunc(rows, func(r row) bool { return r.Part == p.name && r.Figure == b.Figure })
			if i < 0 || len(rows[i].Samples) != 1 || rows[i].Median < 0 || !strings.Contains(out.String(), b.Figure) {
				t.Errorf("%s: %q is not measured, or not printed: %+v\n%s", p.name, b.Figure, rows, &out)
			}
		}
	}
}

// A figure that misses its bar is marked, and the result says so.
func TestMissedBars(t *testing.T) {
	for _, c := range []struct {
		median float64
		least  bool
		missed bool
	}{{1, false, false}, {1.01, false, true}, {1, true, false}, {0.99, true, true}} {
		var out strings.Builder
		missed, err := report(&out, &options{}, []row{{Part: "p", Figure: "f", Samples: []float64{c.median},
			Median: c.median, Limit: 1, Least: c.least}})
		if err != nil || missed != c.missed || strings.Contains(out.String(), "missed") != c.missed {
			t.Errorf("%+v: missed is %v, %v:\n%s", c, missed, err, &out)
		}
	}
}

func TestOptionsAreChecked(t *testing.T) {
	for args, want := range map[string]string{
		"--parts start,none": "there is no part \"none\"",
		"--parts ,":          "no parts",
		"--ranks 3":          "at least 4 ranks",
		"more":               "unexpected argument",
	} {
		if _, err := parseOptions(strings.Fields(args)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
	}
}
