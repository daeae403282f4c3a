// Package roster drives the membership of one rank. Package membership decides, as a pure machine.
// A Roster feeds it events of links, timeouts and the store, and carries out its actions: it
// proposes views by compare-and-swap, probes processes, publishes reports, and tells the groups of
// the rank the job's view.
package roster
