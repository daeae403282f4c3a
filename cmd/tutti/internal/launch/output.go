package launch

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"tutti/internal/files"
)

// maxLine is the longest line that is shown as one; longer ones are cut into lines of this length.
const maxLine = 64 << 10

// Terminal reports whether f is a terminal.
func Terminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// Colour reports whether to write colour to f: it is a terminal that supports it, and NO_COLOR is
// not set.
func Colour(f *os.File) bool {
	return os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb" && Terminal(f)
}

// Tag returns the prefix of the launcher's own lines on f.
func Tag(f *os.File) string {
	if Colour(f) {
		return "\x1b[1;31mtutti:\x1b[0m "
	}
	return "tutti: "
}

// rankColours distinguish neighbours: cyan, yellow, green, magenta, blue, and their bright
// versions; red is for errors.
var rankColours = []int{36, 33, 32, 35, 34, 96, 93, 92, 95, 94}

// Output shows the ranks' output: whole lines, each with its rank's number, never mixed within a
// line. It can also write them to files.
type Output struct {
	out, err *stream
	log      *ranksLog
	report   func(string)
	broken   chan struct{} // closed when the reader of the standard output has gone
	wg       sync.WaitGroup
	hurry    chan struct{} // closed by Hurry
	once     sync.Once     // of Hurry
	dropped  atomic.Int64

	saying sync.Mutex
	lines  []string      // of Say, not written yet
	said   chan struct{} // closed when they are; nil: there are none
}

type stream struct {
	mu     sync.Mutex
	w      io.Writer
	colour bool
	prefix bool
	width  int
	failed bool
	stuck  bool // a write was given up: it may still be in progress, and there is no other
}

// lastWait bounds every write after Hurry.
const lastWait = 500 * time.Millisecond

// NewOutput writes ranks' standard output to out and standard error to errw, with prefixes wide
// enough for world ranks if prefix is set, and everything to logDir/rank-N.log if logDir is not
// empty. report is called once for each file that cannot be written.
func NewOutput(out, errw *os.File, prefix bool, world int, logDir string, ranks []int,
	report func(string)) (*Output, error) {
	width := len(strconv.Itoa(max(world-1, 0)))
	o := &Output{report: report, broken: make(chan struct{}), hurry: make(chan struct{}),
		out: &stream{w: out, colour: Colour(out), prefix: prefix, width: width},
		err: &stream{w: errw, colour: Colour(errw), prefix: prefix, width: width}}
	if logDir != "" {
		if err := files.Directory(logDir); err != nil {
			return nil, fmt.Errorf("the log directory: %w", err)
		}
		o.log = &ranksLog{files: map[int]*os.File{}, report: report}
		for _, r := range ranks {
			f, err := files.Replace(filepath.Join(logDir, fmt.Sprintf("rank-%d.log", r)), 0o644)
			if err != nil {
				o.log.close()
				return nil, fmt.Errorf("make rank %d's log: %w", r, err)
			}
			o.log.files[r] = f
		}
	}
	return o, nil
}

// Broken is closed when the reader of the standard output has gone away, for example head.
func (o *Output) Broken() <-chan struct{} { return o.broken }

// Hurry gives up output that nobody reads: from now on each write has to end soon. Wait and Flush
// then do so, too, if the ranks' ends of the pipes are closed. May be called again.
func (o *Output) Hurry() { o.once.Do(func() { close(o.hurry) }) }

// Dropped returns how many lines were given up; the reader may have got the first of them.
func (o *Output) Dropped() int { return int(o.dropped.Load()) }

// Copy shows what rank writes to r, its standard error if isErr, until r ends. It returns at once;
// Wait waits. Output owns r.
func (o *Output) Copy(rank int, isErr bool, r io.ReadCloser) {
	s := o.out
	if isErr {
		s = o.err
	}
	o.wg.Add(1)
	go func() {
		defer o.wg.Done()
		defer r.Close()
		o.copy(s, rank, r)
	}()
}

// Say writes a line to the standard error, after those of earlier calls. It returns at once; Flush
// waits.
func (o *Output) Say(line string) {
	o.saying.Lock()
	defer o.saying.Unlock()
	o.lines = append(o.lines, line)
	if o.said == nil {
		o.said = make(chan struct{})
		go o.speak()
	}
}

