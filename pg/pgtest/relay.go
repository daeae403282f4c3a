package pgtest

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	mrand "math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"tutti/internal/backoff"
)

// relay forwards all connections between the ranks, and those to the store.
type relay struct {
	l       *net.TCPListener
	token   string
	execute func(ctx context.Context, r *relay, o order) error
	ctx     context.Context
	stop    context.CancelFunc
	wg      sync.WaitGroup

	mu      sync.Mutex
	rules   []Rule
	changed chan struct{} // closed when the rules are replaced
	conns   map[*net.TCPConn]struct{}
	links   map[*link]struct{}
	timers  []*time.Timer
	holds   func() // of a test: called before data wait for the end of a cut
}

// link is a connection that the relay forwards. The relay's mutex guards what changes.
type link struct {
	ends   [2]int
	fail   context.CancelFunc // ends the forwarding
	cut    [2]time.Time       // since when nothing passes from this end; zero: it does
	broken bool               // by a cut that has lasted long enough
}

func newRelay(ctx context.Context, execute func(ctx context.Context, r *relay, o order) error) (*relay, error) {
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return nil, err
	}
	r := &relay{l: l, token: rand.Text(), execute: execute, changed: make(chan struct{}),
		conns: map[*net.TCPConn]struct{}{}, links: map[*link]struct{}{}}
	r.ctx, r.stop = context.WithCancel(ctx)
	r.wg.Go(func() {
		for {
			c, err := l.AcceptTCP()
			if err != nil {
				return
			}
			r.wg.Go(func() { r.serve(c) })
		}
	})
	return r, nil
}

// variable returns the value of relayVariable for a rank.
func (r *relay) variable(rank int) string {
	return fmt.Sprintf("%s=%s/%d/%s", relayVariable, r.l.Addr(), rank, r.token)
}

func (r *relay) close() {
	r.stop()
	r.l.Close()
	r.mu.Lock()
	for c := range r.conns {
		c.Close()
	}
	for _, t := range r.timers {
		t.Stop()
	}
	r.mu.Unlock()
	r.wg.Wait()
}

// after calls f after d, unless the relay is closed by then.
func (r *relay) after(d time.Duration, f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.timers = append(r.timers, time.AfterFunc(d, f))
}

func (r *relay) set(rules []Rule) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()        // for all: they break together
	for k := range r.links { // a rank that has noticed one break may have ordered this
		r.breakLate(k, now)
	}
	r.rules = rules
	for k := range r.links {
		r.cutLink(k, now)
	}
	close(r.changed)
	r.changed = make(chan struct{})
}

// between combines the rules for one direction. The channel is closed when they change.
func (r *relay) between(from, to int) (all Rule, changed <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.rule(from, to), r.changed
}

// rule is between, with the mutex held.
func (r *relay) rule(from, to int) (all Rule) {
	for _, u := range r.rules {
		if (u.From == nil || slices.Contains(u.From, from)) && (u.To == nil || slices.Contains(u.To, to)) {
			all.Cut, all.Delay, all.Loss, all.Break = all.Cut || u.Cut, max(all.Delay, u.Delay), max(all.Loss, u.Loss),
				max(all.Break, u.Break)
		}
	}
	return all
}

// join makes a link of a connection that has been made.
func (r *relay) join(a, b int, fail context.CancelFunc) *link {
	r.mu.Lock()
	defer r.mu.Unlock()
	k := &link{ends: [2]int{a, b}, fail: fail}
	r.links[k] = struct{}{}
	r.cutLink(k, time.Now())
	return k
}

func (r *relay) leave(k *link) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.links, k)
}

// cutLink notes since when a link is cut by the rules. A cut that was there before goes on. The
// mutex is held.
func (r *relay) cutLink(k *link, now time.Time) {
	for i, from := range k.ends {
		if !r.rule(from, k.ends[1-i]).Cut {
			k.cut[i] = time.Time{}
		} else if k.cut[i].IsZero() {
			k.cut[i] = now
		}
	}
}

// breakLate breaks a link if a cut of either direction has lasted long enough. Otherwise it returns
// when one will have; zero: never. The mutex is held.
func (r *relay) breakLate(k *link, now time.Time) (due time.Time) {
	for i, from := range k.ends {
		u := r.rule(from, k.ends[1-i])
		if t := k.cut[i].Add(u.Break); u.Cut && u.Break > 0 && (due.IsZero() || t.Before(due)) {
			due = t
		}
	}
	if !due.IsZero() && !now.Before(due) {
		k.broken = true
		k.fail()
	}
	return due
}

// track makes close close c too.
func (r *relay) track(c *net.TCPConn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ctx.Err() != nil {
		c.Close()
		return false
	}
	r.conns[c] = struct{}{}
	return true
}

func (r *relay) untrack(c *net.TCPConn) {
	c.Close()
	r.mu.Lock()
	delete(r.conns, c)
	r.mu.Unlock()
}

