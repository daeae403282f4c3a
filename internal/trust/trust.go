// Package trust proves on a fresh connection that both ends belong to the same job, and can agree
// on keys for it.
//
// A job has a secret. Its holders may derive a client's key from it, for a program that is no rank:
// see Derive. A holder of only that key can prove to be this client, but no other one and no rank.
// An end interprets nothing that a peer sends before the peer has proved that it knows the key, but
// for the name that says which key that is. The key itself is never sent:
//
//	dialler  -> acceptor   magic, client's name, dialler's nonce, MAC "open"  8 + 32 + 32 + 32 bytes
//	acceptor -> dialler    magic, acceptor's nonce                            8 + 32
//	dialler  -> acceptor   MAC "dial", hello                                  32 + 32
//	acceptor -> dialler    MAC "accept", verdict                              32 + 4 to 516
//
// Numbers are little-endian. The magic is "tutti/3\n" from the dialler and "tutti/3\r" from the
// acceptor. All versions of the protocol begin with such a magic of 8 bytes, in which one of 1 to 9
// and A to Z is the version. An end that gets the magic of another version says so: see ErrVersion.
// The acceptor sends its own magic and 32 zeros first, from which the dialler learns the same. The
// name has 1 to 32 bytes of [A-Za-z0-9._-] and is padded with zeros; 32 zeros stand
// for the holder of the job's secret. A hello consists of FromRank and ToRank (u32),
// FromIncarnation, ToIncarnation and Extra (u64). A verdict is a code (u8, 0: accepted), a zero
// byte, the length of a text (u16, at most 512), and the text in UTF-8. A MAC is
//
//	HMAC-SHA256(key, u32 length of label, label, u32 length of purpose, purpose, said)
//
// The key is the job's secret, or the named client's key. The label is in quotes above. said is all
// that both ends have sent, up to and including the message of the MAC, without magics and MACs:
// name, dialler's nonce, acceptor's nonce, hello, verdict. A client's key is the MAC "client" under
// the job's secret, with the client's name as the purpose and nothing said.
//
// Every message has a fixed size except the verdict's text, which is read after its length was
// checked. The MACs of the last two messages cover both nonces and a label for the direction, so
// that replaying or reflecting a message proves nothing. The first message can be replayed. It
// proves nothing, and tells the acceptor which of many connections to keep: see Acceptor. It costs
// the acceptor one MAC, and another one to derive a client's key. An acceptor that finds a name or
// a MAC wrong answers with zeros in place of its nonce or MAC, which tells the dialler the reason
// and an attacker nothing; a connection that just ends is therefore no sign of a wrong secret. A
// service must compare Hello.To… with itself in Admit: otherwise an attacker between two ends could
// forward a dialler's proof to another acceptor of the job.
//
// The data that follows is not encrypted by this package. For ends that encrypt it a nonce may be a
// fresh X25519 public key. The MACs cover both nonces, so that the handshake authenticates the
// agreement as well. If both ends asked for it they have the same Session, whose keys are
//
//	HKDF-SHA256(secret X25519(own private key, other nonce), salt MAC "session", info label)
//
// The MAC "session" covers everything that was said, the verdict too. No private key is kept longer
// than until keys are made with it: a party that records the data and learns the job's secret later
// cannot decrypt it.
package trust

import (
	"bytes"
	"context"
	"crypto/ecdh"
	"crypto/hkdf"
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

	"tutti/internal/files"
	"tutti/internal/plain"
)

const (
	dialMagic   = "tutti/3\n"
	acceptMagic = "tutti/3\r"
	magicSize   = len(dialMagic)
	versionAt   = len("tutti/") // in every version's magics
	nameSize    = 32
	nonceSize   = 32
	helloSize   = 32
	maxText     = 512
	saidSize    = nameSize + nonceSize               // of what the dialler's first message says
	openingSize = magicSize + saidSize + sha256.Size // the dialler's first message
	answerSize  = magicSize + nonceSize
	proofSize   = sha256.Size + helloSize
	verdictLen  = 4 // code, 0, text length
)

