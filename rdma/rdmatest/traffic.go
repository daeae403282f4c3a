package rdmatest

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"syscall"
	"testing"

	"tutti/rdma"
)

// sizes are lengths around words, pages and packets.
var sizes = []int{1, 7, 8, 64, 1023, 1024, 1025, 4096, 4097, 65539}

// write: exactly the bytes are placed, wherever they begin.
func write(t *testing.T, s Subject) {
	r := newRig(t, s)
	a, b := r.connected(rdma.QPConfig{}, nil)
	dst := r.memory(1<<17, 5, all)
	for i, n := range sizes {
		src := r.memory(n, i, 0)
		src.fill(n)
		dst.fill(i)
		want := slices.Clone(dst.b)
		copy(want[i*13:], src.b)
		a.post(writeOf(uint64(i), src, dst, i*13))
		a.done(uint64(i), rdma.Write)
		same(t, fmt.Sprintf("%d bytes", n), dst.b, want)
	}
	a.post(rdma.SendRequest{ID: 99, Op: rdma.Write, RemoteAddress: dst.at(0), RemoteKey: dst.RemoteKey(),
		Signaled: true})
	a.done(99, rdma.Write)
	b.none()
}

// writeImm: the target's next receive completes with the number, and keeps its memory.
func writeImm(t *testing.T, s Subject) {
	r := newRig(t, s)
	a, b := r.connected(rdma.QPConfig{}, nil)
	src, dst, unused := r.memory(3000, 0, 0), r.memory(4000, 0, all), r.memory(100, 0, all)
	unused.fill(9)
	kept := slices.Clone(unused.b)
	for i, imm := range []uint32{0, 1, 0x01020304, 0xffffffff} {
		src.fill(i)
		b.receive(rdma.RecvRequest{ID: uint64(100 + i), Segments: unused.segs()})
		w := writeOf(uint64(i), src, dst, 10)
		w.Op, w.Imm = rdma.WriteImm, imm
		a.post(w)
		a.done(uint64(i), rdma.Write)
		if c := b.done(uint64(100+i), rdma.RecvWriteImm); c.Imm != imm || c.Bytes != 3000 || !c.HasImm {
			t.Errorf("%+v, want number %#x and 3000 bytes", c, imm)
		}
		same(t, "data", dst.b[10:3010], src.b)
		same(t, "memory of the receive", unused.b, kept)
	}
	b.receive(rdma.RecvRequest{ID: 7}) // a receive without memory will do, and no data
	a.post(rdma.SendRequest{ID: 8, Op: rdma.WriteImm, Imm: 5, Signaled: true})
	a.done(8, rdma.Write)
	if c := b.done(7, rdma.RecvWriteImm); c.Imm != 5 || c.Bytes != 0 {
		t.Errorf("%+v", c)
	}
}

// send: each goes to the next receive, in order, with its length.
func send(t *testing.T, s Subject) {
	r := newRig(t, s)
	a, b := r.connected(rdma.QPConfig{}, nil)
	src, dst := r.memory(65539, 0, 0), r.memory(65600, 1, rdma.LocalWrite)
	for i, n := range append([]int{0}, sizes...) {
		src.fill(i)
		dst.fill(-1)
		want := slices.Clone(dst.b)
		copy(want, src.b[:n])
		b.receive(rdma.RecvRequest{ID: uint64(i), Segments: dst.segs()})
		q := rdma.SendRequest{ID: uint64(50 + i), Op: rdma.Send, Segments: []rdma.Segment{src.part(0, n)},
			Signaled: true}
		if i%2 == 1 {
			q.Op, q.Imm = rdma.SendImm, uint32(n)
		}
		a.post(q)
		a.done(uint64(50+i), rdma.Send)
		c := b.done(uint64(i), rdma.Recv)
		if int(c.Bytes) != n || c.HasImm != (i%2 == 1) || c.HasImm && c.Imm != uint32(n) {
			t.Errorf("%d bytes: %+v", n, c)
		}
		same(t, fmt.Sprintf("%d bytes", n), dst.b, want)
	}
}

// read: exactly the bytes are fetched.
func read(t *testing.T, s Subject) {
	r := newRig(t, s)
	a, b := r.connected(rdma.QPConfig{}, nil)
	src := r.memory(1<<18, 3, rdma.RemoteRead)
	src.fill(1)
	dst := r.memory(65600, 0, rdma.LocalWrite)
	for i, n := range sizes {
		dst.fill(n)
		want := slices.Clone(dst.b)
		copy(want[i:], src.b[n:][:n])
		a.post(rdma.SendRequest{ID: uint64(i), Op: rdma.Read, Segments: []rdma.Segment{dst.part(i, n)},
			RemoteAddress: src.at(n), RemoteKey: src.RemoteKey(), Signaled: true})
		a.done(uint64(i), rdma.Read)
		same(t, fmt.Sprintf("%d bytes", n), dst.b, want)
	}
	b.none()
}

