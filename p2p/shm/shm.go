// Package shm is the transport between processes of one machine: frames in rings of shared memory,
// and memory regions that a peer maps.
//
// A rank listens on a Unix socket with a random abstract name, which leaves no file. A connection
// proves the job's secret (package trust) and must come from the same user (or one side is root).
// Then the accepting side makes one memfd with both rings (package ring) and passes it over. The
// memory is sealed against truncation, and the receiver of a descriptor checks seals, size and kind
// before mapping it: a peer cannot make this process fault.
//
// The socket stays open for the life of the link. It carries messages of a fixed size: bells for a
// sleeping peer, and requests for regions with their answers. Its end shows the peer's death
// immediately, whatever the cause, or after the kernel has freed the peer's memory: a peer that has
// a lifeline (package lifeline) passes it over, and its break tells earlier. A goroutine in Go's
// network poller reads the socket; no thread is blocked.
//
// Plain memory of the peer's process is read by one copy of the kernel, where the system permits
// that: see read_linux.go.
//
// Descriptors: one listener a rank, one socket a link, the peer's process and lifeline, one memfd
// an allocated region, two for a region that peers may write, and one for each 1,024 ranges of
// memory that are exposed at a time. Memory: two rings and a page a link, shared by both sides,
// allocated when touched, or at once if vm.overcommit_memory is 2. Memory of links and regions is
// accounted to the processes that touch it, not to /dev/shm, and the kernel frees it when the last
// process that maps it ends.
package shm

import (
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"tutti/internal/ident"
	"tutti/p2p/ring"
)

// Config of a transport.
type Config struct {
	// RingBytes is the size of the ring in each direction of a link, rounded up to a power of two
	// from 8 KiB to 1 GiB; the accepting side's counts. The largest frame is a quarter of it. A
	// link takes two; n ranks of one machine that are all linked take n*(n-1)*RingBytes at most.
	// Default 512 KiB.
	RingBytes int
	Logger    *slog.Logger // default: nothing is logged
}

// DefaultRingBytes is Config.RingBytes' default.
const DefaultRingBytes = 512 << 10

func (c Config) withDefaults() Config {
	if c.RingBytes <= 0 {
		c.RingBytes = DefaultRingBytes
	}
	c.RingBytes = ring.Round(c.RingBytes)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

// endpoint is what a rank publishes: version, user, socket name, machine.
//
//	byte 0      1
//	bytes 1-4   user id, little-endian
//	bytes 5-20  random name of the socket
//	bytes 21-   machine, as Identify returns it, at most maxMachine bytes
type endpoint struct {
	uid     uint32
	name    [16]byte
	machine string
}

const (
	endpointVersion = 1
	endpointFixed   = 21
	maxMachine      = 200
)

func (e endpoint) encode() []byte {
	b := append([]byte{endpointVersion, byte(e.uid), byte(e.uid >> 8), byte(e.uid >> 16), byte(e.uid >> 24)},
		e.name[:]...)
	return append(b, e.machine...)
}

func decodeEndpoint(b []byte) (e endpoint, err error) {
	if len(b) <= endpointFixed || len(b) > endpointFixed+maxMachine || b[0] != endpointVersion {
		return e, fmt.Errorf("shm: endpoint of %d bytes that is none of ours, or another version's", len(b))
	}
	e.uid = uint32(b[1]) | uint32(b[2])<<8 | uint32(b[3])<<16 | uint32(b[4])<<24
	copy(e.name[:], b[5:])
	e.machine = string(b[endpointFixed:])
	return e, nil
}

// address returns the abstract socket's name. The prefix confines endpoints of peers to names of
// this form.
func (e endpoint) address() string { return "@tutti-" + hex.EncodeToString(e.name[:]) }

// reaches returns why a process on machine here, of user uid, cannot reach e; nil if it can.
func (e endpoint) reaches(here string, uid uint32) error {
	boot, net, _ := strings.Cut(here, " ")
	theirBoot, theirNet, _ := strings.Cut(e.machine, " ")
	switch {
	case here == "":
		return errors.New("shm: this machine could not be identified")
	case theirBoot != boot:
		return fmt.Errorf("shm: the peer is on another machine (boot id %.36q, here %q)", theirBoot, boot)
	case theirNet != net:
		return fmt.Errorf("shm: the peer is in another network namespace (%.36q, here %q), where abstract "+
			"sockets are out of reach", theirNet, net)
	case !ident.MayTalk(uid, e.uid):
		return fmt.Errorf("shm: the peer runs as user %d and this process as user %d; want the same user, or root",
			e.uid, uid)
	}
	return nil
}
