package backoff

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestWaitYieldsAndThenSleeps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := Backoff{Yields: 3, Nap: time.Second}
		defer b.Stop()
		for round, want := range []time.Duration{0, 0, 0, time.Second, time.Second} {
			begin := time.Now()
			if err := b.Wait(t.Context()); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(begin); took != want {
				t.Errorf("wait %d took %v, want %v", round, took, want)
			}
		}
		b.Reset()
		begin := time.Now()
		if err := b.Wait(t.Context()); err != nil || time.Since(begin) != 0 {
			t.Errorf("after Reset a wait took %v: %v", time.Since(begin), err)
		}
	})
}

func TestWaitEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := Backoff{Nap: time.Hour}
		defer b.Stop()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		begin := time.Now()
		if err := b.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) || time.Since(begin) != time.Second {
			t.Errorf("%v after %v", err, time.Since(begin))
		}
		b = Backoff{Yields: 1}
		if err := b.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("with a context that has ended: %v", err)
		}
	})
}

func TestSleep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		began := time.Now()
		if !Sleep(ctx, time.Minute) || time.Since(began) != time.Minute {
			t.Errorf("a minute takes %v", time.Since(began))
		}
		if Sleep(ctx, 2*time.Hour) || time.Since(began) != time.Hour {
			t.Errorf("the context ends after %v", time.Since(began))
		}
		if Sleep(ctx, 0) {
			t.Error("nothing says that the context has ended")
		}
	})
}
