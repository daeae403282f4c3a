package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tutti/bootstrap"
	"tutti/endpoint/stats"
	"tutti/internal/sitetest"
)

// site is where the tests of tutti endpoint are: a secret, and a directory.
type site struct {
	*stage
	dir, secret string
}

func newSite(t *testing.T) *site {
	return &site{newStage(t), t.TempDir(), bootstrap.NewSecret()}
}

// file makes a file of n bytes, and returns its path and its contents.
func (s *site) file(name string, n int) (path string, data []byte) {
	s.t.Helper()
	data = make([]byte, n)
	rand.NewChaCha8([32]byte([]byte(fmt.Sprintf("%032d", n)))).Read(data)
	path = filepath.Join(s.dir, name)
	if err := os.WriteFile(path, data, 0o644); err != nil {
		s.t.Fatal(err)
	}
	return path, data
}

// endpoint prepares tutti endpoint with these arguments and the secret.
func (s *site) endpoint(args ...string) *tutti {
	j := s.command(append([]string{"endpoint"}, args...)...)
	j.cmd.Env = append(j.cmd.Env, "TUTTI_SECRET="+s.secret)
	return j
}

// serve starts tutti endpoint serve, and returns what it prints when it listens.
func (s *site) serve(args ...string) (server *tutti, info string) {
	s.t.Helper()
	server = s.endpoint(append([]string{"serve", "--listen", "127.0.0.1"}, args...)...).start()
	server.Out.Await(s.t, "\n")
	info = strings.TrimSuffix(server.Out.String(), "\n")
	if !strings.HasPrefix(info, "tutti-endpoint://127.0.0.1:") || strings.Contains(info, "\n") {
		s.t.Fatalf("it prints %q", info)
	}
	return server, info
}

// names returns what is in the directory.
func (s *site) names() []string {
	s.t.Helper()
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		s.t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// holds checks the contents of a file.
func (s *site) holds(path string, want []byte) {
	s.t.Helper()
	if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, want) {
		s.t.Errorf("%s has %d bytes, which are not the %d expected ones (%v)", filepath.Base(path), len(got),
			len(want), err)
	}
}

func TestEndpointRead(t *testing.T) {
	s := newSite(t)
	path, data := s.file("big", (abreast+3)*pieceSize+7)
	empty, _ := s.file("empty", 0)
	server, info := s.serve("weights="+path, "a b="+empty, "--name", "node")
	address := strings.TrimPrefix(info[:strings.LastIndex(info, "/")], "tutti-endpoint://")

	for _, at := range []string{info, address} {
		j := s.endpoint("ls", at).start()
		j.End(0)
		want := fmt.Sprintf("a b             0  read\nweights  %d  read\n", len(data))
		if got := j.Out.String(); got != want {
			t.Errorf("ls %s: %q, want %q", at, got, want)
		}
	}
	j := s.endpoint("ls", "--json", info).start()
	j.End(0)
	var r remote
	first, rest, _ := strings.Cut(j.Out.String(), "\n")
	if err := json.Unmarshal([]byte(first), &r); err != nil || r != (remote{"a b", 0, "read"}) ||
		strings.Count(rest, "\n") != 1 {
		t.Errorf("%+v, %v; %q", r, err, rest)
	}

	out := filepath.Join(s.dir, "out")
	for _, c := range []struct {
		args string
		want []byte
	}{
		{"weights", data},
		{"weights --offset 1M", data[1<<20:]},
		{"weights --offset 5 --length 3", data[5:8]},
		{"weights --offset 1K --length 2M", data[1<<10:][:2<<20]},
		{"weights --length 0", nil},
		{fmt.Sprintf("weights --offset %d", len(data)), nil},
	} {
		args := append([]string{"read", info}, strings.Fields(c.args)...)
		j := s.endpoint(args...).start()
		j.End(0)
		if !bytes.Equal([]byte(j.Out.String()), c.want) || j.Err.String() != "" {
			t.Errorf("read %s: %d bytes, which are not the %d expected ones; stderr %q", c.args, len(j.Out.String()),
				len(c.want), j.Err.String())
		}
		j = s.endpoint(append(args, "-o", out)...).start()
		j.End(0)
		if j.Out.String() != "" || j.Err.String() != "" {
			t.Errorf("read %s -o: stdout %q, stderr %q", c.args, j.Out.String(), j.Err.String())
		}
		s.holds(out, c.want)
	}
	s.endpoint("read", info, "a b", "-o", out).start().End(0)
	s.holds(out, nil)

	for _, c := range []struct{ args, says string }{
		{"nothing", "region nothing of endpoint node: no such region"},
		{"weights --offset 1G", "offset 1073741824 is out of the region's bounds"},
		{"weights --length 1G", "1073741824 at offset 0 are out of the region's bounds"},
		{"weights -o /no/such/directory/f", "/no/such/directory/f cannot be made: "},
		{"weights -o " + s.dir, "is a directory"},
	} {
		j := s.endpoint(append([]string{"read", info}, strings.Fields(c.args)...)...).start()
		j.End(1)
		j.says(c.says)
		if j.Out.String() != "" {
			t.Errorf("read %s: stdout %q", c.args, j.Out.String())
		}
	}
	if got := s.names(); !slices.Equal(got, []string{"big", "empty", "out"}) {
		t.Errorf("the directory has %q", got)
	}

	server.Signal(syscall.SIGINT)
	server.End(0)
	server.says("tutti: a b: 0 B read\n")
	server.says("tutti: weights: ")
	if text := server.Err.String(); strings.Count(text, "\n") != 2 || strings.Contains(text, "written") {
		t.Errorf("stderr %q", text)
	}
	j = s.endpoint("read", info, "weights", "-o", out).start()
	j.End(1)
	j.says("connection refused")
}

