package pg_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"tutti/bootstrap"
	"tutti/pg"
	"tutti/pg/pgtest"
)

var memberSecret = []byte("the secret of these members")

// members makes n members in this process.
func members(t *testing.T, n int, cfg pg.Config) []*pg.Member {
	t.Helper()
	cfg.Secret = memberSecret
	if cfg.Timeout == 0 {
		cfg.Timeout = 20 * time.Second
	}
	all := make([]*pg.Member, n)
	for i := range all {
		m, err := pg.NewMember(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(m.Close)
		all[i] = m
	}
	return all
}

func handles(ms ...*pg.Member) (all []string) {
	for _, m := range ms {
		all = append(all, m.Handle())
	}
	return all
}

// outcome is what Form returned to a member.
type outcome struct {
	g   *pg.Group
	err error
}

// form has all of ms form a group of them at a time, and returns what each got.
func form(t *testing.T, uuid string, ms ...*pg.Member) []outcome {
	t.Helper()
	list := handles(ms...)
	return formLists(t, uuid, ms, func(int) []string { return list })
}

// formLists is form with a list of handles for each member.
func formLists(t *testing.T, uuid string, ms []*pg.Member, list func(i int) []string) []outcome {
	t.Helper()
	return formWithin(t.Context(), t, uuid, ms, list)
}

// formWithin is formLists, which ctx ends.
func formWithin(ctx context.Context, t *testing.T, uuid string, ms []*pg.Member,
	list func(i int) []string) []outcome {
	t.Helper()
	all := make([]outcome, len(ms))
	var wg sync.WaitGroup
	for i, m := range ms {
		wg.Go(func() { all[i].g, all[i].err = m.Form(ctx, uuid, list(i)) })
	}
	wg.Wait()
	for _, o := range all {
		if o.g != nil {
			t.Cleanup(func() { o.g.Close() })
		}
	}
	return all
}

// formed is form, which must succeed.
func formed(t *testing.T, uuid string, ms ...*pg.Member) []*pg.Group {
	t.Helper()
	groups := make([]*pg.Group, len(ms))
	for i, o := range form(t, uuid, ms...) {
		if o.err != nil {
			t.Fatalf("rank %d: %v", i, o.err)
		}
		if groups[i] = o.g; o.g.Rank() != i || o.g.Size() != len(ms) {
			t.Errorf("handle %d got rank %d of %d", i, o.g.Rank(), o.g.Size())
		}
	}
	works(t, groups...)
	return groups
}

// works checks that the ranks can reduce and exchange messages.
func works(t *testing.T, groups ...*pg.Group) {
	t.Helper()
	n := len(groups)
	var wg sync.WaitGroup
	for r, g := range groups {
		wg.Go(func() {
			x := []int64{int64(r), 1}
			if err := pg.AllReduce(t.Context(), g, x, pg.Sum); err != nil || x[0] != int64(n*(n-1)/2) ||
				x[1] != int64(n) {
				t.Errorf("rank %d of %d: %v, %v", r, n, x, err)
			}
			all := make([]int64, n)
			if err := pg.AllToAll(t.Context(), g, all, slices.Repeat([]int64{int64(r)}, n)); err != nil ||
				!slices.IsSorted(all) || all[n-1] != int64(n-1) {
				t.Errorf("rank %d of %d: all to all gave %v, %v", r, n, all, err)
			}
		})
	}
	wg.Wait()
}

// Members of different builds, or with different settings, form no group.
func TestFormOfDifferentMembers(t *testing.T) {
	m := members(t, 2, pg.Config{})
	for setting, change := range map[string]func(*bootstrap.Terms){
		"":              func(o *bootstrap.Terms) { o.Version = "0" },
		"TUTTI_UNIFORM": func(o *bootstrap.Terms) { o.Settings["TUTTI_UNIFORM"] = "true" },
	} {
		other, err := bootstrap.DecodeHandle(m[1].Handle(), memberSecret)
		if err != nil {
			t.Fatal(err)
		}
		change(&other.Terms)
		handle, err := bootstrap.EncodeHandle(other, memberSecret)
		if err != nil {
			t.Fatal(err)
		}
		var differs *bootstrap.TermsError
		if _, err := m[0].Form(t.Context(), "u", []string{m[0].Handle(), handle}); !errors.As(err, &differs) ||
			differs.Setting != setting || differs.Peer != other.MemberName() {
			t.Errorf("%q: %v", setting, err)
		}
	}
}

// The place of a handle is the rank: other orders of the same members are other ranks, and members
// that are not in the list have no part.
func TestOrderOfFormedMembersIsTheirRanks(t *testing.T) {
	for _, transport := range transports {
		t.Run(transport, func(t *testing.T) {
			ms := members(t, 3, pg.Config{Transport: transport})
			formed(t, "all", ms...)
			formed(t, "reversed", ms[2], ms[1], ms[0])
			formed(t, "two", ms[2], ms[0])
			formed(t, "alone", ms[1])
		})
	}
}

// A uuid is used once, also by a member that was not in the first group, and also after a failure.
func TestFormRefusesUsedUUID(t *testing.T) {
	ms := members(t, 3, pg.Config{})
	first := formed(t, "u", ms[0], ms[1])
	for i, o := range form(t, "u", ms[2], ms[0], ms[1]) {
		if want := new(*pg.ArgumentError); !errors.As(o.err, want) || (*want).Arg != "uuid" ||
			!strings.Contains(o.err.Error(), "used already") {
			t.Errorf("rank %d: %v, want an *ArgumentError about the uuid", i, o.err)
		}
	}
	works(t, first...)
	first[0].Close()
	first[1].Close()
	if _, err := ms[0].Form(t.Context(), "u", handles(ms[0])); !errors.As(err, new(*pg.ArgumentError)) {
		t.Errorf("after the group was closed: %v", err)
	}
}

// Disjoint groups form at the same time, also with the same uuid, and can be merged and divided.
func TestFormDisjointAndMerged(t *testing.T) {
	ms := members(t, 6, pg.Config{})
	var halves [2][]*pg.Group
	var wg sync.WaitGroup
	for i := range halves {
		wg.Go(func() { halves[i] = formed(t, "half", ms[3*i:3*i+3]...) })
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	merged := formed(t, "merged", ms...)
	works(t, halves[0]...)
	works(t, halves[1]...)
	for _, g := range slices.Concat(halves[0], halves[1]) {
		g.Close()
	}
	works(t, merged...)
	formed(t, "shrunk", ms[1], ms[4], ms[5])
	formed(t, "grown", append(members(t, 1, pg.Config{}), ms[:3]...)...)
}

// After an abort, and after an operation that timed out, the members form another group.
func TestFormAfterFailures(t *testing.T) {
	ms := members(t, 3, pg.Config{})
	aborted := formed(t, "first", ms...)
	aborted[1].Abort(errors.New("enough"))
	if err := aborted[0].Barrier(t.Context()); !errors.Is(err, pg.ErrAborted) {
		t.Errorf("after an abort: %v", err)
	}
	late := formed(t, "second", ms[1], ms[2], ms[0])
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := late[0].Barrier(ctx); !errors.As(err, new(*pg.TimeoutError)) {
		t.Errorf("a barrier of one rank: %v", err)
	}
	formed(t, "third", ms...)
}

// A Form to which a member does not come ends in time, and names the member. The members can form
// another group.
func TestFormWithoutOneMember(t *testing.T) {
	ms := members(t, 3, pg.Config{})
	all := handles(ms...)
	short, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for i, o := range formWithin(short, t, "u", ms[:2], func(int) []string { return all }) {
		if o.err == nil || !strings.Contains(o.err.Error(), "rank 2 is member ") {
			t.Errorf("rank %d: %v, want that rank 2 is named", i, o.err)
		}
	}
	// The one that was late is told.
	if _, err := ms[2].Form(t.Context(), "u", all); !errors.As(err, new(*pg.RankError)) ||
		!strings.Contains(err.Error(), "gave up") {
		t.Errorf("the late member: %v, want a *RankError", err)
	}
	formed(t, "again", members(t, 1, pg.Config{})[0])
	formed(t, "v", ms...)
}

// A cancelled Form ends at all members.
func TestFormCancelled(t *testing.T) {
	ms := members(t, 2, pg.Config{})
	for i := range 40 { // the last time in what waits for the other one
		uuid := fmt.Sprint("u", i)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Duration(i)*time.Millisecond, cancel)
		if _, err := ms[0].Form(ctx, uuid, handles(ms...)); !errors.Is(err, context.Canceled) {
			t.Errorf("the member that was cancelled after %d ms: %v", i, err)
		}
		if _, err := ms[1].Form(t.Context(), uuid, handles(ms...)); !errors.As(err, new(*pg.RankError)) {
			t.Errorf("the other one: %v", err)
		}
	}
}

// A member that has ended is known to be gone: no time limit has to pass.
func TestFormWithClosedMember(t *testing.T) {
	ms := members(t, 3, pg.Config{Timeout: time.Minute})
	ms[1].Close()
	all := handles(ms...)
	began := time.Now()
	for i, o := range formLists(t, "u", []*pg.Member{ms[0], ms[2]}, func(int) []string { return all }) {
		var lost *pg.RankError
		if !errors.As(o.err, &lost) || lost.Rank != 1 && !strings.Contains(o.err.Error(), "rank 1") {
			t.Errorf("%d: %v, want a *RankError about rank 1", i, o.err)
		}
	}
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("it took %v", took)
	}
	if _, err := ms[1].Form(t.Context(), "v", handles(ms[1])); !errors.Is(err, pg.ErrClosed) {
		t.Errorf("a closed member forms a group: %v", err)
	}
}

