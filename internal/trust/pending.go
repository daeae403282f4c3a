package trust

import (
	"container/list"
	"time"
)

// pending decides which unauthenticated connections are kept. It is pure: no I/O, no clock.
//
// A connection is silent until its first message has arrived, and opened from then on. Each class
// has its own room, so that connections which any stranger can make displace each other, but never
// one that has sent what only a member of the job can make, or a client where clients are taken. If
// a class is full, the source with the most connections in it loses its oldest one; of sources with
// equally many, the one with the oldest.
type pending struct {
	silent, opened class
}

// member is an unauthenticated connection.
type member struct {
	source source
	since  time.Time // when it entered its class
	class  *class    // nil: in none
	all    *list.Element
	own    *list.Element // in the list of its source
	who    *candidate    // belongs to the Acceptor
}

// class is the silent or the opened connections.
type class struct {
	room    int
	all     *list.List // of *member, oldest first
	sources map[source]*list.List
}

// newPending returns a pending for at most size connections, and at least one of each class.
func newPending(size int) *pending {
	room := max(size/2, 1)
	return &pending{silent: newClass(room), opened: newClass(room)}
}

func newClass(room int) class {
	return class{room: room, all: list.New(), sources: map[source]*list.List{}}
}

// size returns the number of connections.
func (c *pending) size() int { return c.silent.all.Len() + c.opened.all.Len() }

// enter adds a new connection and returns the one that it displaces, or nil.
func (c *pending) enter(m *member, now time.Time) (out *member) { return c.silent.add(m, now) }

// open moves m, whose first message was valid, and returns the connection that it displaces, or
// nil.
func (c *pending) open(m *member, now time.Time) (out *member) {
	c.leave(m)
	return c.opened.add(m, now)
}

// leave removes m, if it is in.
func (c *pending) leave(m *member) {
	if m.class != nil {
		m.class.remove(m)
	}
}

// shed removes and returns the least valuable connection, or nil.
func (c *pending) shed() *member {
	for _, k := range []*class{&c.silent, &c.opened} {
		if out := k.victim(); out != nil {
			k.remove(out)
			return out
		}
	}
	return nil
}

// oldest returns the connection that has been in its class for longest, or nil.
func (c *pending) oldest() *member {
	a, b := first(c.silent.all), first(c.opened.all)
	if a == nil || b != nil && b.since.Before(a.since) {
		return b
	}
	return a
}

func (k *class) add(m *member, now time.Time) (out *member) {
	if k.all.Len() >= k.room {
		out = k.victim()
		k.remove(out)
	}
	own := k.sources[m.source]
	if own == nil {
		own = list.New()
		k.sources[m.source] = own
	}
	m.class, m.since = k, now
	m.all, m.own = k.all.PushBack(m), own.PushBack(m)
	return out
}

func (k *class) remove(m *member) {
	k.all.Remove(m.all)
	own := k.sources[m.source]
	if own.Remove(m.own); own.Len() == 0 {
		delete(k.sources, m.source)
	}
	m.class, m.all, m.own = nil, nil, nil
}

// victim returns the member to displace, or nil. It visits all sources, of which there are at most
// as many as members.
func (k *class) victim() *member {
	var most *list.List
	for _, own := range k.sources {
		if most == nil || own.Len() > most.Len() || own.Len() == most.Len() &&
			first(own).since.Before(first(most).since) {
			most = own
		}
	}
	if most == nil {
		return nil
	}
	return first(most)
}

func first(l *list.List) *member {
	if e := l.Front(); e != nil {
		return e.Value.(*member)
	}
	return nil
}
