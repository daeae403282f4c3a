package endpoint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tutti/bootstrap"
	"tutti/mem"
)

// until waits for a condition that other goroutines bring about.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatalf("waited for %s in vain", what)
		}
	}
}

func (p *Peer) connected() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.session != nil && p.session.up
}

func TestArgumentsAreChecked(t *testing.T) {
	_, b, p, _ := pair(t, Config{})
	if _, err := b.Register("r", mem.Host(make([]byte, 100), mem.Anywhere), RegionConfig{}); err != nil {
		t.Fatal(err)
	}
	if _, err := b.RegisterFile("f", os.Stdin, 0, 1<<62+1, RegionConfig{}); err == nil {
		t.Error("a region that is longer than a peer accepts")
	}
	if _, err := b.RegisterFile("f", nil, 0, 100, RegionConfig{}); err == nil {
		t.Error("a file that is nil is a region")
	}
	one := mem.Host(make([]byte, 1), mem.Anywhere)
	for name, c := range map[string]struct {
		op   Op
		want error
	}{
		"no kind":           {Op{Local: one}, nil},
		"no region":         {Op{Kind: OpRead, Local: one}, ErrName},
		"negative offset":   {Op{Kind: OpRead, Local: one, Region: "r", Offset: -1}, ErrBounds},
		"behind the end":    {Op{Kind: OpRead, Local: one, Region: "r", Offset: 100}, ErrBounds},
		"unknown":           {Op{Kind: OpRead, Local: one, Region: "s"}, ErrNoRegion},
		"no right":          {Op{Kind: OpWrite, Local: one, Region: "r"}, ErrRights},
		"region of a send":  {Op{Kind: OpSend, Local: one, Region: "r"}, nil},
		"exact read":        {Op{Kind: OpRead, Local: one, Region: "r", Exact: true}, nil},
		"negative timeout":  {Op{Kind: OpRead, Local: one, Region: "r", Timeout: -1}, nil},
		"device memory":     {Op{Kind: OpSend, Local: mem.Device(64, 1, "cuda:0")}, errors.ErrUnsupported},
		"file and memory":   {Op{Kind: OpWrite, Local: one, File: os.Stdin, FileLen: 1, Region: "r"}, nil},
		"file that is nil":  {Op{Kind: OpRead, FileLen: 1, Region: "r"}, nil},
		"file to be sent":   {Op{Kind: OpSend, File: os.Stdin, FileLen: 1}, nil},
		"negative file len": {Op{Kind: OpWrite, File: os.Stdin, FileLen: -1, Region: "r"}, nil},
	} {
		err := p.Start(c.op).Wait(t.Context())
		if err == nil || c.want != nil && !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want an error that wraps %v", name, err, c.want)
		}
	}
	for _, cfg := range []Config{{Secret: "short"}, {Conns: 17}, {Timeout: -1}, {Name: "a\nb"}, {Ports: "x"}} {
		if cfg.Secret == "" {
			cfg.Secret = testSecret
		}
		if e, err := New(newContext(t), cfg); err == nil {
			e.Close()
			t.Errorf("%+v is accepted", cfg)
		}
	}
	if _, err := b.Register("r", one, RegionConfig{}); err == nil {
		t.Error("two regions with one name")
	}
}

