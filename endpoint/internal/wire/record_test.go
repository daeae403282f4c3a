package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

func secretOf(b byte) []byte { return bytes.Repeat([]byte{b}, SecretSize) }

// guardPair returns the guards of both ends of a connection.
func guardPair(t testing.TB, m Mode) (a, b Guard) {
	t.Helper()
	a, err := NewGuard(m, secretOf(1), secretOf(2))
	if err != nil {
		t.Fatal(err)
	}
	if b, err = NewGuard(m, secretOf(2), secretOf(1)); err != nil {
		t.Fatal(err)
	}
	return a, b
}

func eachMode(t *testing.T, f func(t *testing.T, m Mode)) {
	for _, m := range []Mode{Checked, Sealed} {
		t.Run(m.String(), func(t *testing.T) { f(t, m) })
	}
}

// open opens a record of which there is a copy.
func open(r *Records, record []byte) ([]byte, error) {
	record = bytes.Clone(record)
	n, err := r.Size(record)
	if err != nil {
		return nil, err
	}
	if n != len(record) {
		return nil, errors.New("another size")
	}
	return r.Open(record)
}

func TestRecordsCarryBodies(t *testing.T) {
	eachMode(t, func(t *testing.T, m Mode) {
		a, b := guardPair(t, m)
		r := rand.New(rand.NewPCG(1, 2))
		seen := map[string]bool{}
		for _, n := range []int{1, 2, 15, 16, 17, 64, 1000, MaxRecord - 1, MaxRecord, 64, 64} {
			for _, way := range [][2]*Records{{a.Out, b.In}, {b.Out, a.In}} {
				body := make([]byte, n)
				for i := range body {
					body[i] = byte(r.Uint32())
				}
				if n == 64 {
					body = make([]byte, n) // the same again
				}
				// In place, behind something else.
				buf := append(make([]byte, 3, 3+RecordHeader+n+MaxTrailer), make([]byte, RecordHeader)...)
				buf = append(buf, body...)
				record := way[0].Append(buf[:3], buf[3+RecordHeader:])[3:]
				if m == Sealed && seen[string(record)] {
					t.Error("two records have the same bytes")
				}
				seen[string(record)] = true
				if bytes.Contains(record, body) == (m == Sealed) && n > 2 {
					t.Errorf("a record of %d bytes contains its body: %v", n, m != Sealed)
				}
				if got, err := open(way[1], record); err != nil || !bytes.Equal(got, body) {
					t.Fatalf("%d bytes: %d, %v", n, len(got), err)
				}
			}
		}
	})
}

// A record that is not the next one, as it was made, is refused.
func TestDamagedRecordsAreRefused(t *testing.T) {
	eachMode(t, func(t *testing.T, m Mode) {
		a, b := guardPair(t, m)
		bodies := []string{"first", "second", "third"}
		var records [][]byte
		for _, body := range bodies {
			records = append(records, a.Out.Append(nil, []byte(body)))
		}
		refused := func(what string, record []byte) {
			t.Helper()
			_, err := open(b.In, record)
			if !errors.Is(err, ErrRecord) {
				t.Errorf("%s: %v", what, err)
			}
		}
		for i := range records {
			for bit := range 8 * len(records[i]) {
				x := bytes.Clone(records[i])
				x[bit/8] ^= 1 << (bit % 8)
				refused("a bit was changed", x)
			}
			for j := range records {
				if j != i {
					refused("another record was expected", records[j])
				}
			}
			if m == Sealed {
				refused("a record of this end", b.Out.Append(nil, []byte(bodies[i])))
				other, err := NewGuard(m, secretOf(3), secretOf(4))
				if err != nil {
					t.Fatal(err)
				}
				other.Out.n = uint64(i)
				refused("another key", other.Out.Append(nil, []byte(bodies[i])))
			}
			if got, err := open(b.In, records[i]); err != nil || string(got) != bodies[i] {
				t.Fatalf("%q, %v", got, err) // what was refused has changed nothing
			}
		}
	})
}

// No header has the receiver wait for more than MaxRecord bytes.
func TestRecordsHaveLimits(t *testing.T) {
	eachMode(t, func(t *testing.T, m Mode) {
		a, b := guardPair(t, m)
		for _, n := range []uint32{0, MaxRecord + 1, 1 << 31, 1<<32 - 1} {
			head := binary.LittleEndian.AppendUint32(nil, n)
			head = binary.LittleEndian.AppendUint32(head, a.Out.check(head))
			if size, err := b.In.Size(head); !errors.Is(err, ErrRecord) || size != 0 {
				t.Errorf("a record of %d bytes: %d, %v", n, size, err)
			}
		}
	})
}

