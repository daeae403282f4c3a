package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// A group is a control group with a freezer, made by this process.
type group struct {
	dir   string
	state string    // the file that freezes it
	words [2]string // what is written there: to continue, to freeze
}

// newGroup makes an empty group in this process's own. It removes those of earlier processes
// that were killed: what they had stopped continues.
func newGroup() (*group, error) {
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return nil, err
	}
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil, err
	}
	var errs []error
	for line := range strings.Lines(string(mounts)) {
		f := strings.Fields(line)
		var g group
		hierarchy := "freezer"
		switch {
		case len(f) < 4:
			continue
		case f[2] == "cgroup2":
			g, hierarchy = group{state: "cgroup.freeze", words: [2]string{"0", "1"}}, ""
		case f[2] == "cgroup" && slices.Contains(strings.Split(f[3], ","), hierarchy):
			g = group{state: "freezer.state", words: [2]string{"THAWED", "FROZEN"}}
		default:
			continue
		}
		parent := filepath.Join(f[1], path(string(own), hierarchy))
		g.sweep(parent)
		g.dir = filepath.Join(parent, fmt.Sprint(prefix, os.Getpid()))
		if err := g.make(); err != nil {
			errs = append(errs, err)
			continue
		}
		return &g, nil
	}
	errs = append(errs, errors.ErrUnsupported)
	return nil, fmt.Errorf("there is no control group with a freezer in which this process can make others: run it as "+
		"root, where cgroup2 or the freezer of cgroup is mounted: %w", errors.Join(errs...))
}

// prefix is the beginning of the names of groups. The rest is the number of the process.
const prefix = "tutti-stalls-"

// path returns the path of the process's group in a hierarchy, from the lines of /proc/PID/cgroup.
func path(lines, hierarchy string) string {
	for line := range strings.Lines(lines) {
		if f := strings.SplitN(strings.TrimSpace(line), ":", 3); len(f) == 3 &&
			slices.Contains(strings.Split(f[1], ","), hierarchy) {
			return f[2]
		}
	}
	return "/"
}

// sweep removes groups of processes that have ended.
func (g group) sweep(parent string) {
	dirs, _ := filepath.Glob(filepath.Join(parent, prefix+"*"))
	for _, dir := range dirs {
		pid, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(dir), prefix))
		if err != nil || syscall.Kill(pid, 0) != syscall.ESRCH {
			continue
		}
		lanes, _ := filepath.Glob(filepath.Join(dir, "*", g.state))
		for _, lane := range lanes {
			g.dir = filepath.Dir(lane)
			_ = g.freeze(false)
			_ = g.remove()
		}
		g.dir = dir
		_ = g.remove()
	}
}

func (g *group) make() error {
	if err := os.Mkdir(g.dir, 0o755); err != nil {
		return err
	}
	err := g.freeze(false)
	if err != nil {
		_ = g.remove()
	}
	return err
}

// child makes a group in g.
func (g *group) child(name string) (*group, error) {
	c := *g
	c.dir = filepath.Join(g.dir, name)
	return &c, c.make()
}

// remove removes g, which is not frozen. Members go on in the group above.
func (g *group) remove() error {
	g.empty(&group{dir: filepath.Dir(g.dir)})
	return os.Remove(g.dir)
}

// empty moves the members of g, which is not frozen, to another group, and what they begin
// meanwhile.
func (g *group) empty(to *group) {
	for range 1000 {
		all := g.members()
		if len(all) == 0 {
			return
		}
		if !slices.ContainsFunc(all, func(pid int) bool { return to.take(pid) == nil }) {
			time.Sleep(time.Millisecond) // all are ending
		}
	}
}

// procs is the file that lists the members.
func (g *group) procs() string { return filepath.Join(g.dir, "cgroup.procs") }

// members returns the numbers of the members.
func (g *group) members() (pids []int) {
	text, _ := os.ReadFile(g.procs())
	for s := range strings.FieldsSeq(string(text)) {
		if pid, err := strconv.Atoi(s); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// take makes a process a member.
func (g *group) take(pid int) error {
	return os.WriteFile(g.procs(), []byte(strconv.Itoa(pid)), 0)
}

// freeze stops the members, or has them continue.
func (g *group) freeze(on bool) error {
	word := g.words[0]
	if on {
		word = g.words[1]
	}
	return os.WriteFile(filepath.Join(g.dir, g.state), []byte(word), 0)
}
