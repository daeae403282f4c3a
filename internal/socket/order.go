//go:build !race

package socket

func ordered() {}