// A path of the file that the standard output is redirected to is the standard output.
func TestEndpointReadToStandardOutput(t *testing.T) {
	s := newSite(t)
	path, data := s.file("f", pieceSize+9)
	_, info := s.serve("r=" + path)
	log, err := os.OpenFile(filepath.Join(s.dir, "log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	if _, err := log.WriteString("precious"); err != nil {
		t.Fatal(err)
	}
	want := []byte("precious")
	for _, out := range []string{"/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", log.Name()} {
		j := s.endpoint("read", info, "r", "-o", out)
		j.cmd.Stdout = log
		j.start().End(0)
		want = append(want, data...)
		s.holds(log.Name(), want)
	}
}

// A server whose name was taken, while it could not tell the store that it lives, ends.
func TestEndpointServeLosesItsName(t *testing.T) {
	s := newSite(t)
	store := "TUTTI_STORE=" + sitetest.Start(t, sitetest.Config{}).Address
	path, _ := s.file("f", 10)
	serve := func() *tutti {
		t.Helper()
		j := s.endpoint("serve", "--listen", "127.0.0.1", "r="+path, "--publish", "trainer")
		j.cmd.Env = append(j.cmd.Env, store)
		j.start().Out.Await(t, "\n")
		return j
	}
	first := serve()
	first.Signal(syscall.SIGSTOP)
	second := serve()
	first.Signal(syscall.SIGCONT)
	first.End(1)
	first.says("tutti: name trainer is taken by " + strings.TrimSpace(second.Out.String()))
	first.says("r: 0 B read")

	third := s.endpoint("serve", "--listen", "127.0.0.1", "r="+path, "--publish", "trainer")
	third.cmd.Env = append(third.cmd.Env, store)
	third.start().End(1)
	third.says("tutti: directory endpoints: name trainer is taken by ")
	if text := third.Err.String(); strings.Count(text, "\n") != 1 {
		t.Errorf("it says more than one thing: %q", text)
	}
	second.Signal(syscall.SIGTERM)
	second.End(0)
}

// timeout signals its child, and then its process group.
func TestEndpointEndsAtTwoSignals(t *testing.T) {
	s := newSite(t)
	path, _ := s.file("region", 8*pieceSize)
	_, info := s.serve("r=" + path)
	for range 10 {
		d := newDam(t, info, 5*pieceSize)
		j := s.endpoint("read", d.Addr().String(), "r", "-o", filepath.Join(s.dir, "out"), "--timeout", "1h").start()
		d.await(t)
		j.Signal(syscall.SIGTERM)
		for range 100 { // the kernel takes those that come at the same time for one
			j.cmd.Process.Signal(syscall.SIGTERM) // an error says that it has ended already
		}
		j.End(143)
		j.says("tutti: interrupted by SIGTERM\n")
		if got := s.names(); !slices.Equal(got, []string{"region"}) {
			t.Fatalf("the directory has %q", got)
		}
	}
}

func TestEndpointWrite(t *testing.T) {
	s := newSite(t)
	path, data := s.file("region", 3*pieceSize+100)
	source, news := s.file("source", 2*pieceSize+5)
	server, info := s.serve("r="+path, "--write")
	_, fixed := s.serve("r=" + path)
	address := strings.TrimPrefix(info[:strings.LastIndex(info, "/")], "tutti-endpoint://")

	j := s.endpoint("ls", address).start()
	j.End(0)
	if got := j.Out.String(); !strings.HasSuffix(got, "  read+write\n") {
		t.Errorf("ls: %q", got)
	}
	s.endpoint("write", info, "r", source).start().End(0)
	copy(data, news)
	s.holds(path, data)
	s.endpoint("write", info, "r", source, "--offset", "1M").start().End(0)
	copy(data[1<<20:], news)
	s.holds(path, data)
	feed := func(b []byte, args ...string) *tutti {
		j := s.endpoint(append([]string{"write", info, "r", "-"}, args...)...)
		j.cmd.Stdin = bytes.NewReader(b)
		return j.start()
	}
	feed(news[:pieceSize+9], "--offset", "77").End(0)
	copy(data[77:], news[:pieceSize+9])
	s.holds(path, data)
	feed(nil).End(0)
	s.holds(path, data)
	feed(slices.Repeat([]byte{1}, 3*pieceSize), "--offset", "100").End(0) // it just fits
	copy(data[100:], slices.Repeat([]byte{1}, 3*pieceSize))
	s.holds(path, data)

	s.endpoint("write", info, "r", "/proc/version").start().End(0) // whose size is said to be 0
	version, err := os.ReadFile("/proc/version")
	if err != nil {
		t.Fatal(err)
	}
	copy(data, version)
	s.holds(path, data)

	// What does not fit is known before a file is written, and only at the end of a pipe.
	j = s.endpoint("write", info, "r", source, "--offset", "2M").start()
	j.End(1)
	j.says("2097157 at offset 2097152 are out of the region's bounds")
	s.holds(path, data)
	j = feed(news, "--offset", "2M")
	j.End(1)
	j.says("the input is longer than the 1048676 bytes of region r from offset 2097152: what fits has been written")
	copy(data[2<<20:], news)
	s.holds(path, data)

	j = s.endpoint("write", fixed, "r", source).start()
	j.End(1)
	j.says("cannot be written: its rights are read")
	s.holds(path, data)

	server.Signal(syscall.SIGTERM)
	server.End(0)
	server.says("tutti: r: 0 B read, ")
	server.says(" written\n")
}

// A client's credential suffices to connect, but not to serve. Another secret suffices for neither.
// listener carries connections to an address and records what they say.
type listener struct {
	net.Listener
	mu   sync.Mutex
	said bytes.Buffer
}

// Write implements io.Writer.
func (l *listener) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.said.Write(b)
}

