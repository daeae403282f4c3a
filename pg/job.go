package pg

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"maps"
	"math"
	"os"
	"runtime"
	"slices"
	"sort"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/hashicorp/go-multierror"
	"golang.org/x/sync/errgroup"

	"tutti/bootstrap"
	"tutti/collectives"
	"tutti/internal/files"
	"tutti/internal/ports"
	"tutti/p2p"
	"tutti/p2p/inproc"
	"tutti/p2p/shm"
	"tutti/p2p/tcp"
	"tutti/pg/internal/resync"
	"tutti/pg/membership"
)

// job is what the groups of one rank share: its links, its listeners, its place in the store.
type job struct {
	proxy   *p2p.Proxy
	log     *slog.Logger
	timeout time.Duration // 0: none
	algo    collectives.Algo
	tuned   *collectives.Table // what this rank would use, if all others of a group have it; nil: the default
	local   bool               // all ranks are in this process
	mapped  bool               // this rank's memory can be mapped by ranks of its machine
	places  []place
	here    place // this rank's
	self    p2p.Identity

	settings *settings
	members  *members // nil: nobody is replaced. Under the proxy's lock, as what follows
	view     membership.View
	why      map[int]string // why ranks were removed, when they were last
	groups   map[*Group]struct{}

	store   bootstrap.Store // see directory
	record  bootstrap.Record
	server  *bootstrap.Server
	client  *bootstrap.Client
	obs     atomic.Pointer[observer]
	meeting context.CancelCauseFunc // ends the first meeting of all ranks; nil: there is none. Under the proxy's lock
	// every rank has been registered: a record that is missing means that its rank is gone
	met atomic.Bool

	mu      sync.Mutex
	refs    int
	records map[int]bootstrap.Record
	regions atomic.Pointer[[]*p2p.Region] // by address
}

// place is what all ranks must know of each other to choose alike.
type place struct {
	machine     uint64
	cpus        uint64 // which processors this rank may run on: their numbers hashed
	cores       int    // how many they are
	maps        bool
	algo        collectives.Algo
	table       uint64 // hash of the table of algorithms
	incarnation uint64
}

const placeSize = 40

func (p place) encode(b []byte) {
	binary.LittleEndian.PutUint64(b, p.machine)
	binary.LittleEndian.PutUint64(b[8:], p.cpus)
	binary.LittleEndian.PutUint32(b[16:], uint32(p.cores))
	if p.maps {
		b[20] = 1
	}
	b[21] = byte(p.algo)
	binary.LittleEndian.PutUint64(b[24:], p.table)
	binary.LittleEndian.PutUint64(b[32:], p.incarnation)
}

func decodePlace(b []byte) place {
	return place{machine: binary.LittleEndian.Uint64(b), cpus: binary.LittleEndian.Uint64(b[8:]),
		cores: max(1, int(binary.LittleEndian.Uint32(b[16:]))),
		maps:  b[20] == 1, algo: collectives.Algo(b[21]), table: binary.LittleEndian.Uint64(b[24:]),
		incarnation: binary.LittleEndian.Uint64(b[32:])}
}

// crowd is ranks of one machine that may run on the same processors. Launchers bind ranks one to a
// core or not at all, so that sets of processors which differ are taken for disjoint.
type crowd struct {
	machine, cpus uint64
}

// settings is Config with the environment and the defaults filled in.
type settings struct {
	Config
	launch bootstrap.Launch
	algo   collectives.Algo
	kinds  []string // transports
}

var transportNames = []string{"shm", "tcp"}

