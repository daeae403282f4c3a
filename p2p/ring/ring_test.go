package ring

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"testing"
	"unsafe"

	"pgregory.net/rapid"

	"tutti/p2p"
)

func aligned(n int) []byte {
	b := make([]byte, n+line)
	skip := -int(uintptr(unsafe.Pointer(&b[0]))) & (line - 1)
	return b[skip : skip+n : skip+n]
}

func fatal(t interface{ Fatal(...any) }, err error) {
	if err != nil {
		t.Fatal(err)
	}
}

// pair returns both ends of a channel and how often each end's bell was rung for it.
func pair(t interface{ Fatal(...any) }, data int) (a, b *End, bells *[2]int) {
	mem := aligned(Bytes(data))
	a, b, bells = new(End), new(End), new([2]int)
	fatal(t, a.Init(mem, data, 0, func() { bells[1]++ }))
	fatal(t, b.Init(mem, data, 1, func() { bells[0]++ }))
	return a, b, bells
}

func TestInitRefuses(t *testing.T) {
	good := Bytes(MinData)
	for name, c := range map[string]struct {
		mem        []byte
		data, side int
	}{
		"short":        {aligned(good - 1), MinData, 0},
		"long":         {aligned(good + 1), MinData, 0},
		"misaligned":   {aligned(good + 8)[8:], MinData, 0},
		"no power":     {aligned(Bytes(MinData + line)), MinData + line, 0},
		"too small":    {aligned(Bytes(MinData / 2)), MinData / 2, 0},
		"side":         {aligned(good), MinData, 2},
		"negative":     {aligned(good), MinData, -1},
		"nothing":      {nil, MinData, 0},
		"overflow":     {aligned(good), -1 << 30, 0},
		"no ring size": {aligned(Bytes(0)), 0, 0},
	} {
		if new(End).Init(c.mem, c.data, c.side, func() {}) == nil {
			t.Errorf("%s: taken", name)
		}
	}
	for wish, want := range map[int]int{-5: MinData, 0: MinData, MinData: MinData, MinData + 1: 2 * MinData,
		1 << 20: 1 << 20, MaxData + 1: MaxData} {
		if got := Round(wish); got != want {
			t.Errorf("Round(%d) = %d, want %d", wish, got, want)
		}
	}
}