func listen(t *testing.T, address string) *listener {
	t.Helper()
	in, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := &listener{Listener: in}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := in.Accept()
			if err != nil {
				return
			}
			s, err := net.Dial("tcp", address)
			if err != nil {
				c.Close()
				continue
			}
			for _, x := range [][2]net.Conn{{c, s}, {s, c}} {
				wg.Go(func() {
					io.Copy(io.MultiWriter(x[1], l), x[0])
					c.Close()
					s.Close()
				})
			}
		}
	})
	t.Cleanup(wg.Wait)
	t.Cleanup(func() { in.Close() })
	return l
}

// It is enough that one end says --seal or --checksum, and what is sealed cannot be read on the
// way.
func TestEndpointGuards(t *testing.T) {
	s := newSite(t)
	const marker = "what no other process should know"
	path := filepath.Join(s.dir, "file")
	for _, c := range []struct {
		server, client string
		sealed         bool
	}{{"", "", false}, {"--seal", "", true}, {"", "--seal", true}, {"--checksum", "--seal", true},
		{"--checksum", "", false}, {"", "--checksum", false}} {
		t.Run("serve "+c.server+" and "+c.client, func(t *testing.T) {
			if err := os.WriteFile(path, []byte(marker), 0o600); err != nil {
				t.Fatal(err)
			}
			server, info := s.serve(append(strings.Fields(c.server), "--write", "secrets="+path)...)
			l := listen(t, strings.TrimPrefix(info[:strings.LastIndex(info, "/")], "tutti-endpoint://"))
			at := l.Addr().String()
			for _, args := range [][]string{{"ls", at}, {"read", at, "secrets"}, {"write", at, "secrets", path}} {
				j := s.endpoint(append(args, strings.Fields(c.client)...)...).start()
				j.End(0)
				if got := j.Out.String(); args[0] == "read" && got != marker {
					t.Errorf("read %q", got)
				}
			}
			server.Signal(syscall.SIGTERM)
			server.End(0)
			l.mu.Lock()
			defer l.mu.Unlock()
			if n := bytes.Count(l.said.Bytes(), []byte(marker)); n != 0 == c.sealed {
				t.Errorf("the data went %d times over the wire so that others could read it", n)
			}
			if bytes.Contains(l.said.Bytes(), []byte("secrets")) == c.sealed {
				t.Error("the region's name")
			}
		})
	}
}

