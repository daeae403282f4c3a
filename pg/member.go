package pg

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"tutti/bootstrap"
	"tutti/internal/files"
	"tutti/internal/ports"
	"tutti/internal/trust"
	"tutti/p2p"
	"tutti/pg/internal/join"
)

// A Member is this process in groups whose membership the program decides: it gives every member
// the same list of handles, and Form makes a group of them. No store is involved. How the handles
// and the decision travel is up to the program (PyTorch: reconfigure; NCCL: communicators that a
// controller makes of unique ids).
//
//	m, err := pg.NewMember(ctx, pg.Config{Secret: secret})
//	tell(m.Handle())                        // to the program that decides, which answers:
//	g, err := m.Form(ctx, uuid, handles)    // rank i is the member of handles[i]
//
// A process may make several members, and a member may be in several groups at a time.
type Member struct {
	cfg     Config
	timeout time.Duration // of Form
	secret  []byte
	member  *bootstrap.Member
	handle  string
}

// NewMember makes a member. It listens for other members. Of cfg, the fields that concern a job
// (Size, Rank, Job, those of the store, MaxSize, AutoAdmit) must be zero: Form has what stands for
// them. OnFailure must be Report, because a group of Form ends with the first lost rank: the
// program forms another one of the members that are left. Variables of the environment with those
// meanings are ignored.
//
// Every connection proves to know cfg.Secret (default: TUTTI_SECRET), which all members have. A
// handle does not contain it. cfg.Ports may be a range or 0.
func NewMember(ctx context.Context, cfg Config) (*Member, error) {
	bad := func(arg, got, want string) error {
		return &ArgumentError{Call: "member", Arg: arg, Got: got, Want: want}
	}
	switch {
	case ctx == nil:
		return nil, noContext("member")
	case cfg.Size != 0 || cfg.Rank != 0 || cfg.MaxSize != 0:
		return nil, bad("Size, Rank or MaxSize", fmt.Sprintf("%d, %d or %d", cfg.Size, cfg.Rank, cfg.MaxSize),
			"0: the handles say it")
	case cfg.Job != "" || cfg.Store != nil || cfg.StoreAddr != "" || cfg.StoreUser != "" ||
		cfg.StorePassword != "" || cfg.StoreTLS != nil:
		return nil, bad("Job, or a field of the store,", "set", "none: members have no store, and a uuid "+
			"names their job")
	case cfg.OnFailure != Report:
		return nil, bad("OnFailure", cfg.OnFailure.String(), "report: the handles give the membership")
	case cfg.AutoAdmit:
		return nil, bad("AutoAdmit", "true", "false: the handles give the membership")
	}
	m := &Member{cfg: cfg}
	s, err := m.settings(0, 1)
	if err != nil {
		return nil, err
	}
	m.timeout = s.Timeout
	if m.secret = s.Secret; len(m.secret) < trust.MinSecret {
		return nil, bad("Secret", fmt.Sprintf("%d bytes", len(m.secret)), fmt.Sprintf("at least %d bytes, the same "+
			"for all members (or TUTTI_SECRET)", trust.MinSecret))
	}
	if spec, err := ports.ParseSpec(s.Ports); err == nil && spec.Lo == spec.Hi && spec.Lo != 0 {
		return nil, bad("Ports", s.Ports, "a range, or 0: a member and each of its groups have ports of their own")
	}
	ctx, cancel := join.Within(ctx, s.Timeout)
	defer cancel()
	m.member, err = bootstrap.NewMember(ctx, bootstrap.MemberConfig{Secret: m.secret, Interfaces: s.Interfaces,
		Ports: s.Ports, Terms: s.terms(), Dial: s.Dialer, Logger: s.Logger})
	if err != nil {
		return nil, fmt.Errorf("member: %w", files.Explain(err))
	}
	if m.handle, err = bootstrap.EncodeHandle(m.member.Self(), m.secret); err != nil {
		m.member.Close()
		return nil, fmt.Errorf("member: %w", err)
	}
	return m, nil
}

// ofJobs reports whether a variable of the environment concerns a job and not a member.
func ofJobs(name string) bool {
	switch name {
	case "TUTTI_JOB", "TUTTI_MAX_SIZE", "TUTTI_ON_FAILURE", "TUTTI_AUTO_ADMIT", "TUTTI_STANDBY", "TUTTI_RESTART":
		return true
	}
	return strings.HasPrefix(name, "TUTTI_STORE")
}

