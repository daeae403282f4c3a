// Package trust proves on a fresh connection that both ends belong to the same job.
//
// A job has a secret. An end interprets nothing that a peer sends before the peer has proved that
// it knows the secret. The secret itself is never sent:
//
//	dialler  -> acceptor   magic, dialler's nonce, HMAC-SHA256(secret, "open" purpose nonce)
//	acceptor -> dialler    magic, acceptor's nonce
//	dialler  -> acceptor   HMAC-SHA256(secret, "dial" purpose nonces hello), hello
//	acceptor -> dialler    HMAC-SHA256(secret, "accept" purpose nonces hello verdict), verdict
//
// Every message has a fixed size except the verdict's text, which is read after its length was
// checked. The MACs of the last two messages cover both nonces and a label for the direction, so
// that replaying or reflecting a message proves nothing. The first message can be replayed; it
// proves nothing, costs the acceptor one MAC, no answer and no state, and tells it which of many
// connections to keep: see Acceptor. An acceptor that finds a wrong MAC answers with zeros in place
// of its nonce or MAC, which tells the dialler the reason and an attacker nothing; a connection
// that just ends is therefore no sign of a wrong secret. A service must compare Hello.To… with
// itself in admit: otherwise an attacker between two ends could forward a dialler's proof to
// another acceptor of the job. The data that follows is not encrypted.
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
	mrand "math/rand/v2"
	"net"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	dialMagic   = "tutti/2\n"
	acceptMagic = "tutti/2\r"
	magicSize   = len(dialMagic)
	nonceSize   = 32
	helloSize   = 32
	maxText     = 512
	openingSize = magicSize + nonceSize + sha256.Size // the dialler's first message
	answerSize  = magicSize + nonceSize
	proofSize   = sha256.Size + helloSize
	verdictLen  = 4 // code, 0, text length
)

// MinSecret is the minimal length of a secret in bytes.
const MinSecret = 16

// ErrAuth says that the other end does not know the job's secret, or does not speak the protocol.
var ErrAuth = errors.New("job secret does not match")

// ErrTurnedAway says that the acceptor closed the connection without a verdict, because it had too
// many or was ending. See Redial.
var ErrTurnedAway = errors.New("turned away")

// ErrStale says that a connection was made to, or by, another incarnation than the known one. It is
// sent as a Refusal with CodeStale.
var ErrStale = errors.New("unknown incarnation")

// CodeStale is the Code of a Refusal that stands for ErrStale, whatever the purpose.
const CodeStale = 3

// Hello names the two ends. The dialler's proof covers it.
type Hello struct {
	FromRank        uint32
	ToRank          uint32
	FromIncarnation uint64
	ToIncarnation   uint64
	Extra           uint64 // defined by the purpose
}

// Refusal is the acceptor's authenticated refusal.
type Refusal struct {
	Code uint8 // defined by the callers, but for CodeStale; 0 is never sent
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

// denied replaces a nonce or a MAC when the acceptor found the dialler's MAC wrong.
var denied [sha256.Size]byte

// ended describes an end of the stream within the handshake. It is no verdict on the secret: the
// other end may be leaving or dying.
func ended(err error) error {
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("the other end closed the connection during the handshake: %w", err)
	}
	return err
}

// unanswered is ended for the dialler, which may try again.
func unanswered(err error) error {
	is := func(target error) bool { return errors.Is(err, target) }
	if is(io.EOF) || is(io.ErrUnexpectedEOF) || is(syscall.ECONNRESET) || is(syscall.EPIPE) {
		return fmt.Errorf("%w: %w", ErrTurnedAway, ended(err))
	}
	return err
}

func checkSecret(secret []byte) error {
	if len(secret) < MinSecret {
		return fmt.Errorf("the job's secret has %d bytes, at least %d are needed", len(secret), MinSecret)
	}
	return nil
}

// Client proves the dialling end. purpose separates services that share a secret (of at least
// MinSecret bytes). conn's deadline bounds it. An error that wraps ErrAuth: the two ends do not
// share secret and purpose; a *Refusal: they do, and the acceptor refused; ErrTurnedAway: the
// acceptor ended the connection without a verdict.
func Client(conn net.Conn, secret []byte, purpose string, h Hello) error {
	if err := checkSecret(secret); err != nil {
		return err
	}
	mine := make([]byte, nonceSize)
	rand.Read(mine)
	opening := append([]byte(dialMagic), mine...)
	opening = append(opening, mac(secret, "open", purpose, mine)...)
	if _, err := conn.Write(opening); err != nil {
		return unanswered(err)
	}
	var answer [answerSize]byte
	if _, err := io.ReadFull(conn, answer[:magicSize]); err != nil {
		return unanswered(err)
	}
	if string(answer[:magicSize]) != acceptMagic {
		return fmt.Errorf("%w: the other end does not speak this protocol", ErrAuth)
	}
	theirs := answer[magicSize:]
	if _, err := io.ReadFull(conn, theirs); err != nil {
		return unanswered(err)
	}
	if [nonceSize]byte(theirs) == denied {
		return fmt.Errorf("%w: the other end found our first message wrong", ErrAuth)
	}
	hello := h.encode()
	if _, err := conn.Write(append(mac(secret, "dial", purpose, mine, theirs, hello[:]), hello[:]...)); err != nil {
		return unanswered(err)
	}
	var in [sha256.Size + verdictLen + maxText]byte
	fixed := in[:sha256.Size+verdictLen]
	if _, err := io.ReadFull(conn, fixed); err != nil {
		return unanswered(err)
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
		return unanswered(err)
	}
	if !hmac.Equal(in[:sha256.Size], mac(secret, "accept", purpose, mine, theirs, hello[:], verdict)) {
		return fmt.Errorf("%w: the other end's proof is wrong", ErrAuth)
	}
	if code := verdict[0]; code != 0 {
		return &Refusal{Code: code, Text: string(verdict[verdictLen:])}
	}
	return nil
}

