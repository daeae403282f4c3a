package kernels

import "fmt"

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

var opNames = [numOps]string{Sum: "sum", Product: "product", Min: "min", Max: "max", Avg: "avg", BitAnd: "bitand",
	BitOr: "bitor", BitXor: "bitxor"}

// Valid reports whether o is one of the reductions above.
func (o Op) Valid() bool { return o > 0 && o < numOps }

// String returns the name that the command line uses: "sum", "max", ….
func (o Op) String() string {
	if !o.Valid() {
		return fmt.Sprintf("op(%d)", uint8(o))
	}
	return opNames[o]
}

// Ops returns every reduction, in the order of their numbers.
func Ops() []Op {
	var all []Op
	for o := Op(1); o < numOps; o++ {
		all = append(all, o)
	}
	return all
}
