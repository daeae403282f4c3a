package bootstrap

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"tutti/bootstrap/internal/pmi"
	"tutti/internal/ifname"
	"tutti/internal/ports"
	"tutti/internal/span"
	"tutti/internal/trust"
	"tutti/rdma"
)

// Launch holds what the environment says about this process's place in the job and the job's
// settings. A setting that is missing is its type's zero value, except for LocalRank, which is then
// -1.
type Launch struct {
	Rank, Size           int    // slot and number of slots; 0 of 1 without a launcher
	LocalRank, LocalSize int    // place among the ranks of this machine; -1 and 0: unknown
	Job                  string // name of the job, valid in a key; "" if there is none: see JobMissing
	Secret               []byte // the job's secret, nil if none is set
	Store                string // address of the store, see DialStore
	MasterAddr           string // host of rank 0 as the launcher names it, or ""
	MasterPort           int    // the launcher's rendezvous port there, 0 if unknown
	// Source is the origin: "tutti", "torchrun", "openmpi", "pmi", "pmix", "slurm", "kubernetes" or
	// "none".
	Source               string
	Transport, Algorithm string        // restrictions, as written
	Tuning               string        // path of a measured table of algorithms, as written
	SingleCopy           string        // as written
	PeerDevices          string        // as written
	StagingLimit         int           // bytes; 0: not set
	Interfaces, Ports    string        // as written, checked: see ifname.Parse and ports.ParseSpec
	RDMADevices, RDMAGID string        // as written, checked: see rdma.ParseDevices and rdma.ChooseGID
	RDMAPairs            int           // queue pairs for data on each RDMA port and link, 0: not set
	RDMA                 rdma.Settings // of the network of RDMA devices
	LogLevel             string        // "debug", "info", "warn", "error", "off" or ""
	LogDir               string        // directory of flight records, as written
	Metrics              string        // address to serve metrics at, checked: see ports.ParseAddr
	Timeout              time.Duration // 0: not set; negative: none
	LeaseTTL             time.Duration // 0: not set
	OnFailure            string        // "report" ("end"), "shrink", "retry" or ""
	MaxSize              int           // 0: not set
	Uniform, AutoAdmit   bool
	Standby              bool // a spare process, which has no rank yet
	Restarted            bool // this rank's process has died, and this is another one
	StoreUser            string
	StorePassword        string
	StoreCA              string // paths of PEM files
	StoreCert, StoreKey  string

	// For Meet.
	name  string      // of this launch, unique at any time; "": unknown
	named bool        // MasterAddr is the host of rank 0, and a port may be opened there
	pmi   pmi.Address // the launcher's key-value space
}

// Variable documents one environment variable.
type Variable struct{ Name, Meaning, Default string }

