package endpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"tutti/endpoint/internal/args"
	"tutti/endpoint/internal/card"
	"tutti/endpoint/internal/link"
	"tutti/endpoint/internal/wire"
	"tutti/endpoint/stats"
	"tutti/internal/dial"
	"tutti/internal/files"
	"tutti/internal/ifname"
	"tutti/internal/ports"
	"tutti/internal/route"
	"tutti/internal/socket"
	"tutti/internal/trust"
	"tutti/mem"
)

// Config configures an Endpoint.
type Config struct {
	// Name is what the endpoint calls itself, at most 255 bytes of UTF-8 without control characters
	// and those that change the direction of text. It need not be unique.
	Name string
	// Secret is the secret that all endpoints share, or the credential of a client: the text that
	// tutti secret prints. With that of a client the endpoint does not listen, and has its name.
	Secret string
	// Interfaces selects the addresses to listen on and to dial from: names of interfaces, prefixes
	// of names ("eth*"), addresses and networks, separated by commas, excluded after "^". Default:
	// all that are up, loopback last. Of more than 16 the endpoint listens on the first, with one
	// of loopback of each family, and logs the others. "none" listens nowhere: the endpoint only
	// dials.
	Interfaces string
	// Ports is "0" (default: the kernel chooses), "29500" (that port or an error) or "29500-29600"
	// (the first free one). Each address has a port of its own.
	Ports string
	// Conns is the number of connections to a peer, 1 to 16; the dialling end decides. Transfers
	// from 1 MiB use one for each 512 KiB, up to all. Default: as many as ContextConfig.Loops.
	Conns int
	// Timeout bounds operations that have no timeout of their own. Default 30 s.
	Timeout time.Duration
	// DialTimeout bounds connecting to a peer. Default 10 s.
	DialTimeout time.Duration
	// IdleTimeout is how long a connection without operations is kept; a recv that waits is one.
	// Default 300 s; negative: for ever.
	IdleTimeout time.Duration
	// Seal has all connections encrypted and authenticated, with AES-128-GCM and keys that the ends
	// of each one agree on: a third party can neither read what is moved nor change it. A
	// connection is sealed if either end asks for it, and a peer that cannot is refused. Files are
	// then read by this process.
	Seal bool
	// Checksum has all connections carry checksums (CRC32C), which find damage that those of TCP
	// miss, but no forgery. A connection has them if either end asks for it. Seal includes it.
	// Nothing that does not match gets into memory: the connection ends, and what was under way
	// fails with ErrBroken.
	Checksum bool
	// RDMA is the device that large operations use, if both ends have one and neither asks for
	// Checksum or Seal. Default: none.
	RDMA RDMA
	// MaxPeers bounds the peers. A quarter of them, rounded down, is kept from those that share the
	// credential of one client. A peer that has connected by itself, and is not connected any more,
	// makes room for another one, unless Accept has returned it and it has messages that were not
	// received; its operations fail with ErrClosed then. Otherwise a new peer is refused, and
	// Connect fails with ErrBusy until the program closes a peer. Connections that have not said
	// which peer they are of are bounded, too: those of ranks to twice MaxPeers, at least 16, those
	// of clients to as many, and those of one client to three quarters of it. Default 1024.
	MaxPeers int
	// Dialer makes the connections to peers. Default: net.Dialer.
	Dialer dial.Func
	// Logger gets messages that are no errors. Default: none.
	Logger *slog.Logger
}

// Endpoint is one end of reads, writes and messages between programs. Its methods may be called
// from any goroutine.
type Endpoint struct {
	ctx     *Context
	cfg     Config
	id      uint64
	key     trust.Credential
	filter  ifname.Filter
	log     *slog.Logger
	regions registry
	watchers
	info Info
	card *card.Card      // nil: no RDMA
	life context.Context // ends at Close, by ErrClosed
	end  context.CancelCauseFunc
	gone chan struct{} // closed when Close has done its work

	acceptors []*trust.Acceptor
	serving   sync.WaitGroup
	going     sync.Mutex // held when serving begins, and when life ends

	mu       sync.Mutex
	closed   bool
	peers    map[peerID]*Peer
	fresh    []*Peer // that connected and were not accepted
	arrived  chan struct{}
	greeters map[*greeter]struct{}
	unsaid   map[string]int // by client: connections that have not said what they want

	strangers  atomic.Uint64 // connections that were refused
	refused    func(net.Conn, error)
	unreported func() // takes the endpoint out of package stats
	pastMu     sync.Mutex
	past       counts // of peers that were forgotten
}

const (
	purpose      = "endpoint"
	protocol     = 1 // see extra
	greetTimeout = 10 * time.Second
	minUnsaid    = 16                     // see crowdedLocked
	crossedPause = 100 * time.Millisecond // for connections of the peer, before it is dialled again
)

// hostTimeout is how long a peer's host may be silent: see checkHostLocked. Tests make it shorter.
var hostTimeout = 10 * time.Second

// Codes of a trust.Refusal.
const (
	codeOther   = 4 + iota // another endpoint answers
	codeFull               // the endpoint has too many peers, or too many of the client
	codeChecked            // its connections are wire.Checked at least
	codeSealed             // its connections are wire.Sealed
	codeCrowded            // too many connections have not said what they want: see crowdedLocked
)

// extra is what the handshake's Hello says about a connection. With direct the dialler can use
// RDMA, which nothing guards.
func extra(m wire.Mode, direct bool) uint64 {
	x := protocol | uint64(m)<<8
	if direct && m == wire.Plain {
		x |= 1 << 16
	}
	return x
}

