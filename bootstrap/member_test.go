package bootstrap_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"tutti/bootstrap"
	"tutti/internal/ports/portstest"
)

func member(t *testing.T) *bootstrap.Member {
	t.Helper()
	m, err := bootstrap.NewMember(context30(t), bootstrap.MemberConfig{Secret: secret, Interfaces: "127.0.0.1",
		Ports: portstest.Port(t)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	return m
}

func records(ms ...*bootstrap.Member) (all []bootstrap.Record) {
	for _, m := range ms {
		all = append(all, m.Self())
	}
	return all
}

// begin begins a Formation. Its failure is sent to the channel.
func begin(t *testing.T, m *bootstrap.Member, uuid string, of ...*bootstrap.Member) (*bootstrap.Formation, chan error) {
	t.Helper()
	failed := make(chan error, 1)
	f, err := m.Begin(uuid, records(of...), func(err error) { failed <- err })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.End(nil) })
	return f, failed
}

func key(uuid string, rank int) string { return bootstrap.Prefix(uuid) + bootstrap.RankKey(rank) }

func TestHandleRoundTrip(t *testing.T) {
	rec := bootstrap.NewRecord(0, 1, 77, []string{"192.0.2.1:4000", "[2001:db8::1]:4000"})
	h, err := bootstrap.EncodeHandle(rec, secret)
	if err != nil || strings.Contains(h, string(secret)) {
		t.Fatalf("%q, %v", h, err)
	}
	if got, err := bootstrap.DecodeHandle(h, secret); err != nil || !reflect.DeepEqual(got, rec) {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := bootstrap.DecodeHandle(h, []byte("a secret of other members")); err == nil {
		t.Error("a handle of members with another secret was accepted")
	}
	for i := range h { // every change is noticed
		if got, err := bootstrap.DecodeHandle(h[:i]+string(h[i]^1)+h[i+1:], secret); err == nil {
			t.Errorf("changed at %d: %+v", i, got)
		}
	}
}

// A member waits until another has begun the Formation and published its record.
func TestFormationDirectory(t *testing.T) {
	ctx := context30(t)
	a, b := member(t), member(t)
	fa, _ := begin(t, a, "u", a, b)
	if fa.Rank() != 0 {
		t.Fatalf("rank %d", fa.Rank())
	}
	short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	if got, err := fa.Wait(short, key("u", 1)); !errors.Is(err, context.DeadlineExceeded) ||
		!strings.Contains(err.Error(), b.Self().MemberName()) {
		t.Errorf("of a member that has not begun: %q, %v", got, err)
	}
	type answer struct {
		value []byte
		err   error
	}
	got := make(chan answer)
	go func() {
		v, err := fa.Wait(ctx, key("u", 1))
		got <- answer{v, err}
	}()
	fb, _ := begin(t, b, "u", a, b)
	if string(fa.Secret()) != string(fb.Secret()) {
		t.Error("the members derive different secrets")
	}
	if _, err := fb.CompareAndSet(ctx, key("u", 1), nil, []byte("record of b")); err != nil {
		t.Fatal(err)
	}
	if a := <-got; string(a.value) != "record of b" {
		t.Errorf("%q, %v", a.value, a.err)
	}
	if err := fb.Set(ctx, key("u", 0), []byte("forged")); err == nil {
		t.Error("a member set the record of another")
	}
	if err := errors.Join(fa.Formed(), fb.Formed()); err != nil {
		t.Fatal(err)
	}
	fb.End(nil)
	if v, err := fa.Get(ctx, key("u", 1)); !errors.Is(err, bootstrap.ErrNoKey) || v != nil ||
		!strings.Contains(err.Error(), "it has left the group") {
		t.Errorf("after it has left: %q, %v", v, err)
	}
	store, err := bootstrap.OpenStore(ctx, fa, "u")
	if err != nil {
		t.Fatal(err)
	}
	if v, err := store.Get(ctx, bootstrap.RankKey(1)); !errors.Is(err, bootstrap.ErrNoKey) || v != nil ||
		errors.Is(err, bootstrap.ErrStoreAway) || !strings.Contains(err.Error(), "it has left the group") {
		t.Errorf("of the store, after it has left: %q, %v", v, err)
	}
	if _, err := b.Begin("u", records(a, b), nil); !errors.Is(err, bootstrap.ErrUsed) {
		t.Errorf("the same uuid again: %v", err)
	}
	third, _ := begin(t, b, "v", a, b)
	if string(third.Secret()) == string(fa.Secret()) {
		t.Error("two Formations have the same secret")
	}
}

// What is wrong with another member is told to the one that asks, and with different lists to both.
func TestFormationFailures(t *testing.T) {
	ctx := context30(t)
	for name, c := range map[string]struct {
		other func(t *testing.T, a, b *bootstrap.Member) chan error
		is    error
		as    any
		text  string
	}{
		"closed": {func(t *testing.T, a, b *bootstrap.Member) chan error {
			b.Close()
			return nil
		}, bootstrap.ErrGone, nil, "it has ended"},
		"gave up": {func(t *testing.T, a, b *bootstrap.Member) chan error {
			f, _ := begin(t, b, "u", a, b)
			f.End(errors.New("no time"))
			return nil
		}, bootstrap.ErrGone, nil, "no time"},
		"left": {func(t *testing.T, a, b *bootstrap.Member) chan error {
			f, _ := begin(t, b, "u", a, b)
			f.End(nil)
			return nil
		}, bootstrap.ErrGone, nil, "has left"},
		"used": {func(t *testing.T, a, b *bootstrap.Member) chan error {
			f, _ := begin(t, b, "u", b)
			f.End(f.Formed())
			return nil
		}, bootstrap.ErrUsed, nil, "rank 1"},
		"another build": {func(t *testing.T, a, b *bootstrap.Member) chan error {
			b.Close()
			later(t, b.Self().Addrs[0])
			return nil
		}, bootstrap.ErrVersion, nil, "tutti/Z"},
		"other order": {func(t *testing.T, a, b *bootstrap.Member) chan error {
			_, failed := begin(t, b, "u", b, a)
			return failed
		}, nil, new(*bootstrap.DifferError), "as rank 0"},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := member(t), member(t)
			told := c.other(t, a, b)
			f, failed := begin(t, a, "u", a, b)
			_, err := f.Wait(ctx, key("u", 1))
			if err == nil || c.is != nil && !errors.Is(err, c.is) || c.as != nil && !errors.As(err, c.as) ||
				!strings.Contains(err.Error(), c.text) {
				t.Errorf("%v", err)
			}
			if cause := <-failed; cause.Error() != err.Error() || f.Formed() == nil {
				t.Errorf("the Formation failed with %v, the request with %v", cause, err)
			}
			if told != nil && !errors.As(<-told, new(*bootstrap.DifferError)) {
				t.Error("the other member was not told")
			}
		})
	}
}

