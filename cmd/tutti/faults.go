package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"tutti/cmd/tutti/internal/cluster"
	"tutti/cmd/tutti/internal/launch"
	"tutti/p2p/registry"
	"tutti/pg"
)

// faultsVariable tells a rank of bench --faults the directory for timestamps. Processes of a
// machine share the monotonic clock.
const faultsVariable = "TUTTI_BENCH_FAULTS"

// Timestamps: each is a file with one number, nanoseconds of the monotonic clock.
const (
	// The victim is about to kill itself and the process in leaderFile, if there is one.
	momentKill     = "kill"
	momentError    = "error"    // a survivor has its error; one for each, with its rank
	momentNext     = "next"     // the survivor has finished its next collective
	momentStart    = "start"    // the replacement's main has begun
	momentAdmitted = "admitted" // the replacement was admitted
)

const leaderFile = "leader"

// etcdMembers is the size of an etcd that survives the loss of a member.
const etcdMembers = 3

func monotonic() int64 {
	var t unix.Timespec
	unix.ClockGettime(unix.CLOCK_MONOTONIC, &t)
	return t.Nano()
}

// faultRow is the result for one number of ranks, in milliseconds, median and worst over the
// rounds.
type faultRow struct {
	Ranks int `json:"ranks"`
	// Leader says that the leader of the store, a three-member etcd, is killed at the same moment.
	Leader   bool       `json:"leader_killed"`
	Rounds   int        `json:"rounds"`
	Detected [2]float64 `json:"detected_ms"` // kill to the first survivor's error
	Next     [2]float64 `json:"next_ms"`     // kill to the slowest survivor's next finished collective
	Admitted [2]float64 `json:"admitted_ms"` // start of the replacement to its admission
}

// faults measures how long ranks take to continue after one of them is killed, and to admit its
// replacement.
func (f *benchFlags) faults(cmd *cobra.Command) error {
	sizes, rounds := []int{2, 4, 8}, 20
	if cmd.Flags().Changed("ranks") {
		if sizes = []int{f.n}; f.n < 2 {
			return usagef(cmd, "--faults -n %d: expected 2 ranks or more, one of which is killed", f.n)
		}
	}
	if cmd.Flags().Changed("rounds") {
		rounds = f.rounds
	}
	for _, name := range []string{"op", "min", "max", "factor", "dtype", "redop", "root", "iters", "warmup",
		"round-time", "registered", "touch", "queue", "check", "no-check", "bind", "timeout"} {
		if cmd.Flags().Changed(name) {
			return usagef(cmd, "--%s is not for --faults", name)
		}
	}
	switch {
	case f.transport != "" && !transports(f.transport):
		return usagef(cmd, "--faults --transport %s: expected auto, %s", f.transport, registry.Names())
	case rounds < 1:
		return usagef(cmd, "--rounds %d: expected 1 or more", rounds)
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	for _, with := range []string{"", ", and of the leader of a three-member etcd at the same moment"} {
		if !f.asJSON {
			fmt.Fprintf(stdout, "# kill -9 of one rank in a loop of 1 KiB allreduces%s, %d rounds; milliseconds, "+
				"median and worst\n", with, rounds)
			fmt.Fprintln(stdout, "#  ranks    kill to error        to the next result    replacement to admitted")
		}
		for _, n := range sizes {
			row, err := f.faultRow(cmd.Context(), self, n, rounds, with != "")
			if err != nil {
				return err
			}
			if f.asJSON {
				if err := json.NewEncoder(stdout).Encode(row); err != nil {
					return err
				}
				continue
			}
			fmt.Fprintf(stdout, "%8d %9.1f %9.1f    %9.1f %9.1f       %9.1f %9.1f\n", n,
				row.Detected[0], row.Detected[1], row.Next[0], row.Next[1], row.Admitted[0], row.Admitted[1])
		}
	}
	return nil
}

// faultRow measures one number of ranks.
func (f *benchFlags) faultRow(ctx context.Context, self string, n, rounds int, leader bool) (row faultRow, err error) {
	var etcd *cluster.Cluster
	if leader {
		if etcd, err = cluster.Start(ctx, self, etcdMembers); err != nil {
			return row, err
		}
		defer etcd.Close()
	}
	var detected, next, admitted []float64
	for range rounds {
		d, x, a, err := f.faultRound(ctx, self, n, etcd)
		if err != nil {
			return row, err
		}
		detected, next, admitted = append(detected, d), append(next, x), append(admitted, a)
	}
	return faultRow{n, leader, rounds, medianWorst(detected), medianWorst(next), medianWorst(admitted)}, nil
}

func medianWorst(x []float64) [2]float64 {
	slices.Sort(x)
	return [2]float64{(x[(len(x)-1)/2] + x[len(x)/2]) / 2, x[len(x)-1]}
}

// faultRound runs one job and returns its three times in milliseconds. If etcd is not nil, it is
// the job's store, and loses its leader.
func (f *benchFlags) faultRound(ctx context.Context, self string, n int, etcd *cluster.Cluster) (detected, next,
	admitted float64, err error) {
	dir, err := os.MkdirTemp("", "tutti-faults-")
	if err != nil {
		return 0, 0, 0, fmt.Errorf("make a temporary directory (TMPDIR says where): %w", err)
	}
	defer os.RemoveAll(dir)
	o := launch.Options{Program: self, Args: []string{"bench", "--faults", "--emit"}, N: n,
		Elastic: true, MaxRestarts: 1,
		Quiet: true, NoPrefix: true, Grace: 2 * time.Second,
		Stdout: os.Stdout, Stderr: os.Stderr, Env: []string{faultsVariable + "=" + dir, "TUTTI_ON_FAILURE=shrink",
			"TUTTI_TIMEOUT=60s"}}
	if f.transport != "" {
		o.Env = append(o.Env, "TUTTI_TRANSPORT="+f.transport)
	}
	if etcd != nil {
		if err := etcd.Mend(ctx); err != nil {
			return 0, 0, 0, err
		}
		pid, err := etcd.Leader(ctx)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, leaderFile), []byte(strconv.Itoa(pid)), 0o600)
		}
		if err != nil {
			return 0, 0, 0, err
		}
		o.Store = etcd.Address()
	}
	code, err := launch.Run(ctx, o)
	if err == nil && code != 0 {
		err = exit(code)
	}
	if err != nil {
		return 0, 0, 0, err
	}
	moment := func(name string) int64 {
		b, e := os.ReadFile(filepath.Join(dir, name))
		var t int64
		if e == nil {
			t, e = strconv.ParseInt(string(b), 10, 64)
		}
		err = errors.Join(err, e)
		return t
	}
	kill, first, last := moment(momentKill), int64(1)<<62, int64(0)
	for r := range n - 1 {
		first = min(first, moment(momentError+strconv.Itoa(r)))
		last = max(last, moment(momentNext+strconv.Itoa(r)))
	}
	start, in := moment(momentStart), moment(momentAdmitted)
	ms := func(from, to int64) float64 { return float64(to-from) / 1e6 }
	return ms(kill, first), ms(kill, last), ms(start, in), err
}