func TestEndpointTrust(t *testing.T) {
	s := newSite(t)
	path, data := s.file("region", 1000)
	server, info := s.serve("r="+path, "--write")
	raw, err := bootstrap.ParseSecret(s.secret)
	if err != nil {
		t.Fatal(err)
	}
	credential, err := bootstrap.NewCredential(raw, "web-1")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(s.dir, "credential")
	if err := os.WriteFile(file, []byte(credential+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	run := func(env string, args ...string) *tutti {
		j := s.command(append([]string{"endpoint"}, args...)...)
		j.cmd.Env = append(j.cmd.Env, env)
		return j.start()
	}
	for _, j := range []*tutti{
		run("TUTTI_SECRET="+credential, "read", info, "r"),
		run("TUTTI_SECRET_FILE="+file, "read", info, "r"),
		run("TUTTI_SECRET=that of another job", "read", info, "r", "--secret-file", file),
	} {
		j.End(0)
		if j.Out.String() != string(data) {
			t.Errorf("%q reads something else", j.cmd.Args)
		}
	}
	run("TUTTI_SECRET="+credential, "write", info, "r", file).End(0)
	s.holds(path, append([]byte(credential+"\n"), data[len(credential)+1:]...))
	j := run("TUTTI_SECRET="+credential, "serve", "r="+path)
	j.End(codeUsage)
	j.says("this is the credential of client web-1")

	other := bootstrap.NewSecret()
	bad, err := bootstrap.NewCredential([]byte("another secret of 16 bytes or more"), "web-1")
	if err != nil {
		t.Fatal(err)
	}
	for _, secret := range []string{other, bad} {
		for _, args := range [][]string{{"ls", info}, {"read", info, "r", "-o", filepath.Join(s.dir, "out")},
			{"write", info, "r", file}} {
			j := run("TUTTI_SECRET="+secret, args...)
			j.End(1)
			j.says("not authenticated: ")
			j.says("is it that of the other end?")
			if text := j.Err.String() + j.Out.String(); strings.Contains(text, secret[len(secret)-16:]) {
				t.Errorf("it shows the secret: %q", text)
			}
		}
	}
	server.Signal(syscall.SIGINT)
	server.End(0)
	server.says("refused a connection")
	if got := s.names(); !slices.Equal(got, []string{"credential", "region"}) {
		t.Errorf("the directory has %q", got)
	}
}

// hearHangup has processes that the test starts end at SIGHUP, also if this one was started with
// nohup: a process that handles a signal starts processes that do not ignore it.
func hearHangup(t *testing.T) {
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGHUP)
	t.Cleanup(func() { signal.Stop(c) })
}

// The end of its terminal ends a server as SIGTERM does.
func TestEndpointServeHangup(t *testing.T) {
	hearHangup(t)
	s := newSite(t)
	path, _ := s.file("f", 10)
	server, _ := s.serve("f=" + path)
	server.Signal(syscall.SIGHUP)
	server.End(0)
	server.says("tutti: f: 0 B read\n")
}

func TestEndpointServeMetrics(t *testing.T) {
	s := newSite(t)
	path, data := s.file("f", 1000)
	server := s.endpoint("serve", "r="+path, "--listen", "127.0.0.1", "--name", "node")
	server.cmd.Env = append(server.cmd.Env, "TUTTI_METRICS=127.0.0.1:0", "TUTTI_LOG=info")
	server.start().Out.Await(t, "\n")
	info := strings.TrimSuffix(server.Out.String(), "\n")
	server.Err.Await(t, "/metrics")
	_, rest, _ := strings.Cut(server.Err.String(), "url=")
	url, _, _ := strings.Cut(strings.TrimSpace(rest), "\n")
	s.endpoint("read", info, "r", "-o", filepath.Join(s.dir, "out")).start().End(0)
	get, err := (&http.Client{Timeout: patience}).Get(url)
	if err != nil {
		t.Fatal(err)
	}
	b, _ := io.ReadAll(get.Body)
	get.Body.Close()
	want := fmt.Sprintf("tutti_endpoint_served_bytes_total{endpoint=\"node\",id=%q,kind=\"read\"} %d\n",
		info[strings.LastIndex(info, "=")+1:], len(data))
	if !strings.Contains(string(b), want) {
		t.Errorf("%s is not in\n%s", want, b)
	}
	server.Signal(syscall.SIGTERM)
	server.End(0)
}

func TestEndpointByName(t *testing.T) {
	s := newSite(t)
	store := "TUTTI_STORE=" + sitetest.Start(t, sitetest.Config{}).Address
	path, data := s.file("f", 3*pieceSize)
	run := func(code int, args ...string) *tutti {
		t.Helper()
		j := s.endpoint(args...)
		j.cmd.Env = append(j.cmd.Env, store)
		j.start().End(code)
		return j
	}
	serve := func(args ...string) (server *tutti, info string) {
		t.Helper()
		server = s.endpoint(append([]string{"serve", "--listen", "127.0.0.1"}, args...)...)
		server.cmd.Env = append(server.cmd.Env, store)
		server.start().Out.Await(t, "\n")
		return server, strings.TrimSuffix(server.Out.String(), "\n")
	}
	if got := run(0, "ls").Out.String(); got != "" {
		t.Errorf("ls of nothing: %q", got)
	}
	server, info := serve("r="+path, "--publish", "trainer", "--name", "first")
	if got, want := run(0, "ls").Out.String(), "trainer  "+info+"\n"; got != want {
		t.Errorf("ls: %q, want %q", got, want)
	}
	var p published
	if got := run(0, "ls", "--json").Out.String(); json.Unmarshal([]byte(got), &p) != nil ||
		p != (published{"trainer", info}) {
		t.Errorf("ls --json: %q", got)
	}
	if got, want := run(0, "ls", "@trainer").Out.String(), fmt.Sprintf("r  %d  read\n", len(data)); got != want {
		t.Errorf("ls @trainer: %q, want %q", got, want)
	}
	run(1, "serve", "r="+path, "--listen", "127.0.0.1", "--publish", "trainer").says("name trainer is taken by " + info)
	absent := s.endpoint("ls", "@other", "--timeout", "10s") // waits for the name all that time
	absent.cmd.Env = append(absent.cmd.Env, store)
	absent.start()

	// Its name leads to the one that takes its place.
	server.Kill()
	server, _ = serve("r="+path, "--publish", "trainer", "--name", "second")
	out := filepath.Join(s.dir, "out")
	run(0, "read", "@trainer", "r", "-o", out)
	s.holds(out, data)
	server.Signal(syscall.SIGTERM)
	server.End(0)
	if got := run(0, "ls").Out.String(); got != "" {
		t.Errorf("the name outlives its server: %q", got)
	}
	absent.End(1)
	absent.says("no endpoint publishes this name: no connection within 10s")
}

func TestEndpointUsage(t *testing.T) {
	s := newSite(t)
	path, _ := s.file("f", 10)
	fifo := filepath.Join(s.dir, "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ args, says string }{
		{"raed", `there is no command "endpoint raed"; did you mean endpoint read?`},
		{"raed a b -o x", "did you mean endpoint read?"},
		{"serve", "which files? tutti endpoint serve NAME=FILE..."},
		{"serve f", `"f": expected NAME=FILE`},
		{"serve =" + path, "expected NAME=FILE"},
		{"serve x=", `"x=": expected NAME=FILE`},
		{"serve x=/no/such/file", "/no/such/file: no such file or directory"},
		{"serve x=" + s.dir, s.dir + " is a directory"},
		{"serve x=" + fifo, fifo + " is no regular file"},
		{"serve x=" + path + " x=" + path, "two regions have the name x"},
		{"serve \x01=" + path, `invalid name: region "\x01"`},
		{"serve x=" + path + " --publish=", "--publish is empty: leave it out, or is a variable not set?"},
		{"serve x=" + path + " --listen=", "--listen is empty: "},
		{"ls a:1 --secret-file=", "--secret-file is empty: "},
		{"ls @a --store=", "--store is empty: "},
		{"read a:1 r --output=", "--output is empty: "},
		{"serve x=" + path + " --name \x01", `--name: endpoint: invalid name: endpoint "\x01"`},
		{"serve x=" + path + " --listen none", "--listen none: it needs an address"},
		{"serve x=" + path + " --listen 1.2.3.4/99", "--listen 1.2.3.4/99: "},
		{"serve x=" + path + " --ports x", `--ports: port "x": expected a port`},
		{"serve x=" + path + " --secret-file /no/such/file", "--secret-file: open /no/such/file: no such file"},
		{"serve x=" + path + " --publish a --listen 127.0.0.1", "names of endpoints are in a store: set TUTTI_STORE"},
		{"serve x=" + path + " --publish a\u202eb", `--publish: invalid name: "a\u202eb"`},
		{"serve x=" + path + " --metrics 9400", `metrics at 9400: address "9400": expected HOST:PORT`},
		{"ls", "names of endpoints are in a store: set TUTTI_STORE, or give --store URL"},
		{"ls @a", "names of endpoints are in a store: set TUTTI_STORE, or give --store URL"},
		{"ls @", `invalid name: ""`},
		{"ls @a --store x", `store "x": expected tutti://`},
		{"ls @a --store etcd://127.0.0.1:1 --directory a/b", `"a/b"`},
		{"ls x", `endpoint "x": "x" is no address`},
		{"ls tutti-endpoint:///x?id=0000000000000001", "does not listen"},
		{"ls a:1 b:1", "takes ENDPOINT, got 2 arguments"},
		{"ls a:1 --timeout 0s", "--timeout 0s: expected more than 0"},
		{"ls a:1 --timeout soon", `"soon" is no duration`},
		{"read a:1", "tutti endpoint read takes ENDPOINT REGION, got 1 argument"},
		{"read a:1 r --offset -1", `--offset "-1": expected a size`},
		{"read a:1 r --length 9X", `--length "9X": expected a size`},
		{"read a:1 r --bogus", "unknown flag: --bogus"},
		{"write a:1 r", "tutti endpoint write takes ENDPOINT REGION FILE, got 2 arguments"},
		{"write a:1 r /no/such/file", "/no/such/file: no such file or directory"},
		{"write a:1 r " + s.dir, s.dir + " is a directory"},
	} {
		j := s.endpoint(strings.Fields(c.args)...).start()
		j.End(codeUsage)
		j.says(c.says)
		if text := j.Err.String(); strings.Count(text, "\n") != 2 || j.Out.String() != "" {
			t.Errorf("tutti endpoint %s: stdout %q, stderr %q", c.args, j.Out.String(), text)
		}
	}
	for _, args := range []string{"serve x=" + path, "ls a:1", "read a:1 r", "write a:1 r " + path} {
		j := s.run(append([]string{"endpoint"}, strings.Fields(args)...)...)
		j.End(codeUsage)
		j.says("export TUTTI_SECRET=$(tutti secret)")
	}
	for _, args := range []string{"", "serve --help", "ls --help", "read --help", "write --help"} {
		j := s.run(append([]string{"endpoint"}, strings.Fields(args)...)...)
		j.End(0)
		if out := j.Out.String(); !strings.Contains(out, "Usage:\n  tutti endpoint ") || j.Err.String() != "" {
			t.Errorf("tutti endpoint %s: stdout %q, stderr %q", args, out, j.Err.String())
		}
	}
}

// dam forwards connections, and stops when so many bytes have come from the other end.
type dam struct {
	net.Listener
	to   string
	left atomic.Int64
	full chan struct{} // closed then
	once sync.Once

	mu    sync.Mutex
	conns []net.Conn
}

func newDam(t *testing.T, info string, n int64) *dam {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address, _, _ := strings.Cut(strings.TrimPrefix(info, "tutti-endpoint://"), "/")
	d := &dam{Listener: l, to: address, full: make(chan struct{})}
	d.left.Store(n)
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() { d.forward(&all, c) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		d.cut()
		all.Wait()
	})
	return d
}

