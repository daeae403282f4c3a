package prom_test

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"tutti/endpoint"
	"tutti/endpoint/prom"
	"tutti/mem"
)

func TestMetricsOfEndpoints(t *testing.T) {
	c, err := endpoint.NewContext(endpoint.ContextConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var ends [2]*endpoint.Endpoint
	for i := range ends {
		ends[i], err = endpoint.New(c, endpoint.Config{Name: fmt.Sprint("end", i), Interfaces: "127.0.0.1",
			Secret: "a secret for the tests of this package"})
		if err != nil {
			t.Fatal(err)
		}
		defer ends[i].Close()
	}
	if _, err := ends[1].Register("r", mem.Host(make([]byte, 100), mem.Anywhere), endpoint.RegionConfig{}); err != nil {
		t.Fatal(err)
	}
	p, err := ends[0].Connect(t.Context(), ends[1].Info())
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Read(make([]byte, 42), "r", 0).Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := p.Read(make([]byte, 42), "none", 0).Wait(t.Context()); err == nil {
		t.Fatal("there is no such region")
	}
	x, err := prom.Serve("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	get, err := (&http.Client{Timeout: time.Minute}).Get("http://" + x.Addr() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	b, _ := io.ReadAll(get.Body)
	get.Body.Close()
	text := string(b)
	for i, e := range ends {
		id := fmt.Sprintf("%016x", e.Info().ID)
		for _, want := range [][]string{{
			`operations_total{endpoint="end0",id="%s",kind="read"} 1`,
			`operation_bytes_total{endpoint="end0",id="%s",kind="read"} 42`,
			`failures_total{endpoint="end0",id="%s",reason="no region"} 1`,
			`failures_total{endpoint="end0",id="%s",reason="broken"} 0`, // there before the first one
			`refused_total{endpoint="end0",id="%s",reason="stale"} 0`,
			`connected_peers{endpoint="end0",id="%s"} 1`,
			`sessions_total{endpoint="end0",id="%s"} 1`,
		}, {
			`served_total{endpoint="end1",id="%s",kind="read"} 1`,
			`served_bytes_total{endpoint="end1",id="%s",kind="read"} 42`,
			`refused_total{endpoint="end1",id="%s",reason="no region"} 1`,
			`failures_total{endpoint="end1",id="%s",reason="authentication"} 0`,
			`regions{endpoint="end1",id="%s"} 1`,
			`region_bytes{endpoint="end1",id="%s"} 100`,
		}}[i] {
			if want = "tutti_endpoint_" + fmt.Sprintf(want, id) + "\n"; !strings.Contains(text, want) {
				t.Errorf("%s is not in\n%s", want, text)
			}
		}
	}
	if _, err := prom.Serve(x.Addr()); err == nil || !strings.Contains(err.Error(), "metrics at "+x.Addr()) {
		t.Errorf("a port that is taken: %v", err)
	}
}
