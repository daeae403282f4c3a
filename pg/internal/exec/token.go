package exec

import (
	"tutti/p2p"
	"tutti/pg/flight"
)

// EnterToken stands for an exchange between two views where an operation is named. No operation has
// number 0.
var EnterToken = p2p.Token{Call: 1 << 63}

// Spell turns a token back into words: "allreduce #12 (float32 sum, 1024 elements)".
func Spell(t p2p.Token) string {
	if t == EnterToken {
		return "entering a view"
	}
	return flight.Spell(t.Seq, flight.Call(t.Call), t.Count)
}
