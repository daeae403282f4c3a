// Package prom has the metrics of this process's endpoints, for Prometheus.
//
// A rank with TUTTI_METRICS serves them beside its own. A program that has no rank calls [Serve],
// or registers [Endpoints] with a registry of its own.
package prom

import (
	"fmt"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"tutti/endpoint/stats"
	"tutti/internal/metrics"
)

// Exporter serves metrics until Close.
type Exporter struct{ e *metrics.Exporter }

// Serve serves the metrics of all endpoints of this process at http://HOST:PORT/metrics. addr is
// HOST:PORT, HOST:FROM-TO for the first port that is free, or HOST:0 for one that the kernel
// chooses. While another Exporter of this process, or a rank with TUTTI_METRICS, was given the same
// addr, also HOST:0, all of them are served at its port. At most 32 clients are connected; idle
// ones make room for others.
func Serve(addr string) (*Exporter, error) {
	e, err := metrics.Serve(addr, 0, Endpoints())
	if err != nil {
		return nil, fmt.Errorf("metrics at %s: %w", addr, err)
	}
	return &Exporter{e}, nil
}

// Addr returns the address, HOST:PORT.
func (e *Exporter) Addr() string { return e.e.Addr() }

// Close ends the serving. The last Exporter at an address ends the connections and releases the
// port. Idempotent.
func (e *Exporter) Close() { e.e.Close() }

// Endpoints returns a collector of the metrics of all endpoints of this process, at the time of
// each collection. Labels are the endpoint's name and id; its counters begin at zero when it is
// made, but those of a kind of operations are there from its first one on.
func Endpoints() prometheus.Collector { return collector{} }

type collector struct{}

// metric is one metric: what it is, and its values by a label, "" if it has none.
type metric struct {
	desc   *prometheus.Desc
	kind   prometheus.ValueType
	values func(s *stats.Endpoint, put func(v float64, label ...string))
}

func counter(name, help string, values func(*stats.Endpoint, func(float64, ...string)), label ...string) metric {
	return metric{desc(name, help, label), prometheus.CounterValue, values}
}

func gauge(name, help string, values func(*stats.Endpoint, func(float64, ...string)), label ...string) metric {
	return metric{desc(name, help, label), prometheus.GaugeValue, values}
}

func desc(name, help string, label []string) *prometheus.Desc {
	return prometheus.NewDesc("tutti_endpoint_"+name, help, append([]string{"endpoint", "id"}, label...), nil)
}

// number returns the only value of a metric.
func number[T int | int64 | uint64](f func(*stats.Endpoint) T) func(*stats.Endpoint, func(float64, ...string)) {
	return func(s *stats.Endpoint, put func(float64, ...string)) { put(float64(f(s))) }
}

// each returns a value for each key of a map.
func each[T any](of func(*stats.Endpoint) map[string]T, f func(T) float64) func(*stats.Endpoint,
	func(float64, ...string)) {
	return func(s *stats.Endpoint, put func(float64, ...string)) {
		for k, v := range of(s) {
			put(f(v), k)
		}
	}
}

// reasons returns a value for each reason, so that the first failure increases a counter that is
// there.
func reasons(all []string, of func(*stats.Endpoint) map[string]uint64) func(*stats.Endpoint, func(float64, ...string)) {
	return func(s *stats.Endpoint, put func(float64, ...string)) {
		counts := of(s)
		for _, why := range all {
			put(float64(counts[why]), why)
		}
	}
}

func times(c stats.Count) float64 { return float64(c.N) }
func bytes(c stats.Count) float64 { return float64(c.Bytes) }

func done(s *stats.Endpoint) map[string]stats.Count   { return s.Done }
func served(s *stats.Endpoint) map[string]stats.Count { return s.Served }
func direct(s *stats.Endpoint) map[string]stats.Count { return s.Direct }

var failed, refused = stats.Reasons()

var all = []metric{
	counter("operations_total", "Operations of this end that ended well, by kind.", each(done, times), "kind"),
	counter("operation_bytes_total", "Bytes of these.", each(done, bytes), "kind"),
	counter("direct_total", "Of these, what went by RDMA, by kind.", each(direct, times), "kind"),
	counter("direct_bytes_total", "Bytes of these.", each(direct, bytes), "kind"),
	counter("detours_total", "RDMA paths that failed.", number(func(s *stats.Endpoint) uint64 { return s.Detours })),
	counter("failures_total", "Operations of this end that failed, by reason.",
		reasons(failed, func(s *stats.Endpoint) map[string]uint64 { return s.Failed }), "reason"),
	gauge("pending_operations", "Operations of this end that are under way, by kind.",
		each(func(s *stats.Endpoint) map[string]int { return s.Pending }, func(n int) float64 { return float64(n) }),
		"kind"),
	counter("served_total", "Requests of peers that were done, by kind.", each(served, times), "kind"),
	counter("served_bytes_total", "Bytes of these.", each(served, bytes), "kind"),
	counter("refused_total", "Requests of peers that were refused or failed, by reason.",
		reasons(refused, func(s *stats.Endpoint) map[string]uint64 { return s.Refused }), "reason"),
	gauge("waiting_messages", "Messages that have arrived and were not received.",
		number(func(s *stats.Endpoint) uint64 { return s.Waiting.N })),
	gauge("waiting_message_bytes", "Bytes of these.",
		number(func(s *stats.Endpoint) uint64 { return s.Waiting.Bytes })),
	gauge("offered_messages", "Messages that wait at their senders to be received.",
		number(func(s *stats.Endpoint) uint64 { return s.Offered.N })),
	gauge("offered_message_bytes", "Bytes of these.",
		number(func(s *stats.Endpoint) uint64 { return s.Offered.Bytes })),
	gauge("peers", "Peers that are known.", number(func(s *stats.Endpoint) int { return s.Peers })),
	gauge("connected_peers", "Peers that are connected.", number(func(s *stats.Endpoint) int { return s.Connected })),
	gauge("connections", "Connections to them.", number(func(s *stats.Endpoint) int { return s.Conns })),
	counter("sessions_total", "Sessions that were made.", number(func(s *stats.Endpoint) uint64 { return s.Sessions })),
	counter("broken_sessions_total", "Sessions that were lost.",
		number(func(s *stats.Endpoint) uint64 { return s.Broken })),
	counter("strangers_total", "Connections that were refused before they said what they want.",
		number(func(s *stats.Endpoint) uint64 { return s.Strangers })),
	counter("sent_bytes_total", "Bytes that were sent on connections, with what surrounds the data.",
		number(func(s *stats.Endpoint) uint64 { return s.Sent })),
	counter("received_bytes_total", "Bytes that were received on connections, with what surrounds the data.",
		number(func(s *stats.Endpoint) uint64 { return s.Received })),
	gauge("regions", "Regions that are registered.", number(func(s *stats.Endpoint) int { return s.Regions })),
	gauge("region_bytes", "Bytes of these.", number(func(s *stats.Endpoint) int64 { return s.RegionBytes })),
}

// Describe implements prometheus.Collector.
func (collector) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range all {
		ch <- m.desc
	}
}

// Collect implements prometheus.Collector.
func (collector) Collect(ch chan<- prometheus.Metric) {
	for _, s := range stats.All() {
		name := strings.ToValidUTF8(s.Name, "\ufffd") // names are bytes
		for _, m := range all {
			m.values(&s, func(v float64, label ...string) {
				ch <- prometheus.MustNewConstMetric(m.desc, m.kind, v, append([]string{name, s.ID}, label...)...)
			})
		}
	}
}
