// Package torture runs random programs over the public API and checks what they do.
//
// A Program is data: steps that all ranks of a job run in the same order, each rank with its own
// memory, and faults that come at some of them. A generator makes programs from a seed, ranks run
// them (as processes of a stage of package rig, or as goroutines of one process), and an oracle
// checks after every step:
//
//   - a step that nothing disturbs succeeds, with the right bits; one that is disturbed has the
//     right bits or a typed error that its disturbance explains;
//   - inputs are as they were, and memory that no operation owns is left alone: it is filled with a
//     pattern when an operation returns, and looked at again some steps later and at the end;
//   - every call ends by its deadline and a stated slack;
//   - ranks that have to agree do: on views, outcomes, counts and epochs;
//   - what a process holds (files, mappings, goroutines, heap) does not grow from program to
//     program.
//
// A program that fails is run again, reduced as long as it still fails, and printed as a Go test.
//
// The generator is the package's own, with reduction by delta debugging, and not
// pgregory.net/rapid, which other packages use: a failure depends on timing here, and rapid gives a
// case up that passes when it is run again. A candidate counts as failing if one of several runs
// fails.
package torture
