package roster

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"tutti/bootstrap"
	"tutti/pg/membership"
)

// stopping is a store whose user stands still in a call, as a process does that is stopped.
type stopping struct {
	bootstrap.Store
	ttl, list func()
}

func (s *stopping) TTL() time.Duration {
	s.ttl()
	return 3 * time.Second
}

func (s *stopping) List(ctx context.Context, prefix string) (map[string][]byte, error) {
	if prefix == bootstrap.RankKeys {
		s.list()
	}
	return s.Store.List(context.WithoutCancel(ctx), prefix)
}

// An awaited rank is left alone if it registers again soon after this one: the leases of both may
// have ended while both were stopped, or when the store was away.
func TestAwaitedRankRegistersAgain(t *testing.T) {
	const back = 2 * time.Second // of the other rank, after this one
	for _, what := range []string{"this rank was stopped", "this rank's lease was lost",
		"this rank's lease was lost before its roster's start"} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, 2)
				first, other := f.store, f.open()
				f.record(0, self)
				f.awaited = []int{1}
				continued := make(chan struct{})
				var standstill sync.Once
				switch what {
				case "this rank was stopped":
					f.store = &stopping{Store: first, ttl: func() {
						standstill.Do(func() {
							time.Sleep(10 * time.Second)
							close(continued)
						})
					}}
				case "this rank's lease was lost before its roster's start":
					f.without = time.Now()
					close(continued)
				}
				f.opened = func(s bootstrap.Store) bootstrap.Store {
					close(continued)
					return s
				}
				f.Start()
				if what == "this rank's lease was lost" {
					f.mem.Expire(first)
				}
				<-continued
				time.Sleep(back)
				f.recordIn(other, 1, self+1)
				time.Sleep(time.Minute)
				f.proxy.Lock()
				defer f.proxy.Unlock()
				if v := f.ViewLocked(); !v.Has(1, self+1) {
					t.Errorf("the view is %v: %s", v, f.WhyLocked(1))
				}
			})
		})
	}
}

// A rank that finds others of its job does not take the job for over, however long it was stopped
// since it last looked and found none.
func TestJobIsNotOverForStoppedRank(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, 3)
		first, other := f.store, f.open()
		tried := make(chan struct{})
		f.store = unwritable{first, sync.OnceFunc(func() { close(tried) })}
		looks := 0
		f.opened = func(s bootstrap.Store) bootstrap.Store {
			return &stopping{Store: s, ttl: func() {}, list: func() {
				if looks++; looks == 5 {
					time.Sleep(10 * time.Second)
					f.recordIn(s, 0, self)
					f.recordIn(other, 1, self+1)
				}
			}}
		}
		f.Start()
		<-tried
		f.mem.Expire(first)
		f.until("the job has begun, or the rank is out", func() bool { return f.begun.Load() || f.told("evicted") })
		b, err := other.Get(t.Context(), membership.ViewKey)
		if err != nil {
			t.Fatal(err)
		}
		if first, v, err := membership.DecodeStored(b); err != nil || first != self || !v.Has(0, self) {
			t.Errorf("the view is %v of %d, %v", v, first, err)
		}
		if f.told("evicted") {
			t.Error("the rank is out")
		}
	})
}