// faultRank is a rank of faultRound's job: the one with the highest number kills itself, the others
// continue and admit the next one.
func faultRank(ctx context.Context) error {
	began := monotonic()
	ctx, cancel := context.WithTimeout(ctx, time.Minute) // bounds the wait for a replacement
	defer cancel()
	dir := os.Getenv(faultsVariable)
	note := func(name string, t int64) error {
		return os.WriteFile(filepath.Join(dir, name), strconv.AppendInt(nil, t, 10), 0o600)
	}
	g, err := pg.Join(ctx, pg.Config{})
	if err != nil {
		return err
	}
	defer g.Close()
	x := make([]float32, 256)
	if g.View().Epoch > 1 { // the replacement; the others are in Admit
		if err := errors.Join(note(momentAdmitted, monotonic()), note(momentStart, began)); err != nil {
			return err
		}
		return g.Barrier(ctx)
	}
	for i := 0; ; i++ {
		if g.Rank() == g.Size()-1 && i == 100 {
			if err := note(momentKill, monotonic()); err != nil {
				return err
			}
			if b, err := os.ReadFile(filepath.Join(dir, leaderFile)); err == nil {
				if pid, err := strconv.Atoi(string(b)); err == nil && pid > 1 {
					syscall.Kill(pid, syscall.SIGKILL)
				}
			}
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
		err := pg.AllReduce(ctx, g, x, pg.Sum)
		if err == nil && len(g.View().Active) == g.Size() { // else the loss was noticed between two calls
			continue
		}
		at := monotonic()
		var lost *pg.RankError
		for errors.As(err, &lost) {
			err = pg.AllReduce(ctx, g, x, pg.Sum)
		}
		if err = errors.Join(err, note(momentNext+strconv.Itoa(g.Rank()), monotonic()),
			note(momentError+strconv.Itoa(g.Rank()), at)); err != nil {
			return err
		}
		break
	}
	for len(g.View().Active) < g.Size() {
		if _, err := g.Admit(ctx); err != nil {
			return err
		}
	}
	return g.Barrier(ctx)
}
