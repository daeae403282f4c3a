package bootstrap

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tutti/bootstrap/internal/pmi"
)

const meetPatience = 30 * time.Second

func meetContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), meetPatience)
	t.Cleanup(cancel)
	return ctx
}

func TestWaysToMeet(t *testing.T) {
	const torch = "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 "
	const id = "TORCHELASTIC_RUN_ID=x "
	const pmi1 = "PMI_RANK=0 PMI_SIZE=2 "
	const step = "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_JOB_ID=7 "
	const ompi = "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 PMIX_NAMESPACE=7 "
	for env, want := range map[string]struct {
		way  way
		name string
	}{
		"RANK=0 WORLD_SIZE=2": {noWay, ""},
		"RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 " + id: {noWay, "torchrun-x"},
		torch + "LOCAL_WORLD_SIZE=2":                                {noWay, ""},
		torch + "LOCAL_WORLD_SIZE=2 TUTTI_JOB=j":                    {byHost, "j"},
		torch + "LOCAL_WORLD_SIZE=2 " + id:                          {byHost, "torchrun-x"},
		torch + "LOCAL_WORLD_SIZE=2 TUTTI_JOB=j " + id:              {byHost, "torchrun-x"},
		torch + "LOCAL_WORLD_SIZE=1 MASTER_ADDR=h MASTER_PORT=1":    {noWay, "torchrun-h-1"},
		torch + "MASTER_ADDR=h MASTER_PORT=1 " + id:                 {byName, "torchrun-x"},
		pmi1:                          {noWay, ""},
		pmi1 + "PMI_FD=9":             {byPMI, ""},
		pmi1 + "PMI_FD=9 PMI_JOBID=5": {byPMI, "pmi-5"},
		pmi1 + "PMI_FD=9 PMI_JOBID=5 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2":              {byHost, "pmi-5"},
		"PMI_PORT=h:1 PMI_ID=1 TUTTI_SIZE=2":                                           {byPMI, ""},
		"PMI_PORT=tcp://10.0.0.1:80 PMI_ID=1 TUTTI_SIZE=2":                             {noWay, ""},
		step + "SLURM_STEP_ID=0 SLURM_NODELIST=n[3-4]":                                 {byName, "slurm-7.0"},
		step + "SLURM_STEP_ID=0 MASTER_ADDR=[::1]":                                     {byName, "slurm-7.0"},
		step + "SLURM_STEP_ID=0 SLURM_NODELIST=n[3-4":                                  {noWay, "slurm-7.0"},
		"SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_NODELIST=n[3-4]":                          {noWay, ""},
		step + "SLURM_STEP_ID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_TASKS_PER_NODE=2": {byHost, "slurm-7.0"},
		ompi + "OMPI_COMM_WORLD_LOCAL_SIZE=1":                                          {noWay, "openmpi-7"},
		ompi + "OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_MCA_orte_precondition_transports=ab": {byHost, "openmpi-7.ab"},
		"TUTTI_STANDBY=0 TUTTI_SIZE=2 TUTTI_JOB=j":                                     {noWay, "j"},
	} {
		l, err := FromEnv(vars(env))
		if err != nil {
			t.Errorf("%s: %v", env, err)
			continue
		}
		if l.way() != want.way || l.name != want.name || l.Meets() != (want.way != noWay) {
			t.Errorf("%s: way %d of launch %q, want %d of %q", env, l.way(), l.name, want.way, want.name)
		}
		// Everybody may ask a launcher that listens on a port.
		private := want.way == byHost || want.way == byPMI && strings.Contains(env, "PMI_FD")
		if l.MeetsInPrivate() != private {
			t.Errorf("%s: meets in private: %v, want %v", env, !private, private)
		}
	}
}