// MinSecret is the minimal length of a secret in bytes.
const MinSecret = 16

// MaxClient is the maximal length of a client's name in bytes.
const MaxClient = nameSize

// ErrAuth says that the other end does not know the job's secret, or the client's key, or does not
// speak the protocol.
var ErrAuth = errors.New("job secret does not match")

// ErrVersion says that the other end speaks another version of the protocol: it is of another build
// of the library. It proves nothing about the secret.
var ErrVersion = errors.New("another version of the protocol")

// ErrTurnedAway says that the acceptor closed the connection without a verdict, because it had too
// many or was ending. See Redial.
var ErrTurnedAway = errors.New("turned away")

// ErrStale says that a connection was made to, or by, another incarnation than the known one. It is
// sent as a Refusal with CodeStale.
var ErrStale = errors.New("unknown incarnation")

// CodeStale is the Code of a Refusal that stands for ErrStale, whatever the purpose.
const CodeStale = 3

// Hello names the two ends. The dialler's proof covers it. The key proves only Client; From… is
// what a holder of that key says of itself.
type Hello struct {
	Client          string // name of the client whose key the dialler has; "": it has the job's secret
	FromRank        uint32
	ToRank          uint32
	FromIncarnation uint64
	ToIncarnation   uint64
	Extra           uint64 // defined by the purpose
}

