//go:build amd64 || arm64

package p2p

// pause is the processor's hint for spin loops. On arm64 it is a barrier for instructions, as YIELD
// does nothing on most of these processors.
func pause()