// Close ends a Form under way, at all members.
func TestCloseEndsForm(t *testing.T) {
	begun := make(chan struct{}, 1)
	closes := members(t, 1, pg.Config{Timeout: time.Hour,
		Dialer: func(ctx context.Context, d *net.Dialer, _ int, address string) (net.Conn, error) {
			select {
			case begun <- struct{}{}:
			default:
			}
			return d.DialContext(ctx, "tcp", address)
		}})[0]
	other := members(t, 1, pg.Config{})[0]
	list := handles(closes, other)
	done := make(chan error, 1)
	go func() {
		_, err := closes.Form(t.Context(), "u", list)
		done <- err
	}()
	<-begun // it asks the other member, which has not come
	closes.Close()
	if err := <-done; !errors.Is(err, pg.ErrClosed) {
		t.Errorf("the member that was closed: %v", err)
	}
	if _, err := other.Form(t.Context(), "u", list); !errors.As(err, new(*pg.RankError)) {
		t.Errorf("the other member: %v", err)
	}
}

// The meeting of more than eight members is a star: most of them never ask the member that prevents
// it. All name that one nevertheless.
func TestFormOfManyNamesMemberAtFault(t *testing.T) {
	const n, bad = 10, 7
	except := func(ms []*pg.Member) []*pg.Member { return slices.Delete(slices.Clone(ms), bad, bad+1) }
	t.Run("closed", func(t *testing.T) {
		ms := members(t, n, pg.Config{})
		ms[bad].Close()
		all := handles(ms...)
		for i, o := range formLists(t, "u", except(ms), func(int) []string { return all }) {
			if lost := new(*pg.RankError); !errors.As(o.err, lost) || (*lost).Rank != bad {
				t.Errorf("survivor %d: %v, want a *RankError about rank %d", i, o.err, bad)
			}
		}
	})
	t.Run("cancelled", func(t *testing.T) {
		ms := members(t, n, pg.Config{})
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		all := handles(ms...)
		if _, err := ms[bad].Form(ctx, "u", all); !errors.Is(err, context.Canceled) {
			t.Errorf("the member that gives up: %v", err)
		}
		for i, o := range formLists(t, "u", except(ms), func(int) []string { return all }) {
			if lost := new(*pg.RankError); !errors.As(o.err, lost) || (*lost).Rank != bad {
				t.Errorf("survivor %d: %v, want a *RankError about rank %d", i, o.err, bad)
			}
		}
	})
	t.Run("used", func(t *testing.T) {
		ms := members(t, n, pg.Config{})
		formed(t, "u", ms[bad])
		for i, o := range form(t, "u", ms...) {
			if want := new(*pg.ArgumentError); !errors.As(o.err, want) || (*want).Arg != "uuid" ||
				i != bad && !strings.Contains(o.err.Error(), fmt.Sprintf("which rank %d has used", bad)) {
				t.Errorf("rank %d: %v, want an *ArgumentError about the uuid", i, o.err)
			}
		}
	})
}

