package main

import (
	"errors"
	"testing"

	"tutti/endpoint"
)

// A server that comes late, or again, takes the latest version of those that are there.
func TestServerTakesHighestVersion(t *testing.T) {
	lost := errors.New("lost")
	for want, names := range map[int][]string{
		10:  {"10", "9", manifestPrefix + "10", manifestPrefix + "9"},
		100: {manifestPrefix + "100", manifestPrefix + "99", manifestPrefix, manifestPrefix + "x"},
		8:   {manifestPrefix + "7", manifestPrefix + "8", "-" + manifestPrefix + "9"},
	} {
		event := func(name string, gone bool) endpoint.RegionEvent {
			return endpoint.RegionEvent{RemoteRegion: endpoint.RemoteRegion{Name: name}, Gone: gone}
		}
		versions, ended := highest(func(yield func(endpoint.RegionEvent, error) bool) {
			for _, name := range names {
				if !yield(event(name, false), nil) {
					return
				}
			}
			if yield(event(manifestPrefix+"200", true), nil) {
				yield(endpoint.RegionEvent{}, lost)
			}
		})
		if err := <-ended; err != lost {
			t.Errorf("%v: %v", names, err)
		}
		if got := <-versions; got != want {
			t.Errorf("%v: version %d, want %d", names, got, want)
		}
	}
}
