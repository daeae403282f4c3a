package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"tutti/bootstrap"
	"tutti/cmd/tutti/internal/launch"
	"tutti/cmd/tutti/internal/status"
	"tutti/cmd/tutti/internal/term"
	"tutti/endpoint"
	"tutti/endpoint/directory"
	"tutti/endpoint/prom"
	"tutti/internal/ifname"
	"tutti/internal/ports"
	"tutti/internal/trust"
	"tutti/pg/flight"
)

type endpointFlags struct {
	secretFile             string
	timeout                time.Duration
	offset, length, output string
	write, asJSON          bool
	listen, ports, name    string
	publish, metrics       string
	store, directory       string
	seal, checksum         bool
}

// A transfer moves pieces of this many bytes, so many at a time.
const (
	pieceSize = 1 << 20
	abreast   = 16
)

func newEndpoint() *cobra.Command {
	c := &cobra.Command{
		Use:   "endpoint",
		Short: "Read and write files of other machines by name",
		Long: `Serve files as regions of an endpoint, and read and write regions: those of tutti endpoint serve, and
the memory and files that a program registers with package endpoint.

Both ends prove that they know the same secret: TUTTI_SECRET, TUTTI_SECRET_FILE or --secret-file. The
credential of a client (tutti secret --client NAME) takes its place for ls, read and write. The data
is not encrypted unless one of the two ends says --seal.

With a store (TUTTI_STORE, or --store) endpoints have names: serve --publish NAME takes one, others
connect to @NAME, and ls alone lists the names. A name goes when its server ends, or 3 s after it was
killed; one that is started again has another address, and the same name.`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return nil
			}
			text := fmt.Sprintf("there is no command %q", "endpoint "+args[0])
			if s := cmd.SuggestionsFor(args[0]); len(s) > 0 {
				text += "; did you mean endpoint " + strings.Join(s, " or ") + "?"
			}
			return usagef(cmd, "%s", text)
		},
		RunE:                       func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		SuggestionsMinimumDistance: 2,
	}
	c.AddCommand(newEndpointServe(), newEndpointLs(), newEndpointRead(), newEndpointWrite())
	for _, sub := range c.Commands() {
		sub.DisableFlagsInUseLine = true
		sub.Flags().SortFlags = false
		sub.PreRunE = noEmptyFlags
	}
	return c
}

// noEmptyFlags refuses flags with an empty text, as --publish "$NAME" has where NAME is not set.
// Their defaults are for commands without the flag.
func noEmptyFlags(cmd *cobra.Command, _ []string) (err error) {
	cmd.Flags().Visit(func(flag *pflag.Flag) {
		if err == nil && flag.Value.Type() == "string" && flag.Value.String() == "" {
			err = usagef(cmd, "--%s is empty: leave it out, or is a variable not set?", flag.Name)
		}
	})
	return err
}

// endpointArg explains an argument.
const endpointArg = `ENDPOINT is the text that tutti endpoint serve prints, HOST:PORT, or @NAME for one that has a name
in the store.`

func newEndpointServe() *cobra.Command {
	var f endpointFlags
	c := &cobra.Command{
		Use:   "serve NAME=FILE... [--write] [flags]",
		Short: "Serve files as regions that other programs read, and write, by name",
		Long: `Serve each FILE, as long as it is now, as the region NAME of an endpoint, until Ctrl-C or SIGTERM. Then
say what was read and written.

The only line on the standard output describes the endpoint, once it listens: give it to those who
connect. All who know the secret may read, and so may all clients; with --write all of them may write.`,
		Example: `  export TUTTI_SECRET=$(tutti secret)
  tutti endpoint serve weights=model.bin
  tutti endpoint serve a=a.bin b=b.bin --write --listen eth0 --ports 29600
  tutti endpoint serve weights=model.bin --publish trainer --store etcd://etcd1:2379`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usagef(cmd, "which files? tutti endpoint serve NAME=FILE...")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error { return f.serve(cmd, args) },
	}
	fl := c.Flags()
	fl.BoolVar(&f.write, "write", false, "let others write, too")
	fl.StringVar(&f.listen, "listen", "", "network interfaces to listen on: `names`, NAME*, addresses, networks; ^ "+
		"excludes (default: TUTTI_IFNAME, else all that are up)")
	fl.StringVar(&f.ports, "ports", "", "`port` to listen on: 29600, a range 29600-29700, or 0 for the kernel's "+
		"choice (default: TUTTI_PORT, else 0)")
	fl.StringVar(&f.name, "name", "", "what the endpoint calls itself: a `name` (default: the name of this host)")
	fl.StringVar(&f.publish, "publish", "", "publish the endpoint in the store under a `name`, by which others "+
		"connect: @NAME")
	f.inStore(c)
	fl.StringVar(&f.metrics, "metrics", "", "`address` at which metrics are served to Prometheus: 127.0.0.1:9400, a "+
		"range 127.0.0.1:9400-9407, or :0 (default: TUTTI_METRICS, else none)")
	f.guards(c)
	fl.StringVar(&f.secretFile, "secret-file", "", "`file` with the secret (default: TUTTI_SECRET)")
	return c
}

