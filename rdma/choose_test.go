package rdma

import (
	"errors"
	"fmt"
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
