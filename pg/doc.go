// Package pg is a process group: the ranks of a job, and the collectives and messages between them.
//
//	g, err := pg.Join(ctx, pg.Config{})                  // who am I, and where do we meet: from the environment
//	if err != nil {
//		log.Fatal(err)
//	}
//	defer g.Close()
//	err = pg.AllReduce(ctx, g, gradients, pg.Sum)        // any slice of numbers, in place
//
// A job is a number of processes that run the same program, each a rank, 0..Size-1. A launcher
// starts them (tutti run, torchrun, Slurm, mpirun, Kubernetes) and says by variables who is who; a
// store (the launcher's, or a site's etcd) is where they find each other. [Join] returns when all
// have met. [Group.Split] makes subgroups.
//
// # Order
//
// All ranks of a group call the same collectives, with the same arguments, in the same order; they
// run one at a time, in that order. [Group.Do] runs any operation on any buffers, and returns when
// it has ended. [Group.Start] queues one and returns a [Work]; a blocking call that follows goes
// behind it, and so do calls of other goroutines, [Group.Recover], [Group.Admit] and [Group.Agree].
// [Send] and [Recv] stand outside of the order. Every message says which call it belongs to, so that
// ranks which differ get a [*MismatchError] that spells both calls, instead of a wrong result or
// silence: all of them, in the operation that they differ in or, where a rank was through with that
// and needed nothing of the others, in the next. Where ranks wait for each other in calls that
// differ, so that no message passes between them, that takes a quarter of a second.
//
// A collective of nothing (no elements, or counts that are all zero) is a [Group.Barrier]: it
// returns when every rank has called it. In [AllGatherV] and [AllToAllV] a part of no elements is
// waited for as any other; an [AllToAllV] of nothing returns when all other ranks have called it.
//
// # Waiting, and ctx
//
// Every call takes a ctx and is bounded by Config.Timeout besides. When either ends, the operation
// fails, at every rank, within moments: waiting for a rank that does not come is an error that
// names it. When a call has returned, with whatever outcome, nothing reads or writes its memory any
// more. Wait on a Work is different: its ctx ends the waiting only.
//
// Both bound a blocking call from its beginning, the wait for its turn included. A call that gives
// up before its turn returns a [*TimeoutError] and has touched nothing; ranks count with its
// operation all the same, so that it fails at the others, as one whose time was up, when the
// operations before it are done here. The time of an operation that Start began is Config.Timeout
// from when it begins to run, which is when those before it have ended. An operation that is run
// again (Retry) has its whole Timeout again; a ctx never begins anew.
//
// # Errors
//
// They are typed, for errors.As:
//
//	*RankError      a rank died, left or cannot be reached: which, and who noticed
//	*TimeoutError   time was up, or ctx cancelled: who was waited for, and what each was last seen doing
//	*MismatchError  two ranks called different things: which, and what
//	*ArgumentError  this call was wrong by itself: nothing was sent, and the group goes on
//	ErrClosed       the group was closed here
//	ErrEvicted      the others go on without this rank, though it lives
//	ErrIsolated     ranks were lost, and this rank cannot have the store decide who goes on
//	ErrAborted      somebody called Group.Abort
//
// After any but an *ArgumentError the results of that operation are void. A process that is killed
// is known to be gone at once, for its links break; a machine that falls silent, after half a
// minute. A rank that stands still (SIGSTOP, a debugger) is no dead rank; the timeout decides about
// it. A job that goes on without lost ranks (Shrink, Retry) is less patient: whom a collective
// waits for, and whose lease has ended, is lost.
//
// # What an error leaves in the buffers
//
// An *ArgumentError, ErrClosed, an error of a group that had failed before, and the *TimeoutError
// of a call that gave up before its turn leave all buffers as they were. After any other error of
// an operation:
//
//	source, apart from the destination      as it was
//	destination                             void: old contents, inputs, results, and parts of sums may stand side by side in it
//	in place: AllReduce                     void at every rank; RankError.Overwritten says whether it had begun to be written
//	in place: AllGather(V), Gather          this rank's part as it was, other parts void
//	in place: Scatter                       at the root all parts as they were
//	Broadcast                               as it was at the root, void elsewhere
//	Reduce                                  void at the root, as it was elsewhere
//	Gather, Scatter                         the buffer that is not used elsewhere than at the root: as it was
//	Send                                    as it was
//	Recv                                    void; as it was after the *ArgumentError for a message of another length or type
//
// Elements before and after a buffer are never touched.
//
// # When ranks are lost, and come back
//
// A rank number is a slot, for ever: who is lost leaves a hole, nobody is renumbered, and
// collectives skip the holes. [Group.View] says who plays. What the ranks that are left do is
// [Config].OnFailure: wait for [Group.Recover], go on with the next operation (Shrink), or run the
// same one again where its inputs are intact (Retry). An operation may have ended well at some
// ranks and with a *RankError at others; they keep to the same order all the same, for ranks that
// are behind skip, with an error, what the others have finished. With Config.Uniform the outcome is the
// same at all of them, and [Group.Agree] agrees on anything else, on a failed group too:
//
//	err := pg.AllReduce(ctx, g, x, pg.Sum)
//	if ok, aerr := g.Agree(ctx, err == nil); aerr == nil && !ok {
//		err = g.Recover(ctx) // all ranks are here
//	}
//
// A process that is started with the number of a lost rank, or with a new one below Config.MaxSize,
// joins the running job: its Join returns when the others have let it in, by [Group.Admit] or, with
// Config.AutoAdmit, between two operations. It begins with the operation that follows; the program
// brings it up to date:
//
//	if in, err := g.Admit(ctx); err == nil && in > 0 {   // at a step boundary; who comes in begins with the line below
//		err = pg.Broadcast(ctx, g, state, root)
//	}
//
// # Who everybody waits for
//
// A rank records its last operations and answers whoever knows the job's secret, also while it
// hangs: tutti status asks all of them and names the one that keeps the others. With Config.LogDir
// that is written down when an operation fails, on SIGUSR1, and for whoever looks after a rank was
// killed; with Config.Metrics it is served to Prometheus. Package flight documents the format.
//
// # Memory
//
// Collectives work on any slice. On memory from [Alloc], ranks of one machine reduce where the data
// lies, through mappings of each other's memory, and nothing is copied; that pays from some tens of
// KiB on. It is for tensors that live long: every rank allocates alike, once, and [Free] ends it;
// after Close it is plain memory. What a group needs besides is bounded and does not grow with
// messages: some tens of MiB a rank for rings and early messages, and scratch for a few blocks of 8
// MiB. A call like the one before allocates nothing.
//
// A [Window] is memory that ranks put to, get from and signal without the other side's taking part.
//
// # The same bits
//
// A reduction folds its contributions in an order that ranks, sizes and the algorithm fix, never
// timing: the same inputs give the same bits on every run, and on every rank. 16-bit and 8-bit
// floats are summed in float32 and rounded once. Which algorithm runs depends on what all ranks
// know alike: kind, bytes, ranks, machines, and the table in use. Another number of ranks or
// another machine may fold in another order; Config.Algorithm fixes it.
//
// # Trust
//
// A job has a secret; every connection proves to know it before anything else is read, and is then
// sent in the clear. The launcher makes one. Ranks that share a network with strangers are safe
// from their connections, not from their listening.
//
// # Without a launcher
//
// [Local] makes n ranks inside one process, for programs that are parallel in goroutines. Package
// pgtest runs ranks as real processes under go test, and injects faults. A process for which
// nothing is set is rank 0 of 1.
//
// # Environment
//
// A field of [Config] wins over its variable: TUTTI_RANK, TUTTI_SIZE, TUTTI_JOB, TUTTI_STORE,
// TUTTI_SECRET, TUTTI_TRANSPORT, TUTTI_IFNAME, TUTTI_PORT, TUTTI_TIMEOUT, TUTTI_LEASE, TUTTI_ALGO,
// TUTTI_LOG and more: `tutti env` prints the list with meanings and defaults, bootstrap.Variables
// has it for programs. What launchers set by themselves (RANK and WORLD_SIZE, SLURM_*,
// OMPI_COMM_WORLD_*, PMI_*, JOB_COMPLETION_INDEX) is understood as it is.
package pg
