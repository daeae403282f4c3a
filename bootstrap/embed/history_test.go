package embed

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"strings"
	"sync"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/server/v3/storage/mvcc"

	"tutti/bootstrap"
)

// What was overwritten takes no space: a store is never full of it.
func TestStoreForgetsOverwrittenValues(t *testing.T) {
	const live, times = 1 << 20, 12
	s := start(t, Config{Dir: t.TempDir(), live: live})
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			c, err := dial(t, s.Address())
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			value := make([]byte, bootstrap.MaxValue>>i)
			for written := 0; written < times*live/4; written += len(value) {
				if err := c.Put(t.Context(), fmt.Sprint("k", i), value, i%2 == 0); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	if size := s.etcd.Core().Backend().Size(); size > 8*live {
		t.Errorf("the file has %d bytes for %d of data", size, live)
	}
}

// A store that is full says what to do, and is full no longer when keys were deleted.
func TestFullStore(t *testing.T) {
	const live, size = 1 << 20, 16 << 10
	s := start(t, Config{Dir: t.TempDir(), live: live})
	c, err := dial(t, s.Address())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx := t.Context()
	for range 2 {
		n := 0
		for ; err == nil; n++ {
			err = c.Put(ctx, fmt.Sprint("k", n), make([]byte, size), false)
		}
		if n*size < live/2 || n*size > 2*live || !strings.Contains(err.Error(), "it is full") ||
			!strings.Contains(err.Error(), "TUTTI_STORE") || strings.Contains(err.Error(), "etcdctl") {
			t.Fatalf("after %d bytes of at most %d: %v", n*size, live, err)
		}
		if err = c.Create(ctx, "another", []byte("value"), true); err == nil {
			t.Fatal("a full store takes a key")
		}
		if _, err := c.Get(ctx, "k0"); err != nil {
			t.Error(err)
		}
		for i := range n {
			if err := c.Delete(ctx, fmt.Sprint("k", i)); err != nil {
				t.Fatal(err)
			}
		}
		if err = c.Put(ctx, "k", make([]byte, size), false); err != nil {
			t.Fatal(err)
		}
	}
}

// A client that was away while the changes that it waits for were removed gets the present state.
func TestFollowBeyondHistory(t *testing.T) {
	const live = 1 << 20
	s := start(t, Config{Dir: t.TempDir(), live: live})
	var mu sync.Mutex
	var conns []net.Conn
	away := make(chan struct{}) // no connection until it is closed
	close(away)
	far, err := bootstrap.DialStore(t.Context(), bootstrap.StoreConfig{Address: s.Address(), Job: "j", Secret: secret,
		LeaseTTL: patience,
		Dial: func(ctx context.Context, d *net.Dialer, _ int, address string) (net.Conn, error) {
			mu.Lock()
			defer mu.Unlock()
			select {
			case <-away:
			default:
				return nil, errors.New("away")
			}
			conn, err := d.DialContext(ctx, "tcp", address)
			if err == nil {
				conns = append(conns, conn)
			}
			return conn, err
		}})
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	near, err := dial(t, s.Address())
	if err != nil {
		t.Fatal(err)
	}
	defer near.Close()
	ctx, cancel := context.WithCancel(t.Context())
	put := func(key, value string) {
		t.Helper()
		if err := near.Put(ctx, key, []byte(value), false); err != nil {
			t.Fatal(err)
		}
	}
	put("d/a", "1")
	states := make(chan map[string]string)
	var wg sync.WaitGroup
	wg.Go(func() {
		now := map[string]string{}
		tell := func() {
			select {
			case states <- maps.Clone(now):
			case <-ctx.Done():
			}
		}
		err := far.(bootstrap.Follower).Follow(ctx, "d/", func(all map[string][]byte) {
			clear(now)
			for k, v := range all {
				now[k] = string(v)
			}
			tell()
		}, func(e bootstrap.Event) {
			if now[e.Key] = string(e.Value); !e.Exists {
				delete(now, e.Key)
			}
			tell()
		})
		if !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	defer wg.Wait()
	defer cancel()
	await := func(want map[string]string) {
		t.Helper()
		for now := range states {
			if maps.Equal(now, want) {
				return
			}
			t.Logf("%v, not yet %v", now, want)
		}
	}
	await(map[string]string{"d/a": "1"})
	put("d/b", "1")
	await(map[string]string{"d/a": "1", "d/b": "1"})

	core := s.etcd.Core()
	seen := core.KV().Rev()
	mu.Lock()
	away = make(chan struct{})
	for _, conn := range conns {
		conn.Close()
	}
	mu.Unlock()
	if err := near.Delete(ctx, "d/a"); err != nil {
		t.Fatal(err)
	}
	put("d/b", "2")
	gone := func() bool {
		_, err := core.Range(ctx, &pb.RangeRequest{Key: []byte("k"), Revision: seen + 2})
		return errors.Is(err, mvcc.ErrCompacted)
	}
	for !gone() {
		put("k", strings.Repeat("x", live/16))
	}
	mu.Lock()
	close(away)
	mu.Unlock()
	await(map[string]string{"d/b": "2"})
	put("d/c", "1")
	await(map[string]string{"d/b": "2", "d/c": "1"})
}
