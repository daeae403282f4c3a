package files

import (
	"os"
	"os/exec"
	"syscall"
	"testing"
)

// To a process in a user namespace without the host's root, /tmp seems to be of the overflow user.
func TestDirectoryOfAUserThatTheNamespaceLacks(t *testing.T) {
	const inside = "TUTTI_TEST_NAMESPACE"
	if os.Getenv(inside) != "" {
		if err := Directory("/tmp"); err != nil {
			t.Error(err)
		}
		return
	}
	uid, gid := os.Getuid(), os.Getgid()
	if uid == 0 {
		uid, gid = 12345, 12345
	}
	c := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v")
	c.Env = append(os.Environ(), inside+"=1")
	c.Dir = "/"
	c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{HostID: uid, Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{HostID: gid, Size: 1}},
		Credential:  &syscall.Credential{NoSetGroups: true}}
	out, err := c.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Error(err)
	}
}
