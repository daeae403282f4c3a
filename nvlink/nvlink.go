// Package nvlink lists the machine's NVIDIA GPUs and the NVLinks between them.
//
// The driver's management library (NVML) is loaded at run time: a program that links this package
// also starts on a machine without it, and gets an error. Without cgo, or on another system than
// Linux, it is always an error.
//
// `tutti doctor` shows what it finds. The transport between GPUs will be here as well: a
// p2p.Transport whose links map the memory of a peer's device, chosen by the locations of both
// buffers and by which devices NVLink connects (docs/architecture.md has the plan). Until then a
// buffer in a GPU's memory is refused by package pg.
package nvlink

import "errors"

// ErrUnavailable says why GPUs cannot be listed: the driver's library is absent, or this program
// was built without cgo. It is wrapped.
var ErrUnavailable = errors.New("NVIDIA management library cannot be used")

// System is the machine's GPUs and the driver that runs them.
type System struct {
	Driver  string // version of the kernel driver
	CUDA    string // newest CUDA version that the driver supports, "12.4"
	Devices []Device
}

// Device is one GPU.
type Device struct {
	Index  int    // the driver's number, which CUDA_VISIBLE_DEVICES may rearrange
	Name   string // "NVIDIA A100-SXM4-40GB"
	UUID   string
	PCI    string // "0000:3b:00.0"
	Memory uint64 // bytes
	Links  int    // NVLinks that are up
}