// modeOf is the inverse of extra.
func modeOf(x uint64) (m wire.Mode, direct, ok bool) {
	m, direct = wire.Mode(x>>8), x>>16 == 1
	return m, direct, m <= wire.Sealed && x == extra(m, direct)
}

// mode is what the endpoint wants its connections to have, at least.
func (e *Endpoint) mode() wire.Mode {
	switch {
	case e.cfg.Seal:
		return wire.Sealed
	case e.cfg.Checksum:
		return wire.Checked
	}
	return wire.Plain
}

// guardOf makes the guard of a connection, whose ends have agreed on keys.
func guardOf(m wire.Mode, s *trust.Session, dialled bool) (wire.Guard, error) {
	if m != wire.Sealed {
		return wire.NewGuard(m, nil, nil)
	}
	out, err := s.Key(wire.DiallerSecret, wire.SecretSize)
	if err != nil {
		return wire.Guard{}, err
	}
	in, err := s.Key(wire.AcceptorSecret, wire.SecretSize)
	if err != nil {
		return wire.Guard{}, err
	}
	if !dialled {
		out, in = in, out
	}
	return wire.NewGuard(m, out, in)
}

// New makes an endpoint, which listens when New returns. Close ends it.
func New(c *Context, cfg Config) (*Endpoint, error) {
	if !c.made() {
		return nil, errors.New("endpoint: new: c is none that NewContext has made, want one")
	}
	e := &Endpoint{ctx: c, cfg: cfg, id: newID(), log: cfg.Logger, peers: map[peerID]*Peer{},
		arrived: make(chan struct{}, 1),
		gone:    make(chan struct{}), greeters: map[*greeter]struct{}{}, unsaid: map[string]int{}}
	if err := e.complete(); err != nil {
		return nil, fmt.Errorf("endpoint: %w", err)
	}
	e.regions.changed, e.regions.log = e.changed, e.log
	if err := c.use(); err != nil {
		return nil, fmt.Errorf("endpoint: %w", err)
	}
	if c := cfg.RDMA; c.Provider != nil {
		var err error
		e.card, err = card.Open(card.Config{Provider: c.Provider, Devices: c.Devices, GID: c.GID,
			Settings: c.Settings, Log: e.log, Last: e.regions.leave})
		if err != nil {
			e.ctx.unuse()
			return nil, fmt.Errorf("endpoint: %w", err)
		}
	}
	e.life, e.end = context.WithCancelCause(context.Background())
	e.info = Info{ID: e.id, Name: e.cfg.Name}
	if err := e.listen(); err != nil {
		e.Close()
		return nil, fmt.Errorf("endpoint: %w", err)
	}
	if e.cfg.IdleTimeout > 0 {
		e.serving.Go(e.sweep)
	}
	e.unreported = stats.Report(e.Stats)
	return e, nil
}

// complete checks the configuration and sets defaults.
func (e *Endpoint) complete() error {
	c := &e.cfg
	if e.log == nil {
		e.log = slog.New(slog.DiscardHandler)
	}
	if c.Conns == 0 {
		c.Conns = e.ctx.conns()
	}
	if c.Timeout == 0 {
		c.Timeout = 30 * time.Second
	}
	if c.DialTimeout == 0 {
		c.DialTimeout = 10 * time.Second
	}
	if c.IdleTimeout == 0 {
		c.IdleTimeout = 300 * time.Second
	}
	if c.MaxPeers == 0 {
		c.MaxPeers = 1024
	}
	if c.RDMA.From == 0 {
		c.RDMA.From = defaultFrom
	}
	switch {
	case c.Conns < 1 || c.Conns > wire.MaxConns:
		return fmt.Errorf("config: Conns is %d, want 1 to %d", c.Conns, wire.MaxConns)
	case c.Timeout < 0 || c.DialTimeout < 0:
		return fmt.Errorf("config: Timeout is %v and DialTimeout %v, want more than 0", c.Timeout, c.DialTimeout)
	case c.RDMA.From < 0:
		return fmt.Errorf("config: RDMA.From is %d, want 0 or more", c.RDMA.From)
	case c.MaxPeers < 1:
		return fmt.Errorf("config: MaxPeers is %d, want 1 or more", c.MaxPeers)
	}
	if err := c.RDMA.Settings.Check(); err != nil {
		return fmt.Errorf("config: %w", err)
	}
	if c.Name != "" {
		if err := checkName("endpoint", c.Name); err != nil {
			return err
		}
	}
	var err error
	if e.key, err = trust.ParseCredential(c.Secret); err != nil {
		return fmt.Errorf("config: secret: %w", err)
	}
	if e.key.Client != "" {
		c.Name, c.Interfaces = e.key.Client, "none"
	}
	return nil
}

