package queue

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"testing"

	"tutti/rdma"
)

// scene is what explore begins with.
type scene struct {
	queues, depth, chunk int
	users                []Batch // of writes; the addresses are set by explore
	lengths              []int   // operations of each user, which are not contiguous
	spread               bool
	// How many faults of each kind may happen.
	posts    int // a post that ends early
	requests int // a request that fails
	fails    int // moving a queue pair to Failed does
	noReset  bool
	cancels  int // the set fails by a call
	forces   int // the owner resets without waiting
	resets   int
	giveUps  int // a user's time ends
}

// play is one run of a scene.
type play struct {
	scene
	choose func(n int) int
	w      *world
	p      *Poller
	s      *Set
	users  []*player
	resets int              // done
	placed map[uint32][]int // notifications on each queue pair
	story  []string
}

type player struct {
	x        *submission
	t        *Transfer
	finished bool
	err      error // of Submit
	success  int   // requests that ended well
}

func newPlay(t testing.TB, sc scene, choose func(n int) int) *play {
	cfg := Config{Chunk: sc.chunk, Spread: 1 << 40}
	if sc.spread {
		cfg.Spread = 1
	}
	p := &play{scene: sc, choose: choose, placed: map[uint32][]int{}}
	p.w, p.p, p.s = newModel(t, sc.queues, sc.depth, 1, cfg)
	for i, q := range p.w.qps {
		q.noReset = sc.noReset
		q.failing = func() {
			if q.state == rdma.StateReady {
				for range p.pick(len(q.sends)+1, "requests that end before the queue pair fails") {
					p.end(i)
				}
			}
		}
		q.posting = func(chain []rdma.SendRequest) {
			flush, state := chain[0].Op == rdma.Write && len(chain[0].Segments) == 0, p.s.queues[i].ledger.state
			if !flush && state != ready {
				p.w.violation("a chunk was posted to a queue that is %v", state)
			}
		}
		q.postFails = func(n int) int {
			if p.posts == 0 {
				return n
			}
			if k := p.pick(n+1, "post all, or so many less one of", n); k > 0 {
				p.posts--
				return k - 1
			}
			return n
		}
	}
	for u, b := range sc.users {
		for i := range sc.lengths[u] {
			// In spread scenes queue pairs take a cut each.
			n, at := uint64(1), uint64(2*i)
			if sc.spread {
				n, at = cut, uint64(2*i*cut)
			}
			b.Ops = append(b.Ops, Op{Kind: rdma.Write, Local: uint64(u+1)<<32 + at, Remote: at, Len: n})
		}
		x := newSubmission(p.s)
		if err := x.plan(&b); err != nil {
			t.Fatal(err)
		}
		p.users = append(p.users, &player{x: x, t: x.t})
	}
	return p
}

func (p *play) pick(n int, what string, args ...any) int {
	i := p.choose(n)
	p.story = append(p.story, fmt.Sprint(i, " of ", n, ": ", what, args))
	return i
}

// userOf returns whose memory a request uses, -1 for a request without memory.
func userOf(r *rdma.SendRequest) int {
	if len(r.Segments) == 0 {
		return -1
	}
	return int(r.Segments[0].Address>>32) - 1
}

// finish ends the part of a user that Submit plays.
func (u *player) finish(err error) {
	u.finished = true
	if err != nil {
		u.x.fail(err)
		if u.x.posted == 0 {
			u.err = err
		}
	}
	u.t.drop(nil)
}

type action struct {
	what string
	do   func() error
}

// end ends the oldest request of a queue pair, well if that has not failed.
func (p *play) end(i int) {
	q := p.w.qps[i]
	if r := &q.sends[0]; q.state == rdma.StateReady {
		if u := userOf(r); u >= 0 {
			p.users[u].success++
		}
		if r.Op == rdma.WriteImm {
			if p.placed[r.Imm] == nil {
				p.placed[r.Imm] = make([]int, len(p.w.qps))
			}
			p.placed[r.Imm][i]++
		}
	}
	q.end(rdma.Success)
}

