//go:build !linux

package p2p

import "runtime"

func osYield() { runtime.Gosched() }
