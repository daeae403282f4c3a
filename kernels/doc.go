// Package kernels does the arithmetic of collectives on host memory: it reduces n buffers into one,
// for every data type and operation of the process group, at the speed of memory.
//
// # Reductions
//
// A [Reducer] computes dst[i] = srcs[0][i] op srcs[1][i] op …, from left to right. The order is
// part of the contract: the same inputs in the same order give the same bits on every machine,
// whatever instructions it has, also for NaNs. [Reference] returns the definition in portable Go;
// [Lookup] returns the fastest version for this machine, chosen once when the program starts
// (AVX-512 with BW, DQ and VL; AVX2 with F16C and BMI2; else, on other architectures, and with the
// build tag purego, the portable one); [Level] names it. [Reduce] is the checked form for byte
// slices.
//
//	add, err := kernels.Lookup(kernels.Sum, kernels.BFloat16)
//	if err != nil {
//		return err
//	}
//	add(dst, []unsafe.Pointer{mine, left, right}, n)
//
// # Operations
//
//   - Integers: Sum and Product wrap around. Avg is the wrapped sum, divided towards zero. Min,
//     Max, and the bit operations are what they are called.
//   - Float32 and Float64: Sum and Product round at every step, like the scalar expression. Avg
//     divides the sum. A result that is NaN is the first source that is NaN, made quiet, unless an
//     invalid operation (inf-inf, 0*inf) came before it: that yields the NaN of x86, 0xffc00000 or
//     0xfff8000000000000.
//   - Min and Max of floats are minimum and maximum of IEEE 754-2019: -0 is less than +0, and a NaN
//     anywhere makes the result NaN, always the canonical one, 0x7fc00000, 0x7ff8000000000000,
//     0x7e00 (Float16) or 0x7fc0 (BFloat16).
//   - Float16 and BFloat16 are widened to float32, accumulated as float32 over all the sources of
//     one call, and rounded once, to nearest, ties to even; subnormals are kept. NaNs are as in
//     float32, cut to the upper bits.
//   - Float8E4M3 and Float8E5M2: Sum only, likewise. What is too large becomes infinite in E5M2 and
//     NaN in E4M3, which has no infinity; nothing saturates. See [F8E4M3From].
//   - Bool: Sum, Max and BitOr are or; Product, Min and BitAnd are and; BitXor is exclusive or. Any
//     byte but 0 is true; results are 0 or 1.
//   - Subnormals count, everywhere: threads are expected to be in the floating-point mode that Go
//     starts them in, rounding to nearest and flushing nothing. C code that sets another mode on a
//     thread it calls Go from changes results; the functions of the C ABI set Go's meanwhile.
//   - One source is copied as it is (bools become 0 or 1).
//
// [Supported] says which pairs exist. An Avg in stages combines partial results with Sum,
// which is Sum, and ends in [Scale]. An algorithm whose stages are to round 16-bit floats only once
// carries its partial sums as float32, between [Widen] and [Narrow].
//
// # Implementation
//
// The assembly is written by internal/gen (go generate). All kernels have one shape: a block of
// accumulators lies in vector registers, every source is added to it in turn, and the block is
// stored, so that memory is read once and written once whatever the number of sources, and 16-bit
// floats stay float32 in registers from the first source to the last. The first sources of a block,
// up to four, have code of their own each, since processors prefetch by the address of the load
// instruction; prefetches of ours made it slower. Tails are masked (AVX-512) or left to the
// portable kernel (AVX2).
//
// Operations share kernels where that costs the frequent ones nothing: Avg is Sum and a division,
// signed and unsigned integers share Sum and Product, the operations on Bool are those on bytes.
// Min and Max of integers other than Int32 and Int64 are one kernel for each size, which inverts
// some bits of each element before and after; in the nearest cache that takes a third longer than
// separate kernels would. Min and Max of Float16 and BFloat16 compare the bits as integers.
//
// BFloat16 is rounded by the instruction of AVX512_BF16 where the machine has it. That instruction
// takes subnormals for zeros; a block that it leaves a zero in is rounded again from the
// accumulators, with integer arithmetic. Where all blocks hold zeros, a sum of two sources takes
// four fifths longer in the nearest cache, and hardly longer in memory.
//
// Assembly cannot be preempted; therefore a Reducer comes back to Go after every 256 KiB of the
// result.
package kernels
