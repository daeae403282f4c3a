// Work that is in a place when its kernel begins: see Place.
#pragma once

#include "reduce.h"

// A PlacedTable is the sources of a place.
struct PlacedTable {
	u64 at;
	METHOD u64 operator[](u32 s) const { return fixed(at + s * sizeof(u64)); }
};

// PlacedSources is the ReduceParams of a place. Its sources stay where they are: an array that is
// indexed would be copied to the memory of each thread.
struct PlacedSources {
	enum { few = 1 };
	u64 dst, n, vectors, flip, divisor, magic;
	u32 head, sources, flags;
	PlacedTable src;
};

#define PLACED(field) fixed(place + __builtin_offsetof(Place, field))

DEVICE PlacedSources placedSources(u64 place) {
	const u64 first = PLACED(head); // and sources
	return {PLACED(dst), PLACED(n), PLACED(vectors), PLACED(flip), PLACED(divisor), PLACED(magic),
	        u32(first), u32(first >> 32), u32(PLACED(flags)), {place + __builtin_offsetof(Place, src)}};
}

// copyAny copies n bytes between any addresses.
ONCE void copyAny(u64 dst, u64 src, u64 n) {
	CopyParams p = {dst, src, n, 0, 16};
	const u64 apart = dst ^ src;
	if (apart % 16 != 0)
		p.unit = u32(apart & -apart);
	const u64 head = -dst & (p.unit - 1);
	p.head = u32(head < n ? head : n);
	copy<2>(p); // with more, registers would have to be saved for the caller
}

// placedCopies does the copies of a place, which are independent of each other.
DEVICE void placedCopies(u64 place, u32 copies) {
	const PlacedTable table = {place + __builtin_offsetof(Place, src)};
	ROLL
	for (u32 i = 0; i < copies; i++)
		copyAny(table[3 * i], table[3 * i + 1], table[3 * i + 2]);
}

// copyPlaced does the work of a place that may have copies.
DEVICE void copyPlaced(const PlaceParams &p) {
	const u64 place = p.place, kind = PLACED(kind); // and copies
	if (u32(kind) == kCopies)
		placedCopies(place, u32(kind >> 32));
}

// reducePlaced does the work of a place that may have copies or a reduction.
template <class T, class Op>
DEVICE void reducePlaced(const PlaceParams &p) {
	const u64 place = p.place, kind = PLACED(kind);
	if (u32(kind) == kCopies)
		placedCopies(place, u32(kind >> 32));
	else if (u32(kind) == kReduction)
		reduce<T, Op>(placedSources(place));
}

// tell stores the words when the work of a place is done.
DEVICE void tell(const TellParams &p) {
	if (position() != 0)
		return;
	const u64 place = p.place, word = PLACED(word);
	if (word != 0)
		release(word, PLACED(value));
	release(p.word, p.value);
}