// Variables lists every TUTTI_* variable. It is the only list: README and `tutti env` print it.
func Variables() []Variable {
	return []Variable{
		{"TUTTI_RANK", "slot of this process, 0..TUTTI_SIZE-1; with TUTTI_SIZE it overrides every launcher",
			"the launcher's"},
		{"TUTTI_SIZE", "number of ranks; alone it completes a launcher that tells the rank but not the size " +
			"(Kubernetes, PMIx)", "the launcher's"},
		{"TUTTI_LOCAL_RANK", "place of this process among the ranks of its machine", "the launcher's"},
		{"TUTTI_LOCAL_SIZE", "number of ranks on this machine", "the launcher's"},
		{"TUTTI_JOB", "name of the job, under which its ranks meet in the store: letters, digits, '.', '_', '-', " +
			"at most 128",
			"from the launcher's variables; without any, it must be set"},
		{"TUTTI_STORE", "address of the store: tutti://HOST:PORT (embedded by tutti run), etcd://HOST:PORT,… or " +
			"etcds://HOST:PORT,… (a site's own, plain or TLS)", "none"},
		{"TUTTI_SECRET", "the job's secret, which every connection proves to know: at least 16 bytes of text, or " +
			"at least 32 hex digits", "none"},
		{"TUTTI_SECRET_FILE", "file that holds the secret, in the same form, instead of TUTTI_SECRET", "none"},
		{"TUTTI_TRANSPORT", "transports to use: auto, or names separated by commas, the preferred " +
			"one first", "auto"},
		{"TUTTI_BIND", "how tutti run binds ranks to processors: share, each to its part of them; core, each to " +
			"one; or none", "share"},
		{"TUTTI_ALGO", "algorithm to force where the collective has it, the same at all ranks", "by size and topology"},
		{"TUTTI_TUNE", "file with measured choices of algorithms, written by tutti tune; off: none",
			"tutti/tune.json in $XDG_CONFIG_HOME or ~/.config, if it exists"},
		{"TUTTI_SINGLE_COPY", "reading plain memory straight from processes of the same machine, where the system " +
			"permits it: auto, off, or on, without measuring whether it is faster", "auto"},
		{"TUTTI_PEER_DEVICES", "loading from the memory of other ranks' GPUs in place, where they reach each other: " +
			"auto or off", "auto"},
		{"TUTTI_STAGING_LIMIT", "host memory that started collectives of one job on the memory of one GPU copy " +
			"through at a time, in MiB: more of them wait", "1024"},
		{"TUTTI_IFNAME", "network interfaces to use: names, NAME*, addresses, networks; ^ excludes (^docker0,lo)",
			"all that are up"},
		{"TUTTI_PORT", "ports to listen on: 29500 (and the next two, for the transports tcp and rdma: ranks of one " +
			"machine need ports that are three apart), a range 29500-29600 (several groups of a process need " +
			"one), or 0 for the kernel's choice", "0"},
		{"TUTTI_RDMA_DEVICES", "RDMA devices to use, each perhaps with a port: mlx5_0,mlx5_1:1; a name stands for " +
			"all that begin so; = before the list: exactly these; ^: all others", "all"},
		{"TUTTI_RDMA_GID", "address of an RDMA port that peers are given: an index of its table, an address, or a " +
			"network (10.0.0.0/8)", "the best: RoCE v2, routed, IPv4"},
		{"TUTTI_RDMA_QPS", "queue pairs for data on each RDMA port and link, 1 to 16", "1"},
		{"TUTTI_RDMA_TC",
			"traffic class of packets with an address, as all of RoCE have: 0 to 255 (DSCP times 4)", "0"},
		{"TUTTI_RDMA_SL", "service level of packets, and on RoCE their priority, 0 to 15", "0"},
		{"TUTTI_RDMA_PKEY", "index of the partition key in the table of an RDMA port", "0"},
		{"TUTTI_RDMA_TIMEOUT", "when a packet without an answer is repeated, 6 times in all: n from 12 to 31 stands " +
			"for 4.096 us * 2^n", "16 (268 ms); endpoints: 14 (67 ms)"},
		{"TUTTI_RDMA_SQ_TIMEOUT", "how long a batch of a program that uses package rdma/queue waits for room in " +
			"the send queues before it is refused: a duration (10ms) or seconds; negative: not at all. Endpoints " +
			"submit a refused batch again; links of ranks have no such batches", "10ms"},
		{"TUTTI_TIMEOUT", "bound of every operation: a duration (90s, 5m) or seconds; negative: none", "5m"},
		{"TUTTI_LEASE", "how long the store takes a silent rank for alive, whole seconds: a duration or seconds", "3s"},
		{"TUTTI_ON_FAILURE", "when a rank is lost: report (the program calls Recover), shrink or retry; the same " +
			"at all ranks, as the three below", "report"},
		{"TUTTI_UNIFORM",
			"1: every collective has the same outcome at all survivors, for a small exchange after each", "0"},
		{"TUTTI_MAX_SIZE", "number of ranks that the job may grow to", "TUTTI_SIZE"},
		{"TUTTI_AUTO_ADMIT", "1: waiting ranks are admitted between two operations, without Admit", "0"},
		{"TUTTI_STANDBY", "number of this spare process, which has no rank: it waits for a slot that becomes free",
			"none"},
		{"TUTTI_RESTART", "how often this rank was started again: if another process has its slot by then, it waits " +
			"until that is gone", "none; tutti run --max-restarts sets it"},
		{"TUTTI_LOG", "log level on standard error: debug, info, warn, error or off", "warn"},
		{"TUTTI_LOG_DIR", "directory for flight records: the last operations of a rank, in files that outlive it; " +
			"also written on a timeout and on SIGUSR1", "none; tutti run --log-dir sets it"},
		{"TUTTI_METRICS", "address at which a rank serves Prometheus metrics: 127.0.0.1:9400, a range " +
			"127.0.0.1:9400-9407 (port and local rank), or :0; groups of a process share it", "none"},
		{"TUTTI_STORE_USER", "user of a site's etcd", "none"},
		{"TUTTI_STORE_PASSWORD", "that user's password", "none"},
		{"TUTTI_STORE_CA", "PEM file of the certificate authorities of an etcds:// store", "the system's"},
		{"TUTTI_STORE_CERT", "PEM file of the client certificate for an etcds:// store", "none"},
		{"TUTTI_STORE_KEY", "PEM file of that certificate's key", "none"},
	}
}

// launcher describes how a launcher tells a process its place. Of each list the first variable that
// is set counts.
type launcher struct {
	source                           string
	rank, size, localRank, localSize []string
	sizeElsewhere                    bool // the launcher may leave the size to TUTTI_SIZE
	job                              []string
}

