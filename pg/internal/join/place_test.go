package join

import (
	"testing"

	"tutti/collectives"
)

func TestPlaceRoundTrip(t *testing.T) {
	p := Place{Machine: 1, CPUs: 2, Cores: 3, Maps: true, Exchanges: true, Algo: collectives.Ring, Table: 6,
		Incarnation: 7}
	b := make([]byte, PlaceSize)
	p.Encode(b)
	if DecodePlace(b) != p {
		t.Errorf("%+v, then %+v", p, DecodePlace(b))
	}
}
