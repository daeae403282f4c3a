// Package flight is the flight recorder of a rank, and what is read from it: who does what, and who
// is stuck on whom.
//
// A [Recorder] keeps the last [Records] operations of one rank in a ring of fixed size. Writing to
// it costs a handful of plain stores and a load: no clock is asked (a coarse one ticks every 10 ms
// for the whole process), nothing is allocated, nothing is fenced. It is no thread's own: whoever
// holds the lock of the rank's proxy writes and reads it, and a rank that waits for peers gives
// that lock up to anybody who asks, so that a rank which hangs can be examined. If the recorder is
// given a directory, the ring lies in a file that is mapped shared: whatever kills the process, the
// kernel keeps what was stored, and [ReadFile] reads it.
//
// A [Snapshot] is one rank at one moment, as JSON: in the answer to a status request, in what is
// dumped on a timeout, and made of the file of a dead process. [Diagnose] puts the snapshots of all
// ranks together and says in words what keeps them. It is pure: what it says depends on its
// arguments alone.
//
// # Snapshots as JSON
//
// The field names are those of the tags in this package; they are stable within a version, and
// readers are to ignore fields that they do not know. Ranks are numbers in the job, also where a
// subgroup numbers its members otherwise. Times are RFC 3339 by the rank's own clock; durations are
// seconds.
//
// # The file
//
// A file is [FileSize] bytes in the byte order of the machine: a header of 4 KiB (see header), then
// the members of the groups (see groupHead), then the ring at 64 KiB, [Records] records of 64
// bytes. Of a file that a process is still writing, single records may be read half written. A
// reader takes every number in it for possible garbage.
package flight
