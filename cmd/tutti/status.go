package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"tutti/bootstrap"
	"tutti/cmd/tutti/internal/launch"
	"tutti/cmd/tutti/internal/status"
	"tutti/cmd/tutti/internal/term"
	"tutti/endpoint"
	"tutti/endpoint/directory"
	"tutti/pg/flight"
)

type statusFlags struct {
	store, job, secretFile string
	directory, watch       string
	asJSON, flights        bool
	ops                    int
}

const (
	rateSpan     = 500 * time.Millisecond // time between the two samples for rates
	defaultWatch = 2 * time.Second
	minWatch     = 100 * time.Millisecond
)

func newStatus() *cobra.Command {
	var f statusFlags
	c := &cobra.Command{
		Use:   "status [flags] [JOB | ENDPOINT]",
		Short: "Show what the ranks of a running job do, and which rank the others wait for; or what an endpoint does",
		Long: `Ask all ranks of a job for their states. Problems are shown first: a rank that has not come, or does
not answer because it is stopped or dead, ranks with different calls; then the operation of each
rank, in this job or in another one that its process has joined, such as a group of PyTorch's, and
the rates.

JOB is the name, or a prefix of the name, of a job that this user's tutti run has started on this
machine; it may be left out if there is only one. Of several with one name, --store chooses. Other
jobs are found by TUTTI_STORE, TUTTI_JOB and TUTTI_SECRET, or the flags. With --flight, the
arguments are flight records from the log directory, of one job or of several.

ENDPOINT is an argument with a colon, or with @ first, which no job's name has: the text that tutti
endpoint serve prints, HOST:PORT, or @NAME for one that has a name in the store. It is asked over a
connection of its own, which it counts among its peers, and tells its state to those who have the
job's secret, but not to clients with a credential. Endpoints of ranks are shown with their job, too.

The exit code is 0 if nothing is wrong with the job, 3 if something is; 0 if the endpoint answers, if
flight records can be read, and when --watch ends.`,
		Example: `  tutti status
  tutti status --watch 1s run-4f
  tutti status node1:29600
  tutti status --flight logs/flight-rank*`,
		DisableFlagsInUseLine: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			if f.ops < 0 {
				return usagef(cmd, "--ops %d: expected 0 or more", f.ops)
			}
			if f.flights {
				return f.records(cmd, args)
			}
			every, args, err := f.interval(cmd, args)
			if err != nil {
				return err
			}
			if len(args) > 1 {
				return usagef(cmd, "status takes one job or endpoint, got %d", len(args))
			}
			if len(args) == 1 && isEndpoint(args[0]) {
				return f.endpoint(cmd, args[0], every)
			}
			cfg, err := f.find(cmd, args, os.Getenv)
			if err != nil {
				return err
			}
			ctx, stop := interruptible(cmd.Context())
			defer stop()
			return f.follow(ctx, cfg, every)
		},
	}
	fl := c.Flags()
	fl.StringVar(&f.watch, "watch", "", "show it again every `interval`, until Ctrl-C or the job ends (default 2s)")
	fl.Lookup("watch").NoOptDefVal = defaultWatch.String()
	fl.BoolVar(&f.asJSON, "json", false, "one JSON object for each time, or with --flight for each job")
	fl.IntVar(&f.ops, "ops", 0, "with --json: also the last `N` operations of each rank, at most 1024; with "+
		"--flight: this many (default 10), with both: all")
	fl.BoolVar(&f.flights, "flight", false, "the arguments are flight records, JSON or the files of killed ranks")
	fl.StringVar(&f.store, "store", "", "`URL` of the store of the job, or of the endpoint's name (default: "+
		"TUTTI_STORE)")
	fl.StringVar(&f.job, "job", "", "`name` of the job (default: TUTTI_JOB)")
	fl.StringVar(&f.directory, "directory", directory.DefaultName, "`name` of the directory in the store that has the "+
		"endpoint's name")
	fl.StringVar(&f.secretFile, "secret-file", "", "`file` with the job's secret (default: TUTTI_SECRET)")
	return c
}

