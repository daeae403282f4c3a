//go:build cgo && linux

package main

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"tutti/bootstrap"
	"tutti/bootstrap/storetest"
)

// The kinds of requests, STORE_SET and so on: a test cannot ask C.
const (
	storeSet = iota
	storeGet
	storeWait
	storeCompareAndSet
)

// lossy is a store whose first handle is first, and whose further ones come from next.
type lossy struct {
	*jobStore
	memory *storetest.Memory
	first  bootstrap.Store
	dials  int
}

func newLossy(t *testing.T, next func(context.Context) error) *lossy {
	l := &lossy{memory: storetest.NewMemory()}
	keeps := l.memory.Open() // the keys
	l.first = l.memory.Open()
	var err error
	l.jobStore, err = newJobStore(t.Context(), func(ctx context.Context) (bootstrap.Store, error) {
		if l.dials++; l.dials == 1 {
			return l.first, nil
		}
		if err := next(ctx); err != nil {
			return nil, err
		}
		return l.memory.Open(), nil
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		l.release()
		keeps.Close()
	})
	return l
}

// within makes a request about a key in a limited time.
func (l *lossy) within(t *testing.T, limit time.Duration, kind int, value string) (string, error) {
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	b, err := l.ask(ctx, kind, "key", []byte(value), nil)
	return string(b), err
}

// A handle takes longer to come than each request waits for it.
func TestRequestsWaitForTheSameHandle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLossy(t, func(ctx context.Context) error {
			select {
			case <-time.After(time.Second):
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
		if _, err := l.within(t, time.Second, storeSet, "before"); err != nil {
			t.Fatal(err)
		}
		l.memory.Expire(l.first)
		for range 9 {
			if _, err := l.within(t, 100*time.Millisecond, storeWait, ""); !errors.Is(err, context.DeadlineExceeded) {
				t.Fatalf("%v, want the end of the time", err)
			}
		}
		if b, err := l.within(t, 200*time.Millisecond, storeWait, ""); b != "before" || err != nil {
			t.Fatalf("%q, %v, want what was set", b, err)
		}
		if l.dials != 2 {
			t.Errorf("%d handles were asked for, want 2", l.dials)
		}
	})
}

func TestReleaseEndsWhatWaitsForAHandle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLossy(t, func(ctx context.Context) error {
			<-ctx.Done()
			return ctx.Err()
		})
		l.memory.Expire(l.first)
		ended := make(chan error)
		go func() {
			_, err := l.within(t, time.Hour, storeGet, "")
			ended <- err
		}()
		synctest.Wait()
		l.release()
		if err := <-ended; err != errReleased {
			t.Errorf("%v, want that the store was released", err)
		}
	})
}

func TestRefusedHandleIsAnErrorAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		refusal, attempts := errors.New("the password has changed"), 0
		l := newLossy(t, func(context.Context) error {
			if attempts++; attempts < 3 {
				return refusal
			}
			return nil
		})
		l.memory.Expire(l.first)
		begin := time.Now()
		if _, err := l.within(t, time.Hour, storeGet, ""); err != refusal || time.Since(begin) > 0 {
			t.Errorf("%v after %v, want the refusal at once", err, time.Since(begin))
		}
		time.Sleep(4 * retry) // the third attempt succeeds
		if _, err := l.within(t, time.Hour, storeGet, ""); err != nil {
			t.Error(err)
		}
	})
}

// away is a store whose next requests fail.
type away struct {
	bootstrap.Store
	fails int
}

func (a *away) fail() error {
	if a.fails == 0 {
		return nil
	}
	a.fails--
	return bootstrap.ErrStoreAway
}

func (a *away) Put(ctx context.Context, key string, value []byte, lease bool) error {
	return errors.Join(a.fail(), a.Store.Put(ctx, key, value, lease))
}

func (a *away) Delete(ctx context.Context, key string) error {
	return errors.Join(a.fail(), a.Store.Delete(ctx, key))
}

func (a *away) Get(ctx context.Context, key string) ([]byte, error) {
	b, err := a.Store.Get(ctx, key)
	return b, errors.Join(a.fail(), err)
}

func (a *away) CompareAndSwap(ctx context.Context, key string, old, new []byte) error {
	return errors.Join(a.fail(), a.Store.CompareAndSwap(ctx, key, old, new))
}

func TestRequestsAreRepeatedWhileTheStoreIsAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLossy(t, nil)
		a := &away{Store: l.first}
		l.handle = a
		for _, request := range []struct {
			kind        int
			value, want string
		}{{storeSet, "x", ""}, {storeGet, "", "x"}, {storeSet, "", ""}, {storeGet, "", ""}} {
			a.fails = 3
			if b, err := l.within(t, time.Second, request.kind, request.value); b != request.want || err != nil {
				t.Errorf("%+v: %q, %v", request, b, err)
			}
		}
		a.fails = 1 // it may have happened
		if _, err := l.within(t, time.Second, storeCompareAndSet, "x"); !errors.Is(err, bootstrap.ErrStoreAway) {
			t.Errorf("a compare and set: %v, want that the store is away", err)
		}
		a.fails = 1000
		begin := time.Now()
		_, err := l.within(t, time.Second, storeGet, "")
		if !errors.Is(err, bootstrap.ErrStoreAway) || time.Since(begin) != time.Second {
			t.Errorf("%v after %v, want that the store is away after a second", err, time.Since(begin))
		}
	})
}

func TestCompareAndSetWaitsForOneAttemptToTakeAHandle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var err error
		l := newLossy(t, func(context.Context) error {
			time.Sleep(time.Second)
			return err
		})
		l.memory.Expire(l.first)
		if _, err := l.within(t, time.Hour, storeCompareAndSet, "x"); err != nil {
			t.Errorf("%v, want the next handle to be used", err)
		}
		err = bootstrap.ErrStoreAway
		l.memory.Expire(l.handle)
		begin := time.Now()
		_, got := l.within(t, time.Hour, storeCompareAndSet, "x")
		if !errors.Is(got, bootstrap.ErrStoreAway) || time.Since(begin) != time.Second {
			t.Errorf("%v after %v, want that the store is away after a second", got, time.Since(begin))
		}
	})
}
