// Command gen writes the amd64 kernels: kernels_amd64.s and its declarations, and the table that
// finds them. Run it through go generate in package kernels.
//
// Every kernel has one shape. A step is what one group of registers holds of one source; a block is
// several steps. The kernel walks the elements block by block and, inside a block, source by
// source: each source is read once, each result is stored once, whatever the number of sources, and
// nothing but registers holds what lies between. What remains is done step by step, the last step
// under a mask (AVX-512) or by the portable kernel (AVX2).
//
// The code of the sources inside a block is not a loop but is written out for several of them, and
// a branch that is always predicted leaves after the last: processors prefetch by the address of
// the load instruction, and one load that goes from buffer to buffer looks to them like no stream
// at all. Written so, the kernels need no prefetches of their own.
//
// All blocks of a kernel end in the same code. What only some calls need, such as the division of
// Avg, stands behind the end of the function; flags in mode select it. Operations that differ in
// nothing else share a kernel: Avg is Sum with a division, Float16 and BFloat16 share Min and Max,
// and the operations on bools are those on bytes.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"go/format"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/mmcloughlin/avo/attr"
	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/ir"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// The signatures. avo evaluates them without imports, so unsafe.Pointer is written uintptr here and
// put right afterwards.
const (
	kernelSig  = "func(dst, srcs uintptr, k, lo, hi, div, mode int)"
	convertSig = "func(dst, src uintptr, n int)"
)

var declarations []string // of the functions, in Go

// text begins a function.
func text(name, sig string) {
	TEXT(name, attr.NOSPLIT, sig)
	sig = strings.Replace(sig, "dst, srcs uintptr", "dst unsafe.Pointer, srcs *unsafe.Pointer", 1)
	sig = strings.Replace(sig, "dst, src uintptr", "dst, src unsafe.Pointer", 1)
	declarations = append(declarations, "//go:noescape\nfunc "+name+strings.TrimPrefix(sig, "func")+"\n")
}

// isa is a level of the instruction set. Code for both differs where AVX-512 has an instruction or
// a mask to offer.
type isa struct {
	name  string
	width int // bytes of a vector
	wide  bool
}

// slots is the number of sources that have loads of their own in a block.
const slots = 4

func (i isa) vec() reg.VecVirtual {
	if i.wide {
		return ZMM()
	}
	return YMM()
}

// bcast fills a vector with a 32-bit constant.
func (i isa) bcast(v uint32) reg.VecVirtual {
	d := i.vec()
	VPBROADCASTD(constant(fmt.Sprintf("c%08x", v), U32(v)), d)
	return d
}

func (i isa) bcast64(v uint64) reg.VecVirtual {
	d := i.vec()
	VPBROADCASTQ(constant(fmt.Sprintf("c%016x", v), U64(v)), d)
	return d
}

// constants are the data that constant has been asked for.
var constants = map[string][]Constant{}

// constant returns the address of data that have the name.
func constant(name string, data ...Constant) Mem {
	constants[name] = data
	return NewDataAddr(Symbol{Name: name, Static: true}, 0)
}

// writeConstants defines what constant was asked for.
func writeConstants() {
	for _, name := range slices.Sorted(maps.Keys(constants)) {
		GLOBL(name, attr.RODATA|attr.NOPTR)
		at := 0
		for _, c := range constants[name] {
			DATA(at, c)
			at += c.Bytes()
		}
	}
}

func (i isa) and(a Op, b, d Op) {
	if i.wide {
		VPANDD(a, b, d)
	} else {
		VPAND(a, b, d)
	}
}

func (i isa) or(a Op, b, d Op) {
	if i.wide {
		VPORD(a, b, d)
	} else {
		VPOR(a, b, d)
	}
}

func (i isa) xor(a Op, b, d Op) {
	if i.wide {
		VPXORD(a, b, d)
	} else {
		VPXOR(a, b, d)
	}
}

// imm is the constant n >= 0 in as few bytes as instructions have for it.
func imm(n int) Constant {
	if n < 128 {
		return U8(n)
	}
	return U32(n)
}

// lane is the type that the arithmetic is done in: 'i' and 'u' integers, 'f' floats, 'b' bools.
type lane struct {
	kind byte
	size int
}

// loadMasked loads the elements of the mask, of size bytes, and zeroes the others.
func loadMasked(size int, m, k, d Op) {
	switch size {
	case 1:
		VMOVDQU8_Z(m, k, d)
	case 2:
		VMOVDQU16_Z(m, k, d)
	case 4:
		VMOVDQU32_Z(m, k, d)
	case 8:
		VMOVDQU64_Z(m, k, d)
	}
}

func storeMasked(size int, s, k, m Op) {
	switch size {
	case 1:
		VMOVDQU8(s, k, m)
	case 2:
		VMOVDQU16(s, k, m)
	case 4:
		VMOVDQU32(s, k, m)
	case 8:
		VMOVDQU64(s, k, m)
	}
}

// store writes a vector of any width.
func store(s, m Op) {
	if IsZMM(s) {
		VMOVDQU64(s, m)
	} else {
		VMOVDQU(s, m)
	}
}

func load(m, d Op) {
	if IsZMM(d) {
		VMOVDQU64(m, d)
	} else {
		VMOVDQU(m, d)
	}
}

// A storage says how elements lie in memory and how they come into and out of the registers of one
// step.
type storage struct {
	size  int // bytes of an element
	lanes int // elements of a step
	regs  int // registers of a step
	block int // steps of a block
	// heavy: a source takes so many instructions that its memory is not what the kernel waits for
	heavy bool
	// direct: the elements are used as they lie, an instruction may take them from memory
	direct bool
	// load reads a step; k is the mask or nil
	load func(m Mem, k Op, d []reg.VecVirtual)
	// pack makes a step of results ready to be stored and may destroy a
	pack func(a []reg.VecVirtual) Op
	// save packs a step and stores it with one instruction, if there is such a one
	save func(a []reg.VecVirtual, m Mem)
	// quick, if there is one, packs a block and leaves acc alone, or jumps to the label inexact
	// where only pack is right
	quick func(acc [][]reg.VecVirtual, inexact string) []Op
}

