// Package endpoint moves memory and messages between programs that are no ranks of a job: caches of
// keys and values, trainers that hand weights to inference servers, readers of checkpoints.
//
// An [Endpoint] registers memory, or a part of a file, as a [Region] with a name. A [Peer] of it
// reads and writes ranges of its regions, and sends it messages:
//
//	c, err := endpoint.NewContext(endpoint.ContextConfig{})
//	server, err := endpoint.New(c, endpoint.Config{Name: "trainer", Secret: secret})
//	_, err = server.Register("weights", mem.Host(b, mem.Anywhere), endpoint.RegionConfig{})
//	fmt.Println(server.Info())                       // hand it to others by any means
//
//	peer, err := client.Connect(ctx, info)           // in another program
//	err = peer.Read(dst, "weights", 4096).Wait(ctx)  // len(dst) bytes from offset 4096
//
// Every operation is asynchronous: it returns a [Future]. [Peer.Batch] starts any number of
// operations with one Future and a [Result] for each. An operation ends by itself at its timeout
// (30 s by default), and Wait cancels it when its context ends. When a Future has ended, the memory
// of its operations is not accessed any more, whatever arrives later.
//
// A call whose context is nil returns an error that says so, and does nothing; so do those of
// package directory.
//
// # Reads, writes and messages
//
// A read has ended when the bytes are in memory here, a write when the peer has acknowledged that
// they are in its region. The peer checks every access: the region, its generation, the rights of
// this end and the bounds. Operations that are under way together are done in any order. Messages
// arrive in the order of the sends; a send has ended when the peer has the message. Messages up to
// 64 KiB go at once if the peer has room for them, in at most 4 MiB a peer, or 8 MiB if it connects
// anew; others wait at their sender until they are received. Of the peers with the credential
// of one client, the n-th that connects gets 64 MiB/n if that is less, those that left messages
// included. Messages that were not received when a connection was made take from its room for as
// long as the connection lasts.
//
// # RDMA
//
// With Config.RDMA large reads, writes and messages go from memory to memory by an RDMA device, if
// the peer has one too. The API and what it promises stay the same. Connections are still needed:
// everything else goes there, and what a device cannot do, or fails to do. [Peer.Path] says what is
// used. Memory that is sent from often is best registered as a region which the peer may read: the
// device then knows it, and need not be told for each message.
//
// # Devices
//
// Regions and operations may use memory of the devices in ContextConfig.Devices. The goroutine that
// moves the bytes copies them through host memory, a frame at a time, and waits for the copy. A
// device that fails ends the operations that need it. Nothing orders copies after what the
// program's own streams do: record an event there, and wait for it, before memory is registered or
// handed to an operation. Work that begins when an operation has ended sees what it has brought.
//
// With RDMA the card accesses memory of a device that is a device.Exporter by itself: a region, and
// from 256 KiB memory of operations, which has to be exported for each. What else is needed is done
// here: a flush, on devices that need one, before an operation ends. This process does not know
// when peers write to a region, so that one on such a device which a peer may write goes through
// host memory. So does all that the device, the card or their drivers refuse.
//
// # Connections
//
// An endpoint listens on the interfaces that Config allows, and connects to a peer on demand with
// Config.Conns connections. If one of them breaks all do, what was under way fails with
// [ErrBroken], and the next operation connects again. They count as broken, too, if an operation
// ends at its timeout, or is cancelled, and the peer's host has not acknowledged what was sent to
// it for ten seconds. A host answers even while the peer's process is stopped.
//
// A connection that has nothing to do for Config.IdleTimeout is closed by agreement of both ends,
// which no operation notices. A [Peer.Recv] that waits, at either end, keeps the connection, but
// makes none. An end that does not know where the other one listens, as a server does not know it
// of its clients, cannot connect: its operations fail with [ErrBroken] until the other end
// connects. So a client to which its server may send at any time should always have a Recv under
// way, and call [Endpoint.Connect] when one has failed.
//
// A [Context] has the goroutines that serve the connections. They poll for some ten microseconds
// after traffic, and so does a goroutine that waits for a Future; an idle connection costs no
// processor time. A small operation that is started while several are under way may be held for up
// to a millisecond, to be sent with others; waiting for any Future of the peer sends it at once.
//
// # Trust
//
// Every connection proves that both ends know the same secret before anything else is read; package
// bootstrap describes secrets. A program that is trusted less has the credential of a client
// instead, which is made of the secret and a name by tutti secret --client. With it it can connect,
// but not listen, and cannot claim another name; RegionConfig gives rights to it by that name.
//
// Data is neither encrypted nor protected against change on the way, unless one of the two ends
// asks for it. Config.Checksum finds damage. Config.Seal encrypts and authenticates everything with
// keys that the two ends of each connection agree on: a party that records it and learns the secret
// later cannot read it. In both cases nothing gets into memory that is not what the peer has sent;
// the connection ends instead, and what was under way fails with [ErrBroken].
//
// # State
//
// [Endpoint.Stats] counts what an endpoint does, and [Peer.Stats] asks another one, as tutti status
// does. Holders of a client's credential cannot ask.
//
// Package directory finds endpoints by name. docs/wire.md describes the bytes for clients in other
// languages.
package endpoint
