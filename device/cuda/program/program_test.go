//go:build cgo && linux

package program

import (
	"errors"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tutti/device/cuda/fake"
)

func open(t *testing.T) (*Program, uintptr) {
	t.Helper()
	p := Open(t, fake.New(t, fake.Config{}).Path, 0)
	s, err := p.Stream()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Destroy(s); err != nil {
			t.Error(err)
		}
	})
	return p, s
}

// A capture ends on the thread that has begun it, although its goroutine waits for others.
func TestCaptureKeepsItsThread(t *testing.T) {
	p, s := open(t)
	g, err := p.Capture(s, func() error {
		thread, done := unix.Gettid(), make(chan struct{})
		defer close(done)
		for i := 0; i < 50 && unix.Gettid() == thread; i++ {
			taken := make(chan struct{})
			go func() { // which mostly gets the thread of the one that waits for it, and keeps it
				runtime.LockOSThread()
				defer runtime.UnlockOSThread()
				close(taken)
				<-done
			}()
			<-taken
		}
		return nil
	})
	if err = errors.Join(err, g.Close()); err != nil {
		t.Error(err)
	}
}

// Nothing that a program does beside a capture fails, or ends the capture.
func TestCallsBesideACapture(t *testing.T) {
	p, s := open(t)
	g, err := p.Capture(s, func() error {
		ended := make(chan error)
		go func() {
			other, err := p.Stream()
			if err != nil {
				ended <- err
				return
			}
			g, err := p.Capture(other, func() error { return nil })
			ended <- errors.Join(err, g.Launch(other), p.Finish(other, time.Minute), g.Close(), p.Destroy(other))
		}()
		return <-ended
	})
	if err = errors.Join(err, g.Close()); err != nil {
		t.Error(err)
	}
}
