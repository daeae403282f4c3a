package launch

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"tutti/bootstrap"
	"tutti/bootstrap/embed"
	"tutti/cmd/tutti/internal/term"
	"tutti/internal/backoff"
	"tutti/internal/ident"
	"tutti/internal/ifname"
	"tutti/internal/plain"
	"tutti/internal/ports"
)

// Keys of launchers of several nodes in the store, below the job's prefix: the nodes, under a
// lease, and how they ended.
const (
	nodeKeys = "launcher/nodes/"
	doneKeys = "launcher/done/"
)

// nodeRecord is a launcher's record of its node.
type nodeRecord struct {
	N, Nodes    int
	Incarnation uint64 // of the launcher
	Host        string
	Failure     string // --on-failure
	Master      string `json:",omitempty"` // node 0: HOST:PORT for programs with their own rendezvous
	Refusal     string `json:",omitempty"` // why it gives up
}

// readNode reads a launcher's record.
func readNode(text []byte) (r nodeRecord, err error) {
	err = json.Unmarshal(text, &r)
	for _, s := range []*string{&r.Host, &r.Failure, &r.Refusal} {
		*s = plain.Text(*s)
	}
	return r, err
}

// hearWait bounds how long a launcher that gives up waits until another has read its record.
const hearWait = 5 * time.Second

// differs returns why two nodes cannot be of one job, or nil.
func (r nodeRecord) differs(n int, other nodeRecord) error {
	switch {
	case other.N != r.N || other.Nodes != r.Nodes:
		return fmt.Errorf("node %d (%s) was started with -n %d --nnodes %d, this one with -n %d --nnodes %d: "+
			"they must agree", n, other.Host, other.N, other.Nodes, r.N, r.Nodes)
	case other.Failure != r.Failure:
		return fmt.Errorf("node %d (%s) was started with --on-failure %s, this one with --on-failure %s: "+
			"they must agree", n, other.Host, other.Failure, r.Failure)
	}
	return nil
}

// failure is how a node ended: Code, an exit status, is 0 for success. End: the others have to end
// too, even with Options.Elastic.
type failure struct {
	Code        int
	Why         string
	End         bool   `json:",omitempty"`
	Incarnation uint64 // of the launcher: one of an earlier job may have left its report
}

// readFailure reads how a node ended.
func readFailure(text []byte) failure {
	var f failure
	err := json.Unmarshal(text, &f)
	if failed := f.Code != 0; err != nil || f.Code < 0 || f.Code > 255 || !failed && (f.End || f.Why != "") {
		return failure{Code: CodeLaunch, Why: "unreadable record", Incarnation: f.Incarnation}
	}
	f.Why = plain.Text(f.Why)
	return f
}

type broken struct {
	code int
	why  string
}

// store is this launcher's view of the job's store: served, shared with other launchers, both, or
// neither (nil fields; a nil *store works).
type store struct {
	server *embed.Server
	node   int
	nodes  int

	open    func(context.Context) (bootstrap.Store, error) // opens another handle
	me      uint64                                         // this launcher's incarnation
	record  []byte                                         // of this node, under the handle's lease
	back    time.Duration                                  // how long another node's record may be missing
	served  bool                                           // a launcher serves the store
	refused atomic.Bool                                    // it does not listen any more

	mu     sync.Mutex
	handle bootstrap.Store // not nil: there are other nodes; watch replaces it, and reads it without the lock

	failc   chan broken   // receives the first failure elsewhere that ends this node too
	alone   chan struct{} // watch sends while every other node has ended or is gone
	elastic bool
	say     func(string)
	well    atomic.Bool   // another node has succeeded
	wake    chan struct{} // holds a token after well was set
	cancel  context.CancelFunc
	watched chan struct{}
	once    sync.Once
	reports sync.WaitGroup
}

