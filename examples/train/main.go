// Train trains a small character-level language model, data-parallel: every rank holds all weights,
// takes its share of each batch, and the gradients are summed over the ranks while the backward
// pass still runs. Try
//
//	tutti run -n 4 ./examples/train
//
// The text is the Go standard library's source, which is wherever Go is; --text names another file
// or directory. A batch is the same whatever the number of ranks, so that 1, 2 and 4 ranks show the
// same losses up to rounding, and two runs alike have the same bits. The program ends by proving
// that all ranks hold the same weights to the bit, and by a sample of what it learned.
package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"tutti/examples/internal/nn"
	"tutti/pg"
)

type options struct {
	shape
	steps, batch, every int
	rate                float64
	seed                uint64
	dtype, text         string
	limit, sample       int
}

func main() {
	o := options{shape: shape{vocab: vocabulary}}
	flag.IntVar(&o.steps, "steps", 500, "optimizer steps")
	flag.IntVar(&o.batch, "batch", 16, "sequences in a step, all ranks together: divides by the number of ranks")
	flag.IntVar(&o.seq, "seq", 32, "characters in a sequence")
	flag.IntVar(&o.dim, "dim", 64, "width of the model")
	flag.IntVar(&o.heads, "heads", 4, "attention heads: divides the width")
	flag.IntVar(&o.layers, "layers", 2, "blocks")
	flag.Float64Var(&o.rate, "lr", 8e-3, "learning rate, at its height")
	flag.Uint64Var(&o.seed, "seed", 1, "of the weights and the order of the text")
	flag.StringVar(&o.dtype, "dtype", "float32", "float32 or float64")
	flag.StringVar(&o.text, "text", "", "file, or directory of .go files, to learn (default: the Go standard "+
		"library's source)")
	flag.IntVar(&o.limit, "bytes", 2<<20, "how much of the text to read")
	flag.IntVar(&o.every, "every", 25, "print the loss every so many steps")
	flag.IntVar(&o.sample, "sample", 300, "characters to generate at the end")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "train:", err)
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
	if o.dtype == "float64" {
		return train[float64](ctx, g, o, out)
	}
	return train[float32](ctx, g, o, out)
}

func (o options) check(ranks int) error {
	switch {
	case o.batch < 1 || o.batch%ranks != 0:
		return fmt.Errorf("--batch is %d, want a multiple of the %d ranks", o.batch, ranks)
	case o.steps < 1 || o.every < 1 || o.sample < 0 || o.limit < 1:
		return fmt.Errorf("--steps %d, --every %d, --sample %d and --bytes %d: want positive numbers", o.steps, o.every,
			o.sample, o.limit)
	case o.dtype != "float32" && o.dtype != "float64":
		return fmt.Errorf("--dtype is %q, want float32 or float64", o.dtype)
	}
	return o.shape.check()
}