// actions returns what can happen next.
func (p *play) actions() (all []action) {
	add := func(what string, do func()) {
		all = append(all, action{what, func() error { do(); return nil }})
	}
	for i, u := range p.users {
		if u.finished {
			continue
		}
		add(fmt.Sprint("step of user ", i), func() {
			if _, _, err := u.x.step(); err != nil {
				u.finish(err)
			} else if u.x.phase == done {
				u.finish(nil)
			}
		})
		if p.giveUps > 0 {
			add(fmt.Sprint("end of user ", i, "'s time"), func() {
				p.giveUps--
				u.finish(errors.New("time"))
			})
		}
	}
	for i, q := range p.w.qps {
		if len(q.sends) == 0 || q.state != rdma.StateReady && q.state != rdma.StateFailed {
			continue
		}
		add(fmt.Sprint("end of a request of ", i), func() { p.end(i) })
		if p.requests > 0 && q.state == rdma.StateReady {
			add(fmt.Sprint("failure of a request of ", i), func() {
				p.requests--
				q.end(rdma.RetryExceeded)
			})
		}
	}
	if len(p.w.cqs[0].ready) > 0 {
		add("poll", func() { _, _ = p.p.Poll() })
	}
	if p.cancels > 0 {
		add("cancel", func() {
			p.cancels--
			p.s.Fail(errors.New("cancelled"))
		})
	}
	if p.fails > 0 {
		add("fail", func() {
			p.fails--
			for _, q := range p.w.qps {
				q.failFails = true
			}
			p.s.Fail(errors.New("cancelled"))
		})
	}
	if p.s.Err() == nil {
		return all
	}
	drained := true
	for _, q := range p.s.queues {
		drained = drained && q.drained()
	}
	if p.forces > 0 && !drained {
		add("reset by force", func() {
			p.forces--
			for _, q := range p.s.queues {
				_ = q.purge()
			}
		})
	}
	if p.scene.resets > 0 && drained {
		all = append(all, action{"reset", func() error {
			p.scene.resets--
			p.resets++
			err := p.s.Reset(p.w.t.Context(), func(_ int, qp rdma.QP) error { return qp.Connect(nil) })
			if err != nil && !p.noReset && !p.w.qps[0].failFails && p.s.Err() == nil {
				return err
			}
			return nil
		}})
	}
	return all
}

// check returns the first rule that does not hold.
func (p *play) check() error {
	if p.w.event != "" {
		return errors.New(p.w.event)
	}
	if err := p.s.verify(); err != nil {
		return err
	}
	for i, q := range p.w.qps {
		if u := p.s.Usage()[i]; u.InUse < len(q.sends) {
			return fmt.Errorf("%d requests of queue pair %d, and %d credits in use", len(q.sends), i, u.InUse)
		}
	}
	for i, u := range p.users {
		if n := p.placed[p.scene.users[i].ID|spreadBit]; p.scene.users[i].Notify && n != nil && slices.Min(n) > 0 &&
			u.success != u.want(p) {
			return fmt.Errorf("user %d's notification has come, and %d of %d requests were done", i, u.success,
				u.want(p))
		}
		if !u.finished || !u.t.Ended() {
			continue
		}
		for _, q := range p.w.qps {
			for _, r := range q.sends {
				if userOf(&r) == i {
					return fmt.Errorf("user %d's transfer has ended with %v, and its memory is in use", i, u.t.Err())
				}
			}
		}
		if u.t.Err() == nil && u.err == nil && u.success != u.want(p) {
			return fmt.Errorf("user %d's transfer has ended well, and %d of %d requests did", i, u.success, u.want(p))
		}
		if u.err != nil && u.success > 0 {
			return fmt.Errorf("user %d's Submit has returned %v, and requests were posted", i, u.err)
		}
	}
	return nil
}

// want returns the requests of a user that have memory.
func (u *player) want(p *play) int {
	i := slices.Index(p.users, u)
	return p.lengths[i]
}

