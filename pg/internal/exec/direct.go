package exec

import (
	"encoding/binary"
	"errors"
	"fmt"
	"unsafe"

	"tutti/collectives"
	"tutti/device"
	"tutti/kernels"
	"tutti/mem"
	"tutti/p2p"
)

// Ranks whose buffers are all in the memory of devices run a load-store plan there: their streams
// load from the peers' buffers in place, and store into their own. It is the plan of mapped host
// memory, with its exchange and its tickets: see mapped. The host sends the signals of the plan
// when the stream has done the work before them, so that no stream ever waits for a peer.
//
// A descriptor names an allocation by a number of its rank's. The key of a number is told when the
// number is seen first in a view: all ranks know which numbers all ranks have told, so that they
// agree on that without a message. Then all map what they do not have yet, and tell each other
// whether they could. If one could not, no calls of this view run so.

// A Direct is a Feed of a call whose buffers are in the memory of a device, at addresses of it. All
// methods are called with the proxy's lock; those that wait release it.
type Direct interface {
	Feed
	// OnDevice reports whether the buffers are on the device: not any more after Stage.
	OnDevice() bool
	// Device returns a number for the device, from 1 to 255, that differs from those of the others
	// that this rank uses.
	Device() byte
	// Share, Import and Lasts are those of device.Sharer, for n bytes at an address and for the
	// rank in a slot.
	Share(ptr unsafe.Pointer, n int) (key []byte, offset uint64, err error)
	Import(slot int, key []byte) (device.Shared, error)
	Lasts(key []byte) bool
	// Room returns the most ranks of a view for whose plan the stream has room.
	Room() int
	// Give gives a piece of work to the stream.
	Give(work func(s device.Stream, loc mem.Location) error) error
	// Settle waits until the stream has done what it was given. It returns an error if the stream
	// has failed, or when the call fails meanwhile, unless last is true: then the wait is bounded
	// by the time that a stream is given.
	Settle(last bool) error
	// Stage has the buffers copied to the host, where the call runs then: see Need.
	Stage() error
	// Host returns where the byte at an address of the buffers is after Stage.
	Host(ptr unsafe.Pointer) unsafe.Pointer
}

// direct is what a Runner knows of the ranks' devices. All but call, busy and why is the same at
// all ranks, but for the keys, and ends with the view.
type direct struct {
	drop    func(shared []device.Shared, gone bool)
	call    Direct // the running call, while its plan works on the device
	busy    bool   // its stream has work that settle has not waited for
	why     error  // the latest reason why this rank did not offer its buffers
	refused error  // why no call loads
	path    string // the latest by which this rank loads
	devices []byte // the number of each rank's device, by slot
	known   []map[uint64]device.Shared
	keys    map[string]uint64 // numbers of this rank's allocations
	last    uint64
}

// mostKnown is how many allocations of a rank the others keep mapped. With one more, they forget
// them all.
const mostKnown = 64

// verdictSize is the size of a rank's answer whether it could map the peers' memory: zeros, or the
// begin of a reason behind a byte that says for how long it holds.
const verdictSize = 320

// The first byte of a reason.
const (
	never = 1 + iota // not in this view
	later            // a call may ask again
)

// errMixed says that a call of this view was not on the devices of all ranks.
var errMixed = errors.New("a rank's buffers are not in a device's memory that others can load")

// errRoom says that a stream has no room for the work of a call.
var errRoom = errors.New("its stream has no places for the work, because it runs again or the view has grown")

// Refuses reports whether no call of this view loads from devices. With the proxy's lock.
func (r *Runner) Refuses() bool { return r.direct.refused != nil }

// Direct says how the calls of this view use the memory of devices: the path that they load by, or
// else why the buffers are copied to the host; "" if no call has asked. With the proxy's lock.
func (r *Runner) Direct() (path string, err error) {
	x := &r.direct
	switch {
	case x.refused != nil:
		return "", x.refused
	case x.path != "":
		return x.path, nil
	}
	return "", x.why
}

// onDevice returns the running call if it may load from the peers' devices, nil if it runs on the
// host.
func (r *Runner) onDevice() Direct {
	if d, ok := r.feed.(Direct); ok && d.OnDevice() && r.direct.refused == nil {
		return d
	}
	return nil
}

// approach stages the running call if no call loads from devices: peers must not be told where its
// buffers are before, because they may read them straight from this process.
func (r *Runner) approach() error {
	if r.onDevice() != nil {
		return nil
	}
	return r.stage()
}

// stage brings the call's buffers to the host, if they are on a device.
func (r *Runner) stage() error {
	d, ok := r.feed.(Direct)
	if !ok || !d.OnDevice() {
		return nil
	}
	if err := d.Stage(); err != nil {
		return err
	}
	r.cur.In, r.cur.Out = d.Host(r.cur.In), d.Host(r.cur.Out)
	r.in.ptr, r.out.ptr = r.cur.In, r.cur.Out
	return r.need(All)
}

