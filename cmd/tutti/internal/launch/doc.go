// Package launch starts the ranks of a job on this node and ensures that no process of them
// outlives it.
//
// A job has three kinds of processes:
//
//	launcher   what the user started: shows output, serves the store, decides when the job has failed
//	guard      the same binary under another name: starts the ranks, reaps them, and outlives the launcher by moments
//	ranks      each in a process group of its own, children of the guard
//
// Launcher and guard communicate over a pair of connected sockets. The guard ends when the launcher
// asks for it, or when the socket closes because the launcher died: it kills its children until it
// has none, removes the job's temporary directory and exits. It is a subreaper: a process that a
// rank leaves behind, in any session or process group, becomes its child when the parent dies. So
// killing children until there are none reaches every descendant, and never a stranger: a child's
// number is not reused before the guard has waited for it. If the guard itself is killed, the ranks
// die by their parent-death signal and the launcher, a subreaper too, inherits the processes that
// they leave and kills them. Only if both are killed at the same moment do the ranks' children, but
// no rank, survive.
package launch