// listen opens a listener on every allowed address.
func (e *Endpoint) listen() error {
	if e.cfg.Interfaces == "none" {
		return nil
	}
	var err error
	if e.filter, err = ifname.Parse(e.cfg.Interfaces); err != nil {
		return err
	}
	spec, err := ports.ParseSpec(e.cfg.Ports)
	if err != nil {
		return err
	}
	addrs, err := e.filter.Addrs()
	if err != nil {
		return files.Explain(err)
	}
	var skipped error
	e.refused = trust.LogRefused(e.log, "endpoint")
	addrs, left := foremost(addrs)
	if len(left) > 0 {
		e.log.Warn("this host has more addresses than an endpoint listens on: choose with Interfaces",
			"listening", addrs, "not listening", left)
	}
	for _, a := range addrs {
		l, err := ports.Listen(e.life, a.String(), spec)
		if errors.Is(err, syscall.EADDRNOTAVAIL) { // an IPv6 address that is tentative, or was removed
			skipped = err
			continue
		}
		if err != nil {
			return files.Explain(err)
		}
		t := &trust.Acceptor{Listener: l, Secret: e.key.Key, Purpose: purpose, Clients: true, Timeout: greetTimeout,
			Agree: true, // the dialling end may ask for Seal
			Max:   max(16, trust.DefaultMax()/len(addrs)), Admit: e.admit, Accepted: e.accepted,
			Lost: func(h trust.Hello) { e.said(h.Client) }, Failing: trust.LogFailing(e.log, "endpoint"),
			Refused: func(c net.Conn, err error) {
				if wanted(err) == wire.Plain { // else it may dial again, with another mode
					e.strangers.Add(1)
				}
				e.refused(c, err)
			}}
		e.acceptors = append(e.acceptors, t)
		e.serving.Go(t.Serve)
		e.info.Addrs = append(e.info.Addrs, addr(l.Addr().(*net.TCPAddr).AddrPort()))
	}
	if len(e.info.Addrs) == 0 {
		return fmt.Errorf("no address to listen on: %w", skipped)
	}
	return nil
}

// foremost returns the addresses to listen on, which are all unless they are too many, and those
// that are left. An address of loopback of each family stays: programs of this host may use it.
func foremost(addrs []netip.Addr) (listen, left []netip.Addr) {
	if len(addrs) <= maxAddrs {
		return addrs, nil
	}
	var loopback []netip.Addr
	for _, is4 := range []bool{true, false} {
		i := slices.IndexFunc(addrs, func(a netip.Addr) bool { return a.IsLoopback() && a.Is4() == is4 })
		if i >= 0 {
			loopback = append(loopback, addrs[i])
		}
	}
	for _, a := range addrs {
		switch {
		case slices.Contains(loopback, a):
		case len(listen)+len(loopback) < maxAddrs:
			listen = append(listen, a)
		default:
			left = append(left, a)
		}
	}
	return append(listen, loopback...), left
}

// Info returns what peers need to connect to the endpoint.
func (e *Endpoint) Info() Info {
	i := e.info
	i.Addrs = slices.Clone(i.Addrs)
	return i
}

// Register makes memory a region, which peers read and write by name until Unregister. m is the
// endpoint's until then: the program may read and write it, as far as it does not care when peers
// do. Memory of a device must be that of one of ContextConfig.Devices; it is accessed outside of
// the program's streams.
func (e *Endpoint) Register(name string, m mem.Memory, cfg RegionConfig) (*Region, error) {
	if err := e.ctx.reach(m); err != nil {
		return nil, fmt.Errorf("endpoint: region %s: %w", name, err)
	}
	r := &Region{name: name, n: int64(m.Len()), cfg: cfg}
	if r.exporter = e.ctx.exporter(m); r.exporter != nil || m.Loc().Host() {
		r.memory = m
	}
	e.ctx.open(&r.gate, m)
	return e.register(r)
}

// RegisterFile makes n bytes from offset off of a file a region. The kernel moves what is read from
// the file to a connection without a copy in this process, unless the connection has checksums or
// is sealed. The file stays open until after Unregister; if it is shorter than off+n reads of the
// rest fail with ErrFailed.
func (e *Endpoint) RegisterFile(name string, f *os.File, off, n int64, cfg RegionConfig) (*Region, error) {
	if f == nil || off < 0 || n < 0 || n > wire.MaxSize || off+n < 0 {
		return nil, fmt.Errorf("endpoint: region %s: %d bytes at %d of %s: want a file, and a range of it of "+
			"at most %d bytes", name, n, off, fileName(f), int64(wire.MaxSize))
	}
	r := &Region{name: name, n: n, cfg: cfg, file: f, base: off}
	r.gate.Open(nil)
	return e.register(r)
}

func (e *Endpoint) register(r *Region) (*Region, error) {
	if e.life.Err() != nil {
		return nil, fmt.Errorf("endpoint: region %s: %w", r.name, ErrClosed)
	}
	r.cfg.Clients = maps.Clone(r.cfg.Clients) // the program may change its own
	if err := e.regions.add(r); err != nil {
		return nil, fmt.Errorf("endpoint: %w", err)
	}
	return r, nil
}

// Regions returns the regions, in the order of their names.
func (e *Endpoint) Regions() []*Region { return e.regions.all() }

// Connect returns the peer that info describes, connected: it has proved to be that endpoint. To
// the holder of a client's credential, other holders of the same one can prove to be any endpoint.
// For an endpoint that is connected already, whichever end dialled, it returns the same Peer.
func (e *Endpoint) Connect(ctx context.Context, info Info) (*Peer, error) {
	if err := args.Context(ctx, "endpoint", "connect"); err != nil {
		return nil, err
	}
	if info.ID == e.id {
		return nil, errors.New("endpoint: that is this endpoint itself")
	}
	id, err := info.ID, error(nil)
	if id == 0 {
		id, err = e.identify(ctx, info)
	}
	var p *Peer
	if err == nil {
		info.ID = id
		p, err = e.peer(info)
	}
	if err == nil {
		if err = p.connect(ctx); err != nil {
			p.unwanted()
		}
	}
	if err != nil {
		return nil, fmt.Errorf("endpoint %v: %w", info, err)
	}
	return p, nil
}

