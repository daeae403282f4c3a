package verbs

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"

	"tutti/mem"
	"tutti/p2p"
	"tutti/rdma"
)

// device is the port of an open device that a transport uses. It is open as long as the transport
// or a lane uses it.
type device struct {
	rdma.Device
	at   rdma.DevicePort
	port int
	want string // the address, see rdma.ChooseGID
	refs atomic.Int64
	down atomic.Bool // the port is
	gone atomic.Bool // the device was removed

	mu       sync.Mutex
	withheld map[uint32]int // keys of deregistered memory that so many lanes may use yet
}

// register registers memory with a key that no peer may use for what was registered before.
func (d *device) register(m mem.Memory, access rdma.Access) (rdma.MR, error) {
	var aside []rdma.MR // so that the device gives other keys
	defer func() {
		for _, r := range aside {
			r.Close() // memory that stays registered has a key that nobody is told
		}
	}()
	for range 16 {
		r, err := d.Register(m, access)
		if err != nil {
			return nil, err
		}
		d.mu.Lock()
		taken := d.withheld[r.RemoteKey()] > 0
		d.mu.Unlock()
		if !taken {
			return r, nil
		}
		aside = append(aside, r)
	}
	return nil, fmt.Errorf("rdma: %s gives only keys that peers may still use for other memory: %w", d.at,
		syscall.EAGAIN)
}

// withhold has register not return a key. permit follows for each call.
func (d *device) withhold(key uint32) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.withheld == nil {
		d.withheld = map[uint32]int{}
	}
	d.withheld[key]++
}

// permit undoes withhold.
func (d *device) permit(key uint32) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.withheld[key]--; d.withheld[key] == 0 {
		delete(d.withheld, key)
	}
}

// Check reports whether Listen of a transport with cfg would succeed, and whether the objects of a
// link can be made, which it releases again.
func Check(cfg Config) error {
	d, err := open(&cfg, func(rdma.Event) {})
	if err != nil {
		return err
	}
	n := lane{peer: p2p.Identity{}}
	return errors.Join(n.open(d, ringBytes(cfg.RingBytes), 0, func() {}), n.close())
}

// open opens the first device with an active port that cfg allows. Events are passed to notify.
func open(cfg *Config, notify func(rdma.Event)) (*device, error) {
	filter, err := rdma.ParseDevices(cfg.Devices)
	if err != nil {
		return nil, err
	}
	names, err := cfg.Provider.Devices()
	if err != nil {
		return nil, err
	}
	var ports []rdma.DevicePort
	for _, name := range names {
		d, err := cfg.Provider.Open(name, nil)
		if err != nil {
			return nil, err
		}
		for p := range d.Attributes().Ports {
			ports = append(ports, rdma.DevicePort{Device: name, Port: p + 1})
		}
		if err := d.Close(); err != nil {
			return nil, err
		}
	}
	if ports, err = filter.Choose(ports); err != nil {
		return nil, err
	}
	var why error
	for _, at := range ports {
		d, err := openPort(cfg, at, notify)
		if err == nil {
			return d, nil
		}
		why = errors.Join(why, err)
	}
	return nil, why
}

func openPort(cfg *Config, at rdma.DevicePort, notify func(rdma.Event)) (*device, error) {
	d := &device{at: at, port: at.Port, want: cfg.GID}
	var err error
	d.Device, err = cfg.Provider.Open(at.Device, func(e rdma.Event) {
		switch {
		case e.Kind == rdma.DeviceRemoved:
			d.gone.Store(true)
		case e.Kind == rdma.PortLost && e.Port == d.port:
			d.down.Store(true)
		case e.Kind == rdma.PortUp && e.Port == d.port:
			d.down.Store(false)
		}
		notify(e)
	})
	if err != nil {
		return nil, err
	}
	d.retain()
	if _, _, err := d.address(); err != nil {
		return nil, errors.Join(err, d.release())
	}
	return d, nil
}

// address finds out how peers reach the port now: what they are told, and its index.
func (d *device) address() (setup, int, error) {
	port, err := d.Port(d.port)
	if err != nil {
		return setup{}, 0, err
	}
	if port.State != rdma.PortActive {
		return setup{}, 0, fmt.Errorf("rdma: port %v is %v: it cannot be used until it is active", d.at, port.State)
	}
	gids, err := d.GIDs(d.port)
	if err != nil {
		return setup{}, 0, err
	}
	s := setup{link: rdma.InfiniBand, mtu: port.MTU, lid: port.LID}
	if !port.Ethernet && len(gids) == 0 && d.want == "" {
		return s, 0, nil
	}
	e, err := rdma.ChooseGID(gids, d.want)
	if err != nil {
		return setup{}, 0, fmt.Errorf("%v: %w", d.at, err)
	}
	s.gid, s.link = e.GID, e.Type
	return s, e.Index, nil
}

// lost reports whether nothing passes the port.
func (d *device) lost() bool { return d.down.Load() || d.gone.Load() }

func (d *device) retain() { d.refs.Add(1) }

// release undoes retain. The last one closes the device.
func (d *device) release() error {
	if d.refs.Add(-1) > 0 {
		return nil
	}
	return d.Close()
}
