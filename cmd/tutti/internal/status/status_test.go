package status

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"tutti/bootstrap"
	"tutti/bootstrap/storetest"
	"tutti/endpoint/stats"
	"tutti/internal/ports/portstest"
	"tutti/pg/flight"
)

var secret = []byte("a secret of the status tests")

// job is a store and ranks in it that say what the test wants.
type job struct {
	t     *testing.T
	store *storetest.Memory
	size  int
	first int // ranks that the job begins with; 0: size
}

func newJob(t *testing.T, size int) *job {
	j := &job{t: t, store: storetest.NewMemory(), size: size}
	if size > 0 {
		h := j.store.Open()
		t.Cleanup(func() { h.Close() })
		if err := h.Create(t.Context(), bootstrap.SizeKey, []byte(strconv.Itoa(size)), false); err != nil {
			t.Fatal(err)
		}
	}
	return j
}

func (j *job) sampler(secret []byte) *Sampler {
	s := New("train", j.store.Open(), secret)
	s.within = 30 * time.Second
	j.t.Cleanup(func() { s.Close() })
	return s
}

// register puts a rank's record under a lease, which the handle that it returns holds.
func (j *job) register(rank int, incarnation uint64, addrs ...string) bootstrap.Store {
	h := j.store.Open()
	j.t.Cleanup(func() { h.Close() })
	rec := bootstrap.NewRecord(rank, j.size, incarnation, addrs)
	rec.First = j.first
	b, err := rec.Encode()
	if err == nil {
		err = h.Put(j.t.Context(), bootstrap.RankKey(rank), b, true)
	}
	if err != nil {
		j.t.Fatal(err)
	}
	return h
}

// rank starts one that answers with what f says.
func (j *job) rank(rank int, f func(ops int) *flight.Snapshot) bootstrap.Store {
	return j.serve(rank, func(_ context.Context, ops int) ([]byte, error) {
		snap := f(ops)
		if snap == nil {
			return nil, errors.New("it is joining the job")
		}
		return snap.JSON(false)
	})
}

// serve starts a rank that answers with what status returns.
func (j *job) serve(rank int, status func(ctx context.Context, ops int) ([]byte, error)) bootstrap.Store {
	inc := uint64(rank) + 1
	ctx, cancel := context.WithTimeout(j.t.Context(), 30*time.Second)
	defer cancel()
	s, err := bootstrap.Serve(ctx, bootstrap.ServerConfig{Rank: rank, Incarnation: inc, Secret: secret,
		Interfaces: "127.0.0.1",
		Describe:   func(context.Context, int, uint64) (bootstrap.Endpoints, error) { return nil, nil },
		Status:     status})
	if err != nil {
		j.t.Fatal(err)
	}
	j.t.Cleanup(s.Close)
	return j.register(rank, inc, s.Addrs()...)
}

// snapshot is a rank that computes, and has done so many allreduces of 1000 bytes.
func (j *job) snapshot(rank, done int) *flight.Snapshot {
	s := &flight.Snapshot{Version: flight.Version, Job: "train", Rank: rank, Size: j.size,
		Incarnation: fmt.Sprintf("%016x", rank+1), PID: 100 + rank, Host: "node", Time: time.Now(), Since: time.Now(),
		Joined: true,
		View:   flight.View{Epoch: 1}, Groups: []flight.Group{{ID: 1, Slot: rank, Size: j.size, Finished: uint64(done),
			Number: uint64(done)}}, Totals: map[string]flight.Total{"allreduce": {Operations: uint64(done),
			Bytes: uint64(1000 * done)}}}
	for r := range j.size {
		s.View.Active = append(s.View.Active, r)
	}
	return s
}

func presences(s *Sample) (all []string) {
	for _, r := range s.Ranks {
		all = append(all, string(r.Presence))
	}
	return all
}

