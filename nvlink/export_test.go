package nvlink

// For the tests outside of the package.
var (
	Address = address
	Bridges = bridges
)

// Distance orders levels.
func Distance(l Level) int { return l.distance() }
