// Package gpu tests a GPU: the device of package device/cuda with its kernels, against package
// kernels. run.sh runs it on the machine's GPU, and prints a table of bandwidths. Without a GPU the
// tests run on the fake of the driver, which measures nothing.
package gpu
