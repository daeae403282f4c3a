package main

import (
	"cmp"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"tutti/bootstrap"
	"tutti/cmd/tutti/internal/launch"
	"tutti/p2p/registry"
)

type runFlags struct {
	n, nodes, node        int
	rdzv, store, job      string
	secretFile, transport string
	timeout, grace        time.Duration
	logDir, onFailure     string
	bind                  string
	restarts, standby     int
	autoAdmit             bool
	noPrefix, stdin       bool
	verbose, quiet        bool
}

func newRun() *cobra.Command {
	var f runFlags
	c := &cobra.Command{
		Use:   "run -n N [flags] [--] PROGRAM [ARGS]",
		Short: "Start a program as the ranks of a job",
		Long: `Start PROGRAM N times as the ranks of a job, show their output, and end them all when one fails.

A .go file or a directory of Go files is built first. No process that a rank has started outlives the
command, even if the command is killed. The exit code is 0, or that of the rank that failed first (128+S
if it was killed by signal S; if it exited while a signal was killing another rank of this node, that
one's on this node). With --on-failure shrink or retry the others continue when a rank dies; the exit
code is then 0 if a rank succeeds and so do all that are alive then. The command has codes of its own:
1 if the job could not be started or kept running, 2 for wrong flags, 126 or 127 if PROGRAM cannot be
run or found, 141 if nobody reads the output any more, and 128+S if signal S interrupted it and no rank
gave another code.

SIGINT, SIGTERM, SIGHUP and SIGQUIT are passed on to the ranks, which have --grace to end before they
are killed. A second one kills them at once, unless it is a SIGHUP, or the same signal (or SIGTERM after
SIGHUP) within half a second: timeout, sudo and terminals send two. SIGUSR1 and SIGUSR2 are passed on to
those processes of the ranks that handle or block them. Ctrl-Z (SIGTSTP) does not stop a command that
serves the job's store: the ranks need it.

Each rank runs on an equal share of the processors that the command may run on, whole cores of one
NUMA node where there are enough; ranks share processors only if there are more ranks than these.
--verbose prints the shares; --bind none lets all ranks run on all processors.

Started once on each node by srun, mpirun or mpiexec, it takes the number of nodes, its own number and,
except from Open MPI on several hosts, the meeting point from them. The nodes need a secret that they
share (tutti secret), unless, without --rdzv and --store, the launcher has them all on one host or passes
one on (PMI on a descriptor: MPICH's mpiexec, srun --mpi=pmi2).`,
		Example: `  tutti run -n 4 ./train --epochs 3
  tutti run -n 4 ./examples/train                          a Go program, built first
  tutti run -n 8 --nnodes 2 --node-rank 0 --rdzv head:29400 --secret-file s ./train
  srun -N 2 --ntasks-per-node=1 -c 4 tutti run -n 4 ./train   with TUTTI_SECRET in the environment`,
		DisableFlagsInUseLine: true,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usagef(cmd, "which program? tutti run -n N PROGRAM [ARGS]")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			o, err := f.options(cmd, os.Getenv)
			if err != nil {
				return err
			}
			o.Program, o.Args = args[0], args[1:]
			o.Stdout, o.Stderr = os.Stdout, os.Stderr
			if f.stdin {
				o.Stdin = os.Stdin
			}
			return launched(launch.Run(cmd.Context(), o))
		},
	}
	fl := c.Flags()
	fl.SetInterspersed(false) // what follows PROGRAM are its arguments
	fl.IntVarP(&f.n, "ranks", "n", 0, "ranks on this node")
	fl.IntVar(&f.nodes, "nnodes", 0, "nodes of the job; each has a tutti run of its own (default: as the launcher "+
		"says that started this one, else 1)")
	fl.IntVar(&f.node, "node-rank", 0, "number of this node, 0..nnodes-1 (default: as the launcher says, else 0)")
	fl.StringVar(&f.rdzv, "rdzv", "", "`HOST:PORT` where node 0 serves the job's store and all meet")
	fl.StringVar(&f.store, "store", "", "`URL` of a store to use instead (etcd://HOST:PORT,… or etcds://…; "+
		"default: TUTTI_STORE, unless it is the tutti:// of a job that runs this command)")
	fl.StringVar(&f.job, "job", "", "`name` of the job (default: TUTTI_JOB, else that of the launcher "+
		"that started this one, else random on one node and \"default\" on several, which need one with --store)")
	fl.StringVar(&f.secretFile, "secret-file", "",
		"`file` with the job's secret, the same on all nodes (default: TUTTI_SECRET; random on one node)")
	fl.StringVar(&f.transport, "transport", "", "auto, "+registry.Names()+" (default: TUTTI_TRANSPORT, else auto)")
	fl.DurationVar(&f.timeout, "timeout", 0, "bound of every operation, such as 90s (default: TUTTI_TIMEOUT, else 5m)")
	fl.StringVar(&f.logDir, "log-dir", "", "also write the output of rank N to `directory`/rank-N.log, and flight "+
		"records there")
	fl.StringVar(&f.bind, "bind", "", "`how` to bind ranks to processors: share, each to its part of them; core, "+
		"each to one, for programs of one thread; or none (default: TUTTI_BIND, else share)")
	fl.BoolVar(&f.noPrefix, "no-prefix", false, "do not print the rank before each line")
	fl.BoolVar(&f.stdin, "stdin", false, "give the standard input to this node's first rank (default: the "+
		"ranks have none)")
	fl.StringVar(&f.onFailure, "on-failure", "",
		"`what` to do when a rank dies: end the others; or leave them to go on: shrink (the operation in flight "+
			"fails), retry (it runs again) (default: TUTTI_ON_FAILURE, else end)")
	fl.IntVar(&f.restarts, "max-restarts", 0,
		"with shrink or retry: how often a rank that died is started again, with TUTTI_RESTART set; it joins at the "+
			"others' next Admit")
	fl.IntVar(&f.standby, "standby", 0, "with shrink or retry: spare processes that wait for a rank to die and "+
		"take its place; their output has numbers above all ranks', also then")
	fl.BoolVar(&f.autoAdmit, "auto-admit", false,
		"with shrink or retry: let ranks in between any two operations, not at the program's Admit (default: "+
			"TUTTI_AUTO_ADMIT)")
	fl.DurationVar(&f.grace, "grace", 2*time.Second,
		"time between SIGTERM, or your signal, and SIGKILL for the ranks that are ended")
	fl.BoolVarP(&f.verbose, "verbose", "v", false, "print which processors each rank runs on")
	fl.BoolVarP(&f.quiet, "quiet", "q", false, "do not print how the job ended; only the exit code tells")
	return c
}