// bothDirections: a connection has two directions, which do not disturb each other.
func bothDirections(t *testing.T, s Subject) {
	r := newRig(t, s)
	a, b := r.connected(rdma.QPConfig{SendDepth: 64}, nil)
	const n, each = 64, 5000
	var src, dst [2]*region
	for i, e := range []*end{a, b} {
		src[i], dst[i] = r.memory(each, i, 0), r.memory(n*each, 0, all)
		src[i].fill(i)
		var chain []rdma.SendRequest
		for j := range n {
			chain = append(chain, writeOf(uint64(j), src[i], dst[i], j*each))
		}
		e.post(chain...)
	}
	for i, e := range []*end{a, b} {
		for j, c := range e.take(n) {
			if c.ID != uint64(j) || c.Status != rdma.Success {
				t.Fatalf("end %d, completion %d: %+v", i, j, c)
			}
		}
		same(t, "data", dst[i].b, bytes.Repeat(src[i].b, n))
	}
}

// segments: a message is gathered from, and scattered to, several places.
func segments(t *testing.T, s Subject) {
	r := newRig(t, s)
	n := min(r.Attributes().MaxSegments, 4)
	a, b := r.connected(rdma.QPConfig{Segments: n}, nil)
	src, dst, back := r.memory(8192, 0, all), r.memory(8192, 0, all), r.memory(8192, 0, all)
	src.fill(1)
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range 20 {
		var parts, into, fetched []rdma.Segment
		var want []byte
		at := 0
		for range n {
			k := rng.IntN(2048)
			off := rng.IntN(6144)
			parts = append(parts, src.part(off, k))
			want = append(want, src.b[off:off+k]...)
		}
		for j := range n { // cut elsewhere
			k := (len(want) - at) / (n - j)
			into, fetched = append(into, dst.part(at, k)), append(fetched, back.part(at, k))
			at += k
		}
		clear(dst.b)
		clear(back.b)
		if i%2 == 0 {
			b.receive(rdma.RecvRequest{ID: 1, Segments: into})
			a.post(rdma.SendRequest{ID: 2, Op: rdma.Send, Segments: parts, Signaled: true})
			b.done(1, rdma.Recv)
			a.done(2, rdma.Send)
		} else {
			a.post(rdma.SendRequest{ID: 2, Op: rdma.Write, Segments: parts, RemoteAddress: dst.at(0),
				RemoteKey: dst.RemoteKey(), Signaled: true})
			a.done(2, rdma.Write)
		}
		same(t, "gathered", dst.b[:len(want)], want)
		a.post(rdma.SendRequest{ID: 3, Op: rdma.Read, Segments: fetched, RemoteAddress: dst.at(0),
			RemoteKey: dst.RemoteKey(), Signaled: true})
		a.done(3, rdma.Read)
		same(t, "scattered", back.b[:len(want)], want)
	}
}

// inline: the data is taken by Post, from memory that needs no registration.
func inline(t *testing.T, s Subject) {
	r := newRig(t, s)
	a, b := r.connected(rdma.QPConfig{Inline: 64, Segments: 2}, nil)
	dst := r.memory(4096, 0, all)
	plain := make([]byte, 64)
	for i := range 16 {
		for j := range plain {
			plain[j] = byte(i + j)
		}
		want := slices.Clone(plain)
		b.receive(rdma.RecvRequest{ID: 1, Segments: []rdma.Segment{dst.part(64, 64)}})
		parts := []rdma.Segment{{Address: addressOf(plain), Len: 40}, {Address: addressOf(plain[40:]), Len: 24}}
		chain := []rdma.SendRequest{
			{ID: 2, Op: rdma.Write, Segments: parts, Inline: true, Signaled: true, RemoteAddress: dst.at(0),
				RemoteKey: dst.RemoteKey()},
			{ID: 3, Op: rdma.Send, Segments: parts, Inline: true, Signaled: true},
		}
		a.post(chain...)
		clear(plain)
		a.take(2)
		b.done(1, rdma.Recv)
		same(t, "inline", dst.b[:128], append(want, want...))
	}
	long := r.memory(a.Limits().Inline+1, 0, all)
	for _, q := range []rdma.SendRequest{
		{Op: rdma.Write, Segments: long.segs(), Inline: true, RemoteAddress: dst.at(0), RemoteKey: dst.RemoteKey()},
		{Op: rdma.Read, Segments: []rdma.Segment{long.part(0, 8)}, Inline: true, RemoteAddress: dst.at(0),
			RemoteKey: dst.RemoteKey()},
	} {
		if n, err := a.Post([]rdma.SendRequest{q}); n != 0 || !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%v of %d bytes inline: %d, %v; want %v", q.Op, q.Segments[0].Len, n, err, syscall.EINVAL)
		}
	}
}

