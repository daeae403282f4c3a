// Reductions and copies.
#pragma once

#include "number.h"

// The operations. exact has the bits that package kernels defines; quick has the same, unless the
// final result is not clean: then elements have to be combined again with exact. enter and leave
// invert bits, which makes Max of Min, and a signed order of an unsigned one.

struct Sum {
	enum { divides = true };

	template <class A>
	DEVICE A identity() {
		return A(-0.0);
	}

	DEVICE u32 quick(u32 a, u32 b) { return a + b; }
	DEVICE u64 quick(u64 a, u64 b) { return a + b; }
	DEVICE float quick(float a, float b) { return strange(a + b); }
	DEVICE double quick(double a, double b) { return strange(a + b); }

	template <class A>
	DEVICE A exact(A a, A b) {
		A s = a + b;
		if constexpr (A(0.5) != 0) // a float
			if (s != s)
				s = nanOf(a, b);
		return s;
	}
	template <class A>
	DEVICE bool clean(A a) {
		return a == a;
	}
	template <class A>
	DEVICE A enter(A a, u64) {
		return a;
	}
	template <class A>
	DEVICE A leave(A a, u64) {
		return a;
	}
};

struct Product {
	enum { divides = false };

	template <class A>
	DEVICE A identity() {
		return 1;
	}

	DEVICE u32 quick(u32 a, u32 b) { return a * b; }
	DEVICE u64 quick(u64 a, u64 b) { return a * b; }
	DEVICE float quick(float a, float b) { return strange(a * b); }
	DEVICE double quick(double a, double b) { return strange(a * b); }

	template <class A>
	DEVICE A exact(A a, A b) {
		A s = a * b;
		if constexpr (A(0.5) != 0)
			if (s != s)
				s = nanOf(a, b);
		return s;
	}
	template <class A>
	DEVICE bool clean(A a) {
		return a == a;
	}
	template <class A>
	DEVICE A enter(A a, u64) {
		return a;
	}
	template <class A>
	DEVICE A leave(A a, u64) {
		return a;
	}
};

DEVICE u32 inverted(u32 a, u64 flip) { return a ^ u32(flip); }
DEVICE u64 inverted(u64 a, u64 flip) { return a ^ flip; }
DEVICE float inverted(float a, u64 flip) { return as<float>(as<u32>(a) ^ u32(flip)); }
DEVICE double inverted(double a, u64 flip) { return as<double>(as<u64>(a) ^ flip); }

struct Min {
	enum { divides = false };

	template <class A>
	DEVICE A identity() {
		if constexpr (A(0.5) != 0)
			return A(__builtin_inf());
		else
			return ~A(0);
	}

	DEVICE u32 exact(u32 a, u32 b) { return a < b ? a : b; }
	DEVICE u64 exact(u64 a, u64 b) { return a < b ? a : b; }

	// The minimum of IEEE 754-2019, but for the bits of NaNs.
	DEVICE float exact(float a, float b) {
		float m = a < b || a != a ? a : b;
		return a == b ? as<float>(as<u32>(a) | as<u32>(b)) : m;
	}
	DEVICE double exact(double a, double b) {
		double m = a < b || a != a ? a : b;
		return a == b ? as<double>(as<u64>(a) | as<u64>(b)) : m;
	}

	template <class A>
	DEVICE A quick(A a, A b) {
		return exact(a, b);
	}
	template <class A>
	DEVICE bool clean(A a) {
		return a == a; // narrowQuick may make another NaN of the canonical one
	}
	template <class A>
	DEVICE A enter(A a, u64 flip) {
		return inverted(a, flip);
	}
	DEVICE u32 leave(u32 a, u64 flip) { return inverted(a, flip); }
	DEVICE u64 leave(u64 a, u64 flip) { return inverted(a, flip); }
	DEVICE float leave(float a, u64 flip) { return a != a ? as<float>(u32(kCanonical32)) : inverted(a, flip); }
	DEVICE double leave(double a, u64 flip) { return a != a ? as<double>(u64(kCanonical64)) : inverted(a, flip); }
};

struct Bitwise {
	enum { divides = false };

	template <class A>
	DEVICE bool clean(A) {
		return true;
	}
	template <class A>
	DEVICE A enter(A a, u64 flip) {
		return inverted(a, flip);
	}
	template <class A>
	DEVICE A leave(A a, u64 flip) {
		return inverted(a, flip);
	}
};

struct And : Bitwise {
	template <class A>
	DEVICE A identity() {
		return ~A(0);
	}
	template <class A>
	DEVICE A exact(A a, A b) {
		return a & b;
	}
	template <class A>
	DEVICE A quick(A a, A b) {
		return a & b;
	}
};

struct Xor : Bitwise {
	template <class A>
	DEVICE A identity() {
		return 0;
	}
	template <class A>
	DEVICE A exact(A a, A b) {
		return a ^ b;
	}
	template <class A>
	DEVICE A quick(A a, A b) {
		return a ^ b;
	}
};