// print appends everything that the future depends on.
func (p *play) print(b []byte) []byte {
	put := func(v ...int) {
		for _, x := range v {
			b = binary.AppendVarint(b, int64(x))
		}
	}
	owner := func(t *Transfer) int {
		for i, u := range p.users {
			if u.t == t {
				return i
			}
		}
		return -1
	}
	flag := func(f bool) int {
		if f {
			return 1
		}
		return 0
	}
	put(p.posts, p.requests, p.fails, p.cancels, p.forces, p.scene.resets, p.giveUps, flag(p.s.Err() != nil))
	for i, q := range p.s.queues {
		l := &q.ledger
		put(int(l.state), l.inUse, l.reserved, l.n, flag(q.gone), flag(q.closed), int(q.name.life))
		for j := range l.n {
			r := l.at(j)
			put(int(r.first-l.next), r.n, flag(r.orphan), flag(r.flush), flag(r.ended), int(r.status), owner(r.owner))
		}
		m := p.w.qps[i]
		put(int(m.state), len(m.sends), flag(m.failFails))
		for _, r := range m.sends {
			_, n, number := parseID(r.ID)
			put(userOf(&r), flag(r.Signaled), int(n.life), int(number-l.next))
		}
	}
	for id := range uint32(3) {
		for _, n := range p.placed[id|spreadBit] {
			put(n)
		}
	}
	put(p.resets, len(p.w.cqs[0].ready))
	for _, c := range p.w.cqs[0].ready {
		k, n, number := parseID(c.ID)
		put(int(k), int(n.place), int(n.life), int(number-p.s.queues[n.place].ledger.next), int(c.Status))
	}
	for _, u := range p.users {
		put(flag(u.finished), flag(u.err != nil), u.success, u.t.pending, flag(u.t.err != nil))
		if u.finished {
			continue
		}
		put(int(u.x.phase), u.x.at, u.x.posted)
		for _, q := range u.x.using {
			put(q.q.index, int(q.cursor.left), len(q.requests), flag(q.last), flag(q.held), int(q.life))
		}
	}
	return b
}

// rest lets everything end, without further faults, and checks that it does.
func (p *play) rest() error {
	p.posts, p.requests, p.fails, p.cancels, p.forces, p.scene.resets, p.giveUps = 0, 0, 0, 0, 0, 0, 0
	for range 10000 {
		acts := p.actions()
		if len(acts) == 0 {
			break
		}
		for _, a := range acts {
			if err := a.do(); err != nil {
				return fmt.Errorf("%s: %w", a.what, err)
			}
			if err := p.check(); err != nil {
				return fmt.Errorf("%s: %w", a.what, err)
			}
		}
	}
	for i, u := range p.s.Usage() {
		if u.InUse != 0 || u.Recorded != 0 || u.Reserved != 0 || u.Degraded {
			return fmt.Errorf("at rest queue pair %d has %+v", i, u)
		}
	}
	for i, u := range p.users {
		if !u.finished || !u.t.Ended() {
			return fmt.Errorf("at rest user %d has not ended", i)
		}
		if n := p.placed[p.scene.users[i].ID|spreadBit]; p.scene.users[i].Notify && u.t.Err() == nil && u.err == nil &&
			!slices.Equal(n, []int{1, 1}) {
			return fmt.Errorf("at rest user %d has ended well, with notifications %v", i, n)
		}
	}
	for imm, n := range p.placed {
		if slices.Min(n) != slices.Max(n) && p.resets == 0 && p.s.Err() == nil {
			return fmt.Errorf("at rest notification %#x is on the way for ever: %v", imm, n)
		}
	}
	return nil
}

// explore visits every state that a scene can come to, and lets each come to rest.
func explore(t *testing.T, sc scene) (states, endings int) {
	type branch struct{ chosen, of int }
	var path []branch
	seen := map[string]bool{}
	for {
		at, resting := 0, false
		p := newPlay(t, sc, func(n int) int {
			if n == 1 || resting {
				return 0
			}
			if at == len(path) {
				path = append(path, branch{0, n})
			}
			at++
			return path[at-1].chosen
		})
		var err error
		var buffer []byte
		for err == nil {
			if at == len(path) {
				key := string(p.print(buffer[:0]))
				if seen[key] {
					break
				}
				seen[key] = true
			}
			acts := p.actions()
			if len(acts) == 0 {
				break
			}
			a := acts[p.pick(len(acts), "next")]
			p.story = append(p.story, a.what)
			if err = a.do(); err == nil {
				err = p.check()
			}
		}
		if err == nil {
			resting = true
			endings++
			err = p.rest()
		}
		if err != nil {
			t.Fatalf("%v, after %q", err, p.story)
		}
		for len(path) > 0 && path[len(path)-1].chosen == path[len(path)-1].of-1 {
			path = path[:len(path)-1]
		}
		if len(path) == 0 {
			return len(seen), endings
		}
		path[len(path)-1].chosen++
	}
}

