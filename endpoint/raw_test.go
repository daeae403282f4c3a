package endpoint

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"io"
	"math/big"
	"net"
	"sync"
	"testing"
	"time"

	"tutti/mem"
)

// These benchmarks compare connections of endpoints, in each mode, with bare TCP and with
// crypto/tls, which moves the same bytes over the same kind of socket.

// bench has the ends of a connection that something is measured on.
type bench struct {
	name string
	// echo starts an end that sends back what it gets, n bytes at a time. trip makes one round
	// trip.
	echo func(b *testing.B, n int) (trip func())
	// source starts an end that has n bytes. read reads them k times; the reads may overlap.
	source func(b *testing.B, n int) (read func(k int))
}

func benches() []bench {
	all := []bench{
		{"tcp", echoStream(tcpPair), sourceStream(tcpPair)},
		{"tls", echoStream(tlsPair), sourceStream(tlsPair)},
	}
	for _, g := range guards {
		all = append(all, bench{g.name, echoMessages(g.cfg), sourceRegion(g.cfg)})
	}
	return all
}

// A round trip of 64 bytes: messages, of endpoints.
func BenchmarkGuardedRoundTrip(b *testing.B) {
	for _, x := range benches() {
		b.Run(x.name, func(b *testing.B) {
			trip := x.echo(b, 64)
			b.ReportAllocs()
			for b.Loop() {
				trip()
			}
		})
	}
}

// A mebibyte is read, and then the next one.
func BenchmarkGuardedRead(b *testing.B) { benchReads(b, 1) }

// Eight mebibytes are read without waiting for each.
func BenchmarkGuardedStream(b *testing.B) { benchReads(b, 8) }

func benchReads(b *testing.B, k int) {
	const n = 1 << 20
	for _, x := range benches() {
		b.Run(x.name, func(b *testing.B) {
			read := x.source(b, n)
			b.SetBytes(int64(k * n))
			for b.Loop() {
				read(k)
			}
		})
	}
}

func tcpPair(b *testing.B) (c, s net.Conn) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	if c, err = net.Dial("tcp", l.Addr().String()); err != nil {
		b.Fatal(err)
	}
	if s, err = l.Accept(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		c.Close()
		s.Close()
	})
	return c, s
}

// tlsPair has the version and the suite that crypto/tls chooses: TLS 1.3, on machines with AES
// instructions AES-128-GCM.
func tlsPair(b *testing.B) (net.Conn, net.Conn) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		b.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		b.Fatal(err)
	}
	c, s := tcpPair(b)
	own := tls.Certificate{Certificate: [][]byte{cert}, PrivateKey: key}
	server := tls.Server(s, &tls.Config{Certificates: []tls.Certificate{own}})
	client := tls.Client(c, &tls.Config{InsecureSkipVerify: true})
	done := make(chan error, 1)
	go func() { done <- server.Handshake() }()
	if err := client.Handshake(); err != nil {
		b.Fatal(err)
	}
	if err := <-done; err != nil {
		b.Fatal(err)
	}
	if suite := client.ConnectionState().CipherSuite; suite != tls.TLS_AES_128_GCM_SHA256 {
		b.Skipf("skipped: crypto/tls chooses %s here", tls.CipherSuiteName(suite))
	}
	return client, server
}

// during runs f until the benchmark ends, when stop has made it return.
func during(b *testing.B, stop func(), f func()) {
	var wg sync.WaitGroup
	wg.Go(f)
	b.Cleanup(func() {
		stop()
		wg.Wait()
	})
}

func echoStream(pair func(*testing.B) (c, s net.Conn)) func(*testing.B, int) func() {
	return func(b *testing.B, n int) func() {
		c, s := pair(b)
		during(b, func() { c.Close() }, func() {
			buf := make([]byte, n)
			for {
				if _, err := io.ReadFull(s, buf); err != nil {
					return
				}
				s.Write(buf)
			}
		})
		buf := make([]byte, n)
		return func() {
			c.Write(buf)
			if _, err := io.ReadFull(c, buf); err != nil {
				b.Fatal(err)
			}
		}
	}
}

func sourceStream(pair func(*testing.B) (c, s net.Conn)) func(*testing.B, int) func(int) {
	return func(b *testing.B, n int) func(int) {
		c, s := pair(b)
		during(b, func() { c.Close() }, func() {
			buf, ask := make([]byte, n), make([]byte, 1)
			for {
				if _, err := io.ReadFull(s, ask); err != nil {
					return
				}
				for range ask[0] {
					s.Write(buf)
				}
			}
		})
		buf := make([]byte, n)
		return func(k int) {
			c.Write([]byte{byte(k)})
			for range k {
				if _, err := io.ReadFull(c, buf); err != nil {
					b.Fatal(err)
				}
			}
		}
	}
}

func echoMessages(cfg Config) func(*testing.B, int) func() {
	return func(b *testing.B, n int) func() {
		_, _, p, q := pair(b, cfg)
		ctx, cancel := context.WithCancel(context.Background())
		during(b, cancel, func() {
			buf := make([]byte, n)
			for q.Recv(buf).Wait(ctx) == nil && q.Send(buf).Wait(ctx) == nil {
			}
		})
		buf, in := make([]byte, n), make([]byte, n)
		return func() {
			f := p.Send(buf)
			if err := p.Recv(in).Wait(ctx); err != nil {
				b.Fatal(err)
			}
			if err := f.Wait(ctx); err != nil {
				b.Fatal(err)
			}
		}
	}
}

func sourceRegion(cfg Config) func(*testing.B, int) func(int) {
	return func(b *testing.B, n int) func(int) {
		_, e, p, _ := pair(b, cfg)
		if _, err := e.Register("r", mem.Host(make([]byte, n), mem.Anywhere), RegionConfig{}); err != nil {
			b.Fatal(err)
		}
		dst := make([]byte, n) // of all reads, as with streams: the bytes are the same
		var fs []*Future
		return func(k int) {
			fs = fs[:0]
			for range k {
				fs = append(fs, p.Read(dst, "r", 0))
			}
			for _, f := range fs {
				if err := f.Wait(context.Background()); err != nil {
					b.Fatal(err)
				}
			}
		}
	}
}
