package membership

import (
	"bytes"
	"math"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// drawView makes a view as jobs make it, change by change.
func drawView(t *rapid.T) View {
	v := First(rapid.SliceOfN(rapid.SampledFrom([]uint64{0, 1, 0xffff, math.MaxUint64}), 0, 6).Draw(t, "first"))
	if rapid.Bool().Draw(t, "old") {
		v.Epoch = rapid.Uint64Range(1, 1<<40).Draw(t, "epoch")
	}
	for range rapid.IntRange(0, 12).Draw(t, "changes") {
		slot := rapid.IntRange(0, 8).Draw(t, "slot")
		switch rapid.IntRange(0, 3).Draw(t, "change") {
		case 0:
			v = v.Remove(slot)
		case 1, 2:
			v = v.Add(Peer{slot, rapid.Uint64Min(1).Draw(t, "incarnation")})
		case 3:
			v = v.Grow(slot)
		}
	}
	return v
}

func TestViewRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v, o := drawView(t), drawView(t)
		if err := v.check(); err != nil {
			t.Fatal(err)
		}
		b := v.Encode()
		got, err := DecodeView(b)
		if err != nil || !got.Equal(v) {
			t.Fatalf("%v came back as %v, %v", v, got, err)
		}
		if bytes.Equal(b, o.Encode()) != v.Equal(o) {
			t.Fatalf("%+v and %+v: equal bytes of unequal views, or unequal bytes of equal ones", v, o)
		}
		for i := range b {
			if _, err := DecodeView(b[:i]); err == nil {
				t.Fatalf("%d bytes of %d were taken for a view", i, len(b))
			}
		}
		if _, err := DecodeView(append(b, 0)); err == nil {
			t.Fatal("a byte too many was taken")
		}
	})
}

// A view changes into the next, and Diff, Active, Has and Subset say what a plain model says.
func TestViewChanges(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		views := []View{First(rapid.SliceOfN(rapid.Uint64Range(0, 2), 0, 5).Draw(t, "first"))}
		next := uint64(100)
		for range rapid.IntRange(1, 10).Draw(t, "changes") {
			v := views[len(views)-1]
			before := slices.Clone(v.Slots)
			slots := rapid.SliceOfNDistinct(rapid.IntRange(-1, 7), 0, 3, rapid.ID).Draw(t, "slots")
			var n View
			if rapid.Bool().Draw(t, "remove") {
				n = v.Remove(slots...)
				for _, s := range slots {
					if s >= 0 && n.at(s).Incarnation != 0 {
						t.Fatalf("%d is still in %v", s, n)
					}
				}
			} else {
				var incarnations []Peer
				for _, s := range slots {
					next++
					incarnations = append(incarnations, Peer{s, next})
				}
				n = v.Add(incarnations...)
			}
			if !slices.Equal(before, v.Slots) {
				t.Fatal("a view was changed in place")
			}
			if n.Epoch != v.Epoch+1 || n.check() != nil {
				t.Fatalf("%+v follows %+v: %v", n, v, n.check())
			}
			views = append(views, n)
		}
		last := views[len(views)-1]
		subset := func(v View) ([]int, uint64) {
			var ranks []int
			var incs []uint64
			for i, s := range views[0].Slots {
				if s.Incarnation != 0 {
					ranks, incs = append(ranks, i), append(incs, s.Incarnation)
				}
			}
			return v.Subset(ranks, incs)
		}
		epoch := uint64(0)
		for i, v := range views {
			var left, entered []int
			for s := range last.Slots {
				for j := i; j+1 < len(views); j++ {
					if a, b := views[j].at(s).Incarnation, views[j+1].at(s).Incarnation; a != 0 && a != b &&
						!slices.Contains(left, s) {
						left = append(left, s)
					}
				}
				if in := last.at(s).Incarnation; in != 0 && v.at(s).Incarnation != in {
					entered = append(entered, s)
				}
			}
			gotLeft, gotEntered := last.Diff(v.Epoch)
			if !slices.Equal(left, gotLeft) || !slices.Equal(entered, gotEntered) {
				t.Fatalf("from %+v to %+v: left %v, entered %v, expected %v and %v", v, last, gotLeft, gotEntered, left,
					entered)
			}
			active, e := subset(v)
			if e < epoch {
				t.Fatalf("a subgroup went back from epoch %d to %d", epoch, e)
			}
			epoch = e
			for _, a := range active {
				if v.Slots[a].Incarnation != views[0].Slots[a].Incarnation {
					t.Fatalf("rank %d of a subgroup is another incarnation", a)
				}
			}
			if was := views[0].Active(); (e == 0) != (len(active) == len(was)) ||
				i > 0 && e > 0 && views[e-1].Equal(views[0]) {
				t.Fatalf("subgroup of %v in %v: %v, epoch %d", was, v, active, e)
			}
		}
	})
}

