package main

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// The output of govulncheck decides nothing: a finding may mention the same words as the error for
// an unreachable database.
func TestExitCodeDecides(t *testing.T) {
	there := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/index/db.json" {
			http.NotFound(w, r)
		}
	}))
	defer there.Close()
	empty := httptest.NewServer(http.NotFoundHandler())
	defer empty.Close()
	gone := httptest.NewServer(http.NotFoundHandler())
	gone.Close()
	for _, c := range []struct {
		name, database, script string
		code                   int
		says                   string
	}{
		{"nothing found", gone.URL, "echo No vulnerabilities found.", 0, "No vulnerabilities"},
		{"a finding", there.URL, "echo GO-2024-0404: dial tcp: connection refused; exit 3", 3, "GO-2024-0404"},
		{"a finding of a database that has gone", gone.URL, "echo GO-2024-0404: 403 fetching; exit 3", 3,
			"GO-2024-0404"},
		{"no database", gone.URL, "echo fetching: connection refused; exit 1", 0, "skip  vulnerabilities"},
		{"another answers for the database", empty.URL, "exit 1", 0, "skip  vulnerabilities"},
		{"another failure", there.URL, "echo connection refused; exit 1", 1, "can be reached"},
		{"wrong usage", there.URL, "exit 2", 1, "can be reached"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var out strings.Builder
			if code := run(t.Context(), &out, c.database, "sh", "-c", c.script); code != c.code ||
				!strings.Contains(out.String(), c.says) {
				t.Errorf("exit code %d, want %d and %q; it says:\n%s", code, c.code, c.says, out.String())
			}
		})
	}
}
