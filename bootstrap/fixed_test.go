package bootstrap_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"

	"tutti/bootstrap"
)

// setting is a KV of which only Set is used.
type setting struct {
	bootstrap.KV
	set func(ctx context.Context) error
}

func (s *setting) Set(ctx context.Context, _ string, _ []byte) error { return s.set(ctx) }

// A caller's store that is silent while a rank leaves is away. It is asked once for all keys.
func TestSilentCallersStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kv := &setting{set: func(context.Context) error { return nil }}
		s, err := bootstrap.OpenStore(t.Context(), kv, "j")
		if err != nil {
			t.Fatal(err)
		}
		for _, key := range []string{"a", "b", "c"} {
			if err := s.Put(t.Context(), key, []byte("x"), true); err != nil {
				t.Fatal(err)
			}
		}
		asked := 0
		kv.set = func(ctx context.Context) error {
			asked++
			<-ctx.Done()
			return ctx.Err()
		}
		if err := s.Close(); !errors.Is(err, bootstrap.ErrStoreAway) || !strings.Contains(err.Error(), "3 keys") {
			t.Error(err)
		}
		if asked != 1 {
			t.Errorf("it was asked %d times", asked)
		}
	})
}

// An error of a caller's store says why once.
func TestErrorOfCallersStore(t *testing.T) {
	cause := errors.New("the reason")
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	given, give := context.WithCancelCause(t.Context())
	give(cause)
	broken := errors.New("broken pipe")
	for _, c := range []struct {
		ctx  context.Context
		err  error
		want string
		is   []error
	}{
		{canceled, context.Canceled, "context canceled", []error{context.Canceled}},
		{given, fmt.Errorf("gave up: %w", context.Canceled), "the reason: gave up: context canceled",
			[]error{cause, context.Canceled}},
		{t.Context(), broken, "store cannot be reached: broken pipe", []error{bootstrap.ErrStoreAway, broken}},
	} {
		s, err := bootstrap.OpenStore(t.Context(), &setting{set: func(context.Context) error { return c.err }}, "j")
		if err != nil {
			t.Fatal(err)
		}
		err = s.Put(c.ctx, "k", nil, false)
		if err == nil || err.Error() != "set k in the caller's store: "+c.want {
			t.Errorf("%v, want %q", err, c.want)
		}
		for _, want := range c.is {
			if !errors.Is(err, want) {
				t.Errorf("%v is not %v", err, want)
			}
		}
	}
}
