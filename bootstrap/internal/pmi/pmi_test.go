package pmi

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const patience = 30 * time.Second

// launcher is a process manager with n processes.
type launcher struct {
	mu     sync.Mutex
	n      int
	values map[string]string
	inside []net.Conn // processes in the barrier
	bye    int
	before func(command string) string // an answer instead of the right one; "": none; nil: never
	rc     string                      // as Slurm says it in every answer
}

// serve answers one process until it leaves.
func (l *launcher) serve(c net.Conn) {
	defer c.Close()
	lines := bufio.NewScanner(c)
	for lines.Scan() {
		ask, err := parse(lines.Text())
		if err != nil {
			return
		}
		l.mu.Lock()
		answer := ""
		if l.before != nil {
			answer = l.before(ask["cmd"])
		}
		space := ask["kvsname"] == "kvs_1" || ask["cmd"] != "put" && ask["cmd"] != "get"
		switch {
		case answer != "":
		case !space:
			answer = "cmd=" + ask["cmd"] + "_result rc=-1 msg=no_such_space"
		default:
			switch ask["cmd"] {
			case "initack":
				answer = "cmd=initack" + l.rc + "\ncmd=set size=2\ncmd=set rank=" + ask["pmiid"] + "\ncmd=set debug=0"
			case "init":
				answer = "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
			case "get_maxes":
				answer = "cmd=maxes" + l.rc + " kvsname_max=256 keylen_max=64 vallen_max=1024"
			case "get_my_kvsname":
				answer = "cmd=my_kvsname" + l.rc + " kvsname=kvs_1"
			case "put":
				l.values[ask["key"]] = ask["value"]
				answer = "cmd=put_result rc=0 msg=success"
			case "get":
				answer = "cmd=get_result rc=-1 msg=key_not_found value=unknown"
				if v, ok := l.values[ask["key"]]; ok {
					answer = "cmd=get_result rc=0 msg=success value=" + v
				}
			case "barrier_in":
				if l.inside = append(l.inside, c); len(l.inside) == l.n {
					for _, other := range l.inside {
						fmt.Fprintln(other, "cmd=barrier_out"+l.rc)
					}
					l.inside = nil
				}
			case "finalize":
				l.bye++
				answer = "cmd=finalize_ack" + l.rc
			}
		}
		if answer != "" {
			fmt.Fprintln(c, answer)
		}
		l.mu.Unlock()
		if ask["cmd"] == "finalize" {
			return
		}
	}
}

// process makes one of the launcher's processes and returns how it reaches its launcher.
func (l *launcher) process(t *testing.T) Address {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fds[0]), "launcher")
	conn, err := net.FileConn(f)
	f.Close()
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		l.serve(conn)
	}()
	t.Cleanup(func() {
		conn.Close()
		<-done
		unix.Close(fds[1])
	})
	return Address{FD: fds[1]}
}

func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

