// Package directory finds endpoints by name, in etcd.
//
// A program that serves publishes its endpoint under a name, and others connect to it by that name:
//
//	store := bootstrap.StoreConfig{Address: "etcd://HOST:PORT"}
//	d, err := directory.Open(ctx, directory.Config{Store: store})
//	p, err := d.Publish(ctx, "trainer", server.Info())
//
//	peer, err := d.Connect(ctx, client, "trainer") // in another program
//
// # Entries
//
// An entry has a name and an [endpoint.Info]. It is under the lease of the Directory that published
// it: it goes at [Publication.Withdraw] and [Directory.Close], and within the lease's time to live
// (3 s by default) after kill -9. A name has one publisher. Publish of a name that is taken waits
// for the time to live, so that a program that was killed and started again gets its name back; if
// the name is still taken then, a [TakenError] names the endpoint that has it. An endpoint takes
// over an entry of its own, which it recognizes by its identity, at once.
//
// A store that is away for less than the time to live is not noticed. When it is away for longer
// the entries go, and a Directory publishes them again as soon as it is back. A publication whose
// name another program has taken meanwhile ends with a TakenError.
//
// # Trust
//
// Every program with the right to write to the store may publish any entry, so an entry is only a
// hint where to look. [endpoint.Endpoint.Connect] has the endpoint at that address prove that it
// knows the secret, and that it has the identity of the entry. A false entry can thus keep a
// program from its peer, or lead it to another endpoint with the same secret, but not to a
// stranger. Entries that are malformed are passed over.
package directory
