package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"tutti/cmd/tutti/internal/launch"
	"tutti/cmd/tutti/internal/pair"
	"tutti/cmd/tutti/internal/term"
	"tutti/endpoint"
	"tutti/p2p/registry"
	"tutti/rdma"
	"tutti/rdma/verbs"
)

// p2pOp is the operation of bench that measures endpoints.
const p2pOp = "p2p"

// p2pDepth is the number of calls under way in rows with several, unless --queue is set.
const p2pDepth = 16

// p2p measures an endpoint beside a plain TCP connection, with this command as the other process.
func (f *benchFlags) p2p(cmd *cobra.Command) error {
	s := pair.Spec{Factor: f.factor, Depth: cmp.Or(f.queue, p2pDepth), Iters: f.iters, Warmup: f.warmup,
		Rounds: f.rounds, RoundTime: f.roundTime, Check: f.check && !f.noCheck}
	var err error
	if s.Min, s.Max, err = f.sizes(cmd); err != nil {
		return err
	}
	if s.Max > 1<<30 {
		return usagef(cmd, "--max %s: expected no more than 1G", f.max)
	}
	for _, name := range []string{"ranks", "dtype", "redop", "root", "registered", "touch", "bind", "timeout"} {
		if cmd.Flags().Changed(name) {
			return usagef(cmd, "--%s is not for --op p2p", name)
		}
	}
	if s.RDMA, err = f.p2pDevice(cmd); err != nil {
		return err
	}
	ctx, stop := context.WithCancel(cmd.Context())
	defer stop()
	self, err := os.Executable()
	if err != nil {
		return err
	}
	other := exec.CommandContext(ctx, self, "bench", "--op", p2pOp, "--transport", f.transport, "--emit")
	other.Stderr = os.Stderr
	other.WaitDelay = time.Second
	in, err := other.StdoutPipe()
	if err != nil {
		return err
	}
	out, err := other.StdinPipe()
	if err != nil {
		return err
	}
	if err := other.Start(); err != nil {
		return err
	}
	p := &p2pPrinter{json: f.asJSON, colour: launch.Colour(os.Stdout), terminal: launch.Terminal(os.Stderr)}
	p.head(&s)
	wrong, err := pair.Run(ctx, s, in, out, p.row, p.next)
	p.next("")
	out.Close() // the other process ends
	if err != nil {
		stop()
	}
	if werr := other.Wait(); err == nil && werr != nil {
		err = fmt.Errorf("the other process: %w", werr)
	}
	switch {
	case err != nil && cmd.Context().Err() != nil:
		return context.Cause(cmd.Context())
	case err != nil:
		return &launch.Error{Code: codeFailed, Err: err}
	case wrong > 0:
		return exit(codeWrong)
	}
	return nil
}

// p2pOther is the other process. Its orders come through the Go runtime's poller: a read that
// blocked would keep a processor of the runtime for some milliseconds.
func (f *benchFlags) p2pOther(cmd *cobra.Command) error {
	const stdin = 0
	rdma, err := f.p2pDevice(cmd)
	if err != nil {
		return err
	}
	if err := unix.SetNonblock(stdin, true); err != nil {
		return err
	}
	return pair.Serve(cmd.Context(), os.NewFile(stdin, "orders"), os.Stdout, rdma)
}

// p2pDevice returns what endpoints use for --transport.
func (f *benchFlags) p2pDevice(cmd *cobra.Command) (endpoint.RDMA, error) {
	switch f.transport {
	case "", registry.Auto, endpoint.PathTCP.String():
		return endpoint.RDMA{}, nil
	case endpoint.PathDirect.String():
		p, err := verbs.Load()
		if err != nil {
			return endpoint.RDMA{}, err
		}
		s, err := rdma.ParseSettings(os.Getenv)
		if err != nil {
			return endpoint.RDMA{}, err
		}
		return endpoint.RDMA{Provider: p, Devices: os.Getenv("TUTTI_RDMA_DEVICES"), GID: os.Getenv("TUTTI_RDMA_GID"),
			Settings: s}, nil
	}
	return endpoint.RDMA{}, usagef(cmd, "--transport %s: endpoints use %v, or %v for large operations",
		f.transport, endpoint.PathTCP, endpoint.PathDirect)
}

// p2pPrinter prints rows as a table, or as JSON objects.
type p2pPrinter struct {
	json, colour, terminal bool
}

func (p *p2pPrinter) head(s *pair.Spec) {
	if p.json {
		return
	}
	host, _ := os.Hostname()
	fmt.Fprintf(stdout, "# an endpoint (tutti) beside a plain TCP connection (raw), between two processes on %s "+
		"(%s); one connection each; median of %s\n", host, term.Count(runtime.NumCPU(), "core"),
		term.Count(s.Rounds, "round"))
	fmt.Fprintf(stdout, "# time of a call; depth: calls, or pieces of a batch, that are under way\n#\n")
	fmt.Fprintf(stdout, "#%9s %11s %6s %10s %10s %10s %8s %6s %4s\n", "op", "size", "depth", "tutti", "raw",
		"raw/tutti", "tutti", "#wrong", "path")
	fmt.Fprintf(stdout, "#%9s %11s %6s %10s %10s %10s %8s %6s\n", "", "B", "", "us", "us", "", "GB/s", "")
}

func (p *p2pPrinter) row(r pair.Row) {
	p.next("")
	if p.json {
		json.NewEncoder(stdout).Encode(r)
		return
	}
	wrong := fmt.Sprintf("%6d", r.Wrong)
	switch {
	case r.Wrong < 0:
		wrong = fmt.Sprintf("%6s", "n/a")
	case r.Wrong > 0 && p.colour:
		wrong = "\x1b[1;31m" + wrong + "\x1b[0m"
	}
	fmt.Fprintf(stdout, "%10s %11d %6d %10.2f %10.2f %10.2f %8.3f %s %4s\n", r.Op, r.Bytes, r.Depth, r.Tutti, r.Raw,
		r.Ratio, r.GBs, wrong, r.Path)
}

// next shows on a terminal what is being measured; "" shows nothing any more.
func (p *p2pPrinter) next(what string) {
	if p.terminal {
		term.Progress(os.Stderr, what)
	}
}
