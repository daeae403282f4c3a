//go:build cgo && linux

package endpoint_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"tutti/internal/proctest"
	"tutti/mem"
	"tutti/rdma"
	"tutti/rdma/endpoint"
	"tutti/rdma/endpoint/endpointtest"
	"tutti/rdma/rdmatest"
	"tutti/rdma/verbs"
)

// workerVariable holds the description of a worker, in its process.
const workerVariable = "SOFTROCE_WORKER"

// work describes a worker of TestDeviceKilledProcesses.
type work struct {
	Name  string
	Peers []string
	Dir   string // of the sockets that workers are called at, one with each name
}

// said is a line that a worker prints.
type said struct {
	Stage   string // of a handshake; "ready", "wrote" or "checked" beside these
	Peer    string
	Session uint64 // of the peer of "wrote" and "checked", and of the worker that is "ready"
}

// TestDeviceKilledProcesses: two sides have two workers each, which connect with all others at the
// same time. Each side kills the other side's workers in the middle of handshakes, again and again,
// and starts them anew. In the end all are connected with each other, and no connection is dead.
func TestDeviceKilledProcesses(t *testing.T) {
	p, names := rdmatest.Devices(t, verbs.Load)
	if text := os.Getenv(workerVariable); text != "" {
		var w work
		if err := json.Unmarshal([]byte(text), &w); err != nil {
			t.Fatal(err)
		}
		runWorker(t, p, names[0], w)
		return
	}
	h := &house{t: t, dir: t.TempDir(), workers: map[string]*worker{}, left: map[string]int{"a": *kills, "b": *kills},
		done: make(chan struct{})}
	h.names = []string{"a0", "a1", "b0", "b1"}
	h.mu.Lock()
	for _, name := range h.names {
		h.startLocked(name)
	}
	h.mu.Unlock()
	select {
	case <-h.done:
	case <-time.After(endpointtest.Patience):
		h.mu.Lock()
		defer h.mu.Unlock()
		for _, w := range h.workers {
			t.Logf("%s: %d lines; wrote to %v of %d; output %q", w.name, w.lines, w.wrote, w.session, w.text)
		}
		t.Fatalf("not all are connected; kills left: %v", h.left)
	}
	for _, w := range h.workers {
		w.in.Close()
		<-w.ended
		if w.err != nil {
			t.Errorf("%s: %v\n%s", w.name, w.err, w.text)
		}
	}
	t.Logf("%v lives, after which stages workers were killed: %v", h.lives, h.killed)
}

// house has the workers of both sides.
type house struct {
	t     *testing.T
	dir   string
	names []string
	done  chan struct{} // closed when all are connected

	mu      sync.Mutex
	workers map[string]*worker // the present lives
	left    map[string]int     // kills of each side
	lives   int
	killed  map[string]int
	checked bool // all were told to check
}

// worker is one life of a worker.
type worker struct {
	name    string
	p       *proctest.Process
	in      io.WriteCloser
	lines   int // read
	mortal  int // killed after so many lines; 0: never
	dying   bool
	session uint64
	wrote   map[string]uint64 // to which session of each peer
	checked map[string]uint64
	text    []byte        // what it has said beside lines
	ended   chan struct{} // closed when err is set
	err     error
}

func (h *house) startLocked(name string) {
	w := &worker{name: name, wrote: map[string]uint64{}, checked: map[string]uint64{}, ended: make(chan struct{})}
	h.workers[name] = w
	h.lives++
	killer := map[byte]string{'a': "b", 'b': "a"}[name[0]]
	if h.left[killer] > 0 {
		h.left[killer]--
		w.mortal = 1 + rand.IntN(14)
	}
	task := work{Name: name, Dir: h.dir}
	for _, n := range h.names {
		if n != name {
			task.Peers = append(task.Peers, n)
		}
	}
	text, err := json.Marshal(task)
	if err != nil {
		h.t.Error(err)
		return
	}
	cmd := proctest.Again([]string{workerVariable + "=" + string(text)}, "-test.run=^TestDeviceKilledProcesses$",
		"-test.timeout=4m")
	in, err := cmd.StdinPipe()
	out, theirs, err2 := os.Pipe()
	if err := errors.Join(err, err2); err != nil {
		h.t.Error(err)
		return
	}
	cmd.Stdout, cmd.Stderr = theirs, theirs
	w.p, err = proctest.Start(cmd)
	theirs.Close()
	if err != nil {
		h.t.Error(err)
		return
	}
	h.t.Cleanup(w.p.Kill)
	w.in = in
	go func() {
		defer close(w.ended)
		defer out.Close()
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			h.heard(w, lines.Bytes())
		}
		w.err = w.p.Wait()
		h.mu.Lock()
		defer h.mu.Unlock()
		if w.dying {
			h.startLocked(w.name)
		}
	}()
}

