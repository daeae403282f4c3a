package directory_test

import (
	"context"
	"testing"

	"tutti/endpoint/directory"
	"tutti/endpoint/internal/args/argstest"
)

// A call with a context that is nil fails before it does anything.
func TestNilContextIsRefused(t *testing.T) {
	address := site(t)
	d := lasting(t, address)
	kept := publish(t, d, "kept", info(1))
	e := newEndpoint(t, "e")
	var none context.Context
	only := func(_ any, err error) error { return err }
	of := func(call string, do func() error) []argstest.Call {
		return []argstest.Call{{Want: "directory endpoints: " + call + ": ctx is nil, want a context", Do: do}}
	}
	argstest.RefuseNil(t, "tutti/endpoint/directory", map[string][]argstest.Call{
		"Open": of("open", func() error {
			return only(directory.Open(none, directory.Config{Store: storeAt(address)}))
		}),
		"Directory.Lookup":  of("lookup", func() error { return only(d.Lookup(none, "kept")) }),
		"Directory.Wait":    of("wait", func() error { return only(d.Wait(none, "kept")) }),
		"Directory.Entries": of("entries", func() error { return only(d.Entries(none)) }),
		"Directory.Connect": of("connect", func() error { return only(d.Connect(none, e, "kept")) }),
		"Directory.Publish": of("publish", func() error { return only(d.Publish(none, "new", info(2))) }),
		"Directory.Watch": of("watch", func() (err error) {
			n := 0
			for _, err = range d.Watch(none) {
				n++
			}
			if n != 1 {
				t.Errorf("Watch returns %d pairs, want the error alone", n)
			}
			return err
		}),
		"Publication.Withdraw": of("withdraw", func() error { return kept.Withdraw(none) }),
	})
	has(t, d, "kept", info(1))
	noName(t, d, "new")
	publish(t, d, "new", info(2)) // nothing holds the name
}
