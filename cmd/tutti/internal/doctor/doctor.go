// Package doctor examines what a machine can do for a job, and gives advice on what it cannot. It
// tries what can be tried, instead of reading settings.
package doctor

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"tutti/bootstrap"
	"tutti/cmd/tutti/internal/topology"
	"tutti/device/cuda"
	"tutti/nvlink"
	"tutti/p2p/registry"
)

// State is the outcome of one check.
type State string

// The states. Only Broken makes the machine unusable.
const (
	Found   State = "found"
	Missing State = "missing" // absent, but jobs run without it
	Warning State = "warning" // works, but worse than it could
	Broken  State = "broken"  // jobs do not run
)

// Finding is the result of one check.
type Finding struct {
	Group  string `json:"group"`
	Check  string `json:"check"`
	State  State  `json:"state"`
	Detail string `json:"detail"`
	Advice string `json:"advice,omitempty"` // what to do; may be empty
	// Topology is how GPUs and network cards are connected, for the check of that; else nil.
	Topology *topology.Report `json:"topology,omitempty"`
	Table    []string         `json:"-"` // the same as lines of text
}

// Host is the machine to examine.
type Host struct {
	Root    string              // directory of /proc, /sys and /etc; "" is the machine itself
	Getenv  func(string) string // of the environment
	Environ func() []string
	Probe   time.Duration // bounds each check that communicates; 0: 5 s
	// GPUs lists them; nil: as nvlink.Read does. CUDA opens its driver; nil: as cuda.Load does.
	GPUs func() (nvlink.System, error)
	CUDA func() (*cuda.Driver, error)
}

// Local returns the machine of this process.
func Local() *Host { return &Host{Getenv: bootstrap.WithoutServices(os.Getenv), Environ: os.Environ} }

// read returns a file of the machine without surrounding space, "" if it cannot be read.
func (h *Host) read(path string) string {
	b, err := os.ReadFile(filepath.Join("/", h.Root, path))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

func (h *Host) exists(path string) bool {
	_, err := os.Stat(filepath.Join("/", h.Root, path))
	return err == nil
}

func (h *Host) list(path string) []string {
	entries, _ := os.ReadDir(filepath.Join("/", h.Root, path))
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

type check struct {
	group, name string
	run         func(context.Context, *Host) outcome
}

type outcome struct {
	state          State
	detail, advice string
	view           *topology.View
}

func found(detail string) outcome { return outcome{state: Found, detail: detail} }
func missing(detail, advice string) outcome {
	return outcome{state: Missing, detail: detail, advice: advice}
}
func warn(detail, advice string) outcome {
	return outcome{state: Warning, detail: detail, advice: advice}
}
func broken(detail, advice string) outcome {
	return outcome{state: Broken, detail: detail, advice: advice}
}

var checks = []check{
	{"machine", "system", system},
	{"machine", "cores", cores},
	{"machine", "binding", binding},
	{"machine", "simd", simd},
	{"machine", "memory", memory},
	{"machine", "huge pages", hugePages},
	{"limits", "open files", openFiles},
	{"limits", "locked memory", lockedMemory},
	{"one machine", "pidfd", pidfd},
	{"one machine", "/dev/shm", devShm},
	{"one machine", "peer memory", peerMemory},
	{"one machine", "processes", processes},
	{"network", "interfaces", interfaces},
	{"network", "routes", routes},
	{"network", "loopback", loopback},
	{"network", "port", port},
	{"store", "embedded", embedded},
	{"store", "TUTTI_STORE", configured},
	{"devices", "NVIDIA GPUs", gpus},
	{"devices", "CUDA", func(_ context.Context, h *Host) outcome { return cudaDriver(h.cuda()) }},
	{"devices", "topology", connections},
	{"devices", "verbs", verbsLibrary},
	{"devices", "GPUs' memory", gpuMemory},
	{"job", "environment", environment},
	{"job", "variables", variables},
	{"job", "tuning", tuned},
}

// Run makes every check, in a fixed order, and reports each finding as soon as it is known. It
// returns false if something is broken.
func (h *Host) Run(ctx context.Context, report func(Finding)) bool {
	fit, all := true, slices.Clone(checks)
	for _, k := range registry.Kinds() {
		at := slices.IndexFunc(all, func(c check) bool { return c.group == "store" })
		all = slices.Insert(all, at, check{"transports", k.Name, probe(k)})
	}
	for _, d := range h.rdmaDevices() {
		at := slices.IndexFunc(all, func(c check) bool { return c.group == "job" })
		all = slices.Insert(all, at, check{"devices", d, rdmaDevice(d)})
	}
	for _, c := range all {
		cctx, cancel := context.WithTimeout(ctx, h.patience())
		o := c.run(cctx, h)
		cancel()
		fit = fit && o.state != Broken
		f := Finding{Group: c.group, Check: c.name, State: o.state, Detail: o.detail, Advice: o.advice}
		if o.view != nil {
			r := o.view.Report()
			f.Topology, f.Table = &r, o.view.Text()
		}
		report(f)
	}
	return fit
}

func (h *Host) patience() time.Duration {
	if h.Probe > 0 {
		return h.Probe
	}
	return 5 * time.Second
}
