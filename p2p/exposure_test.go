//go:build !race

package p2p_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"tutti/p2p"
)

// exposure returns an exposure of a proxy and its board, as a peer maps it.
func exposure(t *testing.T, p *p2p.Proxy) *p2p.Exposure {
	t.Helper()
	p.Lock()
	defer p.Unlock()
	e, err := p.NewExposure()
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// mapBoard maps the board of e, which is of the rank in slot, at c's rank.
func mapBoard(t *testing.T, p *p2p.Proxy, c *p2p.Channel, slot int, e *p2p.Exposure) *p2p.Mapping {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	board, _ := e.Place()
	p.Lock()
	defer p.Unlock()
	m, err := c.Map(patient(ctx), slot, board)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// TestExposureTickets: no ticket comes back, whichever exposure and word it was of, and a ticket is
// valid from Begin to Withdraw alone.
func TestExposureTickets(t *testing.T) {
	all := cluster(t, 2, 0, nil)
	defer closeAll(all)
	owner, reader := all[0], all[1]
	open(t, owner, 1, 2)
	c := open(t, reader, 1, 2)
	seen := map[uint64]bool{}
	places := map[[2]uint64]bool{}
	var held []*p2p.Exposure
	for i := range 3000 { // several boards
		e := exposure(t, owner)
		held = append(held, e)
		region, off := e.Place()
		if places[[2]uint64{region, uint64(off)}] {
			t.Fatal("two exposures have one word")
		}
		places[[2]uint64{region, uint64(off)}] = true
		ticket := e.Begin()
		if seen[ticket] || ticket == 0 {
			t.Fatalf("ticket %d again", ticket)
		}
		seen[ticket] = true
		if i%500 != 0 {
			continue
		}
		m := mapBoard(t, reader, c, 0, e)
		tk, err := p2p.NewTicket(m, off, ticket)
		if err != nil {
			t.Fatal(err)
		}
		if !tk.Valid() {
			t.Error("a ticket is void before Withdraw")
		}
		if e.Withdraw(); tk.Valid() {
			t.Error("a ticket is valid after Withdraw")
		}
		if e.Begin(); tk.Valid() {
			t.Error("a ticket is valid in the next operation")
		}
		for _, bad := range []int{-64, 1, len(m.Mem), len(m.Mem) - 4} {
			if _, err := p2p.NewTicket(m, bad, ticket); err == nil {
				t.Errorf("a ticket at offset %d of %d bytes", bad, len(m.Mem))
			}
		}
		m.Release()
	}
	owner.Lock()
	for _, e := range held {
		owner.FreeExposure(e)
	}
	owner.Unlock()
	for range held {
		region, off := exposure(t, owner).Place()
		if !places[[2]uint64{region, uint64(off)}] {
			t.Fatal("words that were given back are not used again")
		}
	}
}

// TestExposureRaces: a reader that races with an owner that leaves at any moment never accepts
// later contents of the memory.
func TestExposureRaces(t *testing.T) {
	all := cluster(t, 2, 0, nil)
	defer closeAll(all)
	open(t, all[0], 1, 2)
	c := open(t, all[1], 1, 2)
	e := exposure(t, all[0])
	m := mapBoard(t, all[1], c, 0, e)
	defer m.Release()
	_, off := e.Place()
	data := make([]uint64, 64)
	var told, stop, accepted atomic.Uint64
	done := make(chan struct{})
	go func() {
		defer close(done)
		got := make([]uint64, len(data))
		for stop.Load() == 0 {
			ticket := told.Load()
			if ticket == 0 {
				continue
			}
			tk, err := p2p.NewTicket(m, off, ticket)
			if err != nil {
				t.Error(err)
				return
			}
			copy(got, data)
			if !tk.Valid() {
				continue
			}
			accepted.Add(1)
			for _, v := range got {
				if v != ticket {
					t.Errorf("data of %d is accepted for %d", v, ticket)
					return
				}
			}
		}
	}()
	began := time.Now()
	enough := func() bool {
		took := time.Since(began)
		return took > time.Second && accepted.Load() > 0 || took > 30*time.Second
	}
	for ticket := uint64(0); !enough(); {
		for i := range data {
			data[i] = ticket + 1 // the next
		}
		ticket = e.Begin()
		told.Store(ticket)
		for range ticket % 64 {
			told.Load()
		}
		e.Withdraw()
	}
	stop.Store(1)
	<-done
	if accepted.Load() == 0 {
		t.Error("no read was accepted")
	}
}
