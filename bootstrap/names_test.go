package bootstrap

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"tutti/internal/dial"
)

// slowDNS makes this process's resolver one that answers each question with 127.0.0.1, but not
// before release is called, until the end of the test. asked gets the types of the questions.
func slowDNS(t *testing.T) (asked <-chan byte, release func()) {
	questions, answer := make(chan byte, 100), make(chan struct{})
	was := net.DefaultResolver
	net.DefaultResolver = &net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) {
		mine, theirs := net.Pipe()
		go func() {
			defer theirs.Close()
			q, err := question(theirs)
			if err != nil {
				return
			}
			r, kind := reply(q)
			questions <- kind
			<-answer
			theirs.Write(r)
		}()
		return mine, nil
	}}
	release = sync.OnceFunc(func() { close(answer) })
	t.Cleanup(func() {
		release()
		net.DefaultResolver = was
	})
	return questions, release
}

// address is the type of questions for IPv4 addresses.
const address = 1

// question reads a message of DNS from a stream.
func question(c io.Reader) ([]byte, error) {
	var size [2]byte
	if _, err := io.ReadFull(c, size[:]); err != nil {
		return nil, err
	}
	b := make([]byte, binary.BigEndian.Uint16(size[:]))
	_, err := io.ReadFull(c, b)
	return b, err
}

// reply answers a question for IPv4 addresses with 127.0.0.1, and others with nothing. It returns
// the type, too.
func reply(q []byte) (r []byte, kind byte) {
	const header = 12
	end := header
	for q[end] != 0 {
		end += 1 + int(q[end])
	}
	end += 5 // the root, type and class
	kind = q[end-3]
	b := append(q[:end:end], 0xc0, header, 0, address, 0, 1, 0, 0, 0, 5, 0, 4, 127, 0, 0, 1)
	b[2], b[3] = 0x81, 0x80
	clear(b[6:header]) // of sections but the question
	if kind == address {
		b[7] = 1
	} else {
		b = b[:end]
	}
	return append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...), kind
}

// A name that takes longer to resolve than an attempt lasts is resolved for the next one. The error
// says meanwhile what is awaited.
func TestSlowNames(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	for name, via := range map[string]dial.Func{
		"net.Dialer": nil,
		"a program's": func(ctx context.Context, d *net.Dialer, _ int, address string) (net.Conn, error) {
			return d.DialContext(ctx, "tcp", address)
		},
	} {
		t.Run(name, func(t *testing.T) {
			asked, release := slowDNS(t)
			life, end := context.WithCancel(t.Context())
			defer end()
			d := &dialer{life: life, via: via, made: map[string]*connecting{}}
			ctx, cancel := context.WithCancel(t.Context())
			failed := make(chan error, 1)
			go func() {
				_, err := d.dial(ctx, "store.test.:"+port)
				failed <- err
			}()
			for <-asked != address {
			}
			cancel()
			const want = "the host name store.test. has not been resolved yet: DNS has not answered for "
			if err := <-failed; err == nil || !strings.Contains(err.Error(), want) || !d.slow.Load() {
				t.Errorf("%v, want one that says %q", err, want)
			}
			if err := d.why(); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("the reason is %v, want one that says %q", err, want)
			}
			ctx, cancel = context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			go release()
			c, err := d.dial(ctx, "store.test.:"+port)
			if err != nil {
				t.Fatal(err)
			}
			c.Close()
			if d.why() != nil || len(d.made) > 0 {
				t.Errorf("the reason is %v; %d connections under way", d.why(), len(d.made))
			}
			for len(asked) > 0 {
				if <-asked == address {
					t.Error("DNS was asked again")
				}
			}
		})
	}
}

// An attempt that ends while it connects leaves nothing, and so does the end of the handle.
func TestConnectionsEnd(t *testing.T) {
	life, end := context.WithCancel(t.Context())
	defer end()
	ctx, cancel := context.WithCancel(t.Context())
	d := &dialer{life: life, made: map[string]*connecting{},
		via: func(ctx context.Context, _ *net.Dialer, _ int, _ string) (net.Conn, error) {
			cancel()
			<-ctx.Done()
			return nil, ctx.Err()
		}}
	if _, err := d.dial(ctx, "192.0.2.1:1"); !errors.Is(err, context.Canceled) || len(d.made) > 0 || d.slow.Load() {
		t.Errorf("%v; %d connections under way", err, len(d.made))
	}
	mine, theirs := net.Pipe()
	d.via = func(context.Context, *net.Dialer, int, string) (net.Conn, error) { return mine, nil }
	d.begin("192.0.2.1:1") // and nobody takes it
	end()
	theirs.SetReadDeadline(time.Now().Add(30 * time.Second))
	if _, err := theirs.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("the connection stays open after the handle's end: %v", err)
	}
	d.via = nil
	if _, err := d.dial(t.Context(), "192.0.2.1:1"); !errors.Is(err, context.Canceled) || d.last.Load() != nil {
		t.Errorf("after the handle's end: %v, and the reason is %v", err, d.last.Load())
	}
}
