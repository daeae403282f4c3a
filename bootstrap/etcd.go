package bootstrap

import (
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	grpcbackoff "google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"tutti/internal/backoff"
	"tutti/internal/dial"
	"tutti/internal/trust"
)

// Defaults of StoreConfig.
const (
	DefaultLeaseTTL    = 3 * time.Second
	DefaultDialTimeout = 5 * time.Second
	DefaultOpTimeout   = 3 * time.Second
)

// slowNames replaces DefaultDialTimeout if the store's name takes longer to resolve than an attempt
// to connect lasts. DNS asks for each name of a search list in turn, and needs 5 s for each if its
// first server is dead.
const slowNames = 30 * time.Second

// StorePurpose separates the proof of connections to the embedded store from other uses of the
// job's secret: see trust.Client.
const StorePurpose = "store"

// StoreHello is the hello of a connection to an embedded store: the rank, the endpoint as it was
// given, HOST:PORT, and the remote address of the connection. Both addresses identify the intended
// store.
func StoreHello(rank int, endpoint string, remote net.Addr) trust.Hello {
	return trust.Hello{FromRank: uint32(rank), ToIncarnation: nameStore(endpoint), Extra: nameStore(remote.String())}
}

// StoreMeant reports whether h was made for the store that is known as endpoint and has accepted
// the connection at local. One match is sufficient: a store may have several names, and its address
// may be translated on the way. A proof for another store matches neither.
func StoreMeant(h trust.Hello, endpoint string, local net.Addr) bool {
	return h.ToIncarnation == nameStore(endpoint) || h.Extra == nameStore(local.String())
}

// nameStore hashes a store's HOST:PORT. For a loopback address the hash includes the network
// namespace and the machine.
func nameStore(endpoint string) uint64 {
	scope := ""
	host, port, err := net.SplitHostPort(endpoint)
	if ip, bad := netip.ParseAddr(host); err == nil && bad == nil {
		ip = ip.Unmap().WithZone("")
		endpoint = net.JoinHostPort(ip.String(), port)
		if ip.IsLoopback() {
			scope = here()[2]
		}
	} else if strings.EqualFold(host, "localhost") {
		scope = here()[2]
	}
	sum := sha256.Sum256([]byte(strings.ToLower(endpoint) + "\x00" + scope))
	return binary.LittleEndian.Uint64(sum[:])
}

// StoreConfig selects the store, and the identity of its client.
type StoreConfig struct {
	Address  string      // see ParseStore
	Job      string      // the job; the handle sees only its keys
	Secret   []byte      // the job's secret, needed for tutti:// addresses
	Rank     int         // of this process; for the store's log only
	Guest    uint64      // a Meeting's; 0: a store that is about to end takes the process in, too
	User     string      // of a site's etcd; "": no user; ends of lines after it do not count
	Password string      // that user's, likewise
	TLS      *tls.Config // for etcds://; nil: built from the three files, or the system's authorities
	CA       string      // PEM files; "": none
	Cert     string
	Key      string
	// LeaseTTL is how long the store takes this process to be alive when it is silent, in whole
	// seconds, rounded up; default DefaultLeaseTTL. The store may grant more: see Store.TTL.
	LeaseTTL time.Duration
	// DialTimeout bounds DialStore in addition to its ctx; default DefaultDialTimeout, or 30 s if
	// DNS is slow.
	DialTimeout time.Duration
	// OpTimeout bounds every operation except Wait and Watch, in addition to its ctx; default
	// DefaultOpTimeout.
	OpTimeout time.Duration
	// Observer says that the process is none of the job's: its handle neither keeps the job's keys
	// nor removes them as the last one.
	Observer bool
	Dial     dial.Func    // makes the connections; nil: net.Dialer
	Logger   *slog.Logger // nil: nothing is logged
}

type etcdStore struct {
	c      *clientv3.Client
	addr   StoreAddr
	prefix string
	user   string
	op     time.Duration
	ttl    time.Duration
	lease  clientv3.LeaseID
	log    *slog.Logger

	observer bool // see StoreConfig.Observer

	ctx    context.Context // ends at Close
	cancel context.CancelFunc
	lost   chan struct{}
	ended  chan struct{} // closed when the lease was lost or the handle closed: watches end
	wg     sync.WaitGroup
	mu     sync.Mutex
	err    error // why the lease was lost
	closed bool

	sharing chan struct{}    // holds a token while shared is in use
	shared  clientv3.LeaseID // the job's, if it is known
}