// Every order of steps of two users, of the device and of the poller, with one or two faults.
func TestEveryInterleaving(t *testing.T) {
	two := []Batch{{}, {}}
	notify := []Batch{{Notify: true, ID: 1}, {Notify: true, ID: 2}}
	for name, sc := range map[string]scene{
		"no fault":          {queues: 1, depth: 5, chunk: 2, users: two, lengths: []int{5, 4}},
		"post":              {queues: 1, depth: 4, chunk: 2, users: two, lengths: []int{4, 4}, posts: 2},
		"post, odd depth":   {queues: 1, depth: 5, chunk: 2, users: two, lengths: []int{3, 4}, posts: 2},
		"post, long chunks": {queues: 1, depth: 6, chunk: 3, users: two, lengths: []int{5, 3}, posts: 2, resets: 1},
		"post, depth 2":     {queues: 1, depth: 2, chunk: 2, users: two, lengths: []int{2, 2}, posts: 2, resets: 1},
		"request":           {queues: 1, depth: 4, chunk: 2, users: two, lengths: []int{4, 3}, requests: 1, resets: 1},
		"post, request": {queues: 1, depth: 4, chunk: 2, users: two, lengths: []int{3, 4}, posts: 2, requests: 1,
			resets: 1},
		"time": {queues: 1, depth: 4, chunk: 2, users: two, lengths: []int{5, 3}, giveUps: 2, posts: 1},
		"cancel": {queues: 1, depth: 4, chunk: 2, users: two, lengths: []int{4, 3}, cancels: 1, forces: 1,
			resets: 1},
		"cancel, post": {queues: 1, depth: 4, chunk: 2, users: two, lengths: []int{4, 3}, cancels: 1, posts: 2,
			resets: 1},
		"stuck": {queues: 1, depth: 4, chunk: 2, users: two, lengths: []int{4, 2}, fails: 1, posts: 1, resets: 1},
		"stuck, no reset": {queues: 1, depth: 4, chunk: 2, users: two, lengths: []int{4, 2}, fails: 1, posts: 2,
			noReset: true, forces: 1, resets: 1},
		"spread":       {queues: 2, depth: 2, chunk: 1, users: notify, lengths: []int{2, 2}, spread: true},
		"spread, post": {queues: 2, depth: 4, chunk: 2, users: notify, lengths: []int{2, 2}, spread: true, posts: 1},
		"spread, request": {queues: 2, depth: 2, chunk: 1, users: notify, lengths: []int{2, 2}, spread: true,
			requests: 1},
		"spread, time": {queues: 2, depth: 1, chunk: 1, users: notify, lengths: []int{2, 2}, spread: true,
			giveUps: 1},
		"spread, alone": {queues: 2, depth: 4, chunk: 2, users: notify[:1], lengths: []int{2}, spread: true, posts: 2,
			requests: 1, resets: 1, cancels: 1},
		"spread, resets": {queues: 2, depth: 4, chunk: 1, users: notify[:1], lengths: []int{4}, spread: true,
			cancels: 1,
			resets:  1},
		"resets": {queues: 1, depth: 4, chunk: 2, users: two, lengths: []int{3, 2}, cancels: 2, resets: 2, posts: 1},
	} {
		if raceEnabled && sc.queues*len(sc.users) > 2 {
			continue // one goroutine, many states
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			states, endings := explore(t, sc)
			t.Logf("%d states, %d paths", states, endings)
		})
	}
}
