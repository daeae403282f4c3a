// Package launch starts the ranks of a job on this node and sees to it that none outlives it.
//
// Three kinds of processes make a job:
//
//	launcher   what the user started: shows output, serves the store, decides when the job has failed
//	guard      the same binary under another name: starts the ranks, reaps them, and outlives the launcher by moments
//	ranks      each in a process group of its own, children of the guard
//
// Launcher and guard talk over a pair of connected sockets. The guard ends, in the same way, when
// the launcher asks for it or when the socket closes because the launcher died, however it died: it
// kills its children until it has none, removes the job's temporary directory and exits. It is a
// subreaper: whatever a rank leaves behind, in whichever session or process group, becomes its
// child as the parent dies, so that killing children until there are none reaches every descendant,
// and never a stranger: a child's number is not given to anybody else before the guard has waited
// for it. Should the guard itself be killed, the ranks die by their parent-death signal and the
// launcher, a subreaper too, inherits what they leave and does the same. Only if somebody kills
// both in one moment does what the ranks had started, but no rank, live on.
package launch
