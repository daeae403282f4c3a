// What the kernels need of the machine: on a CUDA device without the headers of the CUDA toolkit,
// and on the host after host.h.
#pragma once

#include "params.h"

#ifdef __CUDA_ARCH__

#define METHOD inline __attribute__((device, always_inline))
#define DEVICE static METHOD
#define ONCE static __attribute__((device, noinline)) // one copy for all kernels
#define GLOBAL __attribute__((address_space(1)))

// position is the number of this thread among the threads of the launch.
DEVICE u64 position() {
	return u64(__nvvm_read_ptx_sreg_ctaid_x()) * __nvvm_read_ptx_sreg_ntid_x() + __nvvm_read_ptx_sreg_tid_x();
}

// threads is the number of threads of the launch.
DEVICE u64 threads() { return u64(__nvvm_read_ptx_sreg_nctaid_x()) * __nvvm_read_ptx_sreg_ntid_x(); }

// fixed reads a number that nothing changes while the kernel runs.
DEVICE u64 fixed(u64 at) {
	u64 v;
	asm("ld.global.nc.u64 %0, [%1];" : "=l"(v) : "l"(at));
	return v;
}

// acquire reads a word that another processor releases.
DEVICE u64 acquire(u64 word) {
	u64 v;
	asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(word) : "memory");
	return v;
}

// release writes a word after all earlier writes, of earlier kernels too, for all processors.
DEVICE void release(u64 word, u64 v) {
	asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(word), "l"(v) : "memory");
}

// A packet is two words of 8 bytes, each half data and half a mark. Each word is read as it was
// written, so that a thread that reads both marks has the data; nothing else is ordered.
DEVICE void storePacket(u64 at, u64 data, u32 first, u32 second) {
	asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};"
	             :
	             : "l"(at), "r"(u32(data)), "r"(first), "r"(u32(data >> 32)), "r"(second)
	             : "memory");
}

// loadPacket reads both words of a packet, each with its mark.
DEVICE void loadPacket(u64 at, u32 &low, u32 &first, u32 &high, u32 &second) {
	asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
	             : "=r"(low), "=r"(first), "=r"(high), "=r"(second)
	             : "l"(at)
	             : "memory");
}

// glance reads a word that another processor writes, and orders nothing.
DEVICE u64 glance(u64 word) {
	u64 v;
	asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(word) : "memory");
	return v;
}

// number and setNumber read and write a number that threads of this device share.
DEVICE u32 number(u64 at) {
	u32 v;
	asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
	return v;
}
DEVICE void setNumber(u64 at, u32 v) {
	asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" : : "l"(at), "r"(v) : "memory");
}

// claim makes a number 1 if it was 0, and reports whether it was.
DEVICE bool claim(u64 at) {
	u32 was;
	asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], 0, 1;" : "=r"(was) : "l"(at) : "memory");
	return was == 0;
}

// nanoseconds is a clock of the device.
DEVICE u64 nanoseconds() {
	u64 v;
	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
	return v;
}

// pause lets others run while this thread polls.
DEVICE void pause() { asm volatile("nanosleep.u32 64;" : : : "memory"); }

#else

#define METHOD inline __attribute__((always_inline))
#define DEVICE static METHOD
#define ONCE static __attribute__((noinline))
#define GLOBAL

DEVICE u64 position() { return u64(host_thread.block) * host_thread.threads + host_thread.thread; }
DEVICE u64 threads() { return u64(host_thread.blocks) * host_thread.threads; }
DEVICE u64 fixed(u64 at) { return *reinterpret_cast<const u64 *>(at); }
DEVICE u64 acquire(u64 word) { return __atomic_load_n(reinterpret_cast<u64 *>(word), __ATOMIC_ACQUIRE); }
DEVICE void release(u64 word, u64 v) { __atomic_store_n(reinterpret_cast<u64 *>(word), v, __ATOMIC_RELEASE); }
DEVICE void storePacket(u64 at, u64 data, u32 first, u32 second) {
	u64 *p = reinterpret_cast<u64 *>(at);
	__atomic_store_n(&p[0], u32(data) | u64(first) << 32, __ATOMIC_RELAXED);
	__atomic_store_n(&p[1], data >> 32 | u64(second) << 32, __ATOMIC_RELAXED);
}
DEVICE void loadPacket(u64 at, u32 &low, u32 &first, u32 &high, u32 &second) {
	u64 *p = reinterpret_cast<u64 *>(at);
	u64 front = __atomic_load_n(&p[0], __ATOMIC_RELAXED), back = __atomic_load_n(&p[1], __ATOMIC_RELAXED);
	low = u32(front), first = u32(front >> 32), high = u32(back), second = u32(back >> 32);
}
DEVICE u64 glance(u64 word) { return __atomic_load_n(reinterpret_cast<u64 *>(word), __ATOMIC_RELAXED); }
DEVICE u32 number(u64 at) { return __atomic_load_n(reinterpret_cast<u32 *>(at), __ATOMIC_RELAXED); }
DEVICE void setNumber(u64 at, u32 v) { __atomic_store_n(reinterpret_cast<u32 *>(at), v, __ATOMIC_RELAXED); }
DEVICE bool claim(u64 at) {
	u32 none = 0;
	u32 *p = reinterpret_cast<u32 *>(at);
	return __atomic_compare_exchange_n(p, &none, 1, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
DEVICE u64 nanoseconds() { return host_nanoseconds(); }
DEVICE void pause() { host_pause(); }

#endif

// A Vector is what one load or store moves at most.
typedef u32 Vector __attribute__((vector_size(16)));

template <class T>
DEVICE T load(u64 address) {
	typedef T Unit __attribute__((may_alias));
	return *reinterpret_cast<const GLOBAL Unit *>(address);
}

template <class T>
DEVICE void store(u64 address, T v) {
	typedef T Unit __attribute__((may_alias));
	*reinterpret_cast<GLOBAL Unit *>(address) = v;
}

// UNROLL unrolls the loop that follows, ROLL does not.
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#define ROLL _Pragma("unroll 1")
#else
#define UNROLL
#define ROLL
#endif

// as returns the bits of x as another type.
template <class To, class From>
DEVICE To as(From x) {
	return __builtin_bit_cast(To, x);
}
