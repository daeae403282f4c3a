// The types of elements: how their bits become numbers that can be combined, and how those become
// bits again. Package kernels defines both, bit by bit.
//
// Every type has Bits, the bits of an element; Acc, the number that is accumulated; widen and
// narrow. widenQuick and narrowQuick do the same for the Lanes of a vector, which are elements or
// several of them, faster and with other bits for NaNs.
#pragma once

#include "machine.h"

enum : u32 {
	kQuiet32 = 1u << 22,
	kInfinity32 = 0x7f800000,
	kMagnitude32 = 0x7fffffff,
	kCanonical32 = 0x7fc00000,
	kInvalid32 = 0xffc00000,
};

enum : u64 {
	kQuiet64 = 1ull << 51,
	kInfinity64 = 0x7ffull << 52,
	kMagnitude64 = ~0ull >> 1,
	kCanonical64 = 0x7ff8ull << 48,
	kInvalid64 = 0xfff8ull << 48,
};

DEVICE bool isNaN(u32 b) { return (b & kMagnitude32) > kInfinity32; }
DEVICE bool isNaN(u64 b) { return (b & kMagnitude64) > kInfinity64; }

// strange returns the result of a quick operation as a device has it: on the host, where a NaN
// would often have the right bits by chance, every NaN becomes that of a device.
#ifdef __CUDA_ARCH__
DEVICE float strange(float a) { return a; }
DEVICE double strange(double a) { return a; }
#else
DEVICE float strange(float a) { return a == a ? a : as<float>(u32(kMagnitude32)); }
DEVICE double strange(double a) { return a == a ? a : as<double>(u64(kMagnitude64)); }
#endif

// nanOf is the NaN that an operation on a and b yields: the first NaN of them, made quiet, else
// that of an invalid operation.
DEVICE float nanOf(float a, float b) {
	u32 x = as<u32>(a), y = as<u32>(b);
	return as<float>(isNaN(x) ? x | kQuiet32 : isNaN(y) ? y | kQuiet32 : u32(kInvalid32));
}

DEVICE double nanOf(double a, double b) {
	u64 x = as<u64>(a), y = as<u64>(b);
	return as<double>(isNaN(x) ? x | kQuiet64 : isNaN(y) ? y | kQuiet64 : u64(kInvalid64));
}

// An Integer of B is accumulated in A, of which its bits are the lower ones.
template <class B, class A>
struct Integer {
	typedef B Bits;
	typedef B Lane;
	typedef A Acc;
	DEVICE A widen(B b) { return b; }
	DEVICE B narrow(A a) { return B(a); }
	DEVICE A widenQuick(B b) { return b; }
	DEVICE B narrowQuick(A a) { return B(a); }
};

typedef Integer<u8, u32> Int8;
typedef Integer<u16, u32> Int16;
typedef Integer<u32, u32> Int32;
typedef Integer<u64, u64> Int64;

struct Float32 {
	typedef u32 Bits;
	typedef u32 Lane;
	typedef float Acc;
	DEVICE float widen(u32 b) { return as<float>(b); }
	DEVICE u32 narrow(float a) { return as<u32>(a); }
	DEVICE float widenQuick(u32 b) { return as<float>(b); }
	DEVICE u32 narrowQuick(float a) { return as<u32>(a); }
};

struct Float64 {
	typedef u64 Bits;
	typedef u64 Lane;
	typedef double Acc;
	DEVICE double widen(u64 b) { return as<double>(b); }
	DEVICE u64 narrow(double a) { return as<u64>(a); }
	DEVICE double widenQuick(u64 b) { return as<double>(b); }
	DEVICE u64 narrowQuick(double a) { return as<u64>(a); }
};

struct Float16 {
	typedef u16 Bits;
	typedef u16 Lane;
	typedef float Acc;

	DEVICE float widen(u16 b) {
		u32 sign = u32(b & 0x8000) << 16, mag = u32(b & 0x7fff) << 13;
		if (mag > 0x7c00u << 13)
			return as<float>(sign | kInfinity32 | kQuiet32 | mag);
		if (mag == 0x7c00u << 13)
			return as<float>(sign | kInfinity32);
		// With the exponent read as that of a float32 the value is 2^-112 times too small; the
		// product is exact, also for subnormals.
		return as<float>(sign | as<u32>(as<float>(mag) * 0x1p112f));
	}