// launchers in order of precedence. torchrun's set wins over everything else. mpirun inside a Slurm
// allocation leaves Slurm's variables of the batch step in the environment, which count nodes and
// not ranks: hence the MPI launchers come before Slurm.
var launchers = []launcher{
	{source: "tutti", rank: []string{"TUTTI_RANK"}, size: []string{"TUTTI_SIZE"},
		localRank: []string{"TUTTI_LOCAL_RANK"}, localSize: []string{"TUTTI_LOCAL_SIZE"}},
	{source: "torchrun", rank: []string{"RANK"}, size: []string{"WORLD_SIZE"}, localRank: []string{"LOCAL_RANK"},
		localSize: []string{"LOCAL_WORLD_SIZE"},
		job:       []string{"TORCHELASTIC_RUN_ID"}},
	{source: "openmpi", rank: []string{"OMPI_COMM_WORLD_RANK"}, size: []string{"OMPI_COMM_WORLD_SIZE"},
		localRank: []string{"OMPI_COMM_WORLD_LOCAL_RANK"},
		localSize: []string{"OMPI_COMM_WORLD_LOCAL_SIZE"}, job: []string{"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}},
	{source: "pmi", rank: []string{"PMI_RANK"}, size: []string{"PMI_SIZE"},
		localRank: []string{"PMI_LOCAL_RANK", "MPI_LOCALRANKID"},
		localSize: []string{"PMI_LOCAL_SIZE", "MPI_LOCALNRANKS"},
		job:       []string{"PMI_JOBID", "PMI_KVSNAME", "PALS_APID", "FLUX_JOB_ID"}},
	{source: "pmi", rank: []string{"PMI_ID"}, sizeElsewhere: true, job: []string{"PMI_JOBID"}}, // mpiexec -pmi-port
	{source: "slurm", rank: []string{"SLURM_PROCID"}, size: []string{"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS",
		"SLURM_NPROCS"}, localRank: []string{"SLURM_LOCALID"},
		job: []string{"SLURM_JOB_ID", "SLURM_JOBID"}},
	{source: "pmix", rank: []string{"PMIX_RANK"}, size: []string{"PMIX_SIZE"}, sizeElsewhere: true,
		job: []string{"PMIX_NAMESPACE"}},
	{source: "kubernetes", rank: []string{"JOB_COMPLETION_INDEX"}, size: []string{"JOB_COMPLETIONS"},
		sizeElsewhere: true, job: []string{"JOB_NAME"}},
}

// FromEnv reads the environment through getenv (os.Getenv; "" means not set). Its only other inputs
// are the file of TUTTI_SECRET_FILE and, to name a job, the command lines of this process's
// ancestors with MPICH's mpiexec, the namespace of its pod in Kubernetes and, where ranks meet at a
// loopback address, its machine and network namespace. Of several launchers the first complete one
// counts, in this order: TUTTI_RANK and TUTTI_SIZE; RANK and WORLD_SIZE as torchrun sets them; Open
// MPI; PMI (MPICH, Hydra, Intel MPI, Cray); Slurm; PMIx; a Kubernetes indexed job. An incomplete
// set is a *PlaceError that names what is missing, a contradiction one that names both variables.
// Without any the process is rank 0 of 1; with a *PlaceError FromEnv returns that, and the
// settings. No error contains a secret or a password.
func FromEnv(getenv func(string) string) (Launch, error) {
	e := env{get: WithoutServices(getenv)}
	l := Launch{Size: 1, LocalRank: -1, Source: "none"}
	var err error
	if _, l.MaxSize, err = e.number([]string{"TUTTI_MAX_SIZE"}, 1); err != nil {
		return Launch{}, err
	}
	alone := l
	if err = e.place(&l); err != nil {
		l, err = alone, &PlaceError{err}
	}
	if wrong := e.settings(&l); wrong != nil {
		return Launch{}, wrong
	}
	return l, err
}

// PlaceError says why the variables of the launchers do not tell this process's place in the job.
type PlaceError struct{ Err error }

func (e *PlaceError) Error() string { return e.Err.Error() }
func (e *PlaceError) Unwrap() error { return e.Err }

type env struct{ get func(string) string }

// WithoutServices returns getenv without what Kubernetes sets for services: it tells the containers
// of a namespace about one called tutti, or master, by TUTTI_PORT=tcp://IP:PORT, or MASTER_PORT.
func WithoutServices(getenv func(string) string) func(string) string {
	return func(name string) string {
		v := getenv(name)
		if scheme, _, ok := strings.Cut(v, "://"); ok && strings.HasSuffix(name, "_PORT") &&
			(scheme == "tcp" || scheme == "udp" || scheme == "sctp") {
			return ""
		}
		return v
	}
}

// first returns the first of names that is set.
func (e env) first(names []string) (name, value string) {
	for _, n := range names {
		if v := strings.TrimSpace(e.get(n)); v != "" {
			return n, v
		}
	}
	return "", ""
}

// number reads the first of names that is set as a count from lo on; name is "" if none is.
func (e env) number(names []string, lo int) (name string, n int, err error) {
	name, v := e.first(names)
	if name == "" {
		return "", 0, nil
	}
	n, err = strconv.Atoi(v)
	if err != nil || n < lo || n > 1<<24 {
		return "", 0, fmt.Errorf("environment: %s=%q: expected a whole number of at least %d", name, clip(v), lo)
	}
	return name, n, nil
}

func clip(s string) string { return s[:min(len(s), 64)] }

// place finds the launcher that counts and reads rank, size, local place, master and job.
func (e env) place(l *Launch) error {
	ownSize, size, err := e.number([]string{"TUTTI_SIZE"}, 1)
	if err != nil {
		return err
	}
	var by *launcher
	if name, _, err := e.number([]string{"TUTTI_STANDBY"}, 0); err != nil {
		return err
	} else if name != "" {
		if ownSize == "" {
			return errors.New("environment: TUTTI_STANDBY is set but TUTTI_SIZE is not: set both")
		}
		l.Standby, l.Rank, l.Size, l.Source = true, -1, size, "tutti"
		if err := e.local(l, launchers[0], ownSize); err != nil {
			return err
		}
		return e.master(l)
	}
	for i, k := range launchers {
		rankName, rank, err := e.number(k.rank, 0)
		if err != nil {
			return err
		}
		if _, job := e.first(k.job); k.source == "slurm" && job != "" && e.slurmStep() == "" {
			if rank > 0 { // alone, rank 0 is taken for the script below
				return fmt.Errorf("environment: %s=%d says which rank this is, but SLURM_STEP_ID does not say of "+
					"which step: set both, as srun does, or neither", rankName, rank)
			}
			continue // the script of a batch job has the variables of a rank, but is none
		}
		sizeName, n, err := e.number(k.size, 1)
		if err != nil {
			return err
		}
		switch own := k.source == "tutti"; {
		case rankName == "" && sizeName == "":
			continue
		case own && rankName == "":
			continue // TUTTI_SIZE alone completes or confirms a launcher's set
		case rankName == "" && (k.source == "slurm" || k.sizeElsewhere):
			continue // salloc's shell has SLURM_NTASKS and no rank: not a step
		case rankName == "":
			return fmt.Errorf("environment: %s=%d is set but %s is not: set both, as the launcher does, or neither",
				sizeName, n, k.rank[0])
		case sizeName == "" && k.sizeElsewhere && ownSize == "":
			return fmt.Errorf("environment: %s=%d says which rank this is, but nothing says how many there are: "+
				"set TUTTI_SIZE", rankName, rank)
		case sizeName == "" && k.sizeElsewhere:
			sizeName, n = ownSize, size
		case sizeName == "":
			return fmt.Errorf("environment: %s=%d is set but %s is not: set both, as the launcher does, or neither",
				rankName, rank, k.size[0])
		}
		if ownSize != "" && n != size {
			return fmt.Errorf("environment: TUTTI_SIZE=%d contradicts %s=%d", size, sizeName, n)
		}
		if most := max(n, l.MaxSize); rank >= most && n < l.MaxSize {
			return fmt.Errorf("environment: %s=%d contradicts TUTTI_MAX_SIZE=%d: ranks are 0..%d", rankName, rank, most,
				most-1)
		} else if rank >= most {
			return fmt.Errorf("environment: %s=%d contradicts %s=%d: ranks are 0..%d", rankName, rank, sizeName, n, n-1)
		}
		l.Rank, l.Size, l.Source, by = rank, n, k.source, &launchers[i]
		if k.source == "pmi" {
			l.pmi = pmi.FromEnv(e.get)
		}
		if err := e.local(l, k, sizeName); err != nil {
			return err
		}
		break
	}
	if by == nil && ownSize != "" && size > 1 {
		return fmt.Errorf("environment: TUTTI_SIZE=%d is set, but nothing says which rank this is: set "+
			"TUTTI_RANK or use a launcher", size)
	}
	if err := e.master(l); err != nil || by == nil {
		return err
	}
	if name := e.job(l, by); name != "" {
		l.name = cleanJob(by.source + "-" + name)
		l.Job = l.name
	}
	_, torchrun := e.first([]string{"TORCHELASTIC_RUN_ID"}) // other launchers set RANK and MASTER_ADDR, too
	l.named = l.MasterAddr != "" && (by.source == "slurm" || torchrun != "")
	return nil
}

// job returns a name for the launch from the launcher's variables, different from all other
// launches that use the same store at the same time; "" if there are no such variables.
func (e env) job(l *Launch, by *launcher) string {
	if name, v := e.first(by.job); name != "" && v != "none" { // torchrun's default is "none"
		if step := e.slurmStep(); by.source == "slurm" && step != "" {
			v += "." + step
		}
		if _, cluster := e.first([]string{"SLURM_CLUSTER_NAME"}); by.source == "slurm" && cluster != "" {
			v += "." + cluster
		}
		// Open MPI 4 names its launches by 16 bits, but also draws a random key for each.
		key := strings.TrimSpace(e.get("OMPI_MCA_orte_precondition_transports"))
		if by.source == "openmpi" && key != "" {
			v += "." + key
		}
		if by.source == "kubernetes" || by.source == "torchrun" {
			v = inNamespace(v)
		}
		return v
	}
	switch by.source {
	case "pmi":
		if at := hydra(os.Getppid()); at != "" {
			return at
		}
	case "kubernetes": // the name of an indexed job's pod is JOB-INDEX
		if v, ok := strings.CutSuffix(strings.TrimSpace(e.get("HOSTNAME")), "-"+strconv.Itoa(l.Rank)); ok && v != "" {
			return inNamespace(v)
		}
	}
	if l.MasterAddr != "" && l.MasterPort > 0 {
		return meetingPoint(l.MasterAddr, strconv.Itoa(l.MasterPort))
	}
	return ""
}

// namespaceFile is where Kubernetes says in which namespace a pod is. All pods of a job have it, or
// none.
var namespaceFile = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

// inNamespace returns a name that others of a namespace of Kubernetes do not have, with that
// namespace, if this process is in a pod. A job of which only some ranks are in pods, or in pods
// with the token of a service account, needs TUTTI_JOB.
func inNamespace(job string) string {
	b, err := os.ReadFile(namespaceFile)
	if ns := strings.TrimSpace(string(b)); err == nil && ns != "" {
		return ns + "." + job
	}
	return job
}

// meetingPoint returns a name for the meeting point of a launch, which is occupied while it runs.
// In Kubernetes every namespace may have a host of a name with less than two dots (SERVICE or
// POD.SERVICE); a pod takes such a name for one of its own namespace.
func meetingPoint(host, port string) string {
	name := host + "-" + port
	ip, err := netip.ParseAddr(host)
	switch {
	case err == nil && ip.IsLoopback() || strings.EqualFold(host, "localhost"):
		sum := sha256.Sum256([]byte(here()[2])) // of this network namespace of this machine
		name += "-" + hex.EncodeToString(sum[:4])
	case err != nil && strings.Count(host, ".") < 2:
		name = inNamespace(name)
	}
	return name
}

// hydra returns a name for the launch of MPICH's and Intel MPI's mpiexec that process pid belongs
// to, or "". No variable names the launch, but the proxies between mpiexec and the ranks know, on
// all hosts, where mpiexec listens.
func hydra(pid int) string {
	for range 16 { // shells and scripts may be in between
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err != nil {
			return ""
		}
		if at := hydraProxy(strings.Split(string(b), "\x00")); at != "" {
			return at
		}
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			return ""
		}
		// pid (name) state ppid …, and the name may contain anything.
		fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		if len(fields) < 2 {
			return ""
		}
		if pid, err = strconv.Atoi(fields[1]); err != nil || pid < 2 {
			return ""
		}
	}
	return ""
}

// hydraProxy returns mpiexec's address from a proxy's command line; "": it is no proxy.
func hydraProxy(args []string) string {
	if base := filepath.Base(args[0]); base != "hydra_pmi_proxy" && base != "hydra_bstrap_proxy" {
		return ""
	}
	value := func(flag string) string {
		if i := slices.Index(args, flag); i >= 0 && i+1 < len(args) {
			return args[i+1]
		}
		return ""
	}
	host, port, err := net.SplitHostPort(value("--control-port"))
	if err != nil {
		host, port = value("--upstream-host"), value("--upstream-port")
	}
	if host == "" || port == "" {
		return ""
	}
	return meetingPoint(host, port)
}

// local reads the place on this machine, which every launcher may omit.
func (e env) local(l *Launch, k launcher, sizeName string) error {
	own := launchers[0]
	rankName, rank, err := e.number(append(own.localRank[:1:1], k.localRank...), 0)
	if err != nil {
		return err
	}
	localName, size, err := e.number(append(own.localSize[:1:1], k.localSize...), 1)
	if err != nil {
		return err
	}
	if k.source == "slurm" && localName == "" {
		if localName, size, err = e.slurmTasksHere(); err != nil {
			return err
		}
	}
	switch {
	case localName != "" && size > max(l.Size, l.MaxSize):
		return fmt.Errorf("environment: %s=%d contradicts %s=%d: a machine cannot have more ranks than the job",
			localName, size, sizeName, l.Size)
	case rankName != "" && localName != "" && rank >= size:
		return fmt.Errorf("environment: %s=%d contradicts %s=%d: local ranks are 0..%d", rankName, rank, localName,
			size, size-1)
	case rankName != "" && rank >= max(l.Size, l.MaxSize):
		return fmt.Errorf("environment: %s=%d contradicts %s=%d: a machine cannot have more ranks than the job",
			rankName, rank, sizeName, l.Size)
	}
	if rankName != "" {
		l.LocalRank = rank
	}
	l.LocalSize = size
	return nil
}

// slurmStep returns the number of the step of Slurm to which this process belongs. "" stands for
// none: batch scripts and interactive shells have no number, or one that is no step's.
func (e env) slurmStep() string {
	const noSteps = 0xfffffff0 // from here on
	_, v := e.first([]string{"SLURM_STEP_ID", "SLURM_STEPID"})
	if n, err := strconv.ParseUint(v, 10, 32); err != nil || n >= noSteps {
		return ""
	}
	return v
}

// slurmTasksHere reads this node's entry of SLURM_STEP_TASKS_PER_NODE, which has the form
// "2(x3),1"; size 0 if it is not set.
func (e env) slurmTasksHere() (name string, size int, err error) {
	name, v := e.first([]string{"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"})
	nodeName, node, err := e.number([]string{"SLURM_NODEID"}, 0)
	if err != nil || name == "" || nodeName == "" {
		return "", 0, err
	}
	for part := range strings.SplitSeq(v, ",") {
		tasks, times, repeated := strings.Cut(part, "(x")
		n, err := strconv.Atoi(tasks)
		r := 1
		if repeated && err == nil {
			r, err = strconv.Atoi(strings.TrimSuffix(times, ")"))
		}
		if err != nil || n < 1 || r < 1 {
			return "", 0, fmt.Errorf("environment: %s=%q: expected a list such as 2(x3),1", name, clip(v))
		}
		if node -= r; node < 0 {
			return name, n, nil
		}
	}
	return "", 0, fmt.Errorf("environment: %s=%q has no entry for SLURM_NODEID=%s", name, clip(v),
		strings.TrimSpace(e.get("SLURM_NODEID")))
}

func (e env) master(l *Launch) error {
	_, addr := e.first([]string{"MASTER_ADDR"})
	if strings.HasPrefix(addr, "[") && strings.HasSuffix(addr, "]") { // an IPv6 address, as in URLs
		addr = addr[1 : len(addr)-1]
	}
	if addr == "" && l.Source == "slurm" {
		_, list := e.first([]string{"SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"})
		if hosts, err := ExpandHosts(list); err == nil {
			addr = hosts[0]
		}
	}
	portName, port, err := e.number([]string{"MASTER_PORT"}, 1)
	switch {
	case addr == "" && l.Source != "torchrun": // a port alone says nothing
		return nil
	case err != nil:
		return err
	case port > 65535:
		return fmt.Errorf("environment: MASTER_PORT=%d: expected a port, 1..65535", port)
	case addr != "" && portName == "" && l.Source == "torchrun":
		return fmt.Errorf("environment: MASTER_ADDR=%s is set but MASTER_PORT is not: set both or neither", clip(addr))
	case addr == "" && portName != "":
		return fmt.Errorf("environment: MASTER_PORT=%d is set but MASTER_ADDR is not: set both or neither", port)
	}
	l.MasterAddr, l.MasterPort = addr, port
	return nil
}

var jobName = regexp.MustCompile(`^[A-Za-z0-9._-]{1,128}$`)

// CheckJob validates a job's name, which becomes part of keys.
func CheckJob(name string) error {
	if !jobName.MatchString(name) {
		return fmt.Errorf("job name %q: expected 1 to 128 letters, digits, '.', '_' or '-'", clip(name))
	}
	return nil
}

// JobMissing returns the error for a job without a name. In a shared store it could not be told
// from other jobs without a name.
func (l Launch) JobMissing() error {
	who := "nothing names the job"
	if l.Source != "none" && l.Source != "tutti" && l.Source != "" {
		who = fmt.Sprintf("the launcher (%s) does not name the job", l.Source)
	}
	return fmt.Errorf("%s: set TUTTI_JOB, the same for all its ranks and another for every job that uses the store",
		who)
}

// shortened matches the end of names that cleanJob has shortened.
var shortened = regexp.MustCompile(`\.[0-9a-f]{16}$`)

// cleanJob makes a launcher's job id valid in a key. Different ids stay different: an invalid one
// is cut, and ends in a hash of the whole.
func cleanJob(s string) string {
	if jobName.MatchString(s) && !shortened.MatchString(s) {
		return s
	}
	sum := sha256.Sum256([]byte(s))
	b := []byte(s[:min(len(s), 128-1-16)])
	for i, c := range b {
		if !jobName.Match([]byte{c}) {
			b[i] = '-'
		}
	}
	return string(b) + "." + hex.EncodeToString(sum[:8])
}

func (e env) settings(l *Launch) error {
	str := func(name string) string { return strings.TrimSpace(e.get(name)) }
	l.Transport, l.Algorithm, l.Tuning = str("TUTTI_TRANSPORT"), str("TUTTI_ALGO"), str("TUTTI_TUNE")
	l.SingleCopy, l.PeerDevices = str("TUTTI_SINGLE_COPY"), str("TUTTI_PEER_DEVICES")
	l.Store, l.StoreUser, l.StorePassword = str("TUTTI_STORE"), str("TUTTI_STORE_USER"), e.get("TUTTI_STORE_PASSWORD")
	l.StoreCA, l.StoreCert, l.StoreKey = str("TUTTI_STORE_CA"), str("TUTTI_STORE_CERT"), str("TUTTI_STORE_KEY")
	l.Interfaces, l.Ports, l.LogLevel = str("TUTTI_IFNAME"), str("TUTTI_PORT"), strings.ToLower(str("TUTTI_LOG"))
	l.LogDir, l.Metrics = e.get("TUTTI_LOG_DIR"), str("TUTTI_METRICS")
	l.RDMADevices, l.RDMAGID = str("TUTTI_RDMA_DEVICES"), str("TUTTI_RDMA_GID")
	if job := str("TUTTI_JOB"); job != "" {
		if err := CheckJob(job); err != nil {
			return fmt.Errorf("environment: TUTTI_JOB: %w", err)
		}
		if l.Job = job; l.name == "" {
			l.name = job
		}
	}
	if l.Store != "" {
		if _, err := ParseStore(l.Store); err != nil {
			return fmt.Errorf("environment: TUTTI_STORE: %w", err)
		}
	}
	for _, pair := range [][2]string{{"TUTTI_STORE_USER", "TUTTI_STORE_PASSWORD"},
		{"TUTTI_STORE_CERT", "TUTTI_STORE_KEY"}} {
		if a, b := str(pair[0]) != "", e.get(pair[1]) != ""; a != b {
			if b {
				pair[0], pair[1] = pair[1], pair[0]
			}
			return fmt.Errorf("environment: %s is set but %s is not: set both or neither", pair[0], pair[1])
		}
	}
	if _, err := ifname.Parse(l.Interfaces); err != nil {
		return fmt.Errorf("environment: TUTTI_IFNAME: %w", err)
	}
	if _, err := ports.ParseSpec(l.Ports); err != nil {
		return fmt.Errorf("environment: TUTTI_PORT: %w", err)
	}
	if _, err := rdma.ParseDevices(l.RDMADevices); err != nil {
		return fmt.Errorf("environment: TUTTI_RDMA_DEVICES: %w", err)
	}
	if err := rdma.CheckGID(l.RDMAGID); err != nil {
		return fmt.Errorf("environment: TUTTI_RDMA_GID: %w", err)
	}
	if v := str("TUTTI_RDMA_QPS"); v != "" {
		n, err := strconv.Atoi(v)
		if err != nil || n < 1 || n > 16 {
			return fmt.Errorf("environment: TUTTI_RDMA_QPS=%q: expected a number from 1 to 16", clip(v))
		}
		l.RDMAPairs = n
	}
	_, restarts, err := e.number([]string{"TUTTI_RESTART"}, 0)
	if err != nil {
		return err
	}
	l.Restarted = restarts > 0
	if l.RDMA, err = rdma.ParseSettings(e.get); err != nil {
		return fmt.Errorf("environment: %w", err)
	}
	if v := str("TUTTI_STAGING_LIMIT"); v != "" {
		n, err := strconv.ParseUint(v, 10, 32)
		if err != nil || n == 0 {
			return fmt.Errorf("environment: TUTTI_STAGING_LIMIT=%q: expected a number of MiB", clip(v))
		}
		l.StagingLimit = int(n) << 20
	}
	if l.Metrics != "" {
		if _, _, err := ports.ParseAddr(l.Metrics); err != nil {
			return fmt.Errorf("environment: TUTTI_METRICS: %w", err)
		}
	}
	switch l.OnFailure = strings.ToLower(str("TUTTI_ON_FAILURE")); l.OnFailure {
	case "", "end", "report", "shrink", "retry":
	default:
		return fmt.Errorf("environment: TUTTI_ON_FAILURE=%q: expected report, shrink or retry", clip(l.OnFailure))
	}
	for name, to := range map[string]*bool{"TUTTI_UNIFORM": &l.Uniform, "TUTTI_AUTO_ADMIT": &l.AutoAdmit} {
		if v := str(name); v != "" {
			b, err := strconv.ParseBool(v)
			if err != nil {
				return fmt.Errorf("environment: %s=%q: expected 1 or 0", name, clip(v))
			}
			*to = b
		}
	}
	switch l.LogLevel {
	case "", "debug", "info", "warn", "error", "off":
	default:
		return fmt.Errorf("environment: TUTTI_LOG=%q: expected debug, info, warn, error or off", clip(l.LogLevel))
	}
	if l.Timeout, err = duration("TUTTI_TIMEOUT", str("TUTTI_TIMEOUT")); err != nil {
		return err
	}
	if l.LeaseTTL, err = duration("TUTTI_LEASE", str("TUTTI_LEASE")); err != nil {
		return err
	}
	if l.LeaseTTL < 0 || l.LeaseTTL%time.Second != 0 {
		return fmt.Errorf("environment: TUTTI_LEASE=%v: expected whole seconds, at least one", l.LeaseTTL)
	}
	// rdma/queue reads it: programs without ranks use that, too.
	if _, err = duration("TUTTI_RDMA_SQ_TIMEOUT", str("TUTTI_RDMA_SQ_TIMEOUT")); err != nil {
		return err
	}
	l.Secret, err = e.secret()
	return err
}

// duration reads "90s" or "90"; a value that is set is never 0.
func duration(name, s string) (time.Duration, error) {
	d, err := span.Parse(s)
	if err != nil {
		return 0, fmt.Errorf("environment: %s=%q: %w", name, clip(s), err)
	}
	return d, nil
}

// trimLine returns s without the ends of lines after it. Files and Kubernetes have secrets with
// one.
func trimLine(s string) string { return strings.TrimRight(s, "\r\n") }

// maxSecretFile bounds the size of a file with a secret in bytes.
const maxSecretFile = 4096

// ReadSecret reads the textual form of a secret, or of a client's credential, from a file, without
// the ends of lines after it. The error names the file.
func ReadSecret(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxSecretFile+1))
	if err != nil {
		return "", err
	}
	if len(b) > maxSecretFile {
		return "", fmt.Errorf("%s is longer than %d bytes", path, maxSecretFile)
	}
	return trimLine(string(b)), nil
}

