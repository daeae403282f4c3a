// Package bootstrap brings the ranks of a job together: what the launch environment says about this
// process, the store that is the job's small shared truth, the registration of ranks in it, and the
// RPC by which two ranks exchange the descriptors of their transports.
//
// The way into a job:
//
//	launch, err := bootstrap.FromEnv(os.Getenv)              // who am I: torchrun, mpirun, Slurm, Kubernetes, tutti run
//	meeting, err := launch.Meet(ctx, …)                      // where no store was named: rank 0 serves one
//	store, err := bootstrap.DialStore(ctx, …)                // etcd, under a lease that lives as long as this process
//	server, err := bootstrap.Serve(ctx, …)                   // the RPC endpoint; it has answered itself when Serve returns
//	err = bootstrap.Register(ctx, store, record)             // one key a rank: incarnation and RPC addresses
//	peer, err := bootstrap.Lookup(ctx, store, slot)          // wait for a peer's key
//	endpoints, err := client.Describe(ctx, peer)             // and ask it, on demand, how its transports are reached
//
// The store carries O(1) keys a rank and nothing large: transport descriptors travel by RPC between
// those two ranks that need them.
//
// # Keys
//
// All keys of a job live under /tutti/<job>/:
//
//	size          the number of ranks, decimal; the first rank writes it, the others must agree
//	ranks/<slot>  the Record of the slot's live incarnation, under that process's lease
//
// # Trust
//
// Every connection of the RPC, and every one to the store that the launcher embeds (tutti://
// addresses), proves the job's secret by package trust before a byte of gRPC is read. A site's own
// etcd (etcd://, etcds://) is authenticated by its means: user and password, TLS certificates.
package bootstrap