func (c Config) resolve(getenv func(string) string) (*settings, error) {
	s := &settings{Config: c}
	var err error
	if s.launch, err = bootstrap.FromEnv(getenv); err != nil {
		if c.Size == 0 {
			return nil, err
		}
		s.launch = bootstrap.Launch{LocalRank: -1}
	}
	l := &s.launch
	if s.Size == 0 {
		s.Size, s.Rank = l.Size, l.Rank
	}
	if s.MaxSize == 0 {
		s.MaxSize = l.MaxSize
	}
	if s.MaxSize = max(s.MaxSize, s.Size); s.Size < 1 || s.MaxSize > MaxRanks ||
		(s.Rank < 0 || s.Rank >= s.MaxSize) && !l.Standby {
		return nil, &ArgumentError{Call: "join", Arg: "Rank, Size and MaxSize",
			Got:  fmt.Sprintf("rank %d of %d, at most %d", s.Rank, s.Size, s.MaxSize),
			Want: fmt.Sprintf("0 <= Rank < Size <= MaxSize <= %d", MaxRanks)}
	}
	def := func(v *string, env, last string) {
		if *v == "" {
			*v = env
		}
		if *v == "" {
			*v = last
		}
	}
	def(&s.Job, l.Job, "")
	if s.Job == "" && s.MaxSize == 1 { // nobody to mix up
		s.Job = "default"
	}
	def(&s.Store, l.Store, "")
	if s.Store == "" && l.MasterAddr != "" && l.MasterPort > 0 {
		s.Store = fmt.Sprintf("etcd://%s:%d", l.MasterAddr, l.MasterPort)
	}
	def(&s.StoreUser, l.StoreUser, "")
	def(&s.StorePassword, l.StorePassword, "")
	def(&s.Transport, l.Transport, "auto")
	def(&s.Interfaces, l.Interfaces, "")
	def(&s.Ports, l.Ports, "0")
	def(&s.Algorithm, l.Algorithm, "auto")
	def(&s.Tuning, l.Tuning, "")
	def(&s.LogDir, l.LogDir, "")
	def(&s.Metrics, l.Metrics, "")
	if s.Secret == nil {
		s.Secret = l.Secret
	}
	if s.Timeout == 0 {
		s.Timeout = l.Timeout
	}
	switch {
	case s.Timeout == 0:
		s.Timeout = DefaultTimeout
	case s.Timeout < 0:
		s.Timeout = 0
	}
	if s.LeaseTTL == 0 {
		s.LeaseTTL = l.LeaseTTL
	}
	if s.OnFailure == Report {
		if s.OnFailure, err = ParseOnFailure(l.OnFailure); err != nil {
			return nil, fmt.Errorf("join: TUTTI_ON_FAILURE: %w", err)
		}
	}
	s.Uniform, s.AutoAdmit = s.Uniform || l.Uniform, s.AutoAdmit || l.AutoAdmit
	if s.Window <= 0 {
		s.Window = DefaultWindow
	}
	if s.algo, err = collectives.ParseAlgo(s.Algorithm); err != nil {
		return nil, fmt.Errorf("join: Algorithm, or TUTTI_ALGO: %w", err)
	}
	if s.Transport == "auto" {
		s.kinds = transportNames
	} else {
		for _, name := range strings.Split(s.Transport, ",") {
			if name != "shm" && name != "tcp" {
				return nil, &ArgumentError{Call: "join", Arg: "Transport, or TUTTI_TRANSPORT,",
					Got: fmt.Sprintf("%q", s.Transport), Want: "auto, or a list of " + strings.Join(transportNames,
						" and ")}
			}
			s.kinds = append(s.kinds, name)
		}
	}
	if s.Logger == nil {
		level := slog.LevelWarn
		if l.LogLevel == "off" {
			s.Logger = slog.New(slog.DiscardHandler)
		} else {
			if l.LogLevel != "" {
				level.UnmarshalText([]byte(l.LogLevel)) // checked by FromEnv
			}
			s.Logger = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level})).With("rank", s.Rank)
		}
	}
	return s, nil
}

// transports makes the transports of this rank, in order of preference.
func (s *settings) transports() ([]p2p.Transport, error) {
	var all []p2p.Transport
	for _, name := range s.kinds {
		switch name {
		case "shm":
			if runtime.GOOS == "linux" || len(s.kinds) == 1 {
				all = append(all, shm.New(shm.Config{RingBytes: ringBytes(s.localRanks()), Logger: s.Logger}))
			}
		case "tcp":
			spec, err := ports.ParseSpec(s.Ports)
			if err != nil {
				return nil, fmt.Errorf("config: %w", err)
			}
			// A host that answers nothing for a window is noticed where somebody waits for it, and
			// sends it heartbeats.
			all = append(all, tcp.New(tcp.Config{Interfaces: s.Interfaces, Ports: spec.Next().String(),
				Logger: s.Logger, PeerTimeout: max(s.Window, time.Second), IdleTimeout: idleTimeout}))
		}
	}
	return all, nil
}

// idleTimeout is after how long a silent host is noticed over links that nobody waits for.
const idleTimeout = 30 * time.Second

// localRanks is how many ranks are likely to be on this machine.
func (s *settings) localRanks() int {
	if s.launch.LocalSize > 0 {
		return s.launch.LocalSize
	}
	return s.Size
}

// ringBytes divides 64 MiB a rank among the links to n local ranks, both directions.
func ringBytes(n int) int { return min(max(32<<20/max(n-1, 1), 16<<10), 512<<10) }

