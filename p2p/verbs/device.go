package verbs

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"tutti/mem"
	"tutti/rdma"
)

// device is an open device, for one of its ports. It is open as long as the transport, a lane or an
// exposure uses it.
type device struct {
	rdma.Device
	at       rdma.DevicePort
	want     string // the address, see rdma.ChooseGID
	settings rdma.Settings
	refs     atomic.Int64
	down     atomic.Bool   // the port is
	gone     atomic.Bool   // the device was removed
	moved    atomic.Uint64 // bytes of puts and gets of this rank

	keys rdma.Withheld // of deregistered memory that lanes may use yet

	refused sync.Map // why memory at a location, of another device, cannot be registered

	source, sink blank // of peers' reads whose contents do not matter, and of this end's
}

// blank is memory whose contents do not matter, for reads whose end does: see railKey.
type blank struct {
	sync.Mutex
	mr    rdma.MR // nil: not yet
	bytes []byte  // of its own, without pointers beside it: C code gets the address
}

// register registers the memory once.
func (b *blank) register(t *Transport, d *device, access rdma.Access) (address uint64, mr rdma.MR, err error) {
	b.Lock()
	defer b.Unlock()
	if b.mr == nil {
		b.bytes = make([]byte, 8)
		b.mr, err = t.registerKey(d, mem.Host(b.bytes, mem.Anywhere), access)
	}
	return addressOf(b.bytes), b.mr, err
}

// refuses returns why memory at loc goes through host memory: it could not be registered once.
func (d *device) refuses(loc mem.Location) error {
	if err, ok := d.refused.Load(loc); ok {
		return err.(error)
	}
	return nil
}

// refuse has refuses return err. That of host memory does not count: what is too much as a whole is
// registered in pieces.
func (d *device) refuse(loc mem.Location, err error) {
	if !loc.Host() {
		d.refused.Store(loc, err)
	}
}

// register registers memory with a device.
func (t *Transport) register(d *device, m mem.Memory, access rdma.Access) (rdma.MR, error) {
	var e rdma.Exporter
	if find := t.cfg.Exporter; find != nil && !m.Loc().Host() {
		var err error
		if e, err = find(m.Loc()); err != nil {
			return nil, err
		}
	}
	return rdma.Register(d.Device, m, e, access)
}

// registerKey registers memory with a key that no peer may use for what was registered before.
func (t *Transport) registerKey(d *device, m mem.Memory, access rdma.Access) (rdma.MR, error) {
	r, _, err := d.keys.Register(d.at.String(), func() (rdma.MR, error) { return t.register(d, m, access) })
	return r, err
}

// deregister ends a registration.
func (d *device) deregister(r rdma.MR) error {
	key := r.RemoteKey()
	err := r.Close()
	if err == nil {
		d.keys.Free(key)
	}
	return err
}

// Check reports whether Listen of a transport with cfg would succeed, and whether the objects of a
// link can be made with one of the ports for frames, which it releases again.
func Check(cfg Config) error {
	t := New(cfg)
	all, err := openAll(&t.cfg, func(rdma.Event) {})
	t.devices = all
	for i := range all {
		var n lane
		one := errors.Join(t.make(&n, t.cfg.RingBytes, nil, i, func() {}), n.close())
		if one == nil {
			err = nil
			break
		}
		err = errors.Join(err, one)
	}
	return errors.Join(err, t.Close())
}

// openAll opens the ports that cfg allows, the nearest first. Those that are not active are opened
// as well, because their events say when they are. It fails if none is.
func openAll(cfg *Config, notify func(rdma.Event)) (all []*device, err error) {
	if err := cfg.Settings.Check(); err != nil {
		return nil, err
	}
	places, why, err := rdma.Allowed(cfg.Provider, cfg.Devices)
	if err != nil {
		return nil, errors.Join(err, why)
	}
	rdma.Nearest(places, cfg.Nodes)
	usable := false
	for _, p := range places {
		d, err := openPort(cfg, p.DevicePort, notify)
		if err != nil {
			why = errors.Join(why, err)
			continue
		}
		all = append(all, d)
		if _, err := d.address(); err != nil {
			why = errors.Join(why, err)
		} else {
			usable = true
		}
	}
	if usable {
		return all, nil
	}
	for _, d := range all {
		why = errors.Join(why, d.release())
	}
	return nil, why
}

func openPort(cfg *Config, at rdma.DevicePort, notify func(rdma.Event)) (*device, error) {
	d := &device{at: at, want: cfg.GID, settings: cfg.Settings}
	d.down.Store(true)
	var err error
	d.Device, err = cfg.Provider.Open(at.Device, func(e rdma.Event) {
		switch {
		case e.Kind == rdma.DeviceRemoved:
			d.gone.Store(true)
		case e.Kind == rdma.PortLost && e.Port == d.at.Port:
			d.down.Store(true)
		case e.Kind == rdma.PortUp && e.Port == d.at.Port:
			d.down.Store(false)
		}
		notify(e)
	})
	if err != nil {
		return nil, err
	}
	d.retain()
	// An event of this time says the same, or is followed by another one.
	if p, err := d.Port(at.Port); err == nil && p.State == rdma.PortActive {
		d.down.Store(false)
	}
	return d, nil
}

