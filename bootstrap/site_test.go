package bootstrap_test

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"tutti/bootstrap"
	"tutti/internal/sitetest"
)

// siteConfig is how a rank of job test dials s.
func siteConfig(s *sitetest.Site) bootstrap.StoreConfig {
	c := bootstrap.StoreConfig{Address: s.Address, Job: "test", CA: s.CA, Cert: s.Cert, Key: s.Key,
		DialTimeout: patience}
	for _, v := range s.Env() {
		switch name, value, _ := strings.Cut(v, "="); name {
		case "TUTTI_STORE_USER":
			c.User = value
		case "TUTTI_STORE_PASSWORD":
			c.Password = value
		}
	}
	return c
}

// A wrong configuration of a rank for a site's store is an immediate error that names the remedy,
// without a timeout.
func TestSiteRefusals(t *testing.T) {
	certs := sitetest.Start(t, sitetest.Config{ClientCerts: true, Users: true})
	users := sitetest.Start(t, sitetest.Config{Users: true})
	foreign := sitetest.NewAuthority(t)
	with := func(s *sitetest.Site, change func(c *bootstrap.StoreConfig)) bootstrap.StoreConfig {
		c := siteConfig(s)
		change(&c)
		return c
	}
	_, port, _ := net.SplitHostPort(strings.TrimPrefix(certs.Address, "etcds://"))
	for _, c := range []struct {
		name string
		cfg  bootstrap.StoreConfig
		text string
	}{
		{"wrong password", with(users, func(c *bootstrap.StoreConfig) { c.Password = "guessed" }),
			`user "rank" and the password are not known`},
		{"wrong password by TLS", with(certs, func(c *bootstrap.StoreConfig) { c.Password = "guessed" }),
			`user "rank" and the password are not known`},
		{"unknown user", with(users, func(c *bootstrap.StoreConfig) { c.User = "nobody" }), `user "nobody"`},
		{"no user", with(users, func(c *bootstrap.StoreConfig) { c.User, c.Password = "", "" }), "TUTTI_STORE_USER"},
		{"user without password", with(users, func(c *bootstrap.StoreConfig) { c.Password = "" }),
			"TUTTI_STORE_PASSWORD"},
		{"foreign authority", with(certs, func(c *bootstrap.StoreConfig) { c.CA = foreign.File }), "TUTTI_STORE_CA"},
		{"unknown authority", with(certs, func(c *bootstrap.StoreConfig) { c.CA = "" }), "TUTTI_STORE_CA"},
		{"another name", with(certs, func(c *bootstrap.StoreConfig) { c.Address = "etcds://localhost:" + port }),
			"localhost"},
		{"no client certificate", with(certs, func(c *bootstrap.StoreConfig) { c.Cert, c.Key = "", "" }),
			"TUTTI_STORE_CERT"},
		{"foreign client certificate", with(certs, func(c *bootstrap.StoreConfig) {
			c.Cert,
				c.Key = foreign.Issue(t, sitetest.Certificate{Name: "rank"})
		}), "TUTTI_STORE_CERT"},
		{"expired client certificate", with(certs, func(c *bootstrap.StoreConfig) {
			c.Cert, c.Key = certs.Authority.Issue(t, sitetest.Certificate{Name: "rank", Expired: true})
		}), "expired"},
		{"no PEM file", with(certs, func(c *bootstrap.StoreConfig) { c.CA = "site_test.go" }),
			"site_test.go holds no PEM certificate"},
		{"key without certificate", with(certs, func(c *bootstrap.StoreConfig) { c.Cert = "" }), "client certificate"},
	} {
		s, err := bootstrap.DialStore(t.Context(), c.cfg)
		if err == nil {
			s.Close()
		}
		if err == nil || errors.Is(err, bootstrap.ErrStoreAway) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v, want at once an error that says %q", c.name, err, c.text)
		}
	}
	// Here the store may still be coming up, as far as can be seen at first: it is tried until the
	// time is up, and then there is an explanation. One that speaks TLS has been reached.
	var wg sync.WaitGroup
	for _, c := range []struct {
		name, address, text string
		away                bool
	}{
		{"TLS to a store without", "etcds" + strings.TrimPrefix(users.Address, "etcd"), "etcd:// address", true},
		{"no TLS to a store with", "etcd" + strings.TrimPrefix(certs.Address, "etcds"), "use " + certs.Address, false},
	} {
		wg.Go(func() {
			s, err := bootstrap.DialStore(t.Context(), bootstrap.StoreConfig{Address: c.address, Job: "test",
				DialTimeout: 10 * time.Second}) // the second is found out after half of it
			if err == nil {
				s.Close()
			}
			if err == nil || errors.Is(err, bootstrap.ErrStoreAway) != c.away ||
				!strings.Contains(err.Error(), c.text) {
				t.Errorf("%s: %v, want one that says %q, and is ErrStoreAway: %v", c.name, err, c.text, c.away)
			}
		})
	}
	wg.Wait()
}

