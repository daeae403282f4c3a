package p2p

// pause tells the core that this is a spin loop.
func pause()
