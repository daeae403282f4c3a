//go:build linux

package netns

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tutti/internal/proctest"
	"tutti/tests/internal/rig"
)

// TestBurstOfEndpoints: 10,000 operations that four endpoints start at once, each on a host of its
// own, two of them behind a link that is slow and loses frames. They are those of the test
// TestRandomProcesses of package endpoint, which checks every byte: once in peace, and once while
// connections are shut down.
func TestBurstOfEndpoints(t *testing.T) {
	program := filepath.Join(t.TempDir(), "endpoint.test")
	build := exec.Command("go", "test", "-c", "-o", program, "./endpoint")
	build.Dir = rig.Module(t)
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go test -c ./endpoint: %v\n%s", err, out)
	}
	for _, kind := range []string{"burst", "killed"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			net := rig.NewSwitch(t, 4)
			net.LaySlow()
			var names []string
			for i, h := range net.Hosts {
				if names = append(names, h.Name); i < 2 {
					continue
				}
				if err := net.Slow(i, 2*time.Millisecond, 0.005); err != nil {
					t.Fatal(err)
				}
			}
			cmd := exec.Command(program, "-test.run", "^TestRandomProcesses$/^"+kind+"$", "-test.v",
				"-test.timeout", "2m", "-hosts", strings.Join(names, ","))
			p := proctest.Run(t, cmd)
			p.Patience = 3 * time.Minute
			p.End(0)
			out := p.Out.String()
			if !strings.Contains(out, "--- PASS: TestRandomProcesses/"+kind) {
				t.Error("the program has not run")
			}
			if net.Lost() == 0 {
				t.Error("the link lost no frame")
			}
			if !t.Failed() {
				t.Log(out)
			}
		})
	}
}
