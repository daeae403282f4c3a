package bootstrap

import (
	"context"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/connectivity"
)

func init() { namespaceFile = "" } // the tests may run in Kubernetes

// Lose has a handle on an etcd take its lease for lost.
func Lose(s Store, why error) { s.(*etcdStore).lose(why) }

// EndLease makes the etcd end a handle's lease. The handle is not notified.
func EndLease(ctx context.Context, s Store) error {
	e := s.(*etcdStore)
	_, err := e.c.Revoke(ctx, e.lease)
	return err
}

// LeaseJob gives the job of s a lease of ttl. Handles that know its former one keep that.
func LeaseJob(ctx context.Context, s Store, ttl time.Duration) error {
	e := s.(*etcdStore)
	l, err := e.c.Grant(ctx, int64(ttl/time.Second))
	if err == nil {
		_, err = e.c.Put(ctx, e.prefix+leaseKey, "", clientv3.WithLease(l.ID))
	}
	return err
}

// ServeStore serves a store from this process's memory, as rank 0 of a Meeting does.
func ServeStore(ctx context.Context, secret []byte) (address string, stop func(), err error) {
	s, err := serveStore(ctx, "127.0.0.1", "0", secret, nil)
	if err != nil {
		return "", nil, err
	}
	return s.address, s.close, nil
}

// UntilFailed returns when the connection of a handle on an etcd has failed, or ctx ends.
func UntilFailed(ctx context.Context, s Store) {
	c := s.(*etcdStore).c.ActiveConnection()
	for st := c.GetState(); st != connectivity.TransientFailure && c.WaitForStateChange(ctx, st); st = c.GetState() {
	}
}
