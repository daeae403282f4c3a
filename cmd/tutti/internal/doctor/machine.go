package doctor

import (
	"context"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"tutti/cmd/tutti/internal/term"
	"tutti/internal/cpus"
	"tutti/internal/files"
	"tutti/kernels"
)

func system(_ context.Context, h *Host) outcome {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return warn(err.Error(), "")
	}
	name, _ := os.Hostname()
	return found(fmt.Sprintf("%s, %s %s, %s", name, unix.ByteSliceToString(u.Sysname[:]),
		unix.ByteSliceToString(u.Release[:]), unix.ByteSliceToString(u.Machine[:])))
}

// cgroupFiles reads a file of this process's cgroup and of each above it, of version 2 (v2), or the
// files of a controller of version 1 (v1), one after the other.
func (h *Host) cgroupFiles(v2, controller string, v1 ...string) []string {
	var values []string
	for line := range strings.Lines(h.read("/proc/self/cgroup")) {
		part := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(part) != 3 {
			continue
		}
		base, files := "", []string(nil)
		switch {
		case part[0] == "0" && part[1] == "":
			base, files = "/sys/fs/cgroup", []string{v2}
		default:
			for c := range strings.SplitSeq(part[1], ",") {
				if c == controller {
					base, files = "/sys/fs/cgroup/"+controller, v1
				}
			}
		}
		if files == nil {
			continue
		}
		for dir := filepath.Clean("/" + part[2]); ; dir = filepath.Dir(dir) {
			var texts []string
			for _, file := range files {
				if s := h.read(filepath.Join(base, dir, file)); s != "" {
					texts = append(texts, s)
				}
			}
			if len(texts) > 0 {
				values = append(values, strings.Join(texts, " "))
			}
			if dir == "/" {
				break
			}
		}
	}
	return values
}

// cpuQuota returns the number of CPUs that the cgroups allow, +Inf without a limit.
func (h *Host) cpuQuota() float64 {
	quota := math.Inf(1)
	for _, s := range h.cgroupFiles("cpu.max", "cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us") {
		f := append(strings.Fields(s), "100000")
		q, qerr := strconv.ParseFloat(f[0], 64)
		period, err := strconv.ParseFloat(f[1], 64)
		if qerr == nil && err == nil && q > 0 && period > 0 {
			quota = min(quota, q/period)
		}
	}
	return quota
}

func cores(_ context.Context, h *Host) outcome {
	usable, quota := runtime.NumCPU(), h.cpuQuota()
	detail := term.Count(usable, "core")
	members := func(path string) int {
		s, _ := cpus.Parse(h.read(path)) // without the file, or with another content, none
		return len(s)
	}
	if online := members("/sys/devices/system/cpu/online"); online > usable {
		detail = fmt.Sprintf("%d of %d cores (affinity)", usable, online)
	}
	nodes := members("/sys/devices/system/node/has_cpu") // others have only memory
	if nodes == 0 {
		nodes = members("/sys/devices/system/node/online")
	}
	if nodes > 1 {
		detail += fmt.Sprintf(" on %d NUMA nodes", nodes)
	}
	for line := range strings.Lines(h.read("/proc/cpuinfo")) {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == "model name" {
			detail += ", " + strings.TrimSpace(v)
			break
		}
	}
	switch {
	case quota < float64(usable):
		return warn(fmt.Sprintf("%s, but the cgroup allows %.3g of them", detail, quota),
			fmt.Sprintf("start at most %d ranks here, or raise the container's CPU limit", max(1, int(quota))))
	case usable == 1:
		return warn(detail, "two ranks take turns on one core: latencies are those of the scheduler")
	}
	return found(detail)
}

// binding says what tutti run gives its ranks on this machine.
func binding(_ context.Context, h *Host) outcome {
	allowed, err := cpus.Allowed()
	var machine []cpus.CPU
	if err == nil {
		machine, err = cpus.Read(os.DirFS(filepath.Join("/", h.Root, "sys/devices/system")), allowed)
	}
	if err != nil {
		return warn(err.Error(), "tutti run cannot bind ranks to processors: two may run on the same one")
	}
	detail := shares(machine)
	switch mode := h.Getenv("TUTTI_BIND"); mode {
	case "", "share":
	case "none":
		return missing("ranks of tutti run may run on all processors (TUTTI_BIND=none)", "")
	default:
		detail += fmt.Sprintf(" (TUTTI_BIND=%s)", mode)
	}
	return found(detail)
}

// shares says which processors ranks get.
func shares(machine []cpus.CPU) string {
	own := map[int]bool{}
	for _, c := range machine {
		own[c.Core] = true
	}
	if len(own) == 1 {
		return "tutti run has one core for all ranks"
	}
	pair := cpus.Share(machine, 2)
	return fmt.Sprintf("tutti run gives up to %d ranks cores of their own; two: %v and %v", len(own), pair[0], pair[1])
}

