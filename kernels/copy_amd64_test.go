//go:build !purego && !race

package kernels

import (
	"testing"
	"time"
	"unsafe"
)

// Every way, also those that this machine does not choose.
func init() {
	copies["moveString"] = moveString
	for name, f := range map[string]struct {
		move func(dst, src unsafe.Pointer, n int)
		can  bool
	}{
		"moveAheadAVX512":       {moveAheadAVX512, hasAVX512},
		"moveAheadAVX2":         {moveAheadAVX2, hasAVX2},
		"moveNonTemporalAVX512": {moveNonTemporalAVX512, hasAVX512},
		"moveNonTemporalAVX2":   {moveNonTemporalAVX2, hasAVX2},
	} {
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

const trialCopies = 32 // of each way

func TestTrialPrefersTheFasterWay(t *testing.T) {
	always := func(time float64) func(int) float64 { return func(int) float64 { return time } }
	interrupted := func(i int) float64 {
		if i%4 == 0 {
			return 1000
		}
		return 1
	}
	for _, c := range []struct {
		name  string
		times []func(i int) float64 // of whole, ahead, nonTemporal
		want  way
	}{
		{"faster ahead", []func(int) float64{always(2), always(1)}, ahead},
		{"faster whole", []func(int) float64{always(1), always(2)}, whole},
		{"alike", []func(int) float64{always(1), always(1)}, whole},
		{"interruptions", []func(int) float64{always(1.1), interrupted}, ahead},
		{"faster past the caches", []func(int) float64{always(3), always(2), always(1)}, nonTemporal},
		{"slower past the caches", []func(int) float64{always(3), always(4), always(5)}, whole},
	} {
		tr := trial{rules: &rules{ways: way(len(c.times)), turns: trialCopies, turn: 1}}
		for round := range 2 { // the second one begins anew
			tr.best.Store(uint32(ways))
			tr.running.Store(true)
			for i := range trialCopies {
				for w, time := range c.times {
					tr.add(way(w), time(i))
				}
			}
			tr.decide()
			if got := way(tr.best.Load()); got != c.want {
				t.Errorf("%s, trial %d: way %d, want %d", c.name, round, got, c.want)
			}
			tr.decide() // nothing has been tried since
			if got := way(tr.best.Load()); got != c.want {
				t.Errorf("%s, after trial %d: way %d, want %d", c.name, round, got, c.want)
			}
		}
	}
}

func TestTrialCopiesAreSharedEvenly(t *testing.T) {
	for n := ahead + 1; n <= ways; n++ {
		tr := trial{rules: &rules{ways: n, turns: trialCopies, turn: 1}}
		for kinds := 1; kinds <= 2; kinds++ { // of copies that take turns, as those to a ring and from it
			done := make([][ways]int, kinds)
			for i := range tr.length() {
				done[int(i)%kinds][tr.way(i)]++
			}
			for kind, d := range done {
				for w := range n {
					if want := trialCopies / kinds; d[w] < want-1 || d[w] > want+1 {
						t.Errorf("of %d ways, copies of kind %d of %d: %v, want about %d each", n, kind, kinds, d[:n],
							want)
						break
					}
				}
			}
		}
	}
}

// Copies to memory that is a little behind their source, modulo 4096, take about as long as others.
func TestAliasedCopies(t *testing.T) {
	const n = 32 << 10
	dst, src := make([]byte, n+8192), make([]byte, n+4096)
	at := func(b []byte, off uintptr) unsafe.Pointer { // at a multiple of 4096, and off
		return unsafe.Add(ptr(b), (4096-uintptr(ptr(b))%4096)%4096+off)
	}
	least := func(move func(dst, src unsafe.Pointer, n int), behind uintptr) time.Duration {
		least := time.Duration(1<<63 - 1)
		for range 50 {
			begin := time.Now()
			move(at(dst, behind), at(src, 0), n)
			least = min(least, time.Since(begin))
		}
		return least
	}
	other := max(least(whole.copy, 0), least(whole.copy, 256))
	for _, behind := range []uintptr{1, 4, 16, 31, 32, 63} {
		took := least(whole.copy, behind)
		t.Logf("%d bytes behind: %v, by a string move %v; others %v", behind, took, least(moveString, behind), other)
		for round := 0; round < 10 && took > 4*other; round++ { // the machine may have been busy with one of them
			took = min(took, least(whole.copy, behind))
			other = max(other, least(whole.copy, 0), least(whole.copy, 256))
		}
		if took > 4*other {
			t.Errorf("%d bytes behind: %v, others take %v", behind, took, other)
		}
	}
}

// TestTrialsDecide: the copies of a trial are timed and decide, whether they are transfers or parts
// of them.
func TestTrialsDecide(t *testing.T) {
	dst, src := make([]byte, sharedFrom), make([]byte, sharedFrom)
	for _, of := range []int{len(src), 8 * len(src), 1000 * len(src)} {
		tr := trial{rules: &outRules}
		if !hasAVX2 { // this processor has one way
			if tr.try(0, ptr(dst), ptr(src), len(src), of) {
				t.Error("a trial of one way")
			}
			continue
		}
		tr.mu.Lock() // another goroutine tries
		if tr.try(0, ptr(dst), ptr(src), len(src), of) {
			t.Error("two goroutines try at once")
		}
		tr.mu.Unlock()
		tr.best.Store(uint32(ways))
		most := tr.length() * uint32(max(1, min(of/len(src), parts)))
		for range most {
			if tr.copy(ptr(dst), ptr(src), len(src), of); tr.best.Load() != uint32(ways) {
				t.Fatalf("parts of %d bytes of %d: decided within a trial", len(src), of)
			}
		}
		if tr.copy(ptr(dst), ptr(src), len(src), of); tr.best.Load() >= uint32(ways) {
			t.Errorf("parts of %d bytes of %d: no decision after %d", len(src), of, most)
		}
		for w, times := range tr.times {
			if len(times) > 0 {
				t.Errorf("%d times of way %d are left", len(times), w)
			}
		}
	}
}
