package endpoint

import (
	"context"
	"testing"

	"tutti/endpoint/internal/args/argstest"
)

// A call with a context that is nil fails before it does anything, also while it would not wait.
func TestNilContextIsRefused(t *testing.T) {
	a, b, pb, pa := pair(t, Config{})
	other := newEndpoint(t, newContext(t), Config{})
	if _, err := other.Connect(t.Context(), b.Info()); err != nil {
		t.Fatal(err)
	}
	until(t, "the other endpoint", func() bool { return len(b.Peers()) == 2 }) // Accept has one to return
	got := make([]byte, 3)
	waiting, ended := pb.Recv(got), pb.Recv(nil)
	ended.Cancel()
	var none context.Context
	only := func(_ any, err error) error { return err }
	connect := func(info Info) argstest.Call {
		return argstest.Call{Want: "endpoint: connect: ctx is nil, want a context",
			Do: func() error { return only(a.Connect(none, info)) }}
	}
	unnamed := other.Info()
	unnamed.ID = 0
	created := func(c *Context) argstest.Call {
		return argstest.Call{Want: "endpoint: new: c is none that NewContext has made",
			Do: func() error { return only(New(c, Config{Secret: testSecret, Conns: 1, Interfaces: "none"})) }}
	}
	of := func(what string, do func() error) []argstest.Call {
		return []argstest.Call{{Want: what + ": ctx is nil, want a context", Do: do}}
	}
	wait := func(f *Future) argstest.Call {
		return of("endpoint b: wait", func() error { return f.Wait(none) })[0]
	}
	argstest.RefuseNil(t, "tutti/endpoint", map[string][]argstest.Call{
		"New":              {created(nil), created(&Context{})},
		"Endpoint.Connect": {connect(b.Info()), connect(other.Info()), connect(unnamed), connect(a.Info())},
		"Endpoint.Accept":  of("endpoint: accept", func() error { return only(b.Accept(none)) }),
		"Peer.Lookup":      of("endpoint b: lookup", func() error { return only(pb.Lookup(none, "r")) }),
		"Peer.Regions":     of("endpoint b: regions", func() error { return only(pb.Regions(none, "", 0)) }),
		"Peer.Stats":       of("endpoint b: stats", func() error { return only(pb.Stats(none)) }),
		"Peer.Watch": of("endpoint b: watch", func() (err error) {
			n := 0
			for _, err = range pb.Watch(none) {
				n++
			}
			if n != 1 {
				t.Errorf("Watch returns %d pairs, want the error alone", n)
			}
			return err
		}),
		"Future.Wait": {wait(waiting), wait(ended)},
	})
	if n := len(a.Peers()); n != 1 {
		t.Errorf("%d peers, want 1: a connect that was refused has left one", n)
	}
	if waiting.Ended() {
		t.Errorf("a wait that was refused has ended its operation: %v", waiting.Err())
	}
	if err := pa.Send([]byte("abc")).Wait(t.Context()); err != nil {
		t.Error(err)
	}
	if err := waiting.Wait(t.Context()); err != nil || string(got) != "abc" {
		t.Errorf("%q, %v", got, err)
	}
	if p := accept(t, b); p.ID() != other.Info().ID {
		t.Errorf("%v is accepted", p)
	}
}
