//go:build linux

package torture

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"tutti/bootstrap"
	"tutti/internal/compiled"
)

// Options configure a run.
type Options struct {
	Transport string
	Seed      uint64
	Job       int           // number of the first job
	Ops       int           // operations of ranks; 0: as many as there is time for
	Duration  time.Duration // 0: as long as Ops take
	Faults    float64       // of programs, those with faults from outside
	Verbose   bool
	Avoid     string // features that programs must not have, separated by commas: see generator.avoids
	Out       string // directory for findings, after which the run continues; "": the first one ends it
	Ignore    *regexp.Regexp
	Shrink    time.Duration // time for reducing a failing program
}

// Summary is the result of a run.
type Summary struct {
	Programs, Jobs, Ops, Steps int
	Errors, Faults, Graphs     map[string]int
	Took                       time.Duration
	Findings                   []*Found
	Ignored                    int
	GPUs                       map[string]int // jobs by GPUs
	cov                        *cover
	began                      time.Time
}

// Found is a finding with a program that reproduces it.
type Found struct {
	Finding
	Source string // of a Go test
	Again  string // a command that runs the job again
}

// Run runs programs.
func Run(t *testing.T, o Options) *Summary {
	if o.Out != "" {
		if err := os.MkdirAll(o.Out, 0o777); err != nil {
			t.Fatal(err)
		}
	}
	return run(t, o, open(t, o.Transport))
}

// run runs programs at a place.
func run(t *testing.T, o Options, s place) *Summary {
	sum := &Summary{Errors: map[string]int{}, Faults: map[string]int{}, Graphs: map[string]int{},
		GPUs: map[string]int{}, cov: newCover()}
	began := time.Now()
	sum.began = began
	over := func() bool {
		return o.Duration > 0 && time.Since(began) > o.Duration || o.Ops > 0 && sum.Ops >= o.Ops
	}
	known, failed := map[string]bool{}, 0
	for number := o.Job; !over(); number++ {
		g := newGenerator(o.Seed, number, o.Transport, o.Faults)
		g.avoid = o.Avoid
		made := g.job()
		sum.Jobs++
		job, why := made.possible()
		if why != nil && !errors.Is(why, compiled.ErrNoCompiler) {
			t.Fatalf("the fake CUDA driver: %v", why)
		} else if why != nil {
			t.Logf("job %d has no GPUs (%q), which are those of the fake CUDA driver: %v", number, made.GPUs, why)
		}
		sum.GPUs[cmp.Or(string(job.GPUs), "none")]++
		j, f := s.start(job)
		if f != nil {
			f.Text = fmt.Sprintf("starting a job: %s (%+v)", f.Text, job)
			if !o.report(t, sum, known, &Found{Finding: *f, Again: o.again(number)}) {
				return sum
			}
			if failed++; failed == 3 {
				t.Errorf("no job can be started: %s", f.Text)
				return sum
			}
			continue
		}
		failed = 0
		var history []*Program
		for n, most := 0, pick(g, 5, 15, 60); n < most && (sum.Programs == 0 || !over()); n++ {
			p := g.program(made)
			history = append(history, p)
			res := j.run(p)
			sum.Programs++
			sum.cov.add(p)
			if o.Verbose {
				for _, slow := range res.Slow {
					t.Logf("job %d, program %d: %s", number, n, slow)
				}
			}
			sum.Ops += res.Ops
			sum.Steps += len(p.Steps)
			for k, v := range res.Errors {
				sum.Errors[k] += v
			}
			for k, v := range res.Graphs {
				sum.Graphs[k] += v
			}
			for k, v := range res.Faults {
				sum.Faults[k] += v
			}
			if len(res.Findings) > 0 {
				f := res.Findings[0]
				found := &Found{Finding: f, Again: o.again(number)}
				var all []string
				for _, g := range res.Findings {
					all = append(all, g.String())
				}
				fresh := !known[key(&f)] && (o.Ignore == nil || !o.Ignore.MatchString(strings.Join(all, "\n")))
				if fresh {
					found.Text = strings.TrimPrefix(strings.Join(append(all, res.Slow...), "\n"),
						fmt.Sprintf("%s: rank %d, step %d: ", f.Kind, f.Rank, f.Step))
					found.Source = s.reduce(job, history, f, o, found)
				}
				if !o.report(t, sum, known, found) {
					sum.Took = time.Since(began)
					return sum
				}
			}
			if res.Lost {
				j = nil
				break
			}
		}
		if j != nil {
			if f := j.finish(); f != nil && !o.report(t, sum, known, &Found{Finding: *f, Again: o.again(number)}) {
				break
			}
		}
	}
	sum.Took = time.Since(began)
	return sum
}

