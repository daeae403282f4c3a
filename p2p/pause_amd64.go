package p2p

// pause is the processor's hint for spin loops.
func pause()
