// The parameters of the kernels. The structs of params.go have the same layout.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

// Flags of a reduction.
enum : u32 {
	kDivide = 1,  // divide what was combined by the divisor
	kRound = 2,   // round it to the type of the elements before
	kSigned = 4,  // the integers to divide are signed
	kNatural = 8, // all addresses are multiples of the size of an element
};

// ReduceParams combines elements 0..n-1 of the sources into dst. Elements head..head+per*vectors-1,
// where per of them have 16 bytes, begin at a multiple of 16 in every buffer.
template <int most>
struct ReduceParams {
	u64 dst;
	u64 n;
	u64 vectors;
	u64 flip;    // the bits of an element to invert before and after
	u64 divisor; // as an integer, or the bits of a float32 or float64
	u64 magic;   // the upper half of x*magic is x/divisor, for integers of up to 32 bits
	u32 head;
	u32 sources;
	u32 flags;
	u32 unused;
	u64 src[most];
};

typedef ReduceParams<8> FewSources;
typedef ReduceParams<504> ManySources; // 4 KiB, the most that every driver takes

// CopyParams copies n bytes. After head bytes both addresses are multiples of the unit.
struct CopyParams {
	u64 dst;
	u64 src;
	u64 n;
	u32 head;
	u32 unit; // bytes: 1, 2, 4, 8 or 16
};

// WordParams is a word of 8 bytes and a value.
struct WordParams {
	u64 word;
	u64 value;
};

// PacketParams combines the n elements of all ranks into dst. Rank r writes its packets into slot r
// of every other rank's inbox, and reads its own inbox.
struct PacketParams {
	u64 dst;
	u64 src;
	u64 n;
	u64 flip;
	u64 divisor;
	u64 magic;
	u64 slot;   // bytes
	u64 stop;   // a word; the kernel gives up when it is not 0
	u64 failed; // a word that becomes 1 if the kernel gave up
	u32 ranks;
	u32 rank;
	u32 flags;
	u32 call;     // what marks the packets of this call
	u64 inbox[8]; // of every rank
};
