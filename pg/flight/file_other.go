//go:build !unix

package flight

import (
	"errors"
	"fmt"
)

func mapFile(path string, size int) ([]byte, error) {
	return nil, fmt.Errorf("%s: files are mapped on Unix systems only: %w", path, errors.ErrUnsupported)
}

func unmap([]byte) {}
