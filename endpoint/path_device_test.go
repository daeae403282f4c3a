//go:build cgo && linux

package endpoint

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"tutti/internal/proctest"
	"tutti/mem"
	"tutti/rdma"
	"tutti/rdma/rdmatest"
	"tutti/rdma/verbs"
)

// lateAnswers has the device wait for answers of a busy machine for some seconds in all.
var lateAnswers = rdma.Settings{Timeout: 17}

// TestDeviceRDMA: the tests of every provider over the device of the virtual machine of make
// test-rdma, without which they are skipped.
func TestDeviceRDMA(t *testing.T) {
	p, _ := rdmatest.Devices(t, verbs.Load)
	for _, c := range directTests {
		t.Run(c.name, func(t *testing.T) { c.f(t, RDMA{Provider: p, From: 1, Settings: lateAnswers}) })
	}
}

// servingVariable is set for the other process of TestDeviceTwoProcesses.
const servingVariable = "TUTTI_TEST_ENDPOINT_SERVES"

// TestDeviceTwoProcesses: reads and writes of another process, which is killed while it serves.
func TestDeviceTwoProcesses(t *testing.T) {
	provider, _ := rdmatest.Devices(t, verbs.Load)
	r := RDMA{Provider: provider, From: 1, Settings: lateAnswers}
	if os.Getenv(servingVariable) != "" {
		b := newEndpoint(t, newContext(t), Config{Name: "child", RDMA: r})
		if _, err := b.Register("data", mem.Host(make([]byte, 4<<20), mem.Anywhere),
			RegionConfig{Rights: Read | Write}); err != nil {
			t.Fatal(err)
		}
		fmt.Println(b.Info())
		io.Copy(io.Discard, os.Stdin)
		return
	}
	child := proctest.RunPiped(t, proctest.Again([]string{servingVariable + "=1"},
		"-test.run=^TestDeviceTwoProcesses$"))
	info, err := ParseInfo(child.Hear())
	if err != nil {
		t.Fatal(err)
	}
	a := newEndpoint(t, newContext(t), Config{Name: "parent", RDMA: r})
	p := connect(t, a, info)
	warm(t, p, "data")
	before := directOf(p, OpWrite)
	for i, n := range sizes[1:] {
		src, off := pattern(n, uint64(i)), int64(i*13)
		wait(t, p.Write(src, "data", off))
		dst := make([]byte, n)
		if wait(t, p.Read(dst, "data", off)); !bytes.Equal(src, dst) {
			t.Fatalf("%d bytes differ", n)
		}
	}
	if n := directOf(p, OpWrite) - before; n != uint64(len(sizes)-1) || a.Stats().Detours > 0 {
		t.Errorf("%d writes by RDMA, state %+v", n, a.Stats())
	}
	var fs []*Future
	for range 50 {
		fs = append(fs, p.Write(make([]byte, 4<<20), "data", 0))
	}
	wait(t, fs[0])
	child.Signal(unix.SIGKILL)
	for _, f := range fs {
		if err := f.Wait(t.Context()); err != nil && !errors.Is(err, ErrBroken) {
			t.Fatal(err)
		}
	}
	if fs[len(fs)-1].Err() == nil {
		t.Error("the last write to a process that was killed has succeeded")
	}
}

// BenchmarkDeviceSend compares messages by RDMA with messages by TCP, over the device of the
// virtual machine: a message that is waited for, and eight that are under way. Those of a region
// are not registered by their sender.
func BenchmarkDeviceSend(b *testing.B) {
	provider, err := verbs.Load()
	if err != nil {
		b.Skip(err)
	}
	if names, err := provider.Devices(); err != nil || len(names) == 0 {
		b.Skipf("devices %q, %v", names, err)
	}
	for _, n := range []int{long, 256 << 10, 1 << 20, 4 << 20} {
		for _, cfg := range []struct {
			name string
			r    RDMA
		}{{"tcp", RDMA{}}, {"rdma", RDMA{Provider: provider}}, {"region", RDMA{Provider: provider}}} {
			for _, depth := range []int{1, 8} {
				b.Run(fmt.Sprint(cfg.name, " ", n, " ", depth), func(b *testing.B) {
					e, _, p, q := pair(b, Config{RDMA: cfg.r, Conns: 1})
					msg, buf := shared(b, n), make([]byte, n)
					if cfg.name == "region" {
						if _, err := e.Register("r", mem.Host(msg, mem.Anywhere), RegionConfig{}); err != nil {
							b.Fatal(err)
						}
					}
					if cfg.r.Provider != nil {
						warmSends(b, p, q)
					}
					b.SetBytes(int64(n * depth))
					fs := make([]*Future, 2*depth)
					for b.Loop() {
						for i := range depth {
							fs[2*i], fs[2*i+1] = q.Recv(buf), p.Send(msg)
						}
						for _, f := range fs {
							wait(b, f)
						}
					}
				})
			}
		}
	}
}

// BenchmarkDeviceRead compares reads by RDMA with reads by TCP, over the device of the virtual
// machine.
func BenchmarkDeviceRead(b *testing.B) {
	provider, err := verbs.Load()
	if err != nil {
		b.Skip(err)
	}
	if names, err := provider.Devices(); err != nil || len(names) == 0 {
		b.Skipf("devices %q, %v", names, err)
	}
	for _, n := range []int{64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 1 << 20} {
		for _, cfg := range []struct {
			name string
			r    RDMA
		}{{"tcp", RDMA{}}, {"rdma", RDMA{Provider: provider, From: 1}}} {
			b.Run(fmt.Sprint(cfg.name, " ", n), func(b *testing.B) {
				data := shared(b, n)
				_, e, p, _ := pair(b, Config{RDMA: cfg.r, Conns: 1})
				if _, err := e.Register("data", mem.Host(data, mem.Anywhere), RegionConfig{}); err != nil {
					b.Fatal(err)
				}
				if cfg.r.Provider != nil {
					warm(b, p, "data")
				}
				dst := make([]byte, n)
				b.SetBytes(int64(n))
				for b.Loop() {
					wait(b, p.Read(dst, "data", 0))
				}
			})
		}
	}
}
