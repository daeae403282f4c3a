// Weights moves the weights of a model from the ranks that train it to programs that serve it. The
// trainers publish a version of the weights again and again, each rank its own shard; the servers
// fetch every new version while they serve the one before, and cut it into parts of their own. Try
//
//	tutti secret --file ~/weights.secret
//	export TUTTI_SECRET_FILE=$HOME/weights.secret
//	tutti run -n 4 ./examples/weights train --wait 3
//
// and three servers, each in a terminal of its own, with the address of the store that the trainers
// print:
//
//	export TUTTI_SECRET_FILE=$HOME/weights.secret TUTTI_STORE=tutti://127.0.0.1:PORT
//	go run ./examples/weights serve --part 0/3
//
//	export TUTTI_SECRET_FILE=$HOME/weights.secret TUTTI_STORE=tutti://127.0.0.1:PORT
//	go run ./examples/weights serve --part 1/3
//
//	export TUTTI_SECRET_FILE=$HOME/weights.secret TUTTI_STORE=tutti://127.0.0.1:PORT
//	go run ./examples/weights serve --part 2/3
//
// The trainers are found by their names, weights/0 and so on, in a directory in the store of their
// job, or in a site's store, TUTTI_STORE=etcd://HOST:PORT. Version v of a shard is the region "v".
// Rank 0 publishes the manifest of a version when all ranks have published their shards. A shard is
// unregistered two versions later: a server that still reads it gets an error, and turns to the
// latest version. A server that ends can be started again, or another one in its place: with --wait
// the trainers wait for it, as long as their group's timeout lets them.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"tutti/bootstrap"
	"tutti/endpoint"
	"tutti/endpoint/directory"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "weights:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 || args[0] != "train" && args[0] != "serve" {
		return errors.New("want \"weights train\" or \"weights serve\", and flags; see --help of each")
	}
	parse := func(fl *flag.FlagSet) error {
		fl.Parse(args[1:])
		if fl.NArg() > 0 {
			return fmt.Errorf("%q: %s takes flags alone", fl.Arg(0), fl.Name())
		}
		return nil
	}
	fl := flag.NewFlagSet("weights "+args[0], flag.ExitOnError)
	if args[0] == "train" {
		var t trainer
		fl.Func("size", "bytes of weights, as 1G or 64M (default 1G)", t.setSize)
		fl.IntVar(&t.versions, "versions", 5, "versions to publish")
		fl.DurationVar(&t.every, "every", time.Second, "pause between versions")
		fl.IntVar(&t.wait, "wait", 0, "end when so many servers have each version, instead of at once")
		if err := parse(fl); err != nil {
			return err
		}
		return t.run(ctx)
	}
	var s server
	fl.Func("part", "part of the weights to serve, as 0/3", s.setPart)
	fl.IntVar(&s.until, "until", 0, "end with this version (default: serve until interrupted)")
	if err := parse(fl); err != nil {
		return err
	}
	return s.run(ctx)
}

// site is what both kinds of programs need: an endpoint, and the directory of the trainers.
type site struct {
	l bootstrap.Launch
	c *endpoint.Context
	e *endpoint.Endpoint
	d *directory.Directory
}

// open makes the endpoint of a program. The environment says where the store is, and the secret.
func open(ctx context.Context, name, interfaces string) (*site, error) {
	l, err := bootstrap.FromEnv(os.Getenv)
	if err != nil {
		return nil, err
	}
	if l.Store == "" || len(l.Secret) == 0 {
		return nil, errors.New("TUTTI_STORE and TUTTI_SECRET_FILE are not set: they say where the trainers are " +
			"found, and prove that this program belongs to them")
	}
	s := &site{l: l}
	if s.c, err = endpoint.NewContext(endpoint.ContextConfig{}); err != nil {
		return nil, err
	}
	cfg := endpoint.Config{Name: name, Secret: string(l.Secret), Interfaces: interfaces}
	if s.e, err = endpoint.New(s.c, cfg); err == nil {
		store := bootstrap.StoreConfig{Address: l.Store, Secret: l.Secret, User: l.StoreUser, Password: l.StorePassword,
			CA: l.StoreCA, Cert: l.StoreCert, Key: l.StoreKey}
		s.d, err = directory.Open(ctx, directory.Config{Store: store})
	}
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

func (s *site) close() (err error) {
	if s.d != nil {
		err = s.d.Close()
	}
	if s.e != nil {
		err = errors.Join(err, s.e.Close())
	}
	return errors.Join(err, s.c.Close())
}

// manifest describes a version.
type manifest struct {
	Version int
	Weights int // float32, in all shards
	Shards  int
}

// span returns the weights of part i of n.
func (m manifest) span(i, n int) (from, to int) { return m.Weights / n * i, m.Weights / n * (i + 1) }

// manifestPrefix begins the names of the manifests' regions; the version follows.
const manifestPrefix = "manifest/"

// weight is the value of weight i in a version. Every server checks every weight.
func weight(i, version int) float32 { return float32(i%(1<<16)) + float32(version)/64 }

// memory returns the memory of weights.
func memory(w []float32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(w))), 4*len(w))
}

// bytesOf is a number of bytes as people write it.
func bytesOf(n float64) string {
	for _, u := range []string{"B", "KiB", "MiB"} {
		if n < 1024 {
			return fmt.Sprintf("%.4g %s", n, u)
		}
		n /= 1024
	}
	return fmt.Sprintf("%.3g GiB", n)
}

// parseBytes is the opposite: a number and K, M or G.
func parseBytes(text string) (n int, err error) {
	at := strings.IndexAny(text, "KMG")
	if at < 0 {
		at = len(text)
	}
	shift := map[string]int{"": 0, "K": 10, "M": 20, "G": 30}[text[at:]]
	if n, err = strconv.Atoi(text[:at]); err != nil || n < 1 || len(text)-at > 1 || n > math.MaxInt>>shift {
		return 0, fmt.Errorf("want a number of bytes, as 1G or 64M")
	}
	return n << shift, nil
}
