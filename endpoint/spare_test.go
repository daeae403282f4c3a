package endpoint

import (
	"testing"
	"unsafe"

	"pgregory.net/rapid"
)

func TestSpares(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var s spares
		used := map[*byte][]byte{}
		for range rapid.IntRange(1, 300).Draw(t, "steps") {
			if len(used) > 0 && rapid.Bool().Draw(t, "put") {
				for p, b := range used {
					s.put(b)
					delete(used, p)
					break
				}
			} else {
				n := rapid.IntRange(0, mostSpare).Draw(t, "length") >> rapid.IntRange(0, 17).Draw(t, "shift")
				b := s.take(n)
				if len(b) != n || cap(b) < leastSpare || n > mostSpare/4 && cap(b) > n {
					t.Fatalf("%d bytes of %d, want %d", len(b), cap(b), n)
				}
				p := unsafe.SliceData(b)
				if used[p] != nil {
					t.Fatal("the same memory twice")
				}
				used[p] = b
			}
			size := 0
			for _, b := range s.bufs {
				if size += cap(b); used[unsafe.SliceData(b)] != nil {
					t.Fatal("memory in use is spare")
				}
			}
			if size != s.size || size > mostSpare || len(s.bufs) > mostSpares {
				t.Fatalf("%d buffers of %d bytes, %d counted", len(s.bufs), size, s.size)
			}
		}
	})
	var s spares
	b := s.take(4096)
	s.put(b)
	if c := s.take(4000); unsafe.SliceData(c) != unsafe.SliceData(b) {
		t.Error("memory is not used again")
	}
}