// divided divides a sum of elements of B: integers towards zero, where the divisor is more than 1.
template <class B, class P>
DEVICE u32 divided(u32 a, const P &p) {
	u32 left = 32 - 8 * sizeof(B);
	i64 v = p.flags & kSigned ? i64(i32(a << left) >> left) : i64(a << left >> left);
	u64 sign = u64(v >> 63);
	u64 q = u64((unsigned __int128)((u64(v) ^ sign) - sign) * p.magic >> 64);
	return u32((q ^ sign) - sign);
}

template <class B, class P>
DEVICE u64 divided(u64 a, const P &p) {
	u64 sign = p.flags & kSigned ? u64(i64(a) >> 63) : 0;
	u64 q = ((a ^ sign) - sign) / p.divisor;
	return (q ^ sign) - sign;
}

template <class B, class P>
DEVICE float divided(float a, const P &p) {
	float by = as<float>(u32(p.divisor)), q = a / by;
	return q == q ? q : nanOf(a, by);
}

template <class B, class P>
DEVICE double divided(double a, const P &p) {
	double by = as<double>(p.divisor), q = a / by;
	return q == q ? q : nanOf(a, by);
}

template <class B>
DEVICE B loadElement(u64 buffer, u64 i, bool natural) {
	u64 at = buffer + i * sizeof(B);
	if (natural)
		return load<B>(at);
	B b = 0;
	for (u32 k = 0; k < sizeof(B); k++)
		b = B(b | B(B(load<u8>(at + k)) << (8 * k)));
	return b;
}

template <class B>
DEVICE void storeElement(u64 buffer, u64 i, bool natural, B b) {
	u64 at = buffer + i * sizeof(B);
	if (natural) {
		store<B>(at, b);
		return;
	}
	for (u32 k = 0; k < sizeof(B); k++)
		store<u8>(at + k, u8(b >> (8 * k)));
}

// reduceElement computes element i, whatever it holds and wherever it lies.
template <class T, class Op, class P>
DEVICE void reduceElement(const P &p, u64 i) {
	typedef typename T::Bits Bits;
	bool natural = p.flags & kNatural;
	auto a = Op::enter(T::widen(loadElement<Bits>(p.src[0], i, natural)), p.flip);
	ROLL
	for (u32 s = 1; s < p.sources; s++)
		a = Op::exact(a, Op::enter(T::widen(loadElement<Bits>(p.src[s], i, natural)), p.flip));
	a = Op::leave(a, p.flip);
	if constexpr (Op::divides)
		if (p.flags & kDivide) {
			if (p.flags & kRound)
				a = T::widen(T::narrow(a));
			a = divided<Bits>(a, p);
		}
	storeElement<Bits>(p.dst, i, natural, T::narrow(a));
}

// lane returns element i of v.
template <class B>
DEVICE B lane(Vector v, u32 i) {
	if constexpr (sizeof(B) == 8)
		return v[2 * i] | u64(v[2 * i + 1]) << 32;
	else
		return B(v[i * sizeof(B) / 4] >> (i * sizeof(B) % 4 * 8));
}

// setLane adds element i to v, where it was 0.
template <class B>
DEVICE void setLane(Vector &v, u32 i, B b) {
	if constexpr (sizeof(B) == 8) {
		v[2 * i] = u32(b);
		v[2 * i + 1] = u32(b >> 32);
	} else {
		v[i * sizeof(B) / 4] |= u32(b) << (i * sizeof(B) % 4 * 8);
	}
}

// A Block is the numbers of one vector while it is reduced.
template <class T, class Op>
struct Block {
	typedef typename T::Bits Bits;
	typedef typename T::Lane Lane;
	enum { lanes = 16 / sizeof(Lane) };

	typename T::Acc a[lanes];

	DEVICE void begin(Block &b) {
		UNROLL
		for (u32 i = 0; i < lanes; i++)
			b.a[i] = Op::template identity<typename T::Acc>();
	}

	DEVICE void first(Block &b, Vector v, u64 flip) {
		UNROLL
		for (u32 i = 0; i < lanes; i++)
			b.a[i] = Op::enter(T::widenQuick(lane<Lane>(v, i)), flip);
	}

	DEVICE void next(Block &b, Vector v, u64 flip) {
		UNROLL
		for (u32 i = 0; i < lanes; i++)
			b.a[i] = Op::quick(b.a[i], Op::enter(T::widenQuick(lane<Lane>(v, i)), flip));
	}

	// last sets v to the result and reports whether it is one.
	template <class P>
	DEVICE bool last(Block &b, Vector &v, const P &p) {
		bool clean = true;
		UNROLL
		for (u32 i = 0; i < lanes; i++) {
			clean &= Op::clean(b.a[i]);
			b.a[i] = Op::leave(b.a[i], p.flip);
		}
		if constexpr (Op::divides)
			if (p.flags & kDivide) {
				UNROLL
				for (u32 i = 0; i < lanes; i++) {
					if (p.flags & kRound)
						b.a[i] = T::widenQuick(T::narrowQuick(b.a[i]));
					b.a[i] = divided<Bits>(b.a[i], p);
				}
			}
		v = Vector{0, 0, 0, 0};
		UNROLL
		for (u32 i = 0; i < lanes; i++)
			setLane<Lane>(v, i, T::narrowQuick(b.a[i]));
		return clean;
	}
};