func (d *dam) forward(all *sync.WaitGroup, c net.Conn) {
	o, err := net.Dial("tcp", d.to)
	if err != nil {
		c.Close()
		return
	}
	d.mu.Lock()
	d.conns = append(d.conns, c, o)
	d.mu.Unlock()
	all.Go(func() {
		io.Copy(o, c)
		o.Close()
	})
	buf := make([]byte, 32<<10)
	for {
		n, err := o.Read(buf)
		if d.left.Add(int64(-n)) < 0 {
			d.once.Do(func() { close(d.full) })
			return
		}
		if _, werr := c.Write(buf[:n]); err != nil || werr != nil {
			c.Close()
			return
		}
	}
}

// cut closes the connections.
func (d *dam) cut() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range d.conns {
		c.Close()
	}
}

func (d *dam) await(t *testing.T) {
	t.Helper()
	select {
	case <-d.full:
	case <-time.After(patience):
		t.Fatal("the bytes never came")
	}
}

// A read that is interrupted, or loses the other end, leaves nothing, and a file that was there as
// it was.
func TestEndpointReadCutShort(t *testing.T) {
	hearHangup(t)
	for _, by := range []string{"SIGINT", "SIGTERM", "SIGHUP", "loss"} {
		for _, over := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s over a file %v", by, over), func(t *testing.T) {
				s := newSite(t)
				path, _ := s.file("region", 8*pieceSize)
				server, info := s.serve("r=" + path)
				out := filepath.Join(s.dir, "out")
				left := []string{"region"}
				if over {
					s.file("out", 100)
					left = []string{"out", "region"}
				}
				d := newDam(t, info, 5*pieceSize)
				j := s.endpoint("read", d.Addr().String(), "r", "-o", out, "--timeout", "1h").start()
				d.await(t)
				if got := s.names(); len(got) != len(left)+1 || !strings.HasPrefix(got[0], ".tutti-read-") {
					t.Errorf("under way, the directory has %q", got)
				}
				switch by {
				case "SIGINT":
					j.Signal(syscall.SIGINT)
					j.End(130)
					j.says("tutti: interrupted by SIGINT\n")
				case "SIGTERM":
					j.Signal(syscall.SIGTERM)
					j.End(143)
					j.says("tutti: interrupted by SIGTERM\n")
				case "SIGHUP":
					j.Signal(syscall.SIGHUP)
					j.End(129)
					j.says("tutti: interrupted by SIGHUP\n")
				case "loss":
					server.Kill()
					d.Close()
					d.cut()
					j.End(1)
					j.says("read of 1048576 bytes of region r from endpoint ")
				}
				if text := j.Err.String(); strings.Count(text, "\n") != 1 {
					t.Errorf("stderr %q", text)
				}
				if got := s.names(); !slices.Equal(got, left) {
					t.Errorf("the directory has %q", got)
				}
				if over {
					if info, err := os.Stat(out); err != nil || info.Size() != 100 {
						t.Errorf("%v, %v", info, err)
					}
				}
			})
		}
	}
}

