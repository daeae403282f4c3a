package rdmatest

import (
	"sync/atomic"
	"syscall"
	"testing"

	"tutti/rdma"
)

// Wrapped is a provider that asks functions of a test. A nil function changes nothing.
type Wrapped struct {
	rdma.Provider
	Port  func(device string, p *rdma.Port)        // may change what Device.Port returns
	GIDs  func(device string, all []rdma.GIDEntry) // may change what Device.GIDs returns
	NewQP func(device string, cfg *rdma.QPConfig)  // sees what Device.NewQP is called with
	// Connect sees what QP.Connect is called with. Its error is that of the call.
	Connect func(device string, r *rdma.Route) error
}

// Open implements rdma.Provider.
func (w *Wrapped) Open(name string, notify func(rdma.Event)) (rdma.Device, error) {
	d, err := w.Provider.Open(name, notify)
	if err != nil {
		return nil, err
	}
	return wrappedDevice{d, w}, nil
}

type wrappedDevice struct {
	rdma.Device
	w *Wrapped
}

// Port implements rdma.Device.
func (d wrappedDevice) Port(port int) (rdma.Port, error) {
	p, err := d.Device.Port(port)
	if err == nil && d.w.Port != nil {
		d.w.Port(d.Name(), &p)
	}
	return p, err
}

// GIDs implements rdma.Device.
func (d wrappedDevice) GIDs(port int) ([]rdma.GIDEntry, error) {
	all, err := d.Device.GIDs(port)
	if err == nil && d.w.GIDs != nil {
		d.w.GIDs(d.Name(), all)
	}
	return all, err
}

// NewQP implements rdma.Device.
func (d wrappedDevice) NewQP(cfg rdma.QPConfig) (rdma.QP, error) {
	if d.w.NewQP != nil {
		d.w.NewQP(d.Name(), &cfg)
	}
	q, err := d.Device.NewQP(cfg)
	if err != nil {
		return nil, err
	}
	return wrappedQP{q, d}, nil
}

type wrappedQP struct {
	rdma.QP
	d wrappedDevice
}

// Connect implements rdma.QP.
func (q wrappedQP) Connect(r *rdma.Route) error {
	if q.d.w.Connect != nil {
		if err := q.d.w.Connect(q.d.Name(), r); err != nil {
			return err
		}
	}
	return q.QP.Connect(r)
}

// InfiniBand returns the devices of p with InfiniBand ports of one subnet. The ports of one of them
// need packets with an address: neither its queue pairs are connected without one, nor those of
// others, because it loses what they would send.
func InfiniBand(p rdma.Provider, needs string) *Wrapped {
	return &Wrapped{Provider: p,
		Port: func(device string, p *rdma.Port) { p.Ethernet, p.LID, p.GRHRequired = false, 7, device == needs },
		GIDs: func(_ string, all []rdma.GIDEntry) {
			for i := range all {
				all[i].Type = rdma.InfiniBand
			}
		},
		Connect: func(device string, r *rdma.Route) error {
			if !r.Global {
				return &rdma.Error{Call: "connect a queue pair without an address", Device: device,
					Errno: syscall.EINVAL}
			}
			return nil
		}}
}

// WithSettings returns the devices of p. Queue pairs that are made or connected without the
// settings fail the test. Made and connected count them.
func WithSettings(t testing.TB, p rdma.Provider, want rdma.Settings) (w *Wrapped, made, connected *atomic.Int64) {
	made, connected = new(atomic.Int64), new(atomic.Int64)
	return &Wrapped{Provider: p,
		NewQP: func(_ string, cfg *rdma.QPConfig) {
			if made.Add(1); cfg.PKey != want.PKey {
				t.Errorf("a queue pair with partition key %d of the table, want %d", cfg.PKey, want.PKey)
			}
		},
		Connect: func(_ string, r *rdma.Route) error {
			if connected.Add(1); r.TrafficClass != want.TrafficClass || r.ServiceLevel != want.ServiceLevel ||
				r.Timeout != want.Timeout {
				t.Errorf("%+v, want %+v", *r, want)
			}
			return nil
		}}, made, connected
}
