package main

import (
	"encoding/json"
	"strings"
	"testing"

	"tutti/cmd/tutti/internal/doctor"
)

func TestDoctor(t *testing.T) {
	s := newStage(t)
	j := s.run("doctor", "--json")
	<-j.finished
	states := map[doctor.State]int{}
	for line := range strings.Lines(j.stdout.String()) {
		var f doctor.Finding
		if err := json.Unmarshal([]byte(line), &f); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		states[f.State]++
	}
	if states[doctor.Found] < 5 {
		t.Errorf("%v", states)
	}
	j.end(map[bool]int{true: 1, false: 0}[states[doctor.Broken] > 0])
	s.empty()

	j = s.command("doctor")
	j.cmd.Env = append(j.cmd.Env, "RANK=5", "WORLD_SIZE=2")
	j.start().end(1)
	if out := j.stdout.String(); !strings.Contains(out, "  broken   environment    RANK=5 contradicts WORLD_SIZE=2") ||
		strings.Contains(out, "\x1b") {
		t.Errorf("stdout %s", out)
	}
}
