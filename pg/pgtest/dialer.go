package pgtest

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"
	"time"

	"tutti/pg"
)

// relayVariable is the environment variable that tells a rank's process its relay, rank and token:
// HOST:PORT/RANK/TOKEN.
const relayVariable = "PGTEST_RELAY"

// request is the first line that a relay reads from a connection, as JSON. It answers with a line:
// "ok", "refused" or an error. After "ok" the connection is one with Addr.
type request struct {
	Token string
	From  int
	To    int
	Addr  string          `json:",omitempty"`
	Do    json.RawMessage `json:",omitempty"` // instead: a request for the relay's owner
}

// Dialer returns a dialer through the test's relay, nil if there is none. It is the
// pg.Config.Dialer of a rank in which the option Faults injects faults. Run sets it for its ranks;
// a program that Exec starts may set it.
func Dialer() pg.Dialer {
	variable := os.Getenv(relayVariable)
	if variable == "" {
		return nil
	}
	return func(ctx context.Context, _ *net.Dialer, to int, address string) (net.Conn, error) {
		c, err := askRelay(ctx, variable, request{To: to, Addr: address})
		if err != nil {
			return nil, &net.OpError{Op: "dial", Net: "tcp", Err: err}
		}
		return c, nil
	}
}

// askRelay sends a request to the relay in variable, a value of relayVariable, and returns the
// connection after an answer of "ok".
func askRelay(ctx context.Context, variable string, r request) (net.Conn, error) {
	part := strings.Split(variable, "/")
	if len(part) != 3 {
		return nil, fmt.Errorf("%s=%q, want HOST:PORT/RANK/TOKEN", relayVariable, variable)
	}
	if _, err := fmt.Sscan(part[1], &r.From); err != nil {
		return nil, fmt.Errorf("%s=%q: the rank: %w", relayVariable, variable, err)
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

func ask(c net.Conn, r request) (string, error) {
	if err := json.NewEncoder(c).Encode(r); err != nil {
		return "", err
	}
	// Byte by byte: the bytes after the line belong to the connection's user.
	line, err := bufio.NewReaderSize(oneByte{c}, 16).ReadString('\n')
	return strings.TrimSuffix(line, "\n"), err
}

type oneByte struct{ c net.Conn }

func (o oneByte) Read(b []byte) (int, error) { return o.c.Read(b[:1]) }
