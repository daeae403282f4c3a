package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"tutti/bootstrap"
	"tutti/bootstrap/embed"
	"tutti/cmd/tutti/internal/term"
	"tutti/device/cuda"
	"tutti/internal/ident"
	"tutti/internal/tuning"
	gpukernels "tutti/kernels/cuda"
	"tutti/nvlink"
)

// embedded starts a store like tutti run, and uses it.
func embedded(ctx context.Context, h *Host) outcome {
	broken := func(err error, it string) outcome { return broken(it+err.Error(), h.storeAdvice(err)) }
	began := time.Now()
	text := bootstrap.NewSecret()
	secret, err := bootstrap.ParseSecret(text)
	if err != nil {
		return broken(err, "")
	}
	s, err := embed.Start(ctx, embed.Config{Secret: secret})
	if err != nil {
		return broken(err, "")
	}
	defer s.Close()
	started := time.Since(began)
	if err := useStore(ctx, bootstrap.StoreConfig{Address: s.Address(), Job: "doctor", Secret: secret}); err != nil {
		return broken(err, "it starts, but ")
	}
	return found(fmt.Sprintf("etcd starts in %v; a client reads what it wrote %v later",
		started.Round(time.Millisecond), (time.Since(began) - started).Round(time.Millisecond)))
}

// storeAdvice returns what to do about an error of the embedded store.
func (h *Host) storeAdvice(err error) string {
	advice := "tutti run serves the job's store; give it an existing one with --store"
	switch {
	case h.noProc() && strings.Contains(err.Error(), "/proc/"):
		return advice + ", or " + noProcAdvice
	case noRoom(err):
		return advice + ", or a writable TMPDIR"
	}
	return advice
}

// noRoom reports whether err says, or a trial shows, that there is no room for temporary files.
func noRoom(err error) bool {
	for _, e := range []unix.Errno{unix.ENOSPC, unix.EDQUOT, unix.EROFS} {
		if strings.Contains(err.Error(), e.Error()) { // etcd does not wrap its errors
			return true
		}
	}
	dir, err := os.MkdirTemp("", "tutti-doctor-")
	if err != nil {
		return true
	}
	os.Remove(dir)
	return false
}

// useStore writes a key under a lease, reads it and ends the lease. The job may be there.
func useStore(ctx context.Context, cfg bootstrap.StoreConfig) error {
	cfg.Observer = true
	s, err := bootstrap.DialStore(ctx, cfg)
	if err != nil {
		return err
	}
	defer s.Close()
	key := fmt.Sprintf("doctor/%x", ident.New())
	if err := s.Put(ctx, key, []byte("tutti"), true); err != nil {
		return err
	}
	got, err := s.Get(ctx, key)
	if err != nil {
		return err
	}
	if string(got) != "tutti" {
		return fmt.Errorf("it returned %q for %q", got, "tutti")
	}
	return nil
}

func configured(ctx context.Context, h *Host) outcome {
	address := h.Getenv("TUTTI_STORE")
	if address == "" {
		return missing("not set", "") // set by the launcher
	}
	l, err := bootstrap.FromEnv(h.Getenv)
	if err != nil {
		return broken(address+": the environment is contradictory", "see environment below")
	}
	began := time.Now()
	cfg := bootstrap.StoreConfig{Address: address, Job: cmp.Or(l.Job, "default"), Secret: l.Secret, User: l.StoreUser,
		Password: l.StorePassword, CA: l.StoreCA, Cert: l.StoreCert, Key: l.StoreKey}
	if err := useStore(ctx, cfg); err != nil {
		return broken(err.Error(), "start it, correct TUTTI_STORE, or unset it: tutti run then serves one")
	}
	return found(fmt.Sprintf("%s answers; connect, write and read took %v", address,
		time.Since(began).Round(time.Millisecond)))
}

func gpus(_ context.Context, h *Host) outcome {
	s, err := h.gpus()
	switch {
	case errors.Is(err, nvlink.ErrUnavailable):
		return missing(err.Error(), "")
	case err != nil:
		return warn(err.Error(), "look at nvidia-smi and dmesg")
	case len(s.GPUs) == 0:
		return missing(fmt.Sprintf("driver %s, no GPU", s.Driver), "")
	}
	var parts []string
	for i, g := range s.GPUs {
		p := fmt.Sprintf("%d: %s %s", i, g.Name, bytes(g.Memory))
		if g.Problem != "" {
			p = fmt.Sprintf("%d: not known", i)
		}
		if n := g.LinksUp(); n > 0 {
			p += ", " + term.Count(n, "NVLink")
		}
		parts = append(parts, p)
	}
	return found(fmt.Sprintf("driver %s, CUDA %s; %s", s.Driver, s.CUDA, strings.Join(parts, "; ")))
}

