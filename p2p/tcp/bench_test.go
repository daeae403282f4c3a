package tcp

import (
	"fmt"
	"io"
	"net"
	"os"
	"testing"

	"tutti/p2p/linktest"
)

func childEcho() { linktest.Echo(&linktest.End{Link: childLink()}, false) }

func childDrain() {
	l := childLink()
	dst := make([]byte, 1<<20)
	for {
		h, p, err := l.Recv()
		if err != nil {
			os.Exit(0)
		}
		if h == nil {
			continue
		}
		if p != nil {
			copy(dst, p)
		} else {
			for got := 0; got < int(h.Len); {
				n, err := l.Fill(dst[got:h.Len])
				if err != nil {
					os.Exit(0)
				}
				got += n
			}
		}
		last := h.Seq == 1
		l.Release()
		if last {
			l.Send(header(0, 0), nil)
			for ok := false; !ok; {
				ok, _ = l.Flush()
			}
		}
	}
}

func rawChild(f func(net.Conn)) {
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	fmt.Println(l.Addr())
	go func() { io.Copy(io.Discard, os.Stdin); os.Exit(0) }()
	f(must(l.Accept()))
}

func childRawEcho() {
	rawChild(func(c net.Conn) {
		b := make([]byte, 112)
		for {
			if _, err := io.ReadFull(c, b); err != nil {
				return
			}
			c.Write(b)
		}
	})
}

func childRawDrain() {
	rawChild(func(c net.Conn) {
		b := make([]byte, 1<<20)
		h := make([]byte, 1)
		for {
			if _, err := io.ReadFull(c, h); err != nil {
				return
			}
			if _, err := io.ReadFull(c, b); err != nil {
				return
			}
			if h[0] == 1 {
				c.Write(h)
			}
		}
	})
}

func BenchmarkPingPong(b *testing.B) {
	b.Run("link/64B", func(b *testing.B) {
		l := dialChild(b, child(b, "echo"), listen(b, 0, local(Config{})))
		h, p := header(1, 64), make([]byte, 64)
		b.ReportAllocs()
		for b.Loop() {
			l.Send(h, p)
			for {
				if r, _, err := l.Recv(); err != nil {
					b.Fatal(err)
				} else if r != nil {
					break
				}
			}
			l.Release()
		}
	})
	b.Run("netconn/112B", func(b *testing.B) {
		at := child(b, "rawecho").Hear()
		c := must(net.Dial("tcp", at))
		defer c.Close()
		p := make([]byte, 112)
		b.ReportAllocs()
		for b.Loop() {
			c.Write(p)
			if _, err := io.ReadFull(c, p); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func BenchmarkStream(b *testing.B) {
	const batch = 64 << 20
	for _, size := range []int{16 << 10, 64 << 10, 256 << 10, 1 << 20} {
		b.Run(fmt.Sprintf("link/%dKiB", size>>10), func(b *testing.B) {
			l := dialChild(b, child(b, "drain"), listen(b, 0, local(Config{MaxFrame: 1 << 20})))
			p, h := pattern(size, 0), header(0, size)
			b.SetBytes(batch)
			b.ReportAllocs()
			for b.Loop() {
				for i := batch / size; i > 0; i-- {
					h.Seq = uint64(i)
					for ok := false; !ok; {
						var err error
						if ok, err = l.Send(h, p); err != nil {
							b.Fatal(err)
						}
					}
				}
				for ok := false; !ok; {
					ok, _ = l.Flush()
				}
				if _, _, err := take(l, 1); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
	b.Run("netconn/1MiB", func(b *testing.B) {
		at := child(b, "rawdrain").Hear()
		c := must(net.Dial("tcp", at))
		defer c.Close()
		p := make([]byte, 1<<20+1)
		b.SetBytes(batch)
		for b.Loop() {
			for i := batch >> 20; i > 0; i-- {
				p[0] = byte(i)
				if _, err := c.Write(p); err != nil {
					b.Fatal(err)
				}
			}
			if _, err := io.ReadFull(c, p[:1]); err != nil {
				b.Fatal(err)
			}
		}
	})
}