// A direction changes its key, and goes on.
func TestKeysAreRenewed(t *testing.T) {
	a, b := guardPair(t, Sealed)
	var buf, record []byte
	body := make([]byte, 16)
	lives := uint64(2)
	if testing.Short() {
		lives = 1
	}
	for n := range lives*keyLife + 2 {
		aead, iv := b.In.aead, b.In.iv
		buf = a.Out.Append(buf[:0], body)
		record = append(record[:0], buf...)
		got, err := b.In.Open(record)
		if err != nil || !bytes.Equal(got, body) {
			t.Fatalf("record %d: %v", n, err)
		}
		changed := n > 0 && n%keyLife == 0
		if (aead != b.In.aead) != changed || (iv != b.In.iv) != changed {
			t.Fatalf("record %d has another key or IV: %v, %v, want %v", n, aead != b.In.aead, iv != b.In.iv, changed)
		}
	}
}

func TestRecordsDoNotAllocate(t *testing.T) {
	eachMode(t, func(t *testing.T, m Mode) {
		a, b := guardPair(t, m)
		buf, body := make([]byte, 0, 200), make([]byte, 64)
		if n := testing.AllocsPerRun(100, func() {
			record := a.Out.Append(buf, body)
			if _, err := b.In.Size(record); err != nil {
				t.Fatal(err)
			}
			if _, err := b.In.Open(record); err != nil {
				t.Fatal(err)
			}
		}); n != 0 {
			t.Errorf("a record costs %v allocations", n)
		}
	})
}

// Memory that changes while a record is made of it makes a valid record. The two ends of the memory
// are different mappings, since the race detector would object.
func TestRecordsOfMemoryThatChanges(t *testing.T) {
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, MaxRecord); err != nil {
		t.Fatal(err)
	}
	var maps [2][]byte
	for i := range maps {
		if maps[i], err = unix.Mmap(fd, 0, MaxRecord, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
			t.Fatal(err)
		}
		defer unix.Munmap(maps[i])
	}
	eachMode(t, func(t *testing.T, m Mode) {
		a, b := guardPair(t, m)
		stop := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			for x := byte(0); ; x++ {
				select {
				case <-stop:
					return
				default:
					for i := 0; i < len(maps[0]); i += 16 {
						maps[0][i] = x
					}
				}
			}
		})
		defer wg.Wait()
		defer close(stop)
		var record []byte
		for i := range 2000 {
			record = a.Out.Append(record[:0], maps[1])
			if _, err := b.In.Open(record); err != nil {
				t.Fatalf("record %d: %v", i, err)
			}
		}
	})
}

func TestGuardsNeedSecrets(t *testing.T) {
	for _, n := range []int{0, SecretSize - 1, SecretSize + 1} {
		if _, err := NewGuard(Sealed, make([]byte, n), secretOf(1)); err == nil {
			t.Errorf("a secret of %d bytes", n)
		}
	}
	if _, err := NewGuard(modes, secretOf(1), secretOf(2)); err == nil {
		t.Error("an unknown mode")
	}
	if g, err := NewGuard(Plain, nil, nil); err != nil || g != (Guard{}) {
		t.Errorf("%v, %v", g, err)
	}
}

// Bytes of a wire are records only as far as they are those that the other end has made.
func FuzzRecords(f *testing.F) {
	bodies := []string{"first", "second", "a longer one, which has more than one block of the cipher"}
	stream := func(t testing.TB, m Mode) (b []byte, ends []int) {
		a, _ := guardPair(t, m)
		for _, body := range bodies {
			b = a.Out.Append(b, []byte(body))
			ends = append(ends, len(b))
		}
		return b, ends
	}
	for _, m := range []Mode{Checked, Sealed} {
		b, ends := stream(f, m)
		f.Add(uint8(m), b)
		f.Add(uint8(m), b[:len(b)-1])
		f.Add(uint8(m), b[ends[0]:])
		for i := range b {
			x := bytes.Clone(b)
			x[i] ^= 0x10
			f.Add(uint8(m), x)
		}
	}
	f.Fuzz(func(t *testing.T, mode uint8, b []byte) {
		m := Checked + Mode(mode)%2
		want, ends := stream(t, m)
		_, g := guardPair(t, m)
		orig := bytes.Clone(b)
		for i, at := 0, 0; len(b)-at >= RecordHeader; i++ {
			n, err := g.In.Size(b[at:])
			if err != nil {
				return
			}
			if n <= RecordHeader || n > RecordHeader+MaxRecord+MaxTrailer {
				t.Fatalf("record %d has %d bytes", i, n)
			}
			if n > len(b)-at {
				return
			}
			body, err := g.In.Open(b[at : at+n])
			at += n
			if err != nil {
				return
			}
			// Who can compute a CRC can make checked records.
			if m == Sealed && (i >= len(bodies) || string(body) != bodies[i] || at != ends[i] ||
				!bytes.Equal(orig[:at], want[:at])) {
				t.Fatalf("record %d opens, and has %q", i, body)
			}
		}
	})
}