// TestModel compares both directions of a channel with queues, for any sequence of calls.
func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		data := MinData << rapid.IntRange(0, 2).Draw(t, "log")
		a, b, bells := pair(t, data)
		ends := [2]*End{a, b}
		var queue [2][][]byte                   // towards end i
		taken := [2]int{-1, -1}                 // by Fill, of the frame that end i holds; -1: nothing
		var held, armed, refused, waits [2]bool // waits: armed after a refusal
		next := uint64(0)
		steps := rapid.IntRange(1, 300).Draw(t, "steps")
		for range steps {
			i := rapid.IntRange(0, 1).Draw(t, "end")
			e, o := ends[i], 1-i
			before := *bells
			do := rapid.SampledFrom([]string{"prepare", "send", "send", "recv", "recv", "fill", "release",
				"release", "arm", "drain"}).Draw(t, "do")
			switch do {
			case "prepare":
				memory := bytes.Clone(e.Memory())
				e.Prepare(rapid.IntRange(0, e.MaxFrame()).Draw(t, "n"))
				if !bytes.Equal(e.Memory(), memory) {
					t.Fatal("Prepare changes the memory")
				}
			case "send":
				n := rapid.OneOf(rapid.IntRange(0, 100), rapid.IntRange(0, e.MaxFrame()),
					rapid.Just(e.MaxFrame())).Draw(t, "n")
				p := make([]byte, n)
				for k := range p {
					p[k] = byte(next) + byte(k)
				}
				ok, err := e.Send(&p2p.Header{Len: uint32(n), Seq: next, Kind: 5, Off: 1 << 60}, p)
				fatal(t, err)
				if !ok && len(queue[o]) == 0 && !held[o] {
					t.Fatalf("%d bytes refused although the peer has read everything", n)
				}
				refused[i] = !ok
				if ok {
					queue[o] = append(queue[o], append(binary.LittleEndian.AppendUint64(nil, next), p...))
					next++
					if rung := bells[o] - before[o]; armed[o] && rung != 1 || !armed[o] && rung != 0 {
						t.Fatalf("end %d armed: %v, rung %d times", o, armed[o], rung)
					}
					if armed[o] {
						armed[o] = false
						ends[o].Answer()
					}
				}
			case "recv":
				h, p, err := e.Recv()
				fatal(t, err)
				if (h != nil) != (len(queue[i]) > 0) {
					t.Fatalf("Recv: %+v with %d frames under way", h, len(queue[i]))
				}
				if h == nil {
					break
				}
				held[i] = true
				want := queue[i][0][8:]
				if h.Seq != binary.LittleEndian.Uint64(queue[i][0]) || int(h.Len) != len(want) || h.Kind != 5 ||
					h.Off != 1<<60 {
					t.Fatalf("header %+v, want frame %x of %d bytes", h, queue[i][0][:8], len(want))
				}
				if taken[i] < 0 && !bytes.Equal(p, want) || taken[i] >= 0 && p != nil && len(want) > 0 {
					t.Fatalf("payload of %d bytes, %d taken", len(p), taken[i])
				}
			case "fill":
				if !held[i] {
					break
				}
				taken[i] = max(taken[i], 0)
				want := queue[i][0][8+taken[i]:]
				dst := make([]byte, rapid.IntRange(0, len(want)).Draw(t, "fill"))
				n, err := e.Fill(dst)
				fatal(t, err)
				if n != len(dst) || !bytes.Equal(dst, want[:n]) {
					t.Fatalf("Fill gave %d of %d bytes", n, len(dst))
				}
				taken[i] += n
			case "release", "drain":
				if !held[i] && do == "release" {
					break
				}
				for {
					e.Release()
					if held[i] {
						queue[i] = queue[i][1:]
						held[i] = false
					}
					if do == "release" {
						break
					}
					h, _, err := e.Recv()
					fatal(t, err)
					if h == nil {
						break
					}
					held[i] = true
				}
				rung := bells[o] - before[o]
				if rung > 0 && !(armed[o] && waits[o]) {
					t.Fatal("room announced to an end that did not wait for it")
				}
				if rung != 1 && armed[o] && waits[o] && len(queue[i]) == 0 {
					t.Fatalf("end %d waits for room, everything was read, and it was told so %d times", o, rung)
				}
				if rung > 0 {
					armed[o] = false
					ends[o].Answer()
				}
			case "arm":
				now := e.Arm()
				armed[i], waits[i] = !now, refused[i]
				if len(queue[i]) > 0 && !held[i] && !now {
					t.Fatal("Arm lets an end sleep with a frame there")
				}
				if refused[i] && len(queue[o]) == 0 && !now {
					t.Fatal("Arm lets an end sleep with room for what was refused")
				}
				if now && len(queue[i]) == 0 && !refused[i] {
					t.Fatal("Arm keeps an end awake with nothing to do")
				}
			}
			if !held[i] {
				taken[i] = -1
			}
		}
	})
}

// TestStaleBytes fills the ring with bytes that look like every commit word to come.
func TestStaleBytes(t *testing.T) {
	a, b, _ := pair(t, MinData)
	r := rand.New(rand.NewPCG(1, 2))
	sent, got := uint64(0), uint64(0)
	for range 20000 {
		n := r.IntN(a.MaxFrame()/8+1) * 8
		p := make([]byte, n)
		for i := 0; i < n; i += 8 {
			binary.LittleEndian.PutUint64(p[i:], (a.out.seq+1+uint64(r.IntN(12)))<<1|uint64(r.IntN(2)))
		}
		ok, err := a.Send(&p2p.Header{Len: uint32(n), Seq: sent}, p)
		fatal(t, err)
		if ok {
			sent++
		}
		for !ok || r.IntN(2) == 0 {
			h, _, err := b.Recv()
			fatal(t, err)
			if h == nil {
				if got != sent {
					t.Fatalf("%d frames sent, %d received", sent, got)
				}
				break
			}
			if h.Seq != got || got == sent {
				t.Fatalf("frame %d after %d of %d", h.Seq, got, sent)
			}
			b.Release()
			got++
			ok = true
		}
	}
	if sent < 10000 {
		t.Fatalf("only %d frames passed", sent)
	}
}

// TestOneBellUntilAnswered: one bell until it is answered.
func TestOneBellUntilAnswered(t *testing.T) {
	a, b, bells := pair(t, MinData)
	send := func() {
		t.Helper()
		ok, err := a.Send(&p2p.Header{}, nil)
		if !ok || err != nil {
			t.Fatal(ok, err)
		}
	}
	take := func() {
		t.Helper()
		if h, _, err := b.Recv(); h == nil || err != nil {
			t.Fatal(h, err)
		}
		b.Release()
	}
	want := func(n int) {
		t.Helper()
		if bells[1] != n {
			t.Fatalf("%d bells, want %d", bells[1], n)
		}
	}
	send()
	want(0) // no end sleeps
	if !b.Arm() {
		t.Fatal("Arm with a frame there")
	}
	take()
	if b.Arm() {
		t.Fatal("Arm with nothing there")
	}
	send()
	want(1)
	send()
	want(1) // told once
	take()
	take()
	if b.Arm() {
		t.Fatal("Arm with nothing there")
	}
	send()
	want(1) // the first bell was not heard yet: it will wake
	take()
	b.Answer()
	b.Arm()
	send()
	want(2)
	take()
	b.Answer()
	b.Arm()
	b.Disarm()
	send()
	want(2)
}