// reduceVector reduces one vector, at this number of bytes in every buffer, and reports whether the
// result is clean. Loads are issued for several sources at a time.
template <class T, class Op, class P>
DEVICE bool reduceVector(const P &p, u64 at) {
	typedef Block<T, Op> Block;
	const u32 group = 4;
	Block b;
	Block::begin(b);
	ROLL
	for (u32 s = 0; s < p.sources; s += group) {
		Vector x[group];
		UNROLL
		for (u32 k = 0; k < group; k++)
			if (s + k < p.sources)
				x[k] = load<Vector>(p.src[s + k] + at);
		UNROLL
		for (u32 k = 0; k < group; k++)
			if (s + k < p.sources)
				Block::next(b, x[k], p.flip);
	}
	Vector v;
	bool clean = Block::last(b, v, p);
	if (clean)
		store<Vector>(p.dst + at, v);
	return clean;
}

// reducePair reduces two vectors of two sources, or the first of them, and returns the bits of
// those whose results are not clean.
template <class T, class Op, class P>
DEVICE u32 reducePair(const P &p, u64 at, u64 step, u32 vectors) {
	typedef Block<T, Op> Block;
	Vector x[2], y[2];
	u32 unclean = 0;
	UNROLL
	for (u32 u = 0; u < 2; u++)
		if (u < vectors) {
			x[u] = load<Vector>(p.src[0] + at + u * step);
			y[u] = load<Vector>(p.src[1] + at + u * step);
		}
	UNROLL
	for (u32 u = 0; u < 2; u++)
		if (u < vectors) {
			Block b;
			Block::first(b, x[u], p.flip);
			Block::next(b, y[u], p.flip);
			if (Block::last(b, x[u], p))
				store<Vector>(p.dst + at + u * step, x[u]);
			else
				unclean |= 1u << u;
		}
	return unclean;
}

// reduce does this thread's part of a reduction: first vectors, then the elements around them.
template <class T, class Op, class P>
DEVICE void reduce(const P &p) {
	const u32 size = sizeof(typename T::Bits), per = 16 / size;
	// Two vectors of 16 numbers do not fit into the registers.
	const bool pairs = P::few && Block<T, Op>::lanes < 16;
	const u64 step = threads(), rest = p.n - p.vectors * per;
	u64 v = position(), e = v;
	ROLL
	for (;;) {
		u64 first;
		u32 again = 1, count = 1;
		if (v < p.vectors) {
			first = p.head + v * per;
			count = per;
			if (pairs && p.sources == 2) {
				again = reducePair<T, Op>(p, first * size, step * 16, v + step < p.vectors ? 2 : 1);
				v += 2 * step;
			} else {
				again = !reduceVector<T, Op>(p, first * size);
				v += step;
			}
		} else if (e < rest) {
			first = e < p.head ? e : e + p.vectors * per;
			e += step;
		} else {
			return;
		}
		ROLL
		for (; again != 0; again >>= 1, first += step * per)
			if (again & 1)
				ROLL
				for (u32 i = 0; i < count; i++)
					reduceElement<T, Op>(p, first + i);
	}
}

// copyUnits copies with loads and stores of the size of U, many at a time.
template <class U, u32 many>
DEVICE void copyUnits(const CopyParams &p) {
	const u64 step = threads(), units = (p.n - p.head) / sizeof(U), end = p.head + units * sizeof(U);
	for (u64 i = position(); i < units; i += many * step) {
		U x[many];
		UNROLL
		for (u32 k = 0; k < many; k++)
			if (i + k * step < units)
				x[k] = load<U>(p.src + p.head + (i + k * step) * sizeof(U));
		UNROLL
		for (u32 k = 0; k < many; k++)
			if (i + k * step < units)
				store<U>(p.dst + p.head + (i + k * step) * sizeof(U), x[k]);
	}
	for (u64 i = position(); i < p.head; i += step)
		store<u8>(p.dst + i, load<u8>(p.src + i));
	for (u64 i = end + position(); i < p.n; i += step)
		store<u8>(p.dst + i, load<u8>(p.src + i));
}

// copy does this thread's part of a copy.
template <u32 many = 4>
DEVICE void copy(const CopyParams &p) {
	switch (p.unit) {
	case 16:
		copyUnits<Vector, many>(p);
		break;
	case 8:
		copyUnits<u64, many>(p);
		break;
	case 4:
		copyUnits<u32, many>(p);
		break;
	case 2:
		copyUnits<u16, many>(p);
		break;
	default:
		copyUnits<u8, many>(p);
	}
}
