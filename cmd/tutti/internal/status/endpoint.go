package status

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"tutti/cmd/tutti/internal/term"
	"tutti/endpoint"
	"tutti/endpoint/stats"
)

// EndpointSample is the state of an endpoint at a time.
type EndpointSample struct {
	Time  time.Time
	State stats.Endpoint
}

// Endpoint is the evaluation of one or two samples of an endpoint that was asked by itself. --json
// prints it.
type Endpoint struct {
	Time time.Time `json:"time"`
	// Interval is the time between the samples for rates; 0: there is one sample.
	Interval float64        `json:"interval_seconds,omitempty"`
	State    stats.Endpoint `json:"endpoint"`
	Rate
}

// MakeEndpoint evaluates a sample, with rates since before if that is not nil.
func MakeEndpoint(now, before *EndpointSample) *Endpoint {
	r := &Endpoint{Time: now.Time, State: now.State}
	if before != nil {
		if r.Interval = now.Time.Sub(before.Time).Seconds(); r.Interval > 0 {
			r.Rate = rates([]stats.Endpoint{now.State}, []stats.Endpoint{before.State}, r.Interval)[0]
		}
	}
	return r
}

// Text writes the evaluation as text.
func (r *Endpoint) Text(w io.Writer, st Style) {
	s := &r.State
	head := fmt.Sprintf("endpoint %s: %s in %s, %s sent, %s received", endpointName(s),
		Size(float64(s.RegionBytes)), count(s.Regions, "region"), Size(float64(s.Sent)), Size(float64(s.Received)))
	fmt.Fprintln(w, st.paint("1", term.Wrap(head, 0, st.Width)))
	fmt.Fprintln(w)
	rate := &r.Rate
	if r.Interval == 0 {
		rate = nil
	}
	columns(w, st, [][]string{endpointHead, endpointLine(s, rate)}, 0, []int{1, 2, 4, 5, 3},
		func(_ int, text string) string { return text })
}

// endpointHead has the titles of endpointLine.
var endpointHead = []string{"endpoint", "peers", "mode", "regions", "op/s", "B/s", "state"}

// endpointLine is the line of an endpoint in a table; rate is nil if it is not known.
func endpointLine(e *stats.Endpoint, rate *Rate) []string {
	line := []string{endpointName(e), fmt.Sprint(e.Connected), endpointMode(e), fmt.Sprint(e.Regions), "", "",
		endpointState(e)}
	if rate != nil {
		line[4], line[5] = quantity(rate.Operations), Size(rate.Bytes)
	}
	return line
}

func endpointName(e *stats.Endpoint) string { return term.Shown(cmp.Or(e.Name, e.ID)) }

// endpointMode names the modes of an endpoint's connections, and RDMA if that is used beside them.
func endpointMode(e *stats.Endpoint) string {
	var all []string
	for _, m := range slices.Sorted(maps.Keys(e.Modes)) {
		all = append(all, term.Shown(m))
	}
	if rdma := endpoint.PathDirect.String(); e.Paths[rdma] > 0 {
		all = append(all, rdma)
	}
	return strings.Join(all, "+")
}

// endpointState describes in a few words what an endpoint does, and what has gone wrong.
func endpointState(e *stats.Endpoint) string {
	pending := map[string]uint64{}
	for k, n := range e.Pending {
		pending[k] = uint64(n)
	}
	var parts []string
	add := func(what string, all map[string]uint64) {
		if len(all) == 0 {
			return
		}
		var sum uint64
		var each []string
		for _, k := range slices.SortedFunc(maps.Keys(all),
			func(a, b string) int { return cmp.Or(cmp.Compare(all[b], all[a]), strings.Compare(a, b)) }) {
			sum += all[k]
			each = append(each, fmt.Sprintf("%d %s", all[k], term.Shown(k)))
		}
		parts = append(parts, fmt.Sprintf("%d %s (%s)", sum, what, strings.Join(each, ", ")))
	}
	messages := func(c stats.Count, what string) {
		if c.N > 0 {
			parts = append(parts, fmt.Sprintf("%s %s (%s)", count(c.N, "message"), what, Size(float64(c.Bytes))))
		}
	}
	add("under way", pending)
	messages(e.Waiting, "not received")
	messages(e.Offered, "waiting at the sender")
	add("failed", e.Failed)
	add("refused", e.Refused)
	if e.Broken > 0 {
		parts = append(parts, fmt.Sprintf("%s lost", count(e.Broken, "session")))
	}
	if e.Strangers > 0 {
		parts = append(parts, fmt.Sprintf("%s refused", count(e.Strangers, "connection")))
	}
	if len(parts) == 0 {
		return "idle"
	}
	return strings.Join(parts, ", ")
}
