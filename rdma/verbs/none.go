//go:build !cgo || !linux

package verbs

import (
	"fmt"

	"tutti/rdma"
)

// Provider finds the system's devices. This build has none.
type Provider struct{ rdma.Provider }

// Load fails: this build has no libibverbs. Its error wraps ErrUnavailable.
func Load() (*Provider, error) {
	return nil, fmt.Errorf("%w: this program was built without cgo (CGO_ENABLED=1 is needed, on Linux)", ErrUnavailable)
}

// ForkSupport returns how registered memory survives a fork.
func (p *Provider) ForkSupport() ForkSupport { return ForkNone }

// WithQuirks returns p: it has no devices.
func (p *Provider) WithQuirks(rdma.Quirks) *Provider { return p }

// DMABuf reports whether the library can register DMA buffers.
func (p *Provider) DMABuf() bool { return false }
