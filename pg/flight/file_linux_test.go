package flight

import (
	"testing"

	"golang.org/x/sys/unix"
)

// A ring is in a file only where writing to it again needs no blocks.
func TestRingIsInNoFileThatIsCopied(t *testing.T) {
	for name, c := range map[string]struct {
		magic  uint32
		copies bool
	}{
		"Btrfs": {0x9123683e, true}, "bcachefs": {0xca451a4e, true}, "NILFS": {0x3434, true},
		"ext4": {unix.EXT4_SUPER_MAGIC, false}, "XFS": {unix.XFS_SUPER_MAGIC, false},
		"tmpfs": {unix.TMPFS_MAGIC, false}, "NFS": {unix.NFS_SUPER_MAGIC, false},
		"overlayfs": {unix.OVERLAYFS_SUPER_MAGIC, false},
	} {
		if copies(c.magic) != c.copies {
			t.Errorf("%s: a ring may be in a file %t, want %t", name, !copies(c.magic), !c.copies)
		}
	}
}
