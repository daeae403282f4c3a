package pg

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"time"

	"tutti/bootstrap"
	"tutti/device"
	"tutti/internal/dial"
)

// Config says how a process joins its group. Fields that are set win over the environment; the zero
// Config takes everything from the variables of the launcher (tutti run, torchrun, Slurm, mpirun,
// Kubernetes indexed jobs) and from the TUTTI_* variables.
type Config struct {
	// Size is the number of ranks and Rank the number of this one, 0..Size-1. Default (Size 0): the
	// environment says both; without a launch environment the process is rank 0 of 1. With Size,
	// variables of a launcher that do not tell both are ignored.
	Size, Rank int
	// Job names the job. Ranks meet in the store under this name. Default TUTTI_JOB, else a name
	// that is made of the launcher's variables. If there are none, a job of several ranks must be
	// given a name. The state of a rank (tutti status, flight records) has what its process does in
	// jobs of other names that it has joined, if it is one rank of each.
	Job string
	// StoreAddr is the store's address, "etcd://host:port,host:port" ("etcds://" for TLS). Default
	// TUTTI_STORE. If that is not set either, ranks meet through their launcher, where it has a
	// way: rank 0 then serves a store, its Close waits until the other ranks have closed their
	// groups, and the job ends with rank 0. Jobs of different names may do so at a time, except
	// through PMI. Else the default is etcd://MASTER_ADDR:MASTER_PORT. A group of one rank needs no
	// store.
	StoreAddr string
	// Store is a store of the program, used instead of one at StoreAddr. It is a map that all ranks
	// see or, if it is a bootstrap.Elastic, one with leases. A job over a store without leases is
	// fixed: it needs OnFailure Report, and no rank joins later. Job separates the jobs that share
	// a store; its default is then "default".
	Store bootstrap.KV
	// StoreUser and StorePassword authenticate to a site's etcd. Default TUTTI_STORE_USER and
	// TUTTI_STORE_PASSWORD.
	StoreUser, StorePassword string
	// StoreTLS is used for etcds:// addresses. Default: built from TUTTI_STORE_CA, TUTTI_STORE_CERT
	// and TUTTI_STORE_KEY, else the system's roots.
	StoreTLS *tls.Config
	// Secret is the key that every connection of the job proves to know, at least 16 bytes. Default
	// TUTTI_SECRET or the contents of TUTTI_SECRET_FILE. Without a secret Join fails, except for a
	// group of one process and for ranks that meet in a place that only they can reach (see
	// StoreAddr). It is copied.
	Secret []byte
	// Transport selects the transports: "auto" (the default: the best one that reaches the peer),
	// or names separated by commas, the preferred one first: "shm", "rdma", "tcp". Default
	// TUTTI_TRANSPORT.
	Transport string
	// Interfaces selects the network interfaces: names and CIDRs, or their exclusion with ^,
	// separated by commas. Default TUTTI_IFNAME, else all. Of several interfaces, the route to the
	// peer decides.
	Interfaces string
	// Ports says on which ports this rank listens: "0" (default: the kernel chooses), "29500-29600"
	// (the first free ones), or "29500": that port and, for the transports tcp and rdma, the two
	// after it, or an error. Each group that a process joins listens on ports of its own. Default
	// TUTTI_PORT.
	Ports string
	// Dialer makes the connections of this rank to its peers and to the store, through a proxy for
	// example. Default: net.Dialer.
	Dialer Dialer
	// Algorithm forces one algorithm for the collectives that have it, and that GPUs do not do
	// alone (see "Reproducible results"). All ranks must have the same Algorithm. Default
	// TUTTI_ALGO, else chosen by size and topology.
	Algorithm string
	// Tuning is the path of a table of algorithms that tutti tune has measured, or "off" for none.
	// A table is refused with a warning if it was measured on other hardware, by another version,
	// with another number of ranks on a machine, or if only its ranks shared processors, or only
	// these do. If the ranks have different tables, all of them use the default one. The order of a
	// reduction depends on its algorithm, so a table may change the last bits of floating-point
	// results; the same table gives the same bits. Default TUTTI_TUNE, else tutti/tune.json in
	// $XDG_CONFIG_HOME or ~/.config, if it exists; that one is refused without a warning if it is
	// for other hardware, another number of ranks or another transport.
	Tuning string
	// Devices finds those whose memory the buffers of operations may be in, beside the host's: a
	// device.List, or a cuda.Finder. The caller closes them after Close. Operations on such buffers
	// copy through host memory, of which each that is under way has its own: as much as its
	// buffers, but 16 MiB at most for Window.PutBuffer and GetBuffer; or they load from the memory
	// of peers in place: see PeerDevices. Join has a device.Preloader open the devices that the
	// process uses. nil: there are none.
	Devices device.Finder
	// StagingLimit bounds the host memory (pinned, at a GPU) that started collectives on the memory
	// of one of Devices copy through at a time, in bytes for all groups that come from one Join: a
	// process that joins several jobs, as PyTorch does for each group, has as much for each. Start
	// of one for which there is no room waits until earlier operations of its group are over and
	// their streams have passed them, for Timeout at most; then the operation fails at all ranks.
	// The only one of its group, blocking calls, and messages do not wait: they take what they
	// need. Ranks that start operations of several groups in different orders need room for all of
	// them. Memory that is not used is kept for some seconds. Default TUTTI_STAGING_LIMIT, else 1
	// GiB.
	StagingLimit int
	// PeerDevices says whether collectives on large buffers in the memory of Devices load from the
	// memory of the other ranks' devices in place, where all ranks are on one machine and the
	// devices reach each other: "auto" or "off". Started operations on a stream of the caller do it
	// on a device.Reserver, such as a GPU, in groups of up to 48 ranks. A group does it if all of
	// its ranks may. Group.Topology says whether it does, and why not. Default TUTTI_PEER_DEVICES,
	// else "auto".
	//
	// With "auto", an allreduce of up to 128 KiB (device.ShortVector), and an allgather, a
	// reduce-scatter or an all-to-all of less than 32 KiB (of all ranks' parts together), are done
	// by the devices alone, without the hosts, if the group has 2 to 8 ranks, all on one machine
	// and each with a GPU that was ready when it joined (see Devices), and no AutoAdmit. The
	// buffers of such a short collective are then in the memory of GPUs at all ranks, or at none:
	// else it is a MismatchError. A rank uses one GPU for these calls; ranks of one process have
	// streams of their own. The first such call in a view waits for all ranks, also in Start. It is
	// not run again with OnFailure Retry.
	//
	// After a short collective a borrowed stream (cuda.Device.Borrow) may be captured into a graph,
	// with collectives of any length whose ranks have parts of equal length: Start on the stream
	// ends at once, and each launch of the graph is the operation. Graphs, and short collectives
	// beside them, come in the same order at all ranks. A launch waits for Timeout at most, and
	// ends at most a second after a rank has closed the group or called Recover. If it has had no
	// result, the group's next operation but Split and Admit fails: with a TimeoutError if a rank
	// was late, with a MismatchError if ranks did different things, with a RankError if a rank was
	// lost, has closed the group or has called Recover, or the group has entered another view since
	// the capture. At the others it fails with a RankError that names the lost rank, or else the
	// one that has noticed. Then the graph is to be captured again, after Recover if the group has
	// failed, and after a short collective outside of a capture. Each view of a group in which a
	// graph was captured keeps up to 6 MiB of a GPU's memory until the device is closed, also if
	// the graph is not used any more. A group of one rank needs none.
	PeerDevices string
	// SingleCopy says whether collectives may read large plain buffers straight from the processes
	// of ranks on the same machine, where the system permits that: "auto" (where that is found to
	// be faster, by trying), "on" (from 32 KiB on, an allreduce from 128 KiB on) or
	// "off". The results are the same. A group does it if all of its ranks may. Default
	// TUTTI_SINGLE_COPY, else "auto".
	SingleCopy string
	// Timeout bounds every operation, and Join, in addition to their ctx. Default TUTTI_TIMEOUT,
	// else 5 minutes. Negative: no bound.
	Timeout time.Duration
	// OnFailure says what the group does when a rank is lost. Default: TUTTI_ON_FAILURE, else
	// Report.
	OnFailure OnFailure
	// Uniform makes the outcome of every collective the same at all survivors: each has the result,
	// or each gets the error. It costs a small exchange after each collective. An operation that a
	// rank gives up (a deadline, a cancelled context) fails on all. If the rank gives up in that
	// exchange, in one for a new view, or because a stream does not take the result, it fails on
	// that rank, and may have succeeded on others.
	// Default TUTTI_UNIFORM. All ranks must have the same OnFailure and Uniform.
	Uniform bool
	// OnTimeout says what happens to ranks that did not come to an operation in time, and which
	// ranks decide that. Default: TimeoutReports. All ranks must have the same OnTimeout.
	OnTimeout OnTimeout
	// Window is how long two live ranks may be unable to reach each other before one of them is
	// removed, and how long an operation waits for a machine that is silent. Two live ranks have at
	// least half a second more than the lease that the store has granted. Default 3 s.
	Window time.Duration
	// MaxSize is the number of ranks that the job may grow to. A rank with a number of Size or
	// above joins a running job. All ranks must have the same MaxSize. Default TUTTI_MAX_SIZE, else
	// Size.
	MaxSize int
	// AutoAdmit admits waiting ranks without a call of Admit, at the next boundary between
	// operations: after an operation in which every rank has learnt from message headers that a
	// rank waits. A program that calls Agree between operations should call Admit instead: a rank
	// that is admitted while others are between an operation and the agreement on it counts one
	// agreement less than they do, and each Agree of theirs waits for its vote until a deadline.
	// All ranks must have the same AutoAdmit. Default TUTTI_AUTO_ADMIT.
	AutoAdmit bool
	// Progress starts a goroutine that receives frames from peers while the program computes. It
	// sleeps while no frames come. Without it, frames are received during calls of this package.
	// That is enough if no rank waits for one that is computing, and a little faster, because a
	// peer need not wake a rank that does not sleep. Default: no.
	Progress bool
	// LeaseTTL is how long the store takes a silent rank to be alive, rounded up to seconds.
	// Default TUTTI_LEASE, else 3 s.
	LeaseTTL time.Duration
	// LogDir is a directory for flight records. The last operations are recorded in a file there,
	// which outlives a killed process and is removed by Close. (On file systems that copy pages
	// which are written, such as Btrfs, there is none.) When an operation fails, and on Unix on
	// SIGUSR1, the rank also writes its full state to flight-rankN-….json; the program may handle
	// SIGUSR1 too. Of failures it keeps 64 such files: each later one replaces the oldest, at most
	// one in 10 s. Default TUTTI_LOG_DIR, else the last operations are kept only in memory, for
	// tutti status.
	LogDir string
	// NoSignal leaves SIGUSR1 to the program: the rank writes no record on it. It is for programs
	// that handle the signal otherwise than by os/signal.
	NoSignal bool
	// Metrics is an address, HOST:PORT, at which this rank serves Prometheus metrics as /metrics,
	// to any client. The port may be 0, or a range, of which each rank of a machine tries a
	// different port first. Groups of one process with the same address are served at one port; of
	// those with the same job and rank, the first. Default TUTTI_METRICS, else none.
	Metrics string
	// Logger gets messages that are no errors. Its handler may run with a lock of the job held: it
	// must return soon, must not panic, and must not call anything of this package. Default:
	// warnings and above to standard error; TUTTI_LOG=debug|info|warn|error sets the level.
	Logger *slog.Logger
	// Getenv reads an environment variable, "" for one that is not set. Default: os.Getenv.
	Getenv func(string) string
}

