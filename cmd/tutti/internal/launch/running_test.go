package launch

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tutti/internal/lockdir"
	"tutti/pg/flight"
)

func TestJobs(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	ours := func() (mine []Running) { // others of this user's may run
		for _, r := range Jobs() {
			if strings.HasPrefix(r.Job, "jobs-test-") {
				mine = append(mine, r)
			}
		}
		return mine
	}
	var locks []*lockdir.Held
	start := func(dir, job string) *launcher {
		l := &launcher{Options: Options{Program: "./train", Args: []string{"-x"}, Job: "jobs-test-" + job,
			Secret: "0123456789abcdef"}, world: 4, temp: filepath.Join(os.TempDir(), "tutti-"+dir)}
		lock, err := makeTemp(l.temp)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { lock.Close() })
		locks = append(locks, lock)
		return l
	}
	a := start("0000000000000001", "a")
	if got := ours(); len(got) != 0 {
		t.Errorf("before it is announced: %+v", got)
	}
	// two nodes of one job
	for _, l := range []*launcher{a, start("0000000000000002", "b"), start("0000000000000003", "b")} {
		if err := l.announce("tutti://127.0.0.1:1"); err != nil {
			t.Fatal(err)
		}
	}
	got := ours()
	if len(got) != 2 || got[0].Job != "jobs-test-a" || got[1].Job != "jobs-test-b" || got[0].Program != "./train -x" ||
		got[0].Ranks != 4 || got[0].Secret != "0123456789abcdef" || got[0].PID != os.Getpid() ||
		time.Since(got[0].Started) < 0 {
		t.Errorf("%+v", got)
	}
	if info, err := os.Stat(filepath.Join(a.temp, runningName)); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v: it holds a secret", info, err)
	}
	if left, _ := os.ReadDir(a.temp); len(left) != 2 { // the lock and the note
		t.Errorf("%v", left)
	}
	os.WriteFile(filepath.Join(a.temp, runningName), []byte(`{"job":"jobs-test-a","store":"http://x"}`), 0o600)
	locks[1].Close() // its launcher is dead
	if got := ours(); len(got) != 1 || got[0].Job != "jobs-test-b" {
		t.Errorf("a damaged note and a dead launcher: %+v", got)
	}
	locks[2].Close()
	if got := ours(); len(got) != 0 {
		t.Errorf("all are dead: %+v", got)
	}
}

// TestForeignNotesAreIgnored: a note counts only as announce leaves it.
func TestForeignNotesAreIgnored(t *testing.T) {
	for name, spoil := range map[string]func(dir, note string) error{
		"a directory that others may enter": func(dir, note string) error { return os.Chmod(dir, 0o711) },
		"a note that others may read":       func(dir, note string) error { return os.Chmod(note, 0o640) },
		"a link": func(dir, note string) error {
			return errors.Join(os.Rename(note, dir+"-elsewhere"), os.Symlink(dir+"-elsewhere", note))
		},
		"a directory that is a link": func(dir, note string) error {
			return errors.Join(os.Rename(dir, dir+"-elsewhere"), os.Symlink(dir+"-elsewhere", dir))
		},
		"a pipe, on which one could wait forever": func(dir, note string) error {
			return errors.Join(os.Remove(note), unix.Mkfifo(note, 0o600))
		},
		"another's note":      func(dir, note string) error { return os.Chown(note, os.Getuid()+1, -1) },
		"another's directory": func(dir, note string) error { return os.Chown(dir, os.Getuid()+1, -1) },
		"a job of no ranks": func(dir, note string) error {
			return os.WriteFile(note, []byte(`{"job":"a","store":"tutti://127.0.0.1:1"}`), 0o600)
		},
	} {
		t.Run(name, func(t *testing.T) {
			if strings.HasPrefix(name, "another's") && os.Getuid() != 0 {
				t.Skip("only root can give a file away")
			}
			l := &launcher{Options: Options{Program: "./train", Job: "a", Secret: "0123456789abcdef"}, world: 4,
				temp: filepath.Join(t.TempDir(), "tutti-0000000000000001")}
			lock, err := makeTemp(l.temp)
			if err != nil {
				t.Fatal(err)
			}
			defer lock.Close()
			if err := l.announce("tutti://127.0.0.1:1"); err != nil {
				t.Fatal(err)
			}
			if r, err := readRunning(l.temp); err != nil || r.Job != "a" {
				t.Fatalf("%+v, %v", r, err)
			}
			if err := spoil(l.temp, filepath.Join(l.temp, runningName)); err != nil {
				t.Fatal(err)
			}
			if r, err := readRunning(l.temp); err == nil {
				t.Errorf("it is believed: %+v", r)
			}
		})
	}
}

