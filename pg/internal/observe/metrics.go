package observe

import (
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"tutti/pg/flight"
)

// collector computes metrics from a snapshot.
type collector struct{ o *Observer }

// collector returns the collector of the rank's metrics, with the labels job and rank.
func (o *Observer) collector() prometheus.Collector {
	self := o.cfg.Self
	return prometheus.WrapCollectorWith(prometheus.Labels{"job": strings.ToValidUTF8(self.Job, "\ufffd"),
		"rank": strconv.Itoa(self.Rank)}, &collector{o})
}

// The metrics, besides the labels job and rank. Counters begin at zero when a rank joins; those of
// a kind of operations are there from its first one on, and those of a peer from its first link on.
var (
	descOperations = desc("operations_total", "Collectives and messages that ended well, by kind.", "kind")
	descBytes      = desc("operation_bytes_total", "Bytes of these: the vector, or all ranks' parts.", "kind")
	descFailures   = desc("failures_total", "Operations that failed, by outcome.", "outcome")
	descEpoch      = desc("view_epoch", "Epoch of the view.")
	descActive     = desc("active_ranks", "Ranks in the view.")
	descRunning    = desc("running_seconds",
		"How long the operation that has run longest has been running, 0 if none runs. "+
			"A message that was started counts while the program waits for it.")
	descFailed = desc("failed_groups", "Groups that have failed.")
	descWaited = desc("waited_seconds_total",
		"Time spent waiting for a peer, in waits that were long enough to look at the clock.", "peer")
	descLinks = desc("links", "Links that are up, by transport; 0 of one that has lost all.", "transport")
	descSent  = desc("link_sent_bytes_total",
		"Payload sent to a peer through its link. Memory that peers map is not counted.", "peer")
	descReceived = desc("link_received_bytes_total", "Payload received from a peer through its link.", "peer")
	descPuts     = desc("window_puts_total",
		"Puts to a peer's part of a window that ended well; a signal alone is one of no bytes.", "peer")
	descPutBytes = desc("window_put_bytes_total", "Bytes of these, which are not in link_sent_bytes_total.", "peer")
	descGets     = desc("window_gets_total", "Gets from a peer's part of a window that ended well.", "peer")
	descGetBytes = desc("window_get_bytes_total", "Bytes of these, which are not in link_received_bytes_total.", "peer")
)

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("tutti_"+name, help, labels, nil)
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descOperations, descBytes, descFailures, descEpoch, descActive, descRunning,
		descFailed, descWaited, descLinks, descSent, descReceived, descPuts, descPutBytes, descGets, descGetBytes} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) { collect(c.o.snapshot(0, ""), ch) }

func collect(s *flight.Snapshot, ch chan<- prometheus.Metric) {
	put := func(d *prometheus.Desc, t prometheus.ValueType, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, t, v, labels...)
	}
	for kind, t := range s.Totals {
		put(descOperations, prometheus.CounterValue, float64(t.Operations), kind)
		put(descBytes, prometheus.CounterValue, float64(t.Bytes), kind)
	}
	for _, o := range flight.Failures() {
		put(descFailures, prometheus.CounterValue, float64(s.Failures[o.String()]), o.String())
	}
	put(descEpoch, prometheus.GaugeValue, float64(s.View.Epoch))
	put(descActive, prometheus.GaugeValue, float64(len(s.View.Active)))
	longest, failed := time.Duration(0), 0
	for _, g := range s.Groups {
		if g.Running != nil {
			longest = max(longest, s.Time.Sub(g.Running.Started))
		}
		if g.Error != "" {
			failed++
		}
	}
	for _, m := range s.Messages {
		if !m.Async {
			longest = max(longest, s.Time.Sub(m.Started))
		}
	}
	put(descRunning, prometheus.GaugeValue, longest.Seconds())
	put(descFailed, prometheus.GaugeValue, float64(failed))
	up := map[string]int{}
	for _, l := range s.Links {
		peer := strconv.Itoa(l.Rank)
		put(descWaited, prometheus.CounterValue, l.Waited, peer)
		put(descSent, prometheus.CounterValue, float64(l.BytesSent), peer)
		put(descReceived, prometheus.CounterValue, float64(l.BytesReceived), peer)
		put(descPuts, prometheus.CounterValue, float64(l.Puts), peer)
		put(descPutBytes, prometheus.CounterValue, float64(l.BytesPut), peer)
		put(descGets, prometheus.CounterValue, float64(l.Gets), peer)
		put(descGetBytes, prometheus.CounterValue, float64(l.BytesGot), peer)
		switch n := up[l.Transport]; {
		case l.Up:
			up[l.Transport] = n + 1
		case l.Transport != "": // that of the last link
			up[l.Transport] = n
		}
	}
	for transport, n := range up {
		put(descLinks, prometheus.GaugeValue, float64(n), transport)
	}
}
