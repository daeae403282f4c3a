package observe

import (
	"slices"
	"sync"
	"time"

	"tutti/pg/flight"
)

// besideAwait is how long the other Observers of the process have to describe their ranks. It is
// shorter than dumpAwait.
const besideAwait = 100 * time.Millisecond

// started are the Observers that describe their ranks to each other, in the order of Start.
var started struct {
	mu  sync.Mutex // held for this list only: no other lock is waited for with it
	all []*Observer
}

// enlist has the other Observers of the process ask o, until leave.
func (o *Observer) enlist() {
	if !o.cfg.Alone {
		started.mu.Lock()
		started.all = append(started.all, o)
		started.mu.Unlock()
	}
}

func (o *Observer) leave() {
	started.mu.Lock()
	started.all = slices.DeleteFunc(started.all, func(x *Observer) bool { return x == o })
	started.mu.Unlock()
}

// others describes what this process is in the other jobs that it has joined. A job of which it is
// several ranks is left out, and has no others: it is not known which ones belong together. others
// asks all Observers at the same time, and takes besideAwait at most. It is called without a
// proxy's lock, and no goroutine waits for one with another.
func (o *Observer) others() []flight.Other {
	if o.cfg.Alone {
		return nil
	}
	started.mu.Lock()
	all := slices.Clone(started.all)
	started.mu.Unlock()
	ranks := map[string]int{} // of this process, by job
	for _, x := range all {
		ranks[x.cfg.Self.Job]++
	}
	if ranks[o.cfg.Self.Job] > 1 {
		return nil
	}
	type answer struct {
		i int
		flight.Other
	}
	answers := make(chan answer, len(all))
	var out []flight.Other
	for _, x := range all {
		self, i := x.cfg.Self, len(out)
		if ranks[self.Job] == 1 && x != o && x.aside(func() { answers <- answer{i, x.snapshot(0, "").Other()} }) {
			out = append(out, flight.Other{Job: self.Job, Rank: self.Rank, Silent: true})
		}
	}
	late := time.After(besideAwait)
	for range out {
		select {
		case a := <-answers:
			out[a.i] = a.Other
		case <-late:
			return out
		}
	}
	return out
}
