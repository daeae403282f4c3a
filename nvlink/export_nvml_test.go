//go:build cgo && linux

package nvlink

// ReadFrom is Read from a library.
var ReadFrom = read