func (r *relay) serve(c *net.TCPConn) {
	if !r.track(c) {
		return
	}
	defer r.untrack(c)
	in := bufio.NewReader(io.LimitReader(c, 1<<20)) // the client sends nothing more before the answer
	var q request
	line, err := in.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, &q)
	}
	if err == nil && q.Token != r.token {
		err = errors.New("not of this test")
	}
	var to *net.TCPConn
	if err == nil && q.Do != nil {
		var o order
		if err = json.Unmarshal(q.Do, &o); err == nil {
			err = r.execute(r.ctx, r, o)
		}
	} else if err == nil {
		to, err = r.dial(q)
	}
	answer := "ok"
	if errors.Is(err, syscall.ECONNREFUSED) {
		answer = "refused"
	} else if err != nil {
		answer = strings.ReplaceAll(err.Error(), "\n", "; ")
	}
	_, err = io.WriteString(c, answer+"\n")
	if to == nil {
		return
	}
	defer r.untrack(to)
	if err != nil || !r.track(to) {
		return
	}
	works, fail := context.WithCancel(r.ctx)
	k := r.join(q.From, q.To, fail)
	defer r.leave(k)
	var both, watch sync.WaitGroup
	watch.Go(func() {
		if r.breaks(works, k) {
			for _, end := range []*net.TCPConn{c, to} {
				end.SetLinger(0) // a reset
				end.Close()
			}
		}
	})
	defer watch.Wait()
	defer fail()
	both.Go(func() { r.pump(works, c, to, q.From, q.To) })
	both.Go(func() { r.pump(works, to, c, q.To, q.From) })
	both.Wait()
}

// breaks waits until a link is broken (true), or ctx has ended (false). Nothing passes when a rank
// can notice the break.
func (r *relay) breaks(ctx context.Context, k *link) bool {
	for {
		ended := ctx.Err() != nil
		r.mu.Lock()
		due := r.breakLate(k, time.Now())
		broken, changed := k.broken, r.changed
		r.mu.Unlock()
		if broken || ended {
			return broken
		}
		var late <-chan time.Time
		if !due.IsZero() {
			t := time.NewTimer(time.Until(due))
			defer t.Stop()
			late = t.C
		}
		select {
		case <-changed:
		case <-late:
		case <-ctx.Done():
		}
	}
}

// dial makes the second half of a connection, when the rules allow both directions.
func (r *relay) dial(q request) (*net.TCPConn, error) {
	for _, way := range [2][2]int{{q.From, q.To}, {q.To, q.From}} {
		if err := r.open(r.ctx, way[0], way[1]); err != nil {
			return nil, err
		}
		rule, _ := r.between(way[0], way[1])
		if !pause(r.ctx, rule.Delay) {
			return nil, r.ctx.Err()
		}
	}
	d := net.Dialer{Timeout: 5 * time.Second}
	c, err := d.DialContext(r.ctx, "tcp", q.Addr)
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

// open waits while the direction is cut. It returns ctx's error if ctx has ended.
func (r *relay) open(ctx context.Context, from, to int) error {
	for {
		rule, changed := r.between(from, to)
		if !rule.Cut || ctx.Err() != nil {
			return ctx.Err()
		}
		if r.holds != nil {
			r.holds()
		}
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
}

// pause waits for d, and returns false if ctx ends before.
func pause(ctx context.Context, d time.Duration) bool { return d <= 0 || backoff.Sleep(ctx, d) }

const (
	packet     = 1448 // bytes of TCP's payload
	retransmit = 200 * time.Millisecond
	inFlight   = 64 // pieces between the two ends of a direction
	pieceSize  = 64 << 10
)

// piece is the result of one read; nil data: the end.
type piece struct {
	due  time.Time
	data []byte
}

// pump copies from src to dst as the rules say, until one of them or ctx ends.
func (r *relay) pump(ctx context.Context, src, dst *net.TCPConn, from, to int) {
	wire := make(chan piece, inFlight)
	var reader sync.WaitGroup
	reader.Go(func() {
		defer close(wire)
		buf := make([]byte, pieceSize)
		var last time.Time
		for {
			n, err := src.Read(buf)
			rule, _ := r.between(from, to)
			late := rule.Delay
			for range (n + packet - 1) / packet {
				for again := retransmit; rule.Loss > 0 && again < time.Minute &&
					mrand.Float64() < rule.Loss; again *= 2 {
					late = max(late, rule.Delay+again)
				}
			}
			p := piece{due: time.Now().Add(late)}
			if p.due.Before(last) {
				p.due = last
			}
			last = p.due
			if n > 0 {
				p.data = slices.Clone(buf[:n])
				select {
				case wire <- p:
				case <-ctx.Done():
					return
				}
			}
			if err != nil {
				p.data = nil
				select {
				case wire <- p:
				case <-ctx.Done():
				}
				return
			}
		}
	})
	for p := range wire {
		if !pause(ctx, time.Until(p.due)) {
			break
		}
		if err := r.open(ctx, from, to); err != nil {
			break
		}
		if p.data == nil {
			dst.CloseWrite()
			break
		}
		if _, err := dst.Write(p.data); err != nil {
			break
		}
	}
	src.CloseRead() // src's data has no reader any more
	for range wire {
	}
	reader.Wait()
}
