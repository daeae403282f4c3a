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

// clearFlights removes an earlier job's flight records from the log directory, like its logs.
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

// landed turns the flight records of a rank that has failed into JSON. how describes its end.
// incarnation is that of the process, 0 if unknown: another one may have taken its place already.
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
// such a file of an earlier incarnation.
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