// inStore defines the flags of the directory of names.
func (f *endpointFlags) inStore(c *cobra.Command) {
	c.Flags().StringVar(&f.store, "store", "", "`URL` of the store that has the names (default: TUTTI_STORE)")
	c.Flags().StringVar(&f.directory, "directory", directory.DefaultName, "`name` of the directory in the store")
}

func newEndpointLs() *cobra.Command {
	var f endpointFlags
	c := &cobra.Command{
		Use:   "ls [ENDPOINT] [--json] [flags]",
		Short: "List the regions of an endpoint, or the names of endpoints",
		Long: `List the regions of an endpoint that the holder of this secret or credential may use: the name, the
size in bytes, and what it may do. Without ENDPOINT, list the names that are published in the store,
and the endpoints that have them.

` + endpointArg,
		Example: `  tutti endpoint ls node1:29600
  tutti endpoint ls --json node1:29600 | jq -r .name
  TUTTI_STORE=etcd://etcd1:2379 tutti endpoint ls`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return nil
			}
			return arguments("ENDPOINT")(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return f.names(cmd)
			}
			return f.with(cmd, args[0], func(ctx context.Context, p *endpoint.Peer) error { return f.ls(ctx, p) })
		},
	}
	c.Flags().BoolVar(&f.asJSON, "json", false, "print one JSON object a region, or a name")
	f.connection(c)
	return c
}

func newEndpointRead() *cobra.Command {
	var f endpointFlags
	c := &cobra.Command{
		Use:   "read ENDPOINT REGION [-o FILE] [flags]",
		Short: "Read a region of an endpoint, or a part of it",
		Long: `Read a region of an endpoint, or a part of it, to the standard output or to a file. The file appears
when it is complete; if the read fails, a file of that name stays as it was. A read that was killed
with SIGKILL leaves a file .tutti-read-... in the same directory, which may be removed.

` + endpointArg,
		Example: `  tutti endpoint read node1:29600 weights -o model.bin
  tutti endpoint read node1:29600 weights --offset 1M --length 64 | xxd`,
		Args: arguments("ENDPOINT", "REGION"),
		RunE: func(cmd *cobra.Command, args []string) error {
			off, err := sizeFlag(cmd, "offset", f.offset)
			if err != nil {
				return err
			}
			n := int64(-1)
			if cmd.Flags().Changed("length") {
				if n, err = sizeFlag(cmd, "length", f.length); err != nil {
					return err
				}
			}
			if f.output == "" && launch.Terminal(os.Stdout) {
				return usagef(cmd, "the standard output is a terminal: give -o FILE, or -o - if you mean it")
			}
			return f.with(cmd, args[0], func(ctx context.Context, p *endpoint.Peer) error {
				return f.read(ctx, p, args[1], off, n)
			})
		},
	}
	fl := c.Flags()
	fl.StringVarP(&f.output, "output", "o", "", "`file` to write (default, and -: the standard output)")
	f.begin(c)
	fl.StringVar(&f.length, "length", "", "`size` of the part to read (default: all that follows)")
	f.connection(c)
	return c
}

func newEndpointWrite() *cobra.Command {
	var f endpointFlags
	c := &cobra.Command{
		Use:   "write ENDPOINT REGION FILE [flags]",
		Short: "Write a file to a region of an endpoint",
		Long: `Write a file, or with - the standard input, to a region of an endpoint. The region keeps its size: a file
that does not fit is refused, and what follows a shorter one stays. A write that fails may have changed
a part of the region.

` + endpointArg,
		Example: `  tutti endpoint write node1:29600 weights model.bin
  tutti endpoint write node1:29600 weights - --offset 1M <part`,
		Args: arguments("ENDPOINT", "REGION", "FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			off, err := sizeFlag(cmd, "offset", f.offset)
			if err != nil {
				return err
			}
			in := os.Stdin
			if args[2] != "-" {
				if in, err = os.Open(args[2]); err != nil {
					return usagef(cmd, "%v", err)
				}
				defer in.Close()
			}
			info, err := in.Stat()
			if err != nil {
				return err
			}
			if info.IsDir() {
				return usagef(cmd, "%s is a directory", args[2])
			}
			return f.with(cmd, args[0], func(ctx context.Context, p *endpoint.Peer) error {
				// A file of /proc says that it is empty.
				whole := args[2] != "-" && info.Mode().IsRegular() && info.Size() > 0
				return f.put(ctx, p, args[1], off, in, whole, info.Size())
			})
		},
	}
	f.begin(c)
	f.connection(c)
	return c
}

// begin defines the flag of commands that access a part of a region.
func (f *endpointFlags) begin(c *cobra.Command) {
	c.Flags().StringVar(&f.offset, "offset", "0", "where to begin, a `size` in bytes; K, M and G are powers of 1024")
}

