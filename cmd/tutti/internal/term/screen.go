package term

import (
	"cmp"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Screen shows text on the alternate screen of a terminal, each in the place of the last. It
// restores the terminal before the process stops at SIGTSTP (Ctrl-Z) or ends at SIGQUIT (Ctrl-\),
// and draws again when the process continues, and when the terminal has another size. The caller
// closes it at other signals.
type Screen struct {
	out *os.File

	mu              sync.Mutex
	text            Text // nil: nothing has been drawn yet
	entered, closed bool

	signals chan os.Signal // nil: nothing has been drawn yet
	over    chan struct{}
	served  sync.WaitGroup
}

// Text returns what a screen of this size shows. What is longer is cut, and so are lines that are
// wider. Escape sequences for colours have no width.
type Text func(columns, rows int) string

// NewScreen returns the screen of a terminal. It changes nothing before the first Draw.
func NewScreen(out *os.File) *Screen { return &Screen{out: out, over: make(chan struct{})} }

const (
	enter = "\x1b[?1049h\x1b[?25l" // the alternate screen, without a cursor
	leave = "\x1b[?25h\x1b[?1049l"
)

// Draw shows text, which may be called again later, from another goroutine. In the background of
// the terminal nothing is shown until the process is in the foreground again.
func (s *Screen) Draw(text Text) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	if s.signals == nil {
		s.signals = make(chan os.Signal, 8)
		signal.Notify(s.signals, syscall.SIGCONT, syscall.SIGQUIT, syscall.SIGWINCH)
		var now action
		if now.swap(nil); now[0] != ignored {
			signal.Notify(s.signals, syscall.SIGTSTP)
		}
		s.served.Go(s.serve)
	}
	s.text = text
	return s.draw()
}

// Close restores the terminal. Nothing is drawn any more.
func (s *Screen) Close() {
	s.mu.Lock()
	wasClosed := s.closed
	s.closed = true
	s.leave()
	s.mu.Unlock()
	if !wasClosed {
		if s.signals != nil {
			signal.Stop(s.signals)
		}
		close(s.over)
	}
	s.served.Wait()
}

// serve handles signals until the screen is closed.
func (s *Screen) serve() {
	for {
		select {
		case sig := <-s.signals:
			s.handle(sig)
		case <-s.over:
			return
		}
	}
}

func (s *Screen) handle(sig os.Signal) {
	if sig == syscall.SIGQUIT {
		signal.Stop(s.signals) // a second one kills though the terminal takes nothing
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch sig {
	case syscall.SIGQUIT:
		s.leave()
		raise(syscall.SIGQUIT)
	case syscall.SIGTSTP:
		s.leave()
		stop()
	}
	if !s.closed {
		s.draw()
	}
}

// draw draws the text. With mu.
func (s *Screen) draw() error {
	if !s.foreground() {
		return nil
	}
	columns, rows := Size(s.out)
	columns, rows = cmp.Or(columns, 80), cmp.Or(rows, 24)
	text := ""
	if !s.entered {
		text, s.entered = enter, true
	}
	_, err := s.out.WriteString(text + frame(s.text(columns, rows), columns, rows))
	return err
}

// leave restores the terminal. With mu.
func (s *Screen) leave() {
	if s.entered {
		s.entered = false
		s.out.WriteString(leave)
	}
}

// foreground reports whether the process is in the foreground of the terminal, or is not controlled
// by it.
func (s *Screen) foreground() bool {
	group, err := unix.IoctlGetInt(int(s.out.Fd()), unix.TIOCGPGRP)
	return err != nil || group == unix.Getpgrp()
}

// frame returns what draws text over what is there. Lines are overwritten in place, which does not
// flicker. No line and no last character scrolls the screen.
func frame(text string, columns, rows int) string {
	var b strings.Builder
	b.WriteString("\x1b[H")
	n := 0
	for line := range strings.Lines(text) {
		if n == rows {
			break
		}
		if n++; n > 1 {
			b.WriteString("\r\n")
		}
		shown, width := cut(strings.TrimSuffix(line, "\n"), columns)
		b.WriteString(shown)
		if width < columns { // else the cursor is still at the last character, which it would erase
			b.WriteString("\x1b[K")
		}
	}
	if strings.Contains(text, "\x1b") {
		b.WriteString("\x1b[0m") // a colour may end below the last line
	}
	if n < rows {
		if n > 0 {
			b.WriteString("\r\n")
		}
		b.WriteString("\x1b[J")
	}
	return b.String()
}

// cut shortens a line to columns, and returns its width then. It keeps all escape sequences.
func cut(line string, columns int) (string, int) {
	var b strings.Builder
	width, escape := 0, false
	for _, r := range line {
		switch {
		case escape:
			escape = r < '@' || r > '~' || r == '['
		case r == '\x1b':
			escape = true
		case width == columns:
			continue
		default:
			width++
		}
		b.WriteRune(r)
	}
	return b.String(), width
}

// raise sends a signal to this thread, which takes it before raise returns.
func raise(sig syscall.Signal) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	unix.Tgkill(unix.Getpid(), unix.Gettid(), sig)
}

// stop has SIGTSTP do what it does by default: it stops the process, and stop returns when that
// continues; but a process that no shell could continue, as its process group is orphaned, is not
// stopped. The Go runtime has no means to give a signal that was caught its default action back,
// and would ignore it.
func stop() {
	var caught, byDefault action
	caught.swap(&byDefault)
	raise(syscall.SIGTSTP)
	byDefault.swap(&caught)
}

// action is what SIGTSTP does. It begins with the handler; the rest depends on the processor.
type action [8]uintptr

const ignored = 1 // SIG_IGN

// swap reads the action, and then sets it if to is not nil.
func (a *action) swap(to *action) {
	const maskSize = 8
	syscall.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(syscall.SIGTSTP), uintptr(unsafe.Pointer(to)),
		uintptr(unsafe.Pointer(a)), maskSize, 0, 0)
}
