//go:build !cgo || !linux

package cuda

import (
	"fmt"

	"tutti/device"
	"tutti/mem"
)

// Driver is the CUDA driver. This build has none.
type Driver struct{}

// Device is a GPU. This build has none.
type Device struct {
	device.Device
	device.HostAllocator
	device.Exporter
	device.Exchanger
}

var errBuild = fmt.Errorf("%w: this program was built without cgo (CGO_ENABLED=1 is needed, on Linux)", ErrUnavailable)

func loaded() bool { return false }

func (*Driver) active() ([]int, error) { return nil, errBuild }

// Load fails: this build cannot call the driver. Its error wraps ErrUnavailable.
func Load() (*Driver, error) { return nil, errBuild }

// LoadLibrary fails as Load does.
func LoadLibrary(string) (*Driver, error) { return nil, errBuild }

// IPC returns false.
func (*Driver) IPC() bool { return false }

// Version returns zeros.
func (*Driver) Version() (major, minor int) { return 0, 0 }

// Devices fails as Load does.
func (*Driver) Devices() ([]Info, error) { return nil, errBuild }

// Open fails as Load does.
func (*Driver) Open(int) (*Device, error) { return nil, errBuild }

// OpenIn fails as Load does.
func (*Driver) OpenIn(string, int) (*Device, error) { return nil, errBuild }

func (*Driver) open(string, int, bool, func(string) string) (*Device, error) { return nil, errBuild }

// Info returns the zero Info.
func (*Device) Info() Info { return Info{} }

// Borrow returns nil.
func (*Device) Borrow(uintptr) device.Stream { return nil }

// ExportIPC fails as Load does.
func (*Device) ExportIPC(mem.Memory) (IPCHandle, uint64, error) { return IPCHandle{}, 0, errBuild }

// ImportIPC fails as Load does.
func (*Device) ImportIPC(uint64, IPCHandle) (*Import, error) { return nil, errBuild }

// WithdrawIPC does nothing.
func (*Device) WithdrawIPC(uint64, IPCHandle) {}

// ForgetIPC does nothing.
func (*Device) ForgetIPC(uint64) {}

// Close does nothing.
func (*Device) Close() error { return nil }