// forget forgets allocations of the rank in slot, which uses none of them any more if gone is true.
func (x *direct) forget(slot int, gone bool, which func(number uint64) bool) {
	var all []device.Shared
	for n, s := range x.known[slot] {
		if !which(n) {
			continue
		}
		delete(x.known[slot], n)
		if s != nil {
			all = append(all, s)
		}
	}
	if len(all) > 0 {
		x.drop(all, gone)
	}
}

func every(uint64) bool { return true }

// close ends the view.
func (x *direct) close() {
	for slot := range x.known {
		x.forget(slot, false, every)
	}
	clear(x.keys)
	x.known, x.devices, x.refused, x.why, x.path = nil, nil, nil, nil, ""
}

// offer writes where this rank's buffers are, and returns the access to them.
func (r *Runner) offer(d Direct, desc []byte, in, out int) (access byte) {
	if d.Room() < len(r.set.Active) {
		r.direct.why = errRoom
		return accessNone
	}
	if len(r.direct.keys) > 4*mostKnown { // most of calls that were not on the devices of all ranks
		clear(r.direct.keys)
	}
	for _, b := range []struct {
		at  int
		ptr unsafe.Pointer
		n   int
	}{{24, r.cur.In, in}, {40, r.cur.Out, out}} {
		if b.n == 0 {
			continue
		}
		key, offset, err := d.Share(b.ptr, b.n)
		if err != nil {
			r.direct.why = err
			return accessNone
		}
		binary.LittleEndian.PutUint64(desc[b.at:], r.direct.number(key))
		binary.LittleEndian.PutUint64(desc[b.at+8:], offset)
	}
	desc[3] = d.Device()
	return accessDevice
}

// number returns the number of an allocation of this rank.
func (x *direct) number(key []byte) uint64 {
	n := x.keys[string(key)]
	if n == 0 {
		if x.keys == nil {
			x.keys = map[string]uint64{}
		}
		x.last++
		n = x.last
		x.keys[string(key)] = n
	}
	return n
}

// An entry is an allocation that the rank in slot has named first.
type entry struct {
	slot   int
	number uint64
}

// A rank introduces allocations by a message of introSize bytes: two keys, each with its length
// before it, and the numbers of its known allocations that it has freed, until the first zero.
const (
	keySize   = 1 + device.MaxKey
	introSize = 2*keySize + 8*mostKnown
)

// introduce has all ranks map what the descriptors name for the first time, and unmap what its
// owner has freed. It reports whether the call may load, at all ranks alike.
func (r *Runner) introduce(d Direct) (bool, error) {
	x := &r.direct
	fresh := x.fresh(r.mapped.all, r.set.Active, r.set.Size)
	if len(fresh) == 0 {
		return true, nil
	}
	mine, all := make([]byte, introSize), make([]byte, introSize*r.set.Size)
	freed := mine[2*keySize:]
	for key, n := range x.keys {
		named := false
		for i := range 2 {
			if binary.LittleEndian.Uint64(r.mapped.mine[24+16*i:]) == n {
				mine[i*keySize] = byte(len(key))
				copy(mine[i*keySize+1:], key)
				named = true
			}
		}
		if _, known := x.known[r.rank][n]; !known || named || d.Lasts([]byte(key)) {
			continue
		}
		delete(x.keys, key)
		if len(freed) > 0 {
			binary.LittleEndian.PutUint64(freed, n)
			freed = freed[8:]
		}
	}
	if err := r.share(mine, all); err != nil {
		return false, err
	}
	for _, slot := range r.set.Active {
		freed := all[slot*introSize+2*keySize:][:8*mostKnown]
		x.forget(slot, true, func(number uint64) bool {
			for at := 0; at < len(freed); at += 8 {
				if binary.LittleEndian.Uint64(freed[at:]) == number {
					return true
				}
			}
			return false
		})
	}
	var own error
	for _, e := range fresh {
		var s device.Shared
		if e.slot != r.rank && own == nil {
			key := all[e.slot*introSize:]
			if binary.LittleEndian.Uint64(r.mapped.all[e.slot*descSize+24:]) != e.number {
				key = key[keySize:]
			}
			if s, own = d.Import(e.slot, key[1:][:min(int(key[0]), device.MaxKey)]); own != nil {
				own = fmt.Errorf("rank %d: %w", r.ranks[e.slot], own)
			} else {
				x.path = s.Path()
			}
		}
		x.known[e.slot][e.number] = s
	}
	mine, all = make([]byte, verdictSize), make([]byte, verdictSize*r.set.Size)
	if own != nil {
		mine[0] = never
		if errors.Is(own, device.ErrLater) {
			mine[0] = later
		}
		copy(mine[1:], own.Error())
	}
	if err := r.share(mine, all); err != nil {
		return false, err
	}
	var why error
	for _, slot := range r.set.Active {
		v := all[slot*verdictSize:][:verdictSize]
		if v[0] == 0 || why != nil && v[0] == later {
			continue
		}
		bad := own
		if slot != r.rank || bad == nil {
			bad = errors.New(string(trim(v[1:])))
		}
		why = fmt.Errorf("rank %d does not reach the memory of %w", r.ranks[slot], bad)
		if v[0] != later {
			x.refused = why
			return false, nil
		}
	}
	if why == nil {
		return true, nil
	}
	x.why = why
	for _, e := range fresh { // the next call that has it introduces it anew
		x.forget(e.slot, false, func(number uint64) bool { return number == e.number })
	}
	return false, nil
}

