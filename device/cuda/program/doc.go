// Package program does what programs do with CUDA beside this module, for tests only: it has
// streams of its own, and graphs. It uses the driver's library, the real one or the fake.
package program
