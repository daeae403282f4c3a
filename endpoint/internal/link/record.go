package link

import (
	"io"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"tutti/endpoint/internal/wire"
	"tutti/internal/socket"
)

// guard makes records of what a connection sends, and opens those that it receives. Records are
// made of frames without regard to where a frame ends.
//
// What is sent is copied, or encrypted, into out: the memory of a region may change meanwhile, and
// the checksum has to be that of the bytes that are sent. What is received is opened in Conn.in,
// and goes to its place when the whole record is known to be what the peer has sent.
type guard struct {
	wire.Guard
	out  []byte // out[sent:] are records that wait for room in the socket
	sent int
	p, q int // Conn.in[p:q] has records that were not opened; p >= Conn.w
}

// guardIn is the size of Conn.in: a record, and what is left of a frame that continues in it. What
// is left of a read beyond a record has to be moved, and is therefore small.
const guardIn = wire.RecordHeader + wire.MaxRecord + wire.MaxTrailer + ahead

// pending reports whether records wait to be sent.
func (g *guard) pending() bool { return g != nil && g.sent < len(g.out) }

// push sends the records that wait.
func (g *guard) push(fd int) syscall.Errno {
	for g.sent < len(g.out) {
		n, e := socket.Send(fd, g.out[g.sent:])
		if e != 0 {
			return e
		}
		g.sent += n
	}
	g.out, g.sent = g.out[:0], 0
	return 0
}

// send makes records of the beginning of a and b, and returns how much of it they have. They are
// sent, or wait.
func (g *guard) send(fd int, a, b []byte) (n int, e syscall.Errno) {
	if e := g.push(fd); e != 0 {
		return 0, e
	}
	for _, p := range [...][]byte{a, b} {
		for len(p) > 0 && len(g.out) < gather {
			k := min(len(p), wire.MaxRecord)
			g.out = g.Out.Append(g.out, p[:k])
			p = p[k:]
			n += k
		}
	}
	return n, g.flush(fd)
}

// sendFile is send for n bytes of the file of o from offset at, or the beginning of them. An error
// of the file is o.err.
func (g *guard) sendFile(fd int, o *Out, at, n int64) (int, syscall.Errno) {
	if e := g.push(fd); e != 0 {
		return 0, e
	}
	g.out = slices.Grow(g.out, wire.RecordHeader+wire.MaxRecord+wire.MaxTrailer)
	body := g.out[wire.RecordHeader : wire.RecordHeader+min(n, wire.MaxRecord)]
	for {
		k, err := unix.Pread(int(o.File.Fd()), body, at)
		switch {
		case err == unix.EINTR:
			continue
		case err == nil && k == 0:
			err = io.ErrUnexpectedEOF // it is shorter than it was
		}
		if err != nil {
			o.err = err
			return 0, 0
		}
		g.out = g.Out.Append(g.out, body[:k])
		return k, g.flush(fd)
	}
}

// flush is push for records that may wait.
func (g *guard) flush(fd int) syscall.Errno {
	if e := g.push(fd); e != unix.EAGAIN {
		return e
	}
	return 0
}

// readRecords is read for a connection with a guard.
func (c *Conn) readRecords() (n int, full bool, err error) {
	g := c.guard
	k := copy(c.in, c.in[c.r:c.w])
	g.q = k + copy(c.in[k:], c.in[g.p:g.q])
	c.r, c.w, g.p = 0, k, k
	b := c.in[g.q:]
	n, e := socket.Recv(c.fd, b)
	g.q += max(n, 0)
	return c.result(n, len(b), e)
}

// consumeRecords opens the records that have arrived, and handles what is in them.
func (c *Conn) consumeRecords() error {
	g := c.guard
	for g.q-g.p >= wire.RecordHeader {
		size, err := g.In.Size(c.in[g.p:g.q])
		if err != nil || size > g.q-g.p {
			return err
		}
		body, err := g.In.Open(c.in[g.p : g.p+size])
		if err != nil {
			return err
		}
		from := g.p + wire.RecordHeader
		g.p += size
		// The beginning of a frame that the record before had goes in front.
		at := from - (c.w - c.r)
		copy(c.in[at:], c.in[c.r:c.w])
		c.r, c.w = at, from+len(body)
		if err := c.consume(); err != nil {
			return err
		}
	}
	return nil
}