// Join makes this process a rank of its job and returns the group of all ranks. It returns when
// every rank has joined, or with an error when ctx or Config.Timeout ends before that. It listens
// for peers on the transports' own addresses; links to them come up when they are first needed.
//
// A rank that is lost before all have joined is waited for, if OnFailure is Shrink or Retry: it may
// be started again, or a process on standby may take its place. With Report, Join fails at the
// ranks that had met it, and in a running job if a rank is lost while it lets this one in.
//
// A process on standby (TUTTI_STANDBY) waits until a slot is free, and for that ctx alone is the
// bound. If another process takes the slot first, or the ranks do not let it in within
// Config.Timeout, it waits on.
func Join(ctx context.Context, cfg Config) (*Group, error) {
	s, err := cfg.resolve(os.Getenv)
	if err != nil {
		return nil, err
	}
	if !s.launch.Standby {
		return s.join(ctx)
	}
	for {
		release, err := s.standBy(ctx)
		if err != nil {
			return nil, fmt.Errorf("standing by for job %q: %w", s.Job, err)
		}
		g, err := s.join(ctx)
		if release(err == nil); err == nil || ctx.Err() != nil || !displaced(err) {
			return g, err
		}
		s.Logger.Info("this process could not take a free place: it stands by again", "rank", s.Rank, "err", err)
		select {
		case <-ctx.Done():
		case <-time.After(joinPause):
		}
	}
}

// displaced reports whether err, of a process on standby that tried to take a free place, is one that
// another attempt may not have.
func displaced(err error) bool {
	return errors.As(err, new(*bootstrap.SlotError)) || errors.Is(err, context.DeadlineExceeded) ||
		errors.Is(err, ErrEvicted) || errors.Is(err, p2p.ErrPeerGone) || errors.As(err, new(*TimeoutError)) ||
		errors.As(err, new(*RankError))
}

// join makes this process the rank s.Rank of its job.
func (s *settings) join(ctx context.Context) (g *Group, err error) {
	ctx, cancel := s.within(ctx)
	defer cancel()
	var before error // why an earlier life of this rank did not meet the others
	for {
		j := &job{log: s.Logger, timeout: s.Timeout, algo: s.algo, refs: 1, records: map[int]bootstrap.Record{},
			settings: s, groups: map[*Group]struct{}{}}
		if g, err = j.join(ctx, s); err == nil {
			return g, nil
		}
		again := j.unmet(ctx, err)
		if err = files.Explain(err); !again && before != nil {
			err = fmt.Errorf("%w (before that: %w)", err, before)
		}
		if n := j.strangers(); n > 0 {
			err = fmt.Errorf("%w (%d connections to this rank were refused: they did not know its job secret; is "+
				"TUTTI_SECRET the same at all ranks?)", err, n)
		}
		j.shut()
		if !again {
			return nil, fmt.Errorf("joining job %q as rank %d of %d: %w", s.Job, s.Rank, s.Size, err)
		}
		s.Logger.Info("a rank was lost before all had met: joining anew", "err", err)
		before = err
		select { // those who were linked with a life that ends here end theirs: none of them is to meet the next
		case <-ctx.Done():
		case <-time.After(joinPause):
		}
	}
}

// joinPause is between two lives of a rank in Join.
const joinPause = 100 * time.Millisecond

// errStarted says that a job began without this life of a rank.
var errStarted = errors.New("the job began without this life of the rank")

// unmet says whether this rank should join anew because another was lost, or gave up, before all
// had met. Its links and its incarnation are known to those who had met the lost one, so they end
// with this life.
func (j *job) unmet(ctx context.Context, err error) bool {
	if j.settings.OnFailure == Report || j.met.Load() || ctx.Err() != nil {
		return false
	}
	var lost *RankError
	var late *TimeoutError // another rank's
	return errors.As(err, &lost) || errors.As(err, &late) || errors.Is(err, p2p.ErrPeerGone) ||
		errors.Is(err, errStarted)
}

