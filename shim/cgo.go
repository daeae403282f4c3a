//go:build cgo && linux

package main

// #cgo CFLAGS: -std=gnu11 -Wall -Wextra
import "C"
