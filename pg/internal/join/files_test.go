package join

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// The rank that serves the store needs a descriptor for each other rank's connection to it.
func TestRoomForFilesOfTheStore(t *testing.T) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	defer unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)
	size := int(limit.Max)
	if err := roomForFiles(size, false); err != nil {
		t.Errorf("a rank of %d that serves nothing: %v", size, err)
	}
	if err := roomForFiles(size, true); err == nil || !strings.Contains(err.Error(), "ulimit -n") {
		t.Errorf("the rank that serves the store to %d: %v", size, err)
	}
}