// train is what every rank does. out is rank 0's.
func train[T nn.Float](ctx context.Context, g *pg.Group, o options, out io.Writer) error {
	if err := o.check(g.Size()); err != nil {
		return err
	}
	text, err := shareText(ctx, g, o)
	if err != nil {
		return err
	}
	learn, exam := divide(text)

	grads, err := pg.Alloc[T](g, 1+o.size())
	if err != nil {
		return err
	}
	m := newModel(o.shape, grads)
	if g.Rank() == 0 {
		m.init(o.seed)
	}
	if err := pg.Broadcast(ctx, g, m.weights, 0); err != nil {
		return err
	}
	share := o.batch / g.Size()
	fmt.Fprintf(out, "%d ranks, %d weights (%s), %d characters of text; %d steps of %d sequences (%d a rank) of "+
		"%d characters\n",
		g.Size(), len(m.weights), o.dtype, len(text), o.steps, o.batch, share, o.seq)

	var (
		optimizer = newAdam[T](len(m.weights))
		a         = m.newActivations(share)
		batch     = newBatch(learn, o, g.Rank()*share, share)
		works     = make([]*pg.Work, len(m.buckets))
		show      = newProgress(out, o)
		scale     = 1 / T(o.batch*o.seq)
	)
	for step := 1; step <= o.steps; step++ {
		tokens, targets := batch.next(step)
		m.gradients(a, tokens, targets, scale, func(i int) {
			s := m.buckets[i]
			works[i] = g.Start(pg.AllReduceOp{Dst: pg.BufferOf(grads[s.begin:s.end]), Op: pg.Sum})
		})
		for i, w := range works { // the first buckets move their weights while the last are still on their way
			if err := w.Wait(ctx); err != nil {
				return err
			}
			optimizer.update(m, m.buckets[i], step, rate(o, step))
		}
		show.step(step, float64(grads[0]))
	}

	if err := validate(ctx, g, m, o, exam, out); err != nil {
		return err
	}
	if err := prove(ctx, g, m.weights, out); err != nil {
		return err
	}
	if g.Rank() == 0 && o.sample > 0 {
		fmt.Fprintf(out, "\n%s\n", strings.TrimSpace(generate(m, "\nfunc ", o.sample, o.seed)))
	}
	return pg.Free(g, grads) // not on the way out of an error: operations may be under way until Close
}

// shareText reads the text on rank 0 and gives it to all, so that one machine needs it.
func shareText(ctx context.Context, g *pg.Group, o options) ([]byte, error) {
	var (
		text []byte
		err  error
		size = make([]int64, 1)
	)
	if g.Rank() == 0 {
		if text, err = readText(o.text, o.limit); err == nil && len(text) < 20*(o.seq+1) {
			err = fmt.Errorf("the text has %d bytes, want at least %d for sequences of %d", len(text), 20*(o.seq+1),
				o.seq)
		}
		if err == nil {
			text = encode(text)
			size[0] = int64(len(text))
		}
	}
	if e := pg.Broadcast(ctx, g, size, 0); err == nil {
		err = e
	}
	if err == nil && size[0] <= 0 {
		err = fmt.Errorf("rank 0 has no text to train on")
	}
	if err != nil {
		return nil, err
	}
	if g.Rank() != 0 {
		text = make([]byte, size[0])
	}
	return text, pg.Broadcast(ctx, g, text, 0)
}

// divide puts every tenth piece of the text apart.
func divide(text []byte) (learn, exam []byte) {
	piece := min(4096, 1+len(text)/20)
	for i := 0; len(text) > 0; i++ {
		n := min(piece, len(text))
		if i%10 == 9 {
			exam = append(exam, text[:n]...)
		} else {
			learn = append(learn, text[:n]...)
		}
		text = text[n:]
	}
	return learn, exam
}

// rate rises over the first steps, then falls to a tenth.
func rate(o options, step int) float64 {
	warm := max(1, min(20, o.steps/10))
	if step < warm {
		return o.rate * float64(step) / float64(warm)
	}
	return o.rate * (1 - 0.9*float64(step-warm)/float64(max(1, o.steps-warm)))
}

// batches draws the sequences first..first+count-1 of every step's batch.
type batches struct {
	text            []byte
	o               options
	first           int
	random          nn.Random
	tokens, targets []byte
}

func newBatch(text []byte, o options, first, count int) *batches {
	return &batches{text, o, first, nn.NewRandom(o.seed, 1<<32), make([]byte, count*o.seq), make([]byte, count*o.seq)}
}

func (b *batches) next(step int) (tokens, targets []byte) {
	seq := b.o.seq
	for i := range len(b.tokens) / seq {
		at := b.random.Uint64(uint64(step*b.o.batch+b.first+i)) % uint64(len(b.text)-seq)
		copy(b.tokens[i*seq:][:seq], b.text[at:])
		copy(b.targets[i*seq:][:seq], b.text[at+1:])
	}
	return b.tokens, b.targets
}

