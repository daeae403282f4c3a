//go:build cgo && linux

package endpoint_test

import (
	"errors"
	"flag"
	"fmt"
	"os/exec"
	"slices"
	"testing"
	"time"

	"tutti/rdma"
	"tutti/rdma/endpoint"
	"tutti/rdma/endpoint/endpointtest"
	"tutti/rdma/rdmatest"
	"tutti/rdma/verbs"
)

// leisurely leaves a slow virtual machine time for an answer.
func leisurely(cfg *endpoint.Config) {
	cfg.Route = endpoint.DefaultRoute()
	cfg.Route.Timeout = 16
}

// opens and kills are those of make test-rdma, unless make bench-rdma asks for more.
var (
	opens = flag.Int("opens", 112, "`number` of opens of TestDeviceSimultaneousOpens")
	kills = flag.Int("kills", 10, "`number` of processes that each side of TestDeviceKilledProcesses kills")
)

// TestDeviceSimultaneousOpens: half of the opens are by ranks whose calls are lost and repeated.
// All ranks restart when they have opened each other.
func TestDeviceSimultaneousOpens(t *testing.T) {
	p, names := rdmatest.Devices(t, verbs.Load)
	for _, faults := range []endpointtest.Faults{{}, {Lose: 0.1, Duplicate: 0.3}} {
		took := endpointtest.RunSimultaneous(t, p, names, 8, *opens/2, faults, leisurely)
		t.Logf("at least %d opens of 8 ranks, %+v: %v", *opens/2, faults, took)
	}
}

func TestDeviceRestarts(t *testing.T) {
	p, names := rdmatest.Devices(t, verbs.Load)
	for _, q := range []rdma.Quirks{{}, {NoReset: true}} {
		endpointtest.RunRestarts(t, p.WithQuirks(q), names, 4, 8, endpointtest.Faults{Lose: 0.1, Duplicate: 0.3},
			leisurely)
	}
}

func TestDeviceVanishedQueuePairs(t *testing.T) {
	p, names := rdmatest.Devices(t, verbs.Load)
	endpointtest.RunVanished(t, p, names)
}

func TestDeviceFailedQueuePairsAreReplacedUnderLoad(t *testing.T) {
	p, names := rdmatest.Devices(t, verbs.Load)
	for _, q := range []rdma.Quirks{{}, {NoReset: true}} {
		runFailures(t, p.WithQuirks(q), [2]string{names[0], names[0]}, 12, leisurely)
	}
}

// soonest is the time within which the bandwidth is to be back when a link is.
const soonest = 2 * time.Second

// TestDeviceLinkDownAndUp: a link that is down under load ends no batch without an error, and when
// it is up again the bandwidth comes back, also if it was down for longer than packets are
// repeated: with -bars all of it, else a quarter of the least, because the machine may have got
// other work.
func TestDeviceLinkDownAndUp(t *testing.T) {
	p, _ := rdmatest.Devices(t, verbs.Load)
	devices, down, up := rdmatest.Veth(t)
	both := newStations(t, p, devices, func(cfg *endpoint.Config) {
		cfg.Route = endpoint.DefaultRoute() // half a second of repetitions
	})
	// A batch that takes longer fails, and its connection with it: Soft-RoCE may forget to repeat
	// packets that it could not send.
	l := newLoad(t, both, time.Second)
	const window = 200 * time.Millisecond
	rate := func() float64 { // of a window
		begin, at := time.Now(), l.bytes.Load()
		<-time.After(window)
		return float64(l.bytes.Load()-at) / time.Since(begin).Seconds() / (1 << 20)
	}
	l.flows(10 * slotSize)
	for _, outage := range []time.Duration{100 * time.Millisecond, 2 * time.Second} {
		var rates []float64
		for range 9 {
			rates = append(rates, rate())
		}
		slices.Sort(rates)
		before, enough := rates[len(rates)/2], rates[0]/4
		if *bars {
			enough = 0.95 * before
		}
		errs := len(l.errors())
		down()
		await(t, both[1].events, rdma.PortLost)
		<-time.After(outage)
		up()
		begin := time.Now()
		await(t, both[1].events, rdma.PortUp)
		best := 0.0
		for best == 0 || best < enough {
			if best = max(best, rate()); time.Since(begin) > endpointtest.Patience {
				t.Fatalf("%.1f MiB/s before the link was down, and at most %.1f since", before, best)
			}
		}
		took := time.Since(begin)
		t.Logf("down for %v: %.1f MiB/s before, %.1f within %v of being up again, %d errors", outage, before, best,
			took, len(l.errors())-errs)
		if *bars && took > soonest {
			t.Errorf("down for %v: the bandwidth was back after %v, expected within %v", outage, took, soonest)
		}
	}
	l.end()
	for _, s := range both {
		s.close()
	}
}

// TestDeviceRemovedUnderLoad: a device that is taken away, or whose network interface is, lets
// nothing hang. It cannot be opened then, and when it was added again it works.
func TestDeviceRemovedUnderLoad(t *testing.T) {
	p, _ := rdmatest.Devices(t, verbs.Load)
	const network, device = "d1", "rxe1"
	for _, c := range []struct {
		remove []string
		cut    bool // the network is gone before the device is
	}{{[]string{"rdma", "link", "delete", device}, false}, {[]string{"ip", "link", "delete", network}, true}} {
		rdmatest.Command(t, "ip", "link", "add", network, "type", "dummy")
		rdmatest.Command(t, "ip", "link", "set", network, "mtu", "4500", "up")
		rdmatest.Command(t, "ip", "addr", "add", "10.97.0.1/24", "dev", network)
		rdmatest.Command(t, "rdma", "link", "add", device, "type", "rxe", "netdev", network)
		both := newStations(t, p, [2]string{device, device}, leisurely)
		l := newLoad(t, both, endpointtest.Patience)
		l.flows(4 * slotSize)
		// The command returns when the device's last user has closed it.
		removed := make(chan error, 1)
		go func() {
			out, err := exec.Command(c.remove[0], c.remove[1:]...).CombinedOutput()
			if err != nil {
				err = fmt.Errorf("%q: %w: %s", c.remove, err, out)
			}
			removed <- err
		}()
		if c.cut {
			l.fails(nil) // what was under way: the statuses of its requests, or the failure of its queue pairs
		}
		for late := time.Now().Add(endpointtest.Patience); ; {
			d, err := p.Open(device, nil)
			if err != nil {
				e, advised := errors.AsType[*rdma.Error](err)
				if advised = advised && e.Advice != ""; !advised && !errors.Is(err, rdma.ErrNoDevice) {
					t.Errorf("a device that is being removed: %v", err)
				}
				break
			}
			if err := d.Close(); err != nil {
				t.Error(err)
			}
			if time.Now().After(late) {
				t.Fatal("the device is there for ever")
			}
		}
		errs := l.end()
		t.Logf("%q: %d bytes, %d errors, the last one: %v", c.remove, l.bytes.Load(), len(errs),
			errs[max(0, len(errs)-1):])
		for _, s := range both {
			s.close()
		}
		select {
		case err := <-removed:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(endpointtest.Patience):
			t.Fatalf("%q does not end", c.remove)
		}
		if _, err := p.Open(device, nil); !errors.Is(err, rdma.ErrNoDevice) {
			t.Errorf("%v, want %v", err, rdma.ErrNoDevice)
		}
		if !c.cut {
			rdmatest.Command(t, "ip", "link", "delete", network)
		}
	}
}
