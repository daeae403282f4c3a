// Package rig stages whole jobs for tests: the launcher, its ranks as processes that a test moves
// step by step, and a strict look at what they leave behind.
//
// A test binary is its own rank program: TestMain calls Main. A Stage has a socket to which every
// rank of the stage connects when it starts, before it joins; the test then tells each rank what to
// do and hears how it went, so that "before the join", "in the join" and "in a collective" are
// states and not guesses of time. Linux only.
package rig
