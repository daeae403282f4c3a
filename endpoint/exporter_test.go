//go:build cgo && linux

package endpoint

import (
	"bytes"
	"strings"
	"syscall"
	"testing"

	"tutti/device"
	"tutti/device/cuda"
	"tutti/device/cuda/fake"
	"tutti/device/cuda/fakegpu"
	"tutti/mem"
	"tutti/rdma/soft"
)

// exporting is a device of a fake driver, and the endpoint that uses it.
type exporting struct {
	t testing.TB
	*fake.Driver
	*cuda.Device
	e *Endpoint
}

func newExporting(t *testing.T, name string, c fake.Config, r RDMA) *exporting {
	t.Helper()
	x := &exporting{t: t}
	x.Device, x.Driver = fakegpu.Open(t, 0, c)
	ctx, err := NewContext(ContextConfig{Devices: []device.Device{x.Device}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := ctx.Close(); err != nil {
			t.Error(err)
		}
	})
	x.e = newEndpoint(t, ctx, Config{Name: name, RDMA: r})
	return x
}

// memory returns memory of the device with these bytes.
func (x *exporting) memory(b []byte) mem.Memory {
	x.t.Helper()
	m, err := x.Alloc(len(b))
	if err != nil {
		x.t.Fatal(err)
	}
	copy(x.Bytes(m), b)
	return m
}

// Memory of devices has the same bytes in the end, whatever carries them, and the devices do if
// they can.
func TestMemoryOfDevicesOverRDMA(t *testing.T) {
	refuse := syscall.Errno(0)
	for name, c := range map[string]struct {
		fake    fake.Config
		refused bool // the cards refuse DMA buffers
		local   bool // memory of operations goes by RDMA
		region  bool // a region that is read and written does
	}{
		"ordered":        {fake.Config{DMABuf: true}, false, true, true},
		"unordered":      {fake.Config{DMABuf: true, Unordered: true}, false, true, false},
		"not exported":   {fake.Config{}, false, false, false},
		"cards without":  {fake.Config{DMABuf: true}, true, false, false},
		"neither of two": {fake.Config{}, true, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			refuse = 0
			if c.refused {
				refuse = syscall.EOPNOTSUPP
			}
			_, r := newFabric(t, soft.Config{Late: 3, Faults: soft.Faults{Call: func(_, call string) syscall.Errno {
				if strings.HasSuffix(call, "of a DMA buffer") {
					return refuse
				}
				return 0
			}}})
			ra, rb := devices(r)
			b := newExporting(t, "b", c.fake, rb)
			a := newExporting(t, "a", c.fake, ra)
			const size = 4 << 20
			data, hostData := b.memory(make([]byte, size)), shared(t, size)
			for name, m := range map[string]mem.Memory{"gpu": data, "host": mem.Host(hostData, mem.Anywhere)} {
				region, err := b.e.Register(name, m, RegionConfig{Rights: Read | Write})
				if err != nil {
					t.Fatal(err)
				}
				defer region.Unregister()
			}
			p, err := a.e.Connect(t.Context(), b.e.Info())
			if err != nil {
				t.Fatal(err)
			}
			q, err := b.e.Accept(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			warm(t, p, "host")
			warmSends(t, p, q)
			warmSends(t, q, p)
			if c.region {
				warm(t, p, "gpu")
			}
			for i, n := range []int{1, 5000, exportFrom, exportFrom + 7, 3<<20 + 5} {
				off, want := int64(i*13), pattern(n, uint64(i))
				src, dst := a.memory(want), a.memory(make([]byte, n))
				long := n >= exportFrom
				for region, at := range map[string][]byte{"gpu": b.Bytes(data), "host": hostData} {
					direct := long && c.local && (region == "host" || c.region)
					reads, writes := directOf(p, OpRead), directOf(p, OpWrite)
					wait(t, p.Start(Op{Kind: OpWrite, Local: src, Region: region, Offset: off}))
					if !bytes.Equal(at[off:][:n], want) {
						t.Fatalf("a write of %d bytes to %s: they differ", n, region)
					}
					copy(a.Bytes(dst), make([]byte, n))
					wait(t, p.Start(Op{Kind: OpRead, Local: dst, Region: region, Offset: off}))
					if !bytes.Equal(a.Bytes(dst), want) {
						t.Fatalf("a read of %d bytes of %s: they differ", n, region)
					}
					reads, writes = directOf(p, OpRead)-reads, directOf(p, OpWrite)-writes
					if (reads == 1) != direct || (writes == 1) != direct {
						t.Errorf("%d bytes of %s: %d reads and %d writes by RDMA, want them: %t", n, region, reads,
							writes, direct)
					}
				}
				host := make([]byte, n)
				wait(t, p.Read(host, "gpu", off))
				if !bytes.Equal(host, want) {
					t.Fatalf("a read of %d bytes of gpu to host memory: they differ", n)
				}
				sends, recvs := directOf(p, OpSend), directOf(q, OpRecv)
				got := b.memory(make([]byte, n))
				f := q.Start(Op{Kind: OpRecv, Local: got, Exact: true})
				wait(t, p.Start(Op{Kind: OpSend, Local: src}))
				if wait(t, f); !bytes.Equal(b.Bytes(got), want) {
					t.Fatalf("a message of %d bytes: they differ", n)
				}
				sends, recvs = directOf(p, OpSend)-sends, directOf(q, OpRecv)-recvs
				if (sends == 1) != (long && c.local) || sends != recvs {
					t.Errorf("a message of %d bytes: %d sends and %d recvs by RDMA", n, sends, recvs)
				}
			}
			if n := a.e.Stats().Detours + b.e.Stats().Detours; n > 0 {
				t.Errorf("%d paths failed", n)
			}
			flushed := a.Calls()["cuFlushGPUDirectRDMAWrites"] > 0 && b.Calls()["cuFlushGPUDirectRDMAWrites"] > 0
			if want := c.fake.Unordered && c.local; flushed != want {
				t.Errorf("flushed: %t, want %t", flushed, want)
			}
			loansEnd(t, p)
		})
	}
}