func TestNodeFromEnv(t *testing.T) {
	const step = "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[3-4] SLURM_PROCID=1 SLURM_NODEID=1 " +
		"SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_LOCALID=0 "
	for env, want := range map[string]Launch{
		"": {Size: 1, LocalRank: -1, Source: "none"},
		// Where a rank would be; the ranks of this launcher are others.
		"RANK=1 WORLD_SIZE=2":          {Size: 1, LocalRank: -1, Source: "none"},
		"TUTTI_RANK=1 TUTTI_SIZE=2":    {Size: 1, LocalRank: -1, Source: "none"},
		"TUTTI_SIZE=7 TUTTI_STANDBY=2": {Size: 1, LocalRank: -1, Source: "none"},
		"JOB_COMPLETION_INDEX=1":       {Size: 1, LocalRank: -1, Source: "none"},
		step + "SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2": {Rank: 1, Size: 2, LocalSize: 1, MasterAddr: "n3",
			Job: "slurm-7.0", Source: "slurm", name: "slurm-7.0", named: true},
		step + "SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2 PMI_RANK=1 PMI_SIZE=2 PMI_FD=9 PMI_JOBID=7.0": {Rank: 1,
			Size: 2, LocalRank: -1, Job: "pmi-7.0", Source: "pmi", name: "pmi-7.0", pmi: pmi.Address{FD: 9}},
		// The script of a batch job.
		"SLURM_JOB_ID=7 SLURM_PROCID=0 SLURM_NODEID=0 SLURM_NNODES=2 SLURM_NTASKS=2": {Size: 1, LocalRank: -1,
			Source: "none"},
		"SLURM_JOB_ID=7 SLURM_PROCID=0 SLURM_NODEID=0 SLURM_NNODES=2": {Size: 1, LocalRank: -1, Source: "none"},
		"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=1 PMIX_NAMESPACE=5 " +
			"TUTTI_IFNAME=eth0": {Rank: 1, Size: 2, LocalRank: -1, LocalSize: 1, Job: "openmpi-5", Source: "openmpi",
			name:       "openmpi-5",
			Interfaces: "eth0"},
	} {
		got, err := NodeFromEnv(vars(env))
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v\nwant %+v", env, got, err, want)
		}
	}
	const two = "SLURM_STEP_NUM_NODES=2 "
	for env, says := range map[string]string{
		step + two + "SLURM_STEP_NUM_TASKS=4":                                             "--ntasks-per-node=1",
		strings.Replace(step, "NODEID=1", "NODEID=2", 1) + two + "SLURM_STEP_NUM_TASKS=2": "SLURM_NODEID=2",
		"OMPI_COMM_WORLD_SIZE=2":                                                          "OMPI_COMM_WORLD_RANK",
	} {
		if got, err := NodeFromEnv(vars(env)); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %+v, %v; want an error with %q", env, got, err, says)
		}
	}
}

// fresh is a name that no other launch on this host has.
func fresh(t *testing.T) string { return fmt.Sprintf("%s-%d", t.Name(), os.Getpid()) }

// together has n ranks meet, of which rank i is launched as env says.
func together(t *testing.T, env func(i int) string, n int, secrets [][]byte) ([]*Meeting, []error) {
	t.Helper()
	ctx := meetContext(t)
	all, errs := make([]*Meeting, n), make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		l, err := FromEnv(vars(env(i)))
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			all[i], errs[i] = l.Meet(ctx, secrets[i], nil)
		})
	}
	wg.Wait()
	return all, errs
}

