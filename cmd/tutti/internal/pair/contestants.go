package pair

import (
	"context"
	"crypto/hmac"
	"fmt"
	"io"
	"net"
	"strconv"
	"time"

	"tutti/endpoint"
	"tutti/mem"
)

// setup bounds the time until the connections are there.
const setup = 10 * time.Second

// region returns the name of the memory that is read and written in a turn: the other process fills
// and compares it while it is not registered.
func (t *turn) region() string { return "turn " + strconv.FormatUint(t.Seed, 10) }

// remote reports whether the turn reads or writes a region.
func (t *turn) remote() bool { return t.Who == tutti && t.Op != sendrecv }

// contestants are one process's ends of the two connections, and its memory.
type contestants struct {
	context  *endpoint.Context
	endpoint *endpoint.Endpoint
	peer     *endpoint.Peer
	raw      net.Conn
	region   *endpoint.Region // of the process that serves, during a turn
	buf      []byte
	back     []byte // what was echoed to the process that measures
	least    int64  // bytes from which operations go by RDMA, but see lentFrom; 0: they do not
}

// newContestants makes an endpoint without peers.
func newContestants(h hello, interfaces string, rdma endpoint.RDMA) (*contestants, error) {
	if rdma.From == 0 {
		rdma.From = directFrom
	}
	ctx, err := endpoint.NewContext(endpoint.ContextConfig{})
	if err != nil {
		return nil, err
	}
	c := &contestants{context: ctx, buf: make([]byte, h.Size), back: make([]byte, h.Size)}
	c.endpoint, err = endpoint.New(ctx, endpoint.Config{Name: "bench", Secret: h.Secret, Interfaces: interfaces,
		Conns: 1, RDMA: rdma})
	if err != nil {
		c.close()
		return nil, err
	}
	if rdma.Provider != nil {
		c.least = rdma.From
	}
	return c, nil
}

// connect makes the connections to the process that has answered a.
func connect(ctx context.Context, h hello, a answer, rdma endpoint.RDMA) (*contestants, error) {
	c, err := newContestants(h, "none", rdma)
	if err != nil {
		return nil, err
	}
	if err := c.dial(ctx, h, a); err != nil {
		c.close()
		return nil, err
	}
	return c, nil
}

func (c *contestants) dial(ctx context.Context, h hello, a answer) error {
	info, err := endpoint.ParseInfo(a.Endpoint)
	if err != nil {
		return err
	}
	if c.peer, err = c.endpoint.Connect(ctx, info); err != nil {
		return err
	}
	if c.raw, err = new(net.Dialer).DialContext(ctx, "tcp", a.Raw); err != nil {
		return err
	}
	_, err = c.raw.Write([]byte(h.Secret))
	return err
}

// listen makes an endpoint and a listener to which another process connects; accept waits for it.
func listen(h hello, rdma endpoint.RDMA) (c *contestants, a answer, accept func(context.Context) error, err error) {
	if c, err = newContestants(h, "127.0.0.1", rdma); err != nil {
		return nil, a, nil, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		c.close()
		return nil, a, nil, err
	}
	a = answer{Endpoint: c.endpoint.Info().String(), Raw: l.Addr().String()}
	return c, a, func(ctx context.Context) (err error) {
		defer l.Close()
		ctx, cancel := context.WithTimeout(ctx, setup)
		defer cancel()
		if c.peer, err = c.endpoint.Accept(ctx); err != nil {
			return err
		}
		deadline := time.Now().Add(setup)
		l.(*net.TCPListener).SetDeadline(deadline)
		for {
			conn, err := l.Accept()
			if err != nil {
				return err
			}
			conn.SetDeadline(deadline)
			proof := make([]byte, len(h.Secret))
			if _, err := io.ReadFull(conn, proof); err == nil && hmac.Equal(proof, []byte(h.Secret)) {
				c.raw = conn
				return conn.SetDeadline(time.Time{})
			}
			conn.Close()
		}
	}, nil
}

// close ends the connections, and waits for their goroutines.
func (c *contestants) close() {
	if c.raw != nil {
		c.raw.Close()
	}
	if c.endpoint != nil {
		c.endpoint.Close()
	}
	c.context.Close()
}