// TestForeignWritesEndLink: what no producer or consumer of ours writes ends the link, for good.
func TestForeignWritesEndLink(t *testing.T) {
	word := func(e *End, at int) *uint64 { return (*uint64)(unsafe.Add(e.in.data, at)) }
	length := func(e *End, at int) *uint32 { return (*uint32)(unsafe.Add(e.in.data, at+12)) }
	for name, spoil := range map[string]func(a, b *End){
		"commit from the past":  func(a, b *End) { *word(b, 0) = 1 << 40 },
		"commit of a later one": func(a, b *End) { *word(b, 0) = 2 << 1 },
		"skip at the beginning": func(a, b *End) { *word(b, 0) = 1<<1 | 1 },
		"longer than allowed":   func(a, b *End) { *word(b, 0) = 1 << 1; *length(b, 0) = uint32(b.max + 1) },
		"much longer":           func(a, b *End) { *word(b, 0) = 1 << 1; *length(b, 0) = 1<<32 - 1 },
		"over the end": func(a, b *End) {
			b.in.pos = b.size - line
			*word(b, int(b.size-line)) = 1 << 1
			*length(b, int(b.size-line)) = 9
		},
		"more freed than sent": func(a, b *End) { *b.out.told = 1 << 50; fill(b) },
		"freed less than before": func(a, b *End) {
			b.out.tail, b.out.head = b.size, 2*line
			*b.out.told = line
			fill(b)
		},
	} {
		a, b, _ := pair(t, MinData)
		spoil(a, b)
		_, _, err := b.Recv()
		if err == nil {
			err = b.Err()
		}
		if !errors.Is(err, p2p.ErrProtocol) {
			t.Errorf("%s: %v, want %v", name, err, p2p.ErrProtocol)
			continue
		}
		*word(b, 0) = 1 << 1 // too late to be good
		*length(b, 0) = 0
		if h, _, err := b.Recv(); h != nil || !errors.Is(err, p2p.ErrProtocol) {
			t.Errorf("%s: afterwards Recv gives %v, %v", name, h, err)
		}
		if ok, err := b.Send(&p2p.Header{}, nil); ok || !errors.Is(err, p2p.ErrProtocol) {
			t.Errorf("%s: afterwards Send gives %v, %v", name, ok, err)
		}
		if !b.Arm() {
			t.Errorf("%s: Arm lets the caller sleep", name)
		}
	}
}

// fill sends until there is no room or an error.
func fill(e *End) {
	for {
		if ok, err := e.Send(&p2p.Header{Len: 500}, make([]byte, 500)); !ok || err != nil {
			return
		}
	}
}

// TestWrongLengthKeepsLink: a wrong length is the caller's fault and does not hurt the link.
func TestWrongLengthKeepsLink(t *testing.T) {
	a, b, _ := pair(t, MinData)
	for _, c := range []struct{ says, has int }{{5, 4}, {4, 5}, {a.MaxFrame() + 1, a.MaxFrame() + 1}, {1<<31 - 1, 0}} {
		if ok, err := a.Send(&p2p.Header{Len: uint32(c.says)}, make([]byte, c.has)); ok || err == nil {
			t.Errorf("header says %d, payload has %d: %v, %v", c.says, c.has, ok, err)
		}
	}
	if a.Err() != nil {
		t.Error(a.Err())
	}
	if h, _, err := b.Recv(); h != nil || err != nil {
		t.Error(h, err)
	}
}

// TestFirstFailureStays: the first error stays; draining delivers, ending does not.
func TestFirstFailureStays(t *testing.T) {
	first, second := errors.New("first"), errors.New("second")
	a, b, _ := pair(t, MinData)
	for range 2 {
		if ok, err := a.Send(&p2p.Header{}, nil); !ok || err != nil {
			t.Fatal(ok, err)
		}
	}
	b.Fail(first, true)
	if h, _, err := b.Recv(); h == nil || err != nil {
		t.Fatalf("frame lost when draining: %v", err)
	}
	b.Release()
	if ok, err := b.Send(&p2p.Header{}, nil); ok || err != first {
		t.Fatal(ok, err)
	}
	b.Fail(second, false)
	if h, _, err := b.Recv(); h != nil || err != first {
		t.Fatal(h, err)
	}
	b.Fail(second, true)
	if h, _, err := b.Recv(); h != nil || err != first {
		t.Fatal("ended, and draining again:", h, err)
	}
}

