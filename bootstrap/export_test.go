package bootstrap

import "context"

// Lose has a handle on an etcd take its lease for lost.
func Lose(s Store, why error) { s.(*etcdStore).lose(why) }

// EndLease has the etcd end a handle's lease. The handle is not told.
func EndLease(ctx context.Context, s Store) error {
	e := s.(*etcdStore)
	_, err := e.c.Revoke(ctx, e.lease)
	return err
}
