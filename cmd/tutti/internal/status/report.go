package status

import (
	"fmt"
	"slices"
	"time"

	"tutti/endpoint/stats"
	"tutti/pg/flight"
)

// Report is the evaluation of one or two samples of a job. --json prints it.
type Report struct {
	Job  string    `json:"job"`
	Time time.Time `json:"time"`
	// Interval is the time between the samples for rates; 0: there is one sample.
	Interval   float64            `json:"interval_seconds,omitempty"`
	Epoch      uint64             `json:"epoch"`            // the latest of all ranks
	Active     []int              `json:"active,omitempty"` // in that epoch
	Findings   []flight.Finding   `json:"findings"`
	Stragglers []flight.Straggler `json:"stragglers"`
	Ranks      []Rank             `json:"ranks"`
}

// Rank is one rank of a Report.
type Rank struct {
	flight.Rank
	State      string  `json:"state"` // what it does, in words
	Plain      bool    `json:"-"`     // State is unremarkable
	Operations float64 `json:"operations_per_second"`
	Bytes      float64 `json:"bytes_per_second"`
	// Endpoints has the rates of the endpoints of the rank's process, in the order of its snapshot.
	Endpoints []Rate `json:"endpoints,omitempty"`
}

// Rate is what an endpoint does a second, by itself and for its peers.
type Rate struct {
	Operations float64 `json:"operations_per_second"`
	Bytes      float64 `json:"bytes_per_second"`
}

// stragglerShare is the share of the time that others must have waited for a rank before it counts
// as a straggler, and stragglerMin the minimal time.
const (
	stragglerShare = 0.02
	stragglerMin   = 0.2
)

// Make makes a report of a sample, with rates since before if that is not nil. Stragglers are those
// since before if watching is set, else since the ranks have joined.
func Make(now, before *Sample, watching bool) *Report {
	r := &Report{Job: now.Job, Time: now.Time, Findings: append([]flight.Finding{}, flight.Diagnose(now.Ranks)...),
		Stragglers: []flight.Straggler{}}
	old := map[int]*flight.Snapshot{}
	var span float64
	var since []flight.Rank
	if before != nil {
		r.Interval = now.Time.Sub(before.Time).Seconds()
		for i := range before.Ranks {
			old[before.Ranks[i].Rank] = before.Ranks[i].Snapshot
		}
		if span = r.Interval; watching {
			since = before.Ranks
		}
	}
	beside := flight.Beside(now.Ranks)
	for i, x := range now.Ranks {
		out := Rank{Rank: x}
		out.State, out.Plain = state(&beside[i])
		if x.End != "" {
			out.State, out.Plain = x.End+"; before: "+out.State, false
		}
		if s, o := x.Snapshot, old[x.Rank]; s != nil {
			if e := s.View.Epoch; e > r.Epoch || e == r.Epoch && r.Active == nil {
				r.Epoch, r.Active = s.View.Epoch, s.View.Active
			}
			if !watching {
				span = max(span, s.Time.Sub(s.Since).Seconds())
			}
			if o != nil && o.Incarnation == s.Incarnation {
				if d := s.Time.Sub(o.Time).Seconds(); d > 0 {
					ops, bytes := sum(s)
					ops0, bytes0 := sum(o)
					out.Operations, out.Bytes = (ops-ops0)/d, (bytes-bytes0)/d
					out.Endpoints = rates(s.Endpoints, o.Endpoints, d)
				}
			}
		}
		r.Ranks = append(r.Ranks, out)
	}
	for _, s := range flight.Stragglers(now.Ranks, since) {
		if late := s.Kept - s.Waited; late >= stragglerMin && late >= stragglerShare*span {
			r.Stragglers = append(r.Stragglers, s)
		}
	}
	return r
}

func sum(s *flight.Snapshot) (ops, bytes float64) {
	for _, t := range s.Totals {
		ops += float64(t.Operations)
		bytes += float64(t.Bytes)
	}
	return ops, bytes
}

// rates returns the rates of endpoints d seconds after they were in the state before.
func rates(now, before []stats.Endpoint, d float64) []Rate {
	old := map[string]stats.Count{}
	for i := range before {
		old[before[i].ID] = moved(&before[i])
	}
	var all []Rate
	for i := range now {
		var r Rate
		x := moved(&now[i])
		if o, ok := old[now[i].ID]; ok && o.N <= x.N && o.Bytes <= x.Bytes {
			r = Rate{float64(x.N-o.N) / d, float64(x.Bytes-o.Bytes) / d}
		}
		all = append(all, r)
	}
	return all
}

