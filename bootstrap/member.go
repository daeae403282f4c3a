package bootstrap

import (
	"cmp"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	mrand "math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"tutti/internal/backoff"
	"tutti/internal/dial"
	"tutti/internal/ident"
	"tutti/internal/trust"
)

// Limits of a Formation.
const (
	MaxMembers = 1 << 16 // handles
	MaxUUID    = 128     // bytes of a uuid
)

// Errors of a Formation, wrapped.
var (
	// ErrUsed: a member has used the uuid before.
	ErrUsed = errors.New("the uuid was used before")
	// ErrGone: a member has ended, has given up, or has left.
	ErrGone = errors.New("the member is gone")
	// ErrMemberClosed: Member.Close was called. It is an ErrGone.
	ErrMemberClosed error = &reason{"this member was closed", ErrGone}
)

// reason is an error with a text of its own, that is another.
type reason struct {
	text string
	is   error
}

func (r *reason) Error() string { return r.text }
func (r *reason) Unwrap() error { return r.is }

// PeerError says which member prevented a Formation, by its rank there.
type PeerError struct {
	Rank     int
	Reporter int   // the rank that found it out: this one, or one that was asked
	Err      error // wraps ErrUsed, ErrGone or ErrVersion
}

func (e *PeerError) Error() string { return fmt.Sprintf("rank %d: %v", e.Rank, e.Err) }
func (e *PeerError) Unwrap() error { return e.Err }

// DifferError says that two members were given different lists of handles for one uuid.
type DifferError struct {
	Rank      int    // of this member in its list
	Own       string // its list: "3 members by member …, with member … as rank 1"
	OtherRank int    // of the other member in its own list
	Other     string
	other     []uint64 // its list
}

func (e *DifferError) Error() string {
	return fmt.Sprintf("two lists of handles for one uuid: %s; %s", e.Own, e.Other)
}

// ---- Handles ----

const (
	handlePrefix = "tutti1."
	handleTag    = 16 // bytes of the tag
	maxHandle    = len(handlePrefix) + (handleTag+maxRecord)*4/3 + 2
)

// EncodeHandle returns the text by which other members that know secret reach the member of record.
// It does not reveal the secret.
func EncodeHandle(record Record, secret []byte) (string, error) {
	b, err := record.Encode()
	if err != nil {
		return "", err
	}
	return handlePrefix + base64.RawURLEncoding.EncodeToString(append(tagOf(secret, b), b...)), nil
}

// DecodeHandle reads the result of EncodeHandle. It refuses handles that were made with another
// secret.
func DecodeHandle(s string, secret []byte) (Record, error) {
	text, ok := strings.CutPrefix(s, handlePrefix)
	if !ok || len(s) > maxHandle {
		return Record{}, fmt.Errorf("%q is no handle of a member: expected one that begins with %s", clip(s),
			handlePrefix)
	}
	b, err := base64.RawURLEncoding.Strict().DecodeString(text)
	if err != nil || len(b) < handleTag {
		return Record{}, fmt.Errorf("handle %q is damaged: expected the text that the member gave", clip(s))
	}
	if !hmac.Equal(b[:handleTag], tagOf(secret, b[handleTag:])) {
		return Record{}, fmt.Errorf("handle %q is damaged, or its member has another secret", clip(s))
	}
	return DecodeRecord(b[handleTag:])
}

func tagOf(secret, b []byte) []byte {
	m := hmac.New(sha256.New, secret)
	m.Write([]byte("tutti handle\x00"))
	m.Write(b)
	return m.Sum(nil)[:handleTag]
}

// MemberName describes the member of a handle.
func (r Record) MemberName() string {
	return fmt.Sprintf("member %016x (pid %d on %s)", r.Incarnation, r.PID, r.Host)
}

// ---- Members ----

// MemberConfig describes a Member.
type MemberConfig struct {
	Secret            []byte
	Interfaces, Ports string    // as in ServerConfig
	Terms             Terms     // of the member's Record
	Dial              dial.Func // makes the connections; nil: net.Dialer
	Logger            *slog.Logger
}

// A Member is the endpoint of a process for jobs whose members are given by their handles. It has a
// listener, at which other members ask for the Record of this process in a Formation.
type Member struct {
	cfg    MemberConfig
	self   Record
	server *Server
	client *Client

	mu      sync.Mutex
	all     map[string]*Formation // by uuid; those that are over stay, because a uuid is used once
	changed chan struct{}         // closed when a Formation begins, is published or ends
	users   int                   // Formations that are not over, and the Member until Close
	closed  bool
}

