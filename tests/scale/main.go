//go:build linux

// Command scale measures what many processes on this machine, many messages and small floats cost,
// beside the bars for them:
//
//	go run ./tests/scale                  everything, some minutes
//	go run ./tests/scale --parts start --ranks 64 --rounds 3
//
// The parts are
//
//	start     Join of many ranks, from its first call to its last return, and their first allreduce
//	loss      kill -9 of one of half as many: the slowest survivor's next result
//	messages  an allreduce and an idle rank beside many posted receives; the start of many sends
//	floats    allreduces of 16-bit floats beside float32; a sum of bfloat16 beside a copy
//
// A figure is the median of its rounds. The exit code is 1 if a figure misses its bar, and 2 if
// there is no result.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"tutti/tests/internal/command"
	"tutti/tests/internal/stats"
)

type options struct {
	parts    []string
	ranks    int
	receives int
	sends    int
	rounds   int
	deadline time.Duration
	tutti    string
	json     string
	lenient  bool
}

// part is figures that are measured together: measure returns a sample of each, in their order.
type part struct {
	name    string
	measure func(ctx context.Context, o *options) ([]float64, error)
	bars    []bar
}

// bar is the most, or the least, that the median of a figure may be.
type bar struct {
	Figure string
	Unit   string
	Limit  float64
	Least  bool
}

var parts = []part{
	{"start", start, []bar{
		{"Join of all ranks", "ms", 3000, false},
		{"their first allreduce of 32 KiB", "ms", 1500, false},
	}},
	{"loss", loss, []bar{
		{"kill -9 of a rank to the slowest survivor's next result", "ms", 1000, false},
	}},
	{"messages", messages, []bar{
		{"allreduce of 64 B beside posted receives, to one without", "", 1.2, false},
		{"processor time of an idle rank with posted receives", "%", 2, false},
		{"start of all sends", "ms", 1000, false},
	}},
	{"floats", floats, []bar{
		{"allreduce of 1 Mi bfloat16, to float32, registered", "", 0.55, false},
		{"allreduce of 1 Mi float16, to float32, registered", "", 0.55, false},
		{"sum of two sources of bfloat16 of 16 KiB, to a copy, by bandwidth", "", 0.9, true},
	}},
}