// An error about a range of a file says which file, by its name.
func TestErrorsOfRangesNameTheFile(t *testing.T) {
	_, b, p, _ := pair(t, Config{})
	f, err := os.Create(filepath.Join(t.TempDir(), "weights"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	register := func(f *os.File) error {
		_, err := b.RegisterFile("r", f, -1, 5, RegionConfig{})
		return err
	}
	named, none := "5 bytes at -1 of the file "+f.Name(), "5 bytes at -1 of a file that is nil"
	for name, c := range map[string]struct {
		err  error
		want string
	}{
		"region":               {register(f), named},
		"region without file":  {register(nil), none},
		"read":                 {p.ReadInto(f, -1, 5, "r", 0).Wait(t.Context()), named},
		"read without a file":  {p.ReadInto(nil, -1, 5, "r", 0).Wait(t.Context()), none},
		"write":                {p.WriteFrom(f, -1, 5, "r", 0).Wait(t.Context()), named},
		"write without a file": {p.WriteFrom(nil, -1, 5, "r", 0).Wait(t.Context()), none},
	} {
		if c.err == nil || !strings.Contains(c.err.Error(), c.want) {
			t.Errorf("%s: %v; want %q", name, c.err, c.want)
		}
	}
}

func TestBatchesHaveResultsForEachOperation(t *testing.T) {
	_, b, p, q := pair(t, Config{Conns: 2})
	data := pattern(1<<20, 1)
	if _, err := b.Register("r", mem.Host(data, mem.Anywhere), RegionConfig{}); err != nil {
		t.Fatal(err)
	}
	var ops []Op
	bufs := make([][]byte, 2000)
	for i := range bufs {
		bufs[i] = make([]byte, 64+i%512)
		ops = append(ops, Op{Kind: OpRead, Local: mem.Host(bufs[i], mem.Anywhere), Region: "r", Offset: int64(i * 500)})
	}
	ops[7].Region = "unknown"
	ops = append(ops, Op{Kind: OpSend, Local: mem.Host(data[:9], mem.Anywhere)})
	f := p.Batch(ops)
	if err := f.Wait(t.Context()); !errors.Is(err, ErrNoRegion) {
		t.Errorf("the batch: %v", err)
	}
	for i := range bufs {
		r := f.Result(i)
		if i == 7 {
			if !errors.Is(r.Err, ErrNoRegion) {
				t.Errorf("operation 7: %+v", r)
			}
			continue
		}
		if r.Err != nil || r.N != int64(len(bufs[i])) || !bytes.Equal(bufs[i], data[i*500:][:len(bufs[i])]) {
			t.Fatalf("operation %d: %+v", i, r)
		}
	}
	in := make([]byte, 9)
	wait(t, q.Recv(in))
	if err := p.Batch(nil).Wait(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestMessagesAreTruncatedOrExact(t *testing.T) {
	_, _, p, q := pair(t, Config{})
	for _, n := range []int{100, 100 << 10} {
		msg := pattern(n, 3)
		s := p.Send(msg)
		buf := make([]byte, n/2)
		f := q.Recv(buf)
		wait(t, f)
		if r := f.Result(0); r.N != int64(n/2) || r.Total != int64(n) || !bytes.Equal(buf, msg[:n/2]) {
			t.Errorf("a truncated message: %+v", r)
		}
		wait(t, s)
		s = p.Send(msg)
		f = q.Start(Op{Kind: OpRecv, Local: mem.Host(make([]byte, n+1), mem.Anywhere), Exact: true})
		if err := f.Wait(t.Context()); !errors.Is(err, ErrSize) {
			t.Errorf("a message of another size: %v", err)
		}
		wait(t, s)
		s = p.Send(msg[:n-1]) // the next one is not affected
		buf = make([]byte, n-1)
		wait(t, q.Start(Op{Kind: OpRecv, Local: mem.Host(buf, mem.Anywhere), Exact: true}))
		wait(t, s)
	}
}

// A message goes to the first recv that was not given up, wherever the others were in the order.
func TestMessagesPassRecvsThatWereGivenUp(t *testing.T) {
	_, _, p, q := pair(t, Config{})
	for _, given := range [][]int{{0}, {1}, {0, 1}, {1, 0}, {2, 1}, {3, 1, 0}, {0, 1, 2, 3}, {3, 2, 1, 0}} {
		fs, bufs := make([]*Future, 5), make([][]byte, 5)
		for i := range fs {
			bufs[i] = make([]byte, 1)
			fs[i] = q.Recv(bufs[i])
		}
		for _, i := range given {
			fs[i].Cancel()
		}
		for n := range len(fs) - len(given) {
			wait(t, p.Send([]byte{byte(n + 1)}))
		}
		n := byte(0)
		for i, f := range fs {
			if slices.Contains(given, i) {
				continue
			}
			wait(t, f)
			if n++; bufs[i][0] != n {
				t.Errorf("without recvs %v, recv %d has message %d, want %d", given, i, bufs[i][0], n)
			}
		}
	}
}

func TestDeadlinesWithdraw(t *testing.T) {
	_, _, p, q := pair(t, Config{})
	buf := make([]byte, 10)
	f := q.Start(Op{Kind: OpRecv, Local: mem.Host(buf, mem.Anywhere), Timeout: time.Millisecond})
	var late *TimeoutError
	if err := f.Wait(t.Context()); !errors.As(err, &late) || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a recv without a message: %v", err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("enough"))
	if err := q.Recv(buf).Wait(ctx); !errors.Is(err, ErrCancelled) {
		t.Errorf("a recv that is cancelled: %v", err)
	}
	// An offered message that is given up is not received.
	big := make([]byte, 1<<20)
	s := p.Send(big)
	s.Cancel()
	if err := s.Err(); !errors.Is(err, ErrCancelled) {
		t.Errorf("a send that is cancelled: %v", err)
	}
	wait(t, p.Send([]byte("next")))
	g := q.Recv(buf)
	wait(t, g)
	if r := g.Result(0); string(buf[:r.N]) != "next" {
		t.Errorf("received %q", buf[:r.N])
	}
}

func TestClientsHaveRightsOfTheirOwn(t *testing.T) {
	ctx := t.Context()
	c := newContext(t)
	e := newEndpoint(t, c, Config{Name: "server"})
	data := make([]byte, 100)
	for name, cfg := range map[string]RegionConfig{
		"all":  {},
		"mine": {Clients: map[string]mem.Rights{"cache": Read | Write}},
		"his":  {Clients: map[string]mem.Rights{"other": Read}},
		"look": {Rights: Write, Clients: map[string]mem.Rights{"cache": Read}},
	} {
		if _, err := e.Register(name, mem.Host(data, mem.Anywhere), cfg); err != nil {
			t.Fatal(err)
		}
	}
	secret, err := bootstrap.ParseSecret(testSecret)
	if err != nil {
		t.Fatal(err)
	}
	text, err := bootstrap.NewCredential(secret, "cache")
	if err != nil {
		t.Fatal(err)
	}
	client := newEndpoint(t, c, Config{Secret: text, Name: "another name"})
	p, err := client.Connect(ctx, e.Info())
	if err != nil {
		t.Fatal(err)
	}
	rs, err := p.Regions(ctx, "", 0)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, r := range rs {
		names = append(names, r.Name)
	}
	if want := []string{"all", "look", "mine"}; !slices.Equal(names, want) {
		t.Errorf("the client sees %v, want %v", names, want)
	}
	b := make([]byte, 1)
	wait(t, p.Write(b, "mine", 0))
	wait(t, p.Read(b, "look", 0))
	for _, f := range []*Future{p.Write(b, "look", 0), p.Write(b, "all", 0)} {
		if err := f.Wait(ctx); !errors.Is(err, ErrRights) {
			t.Error(err)
		}
	}
	if err := p.Read(b, "his", 0).Wait(ctx); !errors.Is(err, ErrNoRegion) {
		t.Error(err)
	}
	q, err := e.Accept(ctx)
	if err != nil || q.Name() != "cache" || q.Client() != "cache" {
		t.Errorf("the server sees %v (%v)", q, err)
	}
	stranger := newEndpoint(t, c, Config{Secret: testSecret[2:] + "77"})
	if _, err := stranger.Connect(ctx, e.Info()); !errors.Is(err, ErrAuth) {
		t.Errorf("another secret: %v", err)
	}
}

// A program may use the map of one region for the next one, with other rights.
func TestRightsOfClientsAreThoseOfTheRegistration(t *testing.T) {
	e := newEndpoint(t, newContext(t), Config{})
	rights := map[string]mem.Rights{"cache": Read}
	if _, err := e.Register("r", mem.Host(make([]byte, 1), mem.Anywhere), RegionConfig{Clients: rights}); err != nil {
		t.Fatal(err)
	}
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := e.RegisterFile("f", f, 0, 0, RegionConfig{Clients: rights}); err != nil {
		t.Fatal(err)
	}
	rights["cache"] = Write
	p := connect(t, newEndpoint(t, newContext(t), Config{Secret: clientSecret(t, "cache")}), e.Info())
	for _, region := range []string{"r", "f"} {
		wait(t, p.Read(nil, region, 0))
		if err := p.Write(nil, region, 0).Wait(t.Context()); !errors.Is(err, ErrRights) {
			t.Errorf("a write to region %s: %v, want %v", region, err, ErrRights)
		}
	}
}

// TestRegionsThatAreRegisteredAnew: what a peer knows of an earlier region of the same name does
// not keep it from what the present one allows.
func TestRegionsThatAreRegisteredAnew(t *testing.T) {
	for name, use := range map[string]func(p *Peer) *Future{
		"longer":      func(p *Peer) *Future { return p.Read(make([]byte, 200), "r", 0) },
		"more rights": func(p *Peer) *Future { return p.Write(make([]byte, 100), "r", 0) },
	} {
		t.Run(name, func(t *testing.T) {
			_, b, p, _ := pair(t, Config{})
			old, err := b.Register("r", mem.Host(make([]byte, 100), mem.Anywhere), RegionConfig{})
			if err != nil {
				t.Fatal(err)
			}
			wait(t, p.Read(make([]byte, 100), "r", 0))
			old.Unregister()
			if err := use(p).Wait(t.Context()); !errors.Is(err, ErrNoRegion) {
				t.Errorf("without a region: %v", err)
			}
			data := mem.Host(make([]byte, 200), mem.Anywhere)
			last, err := b.Register("r", data, RegionConfig{Rights: Read | Write})
			if err != nil {
				t.Fatal(err)
			}
			wait(t, use(p))
			if err := p.Read(make([]byte, 201), "r", 0).Wait(t.Context()); !errors.Is(err, ErrBounds) {
				t.Errorf("a read beyond the region: %v", err)
			}
			last.Unregister()
			if _, err = b.Register("r", data, RegionConfig{Rights: Write}); err != nil {
				t.Fatal(err)
			}
			if err := p.Read(make([]byte, 201), "r", 0).Wait(t.Context()); !errors.Is(err, ErrBounds) {
				t.Errorf("another read beyond the region: %v", err)
			}
			if err := p.Read(make([]byte, 200), "r", 0).Wait(t.Context()); !errors.Is(err, ErrRights) {
				t.Errorf("a read without the right: %v", err)
			}
		})
	}
}

func TestFilesAreReadAndWritten(t *testing.T) { eachGuard(t, []int{2}, filesMove) }

func filesMove(t *testing.T, cfg Config) {
	_, b, p, _ := pair(t, cfg)
	dir := t.TempDir()
	open := func(name string, content []byte) *os.File {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return f
	}
	const n = 3<<20 + 11
	content := pattern(n+5, 1)
	served := open("served", content)
	if _, err := b.RegisterFile("file", served, 5, n, RegionConfig{Rights: Read | Write}); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, n)
	wait(t, p.Read(got, "file", 0))
	if !bytes.Equal(got, content[5:]) {
		t.Error("a file read to memory differs")
	}
	into := open("into", nil)
	wait(t, p.ReadInto(into, 3, n-10, "file", 10))
	if all, _ := os.ReadFile(into.Name()); !bytes.Equal(all[3:], content[15:]) {
		for i := range all[3:] {
			if all[3+i] != content[15+i] {
				t.Errorf("a file read to a file differs %d of %d", i, len(all))
				break
			}
		}
	}
	from := open("from", pattern(n, 2))
	wait(t, p.WriteFrom(from, 1, n-1, "file", 1))
	if all, _ := os.ReadFile(served.Name()); !bytes.Equal(all[6:], pattern(n, 2)[1:]) || !bytes.Equal(all[:6],
		content[:6]) {
		t.Error("a file written from a file differs")
	}
	if err := served.Truncate(1000); err != nil {
		t.Fatal(err)
	}
	if err := p.Read(got, "file", 0).Wait(t.Context()); !errors.Is(err, ErrFailed) {
		t.Errorf("reading behind the end of the file: %v", err)
	}
	small := make([]byte, 100)
	wait(t, p.Read(small, "file", 0))
	if err := p.WriteFrom(from, n-10, 100, "file", 0).Wait(t.Context()); err == nil {
		t.Error("a write from behind the end of a file")
	}
}

// A file that fails is an error of the operation alone, which says why and names no file of the
// peer.
func TestFailuresOfFilesSayWhy(t *testing.T) {
	_, b, p, _ := pair(t, Config{Conns: 2})
	const n = 3 << 20
	full, err := os.OpenFile("/dev/full", os.O_RDWR, 0) // every write fails with ENOSPC
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	short, err := os.Create(filepath.Join(t.TempDir(), "short"))
	if err != nil {
		t.Fatal(err)
	}
	defer short.Close()
	gone, err := os.Create(filepath.Join(t.TempDir(), "gone"))
	if err != nil {
		t.Fatal(err)
	}
	rw := RegionConfig{Rights: Read | Write}
	for name, f := range map[string]*os.File{"full": full, "short": short, "gone": gone} {
		if _, err := b.RegisterFile(name, f, 0, n, rw); err != nil {
			t.Fatal(err)
		}
	}
	defer b.Close() // before the files that are registered
	gone.Close()    // too early
	if _, err := b.Register("memory", mem.Host(pattern(n, 1), mem.Anywhere), rw); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, n)
	for _, c := range []struct {
		what   string
		f      *Future
		failed bool // at the other end
		why    string
	}{
		{"write to a full file", p.Write(buf, "full", 0), true, `"no space left on device"`},
		{"small write to a full file", p.Write(buf[:10], "full", 5), true, `"no space left on device"`},
		{"read of a short file", p.Read(buf, "short", 0), true, `"the file is shorter than the region"`},
		{"read of a closed file", p.Read(buf, "gone", 0), true, `"bad file descriptor"`},
		{"write to a closed file", p.Write(buf, "gone", 0), true, `"file already closed"`},
		{"read into a full file", p.ReadInto(full, 0, n, "memory", 0), false,
			"writing to /dev/full failed: no space left on device"},
		{"read into a closed file", p.ReadInto(gone, 0, n, "memory", 0), false, "failed: file already closed"},
		{"write from a closed file", p.WriteFrom(gone, 0, n, "memory", 0), false, "failed: bad file descriptor"},
		{"write from a short file", p.WriteFrom(short, 0, n, "memory", 0), false, "is shorter than"},
	} {
		err := c.f.Wait(t.Context())
		if err == nil || !strings.Contains(err.Error(), c.why) || errors.Is(err, ErrFailed) != c.failed ||
			errors.Is(err, ErrBroken) {
			t.Errorf("%s: %v, want %s", c.what, err, c.why)
		}
	}
	wait(t, p.Read(buf, "memory", 0)) // the session goes on
}

// Offsets and lengths beyond 32 bits. The file has no pages where it is empty, and what is read of
// it goes to where nothing is kept.
func TestBeyondFourGiB(t *testing.T) {
	for _, conns := range []int{1, 3} {
		t.Run(fmt.Sprint(conns), func(t *testing.T) { beyondFourGiB(t, conns) })
	}
}

func beyondFourGiB(t *testing.T, conns int) {
	_, b, p, _ := pair(t, Config{Conns: conns, Timeout: 5 * time.Minute})
	const four, n = int64(4) << 30, int64(4)<<30 + 64<<20
	fd, err := unix.MemfdCreate("sparse", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(fd), "sparse")
	defer file.Close()
	defer b.Close() // before the file, which is registered
	if err := file.Truncate(n + 7); err != nil {
		t.Fatal(err)
	}
	if _, err := b.RegisterFile("sparse", file, 7, n, RegionConfig{Rights: Read | Write}); err != nil {
		t.Fatal(err)
	}
	for _, size := range []int{100, 300 << 10, 3 << 20} {
		for _, off := range []int64{2<<30 - 50, four - 50, four, four + 12345, n - int64(size)} {
			want, got := pattern(size, uint64(off)), make([]byte, size)
			wait(t, p.Write(want, "sparse", off))
			wait(t, p.Read(got, "sparse", off))
			if !bytes.Equal(got, want) {
				t.Errorf("%d bytes at %d differ", size, off)
			}
			if _, err := file.ReadAt(got, off+7); err != nil || !bytes.Equal(got, want) {
				t.Errorf("%d bytes at %d of the file differ, %v", size, off, err)
			}
			zero := make([]byte, size)
			if _, err := file.ReadAt(got, (off+7)&(four-1)); off >= four && (err != nil || !bytes.Equal(got, zero)) {
				t.Errorf("%d bytes for %d are at its low 32 bits, %v", size, off, err)
			}
			wait(t, p.Write(zero, "sparse", off))
		}
	}
	if err := p.Read(make([]byte, 10), "sparse", n-9).Wait(t.Context()); !errors.Is(err, ErrBounds) {
		t.Errorf("behind the end: %v", err)
	}
	if testing.Short() || conns > 1 {
		return // more than 4 GiB have to go in one piece
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	defer b.Close() // before the files that are registered
	if _, err := b.RegisterFile("null", null, 0, n, RegionConfig{Rights: Write}); err != nil {
		t.Fatal(err)
	}
	for _, f := range []*Future{p.ReadInto(null, 0, n, "sparse", 0), p.WriteFrom(file, 7, n, "null", 0)} {
		if err := f.Wait(t.Context()); err != nil || f.Result(0).N != n {
			t.Errorf("%+v, %v", f.Result(0), err)
		}
	}
}

func TestIdleConnectionsEnd(t *testing.T) {
	_, _, p, q := pair(t, Config{IdleTimeout: 20 * time.Millisecond, Conns: 2})
	wait(t, p.Send([]byte("early")))
	until(t, "the end of both sessions", func() bool { return !p.connected() && !q.connected() })
	buf := make([]byte, 10)
	f := q.Recv(buf)
	wait(t, f) // it was taken, and is not lost
	if n := f.Result(0).N; string(buf[:n]) != "early" {
		t.Errorf("received %q", buf[:n])
	}
	f = q.Recv(buf)
	wait(t, p.Send([]byte("again"))) // connects
	wait(t, f)
	until(t, "the end", func() bool { return !p.connected() && !q.connected() })
	s := q.Send([]byte("no"))
	if err := s.Wait(t.Context()); !errors.Is(err, ErrBroken) { // it was never told where p listens
		t.Errorf("a send to a peer without an address: %v", err)
	}
}

// TestRecvsKeepTheirConnection: a recv that waits keeps its connection, although either end closes
// those that are idle.
func TestRecvsKeepTheirConnection(t *testing.T) {
	a, b, p, q := pair(t, Config{IdleTimeout: 5 * time.Millisecond})
	f := p.Recv(make([]byte, 1))
	session := func() (id uint64) { // that of p, if it stays
		p.mu.Lock()
		defer p.mu.Unlock()
		if s := p.session; s != nil && !s.bye {
			id = s.id
		}
		return id
	}
	until(t, "a connection", func() bool { // the first one may have ended before the recv, which makes none
		_, err := a.Connect(t.Context(), b.Info())
		return err == nil && session() != 0
	})
	first := session()
	heard := func() uint64 { // with its questions whether the session may end, the other end brings answers
		q.mu.Lock()
		defer q.mu.Unlock()
		if q.session == nil {
			return 0
		}
		return q.session.frames
	}
	until(t, "several questions", func() bool { return heard() > 10 || session() != first })
	if now := session(); now != first {
		t.Errorf("session %x has become %x", first, now)
	}
	wait(t, q.Send([]byte{1}))
	wait(t, f)
}

func TestBothEndsConnectAtOnce(t *testing.T) {
	c := newContext(t)
	for range 30 {
		a, b := newEndpoint(t, c, Config{Conns: 2}), newEndpoint(t, c, Config{Conns: 2})
		var p, q *Peer
		var wg sync.WaitGroup
		wg.Go(func() {
			var err error
			if p, err = a.Connect(t.Context(), b.Info()); err != nil {
				t.Error(err)
			}
		})
		wg.Go(func() {
			var err error
			if q, err = b.Connect(t.Context(), a.Info()); err != nil {
				t.Error(err)
			}
		})
		if wg.Wait(); t.Failed() {
			return
		}
		f, g := p.Recv(make([]byte, 5)), q.Recv(make([]byte, 5))
		wait(t, p.Send([]byte("hello")))
		wait(t, q.Send([]byte("hello")))
		wait(t, f)
		wait(t, g)
		a.Close()
		b.Close()
	}
}

// A name after which no list begins is the error of the call, and ends nothing else.
func TestRegionsAfterInvalidNames(t *testing.T) {
	_, b, p, _ := pair(t, Config{})
	if _, err := b.Register("r", mem.Host(make([]byte, 1), mem.Anywhere), RegionConfig{}); err != nil {
		t.Fatal(err)
	}
	other := p.Recv(nil)
	for _, name := range []string{strings.Repeat("x", 256), strings.Repeat("x", 1<<20), "a\xff", "a\nb"} {
		if page, err := p.Regions(t.Context(), name, 0); !errors.Is(err, ErrName) || page != nil {
			t.Errorf("after %.20q: %v, %v; want ErrName", name, page, err)
		}
		if _, err := p.Lookup(t.Context(), name); !errors.Is(err, ErrName) {
			t.Errorf("lookup of %.20q: %v, want ErrName", name, err)
		}
		if err := p.Read(make([]byte, 1), name, 0).Wait(t.Context()); !errors.Is(err, ErrName) {
			t.Errorf("read of %.20q: %v, want ErrName", name, err)
		}
	}
	if page, err := p.Regions(t.Context(), strings.Repeat("q", 255), 0); err != nil || len(page) != 1 {
		t.Errorf("after the longest name: %v, %v", page, err)
	}
	if other.Ended() {
		t.Errorf("another operation has ended: %v", other.Err())
	}
}

// An address may be that of the endpoint itself, which it learns from the one that answers.
func TestConnectToItself(t *testing.T) {
	e := newEndpoint(t, newContext(t), Config{})
	for _, info := range []Info{e.Info(), {Addrs: e.Info().Addrs}} {
		if _, err := e.Connect(t.Context(), info); err == nil || !strings.Contains(err.Error(),
			"that is this endpoint itself") {
			t.Errorf("connect to %v: %v", info, err)
		}
	}
	if n := len(e.Peers()); n != 0 {
		t.Errorf("it has %d peers", n)
	}
}

func TestManyRegions(t *testing.T) {
	_, b, p, _ := pair(t, Config{})
	const n = 10_000
	memory := mem.Host(make([]byte, n), mem.Anywhere)
	want := map[string]bool{}
	for i := range n {
		name := fmt.Sprintf("layer-%d", i)
		if _, err := b.Register(name, memory.Slice(i, 1), RegionConfig{}); err != nil {
			t.Fatal(err)
		}
		want[name] = true
	}
	for after, last := "", false; !last; {
		page, err := p.Regions(t.Context(), after, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range page {
			if !want[r.Name] || r.Len != 1 || r.Rights != Read {
				t.Fatalf("region %+v is not expected, or comes twice", r)
			}
			delete(want, r.Name)
			after = r.Name
		}
		last = len(page) < MaxPage
	}
	if len(want) > 0 {
		t.Errorf("%d regions are missing", len(want))
	}
	var ops []Op
	for i := range n {
		ops = append(ops, Op{Kind: OpRead, Local: mem.Host(make([]byte, 1), mem.Anywhere),
			Region: fmt.Sprintf("layer-%d", i)})
	}
	wait(t, p.Batch(ops))
}

func TestWatchersHearOfRegions(t *testing.T) {
	_, b, p, _ := pair(t, Config{})
	memory := mem.Host(make([]byte, 8), mem.Anywhere)
	register := func(name string) *Region {
		r, err := b.Register(name, memory, RegionConfig{})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	first := register("first")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var seen []string
	for ev, err := range p.Watch(ctx) {
		if err != nil {
			if !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
			break
		}
		seen = append(seen, fmt.Sprint(ev.Name, ev.Gone))
		switch len(seen) {
		case 1:
			register("second")
		case 2:
			first.Unregister()
		case 3:
			if _, err := b.Register("hidden", memory,
				RegionConfig{Clients: map[string]mem.Rights{"x": Read}}); err != nil {
				t.Fatal(err)
			}
			register("first")
		case 4:
			cancel()
		}
	}
	if want := []string{"firstfalse", "secondfalse", "firsttrue", "firstfalse"}; !slices.Equal(seen, want) {
		t.Errorf("saw %v, want %v", seen, want)
	}
	for _, err := range p.Watch(t.Context()) {
		if err == nil {
			go b.Close()
			continue
		}
		if !errors.Is(err, ErrBroken) {
			t.Errorf("the end of a watch: %v", err)
		}
	}
}

// A watcher receives changes in the order in which they are made, by whichever goroutines.
func TestChangesOfRegionsAreToldInTheirOrder(t *testing.T) {
	var g registry
	var mu sync.Mutex
	var seen []bool
	added := make(chan error, 1)
	g.changed = func(_ *Region, gone bool) {
		if gone {
			again := make(chan error, 1)
			go func() { again <- g.add(&Region{name: "r"}) }()
			select { // the other one has no chance to be told first
			case err := <-again:
				added <- err
			case <-time.After(100 * time.Millisecond):
				go func() { added <- <-again }()
			}
		}
		mu.Lock()
		defer mu.Unlock()
		seen = append(seen, gone)
	}
	r := &Region{name: "r"}
	if err := g.add(r); err != nil {
		t.Fatal(err)
	}
	r.Unregister()
	if err := <-added; err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	defer mu.Unlock()
	if want := []bool{false, true, false}; !slices.Equal(seen, want) {
		t.Errorf("gone %v, want %v", seen, want)
	}
}

// A batch of one is held for what follows only if it is small, as one operation is.
func TestLargeBatchesOfOneAreNotHeld(t *testing.T) {
	s := &session{requests: map[uint64]request{1: {}, 2: {}, 3: {}, 4: {}}}
	for n, want := range map[int]bool{smallest: true, smallest + 1: false} {
		if got := s.holdLocked([]Op{{Local: mem.Host(make([]byte, n), mem.Anywhere)}}); got != want {
			t.Errorf("a batch of one operation of %d bytes is held: %v", n, got)
		}
		s.held = 0
	}
}

func TestCloseEndsOperations(t *testing.T) {
	a, _, p, q := pair(t, Config{})
	recv, send := p.Recv(make([]byte, 1)), p.Send(make([]byte, 1<<20))
	theirs := q.Recv(make([]byte, 0))
	wait(t, theirs)
	theirs = q.Recv(make([]byte, 1))
	again := p.Send(make([]byte, 1<<20))
	_ = send
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	for _, f := range []*Future{recv, p.Send(nil)} {
		if err := f.Wait(t.Context()); !errors.Is(err, ErrClosed) {
			t.Errorf("an operation of a closed endpoint: %v", err)
		}
	}
	again.Wait(t.Context())
	theirs.Wait(t.Context())
	op := Op{Kind: OpRecv, Local: mem.Host(make([]byte, 1), mem.Anywhere), Timeout: time.Millisecond}
	if err := q.Start(op).Wait(t.Context()); err == nil { // it might connect again
		t.Error("a recv from a closed endpoint")
	}
	if _, err := a.Register("r", mem.Host(nil, mem.Anywhere), RegionConfig{}); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
}

// An operation on a peer that has connected, but not with all its connections yet, waits for them.
func TestOperationBeforeAllConnectionsHaveCome(t *testing.T) {
	server := newEndpoint(t, newContext(t), Config{})
	second, calls := make(chan struct{}), 0
	client := newEndpoint(t, newContext(t), Config{Conns: 2,
		Dialer: func(ctx context.Context, d *net.Dialer, _ int, address string) (net.Conn, error) {
			if calls++; calls == 2 {
				select {
				case <-second:
				case <-ctx.Done():
					return nil, ctx.Err()
				}
			}
			return d.DialContext(ctx, "tcp", address)
		}})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	connected := make(chan *Peer, 1)
	go func() {
		p, err := client.Connect(ctx, server.Info())
		if err != nil {
			t.Error(err)
		}
		connected <- p
	}()
	p, err := server.Accept(ctx)
	if err != nil {
		t.Fatal(err)
	}
	send := p.Send([]byte("early"))
	if send.Ended() {
		t.Fatal("the send has ended: ", send.Err())
	}
	close(second)
	if q := <-connected; q != nil {
		word := make([]byte, 5)
		wait(t, q.Recv(word))
		wait(t, send)
		if string(word) != "early" {
			t.Errorf("got %q", word)
		}
	}
}