// arguments wants exactly these.
func arguments(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) != len(names) {
			return usagef(cmd, "%s takes %s, got %s", cmd.CommandPath(), strings.Join(names, " "),
				term.Count(len(args), "argument"))
		}
		return nil
	}
}

// sizeFlag reads a size, which may be 0.
func sizeFlag(cmd *cobra.Command, name, text string) (int64, error) {
	if text == "0" {
		return 0, nil
	}
	n, err := parseSize(text)
	if err != nil {
		return 0, usagef(cmd, "--%s %v", name, err)
	}
	return int64(n), nil
}

// connection defines the flags of commands that connect.
func (f *endpointFlags) connection(c *cobra.Command) {
	c.Flags().DurationVar(&f.timeout, "timeout", 30*time.Second, "bound of every operation: to connect, a request, "+
		"the 16 pieces of 1 MiB that are under way")
	f.inStore(c)
	f.guards(c)
	c.Flags().StringVar(&f.secretFile, "secret-file", "", "`file` with the secret or credential (default: "+
		"TUTTI_SECRET)")
}

// guards defines the flags of what guards the data on its way.
func (f *endpointFlags) guards(c *cobra.Command) {
	c.Flags().BoolVar(&f.seal, "seal", false, "encrypt and authenticate the data; it is enough that one end says so")
	c.Flags().BoolVar(&f.checksum, "checksum", false, "find data that was damaged on the way; --seal includes it")
}

// credential returns the secret, or the credential of a client, in its textual form.
func (f *endpointFlags) credential(cmd *cobra.Command) (string, trust.Credential, error) {
	text, from, err := secretText(f.secretFile, os.Getenv)
	if err != nil {
		return "", trust.Credential{}, usagef(cmd, "%v", err)
	}
	if from == "" {
		return "", trust.Credential{}, usagef(cmd, "both ends need the same secret: export TUTTI_SECRET=$(tutti "+
			"secret) once, and give it to the other end, or --secret-file FILE")
	}
	c, err := trust.ParseCredential(text)
	if err != nil {
		return "", c, usagef(cmd, "%s: %v", from, err)
	}
	return text, c, nil
}

// openDirectory connects to the directory of names. who is the holder of this process's credential.
func (f *endpointFlags) openDirectory(ctx context.Context, cmd *cobra.Command, who trust.Credential,
	log *slog.Logger) (*directory.Directory, error) {
	address := cmp.Or(f.store, os.Getenv("TUTTI_STORE"))
	if address == "" {
		return nil, usagef(cmd, "names of endpoints are in a store: set TUTTI_STORE, or give --store URL")
	}
	addr, err := bootstrap.ParseStore(address)
	if err == nil {
		err = bootstrap.CheckJob(f.directory)
	}
	if err != nil {
		return nil, usagef(cmd, "%v", err)
	}
	cfg := storeConfig(address, os.Getenv)
	cfg.Job = f.directory
	if who.Client == "" {
		cfg.Secret = who.Key
	} else if addr.Scheme == "tutti" {
		return nil, usagef(cmd, "store %v takes only holders of the secret, and this is the credential of client %s: "+
			"give the endpoint's address", addr, who.Client)
	}
	return directory.Open(ctx, directory.Config{Store: cfg, Logger: log})
}

// interrupted is the signal that ended an operation.
type interrupted syscall.Signal

func (i interrupted) Error() string { return "interrupted by " + unix.SignalName(syscall.Signal(i)) }

// interruptible returns a context that ends with an interrupted at the first signal to end. A
// second one kills, unless it belongs to the same request: see launch.Request.
func interruptible(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	came := make(chan os.Signal, 8)
	signal.Notify(came, syscall.SIGINT, syscall.SIGTERM)
	if !signal.Ignored(syscall.SIGHUP) { // as under nohup
		signal.Notify(came, syscall.SIGHUP)
	}
	over := make(chan struct{})
	go func() {
		var asked launch.Request
		for first := true; ; {
			select {
			case s := <-came:
				switch s := s.(syscall.Signal); {
				case !asked.Asks(s):
				case first:
					first = false
					cancel(interrupted(s))
				default:
					signal.Stop(came)
					unix.Kill(os.Getpid(), s)
					return
				}
			case <-over:
				return
			}
		}
	}()
	return ctx, sync.OnceFunc(func() {
		cancel(nil)
		var s interrupted
		if errors.As(context.Cause(ctx), &s) {
			return // the process ends, and another signal of the same request does not kill it before
		}
		signal.Stop(came)
		close(over)
	})
}

// regionArg is a NAME=FILE.
type regionArg struct {
	name string
	file *os.File
	size int64
}