// environment makes the store, meets the other nodes, and returns a function for the environment of
// local rank i.
func (l *launcher) environment(ctx context.Context) (func(i int) []string, error) {
	fresh := "" // a secret that the other nodes do not know
	if l.Meet != nil && l.Node > 0 {
		if err := l.hear(ctx); err != nil {
			return nil, err
		}
	}
	if l.Secret == "" {
		l.Secret = bootstrap.NewSecret()
		fresh = l.Secret
	}
	secret, err := bootstrap.ParseSecret(l.Secret)
	if err != nil {
		return nil, err
	}
	if l.Job == "" {
		l.Job = "default"
		if l.Nodes == 1 {
			l.Job, l.unique = fmt.Sprintf("run-%012x", ident.New()>>16), true
		}
	}
	s := &store{node: l.Node, nodes: l.Nodes, failc: make(chan broken, 1), alone: make(chan struct{}),
		elastic: l.Elastic, served: l.Store == "",
		wake: make(chan struct{}, 1), say: func(text string) {
			if !l.Quiet {
				l.say(text)
			}
		}}
	l.hold = s
	address, host := l.Store, "127.0.0.1"
	if address == "" {
		conf := embed.Config{Dir: l.temp, Secret: secret}
		switch {
		case l.Meet != nil && l.Node == 0:
			if host, conf.Ports, err = l.Meet.MeetingHost(); err != nil {
				return nil, err
			}
			conf.Host, conf.Advertise = bootstrap.ListenHost(ctx, host), host
		case l.Nodes > 1:
			address = "tutti://" + l.Rendezvous
			if host, conf.Ports, err = net.SplitHostPort(l.Rendezvous); err != nil {
				return nil, err
			}
			conf.Host, conf.Advertise = bootstrap.ListenHost(ctx, host), host
		}
		if l.Node == 0 {
			if s.server, err = embed.Start(ctx, conf); err != nil {
				if l.Meet != nil && conf.Ports != "0" {
					err = fmt.Errorf("%w (another place to meet: --rdzv HOST:PORT, the same on all nodes)", err)
				}
				return nil, fmt.Errorf("start the job's store: %w", err)
			}
			address = s.server.Address()
			if l.Meet != nil {
				l.Rendezvous = strings.TrimPrefix(address, "tutti://")
				if err := l.invite(ctx, address, fresh); err != nil {
					return nil, err
				}
				defer l.told()
			}
		}
	} else if l.Nodes > 1 {
		if host, err = publicAddress(); err != nil {
			return nil, err
		}
	}
	master := ""
	if l.Node == 0 {
		// Tutti does not listen there: the port is for programs with their own rendezvous.
		p, err := ports.Free(ctx)
		if err != nil {
			return nil, err
		}
		master = net.JoinHostPort(host, strconv.Itoa(int(p)))
	}
	if l.Nodes > 1 {
		err := l.interruptible(ctx, func(ctx context.Context) error {
			var err error
			master, err = s.meet(ctx, l, address, secret, master)
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	masterHost, masterPort, err := net.SplitHostPort(master)
	if err != nil {
		return nil, fmt.Errorf("node 0's address %q: %w", master, err)
	}
	if l.MaxRestarts > 0 || l.Standby > 0 {
		cfg, err := l.storeConfig(address, secret)
		if err != nil {
			return nil, err
		}
		l.views = followViews(cfg)
	}
	if err := l.announce(address); err != nil {
		return nil, err
	}
	base := append(inherit(os.Environ(), l.Store != "", l.Env), l.Env...)
	return func(i int) []string {
		if i >= l.N { // it gets its rank when one is free
			return append(base[:len(base):len(base)], "TUTTI_SIZE="+strconv.Itoa(l.world),
				"TUTTI_LOCAL_SIZE="+strconv.Itoa(l.N),
				"TUTTI_STANDBY="+strconv.Itoa(l.Node*l.Standby+i-l.N),
				"MASTER_ADDR="+masterHost, "MASTER_PORT="+masterPort, "TUTTI_STORE="+address, "TUTTI_JOB="+l.Job,
				"TUTTI_SECRET="+l.Secret)
		}
		return append(base[:len(base):len(base)],
			"RANK="+strconv.Itoa(l.base+i), "WORLD_SIZE="+strconv.Itoa(l.world),
			"LOCAL_RANK="+strconv.Itoa(i), "LOCAL_WORLD_SIZE="+strconv.Itoa(l.N),
			"MASTER_ADDR="+masterHost, "MASTER_PORT="+masterPort,
			"TUTTI_STORE="+address, "TUTTI_JOB="+l.Job, "TUTTI_SECRET="+l.Secret)
	}, nil
}

// meetTime bounds how long nodes wait for each other.
const meetTime = 5 * time.Minute

// invite announces the store, and the secret if they have none, to the other nodes, until l.told is
// called.
func (l *launcher) invite(ctx context.Context, store, secret string) error {
	return l.interruptible(ctx, func(ctx context.Context) (err error) {
		ctx, cancel := context.WithTimeoutCause(ctx, meetTime, fmt.Errorf("not all have come within %v", meetTime))
		defer cancel()
		l.told, err = l.Meet.Tell(ctx, store, secret)
		return err
	})
}

// hear learns node 0's store, and the secret unless this node has one.
func (l *launcher) hear(ctx context.Context) error {
	return l.interruptible(ctx, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeoutCause(ctx, meetTime, fmt.Errorf("no word from it within %v", meetTime))
		defer cancel()
		if !l.Quiet {
			l.say(fmt.Sprintf("looking for node 0 of %d", l.Nodes))
		}
		store, secret, err := l.Meet.Hear(ctx)
		if err != nil {
			return err
		}
		addr, err := bootstrap.ParseStore(store)
		switch {
		case err != nil:
			return fmt.Errorf("node 0 says where to meet: %w", err)
		case secret == "" && l.Secret == "":
			return errors.New("node 0 was given a secret and this node was not: set TUTTI_SECRET on all nodes or " +
				"on none")
		case secret != "" && l.Secret != "":
			return errors.New("this node was given a secret and node 0 was not: set TUTTI_SECRET on all nodes or " +
				"on none")
		}
		l.Rendezvous, l.Secret = addr.Endpoints[0], cmp.Or(l.Secret, secret)
		return nil
	})
}

func publicAddress() (string, error) {
	f, err := ifname.Parse(os.Getenv("TUTTI_IFNAME"))
	if err != nil {
		return "", err
	}
	addrs, err := f.Addrs()
	if err != nil {
		return "", err
	}
	return addrs[0].String(), nil
}

// interruptible runs f, and ends its ctx when the user interrupts it with a signal.
func (l *launcher) interruptible(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	for {
		select {
		case err := <-done:
			if l.user != 0 {
				return &Error{128 + int(l.user), fmt.Errorf("interrupted by %s before the ranks were started",
					unix.SignalName(l.user))}
			}
			return err
		case s := <-l.signals:
			if l.interrupts(s) {
				l.user = s.(syscall.Signal)
				cancel()
			}
		}
	}
}

// storeConfig says how to reach the job's store.
func (l *launcher) storeConfig(address string, secret []byte) (bootstrap.StoreConfig, error) {
	cfg := bootstrap.StoreConfig{Address: address, Job: l.Job, Secret: secret, Rank: l.base}
	if l.Store != "" {
		cfg.User, cfg.Password = os.Getenv("TUTTI_STORE_USER"), os.Getenv("TUTTI_STORE_PASSWORD")
		cfg.CA, cfg.Cert, cfg.Key = os.Getenv("TUTTI_STORE_CA"), os.Getenv("TUTTI_STORE_CERT"),
			os.Getenv("TUTTI_STORE_KEY")
	}
	// The lease is the ranks', too: it bounds how long this node may be silent before the others
	// take it for dead.
	env, err := bootstrap.FromEnv(func(name string) string {
		if name == "TUTTI_LEASE" {
			return os.Getenv(name)
		}
		return ""
	})
	cfg.LeaseTTL = env.LeaseTTL
	return cfg, err
}

// meet announces this node and waits for the others. It returns the master's address, as announced
// by node 0.
func (s *store) meet(ctx context.Context, l *launcher, address string, secret []byte, master string) (string, error) {
	patience := meetTime
	ctx, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("no answer within %v", patience))
	defer cancel()
	cfg, err := l.storeConfig(address, secret)
	if err != nil {
		return "", err
	}
	cfg.DialTimeout = patience
	cfg.Dial = func(ctx context.Context, d *net.Dialer, _ int, address string) (net.Conn, error) {
		conn, err := d.DialContext(ctx, "tcp", address)
		s.refused.Store(s.served && errors.Is(err, syscall.ECONNREFUSED))
		return conn, err
	}
	reached := l.impatient(ctx, address, patience)
	s.handle, err = bootstrap.DialStore(ctx, cfg)
	reached()
	if err != nil {
		err = fmt.Errorf("node %d cannot reach the job's store: %w", s.node, err)
		if errors.Is(err, bootstrap.ErrStoreAway) && l.Meet != nil && l.Meet.ChoosesAddress() {
			err = fmt.Errorf("%w (%s)", err, chosen)
		}
		return "", err
	}
	s.refused.Store(false) // the store did not listen yet
	cfg.DialTimeout = 0
	s.open = func(ctx context.Context) (bootstrap.Store, error) { return bootstrap.DialStore(ctx, cfg) }
	host, _ := os.Hostname()
	s.me = ident.New()
	return s.gather(ctx, l, address, nodeRecord{N: l.N, Nodes: l.Nodes, Incarnation: s.me, Host: host,
		Failure: l.onFailure(), Master: master})
}

// gather is meet for a launcher that has a handle on the store at address, and the record me.
func (s *store) gather(ctx context.Context, l *launcher, address string, me nodeRecord) (master string, err error) {
	s.back = s.handle.TTL() + 2*time.Second
	master = me.Master
	if s.record, err = json.Marshal(me); err != nil {
		return "", err
	}
	enter := func(ctx context.Context) error { return s.enter(ctx, l.Job) }
	if err = enter(ctx); away(err) {
		err = s.renew(ctx, err, enter)
	}
	if err != nil {
		return "", err
	}
	if there, err := s.handle.List(ctx, nodeKeys); err == nil && !l.Quiet {
		absent := s.nodes - 1
		for key := range there {
			if _, _, ok := s.other(key); ok {
				absent--
			}
		}
		if absent > 0 {
			l.say(fmt.Sprintf("waiting for %s at %s", term.Count(absent, "other node"), address))
		}
	}
	// The same watch serves until the end, so that the death of a node right after the meeting is
	// noticed.
	wctx, stop := context.WithCancel(context.Background())
	s.cancel = stop
	nodes, met := s.handle.Watch(wctx, nodeKeys), map[int]uint64{s.node: me.Incarnation}
	// A launcher that this one refuses learns of it from this one's record, which stays until the
	// other has given up too.
	var refusal error
	var refused int
	var late <-chan time.Time
	for len(met) < s.nodes || refusal != nil {
		var e bootstrap.Event
		var open bool
		select {
		case e, open = <-nodes:
		case <-late:
			return "", refusal
		case <-ctx.Done():
			missing := 0
			for met[missing] != 0 {
				missing++
			}
			return "", cmp.Or(refusal, fmt.Errorf("wait for node %d of %d: %w", missing, s.nodes, context.Cause(ctx)))
		}
		_, n, ok := s.other(e.Key)
		switch {
		case !open || e.Err != nil:
			err := cmp.Or(e.Err, bootstrap.ErrStoreClosed)
			if refusal == nil && away(err) {
				err = s.renew(ctx, err, enter)
			}
			if refusal != nil || err != nil {
				return "", cmp.Or(refusal, fmt.Errorf("wait for the other nodes: %w", err))
			}
			nodes, met = s.handle.Watch(wctx, nodeKeys), map[int]uint64{s.node: me.Incarnation}
			continue
		case !ok:
			continue
		case !e.Exists && refusal != nil && n == refused:
			return "", refusal
		case !e.Exists: // of a launcher that was killed, or has given up
			delete(met, n)
			continue
		}
		other, err := readNode(e.Value)
		if err != nil {
			return "", cmp.Or(refusal, fmt.Errorf("node %d's record in the store: %w", n, err))
		}
		switch differs := me.differs(n, other); {
		case other.Refusal != "" && (refusal == nil || n == refused):
			return "", cmp.Or(refusal, differs, fmt.Errorf("node %d (%s) has given up: %s", n, other.Host,
				other.Refusal))
		case refusal != nil:
		case differs != nil:
			refusal, refused, late = differs, n, time.After(hearWait)
			me.Refusal = differs.Error()
			if s.record, err = json.Marshal(me); err == nil {
				err = s.handle.Put(ctx, s.key(), s.record, true)
			}
			if err != nil {
				return "", refusal
			}
		default:
			if met[n] = other.Incarnation; n == 0 {
				master = other.Master
			}
		}
	}
	s.watched = make(chan struct{})
	go s.watch(wctx, nodes, met)
	return master, nil
}

// key is that of this node's record.
func (s *store) key() string { return nodeKeys + strconv.Itoa(s.node) }

// other returns the node that a key is of, and the prefix of such keys. It reports false if that is
// none of the other nodes of this job: a larger one of the same name may have been before.
func (s *store) other(key string) (prefix string, n int, ok bool) {
	prefix, base := path.Split(key)
	n, err := strconv.Atoi(base)
	return prefix, n, err == nil && base == strconv.Itoa(n) && n >= 0 && n < s.nodes && n != s.node
}

// occupied says that this node's record in the store is another launcher's.
type occupied struct{ error }

// away reports whether err is that the store cannot be reached, or that the lease was lost.
func away(err error) bool {
	return errors.Is(err, bootstrap.ErrStoreAway) || errors.Is(err, bootstrap.ErrLeaseLost)
}

// enter puts this node's record into the store. If there is another launcher's, it waits for it to
// go, at most a lease's TTL and a second, since that launcher may be dead. It removes what a node
// of an earlier job has reported.
func (s *store) enter(ctx context.Context, job string) error {
	wctx, cancel := context.WithTimeout(ctx, s.handle.TTL()+time.Second)
	defer cancel()
	var other nodeRecord
	for e := range s.handle.Watch(wctx, s.key()) {
		switch {
		case e.Err != nil:
			return e.Err
		case e.Exists:
			var err error
			if other, err = readNode(e.Value); err != nil {
				return occupied{fmt.Errorf("node %d's record in the store: %w", s.node, err)}
			}
			if other.Incarnation == s.me { // the store has not seen yet that its lease was lost
				if err := s.handle.Adopt(ctx, s.key(), s.record); !errors.Is(err, bootstrap.ErrConflict) {
					return err
				}
			}
		default:
			if err := s.handle.Delete(ctx, doneKeys+strconv.Itoa(s.node)); err != nil {
				return err
			}
			if err := s.handle.Create(ctx, s.key(), s.record, true); !errors.Is(err, bootstrap.ErrConflict) {
				return err
			}
		}
	}
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case other.Incarnation == 0 || other.Incarnation == s.me:
		return fmt.Errorf("node %d's record in the store: %w", s.node, bootstrap.ErrStoreAway)
	}
	return occupied{fmt.Errorf("there is a node %d of job %s already, host %s: give every node its own --node-rank",
		s.node, job, other.Host)}
}

