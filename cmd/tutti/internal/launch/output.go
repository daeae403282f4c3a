package launch

import (
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

// maxLine is the longest line that is kept until it has ended. Longer ones are shown in parts of
// this length.
const maxLine = 64 << 10

// showAfter is how long the end of an unfinished line is kept before it is shown.
const showAfter = 100 * time.Millisecond

// lineWait bounds how long, without prefixes, an unfinished line keeps others from being shown.
const lineWait = time.Second

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

// Output shows the ranks' output: lines, each with its rank's number, never mixed within a line. An
// unfinished line is shown, too, if it is long or pauses; another line that comes then ends it. It
// can also write the output to files.
type Output struct {
	out, err *stream // the same one if both are the same file
	log      *ranksLog
	report   func(string)
	broken   chan struct{} // closed when the reader of the standard output has gone
	wait     time.Duration // lineWait
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
	end    end
	failed bool // a write has failed; the next may succeed
	gone   bool // it has no reader
	stuck  bool // a write was given up: it may still be in progress, and there is no other

	open  *source       // its unfinished line is the last text; nil: the last text is a whole line
	going chan struct{} // closed when that line cannot go on; nil: it cannot
}

// end is what is known of the end of a file to which lines are written.
type end struct {
	within bool // it is within a line
	lost   bool // text that was to follow is lost
}

// write writes b to w. If text was lost within a line, it ends that line first.
func (e *end) write(w io.Writer, b []byte) error {
	if e.within && e.lost {
		b = append([]byte{'\n'}, b...)
	}
	n, err := w.Write(b)
	if n > 0 {
		e.within = b[n-1] != '\n'
	}
	e.lost = err != nil
	return err
}

// source is the standard output or error of one process of a rank.
type source struct {
	to    *stream
	head  []byte // the prefix of each line
	begun bool   // the last text was the beginning of a line
	cr    bool   // the last text ended with a carriage return
	text  []byte // room for the next text
}

// lastWait bounds every write after Hurry.
const lastWait = 500 * time.Millisecond

// NewOutput writes ranks' standard output to out and standard error to errw, with prefixes wide
// enough for world ranks if prefix is set, and everything to logDir/rank-N.log if logDir is not
// empty. report is called once for each file that cannot be written.
func NewOutput(out, errw *os.File, prefix bool, world int, logDir string, ranks []int,
	report func(string)) (*Output, error) {
	width := len(strconv.Itoa(max(world-1, 0)))
	o := &Output{report: report, broken: make(chan struct{}), wait: lineWait, hurry: make(chan struct{}),
		out: &stream{w: out, colour: Colour(out), prefix: prefix, width: width}}
	if o.err = o.out; !sameFile(out, errw) {
		o.err = &stream{w: errw, colour: Colour(errw), prefix: prefix, width: width}
	}
	if logDir != "" {
		if err := files.Directory(logDir); err != nil {
			return nil, fmt.Errorf("the log directory: %w", err)
		}
		o.log = &ranksLog{files: map[int]*rankLog{}, report: report}
		for _, r := range ranks {
			f, err := files.Replace(filepath.Join(logDir, fmt.Sprintf("rank-%d.log", r)), 0o644)
			if err != nil {
				o.log.close()
				return nil, fmt.Errorf("make rank %d's log: %w", r, err)
			}
			o.log.files[r] = &rankLog{WriteCloser: f}
		}
	}
	return o, nil
}

func sameFile(a, b *os.File) bool {
	ai, aerr := a.Stat()
	bi, berr := b.Stat()
	return aerr == nil && berr == nil && os.SameFile(ai, bi)
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
			if o.err.open != nil {
				line = "\n" + line
			}
			o.err.followLocked(nil)
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
	p := &source{to: s}
	if s.prefix {
		p.head = fmt.Appendf(nil, "[%*d] ", s.width, rank)
		if s.colour {
			p.head = fmt.Appendf(nil, "\x1b[%dm[%*d]\x1b[0m ", rankColours[rank%len(rankColours)], s.width, rank)
		}
	}
	timed, _ := r.(interface{ SetReadDeadline(time.Time) error })
	buf := make([]byte, 0, maxLine) // an unfinished line
	shown := 0                      // so much of it has been shown
	var due time.Time               // when the rest has to be; zero: there is none
	for {
		if timed != nil {
			timed.SetReadDeadline(due)
		}
		n, err := r.Read(buf[len(buf):cap(buf)])
		whole := bytes.LastIndexByte(buf[len(buf):len(buf)+n], '\n') + 1
		if whole > 0 {
			whole += len(buf)
		}
		buf = buf[:len(buf)+n]
		if errors.Is(err, os.ErrDeadlineExceeded) {
			o.show(p, buf[shown:])
			shown, due = len(buf), time.Time{}
			continue
		}
		if err != nil || whole == 0 && len(buf) == cap(buf) {
			whole = len(buf)
		}
		if whole > 0 { // lines that have arrived together are written together
			if o.log != nil {
				o.log.write(rank, buf[:whole])
			}
			o.show(p, buf[shown:whole])
			buf = buf[:copy(buf, buf[whole:])]
			shown, due = 0, time.Time{}
		}
		if due.IsZero() && len(buf) > shown {
			due = time.Now().Add(showAfter)
		}
		if err != nil {
			o.finish(p)
			return
		}
	}
}

// show writes the next text of p: whole lines, and perhaps the beginning of another.
func (o *Output) show(p *source, text []byte) {
	if len(text) == 0 {
		return
	}
	s, first, last := p.to, text[0], text[len(text)-1]
	b := p.format(text)
	o.lock(p)
	defer s.mu.Unlock()
	from := len("\n")
	switch {
	case s.open == p && p.cr && first != '\n': // the prefix comes after a carriage return, too
	case s.open == p:
		from += len(p.head)
	case p.begun && first == '\n': // another line has ended the one that ends here
		if from += len(p.head); s.open == nil || len(text) == 1 {
			from++
		}
	case s.open != nil:
		from = 0
	}
	p.begun, p.cr = last != '\n', last == '\r'
	if from == len(b) {
		return
	}
	err := o.emitLocked(s, b[from:])
	if s.stuck {
		p.text = nil // it may still be in use
	}
	if p.begun && err == nil {
		s.followLocked(p)
	} else {
		s.followLocked(nil)
	}
}

// format returns text with the prefix before each line but the first, and after each carriage
// return within a line. A line break, for another's line, and the prefix come before.
func (p *source) format(text []byte) []byte {
	b := append(append(p.text[:0], '\n'), p.head...)
	for len(text) > 0 {
		line := text
		if n := bytes.IndexByte(text, '\n'); n >= 0 {
			line = text[:n+1]
		}
		text = text[len(line):]
		for {
			n := bytes.IndexByte(line, '\r') + 1
			if n == 0 || n == len(line) || line[n] == '\n' {
				break
			}
			b = append(append(b, line[:n]...), p.head...)
			line = line[n:]
		}
		b = append(b, line...)
		if len(text) > 0 {
			b = append(b, p.head...)
		}
	}
	p.text = b
	return b
}

// finish ends the last line of p. Without a prefix it stays unfinished, but does not go on.
func (o *Output) finish(p *source) {
	s := p.to
	if s.prefix && p.begun {
		o.show(p, []byte{'\n'})
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open == p {
		s.stopLocked()
	}
}

// lock locks the stream of p. Without prefixes it waits before until no other's line goes on, for
// o.wait at most.
func (o *Output) lock(p *source) {
	s := p.to
	s.mu.Lock()
	var late <-chan time.Time
	for enough := false; !enough && !s.prefix && s.open != p && s.going != nil; {
		going := s.going
		s.mu.Unlock()
		if late == nil {
			late = time.After(o.wait)
		}
		select {
		case <-going:
		case <-late:
			enough = true
		case <-o.hurry:
			enough = true
		}
		s.mu.Lock()
	}
}

// followLocked notes whose unfinished line is the last text of s, which is locked: nil for none.
func (s *stream) followLocked(p *source) {
	if s.open == p {
		return
	}
	if s.stopLocked(); p != nil {
		s.going = make(chan struct{})
	}
	s.open = p
}

// stopLocked notes that the unfinished line of s, which is locked, cannot go on.
func (s *stream) stopLocked() {
	if s.going != nil {
		close(s.going)
		s.going = nil
	}
}

// emitLocked writes b to s, which is locked, unless s has no reader. It reports the first failure.
func (o *Output) emitLocked(s *stream, b []byte) error {
	if s.gone {
		return nil
	}
	err := o.writeLocked(s, b)
	switch {
	case s.stuck:
		o.dropped.Add(int64(max(1, bytes.Count(b, []byte{'\n'}))))
	case errors.Is(err, syscall.EPIPE):
		s.gone = true
		if s == o.out {
			close(o.broken)
		}
	case err != nil && !s.failed:
		s.failed = true
		o.report(fmt.Sprintf("cannot write the ranks' output: %v; the job goes on", err))
	}
	return err
}

// writeLocked writes to s, which is locked, unless s is stuck.
func (o *Output) writeLocked(s *stream, b []byte) error {
	if s.stuck {
		return nil
	}
	done := make(chan error, 1)
	go func() {
		done <- s.end.write(s.w, b)
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

// ranksLog is one file for each rank. The first failure to write is reported, and the job goes on:
// later lines are written if there is room again.
type ranksLog struct {
	mu     sync.Mutex // a rank's two streams share its file
	files  map[int]*rankLog
	report func(string)
	failed bool
}

type rankLog struct {
	io.WriteCloser
	end end
}

func (l *ranksLog) write(rank int, b []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f := l.files[rank]
	if f == nil {
		return
	}
	if err := f.end.write(f, b); err != nil && !l.failed {
		l.failed = true
		l.report(fmt.Sprintf("cannot write rank %d's log: %v; the job goes on, the log is incomplete", rank, err))
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