// regionArgs opens the files of serve's arguments.
func (f *endpointFlags) regionArgs(cmd *cobra.Command, args []string) ([]regionArg, error) {
	var all []regionArg
	taken := map[string]bool{}
	for _, arg := range args {
		name, path, ok := strings.Cut(arg, "=")
		if !ok || name == "" || path == "" {
			return all, usagef(cmd, "%q: expected NAME=FILE", arg)
		}
		if taken[name] {
			return all, usagef(cmd, "two regions have the name %s", term.Shown(name))
		}
		taken[name] = true
		info, err := os.Stat(path) // before it is opened, which would wait for a writer of a pipe
		switch {
		case err != nil:
			return all, usagef(cmd, "%v", err)
		case info.IsDir():
			return all, usagef(cmd, "%s is a directory", path)
		case !info.Mode().IsRegular():
			return all, usagef(cmd, "%s is no regular file", path)
		}
		mode := os.O_RDONLY
		if f.write {
			mode = os.O_RDWR
		}
		file, err := os.OpenFile(path, mode, 0)
		if err != nil {
			return all, usagef(cmd, "%v", err)
		}
		all = append(all, regionArg{name, file, info.Size()})
	}
	return all, nil
}

func (f *endpointFlags) serve(cmd *cobra.Command, args []string) error {
	secret, who, err := f.credential(cmd)
	if err != nil {
		return err
	}
	if who.Client != "" {
		return usagef(cmd, "this is the credential of client %s: an endpoint that serves needs the secret", who.Client)
	}
	files, err := f.regionArgs(cmd, args)
	defer func() {
		for _, r := range files {
			r.file.Close()
		}
	}()
	if err != nil {
		return err
	}
	level := slog.LevelWarn
	switch text := strings.ToLower(strings.TrimSpace(os.Getenv("TUTTI_LOG"))); text {
	case "":
	case "off":
		level = slog.LevelError + 1
	case "debug", "info", "warn", "error":
		if err := level.UnmarshalText([]byte(text)); err != nil {
			return err
		}
	default:
		return usagef(cmd, "TUTTI_LOG=%q: expected debug, info, warn, error or off", text)
	}
	listen, spec := "TUTTI_IFNAME", "TUTTI_PORT" // where they come from
	if f.listen != "" {
		listen = "--listen"
	}
	if f.ports != "" {
		spec = "--ports"
	}
	cfg := endpoint.Config{Name: f.name, Secret: secret, Interfaces: cmp.Or(f.listen, os.Getenv("TUTTI_IFNAME")),
		Ports: cmp.Or(f.ports, bootstrap.WithoutServices(os.Getenv)("TUTTI_PORT")), Seal: f.seal, Checksum: f.checksum,
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))}
	if cfg.Name == "" {
		cfg.Name, _ = os.Hostname()
	}
	if _, err := ifname.Parse(cfg.Interfaces); err != nil || cfg.Interfaces == "none" {
		if err == nil {
			err = errors.New("it needs an address to listen on")
		}
		return usagef(cmd, "%s %s: %v", listen, cfg.Interfaces, err)
	}
	if _, err := ports.ParseSpec(cfg.Ports); err != nil {
		return usagef(cmd, "%s: %v", spec, err)
	}
	if f.publish != "" {
		if err := directory.CheckName(f.publish); err != nil {
			return usagef(cmd, "--publish: %v", err)
		}
	}
	ctx, stop := interruptible(cmd.Context())
	defer stop()
	if at := cmp.Or(f.metrics, os.Getenv("TUTTI_METRICS")); at != "" {
		x, err := prom.Serve(at)
		if err != nil {
			return usagef(cmd, "%v", err)
		}
		defer x.Close()
		cfg.Logger.Info("metrics are served", "url", "http://"+x.Addr()+"/metrics")
	}
	return open(cmd, cfg, func(e *endpoint.Endpoint) error {
		rights := endpoint.Read
		if f.write {
			rights |= endpoint.Write
		}
		var regions []*endpoint.Region
		for _, r := range files {
			region, err := e.RegisterFile(r.name, r.file, 0, r.size, endpoint.RegionConfig{Rights: rights})
			if errors.Is(err, endpoint.ErrName) {
				return usagef(cmd, "%v", err)
			} else if err != nil {
				return err
			}
			regions = append(regions, region)
		}
		at, withdraw := e.Info().String(), func() error { return nil }
		var lost <-chan struct{} // closed when the name is gone; nil: never
		var why func() error
		if f.publish != "" {
			d, err := f.openDirectory(ctx, cmd, who, cfg.Logger)
			if err != nil {
				return ended(ctx, err)
			}
			defer d.Close()
			pub, err := d.Publish(ctx, f.publish, e.Info())
			if err != nil {
				return ended(ctx, err)
			}
			at, withdraw, lost, why = "@"+f.publish, d.Close, pub.Done(), pub.Err
		}
		if _, err := fmt.Fprintln(os.Stdout, e.Info()); err != nil {
			return err
		}
		if launch.Terminal(os.Stderr) {
			fmt.Fprintf(os.Stderr, "%sserving until Ctrl-C; elsewhere, with the same secret:\n"+
				"  tutti endpoint read %s %s -o FILE\n", launch.Tag(os.Stderr), quoted(at), quoted(files[0].name))
		}
		var failed error
		select {
		case <-ctx.Done():
		case <-lost:
			failed = why()
		}
		if err := withdraw(); err != nil {
			fmt.Fprintln(os.Stderr, launch.Tag(os.Stderr)+err.Error())
		}
		e.Close()
		for _, r := range regions {
			read, written := r.Traffic()
			text := fmt.Sprintf("%s: %s read", term.Shown(r.Name()), status.Size(float64(read)))
			if f.write {
				text += fmt.Sprintf(", %s written", status.Size(float64(written)))
			}
			fmt.Fprintln(os.Stderr, launch.Tag(os.Stderr)+text)
		}
		return failed
	})
}

