package stats

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"
)

// sample is the state of an endpoint.
var sample = Endpoint{Name: "weights", ID: "0123456789abcdef", Done: map[string]Count{"read": {3, 4096}},
	Pending: map[string]int{"recv": 1}, Failed: map[string]uint64{"no region": 2}, Waiting: Count{1, 7}, Peers: 3,
	Connected: 2, Conns: 4, Modes: map[string]int{"plain": 1, "sealed": 1}, Sessions: 9, Sent: 1 << 63, Regions: 2,
	RegionBytes: 1 << 40}

func TestParse(t *testing.T) {
	b, err := json.Marshal(sample)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := Parse(b); err != nil || !reflect.DeepEqual(got, sample) {
		t.Errorf("%+v, %v", got, err)
	}
	many := make([]string, maxKeys+1)
	for i := range many {
		many[i] = fmt.Sprintf(`"%d":1`, i)
	}
	for _, change := range [][2]string{
		{`"id":"0123456789abcdef"`, `"id":"0123456789abcde"`},
		{`"id":"0123456789abcdef"`, `"id":"0123456789ABCDEF"`},
		{`"id":"0123456789abcdef"`, `"id":"0123456789abcdeg"`},
		{`"peers":3`, `"peers":-3`},
		{`"peers":3`, `"peers":1e30`},
		{`"conns":4`, `"conns":4.5`},
		{`"regions":2`, `"regions":-1`},
		{`"region_bytes":1099511627776`, `"region_bytes":-1`},
		{`"sessions":9`, `"sessions":-9`},
		{`"recv":1`, `"recv":-1`},
		{`"sealed":1`, `"sealed":-1`},
		{`"no region":2`, `"no\u001bregion":2`},
		{`"no region":2`, `"no\u202eregion":2`},
		{`"no region":2`, `"` + strings.Repeat("x", maxKeys+1) + `":2`},
		{`"no region":2`, strings.Join(many, ",")},
		{`{"name"`, `[{"name"`},
	} {
		text := strings.Replace(string(b), change[0], change[1], 1)
		if text == string(b) {
			t.Fatalf("%s is not in %s", change[0], b)
		}
		if got, err := Parse([]byte(text)); err == nil || !reflect.DeepEqual(got, Endpoint{}) {
			t.Errorf("%.60s: %+v, %v", change[1], got, err)
		}
	}
}

// FuzzParse: what is accepted is within its bounds, and is read back as it was.
func FuzzParse(f *testing.F) {
	b, err := json.Marshal(sample)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte(`{"id":"0000000000000000","done":null,"failed":{"":0},"ID":"0000000000000001"}`))
	f.Add([]byte(`{"id":"00000000000000` + "\xff\xff" + `","peers":-1}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		e, err := Parse(b)
		if err != nil {
			return
		}
		if len(e.ID) != 16 || min(e.Peers, e.Connected, e.Conns, e.Regions) < 0 || e.RegionBytes < 0 ||
			max(len(e.Done), len(e.Pending), len(e.Failed), len(e.Served), len(e.Refused), len(e.Modes)) > maxKeys {
			t.Fatalf("%+v", e)
		}
		out, err := json.Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		back, err := Parse(out)
		if err != nil {
			t.Fatalf("%s: %v", out, err)
		}
		if again, err := json.Marshal(back); err != nil || string(again) != string(out) {
			t.Fatalf("%s became %s, %v", out, again, err)
		}
	})
}
