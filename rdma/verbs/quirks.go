package verbs

import (
	"os"
	"path/filepath"

	"tutti/rdma"
)

// unlike is a kind of devices that deviate from the verbs standard. A device is of that kind if its
// driver in the kernel has this name, or its vendor this number, unless that is 0.
type unlike struct {
	what   string
	driver string
	vendor uint32
	quirks rdma.Quirks
}

// known are the devices that are known to deviate.
var known = []unlike{
	// Their driver does not know the way from the error state to reset.
	{what: "Alibaba eRDMA", driver: "erdma", vendor: 0x1ded, quirks: rdma.Quirks{NoReset: true}},
	// It leaves a queue pair of RoCE in the error state, and says that it was reset. Intel has
	// other devices.
	{what: "Intel E810 and others of irdma", driver: "irdma", quirks: rdma.Quirks{NoReset: true}},
}

// quirksOf returns what is known of a device.
func quirksOf(driver string, vendor uint32) (q rdma.Quirks) {
	for _, u := range known {
		if driver == u.driver || u.vendor != 0 && vendor == u.vendor {
			q.NoReset = q.NoReset || u.quirks.NoReset
		}
	}
	return q
}

// driverOf returns the name of a device's driver, "" if it has no hardware of its own.
func driverOf(root, device string) string {
	to, err := os.Readlink(filepath.Join(root, device, "device/driver"))
	if err != nil {
		return ""
	}
	return filepath.Base(to)
}