// unsignaled: only signaled requests complete, and say that those before have ended.
func unsignaled(t *testing.T, s Subject) {
	r := newRig(t, s)
	a, _ := r.connected(rdma.QPConfig{SendDepth: 32}, nil)
	src, dst := r.memory(32*100, 0, 0), r.memory(32*100, 0, all)
	for round := range 20 { // more than the queue holds, in all
		src.fill(round)
		var chain []rdma.SendRequest
		for i := range 32 {
			chain = append(chain, rdma.SendRequest{ID: uint64(i), Op: rdma.Write,
				Segments:      []rdma.Segment{src.part(i*100, 100)},
				RemoteAddress: dst.at(i * 100), RemoteKey: dst.RemoteKey(), Signaled: i == 31})
		}
		a.post(chain...)
		a.done(31, rdma.Write)
		same(t, "data", dst.b, src.b)
	}
	a.none()
}

// unsignaledFailure: an unsignaled request that fails completes.
func unsignaledFailure(t *testing.T, s Subject) {
	r := newRig(t, s)
	a, _ := r.connected(rdma.QPConfig{}, nil)
	src, dst := r.memory(8, 0, 0), r.memory(8, 0, all)
	good, bad := writeOf(1, src, dst, 0), writeOf(2, src, dst, 1)
	good.Signaled, bad.Signaled = false, false
	a.post(good, bad)
	a.failed(2, rdma.RemoteAccess)
}

// chains: of any length up to the depth, they complete in their order.
func chains(t *testing.T, s Subject) {
	r := newRig(t, s)
	const depth = 100
	a, b := r.connected(rdma.QPConfig{SendDepth: depth, RecvDepth: depth}, nil)
	src, dst := r.memory(depth, 0, 0), r.memory(depth, 0, all)
	for n := 1; n <= depth; n += 1 + n/8 {
		src.fill(n)
		clear(dst.b)
		var sends []rdma.SendRequest
		var recvs []rdma.RecvRequest
		for i := range n {
			sends = append(sends, rdma.SendRequest{ID: uint64(1000*n + i), Op: rdma.Send,
				Segments: []rdma.Segment{src.part(i, 1)},
				Signaled: true})
			recvs = append(recvs, rdma.RecvRequest{ID: uint64(2000*n + i), Segments: []rdma.Segment{dst.part(i, 1)}})
		}
		b.receive(recvs...)
		a.post(sends...)
		for i, c := range a.take(n) {
			if c.ID != uint64(1000*n+i) || c.Status != rdma.Success {
				t.Fatalf("chain of %d, completion %d: %+v", n, i, c)
			}
		}
		for i, c := range b.take(n) {
			if c.ID != uint64(2000*n+i) || c.Status != rdma.Success {
				t.Fatalf("chain of %d, receive %d: %+v", n, i, c)
			}
		}
		same(t, "data", dst.b[:n], src.b[:n])
	}
	if n, err := a.Post(nil); n != 0 || err != nil {
		t.Errorf("no chain: %d, %v", n, err)
	}
	if n, err := b.PostRecv(nil); n != 0 || err != nil {
		t.Errorf("no chain of receives: %d, %v", n, err)
	}
}

// malformedRequest: the requests before a malformed one are posted, the others are not.
func malformedRequest(t *testing.T, s Subject) {
	r := newRig(t, s)
	a, b := r.connected(rdma.QPConfig{Inline: 8}, nil)
	src, dst := r.memory(8, 0, 0), r.memory(8, 0, all)
	many := make([]rdma.Segment, a.Limits().SendSegments+1)
	for i := range many {
		many[i] = src.part(0, 1)
	}
	for name, spoil := range map[string]func(*rdma.SendRequest){
		"no opcode":         func(q *rdma.SendRequest) { q.Op = 0 },
		"a receive":         func(q *rdma.SendRequest) { q.Op = rdma.Recv },
		"an unknown opcode": func(q *rdma.SendRequest) { q.Op = 200 },
		"many segments":     func(q *rdma.SendRequest) { q.Segments = many },
	} {
		for at := range 5 {
			var chain []rdma.SendRequest
			for i := range 5 {
				chain = append(chain, writeOf(uint64(i), src, dst, 0))
			}
			spoil(&chain[at])
			if n, err := a.Post(chain); n != at || !errors.Is(err, syscall.EINVAL) {
				t.Fatalf("%s at %d: %d posted, %v", name, at, n, err)
			}
			for i, c := range a.take(at) {
				if c.ID != uint64(i) || c.Status != rdma.Success {
					t.Errorf("%s at %d, completion %d: %+v", name, at, i, c)
				}
			}
			a.none()
		}
	}
	tooMany := make([]rdma.Segment, b.Limits().RecvSegments+1)
	if n, err := b.PostRecv([]rdma.RecvRequest{{ID: 1, Segments: dst.segs()}, {ID: 2, Segments: tooMany}}); n != 1 ||
		!errors.Is(err, syscall.EINVAL) {
		t.Errorf("a receive with many segments: %d posted, %v", n, err)
	}
	a.post(writeOf(9, src, dst, 0)) // the connection has not suffered
	a.done(9, rdma.Write)
}

