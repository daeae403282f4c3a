//go:build !amd64 || purego || race

package kernels

import "unsafe"

// The race detector sees the accesses of Copy alone.
func copyShared(dst, src unsafe.Pointer, n int) { Copy(dst, src, n) }

func copyOut(dst, src unsafe.Pointer, n, of int) { Copy(dst, src, n) }

func copyNonTemporal(dst, src unsafe.Pointer, n int) { Copy(dst, src, n) }

// NonTemporal reports whether CopyNonTemporal bypasses the caches: it does not here.
func NonTemporal() bool { return false }

// Acquire does nothing here.
func Acquire(at uintptr, n int) {}

// AcquireOut does nothing here.
func AcquireOut(at uintptr, n int) {}
