package metrics

import (
	"errors"
	"net"
	"net/http"
	"slices"
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
