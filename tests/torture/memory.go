//go:build linux

package torture

import (
	"bytes"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A pool is memory from which buffers of operations are taken. Free memory has a pattern, which is
// checked before it is used again and when a program ends: this detects stores after an operation
// has returned, or outside its buffer.
type pool struct {
	name string
	mem  []byte
	held []*buffer // oldest first: in use, or left alone since they were returned
	next int
	end  int // where buffers end; another goroutine stores to the rest
}

// buffer is a part of a pool.
type buffer struct {
	p      *pool
	at, n  int // with red zones on both sides, which are in [from, to)
	from   int
	to     int
	owner  string // for findings
	active bool
}

func (b *buffer) bytes() []byte {
	if b == nil {
		return nil
	}
	return b.p.mem[b.at : b.at+b.n : b.at+b.n]
}

const (
	redZone   = 64
	touchSize = 4096
)

// pattern is the contents of unused memory, from an offset that is a multiple of its length on.
var pattern = func() []byte {
	b := make([]byte, 4096)
	for i := range b {
		b[i] = byte(0xa5 ^ i*7 ^ i>>8*13)
	}
	return b
}()

func newPool(name string, mem []byte) *pool {
	p := &pool{name: name, mem: mem, end: len(mem)}
	paint(mem, 0)
	return p
}

// paint fills b, which begins at offset at of its pool.
func paint(b []byte, at int) {
	for len(b) > 0 {
		n := copy(b, pattern[at%len(pattern):])
		b, at = b[n:], at+n
	}
}

// painted returns the first offset at which [from, to) does not have the pattern, or -1.
func (p *pool) painted(from, to int) int {
	for from < to {
		want := pattern[from%len(pattern):]
		n := min(len(want), to-from)
		if !bytes.Equal(p.mem[from:from+n], want[:n]) {
			for i := range n {
				if p.mem[from+i] != want[i] {
					return from + i
				}
			}
		}
		from += n
	}
	return -1
}

// take returns n bytes at an offset that is skew above a multiple of 64, nil if there is no room.
func (p *pool) take(n, skew int, owner string) (*buffer, error) {
	need := redZone + skew + (n+63)/64*64 + redZone
	if need > p.end {
		return nil, nil
	}
	from := p.next
	if from+need > p.end {
		from = 0
	}
	b := &buffer{p: p, from: from, to: from + need, at: from + redZone + skew, n: n, owner: owner, active: true}
	return b, p.claim(b)
}

// last returns the n bytes before the pool's end.
func (p *pool) last(n int, owner string) (*buffer, error) {
	if n > p.end {
		return nil, nil
	}
	b := &buffer{p: p, from: max(0, p.end-n-redZone), to: p.end, at: p.end - n, n: n, owner: owner, active: true}
	return b, p.claim(b)
}

var errBusy = fmt.Errorf("in use")

func (p *pool) claim(b *buffer) error {
	for _, o := range p.held {
		if o.from < b.to && b.from < o.to && o.active {
			return errBusy
		}
	}
	kept := p.held[:0]
	var bad error
	for _, o := range p.held {
		if o.from < b.to && b.from < o.to {
			if err := p.look(o); err != nil && bad == nil {
				bad = err
			}
		} else {
			kept = append(kept, o)
		}
	}
	if at := p.painted(b.from, b.to); at >= 0 && bad == nil {
		bad = p.stored(at)
	}
	p.held = append(kept, b)
	p.next = b.to
	if bad != nil {
		paint(p.mem[b.from:b.to], b.from)
	}
	return bad
}

// giveBack paints a buffer that belongs to no operation any more.
func (p *pool) giveBack(b *buffer) {
	b.active = false
	paint(b.bytes(), b.at)
}

func (p *pool) look(o *buffer) error {
	if o.active {
		return nil
	}
	if at := p.painted(o.from, o.to); at >= 0 {
		return p.stored(at)
	}
	return nil
}

// A StoreError says that memory was written that belongs to no operation.
type StoreError struct{ Text string }

func (e *StoreError) Error() string { return e.Text }

func (p *pool) stored(at int) error {
	n := 0
	for i := at; i < min(p.end, at+1<<20); i++ {
		if p.mem[i] != pattern[i%len(pattern)] {
			n++
		}
	}
	who := "outside of all buffers"
	for _, o := range p.held {
		if at >= o.from && at < o.to {
			who = fmt.Sprintf("the buffer of %s, returned", o.owner)
			if at < o.at || at >= o.at+o.n {
				who = fmt.Sprintf("beside the buffer of %s", o.owner)
			}
		}
	}
	return &StoreError{fmt.Sprintf("memory was written that no operation owns: %s at %d of %d (%s), about %d bytes: "+
		"% x", p.name, at, len(p.mem), who, n, p.mem[at:min(at+8, len(p.mem))])}
}

// check checks the whole pool.
func (p *pool) check() error {
	from := 0
	var err error
	for from < p.end {
		to := p.end
		skip := p.end
		for _, o := range p.held {
			if o.active && o.at+o.n > from && o.at < to {
				to, skip = o.at, o.at+o.n
			}
		}
		to = max(to, from)
		if at := p.painted(from, to); at >= 0 {
			if err == nil {
				err = p.stored(at)
			}
			paint(p.mem[from:to], from)
		}
		from = max(skip, from)
	}
	return err
}

// guarded returns n bytes that end at the end of a page, before an inaccessible one.
func guarded(n int) ([]byte, error) {
	page := unix.Getpagesize()
	n = (n + page - 1) / page * page
	mem, err := unix.Mmap(-1, 0, n+page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, err
	}
	if err := unix.Mprotect(mem[n:], unix.PROT_NONE); err != nil {
		return nil, err
	}
	return mem[:n:n], nil
}

// giveMapped unmaps what guarded returned.
func giveMapped(mem []byte) {
	unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(mem)), uintptr(len(mem)+unix.Getpagesize()))
}
