package observe

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"tutti/p2p"
	"tutti/pg/flight"
)

// recorder starts an observer that writes records to dir, of the only rank of a job.
func recorder(t *testing.T, dir string) (*Observer, *p2p.Proxy) {
	t.Helper()
	proxy := p2p.New(p2p.Config{Size: 1})
	t.Cleanup(func() { proxy.Close() })
	o, err := Start(Config{Self: flight.Identity{Job: "job", Size: 1}, Dir: dir, NoSignal: true, Proxy: proxy,
		Groups: func() []Glance { return nil }, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(o.Stop)
	return o, proxy
}

// Of many failures the last ones have records, if they are not too frequent. A signal always leaves
// one.
func TestRecordsOfManyFailures(t *testing.T) {
	dir := t.TempDir()
	o, _ := recorder(t, dir)
	o.pause = time.Hour
	has := func(reason string) int {
		t.Helper()
		found, err := filepath.Glob(filepath.Join(dir, "flight-rank0-"+reason+"*.json"))
		if err != nil {
			t.Fatal(err)
		}
		return len(found)
	}
	for range maxFailures {
		o.dump(onFailure)
	}
	if n := has(onFailure); n != maxFailures {
		t.Fatalf("%d records of %d failures", n, maxFailures)
	}
	o.dump(onTimeout)
	if n := has(onTimeout); n != 0 {
		t.Errorf("%d records of a timeout that followed %d failures at once", n, maxFailures)
	}
	for range 2 {
		o.dump(onSignal)
	}
	if n := has(onSignal); n != 2 {
		t.Errorf("%d records of 2 signals", n)
	}
	o.pause = 0
	o.dump(onTimeout)
	first := filepath.Join(dir, "flight-rank0-failure.json")
	if _, err := os.Stat(first); has(onTimeout) != 1 || has(onFailure) != maxFailures-1 || !os.IsNotExist(err) {
		t.Errorf("a later timeout has %d records, the earlier failures have %d; the first one's: %v", has(onTimeout),
			has(onFailure), err)
	}

	// The user moves all of them: their names are used again, and only for new ones.
	old := t.TempDir()
	found, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range found {
		if err := os.Rename(path, filepath.Join(old, filepath.Base(path))); err != nil {
			t.Fatal(err)
		}
	}
	for range maxFailures {
		o.dump(onFailure)
	}
	if n := has(onFailure); n != maxFailures {
		t.Errorf("%d records of %d failures after the earlier ones were moved", n, maxFailures)
	}
}

// What the program has asked for leaves no record, other failures do.
func TestRecordsOfRequestedFailures(t *testing.T) {
	for why, want := range map[flight.Outcome]int{flight.Cancelled: 0, flight.Aborted: 0, flight.Closed: 0,
		flight.Failed: 1, flight.TimedOut: 1} {
		dir := t.TempDir()
		o, proxy := recorder(t, dir)
		proxy.Lock()
		o.FailureLocked(why, false)
		proxy.Unlock()
		o.Stop() // which waits for the record
		if found, err := filepath.Glob(filepath.Join(dir, "*.json")); err != nil || len(found) != want {
			t.Errorf("%v: %q, %v, want %d", why, found, err, want)
		}
	}
}
