package rma

import (
	"errors"
	"testing"

	"tutti/mem"
	"tutti/p2p"
)

// here reaches the memory of a table in this process.
type here struct{ *Table }

func (h here) Reach(x *mem.Remote, _ mem.Rights) (Target, error) {
	if e := h.Find(x.ID, x.Generation); e != nil {
		return e, nil
	}
	return nil, p2p.ErrRevoked
}
func (here) Drop(Target) {}
func (here) Signalled()  {}

// A put that was refused keeps back the signals that are ordered after it until Poll has returned
// its completion.
func TestRefusedPutKeepsSignalsBack(t *testing.T) {
	const strong, same, other = 0, 8, 16 // offsets of words
	region := mem.NewRegion(7, mem.Host(make([]byte, 64), mem.Anywhere), false, false, nil)
	words := &mem.Remote{ID: 7, Generation: 1, Len: 64, Rights: mem.Signal, Loc: mem.Anywhere}
	withdrawn := &mem.Remote{ID: 7, Generation: 2, Len: 64, Rights: mem.Write, Loc: mem.Anywhere}
	var table Table
	if err := table.Expose(region, words); err != nil {
		t.Fatal(err)
	}
	var c Copier
	c.Reset(here{&table}, func() error { return nil })
	signal := func(id, value uint64, words ...p2p.Signal) {
		t.Helper()
		for _, s := range words {
			s.Value = value
			if err := c.Put(id, mem.Memory{}, nil, 0, s); err != nil {
				t.Fatal(err)
			}
			id++
		}
	}
	all := []p2p.Signal{{At: words, Offset: strong, Strong: true}, {At: words, Offset: same},
		{At: words, Offset: other}}
	if err := c.Put(0, mem.Host(make([]byte, 8), mem.Anywhere), withdrawn, 0, all[1]); err != nil {
		t.Fatal(err)
	}
	signal(1, 5, all...)
	var out [8]p2p.Completion
	if n := c.Poll(out[:]); n != 4 {
		t.Fatalf("%d completions of 4 operations", n)
	}
	for _, e := range out[:4] {
		if want := []error{p2p.ErrRevoked, p2p.ErrUnplaced, p2p.ErrUnplaced, nil}[e.ID]; !errors.Is(e.Err, want) {
			t.Errorf("operation %d: %v, want %v", e.ID, e.Err, want)
		}
	}
	for off, want := range map[int]uint64{strong: 0, same: 0, other: 5} {
		if v := region.Word(off).Load(); v != want {
			t.Errorf("the word at %d is %d, want %d", off, v, want)
		}
	}
	signal(4, 6, all...)
	for range c.Poll(out[:]) {
	}
	for off := strong; off <= other; off += mem.WordSize {
		if v := region.Word(off).Load(); v != 6 {
			t.Errorf("after the completion was returned: the word at %d is %d, want 6", off, v)
		}
	}
}

// shut is memory of a peer that has closed its link, which this end has yet to read.
type shut struct{ here }

func (shut) Enter(mem.Rights, uint64, uint64) ([]byte, error) { return nil, p2p.ErrPeerGone }
func (shut) Leave()                                           {}
func (s shut) Reach(x *mem.Remote, rights mem.Rights) (Target, error) {
	if rights == mem.Read {
		return s.here.Reach(x, rights)
	}
	return s, nil
}

// A flush does not end well after a put that has ended with the link.
func TestFlushAfterPutThatEndsWithTheLink(t *testing.T) {
	const long = share + chunk
	region := mem.NewRegion(7, mem.Host(make([]byte, long), mem.Anywhere), false, false, nil)
	x := &mem.Remote{ID: 7, Generation: 1, Len: long, Rights: mem.Read | mem.Write, Loc: mem.Anywhere}
	var table Table
	if err := table.Expose(region, x); err != nil {
		t.Fatal(err)
	}
	for _, alone := range []bool{false, true} { // the put ends before the flush begins
		var c Copier
		c.Reset(shut{here{&table}}, func() error { return nil })
		local := mem.Host(make([]byte, long), mem.Anywhere)
		want := 2
		if !alone {
			if want = 3; c.Get(0, local, x, 0) != nil {
				t.Fatal("the get does not begin")
			}
		}
		if err := errors.Join(c.Put(1, local, x, 0, p2p.Signal{}), c.FlushPuts(2)); err != nil {
			t.Fatal(err)
		}
		var out [8]p2p.Completion
		ended := 0
		for range 4 {
			n := c.Poll(out[:])
			for _, o := range out[:n] {
				if want := []error{nil, p2p.ErrPeerGone, p2p.ErrPeerGone}[o.ID]; !errors.Is(o.Err, want) {
					t.Errorf("alone %v: operation %d ends with %v, want %v", alone, o.ID, o.Err, want)
				}
			}
			ended += n
		}
		if ended != want {
			t.Errorf("alone %v: %d operations have ended, want %d", alone, ended, want)
		}
	}
}