// NewMember opens the endpoint. It blocks until ctx ends at the latest.
func NewMember(ctx context.Context, cfg MemberConfig) (*Member, error) {
	m := &Member{cfg: cfg, all: map[string]*Formation{}, changed: make(chan struct{}), users: 1}
	id := ident.New()
	var err error
	if m.server, err = Serve(ctx, ServerConfig{Incarnation: id, Secret: cfg.Secret, Interfaces: cfg.Interfaces,
		Ports: cfg.Ports, Logger: cfg.Logger, find: m.find}); err != nil {
		return nil, err
	}
	m.self = NewRecord(0, 1, id, m.server.Addrs())
	m.self.Terms = cfg.Terms
	m.client = NewClient(ClientConfig{Self: m.self, Secret: cfg.Secret, Dial: cfg.Dial})
	return m, nil
}

// Self returns the record that the member's handle contains.
func (m *Member) Self() Record { return m.self }

// Close ends the endpoint, or lets the last Formation end it. Those that are not formed fail with
// ErrMemberClosed, and new ones are refused. Idempotent.
func (m *Member) Close() {
	m.mu.Lock()
	first := !m.closed
	m.closed = true
	begun := slices.Collect(maps.Values(m.all))
	m.mu.Unlock()
	if !first {
		return
	}
	for _, f := range begun {
		f.spoil(ErrMemberClosed)
	}
	m.leave()
}

func (m *Member) leave() {
	m.mu.Lock()
	m.users--
	last := m.users == 0
	m.mu.Unlock()
	if last {
		m.server.Close()
	}
}

// tellLocked wakes those that wait for a change of a Formation.
func (m *Member) tellLocked() {
	close(m.changed)
	m.changed = make(chan struct{})
}

// state is how far a Formation is.
type state uint8

const (
	forming state = iota
	formed
	over
)

// A Formation is the part of one member in a job of several: the directory of the job's ranks, as a
// KV. A rank's record is kept by its own member, which the others ask for it.
type Formation struct {
	m      *Member
	uuid   string
	rank   int
	peers  []Record // by rank; the identity and the addresses of the members
	ids    []uint64 // their identities
	fail   func(error)
	ctx    context.Context // ends with the first failure, and with End
	cancel context.CancelFunc

	// Under m.mu.
	state  state
	err    error             // why it failed, or what End was given; see brief
	values map[string][]byte // the keys of this rank
	silent map[int]error     // why the latest attempt to reach a rank's member has failed
}