func TestValuesReachOtherProcesses(t *testing.T) {
	for _, rc := range []string{"", " rc=0"} { // as Hydra does it, and as Slurm does
		l := &launcher{n: 2, values: map[string]string{}, rc: rc}
		ctx := within(t)
		var wg sync.WaitGroup
		for i := range 2 {
			a := l.process(t)
			wg.Go(func() {
				c, err := Dial(ctx, a)
				if err != nil {
					t.Error(err)
					return
				}
				if err := c.Put(ctx, fmt.Sprintf("from-%d", i), fmt.Sprintf("value-%d", i)); err != nil {
					t.Error(err)
				}
				if err := c.Barrier(ctx); err != nil {
					t.Error(err)
				}
				if v, err := c.Get(ctx, fmt.Sprintf("from-%d", 1-i)); err != nil || v != fmt.Sprintf("value-%d", 1-i) {
					t.Errorf("process %d gets %q, %v", i, v, err)
				}
				if err := c.Close(); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if l.bye != 2 {
			t.Errorf("%d processes said farewell", l.bye)
		}
	}
}

func TestConnectionByPort(t *testing.T) {
	l := &launcher{n: 1, values: map[string]string{}}
	at, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer at.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		if c, err := at.Accept(); err == nil {
			l.serve(c)
		}
	}()
	ctx := within(t)
	c, err := Dial(ctx, Address{Port: at.Addr().String(), ID: "0"})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Put(ctx, "k", "v"); err != nil {
		t.Error(err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	<-done
}

func TestInvalidAnswers(t *testing.T) {
	for command, answers := range map[string][]string{
		"init": {"cmd=response_to_init rc=-1", "cmd=init_ack rc=0", "nonsense", "cmd=a cmd=b",
			strings.Repeat("a=b ", 10)},
		"get_maxes":      {"cmd=maxes", "cmd=maxes keylen_max=x vallen_max=1", "cmd=maxes keylen_max=1 vallen_max=0"},
		"get_my_kvsname": {"cmd=my_kvsname", "cmd=my_kvsname kvsname="},
		"put":            {"cmd=put_result rc=1 msg=no", "cmd=get_result rc=0"},
		"get":            {"cmd=get_result rc=1"},
		"barrier_in":     {"cmd=barrier_in"},
		"finalize":       {"cmd=finalize_ack rc=1"},
	} {
		for _, answer := range answers {
			l := &launcher{n: 1, values: map[string]string{}, before: func(c string) string {
				if c == command {
					return answer
				}
				return ""
			}}
			ctx := within(t)
			err := func() error {
				c, err := Dial(ctx, l.process(t))
				if err != nil {
					return err
				}
				defer c.conn.Close()
				if err := c.Put(ctx, "k", "v"); err != nil {
					return err
				}
				if err := c.Barrier(ctx); err != nil {
					return err
				}
				if _, err := c.Get(ctx, "k"); err != nil {
					return err
				}
				return c.Close()
			}()
			if wrong := (*ProtocolError)(nil); !errors.As(err, &wrong) || wrong.Asked != command {
				t.Errorf("%s answered by %.40q: %v", command, answer, err)
			}
		}
	}
}

func TestEndlessLineIsRefused(t *testing.T) {
	l := &launcher{before: func(string) string { return strings.Repeat("x", 2*maxLine) }}
	if _, err := Dial(within(t), l.process(t)); !errors.Is(err, bufio.ErrBufferFull) {
		t.Error(err)
	}
}

func TestContextEndsBarrier(t *testing.T) {
	l := &launcher{n: 2, values: map[string]string{}}
	c, err := Dial(within(t), l.process(t))
	if err != nil {
		t.Fatal(err)
	}
	defer c.conn.Close()
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("enough")
	time.AfterFunc(10*time.Millisecond, func() { cancel(why) })
	if err := c.Barrier(ctx); !errors.Is(err, why) {
		t.Error(err)
	}
}

// A connection serves once. Its number is not that of something else afterwards.
func TestConnectionServesOnce(t *testing.T) {
	l := &launcher{n: 1, values: map[string]string{}}
	a := l.process(t)
	c, err := Dial(within(t), a)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	other, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if _, err := Dial(within(t), a); err == nil || !strings.Contains(err.Error(), "broken") {
		t.Error(err)
	}
	if flags, err := unix.FcntlInt(uintptr(a.FD), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("the descriptor has flags %x, %v, want FD_CLOEXEC", flags, err)
	}
}

func TestDescriptorsOfOthersStayOpen(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	if _, err := Dial(within(t), Address{FD: int(r.Fd())}); err == nil || !strings.Contains(err.Error(), "PMI_FD") {
		t.Error(err)
	}
	if _, err := unix.FcntlInt(r.Fd(), unix.F_GETFD, 0); err != nil {
		t.Errorf("a pipe that is not the launcher's was closed: %v", err)
	}
	if _, err := Dial(within(t), Address{}); err == nil {
		t.Error("a connection to nowhere")
	}
}

func TestInvalidWordsAreRefused(t *testing.T) {
	l := &launcher{n: 1, values: map[string]string{}}
	ctx := within(t)
	c, err := Dial(ctx, l.process(t))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, kv := range [][2]string{{"", "v"}, {"k", ""}, {"k k", "v"}, {"k", "a=b"}, {"k", "a\ncmd=abort"}, {"k", "ä"},
		{strings.Repeat("k", 64), "v"}, {"k", strings.Repeat("v", 1024)}} {
		if err := c.Put(ctx, kv[0], kv[1]); err == nil {
			t.Errorf("%.10q=%.10q was put", kv[0], kv[1])
		}
	}
	if len(l.values) != 0 {
		t.Errorf("the launcher has %q", l.values)
	}
}

func TestFromEnv(t *testing.T) {
	for env, want := range map[string]Address{
		"PMI_FD=6":                        {FD: 6},
		"PMI_FD=6 PMI_PORT=h:1 PMI_ID=0":  {FD: 6},
		"PMI_PORT=h:1 PMI_ID=3":           {Port: "h:1", ID: "3"},
		"PMI_PORT=h:1":                    {},
		"PMI_FD=x":                        {},
		"PMI_FD=1":                        {},
		"PMI_PORT=h:1 PMI_ID=3=4 PMI_FD=": {},
	} {
		got := FromEnv(func(name string) string {
			for kv := range strings.FieldsSeq(env) {
				if v, ok := strings.CutPrefix(kv, name+"="); ok {
					return v
				}
			}
			return ""
		})
		if got != want {
			t.Errorf("%s: %+v, want %+v", env, got, want)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("cmd=get_result rc=0 msg=success value=ab01")
	f.Add("cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024")
	f.Add("a= =b c==d  e")
	f.Fuzz(func(t *testing.T, line string) {
		pairs, err := parse(line)
		if err != nil {
			return
		}
		if len(pairs) > maxNames {
			t.Errorf("%d pairs", len(pairs))
		}
		for name, value := range pairs {
			if name == "" || !strings.Contains(line, name+"="+value) {
				t.Errorf("%q=%q is not in %q", name, value, line)
			}
		}
	})
}
