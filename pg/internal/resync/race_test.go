//go:build race

package resync

// raceEnabled makes the large tests small: nothing here runs beside anything else.
const raceEnabled = true
