package cpus

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Allowed returns the processors that the calling thread may run on: those that its cgroup allows,
// and of these the ones that it, or its parent, is bound to.
func Allowed() (Set, error) {
	mask := unix.NewCPUSet(Max)
	if err := unix.SchedGetaffinityDynamic(0, mask); err != nil {
		return nil, fmt.Errorf("find the processors of this process: %w", err)
	}
	var s Set
	for cpu := range Max {
		if mask.IsSet(cpu) {
			s = append(s, cpu)
		}
	}
	return s, nil
}

// Bind restricts a thread of this machine, 0 for the calling one, to the processors of s. The
// kernel takes those of them that the thread's cgroup allows; without any it is an error.
func Bind(thread int, s Set) error {
	mask := unix.NewCPUSet(Max)
	for _, cpu := range s {
		mask.Set(cpu)
	}
	if err := unix.SchedSetaffinityDynamic(thread, mask); err != nil {
		return fmt.Errorf("bind to processors %v: %w", s, err)
	}
	return nil
}

// BindGroup restricts all threads of the processes of a process group. Threads and processes that
// they start later inherit it. One whose start is under way may keep what its parent had.
func BindGroup(group int, s Set) error {
	bound := map[int]bool{}
	for { // until no thread was started meanwhile by one that was not bound yet
		fresh := false
		for _, thread := range threads(group) {
			if bound[thread] {
				continue
			}
			if err := Bind(thread, s); err != nil && !errors.Is(err, unix.ESRCH) {
				return err
			}
			bound[thread], fresh = true, true
		}
		if !fresh {
			return nil
		}
	}
}

// threads lists the threads of the processes of a process group.
func threads(group int) []int {
	processes, _ := os.ReadDir("/proc")
	var all []int
	for _, p := range processes {
		pid, err := strconv.Atoi(p.Name())
		if err != nil {
			continue
		}
		if g, err := unix.Getpgid(pid); err != nil || g != group {
			continue
		}
		tasks, _ := os.ReadDir("/proc/" + p.Name() + "/task") // none if the process has ended
		for _, t := range tasks {
			if tid, err := strconv.Atoi(t.Name()); err == nil {
				all = append(all, tid)
			}
		}
	}
	return all
}

// Move has the calling thread go on at another of the processors that it may run on, the next one
// in their order, and reports whether it could. Its binding is the same afterwards: the kernel may
// move it back at any time.
func Move() bool {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	s, err := Allowed()
	if err != nil || len(s) < 2 {
		return false
	}
	var here uint32
	syscall.RawSyscall(unix.SYS_GETCPU, uintptr(unsafe.Pointer(&here)), 0, 0)
	next, ok := slices.BinarySearch(s, int(here))
	if ok {
		next++
	}
	if Bind(0, s[next%len(s):][:1]) != nil {
		return false
	}
	if Bind(0, s) != nil { // its cgroup has other processors now
		for s = s[:0]; len(s) < Max; {
			s = append(s, len(s))
		}
		Bind(0, s)
	}
	return true
}