// DialStore connects to an etcd store and takes a lease, which it keeps alive until Close, as it
// does with the job's. It blocks until the store has granted the lease, or ctx or DialTimeout ends;
// until then it retries a store that cannot be reached. The error names the endpoints. It wraps
// ErrStoreAway if the store could not be reached or is about to end (ErrStoreEnds), ErrAuth if the
// secret is not the store's, and ErrVersion if the process that serves it is of another build.
func DialStore(ctx context.Context, cfg StoreConfig) (Store, error) {
	addr, err := ParseStore(cfg.Address)
	if err != nil {
		return nil, err
	}
	if err := CheckJob(cfg.Job); err != nil {
		return nil, err
	}
	if addr.Scheme == "tutti" && len(cfg.Secret) < trust.MinSecret {
		return nil, fmt.Errorf("store %v: the job's secret is needed (TUTTI_SECRET), at least %d bytes", addr,
			trust.MinSecret)
	}
	cfg.User, cfg.Password = trimLine(cfg.User), trimLine(cfg.Password)
	if (cfg.User == "") != (cfg.Password == "") {
		return nil, fmt.Errorf("store %v: a user and a password go together: set TUTTI_STORE_USER and "+
			"TUTTI_STORE_PASSWORD, or neither", addr)
	}
	tlsConfig, err := cfg.tls(addr)
	if err != nil {
		return nil, err
	}
	def := func(d, def time.Duration) time.Duration {
		if d <= 0 {
			return def
		}
		return d
	}
	op, dial := def(cfg.OpTimeout, DefaultOpTimeout), def(cfg.DialTimeout, DefaultDialTimeout)
	log := cfg.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	most := dial
	if cfg.DialTimeout <= 0 {
		most = slowNames
	}
	dctx, cancel := context.WithTimeoutCause(ctx, most, fmt.Errorf("no answer within %v", most))
	defer cancel()
	dctx, abort := context.WithCancelCause(dctx)
	defer abort(nil)
	began := time.Now()
	var secured atomic.Bool
	if addr.Scheme == "etcd" { // one that speaks TLS looks as if it were away
		defer time.AfterFunc(dial/2, func() { secured.Store(speaksTLS(dctx, addr.Endpoints[0])) }).Stop()
	}

	endpoints := make([]string, len(addr.Endpoints))
	for i, ep := range addr.Endpoints {
		endpoints[i] = map[bool]string{false: "http://", true: "https://"}[addr.Scheme == "etcds"] + ep
	}
	d := &dialer{via: cfg.Dial, secret: cfg.Secret, prove: addr.Scheme == "tutti", tls: addr.Scheme == "etcds",
		rank: cfg.Rank, guest: cfg.Guest,
		alone:   len(addr.Endpoints) == 1,
		refused: func(err error) { abort(&refusal{err}) },
		made:    map[string]*connecting{}}
	if most > dial {
		defer time.AfterFunc(dial, func() {
			if !d.slow.Load() {
				abort(fmt.Errorf("no answer within %v", dial))
			}
		}).Stop()
	}
	conf := clientv3.Config{
		Endpoints:            endpoints,
		Username:             cfg.User,
		Password:             cfg.Password,
		DialTimeout:          dial, // bounds the password's check
		DialKeepAliveTime:    10 * time.Second,
		DialKeepAliveTimeout: 3 * time.Second,
		Logger:               zap.NewNop(),
		DialOptions: []grpc.DialOption{
			grpc.WithContextDialer(d.dial), // also: no proxy
			grpc.WithConnectParams(grpc.ConnectParams{
				Backoff: grpcbackoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 1.6, Jitter: 0.3,
					MaxDelay: time.Second},
				MinConnectTimeout: 2 * time.Second,
			}),
		},
	}
	if tlsConfig != nil {
		conf.DialOptions = append(conf.DialOptions,
			grpc.WithTransportCredentials(&watchedTLS{credentials.NewTLS(tlsConfig), d}))
	}
	if left, ok := dctx.Deadline(); ok {
		conf.DialTimeout = max(time.Until(left), time.Millisecond)
	}
	s := &etcdStore{addr: addr, prefix: Prefix(cfg.Job), user: cfg.User, op: op, log: log, observer: cfg.Observer,
		lost: make(chan struct{}), ended: make(chan struct{}), sharing: make(chan struct{}, 1)}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	d.life = s.ctx
	// New checks the password before it returns, and only the client's own ctx ends it. So this ctx
	// ends when dialling is given up.
	conf.Context = s.ctx
	stop := context.AfterFunc(dctx, s.cancel)
	s.c, err = clientv3.New(conf)
	if err == nil {
		err = s.grant(dctx, def(cfg.LeaseTTL, DefaultLeaseTTL))
	}
	if !stop() && err == nil {
		err = dctx.Err()
	}
	if err != nil {
		if s.c != nil {
			s.c.Close()
		}
		s.cancel()
		why := context.Cause(dctx)
		var no *refusal
		if errors.As(why, &no) {
			return nil, fmt.Errorf("store %v: %w", addr, no.error)
		}
		text := s.reason(err)
		if last := d.why(); last != nil { // more specific than the timeout
			text = last.Error()
		}
		if d.slow.Load() {
			dial = most
		}
		switch {
		case ctx.Err() != nil && d.why() == nil && time.Since(began) < enoughTime:
			return nil, fmt.Errorf("store %v: %w", addr, &noTimeError{context.Cause(ctx)})
		case ctx.Err() != nil:
			return nil, fmt.Errorf("store %v: %w: %w (%s): is it running, and is the address right?", addr,
				ErrStoreAway, context.Cause(ctx), text)
		case secured.Load():
			return nil, fmt.Errorf("store %v: it speaks TLS: use etcds://%s", addr, strings.Join(addr.Endpoints, ","))
		case why != nil || away(err):
			return nil, fmt.Errorf("store %v: %w: no answer within %v (%s): is it running, and is the address right?",
				addr, ErrStoreAway, dial, text)
		}
		return nil, fmt.Errorf("store %v: %s", addr, text)
	}
	answers, err := s.c.KeepAlive(s.ctx, s.lease)
	if err != nil {
		s.c.Close()
		s.cancel()
		return nil, fmt.Errorf("store %v: keep the lease alive: %w", addr, err)
	}
	s.wg.Add(1)
	go s.keep(answers)
	return s, nil
}

