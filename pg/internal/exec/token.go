package exec

import (
	"tutti/p2p"
	"tutti/pg/flight"
)

// EnterToken stands for an exchange between two views where a token names an operation. Operations
// are numbered from 1.
var EnterToken = p2p.Token{Call: 1 << 63}

// Spell describes a token in words: "allreduce #12 (float32 sum, 1024 elements)".
func Spell(t p2p.Token) string {
	if t == EnterToken {
		return "entering a view"
	}
	return flight.Spell(t.Seq, flight.Call(t.Call), t.Count)
}
