package doctor

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"tutti/bootstrap"
	"tutti/collectives"
	"tutti/internal/cpus"
	"tutti/internal/ifname"
	"tutti/internal/tuning"
	"tutti/p2p/registry"
	"tutti/rdma"
	"tutti/rdma/soft"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// machine is a host made of files and variables.
func machine(t *testing.T, files map[string]string, vars ...string) *Host {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return &Host{Root: root, Probe: time.Minute, Environ: func() []string { return vars },
		Getenv: bootstrap.WithoutServices(func(name string) string {
			for _, kv := range vars {
				if k, v, _ := strings.Cut(kv, "="); k == name {
					return v
				}
			}
			return ""
		})}
}

func examine(t *testing.T, h *Host) (map[string]Finding, bool) {
	t.Helper()
	all := map[string]Finding{}
	fit := h.Run(t.Context(), func(f Finding) { all[f.Check] = f })
	if want := len(checks) + len(registry.Kinds()) + len(h.rdmaDevices()); len(all) != want {
		t.Fatalf("%d findings, want %d", len(all), want)
	}
	return all, fit
}

// TestThisMachine: the machine that builds this can run jobs, or the launcher's tests fail too.
func TestThisMachine(t *testing.T) {
	h := machine(t, nil)
	h.Root = ""
	all, fit := examine(t, h)
	for name, f := range all {
		t.Logf("%s: %s %s; %s", name, f.State, f.Detail, f.Advice)
		if (f.State == Broken) == fit && f.State == Broken {
			t.Errorf("%s is broken, but all is well", name)
		}
		if f.Detail == "" || (f.State == Broken || f.State == Warning) && f.Advice == "" {
			t.Errorf("%s: %+v says too little", name, f)
		}
	}
	for _, name := range []string{"shm", "tcp", "loopback", "embedded", "processes"} {
		if s := all[name].State; s != Found && s != Warning {
			t.Errorf("%s: %+v", name, all[name])
		}
	}
	if !fit {
		t.Error("unfit")
	}
}

func TestPeerMemory(t *testing.T) {
	if err := tryReadv(); err != nil {
		t.Skip(err) // so does the check say
	}
	for _, c := range []struct {
		scope, caps string
		state       State
	}{
		{"", "0000000000000000", Found},
		{"0", "0000000000000000", Found},
		{"1", "000001ffff1fffff", Found}, // CAP_SYS_PTRACE is bit 19
		{"2", "0000000000080000", Found},
		{"1", "000001fffff7ffff", Missing},
		{"2", "0000000000000000", Missing},
		{"2", "", Missing},
		{"3", "000001ffffffffff", Missing},
	} {
		files := map[string]string{"proc/self/status": "Name:\ttutti\nCapPrm:\t000001ffffffffff\nCapEff:\t" + c.caps +
			"\nCapBnd:\t000001ffffffffff\n"}
		if c.scope != "" {
			files["proc/sys/kernel/yama/ptrace_scope"] = c.scope + "\n"
		}
		o := peerMemory(t.Context(), machine(t, files))
		if o.state != c.state || strings.Contains(o.detail, "through rings") == (c.state == Found) ||
			(o.advice == "") == (c.state == Missing) {
			t.Errorf("%+v: %+v", c, o)
		}
	}
}

// CAP_IPC_LOCK lifts the limit of locked memory, but not that of a container's own users.
func TestLockedMemory(t *testing.T) {
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &was); err != nil {
		t.Fatal(err)
	}
	low := was
	low.Cur = min(was.Max, 64<<10)
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &low); err != nil {
		t.Fatal(err)
	}
	defer unix.Setrlimit(unix.RLIMIT_MEMLOCK, &was)
	const whole = "         0          0 4294967295\n"
	for _, c := range []struct {
		caps, users string
		state       State
	}{
		{"000001ffffffffff", whole, Found}, // CAP_IPC_LOCK is bit 14
		{"0000000000004000", whole, Found},
		{"0000000000004000", "", Found}, // a kernel without user namespaces
		{"0000000000004000", "         0     100000      65536\n", Warning},
		{"0000000000004000", "         0       1000          1\n         1     100000      65536\n", Warning},
		{"000001ffffffbfff", whole, Warning},
		{"0000000000000000", whole, Warning},
	} {
		o := lockedMemory(t.Context(), machine(t, map[string]string{"proc/self/status": "CapEff:\t" + c.caps + "\n",
			"proc/self/uid_map": c.users, "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n"}))
		if o.state != c.state || (o.advice == "") != (c.state == Found) || !strings.HasPrefix(o.detail, "up to ") {
			t.Errorf("%+v: %+v", c, o)
		}
	}
}

