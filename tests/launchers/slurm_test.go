//go:build linux

package launchers

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"tutti/bootstrap"
	"tutti/internal/proctest"
	"tutti/tests/internal/rig"
)

// slurm is a cluster of two nodes, n1 and n2, on a host of its own.
type slurm struct {
	t     *testing.T
	stage *rig.Stage
	on    []string // the host
	env   []string
}

// slurmConf is slurm.conf, with a directory for everything. The nodes may have more processors than
// this machine.
const slurmConf = `ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=DIR/munge.socket
CryptoType=crypto/munge
StateSaveLocation=DIR/state
SlurmdSpoolDir=DIR/spool-%n
SlurmctldPidFile=DIR/slurmctld.pid
SlurmdPidFile=DIR/slurmd-%n.pid
SlurmctldPort=6817
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerType=sched/builtin
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
NodeName=n1 NodeHostname=HOST NodeAddr=127.0.0.1 Port=6821 CPUs=8
NodeName=n2 NodeHostname=HOST NodeAddr=127.0.0.1 Port=6822 CPUs=8
PartitionName=test Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
`

// startSlurm starts a cluster, which ends with the test.
func startSlurm(t *testing.T, env ...string) *slurm {
	t.Helper()
	rig.NeedRoot(t, "it runs Slurm's daemons")
	rig.Need(t, "slurmctld", "slurmd", "srun", "sbatch", "munged")
	s := rig.New(t)
	dir, err := os.MkdirTemp("", "slurm") // not t.TempDir: paths of sockets are short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	self, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	key := filepath.Join(dir, "munge.key")
	for path, text := range map[string]string{
		key:                               bootstrap.NewSecret() + bootstrap.NewSecret(),
		filepath.Join(dir, "slurm.conf"):  strings.NewReplacer("DIR", dir, "HOST", self).Replace(slurmConf),
		filepath.Join(dir, "cgroup.conf"): "CgroupPlugin=autodetect\n",
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, sub := range []string{"state", "spool-n1", "spool-n2"} {
		if err := os.Mkdir(filepath.Join(dir, sub), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	c := &slurm{t: t, stage: s, on: host(t, "localhost", "n1", "n2"),
		env: append(env, "SLURM_CONF="+filepath.Join(dir, "slurm.conf"))}
	in := func(name string) string { return filepath.Join(dir, name) }
	c.start("munged", "--foreground", "--force", "--num-threads=2", "--key-file="+key, "--socket="+in("munge.socket"),
		"--pid-file="+in("munge.pid"), "--log-file="+in("munge.log"), "--seed-file="+in("munge.seed"))
	rig.Eventually(t, func() bool {
		_, err := os.Stat(in("munge.socket"))
		return err == nil
	}, func() string { return "munged does not come up" })
	c.start("slurmctld", "-D", "-i")
	c.start("slurmd", "-D", "-N", "n1")
	c.start("slurmd", "-D", "-N", "n2")
	rig.Eventually(t, func() bool {
		cmd := exec.Command(c.on[0], append(slices.Clone(c.on[1:]), "sinfo", "-h", "-N", "-o", "%T")...)
		cmd.Env = append(os.Environ(), c.env...)
		out, err := cmd.Output()
		return err == nil && strings.TrimSpace(string(out)) == "idle\nidle"
	}, func() string { return "the nodes do not come up" })
	if t.Failed() {
		t.FailNow()
	}
	return c
}

func (c *slurm) start(argv ...string) *proctest.Child {
	c.t.Helper()
	return c.stage.StartIn(c.on, c.env, argv...)
}

func TestSlurm(t *testing.T) {
	hello, path := programs(t)
	c := startSlurm(t, path)
	dir := t.TempDir()
	t.Run("the batch script", func(t *testing.T) {
		out := filepath.Join(dir, "out")
		c.start("env", "RANKS_PER_NODE=2", "sbatch", "--output="+out, example(t, "slurm.sbatch"), hello).End(0)
		var text []byte
		rig.Eventually(t, func() bool { // sbatch --wait asks every ten seconds
			text, _ = os.ReadFile(out)
			return strings.Count(string(text), "the ranks sum to") == 4
		}, func() string { return fmt.Sprintf("the job prints %q", text) })
		summed(t, 4, unmarked(string(text)))
	})
	t.Run("tutti run needs the secret alone", func(t *testing.T) {
		run := []string{"srun", "--nodes=2", "--ntasks-per-node=1", "tutti", "run", "-n", "2", "--", hello}
		p := c.start(append([]string{"env", "TUTTI_SECRET=" + bootstrap.NewSecret()}, run...)...)
		p.End(0)
		summed(t, 4, unmarked(p.Out.String()))
		p = c.start(run...)
		if code := p.Wait(); code == 0 || !strings.Contains(p.Err.String(), "tutti secret makes one") {
			t.Errorf("without a secret it ends with %d and says %q", code, p.Err.String())
		}
	})
	t.Run("tutti run on one of the nodes", func(t *testing.T) {
		p := c.start("srun", "--nodes=1", "--ntasks=1", "tutti", "run", "-n", "2", "--", hello)
		p.End(0)
		summed(t, 2, unmarked(p.Out.String()))
	})
	t.Run("ranks with PMI need nothing", func(t *testing.T) {
		p := c.start("srun", "--nodes=2", "--ntasks-per-node=2", "--mpi=pmi2", hello)
		p.End(0)
		summed(t, 4, p.Out.String())
		p = c.start("srun", "--nodes=2", "--ntasks-per-node=1", "--mpi=pmi2", "tutti", "run", "-n", "2", "--", hello)
		p.End(0)
		summed(t, 4, unmarked(p.Out.String()))
	})
	t.Run("ranks without PMI", func(t *testing.T) {
		p := c.start("srun", "--nodes=1", "--ntasks=3", hello) // on one node they need nothing either
		p.End(0)
		summed(t, 3, p.Out.String())
		two := []string{"srun", "--nodes=2", "--ntasks-per-node=2", hello}
		p = c.start(append([]string{"env", "TUTTI_SECRET=" + bootstrap.NewSecret()}, two...)...)
		p.End(0)
		summed(t, 4, p.Out.String())
		p = c.start(two...)
		if code := p.Wait(); code == 0 || !strings.Contains(p.Err.String(), "tutti secret") {
			t.Errorf("without a secret they end with %d and say %q", code, p.Err.String())
		}
	})
	t.Run("two steps at once", func(t *testing.T) {
		var all []*proctest.Child
		for i := range 2 {
			all = append(all, c.start("env", fmt.Sprint("N=", i), "srun", "--nodes=2", "--ntasks-per-node=1",
				"--mpi=pmi2", "tutti", "run", "-n", "1", "--", hello))
		}
		for _, p := range all {
			p.End(0)
			summed(t, 2, unmarked(p.Out.String()))
		}
	})
	t.Run("a rank that fails ends the step", func(t *testing.T) {
		p := c.start("env", "TUTTI_SECRET="+bootstrap.NewSecret(), "srun", "--nodes=2", "--ntasks-per-node=1", "tutti",
			"run", "-n", "1", "--", "sh", "-c", `[ "$RANK" = 0 ] && exit 7; exec sleep 1000`)
		p.End(7)
	})
}
