package bench

import (
	"context"
	"fmt"
	"math"
	"math/bits"
	"os"
	"slices"
	"strings"
	"time"
	"unsafe"

	"tutti/internal/cpus"
	"tutti/internal/ident"
	"tutti/internal/tick"
	"tutti/kernels"
	"tutti/pg"
)

// Spec says what to measure. All ranks have the same Spec.
type Spec struct {
	Ops        []string
	DTypes     []kernels.DType
	RedOps     []kernels.Op
	Min, Max   int // bytes
	Factor     int // between sizes, at least 2
	Root       int
	Iters      int // calls in a round; 0: as many as take about RoundTime
	Warmup     int // minimal number of calls before
	Rounds     int
	RoundTime  time.Duration
	Registered bool // buffers from pg.Alloc
	Check      bool
	Touch      bool   // each rank writes its inputs before every call and reads its result after it
	Queue      int    // 0: blocking calls; else operations that are started before the first wait
	Transport  string // as requested; shown, and decides when calls begin: see tick.Of

	corrupt func(op string, rank int, output []byte) // tests spoil results here
}

// Header describes the measurement.
type Header struct {
	Ranks      int    `json:"ranks"`
	Host       string `json:"host"`
	Cores      int    `json:"cores"` // processors that the ranks on rank 0's machine may run on, together
	Transport  string `json:"transport"`
	Topology   string `json:"topology"`
	Registered bool   `json:"registered"`
	Touch      bool   `json:"touch"`
	Queue      int    `json:"queue"`
	Rounds     int    `json:"rounds"`
	Rows       int    `json:"rows"`
}

// Row is one measurement.
type Row struct {
	Op         string  `json:"op"`
	DType      string  `json:"dtype"`
	RedOp      string  `json:"redop"`
	Root       int     `json:"root"` // -1: the operation has no root
	Ranks      int     `json:"ranks"`
	Count      int     `json:"count"` // elements of a rank, or of one part
	Bytes      int     `json:"bytes"` // in total
	Transport  string  `json:"transport"`
	Registered bool    `json:"registered"`
	Touch      bool    `json:"touch"`
	Queue      int     `json:"queue"` // operations started at a time, 0: blocking calls
	InPlace    bool    `json:"in_place"`
	Time       float64 `json:"time_us"` // of the slowest rank, a call: the best round's mean, or median if Touch
	AlgBW      float64 `json:"algbw_gbs"`
	BusBW      float64 `json:"busbw_gbs"`
	Wrong      int64   `json:"wrong"` // elements, on all ranks; -1: not checked
}

// Event is what Run reports: exactly one field is set.
type Event struct {
	Header *Header `json:"header,omitempty"`
	Row    *Row    `json:"row,omitempty"`
	Skip   string  `json:"skip,omitempty"` // what cannot be measured, and why
	Next   string  `json:"next,omitempty"` // what is being measured now
}

// series is one operation, type and reduction.
type series struct {
	op  *operation
	dt  kernels.DType
	red kernels.Op
}

func (s series) name() string {
	if s.op.reduces {
		return fmt.Sprintf("%s of %v %v", s.op.name, s.red, s.dt)
	}
	return fmt.Sprintf("%s of %v", s.op.name, s.dt)
}

// plan lists the series, and what cannot be measured.
func (s *Spec) plan(ranks int) (all []series, skip []string, err error) {
	for _, name := range s.Ops {
		o := find(name)
		if o == nil {
			return nil, nil, fmt.Errorf("there is no operation %q", name)
		}
		if ranks < o.minRanks {
			skip = append(skip, fmt.Sprintf("%s: needs %d ranks", name, o.minRanks))
			continue
		}
		if s.Queue > 0 && o.single {
			skip = append(skip, name+": several operations, which are not queued")
			continue
		}
		if o.name == "barrier" {
			all = append(all, series{o, kernels.Uint8, 0})
			continue
		}
		for _, dt := range s.DTypes {
			if !o.reduces {
				all = append(all, series{o, dt, 0})
				continue
			}
			for _, red := range s.RedOps {
				if !kernels.Supported(red, dt) {
					skip = append(skip, fmt.Sprintf("%s of %v %v: not defined", name, red, dt))
					continue
				}
				all = append(all, series{o, dt, red})
			}
		}
	}
	return all, skip, nil
}

