package bootstrap

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	"tutti/bootstrap/internal/memkv"
	"tutti/bootstrap/internal/pmi"
	"tutti/bootstrap/internal/proof"
	"tutti/internal/backoff"
	"tutti/internal/files"
	"tutti/internal/ident"
	"tutti/internal/ifname"
	"tutti/internal/ports"
	"tutti/internal/trust"
)

// Meeting is the meeting of a launch's processes without a configured store: rank 0 serves a store,
// and the others learn its address from it, or from their launcher.
type Meeting struct {
	Store  string // address of the store
	Secret []byte // the job's secret
	Guest  uint64 // see StoreConfig; 0: this process serves the store, or cannot meet again

	stop   func() // stops inviting the others; nil: not inviting
	leave  func() // tells rank 0 that this rank has left; nil: rank 0 need not know
	served *servedStore
	later  sync.Once // of CloseLater
	ending sync.Once
	over   atomic.Bool
}

// Close leaves the meeting. The process that serves the store waits until the others have closed
// their handles on it, or have ended, or ctx ends; then the store ends. It logs a warning if that
// takes long. A nil Meeting may be closed.
func (m *Meeting) Close(ctx context.Context) {
	if m == nil {
		return
	}
	if m.served != nil {
		m.served.wait(ctx) // handles that are still open lose the store, and get an error
	}
	m.end()
}

// CloseLater closes the meeting in the background and whenever the others have left the store.
// Until then processes that know of the store can use it.
func (m *Meeting) CloseLater() {
	if m == nil {
		return
	}
	m.later.Do(func() {
		go func() {
			if m.served != nil {
				m.served.l.Wait(context.Background())
			}
			m.end()
		}()
	})
}

// Refuse ends the invitations to this meeting. Rank 0 calls it before it leaves its job for good:
// the store takes in no process any more that has not been there, and StoreEnds holds at the
// others. Another rank calls it if its job takes nobody in, and rank 0 may leave later: the next
// Meet of that rank on the host, also in another process, waits for the next meeting. It takes a
// moment.
func (m *Meeting) Refuse() {
	if m == nil {
		return
	}
	if m.stop != nil {
		m.stop()
	}
	if m.served != nil {
		m.served.refuse()
	}
	if m.leave != nil {
		m.leave()
	}
}

// Refused counts the connections that the store has refused, if this process serves it.
func (m *Meeting) Refused() Refused {
	if m == nil || m.served == nil {
		return Refused{}
	}
	return m.served.refused.count()
}

// Over reports whether a store that this process served is closed.
func (m *Meeting) Over() bool { return m != nil && m.served != nil && m.over.Load() }

func (m *Meeting) end() {
	m.ending.Do(func() {
		m.over.Store(true)
		if m.stop != nil {
			m.stop()
		}
		if m.served != nil {
			m.served.close()
		}
	})
}

// way is how the processes of a launch meet.
type way int

const (
	noWay  way = iota
	byHost     // all on one host: a Unix socket named after the launch
	byPMI      // the launcher has a key-value space
	byName     // the launcher names the first host: a port there, derived from the launch's name
)

func (l *Launch) way() way {
	switch {
	case l.Size < 2 || l.Standby:
		return noWay
	case l.LocalSize == l.Size && l.LocalRank >= 0 && l.name != "":
		return byHost
	case l.pmi != (pmi.Address{}):
		return byPMI
	case l.named && l.name != "":
		return byName
	}
	return noWay
}

// Meets reports whether the launcher's variables suffice for Meet.
func (l *Launch) Meets() bool { return l.way() != noWay }

// MeetsInPrivate reports whether Meet needs no secret: only the processes of the launch can receive
// rank 0's invitation. A launcher that listens on a port (PMI_PORT) answers everybody.
func (l *Launch) MeetsInPrivate() bool {
	how := l.way()
	return how == byHost || how == byPMI && l.pmi.FD > 0
}

