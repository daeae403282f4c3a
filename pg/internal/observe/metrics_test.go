package observe

import (
	"log/slog"
	"maps"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"tutti/kernels"
	"tutti/p2p"
	"tutti/pg/flight"
)

// metricsOf collects the metrics of a snapshot.
type metricsOf struct{ *flight.Snapshot }

func (m metricsOf) Describe(ch chan<- *prometheus.Desc) { (&collector{}).Describe(ch) }
func (m metricsOf) Collect(ch chan<- prometheus.Metric) { collect(m.Snapshot, ch) }

// A rule such as increase(tutti_failures_total[5m]) > 0 sees the first failure only if the counter
// was there before, and one for too few links only if the gauge stays.
func TestMetricsAreThereBeforeAndAfter(t *testing.T) {
	s := &flight.Snapshot{Failures: map[string]int{"timed out": 3}, Links: []flight.Link{
		{Rank: 1, Transport: "rdma"}, {Rank: 2, Up: true, Transport: "shm"}, {Rank: 3, Transport: "shm"}, {Rank: 4}}}
	all := prometheus.NewRegistry()
	if err := all.Register(metricsOf{s}); err != nil {
		t.Fatal(err)
	}
	families, err := all.Gather()
	if err != nil {
		t.Fatal(err)
	}
	failures, links := map[string]float64{}, map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			switch f.GetName() {
			case "tutti_failures_total":
				failures[m.GetLabel()[0].GetValue()] = m.GetCounter().GetValue()
			case "tutti_links":
				links[m.GetLabel()[0].GetValue()] = m.GetGauge().GetValue()
			}
		}
	}
	want := map[string]float64{"rank failed": 0, "timed out": 3, "cancelled": 0, "mismatch": 0, "closed": 0,
		"failed": 0, "aborted": 0}
	if !maps.Equal(failures, want) {
		t.Errorf("failures %v, want %v", failures, want)
	}
	if want := map[string]float64{"rdma": 0, "shm": 1}; !maps.Equal(links, want) {
		t.Errorf("links %v, want %v", links, want)
	}
}

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