// Accept returns a peer that has connected by itself, in the order in which they came. It waits for
// one until ctx ends, or the endpoint.
func (e *Endpoint) Accept(ctx context.Context) (*Peer, error) {
	if err := args.Context(ctx, "endpoint", "accept"); err != nil {
		return nil, err
	}
	for {
		e.mu.Lock()
		if len(e.fresh) > 0 {
			p := e.fresh[0]
			e.fresh = e.fresh[1:]
			if len(e.fresh) > 0 {
				e.tellLocked()
			}
			e.mu.Unlock()
			return p, nil
		}
		e.mu.Unlock()
		select {
		case <-e.arrived:
		case <-ctx.Done():
			return nil, fmt.Errorf("endpoint: accept: %w", context.Cause(ctx))
		case <-e.life.Done():
			return nil, fmt.Errorf("endpoint: accept: %w", ErrClosed)
		}
	}
}

func (e *Endpoint) tellLocked() {
	select {
	case e.arrived <- struct{}{}:
	default:
	}
}

// Peers returns the peers that are known.
func (e *Endpoint) Peers() []*Peer {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := make([]*Peer, 0, len(e.peers))
	for _, p := range e.peers {
		all = append(all, p)
	}
	return all
}

// peer returns the peer of info, a new one if it is not known.
func (e *Endpoint) peer(info Info) (*Peer, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil, ErrClosed
	}
	info.Addrs = slices.Clone(info.Addrs)
	id := peerID{"", info.ID} // clients do not listen
	if p := e.peers[id]; p != nil {
		p.mu.Lock()
		p.wanted = true
		if len(info.Addrs) > 0 {
			p.info = info
		}
		p.mu.Unlock()
		return p, nil
	}
	if n := len(e.peers); n >= e.cfg.MaxPeers && !e.evictLocked("") {
		return nil, fmt.Errorf("%w: there are %d peers, and Config.MaxPeers allows %d: close those that are not needed",
			ErrBusy, n, e.cfg.MaxPeers)
	}
	if checkName("endpoint", info.Name) != nil {
		info.Name = ""
	}
	p := newPeer(e, id, info.Name)
	p.info, p.wanted = info, true
	e.peers[id] = p
	return p, nil
}

// forget removes a peer.
func (e *Endpoint) forget(p *Peer) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.peers[p.peerID] == p {
		delete(e.peers, p.peerID)
		p.mu.Lock()
		p.forgetLocked()
		p.mu.Unlock()
	}
	e.fresh = slices.DeleteFunc(e.fresh, func(o *Peer) bool { return o == p })
}

// goes runs f in a goroutine that Close waits for; false: the endpoint is closed.
func (e *Endpoint) goes(f func()) bool {
	e.going.Lock()
	defer e.going.Unlock()
	if e.life.Err() != nil {
		return false
	}
	e.serving.Go(f)
	return true
}

// Close ends all operations with ErrClosed, disconnects from the peers and unregisters the regions.
// After it returned no memory is accessed. Idempotent.
func (e *Endpoint) Close() error {
	e.mu.Lock()
	was := e.closed
	e.closed = true
	var peers []*Peer
	for _, p := range e.peers {
		peers = append(peers, p)
	}
	var waiting []*greeter
	for g := range e.greeters {
		waiting = append(waiting, g)
	}
	e.mu.Unlock()
	if was {
		<-e.gone
		return nil
	}
	defer close(e.gone)
	if e.unreported != nil {
		e.unreported()
	}
	e.going.Lock()
	e.end(ErrClosed)
	e.going.Unlock()
	for _, a := range e.acceptors {
		a.Close()
	}
	for _, g := range waiting {
		g.conn.Close(ErrClosed)
	}
	for _, p := range peers {
		p.leave(ErrClosed)
	}
	for _, r := range e.regions.all() {
		r.Unregister()
	}
	e.serving.Wait()
	e.ctx.unuse()
	if e.card != nil {
		if err := e.card.Close(); err != nil {
			return fmt.Errorf("endpoint: an RDMA device was not closed: %w", err)
		}
	}
	return nil
}