// write stores what pack returned; k is the mask or nil.
func (s storage) write(v Op, m Mem, k Op) {
	switch {
	case k != nil:
		storeMasked(s.size, v, k, m)
	case s.lanes*s.size == 8:
		VMOVQ(v, m)
	default:
		store(v, m)
	}
}

// plain packs what needs no packing.
func plain(a []reg.VecVirtual) Op { return a[0] }

// native is the storage of types that have instructions of their own.
func (i isa) native(size int) storage {
	s := storage{size: size, lanes: i.width / size, regs: 1, block: 256 / i.width, direct: true, pack: plain}
	s.save = func(a []reg.VecVirtual, m Mem) { store(a[0], m) }
	s.load = func(m Mem, k Op, d []reg.VecVirtual) {
		if k != nil {
			loadMasked(size, m, k, d[0])
		} else {
			load(m, d[0])
		}
	}
	return s
}

// flipped is the storage of integers for a kernel of Min that does Max too, and both for the
// integers of the other signedness: some bits of all elements are inverted. The rows are Min and
// Max of the kernel's own kind, then of the other one.
func (i isa) flipped(size int) storage {
	s := i.native(size)
	s.direct, s.save = false, nil
	top := uint64(0x8080808080808080)
	switch size {
	case 2:
		top = 0x8000800080008000
	case 4:
		top = 0x8000000080000000
	case 8:
		top = 1 << 63
	}
	base, kind := choose(fmt.Sprintf("flip%d", size), U64(0), U64(1<<64-1), U64(top), U64(^top))
	flip := i.vec()
	VPBROADCASTQ(Mem{Base: base, Index: kind, Scale: 1}, flip)
	bits := s.load
	s.load = func(m Mem, k Op, d []reg.VecVirtual) {
		if k != nil {
			bits(m, k, d)
			i.xor(d[0], flip, d[0])
		} else {
			i.xor(m, flip, d[0])
		}
	}
	s.pack = func(a []reg.VecVirtual) Op {
		i.xor(flip, a[0], a[0])
		return a[0]
	}
	return s
}

// truths is the storage of bools as 0 and 1: any byte but 0 is true.
func (i isa) truths() storage {
	s := i.native(1)
	s.direct = false
	ones, bytes := i.bcast(0x01010101), s.load
	s.load = func(m Mem, k Op, d []reg.VecVirtual) {
		bytes(m, k, d)
		VPMINUB(ones, d[0], d[0])
	}
	return s
}

// half is the lower half of a vector.
func (i isa) half(v reg.VecVirtual) Op {
	if i.wide {
		return v.AsY()
	}
	return v.AsX()
}

// f16 converts with the instructions for it.
func (i isa) f16() storage {
	s := storage{size: 2, lanes: i.width / 4, regs: 1, block: 8}
	s.load = func(m Mem, k Op, d []reg.VecVirtual) {
		if k == nil {
			VCVTPH2PS(m, d[0])
			return
		}
		loadMasked(2, m, k, i.half(d[0]))
		VCVTPH2PS(i.half(d[0]), d[0])
	}
	s.pack = func(a []reg.VecVirtual) Op {
		h := i.half(a[0])
		VCVTPS2PH(Imm(0), a[0], h)
		return h
	}
	s.save = func(a []reg.VecVirtual, m Mem) { VCVTPS2PH(Imm(0), a[0], m) }
	return s
}

// ordered is the storage of 16-bit floats, of both kinds, for Min and Max. It makes them integers
// of the same order, with -0 before +0: all bits but the sign of negative ones are inverted. The
// distance from infinity to the last pattern is then added or subtracted, which carries the NaNs of
// the other sign around, so that all NaNs come before (Min) or after (Max) the numbers and one of
// them is the result if there is any.
func (i isa) ordered(max bool) storage {
	s := storage{size: 2, lanes: i.width / 2, regs: 1, block: 4}
	var table []Constant // for Float16 and for BFloat16
	name := "orderMin"
	for _, inf := range []uint16{0x7c00, 0x7f80} {
		shift := 0x7fff - inf
		last := 0x7fff - inf - 1 - inf // where -infinity is
		if max {
			name = "orderMax"
			shift, last = -shift, inf-shift
		}
		table = append(table, U16(shift), U16(last), U16(inf|inf>>1), U16(0))
	}
	base, kind := choose(name, table...)
	shift, last, canon := i.vec(), i.vec(), i.vec()
	for j, v := range []reg.VecVirtual{shift, last, canon} {
		VPBROADCASTW(Mem{Base: base, Index: kind, Scale: 1, Disp: 2 * j}, v)
	}
	magnitude := i.bcast(0x7fff7fff)
	exchange := func(x reg.VecVirtual) { // between floats and integers, in both directions
		t := i.vec()
		VPSRAW(Imm(15), x, t)
		if i.wide {
			VPTERNLOGD(Imm(0x78), magnitude, t, x) // x ^ t&magnitude
		} else {
			VPAND(magnitude, t, t)
			VPXOR(t, x, x)
		}
	}
	s.load = func(m Mem, k Op, d []reg.VecVirtual) {
		if k != nil {
			loadMasked(2, m, k, d[0])
		} else {
			load(m, d[0])
		}
		exchange(d[0])
		VPADDW(shift, d[0], d[0])
	}
	s.pack = func(a []reg.VecVirtual) Op {
		x, small, large := a[0], Op(a[0]), Op(last)
		if max {
			small, large = large, small
		}
		if i.wide {
			nan := K()
			VPCMPGTW(small, large, nan)
			VPSUBW(shift, x, x)
			exchange(x)
			VMOVDQU16(canon, nan, x)
		} else {
			nan := i.vec()
			VPCMPGTW(small, large, nan)
			VPSUBW(shift, x, x)
			exchange(x)
			VPBLENDVB(nan, canon, x, x)
		}
		return x
	}
	return s
}

