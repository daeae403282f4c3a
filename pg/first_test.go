package pg

import (
	"context"
	"testing"
	"time"

	"tutti/bootstrap"
	"tutti/pg/internal/join"
	"tutti/pg/internal/resync"
)

// unmet returns the jobs of n ranks in this process that have not met. The job has a fixed size.
func unmet(t *testing.T, n int) []*job {
	t.Helper()
	s, err := Config{Size: n, MaxSize: n, Timeout: 20 * time.Second}.resolve(func(string) string { return "" })
	if err != nil {
		t.Fatal(err)
	}
	s.Store = struct{ bootstrap.KV }{}
	sessions, err := join.Local(n, &join.Settings{Size: n, MaxSize: n, Logger: s.Logger})
	if err != nil {
		t.Fatal(err)
	}
	jobs := make([]*job, n)
	for r, ss := range sessions {
		own := *s
		own.Rank = r
		jobs[r] = newJob(&own)
		jobs[r].session, jobs[r].proxy = ss, ss.Proxy
	}
	return jobs
}

// begin begins a job of fixed size.
func (j *job) begin(ctx context.Context) (*Group, error) {
	if j.settings.MaxSize == 1 {
		return j.enterJob(ctx)
	}
	start, err := join.First(ctx, j.session)
	if err != nil {
		return nil, err
	}
	return j.first(ctx, start)
}

// ahead is what rank 1 tells in the exchange after the first view.
func ahead(calls bool) []byte {
	return encodeTold(resync.Told{At: resync.Point{View: 1, Attempt: 1},
		Standing: resync.Standing{Over: 1, Intact: true, Calls: calls, More: told{}}})
}

// What another rank has told before this one is out of Join stays.
func TestStandingThatComesDuringTheMeeting(t *testing.T) {
	jobs := unmet(t, 2)
	met := make(chan error, 1)
	go func() {
		j := jobs[1]
		j.initial.Epoch = 1
		g, err := j.world()
		if err == nil {
			defer g.Close()
			j.proxy.Lock()
			g.msgs.Notice([]int{0}, noticeStanding, ahead(true))
			j.proxy.Unlock()
			if err = g.meet(t.Context()); err == nil {
				g.leave()
			}
		}
		met <- err
	}()
	g, err := jobs[0].begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	jobs[0].proxy.Lock()
	if _, ok := g.sync.Heard(1); !ok {
		t.Error("the standing was lost")
	}
	jobs[0].proxy.Unlock()
	if err := <-met; err != nil {
		t.Error("rank 1:", err)
	}
}

// A rank answers no exchange between its meeting with the others and the end of Join. It does after
// that.
func TestExchangeThatBeginsBeforeJoinEnds(t *testing.T) {
	gs, err := Local(2, Config{})
	if err != nil {
		t.Fatal(err)
	}
	met := make(chan error, len(gs))
	for _, g := range gs {
		go func() {
			err := g.meet(t.Context())
			met <- err
			if err != nil {
				return
			}
			defer g.leave()
			if g.rank == 0 {
				g.hear(1, noticeStanding, ahead(false))
				if at := g.sync.At(); at.Attempt != 0 {
					t.Errorf("the rank has entered %+v during Join", at)
				}
			}
			g.firstView(g.job.initial)
		}()
	}
	for range gs {
		if err := <-met; err != nil {
			t.Fatal(err)
		}
	}
	p := gs[0].job.proxy
	p.Lock()
	if at := gs[0].sync.At(); at.Attempt != 1 {
		t.Errorf("after Join the rank is in exchange %+v", at)
	}
	p.Unlock()
	for _, g := range gs {
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	}
}

// A rank describes itself at any time, during Join too.
func TestStatusDuringJoin(t *testing.T) {
	for n := 1; n <= 2; n++ {
		for range 5 {
			joined := make(chan *Group, n)
			for _, j := range unmet(t, n) {
				look, looked := make(chan struct{}), make(chan struct{})
				go func() {
					defer close(looked)
					for {
						select {
						case <-look:
							return
						default:
						}
						j.proxy.Lock()
						j.glances()
						j.proxy.Unlock()
					}
				}()
				go func() {
					g, err := j.begin(t.Context())
					if err != nil {
						t.Errorf("rank %d of %d: %v", j.session.Self.Rank, n, err)
					}
					close(look)
					<-looked
					joined <- g
				}()
			}
			var all []*Group
			for range n {
				if g := <-joined; g != nil {
					all = append(all, g)
				}
			}
			for _, g := range all {
				if err := g.Close(); err != nil {
					t.Error(err)
				}
			}
		}
	}
}
