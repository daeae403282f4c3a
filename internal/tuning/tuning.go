// Package tuning stores measured tables of algorithms in files, which `tutti tune` writes and Join
// reads. A file names the hardware that it was measured on, and Load refuses it on any other: a
// table that does not fit is worse than the default one.
package tuning

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"
	"time"

	"tutti/collectives"
)

const (
	// Format is the version of the file's format, and of the meaning of measurements: it is
	// increased when changes of plans or their runner make old measurements useless.
	Format  = 6
	maxFile = 1 << 20
	// Off, in the place of a path, means no file.
	Off = "off"
)

// ErrForeign says that a table was measured on another machine, or for other ranks.
var ErrForeign = errors.New("foreign")

// Machine holds what measurements depend on.
type Machine struct {
	CPU        string `json:"cpu"`
	Arch       string `json:"arch"`
	Cores      int    `json:"cores"` // of the machine, also those that a process may not use
	LocalRanks int    `json:"local_ranks"`
	Transport  string `json:"transport"` // what links the ranks of the machine
}

// File is a table and what it was measured on.
type File struct {
	Format  int    `json:"format"`
	Library string `json:"library"` // see Library
	// Defaults is the hash of the library's default table, which the measured one was compared
	// with.
	Defaults string             `json:"defaults"`
	Machine  Machine            `json:"machine"`
	Date     time.Time          `json:"date"`
	Table    *collectives.Table `json:"table"`
}

// New returns the file for a table that was measured on machine m now.
func New(m Machine, t *collectives.Table) *File {
	return &File{Format: Format, Library: Library(), Defaults: hash(collectives.DefaultTable()), Machine: m,
		Date: time.Now().UTC().Truncate(time.Second), Table: t}
}

func hash(t *collectives.Table) string { return fmt.Sprintf("%016x", t.Hash()) }

// Here describes this machine for a process that is one of localRanks ranks on it, linked by
// transport.
func Here(localRanks int, transport string) Machine {
	return Machine{CPU: cpuModel("/proc/cpuinfo"), Arch: runtime.GOARCH, Cores: cores(), LocalRanks: localRanks,
		Transport: transport}
}

// cores returns the number of processors of this machine, including those that this process may not
// run on, so that ranks that are bound to different ones take the same file.
func cores() int {
	n := 0
	if b, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(b)) {
			if k, _, _ := strings.Cut(line, ":"); strings.TrimSpace(k) == "processor" {
				n++
			}
		}
	}
	return max(n, runtime.NumCPU())
}

// cpuModel reads the first processor's name. On ARM it is made of the numbers of its maker and
// part.
func cpuModel(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return "unknown"
	}
	var arm [2]string
	for line := range strings.Lines(string(b)) {
		k, v, _ := strings.Cut(line, ":")
		v = strings.TrimSpace(v)
		switch strings.TrimSpace(k) {
		case "model name", "cpu model":
			return v
		case "CPU implementer":
			arm[0] = v
		case "CPU part":
			arm[1] = v
		}
		if arm[0] != "" && arm[1] != "" {
			return "implementer " + arm[0] + " part " + arm[1]
		}
	}
	return "unknown"
}

var pseudoVersion = regexp.MustCompile(`[0-9]{14}-[0-9a-f]{12}|\+dirty`)

// Library returns the released version of the library in this program, or "devel". Builds that are
// not released have nothing that tells them apart: a program that replaces the module does not know
// its revision, and tutti tune is not the program that uses the table. There Format alone tells
// whether a measurement still counts.
func Library() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "devel"
	}
	return libraryIn(info)
}

func libraryIn(info *debug.BuildInfo) string {
	for _, m := range append([]*debug.Module{&info.Main}, info.Deps...) {
		if m.Path == "tutti" && m.Replace == nil && strings.HasPrefix(m.Version, "v") &&
			!pseudoVersion.MatchString(m.Version) {
			return m.Version
		}
	}
	return "devel"
}

// DefaultPath returns the default path of the table, tutti/tune.json in the user's configuration
// directory ($XDG_CONFIG_HOME, else ~/.config); "" if the user has none.
func DefaultPath() string {
	dir, err := os.UserConfigDir()
	if err != nil {
		return ""
	}
	return filepath.Join(dir, "tutti", "tune.json")
}

// Place returns the path of the file that Find reads for path; "": none.
func Place(path string) string {
	switch path {
	case Off:
		return ""
	case "":
	default:
		return path
	}
	if path = DefaultPath(); path == "" {
		return ""
	}
	// The home directory may be none, or not accessible.
	_, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.ENOTDIR) {
		return ""
	}
	return path
}

// Find returns the table for ranks on machine here, from the file at path or, if path is "", from
// the one at DefaultPath, if it exists. No table (nil without an error) stands for the default one.
// An error names the file, what is wrong with it, and what to do; the default table has to be used
// then, too.
func Find(path string, here Machine) (*collectives.Table, error) {
	if path = Place(path); path == "" {
		return nil, nil
	}
	t, err := Load(path, here)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return t, nil
}

