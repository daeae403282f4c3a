//go:build linux

package pg_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"tutti/bootstrap"
	"tutti/pg"
)

// Environments of ranks that meet through their launcher: of a rank of three, process and test.
const (
	byName = "SLURM_PROCID=%[1]d SLURM_NTASKS=3 SLURM_NODELIST=localhost,n2 SLURM_JOB_ID=%[2]d " +
		"SLURM_STEP_ID=%[3]d TUTTI_IFNAME=lo"
	byHost = "RANK=%[1]d WORLD_SIZE=3 LOCAL_RANK=%[1]d LOCAL_WORLD_SIZE=3 TUTTI_JOB=again-%[2]d-%[3]d"
)

// launched is the configuration of a rank of the i-th test in such an environment.
func launched(env string, rank, i int) pg.Config {
	vars := map[string]string{}
	for kv := range strings.FieldsSeq(fmt.Sprintf(env, rank, os.Getpid(), i)) {
		name, value, _ := strings.Cut(kv, "=")
		vars[name] = value
	}
	return pg.Config{Timeout: 20 * time.Second, NoSignal: true, Secret: []byte("a secret of this test alone"),
		Getenv: func(name string) string { return vars[name] }}
}

// places returns a number, at least i, for launched in such an environment: the jobs of these names
// meet at ports that differ, and that nobody listens at.
func places(t *testing.T, env string, i int, jobs ...string) int {
	t.Helper()
	free := func() bool {
		for _, job := range jobs {
			l, err := bootstrap.FromEnv(launched(env, 0, i).Getenv)
			if err != nil {
				t.Fatal(err)
			}
			l.Job = cmp.Or(job, l.Job)
			_, port, err := l.MeetingHost()
			if err != nil {
				t.Fatal(err)
			}
			at, err := net.Listen("tcp", "localhost:"+port)
			if err != nil {
				return false
			}
			defer at.Close()
		}
		return true
	}
	for ; !free(); i++ {
	}
	return i
}

// launch runs what ranks returns at three ranks of a test in such an environment, with a number
// from places. It does so again, with another number, if a port was taken meanwhile.
func launch(t *testing.T, env string, i int, jobs []string, ranks func(i int) func(context.Context, int) error) {
	t.Helper()
	for tries := 3; ; tries-- {
		i = places(t, env, i, jobs...)
		var taken atomic.Bool
		run := ranks(i)
		eg, ctx := errgroup.WithContext(t.Context())
		for rank := range 3 {
			eg.Go(func() error {
				err := run(ctx, rank)
				if err == nil {
					return nil
				}
				if errors.Is(err, syscall.EADDRINUSE) {
					taken.Store(true)
				}
				return fmt.Errorf("rank %d: %w", rank, err)
			})
		}
		err := eg.Wait()
		if err == nil {
			return
		}
		if !taken.Load() || tries == 1 {
			t.Error(err)
			return
		}
		i++
	}
}

// Ranks leave a job and join the next one of that name while rank 0 is in the first: they find the
// first one's store. Both jobs run, whatever their ranks do after failures.
func TestRanksAreInNextJobBeforeRankZero(t *testing.T) {
	const n = 3
	for i, c := range []struct {
		name, env string
		onFailure pg.OnFailure
	}{
		{"by name", byName, pg.Report},
		{"by name, shrink", byName, pg.Shrink},
		{"by host, shrink", byHost, pg.Shrink}, // with Report rank 0 does not invite them again
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			launch(t, c.env, 10*i, []string{""}, func(i int) func(context.Context, int) error {
				there := make(chan struct{}, n) // has the ranks that are at the first store again
				return func(ctx context.Context, rank int) error {
					cfg := launched(c.env, rank, i)
					cfg.OnFailure = c.onFailure
					err := work(ctx, cfg, func() {
						for came := 0; rank == 0 && came < n-1 && ctx.Err() == nil; came++ {
							select {
							case <-there:
							case <-ctx.Done():
							}
						}
					})
					if err != nil {
						return err
					}
					cfg.Dialer = signals(there)
					if err := work(ctx, cfg, func() {}); err != nil {
						return fmt.Errorf("in the next job: %w", err)
					}
					return nil
				}
			})
		})
	}
}

// work joins a job, adds up, and leaves the job after wait.
func work(ctx context.Context, cfg pg.Config, wait func()) error {
	g, err := pg.Join(ctx, cfg)
	if err != nil {
		return err
	}
	x := []int64{1}
	err = pg.AllReduce(ctx, g, x, pg.Sum)
	if err == nil && x[0] != int64(g.Size()) {
		err = fmt.Errorf("the sum is %d, want %d", x[0], g.Size())
	}
	wait()
	return errors.Join(err, g.Close())
}

// signals returns a dialer that sends after its first connection to a store.
func signals(there chan<- struct{}) pg.Dialer {
	var once sync.Once
	return func(ctx context.Context, d *net.Dialer, rank int, addr string) (net.Conn, error) {
		c, err := d.DialContext(ctx, "tcp", addr)
		if err == nil && rank == pg.ToStore {
			once.Do(func() { there <- struct{}{} })
		}
		return c, err
	}
}

// Ranks that meet through their launcher may be in several jobs at a time. What the environment
// says about a site's store is nothing to them.
func TestJobsOfLaunch(t *testing.T) {
	const site = " TUTTI_STORE_USER=u TUTTI_STORE_PASSWORD=p TUTTI_STORE_CA=/none TUTTI_STORE_CERT=/none " +
		"TUTTI_STORE_KEY=/none"
	for name, env := range map[string]string{"by name": byName + site, "by host": byHost + site} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			jobs := []string{"", "second", "third"}
			launch(t, env, 100, jobs, func(i int) func(context.Context, int) error {
				return func(ctx context.Context, rank int) (failed error) {
					for _, job := range jobs {
						cfg := launched(env, rank, i)
						cfg.Job = job
						g, err := pg.Join(ctx, cfg)
						if err != nil {
							return fmt.Errorf("job %q: %w", job, err)
						}
						defer func() {
							if err := errors.Join(g.Barrier(ctx), g.Close()); err != nil {
								failed = errors.Join(failed, fmt.Errorf("job %q: %w", job, err))
							}
						}()
					}
					return nil
				}
			})
		})
	}
}
