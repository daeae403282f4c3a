// Package etcd runs a member of an etcd in this process: the store of a job, in package embed, and
// those of tests and measurements. None of them has to survive the machine: nothing is synced to
// disk, and nothing is logged.
package etcd

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"

	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/etcdserver"
	"go.etcd.io/etcd/server/v3/storage/backend"
	"go.etcd.io/etcd/server/v3/storage/wal"
	"go.uber.org/zap"
)

// etcd takes two sizes from globals. The defaults would preallocate 128 MB of log for each member,
// and map 10 GiB for its database, which a limit of the address space (RLIMIT_AS) may not allow. A
// database that grows beyond its map is mapped anew.
func init() {
	wal.SegmentSizeBytes = 4 << 20
	backend.InitialMmapSize = 256 << 20
}

// Config returns the configuration of an etcd of one member with its data in dir, whose port the
// kernel chooses.
func Config(dir string) *embed.Config {
	c := embed.NewConfig()
	c.Name = "tutti"
	c.Dir = dir
	c.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
	c.TickMs, c.ElectionMs = 10, 50
	c.UnsafeNoFsync = true
	c.EnableGRPCGateway = false
	// A single member has no peers: it does not listen for any, and its peer address is only a
	// name.
	peer := url.URL{Scheme: "http", Host: "127.0.0.1:1"}
	c.ListenPeerUrls, c.AdvertisePeerUrls = nil, []url.URL{peer}
	c.InitialCluster = c.Name + "=" + peer.String()
	Listen(c, url.URL{Scheme: "http", Host: "127.0.0.1:0"})
	return c
}

// Listen sets where a member listens for clients.
func Listen(c *embed.Config, at url.URL) {
	c.ListenClientUrls, c.AdvertiseClientUrls = []url.URL{at}, []url.URL{at}
}

// Member is one of several members.
type Member struct {
	Name, Dir    string
	Client, Peer string // HOST:PORT, where it listens for clients and for the others
}

// Config returns its configuration. An election takes 0.1 to 0.2 s, as is usual between machines of
// one room.
func (m Member) Config(all []Member) *embed.Config {
	c := Config(m.Dir)
	c.Name = m.Name
	peer := url.URL{Scheme: "http", Host: m.Peer}
	c.ListenPeerUrls, c.AdvertisePeerUrls = []url.URL{peer}, []url.URL{peer}
	var names []string
	for _, x := range all {
		names = append(names, x.Name+"=http://"+x.Peer)
	}
	c.InitialCluster = strings.Join(names, ",")
	c.ElectionMs = 100
	Listen(c, url.URL{Scheme: "http", Host: m.Client})
	return c
}

// Server is a running member.
type Server struct{ e *embed.Etcd }

// Start starts a member. It returns when the member serves, or ctx ends: one of several serves when
// most of them run.
func Start(ctx context.Context, c *embed.Config) (*Server, error) {
	e, err := embed.StartEtcd(c)
	if err != nil {
		return nil, err
	}
	s := &Server{e}
	select {
	case <-e.Server.ReadyNotify():
		return s, nil
	case err = <-e.Err():
	case <-e.Server.StopNotify():
		err = errors.New("etcd stopped at its start")
	case <-ctx.Done():
		err = fmt.Errorf("etcd is not ready: %w", context.Cause(ctx))
	}
	s.Stop()
	return nil, err
}

// Address returns where clients connect to, HOST:PORT.
func (s *Server) Address() string { return s.e.Clients[0].Addr().String() }

// Core returns the member itself.
func (s *Server) Core() *etcdserver.EtcdServer { return s.e.Server }

// Err reports the end of the member for another reason than Stop.
func (s *Server) Err() <-chan error { return s.e.Err() }

// Stop ends the member without waiting for its clients or for other members.
func (s *Server) Stop() {
	s.e.Server.HardStop()
	s.e.Close()
}