// cudaDriver examines what programs use GPUs with, which cuda.Load has returned. It makes no
// context.
func cudaDriver(d *cuda.Driver, err error) outcome {
	switch _, failed := errors.AsType[*cuda.Error](err); {
	case failed:
		return warn(err.Error(), "look at nvidia-smi and dmesg")
	case err != nil:
		return missing(err.Error(), "")
	}
	major, minor := d.Version()
	detail := fmt.Sprintf("the driver supports CUDA %d.%d", major, minor)
	all, err := d.Devices()
	switch {
	case err != nil:
		return warn(detail+", but "+err.Error(), "look at nvidia-smi and dmesg")
	case len(all) == 0:
		return missing(detail+", no GPU", "give the container a GPU, or look at CUDA_VISIBLE_DEVICES")
	}
	var old []string
	for _, i := range all {
		detail += fmt.Sprintf("; cuda:%d: %s, %s, compute capability %d.%d", i.Ordinal, i.Name, bytes(i.Memory),
			i.Major, i.Minor)
		if !i.MemoryOps {
			detail += ", waits for words by kernels"
		}
		if !d.IPC() {
			detail += ", no IPC: ranks copy through the host"
		}
		if !i.VMM {
			detail += ", memory has no descriptors: processes share it by IPC handles only"
		}
		if _, err := gpukernels.Module(i.Major, i.Minor); err != nil {
			old = append(old, fmt.Sprintf("cuda:%d", i.Ordinal))
		}
	}
	if old != nil {
		return warn(detail, strings.Join(old, ", ")+" cannot be used: the kernels need compute capability 7.0")
	}
	return found(detail)
}

// library searches a shared library in the directories of the dynamic linker.
func (h *Host) library(name string) string {
	multiarch := map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu",
		"ppc64le": "powerpc64le-linux-gnu", "riscv64": "riscv64-linux-gnu", "s390x": "s390x-linux-gnu"}[runtime.GOARCH]
	dirs := filepath.SplitList(h.Getenv("LD_LIBRARY_PATH"))
	dirs = append(dirs, "/lib/"+multiarch, "/usr/lib/"+multiarch, "/lib64", "/usr/lib64", "/lib", "/usr/lib",
		"/usr/local/lib")
	for _, conf := range h.list("/etc/ld.so.conf.d") {
		for line := range strings.Lines(h.read("/etc/ld.so.conf.d/" + conf)) {
			if line = strings.TrimSpace(line); strings.HasPrefix(line, "/") {
				dirs = append(dirs, line)
			}
		}
	}
	for _, d := range dirs {
		if d != "" && h.exists(filepath.Join(d, name)) {
			return filepath.Join(d, name)
		}
	}
	return ""
}

func environment(_ context.Context, h *Host) outcome {
	l, err := bootstrap.FromEnv(h.Getenv)
	if err != nil {
		return broken(strings.Join(h.contradictions(), "; "), "correct or unset the variables that it names")
	}
	if l.Source == "none" {
		return found("no launcher: this process would be rank 0 of 1")
	}
	detail := fmt.Sprintf("rank %d of %d of job %s, by the variables of %s", l.Rank, l.Size,
		cmp.Or(l.Job, "(without a name)"), l.Source)
	switch {
	case l.Size > 1 && l.Store == "" && l.Meets() && (l.Secret != nil || l.MeetsInPrivate()):
		return found(detail + "; the ranks need no store: they meet through their launcher")
	case l.Size > 1 && l.Secret == nil:
		return warn(detail+"; no secret", "a job of several processes needs TUTTI_SECRET or TUTTI_SECRET_FILE")
	case l.Size > 1 && l.Store == "" && l.MasterAddr == "":
		return warn(detail+"; no store", l.HowToMeet())
	case l.Size > 1 && l.Job == "":
		return warn(detail, l.JobMissing().Error())
	}
	return found(detail)
}

