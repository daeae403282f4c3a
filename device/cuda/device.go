//go:build cgo && linux

package cuda

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"

	"tutti/device"
	kernels "tutti/kernels/cuda"
	"tutti/mem"
)

// Device is a GPU. It implements device.Device, device.HostAllocator, device.Exporter,
// device.Exchanger and device.Reserver.
type Device struct {
	gpu       *gpu
	info      Info
	loc       mem.Location
	module    module
	functions map[string]function // loaded, unless the device was opened lazily
	outside   markers             // of borrowed streams
	blocking  bool                // see blocking

	mu        sync.Mutex
	closed    bool
	running   sync.WaitGroup // functions of during and behind, and freeLarge
	failed    error          // the first of behind and freeLarge
	streams   map[*stream]struct{}
	exchanges map[*exchange]struct{} // that were not freed
	memory    map[uint64]allocation  // by address, of Alloc
	host      heap

	rooms   rooms
	kinds   kinds    // of handles of memory
	imports *imports // of other processes
}

// An allocation is memory of Alloc.
type allocation struct {
	n        int
	physical *physical // nil: it has IPC handles only
}

// Open returns a GPU as a device, with all kernels loaded. The caller closes it. It may be opened
// more than once; memory, words and streams belong to one Device each. The driver translates the
// kernels for the GPU, which may take long when it does so first on a machine.
func (d *Driver) Open(ordinal int) (*Device, error) { return d.OpenIn("", ordinal) }

// OpenIn is Open for a GPU that has joined a clique of a fabric of NVSwitches. The name is the same
// for all GPUs of the clique, and for no other: nvlink.System.Clique returns it. Devices of the
// same clique map each other's memory by handles of the fabric, if the driver has them.
func (d *Driver) OpenIn(clique string, ordinal int) (*Device, error) {
	return d.open(clique, ordinal, true, os.Getenv)
}

// open is OpenIn; without preload the driver loads kernels when they are launched first. getenv
// reads the environment.
func (d *Driver) open(clique string, ordinal int, preload bool, getenv func(string) string) (*Device, error) {
	info, handle, err := d.info(ordinal)
	if err != nil {
		return nil, err
	}
	ptx, err := kernels.Module(info.Major, info.Minor)
	if err != nil {
		return nil, fmt.Errorf("cuda: cuda:%d (%s): %w", ordinal, info.Name, err)
	}
	g, err := d.retain(handle, ordinal, info.name())
	if err != nil {
		return nil, err
	}
	v := &Device{gpu: g, info: info, loc: mem.Location(g.name), functions: map[string]function{},
		streams: map[*stream]struct{}{}, exchanges: map[*exchange]struct{}{}, memory: map[uint64]allocation{},
		host: newHeap(), blocking: blocking(getenv)}
	v.imports = newImports(v.loc, g.openImport, g.closeImport, v.rooms.held)
	if err = v.prepareHandles(clique); err == nil {
		err = v.load(ptx, preload)
	}
	if err != nil {
		return nil, errors.Join(err, v.Close())
	}
	return v, nil
}

// blocking reports whether the driver ends each kernel before the call that launches it returns, as
// people have it do to find the one that fails. Kernels that wait for what comes later would never
// end then.
func blocking(getenv func(string) string) bool {
	set := getenv("CUDA_LAUNCH_BLOCKING")
	return set != "" && set != "0"
}

// load loads the kernels, and allocates what the first streams need.
func (v *Device) load(ptx []byte, preload bool) (err error) {
	if v.module, err = v.gpu.loadModule(ptx); err != nil {
		return err
	}
	for _, name := range kernels.Functions() {
		f, err := v.gpu.function(v.module, name)
		if err != nil {
			return err
		}
		if preload {
			if err := v.gpu.loadFunction(f, name); err != nil {
				return err
			}
		}
		v.functions[name] = f
	}
	return v.rooms.prepare(v)
}

// Info describes the GPU.
func (v *Device) Info() Info { return v.info }

// Location implements device.Device.
func (v *Device) Location() mem.Location { return v.loc }

// Alloc implements device.Device. Other processes map the memory by a descriptor (Info.VMM), or by
// an IPC handle: see Share. So nothing else is in its pages, and any memory takes a multiple of
// 2 MiB with most drivers: a program that needs many small buffers divides one allocation.
func (v *Device) Alloc(n int) (mem.Memory, error) { return v.alloc(n, true) }

// alloc allocates memory, which need not be shared.
func (v *Device) alloc(n int, shared bool) (mem.Memory, error) {
	if n < 0 {
		return mem.Memory{}, fmt.Errorf("cuda: allocating %d bytes on %s: %w", n, v.loc, device.ErrMemory)
	}
	if err := v.open(); err != nil {
		return mem.Memory{}, err
	}
	if n == 0 {
		return mem.Device(0, 0, v.loc), nil
	}
	a, size := allocation{n: n}, uint64(n)
	var at uint64
	var err error
	if shared {
		size = (size + ipcBlock - 1) / ipcBlock * ipcBlock
		if a.physical, err = v.allocPhysical(n); err != nil {
			return mem.Memory{}, err
		}
	}
	if a.physical != nil {
		at = a.physical.at
	} else if at, err = v.gpu.alloc(size); err != nil {
		return mem.Memory{}, err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.memory[at] = a
	return mem.Device(at, n, v.loc), nil
}

// release frees memory of Alloc.
func (v *Device) release(at uint64, a allocation) error {
	if a.physical != nil {
		return a.physical.free()
	}
	return v.gpu.free(at)
}

// open returns an error if the device was closed.
func (v *Device) open() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.closed {
		return fmt.Errorf("cuda: %s was closed: %w", v.loc, device.ErrClosed)
	}
	return nil
}

