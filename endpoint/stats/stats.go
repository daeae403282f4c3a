// Package stats has the counters of endpoints, as data: for programs, for the metrics of a process
// and for the status of a rank.
package stats

import (
	"cmp"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
)

// Endpoint is the state of an endpoint, and what it has done since it was made.
type Endpoint struct {
	Name string `json:"name"`
	ID   string `json:"id"` // 16 hexadecimal digits

	// Operations of this end: "read", "write", "send" and "recv". Done are those that ended well,
	// with their bytes; Pending are under way.
	Done    map[string]Count  `json:"done,omitempty"`
	Pending map[string]int    `json:"pending,omitempty"`
	Failed  map[string]uint64 `json:"failed,omitempty"` // operations by reason: "broken", "timeout", …

	// Requests of peers: "read" and "write". Refused and failed requests are counted by the reason
	// that the peer was told: "no region", "stale", "rights", "bounds", "failed", "busy",
	// "cancelled", and "refused" for clients that asked for this.
	Served  map[string]Count  `json:"served,omitempty"`
	Refused map[string]uint64 `json:"refused,omitempty"`

	Waiting Count `json:"waiting"` // messages that have arrived and were not received
	Offered Count `json:"offered"` // messages that wait at their senders to be received

	Peers     int    `json:"peers"`     // that are known
	Connected int    `json:"connected"` // of those
	Conns     int    `json:"conns"`     // their connections
	Sessions  uint64 `json:"sessions"`  // that were made, by either end
	Broken    uint64 `json:"broken"`    // of those, sessions that were lost
	Strangers uint64 `json:"strangers"` // connections that were refused before they said what they want
	Sent      uint64 `json:"sent"`      // bytes on the connections, with what surrounds the data
	Received  uint64 `json:"received"`

	Modes map[string]int `json:"modes,omitempty"` // connected peers: "plain", "checked" or "sealed"
	// Connected peers, by what large operations take: "tcp" or "rdma".
	Paths map[string]int `json:"paths,omitempty"`

	Direct  map[string]Count `json:"direct,omitempty"` // of Done, what went by RDMA
	Detours uint64           `json:"detours"`          // RDMA paths that failed: what was under way went by TCP

	Regions     int   `json:"regions"`
	RegionBytes int64 `json:"region_bytes"`
}

// Reasons returns all reasons that Failed and Refused may have.
func Reasons() (failed, refused []string) {
	refused = []string{"cancelled", "no region", "stale", "rights", "bounds", "failed", "busy", "refused"}
	return append([]string{"other", "timeout", "broken", "closed", "size", "authentication"}, refused...), refused
}

// Count is a number of operations or messages, and their bytes.
type Count struct {
	N     uint64 `json:"n"`
	Bytes uint64 `json:"bytes"`
}

// Add adds an operation of n bytes.
func (c *Count) Add(n uint64) {
	c.N++
	c.Bytes += n
}

// Sources of the endpoints of this process.
var (
	mu      sync.Mutex
	last    int
	sources = map[int]func() Endpoint{}
)

// Report makes All call f, until remove is called. f must not block, and is not called after remove
// has returned.
func Report(f func() Endpoint) (remove func()) {
	mu.Lock()
	defer mu.Unlock()
	last++
	n := last
	sources[n] = f
	return func() {
		mu.Lock()
		defer mu.Unlock()
		delete(sources, n)
	}
}

// All returns the endpoints of this process, in the order of their names.
func All() []Endpoint {
	mu.Lock()
	defer mu.Unlock()
	var all []Endpoint
	for _, f := range sources {
		all = append(all, f())
	}
	slices.SortFunc(all, func(a, b Endpoint) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID))
	})
	return all
}

// Parse reads the state of an endpoint from untrusted JSON. Unknown fields are ignored. The name is
// not checked; all other texts are short and printable, the ID is 16 hexadecimal digits, and no
// number is negative.
func Parse(b []byte) (Endpoint, error) {
	var e Endpoint
	if err := json.Unmarshal(b, &e); err != nil {
		return Endpoint{}, fmt.Errorf("no state of an endpoint: %w", err)
	}
	if id, err := hex.DecodeString(e.ID); err != nil || len(id) != 8 || strings.ToLower(e.ID) != e.ID {
		return Endpoint{}, fmt.Errorf("state of an endpoint with the id %.40q, want 16 hexadecimal digits", e.ID)
	}
	if min(e.Peers, e.Connected, e.Conns, e.Regions) < 0 || e.RegionBytes < 0 {
		return Endpoint{}, errors.New("state of an endpoint with a negative number")
	}
	if err := cmp.Or(checkKeys(e.Done), checkKeys(e.Pending), checkKeys(e.Failed), checkKeys(e.Served),
		checkKeys(e.Refused), checkKeys(e.Modes), checkKeys(e.Paths), checkKeys(e.Direct), checkCounts(e.Pending),
		checkCounts(e.Modes), checkCounts(e.Paths)); err != nil {
		return Endpoint{}, err
	}
	return e, nil
}

// maxKeys bounds the keys of a map, and the bytes of each.
const maxKeys = 32

func checkKeys[T any](m map[string]T) error {
	for k := range m {
		if len(m) > maxKeys || len(k) > maxKeys ||
			strings.ContainsFunc(k, func(r rune) bool { return r < ' ' || r > '~' }) {
			return fmt.Errorf("state of an endpoint with %d counters, one of which is %.40q", len(m), k)
		}
	}
	return nil
}

func checkCounts(m map[string]int) error {
	for k, n := range m {
		if n < 0 {
			return fmt.Errorf("state of an endpoint with %d of %q", n, k)
		}
	}
	return nil
}