// again returns a command that runs a job again, with time for all of its programs.
func (o *Options) again(job int) string {
	return fmt.Sprintf("go test ./tests/torture -run TestTorture -torture.transport %s -torture.seed %#x "+
		"-torture.job %d -torture.faults %g -torture.avoid %q -torture.duration 5m", o.Transport, o.Seed, job, o.Faults,
		o.Avoid)
}

// calls matches the call and the memory of a finding, which differ each time.
var calls = regexp.MustCompile(`(step \d+: )?[a-z]+ (#\d+ )?\([^)]*\)` +
	`( on group \d+| in place \w+ on [a-z]+ memory \d*( and [a-z]+ memory \d*)?)*`)

var numbers = regexp.MustCompile(`[0-9a-fx.µm]*[0-9][0-9a-fx.µms]*`)

// key returns the common part of findings of the same kind.
func key(f *Finding) string {
	line, _, _ := strings.Cut(f.Text, "\n")
	line = calls.ReplaceAllString(line, "")
	return f.Kind + " " + numbers.ReplaceAllString(line[:min(len(line), 160)], "#")
}

// report records a finding, which fails the test. It reports whether the run continues.
func (o *Options) report(t testing.TB, sum *Summary, known map[string]bool, f *Found) bool {
	k := key(&f.Finding)
	if known[k] || o.Ignore != nil && o.Ignore.MatchString(f.String()) {
		sum.Ignored++
		return true
	}
	known[k] = true
	sum.Findings = append(sum.Findings, f)
	text := fmt.Sprintf("%s\n\nthe job again: %s\n\n%s", f.String(), f.Again, f.Source)
	if o.Out == "" {
		t.Errorf("%s", text)
		return false
	}
	name := filepath.Join(o.Out,
		fmt.Sprintf("%s-%s-%d.txt", time.Now().Format("0102-150405"), f.Kind, len(sum.Findings)))
	if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
		t.Errorf("%v\n%s", err, text)
		return true
	}
	line, _, _ := strings.Cut(f.String(), "\n")
	t.Errorf("after %v: %s (%s)", time.Since(sum.began).Round(time.Second), line[:min(len(line), 400)], name)
	return true
}

// possible returns the job without GPUs if the fake driver cannot be made, and why not.
func (j Job) possible() (Job, error) {
	if j.GPUs == NoGPUs {
		return j, nil
	}
	_, err := makeGPUs()
	if err != nil {
		j.GPUs = NoGPUs
	}
	return j, err
}

// place runs jobs: as processes or in this one.
type place interface {
	start(job Job) (work, *Finding)
	reduce(job Job, history []*Program, f Finding, o Options, found *Found) string
}

// work is a running job.
type work interface {
	run(p *Program) *Result
	finish() *Finding
}

type processes struct{ s *stage }

func (p processes) start(job Job) (work, *Finding) {
	x, f := p.s.start(job)
	if f != nil {
		p.s.killAll()
		return nil, f
	}
	return x, nil
}

type goroutines struct{}

type localWork Job

func (goroutines) start(job Job) (work, *Finding) { return localWork(job), nil }
func (w localWork) run(p *Program) *Result        { return runLocal(Job(w), p, nil) }
func (w localWork) finish() *Finding              { return nil }

func open(t *testing.T, transport string) place {
	if transport == "inproc" {
		return goroutines{}
	}
	return processes{newStage(t, transport, bootstrap.NewSecret())}
}