// enoughTime is for how long a store that runs may take to answer. Less shows nothing about it.
const enoughTime = 500 * time.Millisecond

// noTimeError is an ErrStoreAway that does not blame the store: the caller's time was over.
type noTimeError struct{ cause error }

func (e *noTimeError) Error() string   { return fmt.Sprintf("no time was left to connect: %v", e.cause) }
func (e *noTimeError) Unwrap() []error { return []error{ErrStoreAway, e.cause} }

// grantWait bounds the first request for a lease, and is doubled for each further one: a cluster
// may never answer a request that it got while it had no leader. A lease that is granted too late
// expires.
const grantWait = 250 * time.Millisecond

// grant takes the lease, and registers the handle. It retries until the store answers or ctx ends.
// A lease that it has got is kept meanwhile: another handle's Close must not find a registration
// that nobody ends.
func (s *etcdStore) grant(ctx context.Context, ttl time.Duration) error {
	pause := 5 * time.Millisecond
	for wait := grantWait; ; wait *= 2 {
		gctx, cancel := context.WithTimeout(ctx, wait)
		var err error
		if s.lease == 0 {
			var r *clientv3.LeaseGrantResponse
			if r, err = s.c.Grant(gctx, int64(math.Ceil(ttl.Seconds()))); err == nil {
				s.lease, s.ttl = r.ID, time.Duration(r.TTL)*time.Second
			}
		}
		if err == nil {
			err = s.enlist(gctx)
		}
		cancel()
		if err == nil {
			return nil
		}
		expired := errors.Is(err, rpctypes.ErrLeaseNotFound)
		if expired {
			s.lease = 0
		}
		if !expired && !away(err) || !backoff.Sleep(ctx, pause) {
			return err
		}
		pause = min(2*pause, 200*time.Millisecond)
	}
}

// enlist registers this handle, so that the job's keys stay, and begins to keep the job's lease
// alive, unless it is an observer's. A user without write access holds nothing, and may still read.
func (s *etcdStore) enlist(ctx context.Context) error {
	if s.observer {
		return nil
	}
	_, err := s.c.Put(ctx, fmt.Sprintf("%s%s%016x", s.prefix, handleKeys, int64(s.lease)), "",
		clientv3.WithLease(s.lease))
	if errors.Is(err, rpctypes.ErrPermissionDenied) {
		return nil
	}
	if err == nil {
		s.wg.Go(func() { s.hold(0) })
	}
	return err
}