// A member whose Formation fails because of another one names that to those that ask, before End
// and after it, and over several members.
func TestFormationNamesMemberAtFault(t *testing.T) {
	ctx := context30(t)
	for name, c := range map[string]struct {
		spoil func(t *testing.T, d *bootstrap.Member)
		is    error
	}{
		"gone": {func(_ *testing.T, d *bootstrap.Member) { d.Close() }, bootstrap.ErrGone},
		"used": {func(t *testing.T, d *bootstrap.Member) {
			f, _ := begin(t, d, "u", d)
			f.End(f.Formed())
		}, bootstrap.ErrUsed},
		"another build": {func(t *testing.T, d *bootstrap.Member) {
			d.Close()
			later(t, d.Self().Addrs[0])
		}, bootstrap.ErrVersion},
	} {
		t.Run(name, func(t *testing.T) {
			ms := []*bootstrap.Member{member(t), member(t), member(t), member(t)}
			const dead = 3
			c.spoil(t, ms[dead])
			check := func(f *bootstrap.Formation, asked, reporter int) {
				t.Helper()
				_, err := f.Wait(ctx, key("u", asked))
				var peer *bootstrap.PeerError
				if !errors.As(err, &peer) || peer.Rank != dead || peer.Reporter != reporter || !errors.Is(err, c.is) ||
					!strings.Contains(err.Error(), ms[dead].Self().MemberName()) {
					t.Errorf("rank %d asked rank %d: %v, want a *PeerError about rank %d, seen by rank %d", f.Rank(),
						asked, err, dead, reporter)
				}
			}
			var all []*bootstrap.Formation
			for _, m := range ms[:dead] {
				f, _ := begin(t, m, "u", ms...)
				all = append(all, f)
			}
			check(all[0], dead, 0)
			check(all[1], 0, 0)
			for _, f := range all[:2] {
				f.End(fmt.Errorf("forming: %w", f.Err()))
			}
			check(all[2], 1, 1)
		})
	}
}

// A member that another one takes for gone reports that one.
func TestFormationOfMemberCalledGone(t *testing.T) {
	a, b := member(t), member(t)
	f, _ := begin(t, a, "u", a, b)
	f.End(&bootstrap.PeerError{Rank: 1, Err: fmt.Errorf("no route: %w", bootstrap.ErrGone)})
	g, _ := begin(t, b, "u", a, b)
	_, err := g.Wait(context30(t), key("u", 0))
	var peer *bootstrap.PeerError
	if !errors.As(err, &peer) || peer.Rank != 0 || peer.Reporter != 1 || !strings.Contains(err.Error(), "no route") {
		t.Errorf("%v, want a *PeerError about rank 0", err)
	}
}