func simd(context.Context, *Host) outcome {
	switch level := kernels.Level(); {
	case level != "portable":
		return found(level)
	case runtime.GOARCH != "amd64":
		return found(runtime.GOARCH + ": reductions in portable Go")
	}
	return warn("no AVX2 kernels", "reductions run in portable Go, several times slower: in a VM, expose the "+
		"host's CPU model; build without the tag purego")
}

func memory(_ context.Context, h *Host) outcome {
	kb := map[string]uint64{}
	for line := range strings.Lines(h.read("/proc/meminfo")) {
		if f := strings.Fields(line); len(f) >= 2 {
			kb[strings.TrimSuffix(f[0], ":")], _ = strconv.ParseUint(f[1], 10, 64)
		}
	}
	total, free := kb["MemTotal"]<<10, kb["MemAvailable"]<<10
	if total == 0 {
		return warn("/proc/meminfo cannot be read", "mount /proc")
	}
	detail := fmt.Sprintf("%s, %s available", bytes(total), bytes(free))
	limit := total
	for _, s := range h.cgroupFiles("memory.max", "memory", "memory.limit_in_bytes") {
		if n, err := strconv.ParseUint(s, 10, 64); err == nil {
			limit = min(limit, n)
		}
	}
	if limit < total {
		detail += fmt.Sprintf(", the cgroup allows %s", bytes(limit))
	}
	if min(limit, free) < 256<<20 {
		return warn(detail, "shared and registered memory counts against it: free some")
	}
	return found(detail)
}

func hugePages(_ context.Context, h *Host) outcome {
	chosen := func(path string) string {
		_, rest, _ := strings.Cut(h.read(path), "[")
		s, _, _ := strings.Cut(rest, "]")
		return s
	}
	anon, shmem := chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
		chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
	switch {
	case anon == "":
		return missing("this kernel has no transparent huge pages", "")
	case shmem == "" || shmem == "never" || shmem == "deny":
		return missing(fmt.Sprintf("private memory: %s, shared memory: %s", anon, cmpOr(shmem, "never")),
			"for fewer page faults in large registered buffers: echo advise > "+
				"/sys/kernel/mm/transparent_hugepage/shmem_enabled")
	}
	return found(fmt.Sprintf("private memory: %s, shared memory: %s", anon, shmem))
}

func cmpOr(s, def string) string {
	if s == "" {
		return def
	}
	return s
}

func openFiles(context.Context, *Host) outcome {
	most, err := files.Ceiling()
	if err != nil {
		return warn(err.Error(), "")
	}
	// Go raises the soft limit of a Go program to the hard one, and so does each rank that is one.
	detail := fmt.Sprintf("up to %s", limit(most))
	if most < 4096 {
		return warn(detail, "a rank needs a few for each peer: raise it (ulimit -Hn 65536)")
	}
	return found(detail)
}

func lockedMemory(_ context.Context, h *Host) outcome {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &r); err != nil {
		return warn(err.Error(), "")
	}
	if r.Cur == unix.RLIM_INFINITY {
		return found("unlimited")
	}
	detail := "up to " + bytes(r.Cur)
	if h.capable(unix.CAP_IPC_LOCK) && h.initialUsers() {
		return found(detail + ", which does not bound this process: it has CAP_IPC_LOCK")
	}
	const advice = "ulimit -l unlimited, or LimitMEMLOCK=infinity in the service"
	if devices := h.rdmaDevices(); len(devices) > 0 {
		return warn(detail+", which bounds what "+strings.Join(devices, ", ")+" can register", advice)
	}
	return missing(detail, "only RDMA needs more: "+advice)
}

// capable reports whether this process has a capability in effect, in its user namespace.
func (h *Host) capable(capability int) bool {
	for line := range strings.Lines(h.read("/proc/self/status")) {
		if set, ok := strings.CutPrefix(line, "CapEff:"); ok {
			bits, err := strconv.ParseUint(strings.TrimSpace(set), 16, 64)
			return err == nil && bits&(1<<capability) != 0
		}
	}
	return false
}

// initialUsers reports whether this process is in the initial user namespace, which has all users.
// The kernel takes no capability of another one for a right to lock memory.
func (h *Host) initialUsers() bool {
	f := strings.Fields(h.read("/proc/self/uid_map"))
	return len(f) == 0 || len(f) == 3 && f[0] == "0" && f[1] == "0" && f[2] == "4294967295"
}

func limit(n uint64) string {
	if n == unix.RLIM_INFINITY {
		return "unlimited"
	}
	return strconv.FormatUint(n, 10)
}

// bytes formats n.
func bytes(n uint64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB", "PiB"}
	f, u := float64(n), 0
	for f >= 1024 && u < len(units)-1 {
		f, u = f/1024, u+1
	}
	return strings.TrimSuffix(fmt.Sprintf("%.1f", f), ".0") + " " + units[u]
}