// Measurable returns an error that says why nothing can be measured with so many ranks, nil if
// something can.
func (s *Spec) Measurable(ranks int) error {
	all, skip, err := s.plan(ranks)
	if err == nil && len(all) == 0 {
		err = fmt.Errorf("nothing to measure: %s", strings.Join(skip, "; "))
	}
	return err
}

func (s *Spec) sizes() (sizes []int) {
	for b := s.Min; ; b *= s.Factor {
		if sizes = append(sizes, b); b > s.Max/s.Factor {
			return sizes
		}
	}
}

// Run runs the measurement. Every rank of g calls it; report is called at rank 0, from this
// goroutine. It returns the number of wrong elements on all ranks, the same at every rank.
func Run(ctx context.Context, g *pg.Group, s Spec, report func(Event)) (wrong int64, err error) {
	if g.Rank() != 0 {
		report = func(Event) {}
	}
	all, skip, err := s.plan(g.Size())
	if err != nil {
		return 0, err
	}
	cores, err := processors(ctx, g)
	if err != nil {
		return 0, err
	}
	host, _ := os.Hostname()
	h := Header{Ranks: g.Size(), Host: host, Cores: cores, Transport: s.Transport, Topology: g.Topology(),
		Registered: s.Registered, Touch: s.Touch, Queue: s.Queue, Rounds: s.Rounds}
	for _, p := range all {
		if h.Rows++; p.op.name != "barrier" {
			h.Rows += len(s.sizes()) - 1
		}
	}
	report(Event{Header: &h})
	for _, text := range skip {
		report(Event{Skip: text})
	}
	r := &run{Spec: s, g: g, report: report, share: g.LocalSize() == g.Size() && g.Size() > cores}
	if err := r.allocate(); err != nil {
		return 0, err
	}
	defer r.free()
	if slices.ContainsFunc(all, func(p series) bool { return p.op.name == "put" }) {
		win, err := pg.NewWindow(ctx, g, r.room)
		if err != nil {
			return 0, fmt.Errorf("make a window of %d bytes: %w", r.room, err)
		}
		defer win.Close(ctx)
		r.win = &window{Window: win}
	}
	for _, p := range all {
		if err := r.measure(ctx, p); err != nil {
			return r.wrong, fmt.Errorf("%s: %w", p.name(), err)
		}
	}
	return r.wrong, nil
}

// processors returns how many processors the ranks on this rank's machine may run on, together:
// each of them may be bound to some.
func processors(ctx context.Context, g *pg.Group) (int, error) {
	allowed, err := cpus.Allowed()
	if err != nil {
		return 0, err
	}
	here, _ := ident.Here() // zero at all ranks if it is not known
	mine := make([]uint64, 1+cpus.Max/64)
	mine[0] = here.Hash()
	for _, cpu := range allowed {
		mine[1+cpu/64] |= 1 << (cpu % 64)
	}
	all := make([]uint64, g.Size()*len(mine))
	if err := pg.AllGather(ctx, g, all, mine); err != nil {
		return 0, err
	}
	for theirs := range slices.Chunk(all, len(mine)) {
		if theirs[0] == mine[0] {
			for i := range mine {
				mine[i] |= theirs[i]
			}
		}
	}
	n := 0
	for _, word := range mine[1:] {
		n += bits.OnesCount64(word)
	}
	return n, nil
}

type run struct {
	Spec
	g       *pg.Group
	report  func(Event)
	mem     arena
	win     *window // nil: there are no puts
	room    int     // bytes of a buffer for one operation
	share   bool    // the ranks share processors
	raw     [2][]byte
	op      string // what is being measured
	wrong   int64
	touched int64     // wrong elements of touched calls on this rank
	times   []float64 // of touched calls
}

// allocate makes the two buffers. Uneven counts may take twice the size, and a size of less than an
// element a rank is rounded up.
func (r *run) allocate() error {
	r.room = (2*r.Max + 8*r.g.Size() + 2*margin + 63) &^ 63
	n := r.room*max(1, r.Queue) + 64
	for i := range r.raw {
		if !r.Registered {
			r.raw[i] = make([]byte, n)
			continue
		}
		var err error
		if r.raw[i], err = pg.Alloc[byte](r.g, n); err != nil {
			return fmt.Errorf("allocate %d bytes of registered memory: %w", n, err)
		}
	}
	align := func(b []byte) []byte {
		return b[-uintptr(unsafe.Pointer(unsafe.SliceData(b)))&63:]
	}
	r.mem = arena{a: align(r.raw[0]), b: align(r.raw[1])}
	return nil
}

