// Package p2p is a rank's engine for traffic with its peers: the proxy, its links, and regions of
// memory.
//
// A [Transport] makes links (p2p/shm, p2p/verbs, p2p/tcp, p2p/inproc). A [Link] carries frames of
// up to MaxFrame bytes to one incarnation of one peer, reliably and in order, by polling. Further
// capabilities are optional interfaces ([Mapper]). The [Proxy] owns the transports and the links,
// and turns frames into messages between the members of a [Channel]. Plans of package collectives
// run on channels. A process group has two channels, one for collectives and one for Send and Recv.
//
//	p := p2p.New(p2p.Config{…})
//	endpoints, err := p.Listen(ctx)              // for the directory, by which peers find this rank
//	c, err := p.Open(name, epoch, ranks, nil, false)   // every member opens the same name and epoch
//	p.Lock()
//	c.Begin(token, false)
//	c.PostRecv(&r, slot, token, buf, false)
//	err = c.Send(&wait, slot, token, data)
//	err = c.WaitRecv(&wait, &r)
//	p.Unlock()
//
// # Lanes
//
// A channel uses the ordered lane or the tagged one. On the ordered lane the n-th message from a
// peer goes to the n-th receive that is posted for it. Every frame carries the [Token] of its
// operation, which the receiver compares with its own: ranks that called different operations get a
// [Disagreement] with the first message, and a message is never received in another operation. On
// the tagged lane receives select messages by sender and tag. Messages up to EagerMax are sent at
// once; longer ones are announced (RTS), stay in the sender's memory, and are sent straight to the
// receiver's buffer on request (CTS).
//
// # Ownership of memory
//
// A posted buffer belongs to the proxy until the operation is done, cancelled, or forgotten
// (Channel.Forget); then no later frame is written to it. Send returns when its buffer may be
// reused. A receive may allow that the link lends it the message, in a ring of shared memory, until
// ReleaseRecv. The link delivers no further frames meanwhile. When it is needed for anything else,
// the proxy copies the message and ends the loan.
//
// Memory that collectives share comes from Proxy.Alloc. Peers map it for loads only: no collective
// stores into a peer's memory. An [Exposure] says during which operation a buffer may be read, and
// ends that without waiting for readers. A [Mapping] counts its users: memory in use stays mapped
// when its link goes down or its owner frees it. The engine's own memory comes only from
// Proxy.Control, and always has the location [Anywhere].
//
// # Remote memory
//
// Memory for puts and gets is another kind. Proxy.AllocWritable makes it. Proxy.Expose opens a
// range of it with some rights, and returns a mem.Remote that the caller sends to the peers. Peers
// cannot access it before Expose, nor after Proxy.Withdraw has returned nil. Only a Mapping that a
// peer made while the memory was exposed for reading can still be read, until the region is freed.
// A region that is exposed again has another generation.
//
// Channel.Put, Get and FlushPuts begin a [Transfer] and wait until the link has taken it.
// Channel.WaitTransfer waits for its end, Channel.WaitWord for a word that a peer signals. The two
// locations and the size determine the path of a transfer ([ChoosePath]). A transfer needs this
// rank's progress. Over links that carry it in frames it also needs the target's: the target's
// proxy reads and writes the memory while it polls. Transfers with a peer whose link goes down end
// with a [PeerError] that wraps ErrPeerGone.
//
// # Credits
//
// Per channel, peer and direction at most Config.Window bytes may be in flight or waiting for a
// receive; each frame counts its payload and 64 bytes. Every frame in the other direction returns
// credit, and a frame of its own does when half a window is due. So the memory that a rank keeps
// for early messages is bounded. A peer that exceeds its credit violates the protocol and loses its
// link. So does one that uses too many channels that this rank has not opened: some hundreds, or
// thousands in a small job. Channel.Ledger returns the account.
//
// Transfers need no credit: data goes to its place or is dropped. A link takes MaxOutstanding of
// them in each direction, and other frames that found no room have priority.
//
// # Locking
//
// All state is under one lock, which the caller takes for a sequence of calls. A link is therefore
// used by one goroutine at a time. The lock is released whenever a waiter yields or sleeps, and
// earlier if another goroutine wants it. A goroutine that moves much memory releases it meanwhile
// (Proxy.Leave), or between two pieces (Proxy.Moved). Memory that a link lends must be read with
// the lock. Methods that take the lock themselves say so.
//
// # Waiting
//
// There is no progress thread, unless Config.Progress is set. A waiter polls all links, most often
// the one that it waits for, and delivers whatever arrives, to any operation. It polls without a
// pause for a few microseconds if every local rank has a core; then it yields the core between
// polls; after half a millisecond without progress it arms the links and sleeps. A peer that sends
// to an armed link rings its bell. A [Wait] carries the bounds, a context and a timeout; every
// blocking call takes one. Waking, polling and delivering allocate nothing.
//
// # Links and failure
//
// A link is made when an operation first waits for the peer: Config.Resolve returns its endpoints,
// and the first transport that reaches it is dialled. If connections cross, the lower rank's
// survives. A peer that connects when no crossing can explain it has lost its end of the link: this
// end reads what has come, gives up its own, and takes the new link, as after Reconnect. A peer has
// failed if its link broke, the directory says that it is gone, it could not be reached for
// ConnectTimeout, or this process lacks what a link to it needs ([ErrShortage]). It stays failed
// until Reconnect or MarkDead, and its connections are refused until then ([ErrFailed]). Operations
// that wait for it get a [PeerError]; others continue. A channel fails as a whole, by Abort, by a
// Disagreement or by an [Aborted] from a peer, and tells every linked member once; messages that it
// sent before are still delivered. The handshake refuses connections of another incarnation
// ([ErrStale]).
//
// # Epochs
//
// The process group decides the members and their incarnations. Channel.Next moves a channel of the
// ordered lane to its next epoch, among other ranks; links, and the traffic of other channels, are
// not affected. Frames of an earlier epoch are dropped, those of a later one are kept. Names and
// epochs are never reused or truncated: before a channel's first frame in an epoch, a link carries
// a frame with the full name, and a number that replaces it in later headers. Proxy.MarkDead frees
// a rank's place: the next incarnation that proves the job's secret may link. Frames that the rank
// sent before it left may still arrive: its link stays until the peer has ended it, for
// Config.Linger at most. Traffic of an epoch that has begun with a peer ends with the link, and
// does not begin anew with the next one: it fails until the next epoch. Over the next link with the
// same incarnation an end says that its traffic has ended: the peer may have had none, and would
// wait for a message that was lost. Waits there fail with [ErrLost]. A channel of the tagged lane
// has no epochs: its traffic with a peer fails with the link and begins anew with the next one. If
// that is with the same incarnation, messages that had come whole are still received, a window of
// them at most. Short messages that were sent and did not come are missed: each end says over the
// next link how many it has sent. All receives from the peer that are posted then fail with
// [ErrLost], or else the next one that no earlier message matches. So no receive gets a message in
// the place of a lost one before a receive has said that some are lost; of which tags is not known.
package p2p
