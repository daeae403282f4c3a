//go:build linux

package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"tutti/internal/ports"
	"tutti/internal/proctest"
	"tutti/tests/internal/stats"
)

// p2pOptions are the flags of peers p2p, parsed.
type p2pOptions struct {
	options
	depth int
	nixl  string // the virtual environment
}

// A batch is so many pieces of so many bytes, in every contestant.
const (
	batchPieces = 64
	batchPiece  = 4 << 10
)

func parseP2P(args []string) (p2pOptions, error) {
	o := p2pOptions{options: options{Reps: 1}}
	f := flag.NewFlagSet("peers p2p", flag.ContinueOnError)
	sizes := f.String("sizes", "64,4K,64K,1M,16M", "bytes, with K, M or G")
	f.IntVar(&o.Rounds, "rounds", 5, "rounds; the median counts")
	f.IntVar(&o.depth, "depth", 16, "calls under way in rows with several")
	f.DurationVar(&o.Budget, "budget", 50*time.Millisecond, "about the time of a contestant's turn in a row")
	f.DurationVar(&o.Deadline, "deadline", 60*time.Second, "time after which a contestant's turn is ended")
	f.StringVar(&o.nixl, "nixl", cached("nixl"), "virtual environment with NIXL")
	f.BoolVar(&o.lenient, "lenient", false, "do not end with an error if a row misses its bar")
	f.StringVar(&o.jsonPath, "json", "", "also write everything, with each round's figures, to this file")
	f.StringVar(&o.tuttiPath, "tutti", "", "a tutti that is built already; default: build ./cmd/tutti")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	if f.NArg() > 0 {
		return o, fmt.Errorf("unexpected argument %q: everything is a flag", f.Arg(0))
	}
	var err error
	if o.Sizes, err = parseSizes(*sizes); err != nil {
		return o, err
	}
	if o.Rounds < 1 || o.depth < 1 || o.depth > 1024 || o.Budget < time.Millisecond || o.Deadline < time.Second {
		return o, errors.New("--rounds is to be at least 1, --depth 1 to 1024, --budget at least 1ms, " +
			"--deadline at least 1s")
	}
	return o, nil
}

// p2pLine is a line of the table.
type p2pLine struct {
	Op    string `json:"op"`
	Bytes int64  `json:"bytes"`
	Depth int    `json:"depth"`
}

func (l p2pLine) String() string {
	return fmt.Sprintf("%s of %s, %d at a time", l.Op, sizeString(l.Bytes), l.Depth)
}

// p2pRow is a line with the figures of the contestants, in microseconds a call.
type p2pRow struct {
	p2pLine
	Median  map[string]float64   `json:"median_us"`
	Samples map[string][]float64 `json:"samples_us"`
	Raw     float64              `json:"ratio_raw,omitempty"`  // raw / tutti
	Peer    float64              `json:"ratio_peer,omitempty"` // the best of UCX and NIXL / tutti
}

// p2pContest is a comparison of endpoints under way.
type p2pContest struct {
	*workshop
	o       p2pOptions
	samples map[p2pLine]map[string][]float64
	out     map[string]bool // contestants that do not take part any more
}

// p2pTest is a test of ucx_perftest, and what becomes of its figure.
type p2pTest struct {
	test   string
	factor float64 // of the time that it prints
	size   int64
	depth  int
}

// ucxTests returns the tests for a line, of which the fastest counts. Its latencies are half of a
// round trip. It has no acknowledged write of one at a time: a ping-pong of puts takes its place up
// to 4 KiB, where what comes back weighs little.
func ucxTests(l p2pLine) []p2pTest {
	switch {
	case l.Op == "sendrecv" && l.Depth == 1:
		return []p2pTest{{"tag_lat", 2, l.Bytes, 1}, {"ucp_am_lat", 2, l.Bytes, 1}}
	case l.Op == "sendrecv":
		return []p2pTest{{"tag_bw", 1, l.Bytes, l.Depth}, {"ucp_am_bw", 1, l.Bytes, l.Depth}}
	case l.Op == "read":
		return []p2pTest{{"ucp_get", 1, l.Bytes, l.Depth}}
	case l.Op == "write" && l.Depth > 1:
		return []p2pTest{{"ucp_put_bw", 1, l.Bytes, l.Depth}}
	case l.Op == "write" && l.Bytes <= 4<<10:
		return []p2pTest{{"ucp_put_lat", 2, l.Bytes, 1}}
	case l.Op == "batch":
		return []p2pTest{{"ucp_get", batchPieces, batchPiece, l.Depth}}
	}
	return nil
}

