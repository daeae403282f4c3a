package bootstrap

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"tutti/bootstrap/internal/pmi"
	"tutti/internal/ident"
	"tutti/internal/trust"
	"tutti/rdma"
)

// printJob has this binary print the name of the job that it is launched as, and wait for its
// input's end.
const printJob = "BOOTSTRAP_TEST_PRINT_JOB"

func init() {
	if os.Getenv(printJob) == "" {
		return
	}
	l, err := FromEnv(os.Getenv)
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("job " + l.Job)
	io.Copy(io.Discard, os.Stdin)
	os.Exit(0)
}

func vars(s string) func(string) string {
	m := map[string]string{}
	for f := range strings.FieldsSeq(s) {
		k, v, _ := strings.Cut(f, "=")
		m[k] = v
	}
	return func(k string) string { return m[k] }
}

func TestLaunchersAreUnderstood(t *testing.T) {
	for name, c := range map[string]struct {
		env  string
		want Launch
	}{
		"standby": {"TUTTI_STANDBY=1 TUTTI_SIZE=8 TUTTI_LOCAL_SIZE=4",
			Launch{Rank: -1, Size: 8, LocalRank: -1, LocalSize: 4, Standby: true, Source: "tutti"}},
		"nothing":      {"", Launch{Rank: 0, Size: 1, LocalRank: -1, Source: "none"}},
		"size 1 alone": {"TUTTI_SIZE=1", Launch{Rank: 0, Size: 1, LocalRank: -1, Source: "none"}},
		"master only": {"MASTER_ADDR=h MASTER_PORT=7",
			Launch{Size: 1, LocalRank: -1, Source: "none", MasterAddr: "h", MasterPort: 7}},
		"torchrun": {"RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=n0 MASTER_PORT=29500 " +
			"TORCHELASTIC_RUN_ID=a/b", Launch{Rank: 3, Size: 4, LocalRank: 1, LocalSize: 2, MasterAddr: "n0",
			MasterPort: 29500, Job: "torchrun-a-b.bb3edc3f7c4d48d7", Source: "torchrun"}},
		"torchrun none with master": {"RANK=0 WORLD_SIZE=2 MASTER_ADDR=n0 MASTER_PORT=29500 TORCHELASTIC_RUN_ID=none",
			Launch{Size: 2, LocalRank: -1, MasterAddr: "n0", MasterPort: 29500, Job: "torchrun-n0-29500",
				Source: "torchrun"}},
		"own with master": {"TUTTI_RANK=0 TUTTI_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=7",
			Launch{Size: 2, LocalRank: -1, MasterAddr: "10.0.0.1", MasterPort: 7, Job: "tutti-10.0.0.1-7",
				Source: "tutti"}},
		"kubernetes by its pod's name": {"JOB_COMPLETION_INDEX=3 TUTTI_SIZE=4 HOSTNAME=train-8-3",
			Launch{Rank: 3, Size: 4, LocalRank: -1, Job: "kubernetes-train-8", Source: "kubernetes"}},
		"kubernetes elsewhere": {"JOB_COMPLETION_INDEX=3 TUTTI_SIZE=4 HOSTNAME=train-8-13",
			Launch{Rank: 3, Size: 4, LocalRank: -1, Source: "kubernetes"}},
		"pals": {"PMI_RANK=1 PMI_SIZE=2 PALS_APID=ab-1",
			Launch{Rank: 1, Size: 2, LocalRank: -1, Job: "pmi-ab-1", Source: "pmi"}},
		"torchrun none": {"RANK=0 WORLD_SIZE=2 TORCHELASTIC_RUN_ID=none",
			Launch{Size: 2, LocalRank: -1, Source: "torchrun"}},
		"torchrun wins": {"RANK=1 WORLD_SIZE=2 SLURM_PROCID=5 SLURM_NTASKS=8 OMPI_COMM_WORLD_RANK=2 " +
			"OMPI_COMM_WORLD_SIZE=3 JOB_COMPLETION_INDEX=9", Launch{Rank: 1, Size: 2, LocalRank: -1,
			Source: "torchrun"}},
		"own wins": {"TUTTI_RANK=2 TUTTI_SIZE=3 TUTTI_LOCAL_RANK=0 TUTTI_LOCAL_SIZE=1 RANK=1 WORLD_SIZE=2 " +
			"LOCAL_RANK=1 TUTTI_JOB=j", Launch{Rank: 2, Size: 3, LocalRank: 0, LocalSize: 1, Job: "j",
			Source: "tutti"}},
		"confirmed": {"TUTTI_SIZE=2 RANK=1 WORLD_SIZE=2",
			Launch{Rank: 1, Size: 2, LocalRank: -1, Source: "torchrun"}},
		"openmpi": {"OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0 " +
			"OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=prterun-h-12@1 PMIX_RANK=2",
			Launch{Rank: 2, Size: 4, LocalSize: 2, Job: "openmpi-prterun-h-12-1.66f77764b30a585c", Source: "openmpi"}},
		"mpirun inside slurm": {"OMPI_COMM_WORLD_RANK=6 OMPI_COMM_WORLD_SIZE=8 SLURM_PROCID=0 SLURM_NTASKS=2 " +
			"SLURM_JOB_ID=7", Launch{Rank: 6, Size: 8, LocalRank: -1, Source: "openmpi"}},
		"hydra": {"PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2",
			Launch{Rank: 1, Size: 2, LocalRank: 1, LocalSize: 2, Source: "pmi"}},
		"cray": {"PMI_RANK=1 PMI_SIZE=2 PMI_LOCAL_RANK=0 PMI_LOCAL_SIZE=1 PMI_JOBID=55",
			Launch{Rank: 1, Size: 2, LocalRank: 0, LocalSize: 1, Job: "pmi-55", Source: "pmi"}},
		"slurm": {"SLURM_PROCID=5 SLURM_NTASKS=99 SLURM_STEP_NUM_TASKS=7 SLURM_LOCALID=1 SLURM_NODEID=2 " +
			"SLURM_STEP_TASKS_PER_NODE=2(x3),1 SLURM_STEP_NODELIST=gpu[007-009,12] SLURM_JOB_ID=42 SLURM_STEP_ID=0",
			Launch{Rank: 5, Size: 7, LocalRank: 1, LocalSize: 2, MasterAddr: "gpu007", Job: "slurm-42.0",
				Source: "slurm"}},
		"slurm bare": {"SLURM_PROCID=1 SLURM_NTASKS=2",
			Launch{Rank: 1, Size: 2, LocalRank: -1, Source: "slurm"}},
		"slurm without a step's number": {"SLURM_PROCID=0 SLURM_JOB_ID=42",
			Launch{Size: 1, LocalRank: -1, Source: "none"}},
		"slurm's batch script": {"SLURM_PROCID=0 SLURM_NODEID=0 SLURM_LOCALID=0 SLURM_NTASKS=8 SLURM_JOB_ID=42",
			Launch{Size: 1, LocalRank: -1, Source: "none"}},
		"slurm's batch step": {"SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_JOB_ID=42 SLURM_STEP_ID=4294967291",
			Launch{Size: 1, LocalRank: -1, Source: "none"}},
		"slurm's interactive step": {"SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_JOBID=42 SLURM_STEPID=4294967290",
			Launch{Size: 1, LocalRank: -1, Source: "none"}},
		"slurm's older names": {"SLURM_PROCID=0 SLURM_NPROCS=8 SLURM_JOBID=42 SLURM_STEPID=3",
			Launch{Size: 8, LocalRank: -1, Job: "slurm-42.3", Source: "slurm"}},
		"slurm with a cluster": {"SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_JOB_ID=42 SLURM_STEP_ID=3 " +
			"SLURM_CLUSTER_NAME=alps", Launch{Size: 8, LocalRank: -1, Job: "slurm-42.3.alps", Source: "slurm"}},
		"master in brackets": {"MASTER_ADDR=[fe80::1] MASTER_PORT=7",
			Launch{Size: 1, LocalRank: -1, MasterAddr: "fe80::1", MasterPort: 7, Source: "none"}},
		"services tutti and master": {"RANK=0 WORLD_SIZE=2 TUTTI_PORT=tcp://10.0.0.1:80 " +
			"MASTER_PORT=udp://10.0.0.1:80", Launch{Size: 2, LocalRank: -1, Source: "torchrun"}},
		"port without a master": {"MASTER_PORT=http JOB_COMPLETION_INDEX=3 TUTTI_SIZE=4 JOB_NAME=train",
			Launch{Rank: 3, Size: 4, LocalRank: -1, Job: "kubernetes-train", Source: "kubernetes"}},
		"salloc's shell": {"SLURM_NTASKS=4 SLURM_JOB_ID=42", Launch{Size: 1, LocalRank: -1, Source: "none"}},
		"pmix": {"PMIX_RANK=1 TUTTI_SIZE=4 PMIX_NAMESPACE=x",
			Launch{Rank: 1, Size: 4, LocalRank: -1, Job: "pmix-x", Source: "pmix"}},
		"kubernetes": {"JOB_COMPLETION_INDEX=3 TUTTI_SIZE=4 JOB_NAME=train",
			Launch{Rank: 3, Size: 4, LocalRank: -1, Job: "kubernetes-train", Source: "kubernetes"}},
		"own local over launcher's": {"RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 TUTTI_LOCAL_RANK=0",
			Launch{Rank: 1, Size: 2, LocalRank: 0, Source: "torchrun"}},
	} {
		got, err := FromEnv(vars(c.env))
		got.name, got.named, got.pmi = "", false, pmi.Address{} // see TestWaysToMeet
		if err != nil || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %+v, %v\nwant %+v", name, got, err, c.want)
		}
	}
}

