// Package join makes a process a rank of its job. A Session holds the state of one incarnation of a
// rank: its links, its place in the store, and the server that tells others its addresses.
// Session.Connect makes it one that others can find.
//
// There are three ways into a job, each with a constructor. First is for a rank of a job that
// begins: it meets all other ranks. Rejoin is for a replacement or an additional rank: it waits for
// admission to a running job. Session.Running, after Connect, decides between these two. StandBy is
// for a process without a rank: it waits for a free slot, and then connects and joins as that rank.
package join
