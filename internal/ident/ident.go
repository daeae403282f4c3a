// Package ident identifies processes, and the machines and networks that they run on.
package ident

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// New returns a random number that is never 0 and, in practice, unique.
func New() uint64 {
	var b [8]byte
	for {
		rand.Read(b[:])
		if n := binary.LittleEndian.Uint64(b[:]); n != 0 {
			return n
		}
	}
}

// A Place identifies where a process runs. Processes of equal Places share memory files, abstract
// sockets and loopback.
type Place struct {
	Boot    string // boot id of the kernel, which containers of a machine share
	Network string // network namespace
}

// Here returns the Place of this process.
func Here() (Place, error) { return here() }

var here = sync.OnceValues(func() (p Place, err error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return p, fmt.Errorf("identifying this machine: %w", err)
	}
	if p.Boot = strings.TrimSpace(string(boot)); p.Boot == "" || len(p.Boot) > 63 {
		return p, fmt.Errorf("identifying this machine: the kernel's boot id is %q", p.Boot)
	}
	if p.Network, err = os.Readlink("/proc/self/ns/net"); err != nil {
		return p, fmt.Errorf("identifying this network namespace: %w", err)
	}
	return p, nil
})

// Hash returns a number that is equal for equal Places, and almost surely different for others; 0
// only for the zero Place.
func (p Place) Hash() uint64 {
	if p == (Place{}) {
		return 0
	}
	h := fnv.New64a()
	fmt.Fprintf(h, "%s\x00%s", p.Boot, p.Network)
	return h.Sum64() | 1
}

// MayTalk reports whether processes of two users may share memory: they are equal, or one is root.
func MayTalk(a, b uint32) bool { return a == b || a == 0 || b == 0 }

// StandsForOthers reports whether a process that seems to be of user uid may be of another one: the
// kernel shows users that this process's user namespace does not have as its overflow user.
func StandsForOthers(uid uint32) bool {
	overflow, err := os.ReadFile("/proc/sys/kernel/overflowuid")
	if err != nil {
		overflow = []byte("65534") // Linux's default
	}
	users, _ := os.ReadFile("/proc/self/uid_map")
	return standsForOthers(uid, string(overflow), string(users))
}

// standsForOthers is StandsForOthers for the contents of two files. Only a namespace that has all
// users shows none as another one.
func standsForOthers(uid uint32, overflow, users string) bool {
	return strconv.FormatUint(uint64(uid), 10) == strings.TrimSpace(overflow) &&
		!slices.Equal(strings.Fields(users), []string{"0", "0", "4294967295"})
}