// heard handles a line of a worker.
func (h *house) heard(w *worker, line []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	var s said
	if json.Unmarshal(line, &s) != nil {
		w.text = append(append(w.text, line...), '\n')
		return
	}
	switch s.Stage {
	case "ready":
		w.session = s.Session
	case "wrote":
		w.wrote[s.Peer] = s.Session
	case "checked":
		w.checked[s.Peer] = s.Session
	}
	if w.lines++; w.lines == w.mortal {
		w.dying = true
		if h.killed == nil {
			h.killed = map[string]int{}
		}
		h.killed[s.Stage]++
		if err := w.p.Signal(syscall.SIGKILL); err != nil {
			h.t.Error(err)
		}
	}
	all := func(of func(*worker) map[string]uint64) bool {
		for _, x := range h.workers {
			for _, y := range h.workers {
				if x != y && (x.mortal > 0 || y.session == 0 || of(x)[y.name] != y.session) {
					return false
				}
			}
		}
		return true
	}
	switch {
	case !h.checked && all(func(w *worker) map[string]uint64 { return w.wrote }):
		h.checked = true
		for _, w := range h.workers {
			io.WriteString(w.in, "check\n")
		}
	case h.checked && all(func(w *worker) map[string]uint64 { return w.checked }):
		select {
		case <-h.done:
		default:
			close(h.done)
		}
	}
}

// life is what a worker process is.
type life struct {
	work
	t       *testing.T
	table   *endpoint.Table
	session uint64
	words   []uint64 // one that peers write to, and one that is written from for each peer
	mr      rdma.MR
	print   func(said)

	mu      sync.Mutex
	waiting map[uint64]chan<- rdma.Status
	ids     uint64
}

// call is a request to a worker, and its reply.
type call struct {
	From    string
	Request []byte // of a handshake; empty: Place is asked for
	Reply   []byte
	Place   place
	Err     string
}

// place is where a worker can be written to.
type place struct {
	Session, Address uint64
	Key              uint32
}

// runWorker is the program of a worker: it keeps connections to all its peers, and writes over
// them, until its input ends. When it reads a line, it writes once more over each connection.
func runWorker(t *testing.T, p *verbs.Provider, device string, w work) {
	var printing sync.Mutex
	out := json.NewEncoder(os.Stdout)
	l := &life{work: w, t: t, session: rand.Uint64() | 1, words: make([]uint64, 1+len(w.Peers)),
		waiting: map[uint64]chan<- rdma.Status{}, print: func(s said) {
			printing.Lock()
			defer printing.Unlock()
			out.Encode(s)
		}}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	d, err := p.Open(device, nil)
	must(err)
	wake := make(chan struct{}, 1)
	cq, err := d.NewCQ(64*len(w.Peers), func() {
		select {
		case wake <- struct{}{}:
		default:
		}
	})
	must(err)
	l.mr, err = d.Register(mem.Host(unsafe.Slice((*byte)(unsafe.Pointer(&l.words[0])), 8*len(l.words)), mem.Anywhere),
		rdma.LocalWrite|rdma.RemoteWrite)
	must(err)
	qp := rdma.QPConfig{Send: cq, Recv: cq, SendDepth: 4, RecvDepth: 1}
	cfg := endpoint.Config{Session: l.session, Device: d, Caller: l, Queues: []rdma.QPConfig{qp, qp},
		Access: rdma.LocalWrite | rdma.RemoteWrite, Prepare: func(c *endpoint.Connection) error {
			l.print(said{Stage: "prepare", Peer: c.Peer})
			return nil
		}}
	leisurely(&cfg)
	l.table, err = endpoint.New(cfg)
	must(err)
	at := filepath.Join(w.Dir, w.Name)
	if err := os.Remove(at); err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	listener, err := net.Listen("unix", at)
	must(err)
	ctx, stop := context.WithCancel(context.Background())
	var tasks, serving sync.WaitGroup
	serving.Go(func() { l.serve(listener, &serving) })
	polled := make(chan struct{})
	go func() {
		defer close(polled)
		l.poll(ctx, cq, wake)
	}()
	l.print(said{Stage: "ready", Session: l.session})
	checks := make([]chan struct{}, len(w.Peers))
	for i, peer := range w.Peers {
		checks[i] = make(chan struct{}, 1)
		tasks.Go(func() { l.keep(ctx, peer, i, checks[i]) })
	}
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		for _, c := range checks {
			c <- struct{}{}
		}
	}
	stop()
	tasks.Wait()
	end, cancel := context.WithTimeout(context.Background(), endpointtest.Patience)
	defer cancel()
	must(l.table.Close(end))
	must(listener.Close())
	serving.Wait()
	<-polled
	must(errors.Join(cq.Close(), l.mr.Close(), d.Close()))
}

