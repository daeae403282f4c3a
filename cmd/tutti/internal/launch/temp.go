package launch

import (
	"os"
	"regexp"

	"tutti/internal/lockdir"
)

// tempName matches launchers' temporary directories.
var tempName = regexp.MustCompile(`^tutti-[0-9a-f]{16}$`)

// makeTemp makes a launcher's temporary directory. The result must be kept open.
func makeTemp(dir string) (*lockdir.Held, error) {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	return lockdir.Lock(dir)
}

// removeStale removes this user's directories of launchers that were killed together with their
// guards, for example by a batch system.
func removeStale(parent string) { lockdir.RemoveStale(parent, tempName.MatchString) }
