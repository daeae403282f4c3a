package linktest

import (
	"runtime"
	"strconv"
	"testing"
	"unsafe"

	"tutti/p2p"
)

func address(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// Bench measures links between two goroutines of this process: the round trip of small frames,
// awake and asleep, and a stream of large ones.
func Bench(b *testing.B, open func(testing.TB) p2p.Transport) {
	for _, n := range []int{0, 8, 64, 1024} {
		b.Run("PingPong/"+strconv.Itoa(n), func(b *testing.B) {
			x, y := Pair(b, open)
			PingPong(b, x, y, n)
		})
	}
	b.Run("PingPongAsleep/64", func(b *testing.B) {
		x, y := Pair(b, open)
		go Echo(y, true)
		h, p := Frame(0, 64, nil)
		b.ReportAllocs()
		for b.Loop() {
			if err := x.Put(&h, p); err != nil {
				b.Fatal(err)
			}
			if err := x.FlushAll(); err != nil {
				b.Fatal(err)
			}
			if _, _, err := x.Wait(); err != nil {
				b.Fatal(err)
			}
		}
		x.Close()
	})
	b.Run("Stream", func(b *testing.B) {
		x, y := Pair(b, open)
		n := min(64<<10, x.MaxFrame())
		done := make(chan struct{})
		go func() { defer close(done); Drain(y) }()
		Stream(b, x, n)
		x.Close()
		<-done
	})
}

// PingPong measures round trips of n bytes between x and y.
func PingPong(b *testing.B, x, y *End, n int) {
	done := make(chan struct{})
	go func() { defer close(done); Echo(y, false) }()
	Ping(b, x, n)
	x.Close()
	<-done
}

// Ping measures round trips of n bytes over x, whose peer runs Echo.
func Ping(b *testing.B, x *End, n int) {
	h, p := Frame(0, n, nil)
	b.ReportAllocs()
	for b.Loop() {
		for {
			if ok, err := x.Send(&h, p); err != nil {
				b.Fatal(err)
			} else if ok {
				break
			}
		}
		for i := 0; ; i++ {
			x.Flush()
			hdr, q, err := x.Recv()
			if err != nil {
				b.Fatal(err)
			}
			if hdr != nil && (q != nil || hdr.Len == 0) {
				x.Release()
				break
			}
			if i%10000 == 9999 {
				runtime.Gosched()
			}
		}
	}
}

// Echo sends back what comes until the link ends, sleeping between frames or polling.
func Echo(y *End, asleep bool) {
	h := new(p2p.Header)
	for i := 0; ; i++ {
		hdr, q, err := y.Recv()
		if err != nil {
			return
		}
		if hdr == nil || (q == nil && hdr.Len > 0) {
			y.Flush()
			if asleep {
				y.Nap()
			} else if i%10000 == 9999 {
				runtime.Gosched()
			}
			continue
		}
		*h = *hdr
		for {
			if ok, err := y.Send(h, q); err != nil {
				return
			} else if ok {
				break
			}
		}
		y.Release()
		y.Flush()
	}
}

// Stream measures frames of n bytes sent over x, whose peer runs Drain.
func Stream(b *testing.B, x *End, n int) {
	h, p := Frame(0, n, nil)
	b.SetBytes(int64(n))
	b.ReportAllocs()
	for b.Loop() {
		for i := 0; ; i++ {
			ok, err := x.Send(&h, p)
			if err != nil {
				b.Fatal(err)
			}
			x.Flush()
			if ok {
				break
			}
			if i%10000 == 9999 {
				runtime.Gosched()
			}
		}
	}
}

// Drain copies out what comes until the link ends.
func Drain(y *End) {
	for i := 0; ; i++ {
		_, _, ok, err := y.Take()
		if err != nil {
			return
		}
		if !ok && i%10000 == 9999 {
			runtime.Gosched()
		}
	}
}
