package memkv

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func put(t *testing.T, s *Server, key, value string, lease int64) int64 {
	t.Helper()
	r, err := s.Put(t.Context(), &pb.PutRequest{Key: []byte(key), Value: []byte(value), Lease: lease})
	if err != nil {
		t.Fatal(err)
	}
	return r.Header.Revision
}

func get(t *testing.T, s *Server, from, end string) (all []string) {
	t.Helper()
	r, err := s.Range(t.Context(), &pb.RangeRequest{Key: []byte(from), RangeEnd: []byte(end)})
	if err != nil {
		t.Fatal(err)
	}
	for _, kv := range r.Kvs {
		all = append(all, fmt.Sprintf("%s=%s", kv.Key, kv.Value))
	}
	return all
}

func TestRangesAreOrdered(t *testing.T) {
	s := New()
	for _, key := range []string{"b/2", "a", "b/1", "b0", "c"} {
		put(t, s, key, "x", 0)
	}
	for _, c := range [][3]string{
		{"b/", "b0", "[b/1=x b/2=x]"}, {"b/", "\x00", "[b/1=x b/2=x b0=x c=x]"}, {"a", "", "[a=x]"}, {"d", "", "[]"},
	} {
		if got := fmt.Sprint(get(t, s, c[0], c[1])); got != c[2] {
			t.Errorf("range %q to %q: %s, want %s", c[0], c[1], got, c[2])
		}
	}
}

func TestLeasesEndUnlessKeptAlive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New()
		defer s.Close()
		grant := func() int64 {
			r, err := s.LeaseGrant(t.Context(), &pb.LeaseGrantRequest{TTL: 3})
			if err != nil || r.TTL != 3 {
				t.Fatal(r, err)
			}
			return r.ID
		}
		kept, left := grant(), grant()
		put(t, s, "kept", "1", kept)
		put(t, s, "left", "1", left)
		put(t, s, "taken over", "1", left)
		put(t, s, "taken over", "2", 0)
		alive := &keepAlives{ctx: t.Context()}
		for range 3 {
			time.Sleep(2 * time.Second)
			alive.ask = append(alive.ask, kept)
			if err := s.LeaseKeepAlive(alive); err != nil {
				t.Fatal(err)
			}
			if a := alive.answers[len(alive.answers)-1]; a.ID != kept || a.TTL != 3 {
				t.Errorf("kept alive: %v", a)
			}
		}
		if got := fmt.Sprint(get(t, s, "a", "\x00")); got != "[kept=1 taken over=2]" {
			t.Errorf("after two TTLs there are %s", got)
		}
		alive.ask = append(alive.ask, left)
		if err := s.LeaseKeepAlive(alive); err != nil || alive.answers[len(alive.answers)-1].TTL != 0 {
			t.Errorf("a lease that has ended was kept alive: %v, %v", alive.answers, err)
		}
		if r, err := s.LeaseTimeToLive(t.Context(), &pb.LeaseTimeToLiveRequest{ID: left}); err != nil || r.TTL != -1 {
			t.Errorf("a lease that has ended: %v, %v", r, err)
		}
		if _, err := s.Put(t.Context(), &pb.PutRequest{Key: []byte("k"), Lease: left}); !errors.Is(err,
			rpctypes.ErrGRPCLeaseNotFound) {
			t.Errorf("Put under a lease that has ended: %v", err)
		}
	})
}

// keepAlives is a stream that asks once for each of ask.
type keepAlives struct {
	grpc.ServerStream
	ctx     context.Context
	ask     []int64
	answers []*pb.LeaseKeepAliveResponse
}

func (k *keepAlives) Context() context.Context { return k.ctx }

func (k *keepAlives) Recv() (*pb.LeaseKeepAliveRequest, error) {
	if len(k.ask) == 0 {
		return nil, io.EOF
	}
	id := k.ask[0]
	k.ask = k.ask[1:]
	return &pb.LeaseKeepAliveRequest{ID: id}, nil
}

func (k *keepAlives) Send(r *pb.LeaseKeepAliveResponse) error {
	k.answers = append(k.answers, r)
	return nil
}

// watcher is a stream of watches.
type watcher struct {
	grpc.ServerStream
	ctx context.Context
	in  chan *pb.WatchRequest
	out chan *pb.WatchResponse
}