func TestRecordOfEndedRank(t *testing.T) {
	l := &launcher{Options: Options{Job: "x", LogDir: filepath.Join(t.TempDir(), "a[b"), N: 2}}
	if err := os.Mkdir(l.LogDir, 0o755); err != nil {
		t.Fatal(err)
	}
	record := func(rank int, inc uint64) {
		r, err := flight.Open(l.LogDir, flight.Identity{Job: "x", Rank: rank, Size: 20, Incarnation: inc})
		if err != nil {
			t.Fatal(err)
		}
		r.Close(true)
	}
	files := func() (names []string) {
		entries, err := os.ReadDir(l.LogDir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return names
	}
	expect := func(want string) {
		t.Helper()
		if got := strings.Join(files(), " "); got != want {
			t.Errorf("there is %q, want %q", got, want)
		}
	}
	record(1, 1)
	record(10, 2)
	l.landed(1, dead, 0, 137, "was killed by signal 9 (SIGKILL)")
	expect("flight-rank1.json flight-rank10-0000000000000002.bin")
	if s, err := flight.ReadFile(filepath.Join(l.LogDir, "flight-rank1.json")); err != nil ||
		s.Reason != "was killed by signal 9 (SIGKILL)" || s.Rank != 1 {
		t.Errorf("%+v, %v", s, err)
	}
	record(1, 3) // another incarnation
	l.landed(1, dead, 0, 1, "exited with code 1")
	record(1, 4)
	l.landed(1, dead, 0, 0, "")
	expect("flight-rank1-2.json flight-rank1.json flight-rank10-0000000000000002.bin")
	record(1, 5)
	record(1, 6) // has taken its place already
	l.landed(1, dead, 5, 0, "")
	expect("flight-rank1-0000000000000006.bin flight-rank1-2.json flight-rank1.json " +
		"flight-rank10-0000000000000002.bin")
	l.clearFlights()
	expect("flight-rank10-0000000000000002.bin")
	link := filepath.Join(l.LogDir, "flight-rank1-0000000000000005.bin")
	if err := os.Symlink(filepath.Join(l.LogDir, "flight-rank10-0000000000000002.bin"), link); err != nil {
		t.Fatal(err)
	}
	l.landed(1, dead, 0, 1, "exited with code 1") // ended by another process
	l.clearFlights()
	expect("flight-rank1-0000000000000005.bin flight-rank10-0000000000000002.bin")
}

// TestRecordsOfManyEnds: of a rank that is started again and again, the records of the last ends
// are kept, and all of one end.
func TestRecordsOfManyEnds(t *testing.T) {
	f := newFake(t, 2, 1000, 0)
	f.Job, f.LogDir = "x", t.TempDir()
	incarnation := uint64(0)
	ends := func(i, records int) {
		t.Helper()
		for range records {
			incarnation++
			r, err := flight.Open(f.LogDir, flight.Identity{Job: "x", Rank: i, Size: 2, Incarnation: incarnation})
			if err != nil {
				t.Fatal(err)
			}
			r.Close(true)
		}
		f.ranks[i].since, f.ranks[i].quick = time.Now(), 0 // it need not pause
		if err := f.event(Event{ID: i, PID: f.ranks[i].pid, Exited: true, Status: 9 << 8}); err != nil {
			t.Fatal(err)
		}
		f.restart(t, i)
	}
	has := func(i int, first, last uint64) {
		t.Helper()
		all := map[string]bool{}
		for _, path := range flightFiles(f.LogDir, i, ".json") {
			s, err := flight.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			all[s.Incarnation] = true
		}
		for n := first; n <= last; n++ {
			if !all[fmt.Sprintf("%016x", n)] {
				t.Errorf("rank %d's record %d is not there", i, n)
			}
		}
		if len(all) != int(last-first)+1 {
			t.Errorf("%d records of rank %d are there, want %d to %d", len(all), i, first, last)
		}
	}
	ends(0, 1)
	for range flight.MaxKept + 3 {
		ends(1, 1)
	}
	has(1, 5, flight.MaxKept+4)
	ends(1, flight.MaxKept+2) // of as many jobs
	has(1, flight.MaxKept+5, 2*flight.MaxKept+6)
	ends(1, 1)
	has(1, flight.MaxKept+8, 2*flight.MaxKept+7)
	has(0, 1, 1)
}

// TestRecordsOfRestartedRanks: of a rank that is started again and again, the records are kept that
// the last processes have written themselves. In a directory that others may share, those of
// others are left.
func TestRecordsOfRestartedRanks(t *testing.T) {
	host, _ := os.Hostname()
	for name, c := range map[string]struct{ shared, unique bool }{
		"own directory": {}, "shared directory": {shared: true}, "shared, with a unique name": {true, true},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t, 1, 1000, 0)
			dir := t.TempDir()
			f.Job, f.unique = "x", c.unique
			if c.shared {
				t.Setenv("TUTTI_LOG_DIR", dir)
			} else {
				f.LogDir = dir
			}
			now := time.Now()
			write := func(name, job, host string, pid int) string {
				t.Helper()
				_, reason, _ := strings.Cut(name, "-")
				s := &flight.Snapshot{Version: flight.Version, Job: job, Size: 1, Host: host, PID: pid, Reason: reason}
				path, err := s.Write(filepath.Join(dir, "flight-"+name))
				if err == nil {
					err = os.Chtimes(path, now, now)
				}
				if err != nil {
					t.Fatal(err)
				}
				return path
			}
			kept := []string{write("rank0-failure", "x", host, f.ranks[0].pid)} // by an earlier process
			var left []string
			for n := range flight.MaxKept + 3 {
				now = now.Add(time.Hour)
				f.ranks[0].since, f.ranks[0].quick = now, 0
				pid := f.ranks[0].pid
				if n == 0 {
					for _, w := range []struct {
						job, host, reason string
						pid               int
						ours              bool
					}{
						{"another", host, "failure", dead, false},
						{"x", host, "signal", pid, false},
						{"another", host, "failure", pid, !c.shared}, // the program may name the job
						{"x", host, "failure", dead, !c.shared || c.unique},
						{"x", "another", "failure", pid, !c.shared || c.unique},
					} {
						if path := write("rank0-"+w.reason, w.job, w.host, w.pid); w.ours {
							left = append(left, path)
						} else {
							kept = append(kept, path)
						}
					}
				}
				left = append(left, write("rank0-timeout", "x", host, pid))
				if err := f.event(Event{ID: 0, PID: pid, Exited: true, Status: 9 << 8}); err != nil {
					t.Fatal(err)
				}
				f.restart(t, 0)
			}
			want := append(kept, left[len(left)-flight.MaxKept:]...)
			slices.Sort(want)
			if got := flightFiles(dir, 0, ".json"); !slices.Equal(got, want) {
				t.Errorf("there are %q, want %q", got, want)
			}
		})
	}
}