// open calls do with an endpoint.
func open(cmd *cobra.Command, cfg endpoint.Config, do func(*endpoint.Endpoint) error) error {
	c, err := endpoint.NewContext(endpoint.ContextConfig{})
	if err != nil {
		return err
	}
	defer c.Close()
	e, err := endpoint.New(c, cfg)
	if errors.Is(err, endpoint.ErrName) {
		return usagef(cmd, "--name: %v", err)
	} else if err != nil {
		return err
	}
	defer e.Close()
	return do(e)
}

// with calls do with the peer that text describes.
func (f *endpointFlags) with(cmd *cobra.Command, text string, do func(context.Context, *endpoint.Peer) error) error {
	if f.timeout <= 0 {
		return usagef(cmd, "--timeout %v: expected more than 0", f.timeout)
	}
	name, named := strings.CutPrefix(text, "@")
	var info endpoint.Info
	var err error
	if named {
		err = directory.CheckName(name)
	} else if info, err = endpoint.ParseInfo(text); err == nil && len(info.Addrs) == 0 {
		err = fmt.Errorf("endpoint %s does not listen", text)
	}
	if err != nil {
		return usagef(cmd, "%v", err)
	}
	secret, who, err := f.credential(cmd)
	if err != nil {
		return err
	}
	cfg := endpoint.Config{Secret: secret, Interfaces: "none", Timeout: f.timeout, DialTimeout: f.timeout, Seal: f.seal,
		Checksum: f.checksum}
	ctx, stop := interruptible(cmd.Context())
	defer stop()
	err = open(cmd, cfg, func(e *endpoint.Endpoint) error {
		var p *endpoint.Peer
		var err error
		if named {
			p, err = f.connect(ctx, cmd, who, e, name)
		} else {
			p, err = e.Connect(ctx, info)
		}
		if err != nil {
			return err
		}
		return do(ctx, p)
	})
	err = ended(ctx, err)
	if errors.Is(err, endpoint.ErrAuth) {
		err = fmt.Errorf("%w (TUTTI_SECRET or --secret-file: is it that of the other end?)", err)
	}
	return err
}

// connect returns the peer that has a name in the store.
func (f *endpointFlags) connect(ctx context.Context, cmd *cobra.Command, who trust.Credential, e *endpoint.Endpoint,
	name string) (*endpoint.Peer, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, f.timeout, fmt.Errorf("no connection within %v", f.timeout))
	defer cancel()
	d, err := f.openDirectory(ctx, cmd, who, nil)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	return d.Connect(ctx, e, name)
}

// ended returns the error of an operation, which is that of the signal if one has ended it.
func ended(ctx context.Context, err error) error {
	var s interrupted
	if err != nil && errors.As(context.Cause(ctx), &s) {
		return &launch.Error{Code: 128 + int(s), Err: s}
	}
	return err
}

// published is a line of ls --json without an endpoint.
type published struct {
	Name     string `json:"name"`
	Endpoint string `json:"endpoint"`
}

// names lists what is published.
func (f *endpointFlags) names(cmd *cobra.Command) error {
	if f.timeout <= 0 {
		return usagef(cmd, "--timeout %v: expected more than 0", f.timeout)
	}
	_, who, err := f.credential(cmd)
	if err != nil {
		return err
	}
	ctx, stop := interruptible(cmd.Context())
	defer stop()
	tctx, cancel := context.WithTimeoutCause(ctx, f.timeout, fmt.Errorf("no answer within %v", f.timeout))
	defer cancel()
	d, err := f.openDirectory(tctx, cmd, who, nil)
	if err != nil {
		return ended(ctx, err)
	}
	defer d.Close()
	all, err := d.Entries(tctx)
	if err != nil {
		return ended(ctx, err)
	}
	if f.asJSON {
		enc := json.NewEncoder(stdout)
		enc.SetEscapeHTML(false)
		for _, x := range all {
			if err := enc.Encode(published{x.Name, x.Info.String()}); err != nil {
				return err
			}
		}
		return nil
	}
	var lines [][]string
	if launch.Terminal(os.Stdout) {
		lines = append(lines, []string{"name", "endpoint"})
	}
	for _, x := range all {
		lines = append(lines, []string{x.Name, term.Shown(x.Info.String())})
	}
	return columns(lines, "-")
}

