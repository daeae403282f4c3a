package join

import (
	"fmt"

	"tutti/internal/files"
)

// Descriptors of a rank: a store connection, a listener and an epoll instance for each address, a
// few more while links are made, and two for each peer that it links with: a connection and, on
// this machine, the process. A C program's peers may have a third one, and do without. In large
// jobs a rank links with a part of the others, unless the program has all send to all.
const (
	joinFiles = 16
	linkPeers = 32
)

// roomForFiles returns an error if this process may not open the files that a rank of size ranks
// needs, so that Join fails instead of later operations, perhaps on other ranks. If links to all
// ranks need a higher limit, it raises the limit as far as it may: in a C program the limit is
// often 1024.
// serves says that all ranks' store connections end here.
func roomForFiles(size int, serves bool) error {
	served := 0
	if serves {
		served = size - 1
	}
	open, counted := files.Open()
	if counted {
		files.Raise(uint64(open + joinFiles + served + 3*(size-1)))
	}
	limit, known := files.Limit()
	need := joinFiles + served + 2*min(size-1, linkPeers)
	if !known || !counted || uint64(open+need) <= limit {
		return nil
	}
	return fmt.Errorf("this process may have %d open files (RLIMIT_NOFILE) and has %d, a rank of %d ranks needs "+
		"%d more: raise the limit (ulimit -n)", limit, open, size, need)
}
