//go:build linux

package rig

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"tutti/pg"
)

const (
	markVariable    = "RIG_MARK"    // in the environment of every process of a stage, and of nothing else
	controlVariable = "RIG_CONTROL" // makes a test binary a rank; the path of the stage's socket
)

// A Part is a rank's side of a protocol of the test: the verb "play" passes the rank's end of its
// connection to it, and Rank.Play returns the test's end.
type Part func(out *json.Encoder, in *json.Decoder) (code int)

// Main ends a TestMain. It makes the test binary a rank, or a store, if a Stage has started it as
// one. part may be nil.
func Main(m *testing.M, part Part) {
	if kind := os.Getenv(storeVariable); kind != "" {
		os.Exit(storeMain(StoreKind(kind)))
	}
	if path := os.Getenv(controlVariable); path != "" {
		os.Exit(rankMain(path, part))
	}
	code := m.Run()
	if tutti.dir != "" {
		os.RemoveAll(tutti.dir)
	}
	os.Exit(code)
}

// Command is a command to a rank. Every command is answered by one Reply, in order.
type Command struct {
	// Verb is one of
	//	join     pg.Join, all from the environment
	//	verify   Verify with Seed and Counts
	//	allreduce  pg.AllReduce alone, likewise
	//	loop     answers at once and goes on with Verify, Seed+1, Seed+2, …, until an error or stop
	//	await    answers when the loop has done Steps rounds, or has ended
	//	stop     answers at once; the loop ends on all ranks in the same round, with no error, if any was told so
	//	ended    answers when the loop has ended, with its error
	//	chaos    answers at once and goes on, from its Join on, with verified rounds until something is wrong or
	//	         stop, whichever ranks are lost meanwhile; Seed is the number of this incarnation
	//	look     answers with what a rank in chaos does
	//	usage    answers with what the process holds
	//	send     pg.Send of Steps elements to Peer
	//	recv     pg.Recv of as many from Peer
	//	barrier  Group.Barrier
	//	replace  pg.AllReduce until a rank is lost, and then Group.Admit until all ranks are there again
	//	exhaust  opens files until the process may not open more
	//	close    Group.Close, after giving those back
	//	exit     no answer; ends with Code
	//	play     no answer; the rank goes on as the Part that its Main was given
	Verb   string
	Seed   uint64
	Counts []int
	Steps  int
	Peer   int
	Code   int
}

// Reply is a rank's answer.
type Reply struct {
	Fault     *Fault        `json:",omitempty"` // nil: success
	Took      time.Duration // by the command; of ended, from the loop's last good step to its end
	Steps     int           // of the loop
	Topology  string        // of the group, if there is one
	LocalSize int
	Chaos     *Chaos `json:",omitempty"` // look
	Usage     *Usage `json:",omitempty"` // usage
}

// Fault is an error as sent between processes.
type Fault struct {
	Kind  string // rank, timeout, mismatch, argument, closed, wrong (a collective's result is) or other
	Ranks []int  // the ranks at fault: RankError.Rank, TimeoutError.Missing, both of MismatchError
	Text  string
}

func (f *Fault) Error() string { return f.Kind + ": " + f.Text }

// Names reports whether the fault names exactly these ranks, or some of them.
func (f *Fault) Names(ranks ...int) bool {
	for _, r := range f.Ranks {
		found := false
		for _, want := range ranks {
			found = found || r == want
		}
		if !found {
			return false
		}
	}
	return len(f.Ranks) > 0
}

func faultOf(err error) *Fault {
	if err == nil {
		return nil
	}
	f := &Fault{Kind: "other", Text: err.Error()}
	var rank *pg.RankError
	var timeout *pg.TimeoutError
	var mismatch *pg.MismatchError
	var argument *pg.ArgumentError
	var wrong *WrongError
	switch {
	case errors.As(err, &wrong):
		f.Kind = "wrong"
	case errors.As(err, &rank):
		f.Kind, f.Ranks = "rank", []int{rank.Rank}
	case errors.As(err, &timeout):
		f.Kind = "timeout"
		for _, m := range timeout.Missing {
			f.Ranks = append(f.Ranks, m.Rank)
		}
	case errors.As(err, &mismatch):
		f.Kind, f.Ranks = "mismatch", []int{mismatch.RankA, mismatch.RankB}
	case errors.As(err, &argument):
		f.Kind = "argument"
	case errors.Is(err, pg.ErrClosed):
		f.Kind = "closed"
	}
	if sub := (*subgroupError)(nil); errors.As(err, &sub) {
		for i, slot := range f.Ranks {
			f.Ranks[i] = sub.rank(slot)
		}
		f.Text = "in a subgroup: " + f.Text
	}
	return f
}

// hello is a rank's first message.
type hello struct {
	PID     int
	Rank    string // as the launcher set it; "": it is on standby
	Standby string
}

// loop is the rounds of collectives that a rank runs by itself.
type loop struct {
	mu    sync.Mutex
	more  *sync.Cond
	steps int
	stop  bool
	over  bool
	err   error
	last  time.Time
	took  time.Duration

	// In chaos.
	group *pg.Group
	joins int
	doing string
}

