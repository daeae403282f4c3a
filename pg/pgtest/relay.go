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
	timers  []*time.Timer
}

func newRelay(ctx context.Context, execute func(ctx context.Context, r *relay, o order) error) (*relay, error) {
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return nil, err
	}
	r := &relay{l: l, token: rand.Text(), execute: execute, changed: make(chan struct{}),
		conns: map[*net.TCPConn]struct{}{}}
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
	r.rules = rules
	close(r.changed)
	r.changed = make(chan struct{})
}

// between combines the rules for one direction. The channel is closed when they change.
func (r *relay) between(from, to int) (all Rule, changed <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, u := range r.rules {
		if (u.From == nil || slices.Contains(u.From, from)) && (u.To == nil || slices.Contains(u.To, to)) {
			all.Cut, all.Delay, all.Loss, all.Break = all.Cut || u.Cut, max(all.Delay, u.Delay), max(all.Loss, u.Loss),
				max(all.Break, u.Break)
		}
	}
	return all, r.changed
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
	var both, watch sync.WaitGroup
	watch.Go(func() {
		if r.breaks(works, q.From, q.To) {
			fail() // before a rank can notice it and change the rules
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

// breaks waits until a cut of either direction has lasted long enough to break a connection (true),
// or ctx has ended (false).
func (r *relay) breaks(ctx context.Context, a, b int) bool {
	for {
		there, changed := r.between(a, b)
		back, _ := r.between(b, a)
		wait := time.Duration(0)
		for _, u := range []Rule{there, back} {
			if u.Cut && u.Break > 0 && (wait == 0 || u.Break < wait) {
				wait = u.Break
			}
		}
		var late <-chan time.Time
		if wait > 0 {
			t := time.NewTimer(wait)
			defer t.Stop()
			late = t.C
		}
		select {
		case <-changed:
		case <-late:
			return true
		case <-ctx.Done():
			return false
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
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
}

// pause waits for d, and returns false if ctx ends before.
func pause(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return true
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

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
