package p2p

import (
	"cmp"
	"slices"
)

// postings are the receives of the tagged lane that no message has matched. Their orders are those
// of posting, and lie between head and tail.
type postings struct {
	lists      map[posting]*postingList
	head, tail int64
}

// posting is what a receive takes: messages from a slot or AnySlot, with a tag or AnyTag.
type posting struct {
	from int
	tag  int64
}

// postingList is a list of receives that take the same, by order. It is not empty.
type postingList struct{ first, last *RecvReq }

// add adds a receive behind all others.
func (p *postings) add(r *RecvReq) {
	p.tail++
	r.order = p.tail
	key := posting{r.from, r.tag}
	l := p.lists[key]
	if l == nil {
		p.lists[key] = &postingList{r, r}
		return
	}
	r.before, l.last.after, l.last = l.last, r, r
}

// putBack adds a receive before all others.
func (p *postings) putBack(r *RecvReq) {
	p.head--
	r.order = p.head
	key := posting{r.from, r.tag}
	l := p.lists[key]
	if l == nil {
		p.lists[key] = &postingList{r, r}
		return
	}
	r.after, l.first.before, l.first = l.first, r, r
}

// remove removes a receive, and reports whether it was posted.
func (p *postings) remove(r *RecvReq) bool {
	if r.order == 0 {
		return false
	}
	key := posting{r.from, r.tag}
	l := p.lists[key]
	if r.before != nil {
		r.before.after = r.after
	} else {
		l.first = r.after
	}
	if r.after != nil {
		r.after.before = r.before
	} else {
		l.last = r.before
	}
	r.before, r.after, r.order = nil, nil, 0
	if l.first == nil {
		delete(p.lists, key)
	}
	return true
}

// take returns the first receive that takes a message from this slot with this tag, nil if there is
// none. The receive stays.
func (p *postings) take(slot int, tag uint64) (first *RecvReq) {
	if len(p.lists) == 0 {
		return nil
	}
	for _, key := range [...]posting{{slot, int64(tag)}, {AnySlot, int64(tag)}, {slot, AnyTag}, {AnySlot, AnyTag}} {
		if l := p.lists[key]; l != nil && (first == nil || l.first.order < first.order) {
			first = l.first
		}
	}
	return first
}

// from returns the receives that take messages from this slot, in the order of posting.
func (p *postings) from(slot int) (all []*RecvReq) {
	for key, l := range p.lists {
		if key.from == slot || key.from == AnySlot {
			for r := l.first; r != nil; r = r.after {
				all = append(all, r)
			}
		}
	}
	slices.SortFunc(all, func(a, b *RecvReq) int { return cmp.Compare(a.order, b.order) })
	return all
}