// TestRecordsOfAnotherJob: jobs may share a directory of records.
func TestRecordsOfAnotherJob(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	other := &launcher{Options: Options{Job: "records-test", Secret: "0123456789abcdef"}, world: 1,
		temp: filepath.Join(os.TempDir(), "tutti-0000000000000001")}
	lock, err := makeTemp(other.temp)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if err := other.announce("tutti://127.0.0.1:1"); err != nil {
		t.Fatal(err)
	}
	l := &launcher{Options: Options{Job: "x", LogDir: t.TempDir(), N: 1}}
	record := func(job string, inc uint64) string {
		host, _ := os.Hostname()
		r, err := flight.Open(l.LogDir, flight.Identity{Job: job, Size: 1, Incarnation: inc, Host: host})
		if err != nil {
			t.Fatal(err)
		}
		r.Close(true)
		return filepath.Join(l.LogDir, flight.FileName(0, inc))
	}
	theirs := record(other.Job, 1)
	there := func(path string, want bool) {
		t.Helper()
		if _, err := os.Stat(path); (err == nil) != want {
			t.Errorf("%v, want it there: %v", err, want)
		}
	}
	for code := range 2 {
		l.landed(0, dead, 0, code, "ended")
		there(theirs, true)
	}
	there(filepath.Join(l.LogDir, "flight-rank0.json"), false)
	ours := record("named-by-the-program", 2)
	l.landed(0, os.Getpid(), 2, 1, "ended")
	there(ours, false)
	there(filepath.Join(l.LogDir, "flight-rank0.json"), true)
	l.clearFlights()
	there(filepath.Join(l.LogDir, "flight-rank0.json"), false)
	there(theirs, true)
	lock.Close() // its launcher is dead
	l.clearFlights()
	there(theirs, false)
}

// TestRecordOfALivingProcess: containers may share a directory of records and a host name, and have
// PIDs of their own.
func TestRecordOfALivingProcess(t *testing.T) {
	dir, err := os.MkdirTemp("/dev/shm", "records-") // other file systems may not tell who maps a file
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	l := &launcher{Options: Options{Job: "x", LogDir: dir, N: 1}}
	host, _ := os.Hostname()
	r, err := flight.Open(l.LogDir, flight.Identity{Job: "another", Size: 1, Incarnation: 1, Host: host})
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(r.Path())
	if err != nil {
		t.Fatal(err)
	}
	// Its PID is one that this process's namespace does not have.
	at := bytes.Index(b, binary.NativeEndian.AppendUint32(nil, uint32(os.Getpid())))
	f, err := os.OpenFile(r.Path(), os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteAt(binary.NativeEndian.AppendUint32(nil, dead), int64(at))
		f.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	if s, err := flight.ReadFile(r.Path()); err != nil || s.PID != dead {
		t.Fatalf("%+v, %v", s, err)
	}
	for code := range 2 {
		l.landed(0, dead-1, 0, code, "ended")
	}
	if entries, err := os.ReadDir(l.LogDir); err != nil || len(entries) != 1 {
		t.Errorf("%v, %v", entries, err)
	}
	r.Close(true)
	runtime.KeepAlive(r)
}
