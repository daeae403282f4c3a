package pair

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"tutti/bootstrap"
	"tutti/endpoint"
)

// Spec says what to measure.
type Spec struct {
	Min, Max  int // bytes
	Factor    int // between sizes, at least 2
	Depth     int // calls that are under way in rows that have several
	Iters     int // calls of a turn; 0: as many as take about RoundTime
	Warmup    int // calls before the first turn of a row, at least
	Rounds    int // turns of each contestant in a row, of which the median counts
	RoundTime time.Duration
	Check     bool
	RDMA      endpoint.RDMA // of the process that measures; the zero value: TCP
}

// Row is one measurement.
type Row struct {
	Op    string  `json:"op"`
	Bytes int     `json:"bytes"` // of a call
	Depth int     `json:"depth"` // calls, or pieces of a batch, that are under way
	Tutti float64 `json:"tutti_us"`
	Raw   float64 `json:"raw_us"`
	// Ratio is Raw / Tutti: above 1 the endpoint is faster.
	Ratio float64 `json:"ratio"`
	GBs   float64 `json:"tutti_gbs"` // 10^9 bytes a second, one way
	Path  string  `json:"path"`      // "tcp" or "rdma": what has carried the endpoint's data
	Wrong int64   `json:"wrong"`     // bytes; -1: not checked
}

// Operations, in the order of the rows.
const (
	sendrecv = "sendrecv"
	read     = "read"
	write    = "write"
	batch    = "batch"
)

// A batch is so many pieces of so many bytes.
const (
	pieces    = 64
	pieceSize = 4 << 10
)

// directFrom is the length in bytes from which reads and writes go by RDMA, unless Spec.RDMA says
// another one.
const directFrom = 4 << 10

// lentFrom is that of messages: shorter ones are sent before they are received.
const lentFrom = 64<<10 + 1

// Contestants.
const (
	tutti = "tutti"
	raw   = "raw"
)

// turn is what both processes do at the same time.
type turn struct {
	Who   string
	Op    string
	N     int // bytes of a call
	Depth int
	Count int // calls
	Seed  uint64
}

// reads reports whether the bytes go from the process that serves to the other alone.
func (t *turn) reads() bool { return t.Op == read || t.Op == batch }

// echoes reports whether they go there and back.
func (t *turn) echoes() bool { return t.Op == sendrecv && t.Depth == 1 }

// order is what the process that measures tells the other; one field is set.
type order struct {
	Begin *hello `json:",omitempty"`
	Turn  *turn  `json:",omitempty"` // prepare for it, answer, and do it
	Check *turn  `json:",omitempty"` // answer how many bytes of its result are wrong
}

// hello is the first order.
type hello struct {
	Secret string
	Size   int // bytes of the buffer
}

// answer is the answer to an order.
type answer struct {
	Endpoint string `json:",omitempty"` // an endpoint.Info
	Raw      string `json:",omitempty"` // the address of the plain connection
	Wrong    int64
	Err      string `json:",omitempty"`
}

// rows returns the rows without their figures.
func (s *Spec) rows() (rows []Row) {
	for _, op := range []string{sendrecv, read, write} {
		for _, depth := range slices.Compact([]int{1, s.Depth}) {
			for n := s.Min; ; n *= s.Factor {
				if rows = append(rows, Row{Op: op, Bytes: n, Depth: depth}); n > s.Max/s.Factor {
					break
				}
			}
		}
	}
	return append(rows, Row{Op: batch, Bytes: pieces * pieceSize, Depth: 1},
		Row{Op: batch, Bytes: pieces * pieceSize, Depth: pieces})
}

// Run measures, with the process that calls Serve at the other ends of in and out, and gives the
// rows to report. next is told what is measured now. It returns the bytes that were wrong. When ctx
// ends it fails soon; the caller ends the other process.
func Run(ctx context.Context, s Spec, in io.Reader, out io.Writer, report func(Row), next func(string)) (wrong int64,
	err error) {
	m := &measurer{ctx: ctx, in: json.NewDecoder(in), out: json.NewEncoder(out), check: s.Check}
	h := hello{Secret: bootstrap.NewSecret(), Size: max(s.Max, pieces*pieceSize)}
	a, err := m.order(order{Begin: &h})
	if err != nil {
		return 0, err
	}
	if m.contestants, err = connect(ctx, h, a, s.RDMA); err != nil {
		return 0, err
	}
	defer m.close()
	for _, r := range s.rows() {
		next(fmt.Sprintf("%s of %d bytes, depth %d", r.Op, r.Bytes, r.Depth))
		if err := m.row(&s, &r); err != nil {
			return wrong, fmt.Errorf("%s of %d bytes, depth %d: %w", r.Op, r.Bytes, r.Depth, err)
		}
		wrong += max(r.Wrong, 0)
		report(r)
	}
	return wrong, nil
}

// measurer is the process that measures.
type measurer struct {
	ctx   context.Context
	in    *json.Decoder
	out   *json.Encoder
	check bool
	seed  uint64
	wrong int64
	// Operations of the endpoint that a row has measured, and those of them that went by RDMA.
	done, direct uint64
	*contestants
}