// columns prints a table. align has a sign for each column but the last: "-" for one that is
// aligned to the left.
func columns(lines [][]string, align ...string) error {
	width := make([]int, len(align))
	for _, l := range lines {
		for i := range align {
			width[i] = max(width[i], utf8.RuneCountInString(l[i]))
		}
	}
	var b strings.Builder
	for _, l := range lines {
		for i, sign := range align {
			fmt.Fprintf(&b, "%"+sign+"*s  ", width[i], l[i])
		}
		fmt.Fprintln(&b, l[len(align)])
	}
	_, err := io.WriteString(stdout, b.String())
	return err
}

// remote is a line of ls --json.
type remote struct {
	Name   string `json:"name"`
	Size   int64  `json:"size"`
	Rights string `json:"rights"` // read, write or read+write
}

func (f *endpointFlags) ls(ctx context.Context, p *endpoint.Peer) error {
	var all []endpoint.RemoteRegion
	for after := ""; ; after = all[len(all)-1].Name {
		page, err := p.Regions(ctx, after, endpoint.MaxPage)
		if err != nil {
			return err
		}
		all = append(all, page...)
		if len(page) < endpoint.MaxPage {
			break
		}
	}
	if f.asJSON {
		enc := json.NewEncoder(stdout)
		enc.SetEscapeHTML(false)
		for _, r := range all {
			if err := enc.Encode(remote{r.Name, r.Len, r.Rights.String()}); err != nil {
				return err
			}
		}
		return nil
	}
	var lines [][]string
	if launch.Terminal(os.Stdout) {
		lines = append(lines, []string{"name", "size", "rights"})
	}
	for _, r := range all {
		lines = append(lines, []string{term.Shown(r.Name), strconv.FormatInt(r.Len, 10), r.Rights.String()})
	}
	return columns(lines, "-", "")
}

// lookup finds a region, and checks an access to n bytes of it; negative: to all that follow.
func lookup(ctx context.Context, p *endpoint.Peer, name string, off, n int64) (r endpoint.RemoteRegion, _ int64,
	err error) {
	if r, err = p.Lookup(ctx, name); err != nil {
		return r, 0, err
	}
	switch {
	case off > r.Len || n > r.Len-off:
		what := fmt.Sprintf("offset %d is", off)
		if n >= 0 {
			what = fmt.Sprintf("%d at offset %d are", n, off)
		}
		return r, 0, fmt.Errorf("region %s of %v has %d bytes: %s %w", term.Shown(name), p, r.Len, what,
			endpoint.ErrBounds)
	case n < 0:
		n = r.Len - off
	}
	return r, n, nil
}

func (f *endpointFlags) read(ctx context.Context, p *endpoint.Peer, name string, off, n int64) (err error) {
	r, n, err := lookup(ctx, p, name, off, n)
	if err != nil {
		return err
	}
	if !r.Rights.Has(endpoint.Read) {
		return fmt.Errorf("region %s of %v cannot be read: its rights are %v", term.Shown(name), p, r.Rights)
	}
	out, err := create(ctx, f.output)
	if err != nil {
		return err
	}
	m := newMeter("read", n, out.file)
	defer func() {
		if cerr := out.close(err == nil); err == nil {
			err = cerr
		}
		m.close(err == nil)
	}()
	if out.whole {
		if err := reserve(out.file, n); err != nil {
			return err
		}
	}
	var free buffers
	at := int64(0)
	return transfer(ctx, func() (*piece, error) {
		k := min(pieceSize, n-at)
		if k == 0 {
			return nil, nil
		}
		pc := &piece{n: k}
		if out.whole {
			pc.future = p.ReadInto(out.file, at, k, name, off+at)
		} else {
			pc.buf = free.get()
			pc.future = p.Read(pc.buf[:k], name, off+at)
		}
		at += k
		return pc, nil
	}, func(pc *piece) error {
		if !out.whole {
			_, werr, err := patiently(ctx, func() (int, error) { return out.file.Write(pc.buf[:pc.n]) })
			if err = cmp.Or(err, werr); err != nil {
				return err
			}
			free.put(pc.buf)
		}
		m.add(pc.n)
		return nil
	})
}

