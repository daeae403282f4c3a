// Infer runs a transformer that is cut among the ranks, tensor-parallel: every rank holds a part of
// each matrix, and each half of a block ends in a sum over the ranks. Try
//
//	tutti run -n 4 ./examples/infer
//
// The weights come from a seed, each rank makes its own; what the model writes is noise, but the
// same noise for any number of ranks: rank 0 computes everything once more alone, and the program
// fails unless both give the same up to rounding. Reading the prompt sums large matrices, and
// writing, one token at a time, sums many short vectors: what a collective costs shows there.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"tutti/pg"
)

type options struct {
	shape
	prompt    string
	tokens    int
	seed      uint64
	tolerance float64
}

func main() {
	var o options
	flag.IntVar(&o.dim, "dim", 256, "width of the model")
	flag.IntVar(&o.heads, "heads", 8, "attention heads: divides the width; the number of ranks divides it")
	flag.IntVar(&o.layers, "layers", 4, "blocks")
	flag.StringVar(&o.prompt, "prompt", strings.Repeat("All ranks together: tutti. ", 4), "what to read first")
	flag.IntVar(&o.tokens, "tokens", 128, "how many tokens to write")
	flag.Uint64Var(&o.seed, "seed", 1, "of the weights")
	flag.Float64Var(&o.tolerance, "tolerance", 1e-3, "how far a logit may be from the one rank's")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "infer:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options, out io.Writer) (err error) {
	g, err := pg.Join(ctx, pg.Config{})
	if err != nil {
		return err
	}
	defer func() {
		if e := g.Close(); err == nil {
			err = e
		}
	}()
	if g.Rank() != 0 {
		out = io.Discard
	}
	return infer(ctx, g, o, out)
}

// infer is what every rank does. out is rank 0's.
func infer(ctx context.Context, g *pg.Group, o options, out io.Writer) error {
	if o.prompt == "" || o.tokens < 1 {
		return fmt.Errorf("--prompt %q and --tokens %d: want something to read and a token to write", o.prompt,
			o.tokens)
	}
	o.context = len(o.prompt) + o.tokens
	if err := o.check(g.Size()); err != nil {
		return err
	}
	m, err := newModel(o.shape, o.seed, g.Rank(), g.Size(), ranks{g})
	if err != nil {
		return err
	}
	if err := g.Barrier(ctx); err != nil { // so that the clock does not count others' preparations
		return err
	}
	text, logits, err := write(ctx, m, o, nil, out, fmt.Sprintf("%d ranks", g.Size()))
	if err != nil {
		return err
	}
	verdict := []float64{0}
	if g.Rank() == 0 {
		if verdict[0], err = compare(ctx, o, text, logits, out); err != nil {
			return err
		}
	}
	if err := pg.Broadcast(ctx, g, verdict, 0); err != nil { // all ranks end alike
		return err
	}
	if !(verdict[0] <= o.tolerance) { // not a number is a difference
		return fmt.Errorf("the logits of %d ranks differ from those of one by up to %g, want at most %g", g.Size(),
			verdict[0], o.tolerance)
	}
	return nil
}

// write reads the prompt and writes tokens, each the likeliest, unless they are given: then it
// writes those. It returns all tokens and the logits after each of the prompt's and the written.
func write(ctx context.Context, m *model, o options, given []byte, out io.Writer, who string) (text []byte,
	logits []float32, err error) {
	text = []byte(o.prompt)
	began := time.Now()
	l, err := m.forward(ctx, text)
	if err != nil {
		return nil, nil, err
	}
	read := time.Now()
	for i := range o.tokens {
		logits = append(logits, l...)
		next := byte(likeliest(l[len(l)-vocabulary:]))
		if given != nil {
			next = given[len(o.prompt)+i]
		}
		text = append(text, next)
		if i == o.tokens-1 {
			break
		}
		if l, err = m.forward(ctx, text[len(text)-1:]); err != nil {
			return nil, nil, err
		}
	}
	rate := func(n int, d time.Duration) float64 { return float64(n) / math.Max(d.Seconds(), 1e-9) }
	fmt.Fprintf(out, "%-9s read %d tokens at %.0f tokens/s, wrote %d at %.0f tokens/s\n", who+":",
		len(o.prompt), rate(len(o.prompt), read.Sub(began)), o.tokens, rate(o.tokens-1, time.Since(read)))
	return text, logits, nil
}

// compare computes on this rank alone the logits of the same text, and returns the largest
// difference: not a number if any of them is none.
func compare(ctx context.Context, o options, text []byte, logits []float32, out io.Writer) (float64, error) {
	m, err := newModel(o.shape, o.seed, 0, 1, alone{})
	if err != nil {
		return 0, err
	}
	_, want, err := write(ctx, m, o, text, out, "alone")
	if err != nil {
		return 0, err
	}
	worst, largest := 0.0, 0.0
	for i, v := range want {
		worst = max(worst, math.Abs(float64(v-logits[i]))) // what is not a number stays
		largest = math.Max(largest, math.Abs(float64(v)))
	}
	fmt.Fprintf(out, "%d logits of up to %.3g differ by at most %.3g\n", len(want), largest, worst)
	return worst, nil
}

func likeliest(logits []float32) int {
	best := 0
	for i, v := range logits {
		if v > logits[best] {
			best = i
		}
	}
	return best
}

// ranks are the peers of a model whose parts are the ranks of a group.
type ranks struct{ g *pg.Group }

func (r ranks) reduce(ctx context.Context, x []float32) error {
	return pg.AllReduce(ctx, r.g, x, pg.Sum)
}

func (r ranks) gather(ctx context.Context, dst, src []float32) error {
	return pg.AllGather(ctx, r.g, dst, src)
}

func (r ranks) alloc(n int) ([]float32, error) { return pg.Alloc[float32](r.g, n) }
