package rdma

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// DevicePort names a port of a device.
type DevicePort struct {
	Device string
	Port   int
}

func (p DevicePort) String() string { return fmt.Sprintf("%s:%d", p.Device, p.Port) }

// Compare orders ports by the name of the device, then by number.
func (p DevicePort) Compare(o DevicePort) int {
	return cmp.Or(strings.Compare(p.Device, o.Device), cmp.Compare(p.Port, o.Port))
}

// DeviceFilter says which ports a program may use. The zero filter allows all.
type DeviceFilter struct {
	exclude bool
	items   []filterItem
	text    string
}

// filterItem allows the devices that are named so, or whose names begin so.
type filterItem struct {
	name  string
	exact bool
	port  int // 0: all
}

// ParseDevices parses a list of devices in the form of NCCL_IB_HCA: names of devices, each perhaps
// with a port, separated by commas (mlx5_0,mlx5_1:1). A name stands for all that begin with it. "="
// before the list means exactly these names, "^" all devices but those; "^=" is both. The empty
// list allows all.
func ParseDevices(list string) (DeviceFilter, error) {
	f := DeviceFilter{text: list}
	rest, exclude := strings.CutPrefix(strings.TrimSpace(list), "^")
	rest, exact := strings.CutPrefix(rest, "=")
	f.exclude = exclude
	if rest == "" {
		if exclude || exact {
			return DeviceFilter{}, fmt.Errorf("rdma: list of devices %q: no device after %q", list,
				strings.TrimSpace(list))
		}
		return f, nil
	}
	for text := range strings.SplitSeq(rest, ",") {
		text = strings.TrimSpace(text)
		name, port, with := strings.Cut(text, ":")
		item := filterItem{name: name, exact: exact}
		switch i := strings.IndexFunc(name, func(r rune) bool { return !nameRune(r) }); {
		case name == "":
			return DeviceFilter{}, fmt.Errorf("rdma: list of devices %q: an empty name", list)
		case i >= 0:
			return DeviceFilter{},
				fmt.Errorf("rdma: list of devices %q: %q in name %q (\"^\" and \"=\" stand once, before "+
					"the list)", list, name[i:], name)
		}
		if with {
			n, err := strconv.Atoi(port)
			if err != nil || n < 1 || n > 255 || strconv.Itoa(n) != port {
				return DeviceFilter{},
					fmt.Errorf("rdma: list of devices %q: port %q of %s: want a number from 1 to 255", list, port,
						name)
			}
			item.port = n
		}
		f.items = append(f.items, item)
	}
	return f, nil
}

// nameRune reports whether a device's name may have r.
func nameRune(r rune) bool {
	return r == '_' || r == '-' || r == '.' || r >= '0' && r <= '9' || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z'
}

// Allows reports whether p may be used.
func (f DeviceFilter) Allows(p DevicePort) bool {
	if len(f.items) == 0 {
		return true
	}
	return f.exclude != slices.ContainsFunc(f.items, func(i filterItem) bool { return i.is(p) })
}

func (i filterItem) is(p DevicePort) bool {
	if i.exact && p.Device != i.name || !strings.HasPrefix(p.Device, i.name) {
		return false
	}
	return i.port == 0 || i.port == p.Port
}

// Choose returns those of ports that may be used, in their order. An error that wraps ErrNoDevice
// says that none is left, or that the list names one that is not there.
func (f DeviceFilter) Choose(ports []DevicePort) ([]DevicePort, error) {
	if len(ports) == 0 {
		return nil, fmt.Errorf("rdma: this machine has no RDMA device: %w", ErrNoDevice)
	}
	for _, i := range f.items {
		if !f.exclude && !slices.ContainsFunc(ports, i.is) {
			return nil, fmt.Errorf("rdma: list of devices %q: nothing is named %s: %w; there are %v", f.text, i,
				ErrNoDevice, ports)
		}
	}
	chosen := slices.DeleteFunc(slices.Clone(ports), func(p DevicePort) bool { return !f.Allows(p) })
	if len(chosen) == 0 {
		return nil, fmt.Errorf("rdma: list of devices %q excludes all: %w; there are %v", f.text, ErrNoDevice, ports)
	}
	return chosen, nil
}

func (i filterItem) String() string {
	s := i.name
	if !i.exact {
		s += "*"
	}
	if i.port > 0 {
		s += fmt.Sprintf(":%d", i.port)
	}
	return s
}

// Place is a port, and the NUMA node of its device, -1 if that is unknown.
type Place struct {
	DevicePort
	Node int
}

// Allowed returns the ports of a provider's devices that a text allows, in its order: see
// ParseDevices. Devices that cannot be opened are left out; left says why, also beside an error.
func Allowed(p Provider, text string) (ports []Place, left, err error) {
	filter, err := ParseDevices(text)
	if err != nil {
		return nil, nil, err
	}
	names, err := p.Devices()
	if err != nil {
		return nil, nil, err
	}
	var all []DevicePort
	nodes := map[string]int{}
	for _, name := range names {
		d, err := p.Open(name, nil)
		if err != nil {
			left = errors.Join(left, err)
			continue
		}
		a := d.Attributes()
		nodes[name] = a.NUMANode
		for n := range a.Ports {
			all = append(all, DevicePort{Device: name, Port: n + 1})
		}
		if err := d.Close(); err != nil {
			return nil, left, err
		}
	}
	if all, err = filter.Choose(all); err != nil {
		return nil, left, err
	}
	for _, at := range all {
		ports = append(ports, Place{DevicePort: at, Node: nodes[at.Device]})
	}
	return ports, left, nil
}

// Nearest sorts ports by their distance from a process that runs on NUMA nodes: first those of its
// nodes, then those whose node is not known, then all others. Ports of the same distance are
// sorted by name and number. Without nodes, all have the same distance.
func Nearest(ports []Place, nodes []int) {
	distance := func(p Place) int {
		switch {
		case p.Node < 0 || len(nodes) == 0:
			return 1
		case slices.Contains(nodes, p.Node):
			return 0
		}
		return 2
	}
	slices.SortFunc(ports, func(a, b Place) int {
		return cmp.Or(cmp.Compare(distance(a), distance(b)), a.Compare(b.DevicePort))
	})
}
