package membership

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// MaxSlots is the largest number of slots of a view. Its encoding fits into one value of the store
// (64 KiB), see View.Encode.
const MaxSlots = 4096

// Peer is one incarnation of one rank.
type Peer struct {
	Slot        int
	Incarnation uint64
}

// String returns "3/9f", the incarnation in hexadecimal.
func (p Peer) String() string { return fmt.Sprintf("%d/%x", p.Slot, p.Incarnation) }

// Slot is the state of one rank in a view.
type Slot struct {
	Incarnation uint64 // of the active one; 0: the slot is inactive
	Since       uint64 // epoch in which it became active; 0 if inactive
	Left        uint64 // epoch in which an incarnation last left this slot; 0: none did. Never above Since while active
}

// View lists the slots that are active in an epoch, and their incarnations. It is a value: its
// methods return new views, and Slots is immutable after the view was passed on. Two views of the
// same epoch of a job are equal.
type View struct {
	Epoch uint64
	Slots []Slot
}

// First is the view with which a job begins: epoch 1, slot i active by incarnations[i], or inactive
// if that is 0.
func First(incarnations []uint64) View {
	v := View{Epoch: 1, Slots: make([]Slot, len(incarnations))}
	for i, inc := range incarnations {
		if inc != 0 {
			v.Slots[i] = Slot{Incarnation: inc, Since: 1}
		}
	}
	return v
}

// Size is the number of slots, active or not.
func (v View) Size() int { return len(v.Slots) }

// Active returns the active slots in ascending order. The slice is the caller's.
func (v View) Active() []int {
	active := make([]int, 0, len(v.Slots))
	for i, s := range v.Slots {
		if s.Incarnation != 0 {
			active = append(active, i)
		}
	}
	return active
}

// Has reports whether this incarnation of slot is active.
func (v View) Has(slot int, incarnation uint64) bool {
	return incarnation != 0 && v.at(slot).Incarnation == incarnation
}

func (v View) at(slot int) Slot {
	if slot < 0 || slot >= len(v.Slots) {
		return Slot{}
	}
	return v.Slots[slot]
}

// Remove returns the view of the next epoch without the incarnations in slots.
func (v View) Remove(slots ...int) View { return v.change(slots, nil) }

// Add returns the view of the next epoch with these incarnations, at most one of each slot. One in
// an active slot replaces the incarnation there; slots beyond Size grow the view.
func (v View) Add(incarnations ...Peer) View { return v.change(nil, incarnations) }

// Grow returns the view of the next epoch with size slots, the new ones inactive. A view never
// shrinks; size is at most MaxSlots.
func (v View) Grow(size int) View {
	next := v.change(nil, nil)
	next.grow(min(size, MaxSlots))
	return next
}

func (v *View) grow(size int) {
	if n := size - len(v.Slots); n > 0 {
		v.Slots = append(v.Slots, make([]Slot, n)...)
	}
}

// change removes and adds in one epoch.
func (v View) change(out []int, in []Peer) View {
	next := View{Epoch: v.Epoch + 1, Slots: slices.Clone(v.Slots)}
	for _, s := range out {
		if next.at(s).Incarnation != 0 {
			next.Slots[s] = Slot{Left: next.Epoch}
		}
	}
	for _, p := range in {
		if p.Incarnation == 0 || p.Slot < 0 || p.Slot >= MaxSlots {
			continue
		}
		next.grow(p.Slot + 1)
		s := &next.Slots[p.Slot]
		if s.Incarnation == p.Incarnation {
			continue
		}
		if s.Incarnation != 0 {
			s.Left = next.Epoch
		}
		s.Incarnation, s.Since = p.Incarnation, next.Epoch
	}
	return next
}

// Diff compares v with an older view. It returns the slots that an incarnation has left since, and
// the slots that one has entered since and is in; both ascending. A slot may be in both. It needs
// no view in between; a slot that was entered and left in between is among the left.
func (v View) Diff(epoch uint64) (left, entered []int) {
	for i, s := range v.Slots {
		if s.Left > epoch {
			left = append(left, i)
		}
		if s.Since > epoch {
			entered = append(entered, i)
		}
	}
	return left, entered
}