// overLoopback has UCX use what the others use.
var overLoopback = []string{"UCX_TLS=tcp,self", "UCX_NET_DEVICES=lo"}

// compareP2P lets the contestants take turns and prints the table.
func compareP2P(ctx context.Context, o p2pOptions) error {
	w, err := newWorkshop(o.options)
	if err != nil {
		return err
	}
	defer w.close()
	if err := w.build(ctx, string(tutti)); err != nil {
		return err
	}
	c := &p2pContest{workshop: w, o: o, samples: map[p2pLine]map[string][]float64{}, out: map[string]bool{}}
	c.check(ctx)
	for round := range o.Rounds {
		for _, turn := range []struct {
			who string
			run func(context.Context) error
		}{{"tutti", c.tuttiTurn}, {"ucx", c.ucxTurn}, {"nixl", c.nixlTurn}, {"iperf3", c.iperfTurn}} {
			if c.out[turn.who] || ctx.Err() != nil {
				continue
			}
			c.progress("round %d/%d  %s", round+1, o.Rounds, turn.who)
			if err := turn.run(ctx); err != nil && ctx.Err() == nil {
				if turn.who == "tutti" {
					return err
				}
				c.out[turn.who] = true
				c.note("%s does not take part any more: %v", turn.who, err)
			}
		}
	}
	c.progress("")
	rows := c.rows()
	v := judge(rows)
	if err := c.print(os.Stdout, rows, v); err != nil {
		return err
	}
	if o.jsonPath != "" {
		b, err := json.MarshalIndent(map[string]any{"machine": machine(), "versions": w.versions, "rows": rows,
			"missed": v.missed, "notes": w.notes}, "", " ")
		if err != nil {
			return err
		}
		if err := os.WriteFile(o.jsonPath, append(b, '\n'), 0o644); err != nil {
			return fmt.Errorf("writing the results: %w", err)
		}
	}
	if err := context.Cause(ctx); err != nil {
		return err
	}
	if o.lenient {
		return nil
	}
	return v.err()
}

// python is the interpreter of NIXL's virtual environment.
func (c *p2pContest) python() string { return filepath.Join(c.o.nixl, "bin", "python") }

// check finds the contestants that can take part, and their versions.
func (c *p2pContest) check(ctx context.Context) {
	for who, argv := range map[string][]string{
		"ucx": {"ucx_info", "-v"},
		"nixl": {c.python(), "-c", "import nixl_cu12, importlib.metadata as m; " +
			"print('NIXL', m.version('nixl-cu12'))"},
		"iperf3": {"iperf3", "--version"},
	} {
		out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).Output()
		if err == nil && who == "ucx" {
			_, err = exec.LookPath("ucx_perftest")
		}
		if err != nil {
			c.out[who] = true
			c.note("%s does not take part: %v; make deps-peers installs it", who, err)
			continue
		}
		line, _, _ := strings.Cut(strings.TrimLeft(string(out), "# "), "\n")
		c.versions[who] = strings.Join(strings.Fields(line), " ")
	}
}

// add adds a figure in microseconds.
func (c *p2pContest) add(l p2pLine, who string, us float64) {
	if c.samples[l] == nil {
		c.samples[l] = map[string][]float64{}
	}
	c.samples[l][who] = append(c.samples[l][who], us)
}

// p2pFigures is a line of the output of tutti bench --op p2p, or of nixl.py.
type p2pFigures struct {
	p2pLine
	Tutti float64 `json:"tutti_us"`
	Raw   float64 `json:"raw_us"`
	Time  float64 `json:"time_us"`
	Wrong int64   `json:"wrong"`
}

// parse adds the rows of an output, and returns an error if there is none, or one is wrong.
func (c *p2pContest) parse(out []byte) error {
	n := 0
	for line := range bytes.Lines(out) {
		var f p2pFigures
		if json.Unmarshal(line, &f) != nil || f.Op == "" {
			continue
		}
		n++
		if f.Wrong != 0 {
			return fmt.Errorf("%d wrong bytes in %s of %d bytes", f.Wrong, f.Op, f.Bytes)
		}
		for who, us := range map[string]float64{"tutti": f.Tutti, "raw": f.Raw, "nixl": f.Time} {
			if us > 0 {
				c.add(f.p2pLine, who, us)
			}
		}
	}
	if n == 0 {
		return errors.New("it ended well but printed no result")
	}
	return nil
}

func (c *p2pContest) tuttiTurn(ctx context.Context) error {
	for _, p := range progressions(c.o.Sizes) {
		out, err := c.run(ctx, launch{argv: [][]string{{c.tutti, "bench", "--op", "p2p", "--min",
			strconv.FormatInt(p.min, 10), "--max", strconv.FormatInt(p.max, 10), "--factor",
			strconv.FormatInt(p.factor, 10), "--queue", strconv.Itoa(c.o.depth), "--rounds", "1", "--round-time",
			c.o.Budget.String(), "--json"}}})
		if err == nil {
			err = c.parse(out)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (c *p2pContest) nixlTurn(ctx context.Context) error {
	var list []string
	for _, s := range c.o.Sizes {
		list = append(list, strconv.FormatInt(s, 10))
	}
	src := filepath.Join(c.tmp, "nixl.py")
	b, err := sources.ReadFile("src/nixl.py")
	if err == nil {
		err = os.WriteFile(src, b, 0o644)
	}
	if err != nil {
		return err
	}
	out, err := c.run(ctx, launch{argv: [][]string{{c.python(), src, strings.Join(list, ","), strconv.Itoa(c.o.depth),
		strconv.FormatInt(c.o.Budget.Microseconds(), 10)}}, env: overLoopback})
	if err != nil {
		return err
	}
	return c.parse(out)
}

// ucxTurn runs the tests for the lines that Tutti has, as many calls as fill the budget there.
func (c *p2pContest) ucxTurn(ctx context.Context) error {
	for _, l := range c.lines() {
		best := math.Inf(1)
		for _, t := range ucxTests(l) {
			calls := int(c.o.Budget.Seconds() * 1e6 / c.samples[l]["tutti"][0] * t.factor)
			calls = max(calls, 20, 2*t.depth)
			args := []string{"-t", t.test, "-s", strconv.FormatInt(t.size, 10), "-n", strconv.Itoa(calls), "-w",
				strconv.Itoa(max(calls/10, 5)), "-O", strconv.Itoa(t.depth), "-f", "-v"}
			out, err := c.beside(ctx, []string{"ucx_perftest", "-p"}, []string{"ucx_perftest", "127.0.0.1"}, args)
			if err != nil {
				return fmt.Errorf("%s: %w", strings.Join(args, " "), err)
			}
			us, err := parseUCX(out)
			if err != nil {
				return err
			}
			best = min(best, us*t.factor)
		}
		if !math.IsInf(best, 1) {
			c.add(l, "ucx", best)
		}
	}
	return nil
}

// parseUCX returns the overall time of a call in the output of ucx_perftest -f -v.
func parseUCX(out []byte) (float64, error) {
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	names, values := "", strings.Split(lines[len(lines)-1], ",")
	if len(lines) > 1 {
		names = lines[len(lines)-2]
	}
	i := slices.Index(strings.Split(names, ","), "overall_lat")
	if i < 0 || i >= len(values) {
		return 0, fmt.Errorf("ucx_perftest printed no overall_lat: %s", tail(out))
	}
	us, err := strconv.ParseFloat(values[i], 64)
	if err != nil || us <= 0 {
		return 0, fmt.Errorf("ucx_perftest printed the time %q", values[i])
	}
	return us, nil
}

// iperfTurn measures the stream of messages of each size; iperf3 allows no more than 1 MiB.
func (c *p2pContest) iperfTurn(ctx context.Context) error {
	for _, l := range c.lines() {
		if l.Op != "sendrecv" || l.Depth == 1 || l.Bytes > 1<<20 {
			continue
		}
		out, err := c.beside(ctx, []string{"iperf3", "-s", "-1", "-B", "127.0.0.1", "-p"},
			[]string{"iperf3", "-c", "127.0.0.1"}, []string{"-J", "-l", strconv.FormatInt(l.Bytes, 10), "-t", "1"})
		if err != nil {
			return err
		}
		us, err := parseIperf(out, l.Bytes)
		if err != nil {
			return err
		}
		c.add(l, "iperf3", us)
	}
	return nil
}

// parseIperf returns the time of a message of so many bytes in the output of iperf3 -J.
func parseIperf(out []byte, size int64) (float64, error) {
	var r struct {
		End struct {
			Received struct {
				Bits float64 `json:"bits_per_second"`
			} `json:"sum_received"`
		} `json:"end"`
	}
	if err := json.Unmarshal(out, &r); err != nil || r.End.Received.Bits <= 0 {
		return 0, fmt.Errorf("iperf3 printed no rate (%v): %s", err, tail(out))
	}
	return float64(8*size) / r.End.Received.Bits * 1e6, nil
}

// beside starts a server, which takes the port as its last argument, and, when it listens, a client
// with further arguments. It returns the client's output.
func (c *p2pContest) beside(ctx context.Context, server, client, args []string) ([]byte, error) {
	defer proctest.KillAll()
	ctx, cancel := context.WithTimeout(ctx, c.o.Deadline)
	defer cancel()
	reserved, err := ports.Reserve() // the servers set SO_REUSEADDR
	if err != nil {
		return nil, err
	}
	defer reserved.Close()
	port := int(reserved.Port)
	s := command(ctx, append(slices.Clone(server), strconv.Itoa(port)))
	s.Env, s.Dir = append(os.Environ(), overLoopback...), c.tmp
	p, err := proctest.Start(s)
	if err != nil {
		return nil, err
	}
	if err := listening(ctx, port); err != nil {
		return nil, err
	}
	out, err := c.run(ctx, launch{argv: [][]string{slices.Concat(client, []string{"-p", strconv.Itoa(port)}, args)},
		env: overLoopback})
	cancel() // the server has done its work
	p.Wait()
	return out, err
}

// listening waits until a process listens at a port. It asks the kernel: these servers take the
// first connection for their client's.
func listening(ctx context.Context, port int) error {
	want := fmt.Sprintf(":%04X ", port)
	for {
		for _, path := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
			b, err := os.ReadFile(path)
			if err != nil {
				continue
			}
			for line := range strings.Lines(string(b)) {
				f := strings.Fields(line) // number, local address, remote address, state
				if len(f) > 3 && f[3] == "0A" && strings.HasSuffix(f[1]+" ", want) {
					return nil
				}
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("no process listens at port %d: %w", port, context.Cause(ctx))
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// lines returns the lines that have figures, in the order of the table of tutti bench --op p2p.
func (c *p2pContest) lines() (lines []p2pLine) {
	for l := range c.samples {
		lines = append(lines, l)
	}
	order := []string{"sendrecv", "read", "write", "batch"}
	slices.SortFunc(lines, func(a, b p2pLine) int {
		return cmp.Or(cmp.Compare(slices.Index(order, a.Op), slices.Index(order, b.Op)), cmp.Compare(a.Depth, b.Depth),
			cmp.Compare(a.Bytes, b.Bytes))
	})
	return lines
}

// rows compares medians, the worst row first.
func (c *p2pContest) rows() (rows []p2pRow) {
	for _, l := range c.lines() {
		r := p2pRow{p2pLine: l, Samples: c.samples[l], Median: map[string]float64{}}
		for who, us := range r.Samples {
			r.Median[who] = stats.Median(us)
		}
		ours := r.Median["tutti"]
		r.Raw = r.Median["raw"] / ours
		for _, peer := range []string{"ucx", "nixl"} {
			if us := r.Median[peer]; us > 0 && (r.Peer == 0 || us/ours < r.Peer) {
				r.Peer = us / ours
			}
		}
		rows = append(rows, r)
	}
	none := func(x float64) float64 {
		if x == 0 {
			return math.Inf(1)
		}
		return x
	}
	slices.SortStableFunc(rows, func(a, b p2pRow) int { return cmp.Compare(none(a.Peer), none(b.Peer)) })
	return rows
}

// The bars, as the least that a time of others divided by one of Tutti has to be.
const (
	barPeer  = 1.0     // UCX and NIXL, every row
	barRaw   = 0.95    // a plain TCP connection, from barBytes
	barTrip  = 1 / 1.4 // the same, one call of barSmall bytes at a time
	barBatch = 5.0     // Tutti's own reads one after another, a batch of them

	barBytes = 1 << 20
	barSmall = 64
)

// judge compares rows with the bars. What was not measured is not missed.
func judge(rows []p2pRow) verdict {
	const batched = "reads one after another/batched"
	bars := []string{"ucx/tutti", "nixl/tutti", "bandwidth/raw", "raw/tutti round trip", batched}
	var v verdict
	seen := map[string]bool{}
	compare := func(l p2pLine, bar string, other, ours, least float64) {
		if !(other > 0 && ours > 0) {
			return
		}
		seen[bar] = true
		if other/ours >= least {
			v.met++
		} else {
			v.missed = append(v.missed, miss{l.String(), bar, other / ours, least})
		}
	}
	single := map[int64]float64{} // batches whose reads follow one another, by their bytes
	for _, r := range rows {
		if r.Op == "batch" && r.Depth == 1 {
			single[r.Bytes] = r.Median["tutti"]
		}
	}
	for _, r := range rows {
		ours := r.Median["tutti"]
		compare(r.p2pLine, bars[0], r.Median["ucx"], ours, barPeer)
		compare(r.p2pLine, bars[1], r.Median["nixl"], ours, barPeer)
		switch {
		case r.Op == "batch" && r.Depth > 1:
			compare(r.p2pLine, batched, single[r.Bytes], ours, barBatch)
		case r.Op == "batch":
		case r.Bytes >= barBytes:
			compare(r.p2pLine, bars[2], r.Median["raw"], ours, barRaw)
		case r.Bytes == barSmall && r.Depth == 1:
			compare(r.p2pLine, bars[3], r.Median["raw"], ours, barTrip)
		}
	}
	v.sort()
	for _, bar := range bars {
		if !seen[bar] {
			v.unjudged = append(v.unjudged, bar)
		}
	}
	return v
}

// print prints the table, and what misses a bar.
func (c *p2pContest) print(out io.Writer, rows []p2pRow, v verdict) error {
	fmt.Fprintf(out, "%s; two processes over loopback, one connection; microseconds a call, medians over %d rounds\n",
		machine(), c.o.Rounds)
	for _, who := range []string{"ucx", "nixl", "iperf3"} {
		if v := c.versions[who]; v != "" {
			fmt.Fprintf(out, "%s: %s\n", who, v)
		}
	}
	columns := []string{"raw", "iperf3", "ucx", "nixl", "tutti"}
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(t, "\nop\tsize\tdepth\t%s\tpeer/tutti\traw/tutti\t\n", strings.Join(columns, "\t"))
	num := func(x float64) string {
		if x == 0 {
			return "-"
		}
		return fmt.Sprintf("%.2f", x)
	}
	for _, r := range rows {
		fmt.Fprintf(t, "%s\t%s\t%d\t", r.Op, sizeString(r.Bytes), r.Depth)
		for _, who := range columns {
			fmt.Fprintf(t, "%s\t", num(r.Median[who]))
		}
		fmt.Fprintf(t, "%s\t%s\t\n", num(r.Peer), num(r.Raw))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if len(c.notes) > 0 {
		fmt.Fprintln(out, "\nnotes")
		for _, n := range c.notes {
			fmt.Fprintf(out, "- %s\n", n)
		}
	}
	return v.print(out)
}