// share runs f under the job's lease, which all handles keep alive. If there is none it takes one.
func (s *etcdStore) share(ctx context.Context, f func(clientv3.LeaseID) error) error {
	for ended := clientv3.LeaseID(0); ; {
		id, err := s.sharedLease(ctx, ended)
		if err != nil {
			return err
		}
		if err = f(id); !errors.Is(err, rpctypes.ErrLeaseNotFound) || ended != 0 {
			return err
		}
		ended = id // the last handle was closed, or all were away for long
	}
}

// sharedLease returns the job's lease, or takes one, and keeps it alive from then on. It asks the
// store if it knows none but ended, which has ended or is not kept alive any more.
func (s *etcdStore) sharedLease(ctx context.Context, ended clientv3.LeaseID) (clientv3.LeaseID, error) {
	select {
	case s.sharing <- struct{}{}:
		defer func() { <-s.sharing }()
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	if s.shared != 0 && s.shared != ended {
		return s.shared, nil
	}
	s.shared = 0
	key := s.prefix + leaseKey
	r, err := s.c.Get(ctx, key)
	if err != nil {
		return 0, err
	}
	var id clientv3.LeaseID
	if len(r.Kvs) > 0 {
		id = clientv3.LeaseID(r.Kvs[0].Lease)
	} else {
		ttl := JobTTL
		if s.addr.Scheme == "tutti" {
			ttl = embeddedTTL
		}
		g, err := s.c.Grant(ctx, int64(ttl/time.Second))
		if err != nil {
			return 0, err
		}
		id = g.ID
		t, err := s.c.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).
			Then(clientv3.OpPut(key, "", clientv3.WithLease(id))).Else(clientv3.OpGet(key)).Commit()
		if err != nil {
			return 0, err
		}
		if !t.Succeeded { // another handle was faster
			s.c.Revoke(ctx, id)
			id = clientv3.LeaseID(t.Responses[0].GetResponseRange().GetKvs()[0].Lease)
		}
	}
	answers, err := s.c.KeepAlive(s.ctx, id)
	if err != nil {
		return 0, err
	}
	s.shared = id
	s.wg.Go(func() {
		for range answers {
		}
		s.hold(id) // id has ended, or the client has given it up for want of an answer
	})
	return id, nil
}

// sharePause is the pause before each attempt of hold. Ranks come together, and find after it the
// lease that one of them has taken.
const sharePause = time.Second

// hold is sharedLease for a handle that perhaps never writes a job's key: it tries until that
// succeeds, this handle's own lease has ended, or the handle is closed.
func (s *etcdStore) hold(ended clientv3.LeaseID) {
	for {
		select {
		case <-s.ended:
			return
		case <-s.ctx.Done():
			return
		case <-time.After(sharePause):
		}
		ctx, cancel := context.WithTimeout(s.ctx, s.op)
		_, err := s.sharedLease(ctx, ended)
		cancel()
		if err == nil {
			return
		}
	}
}

// dissolve removes the job's keys in one step if no handle is open any more. Every open handle has
// a key that is not under the job's lease.
func (s *etcdStore) dissolve(ctx context.Context) error {
	r, err := s.c.Get(ctx, s.prefix+leaseKey)
	if err != nil || len(r.Kvs) == 0 {
		return err
	}
	id := clientv3.LeaseID(r.Kvs[0].Lease)
	t, err := s.c.Txn(ctx).If(clientv3.Compare(clientv3.LeaseValue(s.prefix), "=", id).WithPrefix()).
		Then(clientv3.OpDelete(s.prefix, clientv3.WithPrefix())).Commit()
	if err != nil || !t.Succeeded {
		return err
	}
	_, err = s.c.Revoke(ctx, id)
	return err
}

// proofTimeout bounds the proof of the secret on a new connection.
const proofTimeout = 5 * time.Second

// prove runs the dialling half of trust on conn until ctx ends, at most proofTimeout.
func prove(ctx context.Context, conn net.Conn, secret []byte, purpose string, h trust.Hello) error {
	deadline := time.Now().Add(proofTimeout)
	if t, ok := ctx.Deadline(); ok && t.Before(deadline) {
		deadline = t
	}
	conn.SetDeadline(deadline)
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	_, err := trust.Client(conn, secret, purpose, h, false)
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	conn.SetDeadline(time.Time{})
	return err
}