// A group outlives its members, also for ranks that have not been linked yet.
func TestGroupOutlivesMember(t *testing.T) {
	ms := members(t, 5, pg.Config{})
	groups := make([]*pg.Group, len(ms))
	for i, o := range form(t, "u", ms...) {
		if o.err != nil {
			t.Fatal(o.err)
		}
		groups[i] = o.g
	}
	for _, m := range ms {
		m.Close()
	}
	works(t, groups...)
}

// A rank that has left before another one has a link to it is said to have left: members have no
// leases.
func TestLinkToMemberThatHasLeft(t *testing.T) {
	ms := members(t, 10, pg.Config{}) // the meeting links them with rank 0 only
	groups := make([]*pg.Group, len(ms))
	for i, o := range form(t, "u", ms...) {
		if o.err != nil {
			t.Fatal(o.err)
		}
		groups[i] = o.g
	}
	groups[9].Close()
	err := pg.Send(t.Context(), groups[5], []int64{1}, 9, 1)
	if lost := new(*pg.RankError); !errors.As(err, lost) || (*lost).Rank != 9 ||
		!strings.Contains(err.Error(), "it has left the group") || strings.Contains(err.Error(), "lease") {
		t.Errorf("%v, want that rank 9 has left", err)
	}
}

// Members that were given different lists for a uuid get errors that describe the difference.
func TestFormWithDifferentLists(t *testing.T) {
	ms := members(t, 4, pg.Config{Timeout: time.Minute})
	a, b, c, d := ms[0].Handle(), ms[1].Handle(), ms[2].Handle(), ms[3].Handle()
	for name, lists := range map[string][3][]string{
		"order":     {{a, b, c}, {a, c, b}, {a, b, c}},
		"length":    {{a, b, c}, {a, b, c}, {a, b, c, d}},
		"member":    {{a, b, d}, {a, b, c}, {a, b, c}},
		"all":       {{a, b, c}, {b, c, a}, {c, a, b}},
		"one alone": {{a, b, c}, {a, b, c}, {d, c}},
	} {
		t.Run(name, func(t *testing.T) {
			began := time.Now()
			for i, o := range formLists(t, name, ms[:3], func(i int) []string { return lists[i] }) {
				var m *pg.MismatchError
				if !errors.As(o.err, &m) || !strings.Contains(o.err.Error(), " as rank ") {
					t.Errorf("rank %d: %v, want a *MismatchError that describes the difference", i, o.err)
				}
			}
			if took := time.Since(began); took > 20*time.Second {
				t.Errorf("it took %v", took)
			}
		})
	}
}

