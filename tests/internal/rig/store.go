//go:build linux

package rig

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"tutti/bootstrap"
	"tutti/bootstrap/embed"
	"tutti/internal/proctest"
	"tutti/internal/sitetest"
)

// storeVariable makes a test binary a store, of the kind that is its value; hostVariable is the
// address at which it listens.
const storeVariable, hostVariable = "RIG_STORE", "RIG_STORE_HOST"

// StoreKind is a kind of store.
type StoreKind string

// Kinds of stores.
const (
	Embedded StoreKind = "tutti" // a launcher's, which asks for the job's secret
	Site     StoreKind = "etcd"  // a site's own, without authentication
)

// Store starts a store as a process of the stage, which a SIGTERM ends. prefix is that of StartIn;
// host is the address of an embedded one, 127.0.0.1 if "".
func (s *Stage) Store(prefix []string, kind StoreKind, secret, host string) (p *proctest.Child, address string) {
	s.t.Helper()
	env := []string{storeVariable + "=" + string(kind), "TUTTI_SECRET=" + secret, hostVariable + "=" + host}
	p = s.StartIn(prefix, env, proctest.Self())
	p.Out.Await(s.t, "\n")
	return p, strings.TrimPrefix(strings.TrimSpace(p.Out.String()), "at ")
}

// storeMain runs a store's process. It returns the exit code.
func storeMain(kind StoreKind) int {
	address, end, err := serveStore(kind)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	enough := make(chan os.Signal, 1)
	signal.Notify(enough, syscall.SIGTERM)
	fmt.Printf("at %s\n", address)
	<-enough
	end()
	return 0
}

func serveStore(kind StoreKind) (address string, end func(), err error) {
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	if kind == Site {
		dir, err := os.MkdirTemp("", "etcd")
		if err != nil {
			return "", nil, err
		}
		address, end, err := sitetest.Serve(ctx, filepath.Join(dir, "data"))
		return address, func() { end(); os.RemoveAll(dir) }, err
	}
	secret, err := bootstrap.ParseSecret(os.Getenv("TUTTI_SECRET"))
	if err != nil {
		return "", nil, err
	}
	s, err := embed.Start(ctx, embed.Config{Secret: secret, Host: os.Getenv(hostVariable)})
	if err != nil {
		return "", nil, err
	}
	return s.Address(), func() { s.Close() }, nil
}