// isEndpoint reports whether an argument is an endpoint. See bootstrap.CheckJob: it is no job's
// name.
func isEndpoint(arg string) bool { return strings.HasPrefix(arg, "@") || strings.Contains(arg, ":") }

// askWithin bounds connecting to an endpoint, and its answer.
const askWithin = 10 * time.Second

// endpoint shows the state of an endpoint.
func (f *statusFlags) endpoint(cmd *cobra.Command, at string, every time.Duration) error {
	for _, name := range []string{"job", "ops"} {
		if cmd.Flags().Changed(name) {
			return usagef(cmd, "--%s is for jobs, and %s is an endpoint", name, term.Shown(at))
		}
	}
	to := &endpointFlags{secretFile: f.secretFile, store: f.store, directory: f.directory, timeout: askWithin}
	return to.with(cmd, at, func(ctx context.Context, p *endpoint.Peer) error {
		return f.followEndpoint(ctx, p, every)
	})
}

// interval reads --watch, whose value may also follow as an argument; 0: it is not set.
func (f *statusFlags) interval(cmd *cobra.Command, args []string) (time.Duration, []string, error) {
	if !cmd.Flags().Changed("watch") {
		return 0, args, nil
	}
	text := f.watch
	if text == defaultWatch.String() {
		at := slices.IndexFunc(args, func(a string) bool { _, err := time.ParseDuration(a); return err == nil })
		if at < 0 && len(args) > 1 {
			at = slices.IndexFunc(args, isNumber) // for the error
		}
		if at >= 0 {
			text, args = args[at], slices.Concat(args[:at], args[at+1:])
		}
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < minWatch {
		return 0, nil, badInterval(cmd, text)
	}
	return d, args, nil
}

func badInterval(cmd *cobra.Command, text string) error {
	example := "2s"
	if d, err := time.ParseDuration(text + "s"); err == nil && d >= minWatch {
		example = text + "s"
	}
	return usagef(cmd, "--watch %s: expected a duration of %v or more, such as %s", text, minWatch, example)
}

func isNumber(text string) bool {
	_, err := strconv.ParseUint(text, 10, 64)
	return err == nil
}

// find returns how to reach the job's store: that of a job that runs here, or as flags and
// environment say.
func (f *statusFlags) find(cmd *cobra.Command, args []string,
	getenv func(string) string) (bootstrap.StoreConfig, error) {
	name := f.job
	if len(args) > 0 {
		if name != "" && name != args[0] {
			return bootstrap.StoreConfig{}, usagef(cmd, "--job %s and %s are different jobs", name, args[0])
		}
		name = args[0]
	}
	told := f.store != "" || getenv("TUTTI_STORE") != ""
	if name == "" && !told { // else FromEnv reads it
		name = getenv("TUTTI_JOB")
	}
	if name != "" {
		if err := bootstrap.CheckJob(name); err != nil {
			return bootstrap.StoreConfig{}, usagef(cmd, "%v", err)
		}
	}
	if f.store != "" {
		if _, err := bootstrap.ParseStore(f.store); err != nil {
			return bootstrap.StoreConfig{}, usagef(cmd, "--store: %v", err)
		}
	}
	if at := cmp.Or(f.store, getenv("TUTTI_STORE")); f.secretFile == "" && at != "" && (f.store != "" ||
		getenv("TUTTI_SECRET")+getenv("TUTTI_SECRET_FILE") == "") {
		if r, ok := served(at, cmp.Or(name, getenv("TUTTI_JOB")), launch.Jobs()); ok {
			return f.config(bootstrap.Launch{Store: r.Store, Job: r.Job}, r.Secret, getenv)
		}
	}
	if f.store == "" && (name != "" || !told) {
		r, err := pick(name, launch.Jobs())
		switch {
		case err == nil && (!told || r.Job == name): // not one of a longer name in place of one elsewhere
			return f.config(bootstrap.Launch{Store: r.Store, Job: r.Job}, r.Secret, getenv)
		case !told && len(args) > 0 && f.watch == defaultWatch.String() && isNumber(name):
			return bootstrap.StoreConfig{}, badInterval(cmd, name) // status --watch 5
		case !told:
			return bootstrap.StoreConfig{}, err
		}
	}
	l, err := bootstrap.FromEnv(func(key string) string {
		switch key {
		case "TUTTI_STORE":
			if f.store != "" {
				return f.store
			}
		case "TUTTI_JOB":
			if name != "" {
				return name
			}
		case "TUTTI_SECRET", "TUTTI_SECRET_FILE": // see below: the flag counts
			return ""
		}
		return getenv(key)
	})
	if err != nil && !errors.As(err, new(*bootstrap.PlaceError)) { // this process is no rank
		return bootstrap.StoreConfig{}, err
	}
	secret, err := (&runFlags{secretFile: f.secretFile}).secret(getenv)
	if err != nil {
		return bootstrap.StoreConfig{}, err
	}
	if secret == "" {
		return bootstrap.StoreConfig{}, fmt.Errorf("the secret of job %s is needed to ask its ranks: set "+
			"TUTTI_SECRET or give --secret-file", cmp.Or(l.Job, defaultJob))
	}
	return f.config(l, secret, getenv)
}

// config returns the configuration of a job's store.
func (f *statusFlags) config(l bootstrap.Launch, secret string,
	getenv func(string) string) (bootstrap.StoreConfig, error) {
	raw, err := bootstrap.ParseSecret(secret)
	if err != nil {
		return bootstrap.StoreConfig{}, err
	}
	c := storeConfig(l.Store, getenv)
	c.Job, c.Secret = cmp.Or(l.Job, defaultJob), raw
	return c, nil
}

// storeConfig returns how to reach the store at an address: a site's with what the environment
// says.
func storeConfig(address string, getenv func(string) string) bootstrap.StoreConfig {
	c := bootstrap.StoreConfig{Address: address}
	if !strings.HasPrefix(address, "tutti://") {
		c.User, c.Password = getenv("TUTTI_STORE_USER"), getenv("TUTTI_STORE_PASSWORD")
		c.CA, c.Cert, c.Key = getenv("TUTTI_STORE_CA"), getenv("TUTTI_STORE_CERT"), getenv("TUTTI_STORE_KEY")
	}
	return c
}

// pick finds a running job by its name or a prefix of it. With an empty name there must be only
// one.
func pick(name string, running []launch.Running) (launch.Running, error) {
	var fit, exact []launch.Running
	for _, r := range running {
		if r.Job == name {
			exact = append(exact, r)
		}
		if strings.HasPrefix(r.Job, name) {
			fit = append(fit, r)
		}
	}
	switch {
	case len(exact) == 1:
		return exact[0], nil
	case len(exact) > 1:
		return launch.Running{}, fmt.Errorf("%d jobs with the name %s run here: give the store of one with --store\n%s",
			len(exact), name, listed(exact, func(r launch.Running) string { return r.Store }))
	case len(fit) == 1:
		return fit[0], nil
	case len(running) == 0:
		what := "no job"
		if name != "" {
			what = fmt.Sprintf("no job %s", name)
		}
		return launch.Running{}, fmt.Errorf("%s of yours was started here by tutti run; for one that runs "+
			"elsewhere, or under another launcher, set TUTTI_STORE, TUTTI_JOB and TUTTI_SECRET as its ranks have "+
			"them (if they have none, it cannot be asked), or see tutti status --help", what)
	case len(fit) == 0:
		return launch.Running{}, fmt.Errorf("no job %s runs here, only\n%s", name, list(running))
	}
	return launch.Running{}, fmt.Errorf("which job? tutti status JOB, of\n%s", list(fit))
}

// served finds the only running job, of this name if it is not empty, whose store is at address.
func served(address, name string, running []launch.Running) (launch.Running, bool) {
	var at []launch.Running
	for _, r := range running {
		if r.Store == address && (name == "" || r.Job == name) {
			at = append(at, r)
		}
	}
	if len(at) != 1 {
		return launch.Running{}, false
	}
	return at[0], true
}

// list lists the names of jobs, one a line, with the stores of those that have the same name.
func list(jobs []launch.Running) string {
	times := map[string]int{}
	for _, r := range jobs {
		times[r.Job]++
	}
	return listed(jobs, func(r launch.Running) string {
		if times[r.Job] > 1 {
			return r.Job + "  --store " + r.Store
		}
		return r.Job
	})
}

// listed lists jobs, one a line. is what tells them apart.
func listed(jobs []launch.Running, is func(launch.Running) string) string {
	var b strings.Builder
	width := 0
	for _, r := range jobs {
		width = max(width, len(is(r)))
	}
	for i, r := range jobs {
		if i > 0 {
			b.WriteByte('\n')
		}
		fmt.Fprintf(&b, "  %-*s  %5d ranks  since %s  %s", width, is(r), r.Ranks,
			r.Started.Local().Format("Jan _2 15:04:05"), term.Shown(fmt.Sprintf("%.60s", r.Program)))
	}
	return b.String()
}

// defaultJob is the name of a job that was given none.
const defaultJob = "default"

// codeStuck is the exit code if something is wrong with the job.
const codeStuck = 3

// follow samples the job and shows it, once or repeatedly until ctx ends.
func (f *statusFlags) follow(ctx context.Context, cfg bootstrap.StoreConfig, every time.Duration) error {
	s, err := status.Dial(ctx, cfg)
	if err != nil {
		if ctx.Err() != nil {
			return stopped(ctx, every)
		}
		return fmt.Errorf("job %s: %w", cfg.Job, err)
	}
	defer s.Close()
	ops := 0
	if f.asJSON {
		ops = min(f.ops, flight.Records)
	}
	var before *status.Sample
	return f.repeat(ctx, every, func(scr *screen, show bool) (over bool, err error) {
		now, err := s.Sample(ctx, ops)
		switch {
		case ctx.Err() != nil:
			return true, stopped(ctx, every)
		case errors.Is(err, status.ErrNoRanks) && before == nil:
			return true, fmt.Errorf("job %s: %w in its store at %s: it has not begun, or is over, or has another "+
				"name, or all its ranks are stopped or cut off from the store (a job of one rank registers nothing)",
				cfg.Job, err, cfg.Address)
		case errors.Is(err, status.ErrNoRanks), errors.Is(err, bootstrap.ErrStoreAway) && before != nil &&
			strings.HasPrefix(cfg.Address, "tutti://"): // such a store ends with its job
			scr.Close()
			fmt.Fprintf(os.Stderr, "%sjob %s has ended\n", launch.Tag(os.Stderr), cfg.Job)
			return true, nil
		case err != nil:
			return true, fmt.Errorf("job %s: %w", cfg.Job, err)
		}
		if show {
			r := status.Make(now, before, every > 0)
			if err := f.show(scr, r, r.Time); err != nil {
				return true, err
			}
			if every == 0 && len(r.Findings) > 0 {
				return true, exit(codeStuck)
			}
		}
		before = now
		return false, nil
	})
}

// followEndpoint asks an endpoint and shows its state, once or repeatedly until ctx ends.
func (f *statusFlags) followEndpoint(ctx context.Context, p *endpoint.Peer, every time.Duration) error {
	var before *status.EndpointSample
	return f.repeat(ctx, every, func(scr *screen, show bool) (over bool, err error) {
		state, err := p.Stats(ctx)
		switch {
		case ctx.Err() != nil:
			return true, stopped(ctx, every)
		case err != nil:
			return true, err
		}
		now := &status.EndpointSample{Time: time.Now(), State: state}
		if show {
			r := status.MakeEndpoint(now, before)
			if err := f.show(scr, r, r.Time); err != nil {
				return true, err
			}
		}
		before = now
		return false, nil
	})
}

// repeat calls look until it says that it is over, until ctx ends, or, if every is 0, twice. The
// first of two calls only samples, for the rates: show is false.
func (f *statusFlags) repeat(ctx context.Context, every time.Duration,
	look func(scr *screen, show bool) (over bool, err error)) error {
	pause := rateSpan // the first rates come soon
	if every > 0 {
		pause = min(pause, every)
	}
	scr := &screen{}
	if every > 0 && !f.asJSON && launch.Terminal(os.Stdout) && os.Getenv("TERM") != "dumb" {
		scr.live = term.NewScreen(os.Stdout)
	}
	defer scr.Close()
	defer context.AfterFunc(ctx, scr.Close)() // at once: a second signal kills
	for round := 0; ; round++ {
		over, err := look(scr, round > 0 || every > 0)
		if err != nil || over || every == 0 && round > 0 {
			return err
		}
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-ctx.Done():
		}
		t.Stop()
		if ctx.Err() != nil {
			return stopped(ctx, every)
		}
		if every > 0 {
			pause = every
		}
	}
}