func TestFormArguments(t *testing.T) {
	ms := members(t, 2, pg.Config{})
	a, b := ms[0].Handle(), ms[1].Handle()
	cfg := pg.Config{Secret: []byte("the secret of other members")}
	stranger, err := pg.NewMember(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stranger.Close)
	for name, c := range map[string]struct {
		uuid    string
		handles []string
		text    string
	}{
		"no uuid":         {"", []string{a, b}, "uuid"},
		"long uuid":       {strings.Repeat("u", 129), []string{a, b}, "129 bytes"},
		"unprintable":     {"a\x00", []string{a, b}, "uuid"},
		"no handles":      {"u", nil, "number of handles is 0"},
		"twice":           {"u", []string{a, b, a}, "handles[0] too"},
		"not this member": {"u", []string{b}, "this member's too"},
		"empty":           {"u", []string{a, ""}, "handles[1]"},
		"nonsense":        {"u", []string{a, "nonsense"}, "handles[1]"},
		"cut short":       {"u", []string{a, b[:len(b)-3]}, "damaged"},
		"altered":         {"u", []string{a, b[:40] + string(b[40]^1) + b[41:]}, "damaged"},
		"other secret":    {"u", []string{a, stranger.Handle()}, "another secret"},
	} {
		_, err := ms[0].Form(t.Context(), c.uuid, c.handles)
		if !errors.As(err, new(*pg.ArgumentError)) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v, want an *ArgumentError with %q", name, err, c.text)
		}
	}
	formed(t, "u", ms...) // none of these has used the uuid
}

