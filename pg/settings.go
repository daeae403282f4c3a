package pg

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strconv"
	"time"

	"tutti/bootstrap"
	"tutti/collectives"
	"tutti/device"
	"tutti/internal/ifname"
	"tutti/internal/ports"
	"tutti/internal/trust"
	"tutti/p2p"
	"tutti/p2p/registry"
	"tutti/pg/internal/exec"
	"tutti/pg/internal/join"
)

// settings is Config with the environment and the defaults filled in.
type settings struct {
	Config
	launch bootstrap.Launch
	log    *slog.Logger // Logger without the rank; nil: Logger is the program's
	algo   collectives.Algo
	single exec.Single
	kinds  []registry.Kind // transports
	// StoreAddr consists of MASTER_ADDR and MASTER_PORT.
	atMaster bool
	// One attempt to reach the store takes that at most; 0: the default.
	dialTimeout time.Duration
	// Devices that were ready when the rank joined exchange packets: see packets.go.
	exchanges bool

	meeting   *bootstrap.Meeting   // where ranks without a store meet; nil: the job has a store
	listened  bool                 // see join.Settings
	guest     uint64               // meeting's
	formation *bootstrap.Formation // nil: the job is not one of Member.Form
}

// fromEnv resolves c with the environment of Config.Getenv.
func (c Config) fromEnv() (*settings, error) {
	if c.Getenv == nil {
		c.Getenv = os.Getenv
	}
	s, err := c.resolve(c.Getenv)
	if err != nil {
		return nil, err
	}
	return s, s.check()
}

// check returns an *ArgumentError for a field that cannot be right. bootstrap.FromEnv has checked
// each variable of the environment.
func (s *settings) check() error {
	if _, err := ports.ParseSpec(s.Ports); err != nil {
		return unreadable("join", "Ports", s.Ports, err)
	}
	if _, err := ifname.Parse(s.Interfaces); err != nil {
		return unreadable("join", "Interfaces", s.Interfaces, err)
	}
	if s.Job != "" {
		if err := bootstrap.CheckJob(s.Job); err != nil {
			return unreadable("join", "Job", s.Job, err)
		}
	}
	if s.MaxSize == 1 { // what follows is not used
		return nil
	}
	if n := len(s.Secret); n > 0 && n < trust.MinSecret {
		return &ArgumentError{Call: "join", Arg: "Secret", Got: fmt.Sprintf("%d bytes", n),
			Want: fmt.Sprintf("at least %d, the same at all ranks", trust.MinSecret)}
	}
	if s.Store != nil {
		return nil
	}
	if s.StoreAddr != "" && !s.atMaster {
		if _, err := bootstrap.ParseStore(s.StoreAddr); err != nil {
			return unreadable("join", "StoreAddr", s.StoreAddr, err)
		}
	}
	// Without an address meet may find a store, which has no users.
	if s.StoreAddr != "" && (s.StoreUser == "") != (s.StorePassword == "") {
		return &ArgumentError{Call: "join", Arg: "StoreUser or StorePassword", Got: "missing",
			Want: "both, or neither (their defaults are TUTTI_STORE_USER and TUTTI_STORE_PASSWORD)"}
	}
	return nil
}

