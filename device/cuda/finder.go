package cuda

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"

	"tutti/device"
	"tutti/mem"
)

// A Finder opens the GPUs of this machine when they are asked for first. It implements
// device.Finder. The zero Finder is ready; it must not be copied after its first use.
type Finder struct {
	// Driver returns the driver, when the first GPU is asked for. nil: Load.
	Driver func() (*Driver, error)

	mu     sync.Mutex // held while a GPU is opened
	open   map[int]*Device
	closed bool
}

// Find implements device.Finder, for "cuda:N". An error of the driver is not kept: the next call
// tries again.
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
	load := f.Driver
	if load == nil {
		load = Load
	}
	driver, err := load()
	if err != nil {
		return nil, err
	}
	d, err := driver.Open(ordinal)
	if err != nil {
		return nil, err
	}
	if f.open == nil {
		f.open = map[int]*Device{}
	}
	f.open[ordinal] = d
	return d, nil
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
