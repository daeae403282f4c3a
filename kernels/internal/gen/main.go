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
package main

import (
	"bytes"
	"flag"
	"fmt"
	"go/format"
	"os"
	"path/filepath"
	"regexp"
	"sort"
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
func (i isa) slots() int {
	if i.wide {
		return 8
	}
	return 4
}

func (i isa) vec() reg.VecVirtual {
	if i.wide {
		return ZMM()
	}
	return YMM()
}

// bcast fills a vector with a 32-bit constant.
func (i isa) bcast(v uint32) reg.VecVirtual {
	r, x, d := GP32(), XMM(), i.vec()
	MOVL(U32(v), r)
	VMOVD(r, x)
	VPBROADCASTD(x, d)
	return d
}

func (i isa) bcast64(v uint64) reg.VecVirtual {
	r, x, d := GP64(), XMM(), i.vec()
	MOVQ(U64(v), r)
	VMOVQ(r, x)
	VPBROADCASTQ(x, d)
	return d
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

// store writes a vector of any width, around the caches if nt.
func store(s, m Op, nt bool) {
	switch {
	case nt:
		VMOVNTDQ(s, m)
	case IsZMM(s):
		VMOVDQU64(s, m)
	default:
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
	// direct: the elements are used as they lie, an instruction may take them from memory
	direct bool
	nt     bool // whether a step can be stored around the caches
	// load reads a step; k is the mask or nil
	load func(m Mem, k Op, d []reg.VecVirtual)
	// store writes a step and may destroy a
	store func(a []reg.VecVirtual, m Mem, k Op, nt bool)
	// pack, if there is one, makes a block of results ready to be stored and leaves acc alone, or
	// jumps to the label inexact where only store is right
	pack func(acc [][]reg.VecVirtual, inexact string) []reg.VecVirtual
}

// native is the storage of types that have instructions of their own.
func (i isa) native(size int, isBool bool) storage {
	s := storage{size: size, lanes: i.width / size, regs: 1, block: 256 / i.width, direct: !isBool, nt: true}
	var ones reg.VecVirtual
	if isBool {
		ones = i.bcast(0x01010101)
	}
	s.load = func(m Mem, k Op, d []reg.VecVirtual) {
		if k != nil {
			loadMasked(size, m, k, d[0])
		} else {
			load(m, d[0])
		}
		if isBool { // any byte but 0 is true
			VPMINUB(ones, d[0], d[0])
		}
	}
	s.store = func(a []reg.VecVirtual, m Mem, k Op, nt bool) {
		if k != nil {
			storeMasked(size, a[0], k, m)
		} else {
			store(a[0], m, nt)
		}
	}
	return s
}

// f16 converts with the instructions for it.
func (i isa) f16() storage {
	s := storage{size: 2, lanes: i.width / 4, regs: 1, block: 8, nt: true}
	half := func() reg.VecVirtual {
		if i.wide {
			return YMM()
		}
		return XMM()
	}
	s.load = func(m Mem, k Op, d []reg.VecVirtual) {
		if k == nil {
			VCVTPH2PS(m, d[0])
			return
		}
		h := half()
		loadMasked(2, m, k, h)
		VCVTPH2PS(h, d[0])
	}
	s.store = func(a []reg.VecVirtual, m Mem, k Op, nt bool) {
		if k == nil && !nt {
			VCVTPS2PH(Imm(0), a[0], m)
			return
		}
		h := half()
		VCVTPS2PH(Imm(0), a[0], h)
		if k != nil {
			storeMasked(2, h, k, m)
		} else {
			store(h, m, true)
		}
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
// that nothing crosses lanes. exact says that the results are bfloat16 already, as those of Min and
// Max are.
func (i isa) bf16(exact bool) storage {
	s := storage{size: 2, lanes: i.width / 2, regs: 2, block: 4, nt: true}
	if !i.wide {
		s.block = 2
	}
	upper := i.bcast(0xffff0000)
	round := func(reg.VecVirtual) {}
	if !exact {
		round = i.rounder(false)
	}
	s.load = func(m Mem, k Op, d []reg.VecVirtual) {
		if k != nil {
			loadMasked(2, m, k, d[1])
		} else {
			load(m, d[1])
		}
		VPSLLD(Imm(16), d[1], d[0])
		i.and(upper, d[1], d[1])
	}
	s.store = func(a []reg.VecVirtual, m Mem, k Op, nt bool) {
		round(a[0])
		round(a[1])
		VPSRLD(Imm(16), a[0], a[0])
		if i.wide {
			VPTERNLOGD(Imm(0xf8), upper, a[1], a[0]) // a0 | a1&upper
		} else {
			VPBLENDW(Imm(0xaa), a[1], a[0], a[0])
		}
		if k != nil {
			storeMasked(2, a[0], k, m)
		} else {
			store(a[0], m, nt)
		}
	}
	return s
}

// bf16Native is bfloat16 with the instruction of AVX512_BF16. It rounds and treats NaNs as we do,
// but takes subnormals for zeros; a block with a zero among its results is therefore rounded again,
// the long way. Widening is by interleaving with zeros, the cheapest there is on Zen 5: inside each
// 16 bytes one register holds the lower elements, another the upper ones.
func (i isa) bf16Native() storage {
	s := i.bf16(false)
	round, zero, mag, order := i.rounder(false), i.bcast(0), i.bcast(0x7fff7fff), i.vec()
	VMOVDQU64(NewDataAddr(Symbol{Name: "interleave", Static: true}, 0), order)
	s.load = func(m Mem, k Op, d []reg.VecVirtual) {
		if k != nil {
			loadMasked(2, m, k, d[1])
		} else {
			load(m, d[1])
		}
		VPUNPCKLWD(d[1], zero, d[0])
		VPUNPCKHWD(d[1], zero, d[1])
	}
	s.store = func(a []reg.VecVirtual, m Mem, k Op, nt bool) {
		for _, x := range a {
			round(x)
			VPSRLD(Imm(16), x, x)
		}
		VPACKUSDW(a[1], a[0], a[0])
		if k != nil {
			storeMasked(2, a[0], k, m)
		} else {
			store(a[0], m, nt)
		}
	}
	s.pack = func(acc [][]reg.VecVirtual, inexact string) (packed []reg.VecVirtual) {
		for _, a := range acc {
			x := i.vec()
			vcvtne2ps2bf16(a[0], a[1], x) // all the lower elements, then all the upper ones
			packed = append(packed, x)
		}
		nonzero := K()
		for j, x := range packed {
			if j == 0 {
				VPTESTMW(mag, x, nonzero)
			} else {
				VPTESTMW(mag, x, nonzero, nonzero)
			}
			VPERMQ(x, order, x)
		}
		KORTESTD(nonzero, nonzero)
		JCC(LabelRef(inexact)) // not all ones
		return packed
	}
	return s
}

// interleave writes the order in which VPERMQ brings the halves of a vector together.
func interleave() {
	GLOBL("interleave", attr.RODATA|attr.NOPTR)
	for j := range 8 {
		DATA(8*j, U64(j/2+j%2*4))
	}
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
	s := storage{size: 1, lanes: i.width / 4, regs: 1, block: 4, nt: i.wide}
	words := func() reg.VecVirtual { // a vector of lanes 16-bit words
		if i.wide {
			return YMM()
		}
		return XMM()
	}
	bcast := func(v uint32) reg.VecVirtual {
		r, x, d := GP32(), XMM(), words()
		MOVL(U32(v), r)
		VMOVD(r, x)
		VPBROADCASTW(x, d)
		return d
	}
	var up, down, nan, magF, magic reg.VecVirtual
	shift, limit := uint64(8), uint32(0x7e) // the limit is where all NaNs go
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
	s.store = func(a []reg.VecVirtual, m Mem, k Op, nt bool) {
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
		switch {
		case !i.wide:
			VPACKUSWB(r, r, b)
			VMOVQ(b, m)
		case k != nil:
			VPMOVWB(r, b)
			storeMasked(1, b, k, m)
		default:
			VPMOVWB(r, b)
			store(b, m, nt)
		}
	}
	return s
}

// An operator folds a source into an accumulator.
type operator struct {
	// apply sets acc = acc op x. x may be memory if direct.
	apply  func(x Op, acc reg.VecVirtual)
	direct bool
	finish func(acc reg.VecVirtual) // nil if there is nothing to do after the last source
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
		return simple([]func(...Op){2: VADDPS, 3: VADDPD}[index])
	case l.kind == 'f' && op == "prod":
		return simple([]func(...Op){2: VMULPS, 3: VMULPD}[index])
	case l.kind == 'f' && op == "avg":
		o := simple([]func(...Op){2: VADDPS, 3: VADDPD}[index])
		n, x, by := GP64(), XMM(), i.vec()
		Load(Param("div"), n)
		VXORPS(x, x, x)
		if l.size == 4 {
			VCVTSI2SSQ(n, x, x)
			VBROADCASTSS(x, by)
			o.finish = func(acc reg.VecVirtual) { VDIVPS(by, acc, acc) }
		} else {
			VCVTSI2SDQ(n, x, x)
			VBROADCASTSD(x, by)
			o.finish = func(acc reg.VecVirtual) { VDIVPD(by, acc, acc) }
		}
		return o
	case l.kind == 'f':
		return i.floatMinMax(op == "max", l.size == 8)
	case op == "sum":
		return simple([]func(...Op){VPADDB, VPADDW, VPADDD, VPADDQ}[index])
	case op == "prod" && l.size == 1:
		odd := i.bcast(0xff00ff00)
		return operator{apply: func(x Op, acc reg.VecVirtual) {
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

// mask returns the mask of the first rem elements of a step, all if there are more.
func mask(rem reg.Register, lanes int) reg.OpmaskVirtual {
	n, m, k := GP64(), GP64(), K()
	MOVQ(U32(lanes), n)
	CMPQ(rem, n)
	CMOVQLT(rem, n)
	MOVQ(I32(-1), m)
	BZHIQ(n, m, m)
	KMOVQ(m, k)
	return k
}

// kernel writes one function. make is called inside it, so that constants stand in registers.
func (i isa) kernel(name string, parts func() (storage, operator)) string {
	name += i.name
	text(name, kernelSig)
	s, o := parts()
	dst := Load(Param("dst"), GP64())
	srcs := Load(Param("srcs"), GP64())
	count := Load(Param("k"), GP64())
	pos := Load(Param("lo"), GP64())
	rem := Load(Param("hi"), GP64())
	mode := Load(Param("mode"), GP64())
	SUBQ(pos, rem)
	if sh := map[int]uint64{2: 1, 4: 2, 8: 3}[s.size]; sh != 0 {
		SHLQ(Imm(sh), pos)
	}
	ADDQ(pos, dst)

	var acc [][]reg.VecVirtual
	for range s.block {
		var a []reg.VecVirtual
		for range s.regs {
			a = append(a, i.vec())
		}
		acc = append(acc, a)
	}
	step := s.lanes * s.size

	at := func(p reg.Register, j int) Mem { return Mem{Base: p, Index: pos, Scale: 1, Disp: j * step} }
	// first and fold take steps of the source at p into acc, finish ends the last one.
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
			var x []reg.VecVirtual
			for range s.regs {
				x = append(x, i.vec())
			}
			s.load(at(p, j), k, x)
			for r := range x {
				o.apply(x[r], acc[j][r])
			}
		}
	}
	finish := func(steps int) {
		if o.finish != nil {
			for j := range steps {
				for _, a := range acc[j] {
					o.finish(a)
				}
			}
		}
	}
	// body reduces steps of all sources into acc. slots is the number of sources that have code of
	// their own.
	body := func(label string, steps, slots int, k Op) {
		cur, left, p := GP64(), GP64(), GP64()
		MOVQ(srcs, cur)
		MOVQ(count, left)
		MOVQ(Mem{Base: cur}, p)
		first(p, steps, k)
		CMPQ(left, Imm(1))
		JE(LabelRef(label + "Finish"))
		Label(label + "Sources")
		for slot := 1; slot < slots; slot++ {
			align(32)
			MOVQ(Mem{Base: cur, Disp: 8 * slot}, p)
			fold(p, steps, k)
			CMPQ(left, Imm(uint64(slot+1)))
			JE(LabelRef(label + "Finish"))
		}
		ADDQ(Imm(uint64(8*(slots-1))), cur)
		SUBQ(Imm(uint64(slots-1)), left)
		JMP(LabelRef(label + "Sources"))
		Label(label + "Finish")
		finish(steps)
	}
	// end stores the block in acc, around the caches if mode says so, and goes on at the label
	// loop.
	end := func(loop string) {
		each := func(nt bool, f func(j int, m Mem, nt bool)) {
			for j := range s.block {
				f(j, Mem{Base: dst, Disp: j * step}, nt)
			}
			ADDQ(U32(step*s.block), dst)
			ADDQ(U32(step*s.block), pos)
			SUBQ(U32(s.lanes*s.block), rem)
			JMP(LabelRef(loop))
		}
		both := func(label string, f func(j int, m Mem, nt bool)) {
			if s.nt {
				TESTQ(mode, mode)
				JNE(LabelRef(loop + label))
			}
			each(false, f)
			if s.nt {
				Label(loop + label)
				each(true, f)
			}
		}
		if s.pack != nil {
			packed := s.pack(acc, loop+"Inexact")
			both("PackedAround", func(j int, m Mem, nt bool) { store(packed[j], m, nt) })
			Label(loop + "Inexact")
		}
		both("Around", func(j int, m Mem, nt bool) { s.store(acc[j], m, nil, nt) })
	}
	begin := func(loop string) {
		align(64)
		Label(loop)
		CMPQ(rem, U32(s.lanes*s.block))
		JLT(LabelRef("steps"))
	}
	if i.wide { // two sources, the most frequent case, in the nearest cache, where jumps and loads of addresses count
		p0, p1 := GP64(), GP64()
		CMPQ(count, Imm(2))
		JNE(LabelRef("block"))
		MOVQ(Mem{Base: srcs}, p0)
		MOVQ(Mem{Base: srcs, Disp: 8}, p1)
		begin("pair")
		first(p0, s.block, nil)
		fold(p1, s.block, nil)
		finish(s.block)
		end("pair")
	}
	begin("block")
	body("block", s.block, i.slots(), nil)
	end("block")

	Label("steps")
	var k Op
	if i.wide {
		TESTQ(rem, rem)
		JLE(LabelRef("done"))
		k = mask(rem, s.lanes)
	} else {
		CMPQ(rem, U32(s.lanes))
		JLT(LabelRef("done"))
	}
	body("step", 1, 2, k)
	s.store(acc[0], Mem{Base: dst}, k, false)
	ADDQ(U32(step), dst)
	ADDQ(U32(step), pos)
	SUBQ(U32(s.lanes), rem)
	JMP(LabelRef("steps"))

	Label("done")
	if s.nt {
		TESTQ(mode, mode)
		JE(LabelRef("return"))
		SFENCE() // streamed stores are not ordered before later ones otherwise
		Label("return")
	}
	VZEROUPPER()
	RET()
	return name
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
		f32 := i.width
		one := func(j int, k Op) {
			x := []reg.VecVirtual{i.vec()}
			if dir == "widen" {
				s.load(Mem{Base: src, Disp: j * s.lanes * s.size}, k, x)
				if k != nil {
					storeMasked(4, x[0], k, Mem{Base: dst, Disp: j * f32})
				} else {
					store(x[0], Mem{Base: dst, Disp: j * f32}, false)
				}
				return
			}
			if k != nil {
				loadMasked(4, Mem{Base: src, Disp: j * f32}, k, x[0])
			} else {
				load(Mem{Base: src, Disp: j * f32}, x[0])
			}
			s.store(x, Mem{Base: dst, Disp: j * s.lanes * s.size}, k, false)
		}
		advance := func(steps int) {
			small, large := steps*s.lanes*s.size, steps*f32
			if dir == "widen" {
				ADDQ(U32(small), src)
				ADDQ(U32(large), dst)
			} else {
				ADDQ(U32(large), src)
				ADDQ(U32(small), dst)
			}
			SUBQ(U32(steps*s.lanes), rem)
		}
		Label("block")
		CMPQ(rem, U32(4*s.lanes))
		JLT(LabelRef("steps"))
		for j := range 4 {
			one(j, nil)
		}
		advance(4)
		JMP(LabelRef("block"))
		Label("steps")
		var k Op
		if i.wide {
			TESTQ(rem, rem)
			JLE(LabelRef("done"))
			k = mask(rem, s.lanes)
		} else {
			CMPQ(rem, U32(s.lanes))
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
	s := storage{size: 2, lanes: i.width / 4, regs: 1}
	round := i.rounder(true)
	s.load = func(m Mem, k Op, d []reg.VecVirtual) {
		if k != nil {
			h := YMM()
			loadMasked(2, m, k, h)
			VPMOVZXWD(h, d[0])
		} else {
			VPMOVZXWD(m, d[0])
		}
		VPSLLD(Imm(16), d[0], d[0])
	}
	s.store = func(a []reg.VecVirtual, m Mem, k Op, nt bool) {
		round(a[0])
		VPSRLD(Imm(16), a[0], a[0])
		if !i.wide {
			hi := XMM()
			VEXTRACTI128(Imm(1), a[0], hi)
			VPACKUSDW(hi, a[0].AsX(), hi)
			VMOVDQU(hi, m)
			return
		}
		h := YMM()
		VPMOVDW(a[0], h)
		if k != nil {
			storeMasked(2, h, k, m)
		} else {
			VMOVDQU(h, m)
		}
	}
	return s
}

// copyNT copies n bytes, a multiple of 256, to dst, which is aligned to 32, around the caches.
func copyNT() {
	text("copyNTAVX2", convertSig)
	dst, src, n := Load(Param("dst"), GP64()), Load(Param("src"), GP64()), Load(Param("n"), GP64())
	Label("loop")
	CMPQ(n, U32(256))
	JLT(LabelRef("done"))
	var v []reg.VecVirtual
	for j := range 8 {
		v = append(v, YMM())
		VMOVDQU(Mem{Base: src, Disp: 32 * j}, v[j])
	}
	for j := range 8 {
		VMOVNTDQ(v[j], Mem{Base: dst, Disp: 32 * j})
	}
	ADDQ(U32(256), src)
	ADDQ(U32(256), dst)
	SUBQ(U32(256), n)
	JMP(LabelRef("loop"))
	Label("done")
	SFENCE()
	VZEROUPPER()
	RET()
}

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
	ANDL(U32(1), r)
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
	copyNT()
	interleave()

	entries := map[string][]string{} // level -> lines
	for _, i := range []isa{{"AVX2", 32, false}, {"AVX512", 64, true}} {
		add := func(op, dt, fn string) {
			entries[i.name] = append(entries[i.name], fmt.Sprintf("t[%s][%s] = %s", op, dt, fn))
		}
		for _, o := range []string{"And", "Or", "Xor"} {
			lower := map[string]string{"And": "and", "Or": "or", "Xor": "xor"}[o]
			add("Bit"+o, "Uint8", i.kernel("bit"+o, func() (storage, operator) {
				return i.native(1, false),
					i.operator(lower, lane{'u', 1})
			}))
			fn := i.kernel("bool"+o, func() (storage, operator) {
				return i.native(1, true),
					i.operator(lower, lane{'b', 1})
			})
			for _, op := range map[string][]string{"And": {"Product", "Min", "BitAnd"}, "Or": {"Sum", "Max", "BitOr"},
				"Xor": {"BitXor"}}[o] {
				add(op, "Bool", fn)
			}
		}
		for _, size := range []int{1, 2, 4, 8} {
			for _, o := range [][2]string{{"Sum", "sum"}, {"Product", "prod"}} {
				fn := i.kernel(fmt.Sprintf("%s%d", o[1], 8*size), func() (storage,
					operator) {
					return i.native(size, false), i.operator(o[1], lane{'u', size})
				})
				add(o[0], fmt.Sprintf("Int%d", 8*size), fn)
				add(o[0], fmt.Sprintf("Uint%d", 8*size), fn)
			}
			for _, o := range [][2]string{{"Min", "min"}, {"Max", "max"}} {
				for _, kind := range "iu" {
					fn := i.kernel(fmt.Sprintf("%s%c%d", o[1], kind-'a'+'A', 8*size), func() (storage, operator) {
						return i.native(size, false), i.operator(o[1], lane{byte(kind), size})
					})
					add(o[0], fmt.Sprintf("%s%d", map[rune]string{'i': "Int", 'u': "Uint"}[kind], 8*size), fn)
				}
			}
		}
		for _, o := range [][2]string{{"Sum", "sum"}, {"Product", "prod"}, {"Min", "min"}, {"Max", "max"},
			{"Avg", "avg"}} {
			exact := o[0] == "Min" || o[0] == "Max"
			add(o[0], "Float32", i.kernel(o[1]+"F32", func() (storage, operator) {
				return i.native(4, false),
					i.operator(o[1], lane{'f', 4})
			}))
			add(o[0], "Float64", i.kernel(o[1]+"F64", func() (storage, operator) {
				return i.native(8, false),
					i.operator(o[1], lane{'f', 8})
			}))
			add(o[0], "Float16", i.kernel(o[1]+"F16", func() (storage, operator) {
				return i.f16(),
					i.operator(o[1], lane{'f', 4})
			}))
			add(o[0], "BFloat16", i.kernel(o[1]+"BF16", func() (storage, operator) {
				return i.bf16(exact),
					i.operator(o[1], lane{'f', 4})
			}))
		}
		add("Sum", "Float8E4M3", i.kernel("sumE4M3", func() (storage, operator) {
			return i.f8(true),
				i.operator("sum", lane{'f', 4})
		}))
		add("Sum", "Float8E5M2", i.kernel("sumE5M2", func() (storage, operator) {
			return i.f8(false),
				i.operator("sum", lane{'f', 4})
		}))
		for _, c := range []struct {
			dt, name string
			make     func() storage
		}{{"Float16", "F16", i.f16}, {"BFloat16", "BF16", i.bf16Plain},
			{"Float8E4M3", "E4M3", func() storage { return i.f8(true) }},
			{"Float8E5M2", "E5M2", func() storage { return i.f8(false) }}} {
			w, n := i.converters(c.name, c.make)
			entries[i.name] = append(entries[i.name], fmt.Sprintf("widen[%s], narrow[%s] = %s, %s", c.dt, c.dt, w, n))
		}
	}

	native := isa{"AVX512BF16", 64, true}
	for _, o := range [][2]string{{"Sum", "sum"}, {"Product", "prod"}, {"Avg", "avg"}} {
		fn := native.kernel(o[1]+"BF16", func() (storage, operator) {
			return native.bf16Native(),
				native.operator(o[1], lane{'f', 4})
		})
		entries[native.name] = append(entries[native.name], fmt.Sprintf("t[%s][BFloat16] = %s", o[0], fn))
	}

	Generate()
	var b bytes.Buffer
	b.WriteString("// Code generated by internal/gen. DO NOT EDIT.\n\n//go:build !purego\n\npackage " +
		"kernels\n\nimport \"unsafe\"\n")
	for _, level := range []string{"AVX2", "AVX512", native.name} {
		sort.Strings(entries[level])
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
		code = bytes.ReplaceAll(code, []byte("(dst uintptr, srcs uintptr,"),
			[]byte("(dst unsafe.Pointer, srcs *unsafe.Pointer,"))
		code = bytes.ReplaceAll(code, []byte("(dst uintptr, src uintptr,"),
			[]byte("(dst unsafe.Pointer, src unsafe.Pointer,"))
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
