//go:build !cgo || !linux

package nvlink

import "fmt"

// Devices lists the machine's GPUs; this build cannot, and its error wraps ErrUnavailable.
func Devices() (System, error) {
	return System{}, fmt.Errorf("%w: this program was built without cgo (CGO_ENABLED=1 is needed, on Linux)",
		ErrUnavailable)
}
