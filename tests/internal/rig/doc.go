// Package rig runs whole jobs for tests: the launcher, its ranks as processes that a test controls
// step by step, and a strict check of what they leave behind.
//
// A test binary is its own rank program: TestMain calls Main. A Stage has a socket to which every
// rank of the stage connects when it starts, before it joins. The test then sends each rank
// commands and receives the results, so that "before the join", "in the join" and "in a collective"
// are states that do not depend on timing. Linux only.
package rig
