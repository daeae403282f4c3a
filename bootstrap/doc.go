// Package bootstrap brings the ranks of a job together. It reads the launch environment, connects
// to the store with the job's shared state, registers ranks in it, and provides the RPC by which
// two ranks exchange the endpoints of their transports.
//
// How a process joins a job:
//
//	launch, err := bootstrap.FromEnv(os.Getenv)              // from torchrun, mpirun, Slurm, Kubernetes, tutti run
//	meeting, err := launch.Meet(ctx, …)                      // where no store was named: rank 0 serves one
//	store, err := bootstrap.DialStore(ctx, …)                // etcd, under a lease that lives as long as this process
//	server, err := bootstrap.Serve(ctx, …)                   // the RPC endpoint; it has answered itself
//	err = bootstrap.Register(ctx, store, record, …)          // one key a rank: incarnation and RPC addresses
//	peer, err := bootstrap.Lookup(ctx, store, slot)          // wait for a peer's key
//	endpoints, err := client.Describe(ctx, peer)             // and ask it, on demand, how its transports are reached
//
// The store holds O(1) small keys for each rank: transport endpoints travel by RPC between the two
// ranks that need them.
//
// Members whose handles the program exchanges need no store: a [Formation] is a KV of which every
// member keeps the record of its own rank.
//
// # Keys
//
// All keys of a job live under /tutti/<job>/. Those of this package:
//
//	size           the number of ranks that the job may grow to, decimal; the first rank writes it,
//	               the others must agree
//	terms          the Terms of the ranks, JSON; likewise
//	ranks/<slot>   the Record of the slot's live incarnation, under that process's lease
//	vacant/<slot>  why the slot of a lost rank may be taken by a process on standby
//	.store/...     the job's lease, and the handles that are open
//
// Package membership has keys of its own, and agreements of groups have agree/....
//
// # Trust
//
// Every connection of the RPC, and every one to the store that the launcher embeds (tutti://
// addresses), proves the job's secret by package trust before gRPC begins. A site's own etcd
// (etcd://, etcds://) uses its own authentication: user and password, TLS certificates.
//
// A program that is no rank may have a [Credential] of its own instead, which is derived from the
// job's secret under a name. The RPC and the store refuse it; it is for endpoints, which programs
// open.
package bootstrap
