package doctor

import (
	"fmt"
	"strings"
	"testing"

	"tutti/device/cuda"
	"tutti/nvlink"
	"tutti/nvlink/nvlinktest"
)

// withGPUs is a machine that has the GPUs of s, and no CUDA.
func withGPUs(t *testing.T, s nvlink.System, err error, vars ...string) *Host {
	h := machine(t, nil, vars...)
	h.GPUs = func() (nvlink.System, error) { return s, err }
	h.CUDA = func() (*cuda.Driver, error) { return nil, cuda.ErrUnavailable }
	return h
}

func TestConnections(t *testing.T) {
	half := nvlinktest.DGXH100()
	half.GPUs[3].Links[5].Up = false
	half.GPUs[4].Fabric.State = nvlink.FabricInProgress
	half.GPUs[6].Fabric.Problem = "insufficient resources"
	half.GPUs[7] = nvlink.GPU{Problem: "GPU is lost"}
	for name, c := range map[string]struct {
		s              nvlink.System
		err            error
		state          State
		detail, advice string
	}{
		"DGX":          {nvlinktest.DGXA100(), nil, Found, "8 GPUs, 10 RDMA devices; pairs: 28 NVS12", ""},
		"no driver":    {nvlink.System{}, fmt.Errorf("%w: x", nvlink.ErrUnavailable), Missing, "no GPU is known", ""},
		"a broken one": {nvlink.System{}, fmt.Errorf("count the GPUs: x"), Warning, "count the GPUs", "nvidia-smi"},
		"no GPU":       {nvlink.System{Driver: "550"}, nil, Missing, "no GPU", ""},
		"trouble": {half, nil, Warning,
			"GPU3: 17 of 18 NVLinks are up; GPU4: registration with the NVSwitch fabric is in progress; " +
				"GPU6 could not enter the NVSwitch fabric: insufficient resources; " +
				"GPU7 cannot be examined: GPU is lost", "start nvidia-fabricmanager"},
	} {
		o := connections(t.Context(), withGPUs(t, c.s, c.err))
		if o.state != c.state || !strings.Contains(o.detail, c.detail) || (o.advice == "") != (c.advice == "") ||
			!strings.Contains(o.advice, c.advice) || (o.view == nil) != (len(c.s.GPUs) == 0) {
			t.Errorf("%s: %+v; want %s, %q, %q", name, o, c.state, c.detail, c.advice)
		}
	}
	if o := gpus(t.Context(), withGPUs(t, half, nil)); o.state != Found || !strings.Contains(o.detail,
		"3: GPU of a test 80 GiB, 17 NVLinks; 4") || !strings.HasSuffix(o.detail, "7: not known") {
		t.Errorf("%+v", o)
	}
}

// TestTopologyFinding: the finding has the tables and the data, without the cards that
// TUTTI_RDMA_DEVICES excludes.
func TestTopologyFinding(t *testing.T) {
	h := withGPUs(t, nvlinktest.DGXH100(), nil, "TUTTI_RDMA_DEVICES=^=mlx5_2")
	var with []Finding
	h.Run(t.Context(), func(f Finding) {
		if f.Topology != nil || f.Table != nil {
			with = append(with, f)
		}
	})
	if len(with) != 1 || with[0].Check != "topology" || len(with[0].Topology.NICs) != 9 ||
		with[0].Topology.Paths[1][2].String() != "NVS18" ||
		strings.Contains(strings.Join(with[0].Table, "\n"),
			"mlx5_2") {
		t.Errorf("%+v", with)
	}
}
