package pg

import (
	"fmt"
	"reflect"
	"unsafe"

	"tutti/kernels"
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

// Number constrains what can be reduced. F16 and BF16 are accumulated in float32; the 8-bit floats
// know Sum only.
type Number interface {
	~int8 | ~int16 | ~int32 | ~int64 | ~int | ~uint8 | ~uint16 | ~uint32 | ~uint64 | ~uint | ~float32 | ~float64
}

// Element constrains what can be moved. Every Number is an Element.
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
	Anywhere = p2p.Anywhere // the location of host memory of no particular place
	AnyRank  = -1           // Recv: from whichever rank
	AnyTag   = -1           // Recv: with whichever tag
	MaxTag   = 1<<31 - 1
	MaxRanks = 1 << 20 // slots of a group
)

// Reduction says how elements are combined.
type Reduction = kernels.Op

// The reductions. Reductions run in rank order, so that the same inputs give the same bits on every
// run and every rank.
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
// they are done and keep nothing of it afterwards. The zero Buffer is an empty one.
type Buffer struct {
	Ptr      unsafe.Pointer
	Count    int
	DType    DType
	Location Location // "" means host memory
}

// BufferOf describes the elements of x.
func BufferOf[T Element](x []T) Buffer {
	return Buffer{Ptr: unsafe.Pointer(unsafe.SliceData(x)), Count: len(x), DType: DTypeOf[T]()}
}

// bufferOf is BufferOf for a call.
func bufferOf[T Element](x []T) exec.Buffer { return exec.Buffer(BufferOf(x)) }

// DTypeOf returns the data type of T: by its name for the small floats, else by its kind (int and
// uint are 64 bits).
func DTypeOf[T Element]() DType {
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
	return kindDType(reflect.TypeFor[T]().Kind())
}

func kindDType(k reflect.Kind) DType {
	switch k {
	case reflect.Int8:
		return Int8
	case reflect.Int16:
		return Int16
	case reflect.Int32:
		return Int32
	case reflect.Int, reflect.Int64:
		return Int64
	case reflect.Uint8:
		return Uint8
	case reflect.Uint16:
		return Uint16
	case reflect.Uint32:
		return Uint32
	case reflect.Uint, reflect.Uint64:
		return Uint64
	case reflect.Float32:
		return Float32
	case reflect.Float64:
		return Float64
	case reflect.Bool:
		return Bool
	}
	panic(fmt.Sprintf("pg: no data type for kind %v", k)) // Element admits no other kind
}