// rounder returns code that rounds float32 to bfloat16 in the upper halves, and leaves anything in
// the lower ones. It adds a little less than half a unit and the last bit that stays. That carries
// nothing into a NaN whose lower half is 0, as it is in all that operations on bfloat16 yield: one
// of their operands, widened, or the NaN of x86. anyNaN says that there are others: they are cut
// off, not rounded, and made quiet.
func (i isa) rounder(anyNaN bool) func(x reg.VecVirtual) {
	one, half := i.bcast(1), i.bcast(0x7fff)
	var quiet, last reg.VecVirtual
	if anyNaN {
		quiet = i.bcast(1 << 22)
	}
	if i.wide {
		last = i.bcast(1 << 16)
	}
	return func(x reg.VecVirtual) {
		switch {
		case i.wide && anyNaN:
			number, nan, odd := K(), K(), K()
			VCMPPS(Imm(7), x, x, number) // ordered
			VPTESTMD(last, x, number, odd)
			KNOTW(number, nan)
			VPORD(quiet, x, nan, x)
			VPADDD(half, x, number, x)
			VPADDD(one, x, odd, x)
		case i.wide:
			odd := K()
			VPTESTMD(last, x, odd)
			VPADDD(half, x, x)
			VPADDD(one, x, odd, x)
		default:
			t := i.vec()
			VPSRLD(Imm(16), x, t)
			VPAND(one, t, t)
			VPADDD(half, t, t)
			if anyNaN {
				number := i.vec()
				VCMPPS(Imm(7), x, x, number)
				VPAND(number, t, t)
				VPANDN(quiet, number, number)
				VPOR(number, x, x)
			}
			VPADDD(t, x, x)
		}
	}
}

// bf16 widens the even elements of a vector into one register and the odd ones into another, so
// that nothing crosses lanes.
func (i isa) bf16() storage {
	s := storage{size: 2, lanes: i.width / 2, regs: 2, block: 4}
	if !i.wide {
		s.block = 2
	}
	upper, round := i.bcast(0xffff0000), i.rounder(false)
	s.load = func(m Mem, k Op, d []reg.VecVirtual) {
		if k != nil {
			loadMasked(2, m, k, d[1])
		} else {
			load(m, d[1])
		}
		VPSLLD(Imm(16), d[1], d[0])
		i.and(upper, d[1], d[1])
	}
	s.pack = func(a []reg.VecVirtual) Op {
		round(a[0])
		round(a[1])
		VPSRLD(Imm(16), a[0], a[0])
		if i.wide {
			VPTERNLOGD(Imm(0xf8), upper, a[1], a[0]) // a0 | a1&upper
		} else {
			VPBLENDW(Imm(0xaa), a[1], a[0], a[0])
		}
		return a[0]
	}
	return s
}

// bf16Native is bfloat16 with the instruction of AVX512_BF16. It rounds and treats NaNs as we do,
// but takes subnormals for zeros; a block with a zero among its results is therefore rounded again,
// the long way. Widening is by interleaving with zeros, the cheapest there is on Zen 5: inside each
// 16 bytes one register holds the lower elements, another the upper ones.
func (i isa) bf16Native() storage {
	s := storage{size: 2, lanes: i.width / 2, regs: 2, block: 4}
	round, zero, mag, order := i.rounder(false), i.bcast(0), i.bcast(0x7fff7fff), i.vec()
	var halves []Constant // the order in which VPERMQ brings the halves of a vector together
	for j := range 8 {
		halves = append(halves, U64(j/2+j%2*4))
	}
	VMOVDQU64(constant("interleave", halves...), order)
	s.load = func(m Mem, k Op, d []reg.VecVirtual) {
		if k != nil {
			loadMasked(2, m, k, d[1])
		} else {
			load(m, d[1])
		}
		VPUNPCKLWD(d[1], zero, d[0])
		VPUNPCKHWD(d[1], zero, d[1])
	}
	s.pack = func(a []reg.VecVirtual) Op {
		for _, x := range a {
			round(x)
			VPSRLD(Imm(16), x, x)
		}
		VPACKUSDW(a[1], a[0], a[0])
		return a[0]
	}
	s.quick = func(acc [][]reg.VecVirtual, inexact string) (packed []Op) {
		nonzero := K()
		for j, a := range acc {
			x := i.vec()
			vcvtne2ps2bf16(a[0], a[1], x) // all the lower elements, then all the upper ones
			if j == 0 {
				VPTESTMW(mag, x, nonzero)
			} else {
				VPTESTMW(mag, x, nonzero, nonzero)
			}
			VPERMQ(x, order, x)
			packed = append(packed, x)
		}
		KORTESTD(nonzero, nonzero)
		JCC(LabelRef(inexact)) // not all ones
		return packed
	}
	return s
}

// vcvtne2ps2bf16 rounds lo into the lower half of d and hi into the upper one. Neither avo nor Go's
// assembler knows the instruction: it goes through the registers' allocation under its name and is
// encoded afterwards, by encode.
func vcvtne2ps2bf16(lo, hi, d reg.VecVirtual) {
	Instruction(&ir.Instruction{Opcode: "VCVTNE2PS2BF16", Operands: []Op{lo, hi, d}, Inputs: []Op{lo, hi},
		Outputs: []Op{d}})
}

var vcvt = regexp.MustCompile(`VCVTNE2PS2BF16 +Z(\d+), Z(\d+), Z(\d+)`)

// encode replaces the instructions that the assembler lacks: EVEX.512.F2.0F38.W0 72 /r.
func encode(asm []byte) []byte {
	return vcvt.ReplaceAllFunc(asm, func(line []byte) []byte {
		var r [3]byte // the last operand first, as processors count
		for j, m := range vcvt.FindSubmatch(line)[1:] {
			n, _ := strconv.Atoi(string(m))
			r[2-j] = byte(n)
		}
		bit := func(r, from byte, to int) byte { return (^r >> from & 1) << to }
		code := [6]byte{0x62,
			bit(r[0], 3, 7) | bit(r[2], 4, 6) | bit(r[2], 3, 5) | bit(r[0], 4, 4) | 2,
			(^r[1]&15)<<3 | 7,
			0x40 | bit(r[1], 4, 3),
			0x72,
			0xc0 | r[0]&7<<3 | r[2]&7}
		var b []byte
		for _, c := range code {
			b = fmt.Appendf(b, "BYTE $0x%02x; ", c)
		}
		return append(append(b, "// "...), line...)
	})
}

