package pg

import (
	"crypto/tls"
	"log/slog"
	"time"

	"tutti/bootstrap"
	"tutti/internal/dial"
)

// Config says how a process joins its group. The zero Config takes everything from the environment
// that a launcher sets (tutti run, torchrun, Slurm, mpirun, Kubernetes indexed jobs) and from the
// TUTTI_* variables; a field that is set wins over them.
type Config struct {
	// Size is the number of ranks and Rank this one's number, 0..Size-1. Size 0 (the default): both
	// come from the environment; a process without any launch environment is rank 0 of 1.
	Size, Rank int
	// Job names the job: ranks meet under it in the store. Default TUTTI_JOB, else a name that is
	// made of what the launcher says; where that is nothing, a job of several ranks must be given
	// one.
	Job string
	// StoreAddr is the store's address, "etcd://host:port,host:port" ("etcds://" for TLS). Default
	// TUTTI_STORE. Without one, ranks meet through their launcher, if it says how: then rank 0
	// serves a store until the others have closed their groups, for which its own Close waits, and
	// the job ends with rank 0. Else the default is etcd://MASTER_ADDR:MASTER_PORT. A group of one
	// rank needs none.
	StoreAddr string
	// Store is a store of the program's own, in the place of one at StoreAddr: a map that all ranks
	// see, or, if it is a bootstrap.Elastic, one with leases. Over the former a job is fixed: it
	// needs OnFailure Report and nobody joins later. Job tells apart jobs that share it; its default
	// is then "default".
	Store bootstrap.KV
	// StoreUser and StorePassword authenticate to a site's etcd. Default TUTTI_STORE_USER and
	// TUTTI_STORE_PASSWORD.
	StoreUser, StorePassword string
	// StoreTLS is used for etcds:// addresses. Default: built from TUTTI_STORE_CA, TUTTI_STORE_CERT
	// and TUTTI_STORE_KEY, else the system's roots.
	StoreTLS *tls.Config
	// Secret is what every connection of the job proves to know, at least 16 bytes. Default
	// TUTTI_SECRET or the contents of TUTTI_SECRET_FILE. A group of more than one process has no
	// default beyond these, unless its ranks meet where nobody else can (see StoreAddr): without a
	// secret Join fails.
	Secret []byte
	// Transport restricts the links: "auto" (default: the best that reaches the peer), or names of
	// transports, separated by commas, the preferred one first: "shm", "tcp". Default
	// TUTTI_TRANSPORT.
	Transport string
	// Interfaces restricts the network interfaces: names, CIDRs, and their exclusion with ^,
	// separated by commas. Default TUTTI_IFNAME, else all; among those the route to the peer
	// decides.
	Interfaces string
	// Ports is where this rank listens: "0" (default: the kernel chooses), "29500" (that port or an
	// error) or "29500-29600". Default TUTTI_PORT.
	Ports string
	// Dialer makes the connections of this rank: to its peers, and to the store. It is for networks
	// that are crossed in a way of their own, through a proxy for example. Default: net.Dialer.
	Dialer Dialer
	// Algorithm forces one algorithm where it exists for the collective. Default TUTTI_ALGO, else
	// chosen by size and topology.
	Algorithm string
	// Tuning is the path of a table of algorithms that tutti tune has measured; "off": none. A
	// table that was measured elsewhere, by another version or with another number of ranks on a
	// machine is refused with a warning, and if the ranks' tables differ all of them use the
	// default one. The order of a reduction depends on its algorithm, so a table may change the
	// last bits of floating-point results; the same table gives the same bits. Default TUTTI_TUNE,
	// else tutti/tune.json in $XDG_CONFIG_HOME or ~/.config, if it is there.
	Tuning string
	// Timeout bounds every operation, and Join, in addition to their ctx. Default TUTTI_TIMEOUT,
	// else 5 minutes. Negative: no bound.
	Timeout time.Duration
	// OnFailure says what the group does when a rank is lost. Default: TUTTI_ON_FAILURE, else
	// Report.
	OnFailure OnFailure
	// Uniform makes the outcome of every collective the same at all survivors: each has the result,
	// or each gets the error. It costs a small exchange after each collective. An operation that a
	// rank gives up (a deadline, a cancelled context) fails there, and may have ended well elsewhere.
	// Default TUTTI_UNIFORM. All ranks must have the same OnFailure and Uniform.
	Uniform bool
	// OnTimeout says what happens to ranks that an operation waited for in vain, and who decides
	// it. Default: TimeoutReports. The same at all ranks.
	OnTimeout OnTimeout
	// Window is how long two live ranks may be unable to reach each other before one of them is
	// removed; at least half a second longer than LeaseTTL. Default 3 s.
	Window time.Duration
	// MaxSize is how many ranks the job may grow to, the same at all of them. A rank with a number
	// of Size or above joins a running job. Default TUTTI_MAX_SIZE, else Size.
	MaxSize int
	// AutoAdmit lets ranks that wait to join in at the next boundary of operations, without Admit:
	// after an operation in which every rank has heard, in the headers, that somebody waits.
	// A program that calls Agree between operations should call Admit instead: a rank that comes in
	// while others stand between an operation and the agreement on it counts one agreement less than
	// they do. Default TUTTI_AUTO_ADMIT; the same at all ranks.
	AutoAdmit bool
	// Progress has a goroutine of this rank take in what peers send while the program computes. It
	// sleeps while nothing comes. Without it that happens in calls of this package, which is enough
	// where nobody waits for a rank that is in none, and a little faster: a peer need not wake a rank
	// that does not sleep. Default: no.
	Progress bool
	// LeaseTTL is how long the store takes a silent rank for alive. Default 3 s.
	LeaseTTL time.Duration
	// LogDir is a directory for flight records. The last operations are recorded there in a file
	// that outlives a killed process and goes at Close; a failed operation, and on Unix the signal
	// SIGUSR1, which a program may use besides, has all that is known written to
	// flight-rankN-….json. Default TUTTI_LOG_DIR, else the last operations are kept in memory
	// alone, for tutti status.
	LogDir string
	// Metrics is an address, HOST:PORT, at which this rank serves Prometheus metrics as /metrics,
	// to whoever reaches it. The port may be a range, in which each rank of a machine begins with
	// its own, or 0. Default TUTTI_METRICS, else none.
	Metrics string
	// Logger gets what is worth knowing but is no error. Default: warnings and above to standard
	// error; TUTTI_LOG=debug|info|warn|error sets the level.
	Logger *slog.Logger
}