func (c Config) resolve(getenv func(string) string) (*settings, error) {
	s := &settings{Config: c}
	var err error
	var unplaced *bootstrap.PlaceError // by the environment
	if s.launch, err = bootstrap.FromEnv(getenv); err != nil && (c.Size == 0 || !errors.As(err, &unplaced)) {
		return nil, err
	}
	l := &s.launch
	if s.Size == 0 {
		s.Size, s.Rank = l.Size, l.Rank
	}
	if s.MaxSize == 0 {
		s.MaxSize = l.MaxSize
	}
	if s.MaxSize = max(s.MaxSize, s.Size); s.Size < 1 || s.MaxSize > MaxRanks ||
		(s.Rank < 0 || s.Rank >= s.MaxSize) && !l.Standby {
		return nil, &ArgumentError{Call: "join", Arg: "Rank, Size and MaxSize",
			Got:  fmt.Sprintf("rank %d of %d, at most %d", s.Rank, s.Size, s.MaxSize),
			Want: fmt.Sprintf("0 <= Rank < Size <= MaxSize <= %d", MaxRanks)}
	}
	def := func(v *string, env, last string) {
		if *v == "" {
			*v = env
		}
		if *v == "" {
			*v = last
		}
	}
	if c.Store == nil {
		def(&s.Job, l.Job, "")
	}
	if s.Job == "" && (s.MaxSize == 1 || c.Store != nil) { // no other job, or the caller separates them
		s.Job = "default"
	}
	def(&s.StoreAddr, l.Store, "")
	if s.StoreAddr == "" && l.MasterAddr != "" && l.MasterPort > 0 && !l.Meets() {
		s.StoreAddr = "etcd://" + net.JoinHostPort(l.MasterAddr, strconv.Itoa(l.MasterPort))
		s.atMaster = true
	}
	def(&s.StoreUser, l.StoreUser, "")
	def(&s.StorePassword, l.StorePassword, "")
	def(&s.Transport, l.Transport, "auto")
	def(&s.Interfaces, l.Interfaces, "")
	def(&s.Ports, l.Ports, "0")
	def(&s.Algorithm, l.Algorithm, "auto")
	def(&s.Tuning, l.Tuning, "")
	def(&s.SingleCopy, l.SingleCopy, "auto")
	def(&s.PeerDevices, l.PeerDevices, "auto")
	def(&s.LogDir, l.LogDir, "")
	def(&s.Metrics, l.Metrics, "")
	if s.Secret = slices.Clone(s.Secret); s.Secret == nil { // the program may wipe its own
		s.Secret = l.Secret
	}
	if s.Timeout == 0 {
		s.Timeout = l.Timeout
	}
	switch {
	case s.Timeout == 0:
		s.Timeout = defaultTimeout
	case s.Timeout < 0:
		s.Timeout = 0
	}
	if s.StagingLimit <= 0 {
		s.StagingLimit = cmp.Or(l.StagingLimit, defaultStagingLimit)
	}
	if s.LeaseTTL == 0 {
		s.LeaseTTL = l.LeaseTTL
	}
	if !s.OnFailure.valid() {
		return nil, &ArgumentError{Call: "join", Arg: "OnFailure", Got: s.OnFailure.String(),
			Want: "Report, Shrink or Retry"}
	}
	if !s.OnTimeout.valid() {
		return nil, &ArgumentError{Call: "join", Arg: "OnTimeout", Got: s.OnTimeout.String(),
			Want: "TimeoutReports, TimeoutEvicts or TimeoutEvictsAlone"}
	}
	if s.OnFailure == Report {
		if s.OnFailure, err = parseOnFailure(l.OnFailure); err != nil {
			return nil, fmt.Errorf("join: TUTTI_ON_FAILURE: %w", err)
		}
	}
	s.Uniform, s.AutoAdmit = s.Uniform || l.Uniform, s.AutoAdmit || l.AutoAdmit
	if s.Window <= 0 {
		s.Window = defaultWindow
	}
	s.Window = min(s.Window, longestWindow)
	if s.algo, err = collectives.ParseAlgo(s.Algorithm); err != nil {
		return nil, unreadable("join", "Algorithm, or TUTTI_ALGO,", s.Algorithm, err)
	}
	if s.single, err = exec.ParseSingle(s.SingleCopy); err != nil {
		return nil, &ArgumentError{Call: "join", Arg: "SingleCopy, or TUTTI_SINGLE_COPY,",
			Got: fmt.Sprintf("%q", s.SingleCopy), Want: "auto, on or off"}
	}
	if s.PeerDevices != "auto" && s.PeerDevices != "off" {
		return nil, &ArgumentError{Call: "join", Arg: "PeerDevices, or TUTTI_PEER_DEVICES,",
			Got: fmt.Sprintf("%q", s.PeerDevices), Want: "auto or off"}
	}
	if s.kinds, err = registry.Find(s.Transport, s.rdmaOptions()); err != nil {
		return nil, &ArgumentError{Call: "join", Arg: "Transport, or TUTTI_TRANSPORT,",
			Got: fmt.Sprintf("%q", s.Transport), Want: "auto, or a list of " + registry.Names()}
	}
	if s.Logger == nil {
		level := slog.LevelWarn
		if l.LogLevel == "off" {
			s.Logger = slog.New(slog.DiscardHandler)
		} else {
			if l.LogLevel != "" {
				level.UnmarshalText([]byte(l.LogLevel)) // checked by FromEnv
			}
			s.Logger = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
			if s.log = s.Logger; !l.Standby {
				s.take(s.Rank)
			}
		}
	}
	if unplaced != nil {
		s.Logger.Debug("the launcher's variables do not tell a place in a job: Config does", "err", unplaced)
	}
	return s, nil
}

