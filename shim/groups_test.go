//go:build cgo && linux

package main

import (
	"slices"
	"testing"
)

// A store that is opened without a limit does not keep the limit of a later group from its effect.
func TestFirstLimitThatIsGivenApplies(t *testing.T) {
	const variable = "TUTTI_TEST_LIMIT"
	for _, c := range []struct {
		environment string
		given, want []int64
	}{
		{"", []int64{0, -1, 2, 0, 3}, []int64{4, 2}},
		{"", []int64{3, 2}, []int64{4, 3}},
		{"1", []int64{0, 2}, nil},
	} {
		t.Setenv(variable, c.environment)
		var got []int64
		b := bound{variable: variable, standard: 4, apply: func(n int64) { got = append(got, n) }}
		for _, n := range c.given {
			b.set(n)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%q in the environment, and %d given: %d applied, want %d", c.environment, c.given, got, c.want)
		}
	}
}