// Begin makes a Formation of peers, one of which is this member. It returns an error that wraps
// ErrUsed if this member has used uuid before. fail is called, once and on any goroutine, when
// another member makes the Formation impossible before Formed was called. The caller calls End.
func (m *Member) Begin(uuid string, peers []Record, fail func(error)) (*Formation, error) {
	f := &Formation{m: m, uuid: uuid, rank: -1, peers: peers, fail: fail, values: map[string][]byte{},
		silent: map[int]error{}}
	for r, p := range peers {
		f.ids = append(f.ids, p.Incarnation)
		if p.Incarnation == m.self.Incarnation {
			f.rank = r
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.closed:
		return nil, ErrMemberClosed
	case m.all[uuid] != nil:
		return nil, ErrUsed
	}
	f.ctx, f.cancel = context.WithCancel(context.Background())
	m.all[uuid] = f
	m.users++
	m.tellLocked()
	return f, nil
}

// Rank returns this member's rank.
func (f *Formation) Rank() int { return f.rank }

// Secret returns the secret of the job. It differs for all uuids and lists of members.
func (f *Formation) Secret() []byte {
	h := hmac.New(sha256.New, f.m.cfg.Secret)
	h.Write([]byte("tutti form\x00" + f.uuid + "\x00"))
	for _, id := range f.ids {
		h.Write(binary.LittleEndian.AppendUint64(nil, id))
	}
	return h.Sum(nil)
}

// Formed tells that the job has begun: another member cannot make it fail any more. It returns why
// the Formation has failed before that, or nil.
func (f *Formation) Formed() error {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	if f.state == forming && f.err == nil {
		f.state = formed
	}
	return f.err
}

// Check asks the member of a rank, and makes the Formation fail if that is gone.
func (f *Formation) Check(ctx context.Context, rank int) {
	if rank != f.rank && rank >= 0 && rank < len(f.ids) {
		f.ask(ctx, rank)
	}
}

// Silent returns why the member of a rank could not be reached when it was last asked, or nil; nil
// after End.
func (f *Formation) Silent(rank int) error {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	return f.silent[rank]
}

// Err returns why the Formation failed, nil if it has not. After End only the text is kept.
func (f *Formation) Err() error {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	return f.err
}

// End ends this member's part, because of err if that is not nil: other members that ask for it are
// told. The uuid stays used. Idempotent.
func (f *Formation) End(err error) {
	f.m.mu.Lock()
	again := f.state == over
	if !again {
		f.state, f.err = over, brief(cmp.Or(f.err, err))
		f.cancel()
		f.values, f.silent, f.peers, f.fail = nil, nil, nil, nil
		f.m.tellLocked()
	}
	f.m.mu.Unlock()
	if !again {
		f.m.leave()
	}
}

// brief returns an error with the text of err that other members are told. Of the errors that err
// wraps it keeps a *DifferError, or the ranks and the kind of a *PeerError, only.
func brief(err error) error {
	if err == nil {
		return nil
	}
	text := err.Error()
	b := &reason{text: strings.Clone(text[:min(len(text), maxReason)])}
	var differ *DifferError
	var peer *PeerError
	switch {
	case errors.As(err, &differ):
		b.is = differ
	case errors.As(err, &peer):
		b.is = &PeerError{peer.Rank, peer.Reporter, faultOf(peer.Err).err()}
	}
	return b
}

// spoil makes the Formation fail, unless it is formed or over.
func (f *Formation) spoil(err error) {
	f.m.mu.Lock()
	first, fail := f.state == forming && f.err == nil, f.fail
	if first {
		f.err = err
		f.cancel()
		f.m.tellLocked()
	}
	f.m.mu.Unlock()
	if first {
		fail(err)
	}
}

// differLocked returns a *DifferError if the list of another member, which has otherRank in it, is
// not this one's.
func (f *Formation) differLocked(otherRank int, other []uint64) error {
	at := 0
	for at < len(f.ids) && at < len(other) && f.ids[at] == other[at] {
		at++
	}
	if at == len(f.ids) && at == len(other) {
		return nil
	}
	names := map[uint64]string{}
	for _, p := range f.peers {
		names[p.Incarnation] = p.MemberName()
	}
	name := func(id uint64) string { return cmp.Or(names[id], fmt.Sprintf("member %016x", id)) }
	spell := func(rank int, ids []uint64) string {
		s := fmt.Sprintf("%d members by %s", len(ids), name(ids[rank]))
		if at < len(ids) {
			s += fmt.Sprintf(", with %s as rank %d", name(ids[at]), at)
		}
		return s
	}
	return &DifferError{Rank: f.rank, Own: spell(f.rank, f.ids), OtherRank: otherRank, Other: spell(otherRank, other),
		other: other}
}

// ---- The server's half ----

// hold bounds how long a member lets another wait for a Formation that has not begun here.
const hold = 2 * time.Second

// find answers a member that asks for this one's Record.
func (m *Member) find(ctx context.Context, q *findRequest) *findReply {
	ctx, cancel := context.WithTimeout(ctx, hold)
	defer cancel()
	for {
		m.mu.Lock()
		reply, spoiled, err := m.answerLocked(q)
		changed := m.changed
		m.mu.Unlock()
		if err != nil {
			spoiled.spoil(err)
		}
		if reply.code != findWait {
			return reply
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return reply
		}
	}
}

// answerLocked answers at once. If the request makes a Formation impossible, it returns that and
// why.
func (m *Member) answerLocked(q *findRequest) (*findReply, *Formation, error) {
	f := m.all[q.uuid]
	switch {
	case f == nil && m.closed:
		return &findReply{code: findGone, body: goneBody{text: []byte("it was closed")}.encode()}, nil, nil
	case f == nil:
		return &findReply{code: findWait}, nil, nil
	case !slices.Equal(f.ids, q.ids):
		if differ := new(*DifferError); f.state != forming && !errors.As(f.err, differ) {
			return &findReply{code: findUsed, body: f.reasonLocked()}, nil, nil
		}
		return &findReply{code: findDiffers, body: encodeIDs(f.rank, f.ids)}, f, f.differLocked(q.rank, q.ids)
	case f.state == over || f.err != nil:
		if differ := new(*DifferError); errors.As(f.err, differ) { // from the one that asks, too
			return &findReply{code: findDiffers, body: encodeIDs((*differ).OtherRank, (*differ).other)}, nil, nil
		}
		why := goneBody{text: f.reasonLocked()}
		if peer := new(*PeerError); errors.As(f.err, peer) {
			why.fault, why.rank = faultOf((*peer).Err), (*peer).Rank
		}
		return &findReply{code: findGone, body: why.encode()}, nil, nil
	}
	if rec := f.values[f.rankKey(f.rank)]; len(rec) > 0 {
		return &findReply{code: findRecord, body: rec}, nil, nil
	}
	return &findReply{code: findWait}, nil, nil
}

// reasonLocked says why a Formation is over.
func (f *Formation) reasonLocked() []byte {
	why := "it has formed a group"
	if f.err != nil {
		why = "it gave up: " + f.err.Error()
	} else if f.state == over {
		why = "it has left the group"
	}
	return []byte(why[:min(len(why), maxReason)])
}

// ---- The directory ----

var _ KV = (*Formation)(nil)

func (f *Formation) rankKey(rank int) string { return Prefix(f.uuid) + RankKey(rank) }

// peer returns the rank of another member whose record key holds.
func (f *Formation) peer(key string) (int, bool) {
	text, ok := strings.CutPrefix(key, Prefix(f.uuid)+RankKeys)
	r, err := strconv.Atoi(text)
	return r, ok && err == nil && r != f.rank && r >= 0 && r < len(f.ids)
}

// Set implements KV. Only this member sees a key.
func (f *Formation) Set(_ context.Context, key string, value []byte) error {
	_, err := f.swap(key, func([]byte) bool { return true }, value)
	return err
}

// CompareAndSet implements KV.
func (f *Formation) CompareAndSet(_ context.Context, key string, expected, desired []byte) ([]byte, error) {
	return f.swap(key, func(now []byte) bool { return string(now) == string(expected) }, desired)
}

func (f *Formation) swap(key string, same func(now []byte) bool, value []byte) ([]byte, error) {
	if r, ok := f.peer(key); ok {
		return nil, fmt.Errorf("the record of rank %d belongs to its member", r)
	}
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	if f.values == nil {
		return nil, ErrGone
	}
	if same(f.values[key]) {
		f.values[key] = slices.Clone(value)
		f.m.tellLocked()
	}
	return slices.Clone(f.values[key]), nil
}

func (f *Formation) own(key string) []byte {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	return slices.Clone(f.values[key])
}

// Get implements KV. A member that is gone has no record: Get says why, with an error that wraps
// ErrGone and ErrNoKey. Others have, and Get waits until they have begun the Formation.
func (f *Formation) Get(ctx context.Context, key string) ([]byte, error) {
	r, ok := f.peer(key)
	if !ok {
		return f.own(key), nil
	}
	b, err := f.ask(ctx, r)
	if errors.Is(err, ErrGone) {
		return nil, &missing{err}
	}
	return b, err
}

// missing says why there is no record of a rank.
type missing struct{ why error }

func (m *missing) Error() string   { return m.why.Error() }
func (m *missing) Unwrap() []error { return []error{m.why, ErrNoKey} }

// Wait implements KV. It waits for records of other members only.
func (f *Formation) Wait(ctx context.Context, key string) ([]byte, error) {
	r, ok := f.peer(key)
	if !ok {
		if b := f.own(key); len(b) > 0 {
			return b, nil
		}
		return nil, fmt.Errorf("key %s of this rank: %w", key, ErrNoKey)
	}
	return f.ask(ctx, r)
}

// ask gets the record of a rank from its member. It waits until the member has begun this
// Formation.
func (f *Formation) ask(ctx context.Context, rank int) ([]byte, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	f.m.mu.Lock()
	if f.peers == nil {
		f.m.mu.Unlock()
		return nil, ErrGone
	}
	to := f.peers[rank]
	f.m.mu.Unlock()
	defer context.AfterFunc(f.ctx, cancel)()
	note := func(err error) {
		f.m.mu.Lock()
		defer f.m.mu.Unlock()
		if f.state != over {
			f.silent[rank] = err
		}
	}
	b, err := f.m.client.find(ctx, rank, to, &findRequest{uuid: f.uuid, ids: f.ids, rank: f.rank}, note)
	var differs *listError
	var relayed *PeerError
	switch {
	case err == nil:
		return b, nil
	case errors.As(err, &differs):
		f.m.mu.Lock()
		if err = f.differLocked(differs.rank, differs.ids); err == nil {
			err = fmt.Errorf("%s says that the lists of handles differ, and sent an equal one", to.MemberName())
		}
		f.m.mu.Unlock()
	case errors.As(err, &relayed) && relayed.Rank < len(f.ids) && relayed.Rank != f.rank:
		err = &PeerError{Rank: relayed.Rank, Reporter: rank, Err: fmt.Errorf("%s, which is rank %d, says: %w",
			to.MemberName(), rank, relayed.Err)}
	case errors.As(err, &relayed): // this member knows better, or the rank is none
		text := fmt.Sprintf("%s: %v", to.MemberName(), relayed.Err)
		err = &PeerError{Rank: rank, Reporter: f.rank, Err: &reason{text, ErrGone}}
	case errors.Is(err, ErrUsed), errors.Is(err, ErrGone), errors.Is(err, ErrVersion):
		err = &PeerError{Rank: rank, Reporter: f.rank, Err: fmt.Errorf("%s: %w", to.MemberName(), err)}
	case f.Err() != nil:
		return nil, f.Err()
	default:
		return nil, err
	}
	f.spoil(err)
	return nil, err
}

// find asks the member to for its record in a Formation, until it answers, is gone, or ctx ends. It
// calls note with the error of an attempt to reach the member, or nil.
func (c *Client) find(ctx context.Context, rank int, to Record, q *findRequest, note func(error)) ([]byte, error) {
	hello := trust.Hello{FromRank: uint32(q.rank), FromIncarnation: c.cfg.Self.Incarnation, ToRank: uint32(rank),
		ToIncarnation: to.Incarnation}
	pause, auth := firstPause, 0
	var last error
	var final *finalError
	for {
		addrs := c.order(to)
		if len(addrs) == 0 {
			err := fmt.Errorf("%s: no address of %q can be reached from here: set TUTTI_IFNAME on both to a "+
				"network they share", to.MemberName(), to.Addrs)
			note(err)
			return nil, err
		}
		b, err := c.findOnce(ctx, addrs, hello, q)
		switch {
		case err == nil:
			return b, nil
		case errors.Is(err, ErrUsed), errors.Is(err, ErrGone), errors.As(err, new(*PeerError)),
			errors.As(err, new(*listError)), errors.As(err, &final):
			return nil, err
		case errors.As(err, new(*refusedError)), errors.Is(err, ErrStale):
			return nil, &reason{"it has ended: " + err.Error(), ErrGone}
		case errors.Is(err, ErrAuth):
			if auth++; auth == authRounds {
				return nil, &reason{"another process has its address: " + err.Error(), ErrGone}
			}
		case errors.Is(err, ErrVersion):
			if auth++; auth == authRounds {
				return nil, err
			}
		case errors.Is(err, errNotYet): // its answer took long enough
			note(nil)
			last = err
			if ctx.Err() == nil {
				continue
			}
		case ctx.Err() == nil:
			note(err)
		}
		if last == nil || ctx.Err() == nil {
			last = err
		}
		if !backoff.Sleep(ctx, time.Duration(float64(pause)*(0.5+mrand.Float64()))) {
			return nil, fmt.Errorf("%s at %v: %w; last attempt: %w", to.MemberName(), addrs, context.Cause(ctx), last)
		}
		pause = min(2*pause, longestPause)
	}
}

var errNotYet = errors.New("it has not been asked to form this group yet")

// listError carries a list that differs, and the rank in it of the member that has it.
type listError struct {
	rank int
	ids  []uint64
}

func (*listError) Error() string { return "the lists of handles differ" }

func (c *Client) findOnce(ctx context.Context, addrs []string, hello trust.Hello, q *findRequest) ([]byte, error) {
	if err := attempts.Acquire(ctx, 1); err != nil {
		return nil, context.Cause(ctx)
	}
	conn, err := c.reach(ctx, addrs, hello)
	attempts.Release(1)
	if err != nil {
		return nil, err
	}
	cctx, cancel := context.WithTimeout(ctx, hold+proofTimeout)
	defer cancel()
	reply := &findReply{}
	if err := call(cctx, conn, findMethod, q, reply, maxFindReply); err != nil {
		return nil, err
	}
	switch reply.code {
	case findRecord:
		return reply.body, nil
	case findWait:
		return nil, errNotYet
	case findUsed:
		return nil, &reason{strings.ToValidUTF8(string(reply.body), "?"), ErrUsed}
	case findGone:
		why, err := decodeGone(reply.body)
		if err != nil {
			return nil, err
		}
		text := strings.ToValidUTF8(string(why.text), "?")
		if why.fault == ownFault {
			return nil, &reason{text, ErrGone}
		}
		return nil, &PeerError{Rank: why.rank, Reporter: int(hello.ToRank), Err: &reason{text, why.fault.err()}}
	}
	rank, ids, err := decodeIDs(reply.body)
	if err != nil {
		return nil, err
	}
	return nil, &listError{rank, ids}
}
