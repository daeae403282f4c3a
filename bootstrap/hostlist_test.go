package bootstrap

import (
	"slices"
	"strings"
	"testing"
)

func TestExpandHosts(t *testing.T) {
	for list, want := range map[string]string{
		"login":                      "login",
		"n[1-2]":                     "n1 n2",
		"gpu[007-009,12],login":      "gpu007 gpu008 gpu009 gpu12 login",
		"a,b-1,c.example.org":        "a b-1 c.example.org",
		"r[1-2]n[0-1]":               "r1n0 r1n1 r2n0 r2n1",
		"n[9-11]-ib":                 "n9-ib n10-ib n11-ib",
		"n[099-101]":                 "n099 n100 n101",
		" n[2,1] ":                   "n2 n1",
		"x[0000000001-0000000002]y1": "x0000000001y1 x0000000002y1",
	} {
		got, err := ExpandHosts(list)
		if err != nil || !slices.Equal(got, strings.Fields(want)) {
			t.Errorf("%q: %q, %v; want %q", list, got, err, want)
		}
	}
	for list, says := range map[string]string{
		"":                              "empty name",
		"a,":                            "empty name",
		",a":                            "empty name",
		"n[1":                           "not closed",
		"n1]":                           "wrong place",
		"n[[1]]":                        "wrong place",
		"n[]":                           "expected a number",
		"n[a-b]":                        "expected a number",
		"n[3-1]":                        "expected a number",
		"n[1-99999]":                    "more than",
		"n[0-999]m[0-999]":              "more than",
		"a b":                           "does not belong",
		"../x":                          "does not belong",
		"n[1-4294967296]":               "expected a number",
		"n[00000000001]":                "expected a number",
		strings.Repeat("a,", 1e5) + "a": "more than",
	} {
		got, err := ExpandHosts(list)
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%.20q: %d hosts, %v; want an error with %q", list, len(got), err, says)
		}
	}
}

func FuzzExpandHosts(f *testing.F) {
	f.Add("gpu[007-009,12],login")
	f.Add("r[1-2]n[0-3]")
	f.Fuzz(func(t *testing.T, list string) {
		hosts, err := ExpandHosts(list)
		if err == nil && (len(hosts) == 0 || len(hosts) > maxHosts) {
			t.Errorf("%d hosts", len(hosts))
		}
		for _, h := range hosts {
			if h == "" || strings.ContainsAny(h, "[], /") {
				t.Errorf("host %q", h)
			}
		}
	})
}
