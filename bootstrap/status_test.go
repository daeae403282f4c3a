package bootstrap

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/rand"
	"errors"
	"strings"
	"testing"
	"time"
)

var statusSecret = []byte("a secret of the status tests")

// statusRank starts the endpoint of rank 1 of 2.
func statusRank(t *testing.T, f func(ctx context.Context, ops int) ([]byte, error)) Record {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	s, err := Serve(ctx, ServerConfig{Rank: 1, Incarnation: 99, Secret: statusSecret, Interfaces: "127.0.0.1",
		Status:   f,
		Describe: func(context.Context, int, uint64) (Endpoints, error) { return nil, nil }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return NewRecord(1, 2, 99, s.Addrs())
}

// stranger is a client that knows the secret and is not a rank.
func stranger(secret []byte) *Client {
	self := NewRecord(-1, 0, 77, nil)
	return NewClient(ClientConfig{Self: self, Secret: secret})
}

func ask(t *testing.T, c *Client, to Record, ops int) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	b, err := c.Status(ctx, to, ops)
	return string(b), err
}

func TestStatus(t *testing.T) {
	rec := statusRank(t, func(_ context.Context, ops int) ([]byte, error) {
		return []byte(strings.Repeat("x", ops)),
			nil
	})
	for _, n := range []int{0, 1, 70_000} {
		if got, err := ask(t, stranger(statusSecret), rec, n); err != nil || len(got) != n {
			t.Errorf("%d: %d bytes, %v", n, len(got), err)
		}
	}
	if got, err := ask(t, stranger(statusSecret), rec, 1<<24); err != nil || len(got) == 0 || len(got) > MaxStatusText {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if _, err := ask(t, stranger([]byte("another secret altogether")), rec, 0); !errors.Is(err, ErrAuth) ||
		!strings.Contains(err.Error(), "rank 1 (incarnation") {
		t.Errorf("another secret: %v", err)
	}
	old := rec
	old.Incarnation = 98
	if _, err := ask(t, stranger(statusSecret), old, 0); !errors.Is(err, ErrStale) {
		t.Errorf("another incarnation: %v", err)
	}
	old.Addrs = nil
	if _, err := ask(t, stranger(statusSecret), old, 0); err == nil || !strings.Contains(err.Error(), "no address") {
		t.Errorf("no addresses: %v", err)
	}
}

// TestStatusFits has a rank with more to say than fits: it leaves operations out, or says that it
// cannot.
func TestStatusFits(t *testing.T) {
	noise := make([]byte, 1024)
	rand.Read(noise)
	var asked []int
	rec := statusRank(t, func(_ context.Context, ops int) ([]byte, error) {
		asked = append(asked, ops)
		b := make([]byte, 0, ops<<10)
		for i := range ops {
			for j := range noise {
				noise[j] ^= byte(i*7 + j*j>>3)
			}
			rand.Read(noise[:512])
			b = append(b, noise...)
		}
		return b, nil
	})
	got, err := ask(t, stranger(statusSecret), rec, 5000)
	if err != nil || len(got)%1024 != 0 || len(got) == 0 || len(asked) < 2 {
		t.Errorf("%d bytes, %v, after asking for %d", len(got), err, asked)
	}
	big := statusRank(t, func(context.Context, int) ([]byte, error) { return make([]byte, MaxStatusText+1), nil })
	if _, err := ask(t, stranger(statusSecret), big, 3); err == nil || !strings.Contains(err.Error(), "too much") {
		t.Error(err)
	}
}

func TestStatusErrors(t *testing.T) {
	rec := statusRank(t, func(context.Context, int) ([]byte, error) { return nil, errors.New("it is joining") })
	if _, err := ask(t, stranger(statusSecret), rec, 3); err == nil || !strings.Contains(err.Error(), "it is joining") {
		t.Error(err)
	}
	none := statusRank(t, nil)
	if _, err := ask(t, stranger(statusSecret), none, 3); err == nil ||
		!strings.Contains(err.Error(), "keeps no status") {
		t.Error(err)
	}
}

// TestStatusHangs asks a rank that does not answer: the client's ctx ends that, also for concurrent
// clients.
func TestStatusHangs(t *testing.T) {
	began := make(chan struct{}, 1)
	rec := statusRank(t, func(ctx context.Context, _ int) ([]byte, error) {
		began <- struct{}{}
		<-ctx.Done()
		return nil, ctx.Err()
	})
	first, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := stranger(statusSecret).Status(first, rec, 0)
		done <- err
	}()
	<-began
	ctx, cancel2 := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel2()
	if _, err := stranger(statusSecret).Status(ctx, rec, 0); err == nil {
		t.Error("a rank that is busy has answered")
	}
	cancel()
	if err := <-done; err == nil {
		t.Error("a rank that hangs has answered")
	}
}

func TestStatusWire(t *testing.T) {
	in := statusRequest{nonce: 1 << 60, ops: 7}
	b, _ := wire{}.Marshal(&in)
	var out statusRequest
	if err := (wire{}).Unmarshal(b, &out); err != nil || out != in {
		t.Errorf("%+v, %v", out, err)
	}
	for _, bad := range [][]byte{nil, b[:11], append(b, 0)} {
		if err := (wire{}).Unmarshal(bad, &out); err == nil {
			t.Errorf("%d bytes decode", len(bad))
		}
	}
	reply := statusReply{nonce: 1, incarnation: 2, body: []byte("abc")}
	b, _ = wire{}.Marshal(&reply)
	var back statusReply
	if err := (wire{}).Unmarshal(b, &back); err != nil || back.nonce != 1 || back.incarnation != 2 ||
		string(back.body) != "abc" {
		t.Errorf("%+v, %v", back, err)
	}
	clear(b)
	if string(back.body) != "abc" {
		t.Error("what was decoded shares the buffer")
	}
	if err := (wire{}).Unmarshal(make([]byte, 15), &back); err == nil {
		t.Error("15 bytes decode")
	}
	if err := (wire{}).Unmarshal(make([]byte, 17+MaxStatus), &back); err == nil {
		t.Error("too many bytes decode")
	}
	var bomb bytes.Buffer
	z := gzip.NewWriter(&bomb)
	z.Write(make([]byte, MaxStatusText+1))
	z.Close()
	if _, err := inflate(bomb.Bytes()); err == nil {
		t.Error("a bomb inflates")
	}
	if _, err := inflate(bomb.Bytes()[:bomb.Len()/2]); err == nil {
		t.Error("half a text inflates")
	}
}
