package join

import (
	"bytes"
	"cmp"
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
	// Lost is called, once at most, when this rank has lost its lease and cannot have another.
	Lost func(err error)
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
	lost     func(error) // Hooks.Lost
	met      atomic.Bool
	linked   atomic.Bool // a link has come up since the latest handle on the store was opened

	// Of keep until HandOver, and then of the caller of Reconnect.
	next   bootstrap.Store   // replaces store when the record is under its lease; nil: there is none yet
	former []bootstrap.Store // predecessors of next that were lost, until the record is under its lease
	unkeep func()            // ends keep

	mu      sync.Mutex
	store   bootstrap.Store          // this rank's record is under its lease, or was
	renewed time.Time                // when store last replaced another one
	records map[int]bootstrap.Record // the records by which ranks were last reached
}

// New makes a new incarnation of a rank. Other ranks cannot find it before Connect.
func New(s *Settings) *Session {
	return &Session{settings: s, log: s.Logger, records: map[int]bootstrap.Record{}, unkeep: func() {},
		Self: p2p.Identity{Rank: s.Rank, Incarnation: ident.New()}}
}

// Connect makes this process a rank that others can find: its listeners answer and, unless it is
// the only rank, its record is in the store, and comes back there after the loss of a lease until
// HandOver. It waits for the store until ctx ends, unless Settings.Listened. After an error the
// Session must still be closed.
func (ss *Session) Connect(ctx context.Context, h Hooks) error {
	s := ss.settings
	notify := func(peer p2p.Identity, err error) {
		if err == nil {
			ss.linked.Store(true)
		}
		if h.Link != nil {
			h.Link(peer, err)
		}
	}
	pc := p2p.Config{Self: ss.Self, Size: s.MaxSize, Notify: notify, Secret: s.Secret, Resolve: ss.resolve,
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
		ss.store, err = s.open(ectx, 0)
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
	ss.record.First, ss.record.Terms = s.Size, s.Terms
	ss.client = bootstrap.NewClient(bootstrap.ClientConfig{Self: ss.record, Secret: s.Secret, Dial: s.Dial,
		Started: true})
	machine := fnv.New64a()
	fmt.Fprintf(machine, "%s\x00%s", ss.record.Machine, ss.record.Network)
	ss.Here.Machine, ss.Here.Maps = machine.Sum64(), ss.Mapped
	ss.lost = h.Lost
	if err := ss.hold(ctx); err != nil {
		return err
	}
	ss.keep()
	return nil
}

// open opens a handle on the store. It waits for a store that is away until ctx ends or, if
// s.Listened, for patience. In that case it returns bootstrap.ErrStoreEnds if the ranks can meet
// again.
func (s *Settings) open(ctx context.Context, patience time.Duration) (bootstrap.Store, error) {
	var warned time.Time
	var waited time.Duration
	for last := time.Now(); ; {
		store, err := s.OpenStore(ctx)
		now := time.Now()
		waited += min(now.Sub(last), storeTry)
		last = now
		switch over := s.Listened && waited >= patience; {
		case !errors.Is(err, bootstrap.ErrStoreAway) || errors.Is(err, context.Cause(ctx)):
			return store, err
		case over && s.Ends != nil:
			return nil, fmt.Errorf("%w (%w)", bootstrap.ErrStoreEnds, err)
		case over:
			return nil, err
		case now.Sub(warned) >= storeWarning:
			s.Logger.Warn("the job's store cannot be reached: this process waits for it", "err", err)
			warned = now
		}
		if err := pause(ctx, err); err != nil {
			return nil, err
		}
	}
}

const (
	storePause   = 100 * time.Millisecond // between two attempts to reach the store
	storeWarning = 30 * time.Second       // between two warnings about it
	// How long a store may be away that ends with its rank, which may be stopped, when this rank
	// has lost its lease.
	storePatience = 30 * time.Second
	// The most that one attempt counts towards storePatience: this process may be stopped in it.
	storeTry = 5 * time.Second
)

// pause waits for storePause. If ctx ends before, it returns err with the cause.
func pause(ctx context.Context, err error) error {
	select {
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", err, context.Cause(ctx))
	case <-time.After(storePause):
		return nil
	}
}

// persist calls f again while that finds the store away, as it is when it elects a leader, or the
// handle lost or closed, which keep replaces. It ends with ctx. A caller's store without leases is
// not asked again.
func (ss *Session) persist(ctx context.Context, f func() error) error {
	for {
		err := f()
		if !away(err) || errors.Is(err, context.Cause(ctx)) || ss.Store().TTL() == 0 {
			return err
		}
		if err := pause(ctx, err); err != nil {
			return err
		}
	}
}

// away reports whether err says that the store is away, or a lease lost, which both can pass, or
// that the handle was closed: then another has replaced it meanwhile.
func away(err error) bool {
	return errors.Is(err, bootstrap.ErrStoreAway) || errors.Is(err, bootstrap.ErrLeaseLost) ||
		errors.Is(err, bootstrap.ErrStoreClosed)
}

// hold puts this rank's record under the lease of the handle in use, or of another one if that is
// lost. It waits for the store as Connect says, and for one that has ended for storePatience.
func (ss *Session) hold(ctx context.Context) error {
	dead := ss.dead()
	var ended error
	err := ss.persist(ctx, func() error {
		if store := ss.Store(); store.Err() == nil {
			return bootstrap.Register(ctx, store, ss.record, dead)
		}
		ended = ss.prepare(func() (bootstrap.Store, error) { return ss.settings.open(ctx, storePatience) })
		if ended != nil {
			return nil
		}
		err := ss.move(ctx, dead)
		if err == nil {
			ss.replace()
		}
		return err
	})
	return cmp.Or(ended, err)
}

// keep has a goroutine take another lease whenever one is lost, until HandOver or Close. If that
// cannot be, because another process has the slot or another job the store, it calls Hooks.Lost.
func (ss *Session) keep() {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	ss.unkeep = func() {
		cancel()
		<-done
	}
	go func() {
		defer close(done)
		for {
			select {
			case <-ss.Store().Lost():
			case <-ctx.Done():
				return
			}
			err := ss.hold(ctx)
			switch {
			case ctx.Err() != nil:
				return
			case err != nil:
				ss.log.Warn("this rank has lost its lease and cannot have another", "err", err)
				if ss.lost != nil {
					ss.lost(err)
				}
				return
			}
			ss.log.Info("this rank has another lease")
		}
	}()
}

// HandOver ends what has taken another lease so far when one was lost. From now on the caller does,
// with Reconnect: Store may be a lost handle already. It returns when this rank last was without a
// lease, zero if it never was. late: no link has come up since, so that the others may have met.
func (ss *Session) HandOver() (without time.Time, late bool) {
	ss.unkeep()
	ss.mu.Lock()
	defer ss.mu.Unlock()
	if ss.store != nil && ss.store.Err() != nil {
		return time.Now(), true
	}
	return ss.renewed, !ss.renewed.IsZero() && !ss.linked.Load()
}

// Table returns this rank's table of algorithms, nil for the default one.
func (ss *Session) Table() *collectives.Table { return ss.settings.Table }

// Met reports whether all ranks have been registered. After that, a rank without a record is gone.
func (ss *Session) Met() bool { return ss.met.Load() }

// Explain returns err. If this rank, or the store that it serves, refused connections of another
// secret or another build, the error says so. It also says so if this rank has no lease, unless
// that has nothing to do with err.
func (ss *Session) Explain(err error) error {
	if store := ss.Store(); store != nil && store.Err() != nil && !away(err) && !differing(err) &&
		!errors.Is(err, p2p.ErrUnfit) {
		err = fmt.Errorf("%w (this rank has no lease in the job's store: %w)", err, store.Err())
	}
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
	ss.unkeep()
	ss.release()
	for _, store := range []bootstrap.Store{ss.next, ss.Store()} {
		if store == nil {
			continue
		}
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

// Store returns the handle on the job's store under whose lease this rank's record is. If the lease
// is lost, another handle replaces it when the record is under the lease of that. It is nil for the
// only rank of a job.
func (ss *Session) Store() bootstrap.Store {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	return ss.store
}

// Reconnect replaces the store handle lost, and registers this rank again. If another incarnation
// has taken the slot, the next view shows it. It is for the time after HandOver. After an error the
// next call goes on with the handle that this one has opened.
func (ss *Session) Reconnect(ctx context.Context, lost bootstrap.Store) error {
	if ss.Store() != lost {
		return nil
	}
	if err := ss.prepare(func() (bootstrap.Store, error) {
		octx, cancel := context.WithTimeout(ctx, roster.StoreWait)
		defer cancel()
		return ss.settings.OpenStore(octx)
	}); err != nil {
		return err
	}
	mctx, cancel := context.WithTimeout(ctx, roster.StoreWait)
	defer cancel()
	if err := ss.move(mctx, nil); err != nil && !errors.As(err, new(*bootstrap.SlotError)) {
		return err
	}
	ss.replace()
	return nil
}

// prepare opens the handle that is to replace the one in use, unless an earlier call has and its
// lease is not lost.
func (ss *Session) prepare(open func() (bootstrap.Store, error)) error {
	if ss.next != nil && ss.next.Err() == nil {
		return nil
	}
	fresh, err := open()
	if err != nil {
		return err
	}
	ss.linked.Store(false) // others see the record, and link, later
	if ss.next != nil {
		ss.former = append(ss.former, ss.next)
	}
	ss.next = fresh
	return nil
}

// move puts this rank's record under the lease of next. A record that the store still has does not
// disappear meanwhile: others would take this rank to be dead. See bootstrap.Register for dead.
func (ss *Session) move(ctx context.Context, dead func(context.Context, bootstrap.Record) bool) error {
	record, err := ss.record.Encode()
	if err != nil {
		return err
	}
	if err = ss.next.Adopt(ctx, bootstrap.RankKey(ss.Self.Rank), record); errors.Is(err, bootstrap.ErrConflict) {
		err = bootstrap.Register(ctx, ss.next, ss.record, dead)
	}
	return err
}

// replace makes next the handle in use.
func (ss *Session) replace() {
	ss.mu.Lock()
	ss.former = append(ss.former, ss.store)
	ss.store, ss.next, ss.renewed = ss.next, nil, time.Now()
	ss.mu.Unlock()
	ss.release()
}

// release closes the former handles. The store may see the ends of their leases later than this
// process does, so that the record must not be under one of these any more.
func (ss *Session) release() {
	for _, store := range ss.former {
		if err := store.Close(); err != nil {
			ss.log.Debug("a lost lease could not be given back", "err", err)
		}
	}
	ss.former = nil
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
	key, limit := bootstrap.RankKey(rank), ss.Store().TTL()+2*time.Second
	ctx, cancel := context.WithTimeout(ctx, 2*limit)
	defer cancel()
	again := time.NewTicker(lookPause)
	defer again.Stop()
	var first []byte // the record of rank at first
	for seen, newest, listed := map[string][]byte{}, time.Now(), false; ; {
		records, err := ss.Store().List(ctx, bootstrap.RankKeys) // a caller's store cannot watch them all
		left := errors.Is(err, bootstrap.ErrStoreClosed)         // another handle has replaced it
		if err == nil && !listed {
			first, listed = records[key], true
		}
		for k, b := range records {
			rec, bad := bootstrap.DecodeRecord(b)
			if k == key && bytes.Equal(b, first) || bad == nil && ss.record.Compare(&rec) != nil {
				left = true
				if !bytes.Equal(seen[k], b) {
					seen[k], newest = b, time.Now()
				}
			}
		}
		if !left || time.Since(newest) >= limit {
			return
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return
		}
	}
}

// lookup asks the store for a rank's record. Before all ranks have met it waits for the store, and
// for the rank to register; afterwards a rank without a record is gone.
func (ss *Session) lookup(ctx context.Context, rank int) (rec bootstrap.Record, err error) {
	if !ss.Met() {
		err = ss.persist(ctx, func() error {
			rec, err = bootstrap.Lookup(ctx, ss.Store(), rank)
			return err
		})
		return rec, err
	}
	b, err := ss.Store().Get(ctx, bootstrap.RankKey(rank))
	if errors.Is(err, bootstrap.ErrNoKey) {
		why := "its lease has ended"
		if peer := new(*bootstrap.PeerError); errors.As(err, peer) {
			why = (*peer).Err.Error()
		} else if ss.Store().TTL() == 0 {
			why = "it has left the job"
		}
		return bootstrap.Record{}, fmt.Errorf("%s: %w", why, p2p.ErrPeerGone)
	}
	if err != nil {
		return bootstrap.Record{}, err
	}
	return bootstrap.DecodeRecord(b)
}

var _ roster.Directory = (*Session)(nil)
