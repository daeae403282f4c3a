package device

import (
	"fmt"
	"strings"

	"tutti/mem"
)

// A Finder knows devices by the location of their memory. Its methods may be called by any
// goroutine.
type Finder interface {
	// Find returns the device whose memory is at loc, always the same one. It may open the device.
	// The error says which devices there are.
	Find(loc mem.Location) (Device, error)
}

// A Preloader is a Finder that can have devices ready before they are asked for.
type Preloader interface {
	// Preload opens the devices that the process uses already, and loads onto them what their
	// streams will need: a device may be unable to load anything while a stream of it waits. It is
	// called before the first work of a job. Devices that were opened are not opened again. It
	// returns all devices that are ready, and the errors of those that are not.
	Preload() ([]Device, error)
}

// List is a Finder of the devices in it.
type List []Device

// Preload implements Preloader.
func (l List) Preload() ([]Device, error) { return l, nil }

// Find implements Finder.
func (l List) Find(loc mem.Location) (Device, error) {
	var known []string
	for _, d := range l {
		if d.Location() == loc {
			return d, nil
		}
		known = append(known, string(d.Location()))
	}
	if known == nil {
		return nil, fmt.Errorf("there is no device at %q: none was given", loc)
	}
	return nil, fmt.Errorf("there is no device at %q, only at %s", loc, strings.Join(known, ", "))
}
