package pg

import (
	"fmt"
	"reflect"
	"unsafe"

	"tutti/device"
	"tutti/kernels"
	"tutti/mem"
	"tutti/p2p"
	"tutti/pg/internal/exec"
)

// Element types that Go lacks, stored as bit patterns.
type (
	F16    = kernels.F16    // IEEE 754 binary16
	BF16   = kernels.BF16   // bfloat16
	F8E4M3 = kernels.F8E4M3 // OCP 8-bit float, 4 exponent bits
	F8E5M2 = kernels.F8E5M2 // OCP 8-bit float, 5 exponent bits
)

// Number constrains the elements of reductions. F16 and BF16 are accumulated in float32. The 8-bit
// floats support only Sum. A type of the program's own counts as its underlying type: one over F16,
// or a half-precision type of another package, as the integer that holds its bits. To reduce those
// as floats, convert the slice, or set the DType of a Buffer and call Group.Do.
type Number interface {
	~int8 | ~int16 | ~int32 | ~int64 | ~int | ~uint8 | ~uint16 | ~uint32 | ~uint64 | ~uint | ~float32 | ~float64
}

// Element constrains the elements of all other operations. Every Number is an Element.
type Element interface {
	Number | ~bool
}

// DType names the element type of a Buffer.
type DType = kernels.DType

// The data types.
const (
	Int8       = kernels.Int8
	Int16      = kernels.Int16
	Int32      = kernels.Int32
	Int64      = kernels.Int64
	Uint8      = kernels.Uint8
	Uint16     = kernels.Uint16
	Uint32     = kernels.Uint32
	Uint64     = kernels.Uint64
	Float32    = kernels.Float32
	Float64    = kernels.Float64
	Float16    = kernels.Float16
	BFloat16   = kernels.BFloat16
	Float8E4M3 = kernels.Float8E4M3
	Float8E5M2 = kernels.Float8E5M2
	Bool       = kernels.Bool
)

// Limits and wildcards.
const (
	Anywhere = p2p.Anywhere // the location of host memory without a NUMA or device preference
	AnyRank  = -1           // Recv: from any rank
	AnyTag   = -1           // Recv: with any tag
	MaxTag   = 1<<31 - 1
	MaxRanks = 1 << 20 // slots of a group
)

// Reduction says how elements are combined.
type Reduction = kernels.Op

// The reductions. The ranks, their number, the size and the algorithm fix the order in which
// elements are combined, so that the same inputs give the same bits on every run and every rank.
// Avg is the sum divided by the number of active ranks. The sum of integers wraps in their type,
// and its average is cut towards zero.
const (
	Sum     = kernels.Sum
	Product = kernels.Product
	Min     = kernels.Min
	Max     = kernels.Max
	Avg     = kernels.Avg
	BitAnd  = kernels.BitAnd
	BitOr   = kernels.BitOr
	BitXor  = kernels.BitXor
)

// Location says where a buffer's memory is.
type Location = p2p.Location

// Buffer is typed memory of the caller: Count elements of DType at Ptr. Collectives use it until
// they end, and keep no reference afterwards. The zero Buffer is empty.
type Buffer struct {
	Ptr      unsafe.Pointer // in a device's memory, the address there
	Count    int
	DType    DType
	Location Location // "" means host memory; else that of a device of Config.Devices
	// Stream is a stream of the device, for memory there. The operation sees the results of earlier
	// work on the stream, and later work sees those of the operation; if it fails, later work finds
	// anything in the destination. All buffers of an operation have the same Stream, and no other
	// goroutine uses it during Do and Start. Without one, earlier work on the memory must have
	// ended.
	//
	// After an operation has ended the stream does not use the memory, with one exception: it has
	// failed because, or while, the stream had not come to it, and the stream did not come within a
	// second more. (Of the operations of a group on one stream that end before it has passed the
	// first of them, only that one waits.) What the stream was given is done when it comes, and the
	// memory must exist until then: the source is read and, if the operation was started, anything
	// is written to the destination.
	Stream device.Stream
}

// onDevice reports whether the buffer is memory of a device.
func (b *Buffer) onDevice() bool { return b.Count > 0 && b.Location != "" && !b.Location.Host() }

func (b *Buffer) place() place { return place{b.Count, b.Location, b.Stream} }

// size returns the size of the buffer in bytes.
func (b *Buffer) size() int { return b.Count * b.DType.Size() }

// bytes returns the memory of a buffer that is the host's.
func (b *Buffer) bytes() []byte { return unsafe.Slice((*byte)(b.Ptr), b.size()) }

// DeviceBuffer describes m, memory of a device, as elements of dt: see Buffer.Stream. It panics if
// m is no whole number of elements.
func DeviceBuffer(m mem.Memory, dt DType, s device.Stream) Buffer {
	if m.Len()%dt.Size() != 0 {
		panic(fmt.Sprintf("pg: %d bytes are no whole number of elements of %v", m.Len(), dt))
	}
	at := uintptr(m.Address())
	return Buffer{Ptr: *(*unsafe.Pointer)(unsafe.Pointer(&at)), Count: m.Len() / dt.Size(), DType: dt,
		Location: m.Loc(), Stream: s}
}

// BufferOf describes the elements of x.
func BufferOf[T Element](x []T) Buffer {
	return Buffer{Ptr: unsafe.Pointer(unsafe.SliceData(x)), Count: len(x), DType: dtypeOf[T]()}
}

// bufferOf returns the exec.Buffer of x.
func bufferOf[T Element](x []T) exec.Buffer {
	return exec.Buffer{Ptr: unsafe.Pointer(unsafe.SliceData(x)), Count: len(x), DType: dtypeOf[T]()}
}

// dtypeOf returns the data type of T: by its name for the small floats, else by its kind (int and
// uint are 64 bits).
func dtypeOf[T Element]() DType {
	var zero T
	switch any(zero).(type) {
	case float32:
		return Float32
	case float64:
		return Float64
	case int32:
		return Int32
	case int, int64:
		return Int64
	case uint8:
		return Uint8
	case int8:
		return Int8
	case int16:
		return Int16
	case uint16:
		return Uint16
	case uint32:
		return Uint32
	case uint, uint64:
		return Uint64
	case bool:
		return Bool
	case F16:
		return Float16
	case BF16:
		return BFloat16
	case F8E4M3:
		return Float8E4M3
	case F8E5M2:
		return Float8E5M2
	}
	return kinds[reflect.TypeFor[T]().Kind()]
}

// kinds are the types of Elements that have a name of their own.
var kinds = [...]DType{
	reflect.Bool: Bool, reflect.Float32: Float32, reflect.Float64: Float64,
	reflect.Int: Int64, reflect.Int8: Int8, reflect.Int16: Int16, reflect.Int32: Int32, reflect.Int64: Int64,
	reflect.Uint: Uint64, reflect.Uint8: Uint8, reflect.Uint16: Uint16, reflect.Uint32: Uint32, reflect.Uint64: Uint64,
}
