// Package nvlink says how the machine's NVIDIA GPUs are connected: by NVLink, through NVSwitches,
// by PCIe, and to which network cards.
//
// [Read] asks the driver's management library (NVML), which is loaded at run time, and the kernel.
// A program that links this package also starts on a machine without the library, and gets an
// error. Without cgo, or on another system than Linux, it is always an error. What [Read] returns
// is data. [System.Path] and [System.NearestNICs] are functions of it, without I/O: the ranks of a
// machine get the same answers, because NVML lists all GPUs, in the same order for all processes,
// whatever CUDA_VISIBLE_DEVICES says. [System.Find] leads from a device of CUDA to its GPU.
//
// What a driver or a virtual machine does not tell stays unknown; it is never an error. A path is
// chosen only if nothing that is known speaks against it.
//
// `tutti doctor` shows all of it; data goes other ways. There is no transport for NVLink: streams
// load from the memory of peers' devices, and exchange packets, by addresses that the CUDA driver
// has mapped (device.Sharer, device.Exchanger), and package pg copies through the host where they
// cannot.
package nvlink

import (
	"errors"
	"fmt"
	"strings"

	"tutti/internal/cpus"
)

// ErrUnavailable says why GPUs cannot be listed: the driver's library is absent, or this program
// was built without cgo. It is wrapped.
var ErrUnavailable = errors.New("NVIDIA management library cannot be used")

// System is the GPUs and network cards of a machine, and how they are connected.
type System struct {
	Driver string   `json:"driver"` // version of the kernel driver
	CUDA   string   `json:"cuda"`   // newest CUDA version that the driver supports, "12.4"
	GPUs   []GPU    `json:"gpus"`   // GPU i has the number i of the driver
	Pairs  [][]Pair `json:"pairs"`  // Pairs[i][j]: GPU i and the memory of GPU j; a row for each GPU
	NICs   []NIC    `json:"nics"`   // RDMA devices, by name
}

// GPU is one GPU.
type GPU struct {
	Name   string `json:"name"` // "NVIDIA A100-SXM4-40GB"
	UUID   string `json:"uuid"` // "GPU-…"
	Memory uint64 `json:"memory"`
	Place
	CPUs   cpus.Set `json:"cpus,omitempty"` // that are near it, none if they are not known
	Links  []Link   `json:"links,omitempty"`
	Fabric Fabric   `json:"fabric"`
	// MIG says whether the GPU is divided into instances, and Instances has their UUIDs, "MIG-…".
	// CUDA sees the instances as devices.
	MIG       Answer   `json:"mig"`
	Instances []string `json:"instances,omitempty"`
	// Problem says why the driver tells nothing about the GPU, "" if it does.
	Problem string `json:"problem,omitempty"`
}

// LinksUp counts the NVLinks of g that are up.
func (g GPU) LinksUp() int {
	n := 0
	for _, l := range g.Links {
		if l.Up {
			n++
		}
	}
	return n
}

// Place is where a device is in the machine.
type Place struct {
	PCI string `json:"pci"` // address, "0000:3b:00.0"; "" if it is not known
	// Bridges are the PCI bridges from the host bridge to the device, and the device itself, as the
	// kernel names them: "pci0000:3a", "0000:3a:00.0", "0000:3b:00.0". None if they are not known.
	Bridges []string `json:"bridges,omitempty"`
	Node    int      `json:"numa_node"` // -1 if it is not known
}

// Link is one end of an NVLink.
type Link struct {
	Number int    `json:"number"` // of the GPU
	Up     bool   `json:"up"`
	Remote Remote `json:"remote"`
	PCI    string `json:"pci,omitempty"` // address of the remote device, "" if it is not known
}

// Remote is what an NVLink leads to.
type Remote uint8

// The kinds of remote devices.
const (
	RemoteUnknown Remote = iota
	RemoteGPU
	RemoteSwitch
	RemoteCPU
)

// String names r.
func (r Remote) String() string {
	return [...]string{"unknown", "GPU", "NVSwitch", "CPU"}[r]
}

