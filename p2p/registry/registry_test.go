package registry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tutti/internal/ports"
	"tutti/p2p"
	"tutti/p2p/linktest"
	"tutti/rdma"
	"tutti/rdma/soft"
)

// Whatever transport works on this machine passes a frame to itself.
func TestProbe(t *testing.T) {
	kinds, err := Find(Auto, Options{})
	if err != nil || len(kinds) == 0 {
		t.Fatal(kinds, err)
	}
	for _, k := range kinds {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		if err := Probe(ctx, k, Options{}); err != nil {
			t.Errorf("%s: %v", k.Name, err)
		}
		cancel()
	}
}

// A transport that does not work says where it failed.
func TestProbeReportsBrokenTransport(t *testing.T) {
	broken := errors.New("no device")
	k := Kind{Name: "none", New: func(Options) (p2p.Transport, error) { return nil, broken }}
	if err := Probe(t.Context(), k, Options{}); !errors.Is(err, broken) {
		t.Error(err)
	}
}

// The transports of a rank with one explicit port listen beside each other.
func TestTransportsHaveTheirPorts(t *testing.T) {
	devices := soft.New(soft.Config{})
	defer devices.Close()
	host := &end{self: p2p.Identity{Incarnation: 1}, secret: []byte("a secret of this test")}
	listen := func(port string) error {
		o := Options{Interfaces: "lo", Ports: port, Logger: slog.New(slog.DiscardHandler)}
		for _, make := range []func() (p2p.Transport, error){
			func() (p2p.Transport, error) { return newVerbs(devices, o) },
			func() (p2p.Transport, error) { return kindOf(t, "tcp").New(o) },
		} {
			tr, err := make()
			if err != nil {
				return err
			}
			defer tr.Close()
			if _, err := tr.Listen(t.Context(), host); err != nil {
				return err
			}
		}
		return nil
	}
	var err error
	for range 20 { // other processes may have the ports after the reserved one
		r, err2 := ports.Reserve()
		if err2 != nil {
			t.Fatal(err2)
		}
		err = listen(fmt.Sprint(r.Port))
		r.Close()
		if err == nil {
			break
		}
	}
	if err != nil {
		t.Error(err)
	}
	if err := listen("65534"); err == nil || !strings.Contains(err.Error(), "65536") {
		t.Errorf("without a port for rdma: %v", err)
	}
}

func kindOf(t *testing.T, name string) Kind {
	t.Helper()
	kinds, err := Find(name, Options{})
	if err != nil {
		t.Fatal(err)
	}
	return kinds[0]
}

func TestFindKeepsOrder(t *testing.T) {
	for text, want := range map[string]string{"shm": "shm", "tcp,shm": "tcp shm", "shm,tcp": "shm tcp"} {
		kinds, err := Find(text, Options{})
		var got []string
		for _, k := range kinds {
			got = append(got, k.Name)
		}
		if err != nil || strings.Join(got, " ") != want {
			t.Errorf("%s: %v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "udp", "shm,", "auto,shm"} {
		if k, err := Find(text, Options{}); !errors.Is(err, ErrUnknown) || !strings.Contains(fmt.Sprint(err), Names()) {
			t.Errorf("%q: %v, %v", text, k, err)
		}
	}
}

// A machine that forbids shared memory to its ranks has the other transports.
func TestSharedMemoryIsForbidden(t *testing.T) {
	const inside = "REGISTRY_TEST_FORBIDDEN"
	if os.Getenv(inside) == "" {
		c := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v")
		c.Env = append(os.Environ(), inside+"=1")
		if out, err := c.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	if err := linktest.Forbid(unix.SYS_MEMFD_CREATE); err != nil {
		t.Skip("no filters of calls here: ", err)
	}
	names := func(kinds []Kind, err error) (names []string) {
		if err != nil {
			t.Error(err)
		}
		for _, k := range kinds {
			names = append(names, k.Name)
		}
		return names
	}
	if got := names(Find(Auto, Options{})); slices.Contains(got, "shm") || !slices.Contains(got, "tcp") {
		t.Errorf("auto stands for %v", got)
	}
	if got := names(Find("shm", Options{})); !slices.Equal(got, []string{"shm"}) {
		t.Errorf("shm stands for %v", got)
	}
	if got := Best(Kinds(), Options{}).Name; got == "shm" {
		t.Errorf("%s works best", got)
	}
	const want = "shm: memfd_create: operation not permitted"
	if err := kindOf(t, "shm").Works(Options{}); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
}

// RDMA that only the settings prevent is not left out.
func TestRDMAThatIsAskedFor(t *testing.T) {
	devices := soft.New(soft.Config{})
	defer devices.Close()
	load := func() (rdma.Provider, error) { return devices, nil }
	idle := soft.New(soft.Config{Devices: 1})
	defer idle.Close()
	idle.SetPort("soft0", 1, false)
	machine := t.TempDir()
	if err := os.Mkdir(filepath.Join(machine, "soft0"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name        string
		s           rdmaSettings
		load        func() (rdma.Provider, error)
		asked, fits bool
	}{
		{"nothing", rdmaSettings{}, load, false, true},
		{"a device", rdmaSettings{devices: "soft0"}, load, true, true},
		{"another device", rdmaSettings{devices: "mlx5_0"}, load, true, false},
		{"another address", rdmaSettings{gid: "192.0.2.1"}, load, true, false},
		{"a wrong setting", rdmaSettings{network: rdma.Settings{ServiceLevel: 16}}, load, true, false},
		{"no library", rdmaSettings{devices: "soft0"}, func() (rdma.Provider, error) {
			return nil, errors.New("no library")
		}, false, false},
		{"no port", rdmaSettings{devices: "soft0"}, func() (rdma.Provider, error) { return idle, nil }, false, false},
	} {
		if err := checkRDMA(machine, c.load, c.s); (err == nil) != c.fits ||
			errors.Is(err, ErrSettings) != (c.asked && !c.fits) {
			t.Errorf("%s: %v", c.name, err)
		}
		if err := checkRDMA(t.TempDir(), c.load, c.s); err == nil || errors.Is(err, ErrSettings) {
			t.Errorf("%s, without devices: %v", c.name, err)
		}
	}
	var works error
	defer Add(Kind{Name: "mine", Works: func(Options) error { return works }})()
	for _, works = range []error{errors.New("no device"), fmt.Errorf("%w: no device", ErrSettings)} {
		kinds, err := Find(Auto, Options{})
		if found := err == nil && kinds[0].Name == "mine"; found != errors.Is(works, ErrSettings) {
			t.Errorf("%v: %t, %v", works, found, err)
		}
	}
}

func TestAddedRowIsPreferred(t *testing.T) {
	var asked Options
	remove := Add(Kind{Name: "mine", Works: func(o Options) error {
		asked = o
		return nil
	}})
	if k, err := Find(Auto, Options{RDMADevices: "mlx5_1"}); err != nil || k[0].Name != "mine" ||
		asked.RDMADevices != "mlx5_1" {
		t.Error(k, err, asked)
	}
	if !strings.HasPrefix(Names(), "mine, ") {
		t.Error(Names())
	}
	for _, name := range []string{"mine", "tcp", Auto, "a,b", ""} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%q was added", name)
				}
			}()
			Add(Kind{Name: name})
		}()
	}
	remove()
	if k, err := Find("mine", Options{}); err == nil {
		t.Error(k)
	}
}
