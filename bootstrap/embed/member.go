package embed

import (
	"net/url"

	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
)

// Member is one of several servers of a plain etcd, such as a site has, to measure the loss of a
// member. It requires no secret: addresses begin with etcd://.
type Member struct {
	Name, Dir    string
	Client, Peer string // HOST:PORT, where it listens for clients and for the others
	Cluster      string // all members, NAME=http://PEER,…
}

// An election takes this long or twice that, as is usual between machines of one room.
const heartbeat, election = 10, 100 // milliseconds

// StartMember starts a member. Close ends it; Err reports its end.
func StartMember(m Member) (*embed.Etcd, error) {
	c := embed.NewConfig()
	c.Name, c.Dir, c.InitialCluster = m.Name, m.Dir, m.Cluster
	at := func(address string) []url.URL { return []url.URL{{Scheme: "http", Host: address}} }
	c.ListenClientUrls, c.AdvertiseClientUrls = at(m.Client), at(m.Client)
	c.ListenPeerUrls, c.AdvertisePeerUrls = at(m.Peer), at(m.Peer)
	c.TickMs, c.ElectionMs = heartbeat, election
	c.UnsafeNoFsync = true
	c.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
	return embed.StartEtcd(c)
}
