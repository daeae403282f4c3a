// Command shim is the C interface of Tutti: the shared library libtutti.so, which make shim builds
// with -buildmode=c-shared. tutti.h documents it for callers, docs/c.md for people that build and
// deploy programs with it. It uses the public API of package pg only.
//
// Every public function is C (entry.c). It first looks whether the process is a forked child, in
// which no Go code can run, and keeps what a thread has set and seen. Functions in Go, which begin
// with "go", do the work. Only symbols that begin with "tutti_" are exported (tutti.map).
//
// Handles are numbers: the low 32 bits are an index into a table, the next 28 a generation that
// grows when an entry is reused, and the high 4 the kind of object. The table of works is memory of
// C, so that C finds out whether an operation has ended without entering Go.
//
// guest.c keeps the Go runtime from disturbing its host: signals, forked children, and other Go
// runtimes in the process.
package main

func main() {}