func TestCores(t *testing.T) {
	v2 := map[string]string{"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
		"sys/fs/cgroup/a/cpu.max": "50000 100000\n"}
	v1 := map[string]string{"proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/a\n0::/\n",
		"sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "150000\n"}
	period := map[string]string{"proc/self/cgroup": "3:cpu,cpuacct:/a\n",
		"sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "200000\n", "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "50000\n"}
	none := map[string]string{"proc/self/cgroup": "3:cpu,cpuacct:/a\n", "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "-1\n"}
	for i, c := range []struct {
		files map[string]string
		quota float64
	}{{v2, .5}, {v1, 1.5}, {period, 4}, {none, math.Inf(1)}, {nil, math.Inf(1)}} {
		h := machine(t, c.files)
		if got := h.cpuQuota(); got != c.quota {
			t.Errorf("case %d: quota %v, want %v", i, got, c.quota)
		}
	}
	if o := cores(t.Context(), machine(t, v2)); o.state != Warning || !strings.Contains(o.detail, "allows 0.5") ||
		!strings.Contains(o.advice, "at most 1 rank") {
		t.Errorf("half a core: %+v", o)
	}
	many := map[string]string{"sys/devices/system/cpu/online": "0-1023", "sys/devices/system/node/online": "0-1"}
	if o := cores(t.Context(), machine(t, many)); !strings.Contains(o.detail, "of 1024 cores") ||
		!strings.Contains(o.detail, "2 NUMA nodes") {
		t.Errorf("affinity: %+v", o)
	}
	many["sys/devices/system/node/online"], many["sys/devices/system/node/has_cpu"] = "0-2,8-15", "0-2"
	if o := cores(t.Context(), machine(t, many)); !strings.Contains(o.detail, "on 3 NUMA nodes") {
		t.Errorf("nodes of memory: %+v", o)
	}
}

func TestBinding(t *testing.T) {
	if s := shares([]cpus.CPU{{ID: 4, Core: 4}}); s != "tutti run has one core for all ranks" {
		t.Error(s)
	}
	if s := shares([]cpus.CPU{{ID: 4, Core: 4}, {ID: 6, Core: 6}}); !strings.Contains(s, "up to 2 ranks") ||
		!strings.HasSuffix(s, "4 and 6") {
		t.Error(s)
	}
	h := machine(t, nil)
	h.Getenv = func(string) string { return "" }
	if o := binding(t.Context(), h); o.state != Found || !strings.Contains(o.detail, "cores of their own; two: ") {
		t.Errorf("%+v", o)
	}
	h.Getenv = func(string) string { return "none" }
	if o := binding(t.Context(), h); o.state != Missing || !strings.Contains(o.detail, "TUTTI_BIND=none") {
		t.Errorf("off: %+v", o)
	}
	allowed, err := cpus.Allowed()
	if err != nil {
		t.Fatal(err)
	}
	h = machine(t, map[string]string{"sys/devices/system/node/node0/cpulist": "x",
		fmt.Sprintf("sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", allowed[0]): "x"})
	if o := binding(t.Context(), h); o.state != Warning || !strings.Contains(o.detail, "node0/cpulist") {
		t.Errorf("not to be read: %+v", o)
	}
}

func TestMemory(t *testing.T) {
	files := map[string]string{"proc/meminfo": "MemTotal:       1048576 kB\nMemAvailable:    524288 kB\n",
		"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "134217728\n"}
	if o := memory(t.Context(), machine(t, files)); o.state != Warning ||
		o.detail != "1 GiB, 512 MiB available, the cgroup allows 128 MiB" {
		t.Errorf("%+v", o)
	}
	files["sys/fs/cgroup/a/memory.max"] = "max\n"
	if o := memory(t.Context(), machine(t, files)); o.state != Found || o.detail != "1 GiB, 512 MiB available" {
		t.Errorf("%+v", o)
	}
}

func TestRoutes(t *testing.T) {
	v4 := "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\neth0 00000000 " +
		map[bool]string{true: "010200C0", false: "C0000201"}[littleEndian()] + " 0003 0 0 0 00000000 0 0 0\n" +
		"eth0 000200C0 00000000 0001 0 0 0 00FFFFFF 0 0 0\n"
	v6 := strings.Repeat("0", 32) + " 00 " + strings.Repeat("0",
		32) + " 00 fd000000000000000000000000000001 00000400 1 0 00000003 eth1\n" +
		strings.Repeat("0", 32) + " 00 " + strings.Repeat("0", 32) + " 00 " + strings.Repeat("0",
		32) + " ffffffff 1 0 00200200 lo\n"
	if got := defaultRoutes(v4, v6); !slices.Equal(got, []string{"via 192.0.2.1 on eth0", "via fd00::1 on eth1"}) {
		t.Errorf("%q", got)
	}
	rapid.Check(t, func(t *rapid.T) { defaultRoutes(rapid.String().Draw(t, "v4"), rapid.String().Draw(t, "v6")) })
}

func littleEndian() bool { return runtime.GOARCH != "s390x" && runtime.GOARCH != "ppc64" }

func TestVerbs(t *testing.T) {
	files := map[string]string{"sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n"}
	if o := verbsLibrary(t.Context(), machine(t, files)); o.state != Warning || !strings.Contains(o.detail,
		"no libibverbs") {
		t.Errorf("card without library: %+v", o)
	}
	files["usr/lib64/libibverbs.so.1"] = ""
	if o := verbsLibrary(t.Context(), machine(t, files)); o.state != Warning || !strings.Contains(o.detail, "uverbs") {
		t.Errorf("card without device file: %+v", o)
	}
	files["dev/infiniband/rdma_cm"] = ""
	if o := verbsLibrary(t.Context(), machine(t, files)); o.state != Warning {
		t.Errorf("card without device file, beside another one: %+v", o)
	}
	files["dev/infiniband/uverbs3"] = "" // the container has the fourth one alone
	if o := verbsLibrary(t.Context(), machine(t, files)); o.state != Found ||
		o.detail != "mlx5_0, /usr/lib64/libibverbs.so.1" {
		t.Errorf("card: %+v", o)
	}
	// This process is on node 1 there.
	files["sys/devices/system/node/node1/cpulist"] = "0-8191\n"
	for name, node := range map[string]string{"mlx5_0": "0", "mlx5_1": "1", "mlx5_2": "1", "mlx5_3": "-1"} {
		port := "sys/class/infiniband/" + name + "/ports/1/"
		files["sys/class/infiniband/"+name+"/device/numa_node"] = node + "\n"
		files[port+"state"] = "4: ACTIVE\n"
		files[port+"gids/0"] = "0000:0000:0000:0000:0000:ffff:0a00:0001\n"
		files[port+"gid_attrs/types/0"] = "RoCE v2\n"
	}
	files["sys/class/infiniband/mlx5_2/ports/1/state"] = "1: DOWN\n"
	if o := verbsLibrary(t.Context(), machine(t, files)); !strings.HasSuffix(o.detail,
		"; links use mlx5_1:1 (NUMA node 1), mlx5_3:1, mlx5_0:1 (NUMA node 0)") {
		t.Errorf("several cards: %+v", o)
	}
	if o := verbsLibrary(t.Context(), machine(t, files, "TUTTI_RDMA_DEVICES=^mlx5_3")); !strings.HasSuffix(o.detail,
		"; links use mlx5_1:1 (NUMA node 1), mlx5_0:1 (NUMA node 0)") {
		t.Errorf("several cards, one of them excluded: %+v", o)
	}
	if o := verbsLibrary(t.Context(), machine(t, nil)); o.state != Missing {
		t.Errorf("nothing: %+v", o)
	}
	conf := map[string]string{"etc/ld.so.conf.d/ofed.conf": "/opt/ofed/lib\n", "opt/ofed/lib/libibverbs.so.1": ""}
	if o := verbsLibrary(t.Context(), machine(t, conf)); !strings.Contains(o.detail,
		"/opt/ofed/lib/libibverbs.so.1, no device") {
		t.Errorf("library elsewhere: %+v", o)
	}
}

// guarded is a provider that does not open all of its devices.
type guarded struct {
	rdma.Provider
	closed []string
}

func (g guarded) Open(name string, notify func(rdma.Event)) (rdma.Device, error) {
	if slices.Contains(g.closed, name) {
		return nil, fmt.Errorf("open %s: %w", name, os.ErrPermission)
	}
	return g.Provider.Open(name, notify)
}

// A device that cannot be opened does not hide those that can.
func TestDevicesThatOpen(t *testing.T) {
	f := soft.New(soft.Config{})
	defer f.Close()
	all, err := f.Devices()
	if err != nil || len(all) < 2 {
		t.Fatal(all, err)
	}
	for _, c := range []struct {
		closed, want []string
	}{{nil, all}, {all[:1], all[1:]}, {all[1:], all[:1]}, {all, nil}} {
		got, why := openable(guarded{f, c.closed})
		if !slices.Equal(got, c.want) || (why != nil) != (c.closed != nil) {
			t.Errorf("%v closed: %v, %v", c.closed, got, why)
		}
		for _, name := range c.closed {
			if !strings.Contains(oneLine(why), name) || strings.Contains(oneLine(why), "\n") {
				t.Errorf("%v closed: %q", c.closed, oneLine(why))
			}
		}
	}
}

// TestRDMADevice: each port's state is told, and the address that peers are given, with the reason.
func TestRDMADevice(t *testing.T) {
	const port = "sys/class/infiniband/mlx5_0/ports/1/"
	base := map[string]string{port + "state": "4: ACTIVE\n", port + "link_layer": "Ethernet\n",
		port + "rate": "400 Gb/sec (4X NDR)\n"}
	gid := func(i, address, kind string) map[string]string {
		return map[string]string{port + "gids/" + i: address + "\n", port + "gid_attrs/types/" + i: kind + "\n",
			port + "gid_attrs/ndevs/" + i: "eth0\n"}
	}
	const local, v4 = "fe80:0000:0000:0000:0000:0000:0000:0001", "0000:0000:0000:0000:0000:ffff:0a00:0001"
	for name, c := range map[string]struct {
		files          []map[string]string
		state          State
		detail, advice string
		vars           []string
	}{
		"good": {[]map[string]string{gid("0", local, "IB/RoCE v1"), gid("1", v4, "RoCE v2")}, Found,
			"port 1 active, Ethernet, 400 Gb/sec (4X NDR), address 10.0.0.1 (index 1, RoCE v2, eth0): routed, " +
				"RoCE v2, IPv4", "", nil},
		"down": {[]map[string]string{gid("0", v4, "RoCE v2"), {port + "state": "1: DOWN\n"}}, Warning,
			"port 1 down", "interface up", nil},
		"no address": {nil, Warning, "no address", "give its network interface an IP address", nil},
		"local":      {[]map[string]string{gid("0", local, "RoCE v2")}, Warning, "fe80::1", "not routed", nil},
		"v1 only": {[]map[string]string{gid("0", v4, "IB/RoCE v1")}, Warning, "RoCE v1", "RoCE v1 is not routed",
			nil},
		"InfiniBand": {[]map[string]string{gid("0", local, "IB/RoCE v1"), {port + "link_layer": "InfiniBand\n"}}, Found,
			"index 0, InfiniBand", "", nil},
		"chosen": {[]map[string]string{gid("0", local, "RoCE v2"), gid("1", v4, "RoCE v2")}, Warning,
			"fe80::1 (index 0, RoCE v2, eth0): TUTTI_RDMA_GID=0", "not routed", []string{"TUTTI_RDMA_GID=0"}},
		"not there": {[]map[string]string{gid("1", v4, "RoCE v2")}, Warning, "no address 10.9.0.0/16 (TUTTI_RDMA_GID)",
			"IP address", []string{"TUTTI_RDMA_GID=10.9.0.0/16"}},
		"excluded": {[]map[string]string{gid("1", v4, "RoCE v2")}, Missing, "excluded by TUTTI_RDMA_DEVICES=^mlx5",
			"", []string{"TUTTI_RDMA_DEVICES=^mlx5"}},
		"wrong list":   {nil, Broken, "TUTTI_RDMA_DEVICES", "unset it", []string{"TUTTI_RDMA_DEVICES=^"}},
		"wrong number": {nil, Broken, "TUTTI_RDMA_SL", "unset it", []string{"TUTTI_RDMA_SL=16"}},
	} {
		files := maps.Clone(base)
		for _, more := range c.files {
			maps.Copy(files, more)
		}
		o := rdmaDevice("mlx5_0")(t.Context(), machine(t, files, c.vars...))
		if o.state != c.state || !strings.Contains(o.detail, c.detail) || (o.advice == "") != (c.advice == "") ||
			!strings.Contains(o.advice, c.advice) {
			t.Errorf("%s: %+v; want %s, %q, %q", name, o, c.state, c.detail, c.advice)
		}
	}
	if o := rdmaDevice("mlx5_0")(t.Context(), machine(t, nil)); o.state != Warning || o.detail != "no port" ||
		o.advice == "" {
		t.Errorf("no port: %+v", o)
	}
	all := map[string]Finding{}
	machine(t, base).Run(t.Context(), func(f Finding) { all[f.Check] = f })
	if f, ok := all["mlx5_0"]; !ok || f.Group != "devices" {
		t.Errorf("no finding about the device: %+v", f)
	}
}

// TestTransportThatDoesNotWork: it is no fault, unless the settings ask for it, or every machine
// should have it.
func TestTransportThatDoesNotWork(t *testing.T) {
	for _, c := range []struct {
		reach registry.Reach
		vars  []string
		state State
	}{
		{registry.Network, nil, Missing},
		{registry.Network, []string{"TUTTI_RDMA_DEVICES=mlx5_9"}, Broken},
		{registry.Machine, nil, Warning},
	} {
		k := registry.Kind{Name: "mine", Reach: c.reach, Advice: "use another one",
			Works: func(o registry.Options) error {
				if o.RDMADevices == "" {
					return errors.New("no device")
				}
				return fmt.Errorf("%w: no device", registry.ErrSettings)
			}}
		if o := probe(k)(t.Context(), machine(t, nil, c.vars...)); o.state != c.state ||
			!strings.Contains(o.detail, "no device") || (o.advice != "") != (c.state != Missing) {
			t.Errorf("%q: %+v, want %s", c.vars, o, c.state)
		}
	}
}

// TestSecretIsExposed: what the group of a file may do counts if the user can change it.
func TestSecretIsExposed(t *testing.T) {
	for _, c := range []struct {
		mode        uint32
		mine, fixed bool
		advice      string
	}{
		{0o600, true, false, ""}, {0o400, false, true, ""},
		{0o640, true, false, "chmod 600 /s"}, {0o440, true, true, ""}, {0o440, false, true, ""},
		{0o640, false, false, ""}, {0o644, true, false, "chmod 600 /s"}, {0o644, false, false, "chmod 600 /s"},
		{0o604, true, false, "chmod 600 /s"}, {0o444, false, true, "mount /s with mode 0400"},
		{0o644, true, true, "mount /s with mode 0400"},
	} {
		if got := exposure("/s", c.mode, c.mine, c.fixed); (got == "") != (c.advice == "") ||
			!strings.Contains(got, c.advice) {
			t.Errorf("%+v: %q", c, got)
		}
	}
	path := filepath.Join(t.TempDir(), "secret")
	for mode, want := range map[os.FileMode]State{0o600: Found, 0o640: Warning, 0o604: Warning} {
		if err := errors.Join(os.WriteFile(path, []byte("sixteen letters!"), mode), os.Chmod(path, mode)); err != nil {
			t.Fatal(err)
		}
		if o := variables(t.Context(), machine(t, nil, "TUTTI_SECRET_FILE="+path)); o.state != want {
			t.Errorf("mode %o: %+v, want %s", mode, o, want)
		}
	}
}

func TestGPUMemory(t *testing.T) {
	card := "sys/class/infiniband/mlx5_0/ports/1/state"
	for name, c := range map[string]struct {
		files   []string
		buffers bool
		state   State
	}{
		"nothing":         {nil, true, Missing},
		"no GPU":          {[]string{card}, true, Missing},
		"no RDMA":         {[]string{"sys/module/nvidia/version"}, true, Missing},
		"without buffers": {[]string{card, "sys/module/nvidia/version"}, false, Warning},
		"with a module": {[]string{card, "sys/module/nvidia/version", "sys/module/nvidia_peermem/version"}, false,
			Warning},
		"with buffers": {[]string{card, "sys/module/nvidia/version"}, true, Found},
	} {
		files := map[string]string{}
		for _, f := range c.files {
			files[f] = ""
		}
		if o := gpuAccess(machine(t, files), c.buffers); o.state != c.state ||
			(o.advice != "") != (c.state == Warning) {
			t.Errorf("%s: %+v, want %s", name, o, c.state)
		}
	}
}

func TestHugePages(t *testing.T) {
	at := "sys/kernel/mm/transparent_hugepage/"
	for _, c := range []struct {
		files map[string]string
		state State
	}{
		{nil, Missing},
		{map[string]string{at + "enabled": "always [madvise] never", at + "shmem_enabled": "always advise [never]"},
			Missing},
		{map[string]string{at + "enabled": "[always] madvise never", at + "shmem_enabled": "always [advise] never"},
			Found},
	} {
		if o := hugePages(t.Context(), machine(t, c.files)); o.state != c.state {
			t.Errorf("%v: %+v", c.files, o)
		}
	}
}

// TestEnvironment: contradictions are named, secrets are not shown, and unknown variables are
// reported.
func TestEnvironment(t *testing.T) {
	taken, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	_, port, _ := net.SplitHostPort(taken.Addr().String())
	before := strconv.Itoa(taken.Addr().(*net.TCPAddr).Port - 1)
	for _, c := range []struct {
		vars   []string
		check  string
		state  State
		detail string
	}{
		{nil, "environment", Found, "rank 0 of 1"},
		{[]string{"TUTTI_TIMEOUT=x", "TUTTI_SECRET=short", "TUTTI_STORE_USER=u", "RANK=1"}, "environment", Broken,
			"TUTTI_STORE_USER is set but TUTTI_STORE_PASSWORD is not: set both or neither; TUTTI_TIMEOUT"},
		{[]string{"TUTTI_TIMEOUT=x", "TUTTI_SECRET=short", "RANK=1"}, "environment", Broken, "; TUTTI_SECRET"},
		{[]string{"TUTTI_TIMEOUT=x", "RANK=1"}, "environment", Broken, "; RANK=1 is set but WORLD_SIZE is not"},
		{[]string{"TUTTI_TUNE=off"}, "tuning", Missing, "none"},
		{[]string{"TUTTI_TUNE=/nosuch/file"}, "tuning", Warning, "/nosuch/file: unreadable"},
		{[]string{"RANK=1"}, "environment", Broken, "RANK=1 is set but WORLD_SIZE is not"},
		{[]string{"RANK=3", "WORLD_SIZE=2"}, "environment", Broken, "RANK=3 contradicts WORLD_SIZE=2"},
		{[]string{"RANK=1", "WORLD_SIZE=2"}, "environment", Warning, "no secret"},
		{[]string{"RANK=1", "WORLD_SIZE=2", "TUTTI_SECRET=0123456789abcdef"}, "environment", Warning, "no store"},
		{[]string{"TUTTI_SECRET=0123456789abcdef"}, "variables", Found, "TUTTI_SECRET=(hidden)"},
		{[]string{"TUTTI_STORE_PASSWORD=p"}, "variables", Found, "TUTTI_STORE_PASSWORD=(hidden)"},
		{[]string{"TUTTI_TRANSPROT=tcp"}, "variables", Warning, "without meaning: TUTTI_TRANSPROT"},
		{[]string{"TUTTI_PORT=tcp://10.0.0.1:80", "TUTTI_PORT_80_TCP=tcp://10.0.0.1:80", "TUTTI_SERVICE_HOST=10.0.0.1"},
			"variables", Found, "no TUTTI_* variable is set"},
		{[]string{"TUTTI_ETCD_SERVICE_PORT=2379", "TUTTI_ETCD_PORT_2379_TCP_ADDR=10.0.0.1"}, "variables", Found,
			"no TUTTI_* variable is set"},
		{[]string{"TUTTI_PORT=tcp://10.0.0.1:80"}, "port", Found, "chosen by the kernel"},
		{[]string{"TUTTI_IFNAME=nosuchif0"}, "interfaces", Broken, "no network address left"},
		{[]string{"TUTTI_IFNAME=a/b"}, "interfaces", Broken, "TUTTI_IFNAME"},
		{[]string{"TUTTI_IFNAME=lo"}, "interfaces", Warning, "TUTTI_IFNAME=lo"},
		{[]string{"TUTTI_PORT=x"}, "port", Broken, "TUTTI_PORT"},
		{[]string{"TUTTI_PORT=" + port}, "port", Broken, port},
		{[]string{"TUTTI_PORT=" + before}, "port", Broken, "TUTTI_PORT"}, // tcp has the next one
		{[]string{"TUTTI_PORT=65535"}, "port", Broken, "the last one is 65535"},
		{[]string{"TUTTI_STORE=redis://x"}, "TUTTI_STORE", Broken, "contradictory"},
		{[]string{"TUTTI_STORE=tutti://127.0.0.1:" + port}, "TUTTI_STORE", Broken, "secret is needed"},
	} {
		h := machine(t, nil, c.vars...)
		i := slices.IndexFunc(checks, func(k check) bool { return k.name == c.check })
		ctx, cancel := context.WithTimeout(t.Context(), h.Probe)
		o := checks[i].run(ctx, h)
		cancel()
		if o.state != c.state || !strings.Contains(o.detail, c.detail) {
			t.Errorf("%q: %s is %+v; want %s with %q", c.vars, c.check, o, c.state, c.detail)
		}
		if strings.Contains(o.detail+o.advice, "0123456789abcdef") {
			t.Errorf("%q: the secret is shown: %+v", c.vars, o)
		}
	}
}

// TestTunedInDefaultPlace: a file there is shown, whatever is wrong with it.
func TestTunedInDefaultPlace(t *testing.T) {
	t.Setenv("XDG_CONFIG_HOME", t.TempDir())
	h := machine(t, nil)
	if o := tuned(t.Context(), h); o.state != Missing {
		t.Errorf("%+v", o)
	}
	for _, m := range []tuning.Machine{tuning.Here(3, "shm"), {CPU: "another", LocalRanks: 2, Transport: "tcp"}} {
		if err := tuning.New(m, collectives.DefaultTable()).Save(tuning.DefaultPath()); err != nil {
			t.Fatal(err)
		}
		state, text := Found, "for jobs with 3 ranks on a machine over shm"
		if m.CPU == "another" {
			state, text = Warning, "foreign"
		}
		if o := tuned(t.Context(), h); o.state != state || !strings.Contains(o.detail, text) {
			t.Errorf("%+v", o)
		}
	}
	if err := os.WriteFile(tuning.DefaultPath(), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if o := tuned(t.Context(), h); o.state != Warning || !strings.Contains(o.detail, "malformed") || o.advice == "" {
		t.Errorf("%+v", o)
	}
}

// TestAdviceFitsTheError: what would not help is not advised.
func TestAdviceFitsTheError(t *testing.T) {
	mounted := map[string]string{"proc/self/stat": "1"}
	tcp := registry.Kind{Name: "tcp", Advice: "a firewall"}
	gone := errors.New("open /proc/x: no such file or directory")
	for _, c := range []struct {
		err         error
		proc        bool
		link, store string // parts of the advice
	}{
		{fmt.Errorf("listen: %w", ifname.ErrNone), true, "see interfaces", "--store"},
		{gone, false, noProcAdvice, noProcAdvice},
		{gone, true, "a firewall", "--store"},
		{errors.New("write: no space left on device"), true, "a firewall", "TMPDIR"},
		{errors.New("too many open files"), true, "a firewall", "--store"},
	} {
		h := machine(t, nil)
		if c.proc {
			h = machine(t, mounted)
		}
		link, store := h.linkAdvice(c.err, tcp), h.storeAdvice(c.err)
		if !strings.Contains(link, c.link) || !strings.Contains(store, c.store) ||
			strings.Contains(store, "TMPDIR") != (c.store == "TMPDIR") {
			t.Errorf("%v: %q, %q", c.err, link, store)
		}
	}
	if o := routes(t.Context(), machine(t, nil)); !strings.Contains(o.detail, "not known") {
		t.Errorf("%+v", o)
	}
	empty := map[string]string{"proc/net/route": "Iface\n"}
	if o := routes(t.Context(), machine(t, empty)); o.detail != "no default route" {
		t.Errorf("%+v", o)
	}
}

// TestUnreachableStore must end with the probe's time.
func TestUnreachableStore(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0") // accepts and never answers
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	h := machine(t, nil, "TUTTI_STORE=etcd://"+l.Addr().String())
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if o := configured(ctx, h); o.state != Broken || o.advice == "" {
		t.Errorf("%+v", o)
	}
}

func TestBytes(t *testing.T) {
	for n, want := range map[uint64]string{0: "0 B", 1023: "1023 B", 1024: "1 KiB", 1536: "1.5 KiB", 8 << 20: "8 MiB",
		1 << 60: "1024 PiB"} {
		if got := bytes(n); got != want {
			t.Errorf("bytes(%d) = %q, want %q", n, got, want)
		}
	}
}