// transports reports whether text is a valid list of transports.
func transports(text string) bool {
	_, err := registry.Find(text, registry.Options{})
	return err == nil
}

// launched turns the results of launch.Run into a command's.
func launched(code int, err error) error {
	if err == nil && code != 0 {
		return exit(code)
	}
	return err
}

// options checks the flags. Errors name the flag.
func (f *runFlags) options(cmd *cobra.Command, getenv func(string) string) (launch.Options, error) {
	given := cmd.Flags().Changed
	outer := bootstrap.Launch{Size: 1}
	if !(given("nnodes") && (given("node-rank") || f.nodes == 1)) { // else all is said
		var err error
		if outer, err = bootstrap.NodeFromEnv(getenv); err != nil {
			return launch.Options{}, usagef(cmd, "%v; or give --nnodes and --node-rank", err)
		}
		started := fmt.Sprintf("%s, which started this command as node %d of %d: give both --nnodes and --node-rank, "+
			"or neither", outer.Source, outer.Rank, outer.Size)
		switch several := outer.Size > 1; {
		case given("nnodes") && several && f.nodes != outer.Size:
			return launch.Options{}, usagef(cmd, "--nnodes %d contradicts %s", f.nodes, started)
		case given("node-rank") && several && f.node != outer.Rank:
			return launch.Options{}, usagef(cmd, "--node-rank %d contradicts %s", f.node, started)
		}
		if !given("nnodes") {
			f.nodes = outer.Size
		}
		if !given("node-rank") {
			f.node = outer.Rank
		}
	}
	o := launch.Options{N: f.n, Nodes: f.nodes, Node: f.node, Job: f.job, NoPrefix: f.noPrefix, LogDir: f.logDir,
		Grace: f.grace, Verbose: f.verbose, Quiet: f.quiet}
	store, from := f.store, "--store"
	if own := strings.TrimSpace(getenv("TUTTI_STORE")); store == "" && f.rdzv == "" &&
		!strings.HasPrefix(own, "tutti://") {
		store, from = own, "TUTTI_STORE" // the site's; a tutti:// there belongs to a job that runs this command
	}
	o.Store = store
	switch {
	case !given("ranks"):
		return o, usagef(cmd, "how many ranks? give -n N")
	case f.n < 1 || f.n > 1<<16:
		return o, usagef(cmd, "-n %d: expected 1 to %d ranks", f.n, 1<<16)
	case f.nodes < 1 || f.nodes > 1<<16:
		return o, usagef(cmd, "--nnodes %d: expected 1 to %d", f.nodes, 1<<16)
	case f.nodes == 1 && f.node != 0:
		return o, usagef(cmd, "--node-rank %d: expected 0, there is 1 node (--nnodes)", f.node)
	case f.node < 0 || f.node >= f.nodes:
		return o, usagef(cmd, "--node-rank %d: expected 0..%d, there are %d nodes (--nnodes)", f.node, f.nodes-1,
			f.nodes)
	case f.nodes > 1 && outer.Size < 2 && !given("node-rank"):
		return o, usagef(cmd, "--nnodes %d needs --node-rank, this node's number", f.nodes)
	case f.rdzv != "" && store != "":
		return o, usagef(cmd, "--rdzv and --store exclude each other: node 0 serves a store, or there is one")
	case outer.Size > 1 && f.rdzv == "" && store == "" && !outer.Meets():
		return o, usagef(cmd, "%s started this command on %d nodes, but does not say where they can meet: give --rdzv "+
			"HOST:PORT, the address of the first (or --store URL)", outer.Source, outer.Size)
	case f.nodes > 1 && outer.Size < 2 && f.rdzv == "" && store == "":
		return o, usagef(cmd, "--nnodes %d needs --rdzv HOST:PORT, the address of node 0 (or --store URL)", f.nodes)
	case f.nodes == 1 && f.rdzv != "" && outer.Source == "none":
		return o, usagef(cmd, "--rdzv is for several nodes: give --nnodes and --node-rank too")
	case f.restarts < 0:
		return o, usagef(cmd, "--max-restarts %d: expected 0 or more", f.restarts)
	case f.standby < 0 || f.standby > 1<<16:
		return o, usagef(cmd, "--standby %d: expected 0 to %d", f.standby, 1<<16)
	case f.transport != "" && !transports(f.transport):
		return o, usagef(cmd, "--transport %s: expected auto, %s", f.transport, registry.Names())
	case f.verbose && f.quiet:
		return o, usagef(cmd, "--verbose and --quiet exclude each other")
	case f.grace < 0:
		return o, usagef(cmd, "--grace %v: expected 0 or more", f.grace)
	case given("timeout") && f.timeout == 0:
		return o, usagef(cmd, "--timeout 0: expected a duration such as 90s; negative for none")
	}
	if f.rdzv != "" {
		rest := strings.TrimPrefix(strings.TrimPrefix(f.rdzv, "etcd://"), "tutti://")
		host, port, err := net.SplitHostPort(rest)
		if n, perr := strconv.ParseUint(port, 10, 16); err != nil || perr != nil || n == 0 || host == "" {
			return o, usagef(cmd, "--rdzv %s: expected HOST:PORT, such as %s:29400", f.rdzv, "head")
		}
		o.Rendezvous = net.JoinHostPort(host, port)
	}
	if store != "" {
		if a, err := bootstrap.ParseStore(store); err != nil {
			return o, usagef(cmd, "%s: %v", from, err)
		} else if a.Scheme == "tutti" && getenv("TUTTI_SECRET") == "" && getenv("TUTTI_SECRET_FILE") == "" &&
			f.secretFile == "" {
			return o, usagef(cmd, "--store %s is another launcher's and needs its secret: set TUTTI_SECRET or "+
				"give --secret-file", store)
		}
	}
	if o.Job == "" {
		o.Job = cmp.Or(getenv("TUTTI_JOB"), outer.Job)
	}
	if o.Job != "" {
		if err := bootstrap.CheckJob(o.Job); err != nil {
			return o, usagef(cmd, "%v", err)
		}
	} else if f.nodes > 1 && store != "" {
		return o, usagef(cmd, "a store that was there before, with several nodes needs --job NAME, the same on "+
			"all nodes and fresh for each job")
	}
	onFailure, err := f.failure(getenv)
	if err != nil {
		return o, usagef(cmd, "%v", err)
	}
	if onFailure == "end" && (f.restarts > 0 || f.standby > 0 || f.autoAdmit) {
		return o, usagef(cmd, "--max-restarts, --standby and --auto-admit need --on-failure shrink or retry: "+
			"with end no rank is left to join")
	}
	if o.Bind, err = f.binding(getenv); err != nil {
		return o, usagef(cmd, "%v", err)
	}
	if o.Secret, err = f.secret(getenv); err != nil {
		return o, usagef(cmd, "%v", err)
	}
	if outer.Size > 1 && f.rdzv == "" && store == "" {
		o.Meet = &outer
	}
	if o.Secret == "" && f.nodes > 1 && (o.Meet == nil || !o.Meet.MeetsInPrivate()) {
		return o, usagef(cmd, "several nodes need a secret that they share: set TUTTI_SECRET or give "+
			"--secret-file FILE with the same contents on all of them (tutti secret makes one)")
	}
	if f.transport != "" {
		o.Env = append(o.Env, "TUTTI_TRANSPORT="+f.transport)
	}
	if onFailure != "end" {
		o.Elastic, o.MaxRestarts, o.Standby = true, f.restarts, f.standby
	}
	if onFailure != "end" || f.onFailure != "" {
		o.Env = append(o.Env, "TUTTI_ON_FAILURE="+onFailure)
	}
	if given("auto-admit") {
		o.Env = append(o.Env, "TUTTI_AUTO_ADMIT="+map[bool]string{false: "0", true: "1"}[f.autoAdmit])
	}
	if f.timeout != 0 {
		o.Env = append(o.Env, "TUTTI_TIMEOUT="+f.timeout.String())
	}
	if f.logDir != "" {
		dir, err := filepath.Abs(f.logDir) // a rank may change its directory
		if err != nil {
			return o, usagef(cmd, "--log-dir %s: %v", f.logDir, err)
		}
		o.Env = append(o.Env, "TUTTI_LOG_DIR="+dir)
	}
	return o, nil
}

