// Package trust proves on a fresh connection that both ends belong to the same job.
//
// A job has a secret. Nothing a peer sends is interpreted before it has shown that it knows the secret, and the secret itself never travels:
//
//	dialler  -> acceptor   magic, dialler's nonce
//	acceptor -> dialler    magic, acceptor's nonce
//	dialler  -> acceptor   HMAC-SHA256(secret, "dial" purpose nonces hello), hello
//	acceptor -> dialler    HMAC-SHA256(secret, "accept" purpose nonces hello verdict), verdict
//
// Every message has a fixed size but for the verdict's text, which is read only after its length was checked. Both nonces and a label for the
// direction are under each MAC, so that neither replaying nor reflecting a message proves anything. An acceptor that finds a proof wrong answers with
// a MAC of zeros, which tells the dialler why and an attacker nothing; a connection that just ends is therefore no sign of a wrong secret. A service
// must compare Hello.To… with itself in admit: else whoever stands between two ends could pass a dialler's proof on to another acceptor of the job.
// The data that follows is not encrypted.
package trust

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/atomic"
)

const (
	magic      = "tutti/1\n"
	nonceSize  = 32
	helloSize  = 32
	maxText    = 512
	opening    = len(magic) + nonceSize
	verdictLen = 4 // code, 0, text length
)

// MinSecret is the shortest secret that is taken, in bytes.
const MinSecret = 16

// ErrAuth says that the other end does not know the job's secret (or is no end of ours at all).
var ErrAuth = errors.New("job secret does not match")

// Hello says who dials whom. It is covered by the dialler's proof.
type Hello struct {
	FromRank        uint32
	ToRank          uint32
	FromIncarnation uint64
	ToIncarnation   uint64
	Extra           uint64 // the purpose's own meaning
}

// Refusal is the acceptor's authenticated "no".
type Refusal struct {
	Code uint8 // the callers' own meaning; 0 is never sent
	Text string
}

func (r *Refusal) Error() string { return r.Text }

func (h Hello) encode() (b [helloSize]byte) {
	binary.LittleEndian.PutUint32(b[0:], h.FromRank)
	binary.LittleEndian.PutUint32(b[4:], h.ToRank)
	binary.LittleEndian.PutUint64(b[8:], h.FromIncarnation)
	binary.LittleEndian.PutUint64(b[16:], h.ToIncarnation)
	binary.LittleEndian.PutUint64(b[24:], h.Extra)
	return b
}

func decodeHello(b []byte) Hello {
	return Hello{
		FromRank: binary.LittleEndian.Uint32(b[0:]), ToRank: binary.LittleEndian.Uint32(b[4:]),
		FromIncarnation: binary.LittleEndian.Uint64(b[8:]), ToIncarnation: binary.LittleEndian.Uint64(b[16:]),
		Extra: binary.LittleEndian.Uint64(b[24:]),
	}
}

func mac(secret []byte, label, purpose string, parts ...[]byte) []byte {
	m := hmac.New(sha256.New, secret)
	for _, s := range []string{label, purpose} {
		m.Write(binary.LittleEndian.AppendUint32(nil, uint32(len(s))))
		m.Write([]byte(s))
	}
	for _, p := range parts {
		m.Write(p)
	}
	return m.Sum(nil)
}

// denied is where a proof would be when the acceptor found the dialler's wrong.
var denied [sha256.Size]byte

// ended names an end of the stream in the middle of the handshake, which is no verdict on the secret: the other end may be leaving or dying.
func ended(err error) error {
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("the other end closed the connection during the handshake: %w", err)
	}
	return err
}

func exchange(conn net.Conn, secret []byte) (mine, theirs []byte, err error) {
	if len(secret) < MinSecret {
		return nil, nil, fmt.Errorf("the job's secret has %d bytes, at least %d are needed", len(secret), MinSecret)
	}
	mine = make([]byte, nonceSize)
	rand.Read(mine)
	if _, err := conn.Write(append([]byte(magic), mine...)); err != nil {
		return nil, nil, err
	}
	in := make([]byte, opening)
	if _, err := io.ReadFull(conn, in[:len(magic)]); err != nil {
		return nil, nil, ended(err)
	}
	if string(in[:len(magic)]) != magic {
		return nil, nil, fmt.Errorf("%w: the other end does not speak this protocol", ErrAuth)
	}
	if _, err := io.ReadFull(conn, in[len(magic):]); err != nil {
		return nil, nil, ended(err)
	}
	return mine, in[len(magic):], nil
}

