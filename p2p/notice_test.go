package p2p_test

import (
	"bytes"
	"context"
	"sync"
	"testing"

	"tutti/p2p"
)

// A notice reaches a peer that has not opened the channel yet, of several the latest counts, and
// long ones arrive whole.
func TestNoticesCarryLatestValue(t *testing.T) {
	all := cluster(t, 2, 64<<10, nil)
	defer closeAll(all)
	name := p2p.Name{Number: 2}
	c, err := all[0].Open(name, p2p.Epoch{}, ranks(2), nil, true)
	if err != nil {
		t.Fatal(err)
	}
	long := bytes.Repeat([]byte{7}, p2p.MaxNotice)
	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	wg.Go(func() {
		all[0].Lock()
		defer all[0].Unlock()
		for i := range 100 { // before there is a link
			c.Notice([]int{0, 1}, 0, []byte{byte(i)})
		}
		w := patient(ctx)
		for told := false; c.Reach(w, 1) == nil; told = true {
			if !told {
				c.Notice([]int{1}, 1, long)
			}
		}
	})
	d, err := all[1].Open(name, p2p.Epoch{}, ranks(2), nil, true)
	if err != nil {
		t.Fatal(err)
	}
	all[1].Lock()
	defer all[1].Unlock()
	var last [p2p.NoticeKeys][]byte
	d.OnNotice(func(slot, key int, value []byte) {
		if slot != 0 {
			t.Errorf("slot %d has told", slot)
		}
		if old := last[key]; key == 0 && old != nil && value[0] < old[0] {
			t.Errorf("%d after %d", value[0], old[0])
		}
		last[key] = value
	})
	w := patient(context.Background())
	for last[0] == nil || last[0][0] != 99 || !bytes.Equal(last[1], long) {
		if err := all[1].Progress(w); err != nil {
			t.Fatalf("%v; the last notices: %v, %d bytes", err, last[0], len(last[1]))
		}
	}
}

// A link that comes up again sends the notices again; those of an old incarnation are dropped.
func TestNoticesAreResentAfterReconnect(t *testing.T) {
	all := cluster(t, 2, 64<<10, nil)
	defer closeAll(all)
	cs := tagged(t, all)
	var heard []byte
	hear := func() {
		t.Helper()
		all[1].Lock()
		defer all[1].Unlock()
		heard = nil
		cs[1].OnNotice(func(_, _ int, value []byte) { heard = value })
		w := patient(context.Background())
		for heard == nil {
			if err := cs[1].Reach(w, 0); err != nil {
				t.Fatal(err)
			}
		}
	}
	all[0].Lock()
	cs[0].Notice([]int{1}, 0, []byte{1})
	all[0].Unlock()
	hear()
	if heard[0] != 1 {
		t.Fatalf("heard %v", heard)
	}
	for r, p := range all { // both take the link for lost, and begin anew
		p.MarkDead(1-r, 0, p2p.ErrPeerGone)
	}
	all[0].Lock()
	cs[0].Notice([]int{1}, 0, []byte{2})
	all[0].Unlock()
	for r, p := range all {
		p.Expect(1-r, uint64(1-r)+1)
	}
	hear()
	if heard[0] != 2 {
		t.Fatalf("heard %v after the link came up again, want the latest", heard)
	}
}

// A value that another rank passes on arrives without a link to the rank whose value it is, also at
// a rank that opens the channel later.
func TestNoticeIsPassedOn(t *testing.T) {
	all := cluster(t, 3, 64<<10, nil)
	defer closeAll(all)
	name := p2p.Name{Number: 2}
	c, err := all[1].Open(name, p2p.Epoch{}, ranks(3), nil, true)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	wg.Go(func() {
		all[1].Lock()
		defer all[1].Unlock()
		c.Relay([]int{1, 2}, 0, 1, []byte("before there is a link"))
		c.Relay([]int{1, 2}, 0, 0, []byte("early"))
		w := patient(ctx)
		for told := false; c.Reach(w, 2) == nil; told = true {
			if !told {
				c.Relay([]int{1, 2}, 0, 0, []byte("late"))
			}
		}
	})
	w := patient(context.Background())
	for all[2].Linked(1) == 0 {
		all[2].Lock()
		err := all[2].Progress(w)
		all[2].Unlock()
		if err != nil {
			t.Fatal(err)
		}
	}
	d, err := all[2].Open(name, p2p.Epoch{}, ranks(3), nil, true)
	if err != nil {
		t.Fatal(err)
	}
	heard := map[int]string{}
	all[2].Lock()
	d.OnNotice(func(slot, key int, value []byte) {
		if slot != 0 {
			t.Errorf("slot %d has told %q", slot, value)
		}
		heard[key] = string(value)
	})
	for heard[0] != "late" || heard[1] != "before there is a link" {
		if err := all[2].Progress(w); err != nil {
			t.Fatalf("%v; heard %v", err, heard)
		}
	}
	all[2].Unlock()
	if all[2].Linked(0) != 0 {
		t.Error("there is a link to the rank whose value was passed on")
	}
}

// A link that was requested is made although no operation waits for the peer.
func TestRequestedLinkIsMade(t *testing.T) {
	for r := range 2 {
		all := cluster(t, 2, 64<<10, nil)
		c := tagged(t, all)[r]
		all[r].Lock()
		c.Request(1 - r)
		all[r].Unlock()
		for w := patient(context.Background()); all[r].Linked(1-r) == 0; {
			all[r].Lock()
			err := all[r].Progress(w)
			all[r].Unlock()
			if err != nil {
				t.Fatalf("rank %d: %v", r, err)
			}
		}
		closeAll(all)
	}
}