// meets checks that ranks have met: what one puts into the store the other finds there.
func meets(t *testing.T, all []*Meeting) {
	t.Helper()
	ctx := meetContext(t)
	var stores []Store
	for i, m := range all {
		s, err := DialStore(ctx, StoreConfig{Address: m.Store, Job: "j", Secret: m.Secret, Rank: i})
		if err != nil {
			t.Fatalf("rank %d: %v", i, err)
		}
		stores = append(stores, s)
	}
	if err := stores[0].Put(ctx, "k", []byte("v"), false); err != nil {
		t.Error(err)
	}
	for i, s := range stores {
		if v, err := s.Wait(ctx, "k"); err != nil || string(v) != "v" {
			t.Errorf("rank %d finds %q, %v", i, v, err)
		}
	}
	// Rank 0 stays until the others have left.
	stores[0].Close()
	left := make(chan struct{})
	go func() {
		defer close(left)
		all[0].Close(ctx)
	}()
	for i, s := range stores[1:] {
		if v, err := s.Get(ctx, "k"); err != nil || string(v) != "v" {
			t.Errorf("rank %d finds %q, %v, while rank 0 leaves", i+1, v, err)
		}
		s.Close()
		all[i+1].Close(ctx)
	}
	<-left
	if c, err := net.Dial("tcp", strings.TrimPrefix(all[0].Store, "tutti://")); err == nil {
		c.Close()
		t.Error("the store is still there")
	}
}

func TestRanksOfOneHostMeet(t *testing.T) {
	name := fresh(t)
	all, errs := together(t, func(i int) string {
		return fmt.Sprintf("RANK=%d WORLD_SIZE=3 LOCAL_RANK=%d LOCAL_WORLD_SIZE=3 TUTTI_JOB=%s", i, i, name)
	}, 3, make([][]byte, 3))
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	if len(all[0].Secret) < 32 || !bytes.Equal(all[0].Secret, all[2].Secret) {
		t.Errorf("the secrets are %d and %d bytes", len(all[0].Secret), len(all[2].Secret))
	}
	meets(t, all)
}

func TestTwoLaunchesOfOneNameDoNotMeet(t *testing.T) {
	env := "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 TUTTI_JOB=" + fresh(t)
	a, err := FromEnv(vars(env))
	if err != nil {
		t.Fatal(err)
	}
	ctx := meetContext(t)
	m, err := a.Meet(ctx, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.Meet(ctx, nil, nil); err == nil || !strings.Contains(err.Error(), a.Job) ||
		!strings.Contains(err.Error(), "give the job another name") {
		t.Errorf("a second rank 0: %v", err)
	}
	m.Close(ctx)
	if m, err = a.Meet(ctx, nil, nil); err != nil {
		t.Errorf("a later launch of that name: %v", err)
	}
	m.Close(ctx)
}

// apart completes env by a number so that the jobs have different ports to meet at, which are free.
func apart(t *testing.T, env string, jobs []string) string {
	t.Helper()
	for id := os.Getpid(); id < os.Getpid()+100; id++ { // others that run this test have other numbers
		seen := map[string]bool{}
		for _, job := range jobs {
			l, err := FromEnv(vars(fmt.Sprintf(env, 0) + fmt.Sprint(id) + job))
			if err != nil {
				t.Fatal(err)
			}
			host, port, err := l.MeetingHost()
			if err != nil {
				t.Fatal(err)
			}
			if s, err := net.Listen("tcp", net.JoinHostPort(host, port)); err == nil {
				s.Close()
				seen[port] = true
			}
		}
		if len(seen) == len(jobs) {
			return env + fmt.Sprint(id)
		}
	}
	t.Fatal("no number of a job leads to free ports")
	panic("unreachable")
}

// The jobs of a launch meet each in a place of its own, at the same time.
func TestJobsOfLaunchMeetApart(t *testing.T) {
	secret := []byte("a secret for the tests of this package")
	jobs := []string{"", " TUTTI_JOB=a", " TUTTI_JOB=b"}
	for how, env := range map[way]string{
		byHost: "RANK=%d WORLD_SIZE=2 LOCAL_RANK=%[1]d LOCAL_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=" + fresh(t),
		byName: apart(t, "SLURM_PROCID=%d SLURM_NTASKS=2 SLURM_NODELIST=localhost,n2 SLURM_STEP_ID=1 SLURM_JOB_ID=",
			jobs),
	} {
		var meetings [][]*Meeting
		for _, job := range jobs {
			ranks := func(i int) string { return fmt.Sprintf(env, i) + job }
			all, errs := together(t, ranks, 2, [][]byte{secret, secret})
			if err := errors.Join(errs...); err != nil {
				t.Fatal(err)
			}
			meetings = append(meetings, all)
		}
		l, err := FromEnv(vars(fmt.Sprintf(env, 0)))
		if err != nil || l.way() != how {
			t.Fatalf("way %d, %v", l.way(), err)
		}
		// One that is there already
		if _, err := l.Meet(meetContext(t), secret, nil); err == nil || !strings.Contains(err.Error(), l.name) ||
			!strings.Contains(err.Error(), "give the job another name") || strings.Contains(err.Error(), "range") {
			t.Errorf("a second rank 0: %v", err)
		}
		for _, all := range meetings {
			meets(t, all)
		}
	}
}

// Rank 0 says who has the name of its launch, and what else keeps it from having that.
func TestNameOfLaunchIsTaken(t *testing.T) {
	invite := func(name, what string) {
		t.Helper()
		stop, err := inviteHost(t.Context(), name, 2, 1, []byte("here"))
		if err == nil {
			stop()
		}
		if err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%v, want %q", err, what)
		}
	}
	name := fresh(t)
	stop, err := inviteHost(t.Context(), name, 2, 1, []byte("here"))
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	invite(name, "a process of this user is rank 0 of launch "+name)

	// A process that does not listen may be of any user.
	name = fresh(t) + "-2"
	s, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		defer unix.Close(s)
		err = unix.Bind(s, &unix.SockaddrUnix{Name: meetingSocket(name).Name})
	}
	if err != nil {
		t.Fatal(err)
	}
	invite(name, "launch "+name+" on this host: its name belongs to a process that takes no connections")

	if os.Getuid() == 0 {
		const other = 12345
		name, as := fresh(t)+"-3", func(uid uintptr) { // this thread only
			if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), uid, ^uintptr(0)); errno != 0 {
				t.Fatal(errno)
			}
		}
		runtime.LockOSThread()
		as(other)
		l, err := net.Listen("unix", meetingSocket(name).Name)
		as(0)
		runtime.UnlockOSThread()
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		invite(name, fmt.Sprintf("launch %s on this host: its name belongs to a process of user %d, not of user 0",
			name, other))
	}

	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Max: limit.Max}); err != nil {
		t.Fatal(err)
	}
	defer unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)
	invite(fresh(t)+"-4", "RLIMIT_NOFILE")
}