// Ctrl-C ends a command that waits for another process.
func TestEndpointInterrupted(t *testing.T) {
	s := newSite(t)
	path, data := s.file("region", 8*pieceSize)
	_, info := s.serve("r="+path, "--write")
	t.Run("who does not answer", func(t *testing.T) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		j := s.endpoint("ls", l.Addr().String(), "--timeout", "1h").start()
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		j.Signal(syscall.SIGINT)
		j.End(130)
		j.says("tutti: interrupted by SIGINT\n")

		j = s.endpoint("ls", l.Addr().String(), "--timeout", "50ms").start()
		j.End(1)
		j.says("cannot connect: ")
	})
	t.Run("who does not read the output", func(t *testing.T) {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		j := s.endpoint("read", info, "r")
		j.cmd.Stdout = w
		j.start()
		w.Close()
		var b [1]byte
		if _, err := r.Read(b[:]); err != nil || b[0] != data[0] {
			t.Fatalf("%x, %v", b, err)
		}
		j.Signal(syscall.SIGINT)
		j.End(130)
	})
	t.Run("who does not write the input", func(t *testing.T) {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		j := s.endpoint("write", info, "r", "-")
		j.cmd.Stdin = r
		j.start()
		r.Close()
		if _, err := w.Write(data[:2*pieceSize]); err != nil { // more than a pipe holds
			t.Fatal(err)
		}
		j.Signal(syscall.SIGINT)
		j.End(130)
	})
}

// On a terminal they show progress, a heading, and what to do next; and no bytes of a file.
func TestEndpointOnTerminal(t *testing.T) {
	s := newSite(t)
	path, data := s.file("region", 3*pieceSize)
	slave, screen, over := watched(t)
	on := func(j *tutti) *tutti {
		j.cmd.Env = append(j.cmd.Env, "TERM=xterm", "NO_COLOR=1")
		j.cmd.Stderr = slave
		return j
	}
	server := on(s.endpoint("serve", "--listen", "127.0.0.1", "it's="+path, "--write")).start()
	server.Out.Await(t, "\n")
	info := strings.TrimSpace(server.Out.String())
	screen.Await(t, `tutti endpoint read '`+info+`' 'it'\''s' -o FILE`)
	if sh, err := exec.LookPath("sh"); err == nil {
		b, err := exec.Command(sh, "-c", "printf %s/ "+quoted(info)+" "+quoted("it's")).Output()
		if err != nil || string(b) != info+"/it's/" {
			t.Errorf("a shell understands %q, %v", b, err)
		}
	}

	on(s.endpoint("read", info, "it's", "-o", path+".out")).start().End(0)
	s.holds(path+".out", data)
	screen.Await(t, "  0%  [")
	screen.Await(t, "] ")
	screen.Await(t, "of 3.1 MB")
	screen.Await(t, "\r\x1b[Ktutti: read 3.1 MB in ")
	on(s.endpoint("write", info, "it's", path+".out")).start().End(0)
	screen.Await(t, "\r\x1b[Ktutti: wrote 3.1 MB in ")

	j := on(s.endpoint("ls", info))
	j.cmd.Stdout = slave
	j.start().End(0)
	screen.Await(t, "name     size  rights\r\nit's  3145728  read+write\r\n")
	j = on(s.endpoint("read", info, "it's"))
	j.cmd.Stdout = slave
	j.start().End(codeUsage)
	screen.Await(t, "the standard output is a terminal: give -o FILE")
	server.Signal(syscall.SIGINT)
	server.End(0)
	screen.Await(t, "it's: 3.1 MB read, 3.1 MB written")
	over()
}

