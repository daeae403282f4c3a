// Package roster drives the membership of one rank. Package membership decides, as a pure machine;
// a Roster feeds it what links, timeouts and the store say, and carries out what it decides: it
// proposes views by compare-and-swap, probes processes, publishes reports, and tells the groups of
// the rank which view the job is in.
package roster