// SecretFromEnv returns the textual form of the secret, or of a client's credential, that
// TUTTI_SECRET or the file of TUTTI_SECRET_FILE holds, without the ends of lines after it. name is
// the variable; "": none is set. The error names the variable.
func SecretFromEnv(getenv func(string) string) (text, name string, err error) {
	text, path := trimLine(getenv("TUTTI_SECRET")), getenv("TUTTI_SECRET_FILE")
	switch {
	case text != "" && path != "":
		return "", "", errors.New("TUTTI_SECRET and TUTTI_SECRET_FILE are both set: set one of them")
	case text != "":
		return text, "TUTTI_SECRET", nil
	case path == "":
		return "", "", nil
	}
	if text, err = ReadSecret(path); err != nil {
		return "", "", fmt.Errorf("TUTTI_SECRET_FILE: %w", err)
	}
	return text, "TUTTI_SECRET_FILE", nil
}

func (e env) secret() ([]byte, error) {
	text, name, err := SecretFromEnv(e.get)
	if err != nil || name == "" {
		if err != nil {
			err = fmt.Errorf("environment: %w", err)
		}
		return nil, err
	}
	s, err := ParseSecret(text)
	if err != nil {
		return nil, fmt.Errorf("environment: %s: %w", name, err)
	}
	return s, nil
}

