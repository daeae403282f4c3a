package join

import (
	"testing"
)

func TestPlaceRoundTrip(t *testing.T) {
	p := Place{Machine: 1, CPUs: 2, Cores: 3, Maps: true, Exchanges: true, Table: 6,
		Incarnation: 7, User: 8}
	b := make([]byte, PlaceSize)
	p.Encode(b)
	if DecodePlace(b) != p {
		t.Errorf("%+v, then %+v", p, DecodePlace(b))
	}
}