// order gives an order and waits for the answer.
func (m *measurer) order(o order) (a answer, err error) {
	if err = m.out.Encode(o); err == nil {
		err = m.in.Decode(&a)
	}
	switch {
	case m.ctx.Err() != nil:
		return a, context.Cause(m.ctx)
	case err != nil:
		return a, fmt.Errorf("the other process: %w", err)
	case a.Err != "":
		return a, errors.New("the other process: " + a.Err)
	}
	return a, nil
}

// row measures a row.
func (m *measurer) row(s *Spec, r *Row) error {
	m.wrong = 0
	who := []string{tutti, raw}
	count, times := map[string]int{}, map[string][]float64{}
	for _, w := range who {
		n, err := m.calibrate(s, turn{Who: w, Op: r.Op, N: r.Bytes, Depth: r.Depth})
		if err != nil {
			return err
		}
		count[w] = n
	}
	m.direct, m.done = 0, 0
	for range s.Rounds {
		for _, w := range who {
			var d time.Duration
			for {
				var err error
				if d, err = m.turn(turn{Who: w, Op: r.Op, N: r.Bytes, Depth: r.Depth, Count: count[w]}); err != nil {
					return err
				}
				if s.Iters > 0 || d >= s.RoundTime/2 || count[w] >= most {
					break
				}
				count[w] = filling(s, count[w], d) // calibrate was disturbed
			}
			times[w] = append(times[w], d.Seconds()*1e6/float64(count[w]))
		}
	}
	r.Tutti, r.Raw = median(times[tutti]), median(times[raw])
	r.Ratio = r.Raw / r.Tutti
	ways := 1
	if r.Op == sendrecv && r.Depth == 1 {
		ways = 2
	}
	r.GBs = float64(ways*r.Bytes) / r.Tutti / 1e3
	if r.Wrong = m.wrong; !m.check {
		r.Wrong = -1
	}
	switch r.Path = endpoint.PathTCP.String(); m.direct {
	case 0:
	case m.done:
		r.Path = endpoint.PathDirect.String()
	default:
		return fmt.Errorf("only %d of %d operations went by RDMA: its path was lost meanwhile", m.direct, m.done)
	}
	return nil
}

// calibrate warms up, and returns how many calls make a turn.
func (m *measurer) calibrate(s *Spec, t turn) (int, error) {
	if err := m.warmMessages(t); err != nil {
		return 0, err
	}
	t.Count = max(s.Warmup, 1)
	for {
		d, err := m.turn(t)
		switch {
		case err != nil:
			return 0, err
		case s.Iters > 0:
			return s.Iters, nil
		case d >= s.RoundTime/4 || t.Count >= most:
			return filling(s, t.Count, d), nil
		}
		t.Count *= 4
	}
}

// most bounds the calls of a turn.
const most = 1 << 24

// filling returns how many calls make a turn if n of them take d.
func filling(s *Spec, n int, d time.Duration) int {
	return int(min(max(1, float64(n)*float64(s.RoundTime)/float64(max(d, 1))), most))
}

// warmMessages sends the messages of a turn until they go by RDMA, if they can.
func (m *measurer) warmMessages(t turn) error {
	if m.least == 0 || t.Who != tutti || t.Op != sendrecv || int64(t.N) < max(m.least, lentFrom) {
		return nil
	}
	t.Count = 1
	for late := time.Now().Add(setup); ; {
		m.direct, m.done = 0, 0
		if _, err := m.turn(t); err != nil || m.direct == m.done {
			return err
		}
		if time.Now().After(late) {
			return fmt.Errorf("messages do not go by RDMA after %v: tutti doctor explains the devices", setup)
		}
	}
}

// turn does a turn and returns how long it took.
func (m *measurer) turn(t turn) (time.Duration, error) {
	m.seed++
	t.Seed = m.seed
	local := m.buf[:t.N]
	if t.reads() {
		clear(local)
	} else {
		fill(local, t.Seed)
	}
	if t.echoes() {
		clear(m.back[:t.N])
	}
	if _, err := m.order(order{Turn: &t}); err != nil {
		return 0, err
	}
	if t.remote() {
		if _, err := m.peer.Lookup(m.ctx, t.region()); err != nil {
			return 0, err
		}
	}
	if err := m.warm(m.ctx, t); err != nil {
		return 0, err
	}
	direct, done := m.counts(t)
	start := time.Now()
	err := m.do(m.ctx, t)
	d := time.Since(start)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", t.Who, err)
	}
	newDirect, newDone := m.counts(t)
	m.direct, m.done = m.direct+newDirect-direct, m.done+newDone-done
	a, err := m.order(order{Check: &t})
	if err != nil || !m.check {
		return d, err
	}
	m.wrong += a.Wrong
	switch {
	case t.reads():
		m.wrong += wrong(local, t.Seed)
	case t.echoes():
		m.wrong += wrong(m.back[:t.N], t.Seed)
	}
	return d, nil
}

func median(xs []float64) float64 {
	slices.Sort(xs)
	return (xs[(len(xs)-1)/2] + xs[len(xs)/2]) / 2
}
