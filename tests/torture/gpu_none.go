//go:build !cgo && linux

package torture

import (
	"fmt"

	"tutti/device/cuda/fake"
	"tutti/internal/compiled"
)

var errNoCgo = fmt.Errorf("the fake CUDA driver needs cgo: %w", compiled.ErrNoCompiler)

func makeGPUs() (fake.Files, error) { return fake.Files{}, errNoCgo }

func (*Job) seat(int, fake.Files) (*seat, error) { return nil, errNoCgo }

func abandonGPUs() {}
