package card

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"

	"tutti/device"
	"tutti/mem"
	"tutti/rdma"
)

// Config says which port to use.
type Config struct {
	Provider rdma.Provider
	Devices  string // as rdma.ParseDevices has it
	GID      string // as rdma.ChooseGID has it
	Settings rdma.Settings
	Log      *slog.Logger
	// Last, unless it is nil, is called when nothing uses a domain any more, before its device is
	// closed: it has to close the memory regions that are left.
	Last func(*Domain)
}

// Card is a port of a device. Its methods may be called from any goroutine.
type Card struct {
	cfg     Config
	at      rdma.DevicePort
	address netip.Addr // of the port; invalid: the best one

	mu      sync.Mutex
	domains map[string]*Domain // the card uses that of no principal, until Close
}

// Open chooses the first port that is active and that cfg allows. Close follows.
func Open(cfg Config) (*Card, error) {
	ports, why, err := rdma.Allowed(cfg.Provider, cfg.Devices)
	if err != nil {
		return nil, errors.Join(err, why)
	}
	for _, p := range ports {
		c := &Card{cfg: cfg, at: p.DevicePort, domains: map[string]*Domain{}}
		if err := c.check(); err != nil {
			why = errors.Join(why, err)
			continue
		}
		d, err := c.Domain("")
		if err != nil {
			why = errors.Join(why, err)
			continue
		}
		return c, d.Release()
	}
	return nil, why
}

// check returns an error if the port cannot be used, and finds the address that was asked for.
func (c *Card) check() error {
	d, err := c.cfg.Provider.Open(c.at.Device, nil)
	if err != nil {
		return err
	}
	defer d.Close()
	port, err := d.Port(c.at.Port)
	if err != nil {
		return err
	}
	if port.State != rdma.PortActive {
		return fmt.Errorf("rdma: port %v is %v: it cannot be used until it is active", c.at, port.State)
	}
	gids, err := d.GIDs(c.at.Port)
	if err != nil {
		return err
	}
	if !port.Ethernet && len(gids) == 0 && c.cfg.GID == "" {
		return nil
	}
	e, err := rdma.ChooseGID(gids, c.cfg.GID)
	if err != nil {
		return fmt.Errorf("%v: %w", c.at, err)
	}
	if c.cfg.GID != "" {
		c.address = e.GID.Addr()
	}
	return nil
}

// String names the port.
func (c *Card) String() string { return c.at.String() }

// Domain returns the protection domain of a principal, and opens it if there is none. If the device
// was removed since, it opens another one: the device may be back. Release follows.
func (c *Card) Domain(principal string) (*Domain, error) {
	d, unused, err := c.domain(principal)
	if unused != nil {
		if err := unused.Release(); err != nil {
			c.cfg.Log.Error("rdma: a device that was removed stays open", "device", c.at.Device, "err", err)
		}
	}
	return d, err
}

// domain is Domain. It also returns the domain that the card does not use any more, or nil: Release
// follows for that, too.
func (c *Card) domain(principal string) (d, unused *Domain, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if d = c.domains[principal]; d == nil || d.Removed() {
		n := &Domain{card: c, principal: principal, keys: new(rdma.Withheld)}
		if n.dev, err = c.cfg.Provider.Open(c.at.Device, n.happened); err != nil {
			return nil, nil, err
		}
		if d != nil {
			n.keys = d.keys // the device numbers its keys anew
		}
		if c.domains[principal] = n; principal == "" {
			n.refs++
			unused = d
		}
		d = n
	}
	d.refs++
	return d, unused, nil
}

// Close closes what Open has opened. All domains that others have got must have been released.
func (c *Card) Close() error {
	c.mu.Lock()
	d := c.domains[""]
	c.mu.Unlock()
	return d.Release()
}

// Domain is a protection domain.
type Domain struct {
	card      *Card
	principal string
	dev       rdma.Device
	refs      int // with Card.mu
	staging   staging
	keys      *rdma.Withheld // of memory that was deregistered, although peers may use them
	removed   atomic.Bool
}

// happened is called with the device's events.
func (d *Domain) happened(e rdma.Event) {
	if e.Kind == rdma.DeviceRemoved {
		d.removed.Store(true)
	}
}

// Removed reports whether the device was removed since the domain was opened. Then nothing works
// any more but Release, Withhold and Permit.
func (d *Domain) Removed() bool { return d.removed.Load() }

// Release undoes Card.Domain. The last one calls Config.Last and closes the device.
func (d *Domain) Release() error {
	c := d.card
	c.mu.Lock()
	d.refs--
	ends := d.refs == 0
	if ends && c.domains[d.principal] == d {
		delete(c.domains, d.principal)
	}
	c.mu.Unlock()
	if !ends {
		return nil
	}
	if c.cfg.Last != nil {
		c.cfg.Last(d)
	}
	return errors.Join(d.staging.close(), d.dev.Close())
}

// Access is what a peer may do with memory.
const (
	Read  = rdma.RemoteRead
	Write = rdma.RemoteWrite
)

// Registration is registered memory.
type Registration struct {
	rdma.MR
	Address uint64 // of its first byte
}

// Register registers memory, exactly its bytes. That of a device needs its exporter, which is nil
// for memory of the host. access is what peers may do with it: Read, Write, both or nothing. Local
// requests read it, and write it if writable is set, as Write does. The memory must stay allocated
// until MR.Close.
func (d *Domain) Register(m mem.Memory, e device.Exporter, access rdma.Access, writable bool) (Registration, error) {
	if e != nil && access&Write != 0 && !e.Ordered() {
		return Registration{}, fmt.Errorf("rdma: work on %s does not see what peers write there before a flush, "+
			"and their writes are not known here: %w", m.Loc(), errors.ErrUnsupported)
	}
	if access&Write != 0 || writable {
		access |= rdma.LocalWrite
	}
	mr, left, err := d.keys.Register(d.card.at.Device, func() (rdma.MR, error) {
		return rdma.Register(d.dev, m, e, access)
	})
	if left != nil {
		d.card.cfg.Log.Error("rdma: memory stays registered", "device", d.card.at.Device, "err", left)
	}
	if errors.Is(err, rdma.ErrRemoved) {
		d.removed.Store(true) // the event may come later
	}
	if err != nil {
		return Registration{}, err
	}
	return Registration{mr, rdma.Address(m)}, nil
}

// Withhold has Register not use a key, because a peer may. Permit follows for each call.
func (d *Domain) Withhold(key uint32) { d.keys.Withhold(key) }

// Permit undoes Withhold.
func (d *Domain) Permit(key uint32) { d.keys.Permit(key) }
