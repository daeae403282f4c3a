// Package pg is a process group: the ranks of a job, and the collectives and messages between them.
//
//	g, err := pg.Join(ctx, pg.Config{})                  // rank, size and store: from the environment
//	if err != nil {
//		log.Fatal(err)
//	}
//	defer g.Close()
//	err = pg.AllReduce(ctx, g, gradients, pg.Sum)        // any slice of numbers, in place
//
// A job is a number of processes that run the same program, each a rank, 0..Size-1. A launcher
// starts them (tutti run, torchrun, Slurm, mpirun, Kubernetes) and sets variables that tell each
// its rank. The processes find each other in a store: the launcher's, or a site's etcd. [Join]
// returns when all have met. [Group.Split] makes subgroups.
//
// # Order
//
// All ranks of a group call the same collectives, with the same arguments, in the same order. The
// collectives run one at a time, in that order. [Group.Do] runs any operation on any buffers, and
// returns when it has ended. [Group.Start] queues one and returns a [Work]. Later blocking calls,
// calls of other goroutines, [Group.Recover], [Group.Admit] and [Group.Agree] run behind it.
// [Send] and [Recv] are not part of the order.
//
// Every message carries the call that it belongs to. If ranks call different operations, all of
// them get a [*MismatchError] that describes both calls, instead of a wrong result or a hang: in
// the operation that differs, in the next one at a rank that needed nothing of the others, or in
// the one before at a rank that is still in it. If no message passes between the ranks because each
// waits for the other, detection takes a quarter of a second.
//
// A collective without data (no elements, or counts that are all zero) is a [Group.Barrier]: it
// returns when every rank has called it. [AllGatherV] and [AllToAllV] wait for a part without
// elements like for any other; an [AllToAllV] without data returns when all other ranks have called
// it.
//
// # Waiting, and ctx
//
// Every call takes a ctx, and Config.Timeout bounds it besides. When either ends, the operation
// fails at every rank within milliseconds. The error of a call that waited for a rank names that
// rank. After a call has returned, with any outcome, nothing reads or writes its memory. The ctx of
// Wait on a Work ends only the waiting.
//
// Both bound a blocking call from its beginning, including the wait for its turn. A call that ends
// before its turn returns a [*TimeoutError] and has changed nothing. Its operation keeps its place
// in the order: when the operations before it are done here, it fails at the other ranks, as one
// that timed out. An operation that Start began has Config.Timeout from when it begins to run. An
// operation that is run again (Retry) has its whole Timeout again; its ctx is not extended.
//
// # Errors
//
// They are types, for errors.As, and values, for errors.Is:
//
//	*RankError      a rank died, left or cannot be reached: which, and who noticed
//	*TimeoutError   time was up, or ctx cancelled: the ranks waited for, and the last operation of each
//	*MismatchError  two ranks called different things: which, and what
//	*ArgumentError  this call is invalid: nothing was sent, and the group is usable
//	ErrClosed       the group, or the window, was closed here
//	ErrEvicted      this rank was removed from the job, though it is alive
//	ErrIsolated     ranks were lost, and this rank cannot reach the store that decides who remains
//	ErrAborted      a rank called Group.Abort
//
// The fields of an error have the numbers that ranks have in the group. The text of an error of a
// subgroup has those of the job, too: "rank 1 of a subgroup (rank 3 of the job) failed during ...".
//
// After any error but an *ArgumentError the results of the operation are void. The death of a
// process is noticed at once, because its links break; that of a silent machine after
// Config.Window, if an operation waits for it over TCP or RDMA, else after half a minute. A rank
// that is stopped (SIGSTOP, a debugger) does not count as dead; the timeout bounds the wait for it.
// In a job that continues without lost ranks (Shrink, Retry) a rank that a collective waits for,
// and whose lease has ended, is lost.
//
// # What an error leaves in the buffers
//
// An *ArgumentError, ErrClosed, an error of a group that had failed before, and the *TimeoutError
// of a call that ended before its turn leave all buffers as they were. After any other error of
// an operation:
//
//	source, apart from the destination      as it was
//	destination                             void: any mixture of old contents, inputs, results and partial sums
//	in place: AllReduce                     void at every rank; RankError.Overwritten says whether it had begun
//	in place: AllGather(V), Gather          this rank's part as it was, other parts void
//	in place: Scatter                       at the root all parts as they were
//	Broadcast                               as it was at the root, void elsewhere
//	Reduce                                  void at the root, as it was elsewhere
//	Gather, Scatter                         the buffer that only the root uses: elsewhere as it was
//	Send                                    as it was
//	Recv                                    void; as it was after the *ArgumentError for another length or type
//	in a device's memory                    the same, but void where a started operation may write
//
// Elements before and after a buffer are never touched.
//
// # Lost ranks, and replacements
//
// A rank number is a slot. A lost rank leaves a hole: no rank is renumbered, and collectives skip
// the holes. [Group.View] lists the active ranks. [Config].OnFailure says how the remaining ranks
// continue: after [Group.Recover], with the next operation (Shrink), or with the same one again if
// its inputs are intact (Retry). An operation may have succeeded at some ranks and failed with a
// *RankError at others. The order stays the same at all of them: ranks that are behind skip, with
// an error, the operations that others have finished. With Config.Uniform the outcome is the same
// at all of them, and [Group.Agree] agrees on anything else, on a failed group too:
//
//	err := pg.AllReduce(ctx, g, x, pg.Sum)
//	if ok, aerr := g.Agree(ctx, err == nil); aerr == nil && !ok {
//		err = g.Recover(ctx) // all ranks are here
//	}
//
// A process that is started with the number of a lost rank, or with a new one below Config.MaxSize,
// joins the running job: its Join returns when the others have admitted it, by [Group.Admit] or,
// with Config.AutoAdmit, between two operations. Its first operation is the one that follows. The
// program brings it up to date:
//
//	if in, err := g.Admit(ctx); err == nil && in > 0 {   // at a step boundary; admitted ranks begin below
//		err = pg.Broadcast(ctx, g, state, root)
//	}
//
// # Membership given by the program
//
// A [Member] is a process in groups whose membership the program decides, without a store and
// without a launcher. [Member.Form] makes a group of the members whose handles it is given, in
// their order:
//
//	m, err := pg.NewMember(ctx, pg.Config{Secret: secret})
//	tell(m.Handle())                        // to the program's controller, which answers:
//	g, err := m.Form(ctx, uuid, handles)    // rank i is the member of handles[i]
//
// Such a group ends with the first lost rank: the members that are left form another one, with a
// new uuid and ranks without holes. So do those of several groups that are to be merged, or
// divided.
//
// # Diagnosis
//
// A rank records its last operations, and sends them to clients that know the job's secret, also
// while it hangs: tutti status asks all ranks and names the one that the others wait for. With
// Config.LogDir the records are also written to a file when an operation fails and on SIGUSR1, and
// remain after a rank was killed. With Config.Metrics the rank serves metrics to Prometheus.
// Package flight documents the format.
//
// # Memory
//
// Collectives work on any slice. On memory from [Alloc], ranks of one machine map each other's
// memory and reduce in place, without copies; this is faster from some tens of KiB on. Alloc is for
// tensors that live long: every rank allocates the same sizes, once, and [Free] releases them.
// After Close they are plain memory. The memory that a group itself needs is bounded and does not
// grow with messages: some tens of MiB a rank for rings and early messages, and scratch for a few
// blocks of 8 MiB. A call with the shape of the one before allocates nothing.
//
// A [Window] is memory for one-sided operations: put, get and signal.
//
// Collectives and messages also take buffers in the memory of devices, in the order of a stream:
// see [Buffer] and Config.Devices. So do [Window.PutBuffer] and [Window.GetBuffer].
//
// # Reproducible results
//
// Ranks, sizes and the algorithm fix the order in which a reduction combines its inputs; timing
// does not: the same inputs give the same bits on every run, and on every rank. 16-bit and 8-bit
// floats are summed in float32 and rounded once. The order depends on what all ranks know alike:
// kind, bytes, ranks, their distribution over machines, whether they share processors, and the
// table in use. It is the same for memory of Alloc and for other memory of the host. On another
// number of ranks, another machine or with other processors the order may differ;
// Config.Algorithm fixes it. Reductions that GPUs do alone, which are short ones in their memory
// and those of a captured graph, combine in the order of the ranks, whatever Algorithm says: a
// captured reduction may differ in the last bits from one that is not captured.
//
// # Trust
//
// A job has a secret, which the launcher makes. Both ends of every connection prove to know it
// before any other data is read. The data that follows is not encrypted. This protects ranks from
// connections of strangers in their network, not from eavesdroppers.
//
// # Without a launcher
//
// [Local] makes n ranks inside one process, for programs that are parallel in goroutines. Package
// pgtest runs ranks as real processes under go test, and injects faults. Without any settings a
// process is rank 0 of 1.
//
// # Environment
//
// A field of [Config] wins over its variable: TUTTI_RANK, TUTTI_SIZE, TUTTI_JOB, TUTTI_STORE,
// TUTTI_SECRET, TUTTI_TRANSPORT, TUTTI_IFNAME, TUTTI_PORT, TUTTI_TIMEOUT, TUTTI_LEASE, TUTTI_ALGO,
// TUTTI_LOG and more: `tutti env` prints the list with meanings and defaults, bootstrap.Variables
// has it for programs. What launchers set by themselves (RANK and WORLD_SIZE, SLURM_*,
// OMPI_COMM_WORLD_*, PMI_*, JOB_COMPLETION_INDEX) is understood as it is.
package pg