// How often Redial dials in total, and its first pause.
const (
	redials     = 6
	redialPause = 2 * time.Millisecond
)

// Redial runs dial, which connects and calls Client, and repeats it a few times within about 100 ms
// while it is turned away: an acceptor with too many connections may close one that has sent
// nothing yet. If the acceptor has ended, the next connection is refused.
func Redial(ctx context.Context, dial func() error) error {
	pause := redialPause
	for n := 1; ; n++ {
		err := dial()
		if n == redials || !errors.Is(err, ErrTurnedAway) {
			return err
		}
		t := time.NewTimer(pause/2 + mrand.N(pause))
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return err
		}
		pause *= 2
	}
}

// half is the accepting half of a handshake, without I/O.
type half struct {
	theirs, mine [nonceSize]byte
	opened       bool // the first message was valid
}

// want returns the length of the next message.
func (h *half) want() int {
	if h.opened {
		return proofSize
	}
	return openingSize
}

// hopeless reports whether no first message begins with in.
func (h *half) hopeless(in []byte) bool {
	n := min(len(in), magicSize)
	return !h.opened && string(in[:n]) != dialMagic[:n]
}

// opening handles the dialler's first message and returns the answer, the last one if there is an
// error.
func (h *half) opening(secret []byte, purpose string, in []byte) (answer []byte, err error) {
	if h.hopeless(in) {
		return nil, fmt.Errorf("%w: the other end does not speak this protocol", ErrAuth)
	}
	answer = append(make([]byte, 0, answerSize), acceptMagic...)
	nonce, tag := in[magicSize:magicSize+nonceSize], in[magicSize+nonceSize:]
	if !hmac.Equal(tag, mac(secret, "open", purpose, nonce)) {
		return append(answer, denied[:]...), fmt.Errorf("%w: the first message is wrong", ErrAuth)
	}
	h.theirs = [nonceSize]byte(nonce)
	rand.Read(h.mine[:])
	h.opened = true
	return append(answer, h.mine[:]...), nil
}

// proof handles the dialler's second message. With an error, answer is the last message to it.
func (h *half) proof(secret []byte, purpose string, in []byte) (who Hello, answer []byte, err error) {
	hello := in[sha256.Size:]
	if !hmac.Equal(in[:sha256.Size], mac(secret, "dial", purpose, h.theirs[:], h.mine[:], hello)) {
		return Hello{}, append(denied[:len(denied):len(denied)], 0xff, 0, 0, 0),
			fmt.Errorf("%w: the proof is wrong", ErrAuth)
	}
	return decodeHello(hello), nil, nil
}

// verdict returns the last message to an authenticated dialler; refused is the reason of a refusal,
// or nil.
func (h *half) verdict(secret []byte, purpose string, who Hello, refused error) []byte {
	verdict := make([]byte, verdictLen, verdictLen+maxText)
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
	hello := who.encode()
	return append(mac(secret, "accept", purpose, h.theirs[:], h.mine[:], hello[:], verdict), verdict...)
}

// Server checks the dialling end of one connection, calls admit (nil: accept; a *Refusal keeps its
// code, any other error is sent as code 1) and proves the accepting end. admit must compare the
// Hello's To… with itself. conn's deadline bounds it. When it returns an error the caller closes
// conn. A listener that strangers can reach uses an Acceptor.
func Server(conn net.Conn, secret []byte, purpose string, admit func(Hello) error) (Hello, error) {
	if err := checkSecret(secret); err != nil {
		return Hello{}, err
	}
	var h half
	var buf [max(openingSize, proofSize)]byte
	in := buf[:h.want()]
	if _, err := io.ReadFull(conn, in[:magicSize]); err != nil {
		return Hello{}, ended(err)
	}
	if !h.hopeless(in[:magicSize]) { // else the rest will not come
		if _, err := io.ReadFull(conn, in[magicSize:]); err != nil {
			return Hello{}, ended(err)
		}
	}
	answer, err := h.opening(secret, purpose, in)
	if err != nil {
		conn.Write(answer) // best effort
		return Hello{}, err
	}
	if _, err := conn.Write(answer); err != nil {
		return Hello{}, err
	}
	in = buf[:h.want()]
	if _, err := io.ReadFull(conn, in); err != nil {
		return Hello{}, ended(err)
	}
	who, answer, err := h.proof(secret, purpose, in)
	if err != nil {
		conn.Write(answer) // best effort
		return Hello{}, err
	}
	refused := admit(who)
	if _, err := conn.Write(h.verdict(secret, purpose, who, refused)); err != nil {
		return who, err
	}
	return who, refused
}

// warnings bounds the refused connections a minute that are logged as warnings.
const warnings = 5

// LogRefused returns an Acceptor's Refused that logs: the first few ends in a minute that do not
// know the secret, or crowd the listener, as warnings, everything else for debugging. A peer that
// leaves within a handshake, or that Admit refuses, is normal.
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
		if !log.Enabled(context.Background(), level) {
			return
		}
		log.Log(context.Background(), level, service+" refused a connection"+more, "from", c.RemoteAddr().String(),
			"err", err)
	}
}