// f8 goes through float16, whose upper half E5M2 is and into which E4M3 fits but for a factor of
// 2^8. Rounding twice would be wrong; therefore float16 is rounded to odd (Boldo and Melquiond,
// "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008):
// truncated, and its last bit set if anything was lost.
func (i isa) f8(e4m3 bool) storage {
	s := storage{size: 1, lanes: i.width / 4, regs: 1, block: 2, heavy: true}
	words := func() reg.VecVirtual { // a vector of lanes 16-bit words
		if i.wide {
			return YMM()
		}
		return XMM()
	}
	bcast := func(v uint16) reg.VecVirtual {
		d := words()
		VPBROADCASTW(constant(fmt.Sprintf("c%04x", v), U16(v)), d)
		return d
	}
	var up, down, nan, magF, magic reg.VecVirtual
	shift, limit := uint64(8), uint16(0x7e) // the limit is where all NaNs go
	if e4m3 {
		shift, limit = 7, 0x7f
		up, down = i.bcast(0x43800000), i.bcast(0x3b800000) // 2^8, 2^-8
		magF, magic = i.bcast(0x7fffffff), i.bcast(0x43f00000)
		nan = i.bcast(0x7fc00000)
	}
	field, one, half, mag, lim := bcast(0xbf80), bcast(1), bcast(1<<(shift-1)-1), bcast(0x7fff), bcast(limit)
	s.load = func(m Mem, k Op, d []reg.VecVirtual) {
		h, b := words(), XMM()
		switch {
		case k != nil:
			loadMasked(1, m, k, b)
		case i.wide:
			VMOVDQU(m, b)
		default:
			VMOVQ(m, b)
		}
		if !e4m3 {
			VPMOVZXBW(b, h)
			VPSLLW(Imm(8), h, h)
			VCVTPH2PS(h, d[0])
			return
		}
		VPMOVSXBW(b, h) // the sign arrives in bit 15, where float16 has it
		VPSLLW(Imm(7), h, h)
		if i.wide {
			VPANDD(field.AsY(), h, h)
		} else {
			VPAND(field, h, h)
		}
		VCVTPH2PS(h, d[0])
		VMULPS(up, d[0], d[0])
		t := i.vec() // 480 is what the pattern of NaN looks like
		i.and(magF, d[0], t)
		if i.wide {
			n := K()
			VCMPPS(Imm(0), magic, t, n)
			VPORD(nan, d[0], n, d[0])
		} else {
			VCMPPS(Imm(0), magic, t, t)
			VPAND(nan, t, t)
			VPOR(t, d[0], d[0])
		}
	}
	s.pack = func(a []reg.VecVirtual) Op {
		x, back, h, t := a[0], i.vec(), words(), words()
		if e4m3 {
			VMULPS(down, x, x)
		}
		VCVTPS2PH(Imm(3), x, h) // truncated
		VCVTPH2PS(h, back)
		if i.wide {
			lost := K()
			VCMPPS(Imm(4), x, back, lost)
			VMOVDQU16_Z(one, lost, t)
		} else {
			hi := XMM()
			VCMPPS(Imm(4), x, back, back)
			VEXTRACTI128(Imm(1), back, hi)
			VPACKSSDW(hi, back.AsX(), t)
			VPSRLW(Imm(15), t, t)
		}
		VPOR(t, h, h)
		VPAND(mag, h, t)
		r := words()
		VPSRLW(Imm(shift), t, r)
		VPAND(one, r, r)
		VPADDW(half, r, r)
		VPADDW(t, r, r)
		VPSRLW(Imm(shift), r, r)
		VPMINUW(lim, r, r)
		VPSRLW(Imm(15), h, h)
		VPSLLW(Imm(7), h, h)
		VPOR(h, r, r)
		b := XMM()
		if i.wide {
			VPMOVWB(r, b)
		} else {
			VPACKUSWB(r, r, b)
		}
		return b
	}
	return s
}

// An operator folds a source into an accumulator.
type operator struct {
	// apply sets acc = acc op x. x may be memory if direct.
	apply  func(x Op, acc reg.VecVirtual)
	direct bool
	// heavy: it takes so many instructions that memory is not what the kernel waits for
	heavy bool
	// finish is done after the last source in calls whose mode has the flag; nil if there is
	// nothing to do
	flag   uint8
	finish func(acc []reg.VecVirtual)
}

// The flags of mode, as in package kernels.
const (
	divide = 1
	truth  = 2
)

// row is the bytes of a row of the table that row reads.
const row = 8

// choose returns the address of that row of the table which mode, above its flags, has the number
// of. It is base+index.
func choose(name string, table ...Constant) (base, index reg.GPVirtual) {
	index, base = GP64(), GP64()
	Load(Param("mode"), index)
	LEAQ(constant(name, table...), base)
	ANDL(I8(-row), index.As32())
	return base, index
}

// truthful adds to o what bools need that were combined as bytes: any byte but 0 becomes 1.
func (i isa) truthful(o operator) operator {
	o.flag, o.finish = truth, func(acc []reg.VecVirtual) {
		ones := i.bcast(0x01010101)
		for _, a := range acc {
			VPMINUB(ones, a, a)
		}
	}
	return o
}