// onFailure returns the ranks' setting of OnFailure.
func (l *launcher) onFailure() string {
	if l.Elastic {
		for _, kv := range l.Env {
			if how, ok := strings.CutPrefix(kv, "TUTTI_ON_FAILURE="); ok {
				return how
			}
		}
	}
	return "end"
}

// chosen explains an address that a launcher has put where launchers meet.
const chosen = "node 0 has chosen that address: set TUTTI_IFNAME to the interface that all nodes share"

// impatient explains a long wait for the store, unless the function that it returns is called
// before. A name that does not resolve is reported at once: it may be wrong, or not exist yet.
func (l *launcher) impatient(ctx context.Context, address string, patience time.Duration) (reached func()) {
	ctx, cancel := context.WithCancel(ctx)
	var done sync.WaitGroup
	done.Go(func() {
		text := fmt.Sprintf("the job's store at %s does not answer yet", address)
		if host, _, err := net.SplitHostPort(l.Rendezvous); err == nil {
			if l.Meet != nil && l.Meet.ChoosesAddress() {
				text += ": " + chosen
			} else {
				text += ": is node 0 started, and is that its address (--rdzv)?"
			}
			if _, err := net.DefaultResolver.LookupIP(ctx, "ip", host); err != nil && ctx.Err() == nil {
				text = fmt.Sprintf("the host name of the meeting point %s (--rdzv) does not resolve yet: %v",
					l.Rendezvous, err)
			} else {
				backoff.Sleep(ctx, 5*time.Second)
			}
		} else {
			backoff.Sleep(ctx, 5*time.Second)
		}
		if ctx.Err() == nil && !l.Quiet {
			l.say(fmt.Sprintf("%s; trying again for up to %v", text, patience))
		}
	})
	return func() {
		cancel()
		done.Wait()
	}
}