func (l *loop) run(g *pg.Group, c Command) {
	l.last = time.Now()
	for i := uint64(1); ; i++ {
		err := l.round(g, c.Seed+i, c.Counts)
		l.mu.Lock()
		now := time.Now()
		l.took = now.Sub(l.last)
		if err != nil {
			l.over = true
			if err != errStopped {
				l.err = err
			}
		} else {
			l.steps++
			l.last = now
		}
		l.more.Broadcast()
		l.mu.Unlock()
		if f := faultOf(err); f != nil && (f.Kind == "wrong" || f.Kind == "argument") {
			g.Close() // the others need not wait for this rank
		}
		if err != nil {
			return
		}
	}
}

var errStopped = errors.New("stopped")

func (l *loop) round(g *pg.Group, seed uint64, counts []int) error {
	l.mu.Lock()
	stop := []int32{0}
	if l.stop {
		stop[0] = 1
	}
	l.mu.Unlock()
	ctx := context.Background()
	if err := pg.AllReduce(ctx, g, stop, pg.Max); err != nil {
		return err
	}
	if stop[0] != 0 {
		return errStopped
	}
	return Verify(ctx, g, seed, counts)
}

// replace waits until a rank is lost, which shows by an error or, with retry, by the view, and
// admits another in its place.
func replace(ctx context.Context, g *pg.Group) error {
	var lost *pg.RankError
	complete := func() bool { return len(g.View().Active) == g.Size() }
	for lost == nil && complete() {
		if err := pg.AllReduce(ctx, g, []int32{1}, pg.Sum); err != nil && !errors.As(err, &lost) {
			return err
		}
	}
	for {
		if _, err := g.Admit(ctx); err != nil && !errors.As(err, &lost) {
			return err
		} else if err == nil && complete() {
			return nil
		}
	}
}

// alone lists the verbs that do not need a group.
var alone = []string{"join", "exit", "chaos", "look", "usage", "stop", "await", "ended"}

func rankMain(path string, part Part) int {
	conn, err := net.Dial("unix", path)
	if err != nil {
		fmt.Fprintln(os.Stderr, "rig:", err)
		return 99
	}
	out := json.NewEncoder(conn)
	out.Encode(hello{os.Getpid(), os.Getenv("RANK"), os.Getenv("TUTTI_STANDBY")})
	in := json.NewDecoder(bufio.NewReader(conn))
	var g *pg.Group
	var hoard []*os.File
	l := &loop{}
	l.more = sync.NewCond(&l.mu)
	ctx := context.Background()
	for {
		var c Command
		if err := in.Decode(&c); err != nil {
			select {} // the test is over, and ends this process
		}
		if c.Verb == "play" {
			return part(out, in)
		}
		var r Reply
		began := time.Now()
		if g == nil && !slices.Contains(alone, c.Verb) {
			r.Fault = &Fault{Kind: "other", Text: c.Verb + " before join"}
		} else {
			switch c.Verb {
			case "join":
				var joined *pg.Group
				if joined, err = pg.Join(ctx, pg.Config{}); err == nil {
					g = joined
				}
				r.Fault = faultOf(err)
			case "verify":
				r.Fault = faultOf(Verify(ctx, g, c.Seed, c.Counts))
			case "loop":
				go l.run(g, c)
			case "chaos":
				go l.chaos(c)
			case "look":
				r.Chaos = l.look()
				l.mu.Lock()
				r.Fault, r.Steps = faultOf(l.err), l.steps
				l.mu.Unlock()
			case "usage":
				r.Usage = Use()
			case "stop":
				l.mu.Lock()
				l.stop = true
				l.mu.Unlock()
			case "await", "ended":
				l.mu.Lock()
				for !l.over && (c.Verb == "ended" || l.steps < c.Steps) {
					l.more.Wait()
				}
				r.Fault, r.Steps = faultOf(l.err), l.steps
				if c.Verb == "ended" {
					began = time.Now().Add(-l.took)
				}
				l.mu.Unlock()
			case "send":
				r.Fault = faultOf(pg.Send(ctx, g, make([]int32, c.Steps), c.Peer, 0))
			case "recv":
				_, err = pg.Recv(ctx, g, make([]int32, c.Steps), c.Peer, 0)
				r.Fault = faultOf(err)
			case "allreduce":
				r.Fault = faultOf(allReduce(ctx, g, c.Seed, c.Counts))
			case "barrier":
				r.Fault = faultOf(g.Barrier(ctx))
			case "replace":
				r.Fault = faultOf(replace(ctx, g))
			case "exhaust":
				for err = nil; err == nil; {
					var f *os.File
					if f, err = os.Open(os.DevNull); err == nil {
						hoard = append(hoard, f)
					}
				}
			case "close":
				for _, f := range hoard {
					f.Close()
				}
				r.Fault = faultOf(g.Close())
			case "exit":
				return c.Code
			default:
				r.Fault = &Fault{Kind: "other", Text: "unknown verb " + c.Verb}
			}
		}
		r.Took = time.Since(began)
		if g != nil {
			r.Topology, r.LocalSize = g.Topology(), g.LocalSize()
		}
		if err := out.Encode(r); err != nil {
			select {}
		}
	}
}