// trim returns text without the zeros behind it.
func trim(text []byte) []byte {
	for len(text) > 0 && text[len(text)-1] == 0 {
		text = text[:len(text)-1]
	}
	return text
}

// fresh adds the allocations that the descriptors name for the first time to the known ones, and
// returns them.
func (x *direct) fresh(all []byte, active []int, size int) (fresh []entry) {
	if x.known == nil {
		x.known, x.devices = make([]map[uint64]device.Shared, size), make([]byte, size)
	}
	same := true
	for _, slot := range active {
		at := &x.devices[slot]
		same = same && (*at == all[slot*descSize+3] || *at == 0)
		*at = all[slot*descSize+3]
	}
	if !same {
		for slot := range x.known {
			x.forget(slot, false, every)
		}
	}
	for _, slot := range active {
		for _, at := range []int{24, 40} {
			n := binary.LittleEndian.Uint64(all[slot*descSize+at:])
			if _, known := x.known[slot][n]; n == 0 || known {
				continue
			}
			if x.known[slot] == nil {
				x.known[slot] = map[uint64]device.Shared{}
			}
			x.known[slot][n] = nil
			fresh = append(fresh, entry{slot, n})
		}
	}
	return fresh
}

// forgetMany forgets the allocations of ranks that have named many. Before an exchange.
func (x *direct) forgetMany(me int) {
	for slot := range x.known {
		if len(x.known[slot]) < mostKnown {
			continue
		}
		if x.forget(slot, true, every); slot == me {
			clear(x.keys)
		}
	}
}

// place returns n bytes at an offset of an allocation of the peer in slot.
func (r *Runner) place(slot int, number, offset uint64, n int) (source, error) {
	s := r.direct.known[slot][number]
	err := fmt.Errorf("%w: allocation %d of its device, which it has not named", p2p.ErrProtocol, number)
	if s != nil {
		var m mem.Memory
		if m, err = s.Memory(offset, n); err == nil {
			at := uintptr(m.Address())
			return source{ptr: *(*unsafe.Pointer)(unsafe.Pointer(&at))}, nil
		}
	}
	return source{}, &p2p.PeerError{Rank: r.ranks[slot], Err: err}
}

// The steps of a plan that works on the device.

func onDevice(ptr unsafe.Pointer, n int, loc mem.Location) mem.Memory {
	return mem.Device(uint64(uintptr(ptr)), n, loc)
}

func (r *Runner) give(work func(s device.Stream, loc mem.Location) error) error {
	r.direct.busy = true
	return r.direct.call.Give(work)
}

// copyThere has the stream copy n bytes.
func (r *Runner) copyThere(dst, src unsafe.Pointer, n int) error {
	if dst == src || n == 0 {
		return nil
	}
	return r.give(func(s device.Stream, loc mem.Location) error {
		return s.Copy(onDevice(dst, n, loc), onDevice(src, n, loc))
	})
}

// reduceThere has the stream run ReduceInto step s.
func (r *Runner) reduceThere(s *collectives.Step, dtype kernels.DType) error {
	if s.Dst.Len == 0 {
		return nil
	}
	op, divisor := r.combination(s)
	return r.give(func(stream device.Stream, loc mem.Location) error {
		srcs := make([]mem.Memory, len(s.Srcs))
		for j := range s.Srcs {
			srcs[j] = onDevice(r.at(&s.Srcs[j]), s.Dst.Len, loc)
		}
		return stream.Reduce(op, dtype, onDevice(r.at(&s.Dst), s.Dst.Len, loc), srcs, divisor)
	})
}

// settle returns when the stream has done what it was given.
func (r *Runner) settle() error {
	if !r.direct.busy {
		return nil
	}
	err := r.direct.call.Settle(false)
	r.direct.busy = err != nil
	return err
}

// leave ends a load-store plan. When it returns, no peer's data counts that was read from the
// call's buffers afterwards, and nothing here touches them.
func (r *Runner) leave() {
	if r.mapped.begun {
		r.mapped.exposure.Withdraw()
	}
	if r.direct.busy {
		r.direct.call.Settle(true) // an error of the stream does not matter any more
	}
	r.direct.call, r.direct.busy = nil, false
	r.mapped.close()
}
