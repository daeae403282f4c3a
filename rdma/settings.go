package rdma

import (
	"fmt"
	"strconv"
	"strings"
)

// Settings are what the network asks of all connections of a program. The zero Settings are the
// defaults.
type Settings struct {
	TrafficClass uint8
	ServiceLevel uint8 // at most 15
	PKey         int   // QPConfig.PKey
	Timeout      uint8 // Route.Timeout, 12 to 31; 0: the default of what makes the connection
}

// settings are the variables of the environment, and the fields that they set, with their least and
// greatest values.
var settings = []struct {
	name, field string
	from, to    int
	set         func(s *Settings, n int)
	get         func(s Settings) int
}{
	{"TUTTI_RDMA_TC", "TrafficClass", 0, 255, func(s *Settings, n int) { s.TrafficClass = uint8(n) },
		func(s Settings) int { return int(s.TrafficClass) }},
	{"TUTTI_RDMA_SL", "ServiceLevel", 0, 15, func(s *Settings, n int) { s.ServiceLevel = uint8(n) },
		func(s Settings) int { return int(s.ServiceLevel) }},
	{"TUTTI_RDMA_PKEY", "PKey", 0, maxPKey, func(s *Settings, n int) { s.PKey = n },
		func(s Settings) int { return s.PKey }},
	{"TUTTI_RDMA_TIMEOUT", "Timeout", 12, 31, func(s *Settings, n int) { s.Timeout = uint8(n) },
		func(s Settings) int { return int(s.Timeout) }},
}

// maxPKey is the greatest index of a table of partition keys.
const maxPKey = 1<<16 - 1

// ParseSettings returns the settings that variables of the environment have. Those that are empty
// are the defaults.
func ParseSettings(get func(name string) string) (s Settings, err error) {
	for _, v := range settings {
		text := strings.TrimSpace(get(v.name))
		if text == "" {
			continue
		}
		n, err := strconv.Atoi(text)
		if err != nil || n < v.from || n > v.to {
			return Settings{}, fmt.Errorf("%s=%.64q: expected a number from %d to %d", v.name, text, v.from, v.to)
		}
		v.set(&s, n)
	}
	return s, nil
}

// Check reports what is wrong with the settings, nil if a connection can have them.
func (s Settings) Check() error {
	for _, v := range settings {
		if n := v.get(s); n != 0 && (n < v.from || n > v.to) {
			return fmt.Errorf("rdma: Settings with %s %d: expected a number from %d to %d", v.field, n, v.from, v.to)
		}
	}
	return nil
}

// Apply gives a route the settings.
func (s Settings) Apply(r *Route) {
	r.TrafficClass, r.ServiceLevel = s.TrafficClass, s.ServiceLevel
	if s.Timeout > 0 {
		r.Timeout = s.Timeout
	}
}