// keep reads the answers to keep-alives and detects the loss of the lease: the store reports it, or
// is silent for a TTL and does not answer a final request. If the process was stopped while its
// lease stayed valid, keep continues with it.
func (s *etcdStore) keep(answers <-chan *clientv3.LeaseKeepAliveResponse) {
	defer s.wg.Done()
	silent := time.NewTimer(s.ttl)
	defer silent.Stop()
	for {
		select {
		case r, ok := <-answers:
			if ok {
				if r != nil {
					silent.Reset(time.Duration(r.TTL) * time.Second)
				}
				continue
			}
			answers = nil // the client gave up, or is being closed
		case <-silent.C:
		}
		err := s.checkLease()
		if err == nil && answers == nil {
			answers, err = s.c.KeepAlive(s.ctx, s.lease)
		}
		if s.ctx.Err() != nil {
			return
		}
		if err != nil {
			s.lose(err)
			return
		}
		silent.Reset(s.ttl)
	}
}

// checkLease asks the store for the lease. The error says why it is lost.
func (s *etcdStore) checkLease() error {
	ctx, cancel := context.WithTimeout(s.ctx, leaseCheck)
	defer cancel()
	r, err := s.c.TimeToLive(ctx, s.lease)
	switch {
	case err == nil && r.TTL >= 0: // whole seconds: 0 in the last one
		return nil
	case err == nil || errors.Is(err, rpctypes.ErrLeaseNotFound):
		return fmt.Errorf("%w: it expired, since this process was silent for longer than %v", ErrLeaseLost, s.ttl)
	}
	return fmt.Errorf("%w: %w: store %v was silent for %v", ErrLeaseLost, ErrStoreAway, s.addr, s.ttl)
}

// leaseCheck bounds the final request to a silent store before the lease counts as lost.
const leaseCheck = 500 * time.Millisecond

// lose records the loss of the lease, once, unless the handle is being closed.
func (s *etcdStore) lose(why error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.err != nil {
		return
	}
	s.err = why
	close(s.lost)
	close(s.ended)
	s.log.Warn("store lease lost", "err", why)
}

// away reports whether err means that the store could not be reached, as opposed to a refusal.
func away(err error) bool {
	if errors.Is(err, clientv3.ErrNoAvailableEndpoints) || errors.Is(err, context.DeadlineExceeded) {
		return true
	}
	var e rpctypes.EtcdError
	if errors.As(err, &e) {
		return e.Code() == codes.Unavailable
	}
	c := status.Code(err)
	return c == codes.Unavailable || c == codes.DeadlineExceeded || c == codes.Canceled
}

// reason returns the text of err without gRPC's decoration, with advice if the store requires a
// user.
func (s *etcdStore) reason(err error) string {
	const variables = "TUTTI_STORE_USER and TUTTI_STORE_PASSWORD"
	switch {
	case errors.Is(err, rpctypes.ErrUserEmpty):
		return "it requires a user: set " + variables
	case errors.Is(err, rpctypes.ErrAuthFailed):
		return fmt.Sprintf("user %q and the password are not known there: check %s", s.user, variables)
	case errors.Is(err, rpctypes.ErrPermissionDenied):
		return fmt.Sprintf("user %q may not: it has to be granted to read and write the keys that begin with %s",
			s.user, s.prefix)
	}
	full := rpctypes.ErrorDesc(rpctypes.ErrGRPCNoSpace)
	if errors.Is(err, rpctypes.ErrNoSpace) || status.Convert(err).Message() == full {
		if s.addr.Scheme == "tutti" {
			return "it is full: keep fewer or smaller values in it, or give the job an etcd of its own (TUTTI_STORE)"
		}
		return "it is full (its alarm NOSPACE is on): compact and defragment it or raise its quota, " +
			"then disarm the alarm (etcdctl alarm disarm)"
	}
	if st, ok := status.FromError(err); ok {
		return st.Message()
	}
	return err.Error()
}

