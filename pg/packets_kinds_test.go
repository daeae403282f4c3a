//go:build cgo && linux

package pg

import (
	"bytes"
	"context"
	"fmt"
	"testing"

	"tutti/collectives"
	"tutti/device/cuda/fake"
	"tutti/mem"
	"tutti/p2p"
	"tutti/pg/flight"
)

// Short collectives of the kinds that devices do alone have the results of the host, at any
// address, and write nothing beside them. Of longer ones, the host takes part.
func TestShortKinds(t *testing.T) {
	limit := collectives.LoadStoreMin(collectives.AllGather)
	for _, n := range []int{2, 3} {
		onPackets(t, n, fake.Config{Devices: n}, Config{}, func(ctx context.Context, r packetRank) error {
			for _, count := range []int{1, 37, (limit - 1) / n, (limit + n - 1) / n} {
				if err := r.shortKinds(ctx, count, n*count < limit); err != nil {
					return fmt.Errorf("parts of %d bytes: %w", count, err)
				}
			}
			return nil
		})
	}
}

// token returns what the latest operation has told the other ranks.
func (g *Group) token() p2p.Token {
	g.job.proxy.Lock()
	defer g.job.proxy.Unlock()
	return g.run.Token()
}

// shortKinds runs collectives whose parts have count bytes. short says whether the devices do them
// alone.
func (r packetRank) shortKinds(ctx context.Context, count int, short bool) error {
	const edge = 9
	size, me := r.Size(), r.Rank()
	var memories [2]mem.Memory // destination and source
	for i := range memories {
		m, err := r.d.Alloc(size*count + 2*edge)
		if err != nil {
			return err
		}
		defer r.d.Free(m)
		memories[i] = m
	}
	type part func(at, parts int) Buffer
	for i, of := range []func(dst, src part) Operation{
		func(dst, src part) Operation { return AllGatherOp{Dst: dst(0, size), Src: src(0, 1)} },
		func(dst, _ part) Operation { return AllGatherOp{Dst: dst(0, size), Src: dst(me, 1)} },
		func(dst, src part) Operation { return ReduceScatterOp{Dst: dst(0, 1), Src: src(0, size), Op: Max} },
		func(dst, src part) Operation { return AllToAllOp{Dst: dst(0, size), Src: src(0, size)} },
	} {
		var host [2][]byte
		var here, there [2]part
		for k, m := range memories {
			b := r.f.Bytes(m)
			for j := range b {
				b[j] = byte(j*(me+3) + 7*i + k + j>>8)
			}
			host[k] = bytes.Clone(b)
			at := edge - 2*k // an odd address, and another one
			here[k] = func(part, parts int) Buffer { return BufferOf(host[k][at+part*count:][:parts*count]) }
			there[k] = func(part, parts int) Buffer {
				return DeviceBuffer(m.Slice(at+part*count, parts*count), Uint8, nil)
			}
		}
		if err := r.Do(ctx, of(here[0], here[1])); err != nil {
			return err
		}
		before, op := r.Copies(), of(there[0], there[1])
		var err error
		if (i+me)%2 == 0 { // blocking and started ones are the same operation
			err = r.Do(ctx, op)
		} else {
			err = r.Start(op).Wait(ctx)
		}
		if err != nil {
			return err
		}
		for k, m := range memories {
			if !bytes.Equal(r.f.Bytes(m), host[k]) {
				return fmt.Errorf("%T %d: memory %d is not as on the host", op, i, k)
			}
		}
		if copied := r.Copies() > before; short && copied {
			return fmt.Errorf("%T %d has gone through the host", op, i)
		}
		if call := flight.Call(r.token().Call); call.InPackets() == call != short {
			return fmt.Errorf("%T %d was called as %v", op, i, flight.Describe(call, 0))
		}
		text, err := r.job.status(ctx, 1)
		if err != nil {
			return err
		}
		s, err := flight.Parse(text)
		if err != nil {
			return err
		}
		if last := s.Groups[0].Last; last == nil || last.Packets != short || short && last.Algorithm != "" {
			return fmt.Errorf("%T %d is recorded as %+v", op, i, last)
		}
	}
	return nil
}

// An operation with as many elements as a message that prepares the first one in packets has is
// itself. A rank that comes in later knows nothing of that message.
func TestCallLikeOneThatPreparesPackets(t *testing.T) {
	onPackets(t, 2, fake.Config{Devices: 2}, Config{}, func(ctx context.Context, r packetRank) error {
		m, err := r.number(1)
		if err != nil {
			return err
		}
		if err := r.Do(ctx, AllReduceOp{Dst: DeviceBuffer(m, Uint32, nil), Op: Sum}); err != nil {
			return err
		}
		if err := AllGather(ctx, r.Group, make([]int64, 2*messageSize/8), make([]int64, messageSize/8)); err != nil {
			return err
		}
		if call := flight.Call(r.token().Call); call.Kind() != collectives.AllGather {
			return fmt.Errorf("an allgather was called as %v", flight.Describe(call, 0))
		}
		return nil
	})
}
