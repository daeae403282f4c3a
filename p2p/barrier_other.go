//go:build !amd64 && !arm64

package p2p

const canExpose = false

func storeBarrier() {}
func loadBarrier()  {}