// HowToMeet says what to set if Meets is false. A launcher without a key-value space that this
// package supports does not tell the ranks of several hosts about each other.
func (l *Launch) HowToMeet() string {
	if l.Source == "openmpi" || l.Source == "pmix" {
		return "the launcher (PMIx) does not tell ranks of several hosts where to meet: start one tutti run on each, " +
			"as mpirun --bind-to none --map-by ppr:1:node tutti run -n RANKS --rdzv HOST:PORT PROGRAM does, " +
			"or " + setStore
	}
	return otherWays
}

// What to do if a launcher's variables do not suffice to meet.
const (
	setStore  = "set TUTTI_STORE=etcd://HOST:PORT and TUTTI_SECRET"
	otherWays = "start the ranks with tutti run, or " + setStore
	// if another job is where this one meets
	otherPlaces = "give the job another name, the same at all its ranks (TUTTI_JOB, or Job of the configuration), or " +
		otherWays
)

// place names the place where the processes of the launch meet. Its jobs have places of their own,
// except the one that has the launch's name.
func (l *Launch) place() string {
	if l.Job == "" || l.Job == l.name {
		return l.name
	}
	return l.name + "/" + l.Job // no name contains a slash
}

// Meet brings the processes of a launch without a configured store (Launch.Store) together. Rank 0
// serves a store from its memory until Meeting.Close; the others return when they know its address.
// secret is the job's; nil lets rank 0 make one if the invitation is private: on one host, where
// only processes of the same user receive it, and through PMI on a descriptor that this process has
// inherited from its launcher.
//
// A launch can meet once through PMI, which serves one program for each rank, and otherwise again
// and again, also for jobs of other names (Launch.Job) at the same time. On one host a rank gets
// the invitation of rank 0's present meeting for its job, unless one of the two has refused that
// (Meeting.Refuse). Meet blocks until ctx ends.
func (l *Launch) Meet(ctx context.Context, secret []byte, log *slog.Logger) (*Meeting, error) {
	how := l.way()
	if how == noWay {
		return nil, errors.New("no store: " + l.HowToMeet())
	}
	if len(secret) == 0 && !l.MeetsInPrivate() {
		return nil, fmt.Errorf("no job secret: the ranks of several hosts need one that they share: set TUTTI_SECRET "+
			"to what tutti secret prints, the same for all (the launcher, %s, does not carry one)", l.Source)
	}
	if l.Rank != 0 {
		text, err := l.hear(ctx, how)
		if err != nil {
			return nil, fmt.Errorf("meeting rank 0: %w", err)
		}
		m, err := text.meeting(secret)
		if err != nil {
			return nil, fmt.Errorf("meeting rank 0: %w", err)
		}
		if how != byPMI {
			m.Guest = ident.New()
		}
		if how == byHost {
			m.leave = func() {
				ctx, cancel := context.WithTimeout(context.Background(), tellTime)
				defer cancel()
				askHost(ctx, l.place(), leaves, l.Rank, text.Meeting) // else rank 0 has ended
			}
		}
		return m, nil
	}
	own := secret
	if len(own) == 0 {
		own = []byte(NewSecret())
	}
	host, port, err := l.meetingHost(how)
	if err != nil {
		return nil, err
	}
	served, err := serveStore(ctx, host, port, own, log)
	switch op := new(*net.OpError); {
	case err == nil:
	case how == byName && errors.Is(err, syscall.EADDRINUSE) && errors.As(err, op):
		return nil, fmt.Errorf("serving the job's store: port %s of this host, where launch %s meets, is taken: %s: %w",
			port, l.place(), otherPlaces, *op)
	default:
		return nil, fmt.Errorf("serving the job's store: %w", err)
	}
	m := &Meeting{Store: served.address, Secret: own, served: served}
	text := invitation{Store: m.Store}
	if len(secret) == 0 {
		text.Secret = hex.EncodeToString(own)
	}
	if m.stop, err = l.tell(ctx, how, text); err != nil {
		m.end()
		if errors.Is(err, syscall.EADDRINUSE) {
			err = fmt.Errorf("%w: %s", err, otherPlaces)
		}
		return nil, fmt.Errorf("telling the other ranks where to meet: %w", err)
	}
	return m, nil
}

