// Package flight is the flight recorder of a rank, and its analysis: which operation each rank is
// in, and which rank the others wait for.
//
// A [Recorder] keeps the last [Records] operations of one rank in a ring of fixed size. A write
// costs a few plain stores and a load: it reads no clock (a coarse one ticks every 10 ms for the
// whole process), allocates nothing, and needs no fence. The lock of the rank's proxy protects the
// recorder. A rank that waits for peers releases that lock on request, so that a rank which hangs
// can be examined. With a directory, the ring is in a file that is mapped shared: the kernel keeps
// its contents when the process is killed, and [ReadFile] reads it.
//
// A [Snapshot] is the state of one rank at one moment, as JSON: in the answer to a status request,
// in the dump after a timeout, and made from the file of a dead process. It has what the rank's
// process does in the other jobs that it has joined, too. [Diagnose] combines the snapshots of all
// ranks and describes the faults in words. It is a pure function.
//
// # Snapshots as JSON
//
// The field names are those of the tags in this package; they are stable within a version, and
// readers must ignore unknown fields. Ranks are numbers in the job, even if a subgroup has other
// numbers for its members; within "others" they are numbers in the job that is named there. Times
// are RFC 3339 by the rank's own clock; durations are seconds.
//
// # The file
//
// A file is [FileSize] bytes in the byte order of the machine: a header of 4 KiB (see header), then
// the members of the groups (see groupHead), then the ring at 64 KiB, [Records] records of 64
// bytes. Closed groups stay listed until later groups need the room; a group for which there is no
// room is not listed. If a process is still writing the file, single records and groups may be
// torn, and groups may be missing. Readers trust no number in it.
package flight
