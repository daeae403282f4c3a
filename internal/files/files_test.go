package files

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
)

func TestExplain(t *testing.T) {
	limit, known := Limit()
	if !known {
		t.Skip("the limit is not known here")
	}
	err := Explain(fmt.Errorf("open x: %w", syscall.EMFILE))
	if !errors.Is(err, syscall.EMFILE) || !strings.Contains(err.Error(),
		fmt.Sprintf("this process may have %d open files (RLIMIT_NOFILE)", limit)) ||
		!strings.Contains(err.Error(), "ulimit -n") {
		t.Errorf("EMFILE: %v", err)
	}
	if again := Explain(fmt.Errorf("later: %w", err)); strings.Count(again.Error(), "ulimit") != 1 {
		t.Errorf("explained twice: %v", again)
	}
	if err := Explain(syscall.ENFILE); !errors.Is(err, syscall.ENFILE) ||
		!strings.Contains(err.Error(), "fs.file-max") {
		t.Errorf("ENFILE: %v", err)
	}
	for _, other := range []error{nil, syscall.ENOENT} {
		if err := Explain(other); err != other {
			t.Errorf("%v became %v", other, err)
		}
	}
}

func TestCeilingIsNotBelowTheLimit(t *testing.T) {
	limit, known := Limit()
	most, err := Ceiling()
	if known != (err == nil) || most < limit {
		t.Errorf("limit %d (known: %t), ceiling %d, %v", limit, known, most, err)
	}
}

func TestOpen(t *testing.T) {
	before, known := Open()
	if !known {
		t.Skip("the number of open files is not known here")
	}
	var p [2]int
	if err := syscall.Pipe(p[:]); err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(p[0])
	defer syscall.Close(p[1])
	if after, _ := Open(); after != before+2 {
		t.Errorf("%d files before a pipe was made, %d after", before, after)
	}
}

// lower lowers the limit of open files to n until the end of the test, and returns it.
func lower(t *testing.T, n uint64) syscall.Rlimit {
	t.Helper()
	var was syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	few := was
	few.Cur = min(few.Cur, n)
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &few); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Setrlimit(syscall.RLIMIT_NOFILE, &was) })
	return few
}

func TestFull(t *testing.T) {
	if _, known := Open(); !known {
		t.Skip("the number of open files is not known here")
	}
	lower(t, 64)
	before := Full()
	var all []int
	for {
		fd, err := syscall.Open(os.DevNull, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
		if err != nil {
			break
		}
		all = append(all, fd)
	}
	then := Full()
	for _, fd := range all {
		syscall.Close(fd)
	}
	if before || !then || Full() {
		t.Errorf("full before all descriptors were used: %v, then: %v, after: %v", before, then, Full())
	}
}

func TestRaise(t *testing.T) {
	now := lower(t, 200)
	low, most := now.Cur, now.Max
	for _, c := range []struct{ to, want uint64 }{{low - 1, low}, {low + 1, min(low+1, most)}, {1 << 62, most}} {
		Raise(c.to)
		if got, _ := Limit(); got != c.want {
			t.Errorf("raised to %d: the limit is %d, want %d", c.to, got, c.want)
		}
	}
}