// Tell announces a store to the other processes of the launch, which call Hear. Rank 0 calls it.
// secret is not sent if it is "". stop ends the announcement; until then processes that start later
// may receive it, too.
func (l *Launch) Tell(ctx context.Context, store, secret string) (stop func(), err error) {
	if stop, err = l.tell(ctx, l.way(), invitation{Store: store, Secret: secret}); err != nil {
		return nil, fmt.Errorf("telling the other nodes where to meet: %w", err)
	}
	if stop == nil {
		stop = func() {}
	}
	return stop, nil
}

// Hear returns what rank 0 of the launch announced by Tell.
func (l *Launch) Hear(ctx context.Context) (store, secret string, err error) {
	text, err := l.hear(ctx, l.way())
	if err != nil {
		return "", "", fmt.Errorf("meeting the first node: %w", err)
	}
	return text.Store, text.Secret, nil
}

// MeetingHost returns the address at which rank 0 of the launch serves a store that the others
// reach, and its port, 0 for any free one. It requires Meets.
func (l *Launch) MeetingHost() (host, port string, err error) { return l.meetingHost(l.way()) }

func (l *Launch) meetingHost(how way) (host, port string, err error) {
	switch how {
	case byHost:
		return "127.0.0.1", "0", nil
	case byName:
		return l.MasterAddr, meetingPort(l.place()), nil
	}
	if !l.ChoosesAddress() {
		return "127.0.0.1", "0", nil
	}
	filter, err := ifname.Parse(l.Interfaces)
	if err != nil {
		return "", "", err
	}
	addrs, err := filter.Addrs()
	if err != nil {
		return "", "", err
	}
	return addrs[0].String(), "0", nil
}

// ChoosesAddress reports whether rank 0 chooses the address where it meets the others. It takes one
// of the first interface that TUTTI_IFNAME allows, which other hosts may not reach.
func (l *Launch) ChoosesAddress() bool { return l.way() == byPMI && l.LocalSize != l.Size }

// Invites reports whether rank 0 tells the others where its store is, once that listens. Otherwise
// they know the place beforehand, and may come too early.
func (l *Launch) Invites() bool {
	how := l.way()
	return how == byHost || how == byPMI
}

// meetingPort returns the port of the place of this name: below Linux's ephemeral ports, and above
// most services.
func meetingPort(name string) string {
	sum := sha256.Sum256([]byte(name))
	return strconv.Itoa(20000 + (int(sum[0])<<8|int(sum[1]))%10000)
}

// invitation is the message of rank 0 to the others.
type invitation struct {
	Store   string
	Secret  string `json:",omitempty"` // textual form
	Meeting uint64 // tells the meetings of a launch apart
}

// maxInvitation bounds the size of an invitation in bytes.
const maxInvitation = 1000

