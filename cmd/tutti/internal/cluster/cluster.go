// Package cluster runs an etcd of several members on this machine, each a process that can be
// killed, to measure the effect of losing one on a job.
package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"

	"tutti/internal/etcd"
	"tutti/internal/ports"
)

// variable marks a process as a member; it holds a task as JSON.
const variable = "TUTTI_ETCD_MEMBER"

// task says which member of which cluster a process is.
type task struct {
	All []etcd.Member
	Own int
}

// MemberMain runs a member until its standard input ends, if this process is one. It returns the
// exit code.
func MemberMain() (code int, is bool) {
	text, is := os.LookupEnv(variable)
	if !is {
		return 0, false
	}
	if err := serve(text); err != nil {
		fmt.Fprintln(os.Stderr, "tutti: etcd:", err)
		return 1, true
	}
	return 0, true
}

func serve(text string) error {
	var t task
	if err := json.Unmarshal([]byte(text), &t); err != nil {
		return err
	}
	if t.Own < 0 || t.Own >= len(t.All) {
		return fmt.Errorf("%s is for member %d of %d", variable, t.Own, len(t.All))
	}
	ctx, end := context.WithCancel(context.Background())
	go func() {
		io.Copy(io.Discard, os.Stdin) // there is no data
		end()
	}()
	e, err := etcd.Start(ctx, t.All[t.Own].Config(t.All))
	if err != nil {
		return err
	}
	select {
	case <-ctx.Done():
		e.Stop()
		return nil
	case err := <-e.Err():
		return err
	}
}

// Cluster is an etcd of this process.
type Cluster struct {
	self    string
	dir     string
	ports   []*ports.Reservation // a member that starts again has its old ones
	members []etcd.Member
	running []*process
}

type process struct {
	cmd  *exec.Cmd
	life io.Closer // the other end of its standard input
	done chan struct{}
}

// Start starts an etcd of n members, which are processes of the program self, whose main calls
// MemberMain first, and returns when all answer. The caller must Close it.
func Start(ctx context.Context, self string, n int) (*Cluster, error) {
	dir, err := os.MkdirTemp("", "tutti-etcd-")
	if err != nil {
		return nil, err
	}
	c := &Cluster{self: self, dir: dir, running: make([]*process, n)}
	for range 2 * n {
		r, err := ports.Reserve()
		if err != nil {
			c.Close()
			return nil, err
		}
		c.ports = append(c.ports, r)
	}
	for i := range n {
		c.members = append(c.members, etcd.Member{Name: fmt.Sprintf("m%d", i), Dir: filepath.Join(dir, fmt.Sprint(i)),
			Client: c.ports[2*i].Address(), Peer: c.ports[2*i+1].Address()})
	}
	if err := c.Mend(ctx); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// Address returns the cluster's address, for TUTTI_STORE.
func (c *Cluster) Address() string {
	var all []string
	for _, m := range c.members {
		all = append(all, m.Client)
	}
	return "etcd://" + strings.Join(all, ",")
}

// Mend starts the members that are not running and returns when all follow one leader.
func (c *Cluster) Mend(ctx context.Context) error {
	for i, p := range c.running {
		if p != nil {
			select {
			case <-p.done:
				p.life.Close()
			default:
				continue
			}
		}
		if err := c.start(i); err != nil {
			return err
		}
	}
	_, err := c.Leader(ctx)
	return err
}

func (c *Cluster) start(i int) error {
	text, err := json.Marshal(task{c.members, i})
	if err != nil {
		return err
	}
	p := &process{cmd: exec.Command(c.self), done: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), variable+"="+string(text))
	p.cmd.Stderr = os.Stderr
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for this process, which ends its members
	if p.life, err = p.cmd.StdinPipe(); err != nil {
		return err
	}
	if err := p.cmd.Start(); err != nil {
		return err
	}
	c.running[i] = p
	go func() {
		p.cmd.Wait()
		close(p.done)
	}()
	return nil
}

// Leader returns the process number of the leader, when all members agree on it.
func (c *Cluster) Leader(ctx context.Context) (pid int, err error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	var all []string
	for _, m := range c.members {
		all = append(all, m.Client)
	}
	// A member that has just been started does not listen yet. By default gRPC would wait a second.
	often := grpc.ConnectParams{MinConnectTimeout: time.Second,
		Backoff: backoff.Config{BaseDelay: 5 * time.Millisecond, Multiplier: 1, MaxDelay: 5 * time.Millisecond}}
	client, err := clientv3.New(clientv3.Config{Endpoints: all, Logger: zap.NewNop(),
		DialOptions: []grpc.DialOption{grpc.WithConnectParams(often)}})
	if err != nil {
		return 0, err
	}
	defer client.Close()
	for {
		leader, agreed := uint64(0), 0
		pid = 0
		for i, m := range c.members {
			sctx, cancel := context.WithTimeout(ctx, time.Second)
			s, err := client.Status(sctx, m.Client)
			cancel()
			if err != nil || s.Leader == 0 || leader != 0 && s.Leader != leader {
				break
			}
			leader = s.Leader
			agreed++
			if s.Header.MemberId == leader {
				pid = c.running[i].cmd.Process.Pid
			}
		}
		if agreed == len(c.members) && pid != 0 {
			return pid, nil
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
			return 0, errors.New("the members of the etcd do not agree on a leader")
		}
	}
}

// Close ends the members and removes their data.
func (c *Cluster) Close() {
	for _, p := range c.running {
		if p != nil {
			p.cmd.Process.Kill() // its data is not needed
			<-p.done
			p.life.Close()
		}
	}
	for _, r := range c.ports {
		r.Close()
	}
	os.RemoveAll(c.dir)
}