func (w *watcher) Context() context.Context { return w.ctx }

func (w *watcher) Recv() (*pb.WatchRequest, error) {
	select {
	case r := <-w.in:
		return r, nil
	case <-w.ctx.Done():
		return nil, w.ctx.Err()
	}
}

func (w *watcher) Send(r *pb.WatchResponse) error {
	select {
	case w.out <- r:
		return nil
	case <-w.ctx.Done():
		return w.ctx.Err()
	}
}

// watchStream runs a stream until the test ends.
func watchStream(t *testing.T, s *Server) *watcher {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	w := &watcher{ctx: ctx, in: make(chan *pb.WatchRequest), out: make(chan *pb.WatchResponse)}
	done := make(chan error, 1)
	go func() { done <- s.Watch(w) }()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return w
}

func (w *watcher) create(from, end string, revision int64) {
	w.in <- &pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: &pb.WatchCreateRequest{
		Key: []byte(from), RangeEnd: []byte(end), StartRevision: revision}}}
}

func (w *watcher) next(t *testing.T) *pb.WatchResponse {
	t.Helper()
	select {
	case r := <-w.out:
		return r
	case <-w.ctx.Done():
		t.Fatal("no answer")
		return nil
	}
}

func TestWatchDeliversEventsSinceRevision(t *testing.T) {
	s := New()
	first := put(t, s, "k/1", "a", 0)
	put(t, s, "other", "a", 0)
	put(t, s, "k/2", "a", 0)
	w := watchStream(t, s)
	w.create("k/", "k0", first+1)
	if r := w.next(t); !r.Created || r.Canceled {
		t.Fatal(r)
	}
	if r := w.next(t); len(r.Events) != 1 || string(r.Events[0].Kv.Key) != "k/2" {
		t.Fatal(r)
	}
	all := &pb.DeleteRangeRequest{Key: []byte("k/"), RangeEnd: []byte("k0")}
	if _, err := s.DeleteRange(t.Context(), all); err != nil {
		t.Fatal(err)
	}
	r := w.next(t)
	if len(r.Events) != 2 || r.Events[0].Type != mvccpb.DELETE || r.Events[1].Type != mvccpb.DELETE ||
		r.Events[0].Kv.ModRevision != r.Header.Revision || r.Events[1].Kv.ModRevision != r.Header.Revision {
		t.Errorf("one request that deletes two keys is told as %v", r)
	}
	w.in <- &pb.WatchRequest{RequestUnion: &pb.WatchRequest_CancelRequest{CancelRequest: &pb.WatchCancelRequest{
		WatchId: r.WatchId}}}
	if r := w.next(t); !r.Canceled {
		t.Error(r)
	}
}

func TestWatchOfCompactedRevisionIsRefused(t *testing.T) {
	for _, c := range []struct {
		what  string
		value string
		puts  int
	}{
		{"many events", "", 2*maxLog + 1},
		{"long values", strings.Repeat("v", 1<<16), 2*maxLogBytes>>16 + 1},
		{"one long value", strings.Repeat("v", 2*maxLogBytes+1), 1},
	} {
		t.Run(c.what, func(t *testing.T) {
			s := New()
			first := put(t, s, "k", c.value, 0)
			for i := range c.puts {
				put(t, s, "k", c.value+fmt.Sprint(i), 0)
			}
			if n, b := len(s.log), weight(s.log); n > 2*maxLog || b > 2*maxLogBytes || b != s.logBytes {
				t.Errorf("%d events of %d bytes are kept, and counted as %d bytes", n, b, s.logBytes)
			}
			w := watchStream(t, s)
			w.create("k", "", first)
			if r := w.next(t); !r.Created {
				t.Fatal(r)
			}
			r := w.next(t)
			if !r.Canceled || r.CompactRevision <= first {
				t.Fatalf("%d events come; those since revision %d are kept", len(r.Events), r.CompactRevision)
			}
			put(t, s, "k", "last", 0)
			w.create("k", "", r.CompactRevision)
			w.next(t)
			if r := w.next(t); r.Canceled || len(r.Events) != len(s.log) || r.Events[0].Kv != s.log[0].Kv {
				t.Errorf("it begins with %d events of %d", len(r.Events), len(s.log))
			}
		})
	}
}