func TestMeter(t *testing.T) {
	began := time.Now()
	for _, c := range []struct {
		moved, total int64
		columns      int
		want         string
	}{
		{0, 1000, 80, "  0%  [" + strings.Repeat(" ", 40) + "]  0 B of 1.0 kB"},
		{500, 1000, 80, " 50%  [" + strings.Repeat("#", 20) + strings.Repeat(" ", 20) + "]  500 B of 1.0 kB  250 B/s"},
		{1000, 1000, 60, "100%  [" + strings.Repeat("#", 24) + "]  1.0 kB of 1.0 kB  500 B/s"},
		{1000, 1000, 30, "100%  1.0 kB of 1.0 kB"},
		{1000, 1000, 32, "100%  1.0 kB of 1.0 kB  500 B/s"},
		{500, -1, 10, "500 B"},
		{1000, 1000, 0, "100%  1.0 kB of 1.0 kB  500 B/s"},
		{500, -1, 80, "500 B  250 B/s"},
		{0, 0, 80, "0 B of 0 B"},
		{1 << 60, 1 << 60, 10, "100%  115"},
	} {
		m := &meter{total: c.total, moved: c.moved, began: began}
		if got := m.text(began.Add(2*time.Second), c.columns); got != c.want {
			t.Errorf("%d of %d in %d columns: %q, want %q", c.moved, c.total, c.columns, got, c.want)
		}
	}
}

