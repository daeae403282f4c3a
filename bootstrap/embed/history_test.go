package embed

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.etcd.io/etcd/server/v3/storage/mvcc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

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

// limited starts a store for so many bytes of live data, and connects to it.
func limited(t *testing.T, live int64) (*Server, bootstrap.Store) {
	t.Helper()
	s := start(t, Config{Dir: t.TempDir(), live: live})
	c, err := dial(t, s.Address())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return s, c
}

// A store that is full says what to do, and is full no longer when keys were deleted.
func TestFullStore(t *testing.T) {
	const live, size = 1 << 20, 16 << 10
	_, c := limited(t, live)
	ctx := t.Context()
	for range 2 {
		n, err := 0, error(nil)
		for ; err == nil; n++ {
			err = c.Put(ctx, fmt.Sprint("k", n), make([]byte, size), false)
		}
		if n*size < live/2 || n*size > 2*live || !strings.Contains(err.Error(), "it is full") ||
			!strings.Contains(err.Error(), "TUTTI_STORE") || strings.Contains(err.Error(), "etcdctl") {
			t.Fatalf("after %d bytes of at most %d: %v", n*size, live, err)
		}
		err = nil
		few := 0 // such as the records of a job
		for ; err == nil; few++ {
			err = c.Put(ctx, fmt.Sprint("few", few), make([]byte, size/2), true)
		}
		if few*size/2 < live/8 || few*size/2 > live/2 || !strings.Contains(err.Error(), "it is full") {
			t.Fatalf("after %d bytes of small values in a store that is full for larger ones: %v", few*size/2, err)
		}
		if _, err := c.Get(ctx, "k0"); err != nil {
			t.Error(err)
		}
		for i := range n {
			if err := errors.Join(c.Delete(ctx, fmt.Sprint("k", i)), c.Delete(ctx, fmt.Sprint("few", i))); err != nil {
				t.Fatal(err)
			}
		}
		if err = c.Put(ctx, "k", make([]byte, size), false); err != nil {
			t.Fatal(err)
		}
	}
}