// contradictions returns all that is wrong with the environment: after each error it reads the rest
// of the variables, without the one that the error names first.
func (h *Host) contradictions() (all []string) {
	hidden := map[string]bool{}
	for {
		_, err := bootstrap.FromEnv(func(name string) string {
			if hidden[name] {
				return ""
			}
			return h.Getenv(name)
		})
		if err == nil {
			return all
		}
		text := strings.TrimPrefix(err.Error(), "environment: ")
		all = append(all, text)
		name := ofJob.FindString(text)
		if errors.As(err, new(*bootstrap.PlaceError)) || name == "" || hidden[name] || h.Getenv(name) == "" {
			return all
		}
		hidden[name] = true
	}
}

// ofJob matches the name of a variable of a job.
var ofJob = regexp.MustCompile(`TUTTI_[A-Z_]+`)

// tuned says which measured table of algorithms jobs use.
func tuned(_ context.Context, h *Host) outcome {
	path := tuning.Place(h.Getenv("TUTTI_TUNE"))
	if path == "" {
		return missing("none: jobs choose algorithms by the default table", "")
	}
	m, err := tuning.Measured(path)
	if err != nil {
		return warn(path+": "+err.Error(), "jobs choose algorithms by the default table: measure with tutti tune, "+
			"remove the file, or set TUTTI_TUNE=off")
	}
	return found(fmt.Sprintf("%s, for jobs with %s on a machine over %s", path, term.Count(m.LocalRanks, "rank"),
		m.Transport))
}

// ofService matches the names of variables that Kubernetes sets for a service, but for NAME_PORT,
// whose value bootstrap.WithoutServices hides.
var ofService = regexp.MustCompile(`_SERVICE_(HOST|PORT)|_PORT_[0-9]`)

// variables lists the TUTTI_* variables that are set and names unknown ones. Those that Kubernetes
// sets for services whose names begin with tutti do not count.
func variables(_ context.Context, h *Host) outcome {
	known := []string{}
	for _, v := range bootstrap.Variables() {
		known = append(known, v.Name)
	}
	var set, unknown []string
	for _, kv := range h.Environ() {
		name, value, _ := strings.Cut(kv, "=")
		switch {
		case !strings.HasPrefix(name, "TUTTI_"), h.Getenv(name) == "", ofService.MatchString(name):
		case !slices.Contains(known, name):
			unknown = append(unknown, name)
		default:
			if strings.Contains(name, "SECRET") && name != "TUTTI_SECRET_FILE" || strings.Contains(name, "PASSWORD") {
				value = "(hidden)"
			}
			set = append(set, name+"="+value)
		}
	}
	slices.Sort(set)
	detail := cmpOr(strings.Join(set, " "), "no TUTTI_* variable is set")
	if len(unknown) > 0 {
		slices.Sort(unknown)
		return warn(fmt.Sprintf("%s; without meaning: %s", detail, strings.Join(unknown, " ")),
			"misspelt? tutti env lists those that are understood")
	}
	if h.Getenv("TUTTI_STORE_CA") != "" && !strings.HasPrefix(h.Getenv("TUTTI_STORE"), "etcds://") {
		return warn(detail, "TUTTI_STORE_CA has no effect: TUTTI_STORE is no etcds:// address")
	}
	if path := h.Getenv("TUTTI_SECRET_FILE"); path != "" {
		var file unix.Stat_t
		var fs unix.Statfs_t
		if unix.Stat(path, &file) == nil && unix.Statfs(path, &fs) == nil {
			advice := exposure(path, file.Mode, int(file.Uid) == os.Geteuid(), fs.Flags&unix.ST_RDONLY != 0)
			if advice != "" {
				return warn(detail, advice)
			}
		}
	}
	return found(detail)
}

// exposure returns what to do about a secret's file that others may read, "" if they may not. mine:
// it belongs to this user; fixed: its file system is mounted read-only. The group of a file that
// this user cannot change may be there for this user, as in a volume of Kubernetes with fsGroup.
func exposure(path string, mode uint32, mine, fixed bool) string {
	switch {
	case mode&0o007 != 0 && fixed:
		return fmt.Sprintf("others may read the secret: mount %s with mode 0400 (defaultMode of a volume in "+
			"Kubernetes)", path)
	case mode&0o007 != 0, mode&0o070 != 0 && mine && !fixed:
		return "others may read the secret: chmod 600 " + path
	}
	return ""
}
