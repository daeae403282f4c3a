package pg

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
)

// A program that tells its place need not have a complete launcher's, but its settings count.
func TestSettingsOfAPlacedProgram(t *testing.T) {
	var log bytes.Buffer
	cfg := Config{Size: 2, Logger: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))}
	resolve := func(env map[string]string) (*settings, error) {
		log.Reset()
		return cfg.resolve(func(name string) string { return env[name] })
	}
	s, err := resolve(map[string]string{"WORLD_SIZE": "3", "TUTTI_TRANSPORT": "tcp", "TUTTI_MAX_SIZE": "4"})
	if err != nil || s.Transport != "tcp" || s.Size != 2 || s.MaxSize != 4 ||
		!strings.Contains(log.String(), "WORLD_SIZE=3") {
		t.Errorf("%v, logged %q", err, &log)
	}
	for name, value := range map[string]string{"TUTTI_UNIFORM": "yes", "TUTTI_MAX_SIZE": "many"} {
		for _, more := range []string{"", "3"} {
			if _, err := resolve(map[string]string{"WORLD_SIZE": more, name: value}); err == nil ||
				!strings.Contains(err.Error(), name) {
				t.Errorf("%s=%s, WORLD_SIZE=%s: %v", name, value, more, err)
			}
		}
	}
	cfg.Size = 0
	if _, err := resolve(map[string]string{"WORLD_SIZE": "3"}); err == nil {
		t.Error("a place that is not complete was taken")
	}
}
