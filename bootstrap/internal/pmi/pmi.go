// Package pmi implements a client of version 1 of the process manager's interface (PMI), by which
// processes of a launch exchange a few bytes through their launcher: MPICH's and Intel MPI's Hydra,
// and Slurm's srun --mpi=pmi2, which supports version 1, too.
//
// Both sides write lines of KEY=VALUE pairs, separated by spaces; the process asks, the launcher
// answers. A process can use its only connection once: after Close the launcher does not answer on
// it any more.
package pmi

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Address is the address of the launcher, from the environment. The zero value: there is none.
type Address struct {
	FD   int    // PMI_FD, a descriptor that this process has inherited; 0: none
	Port string // PMI_PORT, HOST:PORT
	ID   string // PMI_ID, which goes with it
}

// FromEnv reads the launcher's variables. Invalid values are ignored.
func FromEnv(getenv func(string) string) Address {
	var a Address
	if fd, err := strconv.Atoi(getenv("PMI_FD")); err == nil && fd > 2 {
		a.FD = fd
		return a
	}
	if port, id := getenv("PMI_PORT"), getenv("PMI_ID"); port != "" && fit(id) == nil {
		a.Port, a.ID = port, id
	}
	return a
}

// A ProtocolError says that the launcher's answer does not match the request.
type ProtocolError struct {
	Asked  string // the command
	Answer string // at most 200 bytes of it
	Why    string
}

func (e *ProtocolError) Error() string {
	return fmt.Sprintf("PMI: the launcher answers %s with %q: %s", e.Asked, e.Answer, e.Why)
}

// Limits on the launcher's answers.
const (
	maxLine  = 64 << 10
	maxNames = 64
)

// Client is a process's connection to its launcher. Its methods are called by one goroutine at a
// time; each returns when its ctx ends, and after an error all fail.
type Client struct {
	conn net.Conn
	in   *bufio.Reader
	kvs  string
	key  int // the largest sizes of keys and values
	val  int
}

// Dial opens the connection. It fails if the process has used it before.
func Dial(ctx context.Context, a Address) (_ *Client, err error) {
	var conn net.Conn
	switch {
	case a.FD > 0:
		if conn, err = adopt(a.FD); err != nil {
			return nil, fmt.Errorf("PMI: descriptor %d (PMI_FD) is no connection with the launcher: %w", a.FD, err)
		}
	case a.Port != "":
		if conn, err = (&net.Dialer{}).DialContext(ctx, "tcp", a.Port); err != nil {
			return nil, fmt.Errorf("PMI: %w", err)
		}
	default:
		return nil, errors.New("PMI: the launcher has given this process no connection (PMI_FD, PMI_PORT)")
	}
	c := &Client{conn: conn, in: bufio.NewReaderSize(conn, maxLine)}
	defer func() {
		if err != nil {
			c.hangUp()
		}
	}()
	defer c.until(ctx)(&err)
	if a.FD == 0 {
		if err := c.identify(a.ID); err != nil {
			return nil, err
		}
	}
	if _, err := c.ask("init", "response_to_init", "pmi_version", "1", "pmi_subversion", "1"); err != nil {
		return nil, err
	}
	most, err := c.ask("get_maxes", "maxes")
	if err != nil {
		return nil, err
	}
	for name, to := range map[string]*int{"keylen_max": &c.key, "vallen_max": &c.val} {
		if *to, err = strconv.Atoi(most[name]); err != nil || *to < 1 {
			return nil, &ProtocolError{"get_maxes", clip(most[name]), name + " is no number"}
		}
	}
	space, err := c.ask("get_my_kvsname", "my_kvsname")
	if err != nil {
		return nil, err
	}
	if c.kvs = space["kvsname"]; fit(c.kvs) != nil {
		return nil, &ProtocolError{"get_my_kvsname", clip(c.kvs), "no name of a key-value space"}
	}
	return c, nil
}

// adopt turns an inherited descriptor into a connection. The descriptor stays open, so that its
// number never is that of something else; programs that this process starts do not inherit it.
func adopt(fd int) (net.Conn, error) {
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(own), "PMI_FD")
	defer f.Close()
	conn, err := net.FileConn(f) // a duplicate
	if err == nil {
		unix.CloseOnExec(fd)
	}
	return conn, err
}

// hangUp ends the connection, of which PMI_FD may be a duplicate.
func (c *Client) hangUp() {
	if s, ok := c.conn.(interface{ CloseRead() error }); ok {
		s.CloseRead()
	}
	if s, ok := c.conn.(interface{ CloseWrite() error }); ok {
		s.CloseWrite()
	}
	c.conn.Close()
}

