// Package join makes a process a rank of its job. A Session is what one life of a rank holds: its
// links, its place in the store, and the server that tells others how it is reached. There are
// three ways in, all over Connect: a first start meets all other ranks, a replacement or a further
// rank waits to be let into a running job (AwaitAdmission), and a process on standby waits for a
// free slot first (StandBy).
package join