// Client proves the dialling end. purpose separates services that share a secret (of at least MinSecret bytes). It blocks as long as conn's deadline
// lets it. An error that wraps ErrAuth: the two ends do not share secret and purpose; a *Refusal: they do, and the acceptor said no.
func Client(conn net.Conn, secret []byte, purpose string, h Hello) error {
	mine, theirs, err := exchange(conn, secret)
	if err != nil {
		return err
	}
	hello := h.encode()
	if _, err := conn.Write(append(mac(secret, "dial", purpose, mine, theirs, hello[:]), hello[:]...)); err != nil {
		return err
	}
	var in [sha256.Size + verdictLen + maxText]byte
	fixed := in[:sha256.Size+verdictLen]
	if _, err := io.ReadFull(conn, fixed); err != nil {
		return ended(err)
	}
	if [sha256.Size]byte(in[:]) == denied {
		return fmt.Errorf("%w: the other end found our proof wrong", ErrAuth)
	}
	n := int(binary.LittleEndian.Uint16(fixed[sha256.Size+2:]))
	if n > maxText {
		return fmt.Errorf("%w: malformed verdict", ErrAuth)
	}
	verdict := in[sha256.Size : len(fixed)+n]
	if _, err := io.ReadFull(conn, verdict[verdictLen:]); err != nil {
		return ended(err)
	}
	if !hmac.Equal(in[:sha256.Size], mac(secret, "accept", purpose, mine, theirs, hello[:], verdict)) {
		return fmt.Errorf("%w: the other end's proof is wrong", ErrAuth)
	}
	if code := verdict[0]; code != 0 {
		return &Refusal{Code: code, Text: string(verdict[verdictLen:])}
	}
	return nil
}

// Server checks the dialling end, asks admit (nil: yes; a *Refusal keeps its code, any other error is sent as code 1) and proves the accepting end.
// admit must compare the Hello's To… with itself. It blocks as long as conn's deadline lets it. When it returns an error the caller closes conn.
func Server(conn net.Conn, secret []byte, purpose string, admit func(Hello) error) (Hello, error) {
	mine, theirs, err := exchange(conn, secret)
	if err != nil {
		return Hello{}, err
	}
	in := make([]byte, sha256.Size+helloSize)
	if _, err := io.ReadFull(conn, in); err != nil {
		return Hello{}, ended(err)
	}
	hello := in[sha256.Size:]
	if !hmac.Equal(in[:sha256.Size], mac(secret, "dial", purpose, theirs, mine, hello)) {
		conn.Write(append(denied[:], 0xff, 0, 0, 0)) // a courtesy: the connection is closed whether it gets there or not
		return Hello{}, fmt.Errorf("%w: connection from %v", ErrAuth, conn.RemoteAddr())
	}
	h := decodeHello(hello)
	verdict := make([]byte, verdictLen, verdictLen+maxText)
	refused := admit(h)
	if refused != nil {
		text := refused.Error()
		text = strings.ToValidUTF8(text[:min(len(text), maxText)], "")
		verdict[0] = 1
		var r *Refusal
		if errors.As(refused, &r) && r.Code != 0 {
			verdict[0] = r.Code
		}
		binary.LittleEndian.PutUint16(verdict[2:], uint16(len(text)))
		verdict = append(verdict, text...)
	}
	if _, err := conn.Write(append(mac(secret, "accept", purpose, theirs, mine, hello, verdict), verdict...)); err != nil {
		return h, err
	}
	return h, refused
}

// Acceptor runs the accepting half for a listener: a bounded number of connections prove themselves at once, each within Timeout;
// those that do not are closed and nothing else happens.
//
// Whoever connects and then stays silent must not keep the job's ranks out. So while a connection waits for a slot, one of those that had their chance has to
// give its slot up: the oldest that has sent nothing for 100 ms, else the oldest that has not finished its proof within a second. An end that means well
// has sent something by then; if it was just slow, it dials again.
type Acceptor struct {
	Listener net.Listener
	Secret   []byte
	Purpose  string
	Timeout  time.Duration
	Max      int                   // unproved connections at once, and one more that waits for a slot
	Admit    func(Hello) error     // see Server
	Accepted func(net.Conn, Hello) // owns the connection, its deadline cleared; must not block for long
	Refused  func(net.Conn, error) // may be nil; the connection is about to be closed; see LogRefused
	wg       sync.WaitGroup
	mu       sync.Mutex
	open     []*candidate // by age
	closed   bool
	end      chan struct{} // closed with closed
}

// How long a connection keeps its slot while others wait for one; less where Timeout is short.
const (
	silentGrace = 100 * time.Millisecond // one that has sent nothing
	slowGrace   = time.Second            // one whose proof is not complete
)

// ErrCrowded says that a connection was closed for the sake of others: see Acceptor.
var ErrCrowded = errors.New("it proved nothing while others were waiting")

// candidate is a connection on its way through the handshake.
type candidate struct {
	net.Conn
	since   time.Time
	spoke   atomic.Bool // it has sent something
	proved  bool        // it knows the secret; guarded, as evicted, by the acceptor's mu
	evicted bool
}

func (c *candidate) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.spoke.Store(true)
	}
	return n, err
}

// ended returns a channel that Close closes.
func (a *Acceptor) ended() chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.endLocked()
}

func (a *Acceptor) endLocked() chan struct{} {
	if a.end == nil {
		a.end = make(chan struct{})
	}
	return a.end
}

