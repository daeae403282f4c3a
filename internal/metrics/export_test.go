package metrics

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"tutti/internal/ports"
)

// Connections that have sent nothing are closed first, then idle ones, then those within a request;
// those being answered stay.
func TestFewConnsEvictInOrder(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	f := &fewConns{Listener: l, room: 4, in: map[net.Conn]*visit{}}
	connect := func() net.Conn {
		a, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		b, err := f.Accept()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { a.Close(); b.Close() })
		return b
	}
	kept, asks, idles, quiet := connect(), connect(), connect(), connect()
	f.note(kept, http.StateActive)
	f.at(kept, answered)
	f.note(asks, http.StateActive)
	f.note(idles, http.StateIdle)
	for i, want := range []net.Conn{quiet, idles, asks} {
		f.note(connect(), http.StateActive)
		if f.in[want] != nil {
			t.Errorf("connection %d did not take the expected one's place", i)
		}
	}
	for range 100 {
		connect()
	}
	if f.in[kept] == nil || len(f.in) != 4 {
		t.Errorf("of %d connections, the one that is answered is %v", len(f.in), f.in[kept])
	}
}

// slow is a collector that counts how many of its collections run at the same time, and lets none
// end before goOn is closed.
type slow struct {
	desc      *prometheus.Desc
	running   chan struct{}
	goOn      chan struct{}
	now, most atomic.Int32
}

func (s *slow) Describe(c chan<- *prometheus.Desc) { c <- s.desc }

func (s *slow) Collect(c chan<- prometheus.Metric) {
	for n := s.now.Add(1); ; {
		if m := s.most.Load(); n <= m || s.most.CompareAndSwap(m, n) {
			break
		}
	}
	s.running <- struct{}{}
	<-s.goOn
	s.now.Add(-1)
	c <- prometheus.MustNewConstMetric(s.desc, prometheus.GaugeValue, 1)
}

// All of many requests that come together are answered, and few at a time.
func TestRequestsWaitForTheirTurn(t *testing.T) {
	const requests = 3 * maxAnswers
	s := &slow{desc: prometheus.NewDesc("slow", "", nil, nil), running: make(chan struct{}, requests),
		goOn: make(chan struct{})}
	e, err := Serve("127.0.0.1:0", 0, s)
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}
	var all errgroup.Group
	for range requests {
		all.Go(func() error {
			r, err := client.Get("http://" + e.Addr() + "/metrics")
			if err != nil {
				return err
			}
			defer r.Body.Close()
			if r.StatusCode != http.StatusOK {
				return errors.New(r.Status)
			}
			return nil
		})
	}
	for range maxAnswers {
		<-s.running
	}
	close(s.goOn)
	if err := all.Wait(); err != nil {
		t.Error(err)
	}
	if most := s.most.Load(); most > maxAnswers {
		t.Errorf("%d requests were answered at the same time, want at most %d", most, maxAnswers)
	}
}

// gauge is a collector of one metric with a constant label.
func gauge(label string, value float64) prometheus.Collector {
	g := prometheus.NewGauge(prometheus.GaugeOpts{Name: "x", ConstLabels: prometheus.Labels{"of": label}})
	g.Set(value)
	return g
}

// The collectors that this process has served at one address share its port, until each is closed.
func TestExportersOfOneAddress(t *testing.T) {
	var at string
	var first *Exporter
	for range 100 { // below the ports that the kernel chooses
		at = fmt.Sprintf("127.0.0.1:%d", 20_000+rand.IntN(10_000))
		if e, err := Serve(at, 0, gauge("a", 1), gauge("all", 9)); err == nil {
			first = e
			break
		}
	}
	if first == nil {
		t.Fatal("no port is free")
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}
	expect := func(want string) {
		t.Helper()
		r, err := client.Get("http://" + at + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		text, err := io.ReadAll(r.Body)
		if err != nil {
			t.Fatal(err)
		}
		var lines []string
		for line := range strings.Lines(string(text)) {
			if !strings.HasPrefix(line, "#") {
				lines = append(lines, strings.TrimSpace(line))
			}
		}
		if got := strings.Join(lines, " "); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
	expect(`x{of="a"} 1 x{of="all"} 9`)
	second, err := Serve(at, 0, gauge("b", 2), gauge("all", 9))
	if err != nil {
		t.Fatal(err)
	}
	third, err := Serve(at, 0, gauge("a", 3)) // as the first
	if err != nil {
		t.Fatal(err)
	}
	expect(`x{of="a"} 1 x{of="all"} 9 x{of="b"} 2`)
	first.Close()
	first.Close()
	expect(`x{of="a"} 3 x{of="all"} 9 x{of="b"} 2`)
	third.Close()
	expect(`x{of="all"} 9 x{of="b"} 2`)
	second.Close()
	if l, err := net.Listen("tcp", at); err != nil {
		t.Error(err)
	} else {
		l.Close()
	}
}

// In a range of ports each rank of a machine begins with its own.
func TestMetricsPortsOfOneMachine(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	port := taken.Addr().(*net.TCPAddr).Port
	if port+20 > 65535 {
		t.Skip("no room for a range")
	}
	var got []int
	for local := range 3 {
		l, err := listenFrom("127.0.0.1", ports.Spec{Lo: uint16(port), Hi: uint16(port + 20)}, local)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		got = append(got, l.Addr().(*net.TCPAddr).Port)
	}
	if got[0] <= port || got[1] <= got[0]-1 || got[2] < got[1] || got[2] > port+20 || slices.Contains(got, port) {
		t.Errorf("%d on, ranks 0 to 2 have %v", port, got)
	}
}
