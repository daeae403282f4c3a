package p2p_test

import (
	"context"

	"tutti/p2p"
)

// wrapping puts what link returns in the place of each link of a transport.
type wrapping struct {
	p2p.Transport
	link func(p2p.Link) p2p.Link
}

func (w *wrapping) Listen(ctx context.Context, h p2p.Host) ([]byte, error) {
	return w.Transport.Listen(ctx, &wrappingHost{h, w.link})
}

func (w *wrapping) Dial(ctx context.Context, to p2p.Identity, ep []byte) (p2p.Link, error) {
	l, err := w.Transport.Dial(ctx, to, ep)
	if err != nil {
		return nil, err
	}
	return w.link(l), nil
}

type wrappingHost struct {
	p2p.Host
	link func(p2p.Link) p2p.Link
}

func (h *wrappingHost) Accepted(from p2p.Identity, l p2p.Link) { h.Host.Accepted(from, h.link(l)) }