// Of all members that are gone the last to go gives a subgroup its epoch, wherever it is in the
// list.
func TestSubsetEpoch(t *testing.T) {
	v := First([]uint64{1, 2, 3, 4}).Remove(2).Remove(0).Add(Peer{2, 30})
	active, epoch := v.Subset([]int{3, 0, 2, 1}, []uint64{4, 1, 3, 2})
	if !slices.Equal(active, []int{3, 1}) || epoch != 3 {
		t.Fatalf("got %v, epoch %d; want [3 1], 3", active, epoch)
	}
	if active, epoch = v.Subset([]int{1, 3}, []uint64{2, 4}); len(active) != 2 || epoch != 0 {
		t.Fatalf("got %v, epoch %d; want all, 0", active, epoch)
	}
	if active, _ = v.Subset([]int{1, 3, 99, -1}, []uint64{2}); !slices.Equal(active, []int{1}) {
		t.Fatalf("got %v; want [1]", active)
	}
}

// Removing or adding impossible incarnations changes only the epoch.
func TestViewIgnores(t *testing.T) {
	v := First([]uint64{1, 2})
	for _, n := range []View{v.Remove(), v.Remove(-1, 2, 99), v.Add(Peer{0, 1}),
		v.Add(Peer{0, 0}, Peer{-1, 5}, Peer{MaxSlots, 5}), v.Grow(1)} {
		if n.Epoch != 2 || !slices.Equal(n.Slots, v.Slots) {
			t.Errorf("got %+v", n)
		}
	}
	if n := v.Grow(MaxSlots + 1); n.Size() != MaxSlots {
		t.Errorf("grew to %d", n.Size())
	}
	if v.Has(0, 0) || v.Has(-1, 1) || v.Has(2, 1) || !v.Has(1, 2) {
		t.Error("Has is wrong")
	}
}

// The largest view, after two million epochs, and the largest report fit into 64 KiB.
func TestLargestFits(t *testing.T) {
	v := View{Epoch: 2_000_000, Slots: make([]Slot, MaxSlots)}
	r := Report{Epoch: math.MaxUint64, Seq: math.MaxUint64}
	for i := range v.Slots {
		v.Slots[i] = Slot{Incarnation: math.MaxUint64, Since: 1_000_000, Left: 1}
		r.Unreachable = append(r.Unreachable, Peer{i, math.MaxUint64})
		if i < maxVotes {
			r.Late = append(r.Late, Peer{i, math.MaxUint64})
		}
	}
	if err := v.check(); err != nil {
		t.Fatal(err)
	}
	for what, b := range map[string][]byte{"view": v.Encode(), "report": r.Encode()} {
		if len(b) >= 64<<10 {
			t.Errorf("the largest %s has %d bytes", what, len(b))
		}
	}
}

func TestDecodeViewErrors(t *testing.T) {
	inc := "\x00\x00\x00\x00\x00\x00\x00\x07"
	for in, want := range map[string]string{
		"":                             "begins with",
		"\xb1\x01\x00":                 "begins with",
		"\xa1":                         "ends within a number",
		"\xa1\x00\x00":                 "epoch 0",
		"\xa1\x01\x01":                 "items announced",
		"\xa1\x01\xff\xff\xff\xff\x0f": "items announced",
		"\xa1\x01\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f":     "number is too large",
		"\xa1\x01\x01\x02" + inc + "\x00":                      "before epoch 1",
		"\xa1\x01\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00": "without an incarnation",
		"\xa1\x01\x01\x01" + inc[1:] + "\x00":                  "within",
		"\xa1\x01\x01\x00\x02":                                 "left before epoch 1",
		"\xa1\x03\x01\x02" + inc + "\x03":                      "left before epoch 1",
		"\xa1\x01\x01\x00\x00\x00":                             "1 bytes too many",
		"\xa1\x81\x00\x01\x00\x00":                             "more digits",
	} {
		if v, err := DecodeView([]byte(in)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%x: got %v, %v; want an error with %q", in, v, err, want)
		}
	}
}

