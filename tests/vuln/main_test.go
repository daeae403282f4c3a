package main

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// A finding may mention the same words as the error for an unreachable database, which is the only
// failure that is forgiven: one of govulncheck itself counts without a database too.
func TestOnlyAnUnreachableDatabaseIsForgiven(t *testing.T) {
	const unfetched = "echo govulncheck: fetching vulnerabilities: dial tcp: connection refused >&2; exit 1"
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
		{"no database", gone.URL, "echo warning >&2; " + unfetched, 0, "skip  vulnerabilities"},
		{"another answers for the database", empty.URL, unfetched, 0, "skip  vulnerabilities"},
		{"no answer of a database that is there", there.URL, unfetched, 1, "can be reached"},
		{"another failure", there.URL, "echo connection refused >&2; exit 1", 1, "not for want"},
		{"another failure without a database", gone.URL, "echo loading packages >&2; exit 1", 1, "not for want"},
		{"a failure after that of the database", gone.URL, "(" + unfetched + "); echo panic >&2; exit 1", 1,
			"not for want"},
		{"it says nothing", gone.URL, "exit 1", 1, "not for want"},
		{"words of a finding", gone.URL, "(" + unfetched + ") 2>&1; exit 1", 1, "not for want"},
		{"wrong usage", gone.URL, unfetched + "2", 1, "not for want"},
		{"killed", gone.URL, "kill -9 $$", 1, "not for want"},
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

func TestNoProgram(t *testing.T) {
	var out strings.Builder
	if code := run(t.Context(), &out, "http://127.0.0.1:1", "./none"); code != 1 {
		t.Errorf("exit code %d without a program; it says:\n%s", code, out.String())
	}
}
