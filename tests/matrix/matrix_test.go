//go:build linux

// Package matrix checks every operation, type, reduction, transport and a spread of rank counts
// through the command that people would use for it.
package matrix

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tutti/internal/proctest"
)

func TestBenchFindsNothingWrong(t *testing.T) {
	tutti := filepath.Join(t.TempDir(), "tutti")
	if out, err := exec.Command("go", "build", "-o", tutti, "tutti/cmd/tutti").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, mode := range []struct {
		flags []string
		ranks []int
	}{
		{[]string{"--transport", "shm"}, []int{2, 3, 1, 5, 8}},
		{[]string{"--transport", "shm", "--registered"}, []int{2, 3, 4}},
		{[]string{"--transport", "tcp"}, []int{2, 3, 5}},
		{[]string{"--transport", "inproc"}, []int{2, 3, 8}},
	} {
		if testing.Short() {
			mode.ranks = mode.ranks[:2]
		}
		for _, n := range mode.ranks {
			t.Run(fmt.Sprintf("%v/%d", mode.flags[1:], n), func(t *testing.T) {
				factor := "60"
				if n > 4 { // more ranks than cores: one small size and one large one
					factor = "3600"
				}
				args := append([]string{"bench", "-n", fmt.Sprint(n), "--op", "all", "--dtype", "all", "--redop", "all",
					"--min", "60", "--max", "256K", "--factor", factor,
					"--iters", "2", "--rounds", "1", "--warmup", "0", "--json", "--timeout", "60s"}, mode.flags...)
				p := proctest.Run(t, exec.Command(tutti, args...))
				p.Patience = 3 * time.Minute
				if p.End(0); t.Failed() {
					return
				}
				seen := map[string]bool{}
				rows := 0
				for line := range strings.Lines(p.Out.String()) {
					var row struct {
						Op, DType, Redop string
						Ranks            int
						Wrong            *int
					}
					if err := json.Unmarshal([]byte(line), &row); err != nil {
						t.Fatalf("%q: %v", line, err)
					}
					if row.Wrong == nil || *row.Wrong != 0 || row.Ranks != n {
						t.Errorf("%s", line)
					}
					seen[row.Op+" "+row.DType+" "+row.Redop] = true
					rows++
				}
				if len(seen) < 200 || rows < 400 {
					t.Errorf("%d rows of %d combinations: were all of them run?", rows, len(seen))
				}
			})
		}
	}
}