// Jobs of one name in two namespaces of Kubernetes have different names here, whatever starts their
// ranks.
func TestKubernetesNamespaceIsInJob(t *testing.T) {
	defer func(before string) { namespaceFile = before }(namespaceFile)
	namespaceFile = filepath.Join(t.TempDir(), "namespace")
	if err := os.WriteFile(namespaceFile, []byte("team-a\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for env, want := range map[string]string{
		"JOB_COMPLETION_INDEX=3 TUTTI_SIZE=4 JOB_NAME=train":     "kubernetes-team-a.train",
		"JOB_COMPLETION_INDEX=3 TUTTI_SIZE=4 HOSTNAME=train-8-3": "kubernetes-team-a.train-8",
		"JOB_COMPLETION_INDEX=3 TUTTI_SIZE=4":                    "",
		"PMI_RANK=1 PMI_SIZE=2 PMI_JOBID=5":                      "pmi-5",

		"RANK=1 WORLD_SIZE=2 TORCHELASTIC_RUN_ID=train":                              "torchrun-team-a.train",
		"RANK=1 WORLD_SIZE=2 MASTER_ADDR=pt-master-0 MASTER_PORT=7":                  "torchrun-team-a.pt-master-0-7",
		"RANK=1 WORLD_SIZE=2 MASTER_ADDR=w-0.pt MASTER_PORT=7":                       "torchrun-team-a.w-0.pt-7",
		"RANK=1 WORLD_SIZE=2 MASTER_ADDR=w-0.pt.b.svc MASTER_PORT=7":                 "torchrun-w-0.pt.b.svc-7",
		"RANK=1 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=7":                     "torchrun-10.0.0.1-7",
		"TUTTI_RANK=1 TUTTI_SIZE=2 MASTER_ADDR=head MASTER_PORT=7":                   "tutti-team-a.head-7",
		"TUTTI_RANK=1 TUTTI_SIZE=2 MASTER_ADDR=head MASTER_PORT=7 TUTTI_JOB=j":       "j",
		"RANK=1 WORLD_SIZE=2 TORCHELASTIC_RUN_ID=none MASTER_ADDR=h MASTER_PORT=7":   "torchrun-team-a.h-7",
		"JOB_COMPLETION_INDEX=3 TUTTI_SIZE=4 HOSTNAME=n MASTER_ADDR=h MASTER_PORT=7": "kubernetes-team-a.h-7",
	} {
		if l, err := FromEnv(vars(env)); err != nil || l.Job != want {
			t.Errorf("%s: job %q, %v, want %q", env, l.Job, err, want)
		}
	}
}

// A loopback address names a meeting point on one machine only.
func TestMeetingPoint(t *testing.T) {
	for _, host := range []string{"127.0.0.1", "localhost", "::1"} {
		if name := meetingPoint(host, "7"); !strings.HasPrefix(name, host+"-7-") ||
			len(name) != len(host)+len("-7-")+8 {
			t.Errorf("%s: %s", host, name)
		}
	}
	if name := meetingPoint("node", "7"); name != "node-7" {
		t.Error(name)
	}
}

func TestHydraProxy(t *testing.T) {
	for args, want := range map[string]string{
		"/usr/bin/hydra_pmi_proxy --control-port n0:40587 --rmk user --pgid 0 --proxy-id 1":       "n0-40587",
		"/opt/intel/bin/hydra_bstrap_proxy --upstream-host n0 --upstream-port 40587 --proxy-id 1": "n0-40587",
		"hydra_pmi_proxy --rmk user":           "",
		"hydra_pmi_proxy --control-port":       "",
		"/bin/sh -c x --control-port n0:40587": "",
		"":                                     "",
	} {
		if got := hydraProxy(strings.Split(args, " ")); got != want {
			t.Errorf("%s: %q, want %q", args, got, want)
		}
	}
}

// Ranks of one launch have one name, and those of two launches at the same time have two: with the
// launchers that are installed here, also from a script.
func TestJobsOfLaunchersDiffer(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, mpiexec := range [][]string{
		{"mpiexec.mpich", "-n", "2"},
		{"mpiexec.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2"},
	} {
		t.Run(mpiexec[0], func(t *testing.T) {
			path, err := exec.LookPath(mpiexec[0])
			if err != nil {
				t.Skip(err)
			}
			// Each rank prints its job and waits until its launch is told to end.
			launch := func(through ...string) (jobs []string, end func()) {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				c := exec.CommandContext(ctx, path, append(append(mpiexec[1:len(mpiexec):len(mpiexec)], through...),
					self)...)
				c.Env = append(os.Environ(), printJob+"=1")
				in, err := c.StdinPipe()
				if err != nil {
					t.Fatal(err)
				}
				out, err := c.StdoutPipe()
				if err != nil {
					t.Fatal(err)
				}
				c.Stderr = os.Stderr
				if err := c.Start(); err != nil {
					t.Fatal(err)
				}
				lines := bufio.NewScanner(out)
				for len(jobs) < 2 && lines.Scan() {
					if job, ok := strings.CutPrefix(lines.Text(), "job "); ok {
						jobs = append(jobs, job)
					}
				}
				if len(jobs) < 2 {
					t.Fatalf("%s: %q, %v", mpiexec, jobs, lines.Err())
				}
				return jobs, func() {
					in.Close()
					cancel()
					c.Wait()
				}
			}
			a, end := launch()
			defer end()
			b, end := launch("sh", "-c", `"$0"; true`)
			defer end()
			if a[0] == "" || a[0] != a[1] || b[0] == "" || b[0] != b[1] || a[0] == b[0] {
				t.Errorf("one launch is %q, another %q", a, b)
			}
		})
	}
}

func TestContradictoryVariablesAreNamed(t *testing.T) {
	for env, names := range map[string]string{
		"RANK=3 WORLD_SIZE=2":           "RANK=3 WORLD_SIZE=2",
		"RANK=1":                        "RANK=1 WORLD_SIZE",
		"WORLD_SIZE=1":                  "WORLD_SIZE=1 RANK",
		"RANK=-1 WORLD_SIZE=2":          `RANK="-1"`,
		"RANK=x WORLD_SIZE=2":           `RANK="x"`,
		"RANK=0 WORLD_SIZE=0":           `WORLD_SIZE="0"`,
		"RANK=0 WORLD_SIZE=99999999999": "WORLD_SIZE",
		"RANK=0 WORLD_SIZE=2 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2":                    "LOCAL_RANK=2 LOCAL_WORLD_SIZE=2",
		"RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=3":                                 "LOCAL_WORLD_SIZE=3 WORLD_SIZE=2",
		"RANK=0 WORLD_SIZE=2 LOCAL_RANK=5":                                       "LOCAL_RANK=5 WORLD_SIZE=2",
		"RANK=0 WORLD_SIZE=2 MASTER_ADDR=h":                                      "MASTER_ADDR=h MASTER_PORT",
		"RANK=0 WORLD_SIZE=2 MASTER_PORT=9":                                      "MASTER_PORT=9 MASTER_ADDR",
		"RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=70000":                    "MASTER_PORT=70000",
		"SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_JOB_ID=42":                          "SLURM_PROCID=1 SLURM_STEP_ID",
		"SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_JOB_ID=42 SLURM_STEP_ID=4294967291": "SLURM_PROCID=1 SLURM_STEP_ID",
		"TUTTI_RANK=0":                        "TUTTI_RANK=0 TUTTI_SIZE",
		"TUTTI_SIZE=2":                        "TUTTI_SIZE=2 TUTTI_RANK",
		"TUTTI_SIZE=3 RANK=0 WORLD_SIZE=2":    "TUTTI_SIZE=3 WORLD_SIZE=2",
		"TUTTI_SIZE=3 JOB_COMPLETION_INDEX=3": "JOB_COMPLETION_INDEX=3 TUTTI_SIZE=3",
		"JOB_COMPLETION_INDEX=0":              "JOB_COMPLETION_INDEX=0 TUTTI_SIZE",
		"PMIX_RANK=0":                         "PMIX_RANK=0 TUTTI_SIZE",
		"SLURM_PROCID=2":                      "SLURM_PROCID=2 SLURM_STEP_NUM_TASKS",
		"SLURM_PROCID=2 SLURM_NTASKS=2":       "SLURM_PROCID=2 SLURM_NTASKS=2",
		"OMPI_COMM_WORLD_SIZE=2":              "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK",
		"PMI_RANK=0":                          "PMI_RANK=0 PMI_SIZE",
		"SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_NODEID=1 SLURM_TASKS_PER_NODE=2":   "SLURM_TASKS_PER_NODE SLURM_NODEID=1",
		"SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_NODEID=0 SLURM_TASKS_PER_NODE=2(x": "SLURM_TASKS_PER_NODE",
		"SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_NODEID=0 SLURM_TASKS_PER_NODE=3": "SLURM_TASKS_PER_NODE=3 " +
			"SLURM_NTASKS=2",
		"TUTTI_SECRET=short": "TUTTI_SECRET",
		"TUTTI_SECRET=0123456789abcdef TUTTI_SECRET_FILE=/x": "TUTTI_SECRET TUTTI_SECRET_FILE",
		"TUTTI_SECRET_FILE=/does/not/exist":                  "TUTTI_SECRET_FILE /does/not/exist",
		"TUTTI_STORE=redis://h:1":                            "TUTTI_STORE redis",
		"TUTTI_STORE=tutti://h":                              "TUTTI_STORE HOST:PORT",
		"TUTTI_STORE_USER=u":                                 "TUTTI_STORE_USER TUTTI_STORE_PASSWORD",
		"TUTTI_STORE_PASSWORD=u":                             "TUTTI_STORE_PASSWORD TUTTI_STORE_USER",
		"TUTTI_STORE_CERT=u":                                 "TUTTI_STORE_CERT TUTTI_STORE_KEY",
		"TUTTI_IFNAME=10.0.0.0/99":                           "TUTTI_IFNAME 10.0.0.0/99",
		"TUTTI_PORT=9-8":                                     "TUTTI_PORT 9-8",
		"TUTTI_RDMA_DEVICES=a,":                              "TUTTI_RDMA_DEVICES name",
		"TUTTI_RDMA_GID=eth0":                                "TUTTI_RDMA_GID eth0",
		"TUTTI_RDMA_QPS=17":                                  "TUTTI_RDMA_QPS 17 1 16",
		"TUTTI_RDMA_QPS=x":                                   "TUTTI_RDMA_QPS x",
		"TUTTI_RDMA_TC=256":                                  "TUTTI_RDMA_TC 256 0 255",
		"TUTTI_RDMA_SL=16":                                   "TUTTI_RDMA_SL 16 0 15",
		"TUTTI_RDMA_PKEY=-1":                                 "TUTTI_RDMA_PKEY -1 0 65535",
		"TUTTI_RDMA_TIMEOUT=0":                               "TUTTI_RDMA_TIMEOUT 0 12 31",
		"TUTTI_RDMA_TIMEOUT=1s":                              "TUTTI_RDMA_TIMEOUT 1s",
		"TUTTI_TIMEOUT=soon":                                 "TUTTI_TIMEOUT soon",
		"TUTTI_TIMEOUT=0":                                    "TUTTI_TIMEOUT",
		"TUTTI_LEASE=1500ms":                                 "TUTTI_LEASE 1.5s",
		"TUTTI_LEASE=-3s":                                    "TUTTI_LEASE",
		"TUTTI_LOG=loud":                                     "TUTTI_LOG loud",
		"TUTTI_JOB=a/b":                                      "TUTTI_JOB a/b",
		"TUTTI_STAGING_LIMIT=0":                              "TUTTI_STAGING_LIMIT",
		"TUTTI_STAGING_LIMIT=1g":                             "TUTTI_STAGING_LIMIT 1g",
	} {
		got, err := FromEnv(vars(env))
		if err == nil {
			t.Errorf("%s: %+v, want an error", env, got)
			continue
		}
		for name := range strings.FieldsSeq(names) {
			if !strings.Contains(err.Error(), name) {
				t.Errorf("%s: %q does not say %s", env, err, name)
			}
		}
	}
}

func TestVariablesSetLaunch(t *testing.T) {
	file := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(file, []byte(strings.Repeat("ab", 16)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	l, err := FromEnv(vars("TUTTI_TRANSPORT=shm,tcp TUTTI_ALGO=ring TUTTI_IFNAME=eth0 TUTTI_PORT=5-9 " +
		"TUTTI_TIMEOUT=1.5 TUTTI_LEASE=2 TUTTI_LOG=DEBUG TUTTI_RDMA_DEVICES==a:1 TUTTI_RDMA_GID=3 TUTTI_RDMA_QPS=2 " +
		"TUTTI_RDMA_TC=255 TUTTI_RDMA_SL=15 TUTTI_RDMA_PKEY=65535 TUTTI_RDMA_TIMEOUT=31 TUTTI_STAGING_LIMIT=3 " +
		"TUTTI_STORE=etcds://a,b:1 TUTTI_STORE_USER=u TUTTI_STORE_PASSWORD=p TUTTI_STORE_CA=ca " +
		"TUTTI_STORE_CERT=c TUTTI_STORE_KEY=k TUTTI_SECRET_FILE=" + file))
	want := Launch{Size: 1, LocalRank: -1, Source: "none", Secret: bytes.Repeat([]byte{0xab}, 16),
		Store: "etcds://a,b:1", Transport: "shm,tcp", Algorithm: "ring",
		Interfaces: "eth0", Ports: "5-9",
		RDMADevices: "=a:1", RDMAGID: "3", RDMAPairs: 2,
		RDMA:         rdma.Settings{TrafficClass: 255, ServiceLevel: 15, PKey: 65535, Timeout: 31},
		StagingLimit: 3 << 20, LogLevel: "debug",
		Timeout:  1500 * time.Millisecond,
		LeaseTTL: 2 * time.Second, StoreUser: "u", StorePassword: "p", StoreCA: "ca", StoreCert: "c", StoreKey: "k"}
	if err != nil || !reflect.DeepEqual(l, want) {
		t.Errorf("%+v, %v\nwant %+v", l, err, want)
	}
	if l, err = FromEnv(vars("TUTTI_TIMEOUT=-1s")); err != nil || l.Timeout >= 0 {
		t.Errorf("no timeout: %v, %v", l.Timeout, err)
	}
}

// Kubernetes makes variables of secrets as they were stored, often with a newline.
func TestSecretsEndInLines(t *testing.T) {
	text := strings.Repeat("ab", 16)
	want := bytes.Repeat([]byte{0xab}, 16)
	file := filepath.Join(t.TempDir(), "secret")
	for _, end := range []string{"", "\n", "\r\n", "\n\n"} {
		if err := os.WriteFile(file, []byte(text+end), 0o600); err != nil {
			t.Fatal(err)
		}
		for name, value := range map[string]string{"TUTTI_SECRET": text + end, "TUTTI_SECRET_FILE": file} {
			env := func(key string) string { return map[string]string{name: value}[key] }
			if l, err := FromEnv(env); err != nil || !bytes.Equal(l.Secret, want) {
				t.Errorf("%s, which ends in %q: %q, %v", name, end, l.Secret, err)
			}
			if got, from, err := SecretFromEnv(env); got != text || from != name || err != nil {
				t.Errorf("%s, which ends in %q: %q of %s, %v", name, end, got, from, err)
			}
		}
	}
	if text, name, err := SecretFromEnv(vars("")); text != "" || name != "" || err != nil {
		t.Errorf("without a secret: %q of %s, %v", text, name, err)
	}
	if err := os.WriteFile(file, make([]byte, maxSecretFile+1), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadSecret(file); err == nil || !strings.Contains(err.Error(), file+" is longer than 4096 bytes") {
		t.Errorf("a long file: %v", err)
	}
}

func TestParseSecret(t *testing.T) {
	for in, want := range map[string]string{
		"sixteen letters!":                 "sixteen letters!",
		"00112233445566778899aabbccddeeff": "\x00\x11\x22\x33\x44\x55\x66\x77\x88\x99\xaa\xbb\xcc\xdd\xee\xff",
		"00112233445566778899":             "00112233445566778899", // hex, but too few bytes: text
	} {
		if got, err := ParseSecret(in); err != nil || string(got) != want {
			t.Errorf("ParseSecret(%q) = %q, %v", in, got, err)
		}
	}
	if _, err := ParseSecret("swordfish"); err == nil || strings.Contains(err.Error(), "swordfish") {
		t.Errorf("short secret: %v", err)
	}
	a, b := NewSecret(), NewSecret()
	if s, err := ParseSecret(a); err != nil || len(s) != 32 || a == b {
		t.Errorf("NewSecret: %d bytes, %v, same twice: %v", len(s), err, a == b)
	}
	if a, b := ident.New(), ident.New(); a == b || a == 0 || b == 0 {
		t.Errorf("NewIncarnation: %d, then %d", a, b)
	}
}

// A client's credential is read back as it was written, and is no job's secret.
func TestCredential(t *testing.T) {
	name := rapid.StringMatching(`[A-Za-z0-9._-]{1,32}`)
	rapid.Check(t, func(t *rapid.T) {
		secret := rapid.SliceOfN(rapid.Byte(), 16, 64).Draw(t, "secret")
		client := name.Draw(t, "client")
		text, err := NewCredential(secret, client)
		if err != nil {
			t.Fatal(err)
		}
		want, err := trust.Derive(secret, client)
		c, perr := ParseCredential(text)
		if err != nil || perr != nil || c.Client != client || !bytes.Equal(c.Key, want) {
			t.Fatalf("%q is read as %+v, %v", text, c, perr)
		}
		whole, cut := "credential of client "+client+":", rapid.IntRange(len("client:"), len(text)).Draw(t, "cut")
		for _, s := range []string{text, text[:cut], text + "0"} {
			raw, err := ParseSecret(s)
			if raw != nil || err == nil || !strings.Contains(err.Error(), "a rank needs the job's own secret") ||
				strings.Contains(err.Error(), hex.EncodeToString(want)[:8]) {
				t.Fatalf("as a job's secret %q is %x, %v", s, raw, err)
			}
			if is := s == text; strings.Contains(err.Error(), whole) != is {
				t.Fatalf("as a job's secret %q: %v", s, err)
			}
		}
		if _, err := FromEnv(vars("TUTTI_SECRET=" + text)); err == nil || !strings.Contains(err.Error(), whole) ||
			!strings.Contains(err.Error(), "TUTTI_SECRET: ") {
			t.Fatalf("a rank with a client's credential: %v", err)
		}
	})
	for _, text := range []string{"sixteen letters!", "00112233445566778899aabbccddeeff"} {
		want, err := ParseSecret(text)
		if err != nil {
			t.Fatal(err)
		}
		if c, err := ParseCredential(text); err != nil || c.Client != "" || !bytes.Equal(c.Key, want) {
			t.Errorf("the secret %q is read as %+v, %v", text, c, err)
		}
	}
	key := strings.Repeat("5e", 32)
	for _, text := range []string{"", "swordfish", "client:", "client:a", "client:a:", "client:a:" + key[2:],
		"client:a:" + key + "5e", "client:a:" + key + "\n", "client::" + key, "client:" + key + ":a", "client:" + key,
		"client:a b:" + key, "client:a:b:" + key, "client:a:" + key[1:] + "g", "client:" +
			strings.Repeat("n", 33) + ":" + key} {
		if c, err := ParseCredential(text); err == nil || c.Key != nil || strings.Contains(err.Error(), "5e5e") ||
			strings.Contains(err.Error(), "swordfish") {
			t.Errorf("%q is read as %+v, %v", text, c, err)
		}
	}
	for _, name := range []string{"", "a b", "a:b", strings.Repeat("n", 33)} {
		if text, err := NewCredential([]byte("sixteen letters!"), name); err == nil || text != "" {
			t.Errorf("client %q gets %q", name, text)
		}
	}
	if text, err := NewCredential([]byte("short"), "a"); err == nil || text != "" {
		t.Errorf("a short secret gives %q", text)
	}
}

// The table of variables is complete: FromEnv asks for exactly these of ours, besides those that
// only tutti run reads.
func TestVariables(t *testing.T) {
	asked := map[string]bool{"TUTTI_BIND": true}
	env := vars("RANK=0 WORLD_SIZE=1")
	if _, err := FromEnv(func(k string) string { asked[k] = true; return env(k) }); err != nil {
		t.Fatal(err)
	}
	for _, v := range Variables() {
		if !strings.HasPrefix(v.Name, "TUTTI_") || v.Meaning == "" || v.Default == "" {
			t.Errorf("incomplete: %+v", v)
		}
		if !asked[v.Name] {
			t.Errorf("%s is in the table, but FromEnv does not read it", v.Name)
		}
		delete(asked, v.Name)
	}
	for k := range asked {
		if strings.HasPrefix(k, "TUTTI_") {
			t.Errorf("FromEnv reads %s, which is not in the table", k)
		}
	}
}

func TestParseStore(t *testing.T) {
	for in, want := range map[string]string{
		"etcd://a:1,b.c-d:2": "etcd://a:1,b.c-d:2", "etcd://h": "etcd://h:2379", "etcds://[::1]:7": "etcds://[::1]:7",
		"etcd://[fe80::1]/": "etcd://[fe80::1]:2379", "tutti://127.0.0.1:5": "tutti://127.0.0.1:5",
	} {
		if got, err := ParseStore(in); err != nil || got.String() != want {
			t.Errorf("ParseStore(%q) = %v, %v, want %s", in, got, err, want)
		}
	}
	for _, in := range []string{"", "h:1", "http://h:1", "etcd://", "etcd://h:0", "etcd://h:65536", "etcd://h:x",
		"etcd://a,,b", "etcd://[::1", "etcd://[1.2.3.4]:1", "etcd://a b:1", "etcd://u:p@h:1", "etcd://-h:1",
		"tutti://h"} {
		if got, err := ParseStore(in); err == nil {
			t.Errorf("ParseStore(%q) = %v, want an error", in, got)
		}
	}
}

func FuzzFromEnv(f *testing.F) {
	f.Add("RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 MASTER_ADDR=x MASTER_PORT=1", "sixteen letters and more")
	f.Add("SLURM_PROCID=5 SLURM_NTASKS=7 SLURM_NODEID=2 SLURM_TASKS_PER_NODE=2(x3),1 SLURM_NODELIST=a[1-2]b[3]", "")
	f.Add("TUTTI_STORE=etcd://[::1]:2379 TUTTI_TIMEOUT=1e300 TUTTI_LEASE=9223372036 TUTTI_IFNAME=^a", "x")
	f.Add("JOB_COMPLETION_INDEX=1 TUTTI_SIZE=2 JOB_NAME=\xff", "0011")
	f.Add("RANK=3 WORLD_SIZE=4 MASTER_ADDR=a.b MASTER_PORT=1", "sixteen letters and more\r\n")
	f.Fuzz(func(t *testing.T, env, secret string) {
		get := vars(env)
		l, err := FromEnv(func(k string) string {
			switch k {
			case "TUTTI_SECRET", "TUTTI_STORE_PASSWORD":
				return secret
			case "TUTTI_SECRET_FILE":
				return ""
			case "TUTTI_STORE_USER":
				if secret != "" {
					return "u"
				}
				return ""
			}
			return get(k)
		})
		if err != nil {
			if len(secret) > 8 && !strings.Contains(env, secret) && strings.Contains(err.Error(), secret) &&
				!strings.Contains(fmt.Sprint(Variables()), secret) {
				t.Fatalf("the error contains the secret: %v", err)
			}
			return
		}
		if l.Rank < 0 || l.Rank >= l.Size || l.LocalRank < -1 || l.LocalSize > 0 && l.LocalRank >= l.LocalSize ||
			l.LocalSize > l.Size || l.Job != "" && CheckJob(l.Job) != nil ||
			l.MasterPort < 0 || l.MasterPort > 65535 || l.LeaseTTL < 0 || l.Secret != nil && len(l.Secret) < 16 {
			t.Fatalf("%q: %+v", env, l)
		}
	})
}

// Every TUTTI_ name in this package's source is in the table of variables.
func TestNoUnknownVariable(t *testing.T) {
	var known []string
	for _, v := range Variables() {
		known = append(known, v.Name)
	}
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range regexp.MustCompile(`TUTTI_[A-Z_]*[A-Z]`).FindAllString(string(b), -1) {
			if !slices.Contains(known, name) {
				t.Errorf("%s: %s is not in the table", f, name)
			}
		}
	}
}

func TestObservationSettings(t *testing.T) {
	l, err := FromEnv(vars("TUTTI_LOG_DIR=/var/log/x TUTTI_METRICS=127.0.0.1:9400-9407"))
	if err != nil || l.LogDir != "/var/log/x" || l.Metrics != "127.0.0.1:9400-9407" {
		t.Errorf("%+v, %v", l, err)
	}
	if _, err := FromEnv(vars("TUTTI_METRICS=9400")); err == nil ||
		!strings.Contains(err.Error(), `TUTTI_METRICS: address "9400": expected HOST:PORT`) {
		t.Error(err)
	}
}

// Ids of launchers that differ name different jobs, whatever they are made of.
func TestJobsOfDifferentIdsDiffer(t *testing.T) {
	long := strings.Repeat("x", 200)
	seen := map[string]string{}
	for _, id := range []string{"a-b", "a/b", "a b", "a.b", "a:b", long, long + "y", long[:128], long[:127],
		cleanJob("a/b"), cleanJob(cleanJob("a/b"))} {
		name := cleanJob(id)
		if err := CheckJob(name); err != nil {
			t.Errorf("%q: %v", id, err)
		}
		if other, ok := seen[name]; ok {
			t.Errorf("%q and %q are both job %q", other, id, name)
		}
		seen[name] = id
	}
	if name := cleanJob("slurm-42"); name != "slurm-42" {
		t.Errorf("an id that fits became %q", name)
	}
}
