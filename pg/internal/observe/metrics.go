package observe

import (
	"context"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"tutti/internal/ports"
)

// exporter serves a rank's metrics over HTTP. They are computed from a snapshot for each request.
type exporter struct {
	addr string
	srv  *http.Server
	done chan struct{}
}

// export serves at addr, HOST:PORTS. In a range of ports it first tries the one of this rank's
// place on its machine, so that a restarted rank is usually found at the same port.
func (o *Observer) export(addr string, local int) (*exporter, error) {
	host, spec, err := ports.ParseAddr(addr)
	if err != nil {
		return nil, err
	}
	l, err := listenFrom(host, spec, local)
	if err != nil {
		return nil, err
	}
	reg := prometheus.NewRegistry()
	if err := reg.Register(&collector{o}); err != nil {
		l.Close()
		return nil, err
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{MaxRequestsInFlight: 4,
		Timeout: 10 * time.Second}))
	few := &fewConns{Listener: l, room: MetricsConns, in: map[net.Conn]*visit{}}
	e := &exporter{addr: l.Addr().String(), done: make(chan struct{}),
		srv: &http.Server{Handler: few.handler(mux), ConnState: few.note, ConnContext: few.context,
			ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, WriteTimeout: 30 * time.Second,
			IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 16 << 10, ErrorLog: log.New(io.Discard, "", 0)}}
	go func() {
		defer close(e.done)
		e.srv.Serve(few) // ends with close
	}()
	return e, nil
}

// MetricsConns bounds the connections of the metrics exporter: any client may connect, and
// connections use the rank's descriptors.
const MetricsConns = 32

// fewConns is a listener that holds few connections. If there are too many, it closes the oldest of
// those that have sent nothing, else of those that are idle, else of those whose request is
// incomplete. A connection that is being answered stays.
type fewConns struct {
	net.Listener
	room int
	mu   sync.Mutex
	in   map[net.Conn]*visit
}

// visit is the state of a connection in a fewConns.
type visit struct {
	stage stage
	since time.Time
}

// stage orders connections by the loss if they are closed.
type stage int

const (
	silent stage = iota
	idle
	asking
	answered
)

// Accept implements net.Listener.
func (f *fewConns) Accept() (net.Conn, error) {
	c, err := f.Listener.Accept()
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.in) >= f.room {
		var out net.Conn
		for d, v := range f.in {
			if v.stage < answered && (out == nil || v.before(f.in[out])) {
				out = d
			}
		}
		if out == nil {
			out = c
		}
		delete(f.in, out)
		out.Close()
	}
	f.in[c] = &visit{since: time.Now()} // if c itself is closed, note removes it
	return c, nil
}

func (v *visit) before(o *visit) bool {
	return v.stage < o.stage || v.stage == o.stage && v.since.Before(o.since)
}

// note is the server's word of a connection.
func (f *fewConns) note(c net.Conn, s http.ConnState) {
	switch s {
	case http.StateActive:
		f.at(c, asking)
	case http.StateIdle:
		f.at(c, idle)
	case http.StateClosed, http.StateHijacked:
		f.mu.Lock()
		delete(f.in, c)
		f.mu.Unlock()
	}
}

func (f *fewConns) at(c net.Conn, s stage) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if v := f.in[c]; v != nil {
		v.stage, v.since = s, time.Now()
	}
}

// connKey is the key of the connection in a request's context.
type connKey struct{}

func (f *fewConns) context(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}

// handler returns h, and marks connections while their requests are answered.
func (f *fewConns) handler(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if c, ok := r.Context().Value(connKey{}).(net.Conn); ok {
			f.at(c, answered)
			defer f.at(c, asking) // the server may have to read further requests
		}
		h.ServeHTTP(w, r)
	})
}

// listenFrom tries the ports of a range like ports.Listen, but begins with the nth and wraps
// around.
func listenFrom(host string, spec ports.Spec, nth int) (net.Listener, error) {
	first := spec
	if n := int(spec.Hi) - int(spec.Lo); n > 0 {
		first.Lo += uint16(nth % (n + 1))
	}
	l, err := ports.Listen(context.Background(), host, first)
	if err != nil && first != spec && errors.Is(err, syscall.EADDRINUSE) {
		return ports.Listen(context.Background(), host, spec)
	}
	return l, err
}

func (e *exporter) close() {
	e.srv.Close()
	<-e.done
}

// collector computes metrics from a snapshot.
type collector struct{ o *Observer }

// The metrics. Labels are job and rank; counters begin at zero when a rank joins.
var (
	labels         = []string{"job", "rank"}
	descOperations = desc("operations_total", "Collectives and messages that ended well, by kind.", "kind")
	descBytes      = desc("operation_bytes_total", "Bytes of these: the vector, or all ranks' parts.", "kind")
	descFailures   = desc("failures_total", "Operations that failed, by outcome.", "outcome")
	descEpoch      = desc("view_epoch", "Epoch of the view.")
	descActive     = desc("active_ranks", "Ranks in the view.")
	descRunning    = desc("running_seconds",
		"How long the operation that has run longest has been running, 0 if none runs.")
	descFailed = desc("failed_groups", "Groups that have failed.")
	descWaited = desc("waited_seconds_total",
		"Time spent waiting for a peer, in waits that were long enough to look at the clock.", "peer")
	descLinks = desc("links", "Links that are up, by transport.", "transport")
	descSent  = desc("link_sent_bytes_total",
		"Payload sent to a peer through its link. Memory that peers map is not counted.", "peer")
	descReceived = desc("link_received_bytes_total", "Payload received from a peer through its link.", "peer")
	descPuts     = desc("window_puts_total",
		"Puts to a peer's part of a window that ended well; a signal alone is one of no bytes.", "peer")
	descPutBytes = desc("window_put_bytes_total", "Bytes of these, which are not in link_sent_bytes_total.", "peer")
	descGets     = desc("window_gets_total", "Gets from a peer's part of a window that ended well.", "peer")
	descGetBytes = desc("window_get_bytes_total", "Bytes of these, which are not in link_received_bytes_total.", "peer")
)

func desc(name, help string, more ...string) *prometheus.Desc {
	return prometheus.NewDesc("tutti_"+name, help, append(labels[:len(labels):len(labels)], more...), nil)
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descOperations, descBytes, descFailures, descEpoch, descActive, descRunning,
		descFailed, descWaited, descLinks, descSent, descReceived, descPuts, descPutBytes, descGets, descGetBytes} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	s := c.o.snapshot(0, "")
	put := func(d *prometheus.Desc, t prometheus.ValueType, v float64, more ...string) {
		ch <- prometheus.MustNewConstMetric(d, t, v, append([]string{s.Job, strconv.Itoa(s.Rank)}, more...)...)
	}
	for kind, t := range s.Totals {
		put(descOperations, prometheus.CounterValue, float64(t.Operations), kind)
		put(descBytes, prometheus.CounterValue, float64(t.Bytes), kind)
	}
	for why, n := range s.Failures {
		put(descFailures, prometheus.CounterValue, float64(n), why)
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
		if l.Up {
			up[l.Transport]++
		}
	}
	for transport, n := range up {
		put(descLinks, prometheus.GaugeValue, float64(n), transport)
	}
}