// do runs one operation in bounded time and describes its failure.
func (s *etcdStore) do(ctx context.Context, op, key string, lease bool, f func(ctx context.Context) error) error {
	if err := CheckKey(key); err != nil {
		return err
	}
	s.mu.Lock()
	closed, lost := s.closed, s.err
	s.mu.Unlock()
	switch {
	case closed:
		return fmt.Errorf("store: %s %s: %w", op, key, ErrStoreClosed)
	case lease && lost != nil:
		return fmt.Errorf("store: %s %s: %w", op, key, lost)
	case ctx.Err() != nil:
		return fmt.Errorf("store: %s %s: %w", op, key, context.Cause(ctx))
	}
	if lost != nil && s.c.ActiveConnection().GetState() == connectivity.TransientFailure {
		return fmt.Errorf("store %v: %s %s: %w since the lease was lost", s.addr, op, key, ErrStoreAway)
	}
	octx, cancel := context.WithTimeout(ctx, s.op)
	defer cancel()
	err := f(octx)
	switch {
	case err == nil:
		return nil
	case s.ctx.Err() != nil:
		return fmt.Errorf("store: %s %s: %w", op, key, ErrStoreClosed)
	case errors.Is(err, ErrConflict), errors.Is(err, ErrNoKey):
		return err
	case errors.Is(err, rpctypes.ErrLeaseNotFound):
		return fmt.Errorf("store %v: %s %s: %w", s.addr, op, key, ErrLeaseLost) // keep will notice it
	case errors.Is(ctx.Err(), context.Canceled):
		return fmt.Errorf("store: %s %s: %w", op, key, context.Cause(ctx))
	case ctx.Err() != nil:
		return fmt.Errorf("store %v: %s %s: %w: %w", s.addr, op, key, ErrStoreAway, context.Cause(ctx))
	case away(err):
		return fmt.Errorf("store %v: %s %s: %w (%s)", s.addr, op, key, ErrStoreAway, s.reason(err))
	}
	return fmt.Errorf("store %v: %s %s: %s", s.addr, op, key, s.reason(err))
}

// under runs f with the lease for a value: this handle's own, or the job's.
func (s *etcdStore) under(ctx context.Context, own bool, f func(clientv3.OpOption) error) error {
	if own {
		return f(clientv3.WithLease(s.lease))
	}
	return s.share(ctx, func(id clientv3.LeaseID) error { return f(clientv3.WithLease(id)) })
}

func (s *etcdStore) Put(ctx context.Context, key string, value []byte, lease bool) error {
	if err := CheckPut(key, value); err != nil {
		return err
	}
	return s.do(ctx, "put", key, lease, func(ctx context.Context) error {
		return s.under(ctx, lease, func(l clientv3.OpOption) error {
			_, err := s.c.Put(ctx, s.prefix+key, string(value), l)
			return err
		})
	})
}

func (s *etcdStore) Create(ctx context.Context, key string, value []byte, lease bool) error {
	if value == nil {
		value = []byte{}
	}
	return s.swap(ctx, "create", key, clientv3.Compare(clientv3.CreateRevision(s.prefix+key), "=", 0), value, lease)
}

func (s *etcdStore) CompareAndSwap(ctx context.Context, key string, old, new []byte) error {
	is := clientv3.Compare(clientv3.CreateRevision(s.prefix+key), "=", 0)
	if old != nil {
		is = clientv3.Compare(clientv3.Value(s.prefix+key), "=", string(old))
	}
	return s.swap(ctx, "compare and swap", key, is, new, false)
}

func (s *etcdStore) Adopt(ctx context.Context, key string, value []byte) error {
	is := clientv3.Compare(clientv3.Value(s.prefix+key), "=", string(value))
	return s.swap(ctx, "adopt", key, is, append([]byte{}, value...), true)
}

func (s *etcdStore) swap(ctx context.Context, op, key string, is clientv3.Cmp, value []byte, lease bool) error {
	if err := CheckPut(key, value); err != nil {
		return err
	}
	return s.do(ctx, op, key, lease, func(ctx context.Context) error {
		swap := func(then clientv3.Op) error {
			r, err := s.c.Txn(ctx).If(is).Then(then).Else(clientv3.OpGet(s.prefix + key)).Commit()
			if err != nil || r.Succeeded {
				return err
			}
			c := &ConflictError{Key: key}
			if kvs := r.Responses[0].GetResponseRange().GetKvs(); len(kvs) > 0 {
				c.Current = append([]byte{}, kvs[0].Value...)
			}
			return c
		}
		if value == nil {
			return swap(clientv3.OpDelete(s.prefix + key))
		}
		return s.under(ctx, lease, func(l clientv3.OpOption) error {
			return swap(clientv3.OpPut(s.prefix+key, string(value), l))
		})
	})
}

