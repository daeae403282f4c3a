//go:build linux

package torture

import (
	"encoding/json"
	"slices"
	"time"

	"tutti/pg"
)

// clone copies a program.
func (p *Program) clone() *Program {
	b, err := json.Marshal(p)
	c := &Program{}
	if err == nil {
		err = json.Unmarshal(b, c)
	}
	if err != nil {
		panic(err) // a program is data
	}
	return c
}

// without returns the program without the steps [from, to) and their faults; other faults keep
// their steps.
func (p *Program) without(from, to int, job Job) *Program {
	c := p.clone()
	c.Steps = slices.Delete(c.Steps, from, to)
	var faults []Fault
	for _, f := range c.Faults {
		switch {
		case f.Step >= to:
			f.Step -= to - from
		case f.Step >= from:
			continue
		}
		faults = append(faults, f)
	}
	c.Faults = faults
	c.normalize(job)
	return c
}

// shrink reduces a program while fails reports that one of several runs fails in the same way,
// until a time. It returns the number of runs.
func shrink(job Job, p *Program, fails func(job Job, p *Program) bool, until time.Time) (Job, *Program, int) {
	tried := 0
	try := func(j Job, c *Program) bool {
		if time.Now().After(until) {
			return false
		}
		tried++
		if fails(j, c) {
			job, p = j, c
			return true
		}
		return false
	}
	if job.Timeout > 3*time.Second { // calls that wait for it end sooner
		j := job
		j.Timeout = 3 * time.Second
		try(j, p)
	}
	// Steps: halves, then quarters, and so on.
	for size := max(1, len(p.Steps)/2); ; size /= 2 {
		for at := 0; at < len(p.Steps); {
			to := min(at+size, len(p.Steps))
			if c := p.without(at, to, job); len(c.Steps) >= len(p.Steps) || !try(job, c) {
				at = to
			}
		}
		if size <= 1 {
			break
		}
	}
	for i := len(p.Faults) - 1; i >= 0; i-- {
		c := p.clone()
		c.Faults = slices.Delete(c.Faults, i, i+1)
		c.normalize(job)
		try(job, c)
	}
	if p.Touch >= 0 {
		c := p.clone()
		c.Touch = -1
		try(job, c)
	}
	// Fewer ranks.
	for job.Ranks > 2 {
		j := job
		j.Ranks--
		j.Later = min(j.Later, j.Ranks-2)
		c := p.clone()
		for i := range c.Steps {
			if s := &c.Steps[i]; len(s.Ranks) > j.Ranks {
				s.Ranks = s.Ranks[:j.Ranks]
			}
		}
		c.normalize(j)
		if !try(j, c) {
			break
		}
	}
	for _, simpler := range []func(j *Job){
		func(j *Job) { j.OnFailure = pg.Report },
		func(j *Job) { j.Uniform = false },
		func(j *Job) { j.AutoAdmit = false },
		func(j *Job) { j.Algorithm = "" },
		func(j *Job) { j.Progress = false },
		func(j *Job) { j.Copy = "" },
		func(j *Job) { j.Staging = 0 },
		func(j *Job) { j.Later = 0 },
		func(j *Job) { j.Standby = 0 },
		func(j *Job) { j.GPUs, j.Kernels, j.IPC = NoGPUs, false, false },
		func(j *Job) { j.GPUs = GPUsOne },
		func(j *Job) { j.GPUs = GPUsEach },
		func(j *Job) { j.Kernels = false },
		func(j *Job) { j.IPC = false },
	} {
		j := job
		if simpler(&j); j != job {
			try(j, p)
		}
	}
	// Simpler ways to do each step.
	for i := range p.Steps {
		for _, simpler := range []func(s *Step){
			func(s *Step) {
				if !s.Op.window() { // the steps of a window agree on its group and size
					s.Group = 0
				}
			},
			func(s *Step) { s.DType, s.Red = pg.Float32, pg.Sum },
			func(s *Step) { s.Root = 0 },
			func(s *Step) {
				for r := range s.Ranks {
					s.Ranks[r].Cancel, s.Ranks[r].Limit = 0, 0
				}
			},
			func(s *Step) {
				for r := range s.Ranks {
					s.Ranks[r].Late = 0
				}
			},
			func(s *Step) {
				for r := range s.Ranks {
					s.Ranks[r].Hold, s.Ranks[r].Other = 0, false
				}
			},
			func(s *Step) {
				for r := range s.Ranks {
					s.Ranks[r].How = ""
				}
			},
			func(s *Step) {
				for r := range s.Ranks {
					s.Ranks[r].Dst, s.Ranks[r].Src = "", ""
				}
			},
			func(s *Step) {
				for r := range s.Ranks {
					s.Ranks[r].InPlace = false
				}
			},
			func(s *Step) {
				for r := range s.Ranks {
					s.Ranks[r].No = false
				}
			},
			func(s *Step) {
				if len(s.Par) > 1 {
					s.Par = s.Par[1:]
				}
			},
			func(s *Step) {
				if len(s.Par) > 1 {
					s.Par = s.Par[:len(s.Par)-1]
				}
			},
			func(s *Step) {
				if !s.Op.window() {
					s.Count = min(s.Count, 8)
				}
			},
		} {
			c := p.clone()
			simpler(&c.Steps[i])
			if c.Steps[i].Op == "" || equal(&c.Steps[i], &p.Steps[i]) {
				continue
			}
			c.normalize(job)
			try(job, c)
		}
	}
	return job, p, tried
}

func equal(a, b *Step) bool {
	x, _ := json.Marshal(a)
	y, _ := json.Marshal(b)
	return string(x) == string(y)
}