// A Dialer makes a connection with address, HOST:PORT, where rank to listens or, with ToStore, the
// store. d has the local address and the socket options that the connection is to have. It returns
// when ctx ends at the latest. An address at which nobody listens is an error that wraps
// syscall.ECONNREFUSED.
type Dialer = dial.Func

// ToStore stands for the store where a Dialer is told the rank.
const ToStore = dial.Store

// OnTimeout says what happens to ranks that an operation waited for in vain.
type OnTimeout uint8

const (
	// TimeoutReports: the operation returns a *TimeoutError that names them, and the group is
	// unusable until Recover, which they are to call too.
	TimeoutReports OnTimeout = iota
	// TimeoutEvicts: those are removed that more than half of the active ranks of the job have
	// waited for in vain, in one operation, each for at least half of the time that ran out. The
	// group goes on without them as OnFailure says. Where there is no such majority, one rank was
	// early or two do not agree: nobody is removed, and the next operation begins when all are
	// there. A rank that has waited in vain begins nothing else until it is decided: until the others
	// agree, or the late rank comes to its next operation, or for Window.
	TimeoutEvicts
	// TimeoutEvictsAlone: any rank removes whomever it has waited for in vain. A rank that is early
	// removes all others.
	TimeoutEvictsAlone
)

// DefaultWindow is Config.Window's default.
const DefaultWindow = 3 * time.Second

// DefaultTimeout is Config.Timeout's default.
const DefaultTimeout = 5 * time.Minute
