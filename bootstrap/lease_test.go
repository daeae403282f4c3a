package bootstrap

import (
	"context"
	"errors"
	"testing"
	"time"

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
