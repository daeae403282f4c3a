// Package queue submits batches of reads and writes to the queue pairs that lead to a peer.
//
// A Poller polls a completion queue, and gives each completion to the queue pair that it belongs
// to. A Set is the queue pairs of one device that lead to one peer. Set.Submit plans a Batch, posts
// it, and returns a Transfer, which ends when nothing uses the batch's memory any more.
//
// # Planning
//
// The operations of a batch are sorted by remote address. Those that are contiguous there become
// requests with several segments, within the limits of the device. A large batch is divided over
// all queue pairs of the set, a small one goes to one of them. The only order inside a batch is
// that its notification comes last: bytes that a batch writes twice have one of the two values. The
// requests for a queue pair are posted as chunks, with one call each, and the last request of every
// chunk is signaled. So whatever occupies a send queue, a completion that frees it will come; rules
// that signal less often have to foresee that the next chunk would not fit.
//
// # Credits
//
// A place in a send queue is a credit. All users of a queue pair share one counter. A chunk
// reserves its credits, becomes a record of the queue pair's ledger, and is posted, in this order.
// So at any time
//
//	credits in use = credits of all records + credits that are reserved
//
// and a completion releases the credits of its own record and no others: the identifier of a
// request tells the queue pair, the life of the queue pair (which ends with a reset), and the
// number of the request in that life. Completions that are late, or of a queue pair that had the
// same number before, are counted and ignored. A call that waits for credits polls.
//
// # Failure
//
// If a chunk is posted in part, its unsignaled requests have no completion of their own. Their
// record becomes an orphan, and the queue pair is degraded: it refuses chunks until a signaled
// request without data, the flush, was posted behind them and has completed. If that cannot be
// done, or if a request fails, the whole set fails: its queue pairs go to the state Failed, and
// everything on them completes. Set.Reset brings it back, with a new life, when the peer does the
// same.
//
// An error of a transfer is reported when all its requests have completed, or their queue pairs
// were reset or closed. rdma.Fatal tells whether the requests may be posted again over other queue
// pairs; those that were flushed because of another one may, and those that were not posted because
// the set had failed (ErrFailed). To cancel a transfer is to fail its set. Set.Drain, Set.Reset and
// a Wait that is cancelled reset a set by force whose queue pairs do not complete their requests
// within Config.Drain. Set.Fail does not: the program calls one of them, or Set.Close, afterwards.
//
// # Notifications
//
// A batch may carry a number for the peer's program, which gets it when the data of the whole batch
// is visible. It travels as immediate data behind the last request of the batch on each queue pair
// that the batch may use, because there is no order between queue pairs: the number has 31 bits,
// and the highest bit of the data says that it comes on all queue pairs. The receiving set counts
// the parts of each number for each queue pair. The parts are posted all or not at all: their
// credits are reserved together, and if posting fails between them, the set fails.
//
// # Locks
//
// The order is Set.changing, Poller.mu, queue.mu, Transfer.mu, Set.mu. Requests are posted with
// queue.mu, which is what makes the calls of rdma.QP.Post follow each other.
package queue
