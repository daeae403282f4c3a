//go:build linux

// Package launchers runs the files of examples/launch with the launchers that they are for, as far
// as these can be had here: Slurm, Open MPI and MPICH are the real ones, on one machine; systemd
// reads its unit; torchrun is played. Kubernetes' manifest is tested in tests/kubernetes.
package launchers

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"tutti/bootstrap"
	"tutti/internal/proctest"
	"tutti/tests/internal/rig"
)

func TestMain(m *testing.M) { rig.Main(m, nil) }

// example is the path of a file of examples/launch.
func example(t *testing.T, name string) string {
	t.Helper()
	return filepath.Join(rig.Module(t), "examples", "launch", name)
}

// programs builds the program that is launched, and returns its path and a PATH with tutti in it.
func programs(t *testing.T) (hello, path string) {
	t.Helper()
	dir := filepath.Dir(rig.Tutti(t)) // which goes at the end
	built.Do(func() {
		cmd := exec.Command("go", "build", "-o", dir+"/", "./examples/hello")
		cmd.Dir = rig.Module(t)
		if out, err := cmd.CombinedOutput(); err != nil {
			buildError = fmt.Errorf("go build: %w\n%s", err, out)
		}
	})
	if buildError != nil {
		t.Fatal(buildError)
	}
	return filepath.Join(dir, "hello"), "PATH=" + dir + ":" + os.Getenv("PATH")
}

var (
	built      sync.Once
	buildError error
)

// file writes a file of the test.
func file(t *testing.T, name, text string, mode os.FileMode) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
	return path
}

// summed checks that n ranks met, each of which prints a line.
func summed(t *testing.T, n int, printed string) {
	t.Helper()
	for r := range n {
		want := fmt.Sprintf("rank %d of %d: the ranks sum to %d\n", r, n, n*(n-1)/2)
		if strings.Count(printed, want) != 1 {
			t.Errorf("%q is not printed once, but\n%s", want, printed)
			return
		}
	}
}

// endsWell waits until the launcher of a script has ended, and checks its exit code. Debian's
// mpiexec of MPICH sometimes aborts when its ranks have ended. If a rank fails, it exits with the
// rank's code, which is 1.
func endsWell(t *testing.T, script string, p *proctest.Child) {
	t.Helper()
	code := p.Wait()
	switch died := code < 0 || code >= 128; {
	case died && script == "mpich.sh":
		t.Logf("mpiexec ended with %d; it has printed %q", code, p.Err.String())
	case code != 0:
		t.Errorf("exit code %d; it has printed %q", code, p.Err.String())
	}
}

// asRoot lets Open MPI's mpirun run what root starts, and more ranks than there are cores.
var asRoot = []string{"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
	"OMPI_MCA_rmaps_base_oversubscribe=1"}

func TestMPIOnOneHostNeedsNothing(t *testing.T) {
	hello, path := programs(t)
	for script, mpirun := range map[string]string{"openmpi.sh": "mpirun.openmpi", "mpich.sh": "mpiexec.mpich"} {
		t.Run(script, func(t *testing.T) {
			rig.Need(t, mpirun)
			s := rig.New(t)
			// Two at once are two launches.
			var all []*proctest.Child
			for range 2 {
				// Two mpiruns remove a directory that they share under each other's hands.
				own := "OMPI_MCA_orte_tmpdir_base=" + t.TempDir()
				all = append(all, s.Start(append(asRoot, path, own), example(t, script), "3", hello))
			}
			for _, p := range all {
				endsWell(t, script, p)
				summed(t, 3, p.Out.String())
			}
			s.Clean()
		})
	}
}