func (i isa) operator(op string, l lane) operator {
	simple := func(f func(...Op)) operator {
		return operator{apply: func(x Op, acc reg.VecVirtual) { f(x, acc, acc) }, direct: true}
	}
	index := map[int]int{1: 0, 2: 1, 4: 2, 8: 3}[l.size]
	switch {
	case op == "and":
		return operator{apply: func(x Op, acc reg.VecVirtual) { i.and(x, acc, acc) }, direct: true}
	case op == "or":
		return operator{apply: func(x Op, acc reg.VecVirtual) { i.or(x, acc, acc) }, direct: true}
	case op == "xor":
		return operator{apply: func(x Op, acc reg.VecVirtual) { i.xor(x, acc, acc) }, direct: true}
	case l.kind == 'f' && op == "sum":
		o := simple([]func(...Op){2: VADDPS, 3: VADDPD}[index])
		n, x, by := GP64(), XMM(), i.vec()
		Load(Param("div"), n)
		VXORPS(x, x, x)
		quotient := VDIVPS
		if l.size == 4 {
			VCVTSI2SSQ(n, x, x)
			VBROADCASTSS(x, by)
		} else {
			VCVTSI2SDQ(n, x, x)
			VBROADCASTSD(x, by)
			quotient = VDIVPD
		}
		o.flag, o.finish = divide, func(acc []reg.VecVirtual) {
			for _, a := range acc {
				quotient(by, a, a)
			}
		}
		return o
	case l.kind == 'f' && op == "prod":
		return simple([]func(...Op){2: VMULPS, 3: VMULPD}[index])
	case l.kind == 'f':
		return i.floatMinMax(op == "max", l.size == 8)
	case op == "sum":
		return simple([]func(...Op){VPADDB, VPADDW, VPADDD, VPADDQ}[index])
	case op == "prod" && l.size == 1:
		odd := i.bcast(0xff00ff00)
		return operator{heavy: true, apply: func(x Op, acc reg.VecVirtual) {
			// The odd bytes are multiplied in the upper half of their word, the even ones in the
			// lower.
			a, b := i.vec(), i.vec()
			i.and(odd, acc, a)
			VPSRLW(Imm(8), x, b)
			VPMULLW(b, a, a)
			VPMULLW(x, acc, acc)
			if i.wide {
				VPTERNLOGD(Imm(0xdc), odd, a, acc) // a | acc&^odd
			} else {
				VPANDN(acc, odd, acc)
				VPOR(a, acc, acc)
			}
		}}
	case op == "prod" && l.size == 2:
		return simple(VPMULLW)
	case op == "prod" && l.size == 4:
		return simple(VPMULLD)
	case op == "prod" && i.wide:
		return simple(VPMULLQ)
	case op == "prod":
		return operator{apply: func(x Op, acc reg.VecVirtual) {
			a, b := i.vec(), i.vec()
			VPSRLQ(Imm(32), acc, a)
			VPMULUDQ(x, a, a)
			VPSRLQ(Imm(32), x, b)
			VPMULUDQ(acc, b, b)
			VPADDQ(b, a, a)
			VPSLLQ(Imm(32), a, a)
			VPMULUDQ(x, acc, acc)
			VPADDQ(a, acc, acc)
		}}
	case l.size == 8 && !i.wide: // min, max
		var flip reg.VecVirtual
		if l.kind == 'u' {
			flip = i.bcast64(1 << 63)
		}
		return operator{apply: func(x Op, acc reg.VecVirtual) {
			a, b := Op(acc), x
			if l.kind == 'u' {
				fa, fb := i.vec(), i.vec()
				VPXOR(flip, acc, fa)
				VPXOR(flip, x, fb)
				a, b = fa, fb
			}
			gt := i.vec()
			VPCMPGTQ(b, a, gt) // acc > x
			if op == "min" {
				VBLENDVPD(gt, x, acc, acc)
			} else {
				VBLENDVPD(gt, acc, x, acc)
			}
		}}
	}
	return simple(map[string][]func(...Op){
		"mini": {VPMINSB, VPMINSW, VPMINSD, VPMINSQ}, "minu": {VPMINUB, VPMINUW, VPMINUD, VPMINUQ},
		"maxi": {VPMAXSB, VPMAXSW, VPMAXSD, VPMAXSQ}, "maxu": {VPMAXUB, VPMAXUW, VPMAXUD, VPMAXUQ},
	}[op+string(l.kind)][index])
}

// floatMinMax is IEEE 754-2019's minimum or maximum, with one NaN for all.
func (i isa) floatMinMax(max, double bool) operator {
	var canon reg.VecVirtual
	if double {
		canon = i.bcast64(0x7ff8000000000000)
	} else {
		canon = i.bcast(0x7fc00000)
	}
	pick := func(f32, f64 func(...Op)) func(...Op) {
		if double {
			return f64
		}
		return f32
	}
	cmp := pick(VCMPPS, VCMPPD)
	if i.wide {
		rng := pick(VRANGEPS, VRANGEPD)
		imm := Imm(4) // the smaller one, -0 before +0
		if max {
			imm = Imm(5)
		}
		return operator{direct: true, apply: func(x Op, acc reg.VecVirtual) {
			nan := K()
			cmp(Imm(3), x, acc, nan)
			rng(imm, x, acc, acc)
			if double {
				VMOVDQA64(canon, nan, acc)
			} else {
				VMOVDQA32(canon, nan, acc)
			}
		}}
	}
	return operator{apply: func(x Op, acc reg.VecVirtual) {
		// Both orders agree unless a NaN is there or both are zeros; of zeros each order yields the
		// other one.
		a, b := i.vec(), i.vec()
		if max {
			f := pick(VMAXPS, VMAXPD)
			f(x, acc, a)
			f(acc, x, b)
			VPAND(a, b, a)
		} else {
			f := pick(VMINPS, VMINPD)
			f(x, acc, a)
			f(acc, x, b)
			VPOR(a, b, a)
		}
		cmp(Imm(3), x, acc, b)
		if double {
			VBLENDVPD(b, canon, a, acc)
		} else {
			VBLENDVPS(b, canon, a, acc)
		}
	}}
}

// mask returns the mask of the first rem elements of a step, all if there are more. rem is less
// than 256: BZHI takes 8 bits of it.
func mask(rem reg.Register) reg.OpmaskVirtual {
	m, k := GP64(), K()
	MOVQ(I32(-1), m)
	BZHIQ(rem, m, m)
	KMOVQ(m, k)
	return k
}

