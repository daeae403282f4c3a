// Package observe reports the state of a rank: to status requests, in files that outlive the rank,
// and as metrics. Groups record their operations through a Track; metrics are computed from that
// record.
package observe
