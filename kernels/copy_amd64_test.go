//go:build !purego && !race

package kernels

import (
	"testing"
	"unsafe"
)

// Every way, also those that this machine does not choose.
func init() {
	copies["moveString"] = moveString
	for name, f := range map[string]struct {
		move func(dst, src unsafe.Pointer, n int)
		can  bool
	}{"moveAheadAVX512": {moveAheadAVX512, hasAVX512}, "moveAheadAVX2": {moveAheadAVX2, hasAVX2}} {
		if f.can {
			copies[name] = func(dst, src unsafe.Pointer, n int) {
				if n < sharedFrom {
					Copy(dst, src, n)
				} else {
					f.move(dst, src, n)
				}
			}
		}
	}
}

func TestTrialPrefersTheFasterWay(t *testing.T) {
	for _, c := range []struct {
		name         string
		whole, ahead func(i int) float64
		want         way
	}{
		{"faster ahead", func(int) float64 { return 2 }, func(int) float64 { return 1 }, ahead},
		{"faster whole", func(int) float64 { return 1 }, func(int) float64 { return 2 }, whole},
		{"alike", func(int) float64 { return 1 }, func(int) float64 { return 1 }, whole},
		{"interruptions", func(int) float64 { return 1.1 }, func(i int) float64 {
			if i%4 == 0 {
				return 1000
			}
			return 1
		}, ahead},
	} {
		var tr trial
		for round := range 2 { // the second one begins anew
			tr.best.Store(uint32(ways))
			for i := range trialCopies {
				if got := way(tr.best.Load()); got != ways {
					t.Errorf("%s, trial %d: decides for way %d after %d copies", c.name, round, got, i)
				}
				tr.add(whole, c.whole(i))
				tr.add(ahead, c.ahead(i))
			}
			if got := way(tr.best.Load()); got != c.want {
				t.Errorf("%s, trial %d: way %d, want %d", c.name, round, got, c.want)
			}
		}
	}
}

func TestTrialCopiesAreSharedEvenly(t *testing.T) {
	var tr trial
	dst, src := make([]byte, sharedFrom), make([]byte, sharedFrom)
	if !hasAVX2 { // this processor has one way
		if tr.try(0, ptr(dst), ptr(src), len(src)) {
			t.Error("a trial of one way")
		}
		return
	}
	var done [2][ways]int // by parity of the copy, as of copies to a ring and from it
	for i := range uint32(ways) * (trialCopies - 1) {
		had := len(tr.times[whole])
		if !tr.try(i, ptr(dst), ptr(src), len(src)) {
			t.Fatal("a copy of a trial was not made")
		}
		w := ahead
		if len(tr.times[whole]) > had {
			w = whole
		}
		done[i%2][w]++
	}
	for parity, d := range done {
		if diff := d[whole] - d[ahead]; diff < -1 || diff > 1 {
			t.Errorf("copies with numbers of parity %d: %d whole, %d ahead", parity, d[whole], d[ahead])
		}
	}
	tr.mu.Lock() // another goroutine tries
	if tr.try(0, ptr(dst), ptr(src), len(src)) {
		t.Error("two goroutines try at once")
	}
	tr.mu.Unlock()
}
