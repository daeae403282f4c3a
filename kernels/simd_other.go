//go:build !amd64 || purego

package kernels

func newActive() *reducers { return portable }

func activeLevel() string { return "portable" }