	DEVICE u16 narrow(float a) {
		u32 b = as<u32>(a), sign = b >> 16 & 0x8000, mag = b & kMagnitude32;
		if (mag > kInfinity32)
			return u16(sign | 0x7e00 | (mag >> 13 & 0x3ff));
		if (mag >= 0x477ff000) // 65520, half way from the largest finite value to the next power of two
			return u16(sign | 0x7c00);
		if (mag < 0x38800000) // subnormal: the addition leaves units of 2^-24
			return u16(sign | (as<u32>(as<float>(mag) + 0.5f) & 0x7ff));
		mag += 0xfff + (mag >> 13 & 1);
		return u16(sign | ((mag >> 13) - ((127 - 15) << 10)));
	}

#ifdef __CUDA_ARCH__
	DEVICE float widenQuick(u16 b) {
		float a;
		asm("cvt.f32.f16 %0, %1;" : "=f"(a) : "h"(b));
		return a;
	}
	DEVICE u16 narrowQuick(float a) {
		u16 b;
		asm("cvt.rn.f16.f32 %0, %1;" : "=h"(b) : "f"(a));
		return b;
	}
#else
	DEVICE float widenQuick(u16 b) { return strange(widen(b)); }
	DEVICE u16 narrowQuick(float a) { return a == a ? narrow(a) : u16(0x7fff); }
#endif
};

struct BFloat16 {
	typedef u16 Bits;
	typedef u16 Lane;
	typedef float Acc;

	DEVICE float widen(u16 b) { return as<float>(u32(b) << 16); }

	DEVICE u16 narrow(float a) {
		u32 b = as<u32>(a);
		return isNaN(b) ? u16((b | kQuiet32) >> 16) : u16((b + 0x7fff + (b >> 16 & 1)) >> 16);
	}

	DEVICE float widenQuick(u16 b) { return widen(b); }

#if __CUDA_ARCH__ >= 900
	DEVICE u16 narrowQuick(float a) {
		u16 b;
		asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(b) : "f"(a));
		return b;
	}
#else
	// Of NaNs it makes anything, even infinity.
	DEVICE u16 narrowQuick(float a) {
		u32 b = as<u32>(a);
		return u16((b + 0x7fff + (b >> 16 & 1)) >> 16);
	}
#endif
};

struct Float8E4M3 {
	typedef u8 Bits;
	typedef u8 Lane;
	typedef float Acc;

	DEVICE float widen(u8 b) {
		u32 sign = u32(b & 0x80) << 24, mag = u32(b & 0x7f) << 20;
		if (mag == 0x7fu << 20)
			return as<float>(sign | 0x7ff00000);
		return as<float>(sign | as<u32>(as<float>(mag) * 0x1p120f));
	}

	// Nothing saturates: the format has no infinity, and what rounds to more than 448 is a NaN.
	DEVICE u8 narrow(float a) {
		u32 b = as<u32>(a), sign = b >> 24 & 0x80, mag = b & kMagnitude32;
		if (mag > 0x43e80000) // 464
			return u8(sign | 0x7f);
		if (mag < 0x3c800000) // subnormal: units of 2^-9
			return u8(sign | (as<u32>(as<float>(mag) + 0x1p14f) & 0xf));
		mag += 0x7ffff + (mag >> 20 & 1);
		return u8(sign | ((mag >> 20) - ((127 - 7) << 3)));
	}

	DEVICE float widenQuick(u8 b) { return widen(b); }
	DEVICE u8 narrowQuick(float a) { return narrow(a); }
};

struct Float8E5M2 {
	typedef u8 Bits;
	typedef u8 Lane;
	typedef float Acc;

	DEVICE float widen(u8 b) { return Float16::widen(u16(b << 8)); }

	DEVICE u8 narrow(float a) {
		u32 b = as<u32>(a), sign = b >> 24 & 0x80, mag = b & kMagnitude32;
		if (mag > kInfinity32)
			return u8(sign | 0x7e);
		if (mag >= 0x47700000) // 61440
			return u8(sign | 0x7c);
		if (mag < 0x38800000) // subnormal: units of 2^-16
			return u8(sign | (as<u32>(as<float>(mag) + 0x1p7f) & 0x7));
		mag += 0xfffff + (mag >> 21 & 1);
		return u8(sign | ((mag >> 21) - ((127 - 15) << 2)));
	}

	DEVICE float widenQuick(u8 b) { return Float16::widenQuick(u16(b << 8)); }
	DEVICE u8 narrowQuick(float a) { return narrow(a); }
};

// A Bool is any byte; every one but 0 is true. What is accumulated is 0 or 1.
struct Bool {
	typedef u8 Bits;
	typedef u8 Lane;
	typedef u32 Acc;
	DEVICE u32 widen(u8 b) { return b != 0; }
	DEVICE u8 narrow(u32 a) { return u8(a); }
	DEVICE u32 widenQuick(u8 b) { return widen(b); }
	DEVICE u8 narrowQuick(u32 a) { return u8(a); }
};

// A Byte is eight bits without further meaning.
struct Byte {
	typedef u8 Bits;
	typedef u32 Lane;
	typedef u32 Acc;
	DEVICE u32 widen(u8 b) { return b; }
	DEVICE u8 narrow(u32 a) { return u8(a); }
	DEVICE u32 widenQuick(u32 b) { return b; }
	DEVICE u32 narrowQuick(u32 a) { return a; }
};
