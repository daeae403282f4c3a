//go:build !purego && !race

package kernels

// Also on processors whose string moves CopyShared does not use.
func init() { copies["moveString"] = moveString }
