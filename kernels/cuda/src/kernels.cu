// The kernels: every one has a name that begins with tutti_ and one parameter, a struct.

#include "packets.h"
#include "place.h"

#define REDUCTIONS(K)              \
	K(sum, int8, Int8, Sum)        \
	K(sum, int16, Int16, Sum)      \
	K(sum, int32, Int32, Sum)      \
	K(sum, int64, Int64, Sum)      \
	K(sum, float32, Float32, Sum)  \
	K(sum, float64, Float64, Sum)  \
	K(sum, float16, Float16, Sum)  \
	K(sum, bfloat16, BFloat16, Sum) \
	K(sum, float8_e4m3, Float8E4M3, Sum) \
	K(sum, float8_e5m2, Float8E5M2, Sum) \
	K(product, int8, Int8, Product) \
	K(product, int16, Int16, Product) \
	K(product, int32, Int32, Product) \
	K(product, int64, Int64, Product) \
	K(product, float32, Float32, Product) \
	K(product, float64, Float64, Product) \
	K(product, float16, Float16, Product) \
	K(product, bfloat16, BFloat16, Product) \
	K(min, int8, Int8, Min) \
	K(min, int16, Int16, Min) \
	K(min, int32, Int32, Min) \
	K(min, int64, Int64, Min) \
	K(min, float32, Float32, Min) \
	K(min, float64, Float64, Min) \
	K(min, float16, Float16, Min) \
	K(min, bfloat16, BFloat16, Min) \
	K(and, bits, Byte, And) \
	K(xor, bits, Byte, Xor) \
	K(and, bool, Bool, And) \
	K(xor, bool, Bool, Xor)

DEVICE void wait(const WordParams &p) {
	if (position() == 0)
		while (acquire(p.word) < p.value)
			pause();
}

DEVICE void write(const WordParams &p) {
	if (position() == 0)
		release(p.word, p.value);
}

#define KERNELS(K)              \
	K(tutti_copy, CopyParams, copy<>) \
	K(tutti_copy_placed, PlaceParams, copyPlaced) \
	K(tutti_copy_packets, PacketParams, gatherPackets<u64>) \
	K(tutti_copy_bytes_packets, PacketParams, gatherPackets<u8>) \
	K(tutti_tell, TellParams, tell) \
	K(tutti_wait, WordParams, wait) \
	K(tutti_write, WordParams, write)

#ifdef __CUDA_ARCH__

#define KERNEL(name, params, body) \
	extern "C" __attribute__((global, launch_bounds(256, 3))) void name(const params p) { body(p); }
#define REDUCTION(op, dt, type, function) \
	KERNEL(tutti_##op##_##dt, FewSources, (reduce<type, function>)) \
	KERNEL(tutti_##op##_##dt##_many, ManySources, (reduce<type, function>)) \
	KERNEL(tutti_##op##_##dt##_placed, PlaceParams, (reducePlaced<type, function>)) \
	KERNEL(tutti_##op##_##dt##_packets, PacketParams, (reducePackets<type, function>))
REDUCTIONS(REDUCTION)
KERNELS(KERNEL)

#elif defined(TUTTI_HOST)

#define KERNEL(name, params, body) \
	{#name, sizeof(params), [](const void *p, unsigned grid, unsigned block, unsigned) { \
		 hostLaunch(grid, block, [p] { body(*static_cast<const params *>(p)); }); \
	 }},
#define REDUCTION(op, dt, type, function) \
	KERNEL(tutti_##op##_##dt, FewSources, (reduce<type, function>)) \
	KERNEL(tutti_##op##_##dt##_many, ManySources, (reduce<type, function>)) \
	KERNEL(tutti_##op##_##dt##_placed, PlaceParams, (reducePlaced<type, function>)) \
	KERNEL(tutti_##op##_##dt##_packets, PacketParams, (reducePackets<type, function>))
extern "C" __attribute__((visibility("default"))) const tutti_host_kernel tutti_host_kernels[] = {
	REDUCTIONS(REDUCTION) KERNELS(KERNEL){nullptr, 0, nullptr}};

#endif
