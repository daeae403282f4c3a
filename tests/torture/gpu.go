//go:build cgo && linux

package torture

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"tutti/device"
	"tutti/device/cuda"
	"tutti/device/cuda/fake"
	"tutti/device/cuda/program"
	"tutti/mem"
)

// A machine has the GPUs of the ranks of this process: those of a fake driver that ranks of later
// jobs have again.
type machine struct {
	config fake.Config
	driver *cuda.Driver
	fake   *fake.Driver
	finder *cuda.Finder // of the present ranks
	users  int          // their number
}

var machines struct {
	sync.Mutex
	all map[fake.Config]*machine
}

// gpu is a GPU of a machine.
type gpu struct {
	*cuda.Device
	fake *fake.Driver
}

// Bytes implements memoryDevice.
func (g gpu) Bytes(m mem.Memory) []byte { return g.fake.Bytes(m) }

// tape implements memoryDevice.
func (g gpu) tape() (tape, error) {
	p, err := program.New(g.fake.Path, g.Info().Ordinal)
	if err != nil {
		return nil, err
	}
	s, err := p.Stream()
	if err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return &cudaTape{g.Device, p, s, nil}, nil
}

// A cudaTape is a tape of a GPU.
type cudaTape struct {
	d     *cuda.Device
	p     *program.Program
	s     uintptr
	graph *program.Graph // nil: none was captured
}

func (t *cudaTape) stream() device.Stream { return t.d.Borrow(t.s) }

func (t *cudaTape) capture(f func() error) (err error) {
	t.graph, err = t.p.Capture(t.s, f)
	return err
}

func (t *cudaTape) launch() error { return t.graph.Launch(t.s) }

func (t *cudaTape) finish(limit time.Duration) error { return t.p.Finish(t.s, limit) }

func (t *cudaTape) close() (err error) {
	if t.graph != nil {
		err = t.graph.Close()
	}
	return errors.Join(err, t.p.Destroy(t.s), t.p.Close())
}

// makeGPUs makes what the processes of ranks load, unless it was made before.
var makeGPUs = sync.OnceValues(func() (fake.Files, error) { return fake.Make(context.Background()) })

// seat gives a rank of a job its GPU.
func (j *Job) seat(number int, from fake.Files) (*seat, error) {
	at := j.GPUs.of(number)
	if at < 0 {
		return &seat{}, nil
	}
	m, err := enterMachine(fake.Config{Devices: maxRanks, Isolated: j.GPUs == GPUsApart, NoMemoryOps: j.Kernels,
		NoVMM: j.IPC, DMABuf: j.Transport == "soft"}, from)
	if err != nil {
		return nil, err
	}
	d, err := m.finder.Device(at)
	if err != nil {
		return nil, errors.Join(err, m.leave())
	}
	return &seat{device: d, memory: gpu{d, m.fake}, all: m.finder, leave: sync.OnceValue(m.leave)}, nil
}

// enterMachine counts a rank of a machine. It loads a driver for the first one.
func enterMachine(c fake.Config, files fake.Files) (*machine, error) {
	machines.Lock()
	defer machines.Unlock()
	m := machines.all[c]
	if m == nil {
		m = &machine{config: c}
		if err := m.load(files); err != nil {
			return nil, err
		}
		if machines.all == nil {
			machines.all = map[fake.Config]*machine{}
		}
		machines.all[c] = m
	}
	if m.users == 0 {
		m.finder = &cuda.Finder{Driver: func() (*cuda.Driver, error) { return m.driver, nil }}
	}
	m.users++
	return m, nil
}

func (m *machine) load(files fake.Files) error {
	dir, err := os.MkdirTemp("", "torture")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if m.fake, err = fake.Load(dir, files, m.config); err == nil {
		m.driver, err = cuda.LoadLibrary(m.fake.Path)
	}
	return err
}

// leave ends the use by a rank. After the last one, nothing may be left on the GPUs.
func (m *machine) leave() error {
	machines.Lock()
	defer machines.Unlock()
	if m.users--; m.users > 0 {
		return nil
	}
	err := m.finder.Close()
	for until := time.Now().Add(hung); err == nil && m.fake.Census() != (fake.Census{}); time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			err = fmt.Errorf("after the job there is still on its GPUs: %+v", m.fake.Census())
		}
	}
	if err != nil && machines.all[m.config] == m {
		delete(machines.all, m.config)
	}
	return err
}

// abandonGPUs leaves the machines to ranks that do not end.
func abandonGPUs() {
	machines.Lock()
	defer machines.Unlock()
	machines.all = nil
}
