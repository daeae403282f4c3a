package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tutti/cmd/tutti/internal/doctor"
	"tutti/nvlink"
	"tutti/nvlink/nvlinktest"
)

func TestDoctor(t *testing.T) {
	s := newStage(t)
	j := s.run("doctor", "--json")
	j.Wait()
	states := map[doctor.State]int{}
	for line := range strings.Lines(j.Out.String()) {
		var f doctor.Finding
		if err := json.Unmarshal([]byte(line), &f); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		states[f.State]++
	}
	if states[doctor.Found] < 5 {
		t.Errorf("%v", states)
	}
	j.End(map[bool]int{true: 1, false: 0}[states[doctor.Broken] > 0])
	s.empty()

	j = s.command("doctor")
	j.cmd.Env = append(j.cmd.Env, "RANK=5", "WORLD_SIZE=2")
	j.start().End(1)
	if out := j.Out.String(); !strings.Contains(out, "  broken   environment    RANK=5 contradicts WORLD_SIZE=2") ||
		strings.Contains(out, "\x1b") {
		t.Errorf("stdout %s", out)
	}
}

// TestDrawTopology: a picture is written, or what is missing is said.
func TestDrawTopology(t *testing.T) {
	path := filepath.Join(t.TempDir(), "topology.svg")
	h := doctor.Local()
	h.GPUs = func() (nvlink.System, error) { return nvlinktest.DGXH100(), nil }
	if err := drawTopology(h, path); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(path); err != nil || !strings.HasPrefix(string(b), "<svg ") ||
		!strings.Contains(string(b), "mlx5_9") {
		t.Errorf("%.100q, %v", b, err)
	}
	for _, s := range []nvlink.System{{}, {Driver: "550"}} {
		h.GPUs = func() (nvlink.System, error) {
			if s.Driver == "" {
				return s, nvlink.ErrUnavailable
			}
			return s, nil
		}
		if err := drawTopology(h, path+"2"); err == nil || !strings.Contains(err.Error(), "nothing to draw") {
			t.Errorf("%+v: %v", s, err)
		}
		if _, err := os.Stat(path + "2"); err == nil {
			t.Error("a file without a picture")
		}
	}
}

// TestFindingTable: tables follow their finding, as they are.
func TestFindingTable(t *testing.T) {
	var b strings.Builder
	printed := findingPrinter(&b, false, 40)
	printed(doctor.Finding{Group: "devices", Check: "topology", State: doctor.Found, Detail: "8 GPUs",
		Table: []string{"      GPU0  GPU1", "", "NVS18  x"}})
	want := "devices\n  found    topology       8 GPUs\n\n          GPU0  GPU1\n\n    NVS18  x\n"
	if b.String() != want {
		t.Errorf("%q, want %q", b.String(), want)
	}
}
