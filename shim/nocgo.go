//go:build !cgo || !linux

package main

// Without cgo there is no C interface: the library consists of functions that C calls. It also
// depends on Linux: futexes, /proc and the linker's version scripts. This program then does
// nothing.
