// Package fakegpu opens GPUs of the fake CUDA driver for tests of packages that use device/cuda.
package fakegpu
