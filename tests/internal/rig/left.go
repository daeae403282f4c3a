//go:build linux

package rig

import (
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"tutti/internal/proctest"
)

// processes lists the processes of the stage by the mark in their environments, which their
// descendants inherit.
func (s *Stage) processes() []int { return proctest.ProcessesWith(markVariable, s.mark) }

// Processes lists the stage's processes that are alive, with their command lines.
func (s *Stage) Processes() map[int]string {
	all := map[int]string{}
	for _, pid := range s.processes() {
		if line := proctest.CommandLine(pid); line != "" {
			all[pid] = line
		}
	}
	return all
}

// Socket is a socket of a process of the stage.
type Socket struct {
	PID           int
	Network       string // tcp or unix
	Local, Remote netip.AddrPort
	Name          string // unix: the path, abstract ones with @ in front
	Listening     bool
	Inode         string
}

type sockets map[string]Socket // by inode

// Sockets lists the TCP and Unix sockets of the stage's processes: listening ones, and TCP
// connections. Clean checks that the listening ones are closed.
func (s *Stage) Sockets() (all []Socket) {
	for _, pid := range s.processes() {
		own := map[string]bool{}
		fds, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid)) // it may have ended
		for _, fd := range fds {
			if to, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, fd.Name())); err == nil &&
				strings.HasPrefix(to, "socket:[") {
				own[strings.TrimSuffix(strings.TrimPrefix(to, "socket:["), "]")] = true
			}
		}
		for inode, k := range table(pid) {
			if own[inode] {
				k.PID = pid
				all = append(all, k)
				if k.Listening {
					s.seen[inode] = k
				}
			}
		}
	}
	return all
}

// table reads the TCP sockets and the listening Unix sockets of the network namespace of pid.
func table(pid int) sockets {
	all := sockets{}
	for _, file := range []string{"tcp", "tcp6"} {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", pid, file))
		for line := range strings.Lines(string(b)) {
			f := strings.Fields(line)
			if len(f) < 10 || f[0] == "sl" {
				continue
			}
			k := Socket{Network: "tcp", Local: address(f[1]), Remote: address(f[2]), Listening: f[3] == "0A",
				Inode: f[9]}
			all[k.Inode] = k
		}
	}
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/net/unix", pid))
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line) // Num RefCount Protocol Flags Type St Inode Path; flag 0x10000: listening
		if len(f) == 8 && f[3] == "00010000" {
			all[f[6]] = Socket{Network: "unix", Name: f[7], Listening: true, Inode: f[6]}
		}
	}
	return all
}

// address reads an address of /proc/net/tcp: words of four bytes in the machine's order, a colon,
// the port.
func address(s string) netip.AddrPort {
	words, port, _ := strings.Cut(s, ":")
	var b []byte
	for i := 0; i+8 <= len(words); i += 8 {
		v, _ := strconv.ParseUint(words[i:i+8], 16, 32)
		b = append(b, byte(v), byte(v>>8), byte(v>>16), byte(v>>24))
	}
	a, _ := netip.AddrFromSlice(b)
	p, _ := strconv.ParseUint(port, 16, 16)
	return netip.AddrPortFrom(a.Unmap(), uint16(p))
}

func names(t *testing.T, dir string) (all []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && path != dir {
			all = append(all, path)
		}
		return nil // gone meanwhile
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// Clean checks that the jobs of the stage, which have ended, have left nothing: no process, no file
// in the temporary directory or /dev/shm, no listening socket that Sockets has seen.
func (s *Stage) Clean() {
	s.t.Helper()
	describe := func() string {
		var text []string
		for pid, line := range s.Processes() {
			text = append(text, fmt.Sprintf("process %d (%s)", pid, line))
		}
		return "left behind: " + strings.Join(text, ", ")
	}
	Eventually(s.t, func() bool { return len(s.processes()) == 0 }, describe)
	if s.t.Failed() {
		return
	}
	left := func() (files []string) {
		files = names(s.t, filepath.Join(s.dir, "tmp"))
		for _, f := range names(s.t, s.shm()) {
			if !slices.Contains(s.was, f) {
				files = append(files, f)
			}
		}
		return files
	}
	// On a shared /dev/shm files of other programs come and go.
	Eventually(s.t, func() bool { return len(left()) == 0 },
		func() string { return fmt.Sprintf("files left behind: %q", left()) })
	listeners := func() (left []string) {
		now := table(os.Getpid())
		for inode, k := range s.seen {
			if still, ok := now[inode]; ok && still.Listening && still.Local == k.Local && still.Name == k.Name {
				left = append(left, fmt.Sprintf("%s %v%s, of process %d", k.Network, k.Local, k.Name, k.PID))
			}
		}
		return left
	}
	// A process that ends loses its environment, by which it is known, before its sockets.
	Eventually(s.t, func() bool { return len(listeners()) == 0 },
		func() string { return fmt.Sprintf("listeners left behind: %q", listeners()) })
	s.seen = sockets{}
}
