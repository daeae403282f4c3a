package pg

import (
	"fmt"
	"syscall"
	"testing"

	"tutti/p2p"
	"tutti/pg/internal/join"
)

// A rank joins anew when another one was lost before all had met, and not for want of descriptors
// at its own end of a link.
func TestShortageIsNoLossOfAnotherRank(t *testing.T) {
	shortage := fmt.Errorf("%w: %w", p2p.ErrShortage, syscall.EMFILE)
	for err, want := range map[error]bool{
		&RankError{Rank: 1, Err: p2p.ErrPeerGone}: true,
		&TimeoutError{Reporter: 1}:                true,
		join.ErrStarted:                           true,
		&RankError{Rank: 1, Err: shortage}:        false,
		syscall.EMFILE:                            false,
	} {
		if got := elsewhere(fmt.Errorf("join: %w", err)); got != want {
			t.Errorf("%v: another rank's %t, want %t", err, got, want)
		}
	}
}