func (i invitation) meeting(secret []byte) (*Meeting, error) {
	if _, err := ParseStore(i.Store); err != nil {
		return nil, err
	}
	m := &Meeting{Store: i.Store, Secret: secret}
	switch {
	case i.Secret != "" && len(secret) > 0:
		return nil, errors.New("this process was given a job secret and rank 0 was not: set TUTTI_SECRET for all " +
			"ranks or for none")
	case i.Secret == "" && len(secret) == 0:
		return nil, errors.New("rank 0 was given a job secret and this process was not: set TUTTI_SECRET for all " +
			"ranks or for none")
	case i.Secret != "":
		var err error
		if m.Secret, err = ParseSecret(i.Secret); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// kvsKey is the key of the invitation in the launcher's key-value space.
const kvsKey = "tutti-meeting"

func (l *Launch) tell(ctx context.Context, how way, i invitation) (stop func(), err error) {
	i.Meeting = ident.New()
	b, err := json.Marshal(i)
	if err != nil {
		return nil, err
	}
	switch how {
	case byHost:
		return inviteHost(ctx, l.place(), l.Size, i.Meeting, b)
	case byPMI:
		_, err = exchange(ctx, l.pmi, hex.EncodeToString(b))
	}
	return nil, err
}

func (l *Launch) hear(ctx context.Context, how way) (i invitation, err error) {
	var b []byte
	switch how {
	case byHost:
		b, err = hearHost(ctx, l.place(), l.Rank)
	case byPMI:
		var text string
		if text, err = exchange(ctx, l.pmi, ""); err == nil {
			b, err = hex.DecodeString(text)
		}
	case byName:
		return invitation{Store: "tutti://" + net.JoinHostPort(l.MasterAddr, meetingPort(l.place()))}, nil
	default:
		err = errors.New(l.HowToMeet())
	}
	if err == nil {
		err = json.Unmarshal(b, &i)
	}
	return i, err
}

// exchange puts text, unless it is "", into the launcher's key-value space, and returns the value
// when all processes of the launch have come.
func exchange(ctx context.Context, a pmi.Address, text string) (got string, err error) {
	c, err := pmi.Dial(ctx, a)
	if err != nil {
		return "", fmt.Errorf("%w (PMI serves the first job of a launch only: for others, %s)", err, otherWays)
	}
	defer func() {
		if cerr := c.Close(); err == nil {
			err = cerr
		}
	}()
	if text != "" {
		if err := c.Put(ctx, kvsKey, text); err != nil {
			return "", err
		}
	}
	if err := c.Barrier(ctx); err != nil {
		return "", err
	}
	return c.Get(ctx, kvsKey)
}

// meetingSocket returns the abstract Unix socket of the place of this name on this host, in this
// network namespace.
func meetingSocket(name string) *net.UnixAddr {
	sum := sha256.Sum256([]byte(strconv.Itoa(os.Getuid()) + "\x00" + name))
	return &net.UnixAddr{Net: "unix", Name: "@tutti-meeting-" + hex.EncodeToString(sum[:16])}
}

// What a process says to rank 0 on its host, in a line with its rank and a meeting. The answer is
// the invitation, or the end of the connection.
const (
	asks   = "where" // any meeting, 0
	leaves = "left"  // this rank needs no further invitation to the meeting
)

const (
	tellTime   = 5 * time.Second // bounds the exchange with one process
	maxRequest = 60              // the size of a line in bytes
)

// inviteHost sends text to all processes of this user on this host that ask, until stop.
func inviteHost(ctx context.Context, name string, size int, meeting uint64, text []byte) (stop func(), err error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "unix", meetingSocket(name).Name)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, taken(ctx, name, err)
	case err != nil:
		return nil, files.Explain(err)
	}
	h := &host{text: text, size: size, meeting: meeting, left: map[int]bool{}}
	h.ctx, h.cancel = context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		h.serve(l)
	}()
	return func() {
		h.cancel()
		l.Close()
		<-done
	}, nil
}

// taken says who has the socket of a launch, which this process cannot get because of err.
func taken(ctx context.Context, name string, err error) error {
	ctx, cancel := context.WithTimeout(ctx, tellTime)
	defer cancel()
	c, derr := (&net.Dialer{}).DialContext(ctx, "unix", meetingSocket(name).Name)
	if derr != nil {
		return fmt.Errorf("launch %s on this host: its name belongs to a process that takes no connections (%w): %s",
			name, derr, otherWays)
	}
	defer c.Close()
	if err := peerUser(c.(*net.UnixConn)); err != nil {
		return fmt.Errorf("launch %s on this host: %w", name, err)
	}
	return fmt.Errorf("a process of this user is rank 0 of launch %s on this host already: %w", name, err)
}

// host is rank 0's side of inviteHost.
type host struct {
	text    []byte
	size    int // of the launch
	meeting uint64
	ctx     context.Context // ends with the invitations
	cancel  context.CancelFunc

	mu   sync.Mutex
	left map[int]bool // ranks that get no invitation
}

