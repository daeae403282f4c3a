package pg

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"tutti/internal/files"
	"tutti/internal/metrics"
	"tutti/pg/flight"
	"tutti/pg/internal/observe"
)

// look returns a rank's snapshot as a client gets it, aged, as if everything had happened some
// seconds earlier.
func look(t *testing.T, g *Group, ops int) *flight.Snapshot {
	t.Helper()
	text, err := g.job.status(t.Context(), ops)
	if err != nil {
		t.Fatal(err)
	}
	s, err := flight.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	s.Time = s.Time.Add(5 * time.Second)
	return s
}

// until looks at a rank until what it says is right.
func until(t *testing.T, g *Group, what string, right func(s *flight.Snapshot) bool) *flight.Snapshot {
	t.Helper()
	for late := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		s := look(t, g, 10)
		if right(s) {
			return s
		}
		if time.Now().After(late) {
			b, _ := s.JSON(true)
			t.Fatalf("rank %d never %s:\n%.3000s", g.rank, what, b)
		}
	}
}

func diagnose(t *testing.T, gs []*Group) (texts []string) {
	t.Helper()
	var ranks []flight.Rank
	for r, g := range gs {
		ranks = append(ranks, flight.Rank{Rank: r, Presence: flight.Present, Snapshot: look(t, g, 0)})
	}
	for _, f := range flight.Diagnose(ranks) {
		texts = append(texts, f.Text)
	}
	return texts
}

