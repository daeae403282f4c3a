package join

import (
	"context"
	"fmt"
	"runtime"

	"tutti/bootstrap"
	"tutti/p2p"
	"tutti/p2p/inproc"
)

// Local makes the sessions of n ranks inside this process, without a store, in the state after the
// meeting.
func Local(n int, s *Settings) ([]*Session, error) {
	secret := []byte(bootstrap.NewSecret())
	all := make([]*Session, n)
	resolve := func(_ context.Context, rank int) (p2p.Peer, error) {
		if all[rank].Proxy.Closed() {
			return p2p.Peer{}, fmt.Errorf("it closed its group: %w", p2p.ErrPeerGone)
		}
		return p2p.Peer{Identity: all[rank].Self, Endpoints: all[rank].Proxy.Endpoints()}, nil
	}
	ring := min(max(64<<20/(n*n), 8<<10), 256<<10)
	for r := range all {
		of := *s
		of.Rank = r
		ss := New(&of)
		ss.Here = Place{Cores: runtime.NumCPU(), Exchanges: s.Exchanges, Incarnation: ss.Self.Incarnation}
		ss.Proxy = p2p.New(p2p.Config{Self: ss.Self, Size: n, Secret: secret, Resolve: resolve,
			Transports: []p2p.Transport{inproc.New(inproc.Config{RingBytes: ring})},
			Threads:    true, Oversubscribed: n > runtime.NumCPU(), Logger: s.Logger, Progress: s.Progress})
		ss.met.Store(true)
		all[r] = ss
	}
	for _, ss := range all {
		if _, err := ss.Proxy.Listen(context.Background()); err != nil {
			for _, o := range all {
				o.Close()
			}
			return nil, err
		}
	}
	return all, nil
}