// A process that asks while rank 0 of an earlier job of the launch ends asks again.
func TestHearsAfterEmptyInvitation(t *testing.T) {
	name := fresh(t)
	l, err := net.Listen("unix", meetingSocket(name).Name)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	heard := make(chan string, 1)
	go func() {
		text, err := hearHost(meetContext(t), name, 1)
		heard <- fmt.Sprintf("%s, %v", text, err)
	}()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	c.Close()
	stop, err := inviteHost(t.Context(), name, 2, 1, []byte("here"))
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	if got := <-heard; got != "here, <nil>" {
		t.Error(got)
	}
}

func TestMeetWithoutRankZeroTimesOut(t *testing.T) {
	l, err := FromEnv(vars("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 TUTTI_JOB=" + fresh(t)))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := l.Meet(ctx, nil, nil); !errors.Is(err, context.DeadlineExceeded) ||
		!strings.Contains(err.Error(), l.Job) {
		t.Error(err)
	}
}

// Ranks leave a job and join the next at once, before rank 0 leaves.
func TestRanksMeetAgain(t *testing.T) {
	name, ctx := fresh(t), meetContext(t)
	env := func(i int) string {
		return fmt.Sprintf("RANK=%d WORLD_SIZE=2 LOCAL_RANK=%d LOCAL_WORLD_SIZE=2 TUTTI_JOB=%s", i, i, name)
	}
	for _, secret := range [][]byte{nil, []byte("a secret for the tests of this package")} {
		first, errs := together(t, env, 2, [][]byte{secret, secret})
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
		l, err := FromEnv(vars(env(1)))
		if err != nil {
			t.Fatal(err)
		}
		again, err := l.Meet(ctx, secret, nil) // after a Join that has failed, say
		if err != nil || again.Store != first[0].Store {
			t.Errorf("a process that has not left the job meets at %+v, %v", again, err)
		}
		first[1].Refuse()
		first[1].Close(ctx)
		if text, err := askHost(ctx, l.name, asks, 1, 0); err != nil || len(text) > 0 {
			t.Errorf("a rank that has left the job is answered %q, %v", text, err)
		}
		first[0].Close(ctx)
		second, errs := together(t, env, 2, [][]byte{secret, secret})
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
		first[1].Refuse() // late, and not this meeting
		if m, err := l.Meet(ctx, secret, nil); err != nil || m.Store != second[0].Store {
			t.Errorf("after an earlier meeting was refused, the rank meets at %+v, %v", m, err)
		}
		meets(t, second)
	}
}