// fullQueue: what does not fit is not posted, the number says how many did, and each of them
// completes.
func fullQueue(t *testing.T, s Subject) {
	r := newRig(t, s)
	a, _ := r.connected(rdma.QPConfig{SendDepth: 8}, nil)
	src := r.memory(8, 0, 0)
	depth := a.Limits().SendDepth
	chain := make([]rdma.SendRequest, 4*depth+64)
	for i := range chain {
		chain[i] = sendOf(uint64(i), src) // which wait for ever: the peer has no receive
	}
	n, err := a.Post(chain)
	if n < depth || n >= len(chain) || !errors.Is(err, syscall.ENOMEM) {
		t.Fatalf("%d of %d posted to a queue of %d, %v; want %v", n, len(chain), depth, err, syscall.ENOMEM)
	}
	if again, err := a.Post(chain[:1]); again != 0 || !errors.Is(err, syscall.ENOMEM) {
		t.Errorf("%d posted to a full queue, %v", again, err)
	}
	if err := a.Fail(); err != nil {
		t.Fatal(err)
	}
	for i, c := range a.take(n) {
		if c.ID != uint64(i) || c.Status == rdma.Success {
			t.Fatalf("completion %d: %+v", i, c)
		}
	}
	a.none()
}

// fullReceiveQueue is fullQueue for receives.
func fullReceiveQueue(t *testing.T, s Subject) {
	r := newRig(t, s)
	_, b := r.connected(rdma.QPConfig{RecvDepth: 8}, nil)
	dst := r.memory(8, 0, all)
	depth := b.Limits().RecvDepth
	chain := make([]rdma.RecvRequest, 4*depth+64)
	for i := range chain {
		chain[i] = rdma.RecvRequest{ID: uint64(i), Segments: dst.segs()}
	}
	n, err := b.PostRecv(chain)
	if n < depth || n >= len(chain) || !errors.Is(err, syscall.ENOMEM) {
		t.Fatalf("%d of %d posted to a queue of %d, %v; want %v", n, len(chain), depth, err, syscall.ENOMEM)
	}
	if err := b.Fail(); err != nil {
		t.Fatal(err)
	}
	for i, c := range b.take(n) {
		if c.ID != uint64(i) || c.Status != rdma.Flushed {
			t.Fatalf("completion %d: %+v", i, c)
		}
	}
	b.none()
}

// dataBeforeSend: the data of a write is there when a later send has arrived.
func dataBeforeSend(t *testing.T, s Subject) {
	r := newRig(t, s)
	a, b := r.connected(rdma.QPConfig{Inline: 8}, nil)
	src, dst := r.memory(20000, 0, 0), r.memory(20000, 0, all)
	for i := range 50 {
		src.fill(i)
		b.receive(rdma.RecvRequest{ID: 1})
		w := writeOf(2, src, dst, 0)
		w.Signaled = false
		a.post(w, rdma.SendRequest{ID: 3, Op: rdma.Send, Signaled: true})
		b.done(1, rdma.Recv)
		same(t, "data", dst.b, src.b)
		a.done(3, rdma.Send)
	}
}

// fence: a request with a fence begins after the reads before it: it does not change what they
// read.
func fence(t *testing.T, s Subject) {
	r := newRig(t, s)
	a, _ := r.connected(rdma.QPConfig{}, nil)
	remote, got, next := r.memory(8000, 0, all), r.memory(8000, 0, all), r.memory(8000, 0, all)
	remote.fill(0)
	for i := range 50 {
		before := slices.Clone(remote.b)
		next.fill(i + 1)
		w := writeOf(2, next, remote, 0)
		w.Fence = true
		a.post(rdma.SendRequest{ID: 1, Op: rdma.Read, Segments: got.segs(), RemoteAddress: remote.at(0),
			RemoteKey: remote.RemoteKey()}, w)
		a.done(2, rdma.Write)
		same(t, "read before a write with a fence", got.b, before)
		same(t, "written", remote.b, next.b)
	}
}
