package flight

import (
	"maps"
	"slices"
	"time"
)

// place is a rank of a job.
type place struct {
	job  string
	rank int
}

// Beside returns ranks with the groups and messages of the other jobs of their processes as if
// these were of this job, with Job set. The snapshots say which rank of which job each process is:
// so WaitsFor has ranks of this job, and Strangers those of Job that no snapshot is from. If two
// processes say that they are the same rank of a job, there are several jobs of that name: all
// their ranks are strangers. All other numbers of ranks in these groups and messages, and their
// texts, stay those of Job. The Others that are left say only which jobs there are. The ranks given
// are not changed.
func Beside(ranks []Rank) []Rank {
	at, several := map[place]int{}, map[string]bool{}
	for _, r := range ranks {
		if r.Snapshot == nil {
			continue
		}
		for _, o := range r.Snapshot.Others {
			p := place{o.Job, o.Rank}
			if _, taken := at[p]; taken {
				several[o.Job] = true
			}
			at[p] = r.Rank
		}
	}
	out := slices.Clone(ranks)
	for i := range out {
		if s := out[i].Snapshot; s != nil && len(s.Others) > 0 {
			out[i].Snapshot = s.beside(at, several)
		}
	}
	return out
}

// beside does what Beside does for one snapshot.
func (s *Snapshot) beside(at map[place]int, several map[string]bool) *Snapshot {
	c := *s
	c.Groups, c.Messages, c.Others = slices.Clone(s.Groups), slices.Clone(s.Messages), slices.Clone(s.Others)
	for i := range c.Others {
		other, at := &c.Others[i], at
		if several[other.Job] {
			at = nil
		}
		for _, g := range other.Groups {
			g.Job, g.Running, g.Last = other.Job, g.Running.in(other.Job, at), g.Last.in(other.Job, at)
			g.ambiguous = several[other.Job]
			c.Groups = append(c.Groups, g)
		}
		for j := range other.Messages {
			c.Messages = append(c.Messages, *other.Messages[j].in(other.Job, at))
		}
		other.Groups, other.Messages = nil, nil
	}
	return &c
}

// in returns a copy of o, which is of another job, with the ranks that are awaited translated.
func (o *Operation) in(job string, at map[place]int) *Operation {
	if o == nil {
		return nil
	}
	c := *o
	c.Job, c.WaitsFor = job, nil
	for _, r := range o.WaitsFor {
		if to, ok := at[place{job, r}]; ok {
			c.WaitsFor = append(c.WaitsFor, to)
		} else {
			c.Strangers = append(c.Strangers, r)
		}
	}
	return &c
}

// Gather completes flight records of killed processes, which are one for each job. A snapshot
// without Others gets those that the snapshots of other jobs describe, if these are of the same
// process and moment. A job of which the process was several ranks is left out, and gets none: it
// is not known which ones belong together.
func Gather(snaps []*Snapshot) {
	type process struct {
		host string
		pid  int
	}
	by := map[process][]*Snapshot{}
	for _, s := range snaps {
		p := process{s.Host, s.PID}
		by[p] = append(by[p], s)
	}
	for _, s := range snaps {
		if len(s.Others) > 0 {
			continue
		}
		latest, several := map[string]*Snapshot{}, map[string]bool{}
		for _, o := range by[process{s.Host, s.PID}] {
			if s.Time.Sub(o.Time).Abs() >= time.Second {
				continue
			}
			l := latest[o.Job]
			several[o.Job] = several[o.Job] || l != nil && l.Rank != o.Rank
			if l == nil || o.Time.After(l.Time) {
				latest[o.Job] = o
			}
		}
		for _, job := range slices.Sorted(maps.Keys(latest)) {
			if job != s.Job && !several[job] && !several[s.Job] {
				s.Others = append(s.Others, latest[job].Other())
			}
		}
	}
}
