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

// receive waits for a packet and reports whether it came before this rank was told to stop.
DEVICE bool receive(const PacketParams &p, u64 at, u64 &data) {
	u32 low, high;
	for (u32 polls = 1; !loadPacket(at, low, high, p.call); polls++) {
		if (polls % 64 != 0)
			continue;
		if (acquire(p.stop) != 0)
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
	ROLL
	for (u64 i = position(); i < packets; i += step) {
		u64 data = payload<Bits>(p, i);
		ROLL
		for (u32 r = 0; r < p.ranks; r++)
			if (r != p.rank)
				storePacket(p.inbox[r] + p.rank * p.slot + i * 16, u32(data), u32(data >> 32), p.call);
	}
	ROLL
	for (u64 i = position(); i < packets; i += step) {
		typename T::Acc a[per] = {};
		ROLL
		for (u32 r = 0; r < p.ranks; r++) {
			u64 data;
			if (r == p.rank)
				data = payload<Bits>(p, i);
			else if (!receive(p, p.inbox[p.rank] + r * p.slot + i * 16, data)) {
				release(p.failed, 1);
				return;
			}
			UNROLL
			for (u32 k = 0; k < per; k++) {
				auto x = Op::enter(T::widen(Bits(data >> (bits * k))), p.flip);
				a[k] = r == 0 ? x : Op::exact(a[k], x);
			}
		}
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
