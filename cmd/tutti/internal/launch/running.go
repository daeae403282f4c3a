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

	"golang.org/x/sys/unix"

	"tutti/bootstrap"
	"tutti/internal/lockdir"
)

// Running describes a job that a launcher of this user runs on this machine, with what is needed to
// ask its ranks.
type Running struct {
	Job     string    `json:"job"`
	Store   string    `json:"store"`
	Secret  string    `json:"secret"` // textual form
	PID     int       `json:"pid"`    // the launcher's
	Ranks   int       `json:"ranks"`  // of all nodes
	Program string    `json:"program"`
	Started time.Time `json:"started"`
}

// runningName is the file in a launcher's temporary directory that describes its job. Only its
// owner can read it, and it is removed with the directory.
const runningName = "job.json"

const maxRunning = 64 << 10

// announce makes the job known to this user's other commands.
func (l *launcher) announce(store string) error {
	program := strings.Join(append([]string{l.Program}, l.Args...), " ")
	b, err := json.Marshal(Running{Job: l.Job, Store: store, Secret: l.Secret, PID: os.Getpid(), Ranks: l.world,
		Program: program[:min(len(program), 1024)], Started: time.Now()})
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

// Jobs lists the jobs of this user's launchers on this machine, the oldest first; of a job with
// several launchers here, the first.
func Jobs() []Running {
	var all []Running
	dirs := []string{filepath.Clean(os.TempDir())}
	if dirs[0] != "/tmp" {
		dirs = append(dirs, "/tmp") // of a launcher with another TMPDIR
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
			if r, err := readRunning(dir); err == nil {
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

// readRunning reads and checks a file of announce. Any user can make directories of such names
// where temporary ones are, and this user may have opened one to others: the file is valid only as
// announce leaves it, a file of this user in a directory of this user, both without access for
// others.
func readRunning(dir string) (r Running, err error) {
	d, err := unix.Open(dir, unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return r, err
	}
	defer unix.Close(d)
	fd, err := unix.Openat(d, runningName, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return r, err
	}
	f := os.NewFile(uintptr(fd), filepath.Join(dir, runningName))
	defer f.Close()
	for fd, kind := range map[int]uint32{d: unix.S_IFDIR, fd: unix.S_IFREG} {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return r, err
		}
		if int(st.Uid) != os.Getuid() || st.Mode&unix.S_IFMT != kind || st.Mode&0o077 != 0 {
			return r, fmt.Errorf("%s: mode %o, of user %d: not a launcher's of user %d", f.Name(), st.Mode, st.Uid,
				os.Getuid())
		}
	}
	b, err := io.ReadAll(io.LimitReader(f, maxRunning))
	if err == nil {
		err = json.Unmarshal(b, &r)
	}
	if err == nil && r.Ranks < 1 {
		err = fmt.Errorf("%s: a job of %d ranks", f.Name(), r.Ranks)
	}
	if err == nil {
		err = bootstrap.CheckJob(r.Job)
	}
	if err == nil {
		_, err = bootstrap.ParseStore(r.Store)
	}
	return r, err
}