// What cannot be flushed is read again, by TCP.
func TestFlushesThatFail(t *testing.T) {
	_, r := newFabric(t, soft.Config{})
	ra, rb := devices(r)
	b := newEndpoint(t, newContext(t), Config{Name: "b", RDMA: rb})
	a := newExporting(t, "a", fake.Config{DMABuf: true, Unordered: true}, ra)
	data := sharedPattern(t, 1<<20)
	if _, err := b.Register("data", mem.Host(data, mem.Anywhere), RegionConfig{}); err != nil {
		t.Fatal(err)
	}
	p, err := a.e.Connect(t.Context(), b.Info())
	if err != nil {
		t.Fatal(err)
	}
	warm(t, p, "data")
	before := directOf(p, OpRead)
	for round := range 3 {
		a.Fail("cuFlushGPUDirectRDMAWrites", 1, fake.NotSupported)
		dst := a.memory(make([]byte, len(data)))
		wait(t, p.Start(Op{Kind: OpRead, Local: dst, Region: "data"}))
		if !bytes.Equal(a.Bytes(dst), data) {
			t.Fatal("other bytes")
		}
		if n := directOf(p, OpRead) - before; n != 0 {
			t.Errorf("round %d: %d reads by RDMA", round, n)
		}
	}
	if n := a.Driver.Forget(); n != 2 { // of three: it was tried once
		t.Errorf("%d flushes were not tried, want 2", n)
	}
	warm(t, p, "data") // memory of the host
}

// A message from a region in memory of a device is not exported again.
func TestMessagesFromRegionsOfDevices(t *testing.T) {
	_, r := newFabric(t, soft.Config{})
	ra, rb := devices(r)
	b := newEndpoint(t, newContext(t), Config{Name: "b", RDMA: rb})
	a := newExporting(t, "a", fake.Config{DMABuf: true}, ra)
	want := pattern(2*exportFrom, 1)
	m := a.memory(want)
	if _, err := a.e.Register("data", m, RegionConfig{}); err != nil {
		t.Fatal(err)
	}
	defer a.e.Close() // before the device
	p, err := a.e.Connect(t.Context(), b.Info())
	if err != nil {
		t.Fatal(err)
	}
	q := accept(t, b)
	warmSends(t, p, q)
	for range 5 {
		buf := make([]byte, exportFrom)
		f, g := p.Start(Op{Kind: OpSend, Local: m.Slice(100, len(buf))}), q.Recv(buf)
		wait(t, g)
		if wait(t, f); !bytes.Equal(buf, want[100:][:len(buf)]) {
			t.Fatal("other bytes")
		}
	}
	if n := a.Calls()["cuMemGetHandleForAddressRange"]; n != 1 {
		t.Errorf("it was exported %d times", n)
	}
}