// kernel writes one function. make is called inside it, so that constants stand in registers.
func (i isa) kernel(name string, make func() (storage, operator)) string {
	name += i.name
	text(name, kernelSig)
	s, o := make()
	step := s.lanes * s.size // bytes
	dst := Load(Param("dst"), GP64())
	srcs := Load(Param("srcs"), GP64())
	count := Load(Param("k"), GP64())
	pos := Load(Param("lo"), GP64())
	rem := Load(Param("hi"), GP64())
	var mode reg.GPVirtual
	if !s.heavy || o.finish != nil {
		mode = GP64()
		Load(Param("mode"), mode)
	}
	SUBQ(pos, rem)
	if sh := map[int]uint64{2: 1, 4: 2, 8: 3}[s.size]; sh != 0 {
		SHLQ(Imm(sh), pos)
	}
	ADDQ(pos, dst)

	// acc is the accumulators of a block by step, all(n) those of its first n steps.
	var acc [][]reg.VecVirtual
	for range s.block {
		acc = append(acc, i.vecs(s.regs))
	}
	all := func(n int) []reg.VecVirtual { return slices.Concat(acc[:n]...) }
	// first and fold take steps of the source at p into acc.
	at := func(p reg.Register, j int) Mem { return Mem{Base: p, Index: pos, Scale: 1, Disp: j * step} }
	first := func(p reg.Register, steps int, k Op) {
		for j := range steps {
			s.load(at(p, j), k, acc[j])
		}
	}
	fold := func(p reg.Register, steps int, k Op) {
		for j := range steps {
			if s.direct && o.direct && k == nil {
				o.apply(at(p, j), acc[j][0])
				continue
			}
			x := i.vecs(s.regs)
			s.load(at(p, j), k, x)
			for r := range x {
				o.apply(x[r], acc[j][r])
			}
		}
	}
	// test jumps to the label if mode has one of the flags.
	test := func(flags uint8, label string) {
		TESTB(Imm(uint64(flags)), mode.As8())
		JNE(LabelRef(label))
	}
	advance := func(steps int) {
		ADDQ(imm(step*steps), dst)
		ADDQ(imm(step*steps), pos)
		SUBQ(imm(s.lanes*steps), rem)
	}

	// Blocks. rem is less by one block here, so that its sign says whether there is one more.
	var after []func() // what stands behind the end of the function
	block := func() {
		cur, left, p := GP64(), GP64(), GP64()
		align(64)
		Label("block")
		MOVQ(srcs, cur)
		MOVQ(count, left)
		MOVQ(Mem{Base: cur}, p)
		first(p, s.block, nil)
		CMPQ(left, Imm(1))
		JE(LabelRef("finish"))
		Label("sources")
		slots := slots
		if s.heavy || o.heavy {
			slots = 2
		}
		for slot := 1; slot < slots; slot++ {
			align(32)
			MOVQ(Mem{Base: cur, Disp: 8 * slot}, p)
			fold(p, s.block, nil)
			CMPQ(left, Imm(uint64(slot+1)))
			JE(LabelRef("finish"))
		}
		ADDQ(imm(8*(slots-1)), cur)
		SUBQ(imm(slots-1), left)
		JMP(LabelRef("sources"))
	}
	end := func() {
		Label("finish")
		special := func(back string) { // one test for all that is rare
			if o.finish == nil {
				return
			}
			test(o.flag, "special")
			after = append(after, func() {
				Label("special")
				o.finish(all(s.block))
				JMP(LabelRef(back))
			})
			Label(back)
		}
		if s.save != nil {
			special("save")
			for j, a := range acc {
				s.save(a, Mem{Base: dst, Disp: j * step})
			}
		} else {
			pack := func() (v []Op) {
				for _, a := range acc {
					v = append(v, s.pack(a))
				}
				return v
			}
			special("pack")
			var packed []Op
			if s.quick == nil {
				packed = pack()
			} else {
				packed = s.quick(acc, "inexact")
				Label("packed")
				after = append(after, func() {
					Label("inexact")
					for j, v := range pack() {
						VMOVDQA64(v, packed[j])
					}
					JMP(LabelRef("packed"))
				})
			}
			for j, v := range packed {
				s.write(v, Mem{Base: dst, Disp: j * step}, nil)
			}
		}
		advance(s.block)
	}
	size := s.lanes * s.block
	SUBQ(imm(size), rem)
	JLT(LabelRef("rest"))
	switch {
	case i.wide && !s.heavy:
		// Two sources are the most frequent case; in the nearest cache, jumps and loads of
		// addresses count.
		p0, p1 := GP64(), GP64()
		CMPQ(count, Imm(2))
		JNE(LabelRef("block"))
		MOVQ(Mem{Base: srcs}, p0)
		MOVQ(Mem{Base: srcs, Disp: 8}, p1)
		align(64)
		Label("pair")
		first(p0, s.block, nil)
		fold(p1, s.block, nil)
		end()
		JLT(LabelRef("rest"))
		CMPQ(count, Imm(2))
		JE(LabelRef("pair"))
		JMP(LabelRef("block")) // over what align adds
		block()
	default:
		block()
		end()
		JGE(LabelRef("block"))
	}

	// Steps, masked or less by one step.
	Label("rest")
	if i.wide {
		ADDQ(imm(size), rem)
		JLE(LabelRef("done"))
	} else {
		ADDQ(imm(size-s.lanes), rem)
		JLT(LabelRef("done"))
	}
	Label("step")
	var k Op
	if i.wide {
		k = mask(rem)
	}
	n, p := GP64(), GP64()
	MOVQ(Mem{Base: srcs}, p)
	first(p, 1, k)
	MOVL(U32(1), n.As32())
	CMPQ(count, n)
	JE(LabelRef("folded"))
	Label("source")
	MOVQ(Mem{Base: srcs, Index: n, Scale: 8}, p)
	fold(p, 1, k)
	INCQ(n)
	CMPQ(n, count)
	JLT(LabelRef("source"))
	Label("folded")
	if o.finish != nil {
		TESTB(Imm(uint64(o.flag)), mode.As8())
		JE(LabelRef("finished"))
		o.finish(all(1))
		Label("finished")
	}
	s.write(s.pack(acc[0]), Mem{Base: dst}, k)
	advance(1)
	if i.wide {
		JGT(LabelRef("step"))
	} else {
		JGE(LabelRef("step"))
	}
	Label("done")
	VZEROUPPER()
	RET()
	for _, f := range after {
		f()
	}
	return name
}