// TestStatusNamesAwaitedRank has two of three ranks wait in a collective for the third.
func TestStatusNamesAwaitedRank(t *testing.T) {
	gs, err := Local(3, Config{Timeout: 30 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	var wg sync.WaitGroup
	run := func(r int, f func(g *Group) error) {
		wg.Go(func() {
			if err := f(gs[r]); err != nil {
				t.Errorf("rank %d: %v", r, err)
			}
		})
	}
	sum := func(g *Group) error { return AllReduce(ctx, g, make([]float32, 8), Sum) }
	for r := range gs {
		run(r, func(g *Group) error {
			for range 5 { // the second and later ones are hot
				if err := sum(g); err != nil {
					return err
				}
			}
			return g.Barrier(ctx)
		})
	}
	wg.Wait()
	if texts := diagnose(t, gs); len(texts) != 0 {
		t.Errorf("nothing is wrong, yet %q", texts)
	}
	s := look(t, gs[1], 10)
	if s.Rank != 1 || s.Size != 3 || !s.Joined || s.PID != os.Getpid() || s.View.Epoch != 1 ||
		!slices.Equal(s.View.Active, []int{0, 1, 2}) || s.Recorded != 6 || len(s.Groups) != 1 {
		t.Errorf("%+v", s)
	}
	if s.Totals["allreduce"] != (flight.Total{Operations: 5, Bytes: 160}) || s.Totals["barrier"].Operations != 1 {
		t.Errorf("%+v", s.Totals)
	}
	for i, o := range s.Operations[:5] {
		if o.Number != uint64(i+1) || o.Outcome != "ok" || o.Algorithm == "" || o.Kind != "allreduce" ||
			o.DType != "float32" || o.Reduction != "sum" || o.Elements != 8 || o.Bytes != 32 || o.Ended == nil {
			t.Errorf("operation %d: %+v", i, o)
		}
	}
	if g := s.Groups[0]; g.ID != 1 || g.Finished != 6 || g.Number != 6 || g.Running != nil || g.Last == nil ||
		g.Last.Call != s.Operations[5].Call || len(g.Peers) == 0 {
		t.Errorf("%+v", g)
	}
	if len(s.Links) == 0 || !s.Links[0].Up || s.Links[0].Transport != "inproc" || s.Links[0].BytesReceived == 0 ||
		s.Links[0].FramesSent == 0 {
		t.Errorf("%+v", s.Links)
	}

	run(0, sum)
	run(1, sum)
	waits := func(s *flight.Snapshot) bool {
		o := s.Groups[0].Running
		return o != nil && len(o.WaitsFor) > 0
	}
	s = until(t, gs[1], "waits", waits)
	direct := gs[1] // the rank that waits for rank 2 itself, and not for one that does
	if !slices.Contains(s.Groups[0].Running.WaitsFor, 2) {
		direct = gs[0]
	}
	s = until(t, gs[0], "waits", waits)
	if o := s.Groups[0].Running; o.Number != 7 || o.Outcome != "running" || o.Ended != nil ||
		s.Groups[0].Finished != 6 || s.Operations[len(s.Operations)-1].Number != 7 {
		t.Errorf("%+v", s.Groups[0])
	}
	texts := diagnose(t, gs)
	// ranks 0 and 1 may not have taken each other's message yet
	for late := time.Now().Add(10 * time.Second); len(texts) != 1 && time.Now().Before(late); texts = diagnose(t, gs) {
		runtime.Gosched()
	}
	if len(texts) != 1 || !strings.HasPrefix(texts[0], "rank 2 has not entered allreduce #7 (last finished #6, ") ||
		!strings.Contains(texts[0], "; ranks 0 and 1 wait for it, ") {
		t.Errorf("%q", texts)
	}
	// They wait for it so long that they look at the clock, and sleep.
	until(t, direct, "has waited for rank 2", func(s *flight.Snapshot) bool {
		return slices.ContainsFunc(s.Links, func(l flight.Link) bool { return l.Rank == 2 && l.Waited > 0 }) &&
			s.Groups[0].Running.Awaited != nil && *s.Groups[0].Running.Awaited == 2
	})
	run(2, sum)
	wg.Wait()
	if texts := diagnose(t, gs); len(texts) != 0 {
		t.Errorf("nothing is wrong any more, yet %q", texts)
	}

	// A message: one that is waited for, and one that is not.
	run(0, func(g *Group) error { _, err := Recv(ctx, g, make([]int64, 3), 1, 9); return err })
	w := gs[2].Start(RecvOp{X: BufferOf(make([]int64, 3)), From: AnyRank, Tag: AnyTag})
	s = until(t, gs[0], "receives", func(s *flight.Snapshot) bool { return len(s.Messages) == 1 })
	if o := s.Messages[0]; o.Call != "recv from rank 1 (int64, 3 elements, tag 9)" || o.Async ||
		!slices.Equal(o.WaitsFor, []int{1}) {
		t.Errorf("%+v", o)
	}
	s = until(t, gs[2], "receives", func(s *flight.Snapshot) bool { return len(s.Messages) == 1 })
	if o := s.Messages[0]; o.Call != "recv from any rank (int64, 3 elements, any tag)" || !o.Async ||
		len(o.WaitsFor) != 0 {
		t.Errorf("%+v", o)
	}
	if texts := diagnose(t, gs); len(texts) != 1 || !strings.HasPrefix(texts[0],
		"rank 1 has not sent what rank 0 waits for: recv from rank 1") {
		t.Errorf("%q", texts)
	}
	run(1, func(g *Group) error {
		return errors.Join(Send(ctx, g, make([]int64, 3), 0, 9), Send(ctx, g, make([]int64, 3), 2, 1))
	})
	wg.Wait()
	if err := w.Wait(ctx); err != nil {
		t.Error(err)
	}
	s = look(t, gs[0], 10)
	if len(s.Messages) != 0 || s.Totals["recv"] != (flight.Total{Operations: 1, Bytes: 24}) {
		t.Errorf("%+v %+v", s.Messages, s.Totals)
	}

	// A queued operation.
	late := gs[0].Start(AllReduceOp{Dst: BufferOf(make([]float32, 4)), Op: Sum})
	second := gs[0].Start(BarrierOp{})
	until(t, gs[0], "has one queued", func(s *flight.Snapshot) bool {
		return s.Groups[0].Queued == 2 &&
			s.Groups[0].Running != nil
	})
	// to be seen in what was queued
	for began := flight.Now(); time.Duration(flight.Now()-began) < 50*time.Millisecond; {
		time.Sleep(time.Millisecond)
	}
	for r := 1; r < 3; r++ {
		run(r, func(g *Group) error {
			return errors.Join(AllReduce(ctx, g, make([]float32, 4), Sum), g.Barrier(ctx))
		})
	}
	wg.Wait()
	if err := errors.Join(late.Wait(ctx), second.Wait(ctx)); err != nil {
		t.Error(err)
	}
	s = look(t, gs[0], 1)
	if len(s.Operations) != 1 || s.Operations[0].Kind != "barrier" || s.Operations[0].Queued < 0.02 ||
		s.Operations[0].Queued > 30 {
		t.Errorf("%+v", s.Operations)
	}
	for _, g := range gs {
		g.Close()
	}
	if text, err := gs[0].job.status(t.Context(), 0); !errors.Is(err, ErrClosed) {
		t.Errorf("closed, yet %s, %v", text, err)
	}
}

// TestStatusOfWaitsBesidesCalls: a rank that waits for a started message, or in Agree, is seen to
// wait.
func TestStatusOfWaitsBesidesCalls(t *testing.T) {
	gs, err := Local(2, Config{Timeout: 30 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range gs {
		defer g.Close()
	}
	ctx, ended := t.Context(), make(chan error, 1)
	stuck := func(text string) {
		t.Helper()
		if texts := diagnose(t, gs); len(texts) != 1 || !strings.HasPrefix(texts[0], text+"; rank 0 waits for it, ") {
			t.Errorf("%q, want %q", texts, text)
		}
	}
	w := gs[0].Start(RecvOp{X: BufferOf(make([]int64, 3)), From: 1, Tag: 9})
	idle := func() {
		t.Helper()
		if texts := diagnose(t, gs); len(texts) != 0 {
			t.Errorf("its program does not wait, yet %q", texts)
		}
	}
	idle()
	var leave [2]context.CancelFunc
	for i := range leave {
		short, cancel := context.WithCancel(ctx)
		leave[i] = cancel
		go func() { ended <- w.Wait(short) }()
	}
	until(t, gs[0], "waits twice", func(*flight.Snapshot) bool {
		gs[0].job.proxy.Lock()
		defer gs[0].job.proxy.Unlock()
		return w.at.Load().msg.waits == 2
	})
	for i, see := range []func(){func() {
		stuck("rank 1 has not sent what rank 0 waits for: recv from rank 1 (int64, 3 elements, tag 9)")
	}, idle} {
		leave[i]()
		if err := <-ended; err != context.Canceled {
			t.Errorf("a call of Wait that was cancelled: %v", err)
		}
		see()
	}
	go func() { ended <- w.Wait(ctx) }()
	if err := errors.Join(Send(ctx, gs[1], make([]int64, 3), 0, 9), <-ended); err != nil {
		t.Fatal(err)
	}
	agree := func(g *Group) error { _, err := g.Agree(ctx, true); return err }
	go func() { ended <- agree(gs[0]) }()
	until(t, gs[0], "agrees", func(s *flight.Snapshot) bool {
		o := s.Groups[0].Running
		return o != nil && o.Kind == flight.Agreeing && slices.Equal(o.WaitsFor, []int{1})
	})
	stuck("rank 1 has not called agree #1")
	if err := errors.Join(agree(gs[1]), <-ended); err != nil {
		t.Fatal(err)
	}
	if texts := diagnose(t, gs); len(texts) != 0 {
		t.Errorf("nothing is wrong any more, yet %q", texts)
	}
}

// TestStatusOfSubgroups: ranks are those of the job, also in groups that number them otherwise.
func TestStatusOfSubgroups(t *testing.T) {
	each(t, 4, Config{}, func(ctx context.Context, g *Group) error {
		sub, err := g.Split(ctx, g.Rank()/2, -g.Rank()) // 1 and 0, 3 and 2
		if err != nil {
			return err
		}
		defer sub.Close()
		if err := Broadcast(ctx, sub, make([]int32, 5), 0); err != nil {
			return err
		}
		s := look(t, sub, 10)
		if len(s.Groups) != 2 || s.Groups[0].ID != 1 || s.Groups[0].Ranks != nil {
			return fmt.Errorf("groups %+v", s.Groups)
		}
		first := g.Rank()/2*2 + 1
		if x := s.Groups[1]; x.Size != 2 || !slices.Equal(x.Ranks, []int{first, first - 1}) || x.Last == nil ||
			x.Last.Root != first || x.Last.Number != 1 || x.Peers != nil &&
			x.Peers[0].Rank != first^g.Rank()^(first-1) {
			return fmt.Errorf("subgroup %+v %+v", x, x.Last)
		}
		if g.Rank() != first {
			brief, cancel := context.WithCancel(ctx)
			defer cancel()
			ended := make(chan error, 1)
			go func() { ended <- sub.Barrier(brief) }()
			until(t, sub, "waits for the other", func(s *flight.Snapshot) bool {
				o := s.Groups[1].Running
				return o != nil && slices.Equal(o.WaitsFor, []int{first})
			})
			cancel()
			if err := <-ended; !errors.As(err, new(*TimeoutError)) {
				return fmt.Errorf("%v", err)
			}
			x := look(t, sub, 1).Groups[1]
			for _, text := range []string{x.Error, x.LastError} {
				if !strings.Contains(text, fmt.Sprintf("on rank %d after ", g.Rank())) ||
					!strings.Contains(text, fmt.Sprintf("waiting for rank %d (", first)) {
					return fmt.Errorf("subgroup %q", text)
				}
			}
		}
		return g.Barrier(ctx)
	})
}

func TestErrorsInJob(t *testing.T) {
	cause := errors.New("a cause")
	for _, c := range []struct{ err, want error }{
		{&RankError{Rank: 0, Also: []int{1}, Reporter: 1}, &RankError{Rank: 4, Also: []int{2}, Reporter: 2}},
		{&TimeoutError{Missing: []Seen{{1, "x"}}, Reporter: 0}, &TimeoutError{Missing: []Seen{{2, "x"}}, Reporter: 4}},
		{&MismatchError{RankA: 0, RankB: 1}, &MismatchError{RankA: 4, RankB: 2}},
		{&abortedError{Rank: 1, Err: cause}, &abortedError{Rank: 2, Err: cause}},
		{&graphError{"x", &RankError{Rank: 1}}, &graphError{"x", &RankError{Rank: 2, Reporter: 4}}},
		{ErrClosed, ErrClosed},
		{nil, nil},
	} {
		if got := inJob(c.err, []int{4, 2}); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%#v, want %#v", got, c.want)
		}
	}
}

// The state of a rank has the other jobs that its process has joined, but not those of Local.
func TestStatusOfSeveralJobs(t *testing.T) {
	m, err := NewMember(t.Context(), Config{Secret: []byte("the secret of this test"), Timeout: 20 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	local, err := Local(1, Config{Job: "local"})
	if err != nil {
		t.Fatal(err)
	}
	defer local[0].Close()
	var groups []*Group
	for _, name := range []string{"first", "second"} {
		g, err := m.Form(t.Context(), name, []string{m.Handle()})
		if err != nil {
			t.Fatal(err)
		}
		defer g.Close()
		groups = append(groups, g)
	}
	of := func(job string) func(o flight.Other) bool {
		return func(o flight.Other) bool { return o.Job == job && o.Joined && len(o.Groups) == 1 }
	}
	s := until(t, groups[0], "tells of the other job", func(s *flight.Snapshot) bool {
		return slices.ContainsFunc(s.Others, of("second"))
	})
	if slices.ContainsFunc(s.Others, of("local")) || slices.ContainsFunc(s.Others, of("first")) {
		t.Errorf("%+v", s.Others)
	}
	if s := look(t, local[0], 0); s.Others != nil {
		t.Errorf("%+v", s.Others)
	}
}

// TestStatusOfFailures: a failed group reports its error, and counts it.
func TestStatusOfFailures(t *testing.T) {
	gs, err := Local(2, Config{Timeout: 30 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	errs := make(chan error, 2)
	go func() { errs <- AllReduce(t.Context(), gs[0], make([]float32, 8), Sum) }()
	go func() { errs <- AllReduce(t.Context(), gs[1], make([]float32, 9), Sum) }()
	var mismatch *MismatchError
	for range gs {
		if err := <-errs; !errors.As(err, &mismatch) {
			t.Errorf("%v", err)
		}
	}
	for _, g := range gs {
		s := look(t, g, 5)
		if s.Failures["mismatch"] != 1 || s.Groups[0].Error == "" || s.Groups[0].Running != nil ||
			s.Groups[0].Last == nil || s.Groups[0].Last.Outcome != "mismatch" || len(s.Totals) != 0 {
			t.Errorf("%+v %+v", s, s.Groups)
		}
	}
	if texts := diagnose(t, gs); len(texts) == 0 || !strings.HasPrefix(texts[0], "the group has failed at rank") ||
		!strings.Contains(texts[0], ": ranks disagree: rank ") {
		t.Errorf("%q", texts)
	}
	for _, g := range gs {
		go func() { errs <- g.Recover(t.Context()) }()
	}
	if err := errors.Join(<-errs, <-errs); err != nil {
		t.Fatal(err)
	}
	if texts := diagnose(t, gs); len(texts) != 0 {
		t.Errorf("the ranks have recovered, yet %q", texts)
	}
	for _, g := range gs {
		g.Close()
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	each(t, 1, Config{}, func(_ context.Context, g *Group) error {
		if err := g.Barrier(ended); !errors.Is(err, context.Canceled) {
			return fmt.Errorf("%v", err)
		}
		if s := look(t, g, 5); s.Failures["cancelled"] != 1 || s.Groups[0].Running != nil {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
}

// alone joins a job of one rank.
func alone(t *testing.T, cfg Config) (*Group, error) {
	t.Helper()
	for _, name := range []string{"RANK", "WORLD_SIZE", "TUTTI_LOG_DIR", "TUTTI_METRICS"} {
		t.Setenv(name, "")
	}
	cfg.Size, cfg.Job = 1, "alone"
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	return Join(t.Context(), cfg)
}

func names(t *testing.T, dir string) (all []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

// TestLogDir: the last operations are in a file while the rank lives, and a signal or a failure
// writes everything.
func TestLogDir(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "logs", "deep")
	own := make(chan os.Signal, 1) // the program's
	signal.Notify(own, syscall.SIGUSR1)
	defer signal.Stop(own)
	g, err := alone(t, Config{LogDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Barrier(t.Context()); err != nil {
		t.Fatal(err)
	}
	files := names(t, dir)
	if len(files) != 1 || !strings.HasPrefix(files[0], "flight-rank0-") || !strings.HasSuffix(files[0], ".bin") {
		t.Fatalf("%q", files)
	}
	s, err := flight.ReadFile(filepath.Join(dir, files[0])) // as if the process were dead
	if err != nil || len(s.Operations) != 1 || s.Operations[0].Call != "barrier #1" ||
		s.Operations[0].Outcome != "ok" || s.Job != "alone" {
		t.Errorf("%+v, %v", s, err)
	}
	for _, want := range []string{"flight-rank0-signal.json", "flight-rank0-signal-2.json"} {
		if err := syscall.Kill(os.Getpid(), syscall.SIGUSR1); err != nil {
			t.Fatal(err)
		}
		select {
		case <-own:
		case <-time.After(20 * time.Second):
			t.Fatal("the program's own handler does not get the signal")
		}
		for late := time.Now().Add(20 * time.Second); !slices.Contains(names(t, dir),
			want); time.Sleep(time.Millisecond) {
			if time.Now().After(late) {
				t.Fatalf("%q, want %s", names(t, dir), want)
			}
		}
		if s, err := flight.ReadFile(filepath.Join(dir, want)); err != nil || s.Reason != "signal" ||
			len(s.Operations) != 1 || len(s.Groups) != 1 {
			t.Errorf("%+v, %v", s, err)
		}
	}
	late, cancel := context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
	defer cancel()
	if err := g.Barrier(late); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	if err := g.Close(); err != nil { // it waits for the file of the barrier's failure
		t.Error(err)
	}
	left := names(t, dir)
	if !slices.Contains(left, "flight-rank0-timeout.json") || slices.Contains(left, files[0]) {
		t.Errorf("after Close there is %q", left)
	}
}

// TestLogDirOfManyGroups: the file has room for the groups that are open, however many were closed.
func TestLogDirOfManyGroups(t *testing.T) {
	dir := t.TempDir()
	g, err := alone(t, Config{LogDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	for range 4500 { // of 16 bytes each
		sub, err := g.Split(t.Context(), 0, 0)
		if err == nil {
			err = sub.Close()
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	sub, err := g.Split(t.Context(), 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer sub.Close()
	if err := sub.Barrier(t.Context()); err != nil {
		t.Fatal(err)
	}
	s, err := flight.ReadFile(filepath.Join(dir, names(t, dir)[0]))
	if err != nil {
		t.Fatal(err)
	}
	if first, last := s.Groups[0], s.Groups[len(s.Groups)-1]; first.ID != 1 || last.Last == nil ||
		last.Last.Call != "barrier #1" {
		t.Errorf("of %d groups the first is %+v, and the last is %+v", len(s.Groups), first, last)
	}
}

// TestUnusableLogDir costs a warning.
func TestUnusableLogDir(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	var log strings.Builder
	g, err := alone(t, Config{LogDir: file, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	if err := g.Barrier(t.Context()); err != nil {
		t.Error(err)
	}
	if !strings.Contains(log.String(), "no flight records are kept") {
		t.Errorf("%q", log.String())
	}
}

// get asks the metrics' server at addr for path.
func get(t *testing.T, addr, path string) (code int, text string) {
	t.Helper()
	c := &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	r, err := c.Get("http://" + addr + path)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	b, _ := io.ReadAll(r.Body)
	return r.StatusCode, string(b)
}

func TestMetrics(t *testing.T) {
	g, err := alone(t, Config{Metrics: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	for range 3 {
		if err := AllReduce(t.Context(), g, make([]float64, 4), Sum); err != nil {
			t.Fatal(err)
		}
	}
	addr := look(t, g, 0).Metrics
	code, text := get(t, addr, "/metrics")
	if code != 200 {
		t.Errorf("%d %s", code, text)
	}
	for _, want := range []string{`tutti_operations_total{job="alone",kind="allreduce",rank="0"} 3`,
		`tutti_operation_bytes_total{job="alone",kind="allreduce",rank="0"} 96`,
		`tutti_view_epoch{job="alone",rank="0"} 1`, `tutti_active_ranks{job="alone",rank="0"} 1`,
		`tutti_failed_groups{job="alone",rank="0"} 0`, `tutti_running_seconds{job="alone",rank="0"} 0`} {
		if !strings.Contains(text, want+"\n") {
			t.Errorf("%s is not in\n%s", want, text)
		}
	}
	if code, _ := get(t, addr, "/"); code != 404 {
		t.Errorf("/ answers %d", code)
	}
	g.Close()
	if c, err := net.Dial("tcp", addr); err == nil {
		c.Close()
		t.Error("it is served after Close")
	}
}

// The groups of a process have one address in common, as that in its environment, and are all
// served there. The name of a job may be any bytes.
func TestMetricsOfSeveralGroups(t *testing.T) {
	m, err := NewMember(t.Context(), Config{Metrics: "127.0.0.1:0", Secret: []byte("the secret of this test"),
		Timeout: 20 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	var groups []*Group
	for _, name := range []string{"a", "b\xff"} {
		g, err := m.Form(t.Context(), name, []string{m.Handle()})
		if err != nil {
			t.Fatal(err)
		}
		defer g.Close()
		groups = append(groups, g)
	}
	addr := look(t, groups[0], 0).Metrics
	if other := look(t, groups[1], 0).Metrics; other != addr {
		t.Fatalf("the groups are served at %s and %s", addr, other)
	}
	first, second := `tutti_view_epoch{job="a",rank="0"} 1`, "tutti_view_epoch{job=\"b\ufffd\",rank=\"0\"} 1"
	for _, closed := range []bool{false, true} {
		if closed {
			groups[0].Close()
		}
		code, text := get(t, addr, "/metrics")
		if code != 200 || strings.Contains(text, first) == closed || !strings.Contains(text, second) {
			t.Errorf("%d %s", code, text)
		}
	}
}

// During a flood of connections, the metrics use few of the rank's descriptors, and clients get
// answers.
func TestMetricsAnswerDuringFlood(t *testing.T) {
	g, err := alone(t, Config{Metrics: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	addr := look(t, g, 0).Metrics
	before, known := files.Open()
	if !known {
		t.Skip("the number of open files is not known here")
	}
	var conns []net.Conn
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	for i := range 10 * metrics.MaxConns {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(c, []string{"", "GET /metr",
			"GET /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n"}[i%3])
		conns = append(conns, c)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}
	for range 3 {
		r, err := client.Get("http://" + addr + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(r.Body)
		r.Body.Close()
		if err != nil || r.StatusCode != http.StatusOK || !strings.Contains(string(body), "tutti_active_ranks") {
			t.Errorf("%v, %v: %.100s", r.Status, err, body)
		}
	}
	// Those that make room are closed at once; a few more may be on their way.
	if after, _ := files.Open(); after-before-len(conns) > metrics.MaxConns+8 {
		t.Errorf("the exporter has %d descriptors", after-before-len(conns))
	}
}

// TestMetricsOfLinks asks the collector of a rank that has peers.
func TestMetricsOfLinks(t *testing.T) {
	each(t, 2, Config{}, func(ctx context.Context, g *Group) error {
		if err := AllReduce(ctx, g, make([]float64, 4), Sum); err != nil {
			return err
		}
		w, err := NewWindow(ctx, g, 4096)
		if err != nil {
			return err
		}
		defer w.Close(ctx)
		if g.Rank() == 0 {
			for range 3 {
				if err := w.Put(ctx, 1, 0, make([]byte, 1000)); err != nil {
					return err
				}
			}
			if err := errors.Join(w.Flush(ctx, 1), w.Get(ctx, 1, 0, make([]byte, 700))); err != nil {
				return err
			}
		}
		if g.Rank() == 0 {
			o, oerr := observe.Start(observe.Config{Self: g.job.identity(), Metrics: "127.0.0.1:0", Proxy: g.job.proxy,
				Groups: g.job.glances, Joined: func() bool { return true }, Logger: g.job.log})
			if oerr != nil {
				return oerr
			}
			defer o.Stop()
			var at flight.Snapshot
			if text, err := o.Status(ctx, 0); err != nil || json.Unmarshal(text, &at) != nil {
				return fmt.Errorf("%s, %v", text, err)
			}
			c := &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
			r, gerr := c.Get("http://" + at.Metrics + "/metrics")
			if gerr != nil {
				return gerr
			}
			defer r.Body.Close()
			b, _ := io.ReadAll(r.Body)
			for _, want := range []string{`tutti_links{job="default",rank="0",transport="inproc"} 1`,
				`tutti_waited_seconds_total{job="default",peer="1",rank="0"}`,
				`tutti_link_sent_bytes_total{job="default",peer="1",rank="0"}`,
				`tutti_window_puts_total{job="default",peer="1",rank="0"} 3`,
				`tutti_window_put_bytes_total{job="default",peer="1",rank="0"} 3000`,
				`tutti_window_gets_total{job="default",peer="1",rank="0"} 1`,
				`tutti_window_get_bytes_total{job="default",peer="1",rank="0"} 700`} {
				if !strings.Contains(string(b), want) {
					err = fmt.Errorf("%s is not in\n%s", want, b)
				}
			}
		}
		return errors.Join(err, g.Barrier(ctx))
	})
}

func TestInvalidMetricsAddress(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	port := taken.Addr().(*net.TCPAddr).Port
	_, err = alone(t, Config{Metrics: fmt.Sprintf("127.0.0.1:%d", port)})
	if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("port %d of 127.0.0.1 is taken", port)) ||
		!strings.Contains(err.Error(), "metrics at") {
		t.Errorf("a taken port: %v", err)
	}
	if _, err := alone(t, Config{Metrics: "9400"}); err == nil || !strings.Contains(err.Error(), "expected HOST:PORT") {
		t.Error(err)
	}
}

// The exchange with which a job begins is no operation of the program: it is not in the totals.
func TestTotalsWithoutTheFirstExchange(t *testing.T) {
	cfg := Config{Secret: []byte("the secret of this test"), Timeout: 20 * time.Second}
	var members []*Member
	var handles []string
	for range 2 {
		m, err := NewMember(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		members, handles = append(members, m), append(handles, m.Handle())
	}
	errs := make(chan error, len(members))
	for _, m := range members {
		go func() {
			errs <- func() error {
				g, err := m.Form(t.Context(), "first", handles)
				if err != nil {
					return err
				}
				defer g.Close()
				for n := range 2 {
					want := map[string]flight.Total{}
					if n > 0 {
						want["allgather"] = flight.Total{Operations: 1, Bytes: 16}
						if err := AllGather(t.Context(), g, make([]int64, 2), make([]int64, 1)); err != nil {
							return err
						}
					}
					if s := look(t, g, 0); !maps.Equal(s.Totals, want) {
						return fmt.Errorf("after %d operations: %+v, want %+v", n, s.Totals, want)
					}
				}
				return g.Barrier(t.Context())
			}()
		}()
	}
	for range members {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
}