func (s *etcdStore) Get(ctx context.Context, key string) (value []byte, err error) {
	err = s.do(ctx, "get", key, false, func(ctx context.Context) error {
		r, err := s.c.Get(ctx, s.prefix+key)
		switch {
		case err != nil:
			return err
		case len(r.Kvs) == 0:
			return fmt.Errorf("store: get %s: %w", key, ErrNoKey)
		}
		value = append([]byte{}, r.Kvs[0].Value...)
		return nil
	})
	return value, err
}

func (s *etcdStore) List(ctx context.Context, prefix string) (values map[string][]byte, err error) {
	err = s.do(ctx, "list", prefix+"*", false, func(ctx context.Context) error {
		r, err := s.c.Get(ctx, s.prefix+prefix, clientv3.WithPrefix())
		if err != nil {
			return err
		}
		values = make(map[string][]byte, len(r.Kvs))
		for _, kv := range r.Kvs {
			if k := strings.TrimPrefix(string(kv.Key), s.prefix); !strings.HasPrefix(k, ownKeys) {
				values[k] = append([]byte{}, kv.Value...)
			}
		}
		return nil
	})
	return values, err
}

func (s *etcdStore) Delete(ctx context.Context, key string) error {
	return s.do(ctx, "delete", key, false, func(ctx context.Context) error {
		_, err := s.c.Delete(ctx, s.prefix+key)
		return err
	})
}

func (s *etcdStore) Wait(ctx context.Context, key string) ([]byte, error) {
	v, err := s.Get(ctx, key)
	if err == nil || !errors.Is(err, ErrNoKey) {
		return v, err
	}
	return WaitByWatch(ctx, s, key)
}

func (s *etcdStore) Watch(ctx context.Context, key string) <-chan Event {
	out := make(chan Event, 1)
	s.mu.Lock()
	defer s.mu.Unlock()
	err := CheckKey(key)
	if s.closed {
		err = fmt.Errorf("store: watch %s: %w", key, ErrStoreClosed)
	}
	if err != nil {
		out <- Event{Err: err}
		close(out)
		return out
	}
	box := NewMailbox()
	wctx, cancel := context.WithCancel(ctx)
	s.wg.Add(2)
	go func() {
		defer s.wg.Done()
		if err := s.report(wctx, key, box); wctx.Err() == nil {
			box.Put(Event{Key: key, Err: err})
		}
	}()
	go func() {
		defer s.wg.Done()
		defer cancel()
		box.Run(ctx, s.ended, s.why, out)
	}()
	return out
}

// why returns why watches end.
func (s *etcdStore) why() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return s.err
	}
	return ErrStoreClosed
}

// Follow implements Follower.
func (s *etcdStore) Follow(ctx context.Context, prefix string, state func(map[string][]byte),
	change func(Event)) error {
	if !strings.HasSuffix(prefix, "/") {
		return fmt.Errorf("store: follow %s: expected a prefix that ends in /", prefix)
	}
	fctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return fmt.Errorf("store: watch %s: %w", prefix, ErrStoreClosed)
	}
	s.wg.Go(func() {
		select {
		case <-s.ended:
			cancel(s.why())
		case <-fctx.Done():
		}
	})
	s.mu.Unlock()
	err := s.follow(fctx, prefix, state, change)
	if fctx.Err() != nil {
		return fmt.Errorf("store: watch %s: %w", prefix, context.Cause(fctx))
	}
	return err
}

// report sends key's state and its changes to box until ctx ends or the store cannot be reached.
func (s *etcdStore) report(ctx context.Context, key string, box *Mailbox) error {
	known := map[string]bool{} // keys that were reported as existing
	return s.follow(ctx, key, func(now map[string][]byte) {
		for _, k := range slices.Sorted(maps.Keys(now)) {
			box.Put(Event{Key: k, Value: now[k], Exists: true})
		}
		for k := range known {
			if _, ok := now[k]; !ok {
				box.Put(Event{Key: k})
			}
		}
		if !strings.HasSuffix(key, "/") && len(now) == 0 && !known[key] {
			box.Put(Event{Key: key})
		}
		clear(known)
		for k := range now {
			known[k] = true
		}
	}, func(e Event) {
		if e.Exists {
			known[e.Key] = true
		} else {
			delete(known, e.Key)
		}
		box.Put(e)
	})
}

