package join

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hashicorp/go-multierror"
	"golang.org/x/sync/errgroup"

	"tutti/bootstrap"
	"tutti/collectives"
	"tutti/internal/dial"
	"tutti/internal/ident"
	"tutti/p2p"
	"tutti/pg/internal/roster"
)

// Settings describe how a process joins its job.
type Settings struct {
	Rank, Size, MaxSize int
	Secret              []byte
	Terms               bootstrap.Terms
	OpenStore           func(ctx context.Context) (bootstrap.Store, error) // unused if MaxSize is 1
	Transports          func() ([]p2p.Transport, error)
	Interfaces, Ports   string
	Timeout             time.Duration      // of joining; 0: none
	Window              time.Duration      // how long two live ranks may be unable to reach each other
	Survives            bool               // the job goes on when a rank is lost
	Progress            bool               // the proxy has a goroutine of its own
	Exchanges           bool               // of the rank's Place
	Table               *collectives.Table // this rank's table, which is used if all others have it; nil: the default
	Dial                dial.Func          // makes the connections; nil: net.Dialer
	Logger              *slog.Logger
	// Listened says that the store did, before this process knew of it: if it is away, it has
	// ended.
	Listened bool
	// Ends reports whether rank 0, which serves the store, has left its job. It is nil at rank 0,
	// for other stores, and where ranks cannot meet again.
	Ends func(context.Context, bootstrap.Store) bool
	// Serves says that this rank serves the store to all others.
	Serves bool
	// Refused counts the connections that the store has refused, if this rank serves it. nil: it
	// does not.
	Refused func() bootstrap.Refused
}

// Within bounds ctx by d, unless that is 0.
func Within(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	if d > 0 {
		return context.WithTimeout(ctx, d)
	}
	return context.WithCancel(ctx)
}

// Hooks are callbacks of a Session. They are called from any goroutine.
type Hooks struct {
	// Link is called with the proxy's lock when a link came up (err is nil) or failed.
	Link func(peer p2p.Identity, err error)
	// Status answers a status request with at most ops operations.
	Status func(ctx context.Context, ops int) ([]byte, error)
}

// A Session is the state of one incarnation of a rank in its job. New and Connect set its fields;
// afterwards its methods are safe for concurrent use.
type Session struct {
	Self   p2p.Identity
	Proxy  *p2p.Proxy
	Here   Place
	Mapped bool // this rank's memory can be mapped by ranks of its machine

	settings *Settings
	log      *slog.Logger
	record   bootstrap.Record
	server   *bootstrap.Server
	client   *bootstrap.Client
	met      atomic.Bool

	mu      sync.Mutex
	store   bootstrap.Store
	former  []bootstrap.Store        // lost handles, until the record is under the lease of store
	records map[int]bootstrap.Record // the records by which ranks were last reached
}

// New makes a new incarnation of a rank. Other ranks cannot find it before Connect.
func New(s *Settings) *Session {
	return &Session{settings: s, log: s.Logger, records: map[int]bootstrap.Record{},
		Self: p2p.Identity{Rank: s.Rank, Incarnation: ident.New()}}
}

