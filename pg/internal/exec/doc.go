// Package exec runs the collectives of one rank in one group. A [Request] is checked and becomes a
// [Call]. A [Runner] chooses the algorithm, finds or makes the plan, and executes it over the
// group's channel. A call that has run is bound (see [Bound]): the next request like it needs no
// preparation.
//
// The package knows nothing of views, failures and recovery: it returns the channel's errors, and
// the group interprets them.
package exec