// port is a port in use: a device, and its address at the time.
type port struct {
	*device
	path path
	gid  int // index of the address
}

// address finds out how peers reach the port now. The port is not retained.
func (d *device) address() (port, error) {
	p, err := d.Port(d.at.Port)
	if err != nil {
		return port{}, err
	}
	if p.State != rdma.PortActive {
		return port{}, fmt.Errorf("rdma: port %v is %v: it cannot be used until it is active", d.at, p.State)
	}
	gids, err := d.GIDs(d.at.Port)
	if err != nil {
		return port{}, err
	}
	a := path{link: rdma.InfiniBand, mtu: p.MTU, lid: p.LID, grh: p.GRHRequired}
	if !p.Ethernet && !p.GRHRequired && len(gids) == 0 && d.want == "" {
		return port{d, a, 0}, nil
	}
	e, err := rdma.ChooseGID(gids, d.want)
	if err != nil {
		return port{}, fmt.Errorf("%v: %w", d.at, err)
	}
	a.gid, a.link = e.GID, e.Type
	return port{d, a, e.Index}, nil
}

// changed returns an error if the port has not the address any more that it had, at its index. A
// port that cannot say so has it.
func (p *port) changed() error {
	gids, err := p.GIDs(p.at.Port)
	if err != nil || p.path.gid == (rdma.GID{}) || slices.ContainsFunc(gids, func(e rdma.GIDEntry) bool {
		return e.Index == p.gid && e.GID == p.path.gid && e.Type == p.path.link
	}) {
		return nil
	}
	return fmt.Errorf("the address of %v is not %v at index %d any more", p.at, p.path.gid, p.gid)
}

// lost reports whether nothing passes the port.
func (d *device) lost() bool { return d.down.Load() || d.removed() }

// removed reports whether the device was. It does not come back as this one.
func (d *device) removed() bool { return d.gone.Load() }

func (d *device) retain() { d.refs.Add(1) }

// release undoes retain. The last one closes the device.
func (d *device) release() error {
	if d.refs.Add(-1) > 0 {
		return nil
	}
	var err error
	for _, b := range [...]*blank{&d.source, &d.sink} {
		if b.mr != nil {
			err = errors.Join(err, d.deregister(b.mr))
		}
	}
	if d.removed() {
		err = nil // what was removed uses nothing
	}
	return errors.Join(err, d.Close())
}

// closeQP closes a queue pair of the device, if there is one. After an error it is still there.
func (d *device) closeQP(qp *rdma.QP) error {
	if *qp == nil {
		return nil
	}
	if err := (*qp).Close(); err != nil && !d.removed() { // what was removed uses nothing
		return fmt.Errorf("queue pair %d of %s: %w", (*qp).Number(), d.at.Device, err)
	}
	*qp = nil
	return nil
}

// propose chooses the ports of a lane of this end, which has some, the nearest first: that of the
// frames' queue pair, the attempt-th, and that of each rail, per queue pairs for each port. Rails
// are in the order of the ports' names, which is the same for all processes of a machine, and for
// machines that are alike.
func propose(near []port, per, attempt int) (frames port, rails []port) {
	near = near[:min(len(near), maxRails)]
	frames = near[attempt%len(near)]
	byName := slices.SortedFunc(slices.Values(near), func(a, b port) int { return a.at.Compare(b.at) })
	of := map[rdma.GIDType]int{} // ports with a protocol
	for i := range byName {
		p := &byName[i]
		p.path.pair = of[p.path.link]
		of[p.path.link]++
		if p.at == frames.at {
			frames.path.pair = p.path.pair
		}
	}
	for range per {
		for i := range byName {
			if len(rails) == maxRails {
				return frames, rails
			}
			rails = append(rails, byName[i])
			byName[i].path.pair += of[byName[i].path.link]
		}
	}
	return frames, rails
}

// accept chooses the ports of this end for the queue pairs of theirs. A rail has no port if this
// end has none with its protocol.
func accept(near []port, theirs *setup) (frames port, rails []port, err error) {
	byName := slices.SortedFunc(slices.Values(near), func(a, b port) int { return a.at.Compare(b.at) })
	pair := func(p path) (port, bool) {
		fit := slices.DeleteFunc(slices.Clone(byName), func(o port) bool { return o.path.link != p.link })
		if p.qp == 0 || len(fit) == 0 {
			return port{}, false
		}
		mine := fit[p.pair%len(fit)]
		mine.path.pair = p.pair
		return mine, true
	}
	frames, ok := pair(theirs.frames)
	if !ok {
		return port{}, nil, fmt.Errorf("the peer's port is %v, and %v are others: they cannot be connected",
			theirs.frames.link, names(near))
	}
	for _, p := range theirs.rails {
		mine, _ := pair(p)
		rails = append(rails, mine)
	}
	return frames, rails, nil
}

// names returns the names of ports.
func names(ports []port) (list []rdma.DevicePort) {
	for _, p := range ports {
		list = append(list, p.at)
	}
	return list
}
