package p2p

const canExpose = true

// storeBarrier orders earlier accesses before later ones: DMB ISH.
func storeBarrier()

// loadBarrier orders earlier loads before later accesses: DMB ISHLD.
func loadBarrier()