func TestNewMemberArguments(t *testing.T) {
	for text, cfg := range map[string]pg.Config{
		"Secret":    {},
		"OnFailure": {Secret: memberSecret, OnFailure: pg.Shrink},
		"Size":      {Secret: memberSecret, Size: 3},
		"Job":       {Secret: memberSecret, Job: "j"},
		"store":     {Secret: memberSecret, StoreUser: "u"},
		"AutoAdmit": {Secret: memberSecret, AutoAdmit: true},
		"Ports":     {Secret: memberSecret, Ports: "29500"},
	} {
		cfg.Getenv = func(string) string { return "" }
		if _, err := pg.NewMember(t.Context(), cfg); !errors.As(err, new(*pg.ArgumentError)) ||
			!strings.Contains(err.Error(), text) {
			t.Errorf("%s: %v", text, err)
		}
	}
	// What a launcher says of another job does not matter.
	env := map[string]string{"TUTTI_RANK": "3", "TUTTI_SIZE": "4", "TUTTI_ON_FAILURE": "shrink",
		"TUTTI_SECRET": string(memberSecret), "TUTTI_STORE": "nonsense", "TUTTI_STORE_USER": "without a password",
		"TUTTI_JOB": "a job", "TUTTI_MAX_SIZE": "x", "TUTTI_AUTO_ADMIT": "x", "TUTTI_STANDBY": "x"}
	m, err := pg.NewMember(t.Context(), pg.Config{Getenv: func(name string) string { return env[name] }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	formed(t, "u", append(members(t, 1, pg.Config{}), m)...)
}

// Many groups, one after the other, of the same members: nothing is left of them.
func TestFormAgainAndAgain(t *testing.T) {
	ms := members(t, 3, pg.Config{})
	for i := range 20 {
		for _, g := range formed(t, fmt.Sprint(i), ms...) {
			g.Close()
		}
	}
}

// exchange returns the texts of all ranks.
func exchange(t *testing.T, g *pg.Group, text string) []string {
	t.Helper()
	const room = 2048
	mine, all := make([]byte, room), make([]byte, room*g.Size())
	copy(mine, text)
	if err := pg.AllGather(t.Context(), g, all, mine); err != nil {
		t.Fatal(err)
	}
	var texts []string
	for b := range slices.Chunk(all, room) {
		texts = append(texts, strings.TrimRight(string(b), "\x00"))
	}
	return texts
}

// survivors returns when all ranks but dead have called it. It uses messages, because a barrier
// needs the dead rank. Rank 0 lives.
func survivors(t *testing.T, g *pg.Group, dead int) {
	t.Helper()
	mark := []byte{1}
	send := func(to int) error { return pg.Send(t.Context(), g, mark, to, 0) }
	receive := func(from int) error { _, err := pg.Recv(t.Context(), g, mark, from, 0); return err }
	others, calls := []int{0}, []func(int) error{send, receive}
	if g.Rank() == 0 {
		others, calls = nil, []func(int) error{receive, send}
		for r := 1; r < g.Size(); r++ {
			if r != dead {
				others = append(others, r)
			}
		}
	}
	for _, call := range calls {
		for _, r := range others {
			if err := call(r); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// A member is killed before or during Form: the others get an error in time that names it, and form
// a group without it.
func TestFormNamesKilledMember(t *testing.T) {
	const dead = 2
	kill := func(n int, transport string, most int) {
		for dials := range most + 1 { // of the dead one, before its end
			t.Run(fmt.Sprintf("%d/%s/%d", n, transport, dials), func(t *testing.T) {
				pgtest.Run(t, n, func(t *testing.T, outer *pg.Group) {
					ctx := t.Context()
					var dialled atomic.Int32
					dialled.Store(math.MinInt32 / 2)
					cfg := pg.Config{Secret: memberSecret, Transport: transport, Timeout: time.Minute}
					if outer.Rank() == dead {
						cfg.Dialer = func(ctx context.Context, d *net.Dialer, _ int, address string) (net.Conn, error) {
							if int(dialled.Add(1)) > dials {
								pgtest.Kill(t)
							}
							return d.DialContext(ctx, "tcp", address)
						}
					}
					m, err := pg.NewMember(ctx, cfg)
					if err != nil {
						t.Fatal(err)
					}
					defer m.Close()
					list := exchange(t, outer, m.Handle())
					name := fmt.Sprintf("(pid %s on", exchange(t, outer, fmt.Sprint(os.Getpid()))[dead])
					dialled.Store(0)
					if dials == 0 && outer.Rank() == dead {
						pgtest.Kill(t)
					}
					began := time.Now()
					g, err := m.Form(ctx, "first", list)
					if outer.Rank() == dead {
						pgtest.Kill(t) // at the latest
					}
					if err == nil { // all links were up
						if err = g.Barrier(ctx); err == nil {
							err = g.Barrier(ctx)
						}
					} else if !strings.Contains(err.Error(), name) {
						t.Errorf("the error does not name the member: %v", err)
					}
					var lost *pg.RankError
					var late *pg.TimeoutError
					switch {
					case errors.As(err, &lost):
						if lost.Rank != dead {
							t.Errorf("%v, want rank %d", err, dead)
						}
					case !errors.As(err, &late):
						t.Errorf("%v", err)
					}
					if took := time.Since(began); took > 30*time.Second {
						t.Errorf("it took %v", took)
					}
					survivors(t, outer, dead) // a rank that leaves is named by those that link with it late
					if g != nil {
						g.Close()
					}
					g, err = m.Form(ctx, "second", slices.Delete(list, dead, dead+1))
					if err != nil {
						t.Fatal(err)
					}
					defer g.Close()
					if err := g.Barrier(ctx); err != nil || g.Size() != n-1 {
						t.Errorf("%d survivors: %v", g.Size(), err)
					}
					survivors(t, outer, dead) // the same
				}, pgtest.Expect(dead, syscall.SIGKILL))
			})
		}
	}
	for _, transport := range transports {
		kill(4, transport, 4)
	}
	kill(9, "tcp", 2) // a star around rank 0
}

// Members form groups of a random partition at a time, again and again. Some groups are disturbed:
// a member has another list, does not come, or gives up. Those fail at every member, and the others
// form.
func TestFormRandomly(t *testing.T) {
	seed := time.Now().UnixNano()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(uint64(seed), 0))
	ms := members(t, 6, pg.Config{Timeout: 30 * time.Second})
	for round := range 15 {
		rnd.Shuffle(len(ms), func(i, j int) { ms[i], ms[j] = ms[j], ms[i] })
		var wg sync.WaitGroup
		for rest := slices.Clone(ms); len(rest) > 0; {
			n := 1 + rnd.IntN(len(rest))
			own := rest[:n]
			rest = rest[n:]
			fault, at := "", rnd.IntN(n)
			if n > 1 {
				fault = []string{"", "", "order", "absent", "cancelled"}[rnd.IntN(5)]
			}
			wg.Go(func() {
				list := handles(own...)
				groups, errs := make([]*pg.Group, n), make([]error, n)
				var wg sync.WaitGroup
				for i, m := range own {
					wg.Go(func() {
						ctx, list := t.Context(), slices.Clone(list)
						var cancel context.CancelFunc
						switch {
						case fault == "order" && i == at:
							list[0], list[n-1] = list[n-1], list[0]
						case fault == "absent" && i == at:
							errs[i] = errors.New("absent")
							return
						case fault == "absent":
							ctx, cancel = context.WithTimeout(ctx, 100*time.Millisecond)
							defer cancel()
						case fault == "cancelled" && i == at:
							ctx, cancel = context.WithCancel(ctx)
							cancel()
						}
						groups[i], errs[i] = m.Form(ctx, fmt.Sprint(round), list)
					})
				}
				wg.Wait()
				for i, err := range errs {
					if (err == nil) != (fault == "") {
						t.Errorf("round %d: rank %d of %d with fault %q: %v", round, i, n, fault, err)
					}
				}
				if fault == "" && !t.Failed() {
					works(t, groups...)
				}
				for _, g := range groups {
					if g != nil {
						g.Close()
					}
				}
			})
		}
		wg.Wait()
	}
}

// A member that cannot be reached is named, with the reason.
func TestFormWithUnreachableMember(t *testing.T) {
	t.Parallel()
	ms := members(t, 2, pg.Config{})
	cfg := pg.Config{Secret: memberSecret, Transport: "shm", Timeout: 3 * time.Second,
		Dialer: func(context.Context, *net.Dialer, int, string) (net.Conn, error) {
			return nil, errors.New("a firewall is in between")
		}}
	apart, err := pg.NewMember(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(apart.Close)
	_, err = apart.Form(t.Context(), "u", handles(apart, ms[0]))
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "rank 1 is member") ||
		!strings.Contains(err.Error(), "a firewall is in between") {
		t.Errorf("%v", err)
	}
}