func (j *job) join(ctx context.Context, s *settings) (*Group, error) {
	self := p2p.Identity{Rank: s.Rank, Incarnation: bootstrap.NewIncarnation()}
	j.self = self
	pc := p2p.Config{Self: self, Size: s.MaxSize, Notify: j.notify, Secret: s.Secret, Resolve: j.resolve,
		Logger:    s.Logger,
		Heartbeat: s.Window / 4, Linger: min(s.Window, time.Second),
		Patient:        func() bool { return !j.met.Load() },
		Oversubscribed: true} // until it is known who is where
	if s.OnFailure != Report { // a rank that cannot be reached is lost as soon as one whose link breaks
		pc.ConnectTimeout = max(s.Window, time.Second)
	}
	here := place{cpus: allowedCPUs(), cores: runtime.NumCPU(), algo: s.algo}
	if s.MaxSize == 1 {
		j.proxy = p2p.New(pc)
		here.incarnation = self.Incarnation
		j.places, j.here, j.view = []place{here}, here, membership.First([]uint64{self.Incarnation})
		return j.world(s, self)
	}
	switch {
	case len(s.Secret) == 0:
		return nil, errors.New("no job secret: set TUTTI_SECRET (the same for all ranks, at least 16 bytes), or " +
			"start the ranks with tutti run")
	case s.Job == "":
		return nil, s.launch.JobMissing()
	case s.Store == "":
		return nil, errors.New("no store: set TUTTI_STORE=etcd://HOST:PORT, or start the ranks with tutti run")
	}
	if err := roomForFiles(s.MaxSize); err != nil {
		return nil, err
	}
	var err error
	if pc.Transports, err = s.transports(); err != nil {
		return nil, err
	}
	j.proxy = p2p.New(pc)

	// The store's round trips, the handshake's and the transports' self-tests overlap.
	eg, ectx := errgroup.WithContext(ctx)
	eg.Go(func() (err error) {
		j.store, err = s.dialStore(ectx)
		return err
	})
	ready := make(chan struct{})
	eg.Go(func() error {
		defer close(ready)
		endpoints, err := j.proxy.Listen(ectx)
		if err == nil {
			_, shared := endpoints["shm"]
			j.mapped = shared && p2p.CanExpose
		}
		return err
	})
	eg.Go(func() (err error) {
		j.server, err = bootstrap.Serve(ectx, bootstrap.ServerConfig{Rank: s.Rank, Incarnation: self.Incarnation,
			Secret: s.Secret, Interfaces: s.Interfaces,
			Ports: s.Ports, Logger: s.Logger, Status: j.status, Describe: func(ctx context.Context, from int,
				incarnation uint64) (bootstrap.Endpoints, error) {
				select {
				case <-ready:
					return j.proxy.Endpoints(), nil
				case <-ctx.Done():
					return nil, ctx.Err()
				}
			}})
		return err
	})
	if err := eg.Wait(); err != nil {
		return nil, err
	}
	rec := bootstrap.NewRecord(s.Rank, s.MaxSize, self.Incarnation, j.server.Addrs())
	j.record = rec
	j.client = bootstrap.NewClient(bootstrap.ClientConfig{Self: rec, Secret: s.Secret})
	if err := bootstrap.Register(ctx, j.store, rec); err != nil {
		return nil, err
	}
	j.tuned = s.tuned()
	here.table, here.incarnation = j.tuned.Hash(), self.Incarnation
	h := fnv.New64a()
	fmt.Fprintf(h, "%s\x00%s", rec.Machine, rec.Network)
	here.machine, here.maps = h.Sum64(), j.mapped
	j.here = here
	if s.Rank >= s.Size { // it joins a running job, which may be about to begin
		if _, err := j.store.Wait(ctx, viewKey); err != nil {
			return nil, fmt.Errorf("rank %d is beyond the job's first %d, and no job runs that it could join: %w",
				s.Rank, s.Size, err)
		}
	}
	view, first, err := j.running(ctx)
	if err != nil {
		return nil, err
	}
	if view.Epoch > 0 {
		g, err := j.enter(ctx, s, view, first)
		if !errors.Is(err, errOver) {
			return g, err
		}
		j.log.Info("all ranks that could have let this one in are gone: the job begins anew")
		if err := j.anew(ctx, view); err != nil {
			return nil, err
		}
	}
	if s.Rank >= s.Size {
		return nil, fmt.Errorf("rank %d is beyond the job's first %d, and what is in the store is of a job that is over", s.Rank, s.Size)
	}
	lives := make([]uint64, s.Size)
	lives[s.Rank] = self.Incarnation
	j.view = membership.First(lives) // the others' are learnt when they meet
	g, err := j.world(s, self)
	if err != nil {
		return nil, err
	}
	mctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if s.OnFailure != Report {
		defer j.watchStart(mctx, cancel)()
	}
	j.proxy.Lock()
	j.meeting = cancel
	j.proxy.Unlock()
	if err := g.meet(mctx, here); err != nil {
		if cause := context.Cause(mctx); mctx.Err() != nil && ctx.Err() == nil {
			err = cause
		}
		return nil, err
	}
	for r, p := range j.places {
		lives[r] = p.incarnation
	}
	g.job.proxy.Lock()
	g.at = membership.First(lives)
	g.sync = resync.New(g.rank, g.view(g.at))
	g.job.proxy.Unlock()
	g.warn()
	j.proxy.Lock()
	j.meeting = nil
	// by somebody with whom this rank had met, whose life the others may not have met
	lost := mctx.Err() != nil && ctx.Err() == nil
	j.met.Store(!lost)
	j.proxy.Unlock()
	if lost {
		return nil, context.Cause(mctx)
	}
	if s.MaxSize > membership.MaxSlots {
		j.log.Warn("the job is too large for views: who is lost stays lost, and its group with it", "ranks", s.MaxSize,
			"at most", membership.MaxSlots)
		return g, nil
	}
	return g, j.startMembers(g.at, lives[0])
}

// watchStart ends a meeting by cancel when the job has begun without this rank: others had met
// before one was lost whom this rank had not met. The caller must call stop.
func (j *job) watchStart(ctx context.Context, cancel context.CancelCauseFunc) (stop func()) {
	ctx, end := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for e := range j.store.Watch(ctx, viewKey) {
			if e.Err != nil || !e.Exists {
				continue
			}
			if _, v, err := decodeView(e.Value); err != nil || v.Has(j.self.Rank, j.self.Incarnation) {
				continue
			}
			// else it is left over from an earlier job
			if v, _, err := j.running(ctx); err == nil && v.Epoch > 0 && !v.Has(j.self.Rank, j.self.Incarnation) {
				cancel(errStarted)
			}
		}
	}()
	return func() {
		end()
		<-done
	}
}

