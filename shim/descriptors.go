//go:build cgo && linux

package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

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
