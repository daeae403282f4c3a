package embed

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.etcd.io/etcd/client/pkg/v3/fileutil"
	"go.etcd.io/etcd/server/v3/etcdserver"
	"go.etcd.io/etcd/server/v3/storage"
	"go.etcd.io/etcd/server/v3/storage/mvcc"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	"tutti/bootstrap"
	"tutti/internal/files"
)

// maxLive bounds the cost of the keys that exist, in bytes. The library's small writes have a
// quarter more.
const maxLive = 64 << 20

// small is the cost of a write that is not held up, or refused, for the sake of the larger ones, or
// of a program's: the records of a job are small.
const small = bootstrap.MaxValue / 4

// history bounds what the store keeps by bytes. etcd keeps every value that a key ever had until it
// is told to compact. Its own compactors go by the clock, and its quota counts the database's file,
// which never shrinks: at the quota it refuses writes, and goes on to when all data is gone. Here a
// watch counts the live data, and writes are refused while that is too much. The writes are counted
// too: after each period of them a round removes what was overwritten or deleted before the period
// began. The file reuses the space, and so is bounded without a quota.
//
// A watch that is more than about a period of writes behind ends, however much data is live. Its
// client begins another one.
type history struct {
	live    int64 // bound of kept
	period  int64 // bytes of writes between two rounds
	log     *slog.Logger
	retry   time.Duration // time between two attempts of a round, or to purge the log
	compact func(ctx context.Context, revision int64) error
	due     chan struct{} // holds one token when a round may be due
	events  mvcc.WatchStream
	wg      sync.WaitGroup
	ctx     context.Context
	cancel  context.CancelFunc

	mu       sync.Mutex
	kept     int64         // the live bytes, as of the revision seen
	seen     int64         // the last revision that the watch told
	answered int64         // the last revision that an answer told
	written  int64         // bytes of admitted writes that no round has taken account of
	changed  chan struct{} // closed when the watch or a round got on; nil while nobody waits
}

func newHistory(live int64, log *slog.Logger) *history {
	h := &history{live: live, period: live / 4, log: log, retry: time.Second, due: make(chan struct{}, 1)}
	h.ctx, h.cancel = context.WithCancel(context.Background())
	return h
}

// start begins to count and to make rounds. Nobody may have written to the server yet.
func (h *history) start(s *etcdserver.EtcdServer) {
	h.compact = func(ctx context.Context, revision int64) error {
		_, err := s.Compact(ctx, &pb.CompactionRequest{Revision: revision, Physical: true})
		if errors.Is(err, mvcc.ErrCompacted) {
			return nil
		}
		return err
	}
	h.seen = s.KV().Rev()
	h.events = s.Watchable().NewWatchStream()
	h.events.Watch(h.ctx, 0, []byte{0}, []byte{}, 0) // all keys, from now
	h.wg.Go(func() { h.count(h.events.Chan()) })
	h.wg.Go(h.rounds)
	h.wg.Go(func() { h.purge(s.Cfg.WALDir()) })
}

// stop ends what start began. The server must still run: it never answers a compaction that its end
// interrupts.
func (h *history) stop() {
	h.cancel()
	h.events.Close()
	h.wg.Wait()
}

// admit is an interceptor. It refuses writes while the live data is beyond its bound, and delays
// those that are two periods ahead of the rounds, the library's small ones at four.
func (h *history) admit(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	if n := cost(req); n > 0 {
		if err := h.reserve(ctx, n, ofProgram(req)); err != nil {
			return nil, err
		}
	}
	resp, err := next(ctx, req)
	if r, ok := resp.(interface{ GetHeader() *pb.ResponseHeader }); ok && err == nil {
		h.mu.Lock()
		h.answered = max(h.answered, r.GetHeader().GetRevision())
		h.mu.Unlock()
	}
	return resp, err
}

// cost returns what a request adds to the store, in bytes, as etcd's quota estimates it.
func cost(req any) int64 {
	switch req.(type) {
	case *pb.PutRequest, *pb.TxnRequest:
		return int64((&storage.BackendQuota{}).Cost(req))
	}
	return 0
}

// ofProgram reports whether a request writes keys of a program's own.
func ofProgram(req any) bool {
	switch r := req.(type) {
	case *pb.PutRequest:
		return bootstrap.OfProgram(string(r.Key))
	case *pb.TxnRequest:
		return slices.ContainsFunc(slices.Concat(r.Success, r.Failure), func(op *pb.RequestOp) bool {
			return bootstrap.OfProgram(string(op.GetRequestPut().GetKey()))
		})
	}
	return false
}

