// Collectives of small messages over memory that the ranks have mapped of each other. A rank stores
// into the inboxes of others and nowhere else.
#pragma once

#include "reduce.h"

// payload returns elements of the source, 8 bytes of them.
template <class B>
DEVICE u64 payload(const PacketParams &p, u64 packet) {
	const u32 per = 8 / sizeof(B);
	u64 data = 0;
	for (u32 k = 0; k < per; k++)
		if (packet * per + k < p.n)
			data |= u64(loadElement<B>(p.src, packet * per + k, p.flags & kNatural)) << (8 * sizeof(B) * k);
	return data;
}

// giveUp says why, unless another thread has.
DEVICE void giveUp(const PacketParams &p, u64 why) {
	if (claim(p.calls))
		release(p.words + 8, why);
}

// A Wait is what a thread knows while it waits for packets.
struct Wait {
	u64 began;
	u64 stop; // as it was then
};

// receive waits for a packet of a rank, and reports whether it came.
DEVICE bool receive(const PacketParams &p, const Wait &w, u64 at, u32 rank, u32 mark, u64 &data) {
	u32 low, high, first, second;
	for (u32 polls = 1;; polls++) {
		loadPacket(at, low, first, high, second);
		if (first == mark && second == mark)
			break;
		// What was there before has the number of the call before the last.
		if (first != mark && (first & kNumber) == (mark & kNumber)) {
			giveUp(p, kDiffers | u64(rank) << 8 | u64(first) << 32);
			return false;
		}
		if (polls % 64 != 0)
			continue;
		if (acquire(p.words) != 0)
			giveUp(p, kStopped);
		else if (p.limit != 0 && nanoseconds() - w.began > p.limit)
			giveUp(p, kLate | u64(rank) << 8);
		if (number(p.calls) != 0)
			return false;
		pause();
	}
	data = low | u64(high) << 32;
	return true;
}

// allReducePackets sends this thread's part of the source to all, then combines that part of all
// ranks, in their order.
template <class T, class Op>
DEVICE void allReducePackets(const PacketParams &p) {
	typedef typename T::Bits Bits;
	const u32 per = 8 / sizeof(Bits), bits = 8 * sizeof(Bits);
	const u64 step = threads(), packets = (p.n + per - 1) / per;
	if (number(p.calls) != 0) {
		if (position() == 0)
			release(p.words + 16, 1);
		return;
	}
	// The word of the host is far away; it is on its way while packets are.
	const Wait w = {nanoseconds(), glance(p.words)};
	ROLL
	for (u64 i = position(); i < packets; i += step) {
		const u32 call = number(p.calls + 4 + 4 * i) + 1, mark = p.call | (call & kNumber);
		const u64 half = u64(call & 1) * p.ranks * p.slot;
		u64 data = payload<Bits>(p, i);
		ROLL
		for (u32 r = 0; r < p.ranks; r++)
			if (r != p.rank)
				storePacket(p.inbox[r] + half + p.rank * p.slot + i * 16, u32(data), u32(data >> 32), mark);
	}
	ROLL
	for (u64 i = position(); i < packets; i += step) {
		const u32 call = number(p.calls + 4 + 4 * i) + 1, mark = p.call | (call & kNumber);
		const u64 half = u64(call & 1) * p.ranks * p.slot;
		typename T::Acc a[per] = {};
		ROLL
		for (u32 r = 0; r < p.ranks; r++) {
			u64 data;
			if (r == p.rank)
				data = payload<Bits>(p, i);
			else if (!receive(p, w, p.inbox[p.rank] + half + r * p.slot + i * 16, r, mark, data))
				return;
			UNROLL
			for (u32 k = 0; k < per; k++) {
				auto x = Op::enter(T::widen(Bits(data >> (bits * k))), p.flip);
				a[k] = r == 0 ? x : Op::exact(a[k], x);
			}
		}
		if (w.stop != 0) {
			giveUp(p, kStopped);
			return;
		}
		setNumber(p.calls + 4 + 4 * i, call);
		UNROLL
		for (u32 k = 0; k < per; k++) {
			if (i * per + k >= p.n)
				break;
			a[k] = Op::leave(a[k], p.flip);
			if constexpr (Op::divides)
				if (p.flags & kDivide)
					a[k] = divided<Bits>(a[k], p);
			storeElement<Bits>(p.dst, i * per + k, p.flags & kNatural, T::narrow(a[k]));
		}
	}
}