// Subset returns the view of a subgroup that was made of incarnations[i] in the slots ranks[i]: the
// members whose incarnation is still in v, in the order of ranks, and the subgroup's own epoch, the
// last in which the slot of a lost member was left; 0 while all are there. Every process with the
// view v computes the same, even if it skipped views, and later views never yield a lower epoch.
// active belongs to the caller.
func (v View) Subset(ranks []int, incarnations []uint64) (active []int, epoch uint64) {
	for i, r := range ranks {
		if i < len(incarnations) && v.Has(r, incarnations[i]) {
			active = append(active, r)
		} else {
			epoch = max(epoch, v.at(r).Left)
		}
	}
	return active, epoch
}

// Equal reports whether two views have equal epochs and slots.
func (v View) Equal(o View) bool { return v.Epoch == o.Epoch && slices.Equal(v.Slots, o.Slots) }

// String returns "epoch 7: ranks 0-2,5 of 8".
func (v View) String() string {
	return fmt.Sprintf("epoch %d: ranks %s of %d", v.Epoch, ranges(v.Active()), len(v.Slots))
}

// ranges writes ascending numbers as "0-2,5", or "none".
func ranges(a []int) string {
	if len(a) == 0 {
		return "none"
	}
	var b strings.Builder
	for i := 0; i < len(a); {
		j := i
		for j+1 < len(a) && a[j+1] == a[j]+1 {
			j++
		}
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.Itoa(a[i]))
		if j > i {
			b.WriteByte('-')
			b.WriteString(strconv.Itoa(a[j]))
		}
		i = j + 1
	}
	return b.String()
}

// The first byte of each encoding: its kind and version.
const (
	magicView   = 0xA1
	magicReport = 0xB1
)

// Encode returns the canonical binary form: equal views have equal bytes, so that a
// compare-and-swap of bytes is one of views. An active slot takes 8 bytes and two numbers: how many
// epochs ago it became active, and how many before that it was left. A number takes one byte up to
// 126, two up to 16 Ki, three up to 2 Mi: MaxSlots slots stay below 64 KiB as long as the changes
// that they record are less than two million epochs apart. The bytes belong to the caller.
func (v View) Encode() []byte {
	b := make([]byte, 0, 16+12*len(v.Slots))
	b = append(b, magicView)
	b = binary.AppendUvarint(b, v.Epoch)
	b = binary.AppendUvarint(b, uint64(len(v.Slots)))
	for _, s := range v.Slots {
		last := v.Epoch
		if s.Incarnation == 0 {
			b = append(b, 0)
		} else {
			b = binary.AppendUvarint(b, v.Epoch-s.Since+1)
			b = binary.BigEndian.AppendUint64(b, s.Incarnation)
			last = s.Since
		}
		if s.Left == 0 {
			b = append(b, 0)
		} else {
			b = binary.AppendUvarint(b, last-s.Left+1)
		}
	}
	return b
}

// DecodeView is the inverse of Encode. It accepts only the result of Encode for a valid view; any
// other input is an error that says why.
func DecodeView(b []byte) (View, error) {
	r := reader{b: b}
	r.magic(magicView)
	v := View{Epoch: r.uvarint()}
	n := r.count(MaxSlots, 2)
	if r.err == nil && v.Epoch == 0 {
		r.fail("epoch 0")
	}
	if r.err == nil {
		v.Slots = make([]Slot, n)
	}
	for i := range v.Slots {
		s, last := &v.Slots[i], v.Epoch
		if age := r.uvarint(); age > v.Epoch {
			r.fail(fmt.Sprintf("slot %d became active before epoch 1", i))
		} else if age > 0 {
			s.Since = v.Epoch - age + 1
			last = s.Since
			if s.Incarnation = r.uint64(); s.Incarnation == 0 {
				r.fail(fmt.Sprintf("slot %d is active without an incarnation", i))
			}
		}
		if gap := r.uvarint(); gap > last {
			r.fail(fmt.Sprintf("slot %d was left before epoch 1", i))
		} else if gap > 0 {
			s.Left = last - gap + 1
		}
	}
	if err := r.done(); err != nil {
		return View{}, fmt.Errorf("not an encoded view (%d bytes): %w", len(b), err)
	}
	if !bytes.Equal(v.Encode(), b) {
		return View{}, fmt.Errorf("not an encoded view (%d bytes): a number has more digits than it needs", len(b))
	}
	return v, nil
}

