package observe

import (
	"log/slog"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"tutti/kernels"
	"tutti/p2p"
	"tutti/pg/flight"
)

// A message that the program waits for is running, one that it has started is not.
func TestRunningMessages(t *testing.T) {
	proxy := p2p.New(p2p.Config{Size: 2})
	defer proxy.Close()
	o, err := Start(Config{Self: flight.Identity{Job: "job", Size: 2}, Proxy: proxy,
		Groups: func() []Glance { return nil }, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer o.Stop()
	all := prometheus.NewRegistry()
	if err := all.Register(o.collector()); err != nil {
		t.Fatal(err)
	}
	running := func() float64 {
		t.Helper()
		families, err := all.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			if f.GetName() == "tutti_running_seconds" {
				return f.GetMetric()[0].GetGauge().GetValue()
			}
		}
		t.Fatal("no tutti_running_seconds")
		return 0
	}
	var track Track
	track.Open(o.Recorder(), 1, 0, []int{0, 1})
	defer track.Close()
	m := Message{Kind: flight.Recv, Rank: 1, DType: kernels.Int64, Count: 1}
	begin := func(async bool) *flight.Record {
		proxy.Lock()
		defer proxy.Unlock()
		return track.BeginMessage(1, m, async)
	}
	begin(true)
	waited := begin(false)
	for late := time.Now().Add(20 * time.Second); running() == 0; { // the clocks of records are coarse
		if time.Now().After(late) {
			t.Fatal("a message that the program waits for is not running")
		}
	}
	proxy.Lock()
	track.EndMessage(waited, flight.OK)
	proxy.Unlock()
	if s := running(); s != 0 {
		t.Errorf("a message that was started has been running for %v s", s)
	}
}