// failure reads --on-failure and TUTTI_ON_FAILURE: end, shrink or retry. Errors name which of them.
func (f *runFlags) failure(getenv func(string) string) (string, error) {
	switch f.onFailure {
	case "end", "shrink", "retry":
		return f.onFailure, nil
	case "":
	default:
		return "", fmt.Errorf("--on-failure %s: expected end, shrink or retry", f.onFailure)
	}
	switch text := strings.ToLower(strings.TrimSpace(getenv("TUTTI_ON_FAILURE"))); text {
	case "", "end", "report":
		return "end", nil
	case "shrink", "retry":
		return text, nil
	}
	return "", fmt.Errorf("TUTTI_ON_FAILURE=%s: expected report, shrink or retry", getenv("TUTTI_ON_FAILURE"))
}

// binding reads --bind and TUTTI_BIND. Errors name which of them.
func (f *runFlags) binding(getenv func(string) string) (launch.Binding, error) {
	text, from := f.bind, "--bind "
	if text == "" {
		text, from = getenv("TUTTI_BIND"), "TUTTI_BIND="
	}
	switch text {
	case "", "share":
		return launch.BindShare, nil
	case "none":
		return launch.BindNone, nil
	case "core":
		if f.n > runtime.NumCPU() {
			return 0, fmt.Errorf("%score: %d ranks need as many processors, there are %d", from, f.n, runtime.NumCPU())
		}
		return launch.BindSingle, nil
	}
	return 0, fmt.Errorf("%s%s: expected share, core or none", from, text)
}

// secret reads the job's secret; "" if there is none.
func (f *runFlags) secret(getenv func(string) string) (string, error) {
	text, name, err := secretText(f.secretFile, getenv)
	if err != nil || name == "" {
		return "", err
	}
	if _, err := bootstrap.ParseSecret(text); err != nil {
		return "", fmt.Errorf("%s: %w", name, err)
	}
	return text, nil
}

// secretText reads what may be a secret, or a client's credential, from the file or as the
// environment says. name says where it was; "": nowhere.
func secretText(file string, getenv func(string) string) (text, name string, err error) {
	if file == "" {
		text, name, err = bootstrap.SecretFromEnv(getenv)
	} else if text, err = bootstrap.ReadSecret(file); err != nil {
		err = fmt.Errorf("--secret-file: %w", err)
	} else {
		name = "--secret-file"
	}
	if err == nil && strings.ContainsRune(text, 0) { // the ranks get it in a variable
		err = fmt.Errorf("%s: the file has a zero byte, expected text", name)
	}
	return text, name, err
}
