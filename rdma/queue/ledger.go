package queue

import (
	"fmt"

	"tutti/rdma"
)

// condition is what a ledger's queue pair can do.
type condition uint8

const (
	ready    condition = iota
	degraded           // there are orphans, and a flush behind them
	failed             // nothing is taken until renew
)

func (c condition) String() string { return [...]string{"ready", "degraded", "failed"}[c] }

// refusal is why a reservation was refused.
type refusal uint8

const (
	granted refusal = iota
	full            // at present
	never           // more than the queue holds
	barred          // degraded or failed
)

// record describes requests of one send queue that were posted with one call. All but the last are
// unsignaled.
type record struct {
	first  uint32 // number of the first request
	n      int    // requests, each a credit
	orphan bool   // the last one is unsignaled too
	flush  bool   // made by the queue itself
	ended  bool
	status rdma.Status // the first one that is no success
	vendor uint32
	op     rdma.Opcode
	owner  *Transfer // nil of a flush
}

// last returns the number of the last request.
func (r *record) last() uint32 { return r.first + uint32(r.n) - 1 }

// ledger accounts for a send queue. It is a state machine without clock, lock or calls: its user
// posts what it says and tells it what happened. Numbers of requests wrap around.
type ledger struct {
	depth    int // credits there are
	inUse    int // the counter of all users
	reserved int
	orphans  int // records
	state    condition
	next     uint32   // number of the next request
	records  []record // a ring, in the order of posting
	head, n  int
}

func newLedger(depth int) ledger { return ledger{depth: depth, records: make([]record, depth)} }

// at returns the i-th oldest record.
func (l *ledger) at(i int) *record {
	if i += l.head; i >= len(l.records) {
		i -= len(l.records)
	}
	return &l.records[i]
}

// fits returns whether n credits could be reserved.
func (l *ledger) fits(n int) refusal {
	switch {
	case l.state != ready:
		return barred
	case n > l.depth:
		return never
	case l.inUse+n > l.depth:
		return full
	}
	return granted
}

// reserve takes n credits if they are free.
func (l *ledger) reserve(n int) refusal {
	r := l.fits(n)
	if r == granted {
		l.inUse += n
		l.reserved += n
	}
	return r
}

// release gives back reserved credits.
func (l *ledger) release(n int) {
	l.inUse -= n
	l.reserved -= n
}

// write makes a record of n reserved credits, for requests that are posted next, and returns the
// number of the first one.
func (l *ledger) write(n int, op rdma.Opcode, owner *Transfer) uint32 {
	l.reserved -= n
	*l.at(l.n) = record{first: l.next, n: n, op: op, owner: owner}
	l.n++
	l.next += uint32(n)
	return l.next - uint32(n)
}

// posted says that only the first k requests of the latest record were posted, and releases the
// credits of the others. A record without requests is removed; any other becomes an orphan, and the
// queue is degraded.
func (l *ledger) posted(k int) {
	r := l.at(l.n - 1)
	l.inUse -= r.n - k
	l.next -= uint32(r.n - k)
	if r.n = k; k == 0 {
		l.n--
		*r = record{}
		return
	}
	r.orphan = true
	l.orphans++
	l.state = max(l.state, degraded)
}

// flush makes a record for a signaled request behind the orphans, and returns its number. It
// reports false if there is no credit for it. It asks neither for the state nor for a reservation.
func (l *ledger) flush() (uint32, bool) {
	if l.inUse == l.depth {
		return 0, false
	}
	l.inUse++
	l.reserved++
	number := l.write(1, rdma.Write, nil)
	l.at(l.n - 1).flush = true
	return number, true
}

// loose returns whether the latest record is an orphan: nothing says when it has ended.
func (l *ledger) loose() bool { return l.n > 0 && l.at(l.n-1).orphan }

// verdict is what a completion meant.
type verdict uint8

const (
	expected verdict = iota
	stray            // of no request that has not completed
	skipped          // completions of earlier requests are missing
)

// complete ends the record whose last request has the given number, and with it the orphans in
// front of it. A completion with an error of any other request is recorded only. The queue has
// failed if status is no success. It returns the kind of the record's first request too.
func (l *ledger) complete(number uint32, status rdma.Status, vendor uint32) (verdict, rdma.Opcode) {
	for i := range l.n {
		r := l.at(i)
		if offset := number - r.first; offset >= uint32(r.n) {
			if !r.ended && !r.orphan && l.behind(i, number) {
				return skipped, r.op
			}
			continue
		}
		if r.ended || status == rdma.Success && (r.orphan || number != r.last()) {
			return stray, 0
		}
		if status != rdma.Success {
			l.state = failed
		}
		for j := range i {
			l.end(l.at(j))
		}
		if r.status == rdma.Success {
			r.status, r.vendor = status, vendor
		}
		if number == r.last() {
			l.end(r)
		}
		return expected, r.op
	}
	return stray, 0
}

// behind returns whether a request is one of the records behind the i-th.
func (l *ledger) behind(i int, number uint32) bool {
	return number-l.at(i).first < l.next-l.at(i).first
}

// end releases the credits of a record.
func (l *ledger) end(r *record) {
	if r.ended {
		return
	}
	r.ended = true
	l.inUse -= r.n
	if r.orphan {
		l.orphans--
	}
	if r.flush && r.status == rdma.Success && l.state == degraded && l.orphans == 0 {
		l.state = ready
	}
}

// pop removes the oldest record if it has ended.
func (l *ledger) pop() (record, bool) {
	if l.n == 0 || !l.at(0).ended {
		return record{}, false
	}
	r := *l.at(0)
	*l.at(0) = record{}
	if l.head++; l.head == len(l.records) {
		l.head = 0
	}
	l.n--
	return r, true
}

// abandon ends all records as flushed: the queue pair was reset or closed.
func (l *ledger) abandon() {
	l.state = failed
	for i := range l.n {
		r := l.at(i)
		if !r.ended && r.status == rdma.Success {
			r.status = rdma.Flushed
		}
		l.end(r)
	}
}

// renew begins another life, without records and reservations. Those of the life before must not be
// released. All records must have been popped.
func (l *ledger) renew() {
	l.inUse, l.reserved, l.state = 0, 0, ready
}

// check returns how the ledger contradicts itself, or nil.
func (l *ledger) check() error {
	sum, orphans := 0, 0
	for i := range l.n {
		r := l.at(i)
		if !r.ended {
			sum += r.n
		}
		if r.orphan && !r.ended {
			orphans++
		}
	}
	switch {
	case l.inUse != sum+l.reserved:
		return fmt.Errorf("%d credits in use, %d of records and %d reserved", l.inUse, sum, l.reserved)
	case l.inUse > l.depth || l.reserved < 0 || sum < 0:
		return fmt.Errorf("%d of %d credits in use, %d reserved", l.inUse, l.depth, l.reserved)
	case orphans != l.orphans || orphans > 0 && l.state == ready:
		return fmt.Errorf("%d orphans, %d counted, in a queue that is %v", orphans, l.orphans, l.state)
	}
	return nil
}