// A Dialer makes a connection to address, HOST:PORT, at which rank to listens, or the store if to
// is ToStore. d holds the local address and the socket options that the connection should have. The
// Dialer must return when ctx ends. For an address without a listener it must return an error that
// wraps syscall.ECONNREFUSED.
type Dialer = dial.Func

// ToStore is the rank that a Dialer gets for the store.
const ToStore = dial.Store

// OnTimeout says what happens to ranks that did not come to an operation in time.
type OnTimeout uint8

const (
	// TimeoutReports: the operation returns a *TimeoutError that names the missing ranks. The group
	// is unusable until all ranks, the missing ones included, have called Recover.
	TimeoutReports OnTimeout = iota
	// TimeoutEvicts removes the ranks that more than half of the job's active ranks have waited for
	// in vain, in one operation, each for at least half of its timeout. The group goes on without
	// them as OnFailure says. Without such a majority (one rank was early, or two ranks disagree)
	// no rank is removed, and the next operation begins when all ranks have come to it. A rank that
	// comes to the operation later gets the *TimeoutError too. A rank whose operation timed out
	// begins no other until this is decided: until the others agree, the late rank comes to its
	// next operation, or Window ends. An operation that has waited for less than 10 ms removes no
	// rank. The operations of a group know nothing of those of another: a rank that waits in an
	// operation of another group is removed like one that is late itself, although the late rank
	// may be one that it waits for there.
	TimeoutEvicts
	// TimeoutEvictsAlone removes every rank that any one rank has waited for in vain. A rank that
	// is early removes all others. It has to wait for 10 ms at least, as with TimeoutEvicts.
	TimeoutEvictsAlone
)

var onTimeoutNames = []string{"TimeoutReports", "TimeoutEvicts", "TimeoutEvictsAlone"}

// String returns the name of the constant.
func (o OnTimeout) String() string {
	if !o.valid() {
		return fmt.Sprintf("OnTimeout(%d)", uint8(o))
	}
	return onTimeoutNames[o]
}

func (o OnTimeout) valid() bool { return int(o) < len(onTimeoutNames) }

// Config.Window's default, and the most that counts: other times are added to it.
const (
	defaultWindow = 3 * time.Second
	longestWindow = 1000 * 24 * time.Hour
)

// defaultTimeout is Config.Timeout's default.
const defaultTimeout = 5 * time.Minute
