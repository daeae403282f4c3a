//go:build !cgo || !linux

package cuda

import (
	"errors"
	"strings"
	"testing"
)

// A program without cgo says that it cannot use a GPU, and why.
func TestBuildWithoutDriver(t *testing.T) {
	if _, err := Load(); !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), "CGO_ENABLED=1") {
		t.Error(err)
	}
}