// Connect makes this process a rank that others can find: its listeners answer and, unless it is
// the only rank, its record is in the store. It waits for the store until ctx ends, unless
// Settings.Listened. After an error the Session must still be closed.
func (ss *Session) Connect(ctx context.Context, h Hooks) error {
	s := ss.settings
	pc := p2p.Config{Self: ss.Self, Size: s.MaxSize, Notify: h.Link, Secret: s.Secret, Resolve: ss.resolve,
		Logger: s.Logger, Heartbeat: s.Window / 4, Linger: min(s.Window, time.Second), Progress: s.Progress,
		Patient:        func() bool { return !ss.Met() },
		Oversubscribed: true} // until the places of all ranks are known
	if s.Survives { // a rank that cannot be reached counts as lost as soon as one whose link breaks
		pc.ConnectTimeout = max(s.Window, time.Second)
	}
	ss.Here = Place{CPUs: allowedCPUs(), Cores: runtime.NumCPU(), Table: s.Table.Hash(),
		Exchanges: s.Exchanges, Incarnation: ss.Self.Incarnation, User: uint32(os.Geteuid())}
	if s.MaxSize == 1 {
		ss.Proxy = p2p.New(pc)
		return nil
	}
	if err := roomForFiles(s.MaxSize, s.Serves); err != nil {
		return err
	}
	var err error
	if pc.Transports, err = s.Transports(); err != nil {
		return err
	}
	ss.Proxy = p2p.New(pc)

	// The round trips of the store and the handshake overlap with the transports' self-tests.
	eg, ectx := errgroup.WithContext(ctx)
	eg.Go(func() (err error) {
		ss.store, err = s.open(ectx)
		return err
	})
	ready := make(chan struct{})
	eg.Go(func() error {
		defer close(ready)
		_, err := ss.Proxy.Listen(ectx)
		ss.Mapped = err == nil && ss.Proxy.Shares() && p2p.CanExpose
		return err
	})
	describe := func(ctx context.Context, from int, incarnation uint64) (bootstrap.Endpoints, error) {
		select {
		case <-ready:
			return ss.Proxy.Endpoints(), nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	eg.Go(func() (err error) {
		ss.server, err = bootstrap.Serve(ectx, bootstrap.ServerConfig{Rank: s.Rank, Incarnation: ss.Self.Incarnation,
			Secret: s.Secret, Interfaces: s.Interfaces, Ports: s.Ports, Logger: s.Logger, Status: h.Status,
			Describe: describe})
		return err
	})
	if err := eg.Wait(); err != nil {
		return err
	}
	ss.record = bootstrap.NewRecord(s.Rank, s.MaxSize, ss.Self.Incarnation, ss.server.Addrs())
	ss.record.Terms = s.Terms
	ss.client = bootstrap.NewClient(bootstrap.ClientConfig{Self: ss.record, Secret: s.Secret, Dial: s.Dial,
		Started: true})
	machine := fnv.New64a()
	fmt.Fprintf(machine, "%s\x00%s", ss.record.Machine, ss.record.Network)
	ss.Here.Machine, ss.Here.Maps = machine.Sum64(), ss.Mapped
	dead := ss.dead()
	return ss.persist(ctx, func() error { return bootstrap.Register(ctx, ss.store, ss.record, dead) })
}

// open opens a handle on the store. It waits for a store that is away until ctx ends, unless
// s.Listened. In that case it returns bootstrap.ErrStoreEnds if the ranks can meet again.
func (s *Settings) open(ctx context.Context) (bootstrap.Store, error) {
	for warned := (time.Time{}); ; {
		store, err := s.OpenStore(ctx)
		switch away := errors.Is(err, bootstrap.ErrStoreAway); {
		case away && s.Listened && s.Ends != nil:
			return nil, fmt.Errorf("%w (%w)", bootstrap.ErrStoreEnds, err)
		case !away || s.Listened || ctx.Err() != nil:
			return store, err
		}
		if time.Since(warned) >= storeWarning {
			s.Logger.Warn("the job's store cannot be reached: this process waits for it", "err", err)
			warned = time.Now()
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %w", err, context.Cause(ctx))
		case <-time.After(storePause):
		}
	}
}

const (
	storePause   = 100 * time.Millisecond // between two attempts to reach the store
	storeWarning = 30 * time.Second       // between two warnings about it
)

// persist calls f again while that finds the store away, as it is when it elects a leader. It ends
// with ctx or the lease. A caller's store without leases is not asked again.
func (ss *Session) persist(ctx context.Context, f func() error) error {
	for {
		err := f()
		if store := ss.Store(); !errors.Is(err, bootstrap.ErrStoreAway) || store.TTL() == 0 || store.Err() != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(storePause):
		}
	}
}

// Table returns this rank's table of algorithms, nil for the default one.
func (ss *Session) Table() *collectives.Table { return ss.settings.Table }

// Met reports whether all ranks have been registered. After that, a rank without a record is gone.
func (ss *Session) Met() bool { return ss.met.Load() }

// Explain returns err. If this rank, or the store that it serves, refused connections of another
// secret or another build, the error says so.
func (ss *Session) Explain(err error) error {
	var r bootstrap.Refused
	if ss.server != nil {
		r = ss.server.Refused()
	}
	if ss.settings.Refused != nil {
		store := ss.settings.Refused()
		r.Secret, r.Version = r.Secret+store.Secret, r.Version+store.Version
	}
	if r.Secret > 0 {
		err = fmt.Errorf("%w (%d connections to this rank were refused: they did not know its job secret; is "+
			"TUTTI_SECRET the same at all ranks?)", err, r.Secret)
	}
	if r.Version > 0 {
		err = fmt.Errorf("%w (%d connections to this rank were refused: they were of another build of the library; "+
			"run the same build at all ranks)", err, r.Version)
	}
	return err
}

// Close ends the incarnation: its links, its listeners and its lease. It takes bounded time.
func (ss *Session) Close() error {
	var errs *multierror.Error
	if ss.Proxy != nil {
		errs = multierror.Append(errs, ss.Proxy.Close())
	}
	if ss.server != nil {
		ss.server.Close()
	}
	ss.release()
	if store := ss.Store(); store != nil {
		// a store that has ended before this rank is no failure of the rank
		if err := store.Close(); err != nil && !errors.Is(err, bootstrap.ErrStoreAway) {
			errs = multierror.Append(errs, err)
		}
	}
	if errs != nil && len(errs.Errors) == 1 {
		return errs.Errors[0]
	}
	return errs.ErrorOrNil()
}

// Store returns the handle on the job's store. A lost lease replaces the handle. It is nil for the
// only rank of a job.
func (ss *Session) Store() bootstrap.Store {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	return ss.store
}

// Reconnect replaces a store handle whose lease was lost, and registers this rank again. A record
// that the store still has does not disappear meanwhile: others would take this rank to be dead. If
// another incarnation has taken the slot, the next view shows it. After an error the next call goes
// on with the handle that this one has opened.
func (ss *Session) Reconnect(ctx context.Context, lost bootstrap.Store) error {
	store := ss.Store()
	if store == lost || store.Err() != nil {
		octx, cancel := context.WithTimeout(ctx, roster.StoreWait)
		defer cancel()
		fresh, err := ss.settings.OpenStore(octx)
		if err != nil {
			return err
		}
		ss.mu.Lock()
		ss.store, ss.former = fresh, append(ss.former, store)
		ss.mu.Unlock()
		store = fresh
	}
	rctx, cancel := context.WithTimeout(ctx, roster.StoreWait)
	defer cancel()
	record, err := ss.record.Encode()
	if err != nil {
		return err
	}
	if err = store.Adopt(rctx, bootstrap.RankKey(ss.Self.Rank), record); errors.Is(err, bootstrap.ErrConflict) {
		err = bootstrap.Register(rctx, store, ss.record, nil)
	}
	if err != nil && !errors.As(err, new(*bootstrap.SlotError)) {
		return err
	}
	ss.release()
	return nil
}

// release closes the former handles. The store may see the ends of their leases later than this
// process does, so that the record must not be under one of these any more.
func (ss *Session) release() {
	ss.mu.Lock()
	former := ss.former
	ss.former = nil
	ss.mu.Unlock()
	for _, store := range former {
		if err := store.Close(); err != nil {
			ss.log.Debug("a lost lease could not be given back", "err", err)
		}
	}
}

// Known returns the record by which a rank was last reached.
func (ss *Session) Known(rank int) (bootstrap.Record, bool) {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	rec, ok := ss.records[rank]
	return rec, ok
}

// Forget drops the record of a rank, unless it is of the incarnation except.
func (ss *Session) Forget(rank int, except uint64) {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	if rec, ok := ss.records[rank]; ok && (except == 0 || rec.Incarnation != except) {
		delete(ss.records, rank)
	}
}

// Answers returns nil if the process that published rec answers.
func (ss *Session) Answers(ctx context.Context, rec bootstrap.Record) error {
	_, err := ss.client.Describe(ctx, rec)
	return err
}

// Refuses reports whether nothing listens at any of rec's addresses.
func (ss *Session) Refuses(ctx context.Context, rec bootstrap.Record) bool {
	refused := len(rec.Addrs) > 0
	for _, addr := range rec.Addrs {
		dctx, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
		c, err := ss.settings.Dial.Dial(dctx, &net.Dialer{}, rec.Rank, addr)
		cancel()
		if err == nil {
			c.Close()
		}
		refused = refused && errors.Is(err, syscall.ECONNREFUSED)
	}
	return refused
}

// dead returns a function for bootstrap.Register that reports whether the process of a record seems
// to be dead. It warns once about a process, which may also be behind a filter that refuses
// connections.
func (ss *Session) dead() func(context.Context, bootstrap.Record) bool {
	var warned uint64
	return func(ctx context.Context, rec bootstrap.Record) bool {
		if rec.Addrs = ss.outside(rec); !ss.Refuses(ctx, rec) {
			return false
		}
		if warned != rec.Incarnation {
			ss.log.Warn("nothing listens at the addresses of a process that is still registered: this process "+
				"waits for its lease to end",
				"rank", rec.Rank, "pid", rec.PID, "host", rec.Host, "addresses", rec.Addrs)
			warned = rec.Incarnation
		}
		return true
	}
}

// outside returns the addresses of rec that do not lead back to this process's network, unless rec
// is of the same one: a connection that is refused here says nothing about a process elsewhere.
func (ss *Session) outside(rec bootstrap.Record) []string {
	if rec.Network == ss.record.Network {
		return rec.Addrs
	}
	own, _ := net.InterfaceAddrs()
	return slices.DeleteFunc(slices.Clone(rec.Addrs), func(addr string) bool {
		at, err := netip.ParseAddrPort(addr)
		return err != nil || at.Addr().Unmap().IsLoopback() || slices.ContainsFunc(own, func(a net.Addr) bool {
			n, ok := a.(*net.IPNet)
			return ok && n.IP.Equal(at.Addr().AsSlice())
		})
	})
}

// resolve is the proxy's directory: the store has a rank's incarnation, the rank itself its
// endpoints.
func (ss *Session) resolve(ctx context.Context, rank int) (p2p.Peer, error) {
	rec, known := ss.Known(rank)
	if !known {
		var err error
		if rec, err = ss.lookup(ctx, rank); err != nil {
			return p2p.Peer{}, err
		}
	}
	dctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	endpoints, err := ss.client.Describe(dctx, rec)
	if err != nil {
		ss.Forget(rank, 0) // the rank may be gone or replaced by now; the store knows
		switch differs := differing(err); {
		case differs && ss.Met(): // the rank that was met had what this one has
			return p2p.Peer{}, fmt.Errorf("another process has its place: %w: %w", p2p.ErrPeerGone, err)
		case differs:
			return p2p.Peer{}, fmt.Errorf("%w: %w", p2p.ErrUnfit, err)
		}
		return p2p.Peer{}, err
	}
	ss.mu.Lock()
	ss.records[rank] = rec
	ss.mu.Unlock()
	return p2p.Peer{Identity: p2p.Identity{Rank: rank, Incarnation: rec.Incarnation}, Endpoints: endpoints}, nil
}

// differing reports whether err says that two processes need other settings, or another build, to
// be in one job.
func differing(err error) bool {
	return errors.As(err, new(*bootstrap.TermsError)) || errors.As(err, new(*bootstrap.SizeError))
}

// Stay keeps this incarnation for a rank that it does not fit with, and for all others that are
// registered with another size or other terms, until they have found out, too, and their records
// are gone: without the record of this one bootstrap.Register would take it for a rank of an
// earlier job. After it has found another of them, Stay waits no longer than Register does, and in
// all no longer than for two.
func (ss *Session) Stay(ctx context.Context, rank int) {
	store, key := ss.Store(), bootstrap.RankKey(rank)
	limit := store.TTL() + 2*time.Second
	ctx, cancel := context.WithTimeout(ctx, 2*limit)
	defer cancel()
	again := time.NewTicker(lookPause)
	defer again.Stop()
	first, err := store.Get(ctx, key)
	if err != nil && !errors.Is(err, bootstrap.ErrNoKey) {
		return
	}
	for seen, newest := map[string][]byte{}, time.Now(); ; {
		records, err := store.List(ctx, bootstrap.RankKeys) // a caller's store cannot watch them all
		left := false
		for k, b := range records {
			rec, bad := bootstrap.DecodeRecord(b)
			if k == key && bytes.Equal(b, first) || bad == nil && ss.record.Compare(&rec) != nil {
				left = true
				if !bytes.Equal(seen[k], b) {
					seen[k], newest = b, time.Now()
				}
			}
		}
		if err != nil || !left || time.Since(newest) >= limit {
			return
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return
		}
	}
}

// lookup asks the store for a rank's record. Before all ranks have met it waits for the rank to
// register; afterwards a rank without a record is gone.
func (ss *Session) lookup(ctx context.Context, rank int) (bootstrap.Record, error) {
	if !ss.Met() {
		return bootstrap.Lookup(ctx, ss.Store(), rank)
	}
	b, err := ss.Store().Get(ctx, bootstrap.RankKey(rank))
	if errors.Is(err, bootstrap.ErrNoKey) {
		return bootstrap.Record{}, fmt.Errorf("its lease has ended: %w", p2p.ErrPeerGone)
	}
	if err != nil {
		return bootstrap.Record{}, err
	}
	return bootstrap.DecodeRecord(b)
}

var _ roster.Directory = (*Session)(nil)