// moved sums what an endpoint has done, by itself and for its peers.
func moved(e *stats.Endpoint) (sum stats.Count) {
	for _, by := range []map[string]stats.Count{e.Done, e.Served} {
		for _, c := range by {
			sum.N += c.N
			sum.Bytes += c.Bytes
		}
	}
	return sum
}

// state describes in a few words what a rank of Beside does.
func state(r *flight.Rank) (text string, plain bool) {
	s := r.Snapshot
	if s == nil {
		switch r.Presence {
		case flight.Vacant:
			return "empty slot", true
		case flight.Absent:
			return "has not joined yet", false
		case flight.Silent:
			text = "does not answer"
		default:
			text = string(r.Presence)
		}
		if r.Detail != "" {
			text += ": " + r.Detail
		}
		return text, false
	}
	var running *flight.Operation
	older := func(o *flight.Operation) {
		if o != nil && !o.Async && (running == nil || o.Started.Before(running.Started)) {
			running = o
		}
	}
	last, failure, open := s.Since, "", false
	for i := range s.Groups {
		g := &s.Groups[i]
		if open = open || g.Job == ""; g.Job == "" && g.Error != "" {
			return "failed: " + g.Error, false
		}
		older(g.Running)
		if g.Last != nil && g.Last.Ended != nil && g.Last.Ended.After(last) {
			last, failure = *g.Last.Ended, g.Failure()
			if failure != "" && g.Job != "" {
				failure += " (in job " + g.Job + ")"
			}
		}
	}
	for i := range s.Messages {
		older(&s.Messages[i])
	}
	joined, silent := s.Joined, ""
	for i := range s.Others {
		o := &s.Others[i]
		if running != nil && running.Job == o.Job {
			joined = o.Joined
		}
		if o.Silent {
			silent += ", or is in job " + o.Job + ", whose state is not to be had"
		}
	}
	prefix := ""
	if !joined {
		prefix = "joining: "
	}
	if running == nil {
		if !open {
			return prefix + "has closed its groups" + silent, silent == ""
		}
		text = prefix + "computing"
		if d := s.Time.Sub(last); d >= time.Second {
			text += " for " + flight.Seconds(d)
		}
		text += silent
		if failure != "" {
			return text + "; its latest operation failed: " + failure, false
		}
		return text, silent == ""
	}
	text = prefix + running.Short()
	if running.Kind != flight.Entering {
		text = prefix + "in " + running.Short()
	}
	d := s.Time.Sub(running.Started)
	if d < time.Second {
		return text, true
	}
	text += " for " + flight.Seconds(d)
	if waits := running.Awaits(); waits != "" {
		text += ", waits for " + waits
	}
	return text, false
}

// FromFiles makes a report of flight records: of several of one rank it uses the latest, and how
// its process ended if any of them says so. Ranks without one are unknown.
func FromFiles(snaps []*flight.Snapshot) *Report {
	now := &Sample{}
	type process struct {
		rank        int
		incarnation string
	}
	latest, ends := map[int]*flight.Snapshot{}, map[process]string{}
	size := 0
	for _, s := range snaps {
		now.Job = s.Job
		if s.Time.After(now.Time) {
			now.Time = s.Time
		}
		if o := latest[s.Rank]; o == nil || s.Time.After(o.Time) {
			latest[s.Rank] = s
		}
		size = max(size, s.Size)
		if end := s.End(); end != "" {
			ends[process{s.Rank, s.Incarnation}] = end
		}
	}
	for _, rank := range slices.Sorted(rangeOf(latest, size)) {
		r := flight.Rank{Rank: rank, Presence: flight.Unknown, Detail: "there is no flight record of it"}
		if s := latest[rank]; s != nil {
			r.Presence, r.Detail, r.Snapshot = flight.Present, "", s
			r.Where = fmt.Sprintf("pid %d on %s", s.PID, s.Host)
			r.End = ends[process{rank, s.Incarnation}]
		}
		now.Ranks = append(now.Ranks, r)
	}
	return Make(now, nil, false)
}

// rangeOf yields the ranks of m, and those below size unless these are many more.
func rangeOf(m map[int]*flight.Snapshot, size int) func(func(int) bool) {
	return func(yield func(int) bool) {
		all := map[int]bool{}
		for r := range m {
			all[r] = true
		}
		if size <= maxFiles {
			for r := range size {
				all[r] = true
			}
		}
		for r := range all {
			if !yield(r) {
				return
			}
		}
	}
}

// maxFiles is the size of jobs from which ranks without a flight record are not listed.
const maxFiles = 4096
