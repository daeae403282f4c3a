package pg

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"tutti/p2p/registry"
)

// A program that tells its place need not have a complete launcher's, but its settings count.
func TestSettingsOfAPlacedProgram(t *testing.T) {
	var log bytes.Buffer
	cfg := Config{Size: 2, Logger: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))}
	resolve := func(env map[string]string) (*settings, error) {
		log.Reset()
		return cfg.resolve(func(name string) string { return env[name] })
	}
	s, err := resolve(map[string]string{"WORLD_SIZE": "3", "TUTTI_TRANSPORT": "tcp", "TUTTI_MAX_SIZE": "4"})
	if err != nil || s.Transport != "tcp" || s.Size != 2 || s.MaxSize != 4 ||
		!strings.Contains(log.String(), "WORLD_SIZE=3") {
		t.Errorf("%v, logged %q", err, &log)
	}
	for name, value := range map[string]string{"TUTTI_UNIFORM": "yes", "TUTTI_MAX_SIZE": "many"} {
		for _, more := range []string{"", "3"} {
			if _, err := resolve(map[string]string{"WORLD_SIZE": more, name: value}); err == nil ||
				!strings.Contains(err.Error(), name) {
				t.Errorf("%s=%s, WORLD_SIZE=%s: %v", name, value, more, err)
			}
		}
	}
	cfg.Size = 0
	if _, err := resolve(map[string]string{"WORLD_SIZE": "3"}); err == nil {
		t.Error("a place that is not complete was taken")
	}
}

// A number that names no way to go on after a failure or a timeout is refused, and has no name.
func TestUnknownFailureModes(t *testing.T) {
	for name, cfg := range map[string]Config{
		"OnFailure(3)":   {OnFailure: Retry + 1},
		"OnFailure(77)":  {OnFailure: 77},
		"OnTimeout(3)":   {OnTimeout: TimeoutEvictsAlone + 1},
		"OnTimeout(255)": {OnTimeout: 255},
	} {
		var bad *ArgumentError
		arg, _, _ := strings.Cut(name, "(")
		_, err := cfg.resolve(func(string) string { return "" })
		if !errors.As(err, &bad) || bad.Call != "join" || bad.Arg != arg || bad.Got != name {
			t.Errorf("%s: %v, want an *ArgumentError that names it", name, err)
		}
	}
	for name, is := range map[string]fmt.Stringer{"report": Report, "shrink": Shrink, "retry": Retry,
		"OnFailure(3)": Retry + 1, "TimeoutReports": TimeoutReports, "TimeoutEvicts": TimeoutEvicts,
		"TimeoutEvictsAlone": TimeoutEvictsAlone, "OnTimeout(255)": OnTimeout(255)} {
		if is.String() != name {
			t.Errorf("%s is written as %s", name, is)
		}
	}
}

// The store of ranks that are invited has listened, so that it is not waited for. Others may come
// to the place before rank 0.
func TestInvitedRanksDoNotWait(t *testing.T) {
	for _, invited := range []bool{true, false} {
		vars := map[string]string{"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": t.Name()}
		if invited { // on one host
			vars["SLURM_LOCALID"], vars["SLURM_NODEID"], vars["SLURM_TASKS_PER_NODE"] = "0", "0", "2"
		} else {
			vars["MASTER_ADDR"] = "localhost"
		}
		var s *settings
		for step := 0; ; step++ {
			vars["SLURM_STEP_ID"] = strconv.Itoa(os.Getpid() + step)
			var err error
			s, err = Config{Secret: []byte("a secret of this test alone")}.resolve(
				func(name string) string { return vars[name] })
			if err == nil {
				err = s.meet(t.Context())
			}
			if err == nil {
				break
			}
			if step == 9 || !errors.Is(err, syscall.EADDRINUSE) { // else the place is another program's
				t.Fatal(err)
			}
		}
		s.meeting.Close(t.Context())
		js, err := s.session()
		if err != nil {
			t.Fatal(err)
		}
		if js.Listened != invited {
			t.Errorf("Listened is %v, want %v", js.Listened, invited)
		}
	}
}

// An address that rank 0 has chosen among those of its interfaces may be none that others reach:
// the error says how to choose another.
func TestStoreAtChosenAddress(t *testing.T) {
	for env, chosen := range map[string]bool{"PMI_RANK=1 PMI_SIZE=2 PMI_FD=9": true,
		"PMI_RANK=1 PMI_SIZE=2 PMI_FD=9 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=2":                        false,
		"SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[3-4]": false} {
		vars := map[string]string{}
		for kv := range strings.FieldsSeq(env) {
			name, value, _ := strings.Cut(kv, "=")
			vars[name] = value
		}
		s, err := Config{Job: "j", Secret: []byte("a secret of this test alone")}.resolve(
			func(name string) string { return vars[name] })
		if err != nil {
			t.Fatal(err)
		}
		s.listened, s.StoreAddr = true, "tutti://10.0.2.15:1"
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := s.openStore(ctx); err == nil || strings.Contains(err.Error(), "TUTTI_IFNAME") != chosen {
			t.Errorf("%s: %v, names TUTTI_IFNAME: want %v", env, err, chosen)
		}
	}
}

