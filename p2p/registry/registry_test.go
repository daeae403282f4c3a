package registry

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"tutti/p2p"
)

// Whatever transport works on this machine passes a frame to itself.
func TestProbe(t *testing.T) {
	kinds, err := Find(Auto)
	if err != nil || len(kinds) == 0 {
		t.Fatal(kinds, err)
	}
	for _, k := range kinds {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		if err := Probe(ctx, k, Options{}); err != nil {
			t.Errorf("%s: %v", k.Name, err)
		}
		cancel()
	}
}

// A transport that does not work says where it failed.
func TestProbeReportsBrokenTransport(t *testing.T) {
	broken := errors.New("no device")
	k := Kind{Name: "none", New: func(Options) (p2p.Transport, error) { return nil, broken }}
	if err := Probe(t.Context(), k, Options{}); !errors.Is(err, broken) {
		t.Error(err)
	}
}

func TestFindKeepsOrder(t *testing.T) {
	for text, want := range map[string]string{"shm": "shm", "tcp,shm": "tcp shm", "shm,tcp": "shm tcp"} {
		kinds, err := Find(text)
		var got []string
		for _, k := range kinds {
			got = append(got, k.Name)
		}
		if err != nil || strings.Join(got, " ") != want {
			t.Errorf("%s: %v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "udp", "shm,", "auto,shm"} {
		if k, err := Find(text); !errors.Is(err, ErrUnknown) || !strings.Contains(fmt.Sprint(err), Names()) {
			t.Errorf("%q: %v, %v", text, k, err)
		}
	}
}

func TestAddedRowIsPreferred(t *testing.T) {
	remove := Add(Kind{Name: "mine", Works: func() error { return nil }})
	if k, err := Find(Auto); err != nil || k[0].Name != "mine" {
		t.Error(k, err)
	}
	if !strings.HasPrefix(Names(), "mine, ") {
		t.Error(Names())
	}
	for _, name := range []string{"mine", "tcp", Auto, "a,b", ""} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%q was added", name)
				}
			}()
			Add(Kind{Name: name})
		}()
	}
	remove()
	if k, err := Find("mine"); err == nil {
		t.Error(k)
	}
}