func TestSample(t *testing.T) {
	j := newJob(t, 5)
	asked := make(chan int, 1)
	j.rank(0, func(ops int) *flight.Snapshot {
		select {
		case asked <- ops:
		default:
		}
		return j.snapshot(0, 1)
	})
	gone := j.rank(1, func(int) *flight.Snapshot { return j.snapshot(1, 1) })
	j.rank(3, func(int) *flight.Snapshot { return nil })
	s := j.sampler(secret)
	got, err := s.Sample(t.Context(), 7)
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"present", "present", "silent", "silent", "silent"}; !slices.Equal(presences(got), want) {
		t.Errorf("%v, want %v", presences(got), want)
	}
	if n := <-asked; n != 7 {
		t.Errorf("asked for %d operations", n)
	}
	for r, text := range map[int]string{3: "it is joining the job", 4: "its lease has ended (stopped, or dead)"} {
		if !strings.Contains(got.Ranks[r].Detail, text) {
			t.Errorf("rank %d: %q, want %q", r, got.Ranks[r].Detail, text)
		}
	}
	gone.Close()
	if got, err = s.Sample(t.Context(), 0); err != nil || got.Ranks[1].Presence != flight.Silent ||
		got.Ranks[1].Detail != "its lease has ended (stopped, or dead)" {
		t.Errorf("%v, %v", presences(got), err)
	}
	other, err := j.sampler([]byte("another secret altogether")).Sample(t.Context(), 0)
	if err != nil || other.Ranks[0].Presence != flight.Silent || other.Ranks[0].Detail != "it has another secret" {
		t.Errorf("%+v, %v", other.Ranks[0], err)
	}
	hangs, err := net.Listen("tcp", "127.0.0.1:0") // as a stopped process does: the kernel takes connections for it
	if err != nil {
		t.Fatal(err)
	}
	defer hangs.Close()
	j.register(2, 3, hangs.Addr().String())
	s.within = 100 * time.Millisecond
	if got, err = s.Sample(t.Context(), 0); err != nil || got.Ranks[2].Presence != flight.Silent ||
		got.Ranks[2].Detail != "no answer within 100ms, yet the store takes it for alive" ||
		!strings.HasPrefix(got.Ranks[2].Where, fmt.Sprintf("pid %d on ", os.Getpid())) {
		t.Errorf("%+v, %v", got.Ranks[2], err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Sample(ended, 0); err == nil {
		t.Error("a sample although ctx has ended")
	}
}

// TestHostileAnswers has ranks whose answers would control the terminal, or take much memory.
func TestHostileAnswers(t *testing.T) {
	j := newJob(t, 2)
	j.serve(0, func(context.Context, int) ([]byte, error) {
		return nil, errors.New("gone\x1b[2J\r\n\u009b\u202erank 1 is fine")
	})
	large := []byte(`{"version":1,"rank":1,"size":2,"groups":[` + strings.Repeat("{},", 1<<17) + "{}]}")
	j.serve(1, func(context.Context, int) ([]byte, error) { return large, nil })
	got, err := j.sampler(secret).Sample(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	for r, text := range []string{"gone [2J    rank 1 is fine", "131074 objects"} {
		if got := got.Ranks[r]; got.Presence != flight.Silent || !strings.Contains(got.Detail, text) {
			t.Errorf("rank %d: %+q, want %q", r, got.Detail, text)
		}
	}
}

// Ranks of other builds are there, though their states cannot be read.
func TestRanksOfOtherBuilds(t *testing.T) {
	j := newJob(t, 3)
	for r, text := range []string{`{"version":9,"rank":0,"size":3}`, `{"version":9,"rank":"1","size":[]}`} {
		j.serve(r, func(context.Context, int) ([]byte, error) { return []byte(text), nil })
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() { // a rank of another version of the handshake
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			io.ReadFull(c, make([]byte, 104))
			c.Write([]byte("tutti/Z\r"))
			c.Close()
		}
	}()
	defer func() {
		l.Close()
		<-done
	}()
	j.register(2, 3, l.Addr().String())
	got, err := j.sampler(secret).Sample(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	for i, text := range []string{"9, expected 1: use the tutti of the job's build", "9, expected 1: use the tutti of",
		"the other end speaks tutti/Z"} {
		if r := got.Ranks[i]; r.Presence != flight.Unreadable || !strings.Contains(r.Detail, text) {
			t.Errorf("rank %d is %s: %s", i, r.Presence, r.Detail)
		}
	}
	if found := flight.Diagnose(got.Ranks); len(found) > 0 {
		t.Errorf("%+v", found)
	}
}

// An answer that cannot be read in time, since others are, counts as none.
func TestAnswersAreReadInTime(t *testing.T) {
	j := newJob(t, 1)
	j.rank(0, func(int) *flight.Snapshot { return j.snapshot(0, 1) })
	s := j.sampler(secret)
	for range cap(s.reads) {
		s.reads <- struct{}{}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if got, err := s.Sample(ctx, 1); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestSampleOfFew(t *testing.T) {
	if _, err := newJob(t, 0).sampler(secret).Sample(t.Context(), 0); !errors.Is(err, ErrNoRanks) {
		t.Errorf("no ranks: %v", err)
	}
	j := newJob(t, 3) // no ranks have met
	j.rank(1, func(int) *flight.Snapshot { s := j.snapshot(1, 0); s.Joined = false; return s })
	got, err := j.sampler(secret).Sample(t.Context(), 0)
	if want := []string{"absent", "present", "absent"}; err != nil || !slices.Equal(presences(got), want) {
		t.Errorf("%v, %v, want %v", presences(got), err, want)
	}
	j = newJob(t, 3) // the view has left one out
	j.rank(0, func(int) *flight.Snapshot { return j.snapshot(0, 0) })
	j.rank(2, func(int) *flight.Snapshot {
		s := j.snapshot(2, 0)
		s.View = flight.View{Epoch: 2, Active: []int{0, 2}}
		return s
	})
	got, err = j.sampler(secret).Sample(t.Context(), 0)
	if want := []string{"present", "vacant", "present"}; err != nil || !slices.Equal(presences(got), want) {
		t.Errorf("%v, %v, want %v", presences(got), err, want)
	}
	liar := newJob(t, 2)
	liar.rank(0, func(int) *flight.Snapshot { return liar.snapshot(1, 0) })
	got, err = liar.sampler(secret).Sample(t.Context(), 0)
	if err != nil || got.Ranks[0].Snapshot != nil || !strings.Contains(got.Ranks[0].Detail, "takes itself for rank 1") {
		t.Errorf("%+v, %v", got.Ranks[0], err)
	}
}

// A job may grow: its free slots are not ranks that have not joined yet, or are dead.
func TestSampleOfGrowableJob(t *testing.T) {
	ctx := t.Context()
	j := newJob(t, 6)
	j.first = 3
	joined, mute := false, false
	var mu sync.Mutex
	set := func(p *bool) {
		mu.Lock()
		defer mu.Unlock()
		*p = true
	}
	answer := func(rank int) bootstrap.Store {
		return j.rank(rank, func(int) *flight.Snapshot {
			mu.Lock()
			defer mu.Unlock()
			if mute {
				return nil
			}
			s := j.snapshot(rank, 0)
			if s.Joined = joined; joined {
				s.View = flight.View{Epoch: 1, Active: []int{0, 1, 2}}
			} else {
				s.Size, s.View = 3, flight.View{}
			}
			return s
		})
	}
	s := j.sampler(secret)
	sampled := func(s *Sampler, want ...string) {
		t.Helper()
		got, err := s.Sample(ctx, 0)
		if err != nil || !slices.Equal(presences(got), want) {
			t.Errorf("%v, %v, want %v", presences(got), err, want)
		}
	}
	answer(0)
	first := answer(1)
	sampled(s, "present", "present", "absent", "vacant", "vacant", "vacant")
	answer(2)
	set(&joined)
	sampled(s, "present", "present", "present", "vacant", "vacant", "vacant")
	set(&mute)
	first.Close()
	sampled(s, "silent", "silent", "silent", "vacant", "vacant", "vacant")
	sampled(j.sampler(secret), "silent", "absent", "silent", "vacant", "vacant", "vacant") // it knows no view
}

// Ranks that do not answer are one finding, and the sample says where each is.
func TestSampleOfEndedProcesses(t *testing.T) {
	j := newJob(t, 3)
	for r := range 3 {
		j.register(r, uint64(r)+1, portstest.Address(t))
	}
	got, err := j.sampler(secret).Sample(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	if f := flight.Diagnose(got.Ranks); len(f) != 1 || f[0].Text != "ranks 0-2 do not answer: connection refused" {
		t.Errorf("%+v", f)
	}
	for _, r := range got.Ranks {
		if len(r.Addrs) != 1 || r.Where == "" {
			t.Errorf("%+v", r)
		}
	}
}

// pair is two samples of a job, a second apart, in which each rank has done 100 operations.
func pair(n int) (now, before *Sample) {
	j := &job{size: n}
	t0 := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	make := func(at time.Time, done int) *Sample {
		s := &Sample{Job: "train", Time: at}
		for r := range n {
			snap := j.snapshot(r, done)
			snap.Time, snap.Since = at, t0.Add(-time.Minute)
			end := at.Add(-50 * time.Millisecond)
			snap.Groups[0].Last = &flight.Operation{Group: 1, Number: uint64(done), Kind: "allreduce", Ended: &end,
				Outcome: "ok"}
			s.Ranks = append(s.Ranks, flight.Rank{Rank: r, Presence: flight.Present,
				Where: fmt.Sprintf("pid %d on node", 100+r), Snapshot: snap})
		}
		return s
	}
	return make(t0.Add(time.Second), 400), make(t0, 300)
}

func in(s *flight.Snapshot, number uint64, ago time.Duration, waits ...int) {
	s.Groups[0].Running = &flight.Operation{Group: 1, Number: number, Kind: "allreduce", Call: "allreduce #9",
		Started: s.Time.Add(-ago), Outcome: "running", WaitsFor: waits}
	s.Groups[0].Number = number
}

// elsewhere puts the process of a rank into an operation of another job, in which it is rank 0.
func elsewhere(s *flight.Snapshot, ago time.Duration, waits ...int) {
	o := flight.Operation{Group: 1, Number: 17, Kind: "allreduce", Call: "allreduce #17", Started: s.Time.Add(-ago),
		Outcome: "running", WaitsFor: waits}
	s.Others = []flight.Other{{Job: "pair", Joined: true, Groups: []flight.Group{{ID: 1, Size: 2, Running: &o}}}}
}

func TestMake(t *testing.T) {
	now, before := pair(3)
	r := Make(now, before, false)
	if r.Interval != 1 || r.Epoch != 1 || len(r.Findings) != 0 || len(r.Stragglers) != 0 {
		t.Errorf("%+v", r)
	}
	for _, x := range r.Ranks {
		if x.Operations != 100 || x.Bytes != 100_000 || x.State != "computing" || !x.Plain {
			t.Errorf("%+v", x)
		}
	}
	before.Ranks[1].Snapshot.Incarnation = "another" // has begun anew
	if r := Make(now, before, false); r.Ranks[1].Operations != 0 {
		t.Errorf("rates across incarnations: %+v", r.Ranks[1])
	}
	if r := Make(now, nil, false); r.Interval != 0 || r.Ranks[0].Operations != 0 {
		t.Errorf("rates of one sample: %+v", r)
	}
	// Stragglers: a little is noise, and while watching only what is new counts.
	now, before = pair(3)
	for r := range 2 {
		now.Ranks[r].Snapshot.Links = []flight.Link{{Rank: 2, Waited: 5}}
		before.Ranks[r].Snapshot.Links = []flight.Link{{Rank: 2, Waited: 4.95}}
	}
	if r := Make(now, before, false); len(r.Stragglers) != 1 || r.Stragglers[0].Rank != 2 ||
		r.Stragglers[0].Kept != 10 {
		t.Errorf("%+v", r.Stragglers)
	}
	if r := Make(now, before, true); len(r.Stragglers) != 0 {
		t.Errorf("%+v", r.Stragglers)
	}
}

func TestStates(t *testing.T) {
	for _, c := range []struct {
		change func(r *flight.Rank)
		want   string
		plain  bool
	}{
		{func(r *flight.Rank) {}, "computing", true},
		{func(r *flight.Rank) {
			e := r.Snapshot.Time.Add(-41 * time.Second)
			r.Snapshot.Groups[0].Last.Ended = &e
		}, "computing for 41 s", true},
		{func(r *flight.Rank) { in(r.Snapshot, 9, time.Millisecond, 1) }, "in allreduce #9", true},
		{func(r *flight.Rank) { in(r.Snapshot, 9, 3*time.Second, 1) }, "in allreduce #9 for 3.0 s, waits for rank 1",
			false},
		{func(r *flight.Rank) { in(r.Snapshot, 9, 3*time.Second, 1); r.Snapshot.Groups[0].Running.Group = 4 },
			"in allreduce #9 of group 4 for 3.0 s, waits for rank 1", false},
		{func(r *flight.Rank) { in(r.Snapshot, 1, 3*time.Second, 1, 2); r.Snapshot.Joined = false },
			"joining: in allreduce #1 for 3.0 s, waits for ranks 1 and 2", false},
		{func(r *flight.Rank) {
			r.Snapshot.Messages = []flight.Operation{{Kind: "recv", Call: "recv from rank 1 (x)",
				Started: r.Snapshot.Time.Add(-2 * time.Second), WaitsFor: []int{1}}}
		}, "in recv from rank 1 (x) for 2.0 s, waits for rank 1", false},
		{func(r *flight.Rank) { r.Snapshot.Messages = []flight.Operation{{Kind: "recv", Async: true}} }, "computing",
			true},
		{func(r *flight.Rank) { r.Snapshot.Groups[0].Error = "rank 1 failed" }, "failed: rank 1 failed", false},
		{func(r *flight.Rank) {
			g := &r.Snapshot.Groups[0]
			g.Last.Outcome, g.LastError = "timed out", "allreduce #9 timed out"
		}, "computing; its latest operation failed: allreduce #9 timed out", false},
		{func(r *flight.Rank) { // another group has gone on since
			g := r.Snapshot.Groups[0]
			last := *g.Last
			last.Outcome, g.LastError = "timed out", "allreduce #9 timed out"
			before := g.Last.Ended.Add(-time.Millisecond)
			last.Ended, g.Last = &before, &last
			r.Snapshot.Groups = append([]flight.Group{g}, r.Snapshot.Groups...)
		}, "computing", true},
		{func(r *flight.Rank) { r.Snapshot.Groups = nil }, "has closed its groups", true},
		{func(r *flight.Rank) { elsewhere(r.Snapshot, 3*time.Second, 0, 1) },
			"in allreduce #17 of job pair for 3.0 s, waits for rank 0, and rank 1 of that job", false},
		{func(r *flight.Rank) { elsewhere(r.Snapshot, time.Millisecond, 1); r.Snapshot.Joined = false },
			"in allreduce #17 of job pair", true},
		{func(r *flight.Rank) {
			elsewhere(r.Snapshot, 3*time.Second, 1)
			in(r.Snapshot, 9, 4*time.Second, 1)
		}, "in allreduce #9 for 4.0 s, waits for rank 1", false},
		{func(r *flight.Rank) {
			elsewhere(r.Snapshot, 3*time.Second, 1)
			g := &r.Snapshot.Others[0].Groups[0]
			g.Running, g.Error = nil, "rank 1 failed"
		}, "computing", true},
		{func(r *flight.Rank) {
			elsewhere(r.Snapshot, 3*time.Second, 1)
			g := &r.Snapshot.Others[0].Groups[0]
			g.Last, g.Running, g.LastError = g.Running, nil, "it timed out"
			g.Last.Ended, g.Last.Outcome = &r.Snapshot.Time, "timed out"
		}, "computing; its latest operation failed: it timed out (in job pair)", false},
		{func(r *flight.Rank) {
			elsewhere(r.Snapshot, 3*time.Second, 1)
			r.Snapshot.Groups, r.Snapshot.Others[0].Groups[0].Running = nil, nil
		}, "has closed its groups", true},
		{func(r *flight.Rank) { r.Snapshot.Others = []flight.Other{{Job: "pair", Silent: true}} },
			"computing, or is in job pair, whose state is not to be had", false},
		{func(r *flight.Rank) { *r = flight.Rank{Presence: flight.Silent, Detail: "no answer within 1s"} },
			"does not answer: no answer within 1s", false},
		{func(r *flight.Rank) { *r = flight.Rank{Presence: flight.Vacant} }, "empty slot", true},
		{func(r *flight.Rank) { *r = flight.Rank{Presence: flight.Absent} }, "has not joined yet", false},
	} {
		now, _ := pair(1)
		c.change(&now.Ranks[0])
		if got, plain := state(&flight.Beside(now.Ranks)[0]); got != c.want || plain != c.plain {
			t.Errorf("%q, %v; want %q, %v", got, plain, c.want, c.plain)
		}
	}
}

func TestText(t *testing.T) {
	now, before := pair(4)
	for r := range 3 {
		in(now.Ranks[r].Snapshot, 401, 40*time.Second, 3)
		now.Ranks[r].Snapshot.Links = []flight.Link{{Rank: 3, Waited: 40}}
	}
	end := now.Time.Add(-41 * time.Second)
	now.Ranks[3].Snapshot.Groups[0].Last.Ended = &end
	var b bytes.Buffer
	Make(now, before, false).Text(&b, Style{})
	want := `job train: 4 ranks, epoch 1, 100 operations and 100 kB a second and rank
! rank 3 has not entered allreduce #401 (last finished #400, 41 s ago); ranks 0-2 wait for it, 40 s so far
~ rank 3 keeps others waiting: they have waited 2m0s for it, it 0.0 s for others

rank  pid  host  epoch  op/s     B/s  state
   0  100  node      1   100  100 kB  in allreduce #401 for 40 s, waits for rank 3
   1  101  node      1   100  100 kB  in allreduce #401 for 40 s, waits for rank 3
   2  102  node      1   100  100 kB  in allreduce #401 for 40 s, waits for rank 3
   3  103  node      1   100  100 kB  computing for 41 s
`
	if got := b.String(); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	b.Reset()
	Make(now, before, false).Text(&b, Style{Colour: true, Width: 60})
	for line := range strings.Lines(b.String()) {
		if n := len([]rune(strings.NewReplacer("\x1b[0m", "", "\x1b[1m", "", "\x1b[31m", "", "\x1b[33m", "", "\x1b[90m",
			"").Replace(strings.TrimSuffix(line, "\n")))); n > 60 {
			t.Errorf("%d columns: %q", n, line)
		}
	}
	// Many ranks: those that are remarkable, and a sum of the others.
	now, before = pair(100)
	now.Ranks[77] = flight.Rank{Rank: 77, Presence: flight.Silent, Where: "pid 177 on node"}
	b.Reset()
	Make(now, before, false).Text(&b, Style{Rows: 3})
	if got := b.String(); !strings.Contains(got, "\n  77  177  node                       does not answer\n") ||
		!strings.HasSuffix(got, "and 97 ranks more: 97 computing\n") || strings.Count(got, "\n") != 8 {
		t.Error(got)
	}
	now, _ = pair(2)
	b.Reset()
	Make(now, nil, false).Text(&b, Style{})
	if got := b.String(); !strings.HasPrefix(got, "job train: 2 ranks, epoch 1\nnothing is stuck\n\n") {
		t.Error(got)
	}
	for r := range now.Ranks {
		now.Ranks[r] = flight.Rank{Rank: r, Presence: flight.Unreadable, Where: "pid 100 on node"}
	}
	b.Reset()
	Make(now, nil, false).Text(&b, Style{})
	if got := b.String(); !strings.Contains(got, "\n~ no rank can be read") ||
		strings.Contains(got, "nothing is stuck") {
		t.Error(got)
	}
}

// A live screen has room for what is wrong and for some ranks, and says how much it leaves out.
func TestTextFits(t *testing.T) {
	now, before := pair(64)
	for r := range 40 { // each is a finding of its own, and most are not shown
		now.Ranks[r] = flight.Rank{Rank: r, Presence: flight.Silent, Where: fmt.Sprintf("pid %d on node-%d", 1000+r, r),
			Detail: fmt.Sprintf("an error that is longer than a line of a narrow terminal, and ends with %d", r)}
	}
	now.Ranks[40].Snapshot.Endpoints = make([]stats.Endpoint, 30)
	for r := range 3 {
		now.Ranks[50+r].Snapshot.Links = []flight.Link{{Rank: 60 + r, Waited: 9}}
	}
	report := Make(now, before, false)
	quiet, was := pair(64)
	few, old := pair(2)
	for _, c := range []struct {
		name   string
		report *Report
		Style
		full bool // all lines are used
		cut  bool // by the screen: one finding and one rank do not fit
	}{
		{"large", report, Style{Width: 200, Lines: 200}, false, false},
		{"usual", report, Style{Width: 80, Lines: 23}, true, false},
		{"narrow", report, Style{Width: 40, Lines: 11}, true, true},
		{"wide and low", report, Style{Width: 200, Lines: 11}, true, false},
		{"high and narrow", report, Style{Width: 40, Lines: 60}, true, false},
		{"nothing stuck", Make(quiet, was, false), Style{Width: 80, Lines: 23}, true, false},
		{"nothing stuck, narrow", Make(quiet, was, false), Style{Width: 40, Lines: 11}, true, false},
		{"few", Make(few, old, false), Style{Width: 40, Lines: 11}, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			var b bytes.Buffer
			c.report.Text(&b, c.Style)
			text := b.String()
			lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
			if c.cut {
				lines = lines[:min(len(lines), c.Lines)]
				text = strings.Join(lines, "\n")
			}
			if n := len(lines); n > c.Lines || c.full && n < c.Lines-2 {
				t.Errorf("%d lines of %d\n%s", n, c.Lines, text)
			}
			for _, line := range lines {
				if n := len([]rune(line)); n > c.Width {
					t.Errorf("%d columns of %d: %q", n, c.Width, line)
				}
			}
			shown, more := 0, 0
			for _, line := range lines {
				if n := 0; strings.HasPrefix(line, "! and ") {
					fmt.Sscanf(line, "! and %d more", &n)
					more += n
				} else if strings.HasPrefix(line, "! ") {
					shown++
				}
			}
			if shown+more != len(c.report.Findings) || shown == 0 && more > 0 {
				t.Errorf("%d findings are shown, and %d more of %d\n%s", shown, more, len(c.report.Findings), text)
			}
			if !strings.Contains(text, "state\n") || !c.cut && !strings.Contains(text, "computing") {
				t.Errorf("no ranks\n%s", text)
			}
		})
	}
}

func TestTextOfEndpoints(t *testing.T) {
	now, before := pair(2)
	idle := stats.Endpoint{Name: "cache", ID: "01", Connected: 2, Regions: 3,
		Modes: map[string]int{"sealed": 1, "plain": 1}}
	busy := stats.Endpoint{Name: "wei\u202eghts", ID: "02", Done: map[string]stats.Count{"read": {N: 300, Bytes: 3000}},
		Served:  map[string]stats.Count{"write": {N: 100, Bytes: 2e6}},
		Pending: map[string]int{"recv": 1, "read": 2}, Waiting: stats.Count{N: 1, Bytes: 5},
		Offered: stats.Count{N: 2, Bytes: 1e6}, Failed: map[string]uint64{"broken": 3},
		Refused: map[string]uint64{"rights": 1, "no region": 4}, Broken: 1, Strangers: 2}
	was := busy
	was.Done, was.Served = map[string]stats.Count{"read": {N: 100, Bytes: 1000}}, nil
	now.Ranks[0].Snapshot.Endpoints = []stats.Endpoint{idle, busy}
	before.Ranks[0].Snapshot.Endpoints = []stats.Endpoint{idle, was}
	now.Ranks[1].Snapshot.Endpoints = []stats.Endpoint{{ID: "03"}} // it has just been made
	seconds := now.Ranks[0].Snapshot.Time.Sub(before.Ranks[0].Snapshot.Time).Seconds()
	r := Make(now, before, false)
	if got, want := r.Ranks[0].Endpoints[1], (Rate{300 / seconds, 2002000 / seconds}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	var b bytes.Buffer
	r.Text(&b, Style{})
	_, got, _ := strings.Cut(b.String(), "\n\nrank  endpoint")
	for _, want := range []string{
		"      peers          mode  regions  op/s     B/s  state\n",
		"   0  cache                2  plain+sealed        3     0     0 B  idle\n",
		`   0  "wei\u202eghts"      0                      0   300  2.0 MB  `,
		"  3 under way (2 read, 1 recv), 1 message not received (5 B), 2 messages waiting at the sender (1.0 MB), " +
			"3 failed (3 broken), 5 refused (4 no region, 1 rights), 1 session lost, 2 connections refused\n",
		"   1  03                   0                      0     0     0 B  idle\n",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is not in\n%s", want, got)
		}
	}
	b.Reset()
	r.Text(&b, Style{Rows: 2})
	if got := b.String(); !strings.HasSuffix(got, "\nand 1 endpoint more\n") {
		t.Error(got)
	}
}

func TestEndpointByItself(t *testing.T) {
	at := time.Now()
	before := &EndpointSample{at, stats.Endpoint{Name: "cache", ID: "01",
		Served: map[string]stats.Count{"read": {N: 100, Bytes: 1e6}}}}
	now := &EndpointSample{at.Add(2 * time.Second), before.State}
	now.State.Served = map[string]stats.Count{"read": {N: 300, Bytes: 5e6}}
	now.State.Connected, now.State.Modes = 2, map[string]int{"sealed": 2}
	now.State.Regions, now.State.RegionBytes, now.State.Sent, now.State.Received = 1, 4096, 6e6, 1000
	var b bytes.Buffer
	r := MakeEndpoint(now, before)
	r.Text(&b, Style{})
	if want := "endpoint cache: 4.1 kB in 1 region, 6.0 MB sent, 1.0 kB received\n\n" +
		"endpoint  peers    mode  regions  op/s     B/s  state\n" +
		"cache         2  sealed        1   100  2.0 MB  idle\n"; b.String() != want {
		t.Errorf("got\n%swant\n%s", b.String(), want)
	}
	out, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Interval   float64 `json:"interval_seconds"`
		Endpoint   stats.Endpoint
		Operations float64 `json:"operations_per_second"`
		Bytes      float64 `json:"bytes_per_second"`
	}
	if err := json.Unmarshal(out, &got); err != nil || got.Interval != 2 || got.Operations != 100 || got.Bytes != 2e6 ||
		got.Endpoint.Name != "cache" || got.Endpoint.Served["read"].N != 300 {
		t.Errorf("%s, %v", out, err)
	}
	// One sample has no rates, and counters that have begun anew have none.
	b.Reset()
	if r := MakeEndpoint(now, nil); r.Interval != 0 || r.Rate != (Rate{}) {
		t.Errorf("%+v", r)
	} else {
		r.Text(&b, Style{})
	}
	if !strings.HasSuffix(b.String(), "\ncache         2  sealed        1             idle\n") {
		t.Error(b.String())
	}
	if r := MakeEndpoint(&EndpointSample{now.Time, before.State}, &EndpointSample{at, now.State}); r.Rate != (Rate{}) {
		t.Errorf("%+v", r)
	}
}

func TestJSON(t *testing.T) {
	now, before := pair(2)
	now.Ranks[1] = flight.Rank{Rank: 1, Presence: flight.Silent}
	elsewhere(now.Ranks[0].Snapshot, time.Millisecond, 1)
	b, err := json.Marshal(Make(now, before, false))
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Job      string
		Findings []struct{ Kind, Text string }
		Ranks    []struct {
			Rank       int
			Presence   string
			State      string
			Operations float64 `json:"operations_per_second"`
			Snapshot   *flight.Snapshot
		}
	}
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	if len(got.Ranks[0].Snapshot.Others) != 1 || len(got.Ranks[0].Snapshot.Others[0].Groups) != 1 {
		t.Errorf("what a rank says of other jobs is not shown as it is: %s", b)
	}
	if got.Job != "train" || len(got.Findings) != 1 || got.Findings[0].Kind != "gone" || len(got.Ranks) != 2 ||
		got.Ranks[0].Operations != 100 || got.Ranks[0].Snapshot == nil ||
		got.Ranks[1].Presence != "silent" || got.Ranks[1].State != "does not answer" || got.Ranks[1].Snapshot != nil {
		t.Errorf("%s", b)
	}
}

func TestFromFiles(t *testing.T) {
	now, before := pair(3)
	in(now.Ranks[0].Snapshot, 401, 40*time.Second, 2)
	now.Ranks[0].Snapshot.Reason = "timeout"
	now.Ranks[0].Snapshot.Operations = []flight.Operation{{Group: 1, Call: "allreduce #400 (x)",
		Started: now.Time.Add(-45 * time.Second), Ended: &now.Time, Outcome: "ok"},
		*now.Ranks[0].Snapshot.Groups[0].Running}
	r := FromFiles([]*flight.Snapshot{before.Ranks[0].Snapshot, now.Ranks[0].Snapshot, before.Ranks[1].Snapshot})
	if len(r.Ranks) != 3 || r.Ranks[0].Snapshot != now.Ranks[0].Snapshot || r.Ranks[2].Presence != flight.Unknown {
		t.Fatalf("%+v", r)
	}
	if len(r.Findings) != 1 || r.Findings[0].Rank != 2 || !strings.Contains(r.Findings[0].Text,
		"there is no flight record of it") {
		t.Errorf("%+v", r.Findings)
	}
	var b bytes.Buffer
	r.Operations(&b, 10, Style{})
	for _, want := range []string{"rank 0 (pid 100 on node, timeout) at ",
		"45 s before  allreduce #400 (x): ok after 45 s\n", "40 s before  allreduce #9: running for 40 s\n"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is not in\n%s", want, b.String())
		}
	}
	path, err := now.Ranks[0].Snapshot.Write(filepath.Join(t.TempDir(), "a"))
	if err != nil {
		t.Fatal(err)
	}
	if s, err := flight.ReadFile(path); err != nil || s.Reason != "timeout" {
		t.Errorf("%+v, %v", s, err)
	}
}

// A rank whose process has ended badly is at fault, and its state says so, also if its latest
// record was made for another reason. A record of an earlier process of the rank does not count.
func TestFilesOfEndedRanks(t *testing.T) {
	now, before := pair(3)
	now.Ranks[1].Snapshot.Reason = "failure"
	before.Ranks[1].Snapshot.Reason = "exited with code 7"
	before.Ranks[2].Snapshot.Reason = "exited with code 9"
	before.Ranks[2].Snapshot.Incarnation = "another"
	var all []*flight.Snapshot
	for i := range now.Ranks {
		all = append(all, before.Ranks[i].Snapshot, now.Ranks[i].Snapshot)
	}
	r := FromFiles(all)
	var b bytes.Buffer
	r.Text(&b, Style{})
	if len(r.Findings) != 1 || r.Findings[0].Kind != flight.FindingEnded || r.Findings[0].Rank != 1 {
		t.Errorf("%+v", r.Findings)
	}
	if x := r.Ranks[1]; !strings.HasPrefix(x.State, "exited with code 7; before: computing") || x.Plain {
		t.Error(x.State)
	}
	if !r.Ranks[2].Plain || strings.Contains(b.String(), "nothing is stuck") {
		t.Errorf("%s", b.String())
	}
}

// The epoch is the latest of all ranks, though files of the recorder name no active ranks.
func TestEpochOfFiles(t *testing.T) {
	now, _ := pair(2)
	for i, epoch := range []uint64{3, 1} {
		now.Ranks[i].Snapshot.View.Epoch, now.Ranks[i].Snapshot.View.Active = epoch, nil
	}
	if r := FromFiles([]*flight.Snapshot{now.Ranks[0].Snapshot, now.Ranks[1].Snapshot}); r.Epoch != 3 {
		t.Errorf("epoch %d, want 3", r.Epoch)
	}
}

func TestQuantities(t *testing.T) {
	for x, want := range map[float64]string{0: "0", 1: "1", 1.25: "1.2", 12.3: "12", 999.4: "999", 999.6: "1.0 k",
		5_432_100: "5.4 M", 2e10: "20 G"} {
		if got := quantity(x); got != want {
			t.Errorf("%v: %q, want %q", x, got, want)
		}
	}
	if got := Size(1536); got != "1.5 kB" {
		t.Error(got)
	}
}