// put writes a file to a region. whole: it has n bytes, and need not be read in order.
func (f *endpointFlags) put(ctx context.Context, p *endpoint.Peer, name string, off int64, in *os.File, whole bool,
	n int64) (err error) {
	if !whole {
		n = -1
	}
	r, room, err := lookup(ctx, p, name, off, n)
	if err != nil {
		return err
	}
	if !r.Rights.Has(endpoint.Write) {
		return fmt.Errorf("region %s of %v cannot be written: its rights are %v", term.Shown(name), p, r.Rights)
	}
	m := newMeter("wrote", n, nil)
	defer func() { m.close(err == nil) }()
	var free buffers
	var ended error // of the input
	at := int64(0)
	err = transfer(ctx, func() (*piece, error) {
		if whole {
			k := min(pieceSize, n-at)
			if k == 0 {
				return nil, nil
			}
			at += k
			return &piece{n: k, future: p.WriteFrom(in, at-k, k, name, off+at-k)}, nil
		}
		if ended != nil {
			return nil, nil
		}
		buf := free.get()
		k, rerr, err := patiently(ctx, func() (int, error) { return io.ReadFull(in, buf) })
		if err != nil {
			return nil, err
		}
		ended = rerr
		if int64(k) > room-at {
			k = int(room - at)
			ended = fmt.Errorf("the input is longer than the %s of region %s from offset %d: what fits has been "+
				"written", term.Count(room, "byte"), term.Shown(name), off)
		}
		if k == 0 {
			return nil, nil
		}
		at += int64(k)
		return &piece{n: int64(k), buf: buf, future: p.Write(buf[:k], name, off+at-int64(k))}, nil
	}, func(pc *piece) error {
		if pc.buf != nil {
			free.put(pc.buf)
		}
		m.add(pc.n)
		return nil
	})
	if err == nil && ended != io.EOF && ended != io.ErrUnexpectedEOF {
		err = ended
	}
	return err
}

// piece is a part of a transfer that is under way.
type piece struct {
	future *endpoint.Future
	n      int64
	buf    []byte // nil: it goes from or to a file
}

// buffers are buffers of pieceSize bytes that are not in use.
type buffers [][]byte

func (b *buffers) get() []byte {
	if n := len(*b) - 1; n >= 0 {
		buf := (*b)[n]
		*b = (*b)[:n]
		return buf
	}
	return make([]byte, pieceSize)
}

func (b *buffers) put(buf []byte) { *b = append(*b, buf) }

// transfer has several pieces under way. next starts one, or returns nil after the last. done gets
// them in the same order. When transfer returns, none is under way.
func transfer(ctx context.Context, next func() (*piece, error), done func(*piece) error) error {
	var under []*piece
	defer func() {
		for _, pc := range under {
			pc.future.Cancel()
		}
	}()
	for more := true; ; {
		for more && len(under) < abreast {
			pc, err := next()
			if err != nil {
				return err
			}
			if more = pc != nil; more {
				under = append(under, pc)
			}
		}
		if len(under) == 0 {
			return nil
		}
		pc := under[0]
		if err := pc.future.Wait(ctx); err != nil {
			return err
		}
		under = under[1:]
		if err := done(pc); err != nil {
			return err
		}
	}
}

// patiently returns what f returns, a system call that may wait for ever; or, with err, when ctx
// ends first. Then f continues.
func patiently[T any](ctx context.Context, f func() (T, error)) (got T, ferr, err error) {
	type result struct {
		got T
		err error
	}
	c := make(chan result, 1)
	go func() {
		var r result
		r.got, r.err = f()
		c <- r
	}()
	select {
	case r := <-c:
		return r.got, r.err, nil
	case <-ctx.Done():
		return got, nil, context.Cause(ctx)
	}
}

// output is where a read goes.
type output struct {
	file  *os.File
	whole bool   // a new regular file, to be filled in any order
	path  string // of which it gets the name when it is complete
}

// resolve follows the symbolic links of a path, to a file that may not exist. fd is the descriptor
// of this process that the path means, as /dev/stdout does; negative: none.
func resolve(path string) (target string, fd int, err error) {
	self, _ := os.Readlink("/proc/self")
	for range 40 { // links, as the kernel has it
		dir, base := filepath.Split(path)
		if dir, err = filepath.EvalSymlinks(cmp.Or(dir, ".")); err != nil || base == "" || base == ".." {
			return path, -1, nil // to open it says why
		}
		if n, err := strconv.Atoi(base); err == nil && filepath.Base(dir) == "fd" &&
			strings.HasPrefix(dir, "/proc/"+self+"/") {
			return path, n, nil
		}
		path = filepath.Join(dir, base)
		to, err := os.Readlink(path)
		if err != nil { // it is no link
			return path, -1, nil
		}
		if !filepath.IsAbs(to) {
			to = dir + "/" + to
		}
		path = to
	}
	return path, -1, &fs.PathError{Op: "open", Path: path, Err: unix.ELOOP}
}

