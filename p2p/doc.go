// Package p2p is a rank's engine for traffic with its peers: the proxy, the links below it and the
// regions of memory that both know.
//
// A [Transport] makes links (p2p/shm, p2p/tcp, p2p/inproc). A [Link] carries frames of up to
// MaxFrame bytes to one incarnation of one peer, reliably and in order, by polling; what it can do
// beyond that is an optional interface ([Mapper]). The [Proxy] owns the transports and the links,
// and turns frames into messages between the members of a [Channel]. Plans of package collectives
// run on channels; a process group has two, one for collectives and one for Send and Recv.
//
//	p := p2p.New(p2p.Config{…})
//	endpoints, err := p.Listen(ctx)              // for the directory, by which peers find this rank
//	c, err := p.Open(name, epoch, ranks, false)   // every member opens the same name and epoch
//	p.Lock()
//	c.Begin(token, false)
//	c.PostRecv(&r, slot, token, buf, false)
//	err = c.Send(&wait, slot, token, data)
//	err = c.WaitRecv(&wait, &r)
//	p.Unlock()
//
// # Lanes
//
// A channel has an ordered lane and a tagged one, for use by different channels. On the ordered
// lane the n-th message from a peer goes to the n-th receive that is posted for it, and every frame
// carries the [Token] of its operation, which the receiver compares with its own: ranks that called
// different things learn it from the first message, as a [Disagreement], and no message of one
// operation is ever taken for another's. On the tagged lane receives choose by sender and tag.
// Messages up to EagerMax travel at once; longer ones are announced (RTS), wait in the sender's
// memory, and go straight to the receiver's buffer when it asks for them (CTS).
//
// # Who owns memory
//
// A buffer that is posted belongs to the proxy until the operation is done, cancelled, or forgotten
// (Channel.Forget); then nothing writes to it any more, whatever still arrives. Send returns when
// its buffer may be reused. A receive that allows it may be lent a message where the link has it,
// in a ring of shared memory, and gives it back with ReleaseRecv; the link stands still meanwhile,
// and takes the loan back, with a copy, as soon as anything else is needed of it.
//
// Memory that collectives share comes from Proxy.Alloc. Peers map it for loads only: no collective
// stores into a peer's memory. An [Exposure] says during which operation a buffer may be read, and ends that
// without waiting for a reader. A [Mapping] counts its users: memory that is in use stays mapped
// when its link goes down or its owner frees it. The engine's own memory comes from Proxy.Control
// alone, and is at no location but [Anywhere].
//
// # Remote memory
//
// Memory that peers put to and get from is another kind: Proxy.AllocWritable makes it,
// Proxy.Expose opens a range of it with some rights, and the mem.Remote that it returns travels to
// the peers by whatever way the caller has. Nothing of it can be reached before Expose, and nothing
// after Proxy.Withdraw has returned nil; a region that is exposed again has another generation.
//
// Channel.Put, Get and FlushPuts begin a [Transfer] and wait until the link has taken it;
// Channel.WaitTransfer waits for its end, Channel.WaitWord for a word that a peer signals. Which path
// of the peer carries a transfer follows from the two locations and the size ([ChoosePath]). A
// transfer needs this rank's progress. The target's it needs over links that carry it in frames:
// there its memory is written, and read, while its proxy polls. Transfers with a peer whose link
// goes down end with a [PeerError] that wraps ErrPeerGone.
//
// # Credits
//
// Per channel, peer and direction at most Config.Window bytes may be on their way or waiting
// unasked for; each frame counts its payload and 64 bytes. What the receiver has taken is told with
// every frame that goes back, or with a frame of its own when half a window is due. So what a rank
// keeps for others is bounded however far ahead they are, and a peer that sends more than its
// credit breaks the protocol and loses its link. Channel.Ledger shows the account.
//
// Transfers have no credit: data goes to its place or is dropped, a link takes MaxOutstanding of
// them in each direction, and their frames step back for others that found no room.
//
// # Locking
//
// All state is under one lock, which the caller takes for a sequence of calls. A link is therefore
// used by one goroutine at a time. The lock is given up whenever a waiter yields or sleeps, and
// sooner if another goroutine wants it; who moves memory for long gives it up meanwhile
// (Proxy.Leave), or between two pieces (Proxy.Moved). Memory that a link lends must not be read
// without it. Methods that take it themselves say so.
//
// # Waiting
//
// There is no thread of progress, unless Config.Progress asks for one. Who waits polls, the awaited
// link most often, and whatever comes is delivered, to whomever it belongs. Polling is hot for a few
// microseconds, where every local rank has a core; then it yields the core between polls; after half
// a millisecond without progress it arms the links and sleeps: a peer that sends to an armed link
// rings its bell. A [Wait] carries
// the bounds, a context and a timeout, and every blocking call takes one. Waking, polling and
// delivering allocate nothing.
//
// # Links and failure
//
// A link is made when somebody first waits for the peer: Config.Resolve says where it is, the first
// transport that reaches it is dialled. Of connections that cross the lower rank's survives. A peer
// whose link broke, whom the directory knows to be gone, or who cannot be reached for
// ConnectTimeout has failed until Relink or Vacate says otherwise: whoever waits for it gets a
// [PeerError], everybody else goes on. A channel fails as a whole, by Abort, by a Disagreement or
// by an [Aborted] from a peer, and tells every linked member once; what it had sent before is still
// delivered. Evidence about another incarnation is refused at the handshake ([ErrStale]).
//
// # Epochs
//
// Whoever is a member, and in which life, is decided elsewhere. Channel.Next takes a channel of the
// ordered lane into its next epoch, among other ranks; links, and what other channels have under
// way over them, stay. What was sent in an earlier epoch is dropped, what comes from ranks that are
// ahead is kept. Names and epochs are never used again, and never cut short: the first frame of a
// channel's epoch over a link is preceded by one with both in full, and a number that stands for
// them in the headers of those that follow. Proxy.Vacate gives a rank's place free, and the next
// incarnation that proves the job's secret may link itself. What the rank has sent before it left
// may still be under way: its link stays until it has ended it, for Config.Linger at most. A channel
// of the tagged lane has no epochs: its traffic with a peer fails with the link and begins anew with
// the next one.
package p2p