// ParseSecret reads a job's secret from its textual form: hex digits of at least 16 bytes, or any
// other text of that length, taken literally, but no client's credential: see Credential. The error
// contains neither.
func ParseSecret(text string) ([]byte, error) { return trust.ParseSecret(text) }

// NewSecret returns a new secret in the textual form of ParseSecret and TUTTI_SECRET: 64 hex
// digits, 256 random bits.
func NewSecret() string {
	var b [32]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// Credential is what a program proves to endpoints: the job's secret, or the key of a client.
type Credential = trust.Credential

// ParseCredential reads a credential from its textual form. That of a client is client:NAME:KEY, as
// NewCredential writes it, with the key in hex digits. Everything else is a job's secret: see
// ParseSecret. The error contains nothing of the text.
func ParseCredential(text string) (Credential, error) { return trust.ParseCredential(text) }

// NewCredential returns the credential of a client of the job with that secret, in the textual form
// of ParseCredential. It is always the same. It opens endpoints, but no rank's service, and the
// secret does not follow from it.
func NewCredential(secret []byte, client string) (string, error) {
	return trust.NewCredential(secret, client)
}

// StoreAddr is a parsed store address.
type StoreAddr struct {
	Scheme    string   // "tutti" (embedded, every connection proves the job's secret), "etcd" (plain) or "etcds" (TLS)
	Endpoints []string // HOST:PORT each, at least one
}

// String returns the address in its textual form.
func (a StoreAddr) String() string { return a.Scheme + "://" + strings.Join(a.Endpoints, ",") }

// ParseStore reads tutti://HOST:PORT, etcd://HOST:PORT,HOST:PORT or etcds://…; etcd's port is
// optional (2379).
func ParseStore(s string) (StoreAddr, error) {
	scheme, rest, ok := strings.Cut(s, "://")
	if !ok || scheme != "tutti" && scheme != "etcd" && scheme != "etcds" {
		return StoreAddr{}, fmt.Errorf("store %q: expected tutti://HOST:PORT, etcd://HOST:PORT,… or "+
			"etcds://HOST:PORT,…", clip(s))
	}
	a := StoreAddr{Scheme: scheme}
	for ep := range strings.SplitSeq(strings.TrimSuffix(rest, "/"), ",") {
		host, port, err := splitEndpoint(ep)
		if err == nil && port == "" && scheme != "tutti" {
			port = "2379"
		}
		n, perr := strconv.ParseUint(port, 10, 16)
		if err != nil || perr != nil || n == 0 {
			return StoreAddr{}, fmt.Errorf("store %q: endpoint %q: expected HOST:PORT", clip(s), clip(ep))
		}
		if strings.Contains(host, ":") {
			host = "[" + host + "]"
		}
		a.Endpoints = append(a.Endpoints, host+":"+strconv.FormatUint(n, 10))
	}
	return a, nil
}

var hostName = regexp.MustCompile(`^[A-Za-z0-9_]([A-Za-z0-9._-]{0,253})$`)

func splitEndpoint(ep string) (host, port string, err error) {
	if inside, ok := strings.CutPrefix(ep, "["); ok {
		h, rest, closed := strings.Cut(inside, "]")
		if a, err := netip.ParseAddr(h); !closed || err != nil || !a.Is6() || rest != "" && rest[0] != ':' {
			return "", "", errors.New("bad address")
		}
		return h, strings.TrimPrefix(rest, ":"), nil
	}
	host, port, _ = strings.Cut(ep, ":")
	if !hostName.MatchString(host) {
		return "", "", errors.New("bad host")
	}
	return host, port, nil
}
