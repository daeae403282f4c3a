package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"tutti/bootstrap"
	"tutti/bootstrap/embed"
	"tutti/endpoint"
	"tutti/endpoint/directory"
	"tutti/mem"
)

// newDirectory starts a store, which the environment names, and opens its directory.
func newDirectory(t *testing.T) *directory.Directory {
	t.Helper()
	s, err := embed.Start(within(t), embed.Config{Secret: []byte(secret), Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	t.Setenv("TUTTI_STORE", s.Address())
	t.Setenv("TUTTI_SECRET", secret)
	d, err := directory.Open(within(t), directory.Config{Store: bootstrap.StoreConfig{Address: s.Address(),
		Secret: []byte(secret)}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

// newShard makes the endpoint of the trainer of a shard.
func newShard(t *testing.T) *endpoint.Endpoint {
	t.Helper()
	return newEndpoint(t, endpoint.Config{Name: "trainer", Interfaces: "127.0.0.1"})
}

// publish gives an endpoint a name.
func publish(t *testing.T, d *directory.Directory, shard int, e *endpoint.Endpoint) *directory.Publication {
	t.Helper()
	p, err := d.Publish(within(t), fmt.Sprintf("weights/%d", shard), e.Info())
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func register(t *testing.T, e *endpoint.Endpoint, name string, b []byte) {
	t.Helper()
	if _, err := e.Register(name, mem.Host(b, mem.Anywhere), endpoint.RegionConfig{}); err != nil {
		t.Fatal(err)
	}
}

func registerManifest(t *testing.T, e *endpoint.Endpoint, m manifest) {
	t.Helper()
	text, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	register(t, e, fmt.Sprint(manifestPrefix, m.Version), text)
}

// registerShard registers the weights of a shard.
func registerShard(t *testing.T, e *endpoint.Endpoint, m manifest, shard int) []float32 {
	t.Helper()
	from, to := m.span(shard, m.Shards)
	w := make([]float32, to-from)
	for i := range w {
		w[i] = weight(from+i, m.Version)
	}
	register(t, e, fmt.Sprint(m.Version), memory(w))
	return w
}

// A server that has fetched a version, and cannot say so as the trainer has gone, looks for another
// one.
func TestServerOutlivesTrainer(t *testing.T) {
	ctx, d := within(t), newDirectory(t)
	one := manifest{Version: 1, Weights: 8, Shards: 2}
	two := one
	two.Version = 2
	lost, other, again := newShard(t), newShard(t), newShard(t)
	registerManifest(t, lost, one)
	name := publish(t, d, 0, lost)
	done := make(chan error, 1)
	go func() { done <- (&server{part: 1, parts: 2, until: 2}).run(ctx) }()
	p, err := lost.Accept(ctx)
	if err != nil {
		t.Fatal(err)
	}
	until(t, func() bool { return lost.Stats().Served["read"].N > 0 })
	if _, err := p.Lookup(ctx, "any"); !errors.Is(err, endpoint.ErrNoRegion) { // after it has got the manifest
		t.Fatal(err)
	}
	lost.Close()
	if err := name.Withdraw(ctx); err != nil {
		t.Fatal(err)
	}

	registerShard(t, other, one, 1)
	registerShard(t, other, two, 1)
	publish(t, d, 1, other)
	registerManifest(t, again, two)
	publish(t, d, 0, again)
	if p, err = again.Accept(ctx); err != nil {
		t.Fatal(err)
	}
	text := make([]byte, 10)
	f := p.Recv(text)
	if err := f.Wait(ctx); err != nil || string(text[:f.Result(0).N]) != "1/2 2" {
		t.Errorf("the server says %q: %v", text, err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	if n := other.Stats().Sessions; n != 2 {
		t.Errorf("the server has connected %d times to a trainer that it lost sight of, want 2", n)
	}
}

// A server does not fetch again what the trainers have wrong.
func TestWrongWeightEndsServer(t *testing.T) {
	d, e := newDirectory(t), newShard(t)
	m := manifest{Version: 3, Weights: 8, Shards: 1}
	registerShard(t, e, m, 0)[6] = 1
	registerManifest(t, e, m)
	publish(t, d, 0, e)
	err := (&server{}).run(within(t))
	if err == nil || !strings.Contains(err.Error(), "weight 6 of version 3 is 1, want 6.0") {
		t.Errorf("%v", err)
	}
}

// A server that comes late, or again, takes the latest version of those that are there.
func TestServerTakesHighestVersion(t *testing.T) {
	lost := errors.New("lost")
	for want, names := range map[int][]string{
		10:  {"10", "9", manifestPrefix + "10", manifestPrefix + "9"},
		100: {manifestPrefix + "100", manifestPrefix + "99", manifestPrefix, manifestPrefix + "x"},
		8:   {manifestPrefix + "7", manifestPrefix + "8", "-" + manifestPrefix + "9"},
	} {
		event := func(name string, gone bool) endpoint.RegionEvent {
			return endpoint.RegionEvent{RemoteRegion: endpoint.RemoteRegion{Name: name}, Gone: gone}
		}
		versions, ended := highest(func(yield func(endpoint.RegionEvent, error) bool) {
			for _, name := range names {
				if !yield(event(name, false), nil) {
					return
				}
			}
			if yield(event(manifestPrefix+"200", true), nil) {
				yield(endpoint.RegionEvent{}, lost)
			}
		})
		if err := <-ended; err != lost {
			t.Errorf("%v: %v", names, err)
		}
		if got := <-versions; got != want {
			t.Errorf("%v: version %d, want %d", names, got, want)
		}
	}
}