// watch follows the other nodes, whose launchers' incarnations have been met, until ctx ends or the
// store is gone. A node may have been met by the record of a launcher that was dead, and whose
// place another has taken; later, another one cannot stand for one that has died. A node whose
// launcher is gone counts as ended until that one is back.
func (s *store) watch(ctx context.Context, nodes <-chan bootstrap.Event, met map[int]uint64) {
	defer close(s.watched)
	settled := time.Now().Add(s.back)
	ended := map[int]bool{}
	missing := map[int]time.Time{} // nodes without a record, and when they count as gone
	gone := map[int]bool{}         // until their records are back, or say how they ended
	fail := func(code int, why string) {
		select {
		case s.failc <- broken{code, why}:
		default: // only the first counts
		}
	}
	done := s.handle.Watch(ctx, doneKeys)
	finished := func(n int, text []byte) bool {
		f := readFailure(text)
		if f.Incarnation != met[n] { // of an earlier job, or of a launcher whose record has yet to be seen
			return false
		}
		switch {
		case f.Code != 0 && (f.End || !s.elastic):
			fail(f.Code, fmt.Sprintf("node %d: %s", n, f.Why))
		case f.Code != 0:
			s.say(fmt.Sprintf("node %d: %s; the others go on", n, f.Why))
		case !s.well.Swap(true):
			s.wake <- struct{}{}
		}
		delete(missing, n)
		delete(gone, n)
		ended[n] = true
		return true
	}
	lost := func(n int) {
		const why = "its launcher is gone"
		switch {
		case gone[n]:
		case s.elastic:
			s.say(fmt.Sprintf("node %d: %s; the others go on", n, why))
		default:
			fail(CodeLaunch, fmt.Sprintf("node %d: %s", n, why))
		}
		delete(missing, n)
		gone[n] = true
	}
	entered := func(n int, text []byte) {
		switch other, err := readNode(text); {
		case err != nil:
		case other.Incarnation == met[n]:
			delete(missing, n)
			if gone[n] {
				delete(gone, n)
				s.say(fmt.Sprintf("node %d: its launcher is back", n))
			}
		case time.Now().Before(settled):
			met[n] = other.Incarnation
			delete(missing, n)
		default:
			lost(n)
		}
	}
	for {
		var alone chan<- struct{}
		if len(ended)+len(gone) == s.nodes-1 {
			alone = s.alone
		}
		var check <-chan time.Time
		if len(missing) > 0 {
			check = time.After(viewPoll)
		}
		var e bootstrap.Event
		var ok bool
		select {
		case alone <- struct{}{}:
			continue
		case e, ok = <-nodes:
		case e, ok = <-done:
		case <-s.handle.Lost():
			e.Err, ok = s.handle.Err(), true
		case <-check:
			for n, at := range missing {
				if time.Now().Before(at) {
					continue
				}
				switch text, err := s.handle.Get(ctx, doneKeys+strconv.Itoa(n)); {
				case err == nil && finished(n, text):
				case err == nil || errors.Is(err, bootstrap.ErrNoKey):
					// If this launcher was stopped, the record may be back, its event not here.
					switch text, err := s.handle.Get(ctx, nodeKeys+strconv.Itoa(n)); {
					case errors.Is(err, bootstrap.ErrNoKey):
						lost(n)
					case err == nil:
						entered(n, text)
					}
				}
			}
			continue
		}
		prefix, n, others := s.other(e.Key)
		switch {
		case !ok:
			return
		case e.Err != nil:
			err := s.renew(ctx, e.Err, func(ctx context.Context) error {
				return s.handle.Put(ctx, s.key(), s.record, true)
			})
			switch {
			case err == nil:
			case s.served:
				fail(CodeLaunch, fmt.Sprintf("the job's store, which node 0 serves, is gone: %v", err))
				return
			default:
				fail(CodeLaunch, fmt.Sprintf("the job's store is gone: %v", err))
				return
			}
			nodes, done = s.handle.Watch(ctx, nodeKeys), s.handle.Watch(ctx, doneKeys)
			for n := range s.nodes { // the others may have lost their leases too
				if n != s.node && !ended[n] && !gone[n] {
					missing[n] = time.Now().Add(s.back)
				}
			}
		case !others || ended[n]:
		case prefix == doneKeys:
			if e.Exists {
				finished(n, e.Value)
			}
		case prefix == nodeKeys && e.Exists:
			entered(n, e.Value)
		case prefix == nodeKeys && !gone[n]:
			// Its launcher has closed its handle, has lost its lease, or is dead.
			missing[n] = time.Now().Add(s.back)
		}
	}
}

