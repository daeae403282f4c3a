// Package metrics serves the metrics of a process to Prometheus.
package metrics

import (
	"context"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"tutti/internal/ports"
)

// An Exporter has its collectors served over HTTP. They are asked at each request.
type Exporter struct {
	server *server
	all    []prometheus.Collector
}

// A server serves the metrics of all Exporters of this process that were given the same address.
type server struct {
	given, addr string // as Serve was given it, and as it is
	exporters   []*Exporter
	srv         *http.Server
	done        chan struct{}
}

// servers are those of this process, by the address that Serve was given. mu protects their
// exporters, too.
var (
	mu      sync.Mutex
	servers = map[string]*server{}
)

// Serve serves what the collectors have at addr, HOST:PORTS, until Close. In a range of ports it
// first tries the one with this number, so that a process that is started again is usually found at
// the same port. While another Exporter of this process has the same addr, both are served at its
// port. Of collectors with the same metrics and the same constant labels, the first is served.
func Serve(addr string, number int, all ...prometheus.Collector) (*Exporter, error) {
	mu.Lock()
	defer mu.Unlock()
	s := servers[addr]
	if s == nil {
		var err error
		if s, err = serve(addr, number); err != nil {
			return nil, err
		}
		servers[addr] = s
	}
	e := &Exporter{server: s, all: all}
	s.exporters = append(s.exporters, e)
	return e, nil
}

// serve starts a server.
func serve(addr string, number int) (*server, error) {
	host, spec, err := ports.ParseAddr(addr)
	if err != nil {
		return nil, err
	}
	l, err := listenFrom(host, spec, number)
	if err != nil {
		return nil, err
	}
	s := &server{given: addr, addr: l.Addr().String(), done: make(chan struct{})}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, r *http.Request) {
		promhttp.HandlerFor(s.registry(), promhttp.HandlerOpts{Timeout: 10 * time.Second}).ServeHTTP(w, r)
	})
	few := &fewConns{Listener: l, room: MaxConns, in: map[net.Conn]*visit{}, turns: make(chan struct{}, maxAnswers)}
	s.srv = &http.Server{Handler: few.handler(mux), ConnState: few.note, ConnContext: few.context,
		ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, WriteTimeout: 30 * time.Second,
		IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 16 << 10, ErrorLog: log.New(io.Discard, "", 0)}
	go func() {
		defer close(s.done)
		s.srv.Serve(few) // ends with Close
	}()
	return s, nil
}

// registry returns a registry of the collectors that are served now.
func (s *server) registry() *prometheus.Registry {
	mu.Lock()
	defer mu.Unlock()
	reg := prometheus.NewRegistry()
	for _, e := range s.exporters {
		for _, c := range e.all {
			reg.Register(c) // fails if one with its metrics is there
		}
	}
	return reg
}

// Addr returns the address, HOST:PORT.
func (e *Exporter) Addr() string { return e.server.addr }

// Close ends the serving of the collectors. The last Exporter of a server ends the connections and
// releases the port. Idempotent.
func (e *Exporter) Close() {
	mu.Lock()
	defer mu.Unlock()
	s := e.server
	i := slices.Index(s.exporters, e)
	if i < 0 {
		return
	}
	if s.exporters = slices.Delete(s.exporters, i, i+1); len(s.exporters) > 0 {
		return
	}
	delete(servers, s.given)
	s.srv.Close()
	<-s.done
}

// MaxConns bounds the connections of an Exporter: any client may connect, and connections use the
// process's descriptors.
const MaxConns = 32

// maxAnswers bounds the requests that are answered at the same time. Further ones wait.
const maxAnswers = 4

// fewConns is a listener that holds few connections. If there are too many, it closes the oldest of
// those that have sent nothing, else of those that are idle, else of those whose request is
// incomplete or waits for its turn. A connection that is being answered stays.
type fewConns struct {
	net.Listener
	room  int
	turns chan struct{} // holds an entry for each request that is being answered
	mu    sync.Mutex
	in    map[net.Conn]*visit
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

// handler returns h for a few requests at a time, and marks connections while their requests are
// answered.
func (f *fewConns) handler(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case f.turns <- struct{}{}:
			defer func() { <-f.turns }()
		case <-r.Context().Done():
			return
		}
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