func TestSecretOfSomeRanksOnlyIsRefused(t *testing.T) {
	secret := []byte("a secret for the tests of this package")
	for _, given := range [][2][]byte{{secret, nil}, {nil, secret}} {
		name := fresh(t)
		all, errs := together(t, func(i int) string {
			return fmt.Sprintf("RANK=%d WORLD_SIZE=2 LOCAL_RANK=%d LOCAL_WORLD_SIZE=2 TUTTI_JOB=%s", i, i, name)
		}, 2, given[:])
		if errs[0] != nil {
			t.Fatal(errs[0])
		}
		if errs[1] == nil || !strings.Contains(errs[1].Error(), "TUTTI_SECRET") {
			t.Errorf("rank 1: %v", errs[1])
		}
		all[0].Close(t.Context())
	}
}

func TestRanksMeetAtHostNamedByLauncher(t *testing.T) {
	secret := []byte("a secret for the tests of this package")
	env := func(i int) string {
		return fmt.Sprintf("SLURM_PROCID=%d SLURM_NTASKS=2 SLURM_NODELIST=localhost,n2 SLURM_JOB_ID=%d "+
			"SLURM_STEP_ID=0", i, os.Getpid())
	}
	all, errs := together(t, env, 2, [][]byte{secret, secret})
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	meets(t, all)
	port := func(i int) string { return fmt.Sprintf("PMI_PORT=localhost:1 PMI_ID=%d TUTTI_SIZE=2", i) }
	for _, env := range []func(int) string{env, port} {
		_, errs = together(t, env, 2, make([][]byte, 2))
		for i, err := range errs {
			if err == nil || !strings.Contains(err.Error(), "tutti secret") {
				t.Errorf("rank %d without a secret: %v", i, err)
			}
		}
	}
}