// renewPause is the pause before each attempt of renew.
const renewPause = 500 * time.Millisecond

// renew puts this node's record into the store again, by put, and by another handle if the lease
// was lost. It gives up when the record's place is occupied, when a store that a launcher serves
// refuses connections, as one that has ended does, and when the store has been away for viewAway.
// Then it returns the last error.
func (s *store) renew(ctx context.Context, last error, put func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, viewAway)
	defer cancel()
	for !s.refused.Load() && ctx.Err() == nil {
		backoff.Sleep(ctx, renewPause)
		if last = s.reenter(ctx, put); last == nil || errors.As(last, new(occupied)) {
			return last
		}
	}
	return last
}

// reenter is one attempt of renew.
func (s *store) reenter(ctx context.Context, put func(context.Context) error) error {
	if old := s.handle; old.Err() != nil {
		fresh, err := s.open(ctx)
		if err != nil {
			return err
		}
		s.mu.Lock()
		s.handle = fresh
		s.mu.Unlock()
		defer old.Close() // the record is under the new lease then
	}
	return put(ctx)
}

// failed yields the first failure of another node.
func (s *store) failed() <-chan broken {
	if s == nil {
		return nil
	}
	return s.failc
}

// wellElsewhere reports whether another node has succeeded.
func (s *store) wellElsewhere() bool { return s != nil && s.well.Load() }

