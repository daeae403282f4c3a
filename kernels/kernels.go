package kernels

import "fmt"

// DType names the type of the elements of a buffer.
type DType uint8

// The data types. The 16-bit and 8-bit floats are stored as their bit patterns.
const (
	Int8 DType = iota + 1
	Int16
	Int32
	Int64
	Uint8
	Uint16
	Uint32
	Uint64
	Float32
	Float64
	Float16 // IEEE 754 binary16
	BFloat16
	Float8E4M3 // OCP 8-bit float, 4 exponent bits, no infinity: movement and Sum only
	Float8E5M2 // OCP 8-bit float, 5 exponent bits: movement and Sum only
	Bool       // one byte, 0 or 1
	numDTypes
)

// Op names a reduction.
type Op uint8

// The reductions.
const (
	Sum Op = iota + 1
	Product
	Min
	Max
	Avg
	BitAnd
	BitOr
	BitXor
	numOps
)

var dtypes = [numDTypes]struct {
	name string
	size int
}{
	Int8: {"int8", 1}, Int16: {"int16", 2}, Int32: {"int32", 4}, Int64: {"int64", 8},
	Uint8: {"uint8", 1}, Uint16: {"uint16", 2}, Uint32: {"uint32", 4}, Uint64: {"uint64", 8},
	Float32: {"float32", 4}, Float64: {"float64", 8}, Float16: {"float16", 2}, BFloat16: {"bfloat16", 2},
	Float8E4M3: {"float8_e4m3", 1}, Float8E5M2: {"float8_e5m2", 1}, Bool: {"bool", 1},
}

var opNames = [numOps]string{Sum: "sum", Product: "product", Min: "min", Max: "max", Avg: "avg", BitAnd: "bitand",
	BitOr: "bitor", BitXor: "bitxor"}

// Valid reports whether d is one of the data types above; a value read from a wire may not be.
func (d DType) Valid() bool { return d > 0 && d < numDTypes }

// Size returns the bytes of one element, 0 for an invalid DType.
func (d DType) Size() int {
	if !d.Valid() {
		return 0
	}
	return dtypes[d].size
}

// String returns the name that the command line uses: "float32", "bfloat16", ….
func (d DType) String() string {
	if !d.Valid() {
		return fmt.Sprintf("dtype(%d)", uint8(d))
	}
	return dtypes[d].name
}

// Valid reports whether o is one of the reductions above.
func (o Op) Valid() bool { return o > 0 && o < numOps }

// String returns the name that the command line uses: "sum", "max", ….
func (o Op) String() string {
	if !o.Valid() {
		return fmt.Sprintf("op(%d)", uint8(o))
	}
	return opNames[o]
}

// DTypes returns every data type, in the order of their numbers.
func DTypes() []DType {
	var all []DType
	for d := DType(1); d < numDTypes; d++ {
		all = append(all, d)
	}
	return all
}

// Ops returns every reduction, in the order of their numbers.
func Ops() []Op {
	var all []Op
	for o := Op(1); o < numOps; o++ {
		all = append(all, o)
	}
	return all
}
