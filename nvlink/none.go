//go:build !cgo || !linux

package nvlink

import (
	"fmt"
	"io/fs"
)

// Read fails: this build cannot ask the driver. Its error wraps ErrUnavailable.
func Read(fs.FS) (System, error) {
	return System{}, fmt.Errorf("%w: this program was built without cgo (CGO_ENABLED=1 is needed, on Linux)",
		ErrUnavailable)
}
