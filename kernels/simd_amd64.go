//go:build !purego

package kernels

func newActive() *reducers { return portable }