// Refusal is the acceptor's authenticated refusal.
type Refusal struct {
	Code uint8  // defined by the callers, but for CodeStale; 0 is never sent
	Text string // of Client: one plain line, whatever the acceptor has sent
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

func decodeHello(client string, b []byte) Hello {
	return Hello{
		Client: client, FromRank: binary.LittleEndian.Uint32(b[0:]), ToRank: binary.LittleEndian.Uint32(b[4:]),
		FromIncarnation: binary.LittleEndian.Uint64(b[8:]), ToIncarnation: binary.LittleEndian.Uint64(b[16:]),
		Extra: binary.LittleEndian.Uint64(b[24:]),
	}
}

// CheckClient says what is wrong with the name of a client, which has 1 to MaxClient letters,
// digits, '.', '_' and '-'.
func CheckClient(name string) error {
	ok := name != "" && len(name) <= MaxClient
	for _, c := range []byte(name) {
		ok = ok && ('A' <= c && c <= 'Z' || 'a' <= c && c <= 'z' || '0' <= c && c <= '9' || c == '.' || c == '_' ||
			c == '-')
	}
	if !ok {
		return fmt.Errorf("a client's name %q: expected 1 to %d letters, digits, '.', '_', '-'",
			name[:min(len(name), 2*MaxClient)], MaxClient)
	}
	return nil
}

// decodeName reads the name of a first message, "" for the holder of the job's secret.
func decodeName(b []byte) (string, error) {
	name := string(bytes.TrimRight(b, "\x00"))
	if name == "" {
		return "", nil
	}
	return name, CheckClient(name)
}

// Derive returns the key of a client of the job with that secret. It opens what takes clients, see
// Acceptor, and nothing else. Neither the secret nor another client's key follows from it.
func Derive(secret []byte, client string) ([]byte, error) {
	if err := errors.Join(checkKey(secret), CheckClient(client)); err != nil {
		return nil, err
	}
	return mac(secret, "client", client, nil), nil
}

func mac(key []byte, label, purpose string, said []byte) []byte {
	m := hmac.New(sha256.New, key)
	for _, s := range []string{label, purpose} {
		m.Write(binary.LittleEndian.AppendUint32(nil, uint32(len(s))))
		m.Write([]byte(s))
	}
	m.Write(said)
	return m.Sum(nil)
}

// transcript is what two ends have said so far, and what they prove with.
type transcript struct {
	key     []byte
	purpose string
	said    []byte // see the package comment
}

func (t *transcript) say(b []byte)            { t.said = append(t.said, b...) }
func (t *transcript) mac(label string) []byte { return mac(t.key, label, t.purpose, t.said) }

// nonce is an end's own nonce.
type nonce struct {
	public  [nonceSize]byte
	private *ecdh.PrivateKey // nil: the nonce is random
}

// newNonce returns a fresh nonce, a public key if agree is set.
func newNonce(agree bool) (n nonce, err error) {
	if !agree {
		rand.Read(n.public[:])
		return n, nil
	}
	if n.private, err = ecdh.X25519().GenerateKey(rand.Reader); err != nil {
		return nonce{}, fmt.Errorf("key agreement: %w", err)
	}
	n.public = [nonceSize]byte(n.private.PublicKey().Bytes())
	return n, nil
}

// session ends a handshake: everything has been said, and the session has n's private key.
func (n *nonce) session(theirs []byte, t *transcript) *Session {
	private := n.private
	n.private = nil
	if private == nil {
		return nil
	}
	return &Session{private: private, theirs: bytes.Clone(theirs), salt: t.mac("session")}
}

func exchange(private *ecdh.PrivateKey, theirs, salt []byte) (prk []byte, err error) {
	public, err := ecdh.X25519().NewPublicKey(theirs)
	if err != nil {
		return nil, err
	}
	shared, err := private.ECDH(public) // an error if the result is zero, which is no secret
	if err != nil {
		return nil, err
	}
	return hkdf.Extract(sha256.New, shared, salt)
}

// Session holds what the two ends of a connection have agreed on. It is nil at an end that did not
// ask for it. It may be used concurrently. The first call of Key costs a scalar multiplication, and
// forgets the private key; a Session that is not needed costs nothing more.
type Session struct {
	once         sync.Once
	private      *ecdh.PrivateKey // until the first call of Key
	theirs, salt []byte
	prk          []byte
	err          error
}

// agree computes what keys are made of.
func (s *Session) agree() {
	s.prk, s.err = exchange(s.private, s.theirs, s.salt)
	s.private = nil
	if s.err != nil {
		s.err = fmt.Errorf("key agreement: %w", s.err)
	}
}

// Key returns a key of n bytes for the purpose that label names: directions, for example, have
// labels of their own. Both ends get the same key if both asked for agreement. An end cannot see
// whether the other one did: let the dialler say so in Hello.Extra, and Admit refuse what does not
// fit. There is an error at an end that did not ask, and if the other end's nonce is no proper
// public key.
func (s *Session) Key(label string, n int) ([]byte, error) {
	if s == nil {
		return nil, errors.New("this end did not ask for key agreement")
	}
	s.once.Do(s.agree)
	switch {
	case s.err != nil:
		return nil, s.err
	case n < 1:
		return nil, fmt.Errorf("a key of %d bytes", n)
	}
	return hkdf.Expand(sha256.New, s.prk, label, n)
}

// likeMagic reports whether in begins, as far as it has arrived, as the magic own does in any
// version.
func likeMagic(in []byte, own string) bool {
	for i, c := range in[:min(len(in), magicSize)] {
		if c != own[i] && (i != versionAt || !('1' <= c && c <= '9' || 'A' <= c && c <= 'Z')) {
			return false
		}
	}
	return true
}

// errStranger is an ErrAuth whose cause is known, and is not the secret.
var errStranger error = stranger{}

type stranger struct{}

func (stranger) Error() string        { return "the other end does not speak this protocol" }
func (stranger) Is(target error) bool { return target == ErrAuth }

// checkMagic returns nil if in may still become, or begins with, the magic own. The error wraps
// ErrVersion if in begins with that of another version, and ErrAuth otherwise.
func checkMagic(in []byte, own string) error {
	switch {
	case !likeMagic(in, own):
		return errStranger
	case len(in) >= magicSize && in[versionAt] != own[versionAt]:
		return fmt.Errorf("%w: the other end speaks %s, this one %s: run the same build at both", ErrVersion,
			in[:versionAt+1], own[:versionAt+1])
	}
	return nil
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

func checkKey(key []byte) error {
	if len(key) < MinSecret {
		return fmt.Errorf("the secret has %d bytes, at least %d are needed", len(key), MinSecret)
	}
	return nil
}

// Client proves the dialling end with the job's secret or, if h names a client, with that client's
// key (of at least MinSecret bytes). purpose separates services that share a secret. agree asks for
// key agreement; the session is nil without. conn's deadline bounds Client. An error that wraps
// ErrAuth: the two ends do not share key and purpose; ErrVersion: the acceptor is of another build;
// a *Refusal: the ends share key and purpose, and the acceptor refused; ErrTurnedAway: it ended the
// connection without a verdict.
func Client(conn net.Conn, key []byte, purpose string, h Hello, agree bool) (*Session, error) {
	mine, err := newNonce(agree)
	if err != nil {
		return nil, err
	}
	return client(conn, key, purpose, h, mine)
}

func client(conn net.Conn, key []byte, purpose string, h Hello, mine nonce) (*Session, error) {
	if err := checkKey(key); err != nil {
		return nil, err
	}
	our := "our"
	if h.Client != "" {
		if err := CheckClient(h.Client); err != nil {
			return nil, err
		}
		our = "client " + h.Client + "'s"
	}
	t := transcript{key: key, purpose: purpose, said: make([]byte, nameSize, saidSize+nonceSize+helloSize+verdictLen)}
	copy(t.said, h.Client)
	t.say(mine.public[:])
	opening := append([]byte(dialMagic), t.said...)
	if _, err := conn.Write(append(opening, t.mac("open")...)); err != nil {
		return nil, unanswered(err)
	}
	var answer [answerSize]byte
	if _, err := io.ReadFull(conn, answer[:magicSize]); err != nil {
		return nil, unanswered(err)
	}
	if err := checkMagic(answer[:magicSize], acceptMagic); err != nil {
		return nil, err
	}
	theirs := answer[magicSize:]
	if _, err := io.ReadFull(conn, theirs); err != nil {
		return nil, unanswered(err)
	}
	if [nonceSize]byte(theirs) == denied {
		return nil, fmt.Errorf("%w: the other end found %s first message wrong", ErrAuth, our)
	}
	hello := h.encode()
	t.say(theirs)
	t.say(hello[:])
	if _, err := conn.Write(append(t.mac("dial"), hello[:]...)); err != nil {
		return nil, unanswered(err)
	}
	var in [sha256.Size + verdictLen + maxText]byte
	fixed := in[:sha256.Size+verdictLen]
	if _, err := io.ReadFull(conn, fixed); err != nil {
		return nil, unanswered(err)
	}
	if [sha256.Size]byte(in[:]) == denied {
		return nil, fmt.Errorf("%w: the other end found %s proof wrong", ErrAuth, our)
	}
	n := int(binary.LittleEndian.Uint16(fixed[sha256.Size+2:]))
	if n > maxText {
		return nil, fmt.Errorf("%w: malformed verdict", ErrAuth)
	}
	verdict := in[sha256.Size : len(fixed)+n]
	if _, err := io.ReadFull(conn, verdict[verdictLen:]); err != nil {
		return nil, unanswered(err)
	}
	t.say(verdict)
	if !hmac.Equal(in[:sha256.Size], t.mac("accept")) {
		return nil, fmt.Errorf("%w: the other end's proof is wrong", ErrAuth)
	}
	if code := verdict[0]; code != 0 {
		return nil, &Refusal{Code: code, Text: plain.Text(string(verdict[verdictLen:]))}
	}
	return mine.session(theirs, &t), nil
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
	transcript        // of a valid first message, and of what follows
	client     string // the dialler; "": holder of the job's secret
	mine       nonce
}

// opened reports whether the first message was valid.
func (h *half) opened() bool { return h.said != nil }

// want returns the length of the next message.
func (h *half) want() int {
	if h.opened() {
		return proofSize
	}
	return openingSize
}

// begin checks the beginning in of a message, as far as it has arrived. With an error, answer is
// the last message to the dialler, nil for one that does not speak the protocol.
func (h *half) begin(in []byte) (answer []byte, err error) {
	if h.opened() {
		return nil, nil
	}
	if err = checkMagic(in, dialMagic); errors.Is(err, ErrVersion) {
		answer = append([]byte(acceptMagic), denied[:]...)
	}
	return answer, err
}

// opening handles the dialler's first message and returns the answer, the last one if there is an
// error.
func (h *half) opening(a *Acceptor, in []byte) (answer []byte, err error) {
	if answer, err := h.begin(in); err != nil {
		return answer, err
	}
	answer = append(make([]byte, 0, answerSize), acceptMagic...)
	said, tag := in[magicSize:magicSize+saidSize], in[magicSize+saidSize:]
	client, err := decodeName(said[:nameSize])
	if err != nil {
		return append(answer, denied[:]...), fmt.Errorf("%w: the first message: %w", ErrAuth, err)
	}
	key := a.Secret
	if client != "" {
		if key, err = Derive(a.Secret, client); err != nil {
			return nil, err
		}
	}
	if !hmac.Equal(tag, mac(key, "open", a.Purpose, said)) {
		return append(answer, denied[:]...), fmt.Errorf("%w: the first message is wrong", ErrAuth)
	}
	if h.mine, err = newNonce(a.Agree); err != nil {
		return nil, err
	}
	h.client = client
	h.transcript = transcript{key, a.Purpose, make([]byte, 0, saidSize+nonceSize+helloSize+verdictLen)}
	h.say(said)
	h.say(h.mine.public[:])
	return append(answer, h.mine.public[:]...), nil
}

// proof handles the dialler's second message. With an error, answer is the last message to it.
func (h *half) proof(in []byte) (who Hello, answer []byte, err error) {
	hello := in[sha256.Size:]
	h.say(hello)
	if !hmac.Equal(in[:sha256.Size], h.mac("dial")) {
		return Hello{}, append(denied[:len(denied):len(denied)], 0xff, 0, 0, 0),
			fmt.Errorf("%w: the proof is wrong", ErrAuth)
	}
	return decodeHello(h.client, hello), nil, nil
}

// verdict returns the last message to an authenticated dialler; refused is the reason of a refusal,
// or nil.
func (h *half) verdict(refused error) []byte {
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
	h.say(verdict)
	return append(h.mac("accept"), verdict...)
}

// session returns the session of a dialler that was told that it is accepted.
func (h *half) session() *Session {
	return h.mine.session(h.said[nameSize:nameSize+nonceSize], &h.transcript)
}

// warnings bounds the refused connections a minute that are logged as warnings.
const warnings = 5

// LogRefused returns an Acceptor's Refused that logs: the first few ends in a minute that do not
// know the secret, are of another build, or fill the listener, as warnings, everything else for
// debugging. A peer that leaves within a handshake, or that Admit refuses, is normal.
func LogRefused(log *slog.Logger, service string) func(net.Conn, error) {
	var mu sync.Mutex
	var since time.Time
	var n int
	return func(c net.Conn, err error) {
		level, more := slog.LevelDebug, ""
		if errors.Is(err, ErrAuth) || errors.Is(err, ErrVersion) || errors.Is(err, ErrDisplaced) {
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

// LogFailing returns an Acceptor's Failing that logs a warning, at most once a minute.
func LogFailing(log *slog.Logger, service string) func(error) {
	var last time.Time
	return func(err error) {
		if time.Since(last) >= time.Minute {
			last = time.Now()
			log.Warn(service+" cannot accept connections for now", "err", files.Explain(err))
		}
	}
}
