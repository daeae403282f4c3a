// Package bench measures collectives and checks every result.
//
// All ranks of a group call Run with the same Spec; rank 0's report gets the rows. Inputs are
// deterministic functions of the rank and the index, chosen so that every reduction of them is
// exact in the element type, in any order: expected results are then plain loops over all ranks'
// inputs in float64 or in integers. They are compared bit by bit, on every rank, for every size,
// along with a margin around each output and the inputs that an operation must preserve.
//
// The reported time is that of the slowest rank, averaged over the calls of a round, in the best of
// several rounds. The bus bandwidth relates it to what the hardware must move: see the factors in
// ops.go, which are those of nccl-tests
// (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
package bench