// register makes the memory of a turn accessible to the other process.
func (c *contestants) register(t turn) (err error) {
	if t.remote() {
		c.region, err = c.endpoint.Register(t.region(), mem.Host(c.buf, mem.Anywhere), endpoint.RegionConfig{
			Rights: endpoint.Read | endpoint.Write})
	}
	return err
}

// unregister ends that.
func (c *contestants) unregister() {
	if c.region != nil {
		c.region.Unregister()
		c.region = nil
	}
}

// counts returns how many operations of a turn's kind the endpoint has done, and how many of these
// by RDMA.
func (c *contestants) counts(t turn) (direct, done uint64) {
	kinds := []string{read}
	switch {
	case t.Who == raw:
		return 0, 0
	case t.Op == sendrecv:
		kinds = []string{"send", "recv"}
	case t.Op == write:
		kinds = []string{write}
	}
	s := c.endpoint.Stats()
	for _, k := range kinds {
		direct, done = direct+s.Direct[k].N, done+s.Done[k].N
	}
	return direct, done
}

// warm reads the region of a turn until that goes by RDMA, if the turn's operations can: the first
// ones of a region go by TCP, until the endpoint has its key.
func (c *contestants) warm(ctx context.Context, t turn) error {
	size := int64(t.N)
	if t.Op == batch {
		size = pieceSize
	}
	if c.least == 0 || !t.remote() || size < c.least {
		return nil
	}
	spare := make([]byte, size)
	probe := turn{Who: tutti, Op: read}
	before, _ := c.counts(probe)
	for late := time.Now().Add(setup); ; {
		if err := c.peer.Read(spare, t.region(), 0).Wait(ctx); err != nil {
			return err
		}
		if now, _ := c.counts(probe); now > before {
			return nil
		}
		if time.Now().After(late) {
			return fmt.Errorf("reads do not go by RDMA after %v: tutti doctor explains the devices", setup)
		}
	}
}

// do is the measuring process's part of a turn.
func (c *contestants) do(ctx context.Context, t turn) error {
	if t.Who == raw {
		return c.exchange(t, true)
	}
	b, region := c.buf[:t.N], t.region()
	switch {
	case t.echoes():
		back := c.back[:t.N]
		for range t.Count {
			sent := c.peer.Send(b)
			if err := c.peer.Recv(back).Wait(ctx); err != nil {
				return err
			}
			if err := sent.Wait(ctx); err != nil {
				return err
			}
		}
		return nil
	case t.Op == sendrecv:
		return several(ctx, t, func() *endpoint.Future { return c.peer.Send(b) })
	case t.Op == write:
		return several(ctx, t, func() *endpoint.Future { return c.peer.Write(b, region, 0) })
	case t.Op == read:
		return several(ctx, t, func() *endpoint.Future { return c.peer.Read(b, region, 0) })
	}
	ops := make([]endpoint.Op, pieces)
	for i := range ops {
		ops[i] = endpoint.Op{Kind: endpoint.OpRead, Local: mem.Host(b[i*pieceSize:][:pieceSize], mem.Anywhere),
			Region: region, Offset: int64(i * pieceSize)}
	}
	for range t.Count {
		for rest := ops; len(rest) > 0; rest = rest[t.Depth:] {
			if err := c.peer.Batch(rest[:t.Depth]).Wait(ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

// several makes the calls of a turn, of which Depth are under way.
func several(ctx context.Context, t turn, call func() *endpoint.Future) error {
	calls := make([]*endpoint.Future, min(t.Depth, t.Count))
	for i := range t.Count + len(calls) {
		slot := &calls[i%len(calls)]
		if *slot != nil {
			if err := (*slot).Wait(ctx); err != nil {
				return err
			}
		}
		if i < t.Count {
			*slot = call()
		}
	}
	return nil
}

// serve is the other process's part.
func (c *contestants) serve(ctx context.Context, t turn) error {
	if t.Who == raw {
		return c.exchange(t, false)
	}
	b := c.buf[:t.N]
	switch {
	case t.echoes():
		for range t.Count {
			if err := c.peer.Recv(b).Wait(ctx); err != nil {
				return err
			}
			if err := c.peer.Send(b).Wait(ctx); err != nil {
				return err
			}
		}
	case t.Op == sendrecv:
		return several(ctx, t, func() *endpoint.Future { return c.peer.Recv(b) })
	}
	return nil // reads and writes need no goroutine here
}
