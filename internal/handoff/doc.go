// Package handoff passes descriptors between processes of one user on a machine, or of root: a
// [Server] has those that other processes of the machine may have, each by a [Token], which nobody
// can guess. Both ends look at the user at the other one. Sockets are abstract ones, so that both
// processes have to be in one network namespace.
package handoff

import "crypto/rand"

// A Token is what a process shows to get a descriptor.
type Token [16]byte

// NewToken returns a random one.
func NewToken() (t Token) {
	rand.Read(t[:])
	return t
}
