package linktest

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"
	"time"

	"tutti/internal/proctest"
	"tutti/mem"
	"tutti/p2p"
)

// peerVariable makes a test binary a peer; its value is the role.
const peerVariable = "LINKTEST_PEER"

// Role is what a peer does with its link. The peer ends when it returns.
type Role func(*Side) error

// roles are those that every test binary with PeerMain has.
var roles = map[string]Role{"echo": echo(false), "echo asleep": echo(true), "drain": drain, "target": target,
	"writer": writer}

// PeerMain makes this process a peer and does not return, if StartPeer has started it. TestMain
// calls it first. open returns the peer's transport; more are roles of the package under test.
func PeerMain(open func(role string) (p2p.Transport, error), more map[string]Role) {
	role := os.Getenv(peerVariable)
	if role == "" {
		return
	}
	if err := peer(role, open, more); err != nil {
		fmt.Fprintf(os.Stderr, "peer %q: %v\n", role, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func peer(name string, open func(string) (p2p.Transport, error), more map[string]Role) error {
	all := maps.Clone(roles)
	maps.Copy(all, more)
	role := all[name]
	if role == nil {
		return errors.New("there is no such role")
	}
	t, err := open(name)
	if err != nil {
		return err
	}
	defer t.Close()
	n := &Node{Host: NewHost(1), T: t}
	if n.Endpoint, err = t.Listen(context.Background(), n.Host); err != nil {
		return err
	}
	fmt.Println(n.ID.Incarnation, hex.EncodeToString(n.Endpoint))
	e := &End{Link: (<-n.In).Link, Host: n.Host}
	defer e.Close()
	s := NewSide(e, n)
	if s == nil {
		s = &Side{End: e, Node: n}
	}
	return role(s)
}

func echo(asleep bool) Role { return func(s *Side) error { Echo(s.End, asleep); return nil } }

func drain(s *Side) error { Drain(s.End); return nil }

// Peer is another process, which is rank 1, with a link to it.
type Peer struct {
	*Side
	Proc     *proctest.Child
	Endpoint []byte // where it listens
}

// StartPeer starts a process of this test binary, which must call PeerMain, and connects n with it.
// The test ends both.
func StartPeer(tb testing.TB, n *Node, role string, prepare ...func(*exec.Cmd)) *Peer {
	tb.Helper()
	cmd := proctest.Again([]string{peerVariable + "=" + role})
	for _, f := range prepare {
		f(cmd)
	}
	p := &Peer{Proc: proctest.RunPiped(tb, cmd)}
	to := p2p.Identity{Rank: 1}
	var text string
	if _, err := fmt.Sscan(p.Proc.Hear(), &to.Incarnation, &text); err != nil {
		tb.Fatal(err)
	}
	var err error
	if p.Endpoint, err = hex.DecodeString(text); err != nil {
		tb.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	l, err := n.T.Dial(ctx, to, p.Endpoint)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := l.Close(); err != nil {
			tb.Error(err)
		}
	})
	e := &End{Link: l, Host: n.Host}
	if p.Side = NewSide(e, n); p.Side == nil {
		p.Side = &Side{End: e, Node: n}
	}
	return p
}

// tell sends the peer a description of memory.
func (s *Side) tell(b []byte) error { return s.Put(&p2p.Header{Len: uint32(len(b))}, b) }

// told waits for a description of the peer's memory.
func (s *Side) told() (*mem.Remote, error) {
	_, b, err := s.Wait()
	if err != nil {
		return nil, err
	}
	to := new(mem.Remote)
	return to, to.UnmarshalBinary(b)
}

// A target has this much memory, of which page bytes before and after what it exposes must not
// change. A writer writes to two slots of it in turn, and to a word behind them.
const (
	slot    = 512<<10 + 24
	page    = 4096
	exposed = 2*slot + 64
	wordAt  = 2 * slot
)

// target exposes memory of its own, which is filled with round 1, to the other end.
func target(s *Side) error {
	r, err := s.alloc(exposed)
	if err != nil {
		return err
	}
	fill(r.Bytes()[:slot], 1)
	b, err := s.expose(r, 0, exposed, mem.Read|mem.Write|mem.Signal)
	if err == nil {
		err = s.tell(b)
	}
	for err == nil {
		err = s.Turn()
	}
	return until(err)
}

// until is nil if err says that the other end has gone.
func until(err error) error {
	if errors.Is(err, p2p.ErrPeerGone) {
		return nil
	}
	return err
}

// writer puts to the memory of the other end, which it is told of, and gets what it has put. After
// the data of round i, its signal says i.
func writer(s *Side) error {
	to, err := s.told()
	local, got := make([]byte, slot), make([]byte, slot)
	for i := 1; err == nil; i++ {
		at := uint64(i % 2 * slot)
		fill(local, i)
		err = s.Await(s.PutTo(local, to, at, p2p.Signal{At: to, Offset: wordAt, Value: uint64(i)}))
		if err == nil && i%3 == 0 {
			err = s.Await(s.GetFrom(got, to, at))
			if err == nil && !filled(got, i) {
				return fmt.Errorf("it gets other bytes than it has put in round %d", i)
			}
		}
		clear(s.Ended)
	}
	return until(err)
}

// RunKilled tests what is left when a peer's process is killed while memory moves between the two.
// The test binary calls PeerMain; open returns this end's transport.
func RunKilled(t *testing.T, open func(testing.TB) p2p.Transport) {
	if err := proctest.Keep(); err != nil { // which opens a descriptor
		t.Fatal(err)
	}
	s := suite{open}
	t.Run("Connect", func(t *testing.T) { Pair(t, open) })
	for what := range operations {
		NoLeaks(t, "TargetOf"+what, func(t *testing.T) { s.killedTarget(t, what) })
	}
	NoLeaks(t, "Writer", s.killedWriter)
}

// operations begin operation i on the memory of a target.
var operations = map[string]func(x *Side, to *mem.Remote, b []byte, i int) (uint64, error){
	"Puts": func(x *Side, to *mem.Remote, b []byte, _ int) (uint64, error) {
		return x.PutTo(b, to, slot, p2p.Signal{})
	},
	gets: func(x *Side, to *mem.Remote, b []byte, _ int) (uint64, error) { return x.GetFrom(b, to, 0) },
	"Signals": func(x *Side, to *mem.Remote, b []byte, i int) (uint64, error) {
		return x.PutTo(b[:i%2*64], to, slot, p2p.Signal{At: to, Offset: wordAt, Value: uint64(i + 1)})
	},
	"Flushes": func(x *Side, to *mem.Remote, b []byte, i int) (uint64, error) {
		if i%2 == 0 {
			return x.PutTo(b, to, slot, p2p.Signal{})
		}
		return x.Start(x.Rma.FlushPuts)
	},
}

const gets = "Gets"

// killedTarget: operations on the memory of a process that is killed end, those that it has not
// done with ErrPeerGone; none writes afterwards, and the next incarnation is not affected.
func (s suite) killedTarget(t *testing.T, what string) {
	n, begin := s.node(t, 0), operations[what]
	const abreast = 8 // operations, each with memory of its own
	all := make([]byte, abreast*slot)
	local := func(i int) []byte { return all[i%abreast*slot:][:slot] }
	var old *mem.Remote
	for _, kill := range []int{abreast, 3 * abreast} { // after so many operations
		p := StartPeer(t, n, "target")
		x := p.Side
		to, err := x.told()
		if err != nil {
			t.Fatal(err)
		}
		for i := range abreast {
			if fill(local(i), 1); what == gets {
				clear(local(i))
			}
		}
		var ids []uint64
		for i := 0; err == nil; i++ {
			var id uint64
			if id, err = begin(x, to, local(i), i); err != nil {
				break
			}
			if ids = append(ids, id); i >= abreast {
				if late := x.ends(ids[i-abreast]); errors.Is(late, errLate) { // before its memory is used again
					err = late
					break
				}
			}
			if i == kill {
				p.Proc.Signal(syscall.SIGKILL)
			}
			err = x.Err()
		}
		if len(ids) <= kill || !errors.Is(err, p2p.ErrPeerGone) {
			t.Fatalf("operation %d on the memory of a process that is killed after %d: %v", len(ids), kill, err)
		}
		var well [abreast]bool // an operation with this memory has ended well
		for i, id := range ids {
			if err := x.ends(id); err != nil && !errors.Is(err, p2p.ErrPeerGone) {
				t.Errorf("operation %d has ended with %v, want %v", i, err, p2p.ErrPeerGone)
			} else if err == nil {
				well[i%abreast] = true
			}
		}
		want := make([]byte, slot)
		fill(want, 1)
		for i := range abreast {
			if well[i] && !filled(local(i), 1) {
				t.Errorf("an operation with local memory %d has ended well, and the memory has other bytes", i)
			}
			for k, v := range local(i) {
				if v != want[k] && (v != 0 || what != gets) {
					t.Fatalf("byte %d of local memory %d is %d", k, i, v)
				}
			}
		}
		before := bytes.Clone(all)
		p.Proc.Wait()
		if err := x.Close(); err != nil {
			t.Error(err)
		}
		if !bytes.Equal(before, all) {
			t.Error("memory has changed after every operation had ended")
		}
		old = to
	}
	before := bytes.Clone(all)
	s.nextIncarnation(t, n, old)
	if !bytes.Equal(before, all) {
		t.Error("memory has changed with the next incarnation")
	}
}

var errLate = fmt.Errorf("it has not ended after %v", Patience)

// ends waits for the end of an operation, and returns its error; errLate: it has not ended.
func (s *Side) ends(id uint64) error {
	for deadline := time.Now().Add(Patience); ; runtime.Gosched() {
		if c, ok := s.Ended[id]; ok {
			return c.Err
		}
		s.Turn() // it returns the link's error
		if time.Now().After(deadline) {
			return errLate
		}
	}
}

// nextIncarnation: puts, gets and signals reach the memory of a new process with the rank of one
// that was killed, and it refuses those to the memory of the other one.
func (s suite) nextIncarnation(t *testing.T, n *Node, old *mem.Remote) {
	t.Helper()
	p := StartPeer(t, n, "target")
	x := p.Side
	to, err := x.told()
	if err != nil {
		t.Fatal(err)
	}
	local, got := make([]byte, slot), make([]byte, slot)
	fill(local, 2)
	if old != nil {
		if err := x.Await(x.PutTo(local[:100], old, 0, p2p.Signal{})); err == nil || errors.Is(err, p2p.ErrPeerGone) {
			t.Errorf("a put to the memory of an incarnation that is gone: %v", err)
		}
	}
	if err := x.Await(x.GetFrom(got, to, 0)); err != nil || !filled(got, 1) {
		t.Errorf("a get from the next incarnation: %v", err)
	}
	if err := x.Await(x.PutTo(local, to, slot, p2p.Signal{At: to, Offset: wordAt, Value: 5})); err != nil {
		t.Errorf("a put to the next incarnation: %v", err)
	}
	if err := x.Await(x.GetFrom(got, to, slot)); err != nil || !bytes.Equal(got, local) {
		t.Errorf("what was put to the next incarnation is not there: %v", err)
	}
	p.Proc.Kill()
	if err := x.Close(); err != nil {
		t.Error(err)
	}
}

// written is memory of this process that a writer writes to.
type written struct {
	*Peer
	r  *mem.Region
	to *mem.Remote
}

func startWriter(t *testing.T, n *Node) *written {
	t.Helper()
	w := &written{Peer: StartPeer(t, n, "writer")}
	w.r = w.Alloc(t, page+exposed+page)
	w.to = w.Expose(t, w.r, page, exposed, mem.Read|mem.Write|mem.Signal)
	b, err := w.to.MarshalBinary()
	if err == nil {
		err = w.tell(b)
	}
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// round is the last one whose signal has come.
func (w *written) round() int { return int(w.r.Word(page + wordAt).Load()) }

// awaitRound returns when a round has come.
func (w *written) awaitRound(t *testing.T, i int) {
	t.Helper()
	for deadline := time.Now().Add(Patience); w.round() < i; {
		if err := w.Turn(); err != nil {
			t.Fatal(err)
		}
		if time.Now().After(deadline) {
			t.Fatalf("round %d of the peer's puts has not come, but %d", i, w.round())
		}
	}
}

// end kills the process, and checks the memory that it has written to.
func (w *written) end(t *testing.T) {
	t.Helper()
	w.Proc.Signal(syscall.SIGKILL)
	var err error
	for deadline := time.Now().Add(Patience); err == nil; {
		if err = w.Turn(); err == nil && time.Now().After(deadline) {
			t.Fatal("the link to a process that was killed does not end")
		}
	}
	if !errors.Is(err, p2p.ErrPeerGone) {
		t.Errorf("the link to a process that was killed ends with %v", err)
	}
	if err := w.Withdraw(w.to); err != nil {
		t.Fatal(err)
	}
	b := w.r.Bytes()
	before := bytes.Clone(b)
	if i := w.round(); !filled(b[page+i%2*slot:][:slot], i) {
		t.Errorf("the signal of round %d has come, and its data is not there", i)
	}
	if !bytes.Equal(b[:page], make([]byte, page)) || !bytes.Equal(b[page+exposed:], make([]byte, page)) {
		t.Error("memory beside what was exposed has changed")
	}
	w.Proc.Wait()
	w.Turn()
	if err := w.Close(); err != nil {
		t.Error(err)
	}
	if !bytes.Equal(before, b) {
		t.Error("the memory has changed after Withdraw")
	}
}

// killedWriter: the puts of a process that is killed have placed what their signals say, nothing
// else, and nothing after Withdraw; those of the next incarnation arrive.
func (s suite) killedWriter(t *testing.T) {
	n := s.node(t, 0)
	for _, rounds := range []int{1, 4, 9} {
		w := startWriter(t, n)
		w.awaitRound(t, rounds)
		w.end(t)
	}
	s.nextIncarnation(t, n, nil)
}
