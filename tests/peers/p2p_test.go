//go:build linux

package main

import (
	"context"
	"encoding/json"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"tutti/internal/ports"
)

func TestParseP2P(t *testing.T) {
	o, err := parseP2P([]string{"--sizes", "1M,64", "--rounds", "2", "--depth", "3"})
	if err != nil || !slices.Equal(o.Sizes, []int64{64, 1 << 20}) || o.Rounds != 2 || o.depth != 3 {
		t.Errorf("%+v, %v", o, err)
	}
	for _, bad := range []string{"--sizes=3", "--rounds=0", "--depth=0", "--depth=2000", "--budget=1us",
		"--deadline=0s", "sendrecv"} {
		if _, err := parseP2P([]string{bad}); err == nil {
			t.Errorf("%s was accepted", bad)
		}
	}
}

func TestParseUCX(t *testing.T) {
	good := "iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr\n" +
		"1000,4.259,10.597,11.25,5.76,5.76,94363,94363\n"
	if us, err := parseUCX([]byte(good)); us != 11.25 || err != nil {
		t.Errorf("%v, %v", us, err)
	}
	for _, bad := range []string{"", "\n", "1000,4,5,6", "a,overall_lat\n1", "overall_lat\nx", "overall_lat\n0"} {
		if us, err := parseUCX([]byte(bad)); err == nil {
			t.Errorf("%q is taken as %v", bad, us)
		}
	}
}

func TestParseIperf(t *testing.T) {
	good := `{"start": {}, "end": {"sum_sent": {"bits_per_second": 1}, "sum_received": {"bits_per_second": 8e9}}}`
	if us, err := parseIperf([]byte(good), 1<<20); us != 1<<20/1e3 || err != nil {
		t.Errorf("%v, %v", us, err)
	}
	for _, bad := range []string{"", "{}", `{"error": "unable to connect"}`} {
		if us, err := parseIperf([]byte(bad), 64); err == nil {
			t.Errorf("%q is taken as %v", bad, us)
		}
	}
}