// arena returns the memory of the i-th of the operations that are started together.
func (r *run) arena(o *operation, i int) arena {
	if o.name == "put" {
		return arena{a: r.mem.a, b: r.win.Bytes(), win: r.win}
	}
	return arena{a: r.mem.a[i*r.room:], b: r.mem.b[i*r.room:]}
}

func (r *run) free() {
	if r.Registered {
		for _, b := range r.raw {
			pg.Free(r.g, b)
		}
	}
}

func (r *run) measure(ctx context.Context, p series) error {
	var rx reduction
	if p.op.reduces {
		rx = newReduction(p.red, p.dt, r.g.Size())
	}
	sizes := r.sizes()
	if p.op.name == "barrier" {
		sizes = []int{0}
	}
	for _, size := range sizes {
		for _, inPlace := range []bool{false, true} {
			if inPlace && !p.op.in || !inPlace && !p.op.out {
				continue
			}
			in := newInstance(r.g, p.op, p.dt, p.red, &rx, r.arena(p.op, 0), size, r.Root, inPlace)
			if r.Queue > 0 {
				each := []*instance{in}
				for i := 1; i < r.Queue; i++ {
					each = append(each, newInstance(r.g, p.op, p.dt, p.red, &rx, r.arena(p.op, i), size, r.Root,
						inPlace))
				}
				in = queue(r.g, each)
			}
			row := Row{Op: p.op.name, DType: p.dt.String(), RedOp: "none", Root: -1, Ranks: r.g.Size(), Count: in.count,
				Bytes:     in.bytes,
				Transport: r.Transport, Registered: r.Registered, Touch: r.Touch, Queue: r.Queue, InPlace: inPlace,
				Wrong: -1}
			if p.op.reduces {
				row.RedOp = p.red.String()
			}
			if p.op.rooted {
				row.Root = r.Root
			}
			r.report(Event{Next: fmt.Sprintf("%s, %d bytes", p.name(), in.bytes)})
			if err := r.row(ctx, in, &row, p.op); err != nil {
				return err
			}
			r.report(Event{Row: &row})
		}
	}
	return nil
}

// row checks one call, measures many, and checks one more.
func (r *run) row(ctx context.Context, in *instance, row *Row, o *operation) error {
	if r.op = o.name; r.Check {
		row.Wrong = 0
	}
	if err := r.verify(ctx, in, row); err != nil {
		return err
	}
	for range r.Warmup {
		if err := in.call(ctx); err != nil {
			return err
		}
	}
	best, err := r.best(func(n int) (float64, float64, error) { return r.round(ctx, in, n) })
	if err != nil {
		return err
	}
	if err := r.tally(ctx, row, r.touched); err != nil {
		return err
	}
	r.touched = 0
	if err := r.verify(ctx, in, row); err != nil {
		return err
	}
	best /= float64(in.calls)
	row.Time = best * 1e6
	if best > 0 {
		row.AlgBW = float64(in.bytes) / best / 1e9
	}
	row.BusBW = row.AlgBW * o.factor(float64(r.g.Size()))
	return nil
}

// verify makes one call on new inputs and adds the wrong elements of all ranks.
func (r *run) verify(ctx context.Context, in *instance, row *Row) error {
	in.fill()
	if err := r.g.Barrier(ctx); err != nil { // before a peer puts to memory that fill has poisoned
		return err
	}
	if err := in.call(ctx); err != nil || !r.Check {
		return err
	}
	if r.corrupt != nil {
		r.corrupt(row.Op, r.g.Rank(), in.outputs)
	}
	return r.tally(ctx, row, in.wrong())
}

// tally adds the wrong elements of all ranks, w on this one.
func (r *run) tally(ctx context.Context, row *Row, w int64) error {
	if !r.Check {
		return nil
	}
	// The counts are exchanged by the operations under test. So they are exchanged in two ways, to
	// make sure that this rank's count is not lost.
	counts := make([]int64, r.g.Size())
	if err := pg.AllGather(ctx, r.g, counts, []int64{w}); err != nil {
		return err
	}
	total := int64(0)
	for _, c := range counts {
		total += c
	}
	most := []int64{w}
	if err := pg.AllReduce(ctx, r.g, most, pg.Max); err != nil {
		return err
	}
	total = max(total, most[0], w)
	row.Wrong += total
	r.wrong += total
	return nil
}

