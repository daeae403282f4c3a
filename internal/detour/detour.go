// Package detour lets a test stand between a rank and everything that the rank connects to: package
// pgtest, whose relay cuts, delays and loses what passes. Where the variable is not set, which is
// everywhere else, connections are what they always are.
package detour

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Variable is the environment variable that names the relay, the rank and the test's token:
// HOST:PORT/RANK/TOKEN.
const Variable = "TUTTI_DETOUR"

// Store stands for the job's store where a rank is meant.
const Store = -1

// Request is the first line that a relay reads from a connection, as JSON. It answers with a line
// too: "ok", "refused" or what else went wrong; afterwards the connection is that with Addr.
type Request struct {
	Token string
	From  int
	To    int
	Addr  string          `json:",omitempty"`
	Do    json.RawMessage `json:",omitempty"` // instead: something that the relay's owner understands
}

var relay = sync.OnceValue(func() string { return os.Getenv(Variable) })

// Dial connects to address, where rank to listens or, with Store, the store: by d, or through the
// relay.
func Dial(ctx context.Context, d *net.Dialer, to int, address string) (net.Conn, error) {
	if relay() == "" {
		return d.DialContext(ctx, "tcp", address)
	}
	c, err := Ask(ctx, relay(), Request{To: to, Addr: address})
	if err != nil {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: err}
	}
	return c, nil
}

// Ask sends a request to the relay that variable, a value of Variable, names, and returns the
// connection after an answer of "ok".
func Ask(ctx context.Context, variable string, r Request) (net.Conn, error) {
	part := strings.Split(variable, "/")
	if len(part) != 3 {
		return nil, fmt.Errorf("%s=%q, want HOST:PORT/RANK/TOKEN", Variable, variable)
	}
	if _, err := fmt.Sscan(part[1], &r.From); err != nil {
		return nil, fmt.Errorf("%s=%q: the rank: %w", Variable, variable, err)
	}
	r.Token = part[2]
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", part[0])
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })
	answer, err := ask(c, r)
	switch {
	case !stop():
		err = ctx.Err()
	case err == nil && answer == "refused":
		err = syscall.ECONNREFUSED
	case err == nil && answer != "ok":
		err = errors.New(answer)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

func ask(c net.Conn, r Request) (string, error) {
	if err := json.NewEncoder(c).Encode(r); err != nil {
		return "", err
	}
	// Byte by byte: what follows the line is another's.
	line, err := bufio.NewReaderSize(oneByte{c}, 16).ReadString('\n')
	return strings.TrimSuffix(line, "\n"), err
}

type oneByte struct{ c net.Conn }

func (o oneByte) Read(b []byte) (int, error) { return o.c.Read(b[:1]) }
