// Package join makes a process a rank of its job. A Session holds the state of one incarnation of a
// rank: its links, its place in the store, and the server that tells others its addresses. There
// are three ways to join, all after Connect: a first start meets all other ranks, a replacement or
// an additional rank waits for admission to a running job (AwaitAdmission), and a process on
// standby first waits for a free slot (StandBy).
package join
