package verbs

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"tutti/rdma"
)

// TestForkIsPrepared: ibv_fork_init is called only where nothing else helps.
func TestForkIsPrepared(t *testing.T) {
	for _, c := range []struct {
		state   int
		release string
		init    error
		want    ForkSupport
		calls   int
	}{
		{forkUnneeded, "6.1.0-56-amd64", nil, ForkByKernel, 0},
		{forkUnneeded, "5.4.0", nil, ForkByKernel, 0}, // a distribution's kernel with the change
		{forkEnabled, "4.18.0", nil, ForkByLibrary, 0},
		{forkDisabled, "4.18.0", nil, ForkByLibrary, 1},
		{forkDisabled, "6.1.0", nil, ForkByLibrary, 1}, // the library has asked the kernel
		{forkDisabled, "4.18.0", syscall.EINVAL, ForkNone, 1},
		{forkUnknown, "5.12.0-rc1", nil, ForkByKernel, 0},
		{forkUnknown, "6.1", nil, ForkByKernel, 0},
		{forkUnknown, "5.11.22", nil, ForkByLibrary, 1},
		{forkUnknown, "4.18.0-553.el8", nil, ForkByLibrary, 1},
		{forkUnknown, "", nil, ForkByLibrary, 1},
		{forkUnknown, "4.18.0", syscall.ENOSYS, ForkNone, 1},
	} {
		calls := 0
		got := prepareFork(forkCalls{func() int { return c.state }, func() error { calls++; return c.init }}, c.release)
		if got != c.want || calls != c.calls {
			t.Errorf("state %d on %q: %q after %d calls of ibv_fork_init; want %q after %d", c.state, c.release, got,
				calls,
				c.want, c.calls)
		}
	}
}

// sysfsDevice makes a directory of devices from files.
func sysfsDevice(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text+"\n"),
			0o644)); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// TestAddressesFromSysfs: an old library's devices have the addresses that the kernel shows.
func TestAddressesFromSysfs(t *testing.T) {
	const port = "mlx5_0/ports/1/"
	files := map[string]string{
		"mlx5_0/device/numa_node": "1",
		port + "link_layer":       "Ethernet",
		port + "gids/0":           "fe80:0000:0000:0000:0000:0000:0000:0001", port + "gid_attrs/types/0": "IB/RoCE v1",
		port + "gid_attrs/ndevs/0": "eth0",
		port + "gids/1":            "0000:0000:0000:0000:0000:ffff:0a00:0001", port + "gid_attrs/types/1": "RoCE v2",
		port + "gids/2": "0000:0000:0000:0000:0000:0000:0000:0000",
		port + "gids/3": "nonsense",
		port + "gids/4": "fe80::1",
	}
	root := sysfsDevice(t, files)
	if e, ok := sysfsGID(root, "mlx5_0", 1, 0); !ok || e.Type != rdma.RoCEv1 || e.GID.String() != "fe80::1" ||
		e.Interface != "eth0" {
		t.Errorf("%+v, %v", e, ok)
	}
	if e, ok := sysfsGID(root, "mlx5_0", 1, 1); !ok || e.Type != rdma.RoCEv2 || e.GID.String() != "10.0.0.1" ||
		e.Index != 1 {
		t.Errorf("%+v, %v", e, ok)
	}
	for _, i := range []int{2, 3, 4, 5} {
		if e, ok := sysfsGID(root, "mlx5_0", 1, i); ok {
			t.Errorf("entry %d: %+v", i, e)
		}
	}
	if n := KernelNUMANode(root, "mlx5_0"); n != 1 {
		t.Errorf("NUMA node %d, want 1", n)
	}
	if n := KernelNUMANode(root, "rxe0"); n != -1 {
		t.Errorf("NUMA node %d, want -1", n)
	}
	infiniband := maps.Clone(files)
	infiniband[port+"link_layer"] = "InfiniBand"
	if e, ok := sysfsGID(sysfsDevice(t, infiniband), "mlx5_0", 1, 0); !ok || e.Type != rdma.InfiniBand {
		t.Errorf("%+v, %v", e, ok)
	}
}

// TestQuirksAreKnown: a device is recognized by its driver, which is where the vendor's number is
// that of its hardware's manufacturer, and by the vendor's number, which a container without sysfs
// has, too.
func TestQuirksAreKnown(t *testing.T) {
	root := t.TempDir()
	for device, driver := range map[string]string{"erdma_0": "erdma", "mlx5_0": "mlx5_core", "irdma0": "irdma"} {
		dir := filepath.Join(root, device, "device")
		if err := errors.Join(os.MkdirAll(dir, 0o755), os.Symlink("../../../bus/pci/drivers/"+driver,
			filepath.Join(dir, "driver"))); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		device  string
		vendor  uint32
		noReset bool
	}{{"erdma_0", 0, true}, {"mlx5_0", 0x02c9, false}, {"mlx5_0", 0x1ded, true}, {"rxe0", 0xffffff, false},
		{"absent", 0x1ded, true}, {"irdma0", 0x8086, true}, {"absent", 0x8086, false}, {"absent", 0, false}} {
		if got := quirksOf(driverOf(root, c.device), c.vendor); got.NoReset != c.noReset {
			t.Errorf("%+v: %+v", c, got)
		}
	}
}

func TestRates(t *testing.T) {
	for _, c := range []struct {
		width, speed int
		want         float64
	}{{2, 128, 400}, {2, 32, 100}, {1, 1, 2.5}, {8, 64, 600}, {16, 64, 100}, {0, 1, 0}, {3, 3, 0}} {
		if got := gbps(c.width, c.speed); got != c.want {
			t.Errorf("width %d, speed %d: %v Gbit/s, want %v", c.width, c.speed, got, c.want)
		}
	}
}

// TestAdvice: what a user can change is said.
func TestAdvice(t *testing.T) {
	for _, c := range []struct {
		kind  callKind
		errno syscall.Errno
		some  bool
	}{
		{callRegister, syscall.ENOMEM, true}, {callRegister, syscall.EFAULT, true}, {callRegister, syscall.EOPNOTSUPP,
			true},
		{callList, syscall.ENOSYS, true}, {callOpen, syscall.EACCES, true}, {callOpen, syscall.ENOENT, true},
		{callCreate, syscall.ENOMEM, true},
		{callPost, syscall.ENOMEM, true}, {callModify, syscall.EINVAL, true}, {callModify, syscall.ENETUNREACH, true},
		{callQuery, syscall.ENODEV, true}, {callDestroy, syscall.EBUSY, true}, {callQuery, syscall.EINTR, false},
	} {
		if got := advise(c.kind, c.errno); (got != "") != c.some {
			t.Errorf("call %d, %v: advice %q", c.kind, c.errno, got)
		}
	}
}

// TestLoadSaysWhatIsMissing: it works, or its error says why.
func TestLoadSaysWhatIsMissing(t *testing.T) {
	p, err := Load()
	if err != nil {
		if !errors.Is(err, ErrUnavailable) || len(err.Error()) < len(ErrUnavailable.Error())+10 {
			t.Errorf("%v", err)
		}
		return
	}
	again, _ := Load()
	names, err := p.Devices()
	if err != nil || again != p || !slices.IsSorted(names) {
		t.Errorf("devices %q, %v", names, err)
	}
	if d, err := p.Open("no-such-device", nil); d != nil || err == nil {
		t.Errorf("%v, %v", d, err)
	}
}