// settings returns the settings of a job in which this member is rank of size.
func (m *Member) settings(rank, size int) (*settings, error) {
	cfg := m.cfg
	cfg.Rank, cfg.Size, cfg.MaxSize, cfg.Job = rank, size, size, "default"
	if cfg.Getenv == nil {
		cfg.Getenv = os.Getenv
	}
	getenv := cfg.Getenv
	cfg.Getenv = func(name string) string {
		if ofJobs(name) {
			return ""
		}
		return getenv(name)
	}
	s, err := cfg.fromEnv()
	if err == nil {
		s.OnFailure, s.AutoAdmit, s.launch.Standby = Report, false, false
	}
	return s, err
}

// Handle returns the text by which members name this one, at most some hundred bytes of printable
// characters: its addresses, its identity, and a code by which members with the same secret
// recognize that it is unchanged. It is useless without the secret.
func (m *Member) Handle() string { return m.handle }

// Form makes a group of the members with these handles, of which this is one: handles[i] is rank i.
// All of them call Form with the same uuid and the same handles in the same order. It returns when
// all have, or with an error when ctx or Config.Timeout ends before that. The group is independent
// of others that the members are in. It is closed by Close, like any other; its membership does not
// change.
//
// A uuid of 1 to 128 printable bytes names the attempt. A member uses it once, even if Form fails:
// a repeated attempt takes another uuid. (It keeps some hundred bytes, and 8 for each handle, to
// remember it.) A list with a member that has used the uuid is refused at every rank with an
// *ArgumentError. If two members have different lists for a uuid, both get a *MismatchError that
// describes the difference. If a member has ended, or its Form has failed, the others get a
// *RankError that names its rank, or a *TimeoutError. The Reporter of a *RankError is the member
// from which this one has it. Errors name ranks and members.
//
// A Form may fail at some members and succeed at others, if a member is lost or gives up when the
// others have all met: their first operation then fails with a *RankError.
func (m *Member) Form(ctx context.Context, uuid string, handles []string) (*Group, error) {
	if ctx == nil {
		return nil, noContext("form")
	}
	peers, err := m.peers(uuid, handles)
	if err != nil {
		return nil, err
	}
	ctx, end := join.Within(ctx, m.timeout)
	defer end()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	f, err := m.member.Begin(uuid, peers, cancel)
	switch {
	case errors.Is(err, bootstrap.ErrUsed):
		return nil, &ArgumentError{Call: "form", Arg: "uuid", Got: fmt.Sprintf("%q, which this member has used "+
			"already", uuid), Want: "one that no member has used"}
	case err != nil: // ErrMemberClosed
		return nil, fmt.Errorf("form: %w: %w", ErrClosed, err)
	}
	g, err := m.form(ctx, f, uuid, len(peers))
	if err == nil {
		if err = f.Formed(); err != nil {
			g.Close()
		}
	} else {
		err = reasonOf(ctx, f, err)
	}
	if err != nil {
		err = fmt.Errorf("forming %q as rank %d of %d: %w", uuid, f.Rank(), len(peers), explained(f, uuid, peers, err))
		f.End(blaming(err))
		return nil, err
	}
	return g, nil
}

// blaming returns what other members are told of err, with which a Form has failed: they name the
// rank that it names.
func blaming(err error) error {
	var lost *RankError
	if !errors.As(err, &lost) || errors.Is(err, p2p.ErrShortage) { // of this process
		return err
	}
	return &bootstrap.PeerError{Rank: lost.Rank, Reporter: lost.Reporter,
		Err: fmt.Errorf("%w: %w", bootstrap.ErrGone, err)}
}

// reasonSoon bounds the question to another member why its Form failed. One that is alive answers
// at once, unless its machine is busy.
const reasonSoon = 5 * time.Second

// reasonOf returns the reason for err, the failure of a Form. If it is a consequence of the failure
// of another member's Form, that is asked.
func reasonOf(ctx context.Context, f *bootstrap.Formation, err error) error {
	var lost *RankError
	var late *TimeoutError
	ask := -1
	switch {
	case errors.As(err, &lost):
		ask = lost.Rank
	case errors.As(err, &late) && errors.Is(err, context.Canceled):
		ask = late.Reporter
	}
	if ask >= 0 && f.Err() == nil {
		ctx, cancel := context.WithTimeout(ctx, reasonSoon)
		defer cancel()
		f.Check(ctx, ask)
	}
	return cmp.Or(f.Err(), err)
}

