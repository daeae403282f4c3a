// Collectives over memory that the ranks have mapped of each other. A rank stores into the inboxes
// of others and nowhere else.
#pragma once

#include "reduce.h"

// payload returns elements of memory at src, 8 bytes of them.
template <class B>
DEVICE u64 payload(const PacketParams &p, u64 src, u64 packet) {
	const u32 per = 8 / sizeof(B);
	u64 data = 0;
	ROLL
	for (u32 k = 0; k < per; k++)
		if (packet * per + k < p.n)
			data |= u64(loadElement<B>(src, packet * per + k, p.flags & kNatural)) << (8 * sizeof(B) * k);
	return data;
}

// what is what a call is, from the marks of its packets.
DEVICE u64 what(u32 first, u32 second) {
	return u64(first >> kNumberBits) | u64(second >> kNumberBits) << (32 - kNumberBits);
}

// claimed says why a call gave up, unless another thread has.
ONCE void claimed(u64 calls, u64 words, u64 id, u64 call, u64 why) {
	if (!claim(calls))
		return;
	release(words + 24, id != 0 ? id : kRecorded | (acquire(words + 32) + 1));
	release(words + 40, call);
	release(words + 8, why);
}

DEVICE void giveUp(const PacketParams &p, u64 why) {
	claimed(p.calls, p.words, p.id, what(p.marks[0], p.marks[1]), why);
}

// A Wait is what a thread knows while it waits for packets.
struct Wait {
	u64 began;
	u64 stop; // as it was then
};

// A Round is the packets that a slot has room for, of those of a call. A call of several rounds is
// so many calls to those who count.
struct Round {
	u64 base;   // the first packet
	u64 i;      // the packet
	u32 number; // of the call
	u64 at;     // where the packet is in the slot of the first rank, in every inbox
};

DEVICE Round roundOf(const PacketParams &p, u64 base, u64 i) {
	const u64 k = i - base;
	const u32 call = number(p.calls + 4 + 4 * k) + 1;
	return {base, i, call & kNumber, u64(call & 1) * p.ranks * p.slot + k * 16};
}

// done counts the call.
DEVICE void done(const PacketParams &p, const Round &r) {
	const u64 at = p.calls + 4 + 4 * (r.i - r.base);
	setNumber(at, number(at) + 1);
}

// send sends this thread's packets of a round to all.
template <class B>
DEVICE void send(const PacketParams &p, u64 base, u64 end) {
	const u64 step = threads();
	ROLL
	for (u64 i = base + position(); i < end; i += step) {
		const Round round = roundOf(p, base, i);
		u64 data = 0;
		if (p.from == 0 && !(p.flags & kSilent))
			data = payload<B>(p, p.src, i);
		ROLL
		for (u32 r = 0; r < p.ranks; r++) {
			if (r == p.rank)
				continue;
			if (p.from != 0 && !(p.flags & kSilent))
				data = payload<B>(p, p.src + p.from * p.part[r], i);
			storePacket(p.inbox[r] + round.at + p.rank * p.slot, data, p.marks[0] | round.number,
			            p.marks[1] | round.number);
		}
	}
}

// receive waits for the packet of a rank, and reports whether it came.
DEVICE bool receive(const PacketParams &p, const Wait &w, const Round &round, u32 rank, u64 &data) {
	const u64 at = p.inbox[p.rank] + round.at + rank * p.slot;
	const u32 mark = p.marks[0] | round.number, other = p.marks[1] | round.number;
	u32 low, high, first, second;
	for (u32 polls = 1;; polls++) {
		loadPacket(at, low, first, high, second);
		if (first == mark && second == other)
			break;
		// What was there before has the number of the call before the last.
		if ((first & kNumber) == round.number && (second & kNumber) == round.number) {
			giveUp(p, kDiffers | u64(rank) << 8 | what(first, second) << 16);
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

// begin reports whether the kernel may begin.
DEVICE bool begin(const PacketParams &p) {
	if (number(p.calls) == 0)
		return true;
	if (position() == 0)
		release(p.words + 16, 1);
	return false;
}

// reducePackets sends this thread's parts of the source, then combines what it got of all ranks, in
// their order.
template <class T, class Op>
DEVICE void reducePackets(const PacketParams &p) {
	typedef typename T::Bits Bits;
	const u32 per = 8 / sizeof(Bits), bits = 8 * sizeof(Bits);
	const u64 step = threads(), packets = (p.n + per - 1) / per, most = p.slot / 16;
	if (!begin(p))
		return;
	// The word of the host is far away; it is on its way while packets are.
	const Wait w = {nanoseconds(), glance(p.words)};
	ROLL
	for (u64 base = 0; base < packets; base += most) {
		const u64 end = packets - base < most ? packets : base + most;
		send<Bits>(p, base, end);
		ROLL
		for (u64 i = base + position(); i < end; i += step) {
			const Round round = roundOf(p, base, i);
			typename T::Acc a[per] = {};
			ROLL
			for (u32 r = 0; r < p.ranks; r++) {
				u64 data;
				if (r == p.rank)
					data = payload<Bits>(p, p.src + p.from * p.part[r], i);
				else if (!receive(p, w, round, r, data))
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
			done(p, round);
			if (p.flags & kIdle)
				continue;
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
}

// put stores elements, 8 bytes of them, at dst.
template <class B>
DEVICE void put(const PacketParams &p, u64 dst, u64 packet, u64 data) {
	const u32 per = 8 / sizeof(B);
	ROLL
	for (u32 k = 0; k < per; k++)
		if (packet * per + k < p.n)
			storeElement<B>(dst, packet * per + k, p.flags & kNatural, B(data >> (8 * sizeof(B) * k)));
}

// gatherPackets sends this thread's parts of the source, then puts what it got of the ranks side by
// side.
template <class B>
DEVICE void gatherPackets(const PacketParams &p) {
	const u32 per = 8 / sizeof(B);
	const u64 step = threads(), packets = (p.n + per - 1) / per, most = p.slot / 16;
	if (!begin(p))
		return;
	const Wait w = {nanoseconds(), glance(p.words)};
	ROLL
	for (u64 base = 0; base < packets; base += most) {
		const u64 end = packets - base < most ? packets : base + most;
		send<B>(p, base, end);
		ROLL
		for (u64 i = base + position(); i < end; i += step) {
			const Round round = roundOf(p, base, i);
			ROLL
			for (u32 r = 0; r < p.ranks; r++) {
				u64 data = 0;
				const bool counts = !(p.flags & kIdle) && (p.root == r || p.root == p.ranks);
				if (r != p.rank && !receive(p, w, round, r, data))
					return;
				if (!counts || w.stop != 0)
					continue;
				if (r == p.rank)
					data = payload<B>(p, p.src + p.from * p.part[r], i);
				put<B>(p, p.dst + p.to * p.part[r], i, data);
			}
			if (w.stop != 0) {
				giveUp(p, kStopped);
				return;
			}
			done(p, round);
		}
	}
}
