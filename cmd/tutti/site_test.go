package main

import (
	"os"
	"slices"
	"strings"
	"testing"

	"tutti/bootstrap"
	"tutti/internal/proctest"
	"tutti/internal/sitetest"
)

// Where the site has a store, a job uses it: by the flag, or because the environment says so. It
// needs no other variables than any rank does.
func TestRunSiteStore(t *testing.T) {
	site := sitetest.Start(t, sitetest.Config{ClientCerts: true, Users: true})
	for _, by := range []string{"flag", "environment"} {
		t.Run(by, func(t *testing.T) {
			s := newStage(t)
			args := []string{"run", "-n", "2", "--job", "test"}
			env := site.Env()
			if by == "flag" {
				args = append(args, "--store", site.Address)
				env = slices.DeleteFunc(env, func(v string) bool { return strings.HasPrefix(v, "TUTTI_STORE=") })
			}
			j := s.command(append(args, proctest.Self())...)
			j.cmd.Env = append(j.cmd.Env, env...)
			j.start()
			all := s.arrive(2)
			for i, p := range all {
				for _, v := range site.Env() {
					if name, value, _ := strings.Cut(v, "="); p.Env[name] != value {
						t.Errorf("rank %d has %s=%q, want %q", i, name, p.Env[name], value)
					}
				}
			}
			l, err := bootstrap.FromEnv(func(name string) string { return all[0].Env[name] })
			if err != nil || len(l.Secret) == 0 || l.Job != "test" {
				t.Errorf("%+v, %v", l, err)
			}
			for _, p := range all {
				p.tell("exit 0")
			}
			j.End(0)
			s.empty()
		})
	}
}

// A job that brings its own store does not trip over how a site's would be entered, nor over the
// store of a job that it runs in.
func TestRunOwnStore(t *testing.T) {
	s := newStage(t)
	j := s.command("run", "-n", "1", proctest.Self())
	j.cmd.Env = append(j.cmd.Env, "TUTTI_STORE=tutti://192.0.2.1:1", "TUTTI_STORE_CA="+os.DevNull,
		"TUTTI_STORE_USER=somebody", "TUTTI_STORE_PASSWORD=x")
	j.start()
	p := s.arrive(1)[0]
	l, err := bootstrap.FromEnv(func(name string) string { return p.Env[name] })
	if err != nil {
		t.Fatal(err)
	}
	h, err := bootstrap.DialStore(t.Context(), bootstrap.StoreConfig{Address: l.Store, Job: l.Job, Secret: l.Secret,
		User: l.StoreUser, Password: l.StorePassword, CA: l.StoreCA})
	if err != nil {
		t.Fatal(err)
	}
	h.Close()
	p.tell("exit 0")
	j.End(0)
	s.empty()
}