// form makes the group.
func (m *Member) form(ctx context.Context, f *bootstrap.Formation, uuid string, size int) (*Group, error) {
	s, err := m.settings(f.Rank(), size)
	if err != nil {
		return nil, err
	}
	s.preload()
	s.Job, s.Store, s.Secret, s.formation = uuid, f, f.Secret(), f
	js, err := s.session()
	if err != nil {
		return nil, err
	}
	if size > 1 {
		js.Table = s.tuned()
	}
	g, _, err := s.attempt(ctx, js)
	return g, files.Explain(err)
}

// peers reads the arguments of Form.
func (m *Member) peers(uuid string, handles []string) ([]bootstrap.Record, error) {
	bad := func(arg, got, want string) ([]bootstrap.Record, error) {
		return nil, &ArgumentError{Call: "form", Arg: arg, Got: got, Want: want}
	}
	if len(uuid) < 1 || len(uuid) > bootstrap.MaxUUID ||
		strings.ContainsFunc(uuid, func(c rune) bool { return c < ' ' || c == 0x7f }) {
		return bad("uuid", fmt.Sprintf("%.40q (%d bytes)", uuid, len(uuid)), fmt.Sprintf("1 to %d printable bytes",
			bootstrap.MaxUUID))
	}
	if len(handles) < 1 || len(handles) > bootstrap.MaxMembers {
		return bad("the number of handles", fmt.Sprint(len(handles)), fmt.Sprintf("1 to %d", bootstrap.MaxMembers))
	}
	peers, at := make([]bootstrap.Record, len(handles)), make(map[uint64]int, len(handles))
	for i, h := range handles {
		arg := fmt.Sprintf("handles[%d]", i)
		p, err := bootstrap.DecodeHandle(h, m.secret)
		if err != nil {
			return bad(arg, "invalid: "+err.Error(), "what Handle of a member with the same secret returned")
		}
		if before, twice := at[p.Incarnation]; twice {
			return bad(arg, fmt.Sprintf("that of %s, which is handles[%d] too", p.MemberName(), before),
				"each member once")
		}
		if err := m.member.Self().Terms.Compare(p.Terms, p.MemberName()); err != nil {
			return nil, fmt.Errorf("form: %s: %w", arg, err)
		}
		at[p.Incarnation], peers[i] = i, p
	}
	if _, in := at[m.member.Self().Incarnation]; !in {
		return bad("the handles", fmt.Sprintf("%d of other members", len(handles)), "this member's too, "+
			m.member.Self().MemberName())
	}
	return peers, nil
}

// explained returns an error of a Form as the error of this package, with the names of the members
// whose ranks it names.
func explained(f *bootstrap.Formation, uuid string, peers []bootstrap.Record, err error) error {
	var differs *bootstrap.DifferError
	var peer *bootstrap.PeerError
	var lost *RankError
	var late *TimeoutError
	var ranks []int
	call := fmt.Sprintf("form %q", uuid)
	switch {
	case errors.Is(err, bootstrap.ErrMemberClosed):
		return fmt.Errorf("%w: %w", ErrClosed, err)
	case errors.As(err, &differs):
		return &MismatchError{RankA: differs.Rank, CallA: call + " of " + differs.Own, RankB: differs.OtherRank,
			CallB: call + " of " + differs.Other}
	case errors.As(err, &peer) && errors.Is(err, bootstrap.ErrUsed):
		return &ArgumentError{Call: "form", Arg: "uuid", Got: fmt.Sprintf("%q, which rank %d has used already (%v)",
			uuid, peer.Rank, peer.Err), Want: "one that no member has used"}
	case errors.As(err, &peer):
		return &RankError{Rank: peer.Rank, Reporter: peer.Reporter, Call: call, Err: peer.Err}
	case errors.As(err, &lost):
		ranks = append([]int{lost.Rank}, lost.Also...)
	case errors.As(err, &late):
		for _, m := range late.Missing {
			ranks = append(ranks, m.Rank)
		}
	}
	for _, r := range ranks {
		if r >= 0 && r < len(peers) {
			err = fmt.Errorf("%w; rank %d is %s", err, r, peers[r].MemberName())
			if why := f.Silent(r); why != nil {
				err = fmt.Errorf("%w, which cannot be reached: %v", err, why)
			}
		}
	}
	return err
}

// Close withdraws the handle: the member cannot take part in other groups. A Form under way fails
// with ErrClosed, and at the other members with a *RankError. Groups that were formed stay until
// they are closed. Idempotent.
func (m *Member) Close() { m.member.Close() }
