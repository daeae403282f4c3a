//go:build linux

package faults

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"tutti/internal/files"
	"tutti/tests/internal/rig"
)

// TestHostileConnections throws garbage, drips and silence at every listening socket of a live job,
// TCP and Unix, while it computes, and while it forms.
func TestHostileConnections(t *testing.T) {
	const n = 4
	for _, transport := range []string{"tcp", "shm"} {
		t.Run(transport+"/in collectives", func(t *testing.T) {
			t.Parallel()
			s := rig.New(t)
			job := s.Run([]string{"TUTTI_LOG=off"}, "-n", fmt.Sprint(n), "--transport", transport, "--timeout", "1m")
			ranks := s.Arrive(n)
			rig.Well(ranks, rig.Command{Verb: "join"})
			rig.Well(ranks, rig.Command{Verb: "loop", Seed: 1, Counts: mixed})
			a := attack(t, s, n)
			steps := rig.Well(ranks[:1], rig.Command{Verb: "await"})[0].Steps
			for end := steps + 10; steps < end; {
				steps++
				rig.Well(ranks, rig.Command{Verb: "await", Steps: steps})
			}
			a.end()
			rig.Well(ranks, rig.Command{Verb: "stop"})
			rig.Well(ranks, rig.Command{Verb: "ended"})
			rig.Leave(ranks)
			job.End(0)
			s.Clean()
		})
		t.Run(transport+"/in the join", func(t *testing.T) {
			t.Parallel()
			s := rig.New(t)
			job := s.Run([]string{"TUTTI_LOG=off"}, "-n", fmt.Sprint(n), "--transport", transport, "--timeout", "1m")
			ranks := s.Arrive(n)
			for _, r := range ranks[1:] {
				r.Tell(rig.Command{Verb: "join"})
			}
			a := attack(t, s, n-1)
			ranks[0].Tell(rig.Command{Verb: "join"})
			for _, r := range ranks {
				if reply := r.Hear(); reply.Fault != nil {
					t.Errorf("rank %d: %v", r.Number, reply.Fault)
				}
			}
			if t.Failed() {
				t.FailNow()
			}
			rig.Well(ranks, rig.Command{Verb: "verify", Seed: 1, Counts: mixed})
			a.end()
			rig.Leave(ranks)
			job.End(0)
			s.Clean()
		})
	}
}

// attackers are the connections of an attack.
type attackers struct {
	t       *testing.T
	stop    chan struct{}
	wg      sync.WaitGroup
	idle    []net.Conn
	drained atomic.Int64
}

// listeners returns functions that connect to everything that the stage's processes listen at, by
// process, once the launcher's store and this many ranks do.
func listeners(t *testing.T, s *rig.Stage, ranks int) map[int][]func() net.Conn {
	t.Helper()
	var targets []rig.Socket
	rig.Eventually(t, func() bool {
		targets = targets[:0]
		pids := map[int]bool{}
		for _, k := range s.Sockets() {
			if k.Listening && (k.Network == "tcp" || strings.HasPrefix(k.Name, "@")) {
				targets = append(targets, k)
				pids[k.PID] = true
			}
		}
		return len(pids) == ranks+1
	}, func() string { return fmt.Sprintf("not all processes listen, but %v", targets) })
	dials := map[int][]func() net.Conn{}
	for _, k := range targets {
		address := k.Name
		if k.Network == "tcp" {
			host := k.Local.Addr()
			if host.IsUnspecified() {
				address = fmt.Sprintf("127.0.0.1:%d", k.Local.Port())
			} else {
				address = k.Local.String()
			}
		}
		dials[k.PID] = append(dials[k.PID], func() net.Conn {
			conn, err := net.DialTimeout(k.Network, address, rig.Patience)
			if err != nil {
				return nil // a full backlog is what an attack makes
			}
			return conn
		})
	}
	return dials
}

// attack begins to attack everything that the stage's processes listen at, once the launcher's
// store and at least this many ranks do. When it returns every listener has its idle connections.
func attack(t *testing.T, s *rig.Stage, ranks int) *attackers {
	t.Helper()
	dials := slices.Concat(slices.Collect(maps.Values(listeners(t, s, ranks)))...)
	a := &attackers{t: t, stop: make(chan struct{})}
	t.Cleanup(a.end)
	const idle = 100
	for _, dial := range dials {
		for range idle {
			if conn := dial(); conn != nil {
				a.idle = append(a.idle, conn)
			}
		}
		a.wg.Go(func() { a.garbage(dial) })
		a.wg.Go(func() { a.drip(dial) })
	}
	if len(a.idle) < idle*len(dials)/2 {
		t.Errorf("only %d idle connections could be made with %d listeners", len(a.idle), len(dials))
	}
	return a
}