// Where a read goes: a new file, the place of one that is there, through links, or into a pipe.
func TestEndpointOutput(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	fill := func(path, text string, complete bool) error {
		t.Helper()
		o, err := create(t.Context(), path)
		if err != nil {
			return err
		}
		if old, err := os.Stat(path); o.whole && err == nil { // nothing but its name is left for close
			if info, err := o.file.Stat(); err != nil || info.Mode() != old.Mode() {
				t.Errorf("before it is complete, what replaces %s is %v, %v; want mode %v", path, info, err, old.Mode())
			}
		}
		if o.whole {
			if err := reserve(o.file, int64(len(text))); err != nil {
				t.Error(err)
			}
		}
		if _, err := o.file.WriteString(text); err != nil {
			t.Error(err)
		}
		return o.close(complete)
	}
	want := func(path, text string, mode os.FileMode) {
		t.Helper()
		b, err := os.ReadFile(path)
		info, serr := os.Stat(path)
		if err != nil || serr != nil || string(b) != text || info.Mode().Perm() != mode {
			t.Errorf("%q, %v, %v, %v; want %q with mode %v", b, info, err, serr, text, mode)
		}
	}
	old := syscall.Umask(0o027)
	defer syscall.Umask(old)
	if err := fill(at("new"), "first", true); err != nil {
		t.Fatal(err)
	}
	want(at("new"), "first", 0o640)
	if err := errors.Join(os.Chmod(at("new"), 0o604), os.Symlink("new", at("link"))); err != nil {
		t.Fatal(err)
	}
	if err := fill(at("link"), "second", true); err != nil {
		t.Fatal(err)
	}
	want(at("new"), "second", 0o604)
	if err := fill(at("new"), "third", false); err != nil {
		t.Fatal(err)
	}
	want(at("new"), "second", 0o604)
	if info, err := os.Lstat(at("link")); err != nil || info.Mode()&os.ModeSymlink == 0 {
		t.Errorf("the link is %v, %v", info, err)
	}
	if err := fill(dir, "", true); err == nil {
		t.Error("a directory")
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 2 {
		t.Errorf("%v, %v", entries, err)
	}
	// A link that leads nowhere has its target made.
	if err := os.Symlink("sub/../target", at("dangling")); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Mkdir(at("sub"), 0o700), fill(at("dangling"), "made", true)); err != nil {
		t.Fatal(err)
	}
	want(at("target"), "made", 0o640)
	if info, err := os.Lstat(at("dangling")); err != nil || info.Mode()&os.ModeSymlink == 0 {
		t.Errorf("the link is %v, %v", info, err)
	}
	if err := errors.Join(os.Symlink("b", at("a")), os.Symlink("a", at("b"))); err != nil {
		t.Fatal(err)
	}
	if err := fill(at("a"), "", true); !errors.Is(err, unix.ELOOP) {
		t.Errorf("links without an end: %v", err)
	}
	// A descriptor of this process is written where it stands, not replaced.
	log, err := os.OpenFile(at("log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	text := ""
	for _, path := range []string{"/dev/fd/%d", "/proc/self/fd/%d", "/proc/thread-self/fd/%d"} {
		path = fmt.Sprintf(path, log.Fd())
		text += path
		if err := fill(path, path, true); err != nil {
			t.Fatal(err)
		}
		want(at("log"), text, 0o600)
	}
	if err := fill("/dev/fd/99999", "", true); !errors.Is(err, unix.EBADF) {
		t.Errorf("a descriptor that is not open: %v", err)
	}
	// What is no regular file is written, not replaced.
	if err := unix.Mkfifo(at("fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	pipe, err := os.OpenFile(at("fifo"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := fill(at("fifo"), "fourth", true); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(at("fifo")); err != nil || info.Mode()&os.ModeNamedPipe == 0 {
		t.Fatalf("the pipe is %v, %v", info, err)
	}
	var got [10]byte
	if n, err := pipe.Read(got[:]); err != nil || string(got[:n]) != "fourth" {
		t.Errorf("%q, %v", got[:n], err)
	}
	pipe.Close()
	// A pipe that is not read is waited for until the context ends.
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(interrupted(syscall.SIGINT))
	if _, err := create(ctx, at("fifo")); !errors.Is(err, interrupted(syscall.SIGINT)) {
		t.Errorf("%v", err)
	}
	if r, err := os.OpenFile(at("fifo"), os.O_RDONLY|syscall.O_NONBLOCK, 0); err == nil { // lets it go
		r.Close()
	}
}

// TestStatusOfEndpoint: an endpoint of a process that is no rank tells its state, by itself.
func TestStatusOfEndpoint(t *testing.T) {
	s := newSite(t)
	store := "TUTTI_STORE=" + sitetest.Start(t, sitetest.Config{}).Address
	path, data := s.file("f", 3*pieceSize)
	server := s.endpoint("serve", "r="+path, "--listen", "127.0.0.1", "--name", "node", "--publish", "trainer",
		"--seal")
	server.cmd.Env = append(server.cmd.Env, store)
	server.start().Out.Await(t, "\n")
	info := strings.TrimSpace(server.Out.String())
	address := strings.TrimPrefix(info[:strings.LastIndex(info, "/")], "tutti-endpoint://")
	status := func(secret string, args ...string) *tutti {
		j := s.command(append([]string{"status"}, args...)...)
		j.cmd.Env = append(j.cmd.Env, store, "TUTTI_SECRET="+secret)
		return j.start()
	}
	s.endpoint("read", info, "r", "-o", filepath.Join(s.dir, "out")).start().End(0)

	for _, at := range []string{info, address, "@trainer"} { // earlier requests have left no trace
		j := status(s.secret, at)
		j.End(0)
		head, table, _ := strings.Cut(j.Out.String(), "\n\n")
		if !strings.HasPrefix(head, "endpoint node: 3.1 MB in 1 region, ") ||
			table != "endpoint  peers    mode  regions  op/s  B/s  state\n"+
				"node          1  sealed        1     0  0 B  idle\n" {
			t.Errorf("status %s: %q", at, j.Out.String())
		}
	}
	type line struct {
		Interval float64 `json:"interval_seconds"`
		Endpoint stats.Endpoint
		Rate     float64 `json:"operations_per_second"`
	}
	j := status(s.secret, "--json", info)
	j.End(0)
	var got line
	if err := json.Unmarshal([]byte(j.Out.String()), &got); err != nil || got.Interval <= 0 ||
		got.Endpoint.Served["read"] != (stats.Count{N: 3, Bytes: uint64(len(data))}) ||
		got.Endpoint.Modes["sealed"] != 1 {
		t.Errorf("%+v, %v", got, err)
	}

	// It is watched until it goes.
	j = status(s.secret, "--watch=100ms", address)
	j.Out.Await(t, "node          1  sealed        1             idle\n")
	j.Out.Await(t, "node          1  sealed        1     0  0 B  idle\n")
	j.Signal(syscall.SIGINT)
	j.End(0)
	j = status(s.secret, "--json", "--watch", "100ms", address)
	j.Out.Await(t, "interval_seconds")
	server.Signal(syscall.SIGTERM)
	server.End(0)
	j.End(1)
	j.says("state of endpoint node: ")
	for text := range strings.Lines(j.Out.String()) {
		if err := json.Unmarshal([]byte(text), &got); err != nil || got.Endpoint.Name != "node" {
			t.Errorf("%q: %v", text, err)
		}
	}

	key, err := bootstrap.ParseSecret(s.secret)
	if err != nil {
		t.Fatal(err)
	}
	client, err := bootstrap.NewCredential(key, "eve")
	if err != nil {
		t.Fatal(err)
	}
	_, info = s.serve("r=" + path)
	for _, c := range []struct {
		secret, args string
		code         int
		says         string
	}{
		{client, info, 1, "only those who have the job's secret may ask for the state"},
		{bootstrap.NewSecret(), info, 1, "is it that of the other end?"},
		{"", info, 2, "both ends need the same secret"},
		{s.secret, "--ops 3 " + info, 2, "--ops is for jobs, and tutti-endpoint://"},
		{s.secret, "--job x " + info, 2, "--job is for jobs, and tutti-endpoint://"},
		{s.secret, "x:y", 2, `"x:y" is no address`},
		{s.secret, "@", 2, `invalid name: ""`},
		{s.secret, info + " job", 2, "takes one job or endpoint"},
		{s.secret, "127.0.0.1:1", 1, "connection refused"},
	} {
		j := status(c.secret, strings.Fields(c.args)...)
		j.End(c.code)
		j.says(c.says)
	}
}
