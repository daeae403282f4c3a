package endpoint_test

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"tutti/bootstrap"
	"tutti/endpoint"
	"tutti/mem"
)

const (
	secret = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"
	both   = endpoint.Read | endpoint.Write
)

// server is an endpoint that client.py is run against.
type server struct {
	*testing.T
	*endpoint.Endpoint
	ctx    context.Context
	python string
	key    string // that the client has
}

// serve starts an endpoint with a secret.
func serve(t *testing.T, secret string) *server {
	return serveWith(t, endpoint.Config{Secret: secret})
}

// serveWith starts an endpoint.
func serveWith(t *testing.T, cfg endpoint.Config) *server {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skipf("skipped: there is no python3: %v", err)
	}
	const check = "import sys; assert sys.version_info >= (3, 8), sys.version"
	if out, err := exec.Command(python, "-c", check).CombinedOutput(); err != nil {
		t.Skipf("skipped: %s is not Python 3.8 or later: %s", python, out)
	}
	c, err := endpoint.NewContext(endpoint.ContextConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	cfg.Name, cfg.Interfaces = "server", "127.0.0.1"
	e, err := endpoint.New(c, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	return &server{t, e, ctx, python, cfg.Secret}
}

// register registers memory with other bytes for each name.
func (s *server) register(name string, n int, cfg endpoint.RegionConfig) []byte {
	s.Helper()
	b := pattern(n, uint64(len(s.Regions())))
	if _, err := s.Register(name, mem.Host(b, mem.Anywhere), cfg); err != nil {
		s.Fatal(err)
	}
	return b
}

func pattern(n int, seed uint64) []byte {
	b := make([]byte, n)
	r := rand.New(rand.NewPCG(seed, 1))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

// client is a run of client.py.
type client struct {
	s        *server
	cmd      *exec.Cmd
	out, err bytes.Buffer
}

// start starts client.py with a command.
func (s *server) start(args ...string) *client {
	s.Helper()
	return s.startFile("client.py", args...)
}

// startFile is start for another file than client.py.
func (s *server) startFile(file string, args ...string) *client {
	s.Helper()
	args = append([]string{file, s.Info().Addrs[0]}, args...)
	c := &client{s: s, cmd: exec.CommandContext(s.ctx, s.python, args...)}
	c.cmd.Env = append(os.Environ(), "TUTTI_SECRET="+s.key)
	c.cmd.Stdout, c.cmd.Stderr = &c.out, &c.err
	if err := c.cmd.Start(); err != nil {
		s.Fatal(err)
	}
	return c
}

// peer returns the client that connects next.
func (s *server) peer() *endpoint.Peer {
	s.Helper()
	p, err := s.Accept(s.ctx)
	if err != nil {
		s.Fatal(err)
	}
	return p
}

// ok waits for success and returns what the client wrote.
func (c *client) ok() []byte {
	c.s.Helper()
	if err := c.cmd.Wait(); err != nil || c.err.Len() > 0 {
		c.s.Fatalf("%q: %v: %s", c.cmd.Args, err, &c.err)
	}
	return c.out.Bytes()
}

// fails waits for an error of one line that contains want.
func (c *client) fails(want string) {
	c.s.Helper()
	err := c.cmd.Wait()
	var exit *exec.ExitError
	if text := c.err.String(); !errors.As(err, &exit) || exit.ExitCode() != 1 || !strings.Contains(text, want) ||
		!strings.HasPrefix(text, "client.py: ") || strings.Count(text, "\n") != 1 || c.out.Len() > 0 {
		c.s.Errorf("%q: %v, wrote %q and\n%swant an error with %q", c.cmd.Args, err, &c.out, text, want)
	}
}

// run runs a command that succeeds, and forgets the peer.
func (s *server) run(args ...string) []byte {
	s.Helper()
	c := s.start(args...)
	p := s.peer()
	out := c.ok()
	p.Close()
	return out
}

// fail is run for a command that fails after it has connected.
func (s *server) fail(want string, args ...string) {
	s.Helper()
	c := s.start(args...)
	p := s.peer()
	c.fails(want)
	p.Close()
}

// file writes a file and returns its path.
func (s *server) file(b []byte) string {
	s.Helper()
	path := filepath.Join(s.TempDir(), "file")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		s.Fatal(err)
	}
	return path
}

func (s *server) same(what string, got, want []byte) {
	s.Helper()
	if !bytes.Equal(got, want) {
		s.Errorf("%s: %d bytes, not the %d expected", what, len(got), len(want))
	}
}

func TestClientReadsAndWrites(t *testing.T) {
	s := serve(t, secret)
	const big = 3 << 20
	data := s.register("data", big+100, endpoint.RegionConfig{Rights: both})
	fixed := s.register("fixed", 1000, endpoint.RegionConfig{})
	s.register("empty", 0, endpoint.RegionConfig{Rights: both})

	s.same("read", s.run("read", "data"), data)
	s.same("read of a part", s.run("read", "fixed", "7", "11"), fixed[7:18])
	s.same("read from an offset", s.run("read", "fixed", "990"), fixed[990:])
	s.same("read of 0 bytes", s.run("read", "fixed", "1000", "0"), nil)
	s.same("read of an empty region", s.run("read", "empty"), nil)

	want := bytes.Clone(data)
	for i, n := range []int{big, 1, 0} {
		b := pattern(n, uint64(100+i))
		copy(want[i*13:], b)
		s.run("write", "data", strconv.Itoa(i*13), s.file(b))
		s.same("region after write", data, want)
	}
	s.run("write", "empty", "0", s.file(nil))

	s.fail("no such region", "read", "other")
	s.fail("no such region", "write", "other", "0", s.file([]byte("x")))
	s.fail("out of the region's bounds", "read", "fixed", "990", "11")
	s.fail("out of the region's bounds", "read", "fixed", "1001")
	s.fail("out of the region's bounds", "write", "data", strconv.Itoa(len(data)), s.file([]byte("x")))
	s.fail("does not allow that", "write", "fixed", "0", s.file([]byte("x")))
	s.same("region after failures", data, want)
	s.same("fixed", fixed, pattern(1000, 1))
}

// What the standard output does not take is written again, or an error.
func TestClientWritesAllOrFails(t *testing.T) {
	s := serve(t, secret)
	data := s.register("data", 1<<20, endpoint.RegionConfig{})
	for _, unbuffered := range []string{"", "1"} {
		for _, limit := range []string{"unlimited", "100"} {
			path := filepath.Join(t.TempDir(), "out")
			c := &client{s: s, cmd: exec.CommandContext(s.ctx, "bash", "-c",
				`ulimit -f "$3"; trap "" XFSZ; exec "$0" client.py "$1" read data >"$2"`, s.python, s.Info().Addrs[0],
				path, limit)}
			c.cmd.Env = append(os.Environ(), "TUTTI_SECRET="+s.key, "PYTHONUNBUFFERED="+unbuffered)
			c.cmd.Stdout, c.cmd.Stderr = &c.out, &c.err
			if err := c.cmd.Start(); err != nil {
				t.Skipf("skipped: there is no bash: %v", err)
			}
			p := s.peer()
			if limit != "unlimited" {
				c.fails("File too large")
			} else {
				c.ok()
				got, err := os.ReadFile(path)
				if err != nil {
					t.Fatal(err)
				}
				s.same("output", got, data)
			}
			p.Close()
		}
	}
}

// Wrong arguments are errors of one line.
func TestClientArguments(t *testing.T) {
	s := serve(t, secret)
	s.register("data", 100, endpoint.RegionConfig{Rights: both})
	const huge = "99999999999999999999999999"
	one := s.file([]byte("x"))
	for _, args := range [][]string{{"read", "data", "-1"}, {"read", "data", huge}, {"read", "data", "0", "-1"},
		{"read", "data", "0", huge}, {"read", "data", "-5", "7"}, {"read", "data", "9223372036854775808", "1"},
		{"write", "data", "-1", one}, {"write", "data", huge, one}} {
		s.fail("out of the region's bounds", args...)
	}
	for _, name := range []string{"", strings.Repeat("x", 256), strings.Repeat("x", 100000)} {
		s.fail("the name of a region has 1 to 255 bytes", "read", name)
		s.fail("the name of a region has 1 to 255 bytes", "write", name, "0", one)
	}
	s.fail("no such region", "read", strings.Repeat("x", 255))
	for _, address := range []string{"x", ":1", "a..b:1", strings.Repeat("x", 64) + ":1", "\xff:1", "ä:1",
		"127.0.0.1:0", "127.0.0.1:65536"} {
		c := &client{s: s, cmd: exec.CommandContext(s.ctx, s.python, "client.py", address, "ls")}
		c.cmd.Env = append(os.Environ(), "TUTTI_SECRET="+s.key)
		c.cmd.Stdout, c.cmd.Stderr = &c.out, &c.err
		if err := c.cmd.Start(); err != nil {
			t.Fatal(err)
		}
		c.fails("is not HOST:PORT")
	}
}

// A client that ends says so, and is no session that was lost.
func TestClientSaysBye(t *testing.T) {
	s := serve(t, secret)
	s.register("data", 100, endpoint.RegionConfig{})
	for _, args := range [][]string{{"ls"}, {"read", "data"}, {"read", "other"}} {
		c := s.start(args...)
		p := s.peer()
		c.cmd.Wait()
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for s.Stats().Connected > 0 {
			select {
			case <-tick.C:
			case <-s.ctx.Done():
				t.Fatal("the client does not go")
			}
		}
		p.Close()
	}
	if x := s.Stats(); x.Broken != 0 {
		t.Errorf("%d sessions of clients were lost: %+v", x.Broken, x)
	}
}

func TestClientLists(t *testing.T) {
	s := serve(t, secret)
	s.same("nothing", s.run("ls"), nil)
	var want []string
	for i := range 1030 { // more than a page
		name := "r" + strconv.Itoa(10000+i)
		s.register(name, i, endpoint.RegionConfig{Rights: both})
		want = append(want, "rw "+strconv.Itoa(i)+" "+name)
	}
	s.register("s", 5, endpoint.RegionConfig{})
	s.register("t\u00fc x", 6, endpoint.RegionConfig{Rights: endpoint.Write})
	want = append(want, "r- 5 s", "-w 6 t\u00fc x")
	got := regexp.MustCompile("(?m)^(..) +").ReplaceAllString(string(s.run("ls")), "$1 ")
	if got != strings.Join(want, "\n")+"\n" {
		t.Errorf("ls wrote\n%s", got)
	}
}

func TestClientSends(t *testing.T) {
	s := serve(t, secret)
	for _, n := range []int{0, 1, 64 << 10, 64<<10 + 1, 100000} { // the last two are offered
		text := hex.EncodeToString(pattern(n, 1))[:n]
		c := s.start("send", text)
		p := s.peer()
		buf := make([]byte, n+1)
		f := p.Recv(buf)
		if err := f.Wait(s.ctx); err != nil {
			t.Fatal(err)
		}
		s.same("message", buf[:f.Result(0).N], []byte(text))
		s.same("output", c.ok(), nil)
		p.Close()
	}
}

func TestClientReceives(t *testing.T) {
	s := serve(t, secret)
	for _, n := range []int{0, 1, 16 << 10, 16<<10 + 1, 3 << 20} { // the last two are offered
		msg := pattern(n, 2)
		c := s.start("recv")
		p := s.peer()
		if err := p.Send(msg).Wait(s.ctx); err != nil {
			t.Fatal(err)
		}
		s.same("message", c.ok(), msg)
		p.Close()
	}
}

// A program that uses client.py as a module, and more than one message in each direction.
func TestClientTalks(t *testing.T) {
	s := serve(t, secret)
	data := s.register("data", 100, endpoint.RegionConfig{Rights: both})
	const program = `
import sys, client
c = client.Client(sys.argv[1], sys.argv[2])
while (m := c.recv()) != b"end":
    c.write("data", len(m) % 100, b"x")
    c.send(m[::-1])
`
	c := &client{s: s, cmd: exec.CommandContext(s.ctx, s.python, "-c", program, s.Info().Addrs[0], secret)}
	c.cmd.Stdout, c.cmd.Stderr = &c.out, &c.err
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := s.peer()
	sizes := []int{5, 0, 1, 16 << 10, 20000, 3, 300000, 16 << 10, 16 << 10, 16 << 10, 16 << 10, 7}
	var sends []*endpoint.Future
	for i, n := range sizes {
		sends = append(sends, p.Send(pattern(n, uint64(i))))
	}
	given := p.Send(pattern(1000000, 3)) // waits behind the others, and is given up
	sends = append(sends, p.Send([]byte("ninth")))
	given.Cancel()
	sizes = append(sizes, 5)
	want := bytes.Clone(data)
	for i, n := range sizes { // the client may be ahead, and have written the byte of the next one
		msg := pattern(n, uint64(i))
		if i == len(sizes)-1 {
			msg = []byte("ninth")
		}
		buf := make([]byte, n+1)
		f := p.Recv(buf)
		if err := errors.Join(f.Wait(s.ctx), sends[i].Wait(s.ctx)); err != nil {
			t.Fatal(err)
		}
		buf = buf[:f.Result(0).N]
		for l, r := 0, len(buf)-1; l < r; l, r = l+1, r-1 {
			buf[l], buf[r] = buf[r], buf[l]
		}
		s.same("message "+strconv.Itoa(i), buf, msg)
		want[n%100] = 'x'
		s.same("byte "+strconv.Itoa(n%100), data[n%100:][:1], []byte("x"))
	}
	if err := p.Read(make([]byte, 1), "any", 0).Wait(s.ctx); !errors.Is(err, endpoint.ErrNoRegion) {
		t.Errorf("a read of the client's memory: %v, want ErrNoRegion", err)
	}
	if err := p.Send([]byte("end")).Wait(s.ctx); err != nil {
		t.Fatal(err)
	}
	s.same("output", c.ok(), nil)
	s.same("region", data, want)
}

// The client sends messages that are not received until they fill the window, of which each takes
// more than its bytes. The next one is offered.
func TestClientKeepsToTheWindow(t *testing.T) {
	s := serve(t, secret)
	const program = `
import sys, client
c = client.Client(sys.argv[1], sys.argv[2])
for i in range(66):
    c.send(bytes([i]) * 65536)
`
	c := &client{s: s, cmd: exec.CommandContext(s.ctx, s.python, "-c", program, s.Info().Addrs[0], secret)}
	c.cmd.Stdout, c.cmd.Stderr = &c.out, &c.err
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := s.peer()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for s.Stats().Offered.N == 0 {
		select {
		case <-tick.C:
		case <-s.ctx.Done():
			t.Fatalf("no message was offered: %+v", s.Stats())
		}
	}
	if n := s.Stats().Waiting.N; n != 63 {
		t.Errorf("%d messages of 64 KiB have gone at once, want 63", n)
	}
	buf := make([]byte, 65537)
	for i := range 66 {
		f := p.Recv(buf)
		if err := f.Wait(s.ctx); err != nil {
			t.Fatal(err)
		}
		s.same("message "+strconv.Itoa(i), buf[:f.Result(0).N], bytes.Repeat([]byte{byte(i)}, 65536))
	}
	s.same("output", c.ok(), nil)
}

// A client of another version than the endpoint says so.
func TestClientOfAnotherVersion(t *testing.T) {
	s := serve(t, secret)
	source, err := os.ReadFile("client.py")
	if err != nil {
		t.Fatal(err)
	}
	const version = "VERSION, BULK = 2,"
	if !bytes.Contains(source, []byte(version)) {
		t.Fatalf("client.py does not have %q", version)
	}
	c := s.startFile(s.file(bytes.Replace(source, []byte(version), []byte("VERSION, BULK = 9,"), 1)), "ls")
	c.fails("the endpoint's frames are of version 2, and this client's of version 9")
}

// A program asks the client for its state, which it does not tell.
func TestClientTellsNoState(t *testing.T) {
	s := serve(t, secret)
	c := s.start("recv")
	p := s.peer()
	if _, err := p.Stats(s.ctx); !errors.Is(err, endpoint.ErrRefused) {
		t.Errorf("the state of the client: %v, want ErrRefused", err)
	}
	if err := p.Send([]byte("m")).Wait(s.ctx); err != nil {
		t.Fatal(err)
	}
	s.same("message", c.ok(), []byte("m"))
}

func TestClientHasItsRights(t *testing.T) {
	s := serve(t, secret)
	clients := func(r mem.Rights) endpoint.RegionConfig {
		return endpoint.RegionConfig{Clients: map[string]mem.Rights{"reader": r}}
	}
	read := s.register("read", 10, clients(endpoint.Read))
	write := s.register("write", 10, clients(endpoint.Write))
	s.register("hidden", 10, endpoint.RegionConfig{Rights: both, Clients: map[string]mem.Rights{"reader": 0}})
	s.register("public", 10, endpoint.RegionConfig{})
	key, err := hex.DecodeString(secret)
	if err != nil {
		t.Fatal(err)
	}
	if s.key, err = bootstrap.NewCredential(key, "reader"); err != nil {
		t.Fatal(err)
	}
	if got := strings.Fields(string(s.run("ls"))); strings.Join(got, " ") != "r- 10 public r- 10 read -w 10 write" {
		t.Errorf("ls wrote %q", got)
	}
	s.same("read", s.run("read", "read"), read)
	s.run("write", "write", "3", s.file([]byte("abc")))
	s.same("write", write[3:6], []byte("abc"))
	s.fail("does not allow that", "write", "read", "3", s.file([]byte("abc")))
	s.fail("does not allow that", "read", "write")
	s.fail("no such region", "read", "hidden")
	c := s.start("send", "hello")
	p := s.peer()
	buf := make([]byte, 5)
	if err := p.Recv(buf).Wait(s.ctx); err != nil || p.Client() != "reader" || string(buf) != "hello" {
		t.Errorf("message %q of client %q: %v", buf, p.Client(), err)
	}
	c.ok()

	// The same key under another name proves nothing.
	s.key = strings.Replace(s.key, "reader", "writer", 1)
	s.start("ls").fails("not authenticated")
}

func TestClientSecrets(t *testing.T) {
	const text = "a secret that is no number"
	s := serve(t, text)
	data := s.register("data", 10, endpoint.RegionConfig{})
	s.same("read", s.run("read", "data"), data)
	s.key = secret
	s.start("ls").fails("not authenticated")
	s.start("--secret-file", filepath.Join(t.TempDir(), "none"), "ls").fails("No such file")
	s.same("read", s.run("--secret-file", s.file([]byte(text+"\r\n")), "read", "data"), data)
	for key, want := range map[string]string{"": "no secret", "short": "no secret", "client:x:12": "credential"} {
		s.key = key
		s.start("ls").fails(want)
	}
	s.key = text
	s.Endpoint.Close()
	s.start("ls").fails("refused")
}

// The client knows plain connections alone. An endpoint that wants more tells it so.
func TestClientIsRefused(t *testing.T) {
	sealed := serveWith(t, endpoint.Config{Secret: secret, Seal: true})
	sealed.start("ls").fails("refused: it takes sealed connections alone")
	checked := serveWith(t, endpoint.Config{Secret: secret, Checksum: true})
	checked.start("ls").fails("refused: it takes connections with checksums alone")
}

// A message may take long to come. What the endpoint answers may not, also after a message.
func TestClientWaitsLongForMessagesAlone(t *testing.T) {
	s := serve(t, secret)
	const program = `
import socket, sys, client
c = client.Client(sys.argv[1], sys.argv[2])
assert c.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), "a host that is gone is not noticed"
c.sock.settimeout(0.1)
c.recv()
c.recv()
try:
    c.send(bytes(100000))  # is offered, and nobody receives it
except OSError as e:
    print(e)
`
	c := &client{s: s, cmd: exec.CommandContext(s.ctx, s.python, "-c", program, s.Info().Addrs[0], secret)}
	c.cmd.Stdout, c.cmd.Stderr = &c.out, &c.err
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := s.peer()
	for range 2 {
		if err := p.Send([]byte("m")).Wait(s.ctx); err != nil {
			t.Fatal(err)
		}
	}
	s.same("output", c.ok(), []byte("timed out\n"))
}