// errOver says that a job ended while this rank waited to be let in.
var errOver = errors.New("all ranks of the job are gone")

// enter joins a running job: when it returns, the others have let this rank in, at one of their
// step boundaries.
func (j *job) enter(ctx context.Context, s *settings, view membership.View, first uint64) (*Group, error) {
	j.met.Store(true)
	if err := j.startMembers(view, first); err != nil {
		return nil, err
	}
	ms := j.members
	if r := s.Rank; r < view.Size() && view.Slots[r].Incarnation != 0 {
		ms.publish(knockKey+strconv.Itoa(r), stamp(j.self.Incarnation))
	}
	var in bool
	alive := time.Now() // when one of those who could let it in was registered last
	again := time.NewTicker(time.Second)
	defer again.Stop()
	for !in {
		if err := ms.ask(ctx, func(m *membership.Machine) { in = m.Member() }); err != nil {
			return nil, fmt.Errorf("waiting to be let in (do the others call Admit, or have they AutoAdmit?): %w", err)
		}
		j.proxy.Lock()
		out := ms.evicted
		j.proxy.Unlock()
		if out {
			return nil, ErrEvicted
		}
		if !in {
			select {
			case <-ctx.Done():
			case <-time.After(2 * time.Millisecond):
			case <-again.C:
				if v, _, err := j.running(ctx); err != nil || v.Epoch > 0 {
					alive = time.Now()
				} else if time.Since(alive) > j.store.TTL()+2*time.Second { // and not just without their leases
					return nil, errOver
				}
			}
		}
	}
	ms.publish(joinKey+strconv.Itoa(s.Rank), nil)
	ms.publish(knockKey+strconv.Itoa(s.Rank), nil)
	j.proxy.Lock()
	view = j.view
	j.proxy.Unlock()
	g, err := newGroup(j, upTo(view.Size()), s.Rank, worldName, nil, view, view.Epoch-1)
	if err != nil {
		return nil, err
	}
	if err := g.enter(ctx, "join", nil); err != nil {
		return nil, err
	}
	defer g.leave()
	g.must = view.Epoch
	g.viewChanged()
	if err := g.move(resync.Standing{Joins: true, Intact: true}, false); err != nil {
		return nil, err
	}
	g.joins = false
	g.seq = g.begins - 1
	if !s.AutoAdmit { // the others are in Admit, or will be when they see that somebody is lost
		if _, err := g.admit(ctx, math.MaxUint64); err != nil {
			return nil, err
		}
	}
	return g, nil
}

// anew takes back what enter did, so that this rank can be one of a job that begins. With those
// that have begun it may be linked already.
func (j *job) anew(ctx context.Context, over membership.View) error {
	j.members.stop()
	j.proxy.Lock()
	j.members = nil
	j.proxy.Unlock()
	for _, key := range []string{joinKey, knockKey} {
		if err := j.store.Delete(ctx, key+strconv.Itoa(j.self.Rank)); err != nil {
			return err
		}
	}
	j.mu.Lock()
	clear(j.records)
	j.mu.Unlock()
	j.met.Store(false)
	for r := range j.settings.MaxSize {
		if l := j.proxy.Linked(r); l == 0 || over.Has(r, l) {
			j.proxy.Vacate(r, 0, nobody(r))
			j.proxy.Expect(r, 0)
		}
	}
	return nil
}

func upTo(n int) []int {
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	return all
}

// running returns the view of the job if it is running: one of the lives that it has is registered.
// The zero View: it is about to begin, or what is in the store is left over from a job of the same
// name.
func (j *job) running(ctx context.Context) (membership.View, uint64, error) {
	b, err := j.store.Get(ctx, viewKey)
	if errors.Is(err, bootstrap.ErrNoKey) {
		return membership.View{}, 0, nil
	}
	if err != nil {
		return membership.View{}, 0, err
	}
	first, view, err := decodeView(b)
	if err != nil {
		return membership.View{}, 0, err
	}
	records, err := j.store.List(ctx, "ranks/")
	if err != nil {
		return membership.View{}, 0, err
	}
	for _, b := range records {
		if rec, err := bootstrap.DecodeRecord(b); err == nil && rec.Rank != j.self.Rank &&
			view.Has(rec.Rank, rec.Incarnation) {
			return view, first, nil
		}
	}
	return membership.View{}, 0, nil
}

