// Package stats has what comparisons of measurements need.
package stats

import (
	"fmt"
	"math"
	"slices"
)

// Median returns the median of xs, which it does not change: the mean of the middle two for an even
// number, NaN if there are none.
func Median(xs []float64) float64 {
	if len(xs) == 0 {
		return math.NaN()
	}
	s := slices.Sorted(slices.Values(xs))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

// Geomean returns the geometric mean of positive xs, NaN if there are none.
func Geomean(xs []float64) float64 {
	sum := 0.0
	for _, x := range xs {
		sum += math.Log(x)
	}
	return math.Exp(sum / float64(len(xs)))
}

// Bounds returns k such that the interval from the k-th smallest (from 0) of n samples to the k-th
// largest holds the median of their distribution with at least the probability confidence, and is
// the narrowest of these. The number of samples below the median is binomial, whatever the
// distribution.
func Bounds(n int, confidence float64) (k int, err error) {
	if !(confidence > 0 && confidence < 1) {
		return 0, fmt.Errorf("a confidence of %v: expected more than 0 and less than 1", confidence)
	}
	k = -1
	tail, p := 0.0, math.Pow(0.5, float64(n)) // P(at most i samples are below the median), P(just i are)
	for i := 0; i < (n+1)/2; i++ {
		if tail += p; 1-2*tail < confidence {
			break
		}
		k = i
		p = p * float64(n-i) / float64(i+1)
	}
	if k < 0 {
		return 0, fmt.Errorf("%d rounds are too few for an interval of confidence %v", n, confidence)
	}
	return k, nil
}

// Interval is Bounds of xs.
func Interval(xs []float64, confidence float64) (lo, hi float64, err error) {
	k, err := Bounds(len(xs), confidence)
	if err != nil {
		return 0, 0, err
	}
	s := slices.Sorted(slices.Values(xs))
	return s[k], s[len(s)-1-k], nil
}