// When rank 0 has left its job, its store takes in the processes that have been there, and no
// others: those meet rank 0 again. Handles that are open can find out.
func TestStoreThatEndsTakesInNoStrangers(t *testing.T) {
	secret, ctx := []byte("a secret for the tests of this package"), meetContext(t)
	env := func(i int) string {
		return fmt.Sprintf("SLURM_PROCID=%d SLURM_NTASKS=2 SLURM_NODELIST=localhost,n2 SLURM_JOB_ID=%d "+
			"SLURM_STEP_ID=1", i, os.Getpid())
	}
	all, errs := together(t, env, 2, [][]byte{secret, secret})
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	enter := func(job string, guest uint64) (Store, error) {
		return DialStore(ctx, StoreConfig{Address: all[1].Store, Job: job, Secret: secret, Rank: 1, Guest: guest})
	}
	s, err := enter("j", all[1].Guest)
	if err != nil {
		t.Fatal(err)
	}
	if StoreEnds(ctx, s) {
		t.Error("the store ends before rank 0 leaves")
	}
	all[0].Refuse()
	if !StoreEnds(ctx, s) {
		t.Error("the store does not end though rank 0 has left")
	}
	if _, err := enter("k", all[1].Guest+1); !errors.Is(err, ErrStoreEnds) || !errors.Is(err, ErrStoreAway) {
		t.Errorf("another guest: %v, want ErrStoreEnds, which is an ErrStoreAway", err)
	}
	for _, guest := range []uint64{all[1].Guest, 0} {
		again, err := enter("j", guest)
		if err != nil {
			t.Fatalf("guest %x: %v", guest, err)
		}
		again.Close()
	}
	for _, said := range []string{"tutti/Z\n", "tutti/0\n", "junk"} { // of another build, and of strangers
		c, err := net.Dial("tcp", strings.TrimPrefix(all[0].Store, "tutti://"))
		if err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(meetPatience))
		io.WriteString(c, said)
		if _, err := io.ReadAll(c); err != nil {
			t.Error(err)
		}
		c.Close()
	}
	if r := all[0].Refused(); r != (Refused{Secret: 2, Version: 1}) {
		t.Errorf("rank 0 has refused %+v", r)
	}
	if r := all[1].Refused(); r != (Refused{}) {
		t.Errorf("rank 1, which serves no store, has refused %+v", r)
	}
	s.Close()
	all[0].Close(ctx)
}

// lines sends what is logged.
type lines chan string

func (l lines) Write(b []byte) (int, error) {
	l <- string(b)
	return len(b), nil
}

// The process that serves the store says for whom it waits.
func TestRankZeroSaysThatItWaits(t *testing.T) {
	logged, name := make(lines, 10), fresh(t)
	env := func(i int) string {
		return fmt.Sprintf("RANK=%d WORLD_SIZE=2 LOCAL_RANK=%d LOCAL_WORLD_SIZE=2 TUTTI_JOB=%s", i, i, name)
	}
	l, err := FromEnv(vars(env(0)))
	if err != nil {
		t.Fatal(err)
	}
	ctx := meetContext(t)
	m, err := l.Meet(ctx, nil, slog.New(slog.NewTextHandler(logged, nil)))
	if err != nil {
		t.Fatal(err)
	}
	s, err := DialStore(ctx, StoreConfig{Address: m.Store, Job: "j", Secret: m.Secret, Rank: 1})
	if err != nil {
		t.Fatal(err)
	}
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		m.Close(ctx)
	}()
	select {
	case line := <-logged:
		if !strings.Contains(line, "handles=1") || !strings.Contains(line, "at most") {
			t.Errorf("logged %q, want one handle and a limit", line)
		}
	case <-closed:
		t.Error("rank 0 does not wait")
	case <-ctx.Done():
		t.Error("nothing is logged")
	}
	s.Close()
	<-closed
}

func TestMeetingPortsStayClearOfOthers(t *testing.T) {
	seen := map[string]bool{}
	for i := range 1000 {
		port := meetingPort(fmt.Sprint("slurm-", i))
		if port < "20000" || port > "29999" || len(port) != 5 {
			t.Fatal(port)
		}
		seen[port] = true
	}
	if len(seen) < 900 {
		t.Errorf("1000 launches have %d ports", len(seen))
	}
}