// Load reads the file at path and returns its table if it was measured by this library on a machine
// like here.
func Load(path string, here Machine) (*collectives.Table, error) {
	b, err := read(path)
	if err != nil {
		return nil, err
	}
	f, err := decode(b)
	if err != nil {
		return nil, err
	}
	if err := f.fits(here); err != nil {
		return nil, fmt.Errorf("%w; measure again with tutti tune -n %d --transport %s", err, here.LocalRanks,
			here.Transport)
	}
	return f.Table, nil
}

// Measured returns what the file at path was measured on. The error is that of Load for ranks like
// those on this machine, if it is not the same or the file is of another library.
func Measured(path string) (Machine, error) {
	b, err := read(path)
	if err != nil {
		return Machine{}, err
	}
	f, err := decode(b)
	if err != nil {
		return Machine{}, err
	}
	return f.Machine, f.fits(Here(f.Machine.LocalRanks, f.Machine.Transport))
}

func read(path string) ([]byte, error) {
	i, err := os.Stat(path)
	if err == nil && !i.Mode().IsRegular() { // a pipe would block the caller
		err = errors.New("no regular file")
	}
	if err != nil {
		return nil, unreadable(err)
	}
	r, err := os.Open(path)
	if err != nil {
		return nil, unreadable(err)
	}
	defer r.Close()
	b, err := io.ReadAll(io.LimitReader(r, maxFile+1))
	if err != nil {
		return nil, unreadable(err)
	}
	if len(b) > maxFile {
		return nil, fmt.Errorf("malformed: longer than %d bytes", maxFile)
	}
	return b, nil
}

func unreadable(err error) error {
	var p *os.PathError
	if errors.As(err, &p) {
		err = p.Err // the path is mentioned already
	}
	return fmt.Errorf("unreadable: %w", err)
}

func decode(b []byte) (*File, error) {
	var format struct {
		Format int `json:"format"`
	}
	if err := json.Unmarshal(b, &format); err != nil {
		return nil, fmt.Errorf("malformed: %w", err)
	}
	if format.Format != Format {
		return nil, fmt.Errorf("stale: it has format %d, this library reads format %d; measure again with tutti tune",
			format.Format, Format)
	}
	var f File
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&f); err != nil {
		return nil, fmt.Errorf("malformed: %w", err)
	}
	if f.Table == nil {
		return nil, errors.New("malformed: it holds no table")
	}
	return &f, nil
}

// fits returns how this machine differs from the one that the file was made on, or nil.
func (f *File) fits(here Machine) error {
	m := f.Machine
	switch {
	case f.Library != Library() || f.Defaults != hash(collectives.DefaultTable()):
		return fmt.Errorf("stale: measured by version %.64q with defaults %.16q, this is version %q with defaults %q",
			f.Library, f.Defaults, Library(), hash(collectives.DefaultTable()))
	case m.CPU != here.CPU || m.Arch != here.Arch || m.Cores != here.Cores:
		return fmt.Errorf("%w: measured on %d cores of %.100q (%.16s), here are %d of %q (%s)", ErrForeign, m.Cores,
			m.CPU, m.Arch, here.Cores, here.CPU, here.Arch)
	case m.LocalRanks != here.LocalRanks:
		return fmt.Errorf("%w: measured with %d ranks on a machine, here are %d", ErrForeign, m.LocalRanks,
			here.LocalRanks)
	case m.Transport != here.Transport:
		return fmt.Errorf("%w: measured over %.16q, the ranks here use %s", ErrForeign, m.Transport, here.Transport)
	}
	return nil
}

// CheckWritable checks in advance whether Save can write to path. It makes the file's directory.
func CheckWritable(path string) error {
	if i, err := os.Stat(path); err == nil && !i.Mode().IsRegular() {
		return fmt.Errorf("%s is no regular file", path)
	}
	t, err := createBeside(path)
	if err != nil {
		return err
	}
	return errors.Join(t.Close(), os.Remove(t.Name()))
}

// createBeside makes a file that can be renamed to path, and its directory.
func createBeside(path string) (*os.File, error) {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	return os.CreateTemp(dir, ".tune-*")
}

// Save writes the file to path, making its directory. Concurrent readers see the old file or the
// new one as a whole.
func (f *File) Save(path string) (err error) {
	b, err := json.Marshal(f)
	if err != nil {
		return err
	}
	var out bytes.Buffer
	if err := json.Indent(&out, b, "", " "); err != nil {
		return err
	}
	out.WriteByte('\n')
	t, err := createBeside(path)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			os.Remove(t.Name())
		}
	}()
	_, err = t.Write(out.Bytes())
	if cerr := t.Chmod(0o644); err == nil { // ranks of other users read it, too
		err = cerr
	}
	if cerr := t.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(t.Name(), path)
	}
	return err
}
