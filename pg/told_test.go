package pg

import (
	"bytes"
	"encoding/binary"
	"math"
	"testing"

	"tutti/pg/internal/join"
	"tutti/pg/internal/resync"
)

// decodeTold accepts any input, and valid input encodes to the same bytes.
func FuzzTold(f *testing.F) {
	f.Add(encodeTold(resync.Told{At: resync.Point{View: 7, Attempt: 1},
		Standing: resync.Standing{Over: 5, Given: 2, Since: 3, Stops: resync.Stops{3, 4}, Has: true, Calls: true,
			Last: resync.Outcome{At: resync.Point{View: 6}, Start: 4, Confirmed: 3},
			More: told{place: join.Place{Machine: 1, Cores: 2, Maps: true, Incarnation: 9}, ballot: 2,
				host: true, of: 7, cause: []byte("why")}}}))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		x, err := decodeTold(b)
		if err != nil {
			return
		}
		again := encodeTold(x)
		if y, err := decodeTold(again); err != nil || !bytes.Equal(encodeTold(y), again) || x.At != y.At ||
			x.Over != y.Over || x.Given != y.Given || x.Since != y.Since || x.Stops != y.Stops ||
			x.Last != y.Last || x.More.(told).host != y.More.(told).host || x.More.(told).of != y.More.(told).of {
			t.Errorf("%x was understood as %+v, told as %x and understood as %+v (%v)", b, x, again, y, err)
		}
	})
}

// A peer's numbers are bounded: a sum that overflows would put the ranks at different operations,
// and the highest number stands for a rank without a say.
func TestNumbersOfPeersAreBounded(t *testing.T) {
	told := encodeTold(resync.Told{Standing: resync.Standing{More: told{}}})
	for _, at := range []int{8, 16, 40, 48, 56, 72, standingSince, standingStops, standingSize - 8} {
		b := bytes.Clone(told)
		for n, fits := range map[uint64]bool{maxNumber: true, maxNumber + 1: false, math.MaxUint64: false} {
			binary.LittleEndian.PutUint64(b[at:], n)
			if _, err := decodeTold(b); (err == nil) != fits {
				t.Errorf("%d at byte %d of a standing: %v", n, at, err)
			}
		}
	}
	for n, fits := range map[uint64]bool{maxNumber: true, maxNumber + 1: false, math.MaxUint64: false} {
		if _, err := decodeBallot(ballot{n: n}.encode()); (err == nil) != fits {
			t.Errorf("a ballot in agreement %d: %v", n, err)
		}
	}
}

func FuzzBallot(f *testing.F) {
	f.Add(ballot{3, [2]bool{true, false}, true}.encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		x, err := decodeBallot(b)
		if err != nil {
			return
		}
		if y, err := decodeBallot(x.encode()); err != nil || x != y {
			t.Errorf("%x: %v, then %v (%v)", b, x, y, err)
		}
		for n := range uint64(5) {
			if yes, known := x.vote(x.n - n); n <= x.n && (!known || n < 2 && yes != x.yes[n]) {
				t.Errorf("%v: vote %d: %v, %v", x, x.n-n, yes, known)
			}
		}
	})
}

// A rank that comes in while others are in an agreement has no say in that one, and has one in the
// next.
func TestAdmittedRankVotesFromNextAgreement(t *testing.T) {
	g := &Group{agreement: agreement{ballots: map[int]ballot{0: {n: 7, yes: [2]bool{true, false}}, 1: abstains}}}
	if yes, known := g.ballots[1].vote(7); !yes || !known {
		t.Errorf("before it is in: %v, %v, want true, true", yes, known)
	}
	g.join(7)
	if yes, known := g.ballots[1].vote(7); !yes || !known {
		t.Errorf("in the agreement under way: %v, %v, want true, true", yes, known)
	}
	if _, known := g.ballots[1].vote(8); known {
		t.Error("in the next: its vote is not waited for")
	}
	if g.ballots[0] != (ballot{n: 7, yes: [2]bool{true, false}}) {
		t.Errorf("another rank's ballot is %v", g.ballots[0])
	}
}
