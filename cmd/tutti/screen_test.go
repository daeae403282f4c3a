package main

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

// A live screen is left before the process stops or dies, and comes back when it continues.
func TestLiveScreenSignals(t *testing.T) {
	const (
		enter = "\x1b[?1049h\x1b[?25l\x1b[H"
		leave = "\x1b[?25h\x1b[?1049l"
	)
	s := newSite(t)
	path, _ := s.file("f", 5)
	_, info := s.serve("r=" + path)
	for _, c := range []struct {
		end  syscall.Signal
		code int
	}{{syscall.SIGQUIT, 2}, {syscall.SIGINT, 0}} {
		t.Run(fmt.Sprint(c.end), func(t *testing.T) {
			slave, shown, over := watched(t)
			v := s.command("status", "--watch=1h", info)
			v.cmd.Env = append(v.cmd.Env, "TERM=xterm", "TUTTI_SECRET="+s.secret)
			v.cmd.Stdout = slave
			v.start()
			shown.Await(t, "1 region")
			v.Signal(syscall.SIGTSTP)
			for late := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
				b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", v.PID()))
				if err != nil || time.Now().After(late) {
					t.Fatalf("it does not stop: %q, %v", b, err)
				}
				if bytes.Contains(b, []byte(") T ")) {
					break
				}
			}
			shown.Await(t, leave)
			v.Signal(syscall.SIGCONT)
			shown.Await(t, leave+enter)
			v.Signal(c.end)
			v.End(c.code)
			over()
			if out := shown.String(); !strings.HasPrefix(out, enter) || !strings.HasSuffix(out, leave) ||
				strings.Count(out, "1 region") < 2 || strings.Count(out, leave) != 2 {
				t.Errorf("%q", out)
			}
		})
	}
}
