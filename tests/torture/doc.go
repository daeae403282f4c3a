// Package torture runs random programs over the public API and checks the results.
//
// A Program is data: steps that all ranks of a job run in the same order, each rank with its own
// memory, and faults at some of them. A generator makes programs from a seed, ranks run them (as
// processes of a stage of package rig, or as goroutines of one process), and an oracle checks after
// every step:
//
//   - an undisturbed step succeeds, with the right bits; a disturbed one has the right bits or a
//     typed error that its disturbance explains;
//   - inputs are unchanged, and so is memory that belongs to no operation: it is filled with a
//     pattern when an operation returns, and checked some steps later and at the end;
//   - every call ends by its deadline and a stated slack;
//   - ranks agree on views, outcomes, counts and epochs;
//   - the resources of a process of one rank (files, mappings, goroutines, heap) do not grow from
//     program to program.
//
// A program that fails is run again, reduced as long as it still fails, and printed as a Go test.
//
// The generator, with reduction by delta debugging, is specific to this package; other packages use
// pgregory.net/rapid. A failure here depends on timing, and rapid gives a case up that passes when
// it is run again. A candidate counts as failing if one of several runs fails.
package torture
