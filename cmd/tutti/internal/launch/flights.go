package launch

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"tutti/internal/files"
	"tutti/pg/flight"
)

// flightDir is where ranks keep their flight records; "": nowhere.
func (l *launcher) flightDir() string {
	if l.LogDir != "" {
		return l.LogDir
	}
	return os.Getenv("TUTTI_LOG_DIR")
}

// flightFiles lists what rank has left in the directory of flight records: regular files of this
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

// clearFlights removes the flight records of an earlier job from the log directory, as its logs
// are.
func (l *launcher) clearFlights() {
	if l.LogDir == "" {
		return
	}
	for i := range l.N {
		for _, suffix := range []string{".bin", ".json"} {
			for _, path := range flightFiles(l.LogDir, l.base+i, suffix) {
				os.Remove(path)
			}
		}
	}
}

// landed turns the flight records of a rank that has ended into JSON, for people, unless it ended
// well. how describes its end. Of which life it was tells incarnation, 0 if that is not known: its
// place may have been taken already.
func (l *launcher) landed(rank int, incarnation uint64, code int, how string) {
	dir := l.flightDir()
	if dir == "" {
		return
	}
	suffix := ".bin"
	if incarnation != 0 {
		suffix = fmt.Sprintf("-%016x.bin", incarnation)
	}
	for _, path := range flightFiles(dir, rank, suffix) {
		if code != 0 {
			if err := translate(path, filepath.Join(dir, fmt.Sprintf("flight-rank%d", rank)), how); err != nil {
				l.say(fmt.Sprintf("rank %d's flight record: %v", rank, err))
				continue
			}
		}
		os.Remove(path)
	}
}

// translate reads a flight record and writes it as base.json, or base-INCARNATION.json if there is
// such a file of an earlier life.
func translate(path, base, how string) error {
	s, err := flight.ReadFile(path)
	if err != nil {
		return err
	}
	s.Reason = how
	to := base + ".json"
	if _, err := os.Lstat(to); !errors.Is(err, fs.ErrNotExist) {
		to = base + "-" + s.Incarnation + ".json"
	}
	return s.Write(to)
}