// validate prints the loss on text that was not learned from; each rank looks at its part of it.
func validate[T nn.Float](ctx context.Context, g *pg.Group, m *model[T], o options, text []byte, out io.Writer) error {
	a, sum := m.newActivations(1), make([]float64, 2)
	const most = 128
	pieces := min(most, (len(text)-1)/m.seq)
	for i := g.Rank(); i < pieces; i += g.Size() {
		at := i * ((len(text) - 1) / pieces) // spread over all of it
		logits := m.forward(a, text[at:at+m.seq])
		sum[0] += nn.CrossEntropyGrad(logits, text[at+1:at+1+m.seq], m.seq, m.vocab, 0)
		sum[1] += float64(m.seq)
	}
	if err := pg.AllReduce(ctx, g, sum, pg.Sum); err != nil {
		return err
	}
	fmt.Fprintf(out, "loss on text kept apart: %.4f\n", sum[0]/sum[1])
	return nil
}

// prove fails unless all ranks hold the same weights, bit by bit.
func prove[T nn.Float](ctx context.Context, g *pg.Group, weights []T, out io.Writer) error {
	raw := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(weights))), len(weights)*int(unsafe.Sizeof(weights[0])))
	mine := sha256.Sum256(raw)
	all := make([]byte, g.Size()*len(mine))
	if err := pg.AllGather(ctx, g, all, mine[:]); err != nil {
		return err
	}
	for r := range g.Size() {
		if theirs := all[r*len(mine):][:len(mine)]; !bytes.Equal(theirs, mine[:]) {
			return fmt.Errorf("rank %d holds other weights (sha256 %x) than rank %d (%x)", r, theirs, g.Rank(), mine)
		}
	}
	fmt.Fprintf(out, "weights are bit-identical on all %d ranks: sha256 %x\n", g.Size(), mine)
	return nil
}

// generate goes on from prompt, one character at a time.
func generate[T nn.Float](m *model[T], prompt string, n int, seed uint64) string {
	const temperature = 0.7
	a, tokens, random := m.newActivations(1), encode([]byte(prompt)), nn.NewRandom(seed, 1<<33)
	window := make([]byte, m.seq)
	for i := range n {
		recent := tokens[max(0, len(tokens)-m.seq):]
		clear(window)
		copy(window, recent) // attention is causal: what comes after the last character does not matter
		p := m.forward(a, window)[(len(recent)-1)*m.vocab:][:m.vocab]
		for j := range p {
			p[j] /= temperature
		}
		nn.Softmax(p)
		pick, left := 0, T(random.Float64(uint64(i)))
		for ; pick < m.vocab-1 && left >= p[pick]; pick++ {
			left -= p[pick]
		}
		tokens = append(tokens, byte(pick))
	}
	return decode(tokens)
}

// progress prints losses, and between them, on a terminal, a line that overwrites itself.
type progress struct {
	out      io.Writer
	o        options
	terminal bool
	began    time.Time
}

func newProgress(out io.Writer, o options) *progress {
	p := &progress{out: out, o: o, began: time.Now()}
	if f, ok := out.(*os.File); ok {
		info, err := f.Stat()
		p.terminal = err == nil && info.Mode()&os.ModeCharDevice != 0
	}
	return p
}

func (p *progress) step(step int, loss float64) {
	o := p.o
	line := fmt.Sprintf("step %*d/%d  loss %.6f  %.0f tokens/s", len(fmt.Sprint(o.steps)), step, o.steps, loss,
		float64(step*o.batch*o.seq)/math.Max(time.Since(p.began).Seconds(), 1e-9))
	end := "\n"
	if step != 1 && step != o.steps && step%o.every != 0 {
		if !p.terminal {
			return
		}
		end = ""
	}
	if p.terminal {
		line = "\r\x1b[K" + line
	}
	fmt.Fprint(p.out, line+end)
}
