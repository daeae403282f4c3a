package pg

import (
	"fmt"
	"hash/fnv"
	"strconv"

	"tutti/bootstrap"
	"tutti/collectives"
	"tutti/internal/grain"
)

// planFormat is the version of what the ranks of a job send each other, and of what each of them
// derives from the arguments of a call. It is raised with every change of plans, of the sizes into
// which they divide vectors, of tokens, of descriptors of memory, and of notices. Ranks with
// different plans may get wrong results without an error.
const planFormat = 3

// terms returns what this rank needs alike with all others.
func (s *settings) terms() bootstrap.Terms {
	h := fnv.New64a()
	fmt.Fprint(h, collectives.DefaultTable().Hash(), " ", grain.Get().Block)
	for _, k := range collectives.Kinds() {
		fmt.Fprint(h, " ", collectives.LoadStoreMin(k))
	}
	return bootstrap.Terms{Version: fmt.Sprintf("%d.%016x", planFormat, h.Sum64()), Settings: map[string]string{
		"TUTTI_ALGO":       s.algo.String(),
		"TUTTI_ON_FAILURE": s.OnFailure.String(),
		"TUTTI_UNIFORM":    strconv.FormatBool(s.Uniform),
		"TUTTI_AUTO_ADMIT": strconv.FormatBool(s.AutoAdmit),
		"OnTimeout":        s.OnTimeout.String(),
	}}
}
