package span

import (
	"testing"
	"time"
)

func TestParse(t *testing.T) {
	for text, want := range map[string]time.Duration{"": 0, "90s": 90 * time.Second, "90": 90 * time.Second,
		"0.01": 10 * time.Millisecond, "10ms": 10 * time.Millisecond, "-1": -time.Second, "-1ms": -time.Millisecond} {
		if got, err := Parse(text); got != want || err != nil {
			t.Errorf("%q: %v, %v; want %v", text, got, err, want)
		}
	}
	for _, text := range []string{"0", "0s", "-0", "1e-12", "x", "5 m", "1e300", "NaN", "inf", "10 ms"} {
		if got, err := Parse(text); err == nil {
			t.Errorf("%q: %v, want an error", text, got)
		}
	}
}