// take gives this process a rank, which its own Logger names.
func (s *settings) take(rank int) {
	if s.Rank = rank; s.log != nil {
		s.Logger = s.log.With("rank", rank)
	}
}

// preload has the devices that the process uses ready before the first operation.
func (s *settings) preload() {
	p, ok := s.Devices.(device.Preloader)
	if !ok {
		return
	}
	ready, err := p.Preload()
	if err != nil {
		s.Logger.Warn("a device is not ready: operations on its memory will try again to open it", "err", err)
	}
	for _, d := range ready {
		if _, ok := d.(device.Exchanger); ok && s.PeerDevices != "off" && !s.AutoAdmit {
			s.exchanges = true
		}
	}
}

// session returns the settings for package join.
func (s *settings) session() (*join.Settings, error) {
	js := &join.Settings{Rank: s.Rank, Size: s.Size, MaxSize: s.MaxSize, Secret: s.Secret, Terms: s.terms(),
		Transports: s.transports, Progress: s.Progress,
		Interfaces: s.Interfaces, Ports: s.Ports, Timeout: s.Timeout, Window: s.Window,
		Survives: s.OnFailure != Report, Exchanges: s.exchanges, Dial: s.Dialer, Logger: s.Logger,
		OpenStore: s.openStore, Listened: s.listened}
	if s.guest != 0 {
		js.Ends = bootstrap.StoreEnds
	}
	if js.Serves = s.serves(); js.Serves {
		js.Refused = s.meeting.Refused
	}
	if s.MaxSize == 1 {
		return js, nil
	}
	switch {
	case s.Store == nil && s.StoreAddr == "" && s.launch.Source != "none" && s.launch.Source != "tutti":
		return nil, errors.New("no store: " + s.launch.HowToMeet())
	case len(s.Secret) == 0:
		return nil, errors.New("no job secret: set TUTTI_SECRET (the same for all ranks, at least 16 bytes), or " +
			"start the ranks with tutti run")
	case s.Job == "":
		return nil, s.launch.JobMissing()
	case s.fixed() && (s.OnFailure != Report || s.AutoAdmit || s.MaxSize > s.Size || s.launch.Standby):
		return nil, s.tooElastic()
	case s.Store == nil && s.StoreAddr == "":
		return nil, errors.New("no store: set TUTTI_STORE=etcd://HOST:PORT, or start the ranks with tutti run")
	}
	return js, nil
}

// tooElastic returns the error of a setting by which ranks are lost or taken in, with a store that
// is no bootstrap.Elastic.
func (s *settings) tooElastic() error {
	bad := &ArgumentError{Call: "join", Arg: "TUTTI_STANDBY", Got: "set", Want: "no spare process"}
	switch {
	case s.OnFailure != Report:
		bad.Arg, bad.Got, bad.Want = "OnFailure, or TUTTI_ON_FAILURE,", s.OnFailure.String(), Report.String()
	case s.AutoAdmit:
		bad.Arg, bad.Got, bad.Want = "AutoAdmit, or TUTTI_AUTO_ADMIT,", "set", "none"
	case s.MaxSize > s.Size:
		bad.Arg, bad.Got = "MaxSize, or TUTTI_MAX_SIZE,", strconv.Itoa(s.MaxSize)
		bad.Want = fmt.Sprintf("Size, %d", s.Size)
	}
	bad.Want += ", because the program's store cannot tell which ranks are alive"
	return bad
}

// meet finds a store through the launcher for ranks that were given none.
func (s *settings) meet(ctx context.Context) (err error) {
	l := &s.launch
	if s.Store != nil || s.StoreAddr != "" || s.MaxSize < 2 || !l.Meets() || s.Rank != l.Rank || s.Size != l.Size {
		return nil
	}
	at := *l
	at.Job = s.Job
	if s.meeting, err = at.Meet(ctx, s.Secret, s.Logger); err != nil {
		return s.failed(err)
	}
	s.StoreAddr, s.Secret, s.Job = s.meeting.Store, s.meeting.Secret, cmp.Or(s.Job, "default")
	s.listened, s.guest = l.Invites(), s.meeting.Guest
	s.withoutSite()
	return nil
}

// serves reports whether this rank serves the job's store.
func (s *settings) serves() bool { return s.meeting != nil && s.Rank == 0 }