// stopped returns the error if a signal has ended ctx. That is how --watch ends; without it nothing
// is known of the job.
func stopped(ctx context.Context, every time.Duration) error {
	if every > 0 {
		return nil
	}
	return ended(ctx, ctx.Err())
}

// report is what status can show.
type report interface {
	Text(w io.Writer, st status.Style)
}

// show prints a report of a time.
func (f *statusFlags) show(scr *screen, r report, at time.Time) error {
	if f.asJSON {
		enc := json.NewEncoder(stdout)
		enc.SetEscapeHTML(false)
		return enc.Encode(r)
	}
	st := status.Style{Colour: launch.Colour(os.Stdout)}
	clock := at.Format("15:04:05.0") + "\n"
	if scr.live != nil {
		return scr.live.Draw(func(columns, rows int) string {
			st := st
			st.Width, st.Lines = columns, max(rows-1, 1)
			b := bytes.NewBufferString(clock)
			r.Text(b, st)
			return b.String()
		})
	}
	if st.Width = term.Width(os.Stdout); st.Width > 0 {
		st.Rows = 64
	}
	var b bytes.Buffer
	if scr.shown {
		b.WriteString("\n" + clock)
	}
	scr.shown = true
	r.Text(&b, st)
	_, err := os.Stdout.Write(b.Bytes())
	return err
}

