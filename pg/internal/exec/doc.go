// Package exec runs the collectives of one rank in one group. A [Request] is checked and becomes a
// [Call]; a [Runner] chooses the algorithm, makes the plan or finds it, and executes it over the
// group's channel. A call that has run is bound (see [Bound]): the same request again only runs.
//
// The package knows nothing of views, failures and recovery: an error is the channel's, and what it
// means is the group's business.
package exec
