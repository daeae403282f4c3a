// Package span reads durations from environment variables.
package span

import (
	"errors"
	"strconv"
	"time"
)

// Parse reads "90s", or a number of seconds: "90", "0.5". The empty text is 0, and no other one is:
// a value that is set means something.
func Parse(text string) (time.Duration, error) {
	if text == "" {
		return 0, nil
	}
	d, err := time.ParseDuration(text)
	// This includes a value without a unit that ParseDuration accepts: "0".
	if n, nerr := strconv.ParseFloat(text, 64); nerr == nil && n > -1e9 && n < 1e9 {
		d, err = time.Duration(n*float64(time.Second)), nil
	}
	if err != nil || d == 0 {
		return 0, errors.New("expected a duration other than 0, such as 90s, 5m, or a number of seconds")
	}
	return d, nil
}