// keep keeps a connection to a peer, and writes over it.
func (l *life) keep(ctx context.Context, peer string, i int, check <-chan struct{}) {
	stage := "wrote"
	for ctx.Err() == nil {
		c, err := l.table.Open(ctx, peer)
		if err != nil {
			continue // ctx has ended: nothing else ends the attempts
		}
		told := false
		for err = l.write(ctx, c, i); err == nil; err = l.write(ctx, c, i) {
			if !told || stage == "checked" {
				told = true
				l.print(said{Stage: stage, Peer: peer, Session: c.Remote()})
			}
			stage = "wrote"
			select {
			case <-c.Retired():
			case <-check:
				stage = "checked"
			case <-time.After(20 * time.Millisecond): // of traffic
			case <-ctx.Done():
			}
		}
		if stage == "checked" && ctx.Err() == nil {
			l.t.Errorf("the connection to %s is dead: %v", peer, err)
		}
		c.Fail()
	}
}

// write writes a word to a peer by every queue pair of a connection.
func (l *life) write(ctx context.Context, c *endpoint.Connection, i int) error {
	there, err := l.exchange(ctx, c.Peer, call{From: l.Name})
	if err != nil {
		return err
	}
	if there.Place.Session != c.Remote() {
		return fmt.Errorf("connected with session %x of %s, which has ended", c.Remote(), c.Peer)
	}
	return endpointtest.Write(ctx, c, func(done chan<- rdma.Status) rdma.SendRequest {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.ids++
		l.waiting[l.ids] = done
		return rdma.SendRequest{ID: l.ids, RemoteKey: there.Place.Key, RemoteAddress: there.Place.Address,
			Segments: []rdma.Segment{{Key: l.mr.LocalKey(), Len: 8,
				Address: uint64(uintptr(unsafe.Pointer(&l.words[1+i])))}}}
	})
}

// poll gives completions to the goroutines that wait for them.
func (l *life) poll(ctx context.Context, cq rdma.CQ, wake <-chan struct{}) {
	var out [rdma.PollBatch]rdma.Completion
	for ctx.Err() == nil {
		if err := cq.Arm(); err != nil {
			l.t.Error(err)
			return
		}
		n, err := cq.Poll(out[:])
		if err != nil {
			l.t.Error(err)
			return
		}
		l.mu.Lock()
		for _, c := range out[:n] {
			if w := l.waiting[c.ID]; w != nil {
				w <- c.Status
				delete(l.waiting, c.ID)
			}
		}
		l.mu.Unlock()
		if n > 0 {
			continue
		}
		select {
		case <-wake:
		case <-ctx.Done():
		}
	}
}

// serve answers the calls of peers.
func (l *life) serve(listener net.Listener, serving *sync.WaitGroup) {
	for {
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		serving.Go(func() {
			defer conn.Close()
			conn.SetDeadline(time.Now().Add(endpointtest.Patience))
			var c call
			if json.NewDecoder(conn).Decode(&c) != nil {
				return // the peer was killed
			}
			if len(c.Request) > 0 {
				l.print(said{Stage: "request", Peer: c.From})
				if c.Reply, err = l.table.Handle(c.From, c.Request); err != nil {
					c.Err = err.Error()
				}
			}
			c.Place = place{l.session, uint64(uintptr(unsafe.Pointer(&l.words[0]))), l.mr.RemoteKey()}
			json.NewEncoder(conn).Encode(c)
		})
	}
}

// exchange calls a peer.
func (l *life) exchange(ctx context.Context, peer string, c call) (call, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", filepath.Join(l.Dir, peer))
	if err != nil {
		runtime.Gosched() // the peer is about to be started
		return c, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })()
	if err := errors.Join(json.NewEncoder(conn).Encode(c), json.NewDecoder(conn).Decode(&c)); err != nil {
		return c, err
	}
	if c.Err != "" {
		return c, errors.New(strings.ToValidUTF8(c.Err, "?"))
	}
	return c, nil
}

// Call implements endpoint.Caller.
func (l *life) Call(ctx context.Context, peer string, request []byte) ([]byte, error) {
	l.print(said{Stage: "call", Peer: peer})
	c, err := l.exchange(ctx, peer, call{From: l.Name, Request: request})
	return c.Reply, err
}