// TestDrainedRingHasRoomForLargestFrame: wherever the ring stands, a consumer that has read
// everything leaves room for the largest frame; a producer that was refused learns it from Arm.
func TestDrainedRingHasRoomForLargestFrame(t *testing.T) {
	a, b, bells := pair(t, MinData)
	read := func() {
		for {
			h, _, err := b.Recv()
			fatal(t, err)
			if h == nil {
				return
			}
			b.Release()
		}
	}
	send := func(n int) bool {
		ok, err := a.Send(&p2p.Header{Len: uint32(n)}, make([]byte, n))
		fatal(t, err)
		return ok
	}
	r := rand.New(rand.NewPCG(3, 4))
	for i := range 20000 {
		for range r.IntN(20) {
			if !send(r.IntN(300)) {
				read()
			}
		}
		read()
		if i%2 == 0 && !send(a.MaxFrame()) {
			t.Fatalf("round %d: no room for the largest frame at %d, %d told", i, a.out.tail, *a.out.told)
		}
		if i%10 == 0 {
			for send(a.MaxFrame()) {
			}
			read()
			if !a.Arm() {
				t.Fatalf("round %d: Arm lets a producer sleep that has room", i)
			}
		}
	}
	if bells[0] != 0 {
		t.Fatalf("%d bells for a producer that never slept", bells[0])
	}
}

// FuzzConsumer lets a hostile peer write anything anywhere in the channel. Nothing outside of the
// ring is offered or touched, and nothing panics.
func FuzzConsumer(f *testing.F) {
	frame := make([]byte, 2*line)
	frame[0], frame[12] = 2, 5
	f.Add(frame, uint16(control+MinData), []byte("rrlrfla"))
	f.Add([]byte{3}, uint16(control+MinData), []byte("rrss"))
	f.Add(bytes.Repeat([]byte{2, 0, 0, 0, 0, 0, 0, 0}, 800), uint16(0), []byte("srlsrlwrlsa"))
	f.Fuzz(func(t *testing.T, spoil []byte, at uint16, script []byte) {
		const guard = 4 * line
		all := aligned(Bytes(MinData) + 2*guard)
		for i := range all[:guard] {
			all[i], all[len(all)-1-i] = 0xa5, 0xa5
		}
		mem := all[guard : len(all)-guard : len(all)-guard]
		var b End
		fatal(t, b.Init(mem, MinData, 1, func() {}))
		theirs := mem[control : control+MinData]
		paint := func() {
			if int(at) < len(mem) {
				copy(mem[at:], spoil)
			}
		}
		paint()
		for _, op := range script[:min(len(script), 200)] {
			switch op {
			case 'r':
				h, p, err := b.Recv()
				if h != nil && err != nil || h == nil && p != nil {
					t.Fatal(h, p, err)
				}
				if h != nil && !b.in.filling {
					if uint32(len(p)) != h.Len || len(p) > b.MaxFrame() {
						t.Fatalf("%d bytes offered for %d", len(p), h.Len)
					}
					if len(p) > 0 {
						from := int(uintptr(unsafe.Pointer(&p[0])) - uintptr(unsafe.Pointer(&theirs[0])))
						if from < 0 || from+len(p) > MinData {
							t.Fatalf("payload at %d, length %d", from, len(p))
						}
						p[0]++ // must be memory
					}
				}
			case 'l':
				b.Release()
			case 'f':
				b.Fill(make([]byte, 7))
			case 'a':
				b.Arm()
			case 's':
				b.Send(&p2p.Header{Len: 900}, make([]byte, 900))
			case 'w':
				paint()
			}
		}
		for i := range all[:guard] {
			if all[i] != 0xa5 || all[len(all)-1-i] != 0xa5 {
				t.Fatal("memory outside of the channel was written")
			}
		}
	})
}

func BenchmarkSendRecv(b *testing.B) {
	x, y, _ := pair(b, 64<<10)
	h, p := p2p.Header{Len: 64}, make([]byte, 64)
	b.ReportAllocs()
	for b.Loop() {
		x.Send(&h, p)
		if got, _, _ := y.Recv(); got == nil {
			b.Fatal("nothing")
		}
		y.Release()
	}
}