// Serve accepts until the listener is closed by Close, and then returns after the last handshake ended.
func (a *Acceptor) Serve() {
	slots := make(chan struct{}, a.Max)
	defer a.wg.Wait()
	pause := 5 * time.Millisecond
	for {
		conn, err := a.Listener.Accept()
		if err != nil {
			if a.isClosed() || errors.Is(err, net.ErrClosed) {
				return
			}
			// Out of descriptors or the like: the listener lives on, and retrying at once would only burn the CPU.
			select {
			case <-a.ended():
			case <-time.After(pause):
			}
			pause = min(2*pause, time.Second)
			continue
		}
		pause = 5 * time.Millisecond
		if !a.enter(slots) {
			conn.Close()
			continue // to an Accept that fails
		}
		c := &candidate{Conn: conn, since: time.Now()}
		a.mu.Lock()
		if a.closed {
			a.mu.Unlock()
			conn.Close()
			continue
		}
		a.open = append(a.open, c)
		a.wg.Add(1)
		a.mu.Unlock()
		go func() {
			defer a.wg.Done()
			defer func() { <-slots }()
			a.handshake(c)
		}()
	}
}

// enter takes a slot, and sees to it that one becomes free; false: the acceptor was closed.
func (a *Acceptor) enter(slots chan struct{}) bool {
	for {
		select {
		case slots <- struct{}{}:
			return true
		default:
		}
		t := time.NewTimer(a.evict())
		select {
		case slots <- struct{}{}:
			t.Stop()
			return true
		case <-t.C:
		case <-a.ended():
			t.Stop()
			return false
		}
	}
}

// evict closes the connection that has to make room, if there is one, and returns how long it makes sense to wait for a slot before it is called again.
func (a *Acceptor) evict() (wait time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	silent, slow := min(silentGrace, a.Timeout/50), min(slowGrace, a.Timeout/5)
	var out *candidate
	outSpoke := false
	wait = silent
	for _, c := range a.open {
		if c.proved {
			continue
		}
		spoke, grace := c.spoke.Load(), silent
		if spoke {
			grace = slow
		}
		if left := grace - time.Since(c.since); left > 0 {
			wait = min(wait, left)
		} else if out == nil || outSpoke && !spoke {
			out, outSpoke = c, spoke
		}
	}
	if out != nil {
		out.evicted = true
		a.forget(out)
		out.Close() // which ends its handshake and frees its slot
	}
	return wait
}

// forget takes c out of the connections that evict and Close know. Called with mu.
func (a *Acceptor) forget(c *candidate) {
	if i := slices.Index(a.open, c); i >= 0 {
		a.open = slices.Delete(a.open, i, i+1)
	}
}

func (a *Acceptor) handshake(c *candidate) {
	c.SetDeadline(c.since.Add(a.Timeout))
	h, err := Server(c, a.Secret, a.Purpose, func(h Hello) error {
		a.mu.Lock()
		c.proved = true // it is never evicted from here on; Close and the deadline still end it
		a.mu.Unlock()
		return a.Admit(h)
	})
	a.mu.Lock()
	a.forget(c)
	switch {
	case c.evicted:
		err = ErrCrowded
	case err == nil && a.closed:
		err = net.ErrClosed
	}
	a.mu.Unlock()
	if err != nil {
		if a.Refused != nil {
			a.Refused(c.Conn, err)
		}
		c.Close()
		return
	}
	c.SetDeadline(time.Time{})
	a.Accepted(c.Conn, h)
}

func (a *Acceptor) isClosed() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.closed
}

// Close closes the listener and the connections that have not proved themselves yet.
func (a *Acceptor) Close() error {
	a.mu.Lock()
	if a.closed {
		a.mu.Unlock()
		return nil
	}
	a.closed = true
	close(a.endLocked())
	for _, c := range a.open {
		c.Close()
	}
	a.mu.Unlock()
	return a.Listener.Close()
}

// warnings is how many refused connections a minute are worth a line each to a person.
const warnings = 5

// LogRefused returns an Acceptor's Refused that logs: as a warning who does not know the secret or crowds the listener, the first few of them in a minute, and
// everything else for debugging. A peer that leaves in the middle of a handshake, or is refused by Admit, is part of every job's life.
func LogRefused(log *slog.Logger, service string) func(net.Conn, error) {
	var mu sync.Mutex
	var since time.Time
	var n int
	return func(c net.Conn, err error) {
		level, more := slog.LevelDebug, ""
		if errors.Is(err, ErrAuth) || errors.Is(err, ErrCrowded) {
			mu.Lock()
			if now := time.Now(); now.Sub(since) >= time.Minute {
				since, n = now, 0
			}
			if n++; n <= warnings {
				level = slog.LevelWarn
			}
			if n == warnings {
				more = "; more of them in this minute are logged at level debug"
			}
			mu.Unlock()
		}
		log.Log(context.Background(), level, service+" refused a connection"+more, "from", c.RemoteAddr().String(), "err", err)
	}
}
