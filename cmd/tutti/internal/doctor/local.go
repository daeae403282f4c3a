package doctor

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"tutti/internal/ifname"
	"tutti/internal/ports"
	"tutti/p2p/registry"
)

// probe makes a link of a transport between two ends in this process, like two ranks.
func probe(k registry.Kind) func(context.Context, *Host) outcome {
	return func(ctx context.Context, h *Host) outcome {
		if err := k.Works(rdmaOptions(h)); errors.Is(err, registry.ErrSettings) {
			return broken(err.Error(), k.Advice)
		} else if err != nil && k.Reach == registry.Machine { // every machine should have it
			return warn(err.Error(), h.linkAdvice(err, k))
		} else if err != nil {
			return missing(err.Error(), "")
		}
		began := time.Now()
		if err := registry.Probe(ctx, k, rdmaOptions(h)); err != nil {
			return broken(err.Error(), h.linkAdvice(err, k))
		}
		return found(fmt.Sprintf("two ends in this process were linked and passed a frame in %v",
			time.Since(began).Round(time.Microsecond)))
	}
}

// linkAdvice returns what to do about an error of a transport.
func (h *Host) linkAdvice(err error, k registry.Kind) string {
	switch {
	case errors.Is(err, ifname.ErrNone):
		return "see interfaces above"
	case h.noProc() && strings.Contains(err.Error(), "/proc/"):
		return noProcAdvice
	}
	return k.Advice
}

// noProc reports whether /proc is not mounted.
func (h *Host) noProc() bool { return h.read("/proc/self/stat") == "" }

const noProcAdvice = "mount /proc"

func pidfd(context.Context, *Host) outcome {
	if err := tryPidfd(); err != nil {
		return warn(err.Error(),
			"the death of a rank is noticed by its connections alone; Linux 5.3 or later has pidfd")
	}
	return found("the death of a process can be waited for")
}

func tryPidfd() error {
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		return fmt.Errorf("pidfd_open: %w", err)
	}
	defer unix.Close(fd)
	if _, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0); err != nil {
		return fmt.Errorf("poll a pidfd: %w", err)
	}
	return nil
}

func devShm(_ context.Context, h *Host) outcome {
	var s unix.Statfs_t
	if err := unix.Statfs("/dev/shm", &s); err != nil {
		return missing("none", "") // Tutti does not need it
	}
	return found(fmt.Sprintf("%s, %s free; not used: shared memory has no names here", bytes(s.Blocks*uint64(s.Bsize)),
		bytes(s.Bavail*uint64(s.Bsize))))
}

// peerMemory tries process_vm_readv, by which ranks read plain memory of each other. Yama never
// refuses it to a process that reads its own memory, as here, or that of one which it has started.
func peerMemory(_ context.Context, h *Host) outcome {
	const rings = "; plain memory of peers is copied through rings"
	if err := tryReadv(); err != nil {
		return missing(err.Error()+rings, "")
	}
	scope := h.read("/proc/sys/kernel/yama/ptrace_scope")
	refused := "process_vm_readv is refused between ranks (ptrace_scope " + scope + ")" + rings
	switch {
	case scope == "3": // until the machine starts again
		return missing(refused, "registered memory needs none; a lower kernel.yama.ptrace_scope has to be set at boot")
	case scope != "" && scope != "0" && !h.capable(unix.CAP_SYS_PTRACE):
		return missing(refused, "sysctl kernel.yama.ptrace_scope=0 permits it, and so does CAP_SYS_PTRACE; registered "+
			"memory needs none")
	}
	return found("process_vm_readv works between processes of a user: plain memory of peers can be read in place")
}

func tryReadv() error {
	from, to := uint64(0x7475747469), uint64(0)
	size := int(unsafe.Sizeof(from))
	n, err := unix.ProcessVMReadv(os.Getpid(), []unix.Iovec{{Base: (*byte)(unsafe.Pointer(&to)), Len: uint64(size)}},
		[]unix.RemoteIovec{{Base: uintptr(unsafe.Pointer(&from)), Len: size}}, 0)
	if err != nil {
		return fmt.Errorf("process_vm_readv: %w", err)
	}
	if n != size || from != to {
		return fmt.Errorf("process_vm_readv has read %d of %d bytes, and %x for %x", n, size, to, from)
	}
	return nil
}

// processes checks what the launcher needs to leave no process behind.
func processes(_ context.Context, h *Host) outcome {
	var n int
	if err := unix.Prctl(unix.PR_GET_CHILD_SUBREAPER, uintptr(unsafe.Pointer(&n)), 0, 0, 0); err != nil {
		return broken(fmt.Sprintf("no subreapers: %v", err),
			"tutti run cannot find what the ranks leave behind; Linux 3.4 or later is needed")
	}
	if h.noProc() {
		return broken("/proc is not mounted", "tutti run finds the ranks' processes there: mount it")
	}
	return found("subreaper and /proc work: a killed job leaves nothing behind")
}

