package kernels

import (
	"bytes"
	"testing"

	"golang.org/x/sys/unix"
)

// betweenWalls returns n bytes, rounded up to pages, with a hole of the address space at each end:
// an access to one crashes.
func betweenWalls(t *testing.T, n int) []byte {
	page := unix.Getpagesize()
	data := (n + page - 1) &^ (page - 1)
	m, err := unix.Mmap(-1, 0, data+2*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(m) })
	for _, hole := range [][]byte{m[:page], m[page+data:]} {
		if err := unix.Mprotect(hole, unix.PROT_NONE); err != nil {
			t.Fatal(err)
		}
	}
	return m[page:][:data:data]
}

// beforeWall returns n bytes that end at a hole.
func beforeWall(t *testing.T, n int) []byte {
	m := betweenWalls(t, n)
	return m[len(m)-n:]
}

// Acquire changes nothing, and takes any address and length.
func TestAcquire(t *testing.T) {
	b := beforeWall(t, 4096)
	for i := range b {
		b[i] = byte(i)
	}
	at := uintptr(ptr(b))
	for _, off := range []uintptr{0, 1, 4095, 4096, 1 << 20, -at, 1 - at, 1<<63 - at, -at - 1, 1<<47 - at} {
		for _, n := range []int{-1, 0, 1, 64, 8192} {
			Acquire(at+off, n)
			AcquireOut(at+off, n)
		}
	}
	for i := range b {
		if b[i] != byte(i) {
			t.Fatalf("byte %d has changed", i)
		}
	}
}

// TestKernelsStayInBounds runs everything on buffers that end at a hole, at every length of a tail.
func TestKernelsStayInBounds(t *testing.T) {
	const room = 4096
	walls := [3][]byte{beforeWall(t, room), beforeWall(t, room), beforeWall(t, room)}
	for _, im := range implementations {
		for _, dt := range DTypes() {
			for n := range 140 {
				at := func(i, size int) []byte { return walls[i][room-n*size:] }
				for _, op := range Ops() {
					if r := im.t.reduce[op][dt]; r != nil {
						s := dt.Size()
						r(ptr(at(0, s)), ptrs(at(1, s), at(2, s)), n)
						r(ptr(at(0, s)), ptrs(at(0, s), at(1, s), at(2, s)), n)
					}
				}
				if im.t.widen[dt] != nil {
					im.t.widen[dt](ptr(at(0, 4)), ptr(at(1, dt.Size())), n)
					im.t.narrow[dt](ptr(at(0, dt.Size())), ptr(at(1, 4)), n)
				}
			}
		}
	}
}

// TestCopiesStayInBounds copies from and to buffers that end at a hole, or begin behind one.
func TestCopiesStayInBounds(t *testing.T) {
	const most = 3 * sharedFrom
	walled := [2][]byte{betweenWalls(t, most), betweenWalls(t, most)}
	for name, f := range copies {
		for _, n := range []int{1, 63, sharedFrom, sharedFrom + 1, sharedFrom + 255, sharedFrom + 1279, most} {
			for _, dst := range [][]byte{walled[0][:n], walled[0][len(walled[0])-n:]} {
				for _, src := range [][]byte{walled[1][:n], walled[1][len(walled[1])-n:]} {
					for i := range src {
						src[i] = byte(i * 7)
					}
					clear(dst)
					if f(ptr(dst), ptr(src), n); !bytes.Equal(dst, src) {
						t.Fatalf("%s of %d bytes", name, n)
					}
				}
			}
		}
	}
}