// standBy waits until a slot of the running job is free and claims it for this process: s.Rank. The
// claim holds until release. That takes as long as nobody is lost; what bounds it is ctx alone, but
// no single question to the store waits for long.
func (s *settings) standBy(ctx context.Context) (release func(joined bool), err error) {
	if s.Job == "" {
		return nil, s.launch.JobMissing()
	}
	dctx, dialed := s.within(ctx)
	defer dialed()
	store, err := s.dialStore(dctx)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			store.Close()
		}
	}()
	wctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var view membership.View
	// records and claims go without a change of the view
	changes, again := store.Watch(wctx, viewKey), time.NewTicker(200*time.Millisecond)
	defer again.Stop()
	vacancies, vacant := store.Watch(wctx, bootstrap.VacantKeys), map[int]bool{}
	for {
		select {
		case e, open := <-changes:
			switch {
			case !open:
				return nil, cmp.Or(context.Cause(ctx), bootstrap.ErrStoreAway)
			case e.Err != nil:
				return nil, e.Err
			case e.Exists:
				if _, view, err = decodeView(e.Value); err != nil {
					return nil, err
				}
			}
		case e, open := <-vacancies:
			switch {
			case !open:
				return nil, cmp.Or(context.Cause(ctx), bootstrap.ErrStoreAway)
			case e.Err != nil:
				return nil, e.Err
			}
			if slot, err := strconv.Atoi(strings.TrimPrefix(e.Key, bootstrap.VacantKeys)); err == nil && slot >= 0 &&
				slot < s.MaxSize {
				if vacant[slot] = true; !e.Exists {
					delete(vacant, slot)
				}
			}
		case <-again.C:
		}
		free := slices.Sorted(maps.Keys(vacant)) // before there is a view
		for slot, at := range view.Slots {
			if at.Incarnation == 0 && at.Left != 0 && !vacant[slot] {
				free = append(free, slot)
			}
		}
		for _, slot := range free {
			if s.claim(ctx, store, slot) != nil {
				continue
			}
			s.Rank = slot
			return func(joined bool) {
				if vacant[slot] && joined {
					dctx, cancel := context.WithTimeout(context.Background(), storeWait)
					defer cancel()
					if err := store.Delete(dctx, bootstrap.VacantKeys+strconv.Itoa(slot)); err != nil {
						s.Logger.Debug("the vacancy that this rank has taken is still told", "err", err)
					}
				}
				store.Close()
			}, nil
		}
	}
}

// claim takes a slot for this process, unless somebody has it.
func (s *settings) claim(ctx context.Context, store bootstrap.Store, slot int) error {
	ctx, cancel := context.WithTimeout(ctx, storeWait)
	defer cancel()
	if _, err := store.Get(ctx, bootstrap.RankKey(slot)); !errors.Is(err, bootstrap.ErrNoKey) {
		return cmp.Or(err, bootstrap.ErrConflict) // somebody has registered already
	}
	return store.Create(ctx, "claims/"+strconv.Itoa(slot), []byte("a spare process"), true)
}

// within bounds ctx by Config.Timeout.
func (s *settings) within(ctx context.Context) (context.Context, context.CancelFunc) {
	if s.Timeout > 0 {
		return context.WithTimeout(ctx, s.Timeout)
	}
	return context.WithCancel(ctx)
}

func (s *settings) dialStore(ctx context.Context) (bootstrap.Store, error) {
	return bootstrap.DialStore(ctx, bootstrap.StoreConfig{Address: s.Store, Job: s.Job, Secret: s.Secret, Rank: s.Rank,
		User:     s.StoreUser,
		Password: s.StorePassword, TLS: s.StoreTLS, CA: s.launch.StoreCA, Cert: s.launch.StoreCert,
		Key: s.launch.StoreKey, LeaseTTL: s.LeaseTTL, Logger: s.Logger})
}

// directory returns the job's store, which is another handle after the lease was lost.
func (j *job) directory() bootstrap.Store {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.store
}

// reconnect replaces a handle on the store whose lease was lost, and registers this rank again. If
// another life has taken the slot meanwhile, the view will tell.
func (j *job) reconnect(ctx context.Context, old bootstrap.Store) error {
	ctx, cancel := context.WithTimeout(ctx, storeWait)
	defer cancel()
	fresh, err := j.settings.dialStore(ctx)
	if err != nil {
		return err
	}
	// Before this rank registers: the store may take the old lease's end, and the record with it, a
	// little later than this process did.
	if err := old.Close(); err != nil {
		j.log.Debug("the lost lease could not be given back", "err", err)
	}
	var taken *bootstrap.SlotError
	if err := bootstrap.Register(ctx, fresh, j.record); err != nil && !errors.As(err, &taken) {
		fresh.Close()
		return err
	}
	j.mu.Lock()
	j.store = fresh
	j.mu.Unlock()
	return nil
}

// notify is the proxy's word of a link, with its lock.
func (j *job) notify(peer p2p.Identity, err error) {
	if j.meeting != nil && j.settings.OnFailure != Report && errors.Is(err, p2p.ErrPeerGone) {
		j.meeting(fmt.Errorf("rank %d was lost before all ranks had joined: %w", peer.Rank, err))
	}
	if j.members != nil {
		j.members.link(peer, err)
	}
}