// A round makes n calls. It returns the slowest rank's seconds for one of them, and for all with
// what is done around them: all ranks get the same.
type round func(n int) (call, all float64, err error)

// best returns the time of a call in the best of several rounds.
func (r *run) best(do round) (float64, error) {
	n, err := r.calibrate(do)
	if err != nil {
		return 0, err
	}
	best := math.Inf(1)
	for range max(1, r.Rounds) {
		call, err := r.counted(do, &n)
		if err != nil {
			return 0, err
		}
		best = min(best, call)
	}
	return best, nil
}

// counted returns the time of a call in a round of n calls. A round whose calls take less than half
// of RoundTime does not count, since something has disturbed the calibration: it is repeated with
// as many as fill it, which n is set to. The programs of tests/peers do the same (measure.h).
func (r *run) counted(do round, n *int) (float64, error) {
	for {
		call, all, err := do(*n)
		if err != nil || r.Iters > 0 || all >= r.RoundTime.Seconds()/2 || *n >= r.most() {
			return call, err
		}
		*n = r.filling(*n, all) // at least twice as many
	}
}

// calibrate determines the number of calls in a round, after calls for a quarter of its time, so
// that one that takes long, as the first ones of a process do, does not decide.
func (r *run) calibrate(do round) (int, error) {
	if r.Iters > 0 {
		return r.Iters, nil
	}
	goal, warm := r.RoundTime.Seconds(), 0.0
	for n := 1; ; {
		_, all, err := do(n)
		if err != nil {
			return 0, err
		}
		if warm >= goal/4 && all >= goal/8 || n >= r.most()/4 {
			return r.filling(n, all), nil
		}
		if warm += all; all < goal/8 {
			n *= 2
		}
	}
}

// filling returns how many calls fill a round if n of them take so many seconds.
func (r *run) filling(n int, all float64) int {
	return int(min(max(1, float64(n)*r.RoundTime.Seconds()/max(all, 1e-9)), float64(r.most())))
}

// most returns how many calls a round has at most.
func (r *run) most() int {
	if r.Touch { // their times are kept
		return 1 << 16
	}
	return 1 << 20
}

// round is a round of in.
func (r *run) round(ctx context.Context, in *instance, n int) (call, all float64, err error) {
	if r.Touch {
		return r.touch(ctx, in, n)
	}
	if err := r.g.Barrier(ctx); err != nil {
		return 0, 0, err
	}
	began := time.Now()
	for range n {
		if err := in.call(ctx); err != nil {
			return 0, 0, err
		}
	}
	t := []float64{time.Since(began).Seconds()}
	err = pg.AllReduce(ctx, r.g, t, pg.Max)
	return t[0] / float64(n), t[0], err
}

// touch is a round in the way in which programs use collectives: before each call every rank writes
// new inputs, and after it reads its result; all have written when the call begins. Only the calls
// are measured. call is the median over the calls. If each rank has a processor, a call takes as
// long as its slowest rank, and ranks that are all on one machine begin it together. If they share
// processors, each begins when it gets one, and a call takes from the first rank's beginning to the
// last rank's end: a late rank finds what others have done meanwhile.
func (r *run) touch(ctx context.Context, in *instance, n int) (call, all float64, err error) {
	r.times = r.times[:0]
	together := !r.share && r.g.LocalSize() == r.g.Size() // machines have clocks of their own
	start := machine.now()
	for range n {
		in.first++
		in.write()
		if err := r.g.Barrier(ctx); err != nil {
			return 0, 0, err
		}
		if together {
			machine.together(tick.Of(r.Transport))
		}
		began := machine.now()
		if err := in.call(ctx); err != nil {
			return 0, 0, err
		}
		if ended := machine.now(); r.share {
			r.times = append(r.times, -began.Seconds(), ended.Seconds())
		} else {
			r.times = append(r.times, (ended - began).Seconds())
		}
		if r.corrupt != nil {
			r.corrupt(r.op, r.g.Rank(), in.outputs)
		}
		r.touched += in.result()
	}
	r.times = append(r.times, (machine.now() - start).Seconds())
	if err := pg.AllReduce(ctx, r.g, r.times, pg.Max); err != nil {
		return 0, 0, err
	}
	last := len(r.times) - 1
	times, all := r.times[:last], r.times[last]
	if r.share {
		times = spans(times)
	}
	slices.Sort(times)
	return (times[(n-1)/2] + times[n/2]) / 2, all, nil
}