// screen is where reports are shown: on a live screen each replaces the last, else they follow each
// other.
type screen struct {
	live  *term.Screen // nil: none
	shown bool
}

// Close restores the terminal.
func (s *screen) Close() {
	if s.live != nil {
		s.live.Close()
	}
}

// records reads flight records and shows them.
func (f *statusFlags) records(cmd *cobra.Command, paths []string) error {
	if len(paths) == 0 {
		return usagef(cmd, "which flight records? tutti status --flight FILE...")
	}
	for _, name := range []string{"watch", "job", "store", "secret-file", "directory"} {
		if cmd.Flags().Changed(name) {
			return usagef(cmd, "--%s is for running jobs, --flight for records of ended ones", name)
		}
	}
	var jobs []string // in the order of their first records
	var all []*flight.Snapshot
	snaps := map[string][]*flight.Snapshot{}
	for _, path := range paths {
		if real, err := filepath.EvalSymlinks(path); err == nil {
			path = real // the user may name a symbolic link
		}
		s, err := flight.ReadFile(path)
		if err != nil {
			return err
		}
		if snaps[s.Job] == nil {
			jobs = append(jobs, s.Job)
		}
		all, snaps[s.Job] = append(all, s), append(snaps[s.Job], s)
	}
	flight.Gather(all)
	st := status.Style{Colour: launch.Colour(os.Stdout), Width: term.Width(os.Stdout)}
	for i, job := range jobs {
		r := status.FromFiles(snaps[job])
		if f.asJSON {
			if err := f.show(&screen{}, r, r.Time); err != nil {
				return err
			}
			continue
		}
		if i > 0 {
			fmt.Fprintln(stdout)
		}
		r.Text(stdout, st)
		r.Operations(stdout, cmp.Or(f.ops, 10), st)
	}
	return nil
}