// vecs returns n vectors.
func (i isa) vecs(n int) (v []reg.VecVirtual) {
	for range n {
		v = append(v, i.vec())
	}
	return v
}

// align fills up with no-ops to a multiple of n bytes: processors tell loads apart by some bits of
// their addresses, and where chance lets those of several sources collide it costs a tenth.
func align(n uint64) {
	Instruction(&ir.Instruction{Opcode: "PCALIGN", Operands: []Op{Imm(n)}})
}

// converters writes the conversions between a small float and float32. They take any n; AVX2 ones
// leave n mod 8.
func (i isa) converters(name string, make func() storage) (widen, narrow string) {
	for _, dir := range []string{"widen", "narrow"} {
		text(dir+name+i.name, convertSig)
		s := make()
		dst, src, rem := Load(Param("dst"), GP64()), Load(Param("src"), GP64()), Load(Param("n"), GP64())
		one := func(j int, k Op) {
			x := i.vecs(1)
			small, large := j*s.lanes*s.size, j*i.width
			if dir == "widen" {
				s.load(Mem{Base: src, Disp: small}, k, x)
				if k != nil {
					storeMasked(4, x[0], k, Mem{Base: dst, Disp: large})
				} else {
					store(x[0], Mem{Base: dst, Disp: large})
				}
				return
			}
			if k != nil {
				loadMasked(4, Mem{Base: src, Disp: large}, k, x[0])
			} else {
				load(Mem{Base: src, Disp: large}, x[0])
			}
			s.write(s.pack(x), Mem{Base: dst, Disp: small}, k)
		}
		advance := func(steps int) {
			small, large := src, dst
			if dir == "narrow" {
				small, large = dst, src
			}
			ADDQ(imm(steps*s.lanes*s.size), small)
			ADDQ(imm(steps*i.width), large)
			SUBQ(imm(steps*s.lanes), rem)
		}
		SUBQ(imm(s.block*s.lanes), rem)
		JLT(LabelRef("rest"))
		Label("block")
		for j := range s.block {
			one(j, nil)
		}
		advance(s.block)
		JGE(LabelRef("block"))
		Label("rest")
		ADDQ(imm(s.block*s.lanes), rem)
		Label("steps")
		var k Op
		if i.wide {
			TESTQ(rem, rem)
			JLE(LabelRef("done"))
			k = mask(rem)
		} else {
			CMPQ(rem, imm(s.lanes))
			JLT(LabelRef("done"))
		}
		one(0, k)
		advance(1)
		JMP(LabelRef("steps"))
		Label("done")
		VZEROUPPER()
		RET()
	}
	return "widen" + name + i.name, "narrow" + name + i.name
}

// bf16Plain is bfloat16 in the order of memory, for the conversions.
func (i isa) bf16Plain() storage {
	s := storage{size: 2, lanes: i.width / 4, regs: 1, block: 4}
	round := i.rounder(true)
	s.load = func(m Mem, k Op, d []reg.VecVirtual) {
		if k != nil {
			loadMasked(2, m, k, i.half(d[0]))
			VPMOVZXWD(i.half(d[0]), d[0])
		} else {
			VPMOVZXWD(m, d[0])
		}
		VPSLLD(Imm(16), d[0], d[0])
	}
	s.pack = func(a []reg.VecVirtual) Op {
		round(a[0])
		VPSRLD(Imm(16), a[0], a[0])
		if i.wide {
			VPMOVDW(a[0], a[0].AsY())
			return a[0].AsY()
		}
		hi := XMM()
		VEXTRACTI128(Imm(1), a[0], hi)
		VPACKUSDW(hi, a[0].AsX(), hi)
		return hi
	}
	return s
}

// signature is avo's comment before each function, which repeats the declaration.
var signature = regexp.MustCompile(`(?m)^// func .*\n`)

// cpuid reports whether the processor has F16C and BMI2, of which golang.org/x/sys/cpu knows only
// the latter.
func cpuid() {
	text("cpuidF16C", "func() bool")
	MOVL(U32(1), reg.EAX)
	XORL(reg.ECX, reg.ECX)
	CPUID()
	r := GP32()
	MOVL(reg.ECX, r)
	SHRL(Imm(29), r)
	ANDL(imm(1), r)
	Store(r.As8(), ReturnIndex(0))
	RET()
}

