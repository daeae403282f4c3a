package cuda

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"

	"tutti/device"
	"tutti/mem"
)

// A Finder opens the GPUs of this machine when they are asked for first, or by Preload. It
// implements device.Finder and device.Preloader. The zero Finder is ready; it must not be copied
// after its first use.
type Finder struct {
	// Driver returns the driver, when the first GPU is asked for. nil: Load.
	Driver func() (*Driver, error)
	// Ordinals are the driver's numbers of GPUs that Preload opens, beside those in use.
	Ordinals []int
	// Clique names the clique of a fabric that a GPU has joined, "" for none: see Driver.OpenIn. A
	// program has it from nvlink.System.Clique. nil: none has joined one.
	Clique func(Info) string
	// Getenv reads a variable of the environment, "" for one that is not set. nil: os.Getenv.
	Getenv func(string) string

	mu     sync.Mutex // held while a GPU is opened
	open   map[int]*Device
	closed bool
}

// Find implements device.Finder, for "cuda:N". After an error of the GPU the next call tries again;
// that of Load is kept for the life of the process.
func (f *Finder) Find(loc mem.Location) (device.Device, error) {
	number, ok := strings.CutPrefix(string(loc), "cuda:")
	n, err := strconv.Atoi(number)
	if !ok || err != nil || n < 0 || number != strconv.Itoa(n) {
		return nil, fmt.Errorf("cuda: there is no device at %q: GPUs are at \"cuda:0\" and so on", loc)
	}
	d, err := f.Device(n)
	if err != nil {
		return nil, err
	}
	return d, nil
}

// Device returns the GPU with a number of the driver's.
func (f *Finder) Device(ordinal int) (*Device, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if d := f.open[ordinal]; d != nil {
		return d, nil
	}
	if f.closed {
		return nil, fmt.Errorf("cuda: cuda:%d: the finder was closed: %w", ordinal, device.ErrClosed)
	}
	driver, err := f.driver()
	if err != nil {
		return nil, err
	}
	clique := ""
	if f.Clique != nil {
		all, err := driver.Devices()
		if err != nil {
			return nil, err
		}
		if ordinal >= 0 && ordinal < len(all) {
			clique = f.Clique(all[ordinal])
		}
	}
	getenv := f.Getenv
	if getenv == nil {
		getenv = os.Getenv
	}
	d, err := driver.open(clique, ordinal, true, getenv)
	if err != nil {
		return nil, err
	}
	if f.open == nil {
		f.open = map[int]*Device{}
	}
	f.open[ordinal] = d
	return d, nil
}

func (f *Finder) driver() (*Driver, error) {
	if f.Driver != nil {
		return f.Driver()
	}
	return Load()
}

// Preload implements device.Preloader. It opens the GPUs in Ordinals, and those whose primary
// context the process has: PyTorch and the CUDA runtime make it with the first use of a GPU, or
// when it is set as the current one. In a process that uses no GPU, Preload without Ordinals leaves
// the driver alone.
func (f *Finder) Preload() (ready []device.Device, err error) {
	if len(f.Ordinals) == 0 && f.Driver == nil && !loaded() {
		return nil, nil
	}
	driver, err := f.driver()
	if err != nil {
		return nil, err
	}
	active, err := driver.active()
	errs := []error{err}
	for _, n := range append(active, f.Ordinals...) {
		_, err := f.Device(n)
		errs = append(errs, err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, d := range f.open {
		ready = append(ready, d)
	}
	return ready, errors.Join(errs...)
}

// Close closes the GPUs that were opened: see Device.Close. Idempotent.
func (f *Finder) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	var errs []error
	for _, d := range f.open {
		errs = append(errs, d.Close())
	}
	f.open = nil
	return errors.Join(errs...)
}