// A store that is full of a program's keys, however small, takes what the library writes about the
// job: its view, and the records of ranks.
func TestProgramLeavesRoom(t *testing.T) {
	const live = 1 << 20
	_, c := limited(t, live)
	ctx := t.Context()
	const view = "membership/view" // of pg/membership
	if err := c.CompareAndSwap(ctx, view, nil, []byte("1")); err != nil {
		t.Fatal(err)
	}
	n, size, err := 0, small/4, error(nil)
	for err == nil { // the program sets keys, and creates them as a sum does
		key := fmt.Sprint(bootstrap.ProgramKeys, n)
		if n++; n%2 == 0 {
			err = c.Put(ctx, key, make([]byte, size), false)
		} else {
			err = c.CompareAndSwap(ctx, key, nil, make([]byte, size))
		}
	}
	if !strings.Contains(err.Error(), "it is full") || n*size < live/2 {
		t.Fatalf("after %d bytes: %v", n*size, err)
	}
	record := make([]byte, 1000)
	for i := range live / 8 / len(record) {
		if err := c.Put(ctx, bootstrap.RankKey(i), record, true); err != nil {
			t.Fatalf("record %d: %v", i, err)
		}
	}
	if err := c.CompareAndSwap(ctx, view, []byte("1"), []byte("2")); err != nil {
		t.Errorf("the view: %v", err)
	}
	for i := range n / 2 { // also by a compare and swap
		key := fmt.Sprint(bootstrap.ProgramKeys, 2*i)
		if err := c.CompareAndSwap(ctx, key, make([]byte, size), nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Put(ctx, bootstrap.ProgramKeys+"k", make([]byte, size), false); err != nil {
		t.Errorf("after half of the program's keys were deleted: %v", err)
	}
}

// Writers that are ahead of the rounds share them: there is one for each period of writes, and none
// for writes that are refused, or for deletions.
func TestWritersShareRounds(t *testing.T) {
	const live, writers, each = 1 << 20, 200, 5
	s := start(t, Config{Dir: t.TempDir(), live: live})
	h, core := s.history, s.etcd.Core()
	var rounds, written atomic.Int64
	compact := h.compact
	h.compact = func(ctx context.Context, revision int64) error {
		rounds.Add(1)
		return compact(ctx, revision)
	}
	do := func(req any) error {
		_, err := h.admit(t.Context(), req, nil, func(ctx context.Context, _ any) (any, error) {
			if req, ok := req.(*pb.DeleteRangeRequest); ok {
				return core.DeleteRange(ctx, req)
			}
			written.Add(cost(req))
			return core.Put(ctx, req.(*pb.PutRequest))
		})
		return err
	}
	var deleted atomic.Int64
	var wg sync.WaitGroup
	for i := range writers {
		wg.Go(func() {
			for n := 0; n < each; {
				err := do(&pb.PutRequest{Key: fmt.Append(nil, "k", i), Value: make([]byte, bootstrap.MaxValue)})
				if err == nil {
					n++
				} else if errors.Is(err, rpctypes.ErrGRPCNoSpace) {
					err = do(&pb.DeleteRangeRequest{Key: fmt.Append(nil, "k", deleted.Add(1)%writers)})
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	if n := rounds.Load(); n == 0 || n > written.Load()/h.period {
		t.Errorf("%d rounds for %d bytes of writes, with periods of %d", n, written.Load(), h.period)
	}
}

// fakeHistory returns a history with rounds that call compact, of a store in which nothing is live.
func fakeHistory(t *testing.T, log io.Writer, compact func(context.Context) error) *history {
	h := newHistory(1<<20, slog.New(slog.NewTextHandler(log, nil)))
	h.retry = time.Millisecond
	h.compact = func(ctx context.Context, _ int64) error { return compact(ctx) }
	h.wg.Go(h.rounds)
	t.Cleanup(func() {
		h.cancel()
		h.wg.Wait()
	})
	return h
}

// fill reserves for large writes until further ones wait.
func fill(t *testing.T, h *history) {
	t.Helper()
	for range 2 * h.period / bootstrap.MaxValue {
		if err := h.reserve(t.Context(), bootstrap.MaxValue, false); err != nil {
			t.Fatal(err)
		}
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := h.reserve(ended, bootstrap.MaxValue, false); status.Code(err) != codes.Canceled {
		t.Fatalf("a write ahead of a round that has not ended: %v", err)
	}
}

// The library's small writes do not wait behind large ones that are ahead of the rounds, as a
// program's do.
func TestSmallWritesPass(t *testing.T) {
	goOn := make(chan struct{})
	h := fakeHistory(t, io.Discard, func(ctx context.Context) error {
		select {
		case <-goOn:
		case <-ctx.Done():
		}
		return ctx.Err()
	})
	fill(t, h)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := h.reserve(ended, small, true); status.Code(err) != codes.Canceled {
		t.Errorf("a small write of a program: %v", err)
	}
	for range 4 {
		if err := h.reserve(t.Context(), small, false); err != nil {
			t.Error(err)
		}
	}
	close(goOn)
	if err := h.reserve(t.Context(), bootstrap.MaxValue, false); err != nil {
		t.Error(err)
	}
}

// After a failed compaction writes wait for one that succeeds.
func TestFailedCompaction(t *testing.T) {
	results := make(chan error)
	var log strings.Builder
	h := fakeHistory(t, &log, func(ctx context.Context) error {
		select {
		case err := <-results:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	fill(t, h)
	for range 3 {
		results <- errors.New("too many requests")
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := h.reserve(ended, bootstrap.MaxValue, false); status.Code(err) != codes.Canceled {
		t.Errorf("a write after a failed compaction: %v", err)
	}
	results <- nil
	if err := h.reserve(t.Context(), bootstrap.MaxValue, false); err != nil {
		t.Error(err)
	}
	h.cancel()
	h.wg.Wait()
	if n := strings.Count(log.String(), "too many requests"); n != 1 {
		t.Errorf("%d records of 3 errors: %s", n, &log)
	}
}

type writerFunc func([]byte)

func (f writerFunc) Write(b []byte) (int, error) {
	f(b)
	return len(b), nil
}

// Old parts of the log are removed, though an attempt failed.
func TestPurgeGoesOn(t *testing.T) {
	dir := t.TempDir()
	made, wal := filepath.Join(dir, "made"), filepath.Join(dir, "wal")
	if err := os.Mkdir(made, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"1.wal", "2.wal", "3.wal"} {
		if err := os.WriteFile(filepath.Join(made, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	logged := make(chan string, 1)
	h := fakeHistory(t, writerFunc(func(b []byte) { logged <- string(b) }), nil)
	h.wg.Go(func() { h.purge(wal) })
	if text := <-logged; !strings.Contains(text, "no such file") {
		t.Error(text)
	}
	if err := os.Rename(made, wal); err != nil {
		t.Fatal(err)
	}
	for len(entries(t, wal)) > 1 {
		time.Sleep(time.Millisecond)
	}
}

// A watch that is less than a period of writes behind goes on, however much data is live.
func TestHistoryOfPeriod(t *testing.T) {
	const live, n = 1 << 20, 14
	s, c := limited(t, live)
	core := s.etcd.Core()
	var revisions []int64 // after each write
	for i := range 6 * n {
		if err := c.Put(t.Context(), fmt.Sprint("k", i%n), make([]byte, bootstrap.MaxValue), false); err != nil {
			t.Fatal(err)
		}
		revisions = append(revisions, core.KV().Rev())
		behind := max(0, i+1-live/4/bootstrap.MaxValue)
		req := &pb.RangeRequest{Key: []byte("k"), Revision: revisions[behind]}
		if _, err := core.Range(t.Context(), req); err != nil {
			t.Fatalf("write %d: the state after write %d: %v", i, behind, err)
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
