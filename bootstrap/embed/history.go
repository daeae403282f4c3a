package embed

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.etcd.io/etcd/client/pkg/v3/fileutil"
	"go.etcd.io/etcd/server/v3/etcdserver"
	"go.etcd.io/etcd/server/v3/storage"
	"go.etcd.io/etcd/server/v3/storage/mvcc"
	"go.etcd.io/etcd/server/v3/storage/schema"
	"google.golang.org/grpc"
)

// maxLive bounds the bytes of the keys that exist, and their values.
const maxLive = 64 << 20

// history bounds what the store keeps by bytes. etcd keeps every value that a key ever had until it
// is told to compact. Its own compactors go by the clock, and its quota counts the database's file,
// which never shrinks: at the quota it refuses writes, and goes on to when all data is gone. Here
// the writes are counted. After each period of them a round removes what was overwritten or deleted
// before the period began. The file reuses the space, and so is bounded without a quota.
//
// A watch that is further behind than a period of writes ends, and its client begins another one.
type history struct {
	live    int64 // bound of the live bytes
	period  int64 // bytes of writes between two rounds
	written atomic.Int64
	full    atomic.Bool
	due     chan struct{}  // holds one token when a round is due
	asks    chan chan bool // see room
	ctx     context.Context
	cancel  context.CancelFunc
	done    chan struct{} // closed at the end of run
}

func newHistory(live int64) *history {
	h := &history{live: live, period: live / 4, due: make(chan struct{}, 1), asks: make(chan chan bool),
		done: make(chan struct{})}
	h.ctx, h.cancel = context.WithCancel(context.Background())
	return h
}

// admit is an interceptor. It refuses writes while the live data is beyond its bound, and delays
// those that are two periods ahead of the rounds.
func (h *history) admit(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	if n := cost(req); n > 0 {
		if (h.full.Load() || h.written.Load() >= 2*h.period) && !h.room(ctx) {
			return nil, rpctypes.ErrGRPCNoSpace
		}
		if h.written.Add(n) >= h.period {
			select {
			case h.due <- struct{}{}:
			default:
			}
		}
	}
	return next(ctx, req)
}

// cost returns what a request adds to the store, in bytes, as etcd's quota estimates it.
func cost(req any) int64 {
	switch req.(type) {
	case *pb.PutRequest, *pb.TxnRequest:
		return int64((&storage.BackendQuota{}).Cost(req))
	}
	return 0
}

// room reports, after the round that is due, whether there is room for further data.
func (h *history) room(ctx context.Context) bool {
	answer := make(chan bool, 1)
	select {
	case h.asks <- answer:
		return <-answer
	case <-ctx.Done():
	case <-h.done:
	}
	return true // whatever comes of the request
}

// run makes the rounds, and removes old parts of the log, until stop. etcd would let 30 seconds of
// the log come together.
func (h *history) run(s *etcdserver.EtcdServer) {
	defer close(h.done)
	purged, _ := fileutil.PurgeFileWithDoneNotify(nil, s.Cfg.WALDir(), "wal", 1, time.Second, h.ctx.Done())
	defer func() { <-purged }()
	var last int64 // the store's revision at the last round
	for {
		select {
		case <-h.due:
			last = h.round(s, last)
		case answer := <-h.asks:
			last = h.round(s, last)
			answer <- !h.full.Load()
		case <-h.ctx.Done():
			return
		}
	}
}

// stop ends run. The server must still run: it never answers a compaction that its end interrupts.
func (h *history) stop() {
	h.cancel()
	<-h.done
}

// round compacts to the revision of the last round, and to the present one if too much remains. It
// sets full, and returns the present revision. It does nothing if nothing has changed.
func (h *history) round(s *etcdserver.EtcdServer, last int64) int64 {
	now := s.KV().Rev()
	if now == last {
		return last
	}
	written := h.written.Load()
	full, err := h.compact(s, last)
	if full && err == nil {
		full, err = h.compact(s, now)
	}
	if err != nil {
		return last // a later write tries again
	}
	h.written.Add(-written)
	h.full.Store(full)
	return now
}

// compact removes what was overwritten or deleted up to a revision, and reports whether what
// remains is beyond the bound.
func (h *history) compact(s *etcdserver.EtcdServer, revision int64) (full bool, err error) {
	if revision > 0 {
		_, err := s.Compact(h.ctx, &pb.CompactionRequest{Revision: revision, Physical: true})
		if err != nil && !errors.Is(err, mvcc.ErrCompacted) {
			return false, err
		}
	}
	b := s.Backend()
	if b.SizeInUse() <= h.live {
		return false, nil
	}
	left := h.live // pages in use may be half empty
	tx := b.ConcurrentReadTx()
	tx.RLock()
	defer tx.RUnlock()
	tx.UnsafeForEach(schema.Key, func(k, v []byte) error {
		left -= int64(len(k) + len(v))
		return nil
	})
	return left < 0, nil
}