// sameKind reports whether a program that is run again fails in the same way.
func sameKind(a Finding, res *Result) bool {
	return slices.ContainsFunc(res.Findings, func(b Finding) bool {
		return a.Kind == b.Kind && errorNames.FindString(a.Text) == errorNames.FindString(b.Text)
	})
}

var errorNames = regexp.MustCompile(`\b(\w+Error|Err[A-Z]\w+|untyped|partly overlapping|input|stores to registered|` +
	`by|outcome|agreed|gathered|admitted|after recovering)\b`)

func (p processes) reduce(job Job, history []*Program, f Finding, o Options, found *Found) string {
	return reduce(p, job, history, f, o, found)
}

func (p goroutines) reduce(job Job, history []*Program, f Finding, o Options, found *Found) string {
	return reduce(p, job, history, f, o, found)
}

// reduce reduces the failing program, the last of the job's, and prints it.
func reduce(p place, job Job, history []*Program, f Finding, o Options, found *Found) string {
	until := time.Now().Add(o.Shrink)
	var last []Finding
	fails := func(j Job, program *Program) bool {
		for range 4 {
			w, bad := p.start(j)
			if bad != nil {
				return false
			}
			for range 3 {
				res := w.run(program)
				if sameKind(f, res) {
					last = res.Findings
					return true
				}
				if res.Lost {
					w = nil
					break
				}
			}
			if w != nil {
				w.finish()
			}
			if time.Now().After(until) {
				return false
			}
		}
		return false
	}
	program := history[len(history)-1]
	comment := fmt.Sprintf("It found %s.",
		strings.ReplaceAll(tail(strings.SplitN(f.String(), "\n", 2)[0], 600), "\n", " "))
	if o.Shrink == 0 || !fails(job, program) {
		return source("TestFound", job, []*Program{program},
			comment+fmt.Sprintf("\nIt was not reduced: alone it did not fail in twelve runs. It was program %d "+
				"of its job.",
				len(history)))
	}
	job, program, tried := shrink(job, program, fails, until)
	if len(last) > 0 {
		comment = fmt.Sprintf("It found %s.", tail(strings.SplitN(last[0].String(), "\n", 2)[0], 600))
	}
	return source("TestFound", job, []*Program{program}, fmt.Sprintf("%s\nIt was reduced in %d steps.", comment, tried))
}

// Replay runs programs on a job, one after the other. A finding fails the test.
func Replay(t *testing.T, job Job, programs ...*Program) {
	t.Helper()
	for _, p := range programs {
		p.normalize(job)
	}
	if _, why := job.possible(); errors.Is(why, compiled.ErrNoCompiler) {
		t.Skipf("the ranks have GPUs of the fake CUDA driver: %v", why)
	} else if why != nil {
		t.Fatalf("the fake CUDA driver: %v", why)
	}
	w, f := open(t, job.Transport).start(job)
	if f != nil {
		t.Fatal(f)
	}
	for _, p := range programs {
		res := w.run(p)
		for _, f := range res.Findings {
			t.Error(f.String())
		}
		if res.Lost {
			return
		}
	}
	if f := w.finish(); f != nil {
		t.Error(f)
	}
}

// Print prints the result of a run.
func (s *Summary) Print(w io.Writer, transport string) {
	rate := float64(s.Ops) / max(s.Took.Seconds(), 0.001)
	fmt.Fprintf(w,
		"%s: %d operations of ranks (%.0f a second), %d steps, %d programs, %d jobs in %v; "+
			"%d findings, %d ignored or seen before\n", transport, s.Ops, rate, s.Steps, s.Programs, s.Jobs,
		s.Took.Round(time.Second), len(s.Findings), s.Ignored)
	for what, m := range map[string]map[string]int{"faults": s.Faults, "errors": s.Errors, "GPUs of jobs": s.GPUs,
		"graphs": s.Graphs} {
		var all []string
		for _, k := range slices.Sorted(maps.Keys(m)) {
			all = append(all, fmt.Sprintf("%s %d", k, m[k]))
		}
		fmt.Fprintf(w, "%s: %s\n", what, strings.Join(all, ", "))
	}
	s.cov.print(w, transport, 50)
}
