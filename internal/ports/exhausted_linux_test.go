package ports

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// The kernel has one port to choose in the network namespace of a process of its own.
func TestListenNoPortLeft(t *testing.T) {
	const inside = "TUTTI_TEST_NAMESPACE"
	if os.Getenv(inside) != "" {
		if err := os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", []byte("40000 40000"), 0); err != nil {
			t.Fatal(err)
		}
		l, err := Listen(t.Context(), "", Spec{})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if _, err := Listen(t.Context(), "", Spec{}); !errors.Is(err, syscall.EADDRINUSE) ||
			!strings.Contains(err.Error(), "all ports of this machine that the kernel may choose are taken") {
			t.Error(err)
		}
		return
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
}
