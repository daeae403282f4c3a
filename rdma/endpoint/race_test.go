//go:build race

package endpoint

const raceEnabled = true