// admit decides on an authenticated connection.
func (e *Endpoint) admit(_ net.Conn, h trust.Hello) error {
	switch {
	case h.ToIncarnation != 0 && h.ToIncarnation != e.id:
		return &trust.Refusal{Code: codeOther, Text: "another endpoint has this address now"}
	case h.FromIncarnation == e.id:
		return &trust.Refusal{Code: codeOther, Text: "that is this endpoint itself"}
	case h.FromIncarnation == 0:
		return &trust.Refusal{Code: codeOther, Text: "invalid identity"}
	}
	mode, _, ok := modeOf(h.Extra)
	if want := e.mode(); !ok {
		return &trust.Refusal{Code: codeOther, Text: fmt.Sprintf("options %#x are not known here", h.Extra)}
	} else if mode < want {
		return refuseMode(want)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if why := e.crowdedLocked(h.Client); why != "" { // before it evicts a peer
		return &trust.Refusal{Code: codeCrowded, Text: why}
	}
	if e.peers[peerID{h.Client, h.FromIncarnation}] == nil {
		if why := e.fullLocked(h.Client); why != "" {
			return &trust.Refusal{Code: codeFull, Text: why}
		}
	}
	e.unsaid[h.Client]++
	return nil
}

// crowdedLocked returns why no further connection of client may come before others have said what
// they want, or "" if one may. Ranks have room of their own, and one client has a part of that of
// clients. A peer needs room for two: it makes the connections of a session one after the other,
// and this end may not have seen yet that the one that asked for the identity is closed.
func (e *Endpoint) crowdedLocked(client string) string {
	peers, all := max(e.cfg.MaxPeers, minUnsaid/2), 0
	for c, n := range e.unsaid {
		if (c == "") == (client == "") {
			all += n
		}
	}
	if n := e.unsaid[client]; client != "" && n >= 2*(peers-peers/4) {
		return fmt.Sprintf("it waits for Hello on %d connections with the credential of client %s: send it, or dial "+
			"again in %v", n, client, greetTimeout)
	}
	if all >= 2*peers {
		return fmt.Sprintf("it waits for Hello on %d connections: dial again in %v", all, greetTimeout)
	}
	return ""
}

// said counts a connection out that has said what it wants, or has ended.
func (e *Endpoint) said(client string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.saidLocked(client)
}

func (e *Endpoint) saidLocked(client string) {
	if e.unsaid[client]--; e.unsaid[client] == 0 {
		delete(e.unsaid, client)
	}
}

// fullLocked makes room for another peer, which has the credential of client if that is not "". It
// returns why there is none, or "" if there is some.
func (e *Endpoint) fullLocked(client string) string {
	if client != "" {
		n := 0
		for id := range e.peers {
			if id.client == client {
				n++
			}
		}
		if n >= e.cfg.MaxPeers-e.cfg.MaxPeers/4 && !e.evictLocked(client) {
			return fmt.Sprintf("it has %d peers with the credential of client %s, and takes no more of them: "+
				"close some, or raise its Config.MaxPeers", n, client)
		}
	}
	if n := len(e.peers); n >= e.cfg.MaxPeers && !e.evictLocked("") {
		return fmt.Sprintf("it has %d peers, and takes no more", n)
	}
	return ""
}

// refuseMode refuses a connection that has less than the mode that this end wants. A dialler of
// this package dials again: see wanted.
func refuseMode(want wire.Mode) error {
	if want == wire.Sealed {
		return &trust.Refusal{Code: codeSealed, Text: "it takes sealed connections alone: set Seal at this end if it " +
			"can, or do without at the one that refuses"}
	}
	return &trust.Refusal{Code: codeChecked, Text: "it takes connections with checksums alone: set Checksum at this " +
		"end if it can, or do without at the one that refuses"}
}

// wanted is the mode that an acceptor has asked for by refusing another one, or Plain.
func wanted(err error) wire.Mode {
	var r *trust.Refusal
	switch {
	case !errors.As(err, &r):
	case r.Code == codeChecked:
		return wire.Checked
	case r.Code == codeSealed:
		return wire.Sealed
	}
	return wire.Plain
}

// accepted takes over an accepted connection.
func (e *Endpoint) accepted(c net.Conn, h trust.Hello, s *trust.Session) {
	mode, direct, _ := modeOf(h.Extra)
	guard, err := guardOf(mode, s, false)
	if err != nil {
		e.log.Warn("endpoint: a connection is refused", "from", c.RemoteAddr(), "err", err)
		e.said(h.Client)
		c.Close()
		return
	}
	fd, err := socket.Detach(c)
	if err != nil {
		e.log.Warn("endpoint: a connection is closed", "from", c.RemoteAddr(), "err", files.Explain(err))
		e.said(h.Client)
		return
	}
	g := &greeter{ep: e, from: peerID{h.Client, h.FromIncarnation}, direct: direct && e.card != nil, socket: c}
	c2, err := e.ctx.loop().Add(fd, guard, g, func(c *link.Conn) {
		g.conn = c
		e.mu.Lock()
		e.greeters[g] = struct{}{}
		e.mu.Unlock()
		g.timer = time.AfterFunc(greetTimeout, func() { c.Close(errors.New("it did not say what it wants")) })
	})
	if err != nil {
		g.stop()
	} else if e.life.Err() != nil { // Close may have looked before
		c2.Close(ErrClosed)
	}
}

// greeter handles a connection until it has said which session it belongs to.
type greeter struct {
	ep    *Endpoint
	from  peerID
	conn  *link.Conn
	timer *time.Timer
	asked bool // for its identity
	h     wire.Header
	g     wire.Greeting

	direct bool     // both ends can use RDMA
	socket net.Conn // has the addresses, and is closed
}

func (g *greeter) stop() {
	g.timer.Stop()
	g.ep.mu.Lock()
	defer g.ep.mu.Unlock()
	if _, ok := g.ep.greeters[g]; ok {
		delete(g.ep.greeters, g)
		g.ep.saidLocked(g.from.client)
	}
}

// Frame implements link.Handler.
func (g *greeter) Frame(c *link.Conn, h wire.Header, ext []byte) (link.Sink, error) {
	if h.Op != wire.Hello {
		return link.Sink{}, fmt.Errorf("%w: %v before Hello", wire.ErrFrame, h.Op)
	}
	var err error
	g.h = h
	if g.g, err = wire.DecodeGreeting(ext); err != nil {
		if errors.Is(err, ErrVersion) { // so that the dialler can say so, too
			c.Send(g.ep.greeting(h.Address, wire.Greeting{Count: 1}))
		}
		return link.Sink{}, err
	}
	return link.Sink{Buf: c.Text(h.Size - uint64(len(ext))), Token: g}, nil
}

// helloName returns the name in a Hello, which may be empty.
func helloName(sink link.Sink) (string, error) {
	name := string(sink.Buf)
	if name != "" {
		if err := checkName("endpoint", name); err != nil {
			return "", fmt.Errorf("%w: %w", wire.ErrFrame, err)
		}
	}
	return name, nil
}

// End implements link.Handler.
func (g *greeter) End(c *link.Conn, sink link.Sink, _ bool) error {
	name, err := helloName(sink)
	if err != nil {
		return err
	}
	if g.h.Address == 0 { // it only wants the identity
		if g.asked {
			return fmt.Errorf("%w: a second Hello without a session", wire.ErrFrame)
		}
		g.asked = true
		c.Send(g.ep.greeting(0, wire.Greeting{Index: g.g.Index, Count: g.g.Count}))
		return nil
	}
	g.stop()
	p, s, err := g.ep.enter(g.from, name, g.h.Address, g.g, g.direct)
	if errors.Is(err, errCrossed) {
		c.Send(wire.Header{Op: wire.Bye}.Append(nil))
	}
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.settle(c)
	c.SetHandler(s)
	c.Later(s.greeting(int(g.g.Index)))
	p.touchLocked(c)
	return s.joinLocked(c, g.g)
}

// Broken implements link.Handler.
func (g *greeter) Broken(c *link.Conn, err error) {
	g.stop()
	if errors.Is(err, ErrVersion) || errors.Is(err, wire.ErrFrame) {
		g.ep.refused(g.socket, err)
	}
}

// enter returns the session that a peer's connection belongs to.
func (e *Endpoint) enter(from peerID, name string, id uint64, g wire.Greeting, direct bool) (*Peer, *session,
	error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil, nil, ErrClosed
	}
	p := e.peers[from]
	if p == nil {
		if why := e.fullLocked(from.client); why != "" {
			return nil, nil, fmt.Errorf("%w: %s", ErrBusy, why)
		}
		p = newPeer(e, from, cmp.Or(from.client, name))
		e.peers[from] = p
		e.fresh = append(e.fresh, p)
		e.tellLocked()
	}
	room := int64(0)
	if g.Index == 0 { // others begin no session
		room = e.roomLocked(p)
	}
	p.mu.Lock()
	defer p.unlock()
	if s := p.coming; s != nil && s.id == id && !s.broken {
		return p, s, nil
	}
	if g.Index > 0 {
		return nil, nil, fmt.Errorf("%w: connection %d of a session that is over", wire.ErrFrame, g.Index)
	}
	switch s := p.session; {
	case e.id > from.id: // the peer's connections are the ones to use
	case s == nil && p.dialling != nil, s != nil && s.dialled && s.id != g.Last:
		return nil, nil, errCrossed
	}
	if p.coming != nil {
		p.coming.breakLocked(fmt.Errorf("%w: the peer has connected anew", ErrBroken))
	}
	s := newSession(p, id, int(g.Count), room)
	if direct {
		s.path = newPath(s)
	}
	p.coming = s
	s.limitLocked(func() {
		if !s.up {
			s.breakLocked(fmt.Errorf("%w: not all connections came", ErrBroken))
			p.resumeLocked()
		}
	})
	return p, s, nil
}