// check returns why v is invalid, or nil.
func (v View) check() error {
	if v.Epoch == 0 || len(v.Slots) > MaxSlots {
		return fmt.Errorf("epoch %d with %d slots: expected an epoch of 1 or more and at most %d slots", v.Epoch,
			len(v.Slots), MaxSlots)
	}
	for i, s := range v.Slots {
		active := s.Incarnation != 0
		if active != (s.Since != 0) || s.Since > v.Epoch || s.Left > v.Epoch || active && s.Left > s.Since {
			return fmt.Errorf("epoch %d: slot %d (incarnation %x, active since %d, left in %d) contradicts itself",
				v.Epoch, i, s.Incarnation, s.Since, s.Left)
		}
	}
	return nil
}

// Encode returns the canonical binary form of a report, its peers ascending by slot. A report that
// names every slot of the largest view once stays below 64 KiB. The bytes belong to the caller.
func (r Report) Encode() []byte {
	b := make([]byte, 0, 24+10*len(r.Unreachable))
	b = append(b, magicReport)
	b = binary.AppendUvarint(b, r.Epoch)
	b = binary.AppendUvarint(b, r.Seq)
	b = appendPeers(b, r.Unreachable)
	return appendPeers(b, r.Late)
}

func appendPeers(b []byte, peers []Peer) []byte {
	b = binary.AppendUvarint(b, uint64(len(peers)))
	next := 0
	for _, p := range peers {
		b = binary.AppendUvarint(b, uint64(p.Slot-next))
		b = binary.BigEndian.AppendUint64(b, p.Incarnation)
		next = p.Slot + 1
	}
	return b
}

// DecodeReport is the inverse of Report.Encode, and as strict as DecodeView.
func DecodeReport(b []byte) (Report, error) {
	r := reader{b: b}
	r.magic(magicReport)
	rep := Report{Epoch: r.uvarint(), Seq: r.uvarint()}
	rep.Unreachable = r.peers()
	rep.Late = r.peers()
	if err := r.done(); err != nil {
		return Report{}, fmt.Errorf("not an encoded report (%d bytes): %w", len(b), err)
	}
	if !bytes.Equal(rep.Encode(), b) {
		return Report{}, fmt.Errorf("not an encoded report (%d bytes): a number has more digits than it needs", len(b))
	}
	return rep, nil
}

// peers reads a list of incarnations, ascending by slot.
func (r *reader) peers() (all []Peer) {
	n := r.count(MaxSlots, 9)
	if r.err == nil && n > 0 {
		all = make([]Peer, n)
	}
	next := uint64(0)
	for i := range all {
		skip := r.uvarint()
		if skip >= MaxSlots || next+skip >= MaxSlots {
			r.fail(fmt.Sprintf("a slot beyond %d", MaxSlots-1))
			break
		}
		all[i] = Peer{int(next + skip), r.uint64()}
		if all[i].Incarnation == 0 {
			r.fail(fmt.Sprintf("slot %d without an incarnation", next+skip))
		}
		next += skip + 1
	}
	return all
}

// reader reads fields of b. The first error stays, and all later reads return 0.
type reader struct {
	b   []byte
	err error
}

func (r *reader) fail(why string) {
	if r.err == nil {
		r.err = errors.New(why)
	}
	r.b = nil
}

func (r *reader) magic(want byte) {
	switch {
	case len(r.b) == 0:
		r.fail(fmt.Sprintf("it is empty, expected that it begins with %#x", want))
		return
	case r.b[0] != want:
		r.fail(fmt.Sprintf("it begins with %#x, expected %#x", r.b[0], want))
		return
	}
	r.b = r.b[1:]
}

func (r *reader) uvarint() uint64 {
	x, n := binary.Uvarint(r.b)
	if n <= 0 {
		r.fail("it ends within a number, or the number is too large")
		return 0
	}
	r.b = r.b[n:]
	return x
}

func (r *reader) uint64() uint64 {
	if len(r.b) < 8 {
		r.fail("it ends within an incarnation")
		return 0
	}
	x := binary.BigEndian.Uint64(r.b)
	r.b = r.b[8:]
	return x
}

// count reads a number of items of at least size bytes each, and checks that they can follow.
func (r *reader) count(most, size int) int {
	n := r.uvarint()
	if n > uint64(most) || n > uint64(len(r.b)/size) {
		r.fail(fmt.Sprintf("%d items announced, %d bytes follow (at most %d items)", n, len(r.b), most))
		return 0
	}
	return int(n)
}

func (r *reader) done() error {
	if r.err == nil && len(r.b) > 0 {
		r.fail(fmt.Sprintf("%d bytes too many", len(r.b)))
	}
	return r.err
}
