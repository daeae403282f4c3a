package launch

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"tutti/bootstrap"
	"tutti/internal/lockdir"
)

// Running is a job that a launcher of this user runs on this machine, and what it takes to ask its ranks.
type Running struct {
	Job     string    `json:"job"`
	Store   string    `json:"store"`
	Secret  string    `json:"secret"` // textual form
	PID     int       `json:"pid"`    // the launcher's
	Ranks   int       `json:"ranks"`  // of all nodes
	Program string    `json:"program"`
	Started time.Time `json:"started"`
}

// runningName is the file in a launcher's temporary directory that says what it runs. It is readable for its owner alone, and goes with the directory.
const runningName = "job.json"

const maxRunning = 64 << 10

// announce lets this user's other commands find the job.
func (l *launcher) announce(store string) error {
	program := strings.Join(append([]string{l.Program}, l.Args...), " ")
	b, err := json.Marshal(Running{Job: l.Job, Store: store, Secret: l.Secret, PID: os.Getpid(), Ranks: l.world, Program: program[:min(len(program), 1024)], Started: time.Now()})
	if err != nil {
		return err
	}
	path := filepath.Join(l.temp, runningName)
	if err = os.WriteFile(path+".new", b, 0o600); err == nil {
		err = os.Rename(path+".new", path)
	}
	if err != nil {
		return fmt.Errorf("note what runs here: %w", err)
	}
	return nil
}

// Jobs lists the jobs of this user's launchers on this machine, the oldest first; of a job with several launchers here, the first.
func Jobs() []Running {
	var all []Running
	dirs := []string{filepath.Clean(os.TempDir())}
	if dirs[0] != "/tmp" {
		dirs = append(dirs, "/tmp") // of a launcher with another TMPDIR than ours
	}
	for _, parent := range dirs {
		entries, err := os.ReadDir(parent)
		if err != nil {
			continue
		}
		for _, e := range entries {
			dir := filepath.Join(parent, e.Name())
			if !tempName.MatchString(e.Name()) || !lockdir.InUse(dir) {
				continue
			}
			if r, err := readRunning(filepath.Join(dir, runningName)); err == nil {
				all = append(all, r)
			}
		}
	}
	slices.SortFunc(all, func(a, b Running) int { return a.Started.Compare(b.Started) })
	var out []Running
	for _, r := range all {
		if !slices.ContainsFunc(out, func(o Running) bool { return o.Job == r.Job && o.Store == r.Store }) {
			out = append(out, r)
		}
	}
	return out
}

// readRunning reads what announce wrote, and checks it: the directory is this user's, but who knows which version wrote it.
func readRunning(path string) (r Running, err error) {
	f, err := os.Open(path)
	if err != nil {
		return r, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxRunning))
	if err == nil {
		err = json.Unmarshal(b, &r)
	}
	if err == nil {
		err = bootstrap.CheckJob(r.Job)
	}
	if err == nil {
		_, err = bootstrap.ParseStore(r.Store)
	}
	return r, err
}