// roomLocked is how much a peer's next session may have of window. A client can have many
// identities, so that the n-th of its peers that connects gets an n-th of clientWindow at most.
// Those that are connected count, and those that have left messages.
func (e *Endpoint) roomLocked(p *Peer) int64 {
	if p.client == "" {
		return window
	}
	n := int64(1)
	for id, o := range e.peers {
		if o == p || id.client != p.client {
			continue
		}
		o.mu.Lock()
		if o.session != nil || o.coming != nil && !o.coming.broken || o.mail.len() > 0 {
			n++
		}
		o.mu.Unlock()
	}
	return min(window, clientWindow/n)
}

// errCrossed says that both ends dial each other, and that the connections of the end with the
// smaller identity are the ones to use.
var errCrossed = errors.New("both ends connect at the same time")

// evictLocked makes room for a peer, and reports whether it could. It takes out one that has the
// credential of client, or any one if client is "". A peer whose messages the program has not
// received stays if the program has it, and goes last if not.
func (e *Endpoint) evictLocked(client string) bool {
	for _, unread := range []bool{false, true} {
		for id, p := range e.peers {
			if client != "" && id.client != client {
				continue
			}
			p.mu.Lock()
			ok := p.session == nil && p.dialling == nil && !p.wanted && len(p.due) == 0 && (p.coming == nil ||
				p.coming.broken) && (p.mail.len() == 0 || unread && slices.Contains(e.fresh, p))
			if ok {
				p.forgetLocked()
				p.gone = fmt.Errorf("%v: %w: it had no connection, and another peer has its place: Config.MaxPeers "+
					"is %d", p, ErrClosed, e.cfg.MaxPeers)
				p.end(p.gone)
				if p.parting != nil {
					p.parting.breakLocked(p.gone)
				}
				p.mail = queue[*arrival]{}
			}
			p.mu.Unlock()
			if ok {
				delete(e.peers, id)
				e.fresh = slices.DeleteFunc(e.fresh, func(o *Peer) bool { return o == p })
				return true
			}
		}
	}
	return false
}