// TestQueueIsBounded: events that a watcher does not take are dropped before they fill the memory,
// and it is sent away when it takes again.
func TestQueueIsBounded(t *testing.T) {
	const most = 1 << 10
	for what, n := range map[string]int{"many events": maxQueue / most, "long values": maxQueueBytes / most / most} {
		value := []byte{}
		if what == "long values" {
			value = make([]byte, most)
		}
		r := &pb.WatchResponse{}
		for range most {
			r.Events = append(r.Events, &mvccpb.Event{Kv: &mvccpb.KeyValue{Value: value}})
		}
		q := &queue{more: make(chan struct{}, 1)}
		for range 2 { // what was taken does not count
			for range n {
				q.put(r)
			}
			if all, full := q.take(); full || len(all) != n {
				t.Errorf("%s: %d of %d responses are there, full: %v", what, len(all), n, full)
			}
		}
		for range n + 1 {
			q.put(r)
		}
		if all, full := q.take(); !full || len(all) != n {
			t.Errorf("%s: %d responses are there, want %d, full: %v", what, len(all), n, full)
		}
	}
}

func TestTransactionsAreAtomic(t *testing.T) {
	s := New()
	before := put(t, s, "a", "1", 0)
	swap := func(want string, ops ...*pb.RequestOp) (*pb.TxnResponse, error) {
		return s.Txn(t.Context(), &pb.TxnRequest{Compare: []*pb.Compare{{Key: []byte("a"), Target: pb.Compare_VALUE,
			TargetUnion: &pb.Compare_Value{Value: []byte(want)}}}, Success: ops})
	}
	set := func(key string, lease int64) *pb.RequestOp {
		return &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte(key),
			Value: []byte("2"), Lease: lease}}}
	}
	if r, err := swap("0", set("b", 0)); err != nil || r.Succeeded || r.Header.Revision != before {
		t.Error(r, err)
	}
	if _, err := swap("1", set("b", 0), set("c", 99)); !errors.Is(err, rpctypes.ErrGRPCLeaseNotFound) {
		t.Error(err)
	}
	if got := fmt.Sprint(get(t, s, "a", "\x00")); got != "[a=1]" {
		t.Errorf("a transaction that failed has left %s", got)
	}
	if r, err := swap("1", set("a", 0), set("b", 0)); err != nil || !r.Succeeded || r.Header.Revision != before+1 {
		t.Error(r, err)
	}
	if r, err := s.Range(t.Context(), &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte{0}}); err != nil ||
		len(r.Kvs) != 2 || r.Kvs[0].Version != 2 || r.Kvs[0].CreateRevision != before ||
		r.Kvs[0].ModRevision != before+1 || r.Kvs[1].CreateRevision != before+1 {
		t.Error(r, err)
	}
}

func TestUnknownOptionsAreRefused(t *testing.T) {
	s, key, ctx := New(), []byte("k"), t.Context()
	errs := map[string]error{}
	_, errs["range at a revision"] = s.Range(ctx, &pb.RangeRequest{Key: key, Revision: 1})
	_, errs["range with a limit"] = s.Range(ctx, &pb.RangeRequest{Key: key, Limit: 1})
	_, errs["put that tells the old value"] = s.Put(ctx, &pb.PutRequest{Key: key, PrevKv: true})
	_, errs["nested transaction"] = s.Txn(ctx, &pb.TxnRequest{Success: []*pb.RequestOp{{
		Request: &pb.RequestOp_RequestTxn{RequestTxn: &pb.TxnRequest{}}}}})
	_, errs["compaction"] = s.Compact(ctx, &pb.CompactionRequest{})
	for what, err := range errs {
		if status.Code(err) != codes.Unimplemented {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := s.Put(ctx, &pb.PutRequest{}); !errors.Is(err, rpctypes.ErrGRPCEmptyKey) {
		t.Error(err)
	}
	big := make([]byte, maxBytes)
	if _, err := s.Put(ctx, &pb.PutRequest{Key: key, Value: big}); !errors.Is(err, rpctypes.ErrGRPCNoSpace) {
		t.Error(err)
	}
}
