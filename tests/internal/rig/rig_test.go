//go:build linux

package rig

import (
	"errors"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"tutti/pg"
)

func TestMain(m *testing.M) { Main(m, nil) }

func TestVerify(t *testing.T) {
	for _, n := range []int{1, 2, 5} {
		gs, err := pg.Local(n, pg.Config{})
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for _, g := range gs {
			wg.Go(func() {
				for seed := range uint64(3) {
					if err := Verify(t.Context(), g, seed, []int{0, 1, 3, 1000}); err != nil {
						t.Errorf("rank %d of %d: %v", g.Rank(), n, err)
					}
				}
				if err := allReduce(t.Context(), g, 1, []int{1, 1000}); err != nil {
					t.Errorf("rank %d of %d: %v", g.Rank(), n, err)
				}
				g.Close()
			})
		}
		wg.Wait()
	}
}

func TestSameNamesWrongElement(t *testing.T) {
	x := []int32{1, 2, 4}
	var wrong *WrongError
	err := same("x", x, func(i int) int32 { return int32(i + 1) })
	if !errors.As(err, &wrong) || wrong.At != 2 || wrong.Got != int32(4) || wrong.Want != int32(3) {
		t.Errorf("got %v", err)
	}
	if f := faultOf(err); f.Kind != "wrong" {
		t.Errorf("got %v", f)
	}
}

// TestSlowHostDelaysPackets looks at what a slow cable does, and that it is over.
func TestSlowHostDelaysPackets(t *testing.T) {
	Need(t, "ping")
	s := NewSwitch(t, 2)
	s.LaySlow()
	ping := func() time.Duration { // some frames are lost when a cable is plugged in
		t.Helper()
		var out []byte
		for until := time.Now().Add(Patience); time.Now().Before(until); {
			var err error
			if out, err = s.Hosts[0].command("ping", "-c", "1", "-W", "1", s.Address(1)).CombinedOutput(); err != nil {
				continue
			}
			_, rest, _ := strings.Cut(string(out), "rtt min/avg/max/mdev = ")
			least, _, _ := strings.Cut(rest, "/")
			if d, err := time.ParseDuration(least + "ms"); err == nil {
				return d
			}
		}
		t.Fatalf("no answer: %s", out)
		return 0
	}
	do := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	ping()
	do(s.Slow(1, 30*time.Millisecond, 0))
	if d := ping(); d < 60*time.Millisecond {
		t.Errorf("a host behind a cable of 30ms answers after %v", d)
	}
	do(s.Part())
	d := ping()
	for until := time.Now().Add(Patience); d >= 60*time.Millisecond && time.Now().Before(until); { // a busy machine
		d = ping()
	}
	if d >= 60*time.Millisecond {
		t.Errorf("a host that is not slow any more answers after %v", d)
	}
	do(s.Slow(1, 0, 1))
	if s.Hosts[0].command("ping", "-c", "3", "-i", "0.1", "-W", "1", s.Address(1)).Run() == nil {
		t.Error("a cable that loses all frames carries some")
	}
	Eventually(t, func() bool { return s.Lost() > 0 }, func() string { return "the cable counts no lost frame" })
}

// Errors of a switch are returned: other goroutines than the test's must not fail it.
func TestSwitchReturnsErrors(t *testing.T) {
	s := NewSwitch(t, 2)
	if err := errors.Join(s.Deafen(0, 1), s.Mend(0, 1), s.Part(1), s.Part()); err != nil {
		t.Error(err)
	}
	s.Hosts[0].IP("link", "del", "data")
	for what, err := range map[string]error{"Deafen": s.Deafen(0, 1), "Mend": s.Mend(0, 1), "Part": s.Part(1)} {
		if err == nil {
			t.Errorf("%s of a host without an interface succeeds", what)
		}
	}
	out, err := s.host.command("ip", "link", "show", port(1)).Output()
	if !strings.Contains(string(out), "master far") {
		t.Errorf("the other host was not moved: %s, %v", out, err)
	}
}

func TestFaultNamesErrorType(t *testing.T) {
	inner := &pg.RankError{Rank: 1, Err: errors.New("x")}
	if f := faultOf(inner); f.Kind != "rank" || !f.Names(1, 2) || f.Names(2) {
		t.Errorf("got %+v", f)
	}
	if f := faultOf(&subgroupError{inner, func(slot int) int { return 2*slot + 1 }}); f.Kind != "rank" || !f.Names(3) {
		t.Errorf("of a subgroup: %+v", f)
	}
	if f := faultOf(&pg.TimeoutError{Missing: []pg.Seen{{Rank: 4}, {Rank: 5}}}); f.Kind != "timeout" ||
		!slices.Equal(f.Ranks, []int{4, 5}) {
		t.Errorf("got %+v", f)
	}
	if faultOf(nil) != nil {
		t.Error("no error is a fault")
	}
}

func TestAddress(t *testing.T) {
	for text, want := range map[string]string{
		"0100007F:1F90":                         "127.0.0.1:8080",
		"00000000:0001":                         "0.0.0.0:1",
		"00000000000000000000000001000000:0016": "[::1]:22",
		"0000000000000000FFFF00000100007F:1F90": "127.0.0.1:8080",
	} {
		if got := address(text); got != netip.MustParseAddrPort(want) {
			t.Errorf("%s is %v, want %s", text, got, want)
		}
	}
}

// TestProcessInspection looks at this process through /proc.
func TestProcessInspection(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	at := l.Addr().(*net.TCPAddr).AddrPort()
	if !slices.ContainsFunc(slices.Collect(maps.Values(table(os.Getpid()))),
		func(k Socket) bool { return k.Listening && k.Local == at }) {
		t.Errorf("the listener at %v is not seen", at)
	}
	s := New(t)
	p := s.Start(nil, "sleep", strconv.Itoa(1000))
	Eventually(t, func() bool { return s.Processes()[p.PID()] == "sleep 1000" },
		func() string { return "the stage's process is not seen" })
	p.Kill()
	for inode, k := range table(os.Getpid()) {
		if k.Listening && k.Local == at {
			s.seen[inode] = k
		}
	}
	time.AfterFunc(20*time.Millisecond, func() { l.Close() }) // too early only hides a fault
	s.Clean()
}

// A process that executes one program after the other is seen, with its arguments.
func TestStageFindsProcessInExec(t *testing.T) {
	s := New(t)
	const again = `exec /bin/sh -c "$0" "$0"`
	p := s.Start(nil, "/bin/sh", "-c", again, again)
	for range 300 {
		if all := s.Processes(); all[p.PID()] == "" {
			t.Fatalf("process %d is not among %v", p.PID(), all)
		}
	}
	p.Kill()
	s.Clean()
}