func main() {
	if which := os.Getenv(rankVariable); which != "" {
		if err := runRank(which); err != nil {
			fmt.Fprintln(os.Stderr, "scale:", err)
			os.Exit(1)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	o, err := parseOptions(os.Args[1:])
	missed := false
	if err == nil {
		missed, err = run(ctx, os.Stdout, o)
	}
	stop()
	switch {
	case errors.Is(err, flag.ErrHelp):
	case err != nil:
		fmt.Fprintln(os.Stderr, "scale:", err)
		os.Exit(2)
	case missed && !o.lenient:
		os.Exit(1)
	}
}

func parseOptions(args []string) (*options, error) {
	o := &options{}
	f := flag.NewFlagSet("scale", flag.ContinueOnError)
	var names []string
	for _, p := range parts {
		names = append(names, p.name)
	}
	which := f.String("parts", strings.Join(names, ","), "what to measure")
	f.IntVar(&o.ranks, "ranks", 128, "ranks of start; loss has half as many")
	f.IntVar(&o.receives, "receives", 10000, "posted receives")
	f.IntVar(&o.sends, "sends", 100000, "started sends")
	f.IntVar(&o.rounds, "rounds", 5, "rounds; the median counts")
	f.DurationVar(&o.deadline, "deadline", 2*time.Minute, "time after which a round of a part is ended")
	f.StringVar(&o.tutti, "tutti", "", "a tutti that is built already; default: build ./cmd/tutti")
	f.StringVar(&o.json, "json", "", "also write every round's figures to this file")
	f.BoolVar(&o.lenient, "lenient", false, "do not end with an error if a bar is missed")
	if err := f.Parse(args); err != nil {
		return nil, err
	}
	o.parts = strings.FieldsFunc(*which, func(r rune) bool { return r == ',' })
	for _, p := range o.parts {
		if !slices.Contains(names, p) {
			return nil, fmt.Errorf("there is no part %q: want some of %s", p, strings.Join(names, ","))
		}
	}
	switch {
	case f.NArg() > 0:
		return nil, fmt.Errorf("unexpected argument %q", f.Arg(0))
	case len(o.parts) == 0:
		return nil, errors.New("no parts to measure")
	case o.ranks < 4 || o.rounds < 1 || o.receives < 1 || o.sends < 1:
		return nil, errors.New("want at least 4 ranks, and one round, receive and send")
	}
	return o, nil
}

// row is a figure with its samples.
type row struct {
	Part    string    `json:"part"`
	Figure  string    `json:"figure"`
	Unit    string    `json:"unit"`
	Samples []float64 `json:"samples"`
	Median  float64   `json:"median"`
	Limit   float64   `json:"limit"`
	Least   bool      `json:"least"` // Limit is the least, else the most
}

// misses reports whether the figure misses its bar.
func (r *row) misses() bool {
	if r.Least {
		return !(r.Median >= r.Limit)
	}
	return !(r.Median <= r.Limit)
}

// run measures, and prints the table. missed: a figure misses its bar.
func run(ctx context.Context, out io.Writer, o *options) (missed bool, err error) {
	if o.tutti == "" {
		dir, err := os.MkdirTemp("", "scale-")
		if err != nil {
			return false, err
		}
		defer os.RemoveAll(dir)
		o.tutti = filepath.Join(dir, "tutti")
		if _, err := command.Output(ctx, "", nil, "go", "build", "-o", o.tutti, "./cmd/tutti"); err != nil {
			return false, err
		}
	}
	var rows []row
	for _, p := range parts {
		if !slices.Contains(o.parts, p.name) {
			continue
		}
		samples := make([][]float64, len(p.bars))
		for range o.rounds {
			within, cancel := context.WithTimeout(ctx, o.deadline)
			one, err := p.measure(within, o)
			cancel()
			if err == nil && len(one) != len(p.bars) {
				err = fmt.Errorf("%d figures, want %d", len(one), len(p.bars))
			}
			if err != nil {
				return false, fmt.Errorf("%s: %w", p.name, err)
			}
			for i, x := range one {
				samples[i] = append(samples[i], x)
			}
		}
		for i, b := range p.bars {
			rows = append(rows, row{p.name, b.Figure, b.Unit, samples[i], stats.Median(samples[i]), b.Limit, b.Least})
		}
	}
	if o.json != "" {
		b, err := json.MarshalIndent(rows, "", " ")
		if err == nil {
			err = os.MkdirAll(filepath.Dir(o.json), 0o755)
		}
		if err == nil {
			err = os.WriteFile(o.json, append(b, '\n'), 0o644)
		}
		if err != nil {
			return false, err
		}
	}
	return report(out, o, rows)
}

// report prints the table.
func report(out io.Writer, o *options, rows []row) (missed bool, err error) {
	fmt.Fprintf(out, "%d ranks (loss: %d), %d posted receives, %d started sends, %d rounds\n\n", o.ranks, o.ranks/2,
		o.receives, o.sends, o.rounds)
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprint(t, "part\tfigure\tmedian\tof\tbar\t\n")
	for _, r := range rows {
		most, verdict := "at most", ""
		if r.Least {
			most = "at least"
		}
		if r.misses() {
			missed, verdict = true, "missed"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s to %s\t%s %s\t%s\n", r.Part, r.Figure, amount(r.Median, r.Unit),
			amount(slices.Min(r.Samples), ""), amount(slices.Max(r.Samples), ""), most, amount(r.Limit, r.Unit),
			verdict)
	}
	return missed, t.Flush()
}

func amount(x float64, unit string) string { return strings.TrimSpace(fmt.Sprintf("%.3g %s", x, unit)) }