// during runs f, for which Close waits. If the device was closed, f is not run.
func (v *Device) during(f func() error) error {
	v.mu.Lock()
	if v.closed {
		v.mu.Unlock()
		return nil
	}
	v.running.Add(1)
	v.mu.Unlock()
	defer v.running.Done()
	return f()
}

// behind has a goroutine run f, which may wait for the work on the GPU, and for which Close waits.
// Close returns its error. If the device was closed, f is not run: Close frees everything.
func (v *Device) behind(f func() error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if !v.closed {
		v.running.Go(func() { v.fail(f()) })
	}
}

// fail keeps an error for Close.
func (v *Device) fail(err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.failed = cmp.Or(v.failed, err)
}

// Free implements device.Device. It may wait until all work on the GPU has ended.
func (v *Device) Free(m mem.Memory) error {
	if m.Loc() == v.loc && m.Len() == 0 {
		return nil
	}
	a, err := v.take(m)
	if err != nil {
		return err
	}
	return v.release(m.Address(), a)
}

// freeUnused is Free for memory that no work uses. If the memory has a descriptor, it does not
// wait, and the program may be capturing a stream.
func (v *Device) freeUnused(m mem.Memory) error {
	a, err := v.take(m)
	switch {
	case err != nil:
		return err
	case a.physical != nil:
		return a.physical.freeUnused()
	}
	return v.gpu.free(m.Address())
}

// take takes memory of Alloc out of the list of it.
func (v *Device) take(m mem.Memory) (allocation, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	var a allocation
	if m.Loc() == v.loc {
		a = v.memory[m.Address()]
	}
	if a.n == 0 || a.n != m.Len() {
		return a, fmt.Errorf("cuda: freeing %d bytes at %q that %s has not allocated so: %w", m.Len(), m.Loc(), v.loc,
			device.ErrMemory)
	}
	delete(v.memory, m.Address())
	return a, nil
}

// Export implements device.Exporter. The memory need not be of Alloc: it is that of any allocation
// in the GPU's primary context.
func (v *Device) Export(m mem.Memory) (fd int, offset uint64, err error) {
	switch {
	case m.Loc() != v.loc || m.Len() == 0:
		return -1, 0, fmt.Errorf("cuda: exporting %d bytes at %q of %s: %w", m.Len(), m.Loc(), v.loc, device.ErrMemory)
	case !v.info.DMABuf:
		return -1, 0, fmt.Errorf("cuda: %s has no DMA buffers that other devices can write to: %w", v.loc,
			errors.ErrUnsupported)
	}
	if err := v.open(); err != nil {
		return -1, 0, err
	}
	return v.gpu.export(m.Address())
}

// Ordered implements device.Exporter.
func (v *Device) Ordered() bool { return v.info.Ordered }

// Flush implements device.Exporter.
func (v *Device) Flush() error {
	if v.info.Ordered {
		return nil
	}
	if err := v.open(); err != nil {
		return err
	}
	return v.gpu.flush()
}

// Stream implements device.Device.
func (v *Device) Stream() (device.Stream, error) {
	if err := v.open(); err != nil {
		return nil, err
	}
	s, err := newStream(v)
	if err != nil {
		return nil, err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.streams[s] = struct{}{}
	return s, nil
}

// Close stops the exchanges that were not freed, closes the streams that are open, frees all memory
// of Alloc and AllocHost, unmaps that of other processes, and gives the context back. It returns
// the first error. No other method may be running, but Free of an exchange and Release of an
// import. What cannot be unmapped, because the program captures a stream, is unmapped with memory
// of another Device of the GPU, or when that is closed. Idempotent.
func (v *Device) Close() error {
	v.imports.stop() // before anybody hears that the device was closed
	v.mu.Lock()
	if v.closed {
		v.mu.Unlock()
		return nil
	}
	v.closed = true
	streams, exchanges := slices.Collect(maps.Keys(v.streams)), slices.Collect(maps.Keys(v.exchanges))
	v.mu.Unlock()
	for _, x := range exchanges { // kernels wait in streams for other ranks
		x.Stop()
	}
	errs := make([]error, len(streams))
	var closing sync.WaitGroup
	for i, s := range streams { // at once: one may be held up by another that waits
		closing.Go(func() { errs[i] = s.Close() })
	}
	closing.Wait()
	v.running.Wait()
	inboxes.forget(v)
	errs = append(errs, v.failed, v.imports.end(v.gpu.closeUsedImport))
	for at, a := range v.memory {
		errs = append(errs, v.release(at, a))
	}
	var others []*inbox // into which kernels of the exchanges have stored
	for _, x := range exchanges {
		if x.takeWords().Len() > 0 {
			others = append(others, x.others...)
		}
	}
	v.rooms.leave()
	for _, c := range v.host.chunks {
		errs = append(errs, v.gpu.freeHost(c.at))
	}
	v.memory, v.host = nil, newHeap()
	errs = append(errs, v.outside.free(v.gpu))
	if v.module != nil {
		errs = append(errs, v.gpu.unloadModule(v.module))
	}
	left := v.gpu.unmapLeft()
	if errs = append(errs, left); left == nil { // all work has ended
		for _, i := range others {
			errs = append(errs, inboxes.drop(i))
		}
	}
	return first(append(errs, v.gpu.release()))
}
