package endpoint

import (
	"io"
	"net"
	"testing"
)

func BenchmarkRawPingPong(b *testing.B) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	go func() {
		c, _ := l.Accept()
		buf := make([]byte, 64)
		for {
			if _, err := io.ReadFull(c, buf); err != nil {
				return
			}
			c.Write(buf)
		}
	}()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	buf := make([]byte, 64)
	for b.Loop() {
		c.Write(buf)
		io.ReadFull(c, buf)
	}
}

func BenchmarkRawStream(b *testing.B) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	const n = 1 << 20
	go func() {
		c, _ := l.Accept()
		buf := make([]byte, n)
		ask := make([]byte, 1)
		for {
			if _, err := io.ReadFull(c, ask); err != nil {
				return
			}
			c.Write(buf)
		}
	}()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	buf := make([]byte, n)
	b.SetBytes(n)
	for b.Loop() {
		c.Write(buf[:1])
		io.ReadFull(c, buf)
	}
}
