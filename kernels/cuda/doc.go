// Package cuda has the kernels for CUDA devices: reductions, copies, and kernels that wait for a
// word and write one. Package kernels defines what a reduction yields, bit by bit.
//
// [Module] is what a driver loads. [Reduce], [Copy], [Wait] and [Write] return what it launches: a
// [Launch] names a kernel, its grid and its parameter. The package launches nothing and needs no
// CUDA; addresses are those of the device.
//
//	launches, err := cuda.Reduce(kernels.Sum, kernels.BFloat16, dst, srcs, bytes, 0, multiprocessors)
//	for _, l := range launches {
//		// cuLaunchKernel(function(l.Function), l.Grid, 1, 1, l.Block, 1, 1, l.Shared, stream, &l.Params[0])
//	}
//
// # Sources
//
// The kernels are CUDA C++ in src, which clang compiles to PTX without the CUDA toolkit
// (internal/gen, go generate). The same source is C++ for the host after src/host.h: package
// cudatest compiles that, for tests that run the kernels on a machine without a GPU.
//
// # Reductions
//
// A kernel reads every source once and writes the result once. Where all addresses are the same
// modulo 16, a thread loads and stores vectors of 16 bytes; the elements around them, and all
// elements where the addresses differ, are done one by one, from bytes if they are not aligned.
// Small floats are accumulated in float32 over all sources, as in package kernels.
//
// A device answers other NaNs than package kernels asks for. A vector is therefore combined without
// regard to NaNs, and if the result has one, its elements are computed again one by one with the
// NaNs of the definition. A result that is no NaN had none on its way.
//
// Two kernels do each reduction: one for up to 8 sources, whose parameter is small, and one for up
// to [MaxSources]. Max is Min of inverted elements, or is and of inverted bits, and the same
// inversion orders signed integers as unsigned ones.
//
// # Places
//
// A [Place] has copies or a reduction that are chosen when its kernels are in a stream already
// ([Placed]). A kernel reads it from the memory of the device, up to 48 sources.
//
// # Packets
//
// [Packets] is a collective in one kernel, over inboxes that the ranks have mapped of each other:
// each sends all others what it has for them, and combines what it got, or puts it side by side.
package cuda
