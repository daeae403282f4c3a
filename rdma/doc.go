// Package rdma describes RDMA devices: what a program needs of the verbs interface to move memory
// between machines without their processors.
//
// A Provider finds devices. Package rdma/verbs is the provider of the system's devices, by
// libibverbs; package rdma/soft is one in memory, for tests, that runs in a chosen order and fails
// on request. What is built on devices uses the interfaces here and works with both.
//
// A Device registers memory and makes completion queues and queue pairs. A queue pair is one end of
// a reliable connection. Requests are posted to it as chains, with one call for a whole chain, and
// completions are polled as batches, with one call for up to PollBatch of them. No method but Close
// waits for a peer.
//
// # Order and visibility
//
// The requests of one queue pair begin in the order in which they were posted, and complete in that
// order. The data of a Write is placed before a later Send or WriteImm of the same queue pair
// completes a receive at the target, but perhaps after the data of later requests. There is no
// order between queue pairs. A Read may be done after the requests behind it, unless they have
// Fence set. A completion of an unsignaled request is reported only if the request failed; a later
// completion of the same queue pair says that it has ended.
//
// # Failure
//
// If a request fails, its queue pair goes to the state Failed, and the requests behind it complete
// with Flushed. Requests that are posted to a queue pair in that state complete with Flushed too; a
// receive that is posted to one that failed by itself may do so only after QP.Fail. A failed queue
// pair can be reset, or on some devices only be replaced: see Quirks. A program must
// not reuse the memory of a request before the request has completed, or its queue pair was closed
// or reset.
//
// What is in use is not closed: the error is EBUSY. A method after Close fails with ErrClosed,
// Close too. Calls with arguments that make no sense fail with EINVAL.
package rdma
