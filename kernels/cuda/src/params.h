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
	// Of packets:
	kSilent = 16, // this rank has no source, and sends zeros
	kIdle = 32,   // this rank has no result
};

// ReduceParams combines elements 0..n-1 of the sources into dst. Elements head..head+per*vectors-1,
// where per of them have 16 bytes, begin at a multiple of 16 in every buffer.
template <int most>
struct ReduceParams {
	enum { few = most <= 8 };
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

// What is in a place.
enum : u32 {
	kCopies = 1,
	kReduction = 2,
};

// A Place is the memory of a device for work that is chosen when the stream has its kernels:
// copies, a reduction, or nothing. Then, if word is not 0, value is stored there.
struct Place {
	u32 kind;
	u32 copies; // each has three numbers of src: where to, where from, bytes
	u64 word;
	u64 value;
	u64 dst;
	u64 n;
	u64 vectors;
	u64 flip;
	u64 divisor;
	u64 magic;
	u32 head;
	u32 sources;
	u32 flags;
	u32 unused;
	u64 src[48];
};
static_assert(sizeof(Place) == 472, "the size is known to package cuda and to the fake driver");

// PlaceParams is a place.
struct PlaceParams {
	u64 place;
};

// TellParams is a place, and a word that is stored after that of the place.
struct TellParams {
	u64 place;
	u64 word;
	u64 value;
};

// WordParams is a word of 8 bytes and a value.
struct WordParams {
	u64 word;
	u64 value;
};

// Why a kernel gave up, in the low byte of a word; the next byte is a rank, and the others are what
// the rank's call is: above the numbers of its marks, the second above the first.
enum : u64 {
	kStopped = 1, // it was told to
	kLate = 2,    // the rank's packets did not come within the limit
	kDiffers = 3, // the rank made another call
};

// A kernel without an id has been recorded.
enum : u64 { kRecorded = 1ull << 63 };

// A mark has the number of the call in its low bits, and a part of what the call is above them.
enum : u32 { kNumber = 511, kNumberBits = 9 };

// PacketParams exchanges n elements with every rank, and combines them or puts them side by side.
// Rank r writes its packets into slot r of every other rank's inbox, and reads its own inbox.
struct PacketParams {
	u64 dst;
	u64 src;
	u64 n;
	u64 flip;
	u64 divisor;
	u64 magic;
	u64 from;  // bytes of a part of the source, which has one for every rank; 0: all get the same
	u64 to;    // bytes of a part of the result, which has one of every rank; 0: it has one
	u64 slot;  // bytes
	u64 calls; // of this rank: 0 until a kernel gave up, then by packet the number of its latest call; 4 bytes each
	// Of the host: stop, and if it is not 0 kernels give up; why one gave up; 1 if one began later;
	// the id of the one that gave up; how many kernels with an id have ended, which the streams of
	// the host count; what the call is of the one that gave up.
	u64 words;
	u64 limit; // nanoseconds that a kernel waits; 0: it is not bounded
	u64 id;    // 0: it has none, and takes the next one with kRecorded
	u32 ranks;
	u32 rank;
	u32 flags;
	u32 root;  // the rank whose elements are put; ranks: those of all are
	u32 marks[2]; // what the call is, as in a packet
	u32 part[8]; // of every rank, where there are several
	u64 inbox[8]; // of every rank
};
