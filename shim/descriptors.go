//go:build cgo && linux

package main

// #include "internal.h"
import "C"

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
)

// Package syscall raises the limit of open files. The host's children would inherit that, and
// select cannot be used on files beyond the usual limit. This restores the limit that the host had
// when it loaded the library. A join raises it as far as a job of its size needs.
func init() {
	host := syscall.Rlimit{Cur: uint64(C.tutti_files.rlim_cur), Max: uint64(C.tutti_files.rlim_max)}
	raised := syscall.Rlimit{Cur: host.Max - 1, Max: host.Max}
	var now syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &now); err == nil && now == raised {
		syscall.Setrlimit(syscall.RLIMIT_NOFILE, &host)
	}
}

// watcher returns the epoll instance of this process that watches fd.
func watcher(fd int) (int, bool) {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0, false
	}
	for _, e := range entries {
		if link, err := os.Readlink("/proc/self/fd/" + e.Name()); err != nil || link != "anon_inode:[eventpoll]" {
			continue
		}
		info, err := os.ReadFile("/proc/self/fdinfo/" + e.Name())
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(info)) {
			var watched int
			if _, err := fmt.Sscanf(line, "tfd: %d", &watched); err == nil && watched == fd {
				n, err := strconv.Atoi(e.Name())
				return n, err == nil
			}
		}
	}
	return 0, false
}