// Close ends what is being formed, which others are told, and not what has been formed.
func TestCloseEndsForming(t *testing.T) {
	ctx := context30(t)
	a, b := member(t), member(t)
	formed, kept := begin(t, a, "formed", a, b)
	if err := formed.Formed(); err != nil {
		t.Fatal(err)
	}
	forming, failed := begin(t, a, "forming", a, b)
	other, _ := begin(t, b, "forming", a, b)
	asks := make(chan error)
	go func() {
		_, err := forming.Wait(ctx, key("forming", 1)) // which b has not published
		asks <- err
	}()
	a.Close()
	for what, err := range map[string]error{"the request": <-asks, "the Formation": <-failed,
		"Formed": forming.Formed()} {
		if !errors.Is(err, bootstrap.ErrMemberClosed) {
			t.Errorf("%s ended with %v", what, err)
		}
	}
	forming.End(nil)
	if _, err := other.Wait(ctx, key("forming", 0)); !errors.Is(err, bootstrap.ErrGone) ||
		!strings.Contains(err.Error(), "was closed") {
		t.Errorf("the other member is told: %v", err)
	}
	select {
	case err := <-kept:
		t.Errorf("what had been formed failed: %v", err)
	default:
	}
}

// A group that has been formed stays, whatever other members ask for.
func TestFormedStays(t *testing.T) {
	a, b := member(t), member(t)
	f, failed := begin(t, a, "u", a)
	if err := f.Formed(); err != nil {
		t.Fatal(err)
	}
	g, _ := begin(t, b, "u", a, b)
	if _, err := g.Wait(context30(t), key("u", 0)); !errors.Is(err, bootstrap.ErrUsed) {
		t.Errorf("%v", err)
	}
	select {
	case err := <-failed:
		t.Errorf("the group that was there failed: %v", err)
	default:
	}
}

// What a member keeps of a Formation after End does not grow with the members that did not answer,
// nor with attempts that end later. Other members are told why it ended.
func TestEndForgets(t *testing.T) {
	ctx := context30(t)
	cause := errors.New("no route")
	var f atomic.Pointer[bootstrap.Formation]
	var late atomic.Bool
	dial := func(context.Context, *net.Dialer, int, string) (net.Conn, error) {
		if late.Load() {
			f.Load().End(fmt.Errorf("gave up: %w", cause))
		}
		return nil, cause
	}
	m, err := bootstrap.NewMember(ctx, bootstrap.MemberConfig{Secret: secret, Interfaces: "127.0.0.1", Dial: dial})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	other := member(t)
	const dead = 100
	peers := records(m, other)
	for r := range dead {
		peers = append(peers, bootstrap.NewRecord(0, 1, uint64(1+r), []string{"127.0.0.1:1"}))
	}
	begun, err := m.Begin("u", peers, func(error) {})
	if err != nil {
		t.Fatal(err)
	}
	f.Store(begun)
	var asking sync.WaitGroup
	for r := 2; r < len(peers); r++ {
		asking.Go(func() { begun.Check(ctx, r) })
	}
	for r := 2; r < len(peers); r++ {
		for begun.Silent(r) == nil && ctx.Err() == nil {
			runtime.Gosched()
		}
	}
	late.Store(true) // each attempt now ends after End
	asking.Wait()
	for r := range peers {
		if err := begun.Silent(r); err != nil {
			t.Fatalf("rank %d is %v after End", r, err)
		}
	}
	if err := begun.Err(); err == nil || err.Error() != "gave up: no route" || errors.Is(err, cause) {
		t.Errorf("%v, want the text alone", err)
	}
	g, err := other.Begin("u", peers, func(error) {})
	if err != nil {
		t.Fatal(err)
	}
	defer g.End(nil)
	if _, err := g.Wait(ctx, key("u", 0)); !errors.Is(err, bootstrap.ErrGone) ||
		!strings.HasSuffix(err.Error(), "it gave up: gave up: no route") {
		t.Errorf("the other member is told: %v", err)
	}
}

// Who comes with a third list after End is told how the lists differ, as those before were.
func TestListsDifferAfterEnd(t *testing.T) {
	a, b, c := member(t), member(t), member(t)
	f, _ := begin(t, a, "u", a, b)
	begin(t, b, "u", b, a)
	_, err := f.Wait(context30(t), key("u", 1))
	f.End(err)
	if err := f.Err(); !errors.As(err, new(*bootstrap.DifferError)) {
		t.Errorf("after End: %v", err)
	}
	third, _ := begin(t, c, "u", c, a)
	if _, err := third.Wait(context30(t), key("u", 1)); !errors.As(err, new(*bootstrap.DifferError)) {
		t.Errorf("the third member is told: %v", err)
	}
}