// strangers is how many connections were refused because of their secret.
func (j *job) strangers() int {
	if j.server == nil {
		return 0
	}
	return j.server.Strangers()
}

// world makes the group of all ranks.
func (j *job) world(s *settings, self p2p.Identity) (*Group, error) {
	g, err := newGroup(j, upTo(s.Size), self.Rank, worldName, nil, j.view, 1)
	if err == nil && s.MaxSize == 1 {
		g.locate(j.places)
	}
	return g, err
}

// meet is the first collective of a job: all ranks tell each other where they are. When it returns,
// all have joined.
func (g *Group) meet(ctx context.Context, here place) error {
	mine := make([]byte, placeSize)
	here.encode(mine)
	all := make([]byte, placeSize*g.size)
	forced := g.topo.Algo
	g.topo.Algo = collectives.Auto // not agreed on yet
	g.topo.Caps = collectives.Caps{Cores: 1}
	g.settle()
	if err := AllGather(ctx, g, all, mine); err != nil {
		return err
	}
	g.topo.Algo = forced
	g.job.places = make([]place, g.size)
	for r := range g.size {
		p := decodePlace(all[r*placeSize:])
		g.job.places[r] = p
		if p.algo != here.algo {
			return fmt.Errorf("rank %d was told to use algorithm %v and rank %d algorithm %v: set TUTTI_ALGO "+
				"alike on all ranks", g.rank, here.algo, r, p.algo)
		}
	}
	g.job.proxy.Lock()
	g.locate(g.job.places)
	g.job.crowd(g)
	g.job.proxy.Unlock()
	return nil
}

// crowd finds out whether ranks of the group share this rank's processors. With the proxy's lock.
func (j *job) crowd(g *Group) {
	alike := 0
	for _, slot := range g.active {
		if p := j.places[g.ranks[slot]]; p.machine == j.here.machine && p.cpus == j.here.cpus {
			alike++
		}
	}
	j.proxy.SetOversubscribed(alike > j.here.cores)
}

// settle takes in where the members of a view are. With the proxy's lock.
func (j *job) settle(g *Group, places []place) {
	j.places = places
	j.crowd(g)
}

// resolve is the proxy's directory: the store says who a rank is, the rank itself how to reach it.
func (j *job) resolve(ctx context.Context, rank int) (p2p.Peer, error) {
	j.mu.Lock()
	rec, cached := j.records[rank]
	j.mu.Unlock()
	if !cached {
		var err error
		if rec, err = j.lookup(ctx, rank); err != nil {
			return p2p.Peer{}, err
		}
	}
	dctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	endpoints, err := j.client.Describe(dctx, rec)
	if err != nil {
		j.mu.Lock()
		delete(j.records, rank) // it may be gone, or another by now: the store knows
		j.mu.Unlock()
		return p2p.Peer{}, err
	}
	j.mu.Lock()
	j.records[rank] = rec
	j.mu.Unlock()
	return p2p.Peer{Identity: p2p.Identity{Rank: rank, Incarnation: rec.Incarnation}, Endpoints: endpoints}, nil
}

// lookup asks the store for a rank. Before all ranks have met it waits for the rank to register;
// afterwards a rank without a record is gone.
func (j *job) lookup(ctx context.Context, rank int) (bootstrap.Record, error) {
	if !j.met.Load() {
		return bootstrap.Lookup(ctx, j.directory(), rank)
	}
	b, err := j.directory().Get(ctx, bootstrap.RankKey(rank))
	if errors.Is(err, bootstrap.ErrNoKey) {
		return bootstrap.Record{}, fmt.Errorf("its lease has ended: %w", p2p.ErrPeerGone)
	}
	if err != nil {
		return bootstrap.Record{}, err
	}
	return bootstrap.DecodeRecord(b)
}