// Flush waits until the lines of Say have been written.
func (o *Output) Flush() {
	o.saying.Lock()
	said := o.said
	o.saying.Unlock()
	if said != nil {
		<-said
	}
}

// speak writes the lines of Say until there are none.
func (o *Output) speak() {
	for {
		o.saying.Lock()
		lines := o.lines
		o.lines = nil
		if len(lines) == 0 {
			close(o.said)
			o.said = nil
			o.saying.Unlock()
			return
		}
		o.saying.Unlock()
		for _, line := range lines {
			o.err.mu.Lock()
			o.writeLocked(o.err, []byte(line+"\n"))
			o.err.mu.Unlock()
		}
	}
}

// Wait waits until every reader has ended, and closes the logs.
func (o *Output) Wait() {
	o.wg.Wait()
	if o.log != nil {
		o.log.close()
	}
}

func (o *Output) copy(s *stream, rank int, r io.Reader) {
	var head []byte
	if s.prefix {
		head = fmt.Appendf(nil, "[%*d] ", s.width, rank)
		if s.colour {
			head = fmt.Appendf(nil, "\x1b[%dm[%*d]\x1b[0m ", rankColours[rank%len(rankColours)], s.width, rank)
		}
	}
	in := bufio.NewReaderSize(r, maxLine)
	var buf []byte
	for {
		line, err := in.ReadSlice('\n')
		if len(line) > 0 {
			if o.log != nil {
				o.log.write(rank, line)
			}
			buf = append(append(buf, head...), line...)
			if line[len(line)-1] != '\n' {
				buf = append(buf, '\n')
			}
		}
		// Lines that have arrived are written together.
		if next, _ := in.Peek(in.Buffered()); err != nil && !errors.Is(err, bufio.ErrBufferFull) ||
			len(buf) >= maxLine || !hasLine(next) {
			if o.emit(s, buf) {
				buf = buf[:0]
			} else {
				buf = nil
			}
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return
		}
	}
}

func hasLine(b []byte) bool {
	for _, c := range b {
		if c == '\n' {
			return true
		}
	}
	return false
}

// emit writes lines. It returns false if b may still be in use.
func (o *Output) emit(s *stream, b []byte) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(b) == 0 || s.failed && s == o.err {
		return true
	}
	err := o.writeLocked(s, b)
	if s.stuck {
		o.dropped.Add(int64(bytes.Count(b, []byte{'\n'})))
		return false
	}
	if err == nil || s.failed {
		return true
	}
	s.failed = true
	if errors.Is(err, syscall.EPIPE) {
		if s == o.out {
			close(o.broken)
		}
		return true
	}
	if s == o.out {
		o.report(fmt.Sprintf("cannot write the ranks' output: %v; the job goes on", err))
	}
	return true
}

// writeLocked writes to s, which is locked, unless s is stuck.
func (o *Output) writeLocked(s *stream, b []byte) error {
	if s.stuck {
		return nil
	}
	done := make(chan error, 1)
	go func() {
		_, err := s.w.Write(b)
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-o.hurry:
	}
	late := time.NewTimer(lastWait)
	defer late.Stop()
	select {
	case err := <-done:
		return err
	case <-late.C:
		s.stuck = true
		return nil
	}
}

// ranksLog is one file for each rank. A failure to write is reported once, and the job goes on.
type ranksLog struct {
	mu     sync.Mutex // a rank's two streams share its file
	files  map[int]*os.File
	report func(string)
	failed bool
}

func (l *ranksLog) write(rank int, b []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f := l.files[rank]
	if f == nil {
		return
	}
	if _, err := f.Write(b); err != nil {
		if !l.failed {
			l.report(fmt.Sprintf("cannot write rank %d's log: %v; the job goes on, the log is incomplete", rank, err))
		}
		l.failed = true
		f.Close()
		delete(l.files, rank)
	}
}

func (l *ranksLog) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for r, f := range l.files {
		f.Close()
		delete(l.files, r)
	}
}
