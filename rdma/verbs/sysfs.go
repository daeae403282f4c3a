package verbs

import (
	"encoding/hex"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"tutti/rdma"
)

// sysfs is the kernel's directory of RDMA devices.
const sysfs = "/sys/class/infiniband"

func readLine(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// KernelNUMANode returns the NUMA node of a device, -1 if it is unknown, as the kernel shows it
// below root, a directory such as /sys/class/infiniband.
func KernelNUMANode(root, device string) int {
	n, err := strconv.Atoi(readLine(filepath.Join(root, device, "device/numa_node")))
	if err != nil || n < 0 {
		return -1
	}
	return n
}

// KernelGIDs returns the addresses of a port as the kernel shows them below root, a directory such
// as /sys/class/infiniband. It needs no library, and no right to use the device.
func KernelGIDs(root, device string, port int) ([]rdma.GIDEntry, error) {
	dir, err := os.ReadDir(filepath.Join(root, device, "ports", strconv.Itoa(port), "gids"))
	if err != nil {
		return nil, err
	}
	var all []rdma.GIDEntry
	for i := range len(dir) {
		if e, ok := sysfsGID(root, device, port, i); ok {
			all = append(all, e)
		}
	}
	return all, nil
}

// sysfsGID reads an entry of a port's table of addresses, false if it is empty.
func sysfsGID(root, device string, port, index int) (rdma.GIDEntry, bool) {
	dir, i := filepath.Join(root, device, "ports", strconv.Itoa(port)), strconv.Itoa(index)
	e := rdma.GIDEntry{Index: index}
	raw, err := hex.DecodeString(strings.ReplaceAll(readLine(filepath.Join(dir, "gids", i)), ":", ""))
	if err != nil || len(raw) != len(e.GID) {
		return e, false
	}
	copy(e.GID[:], raw)
	if e.GID == (rdma.GID{}) {
		return e, false
	}
	switch kind := readLine(filepath.Join(dir, "gid_attrs/types", i)); {
	case strings.Contains(kind, "v2"):
		e.Type = rdma.RoCEv2
	case strings.Contains(kind, "v1") && readLine(filepath.Join(dir, "link_layer")) == "Ethernet":
		e.Type = rdma.RoCEv1 // the kernel names it "IB/RoCE v1" for both
	}
	e.Interface = readLine(filepath.Join(dir, "gid_attrs/ndevs", i))
	return e, true
}

// gbps returns the rate of a port in Gbit/s from the numbers of the verbs for width and speed.
func gbps(width, speed int) float64 {
	lanes := map[int]float64{1: 1, 2: 4, 4: 8, 8: 12, 16: 2}[width]
	lane := map[int]float64{1: 2.5, 2: 5, 4: 10, 8: 10, 16: 14, 32: 25, 64: 50, 128: 100, 256: 200}[speed]
	return lanes * lane
}