// dial makes a session with a peer, or waits for one that the peer makes.
func (e *Endpoint) dial(p *Peer) error {
	ctx, cancel := context.WithTimeout(p.life, e.cfg.DialTimeout)
	defer cancel()
	p.mu.Lock()
	info, coming := p.info, p.coming
	p.mu.Unlock()
	if coming != nil && p.awaitSession(ctx, coming.over) == nil {
		return nil
	}
	addrs, why := e.order(info.Addrs)
	for i, a := range addrs {
		part, cancel := share(ctx, len(addrs)-i)
		err := e.dialOrAwait(part, p, a)
		cancel()
		if err == nil {
			return nil
		}
		why = append(why, fmt.Errorf("%s: %w", a, err))
		if ctx.Err() != nil {
			break
		}
	}
	return explain(why)
}

// dialOrAwait makes a session at one address, or waits for one that the peer makes. It dials again
// if none comes: the peer does not dial if it had only not noticed the end of the session before.
func (e *Endpoint) dialOrAwait(ctx context.Context, p *Peer, address string) error {
	for {
		p.mu.Lock()
		if p.gone != nil {
			defer p.mu.Unlock()
			return p.gone
		}
		s := newSession(p, newID(), e.cfg.Conns, window)
		s.dialled = true
		p.mu.Unlock()
		err := e.dialAt(ctx, s, address)
		if err == nil {
			return nil
		}
		p.mu.Lock()
		s.breakLocked(err)
		p.unlock()
		if !errors.Is(err, errCrossed) {
			return err
		}
		pause, cancel := context.WithTimeout(ctx, crossedPause)
		err = p.awaitSession(pause, nil)
		cancel()
		if err == nil || ctx.Err() != nil {
			return err
		}
	}
}

// share returns a context with a part of the time that ctx has: that of one of n addresses.
func share(ctx context.Context, n int) (context.Context, context.CancelFunc) {
	d, ok := ctx.Deadline()
	if !ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, time.Until(d)/time.Duration(n))
}

// explain joins the reasons why no address could be dialled.
func explain(why []error) error {
	if len(why) == 0 {
		why = []error{errors.New("the peer has no addresses")}
	}
	return &dialError{why}
}

// dialError says why there is no connection. It wraps ErrBroken, without saying that one was lost.
type dialError struct{ why []error }

func (e *dialError) Error() string {
	var all []string
	for _, err := range e.why {
		all = append(all, err.Error())
	}
	return "cannot connect: " + strings.Join(all, "; ")
}

func (e *dialError) Unwrap() []error { return append([]error{ErrBroken}, e.why...) }

// order returns the addresses that can be reached, best first, and why others cannot.
func (e *Endpoint) order(addrs []string) (out []string, why []error) {
	m := route.This(e.filter)
	type at struct {
		route.Path
		text string
	}
	var found []at
	for _, text := range addrs {
		a, err := netip.ParseAddrPort(text)
		if err != nil { // a name: the dialler resolves it
			found = append(found, at{text: text})
			continue
		}
		p, err := m.Judge(a, route.Unknown)
		if err != nil {
			why = append(why, err)
			continue
		}
		found = append(found, at{p, text})
	}
	slices.SortStableFunc(found, func(a, b at) int { return route.Compare(a.Path, b.Path) })
	for _, f := range found {
		out = append(out, f.text)
	}
	return out, why
}

// line is a connection whose ends have proved themselves.
type line struct {
	fd    int
	mode  wire.Mode
	guard wire.Guard
}

// open opens a connection to an address and proves both ends; id is that of the other end, 0: any.
// It has the mode, or a higher one that the other end wants.
func (e *Endpoint) open(ctx context.Context, address string, id uint64, mode wire.Mode) (l line, err error) {
	for {
		l, err = e.prove(ctx, address, id, mode)
		want := wanted(err)
		if want <= mode {
			break
		}
		mode = want // each one at most once
	}
	var r *trust.Refusal
	switch {
	case errors.As(err, &r):
		return l, fmt.Errorf("%w: %s", ErrRefused, r.Text)
	case errors.Is(err, trust.ErrAuth):
		return l, fmt.Errorf("%w: %w", ErrAuth, err)
	}
	return l, files.Explain(err)
}

// prove is open for exactly this mode.
func (e *Endpoint) prove(ctx context.Context, address string, id uint64, mode wire.Mode) (line, error) {
	var conn net.Conn
	var s *trust.Session
	err := trust.Redial(ctx, func() (err error) {
		if conn, err = e.cfg.Dialer.Dial(ctx, &net.Dialer{KeepAlive: 15 * time.Second}, 0, address); err != nil {
			return err
		}
		if d, ok := ctx.Deadline(); ok {
			conn.SetDeadline(d)
		}
		stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
		s, err = trust.Client(conn, e.key.Key, purpose, trust.Hello{Client: e.key.Client, FromIncarnation: e.id,
			ToIncarnation: id, Extra: extra(mode, e.card != nil)}, mode == wire.Sealed)
		if !stop() && err == nil {
			err = ctx.Err()
		}
		if err != nil {
			conn.Close()
		}
		var r *trust.Refusal
		if errors.As(err, &r) && r.Code == codeCrowded {
			return fmt.Errorf("%w: %w", trust.ErrTurnedAway, err)
		}
		return err
	})
	if err != nil {
		return line{}, err
	}
	guard, err := guardOf(mode, s, true)
	if err != nil {
		conn.Close()
		return line{}, err
	}
	conn.SetDeadline(time.Time{})
	fd, err := socket.Detach(conn)
	return line{fd, mode, guard}, err
}