func TestListeningFindsAListenerWithoutConnecting(t *testing.T) {
	for _, address := range []string{"127.0.0.1:0", "[::]:0"} {
		l, err := net.Listen("tcp", address)
		if err != nil {
			t.Skipf("listen at %s: %v", address, err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		if err := listening(ctx, l.Addr().(*net.TCPAddr).Port); err != nil {
			t.Error(err)
		}
		cancel()
		l.Close()
	}
	reserved, err := ports.Reserve()
	if err != nil {
		t.Fatal(err)
	}
	defer reserved.Close()
	port := int(reserved.Port)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := listening(ctx, port); err == nil {
		t.Errorf("a process listens at port %d", port)
	}
}

func TestBarsOfEndpoints(t *testing.T) {
	row := func(op string, bytes int64, depth int, figures map[string]float64) p2pRow {
		return p2pRow{p2pLine: p2pLine{op, bytes, depth}, Median: figures}
	}
	const trip, stream, batched = "raw/tutti round trip", "bandwidth/raw", "reads one after another/batched"
	type us = map[string]float64
	for _, x := range []struct {
		name   string
		rows   []p2pRow
		met    int
		missed []string // their bars, worst first
	}{
		{"nothing", nil, 0, nil},
		{"not measured", []p2pRow{row("read", 64, 1, us{"raw": 1}),
			row("read", 64, 16, us{"tutti": 1})}, 0, nil},
		{"as fast as peers", []p2pRow{row("read", 4096, 1, us{"tutti": 2, "ucx": 2, "nixl": 2})}, 2, nil},
		{"slower than one", []p2pRow{row("read", 4096, 1, us{"tutti": 2, "ucx": 1.99, "nixl": 9})}, 1,
			[]string{"ucx/tutti"}},
		{"slower than both", []p2pRow{row("batch", 256<<10, 1, us{"tutti": 2, "ucx": 1.9, "nixl": 1})},
			0, []string{"nixl/tutti", "ucx/tutti"}},
		{"round trip", []p2pRow{row("sendrecv", 64, 1, us{"tutti": 1.39, "raw": 1})}, 1, nil},
		{"slow round trip", []p2pRow{row("write", 64, 1, us{"tutti": 1.41, "raw": 1})}, 0,
			[]string{trip}},
		{"stream", []p2pRow{row("read", 1<<20, 16, us{"tutti": 100, "raw": 95.1})}, 1, nil},
		{"slow streams", []p2pRow{row("read", 1<<20, 16, us{"tutti": 100, "raw": 94.9}),
			row("write", 16<<20, 1, us{"tutti": 100, "raw": 50})}, 0, []string{stream, stream}},
		{"no bar", []p2pRow{row("sendrecv", 64, 16, us{"tutti": 9, "raw": 1}),
			row("read", 4096, 1, us{"tutti": 9, "raw": 1, "iperf3": 1}),
			row("batch", 256<<10, 64, us{"tutti": 9, "raw": 1})}, 0, nil},
		{"batch", []p2pRow{row("batch", 256<<10, 64, us{"tutti": 10}),
			row("batch", 256<<10, 1, us{"tutti": 50})}, 1, nil},
		{"slow batch", []p2pRow{row("batch", 256<<10, 1, us{"tutti": 49}),
			row("batch", 256<<10, 64, us{"tutti": 10})}, 0,
			[]string{batched}},
		{"by how far below its bar", []p2pRow{
			row("sendrecv", 64, 1, us{"tutti": 10, "raw": 7, "ucx": 8}),
			row("batch", 256<<10, 1, us{"tutti": 20}),
			row("batch", 256<<10, 64, us{"tutti": 10})}, 0,
			[]string{batched, "ucx/tutti", trip}},
	} {
		t.Run(x.name, func(t *testing.T) {
			v := judge(x.rows)
			var missed []string
			for _, b := range v.missed {
				missed = append(missed, b.Bar)
			}
			if v.met != x.met || !slices.Equal(missed, x.missed) {
				t.Errorf("%d meet their bar, %q miss it; want %d and %q", v.met, missed, x.met, x.missed)
			}
			var out strings.Builder
			if err := v.print(&out); err != nil {
				t.Fatal(err)
			}
			for _, bar := range v.unjudged {
				if !strings.Contains(out.String(), bar+": not measured") || slices.Contains(missed, bar) {
					t.Errorf("%s was not measured: %s", bar, out.String())
				}
			}
			if len(v.unjudged) == 5 != (v.met+len(missed) == 0) {
				t.Errorf("not measured: %q, of %d comparisons", v.unjudged, v.met+len(missed))
			}
		})
	}
}

// The rows have figures of the libraries that are installed, and of no other. One that is not is a
// test that is skipped, which CI does not permit.
func TestP2PComparesInstalledLibraries(t *testing.T) {
	if testing.Short() {
		t.Skip("it builds tutti and runs several programs")
	}
	path := filepath.Join(t.TempDir(), "out.json")
	o, err := parseP2P([]string{"--sizes", "64", "--rounds", "1", "--budget", "1ms", "--deadline", "5m", "--lenient",
		"--json", path})
	if err != nil {
		t.Fatal(err)
	}
	if err := compareP2P(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var rep struct{ Rows []p2pRow }
	if err := json.Unmarshal(b, &rep); err != nil {
		t.Fatal(err)
	}
	want := map[string]int{"tutti": 8, "raw": 8}
	if _, err := exec.LookPath("ucx_perftest"); err == nil {
		want["ucx"] = 8
	}
	if _, err := exec.LookPath("iperf3"); err == nil {
		want["iperf3"] = 1
	}
	if _, err := os.Stat(filepath.Join(o.nixl, "complete")); err == nil {
		want["nixl"] = 6
	}
	for _, who := range []string{"tutti", "raw", "ucx", "iperf3", "nixl"} {
		n := 0
		for _, r := range rep.Rows {
			if r.Median[who] > 0 {
				n++
			}
		}
		t.Run(who, func(t *testing.T) {
			if n != want[who] {
				t.Errorf("%d rows have figures of %s, expected %d", n, who, want[who])
			}
			if want[who] == 0 {
				t.Skipf("%s is not installed (make deps-peers)", who)
			}
		})
	}
}