// The launchers of other systems than Debian have other names, and may be anywhere.
func TestMPILaunchersAreFound(t *testing.T) {
	const says = "#!/bin/sh\necho \"${0##*/} $*\"\n"
	for script, names := range map[string]struct{ variable, debian, plain string }{
		"openmpi.sh": {"MPIRUN", "mpirun.openmpi", "mpirun"},
		"mpich.sh":   {"MPIEXEC", "mpiexec.mpich", "mpiexec"},
	} {
		t.Run(script, func(t *testing.T) {
			own := file(t, "own", says, 0o755)
			plain, debian := file(t, names.plain, says, 0o755), file(t, names.debian, says, 0o755)
			both := filepath.Dir(plain) + ":" + filepath.Dir(debian)
			for _, c := range []struct{ path, variable, want string }{
				{filepath.Dir(plain), "", names.plain},
				{both, "", names.debian},
				{both, own, "own"},
				{filepath.Dir(plain), "own", ""}, // not there
			} {
				cmd := exec.CommandContext(t.Context(), example(t, script), "3", "program")
				cmd.Env = []string{"PATH=" + c.path, names.variable + "=" + c.variable}
				want := c.want + " -n 3 program\n"
				if c.want == "" {
					want = ""
				}
				if out, err := cmd.Output(); string(out) != want || (err == nil) != (c.want != "") {
					t.Errorf("with PATH=%s, %s=%s: %q, %v; want %q", c.path, names.variable, c.variable, out, err, want)
				}
			}
		})
	}
}

// A rank's script may run one program after the other. Each meets its own ranks.
func TestMPIRunsProgramsInARow(t *testing.T) {
	const times, n = 4, 3
	hello, path := programs(t)
	for script, mpirun := range map[string]string{"openmpi.sh": "mpirun.openmpi", "mpich.sh": "mpiexec.mpich"} {
		t.Run(script, func(t *testing.T) {
			rig.Need(t, mpirun)
			s := rig.New(t)
			p := s.Start(append(asRoot, path), example(t, script), fmt.Sprint(n), "sh", "-ec",
				fmt.Sprintf("for i in $(seq %d); do %s; done", times, hello))
			endsWell(t, script, p)
			for r := range n {
				want := fmt.Sprintf("rank %d of %d: the ranks sum to %d\n", r, n, n*(n-1)/2)
				if got := strings.Count(p.Out.String(), want); got != times {
					t.Errorf("%q is printed %d times, want %d:\n%s", want, got, times, p.Out.String())
				}
			}
			s.Clean()
		})
	}
}

func TestMPIOnSeveralHosts(t *testing.T) {
	hello, path := programs(t)
	for script, c := range map[string]struct {
		mpirun string
		hosts  string
		env    []string
	}{
		// Hosts other than this one are reached by a program that does not go there. Open MPI takes
		// a name that leads here for this one: the other has none.
		"openmpi.sh": {"mpirun.openmpi", "localhost,other", append(asRoot, "OMPI_MCA_plm=rsh",
			"OMPI_MCA_plm_rsh_agent="+file(t, "reach", "#!/bin/sh\nshift\nexec sh -c \"$*\"\n", 0o755),
			"TUTTI_SECRET_FILE="+file(t, "secret", bootstrap.NewSecret()+"\n", 0o600), "PORT=29417")},
		"mpich.sh": {"mpiexec.mpich", "one,two", []string{"HYDRA_LAUNCHER=fork"}},
	} {
		t.Run(script, func(t *testing.T) {
			rig.Need(t, c.mpirun)
			s := rig.New(t)
			env := append(slices.Clone(c.env), path, "HOSTS="+c.hosts)
			p := s.StartIn(host(t, "localhost", "one", "two"), env, example(t, script), "2", hello)
			endsWell(t, script, p)
			summed(t, 4, unmarked(p.Out.String()))
			s.Clean()
		})
	}
}

// unmarked is what ranks printed without what tutti run puts before the lines, colours among it: a
// terminal that mpirun makes shows them.
func unmarked(out string) string {
	var b strings.Builder
	for line := range strings.Lines(strings.ReplaceAll(out, "\r\n", "\n")) {
		if i := strings.Index(line, "rank "); i >= 0 {
			line = line[i:]
		}
		b.WriteString(line)
	}
	return b.String()
}

// host is a prefix that runs a program on a host of its own, which knows these names for its
// loopback address.
func host(t *testing.T, names ...string) []string {
	t.Helper()
	h := rig.NewHosts(t, 1)[0]
	rig.Need(t, "nsenter")
	h.Decoy("eth0", "192.0.2.1/24") // without one some resolvers take it that there is no IPv4
	self, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	hosts := file(t, "hosts", "127.0.0.1 "+strings.Join(append(names, self), " ")+"\n", 0o644)
	// Not by "ip netns exec", which hides the control groups that Slurm wants.
	return []string{"nsenter", "--net=/run/netns/" + h.Name, "unshare", "-m", "sh", "-c",
		`mount --bind "$0" /etc/hosts && exec "$@"`, hosts}
}

