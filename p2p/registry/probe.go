package registry

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"tutti/p2p"
)

// Probe makes a link of a kind between two ends in this process and sends a frame over it. Of the
// settings only those of RDMA count. It ends with ctx at the latest.
func Probe(ctx context.Context, k Kind, o Options) (err error) {
	secret := []byte("a secret of this process alone")
	ends := make([]*end, 2)
	for i := range ends {
		t, err := k.New(Options{LocalRanks: 2, Ports: "0", RDMADevices: o.RDMADevices, RDMAGID: o.RDMAGID,
			RDMAPairs: o.RDMAPairs, RDMA: o.RDMA, PeerTimeout: time.Second, IdleTimeout: time.Second,
			Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			return err
		}
		defer t.Close()
		ends[i] = &end{self: p2p.Identity{Rank: i, Incarnation: uint64(i) + 1}, secret: secret, transport: t,
			accepted: make(chan p2p.Link, 1)}
	}
	at, err := ends[0].transport.Listen(ctx, ends[0])
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	if _, err := ends[1].transport.Listen(ctx, ends[1]); err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	if err := ends[1].transport.Reaches(at); err != nil {
		return fmt.Errorf("reach itself: %w", err)
	}
	out, err := ends[1].transport.Dial(ctx, ends[0].self, at)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	defer out.Close()
	var in p2p.Link
	select {
	case in = <-ends[0].accepted:
		defer in.Close()
	case <-ctx.Done():
		return fmt.Errorf("connect: the other end has not accepted: %w", ctx.Err())
	}
	const word = "tutti"
	var got []byte
	sent := false
	for {
		if !sent {
			h := p2p.Header{Kind: 1, Len: uint32(len(word))}
			if sent, err = out.Send(&h, []byte(word)); err != nil {
				return fmt.Errorf("send: %w", err)
			}
		}
		if _, err := out.Flush(); err != nil {
			return fmt.Errorf("send: %w", err)
		}
		h, payload, err := in.Recv()
		if err == nil && h != nil {
			got = append(got, payload...)
			if payload == nil {
				var n int
				rest := make([]byte, max(len(word)-len(got), 0))
				n, err = in.Fill(rest)
				got = append(got, rest[:n]...)
			}
		}
		switch {
		case err != nil:
			return fmt.Errorf("receive: %w", err)
		case len(got) < len(word):
		case string(got) != word:
			return fmt.Errorf("receive: got %q, want %q", got, word)
		default:
			in.Release()
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("receive: a frame did not arrive: %w", ctx.Err())
		case <-time.After(time.Millisecond):
		}
	}
}

// end is one end of a probe. It implements p2p.Host.
type end struct {
	self      p2p.Identity
	secret    []byte
	transport p2p.Transport
	accepted  chan p2p.Link
}

func (e *end) Self() p2p.Identity                 { return e.self }
func (e *end) Secret() []byte                     { return e.secret }
func (e *end) Admit(p2p.Identity) error           { return nil }
func (e *end) Lost(p2p.Identity)                  {}
func (e *end) Wake()                              {}
func (e *end) Region(uint64) (*p2p.Region, error) { return nil, p2p.ErrNoRegion }

// Accepted keeps the first link.
func (e *end) Accepted(_ p2p.Identity, l p2p.Link) {
	select {
	case e.accepted <- l:
	default:
		l.Close()
	}
}
