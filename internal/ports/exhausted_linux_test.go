package ports

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// kernelPorts runs a test again, in a process with a network namespace of its own, where the kernel
// chooses ports of a range. It returns true there.
func kernelPorts(t *testing.T, between string) bool {
	t.Helper()
	const inside = "TUTTI_TEST_NAMESPACE"
	if os.Getenv(inside) != "" {
		if err := os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", []byte(between), 0); err != nil {
			t.Fatal(err)
		}
		return true
	}
	c := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v")
	c.Env = append(os.Environ(), inside+"=1")
	c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if uid := os.Getuid(); uid != 0 {
		c.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		c.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: uid, Size: 1}}
	}
	out, err := c.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Error(err)
	}
	return false
}

// The kernel has one port to choose.
func TestListenNoPortLeft(t *testing.T) {
	if kernelPorts(t, "40000 40000") {
		l, err := Listen(t.Context(), "", Spec{})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if _, err := Listen(t.Context(), "", Spec{}); !errors.Is(err, syscall.EADDRINUSE) ||
			!strings.Contains(err.Error(), "all ports of this machine that the kernel may choose are taken") {
			t.Error(err)
		}
	}
}

// A free port is one that the kernel gives nobody, unless it gives all. What listens is avoided.
func TestFree(t *testing.T) {
	if kernelPorts(t, "10004 10100") {
		for range 4 {
			p, err := Free(t.Context())
			if err != nil || p < 10000 || p >= 10004 {
				t.Fatalf("port %d, %v", p, err)
			}
			l, err := Listen(t.Context(), "", Spec{p, p})
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
		}
		if p, err := Free(t.Context()); err != nil || p < 10004 || p > 10100 {
			t.Errorf("port %d, %v, when those that the kernel does not give are taken", p, err)
		}
	}
}

// Where the kernel gives nearly all ports, a free one is of its choice.
func TestFreeOfTheKernel(t *testing.T) {
	if kernelPorts(t, "1024 65535") {
		p, err := Free(t.Context())
		if err != nil || p < 1024 {
			t.Errorf("port %d, %v", p, err)
		}
	}
}