// identify sends the rank on a connection to PMI_PORT. The launcher's answers are not needed.
func (c *Client) identify(id string) error {
	if _, err := c.ask("initack", "initack", "pmiid", id); err != nil {
		return err
	}
	for range 3 { // size, rank and debug
		line, err := c.line()
		if err != nil {
			return err
		}
		if pairs, err := parse(line); err != nil || pairs["cmd"] != "set" {
			return &ProtocolError{"initack", clip(line), "expected cmd=set"}
		}
	}
	return nil
}

// Put sets a key of the launch, which others may get after the next Barrier. Key and value are
// printable ASCII without spaces and '='.
func (c *Client) Put(ctx context.Context, key, value string) (err error) {
	for _, s := range []string{key, value} {
		if err := fit(s); err != nil {
			return fmt.Errorf("PMI: put %s: %w", clip(key), err)
		}
	}
	if len(key) >= c.key || len(value) >= c.val { // the limits include a final zero byte
		return fmt.Errorf("PMI: put %s: a key of %d and a value of %d bytes; the launcher takes less than %d and %d",
			clip(key), len(key), len(value), c.key, c.val)
	}
	defer c.until(ctx)(&err)
	_, err = c.ask("put", "put_result", "kvsname", c.kvs, "key", key, "value", value)
	return err
}

// Get returns the value of a key that was put before the last Barrier.
func (c *Client) Get(ctx context.Context, key string) (value string, err error) {
	if err := fit(key); err != nil {
		return "", fmt.Errorf("PMI: get %s: %w", clip(key), err)
	}
	defer c.until(ctx)(&err)
	a, err := c.ask("get", "get_result", "kvsname", c.kvs, "key", key)
	return a["value"], err
}

// Barrier returns when all processes of the launch have called it.
func (c *Client) Barrier(ctx context.Context) (err error) {
	defer c.until(ctx)(&err)
	_, err = c.ask("barrier_in", "barrier_out")
	return err
}

// closeTime bounds Close.
const closeTime = 5 * time.Second

// Close finalizes the connection: the launcher takes a process that ends without it to have failed.
func (c *Client) Close() error {
	defer c.hangUp()
	c.conn.SetDeadline(time.Now().Add(closeTime))
	_, err := c.ask("finalize", "finalize_ack")
	return err
}

// until makes the connection's operations end with ctx; the caller defers the result.
func (c *Client) until(ctx context.Context) func(*error) {
	c.conn.SetDeadline(time.Time{})
	stop := context.AfterFunc(ctx, func() { c.conn.SetDeadline(time.Unix(1, 0)) })
	return func(err *error) {
		if !stop() && *err != nil {
			*err = fmt.Errorf("PMI: %w", context.Cause(ctx))
		}
	}
}

// ask sends a command and returns the pairs of the answer.
func (c *Client) ask(command, answer string, pairs ...string) (map[string]string, error) {
	var b strings.Builder
	b.WriteString("cmd=" + command)
	for i := 0; i < len(pairs); i += 2 {
		b.WriteString(" " + pairs[i] + "=" + pairs[i+1])
	}
	b.WriteByte('\n')
	if _, err := c.conn.Write([]byte(b.String())); err != nil {
		return nil, broken(command, err)
	}
	line, err := c.line()
	if err != nil {
		return nil, broken(command, err)
	}
	got, err := parse(line)
	switch {
	case err != nil:
		return nil, &ProtocolError{command, clip(line), err.Error()}
	case got["cmd"] != answer:
		return nil, &ProtocolError{command, clip(line), "expected cmd=" + answer}
	case got["rc"] != "" && got["rc"] != "0":
		return nil, &ProtocolError{command, clip(line), "the launcher refuses"}
	}
	return got, nil
}

func broken(command string, err error) error {
	if errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) {
		err = fmt.Errorf("%w: another process of this rank may have used the connection", err)
	}
	return fmt.Errorf("PMI: %s: the launcher's connection is broken: %w", command, err)
}

func (c *Client) line() (string, error) {
	b, err := c.in.ReadSlice('\n')
	if err != nil {
		return "", err
	}
	return string(b[:len(b)-1]), nil
}

// parse reads a line of KEY=VALUE pairs. Words without '=' belong to a text that is not used.
func parse(line string) (map[string]string, error) {
	pairs := map[string]string{}
	for word := range strings.FieldsSeq(line) {
		name, value, found := strings.Cut(word, "=")
		if !found {
			continue
		}
		if _, twice := pairs[name]; twice || name == "" {
			return nil, fmt.Errorf("%q is there twice", clip(name))
		}
		if pairs[name] = value; len(pairs) > maxNames {
			return nil, fmt.Errorf("more than %d pairs", maxNames)
		}
	}
	return pairs, nil
}

// fit validates a word of the protocol.
func fit(s string) error {
	if s == "" {
		return errors.New("an empty word")
	}
	for _, c := range []byte(s) {
		if c <= ' ' || c >= 0x7f || c == '=' {
			return fmt.Errorf("%q does not belong into a word", c)
		}
	}
	return nil
}

func clip(s string) string { return s[:min(len(s), 200)] }
