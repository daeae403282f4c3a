package shm

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"unsafe"
)

// advised returns how many bytes of b large pages are asked for.
func advised(t *testing.T, b []byte) (n int) {
	t.Helper()
	text, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	begin := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	var lo, hi uintptr
	for line := range strings.Lines(string(text)) {
		var from, to uintptr
		if k, _ := fmt.Sscanf(line, "%x-%x ", &from, &to); k == 2 {
			lo, hi = from, to
		}
		if flags, ok := strings.CutPrefix(line, "VmFlags:"); ok && slices.Contains(strings.Fields(flags), "hg") {
			n += max(0, int(min(hi, begin+uintptr(len(b))))-int(max(lo, begin)))
		}
	}
	return n
}

// A small region takes no large page, nor does the end of a larger one.
func TestLargePages(t *testing.T) {
	x, large := newExports(), largePage()
	for n, want := range map[int]int{64 << 10: 0, 2 * max(large, 1<<20): 2 * large, 3 * max(large, 1<<20) / 2: large} {
		r, err := x.alloc(n, true)
		if err != nil {
			t.Fatal(err)
		}
		if got := advised(t, r.Bytes()); got != want {
			t.Errorf("region of %d bytes: large pages for %d, want %d", n, got, want)
		}
		if err := r.Free(); err != nil {
			t.Error(err)
		}
	}
}