// follow calls state with what there is of a key, or below one that ends in "/", and change with
// the changes, until ctx ends or the store cannot be reached. When the store cancels the watch (it
// lost its leader), follow begins again.
//
// The watch begins before the state is read, and changes that the state contains are dropped. A
// watch from the state's revision on would be one of the past if anybody writes meanwhile, as the
// ranks of a job do when it begins, and those etcd serves every 100 ms only.
func (s *etcdStore) follow(ctx context.Context, key string, state func(map[string][]byte), change func(Event)) error {
	var opts []clientv3.OpOption
	if strings.HasSuffix(key, "/") {
		opts = append(opts, clientv3.WithPrefix())
	}
	for {
		wctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
		var changes clientv3.WatchChan
		var r *clientv3.GetResponse
		err := s.do(ctx, "watch", key, false, func(ctx context.Context) (err error) {
			defer context.AfterFunc(ctx, cancel)()
			changes = s.c.Watch(wctx, s.prefix+key, append(opts, clientv3.WithCreatedNotify())...)
			if created, ok := <-changes; !ok {
				return cmp.Or(ctx.Err(), rpctypes.ErrNoLeader)
			} else if err := created.Err(); err != nil {
				return err
			}
			r, err = s.c.Get(ctx, s.prefix+key, opts...)
			return err
		})
		if err != nil {
			cancel()
			return err
		}
		now := make(map[string][]byte, len(r.Kvs))
		for _, kv := range r.Kvs {
			now[strings.TrimPrefix(string(kv.Key), s.prefix)] = append([]byte{}, kv.Value...)
		}
		state(now)
		for resp := range changes {
			for _, ev := range resp.Events {
				if ev.Kv.ModRevision <= r.Header.Revision {
					continue
				}
				e := Event{Key: strings.TrimPrefix(string(ev.Kv.Key), s.prefix),
					Exists: ev.Type == clientv3.EventTypePut}
				if e.Exists {
					e.Value = append([]byte{}, ev.Kv.Value...)
				}
				change(e)
			}
		}
		cancel()
		if !backoff.Sleep(ctx, 20*time.Millisecond) {
			return ctx.Err()
		}
	}
}

func (s *etcdStore) TTL() time.Duration    { return s.ttl }
func (s *etcdStore) Lost() <-chan struct{} { return s.lost }

func (s *etcdStore) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

func (s *etcdStore) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		s.wg.Wait()
		return nil
	}
	s.closed = true
	lost := s.err != nil
	if !lost {
		close(s.ended)
	}
	s.mu.Unlock()
	err := s.giveBack(lost)
	s.cancel()
	s.c.Close()
	s.wg.Wait()
	return err
}

// StoreEnds reports whether rank 0, which serves the store of a launch from its memory, has left
// its job: see Meeting.Refuse. It asks the store.
func StoreEnds(ctx context.Context, store Store) bool {
	s, ok := store.(*etcdStore)
	if !ok {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, s.op)
	defer cancel()
	r, err := s.c.Get(ctx, endsKey)
	return err == nil && len(r.Kvs) > 0
}

// silentWait bounds Close if the connection has failed, or the lease was lost; else it takes the
// time of an operation at most.
const silentWait = time.Second

// giveBack ends the lease, and the job if this was the last handle of its processes.
func (s *etcdStore) giveBack(lost bool) error {
	// Requests may succeed although the connection is not Ready: its state is told late.
	limit, state := s.op, s.c.ActiveConnection().GetState()
	if lost && state != connectivity.Ready {
		return nil
	}
	if lost || state == connectivity.TransientFailure {
		limit = min(limit, silentWait)
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	_, err := s.c.Revoke(ctx, s.lease)
	switch {
	case lost: // it may stay in the store for a while, with its keys
		return nil
	case errors.Is(err, rpctypes.ErrLeaseNotFound): // it has expired
		return nil
	case err != nil && away(err):
		return fmt.Errorf("store %v: %w: the lease is not given back and ends by itself within %v", s.addr,
			ErrStoreAway, s.ttl)
	case err != nil:
		return fmt.Errorf("store %v: give the lease back (it ends by itself within %v): %s", s.addr, s.ttl,
			s.reason(err))
	}
	// Not after a lease that has ended by itself: those of other handles may have ended too, and
	// the job goes on when they have new ones. An observer does not know whether they have.
	if s.observer {
		return nil
	}
	if err := s.dissolve(ctx); err != nil { // otherwise the job's lease expires with them
		s.log.Debug("the job's keys stay in the store for a while", "err", err)
	}
	return nil
}