// reserve waits until a write that costs n bytes, of a program or the library, may be made, and
// counts it.
func (h *history) reserve(ctx context.Context, n int64, program bool) error {
	full, limit := h.live, 2*h.period
	if n <= small && !program {
		full, limit = h.live+h.live/4, 4*h.period
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for {
		if h.kept > full {
			if err := h.catchUp(ctx); err != nil {
				return err
			}
			if h.kept > full {
				return rpctypes.ErrGRPCNoSpace
			}
		}
		if h.written < limit {
			break
		}
		if err := h.wait(ctx); err != nil {
			return err
		}
	}
	if h.written += n; h.written >= h.period {
		select {
		case h.due <- struct{}{}:
		default:
		}
	}
	return nil
}

// catchUp waits until all is counted that clients know to be done. The caller holds h.mu.
func (h *history) catchUp(ctx context.Context) error {
	for answered := h.answered; h.seen < answered; {
		if err := h.wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

// wait waits for a change of what h.mu guards, which the caller holds.
func (h *history) wait(ctx context.Context) error {
	if h.changed == nil {
		h.changed = make(chan struct{})
	}
	changed := h.changed
	h.mu.Unlock()
	defer h.mu.Lock()
	select {
	case <-changed:
		return nil
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	case <-h.ctx.Done():
		return rpctypes.ErrGRPCStopped
	}
}

// tell ends the present waits. The caller holds h.mu.
func (h *history) tell() {
	if h.changed != nil {
		close(h.changed)
		h.changed = nil
	}
}

// count keeps account of the live data, until stop.
func (h *history) count(changes <-chan mvcc.WatchResponse) {
	costs := map[string]int64{} // of the keys that exist
	for c := range changes {
		h.mu.Lock()
		for _, e := range c.Events {
			key := string(e.Kv.Key)
			h.kept -= costs[key]
			if e.Type == mvccpb.Event_PUT {
				costs[key] = cost(&pb.PutRequest{Key: e.Kv.Key, Value: e.Kv.Value})
				h.kept += costs[key]
			} else {
				delete(costs, key)
			}
			h.seen = e.Kv.ModRevision
		}
		h.tell()
		h.mu.Unlock()
	}
}

// rounds makes the rounds that are due, until stop.
func (h *history) rounds() {
	failed := h.failing("the store cannot remove what was overwritten, and holds up writes")
	last := int64(1) // revision at the last round; that of an empty store
	for {
		select {
		case <-h.due:
		case <-h.ctx.Done():
			return
		}
		now, err := h.round(last)
		for ; err != nil; now, err = h.round(last) {
			if !failed(err) {
				return
			}
		}
		last = now
	}
}

// round compacts to the revision of the last round, and returns that of this one. It does nothing
// if less than a period was written since. Then writes that waited go on.
func (h *history) round(last int64) (now int64, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.written < h.period {
		return last, nil
	}
	if err := h.catchUp(h.ctx); err != nil {
		return 0, err
	}
	written := h.written // all that the watch has told was counted before
	now = h.seen         // no compaction overtakes the watch
	h.mu.Unlock()
	err = h.compact(h.ctx, last)
	h.mu.Lock()
	if err != nil {
		return 0, err
	}
	h.written -= written
	h.tell()
	return now, nil
}

// purge removes old parts of the log every second, until stop. etcd would let 30 seconds of it come
// together.
func (h *history) purge(dir string) {
	failed := h.failing("the store cannot remove old parts of its log for now")
	for {
		done, errs := fileutil.PurgeFileWithDoneNotify(nil, dir, "wal", 1, time.Second, h.ctx.Done())
		<-done
		select {
		case err := <-errs: // it gave up
			if failed(err) {
				continue
			}
		default:
		}
		return
	}
}

// failing returns a function that logs an error, at most once a minute, and waits until the next
// attempt. It returns false at stop.
func (h *history) failing(text string) func(error) bool {
	var last time.Time
	return func(err error) bool {
		if h.ctx.Err() == nil && time.Since(last) >= time.Minute {
			last = time.Now()
			h.log.Warn(text, "err", files.Explain(err))
		}
		select {
		case <-time.After(h.retry):
			return true
		case <-h.ctx.Done():
			return false
		}
	}
}