// Local makes n ranks inside this process, for tests and for programs that are parallel in threads.
// Ranks are goroutines of the caller, one for each group returned. Of cfg it takes Algorithm,
// Timeout and Logger; it chooses by the default table.
func Local(n int, cfg Config) ([]*Group, error) {
	if cfg.Size, cfg.Rank, cfg.MaxSize = n, 0, n; n < 1 {
		return nil, &ArgumentError{Call: "local", Arg: "the number of ranks", Got: fmt.Sprint(n), Want: "at least 1"}
	}
	cfg.Job = cmp.Or(cfg.Job, "default")
	s, err := cfg.resolve(func(string) string { return "" })
	if err != nil {
		return nil, err
	}
	secret := []byte(bootstrap.NewSecret())
	proxies := make([]*p2p.Proxy, n)
	ids := make([]p2p.Identity, n)
	places := make([]place, n)
	for r := range n {
		ids[r] = p2p.Identity{Rank: r, Incarnation: bootstrap.NewIncarnation()}
		places[r] = place{cores: runtime.NumCPU(), algo: s.algo}
	}
	resolve := func(_ context.Context, rank int) (p2p.Peer, error) {
		if proxies[rank].Closed() {
			return p2p.Peer{}, fmt.Errorf("it closed its group: %w", p2p.ErrPeerGone)
		}
		return p2p.Peer{Identity: ids[rank], Endpoints: proxies[rank].Endpoints()}, nil
	}
	groups := make([]*Group, 0, n)
	fail := func(err error) ([]*Group, error) {
		for _, g := range groups {
			g.Close()
		}
		return nil, fmt.Errorf("%d local ranks: %w", n, err)
	}
	lives := make([]uint64, n)
	for r := range n {
		lives[r] = ids[r].Incarnation
	}
	view := membership.First(lives)
	for r := range n {
		ring := min(max(64<<20/(n*n), 4<<10), 256<<10)
		proxies[r] = p2p.New(p2p.Config{Self: ids[r], Size: n, Secret: secret, Resolve: resolve,
			Transports: []p2p.Transport{inproc.New(inproc.Config{RingBytes: ring})},
			Threads:    true, Oversubscribed: n > runtime.NumCPU(), Logger: s.Logger})
		j := &job{proxy: proxies[r], log: s.Logger, timeout: s.Timeout, algo: s.algo, local: true, refs: 1,
			places: places, settings: s, self: ids[r], here: places[r], view: view, groups: map[*Group]struct{}{}}
		if _, err := j.proxy.Listen(context.Background()); err != nil {
			j.shut()
			return fail(err)
		}
		g, err := j.world(s, ids[r])
		if err != nil {
			j.shut()
			return fail(err)
		}
		g.locate(places)
		groups = append(groups, g)
	}
	return groups, nil
}

// retain keeps the job open for one more group; false: it is closed already.
func (j *job) retain() bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.refs == 0 {
		return false
	}
	j.refs++
	return true
}

// release is retain's counterpart; the last one ends the job on this rank.
func (j *job) release() error {
	j.mu.Lock()
	j.refs--
	last := j.refs == 0
	j.mu.Unlock()
	if last {
		return j.shut()
	}
	return nil
}

func (j *job) shut() error {
	var errs *multierror.Error
	if j.members != nil {
		j.members.stop()
	}
	if j.proxy != nil {
		errs = multierror.Append(errs, j.proxy.Close())
	}
	if j.server != nil {
		j.server.Close()
	}
	if store := j.directory(); store != nil {
		// a store that left before us is no failure of ours
		if err := store.Close(); err != nil && !errors.Is(err, bootstrap.ErrStoreAway) {
			errs = multierror.Append(errs, err)
		}
	}
	j.unobserve()
	if errs != nil && len(errs.Errors) == 1 {
		return errs.Errors[0]
	}
	return errs.ErrorOrNil()
}

// alloc returns memory that peers can map, and remembers it.
func (j *job) alloc(n int) ([]byte, error) {
	r, err := j.proxy.Alloc(n)
	if err != nil {
		return nil, err
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	var all []*p2p.Region
	if old := j.regions.Load(); old != nil {
		all = append(all, *old...)
	}
	all = append(all, r)
	sort.Slice(all, func(a, b int) bool { return regionStart(all[a]) < regionStart(all[b]) })
	j.regions.Store(&all)
	return r.Mem, nil
}

func regionStart(r *p2p.Region) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(r.Mem))) }

// region returns the mappable region that holds n bytes at ptr, and ptr's offset in it; nil if
// there is none.
func (j *job) region(ptr unsafe.Pointer, n int) (*p2p.Region, int) {
	all := j.regions.Load()
	if all == nil {
		return nil, 0
	}
	at := sort.Search(len(*all), func(i int) bool { return regionStart((*all)[i]) > uintptr(ptr) }) - 1
	if at < 0 {
		return nil, 0
	}
	r := (*all)[at]
	off := int(uintptr(ptr) - regionStart(r))
	if !r.Shared || off+n > len(r.Mem) {
		return nil, 0
	}
	return r, off
}

func (j *job) freeMem(ptr unsafe.Pointer) error {
	j.mu.Lock()
	var found *p2p.Region
	if old := j.regions.Load(); old != nil {
		kept := make([]*p2p.Region, 0, len(*old))
		for _, r := range *old {
			if regionStart(r) == uintptr(ptr) {
				found = r
			} else {
				kept = append(kept, r)
			}
		}
		j.regions.Store(&kept)
	}
	j.mu.Unlock()
	if found == nil {
		return &ArgumentError{Call: "free", Arg: "the slice", Got: "not from Alloc of this job, or freed before",
			Want: "what Alloc returned"}
	}
	return j.proxy.FreeRegion(found)
}