// withoutSite drops what the program or the environment says about a site's store: that of a
// meeting is another one.
func (s *settings) withoutSite() {
	s.StoreUser, s.StorePassword, s.StoreTLS = "", "", nil
	s.launch.StoreCA, s.launch.StoreCert, s.launch.StoreKey = "", "", ""
}

// part leaves a meeting, which may be nil, and the formation. If this rank serves the store, part
// first waits until the other ranks have left, or until ctx or Config.Timeout ends.
func (s *settings) part(ctx context.Context, meeting *bootstrap.Meeting) {
	ctx, cancel := join.Within(ctx, s.Timeout)
	defer cancel()
	meeting.Close(ctx)
	if s.formation != nil {
		s.formation.End(nil)
	}
}

// partSoon bounds part after a failed Join. Meanwhile the other ranks can find out why they cannot
// join.
const partSoon = time.Second

// fixed reports whether the job's store cannot detect lost ranks.
func (s *settings) fixed() bool {
	if s.Store == nil {
		return false
	}
	_, elastic := s.Store.(bootstrap.Elastic)
	return !elastic
}

// openStore returns a handle on the job's store.
func (s *settings) openStore(ctx context.Context) (bootstrap.Store, error) {
	if s.Store != nil {
		return bootstrap.OpenStore(ctx, s.Store, s.Job)
	}
	store, err := bootstrap.DialStore(ctx, bootstrap.StoreConfig{Address: s.StoreAddr, Job: s.Job, Secret: s.Secret,
		Rank: s.Rank, Guest: s.guest, User: s.StoreUser, Password: s.StorePassword, TLS: s.StoreTLS,
		CA: s.launch.StoreCA, Cert: s.launch.StoreCert, Key: s.launch.StoreKey, LeaseTTL: s.LeaseTTL,
		DialTimeout: s.dialTimeout, Dial: s.Dialer, Logger: s.Logger})
	switch {
	case err != nil && s.atMaster:
		err = fmt.Errorf("%w (it is looked for at MASTER_ADDR and MASTER_PORT: set TUTTI_STORE if it is elsewhere)",
			err)
	case errors.Is(err, bootstrap.ErrStoreAway) && s.listened && s.launch.ChoosesAddress():
		err = fmt.Errorf("%w (rank 0 has chosen that address: set TUTTI_IFNAME to the interface that all hosts share)",
			err)
	}
	return store, err
}

// rdmaOptions returns the settings of RDMA devices.
func (s *settings) rdmaOptions() registry.Options {
	return registry.Options{RDMADevices: s.launch.RDMADevices, RDMAGID: s.launch.RDMAGID,
		RDMAPairs: s.launch.RDMAPairs, RDMA: s.launch.RDMA}
}

// transports makes the transports of this rank, in order of preference.
func (s *settings) transports() ([]p2p.Transport, error) {
	o := s.rdmaOptions()
	o.LocalRanks, o.Interfaces, o.Ports = s.localRanks(), s.Interfaces, s.Ports
	// While an operation waits for a host, the proxy sends it heartbeats, and a host that is silent
	// for a window counts as lost.
	o.PeerTimeout, o.IdleTimeout = max(s.Window, time.Second), idleTimeout
	o.Dial, o.Devices, o.Logger = s.Dialer, s.Devices, s.Logger
	asked := s.kinds
	if s.Transport == registry.Auto { // also those that do not work, to say so
		asked = registry.Kinds()
	}
	var all []p2p.Transport
	var none error
	for _, k := range asked {
		switch err := k.Works(o); {
		case errors.Is(err, registry.ErrSettings):
			return nil, fmt.Errorf("config: transport %s: %w", k.Name, err)
		case err != nil && len(asked) > 1:
			if k.Reach == registry.Machine && o.LocalRanks > 1 {
				s.Logger.Warn("transport "+k.Name+" does not work here: ranks of this machine use another one",
					"err", err, "advice", k.Advice)
			}
			none = errors.Join(none, fmt.Errorf("config: transport %s: %w", k.Name, err))
			continue
		}
		t, err := k.New(o)
		if err != nil {
			return nil, fmt.Errorf("config: transport %s: %w", k.Name, err)
		}
		all = append(all, t)
	}
	if len(all) == 0 {
		return nil, none
	}
	return all, nil
}

// idleTimeout bounds the silence of a host while no operation waits for it.
const idleTimeout = 30 * time.Second

// localRanks is how many ranks are likely to be on this machine.
func (s *settings) localRanks() int {
	if s.launch.LocalSize > 0 {
		return s.launch.LocalSize
	}
	return s.Size
}
