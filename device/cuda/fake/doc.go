// Package fake builds a fake of the CUDA driver's library, for tests only. fake.c says what it does
// as the real one does. It needs cgo, a C compiler and a C++ compiler.
package fake

// Codes of errors, CUresult.
const (
	InvalidValue   = 1
	OutOfMemory    = 2
	InvalidDevice  = 101
	AlreadyMapped  = 208
	NotPermitted   = 800
	NotSupported   = 801
	IllegalAddress = 700 // ends the context

	CaptureUnsupported = 900
	CaptureInvalidated = 901
	CaptureImplicit    = 906
)

// Work stands for the work of streams where a call is named: what fails then is the work itself,
// when the stream has come to it, and with it the context.
const Work = "work"

// Config is what a machine has.
type Config struct {
	Devices     int  // GPUs; 0: 2
	None        bool // no GPU at all
	NoMemoryOps bool // streams wait for words by kernels
	Major       int  // compute capability; 0: 9
	Queues      int  // that streams share, at most 64; 0: each has its own
	DMABuf      bool // memory can be exported as DMA buffers
	Unordered   bool // what other devices write has to be flushed
	Isolated    bool // no GPU has access to another one's memory
	LockedFrees bool // all other calls wait while one frees memory

	NoVMM         bool            // memory has IPC handles only
	NoDescriptors bool            // memory of cuMemCreate has no descriptors
	Cliques       [maxDevices]int // of the fabric that each GPU has joined; 0: none
}

// maxDevices is the most GPUs that a driver has.
const maxDevices = 8

// Files are what drivers are made of.
type Files struct {
	Library string // a copy of it is a driver
	Kernels string // of package kernels/cuda, compiled for the host
}

// Census counts what there is in a driver.
type Census struct {
	Contexts     int // references to primary contexts
	DeviceBlocks int // allocations
	Imported     int // allocations of other processes that are mapped
	Physical     int // memory of cuMemCreate that has handles here or is mapped, imported or not
	Reserved     int // ranges of addresses that are reserved, mapped or not
	HostBlocks   int // of pinned memory
	Modules      int
	Streams      int // or queues, if they share them
	Events       int

	Resident int // kernels that run
	Loading  int // loads of kernels that wait until none runs
	Delayed  int // copies that wait until a load has ended
	Blocked  int // calls that wait until a stream takes more operations
}