// flood holds about 5,000 connections to what listens, as far as this process may, and makes a
// thousand a second more; every other one sends junk, and the oldest make room. It returns when
// they are there.
func flood(t *testing.T, dials []func() net.Conn) (made *atomic.Int64) {
	t.Helper()
	n := 5000
	if limit, known := files.Limit(); known {
		n = min(n, int(limit)/2)
	}
	made = new(atomic.Int64)
	stop, ready := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		held := make([]net.Conn, n)
		junk := append([]byte("tutti/3\n"), make([]byte, 32)...)
		pace := time.NewTicker(time.Millisecond)
		defer pace.Stop()
		for i := 0; ; i++ {
			if i == n {
				close(ready)
			}
			if i >= n {
				<-pace.C
			}
			select {
			case <-stop:
				for _, c := range held {
					if c != nil {
						c.Close()
					}
				}
				return
			default:
			}
			if old := held[i%n]; old != nil {
				old.Close()
			}
			held[i%n] = dials[i%len(dials)]()
			if c := held[i%n]; c != nil {
				made.Add(1)
				if i/len(dials)%2 == 0 {
					c.Write(junk)
				}
			}
		}
	})
	t.Cleanup(func() { close(stop); wg.Wait() })
	select {
	case <-ready:
	case <-time.After(rig.Patience):
		t.Fatalf("only %d of %d connections could be made", made.Load(), n)
	}
	return made
}

// A rank joins while everything that another rank listens at is flooded with connections, and then
// the job works on.
func TestJobsWorkDespiteFloodOfConnections(t *testing.T) {
	const n = 3
	for _, transport := range []string{"tcp", "shm"} {
		t.Run(transport, func(t *testing.T) {
			s := rig.New(t)
			job := s.Run([]string{"TUTTI_LOG=off"}, "-n", fmt.Sprint(n), "--transport", transport, "--timeout", "1m")
			ranks := s.Arrive(n)
			for _, r := range ranks[1:] {
				r.Tell(rig.Command{Verb: "join"})
			}
			made := flood(t, listeners(t, s, n-1)[ranks[1].PID])
			began, before := time.Now(), made.Load()
			ranks[0].Tell(rig.Command{Verb: "join"})
			for _, r := range ranks {
				if reply := r.Hear(); reply.Fault != nil {
					t.Fatalf("rank %d: %v", r.Number, reply.Fault)
				}
			}
			t.Logf("joined in %v, while %d more connections were made", time.Since(began).Round(time.Millisecond),
				made.Load()-before)
			rig.Well(ranks, rig.Command{Verb: "verify", Seed: 1, Counts: mixed})
			rig.Well(ranks, rig.Command{Verb: "loop", Seed: 1, Counts: mixed})
			rig.Eventually(t, func() bool { return made.Load() > before+2000 },
				func() string { return "the flood has dried up" })
			rig.Well(ranks, rig.Command{Verb: "stop"})
			rig.Well(ranks, rig.Command{Verb: "ended"})
			rig.Leave(ranks)
			job.End(0)
		})
	}
}

func (a *attackers) over() bool {
	select {
	case <-a.stop:
		return true
	default:
		return false
	}
}

// garbage sends what a scanner, a confused program or a fuzzer would, again and again.
func (a *attackers) garbage(dial func() net.Conn) {
	rnd := rand.New(rand.NewPCG(1, 2))
	noise := make([]byte, 4096)
	for i := 0; !a.over(); i++ {
		conn := dial()
		if conn == nil {
			continue
		}
		for j := range noise {
			noise[j] = byte(rnd.Uint32())
		}
		b := [][]byte{
			noise,
			[]byte("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
			[]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
			append([]byte("tutti/3\n"), noise...),
			append([]byte("tutti/3\n"), make([]byte, 4096)...),
			bytes.Repeat([]byte{0xff}, 4096),
			{0x16, 0x03, 0x01, 0x02, 0x00, 0x01},
		}[i%7]
		conn.SetDeadline(time.Now().Add(100 * time.Millisecond))
		conn.Write(b)
		got, _ := io.Copy(io.Discard, io.LimitReader(conn, 1<<20))
		a.drained.Add(got)
		conn.Close()
	}
}

// drip begins a handshake correctly and continues with a byte from time to time.
func (a *attackers) drip(dial func() net.Conn) {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !a.over() {
		conn := dial()
		if conn == nil {
			continue
		}
		message := append([]byte("tutti/3\n"), make([]byte, 1000)...)
		for i := range message {
			conn.SetDeadline(time.Now().Add(rig.Patience))
			if _, err := conn.Write(message[i : i+1]); err != nil || a.over() {
				break
			}
			select {
			case <-tick.C:
			case <-a.stop:
			}
		}
		conn.Close()
	}
}

// end ends the attack and checks that the job has closed the silent connections, or does so in
// time.
func (a *attackers) end() {
	if a.over() {
		return
	}
	a.t.Helper()
	close(a.stop)
	a.wg.Wait()
	for _, conn := range a.idle {
		conn.SetReadDeadline(time.Now().Add(rig.Patience))
		if _, err := io.Copy(io.Discard, io.LimitReader(conn, 1<<20)); errors.Is(err, os.ErrDeadlineExceeded) {
			a.t.Errorf("a silent connection to %v stays open", conn.RemoteAddr())
		}
		conn.Close()
	}
}