// A launcher with a key-value space for two processes.
func kvsLauncher(t *testing.T) (fds [2]int) {
	values, inside := map[string]string{}, []*os.File{}
	var mu sync.Mutex
	for i := range fds {
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		fds[i] = pair[1]
		f := os.NewFile(uintptr(pair[0]), "launcher")
		done := make(chan struct{})
		go func() {
			defer close(done)
			var buf [4096]byte
			for {
				n, err := f.Read(buf[:])
				if err != nil || n == 0 {
					return
				}
				ask := map[string]string{}
				for word := range strings.FieldsSeq(string(buf[:n])) {
					k, v, _ := strings.Cut(word, "=")
					ask[k] = v
				}
				mu.Lock()
				switch ask["cmd"] {
				case "init":
					fmt.Fprintln(f, "cmd=response_to_init rc=0")
				case "get_maxes":
					fmt.Fprintln(f, "cmd=maxes keylen_max=64 vallen_max=1024")
				case "get_my_kvsname":
					fmt.Fprintln(f, "cmd=my_kvsname kvsname=k")
				case "put":
					values[ask["key"]] = ask["value"]
					fmt.Fprintln(f, "cmd=put_result rc=0")
				case "get":
					fmt.Fprintln(f, "cmd=get_result rc=0 value="+values[ask["key"]])
				case "barrier_in":
					if inside = append(inside, f); len(inside) == len(fds) {
						for _, in := range inside {
							fmt.Fprintln(in, "cmd=barrier_out")
						}
					}
				case "finalize":
					fmt.Fprintln(f, "cmd=finalize_ack")
				}
				mu.Unlock()
			}
		}()
		t.Cleanup(func() {
			<-done // the process has left
			f.Close()
		})
	}
	return fds
}

func TestRanksMeetThroughKeyValueSpace(t *testing.T) {
	fds := kvsLauncher(t)
	env := func(i int) string { return fmt.Sprintf("PMI_RANK=%d PMI_SIZE=2 PMI_FD=%d TUTTI_IFNAME=lo", i, fds[i]) }
	all, errs := together(t, env, 2, make([][]byte, 2))
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	_, errs = together(t, env, 2, make([][]byte, 2))
	for i, err := range errs {
		if err == nil || !strings.Contains(err.Error(), otherWays) {
			t.Errorf("rank %d in another job: %v", i, err)
		}
	}
	meets(t, all)
}

func TestLaunchersTellOfTheirStore(t *testing.T) {
	fds := kvsLauncher(t)
	name := fresh(t)
	for what, env := range map[string]func(i int) string{
		"one host": func(i int) string {
			return fmt.Sprintf("OMPI_COMM_WORLD_RANK=%d OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=%d "+
				"OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=%s", i, i, name)
		},
		"PMI": func(i int) string { return fmt.Sprintf("PMI_RANK=%d PMI_SIZE=2 PMI_FD=%d", i, fds[i]) },
	} {
		ctx := meetContext(t)
		first, err := NodeFromEnv(vars(env(0)))
		if err != nil {
			t.Fatal(err)
		}
		second, err := NodeFromEnv(vars(env(1)))
		if err != nil {
			t.Fatal(err)
		}
		stop := make(chan func(), 1)
		go func() {
			f, err := first.Tell(ctx, "tutti://h:1", "the secret of a job")
			if err != nil {
				t.Errorf("%s: %v", what, err)
			}
			stop <- f
		}()
		store, secret, err := second.Hear(ctx)
		if err != nil || store != "tutti://h:1" || secret != "the secret of a job" {
			t.Errorf("%s: heard %q, %q, %v", what, store, secret, err)
		}
		if f := <-stop; f != nil {
			f()
		}
	}
}

func TestInvitationsAreChecked(t *testing.T) {
	for _, i := range []invitation{{}, {Store: "http://h:1"}, {Store: "tutti://h:1", Secret: "short"}} {
		if m, err := i.meeting(nil); err == nil {
			t.Errorf("%+v: %+v", i, m)
		}
	}
}

func TestMeetingPointIsRequired(t *testing.T) {
	const ompi = "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=1"
	for env, says := range map[string]string{
		ompi:                                  "mpirun --bind-to none --map-by ppr:1:node tutti run",
		"PMI_RANK=0 PMI_SIZE=2":               "TUTTI_STORE",
		"JOB_COMPLETION_INDEX=0 TUTTI_SIZE=2": "tutti run",
	} {
		l, err := FromEnv(vars(env))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := l.Meet(t.Context(), nil, nil); err == nil || !strings.Contains(err.Error(), says) ||
			strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v; want one line with %q", env, err, says)
		}
	}
}