// The store of ranks without TUTTI_STORE is at MASTER_ADDR, which may be an IPv6 address. The error
// says where the address comes from.
func TestStoreAtMaster(t *testing.T) {
	for host, want := range map[string]string{"h": "etcd://h:1", "::1": "etcd://[::1]:1", "[::1]": "etcd://[::1]:1"} {
		env := map[string]string{"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": "1"}
		s, err := Config{}.resolve(func(name string) string { return env[name] })
		if err != nil || s.StoreAddr != want {
			t.Fatalf("%s: %v, the store is at %s, want %s", host, err, s.StoreAddr, want)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := s.openStore(ctx); err == nil || !strings.Contains(err.Error(), want) ||
			!strings.Contains(err.Error(), "MASTER_ADDR") {
			t.Errorf("%s: %v, want an error that names %s and MASTER_ADDR", host, err, want)
		}
	}
}

// A transport that does not work is left out of several, unless the settings ask for it.
func TestTransportThatIsAskedFor(t *testing.T) {
	defer registry.Add(registry.Kind{Name: "mine", Works: func(o registry.Options) error {
		if o.RDMADevices == "" {
			return errors.New("no device")
		}
		return fmt.Errorf("%w: no device", registry.ErrSettings)
	}})()
	for _, transport := range []string{"auto", "mine,tcp", "mine"} {
		for _, devices := range []string{"", "mlx5_9"} {
			if transport == "mine" && devices == "" {
				continue // its constructor says what is wrong
			}
			s, err := Config{Size: 1, Transport: transport}.resolve(func(name string) string {
				return map[string]string{"TUTTI_RDMA_DEVICES": devices}[name]
			})
			if err != nil {
				t.Fatal(err)
			}
			all, err := s.transports()
			for _, tr := range all {
				err = errors.Join(err, tr.Close())
			}
			if asked := devices != ""; errors.Is(err, registry.ErrSettings) != asked || !asked && err != nil {
				t.Errorf("%s with devices %q: %v, %v", transport, devices, all, err)
			}
		}
	}
}

// A rank that cannot share memory with the ranks of its machine says so, and uses another
// transport.
func TestTransportOfTheMachineThatDoesNotWork(t *testing.T) {
	const want = "transport mine does not work here"
	broken := errors.New("forbidden")
	for _, c := range []struct {
		reach     registry.Reach
		transport string
		size      int
		said      int
	}{
		{registry.Machine, "auto", 2, 1}, {registry.Machine, "mine,tcp", 2, 1}, {registry.Machine, "tcp", 2, 0},
		{registry.Machine, "auto", 1, 0}, {registry.Network, "auto", 2, 0},
	} {
		remove := registry.Add(registry.Kind{Name: "mine", Reach: c.reach, Advice: "what to do",
			Works: func(registry.Options) error { return broken }})
		var log bytes.Buffer
		s, err := Config{Size: c.size, Transport: c.transport,
			Logger: slog.New(slog.NewTextHandler(&log, nil))}.resolve(func(string) string { return "" })
		if err != nil {
			t.Fatal(err)
		}
		all, err := s.transports()
		for _, tr := range all {
			err = errors.Join(err, tr.Close())
		}
		if err != nil || len(all) == 0 {
			t.Errorf("%+v: %v, %v", c, all, err)
		}
		for _, text := range []string{want, "what to do", "forbidden"} {
			if got := strings.Count(log.String(), text); got != c.said {
				t.Errorf("%+v: %q is said %d times: %s", c, text, got, &log)
			}
		}
		remove()
	}
	for _, name := range []string{"mine", "other"} {
		defer registry.Add(registry.Kind{Name: name, Works: func(registry.Options) error { return broken }})()
	}
	s, err := Config{Size: 2, Transport: "mine,other"}.resolve(func(string) string { return "" })
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.transports(); !errors.Is(err, broken) ||
		!strings.Contains(err.Error(), "transport other: forbidden") {
		t.Errorf("none works: %v", err)
	}
}

// A program may wipe its key after Join: later links prove the job's.
func TestSecretIsCopied(t *testing.T) {
	key := []byte("a secret of this test alone")
	s, err := Config{Size: 2, Secret: key}.resolve(func(string) string { return "" })
	if err != nil {
		t.Fatal(err)
	}
	if clear(key); string(s.Secret) != "a secret of this test alone" {
		t.Errorf("the job's secret is %q now", s.Secret)
	}
}

// A field that cannot be right is the caller's error, and not one of the library or the store.
func TestWrongFieldsAreArgumentErrors(t *testing.T) {
	secret := []byte("a secret of this test alone")
	for arg, cfg := range map[string]Config{
		"Algorithm":  {Size: 1, Algorithm: "magic"},
		"Ports":      {Size: 1, Ports: "29500-"},
		"Interfaces": {Size: 1, Interfaces: "10.0.0.0/99"},
		"Secret":     {Size: 2, Job: "j", StoreAddr: "etcd://127.0.0.1:1", Secret: secret[:15]},
		"Job":        {Size: 2, Job: "two words", StoreAddr: "etcd://127.0.0.1:1", Secret: secret},
		"StoreAddr":  {Size: 2, Job: "j", StoreAddr: "etcd:127.0.0.1", Secret: secret},
		"StoreUser":  {Size: 2, Job: "j", StoreAddr: "etcd://127.0.0.1:1", Secret: secret, StoreUser: "u"},
		"StoreUser or StorePassword": {Size: 2, Job: "j", StoreAddr: "etcd://127.0.0.1:1", Secret: secret,
			StorePassword: "p"},
	} {
		cfg.Getenv = func(string) string { return "" }
		var wrong *ArgumentError
		if _, err := Join(t.Context(), cfg); !errors.As(err, &wrong) || !strings.HasPrefix(wrong.Arg, arg) {
			t.Errorf("%s: %v, want an *ArgumentError about it", arg, err)
		}
	}
}
