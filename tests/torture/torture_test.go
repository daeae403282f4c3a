//go:build linux

package torture

import (
	"flag"
	"math/rand/v2"
	"regexp"
	"strings"
	"testing"
	"time"

	"tutti/tests/internal/rig"
)

var (
	seed = flag.Uint64("torture.seed", 1, "of TestTorture, to have the same programs again; 0: by chance")
	job  = flag.Int("torture.job", 0, "number of the first job of TestTorture")
	ops  = flag.Int("torture.ops", 0,
		"operations of TestTorture, for each transport; 0: as many as there is time for")
	duration  = flag.Duration("torture.duration", 0, "of TestTorture, for all transports together; 0: some seconds")
	transport = flag.String("torture.transport", "shm,tcp,hosts,soft,inproc", "transports of TestTorture")
	faults    = flag.Float64("torture.faults", 0.15, "part of the programs that have faults from outside")
	out       = flag.String("torture.out", "",
		"directory for what TestTorture finds: it goes on then, and fails at its end")
	ignore = flag.String("torture.ignore", "", "findings that match this expression are not reported")
	avoid  = flag.String("torture.avoid", "",
		"what programs do not have: windows (of disturbance), groups (during faults), free, cancel, kill, stop, "+
			"evicts, standby, grow, gpus, …")
	verbose   = flag.Bool("torture.slow", false, "log calls that take longer than a second")
	shrinking = flag.Duration("torture.shrink", time.Minute, "how long a failing program is made smaller")
)

func TestMain(m *testing.M) { rig.Main(m, Play) }

// TestTorture runs random programs. For hours:
//
//	go test ./tests/torture -run TestTorture -v -timeout 0 -torture.duration 4h -torture.out /tmp/found
func TestTorture(t *testing.T) {
	from := *seed
	if from == 0 {
		from = rand.Uint64()
	}
	all := strings.Split(*transport, ",")
	d := *duration
	if d == 0 && *ops == 0 {
		d = 4 * time.Second
	}
	var found []*Found
	for _, tr := range all {
		t.Run(tr, func(t *testing.T) {
			o := Options{Transport: tr, Seed: from, Job: *job, Ops: *ops, Duration: d / time.Duration(len(all)),
				Faults: *faults, Avoid: *avoid, Verbose: *verbose, Out: *out, Shrink: *shrinking}
			if *ignore != "" {
				o.Ignore = regexp.MustCompile(*ignore)
			}
			t.Logf("to have the same programs again: -torture.seed %#x -torture.job %d", from, *job)
			sum := Run(t, o)
			var b strings.Builder
			sum.Print(&b, tr)
			t.Log(b.String())
			found = append(found, sum.Findings...)
		})
	}
	for _, f := range found {
		t.Logf("found: %.2000s", f) // once more at the end of a long output
	}
}
