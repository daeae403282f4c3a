package rdma

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
)

var machine = []DevicePort{{"mlx5_0", 1}, {"mlx5_0", 2}, {"mlx5_1", 1}, {"mlx5_10", 1}, {"rxe0", 1}}

func TestDevicesAreChosenAsWithNCCL(t *testing.T) {
	for list, want := range map[string]string{
		"":                "mlx5_0:1 mlx5_0:2 mlx5_1:1 mlx5_10:1 rxe0:1",
		"mlx5":            "mlx5_0:1 mlx5_0:2 mlx5_1:1 mlx5_10:1",
		"mlx5_1":          "mlx5_1:1 mlx5_10:1",
		"=mlx5_1":         "mlx5_1:1",
		"=mlx5_0:2, rxe0": "mlx5_0:2 rxe0:1",
		"rxe0,mlx5_0:1":   "mlx5_0:1 rxe0:1",
		"^mlx5":           "rxe0:1",
		"^mlx5_0:2,rxe":   "mlx5_0:1 mlx5_1:1 mlx5_10:1",
		"^=mlx5_1":        "mlx5_0:1 mlx5_0:2 mlx5_10:1 rxe0:1",
		"^absent":         "mlx5_0:1 mlx5_0:2 mlx5_1:1 mlx5_10:1 rxe0:1",
	} {
		f, err := ParseDevices(list)
		if err != nil {
			t.Errorf("%q: %v", list, err)
			continue
		}
		got, err := f.Choose(machine)
		if err != nil || fmt.Sprint(got) != "["+want+"]" {
			t.Errorf("%q: %v, %v; want %s", list, got, err, want)
		}
	}
	for list, why := range map[string]string{"=mlx5": "nothing is named mlx5", "mlx5_0:3": "mlx5_0*:3",
		"^mlx,rxe": "excludes all",
		"mlx5,efa": "nothing is named efa"} {
		f, err := ParseDevices(list)
		if err != nil {
			t.Errorf("%q: %v", list, err)
			continue
		}
		if got, err := f.Choose(machine); !errors.Is(err, ErrNoDevice) || !strings.Contains(err.Error(), why) ||
			len(got) > 0 {
			t.Errorf("%q: %v, %v; want an error with %q", list, got, err, why)
		}
	}
	if _, err := (DeviceFilter{}).Choose(nil); !errors.Is(err, ErrNoDevice) {
		t.Errorf("a machine without devices: %v", err)
	}
	for _, list := range []string{"^", "=", "^=", ",", "mlx5,", "mlx5:", "mlx5:0", "mlx5:x", "mlx5:256", "mlx5:+1",
		"mlx5:1:2",
		"mlx5,^rxe", "=mlx5,=rxe", "ml x", "a/b", "=^mlx5"} {
		if f, err := ParseDevices(list); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("%q", list)) {
			t.Errorf("%q: %+v, %v; want an error that shows the list", list, f, err)
		}
	}
}

// TestPortsOfOwnNodesComeFirst: the ports of the process's nodes come first, those of other nodes
// last.
func TestPortsOfOwnNodesComeFirst(t *testing.T) {
	at := func(name string, port, node int) Place { return Place{DevicePort{name, port}, node} }
	all := []Place{at("d", 2, 0), at("d", 1, 0), at("c", 1, -1), at("b", 1, 1), at("a", 1, 2), at("e", 1, 1)}
	for _, c := range []struct {
		nodes []int
		want  string
	}{
		{nil, "a:1 b:1 c:1 d:1 d:2 e:1"},
		{[]int{0}, "d:1 d:2 c:1 a:1 b:1 e:1"},
		{[]int{1}, "b:1 e:1 c:1 a:1 d:1 d:2"},
		{[]int{0, 1, 2}, "a:1 b:1 d:1 d:2 e:1 c:1"},
		{[]int{7}, "c:1 a:1 b:1 d:1 d:2 e:1"},
	} {
		ports := slices.Clone(all)
		Nearest(ports, c.nodes)
		var names []string
		for _, p := range ports {
			names = append(names, p.String())
		}
		if got := strings.Join(names, " "); got != c.want {
			t.Errorf("from nodes %v: %s, want %s", c.nodes, got, c.want)
		}
	}
}

// FuzzParseDevices: a list that is accepted chooses of the machine's ports, with an exclusion the
// others, and says why if it chooses none.
func FuzzParseDevices(f *testing.F) {
	for _, s := range []string{"", "mlx5_0,mlx5_1:1", "^mlx5_2", "=exact", "^=a:1", "mlx5:", "^"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, list string) {
		filter, err := ParseDevices(list)
		if err != nil {
			return
		}
		chosen, err := filter.Choose(machine)
		if err != nil && !errors.Is(err, ErrNoDevice) || (err == nil) != (len(chosen) > 0) {
			t.Fatalf("%q: %v, %v", list, chosen, err)
		}
		for _, p := range chosen {
			if !filter.Allows(p) {
				t.Fatalf("%q: %v was chosen and is not allowed", list, p)
			}
		}
		if list != "" && strings.TrimSpace(list) == list && list[0] != '^' {
			other, err := ParseDevices("^" + list)
			if err != nil {
				t.Fatalf("%q is accepted, %q is not: %v", list, "^"+list, err)
			}
			for _, p := range machine {
				if filter.Allows(p) == other.Allows(p) {
					t.Fatalf("%q and its exclusion agree on %v", list, p)
				}
			}
		}
	})
}
