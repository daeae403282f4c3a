//go:build !race

package resync

const raceEnabled = false