// create opens the output with this path; "" and "-" are the standard output, and so is a path of
// the file that it is redirected to. A regular file gets its name, or takes the place of the one
// that has it, in close. A descriptor, as that of /dev/fd/3, is written as it is.
func create(ctx context.Context, path string) (*output, error) {
	if path == "" || path == "-" {
		return &output{file: os.Stdout}, nil
	}
	info, err := os.Stat(path)
	if own, oerr := os.Stdout.Stat(); err == nil && oerr == nil && os.SameFile(info, own) {
		return &output{file: os.Stdout}, nil
	}
	target, fd, rerr := resolve(path)
	if rerr != nil {
		return nil, rerr
	}
	if fd >= 0 {
		n, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return nil, &fs.PathError{Op: "open", Path: path, Err: err}
		}
		return &output{file: os.NewFile(uintptr(n), path)}, nil
	}
	switch {
	case err == nil && !info.Mode().IsRegular(): // a device or a pipe; of a directory it is an error
		f, ferr, err := patiently(ctx, func() (*os.File, error) { return os.OpenFile(path, os.O_WRONLY, 0) })
		return &output{file: f}, cmp.Or(err, ferr)
	case err == nil:
		f, err := os.OpenFile(path, os.O_WRONLY, 0) // it must be writable
		if err != nil {
			return nil, err
		}
		f.Close()
	case !errors.Is(err, fs.ErrNotExist):
		return nil, err
	}
	path = target
	mode := fs.FileMode(0o666)
	if info != nil {
		mode = 0o600 // until it has that of the old one
	}
	temp := filepath.Join(filepath.Dir(path), ".tutti-read-"+rand.Text())
	f, err := os.OpenFile(temp, os.O_CREATE|os.O_EXCL|os.O_RDWR, mode)
	if err != nil {
		return nil, fmt.Errorf("%s cannot be made: %w", path, err)
	}
	out := &output{file: f, whole: true, path: path}
	if info != nil {
		if err := f.Chmod(info.Mode().Perm()); err != nil { // not after the transfer
			out.close(false)
			return nil, fmt.Errorf("%s cannot be replaced: %w", path, err)
		}
	}
	return out, nil
}

// close gives the output its name if it is complete, and removes it otherwise.
func (o *output) close(complete bool) error {
	if o.file == os.Stdout {
		return nil
	}
	err := o.file.Close()
	if !o.whole {
		return err
	}
	if complete && err == nil {
		err = os.Rename(o.file.Name(), o.path)
	}
	if !complete || err != nil {
		os.Remove(o.file.Name())
	}
	return err
}

// reserve makes room for n bytes in a file, if its file system can.
func reserve(f *os.File, n int64) error {
	if n == 0 {
		return nil
	}
	for {
		switch err := unix.Fallocate(int(f.Fd()), 0, 0, n); err {
		case nil, unix.EOPNOTSUPP, unix.ENOSYS:
			return nil
		case unix.EINTR:
		default:
			return fmt.Errorf("%d bytes for %s: %w", n, f.Name(), err)
		}
	}
}

// meter shows the progress of a transfer on a terminal.
type meter struct {
	out          *os.File // nil: none
	verb         string
	total, moved int64 // total: negative if it is not known
	began, drawn time.Time
}

// newMeter returns a meter on the standard error, unless that is no terminal, or the data goes to
// a terminal.
func newMeter(verb string, total int64, data *os.File) *meter {
	m := &meter{verb: verb, total: total, began: time.Now()}
	if launch.Terminal(os.Stderr) && os.Getenv("TERM") != "dumb" && (data == nil || !launch.Terminal(data)) {
		m.out = os.Stderr
		m.draw(m.began)
	}
	return m
}

func (m *meter) add(n int64) {
	m.moved += n
	if m.out == nil {
		return
	}
	if now := time.Now(); now.Sub(m.drawn) >= 100*time.Millisecond {
		m.draw(now)
	}
}

func (m *meter) draw(now time.Time) {
	m.drawn = now
	term.Progress(m.out, m.text(now, term.Width(m.out)))
}

// text is the line of the meter, for a terminal with so many columns.
func (m *meter) text(now time.Time, columns int) string {
	text, percent, part := status.Size(float64(m.moved)), "", 0.
	if m.total >= 0 {
		text += " of " + status.Size(float64(m.total))
	}
	if m.total > 0 {
		part = float64(m.moved) / float64(m.total)
		percent = fmt.Sprintf("%3d%%  ", int(part*100))
	}
	if d := now.Sub(m.began).Seconds(); d > 0 && m.moved > 0 {
		rate := fmt.Sprintf("  %s/s", status.Size(float64(m.moved)/d))
		if columns <= 0 || len(percent)+len(text)+len(rate) <= columns {
			text += rate
		}
	}
	if m.total <= 0 {
		return term.Clip(text, columns)
	}
	if room := min(columns-len(percent)-len(text)-5, 40); room >= 10 {
		full := min(int(part*float64(room)), room)
		return percent + "[" + strings.Repeat("#", full) + strings.Repeat(" ", room-full) + "]  " + text
	}
	return term.Clip(percent+text, columns)
}

// close removes the line, and says what was moved if that is all.
func (m *meter) close(complete bool) {
	if m.out == nil {
		return
	}
	fmt.Fprint(m.out, "\r\x1b[K")
	if complete {
		d := max(time.Since(m.began), time.Millisecond)
		fmt.Fprintf(m.out, "%s%s %s in %s, %s/s\n", launch.Tag(m.out), m.verb, status.Size(float64(m.moved)),
			flight.Seconds(d), status.Size(float64(m.moved)/d.Seconds()))
	}
}

// quoted is an argument for a shell.
func quoted(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }
