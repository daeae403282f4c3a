// Command rdmabench compares rdma/queue with the programs of perftest on the same RDMA device: a
// stream of writes with ib_write_bw, and writes back and forth with ib_write_lat. All of them take
// turns, and the medians of the rounds are compared:
//
//	make bench-rdma
//
// runs it in the virtual machine of tests/softroce. Each contestant is two processes on the same
// device. The exit status is 1 if a median misses its bar.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
)

// The bars: shares of perftest's medians.
const (
	leastBandwidth = 0.85
	mostLatency    = 1.7
)

// settings are what all contestants do.
type settings struct {
	Device   string        `json:"device"`
	Size     int           `json:"size"`     // bytes of a write of the stream
	Depth    int           `json:"depth"`    // writes under way
	Writes   int           `json:"writes"`   // of the stream
	Trips    int           `json:"trips"`    // back and forth, of 8 bytes
	Deadline time.Duration `json:"deadline"` // of a turn
}

func main() {
	var s settings
	rounds := flag.Int("rounds", 7, "rounds; the median counts")
	flag.StringVar(&s.Device, "device", "rxe0", "RDMA device")
	flag.IntVar(&s.Size, "size", 64<<10, "bytes of a write of the stream")
	flag.IntVar(&s.Depth, "depth", 64, "writes under way in the stream")
	flag.IntVar(&s.Writes, "writes", 1500, "writes of the stream")
	flag.IntVar(&s.Trips, "trips", 3000, "times that 8 bytes go back and forth")
	flag.DurationVar(&s.Deadline, "deadline", time.Minute, "time after which a turn is ended")
	end := flag.String("end", "", "internal: be this end of a contestant")
	flag.Parse()
	var err error
	if *end != "" {
		err = runEnd(*end)
	} else {
		err = compare(os.Stdout, s, *rounds, rows(s))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "rdmabench:", err)
		os.Exit(1)
	}
}

// row is a line of the table: a figure of perftest, and Tutti's.
type row struct {
	what, program, unit string
	theirs, ours        func(ctx context.Context, s settings) (float64, error)
	ok                  func(ratio float64) bool // of ours to theirs
	bar                 string
}

func rows(s settings) []row {
	return []row{
		{what: fmt.Sprintf("writes of %d bytes, %d under way", s.Size, s.Depth), program: "ib_write_bw", unit: "MiB/s",
			theirs: perftestBandwidth, ours: ownBandwidth,
			ok: func(r float64) bool { return r >= leastBandwidth }, bar: fmt.Sprintf("at least %v", leastBandwidth)},
		{what: "8 bytes, one way", program: "ib_write_lat", unit: "us", theirs: perftestLatency, ours: ownLatency,
			ok: func(r float64) bool { return r <= mostLatency }, bar: fmt.Sprintf("at most %v", mostLatency)},
	}
}

// compare runs all contestants in turns, and prints the table. An error says which bar is missed.
func compare(out io.Writer, s settings, rounds int, all []row) error {
	if rounds < 1 || s.Size < 1 || s.Depth < streamBatch || s.Writes < s.Depth || s.Trips < 1 || s.Deadline <= 0 {
		return fmt.Errorf("expected at least one round, byte and trip, %d writes under way, as many writes, and a "+
			"deadline", streamBatch)
	}
	theirs, ours := make([][]float64, len(all)), make([][]float64, len(all))
	turn := func(to *[]float64, run func(context.Context, settings) (float64, error)) error {
		ctx, cancel := context.WithTimeout(context.Background(), s.Deadline)
		defer cancel()
		v, err := run(ctx, s)
		*to = append(*to, v)
		return err
	}
	for round := range rounds {
		for i, r := range all {
			order := []func() error{
				func() error { return turn(&theirs[i], r.theirs) },
				func() error { return turn(&ours[i], r.ours) },
			}
			if round%2 == 1 {
				slices.Reverse(order)
			}
			for _, do := range order {
				if err := do(); err != nil {
					return fmt.Errorf("%s, round %d: %w", r.what, round+1, err)
				}
			}
		}
	}
	var missed []string
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "\tunit\tperftest\trange\tTutti\trange\tratio\tbar")
	for i, r := range all {
		a, b := median(theirs[i]), median(ours[i])
		ratio := b / a
		fmt.Fprintf(w, "%s (%s)\t%s\t%.1f\t%s\t%.1f\t%s\t%.2f\t%s\n", r.what, r.program, r.unit, a, spread(theirs[i]),
			b, spread(ours[i]), ratio, r.bar)
		if !r.ok(ratio) {
			missed = append(missed, fmt.Sprintf("%s: %.2f times %s, expected %s", r.what, ratio, r.program, r.bar))
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if len(missed) > 0 {
		return fmt.Errorf("bars are missed: %s", strings.Join(missed, "; "))
	}
	return nil
}

func median(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

func spread(v []float64) string { return fmt.Sprintf("%.1f-%.1f", slices.Min(v), slices.Max(v)) }

// perftestBandwidth is the average of ib_write_bw, in MiB/s.
func perftestBandwidth(ctx context.Context, s settings) (float64, error) {
	return perftest(ctx, s, 3, "ib_write_bw", "-s", strconv.Itoa(s.Size), "-n", strconv.Itoa(s.Writes), "--tx-depth",
		strconv.Itoa(s.Depth))
}

// perftestLatency is the median of ib_write_lat, in microseconds.
func perftestLatency(ctx context.Context, s settings) (float64, error) {
	return perftest(ctx, s, 4, "ib_write_lat", "-s", "8", "-n", strconv.Itoa(s.Trips))
}

// perftest runs both processes of a program of perftest, and returns a column of the client's
// result.
func perftest(ctx context.Context, s settings, column int, program string, args ...string) (float64, error) {
	args = append(args, "-d", s.Device, "-F")
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	server := exec.CommandContext(ctx, program, append(args, "-p", strconv.Itoa(perftestPort))...)
	var said bytes.Buffer
	server.Stdout, server.Stderr = &said, &said
	if err := server.Start(); err != nil {
		return 0, err
	}
	ended := make(chan error, 1)
	go func() { ended <- server.Wait() }()
	if err := listening(ctx, ended); err != nil {
		cancel()
		return 0, fmt.Errorf("the server of %s: %w", program, err)
	}
	client := exec.CommandContext(ctx, program, append(args, "-p", strconv.Itoa(perftestPort), "127.0.0.1")...)
	out, err := client.CombinedOutput()
	if err != nil {
		cancel()
	}
	if late := <-ended; err == nil {
		err = late
	}
	if err != nil {
		return 0, fmt.Errorf("%s: %w\n%s\nits server:\n%s", program, err, out, &said)
	}
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		if len(f) > column && f[0] == args[1] {
			return strconv.ParseFloat(f[column], 64)
		}
	}
	return 0, fmt.Errorf("%s printed no result:\n%s", program, out)
}

// perftestPort is where the server of a program of perftest waits for its client.
const perftestPort = 18515

// listening waits until a process listens at perftestPort: a client that is earlier fails. The
// server itself does not say when it does.
func listening(ctx context.Context, ended <-chan error) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		for _, table := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
			b, err := os.ReadFile(table)
			if err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
			for line := range strings.Lines(string(b)) { // number, local address, remote address, state
				f := strings.Fields(line)
				if len(f) > 3 && strings.HasSuffix(f[1], fmt.Sprintf(":%04X", perftestPort)) && f[3] == "0A" {
					return nil
				}
			}
		}
		select {
		case <-tick.C:
		case err := <-ended:
			return fmt.Errorf("it has ended: %w", err)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// own runs both processes of Tutti, and returns the client's result.
func own(ctx context.Context, s settings, what string) (float64, error) {
	self, err := os.Executable()
	if err != nil {
		return 0, err
	}
	config, err := json.Marshal(s)
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var to [2]io.WriteCloser
	var from [2]*json.Decoder
	var ends [2]*exec.Cmd
	var said [2]bytes.Buffer
	for i, side := range []string{"server", "client"} {
		c := exec.CommandContext(ctx, self, "-end", what+" "+side)
		c.Stderr = &said[i]
		if to[i], err = c.StdinPipe(); err != nil {
			return 0, err
		}
		out, err := c.StdoutPipe()
		if err != nil {
			return 0, err
		}
		from[i], ends[i] = json.NewDecoder(out), c
		if err := c.Start(); err != nil {
			return 0, err
		}
		defer func() {
			cancel()
			_ = c.Wait() // again if it has ended well
		}()
	}
	why := func(err error) error { return fmt.Errorf("%s: %w\n%s%s", what, err, &said[0], &said[1]) }
	for i := range ends {
		if _, err := to[i].Write(config); err != nil {
			return 0, why(err)
		}
	}
	for i := range ends {
		var place json.RawMessage
		if err := from[i].Decode(&place); err != nil {
			return 0, why(err)
		}
		if _, err := to[1-i].Write(place); err != nil {
			return 0, why(err)
		}
	}
	// Both say when they are connected, and the client begins then.
	for i := range ends {
		var connected bool
		if err := from[i].Decode(&connected); err != nil {
			return 0, why(err)
		}
		if _, err := to[1-i].Write([]byte("true\n")); err != nil {
			return 0, why(err)
		}
	}
	var result float64
	if err := from[1].Decode(&result); err != nil {
		return 0, why(err)
	}
	for i := range ends {
		to[i].Close() // both end
	}
	for i := range ends {
		if err := ends[i].Wait(); err != nil {
			return 0, why(err)
		}
	}
	return result, nil
}

func ownBandwidth(ctx context.Context, s settings) (float64, error) { return own(ctx, s, "bandwidth") }
func ownLatency(ctx context.Context, s settings) (float64, error)   { return own(ctx, s, "latency") }