// torchrun is what the real one does with the flags of our example, on one host.
const torchrun = `#!/bin/sh
set -eu
nodes=1 rank=0 id=none master=127.0.0.1
while [ $# -gt 0 ]; do
	case $1 in
	--standalone) id=alone-$$ ;;
	--nnodes=*) nodes=${1#*=} rank=$NODE ;;
	--nproc-per-node=*) n=${1#*=} ;;
	--rdzv-id=*) id=${1#*=} ;;
	--rdzv-backend=c10d | --no-python) ;;
	--rdzv-endpoint=*) master=${1#*=} master=${master%:*} ;;
	-*) echo "torchrun: no flag $1" >&2; exit 2 ;;
	*) break ;;
	esac
	shift
done
i=0
while [ $i -lt "$n" ]; do
	RANK=$((rank * n + i)) WORLD_SIZE=$((nodes * n)) LOCAL_RANK=$i LOCAL_WORLD_SIZE=$n TORCHELASTIC_RUN_ID=$id \
		MASTER_ADDR=$master MASTER_PORT=29555 "$@" &
	i=$((i + 1))
done
wait
`

func TestTorchrun(t *testing.T) {
	hello, path := programs(t)
	dir := filepath.Dir(file(t, "torchrun", torchrun, 0o755))
	path = "PATH=" + dir + ":" + strings.TrimPrefix(path, "PATH=")
	t.Run("one host", func(t *testing.T) {
		s := rig.New(t)
		p := s.Start([]string{path}, example(t, "torchrun.sh"), "3", hello)
		p.End(0)
		summed(t, 3, p.Out.String())
		s.Clean()
	})
	t.Run("two hosts", func(t *testing.T) {
		s := rig.New(t)
		on := host(t, "localhost", "first", "second")
		env := []string{path, "HOSTS=first,second", "ID=torch", "TUTTI_SECRET_FILE=" + file(t, "secret",
			bootstrap.NewSecret()+"\n", 0o600)}
		var all []*proctest.Child
		for node := range 2 {
			all = append(all, s.StartIn(on, append(env, fmt.Sprint("NODE=", node)), example(t, "torchrun.sh"), "2",
				hello))
		}
		printed := ""
		for _, p := range all {
			p.End(0)
			printed += p.Out.String()
		}
		summed(t, 4, printed)
		s.Clean()
	})
}

func TestSystemdUnit(t *testing.T) {
	rig.Need(t, "systemd-analyze")
	text, err := os.ReadFile(example(t, "tutti-train.service"))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	// The programs of the unit have to exist.
	installed := strings.NewReplacer("/usr/local/bin/tutti ", rig.Tutti(t)+" ", "/usr/local/bin/train",
		proctest.Self()).Replace(string(text))
	verify := func(text string) string {
		path := filepath.Join(dir, "tutti-train.service")
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		out, err := exec.CommandContext(t.Context(), "systemd-analyze", "verify", path).CombinedOutput()
		if err != nil {
			return fmt.Sprintf("%v\n%s", err, out)
		}
		var said []string // of this unit
		for line := range strings.Lines(string(out)) {
			if strings.Contains(line, "tutti-train") {
				said = append(said, line)
			}
		}
		return strings.Join(said, "")
	}
	if said := verify(installed); said != "" {
		t.Errorf("systemd says: %s", said)
	}
	if said := verify(strings.Replace(installed, "KillMode=mixed", "KillMode=mixe", 1)); said == "" {
		t.Error("systemd says nothing of a mistake")
	}
	// Its flags are tutti run's: with a program that is not there it says so, and nothing of flags.
	_, command, _ := strings.Cut(string(text), "\nExecStart=")
	command, _, _ = strings.Cut(command, "\n")
	secret := file(t, "secret", bootstrap.NewSecret()+"\n", 0o600)
	argv := strings.Fields(strings.NewReplacer("${NODE}", "0", "%d/secret", secret,
		"/usr/local/bin/train", "/no/program").Replace(command))
	s := rig.New(t)
	p := s.Start(nil, append([]string{rig.Tutti(t)}, argv[1:]...)...)
	p.End(127)
	if !strings.Contains(p.Err.String(), "/no/program") {
		t.Errorf("tutti says %q", p.Err.String())
	}
	s.Clean()
}