func TestDecodeReportErrors(t *testing.T) {
	inc := "\x00\x00\x00\x00\x00\x00\x00\x07"
	for in, want := range map[string]string{
		"\xa1\x01\x00\x00": "begins with",
		"\xb1\x01\x01":     "ends within a number",
		"\xb1\x01\x01\x01": "items announced",
		"\xb1\x01\x01\x01\x00" + inc + "\x01\x03" + inc + "\x00":         "too many",
		"\xb1\x01\x01\x01\xff\x1f" + inc + "\x00":                        "", // slot 4095
		"\xb1\x01\x01\x01\xff\x1f" + inc:                                 "ends within a number",
		"\xb1\x01\x01\x01\x80\x20" + inc:                                 "beyond 4095",
		"\xb1\x01\x01\x02\xff\x1f" + inc + "\x00" + inc:                  "beyond 4095",
		"\xb1\x01\x01\x01\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01" + inc: "beyond 4095",
		"\xb1\x01\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00":           "without an incarnation",
		"\xb1\x81\x00\x01\x00\x00":                                       "more digits",
	} {
		r, err := DecodeReport([]byte(in))
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%x: got %v, %v; want an error with %q", in, r, err, want)
		}
	}
}

func TestReportRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		slots := rapid.SliceOfNDistinct(rapid.IntRange(0, MaxSlots-1), 0, 8, rapid.ID).Draw(t, "slots")
		slices.Sort(slots)
		r := Report{Epoch: rapid.Uint64().Draw(t, "epoch"), Seq: rapid.Uint64().Draw(t, "seq")}
		for _, s := range slots {
			p := Peer{s, rapid.Uint64Min(1).Draw(t, "incarnation")}
			r.Unreachable = append(r.Unreachable, p)
			if rapid.Bool().Draw(t, "late") {
				r.Late = append(r.Late, p)
			}
		}
		b := r.Encode()
		got, err := DecodeReport(b)
		if err != nil || got.Epoch != r.Epoch || got.Seq != r.Seq || !slices.Equal(got.Unreachable, r.Unreachable) ||
			!slices.Equal(got.Late, r.Late) {
			t.Fatalf("%v came back as %v, %v", r, got, err)
		}
		for i := range b {
			if _, err := DecodeReport(b[:i]); err == nil {
				t.Fatalf("%d bytes of %d were taken for a report", i, len(b))
			}
		}
	})
}

func TestViewAndReportText(t *testing.T) {
	v := First([]uint64{1, 2, 3, 0, 0, 6, 0, 8, 9})
	for got, want := range map[string]string{
		v.String():                                   "epoch 1: ranks 0-2,5,7-8 of 9",
		v.Remove(1, 2).String():                      "epoch 2: ranks 0,5,7-8 of 9",
		First(nil).String():                          "epoch 1: ranks none of 0",
		(Peer{3, 0x9f}).String():                     "3/9f",
		(Report{Seq: 4}).String():                    "report #4 in epoch 0: cannot reach none",
		(Propose{Old: v, New: v.Remove(0)}).String(): "propose epoch 2: ranks 1-2,5,7-8 of 9; out 0",
	} {
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func FuzzDecodeView(f *testing.F) {
	v := First([]uint64{1, 0, math.MaxUint64})
	for _, v := range []View{v, v.Remove(0), v.Remove(0).Add(Peer{0, 9}, Peer{5, 7}), v.Grow(40), First(nil)} {
		f.Add(v.Encode())
	}
	f.Add([]byte("\xa1\x01\xff\x1f"))
	f.Fuzz(func(t *testing.T, b []byte) {
		v, err := DecodeView(b)
		if err != nil {
			return
		}
		if err := v.check(); err != nil {
			t.Fatalf("%x: %v", b, err)
		}
		if !bytes.Equal(v.Encode(), b) {
			t.Fatalf("%x is %v, which is %x", b, v, v.Encode())
		}
		if next := v.Remove(v.Active()...); next.Epoch != 0 && (len(next.Active()) != 0 || next.check() != nil) {
			t.Fatalf("%+v follows %+v", next, v)
		}
	})
}

func FuzzDecodeReport(f *testing.F) {
	for _, r := range []Report{{}, {Epoch: 3, Seq: 300, Unreachable: []Peer{{0, 1}, {1, 2}, {4095, 3}}},
		{Epoch: 3, Seq: 3, Late: []Peer{{2, 7}}}} {
		f.Add(r.Encode())
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := DecodeReport(b)
		if err == nil && !bytes.Equal(r.Encode(), b) {
			t.Fatalf("%x is %v, which is %x", b, r, r.Encode())
		}
	})
}