func interfaces(_ context.Context, h *Host) outcome {
	all, err := ifname.Interfaces()
	if err != nil {
		return broken(err.Error(), "")
	}
	spec := h.Getenv("TUTTI_IFNAME")
	f, err := ifname.Parse(spec)
	if err != nil {
		return broken("TUTTI_IFNAME: "+err.Error(), "correct it or unset it")
	}
	var parts []string
	outside := false
	for _, i := range all {
		var addrs []string
		for _, a := range i.Addrs {
			if a.IsLinkLocalUnicast() {
				continue
			}
			s := a.String()
			if spec != "" && !f.Allows(i.Name, a) {
				s += " (excluded)"
			} else if !i.Loopback {
				outside = true
			}
			addrs = append(addrs, s)
		}
		if len(addrs) > 0 {
			parts = append(parts, i.Name+" "+strings.Join(addrs, " "))
		}
	}
	detail := strings.Join(parts, ", ")
	best, err := f.Choose(all)
	if err != nil {
		if len(parts) == 0 {
			return broken(err.Error(), "set an interface up, for ranks of one machine the loopback: ip link set lo up")
		}
		return broken(err.Error(), "set TUTTI_IFNAME to interfaces that are up, or unset it")
	}
	if spec != "" {
		detail += "; TUTTI_IFNAME=" + spec
	}
	detail += "; first choice " + best[0].String()
	if !outside {
		return warn(detail, "only loopback is left: ranks on other machines cannot be reached")
	}
	return found(detail)
}

func routes(_ context.Context, h *Host) outcome {
	got := defaultRoutes(h.read("/proc/net/route"), h.read("/proc/net/ipv6_route"))
	if len(got) == 0 && !h.exists("/proc/net/route") && !h.exists("/proc/net/ipv6_route") {
		return missing("not known: there is no /proc/net/route", "")
	}
	if len(got) == 0 {
		return missing("no default route", "machines on the same network are still reached")
	}
	return found("default " + strings.Join(got, ", "))
}

// defaultRoutes reads the kernel's tables: hexadecimal, those of IPv4 in the byte order of the
// machine.
func defaultRoutes(v4, v6 string) (out []string) {
	add := func(s string) {
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	for line := range strings.Lines(v4) {
		f := strings.Fields(line)
		if len(f) < 8 || f[1] != "00000000" || f[7] != "00000000" {
			continue
		}
		n, err := strconv.ParseUint(f[2], 16, 32)
		if err != nil {
			continue
		}
		var b [4]byte
		binary.NativeEndian.PutUint32(b[:], uint32(n))
		add(fmt.Sprintf("via %v on %s", netip.AddrFrom4(b), f[0]))
	}
	for line := range strings.Lines(v6) {
		f := strings.Fields(line)
		if len(f) < 10 || f[1] != "00" || strings.Trim(f[0], "0") != "" || f[9] == "lo" {
			continue
		}
		var b [16]byte
		ok := len(f[4]) == 32
		for i := 0; ok && i < 16; i++ {
			n, err := strconv.ParseUint(f[4][2*i:2*i+2], 16, 8)
			b[i], ok = byte(n), err == nil
		}
		if ok {
			add(fmt.Sprintf("via %v on %s", netip.AddrFrom16(b), f[9]))
		}
	}
	return out
}

func loopback(ctx context.Context, _ *Host) outcome {
	const advice = "the store and tcp links between ranks of one machine need it: ip link set lo up"
	began := time.Now()
	l, err := ports.Listen(ctx, "127.0.0.1", ports.Spec{})
	if err != nil {
		return broken(err.Error(), advice)
	}
	defer l.Close()
	deadline, _ := ctx.Deadline()
	l.(*net.TCPListener).SetDeadline(deadline)
	go func() {
		if c, err := l.Accept(); err == nil {
			c.SetDeadline(deadline)
			io.Copy(c, c)
			c.Close()
		}
	}()
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", l.Addr().String())
	if err != nil {
		return broken(err.Error(), advice)
	}
	defer c.Close()
	c.SetDeadline(deadline)
	ping := []byte("tutti")
	if _, err := c.Write(ping); err != nil {
		return broken(err.Error(), advice)
	}
	if _, err := io.ReadFull(c, ping); err != nil {
		return broken(err.Error(), advice)
	}
	return found(fmt.Sprintf("127.0.0.1 answers itself in %v, connecting included",
		time.Since(began).Round(time.Microsecond)))
}

func port(ctx context.Context, h *Host) outcome {
	text := h.Getenv("TUTTI_PORT")
	spec, err := ports.ParseSpec(text)
	if err != nil {
		return broken("TUTTI_PORT: "+err.Error(), "correct it or unset it")
	}
	l, err := ports.Listen(ctx, "", spec)
	if err != nil {
		return broken("TUTTI_PORT: "+err.Error(), "free the port, or set TUTTI_PORT to a range or 0")
	}
	l.Close()
	if spec.Lo == 0 {
		return found("chosen by the kernel (TUTTI_PORT sets one or a range)")
	}
	if spec.Lo == spec.Hi {
		kinds, _ := registry.Find(cmp.Or(h.Getenv("TUTTI_TRANSPORT"), registry.Auto), rdmaOptions(h))
		for i, transport := range []string{"tcp", "rdma"} {
			if k := slices.IndexFunc(kinds, func(k registry.Kind) bool { return k.Name == transport }); k < 0 ||
				kinds[k].Works(rdmaOptions(h)) != nil {
				continue // it does not listen here
			}
			further, err := spec.After(i + 1)
			if err == nil {
				if l, err = ports.Listen(ctx, "", further); err == nil {
					l.Close()
				}
			}
			if err != nil {
				return broken(fmt.Sprintf("TUTTI_PORT: %s listens %d after it: %v", transport, i+1, err),
					"free the port, or set TUTTI_PORT to another one, to a range or to 0")
			}
		}
		return warn("TUTTI_PORT="+text+" is free, and so are the next ones, of its transports",
			"a second rank on this machine has none: set a range, such as "+fmt.Sprintf("%d-%d", spec.Lo,
				min(int(spec.Lo)+99, 65535)))
	}
	return found("TUTTI_PORT=" + text + " has a free one")
}