// elsewhere receives a token when another node has succeeded.
func (s *store) elsewhere() <-chan struct{} {
	if s == nil {
		return nil
	}
	return s.wake
}

// report tells the other nodes how this one ended; only the first report counts. With end it ends
// them too.
func (s *store) report(code int, why string, end bool) {
	if s == nil || s.watched == nil {
		return
	}
	s.mu.Lock()
	handle := s.handle
	s.mu.Unlock()
	if handle == nil {
		return
	}
	s.once.Do(func() {
		text, err := json.Marshal(failure{code, why, end && code != 0, s.me})
		if err != nil {
			return
		}
		s.reports.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), bootstrap.DefaultOpTimeout)
			defer cancel()
			for handle.Put(ctx, doneKeys+strconv.Itoa(s.node), text, false) != nil {
				select { // watch may be taking another handle
				case <-s.watched:
					return
				case <-ctx.Done():
					return
				case <-time.After(renewPause):
				}
				s.mu.Lock()
				handle = s.handle
				s.mu.Unlock()
			}
		})
	})
}

// others waits, if this launcher serves the store, until the other nodes have ended or the user
// interrupts it with a signal.
func (s *store) others(ctx context.Context, l *launcher) error {
	if s == nil || s.server == nil || s.watched == nil {
		return nil
	}
	s.report(l.code, l.why, l.endsAll())
	var late <-chan time.Time
	if l.code != 0 && (l.failed || !l.Elastic) {
		late = time.After(l.Grace + dieBy)
	}
	failed := s.failc
	for {
		select {
		case <-s.alone:
			return nil
		case <-late:
			return nil
		case f := <-failed:
			failed = nil
			l.fail(f.code, f.why)
			late = time.After(l.Grace + dieBy)
		case sig := <-l.signals:
			if l.interrupts(sig) {
				l.user = sig.(syscall.Signal)
				l.fail(128+int(l.user), "")
				return nil
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// finish reports how this node ended and closes the store.
func (s *store) finish(code int, why string, end bool) {
	s.report(code, why, end)
	s.reports.Wait()
	if s.cancel != nil {
		s.cancel()
	}
	if s.watched != nil {
		<-s.watched
	}
	if s.handle != nil {
		s.handle.Close()
	}
	if s.server != nil {
		s.server.Close()
	}
}
