package bootstrap

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// answers are a store's to the question how long a lease lasts.
type answers struct {
	clientv3.Lease
	ttl int64
	err error
}

func (a answers) TimeToLive(context.Context, clientv3.LeaseID, ...clientv3.LeaseOption) (
	*clientv3.LeaseTimeToLiveResponse, error) {
	return &clientv3.LeaseTimeToLiveResponse{TTL: a.ttl}, a.err
}

// A lease is checked in whole seconds, and lasts through the one that counts as 0.
func TestLeaseInItsLastSecond(t *testing.T) {
	for _, c := range []struct {
		name string
		says answers
		want error
	}{
		{"a second is left", answers{ttl: 1}, nil},
		{"less is left", answers{ttl: 0}, nil},
		{"it has ended", answers{ttl: -1}, ErrLeaseLost},
		{"there is none", answers{err: rpctypes.ErrLeaseNotFound}, ErrLeaseLost},
		{"no answer", answers{err: context.DeadlineExceeded}, ErrStoreAway},
	} {
		s := &etcdStore{c: &clientv3.Client{Lease: c.says}, ctx: t.Context(), ttl: time.Second}
		if err := s.checkLease(); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
}

// leased is a store that has a lease for the job. The client gives up to keep it alive at first.
type leased struct {
	clientv3.KV
	clientv3.Lease
	id   clientv3.LeaseID
	kept int
}

func (l *leased) Get(context.Context, string, ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	return (*clientv3.GetResponse)(&pb.RangeResponse{Kvs: []*mvccpb.KeyValue{{Lease: int64(l.id)}}}), nil
}

func (l *leased) KeepAlive(ctx context.Context, id clientv3.LeaseID) (
	<-chan *clientv3.LeaseKeepAliveResponse, error) {
	if id != l.id {
		return nil, rpctypes.ErrLeaseNotFound
	}
	answers := make(chan *clientv3.LeaseKeepAliveResponse)
	if l.kept++; l.kept == 1 {
		close(answers)
	} else {
		context.AfterFunc(ctx, func() { close(answers) })
	}
	return answers, nil
}

// newSharing returns a handle whose client uses kv and lease.
func newSharing(t *testing.T, kv clientv3.KV, lease clientv3.Lease) *etcdStore {
	s := &etcdStore{c: &clientv3.Client{KV: kv, Lease: lease}, op: time.Minute, sharing: make(chan struct{}, 1)}
	s.ctx, s.cancel = context.WithCancel(t.Context())
	return s
}

// A handle keeps the job's lease alive again after its client has given that up.
func TestJobLeaseIsKeptAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &leased{id: 7}
		s := newSharing(t, l, l)
		if id, err := s.sharedLease(s.ctx, 0); id != l.id || err != nil {
			t.Fatal(id, err)
		}
		time.Sleep(2 * sharePause)
		if synctest.Wait(); l.kept != 2 || s.shared != l.id {
			t.Errorf("the lease was kept %d times, now %x; want twice, now %x", l.kept, s.shared, l.id)
		}
		s.cancel()
		s.wg.Wait()
	})
}

// unanswered is a store that is silent.
type unanswered struct {
	clientv3.KV
	asked chan struct{} // receives a token with each request
}

func (u unanswered) Get(ctx context.Context, _ string, _ ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	u.asked <- struct{}{}
	<-ctx.Done()
	return nil, ctx.Err()
}

// A write ends with its context also while the handle waits for the job's lease.
func TestWriteEndsWhileHandleWaitsForJobLease(t *testing.T) {
	u := unanswered{asked: make(chan struct{}, 2)}
	s := newSharing(t, u, nil)
	s.wg.Go(func() { s.hold(0) })
	<-u.asked
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	written := make(chan error, 1)
	go func() { written <- s.CompareAndSwap(ctx, "k", nil, []byte("v")) }()
	select {
	case err := <-written:
		if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, ErrStoreAway) {
			t.Error(err)
		}
	case <-time.After(30 * time.Second):
		t.Error("the write goes on after its context has ended")
	}
	s.cancel()
	s.wg.Wait()
}