func (h *host) serve(l net.Listener) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		c, err := l.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil: // no descriptor is free, for example
			time.Sleep(10 * time.Millisecond)
			continue
		}
		wg.Go(func() { h.answer(c) })
	}
}

func (h *host) answer(c net.Conn) {
	defer c.Close()
	c.SetDeadline(time.Now().Add(tellTime))
	defer context.AfterFunc(h.ctx, func() { c.SetDeadline(time.Unix(1, 0)) })()
	if peerUser(c.(*net.UnixConn)) != nil {
		return
	}
	line, err := bufio.NewReader(io.LimitReader(c, maxRequest)).ReadString('\n')
	if err != nil {
		return
	}
	var verb string
	var rank int
	var meeting uint64
	if _, err := fmt.Sscanf(line, "%s %d %d\n", &verb, &rank, &meeting); err != nil {
		return
	}
	h.mu.Lock()
	if verb == leaves && rank < h.size && meeting == h.meeting { // else the rank was in an earlier one
		h.left[rank] = true
	}
	left := h.left[rank]
	h.mu.Unlock()
	if verb == asks && !left {
		c.Write(h.text)
	}
}

// hearHost waits for and returns the text of inviteHost.
func hearHost(ctx context.Context, name string, rank int) ([]byte, error) {
	var last error
	for pause := 5 * time.Millisecond; ; pause = min(2*pause, 200*time.Millisecond) {
		text, err := askHost(ctx, name, asks, rank, 0)
		if err == nil && len(text) == 0 {
			err = errors.New("rank 0 is in an earlier job, which this rank has left, or is about to end")
		}
		if late := net.Error(nil); last == nil || !errors.As(err, &late) || !late.Timeout() {
			last = err
		}
		var user *userError
		switch {
		case err == nil:
			return text, nil
		case errors.As(err, &user):
			return nil, fmt.Errorf("launch %s on this host: %w", name, err)
		case !backoff.Sleep(ctx, pause): // else rank 0 has not begun, or is about to end
			return nil, fmt.Errorf("no process of launch %s on this host says where to meet: %w (%w)", name,
				context.Cause(ctx), last)
		}
	}
}

// askHost sends a line to rank 0, and returns the answer.
func askHost(ctx context.Context, name, verb string, rank int, meeting uint64) ([]byte, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, "unix", meetingSocket(name).Name)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	if err := peerUser(c.(*net.UnixConn)); err != nil {
		return nil, err
	}
	c.SetDeadline(time.Now().Add(tellTime))
	defer context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })()
	if _, err := fmt.Fprintf(c, "%s %d %d\n", verb, rank, meeting); err != nil {
		return nil, err
	}
	return io.ReadAll(io.LimitReader(c, maxInvitation))
}

// servedStore is a store that this process serves from its memory.
type servedStore struct {
	address string
	l       *proof.Listener
	g       *grpc.Server
	kv      *memkv.Server
	log     *slog.Logger
	done    chan struct{}
	refused refusals

	mu     sync.Mutex
	guests map[uint64]struct{} // that have been here; see StoreConfig
	ends   bool                // no others are admitted
}

// endsKey is a key outside of all jobs. It exists when a served store is about to end.
const endsKey = "/tutti-ends"

// codeEnds is the code of the Refusal of a store that is about to end: see ErrStoreEnds.
const codeEnds = 2

// ListenHost returns the address on which to listen so that others reach host. On the machine that
// it names, a name often resolves to a loopback address; the result is then all addresses.
func ListenHost(ctx context.Context, host string) string {
	if net.ParseIP(host) != nil {
		return host
	}
	if v4, err := net.DefaultResolver.LookupIP(ctx, "ip4", host); err == nil && len(v4) > 0 {
		return "0.0.0.0"
	}
	return "::"
}

// A userError says that a name belongs to another user, or perhaps does.
type userError struct{ uid uint32 }

