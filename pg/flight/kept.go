package flight

import (
	"os"
	"slices"
)

// MaxKept is how many files a Kept keeps.
const MaxKept = 64

// Kept lists the files of a rank's latest snapshots. The zero value has none.
type Kept struct{ files []kept } // the oldest first

type kept struct {
	path string
	info os.FileInfo
}

// Add adds files that Write has made, and removes the oldest ones beyond MaxKept, but none of
// these. An old one may have been moved, and its name be that of another rank's or job's file by
// now.
func (k *Kept) Add(paths ...string) {
	for _, path := range paths {
		k.files = slices.DeleteFunc(k.files, func(old kept) bool { return old.path == path })
		if info, err := os.Stat(path); err == nil {
			k.files = append(k.files, kept{path, info})
		}
	}
	for len(k.files) > max(MaxKept, len(paths)) {
		old := k.files[0]
		k.files = k.files[1:]
		if now, err := os.Stat(old.path); err == nil && os.SameFile(now, old.info) {
			os.Remove(old.path)
		}
	}
}
