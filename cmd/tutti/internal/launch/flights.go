package launch

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"tutti/internal/files"
	"tutti/pg/flight"
)

// flightDir returns the directory of the ranks' flight records; "": there is none.
func (l *launcher) flightDir() string {
	if l.LogDir != "" {
		return l.LogDir
	}
	return os.Getenv("TUTTI_LOG_DIR")
}

// flightFiles lists the files of rank in the directory of flight records: regular files of this
// user.
func flightFiles(dir string, rank int, suffix string) []string {
	entries, err := os.ReadDir(dir) // no pattern: the directory's name may contain anything
	if err != nil {
		return nil
	}
	var paths []string
	for _, e := range entries {
		if rest, ours := strings.CutPrefix(e.Name(), fmt.Sprintf("flight-rank%d", rank)); ours &&
			strings.HasSuffix(rest, suffix) && (rest[0] == '-' || rest[0] == '.') {
			if info, err := e.Info(); err == nil && files.Own(info) {
				paths = append(paths, filepath.Join(dir, e.Name()))
			}
		}
	}
	return paths
}

// foreign reports whether a flight record is of another job that one of this user's launchers runs
// here.
func (l *launcher) foreign(s *flight.Snapshot) bool {
	return s.Job != l.Job && slices.ContainsFunc(Jobs(), func(r Running) bool { return r.Job == s.Job })
}

// written reports whether a process may still write the flight record in a file. The kernel refuses
// a lease for reading if a process has the file open or mapped for writing, which may be one of
// another PID namespace. Overlay file systems do not count mappings, and others have no leases:
// there the process's PID has to do.
func written(path string, s *flight.Snapshot) bool {
	f, err := files.Read(path)
	if err != nil {
		return false
	}
	defer f.Close() // ends the lease
	if _, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_RDLCK); errors.Is(err, unix.EAGAIN) {
		return true
	}
	host, _ := os.Hostname()
	return s.Host == host && unix.Kill(s.PID, 0) != unix.ESRCH
}

// clearFlights removes an earlier job's flight records from the log directory, like its logs. It
// leaves those that are foreign.
func (l *launcher) clearFlights() {
	if l.LogDir == "" {
		return
	}
	for i := range l.N {
		for _, suffix := range []string{".bin", ".json"} {
			for _, path := range flightFiles(l.LogDir, l.base+i, suffix) {
				if s, err := flight.ReadFile(path); err != nil || !l.foreign(s) {
					os.Remove(path)
				}
			}
		}
	}
}

// left returns the records of failed operations that a process which has failed as rank has
// written since its start, if it may be started again.
func (l *launcher) left(rank, pid int, since time.Time) (paths []string) {
	dir := l.flightDir()
	if dir == "" || l.MaxRestarts == 0 {
		return nil
	}
	for _, path := range flightFiles(dir, rank, ".json") {
		if info, err := os.Lstat(path); err != nil || info.ModTime().Before(since) {
			continue
		}
		s, err := flight.ReadFile(path)
		if err == nil && l.wrote(pid, s) && s.Reason != "signal" {
			paths = append(paths, path)
		}
	}
	return paths
}

// wrote reports whether a flight record of a rank is by process pid of the rank, or by a child of
// it. The program may name the job. A directory of the environment may be shared: with other jobs,
// of the same name unless that is unique, and with other machines.
func (l *launcher) wrote(pid int, s *flight.Snapshot) bool {
	switch job := s.Job == l.Job; {
	case l.LogDir != "":
		return job || s.PID == pid
	case l.unique:
		return job
	default:
		host, _ := os.Hostname()
		return job && s.PID == pid && s.Host == host
	}
}

// landed turns the flight records of a rank that has failed into JSON, and returns the files. how
// describes its end. incarnation is that of the process, 0 if unknown: another one may have taken
// its place already.
func (l *launcher) landed(rank, pid int, incarnation uint64, code int, how string) (paths []string) {
	dir := l.flightDir()
	if dir == "" {
		return nil
	}
	suffix := ".bin"
	if incarnation != 0 {
		suffix = fmt.Sprintf("-%016x.bin", incarnation)
	}
	for _, path := range flightFiles(dir, rank, suffix) {
		s, err := flight.ReadFile(path)
		// A program may name the job of its groups.
		if err == nil && s.Job != l.Job && s.PID != pid && (l.foreign(s) || written(path, s)) {
			continue
		}
		if err == nil && code != 0 {
			s.Reason = how
			var written string
			if written, err = s.Write(filepath.Join(dir, fmt.Sprintf("flight-rank%d", rank))); err == nil {
				paths = append(paths, written)
			}
		}
		if err == nil || code == 0 {
			os.Remove(path)
		} else {
			l.say(fmt.Sprintf("rank %d's flight record: %v", rank, err))
		}
	}
	return paths
}
