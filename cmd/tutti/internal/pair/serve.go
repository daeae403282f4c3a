package pair

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"tutti/endpoint"
)

// Serve is the process beside that of Run, whose orders it reads from in until they end. rdma is as
// in Spec, for this process.
func Serve(ctx context.Context, in io.Reader, out io.Writer, rdma endpoint.RDMA) error {
	return serve(ctx, in, out, rdma, nil)
}

// serve is Serve; spoil, unless it is nil, is called with a turn's memory before it is compared.
func serve(ctx context.Context, in io.Reader, out io.Writer, rdma endpoint.RDMA, spoil func(turn, []byte)) error {
	orders, answers := json.NewDecoder(in), json.NewEncoder(out)
	var c *contestants
	defer func() {
		if c != nil {
			c.close()
		}
	}()
	var failed error
	for {
		var o order
		switch err := orders.Decode(&o); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return fmt.Errorf("orders: %w", err)
		}
		a := answer{}
		work := func() error { return nil } // after the answer
		switch {
		case o.Begin != nil && c == nil:
			var accept func(context.Context) error
			if c, a, accept, failed = listen(*o.Begin, rdma); failed == nil {
				work = func() error { return accept(ctx) }
			}
		case c == nil:
			return errors.New("orders: the first one is not the first")
		case failed != nil:
		case o.Turn != nil:
			b := c.buf[:o.Turn.N]
			if o.Turn.reads() {
				fill(b, o.Turn.Seed)
			} else {
				clear(b)
			}
			failed = c.register(*o.Turn)
			work = func() error { return c.serve(ctx, *o.Turn) }
		case o.Check != nil:
			c.unregister()
			if spoil != nil {
				spoil(*o.Check, c.buf[:o.Check.N])
			}
			a.Wrong = wrong(c.buf[:o.Check.N], o.Check.Seed)
		}
		if failed != nil {
			a.Err = failed.Error()
		}
		if err := answers.Encode(a); err != nil {
			return fmt.Errorf("answers: %w", err)
		}
		if failed == nil {
			failed = work()
		}
	}
}