// Kubernetes makes variables of secrets as they were stored, often with a newline.
func TestSiteUserEndsInLine(t *testing.T) {
	cfg := siteConfig(sitetest.Start(t, sitetest.Config{Users: true}))
	cfg.User, cfg.Password = cfg.User+"\n", cfg.Password+"\r\n"
	s := dial(t, nil, cfg)
	if err := s.Put(t.Context(), "k", []byte("v"), true); err != nil {
		t.Error(err)
	}
}

// An expired certificate of the store's is found out, and that it is the store's.
func TestSiteExpired(t *testing.T) {
	s := sitetest.Start(t, sitetest.Config{TLS: true, Expired: true})
	h, err := bootstrap.DialStore(t.Context(), siteConfig(s))
	if err == nil {
		h.Close()
	}
	if err == nil || !strings.Contains(err.Error(), "expired") || strings.Contains(err.Error(), "client") {
		t.Errorf("%v", err)
	}
}

// One of several members that cannot be trusted does not keep a job from the others.
func TestSiteMembers(t *testing.T) {
	good, bad := sitetest.Start(t, sitetest.Config{TLS: true}), sitetest.Start(t, sitetest.Config{TLS: true})
	cfg := siteConfig(good)
	cfg.Address = bad.Address + "," + strings.TrimPrefix(good.Address, "etcds://")
	s := dial(t, nil, cfg)
	if err := s.Put(t.Context(), "k", []byte("v"), true); err != nil {
		t.Error(err)
	}
}

// A user sees nothing but what it was granted, and is told so.
func TestSitePermissions(t *testing.T) {
	site := sitetest.Start(t, sitetest.Config{Users: true})
	cfg := siteConfig(site)
	cfg.Job = "other"
	s, err := bootstrap.DialStore(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	err = s.Put(t.Context(), "k", nil, true)
	if err == nil || errors.Is(err, bootstrap.ErrStoreAway) || !strings.Contains(err.Error(), `user "rank" may not`) ||
		!strings.Contains(err.Error(), "/tutti/other/") {
		t.Errorf("%v", err)
	}
	err = bootstrap.Register(t.Context(), s, bootstrap.NewRecord(0, 2, 1, nil), nil)
	if err == nil || !strings.Contains(err.Error(), `user "rank" may not`) {
		t.Errorf("Register: %v", err)
	}
}

// The proof of a password is good for minutes, here for a second; a lease, and the handle, outlive
// it.
func TestSiteTokenExpires(t *testing.T) {
	t.Parallel()
	const life = 1 // s
	site := sitetest.Start(t, sitetest.Config{Users: true, TokenTTL: life})
	cfg := siteConfig(site)
	cfg.LeaseTTL = brief
	s, ctx := dial(t, nil, cfg), context30(t)
	if err := s.Put(ctx, "mine", []byte("v"), true); err != nil {
		t.Fatal(err)
	}
	select {
	case <-s.Lost():
		t.Fatal(s.Err())
	case <-time.After(s.TTL() + 2*life*time.Second): // the lease was renewed after the token's end
	}
	if v, err := s.Get(ctx, "mine"); err != nil || string(v) != "v" {
		t.Errorf("Get: %q, %v", v, err)
	}
	if err := s.Put(ctx, "more", nil, true); err != nil {
		t.Error(err)
	}
	wctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if e := next(t, s.Watch(wctx, "mine")); !e.Exists || e.Err != nil {
		t.Errorf("%+v", e)
	}
}
