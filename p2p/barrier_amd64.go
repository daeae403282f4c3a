package p2p

const canExpose = true

// storeBarrier orders earlier stores before later ones. The XCHG before it has done so.
func storeBarrier() {}

// loadBarrier orders earlier loads before later ones.
func loadBarrier()
