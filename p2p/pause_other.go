//go:build !amd64

package p2p

func pause() {}