// identify asks the endpoint at an address for its identity.
func (e *Endpoint) identify(ctx context.Context, info Info) (uint64, error) {
	all, cancel := context.WithTimeout(ctx, e.cfg.DialTimeout)
	defer cancel()
	defer context.AfterFunc(e.life, cancel)()
	addrs, why := e.order(info.Addrs)
	for i, a := range addrs {
		part, cancel := share(all, len(addrs)-i)
		defer cancel()
		l, err := e.open(part, a, 0, e.mode())
		if err == nil {
			w := &asked{id: make(chan uint64, 1), gone: make(chan error, 1)}
			var c *link.Conn
			if c, err = e.ctx.loop().Add(l.fd, l.guard, w, func(*link.Conn) {}); err == nil {
				c.Send(e.greeting(0, wire.Greeting{Count: 1}))
				select {
				case id := <-w.id:
					c.Close(ErrClosed)
					<-w.gone
					return id, nil
				case err = <-w.gone:
				case <-part.Done():
					err = part.Err()
					c.Close(err)
					<-w.gone
				}
			}
		}
		why = append(why, fmt.Errorf("%s: %w", a, err))
	}
	if d, ok := ctx.Deadline(); ok && !time.Now().Before(d) {
		<-ctx.Done() // what failed at the deadline may have been faster
	}
	switch {
	case e.life.Err() != nil:
		return 0, ErrClosed
	case ctx.Err() != nil:
		return 0, cancelledBy(ctx)
	}
	return 0, explain(why)
}

// greeting is the first frame on a connection of a session; 0: of none.
func (e *Endpoint) greeting(session uint64, g wire.Greeting) []byte {
	name := e.cfg.Name
	b := wire.Header{Size: uint64(wire.HelloSize + len(name)), Address: session, Op: wire.Hello}.Append(nil)
	g.Version, g.Requests, g.Endpoint = wire.Version, maxRequests, e.id
	return append(g.Append(b), name...)
}

// asked handles a connection that is to tell whose it is.
type asked struct {
	id   chan uint64
	gone chan error
}

// Frame implements link.Handler.
func (w *asked) Frame(c *link.Conn, h wire.Header, ext []byte) (link.Sink, error) {
	if h.Op != wire.Hello {
		return link.Sink{}, fmt.Errorf("%w: %v before Hello", wire.ErrFrame, h.Op)
	}
	g, err := wire.DecodeGreeting(ext)
	if err == nil && len(w.id) == 0 {
		w.id <- g.Endpoint
	}
	return link.Sink{}, err
}

// End implements link.Handler.
func (w *asked) End(*link.Conn, link.Sink, bool) error { return nil }

// Broken implements link.Handler.
func (w *asked) Broken(_ *link.Conn, err error) { w.gone <- err }

// dialAt makes all connections of a session to one address, and waits until it is up.
func (e *Endpoint) dialAt(ctx context.Context, s *session, address string) error {
	mode := e.mode()
	for i := range s.conns {
		l, err := e.open(ctx, address, s.peer.id, mode)
		if err != nil {
			return err
		}
		mode = l.mode
		if i == 0 && mode == wire.Plain && e.card != nil {
			s.peer.mu.Lock()
			s.path = newPath(s)
			s.peer.mu.Unlock()
		}
		c, err := e.ctx.loop().Add(l.fd, l.guard, &greeted{s}, func(c *link.Conn) {
			s.peer.mu.Lock()
			s.conns[i] = c
			s.peer.mu.Unlock()
		})
		if err != nil {
			s.peer.mu.Lock()
			s.conns[i] = nil
			s.peer.mu.Unlock()
			return err
		}
		s.peer.mu.Lock()
		if s.broken { // before c was one of its connections, perhaps
			c.Close(s.err)
		}
		up := s.peer.session
		hello := s.greeting(i)
		s.peer.mu.Unlock()
		if up != nil { // the peer was faster
			return errCrossed
		}
		c.Send(hello)
		select {
		case <-s.step: // the peer knows it: they arrive in order
		case <-s.over:
			s.peer.mu.Lock()
			defer s.peer.mu.Unlock()
			return s.err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// greeted handles a dialled connection until the peer has greeted.
type greeted struct{ *session }

// Frame implements link.Handler.
func (g *greeted) Frame(c *link.Conn, h wire.Header, ext []byte) (link.Sink, error) {
	if h.Op == wire.Bye {
		return link.Sink{}, errCrossed
	}
	if h.Op != wire.Hello || h.Address != g.id {
		return link.Sink{}, fmt.Errorf("%w: %v of session %x, expected Hello of %x", wire.ErrFrame, h.Op,
			h.Address, g.id)
	}
	gr, err := wire.DecodeGreeting(ext)
	if err != nil {
		return link.Sink{}, err
	}
	return link.Sink{Buf: c.Text(h.Size - uint64(len(ext))), Token: gr}, nil
}

// End implements link.Handler.
func (g *greeted) End(c *link.Conn, sink link.Sink, _ bool) error {
	p := g.peer
	p.mu.Lock()
	defer p.settle(c)
	name, err := helloName(sink)
	if err != nil {
		return err
	}
	if p.Name() == "" && name != "" {
		p.name.Store(&name)
	}
	c.SetHandler(g.session)
	gr := sink.Token.(wire.Greeting)
	if int(gr.Index) >= len(g.conns) || g.conns[gr.Index] != c {
		return fmt.Errorf("%w: Hello of connection %d on another one", wire.ErrFrame, gr.Index)
	}
	return g.joinLocked(c, gr)
}
