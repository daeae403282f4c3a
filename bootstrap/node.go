package bootstrap

import (
	"fmt"
	"strings"
)

// NodeFromEnv reads the environment of a launcher of ranks that another launcher has started once
// on each node. In the Launch that it returns, Rank is the number of this node, Size the number of
// nodes, and Job the name of the job. It supports Open MPI, PMI and steps of Slurm; without them
// Size is 1. It also sets the fields that Meet, Tell and Hear need.
func NodeFromEnv(getenv func(string) string) (Launch, error) {
	// Variables about ranks do not describe this process.
	mine := func(name string) bool {
		for _, prefix := range []string{"OMPI_", "PMI_", "MPI_LOCAL", "PMIX_NAMESPACE", "PALS_", "FLUX_", "SLURM_"} {
			if strings.HasPrefix(name, prefix) {
				return true
			}
		}
		return name == "TUTTI_IFNAME"
	}
	e := env{get: WithoutServices(func(name string) string {
		if !mine(name) {
			return ""
		}
		return getenv(name)
	})}
	l := Launch{Size: 1, LocalRank: -1, Source: "none"}
	if err := e.place(&l); err != nil {
		return Launch{}, err
	}
	l.Interfaces = strings.TrimSpace(e.get("TUTTI_IFNAME"))
	switch step := e.slurmStep(); {
	case l.Source == "slurm" && step == "":
		return Launch{Size: 1, LocalRank: -1, Source: "none"}, nil
	case l.Source != "slurm" && l.Source != "pmi", step == "":
		return l, nil
	}
	name, nodes, err := e.number([]string{"SLURM_STEP_NUM_NODES", "SLURM_NNODES"}, 1)
	if err != nil || name == "" {
		return l, err
	}
	if l.Size != nodes {
		return Launch{}, fmt.Errorf("environment: srun started %d tasks on %d nodes (%s), and each of them would "+
			"start the ranks of a node: give srun --ntasks-per-node=1", l.Size, nodes, name)
	}
	if _, l.Rank, err = e.number([]string{"SLURM_NODEID"}, 0); err == nil && l.Rank >= nodes {
		err = fmt.Errorf("environment: SLURM_NODEID=%d contradicts %s=%d: nodes are 0..%d", l.Rank, name, nodes,
			nodes-1)
	}
	return l, err
}