func main() {
	asm := flag.String("asm", "kernels_amd64.s", "file of the assembly")
	decl := flag.String("decl", "kernels_amd64.go", "file of the declarations and the table")
	flag.Parse()
	raw := hidden(*asm) // avo's output, before encode
	if err := flag.Set("out", raw); err != nil {
		fail(err)
	}
	ConstraintExpr("!purego")
	cpuid()

	entries := map[string][]string{} // level -> lines
	for _, i := range []isa{{"AVX2", 32, false}, {"AVX512", 64, true}} {
		add := func(op, dt, fn string) {
			entries[i.name] = append(entries[i.name], fmt.Sprintf("t[%s][%s] = %s", op, dt, fn))
		}
		// kernel writes what reduces elements of s with the operation op on lanes l.
		kernel := func(name string, s func() storage, op string, l lane) string {
			return i.kernel(op+name, func() (storage, operator) { return s(), i.operator(op, l) })
		}
		native := func(size int) func() storage { return func() storage { return i.native(size) } }

		for _, o := range []string{"And", "Or", "Xor"} {
			lower := strings.ToLower(o)
			fn := i.kernel(lower, func() (storage, operator) {
				op := i.operator(lower, lane{'u', 1})
				if o == "Or" {
					op = i.truthful(op)
				}
				return i.native(1), op
			})
			add("Bit"+o, "Uint8", fn)
			if o == "Or" {
				for _, op := range []string{"Sum", "Max", "BitOr"} {
					add(op, "Bool", fn)
				}
			}
		}
		add("BitXor", "Bool", kernel("Bool", i.truths, "xor", lane{'u', 1}))
		for _, size := range []int{1, 2, 4, 8} {
			bits := strconv.Itoa(8 * size)
			for _, o := range [][2]string{{"Sum", "sum"}, {"Product", "prod"}} {
				fn := kernel(bits, native(size), o[1], lane{'u', size})
				add(o[0], "Int"+bits, fn)
				add(o[0], "Uint"+bits, fn)
			}
			kind := byte('u')
			if size == 8 {
				kind = 'i' // AVX2 has no comparison of others
			}
			fn := i.kernel("order"+bits, func() (storage, operator) {
				op := i.operator("min", lane{kind, size})
				if size == 1 {
					op = i.truthful(op)
				}
				return i.flipped(size), op
			})
			for _, op := range []string{"Min", "Max"} {
				add(op, "Int"+bits, fn)
				add(op, "Uint"+bits, fn)
			}
			switch size {
			case 1: // the least byte is 0 if one of them is
				for _, op := range []string{"Product", "Min", "BitAnd"} {
					add(op, "Bool", fn)
				}
			case 4, 8: // these types are frequent enough for kernels of their own
				add("Min", "Int"+bits, kernel("I"+bits, native(size), "min", lane{'i', size}))
				add("Max", "Int"+bits, kernel("I"+bits, native(size), "max", lane{'i', size}))
			}
		}
		for _, o := range [][2]string{{"Sum", "sum"}, {"Product", "prod"}, {"Min", "min"}, {"Max", "max"}} {
			add(o[0], "Float32", kernel("F32", native(4), o[1], lane{'f', 4}))
			add(o[0], "Float64", kernel("F64", native(8), o[1], lane{'f', 8}))
		}
		for _, o := range [][2]string{{"Sum", "sum"}, {"Product", "prod"}} {
			add(o[0], "Float16", kernel("F16", i.f16, o[1], lane{'f', 4}))
			add(o[0], "BFloat16", kernel("BF16", i.bf16, o[1], lane{'f', 4}))
		}
		for _, o := range [][2]string{{"Min", "min"}, {"Max", "max"}} {
			fn := kernel("Ordered", func() storage { return i.ordered(o[0] == "Max") }, o[1], lane{'i', 2})
			add(o[0], "Float16", fn)
			add(o[0], "BFloat16", fn)
		}
		for _, f := range []struct {
			dt, name string
			make     func() storage
		}{
			{"Float16", "F16", func() storage { s := i.f16(); s.block = 4; return s }},
			{"BFloat16", "BF16", i.bf16Plain},
			{"Float8E4M3", "E4M3", func() storage { return i.f8(true) }},
			{"Float8E5M2", "E5M2", func() storage { return i.f8(false) }},
		} {
			if strings.HasPrefix(f.dt, "Float8") {
				add("Sum", f.dt, i.kernel("sum"+f.name, func() (storage, operator) {
					o := i.operator("sum", lane{'f', 4})
					o.finish = nil // there is no Avg
					return f.make(), o
				}))
			}
			w, n := i.converters(f.name, f.make)
			entries[i.name] = append(entries[i.name], fmt.Sprintf("widen[%s], narrow[%s] = %s, %s", f.dt, f.dt, w, n))
		}
		for _, dt := range []string{"Float32", "Float64", "Float16", "BFloat16"} {
			add("Avg", dt, "t[Sum]["+dt+"]")
		}
	}

	native := isa{"AVX512BF16", 64, true}
	for _, o := range [][2]string{{"Sum", "sum"}, {"Product", "prod"}} {
		fn := native.kernel(o[1]+"BF16", func() (storage, operator) {
			return native.bf16Native(), native.operator(o[1], lane{'f', 4})
		})
		entries[native.name] = append(entries[native.name], fmt.Sprintf("t[%s][BFloat16] = %s", o[0], fn))
	}
	entries[native.name] = append(entries[native.name], "t[Avg][BFloat16] = t[Sum][BFloat16]")
	writeConstants()

	Generate()
	var b bytes.Buffer
	b.WriteString("// Code generated by internal/gen. DO NOT EDIT.\n\n//go:build !purego\n\npackage " +
		"kernels\n\nimport \"unsafe\"\n")
	for _, level := range []string{"AVX2", "AVX512", native.name} {
		fmt.Fprintf(&b, "\n// fill%s enters the kernels of this level. Bit operations are entered as those of bytes.\n",
			level)
		fmt.Fprintf(&b, "func fill%s(t *[numOps][numDTypes]kernel, widen, narrow *[numDTypes]func(dst, src "+
			"unsafe.Pointer, n int)) {\n", level)
		for _, e := range entries[level] {
			fmt.Fprintln(&b, e)
		}
		b.WriteString("}\n")
	}
	for _, d := range declarations {
		b.WriteString("\n" + d)
	}
	src, err := format.Source(b.Bytes())
	var code []byte
	if err == nil {
		code, err = os.ReadFile(raw)
	}
	if err == nil {
		code = signature.ReplaceAll(code, nil)
		err = replace([2]string{*asm, *decl}, [2][]byte{encode(code), src})
	}
	os.Remove(raw)
	if err != nil {
		fail(err)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "gen:", err)
	os.Exit(1)
}

// replace writes the files beside their places and then moves them there, so that a build at the
// same time reads old files or new ones, but never half of one.
func replace(paths [2]string, contents [2][]byte) error {
	for i, p := range paths {
		if err := os.WriteFile(hidden(p), contents[i], 0o644); err != nil {
			return err
		}
	}
	for _, p := range paths {
		if err := os.Rename(hidden(p), p); err != nil {
			return err
		}
	}
	return nil
}

// hidden names a file beside p that the go command ignores.
func hidden(p string) string { return filepath.Join(filepath.Dir(p), ".new-"+filepath.Base(p)) }
