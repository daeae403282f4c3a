package pg

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"strconv"

	"tutti/bootstrap"
	"tutti/collectives"
	"tutti/internal/grain"
	"tutti/p2p"
	"tutti/pg/internal/exec"
)

// planFormat is the version of what the ranks of a job send each other, and of what each of them
// derives from the arguments of a call. It is raised with every change of plans, of the sizes into
// which they divide vectors, of tokens, of credit and frames, of descriptors of memory, of notices,
// and of views. Ranks with different plans may get wrong results without an error. A test compares
// it with samples of these.
const planFormat = 6

// windowSizes are sizes of jobs, of which the smallest and the largest have credit at its bounds.
var windowSizes = []int{2, 32, 4096}

// termsHash is a hash of the tables and sizes that all ranks need alike. block is that of package
// grain, window the credit of a job of some ranks.
func termsHash(block int, window func(size int) int) uint64 {
	h := fnv.New64a()
	fmt.Fprint(h, collectives.DefaultTable().Hash(), " ", cmp.Or(block, exec.VectorBlock))
	for _, k := range collectives.Kinds() {
		fmt.Fprint(h, " ", collectives.LoadStoreMin(k))
	}
	for _, n := range windowSizes {
		fmt.Fprint(h, " ", window(n))
	}
	return h.Sum64()
}

// terms returns what this rank needs alike with all others.
func (s *settings) terms() bootstrap.Terms {
	version := fmt.Sprintf("%d.%016x", planFormat, termsHash(grain.Get().Block, p2p.DefaultWindow))
	return bootstrap.Terms{Version: version, Settings: map[string]string{
		"TUTTI_ALGO":       s.algo.String(),
		"TUTTI_ON_FAILURE": s.OnFailure.String(),
		"TUTTI_UNIFORM":    strconv.FormatBool(s.Uniform),
		"TUTTI_AUTO_ADMIT": strconv.FormatBool(s.AutoAdmit),
		"OnTimeout":        s.OnTimeout.String(),
	}}
}
