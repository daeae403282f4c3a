//go:build cgo && linux

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"tutti/cmd/tutti/internal/bench"
	"tutti/internal/proctest"
	"tutti/rdma/rdmatest"
	"tutti/rdma/verbs"
)

// TestDeviceTransport: every operation has the right results over RDMA between 2 and 4 processes,
// and its data passes the device: frames in packets, and long puts directly.
func TestDeviceTransport(t *testing.T) {
	_, names := rdmatest.Devices(t, verbs.Load)
	sent := func() int { // packets
		b, err := os.ReadFile("/sys/class/infiniband/" + names[0] + "/ports/1/hw_counters/sent_pkts")
		n, nerr := strconv.Atoi(strings.TrimSpace(string(b)))
		if err != nil || nerr != nil {
			t.Fatal(err, nerr)
		}
		return n
	}
	for _, n := range []int{2, 4} {
		t.Run(fmt.Sprintf("%d ranks", n), func(t *testing.T) {
			s := newStage(t)
			before := sent()
			j := s.command("run", "-n", fmt.Sprint(n), "--transport", "rdma", "--no-prefix", "--", proctest.Self(),
				"bench", "--op", "all", "--min", "8", "--max", "64K", "--factor", "8192", "--iters", "1", "--rounds",
				"1", "--json")
			j.cmd.Env = append(j.cmd.Env, asRanks+"=1", "TUTTI_LEASE=60s", "TUTTI_LOG=info") // the machine is slow
			j.start()
			j.Patience = 4 * patience
			j.End(0)
			if t.Failed() {
				return
			}
			ops, bytes := map[string]bool{}, 0
			for line := range strings.Lines(j.Out.String()) {
				var r bench.Row
				if err := json.Unmarshal([]byte(line), &r); err != nil {
					t.Fatalf("%q: %v", line, err)
				}
				if r.Ranks != n || r.Wrong != 0 {
					t.Errorf("%s", line)
				}
				ops[r.Op] = true
				bytes = max(bytes, r.Bytes)
			}
			for _, op := range bench.Ops() {
				if !ops[op] {
					t.Errorf("no row of %s; stderr %q", op, j.Err.String())
				}
			}
			line := regexp.MustCompile(`the device has moved" rank=\d+ put=(\d+)`)
			moved := line.FindAllStringSubmatch(j.Err.String(), -1)
			for _, m := range moved {
				if k, err := strconv.Atoi(m[1]); err != nil || k < bytes {
					t.Errorf("%s bytes of puts were moved by the device (%v)", m[1], err)
				}
			}
			if len(moved) != n {
				t.Errorf("%d ranks say what their devices have moved; stderr %q", len(moved), j.Err.String())
			}
			// The largest packet has 4 KiB.
			if got := sent() - before; got < len(ops)*bytes>>12 {
				t.Errorf("%d packets were sent by %s", got, names[0])
			}
		})
	}
}
