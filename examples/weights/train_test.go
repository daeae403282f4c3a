package main

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"tutti/endpoint"
	"tutti/pg"
	"tutti/pg/pgtest"
)

const secret = "a secret for the tests of this package"

// within ends long after everything that works: it turns a hang into a failure.
func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// newEndpoint makes an endpoint that ends with the test.
func newEndpoint(t *testing.T, cfg endpoint.Config) *endpoint.Endpoint {
	t.Helper()
	c, err := endpoint.NewContext(endpoint.ContextConfig{})
	if err != nil {
		t.Fatal(err)
	}
	cfg.Secret = secret
	e, err := endpoint.New(c, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		e.Close()
		c.Close()
	})
	return e
}

// connect makes a program that connects to an endpoint.
func connect(t *testing.T, name string, to *endpoint.Endpoint) (*endpoint.Endpoint, *endpoint.Peer) {
	t.Helper()
	e := newEndpoint(t, endpoint.Config{Name: name, Interfaces: "none"})
	p, err := e.Connect(within(t), to.Info())
	if err != nil {
		t.Fatal(err)
	}
	return e, p
}

func say(t *testing.T, p *endpoint.Peer, text string) {
	t.Helper()
	if err := p.Send([]byte(text)).Wait(within(t)); err != nil {
		t.Fatal(err)
	}
}

// The trainers wait for servers alone, and for others in the place of those that are lost.
func TestReportOutlivesPrograms(t *testing.T) {
	ctx := within(t)
	e := newEndpoint(t, endpoint.Config{Name: "trainer", Interfaces: "127.0.0.1"})
	tr, words, done := trainer{wait: 2}, make(chan word), make(chan error, 1)
	go listen(ctx, e, words)
	report := func(version int) { go func() { done <- tr.report(ctx, words, version) }() }
	ended := func() {
		t.Helper()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}

	connect(t, "onlooker", e) // stays, and says nothing
	first, p := connect(t, "server 0/2", e)
	_, q := connect(t, "server 1/2", e)
	report(1)
	say(t, p, "0/2 1")
	say(t, q, "1/2 1")
	ended()

	first.Close() // between two versions
	report(2)
	say(t, q, "1/2 2")
	lost, _ := connect(t, "server 0/2", e)
	lost.Close() // during one
	_, r := connect(t, "stranger", e)
	say(t, r, "good morning")
	last, p := connect(t, "server 0/2", e)
	say(t, p, "0/2 2")
	last.Close() // it has said all that is wanted of it
	ended()
}

// A server that was lost and has come again is one.
func TestServersAreCountedOnce(t *testing.T) {
	words := make(chan word, 5)
	for _, w := range []word{{1, "0/2", 7}, {2, "1/2", 6}, {1, "0/2", 7}, {2, "1/2", 7}, {2, "1/2", 8}} {
		words <- w
	}
	tr := trainer{wait: 2}
	if err := tr.report(within(t), words, 7); err != nil || len(words) != 1 {
		t.Errorf("%d words are left, want 1: %v", len(words), err)
	}
}

// A trainer closes the peers that have gone, also those that had gone before it heard them.
func TestTrainerForgetsPrograms(t *testing.T) {
	ctx := within(t)
	e := newEndpoint(t, endpoint.Config{Name: "trainer", Interfaces: "127.0.0.1", Timeout: time.Millisecond})
	gone, p := connect(t, "server", e)
	say(t, p, "0/1 1")
	gone.Close()
	until(t, func() bool { return e.Stats().Connected == 0 })
	words := make(chan word)
	go listen(ctx, e, words)
	if w := <-words; w != (word{gone.Info().ID, "0/1", 1}) {
		t.Errorf("the server says %+v", w)
	}
	until(t, func() bool { return len(e.Peers()) == 0 })
}

// until waits for a condition.
func until(t *testing.T, f func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for ctx := within(t); !f(); {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatal("it does not come")
		}
	}
}

// What is no flag is an error, before anything is done with the flags that follow it.
func TestArgumentsAreRefused(t *testing.T) {
	for _, args := range []string{"train extra --versions 1", "serve extra --part 0/1"} {
		err := run(within(t), strings.Fields(args))
		if err == nil || !strings.Contains(err.Error(), `"extra"`) {
			t.Errorf("weights %s: %v", args, err)
		}
	}
}

// The sum over any number of ranks changes the weights by the same.
func TestStepIsExact(t *testing.T) {
	for _, n := range []int{1, 2, 3, 10, 11, 12, 13, 25} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			pgtest.RunLocal(t, n, func(t *testing.T, g *pg.Group) {
				if change, err := step(t.Context(), g); change != 1./64 || err != nil {
					t.Errorf("%v, %v; want %v", change, err, 1./64)
				}
			})
		})
	}
}
