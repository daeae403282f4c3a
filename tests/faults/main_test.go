//go:build linux

// Package faults tests whole jobs, as a user starts them, under faults: dead, stopped and hostile
// processes, a store that goes away, wrong settings and scarce resources. After each of them, every
// rank has an error that says what happened or goes on, in bounded time, and nothing is left
// behind.
package faults

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"

	"tutti/bootstrap"
	store "tutti/bootstrap/embed"
	"tutti/internal/ports"
	"tutti/tests/internal/rig"
)

// storeVariable makes the test binary a store that runs until it gets a SIGTERM: "tutti", the
// embedded one with the job's secret, or "etcd", a site's own, where everybody is let in.
// hostVariable is the address where the first listens.
const storeVariable, hostVariable = "FAULTS_STORE", "FAULTS_STORE_HOST"

func TestMain(m *testing.M) {
	if kind := os.Getenv(storeVariable); kind != "" {
		address, end, err := serve(kind)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Printf("at %s\n", address)
		enough := make(chan os.Signal, 1)
		signal.Notify(enough, syscall.SIGTERM)
		<-enough
		end()
		os.Exit(0)
	}
	rig.Main(m, nil)
}

func serve(kind string) (address string, end func(), err error) {
	ctx, cancel := context.WithTimeout(context.Background(), rig.Patience)
	defer cancel()
	if kind == "tutti" {
		raw, err := bootstrap.ParseSecret(os.Getenv("TUTTI_SECRET"))
		if err != nil {
			return "", nil, err
		}
		s, err := store.Start(ctx, store.Config{Secret: raw, Host: os.Getenv(hostVariable)})
		if err != nil {
			return "", nil, err
		}
		return s.Address(), func() { s.Close() }, nil
	}
	l, err := ports.Listen(ctx, "127.0.0.1", ports.Spec{})
	if err != nil {
		return "", nil, err
	}
	client := url.URL{Scheme: "http", Host: l.Addr().String()}
	l.Close()
	dir, err := os.MkdirTemp("", "etcd")
	if err != nil {
		return "", nil, err
	}
	c := embed.NewConfig()
	c.Dir = filepath.Join(dir, "data")
	c.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
	c.UnsafeNoFsync = true
	c.ListenClientUrls, c.AdvertiseClientUrls = []url.URL{client}, []url.URL{client}
	peer := url.URL{Scheme: "http", Host: "127.0.0.1:1"}
	c.ListenPeerUrls, c.AdvertisePeerUrls = nil, []url.URL{peer}
	c.InitialCluster = c.InitialClusterFromName(c.Name)
	c.TickMs, c.ElectionMs = 10, 50
	e, err := embed.StartEtcd(c)
	if err != nil {
		return "", nil, err
	}
	select {
	case <-e.Server.ReadyNotify():
		return "etcd://" + client.Host, e.Close, nil
	case <-ctx.Done():
		return "", nil, ctx.Err()
	}
}

var secret = bootstrap.NewSecret()

// startStore starts a store as a process of the stage.
func startStore(t *testing.T, s *rig.Stage, kind string) (p *rig.Process, address string) {
	t.Helper()
	p = s.Start([]string{storeVariable + "=" + kind, "TUTTI_SECRET=" + secret}, rig.Self(t))
	p.Out.Await(t, "\n")
	return p, strings.TrimPrefix(strings.TrimSpace(p.Out.String()), "at ")
}

// startRank starts a rank without a launcher. More settings override those that are usual.
func startRank(t *testing.T, s *rig.Stage, address string, rank, size int, more ...string) *rig.Process {
	t.Helper()
	env := []string{"RANK=" + strconv.Itoa(rank), "WORLD_SIZE=" + strconv.Itoa(size), "TUTTI_JOB=faults",
		"TUTTI_STORE=" + address, "TUTTI_SECRET=" + secret}
	return s.Start(append(env, more...), rig.Self(t))
}

// blames checks that every rank has a fault of this kind with a text that contains all of texts.
func blames(t *testing.T, all []rig.Reply, ranks []*rig.Rank, kind string, texts ...string) {
	t.Helper()
	for i, a := range all {
		if a.Fault == nil {
			t.Errorf("rank %d has no error", ranks[i].Number)
			continue
		}
		if kind != "" && a.Fault.Kind != kind {
			t.Errorf("rank %d: %v, want an error of kind %s", ranks[i].Number, a.Fault, kind)
		}
		for _, text := range texts {
			if !strings.Contains(a.Fault.Text, text) {
				t.Errorf("rank %d: %v, want %q in it", ranks[i].Number, a.Fault, text)
			}
		}
		if a.Took > rig.Patience {
			t.Errorf("rank %d: it took %v", ranks[i].Number, a.Took.Round(time.Millisecond))
		}
	}
}

// without returns the ranks but one.
func without(ranks []*rig.Rank, but int) (others []*rig.Rank) {
	for _, r := range ranks {
		if r.Number != but {
			others = append(others, r)
		}
	}
	return others
}