func (e *userError) Error() string {
	if int(e.uid) == os.Getuid() {
		return fmt.Sprintf("user %d, as which this process runs, stands for all users that its user namespace does "+
			"not have, so that others cannot be told from it: run the ranks as another user, or with tutti run", e.uid)
	}
	return fmt.Sprintf("its name belongs to a process of user %d, not of user %d: %s", e.uid, os.Getuid(), otherWays)
}

// peerUser returns an error unless the other end of a Unix socket is a process of this user: a
// userError if it is of another one, or may be.
func peerUser(c *net.UnixConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	cred, err := ident.Peer(raw)
	if err == nil && (int(cred.Uid) != os.Getuid() || ident.StandsForOthers(cred.Uid)) {
		err = &userError{cred.Uid}
	}
	return err
}

// serveStore serves a store at one of the ports.
func serveStore(ctx context.Context, host, port string, secret []byte, log *slog.Logger) (*servedStore, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	spec, err := ports.ParseSpec(port)
	if err != nil {
		return nil, err
	}
	l, err := ports.Listen(ctx, ListenHost(ctx, host), spec)
	if err != nil {
		return nil, err
	}
	at := net.JoinHostPort(host, strconv.Itoa(l.Addr().(*net.TCPAddr).Port))
	s := &servedStore{address: "tutti://" + at, kv: memkv.New(), log: log, done: make(chan struct{}),
		guests: map[uint64]struct{}{},
		g: grpc.NewServer(grpc.Creds(proof.Credentials{}), grpc.ConnectionTimeout(proof.Timeout),
			grpc.MaxRecvMsgSize(4*MaxValue),
			grpc.KeepaliveParams(keepalive.ServerParameters{Time: 10 * time.Second, Timeout: 5 * time.Second}),
			grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Second,
				PermitWithoutStream: true}))}
	note := trust.LogRefused(log, "store")
	s.l = proof.Listen(l, proof.Config{Secret: secret, Purpose: StorePurpose, Failing: trust.LogFailing(log, "store"),
		Refused: func(c net.Conn, err error) {
			s.refused.note(err)
			note(c, err)
		},
		Admit: func(conn net.Conn, h trust.Hello) error {
			if !StoreMeant(h, at, conn.LocalAddr()) {
				return &trust.Refusal{Code: 1, Text: "the connection was meant for another store than " + at}
			}
			return s.admit(h.FromIncarnation)
		}})
	s.kv.Register(s.g)
	go func() {
		defer close(s.done)
		s.g.Serve(s.l)
	}()
	return s, nil
}

// admit takes in a guest, unless the store is about to end and has not seen it. Guest 0 is
// any process.
func (s *servedStore) admit(guest uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, seen := s.guests[guest]; s.ends && guest != 0 && !seen {
		return &trust.Refusal{Code: codeEnds, Text: ErrStoreEnds.Error()}
	}
	s.guests[guest] = struct{}{}
	return nil
}

// refuse is Meeting.Refuse.
func (s *servedStore) refuse() {
	s.mu.Lock()
	s.ends = true
	s.mu.Unlock()
	s.kv.Put(context.Background(), &pb.PutRequest{Key: []byte(endsKey)}) // fails if the store is full
}

// waitWarning is the time after which the process that serves the store says that it waits.
const waitWarning = time.Second

// wait returns when no handle is open, or ctx ends.
func (s *servedStore) wait(ctx context.Context) {
	defer time.AfterFunc(waitWarning, func() {
		args := []any{"handles", s.l.Open()}
		if t, ok := ctx.Deadline(); ok {
			args = append(args, "for at most", time.Until(t).Round(time.Second))
		}
		s.log.Warn("this process serves the job's store, and waits for other ranks that have not left it", args...)
	}).Stop()
	s.l.Wait(ctx)
}

func (s *servedStore) close() {
	s.l.CloseAll()
	s.g.Stop()
	<-s.done
	s.kv.Close()
}
