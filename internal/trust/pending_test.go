package trust

import (
	"net/netip"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func from(a byte) source { return source{addr: netip.AddrFrom4([4]byte{10, 0, 0, a})} }

// A full class loses the oldest connection of the source that holds most.
func TestPendingEvictsOldestOfLargestSource(t *testing.T) {
	c := newPending(8) // four of each class
	now := time.Unix(0, 0)
	enter := func(s source) (m, out *member) {
		now = now.Add(time.Second)
		m = &member{source: s}
		return m, c.enter(m, now)
	}
	one, _ := enter(from(1))
	a, _ := enter(from(2))
	b, _ := enter(from(2))
	d, out := enter(from(2))
	if out != nil {
		t.Fatalf("four of four, and %v has to go", out)
	}
	for i, want := range []*member{a, b, d} {
		if _, out = enter(from(2)); out != want {
			t.Errorf("flood's connection %d evicts %+v, want %+v", i, out, want)
		}
	}
	if one.class == nil {
		t.Error("the only connection of its source has gone")
	}
	// Of sources that hold alike many, the one whose oldest is oldest.
	c = newPending(8)
	one, _ = enter(from(1))
	for i := range byte(3) {
		enter(from(2 + i))
	}
	if _, out = enter(from(9)); out != one {
		t.Errorf("of four sources with one each, %+v goes, want %+v", out, one)
	}
}

// Connections that strangers can make do not displace those whose first message was valid.
func TestPendingKeepsOpenedFromSilent(t *testing.T) {
	c := newPending(8)
	now := time.Unix(0, 0)
	var honest []*member
	for range 4 {
		m := &member{source: from(1)}
		c.enter(m, now)
		if out := c.open(m, now); out != nil {
			t.Fatalf("%+v goes", out)
		}
		honest = append(honest, m)
	}
	for i := range 10000 {
		now = now.Add(time.Millisecond)
		c.enter(&member{source: from(1)}, now)
		if i%1000 == 0 && c.oldest() != honest[0] {
			t.Fatal("the oldest is another")
		}
	}
	for _, m := range honest {
		if m.class != &c.opened {
			t.Fatal("an opened connection has gone")
		}
	}
	if c.size() != 8 {
		t.Errorf("%d are held, want 8", c.size())
	}
	// Only opened ones make room for an opened one.
	m := &member{source: from(3)}
	c.enter(m, now)
	if out := c.open(m, now); out != honest[0] {
		t.Errorf("%+v goes, want the oldest opened one", out)
	}
	for range 8 {
		c.shed()
	}
	if c.size() != 0 || c.shed() != nil || c.oldest() != nil {
		t.Errorf("%d are left", c.size())
	}
}

// Invariants: a class stays within its room; a new connection is never displaced, nor one of a
// source that has fewer than another; and the lists agree with each other.
func TestPendingInvariants(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.IntRange(2, 12).Draw(t, "size")
		c := newPending(size)
		now := time.Unix(0, 0)
		var in []*member // by age
		check := func(k *class, m, out *member) {
			if out == nil {
				return
			}
			if out == m || out.class != nil {
				t.Fatal("the newcomer goes, or the one who goes is still in")
			}
			held := map[source]int{out.source: 1}
			for _, o := range in {
				if o.class == k && o != m {
					held[o.source]++
				}
				if o.class == k && o != m && o.source == out.source && o.since.Before(out.since) {
					t.Fatal("an older one of the same source stays")
				}
			}
			for _, n := range held {
				if n > held[out.source] {
					t.Fatalf("a source with %d loses one, and another has %d", held[out.source], n)
				}
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"enter": func(t *rapid.T) {
				now = now.Add(1)
				m := &member{source: from(rapid.Byte().Draw(t, "source") % 4)}
				check(&c.silent, m, c.enter(m, now))
				in = append(in, m)
			},
			"open": func(t *rapid.T) {
				now = now.Add(1)
				for _, m := range in {
					if m.class == &c.silent {
						check(&c.opened, m, c.open(m, now))
						return
					}
				}
			},
			"leave": func(t *rapid.T) {
				if len(in) > 0 {
					c.leave(rapid.SampledFrom(in).Draw(t, "who"))
				}
			},
			"": func(t *rapid.T) {
				n, oldest := 0, (*member)(nil)
				for _, m := range in {
					if m.class != nil {
						n++
						if oldest == nil || m.since.Before(oldest.since) {
							oldest = m
						}
					}
				}
				if c.size() != n || c.oldest() != oldest {
					t.Fatalf("%d are held, want %d; the oldest is %p, want %p", c.size(), n, c.oldest(), oldest)
				}
				for _, k := range []*class{&c.silent, &c.opened} {
					sum := 0
					for _, own := range k.sources {
						sum += own.Len()
					}
					if k.all.Len() > k.room || sum != k.all.Len() {
						t.Fatalf("%d members, by sources %d, room for %d", k.all.Len(), sum, k.room)
					}
				}
			},
		})
	})
}