// MarshalText implements encoding.TextMarshaler.
func (r Remote) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// Fabric is a GPU's membership in a fabric of NVSwitches. GPUs with the same cluster and clique
// reach each other through it. A named cluster may have several machines (MNNVL).
type Fabric struct {
	State   FabricState `json:"state"`
	Cluster string      `json:"cluster,omitempty"` // UUID, "" if the fabric is within one machine
	Clique  uint32      `json:"clique"`
	Problem string      `json:"problem,omitempty"` // why the GPU could not enter the fabric
}

// FabricState says how far a GPU has come into the fabric.
type FabricState uint8

// The states of a GPU in the fabric.
const (
	FabricUnknown    FabricState = iota
	FabricNone                   // the GPU needs no registration, or has no NVSwitch
	FabricNotStarted             // the fabric manager has not registered it
	FabricInProgress
	FabricCompleted
)

// String names f.
func (f FabricState) String() string {
	return [...]string{"unknown", "none", "not started", "in progress", "completed"}[f]
}

// MarshalText implements encoding.TextMarshaler.
func (f FabricState) MarshalText() ([]byte, error) { return []byte(f.String()), nil }

// Answer is yes, no, or unknown.
type Answer uint8

// The answers.
const (
	Unknown Answer = iota
	No
	Yes
)

// String returns a word.
func (a Answer) String() string { return [...]string{"unknown", "no", "yes"}[a] }

// MarshalText implements encoding.TextMarshaler.
func (a Answer) MarshalText() ([]byte, error) { return []byte(a.String()), nil }

// Pair says what the driver knows of a GPU and the memory of another one: how near they are by
// PCIe, and by what the first can access the second's memory.
type Pair struct {
	Level   Level  `json:"level"`
	Read    Answer `json:"read"`
	Write   Answer `json:"write"`
	Atomics Answer `json:"atomics"`
	NVLink  Answer `json:"nvlink"` // access by NVLink
	PCIe    Answer `json:"pcie"`   // access by PCIe
}

// NIC is a network card with RDMA.
type NIC struct {
	Name string `json:"name"` // the kernel's, "mlx5_0"
	Place
	Up Answer `json:"up"` // whether a port is active
}

// Spot is what a rank computes on: a GPU, or an instance of one that is divided.
type Spot struct {
	GPU int    // index in System.GPUs
	MIG string // UUID of the instance, "" for a whole GPU
}

// Find returns the GPU, or the instance, of a device that another interface knows by its UUID, with
// or without a prefix such as "GPU-", or by its PCI address. CUDA numbers devices differently from
// NVML, and CUDA_VISIBLE_DEVICES hides some. An empty text matches nothing.
func (s System) Find(uuid, pci string) (Spot, bool) {
	if uuid = bare(uuid); uuid != "" {
		for i, g := range s.GPUs {
			for _, m := range g.Instances {
				if bare(m) == uuid {
					return Spot{i, m}, true
				}
			}
			if bare(g.UUID) == uuid {
				return Spot{GPU: i}, true
			}
		}
	}
	if pci = address(pci); pci != "" {
		for i, g := range s.GPUs {
			if g.PCI == pci {
				return Spot{GPU: i}, true
			}
		}
	}
	return Spot{}, false
}

// Clique names the clique of a fabric that the GPU of a device has joined, which Find finds, "" if
// it has joined none. GPUs of the machine with the same name map each other's memory by handles of
// the fabric. Instances of a GPU do not.
func (s System) Clique(uuid, pci string) string {
	at, found := s.Find(uuid, pci)
	if !found || at.MIG != "" {
		return ""
	}
	f := s.GPUs[at.GPU].Fabric
	if f.State != FabricCompleted || f.Problem != "" || s.GPUs[at.GPU].Problem != "" {
		return ""
	}
	return fmt.Sprintf("%s/%d", f.Cluster, f.Clique)
}

// bare returns a UUID without its prefix, in lower case.
func bare(uuid string) string {
	uuid = strings.ToLower(uuid)
	for _, prefix := range []string{"gpu-", "mig-"} {
		uuid = strings.TrimPrefix(uuid, prefix)
	}
	return uuid
}
