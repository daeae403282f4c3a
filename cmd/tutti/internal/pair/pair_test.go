package pair

import (
	"context"
	"fmt"
	"io"
	"slices"
	"testing"
	"time"

	"tutti/endpoint"
	"tutti/rdma/soft"
)

// run measures with both ends in this process; spoil is called with the serving end's memory before
// the result of a turn is compared.
func run(t *testing.T, spoil func(turn, []byte)) (rows []Row, bad int64) {
	return runOver(t, endpoint.RDMA{}, endpoint.RDMA{}, spoil)
}

// runOver is run with RDMA at each end.
func runOver(t *testing.T, mine, theirs endpoint.RDMA, spoil func(turn, []byte)) (rows []Row, bad int64) {
	orders, order := io.Pipe()
	answers, answer := io.Pipe()
	served := make(chan error, 1)
	go func() {
		served <- serve(t.Context(), orders, answer, theirs, spoil)
		answer.Close()
	}()
	s := Spec{Min: 1, Max: 400_000, Factor: 70, Depth: 2, Iters: 3, Warmup: 1, Rounds: 1, RoundTime: time.Millisecond,
		Check: true, RDMA: mine}
	bad, err := Run(t.Context(), s, answers, order, func(r Row) { rows = append(rows, r) }, func(string) {})
	order.Close()
	if serr := <-served; err != nil || serr != nil {
		t.Fatalf("Run: %v; Serve: %v", err, serr)
	}
	return rows, bad
}

func TestRunComparesEveryByte(t *testing.T) {
	if rows, bad := run(t, nil); bad != 0 || len(rows) != 3*2*4+2 {
		t.Errorf("%d wrong bytes in %d rows", bad, len(rows))
	}
	// A byte that is wrong at the end of a message or of a write is found in each turn.
	rows, _ := run(t, func(x turn, b []byte) {
		if !x.reads() {
			b[len(b)-1] ^= 1
		}
	})
	for _, r := range rows {
		want := int64(0)
		if r.Op == sendrecv || r.Op == write {
			want = 4 // a warm-up and a turn of both contestants
		}
		if r.Wrong != want {
			t.Errorf("%+v: expected %d wrong bytes", r, want)
		}
	}
}

// Reads and writes of at least RDMA.From bytes go by RDMA, and so do pieces of batches and long
// messages.
func checkPaths(t *testing.T, mine, theirs endpoint.RDMA) {
	rows, bad := runOver(t, mine, theirs, nil)
	if bad != 0 || len(rows) != 3*2*4+2 {
		t.Errorf("%d wrong bytes in %d rows", bad, len(rows))
	}
	for _, r := range rows {
		want := "tcp"
		if r.Op != sendrecv && r.Bytes >= directFrom || r.Bytes >= lentFrom {
			want = "rdma"
		}
		if r.Path != want {
			t.Errorf("%+v: want path %q", r, want)
		}
	}
}

// Each row comes once, and sizes end although the next one would be too large for an int.
func TestRows(t *testing.T) {
	for _, c := range []struct {
		depth, factor int
		want          []int // depths and sizes
	}{
		{1, 2, []int{1, 64, 1, 128}},
		{3, 2, []int{1, 64, 1, 128, 3, 64, 3, 128}},
		{1, 1 << 62, []int{1, 64}},
	} {
		s := Spec{Min: 64, Max: 200, Factor: c.factor, Depth: c.depth}
		got := map[string][]int{}
		for _, r := range s.rows() {
			got[r.Op] = append(got[r.Op], r.Depth, r.Bytes)
		}
		for _, op := range []string{sendrecv, read, write} {
			if !slices.Equal(got[op], c.want) {
				t.Errorf("%d calls under way, factor %d: %s with depths and sizes %v, want %v", c.depth, c.factor, op,
					got[op], c.want)
			}
		}
	}
}

func TestRDMA(t *testing.T) {
	f := soft.New(soft.Config{Seed: 4, Late: 3})
	defer f.Close()
	checkPaths(t, endpoint.RDMA{Provider: f, Devices: "soft0"}, endpoint.RDMA{Provider: f, Devices: "soft1"})
}

func TestDataDiffersBetweenTurnsAndPlaces(t *testing.T) {
	for _, n := range []int{0, 1, 7, 8, 9, 4096, 4099} {
		b := make([]byte, n+1)
		b[n] = 7
		fill(b[:n], 3)
		if x := wrong(b[:n], 3); x != 0 || b[n] != 7 {
			t.Errorf("%d bytes: %d wrong, and the next is %d", n, x, b[n])
		}
		if n < 8 {
			continue
		}
		if x := wrong(b[:n], 4); x < int64(n)/2 {
			t.Errorf("%d of %d bytes differ from those of the next turn", x, n)
		}
		copy(b, b[1:n])
		if x := wrong(b[:n], 3); x < int64(n)/2 {
			t.Errorf("%d of %d bytes that are displaced differ", x, n)
		}
	}
}

func TestRunEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	answers, answer := io.Pipe()
	defer answer.Close()
	orders, order := io.Pipe()
	go func() {
		io.ReadAtLeast(orders, make([]byte, 1), 1)
		cancel()
		answer.CloseWithError(fmt.Errorf("killed")) // what ends the other process closes its output
		io.Copy(io.Discard, orders)
	}()
	s := Spec{Min: 1, Max: 1, Factor: 2, Depth: 1, Rounds: 1, RoundTime: time.Millisecond}
	if _, err := Run(ctx, s, answers, order, func(Row) {}, func(string) {}); err != context.Canceled {
		t.Errorf("%v, expected %v", err, context.Canceled)
	}
	orders.Close()
}
