package rdma

import (
	"strings"
	"testing"
)

// Settings of a program have the same bounds as those of the environment.
func TestSettingsHaveBounds(t *testing.T) {
	for _, s := range []Settings{{}, {TrafficClass: 255, ServiceLevel: 15, PKey: 1<<16 - 1, Timeout: 31}} {
		if err := s.Check(); err != nil {
			t.Errorf("%+v: %v", s, err)
		}
	}
	for field, s := range map[string]Settings{"ServiceLevel 16": {ServiceLevel: 16}, "PKey 65536": {PKey: 1 << 16},
		"PKey -1": {PKey: -1}, "Timeout 11": {Timeout: 11}, "Timeout 32": {Timeout: 32}} {
		if err := s.Check(); err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%+v: %v, want an error with %q", s, err, field)
		}
	}
}
