package p2p

import (
	"fmt"
	"slices"
	"testing"
)

// The model of an Exposure: an owner that begins an operation, tells its peer, and leaves it early
// or stays, and a reader. Each thread is a list of accesses and of pairs that the processor keeps
// in order; all other accesses of a thread may happen in any order. The owner's buffer has two
// cells, which hold 0 before the operation, 1 during it, and 2 when the caller has written them
// after the return.
type access struct {
	name  string
	store bool
	cell  string
	value int
}

type order [2]string // names of accesses: the first before the second

var (
	modelOwner = []access{{"fill0", true, "data0", 1}, {"fill1", true, "data1", 1}, {"begin", true, "word", 7},
		{"tell", true, "message", 1}}
	modelLeave = []access{{"withdraw", true, "word", 0}, {"refill0", true, "data0", 2}, {"refill1", true, "data1", 2}}
	modelRead  = []access{{"hear", false, "message", 0}, {"load0", false, "data0", 0}, {"load1", false, "data1", 0},
		{"look", false, "word", 0}}

	ownerOrder = []order{{"fill0", "tell"}, {"fill1", "tell"}, {"begin", "tell"}, {"withdraw", "refill0"},
		{"withdraw", "refill1"}}
	// All processors see one thread's stores to one cell in order.
	coherence   = []order{{"begin", "withdraw"}}
	readerOrder = []order{{"hear", "load0"}, {"hear", "load1"}, {"load0", "look"}, {"load1", "look"}}
)

// explore runs the threads in every way that the orders allow and returns what is wrong with one of
// them: data is accepted that is not the operation's, or data of an owner that stays is refused.
// With buffers the stores of the owner lie in a queue, from which they reach the memory in order
// but later, unless drain names them: these wait until the queue is empty, as a locked instruction
// does.
func explore(owner []access, orders []order, stays, buffers bool, drain string) string {
	threads := [2][]access{owner, modelRead}
	type state struct {
		memory map[string]int
		queue  []access
		done   [2]map[string]bool
		got    map[string]int
	}
	var run func(s state) string
	clone := func(s state) state {
		c := state{map[string]int{}, slices.Clone(s.queue), [2]map[string]bool{{}, {}}, map[string]int{}}
		for k, v := range s.memory {
			c.memory[k] = v
		}
		for k, v := range s.got {
			c.got[k] = v
		}
		for i := range s.done {
			for k := range s.done[i] {
				c.done[i][k] = true
			}
		}
		return c
	}
	seen := map[string]bool{}
	run = func(s state) string {
		key := fmt.Sprint(s)
		if seen[key] {
			return ""
		}
		seen[key] = true
		if len(s.done[1]) == len(modelRead) {
			switch accepted := s.got["look"] == 7; {
			case s.got["hear"] == 0: // there is nothing to read yet
			case accepted && (s.got["load0"] != 1 || s.got["load1"] != 1):
				return fmt.Sprintf("accepts %v", s.got)
			case !accepted && stays:
				return fmt.Sprintf("refuses %v", s.got)
			}
			return ""
		}
		if len(s.queue) > 0 {
			c := clone(s)
			c.memory[c.queue[0].cell] = c.queue[0].value
			c.queue = c.queue[1:]
			if bad := run(c); bad != "" {
				return bad
			}
		}
		for i, thread := range threads {
		next:
			for _, a := range thread {
				if s.done[i][a.name] {
					continue
				}
				for _, o := range orders {
					if o[1] == a.name && slices.ContainsFunc(thread, func(b access) bool { return b.name == o[0] }) &&
						!s.done[i][o[0]] {
						continue next
					}
				}
				if a.name == drain && len(s.queue) > 0 {
					continue
				}
				c := clone(s)
				c.done[i][a.name] = true
				switch {
				case !a.store:
					c.got[a.name] = c.memory[a.cell]
				case buffers && a.name != drain:
					c.queue = append(c.queue, a)
				default:
					c.memory[a.cell] = a.value
				}
				if bad := run(c); bad != "" {
					return bad
				}
			}
		}
		return ""
	}
	return run(state{map[string]int{}, nil, [2]map[string]bool{{}, {}}, map[string]int{}})
}

// TestExposureOrder: with the orders that Exposure documents nothing wrong is accepted and nothing
// right refused, on a processor that keeps no others, with and without store buffers; without any
// one of them something is.
func TestExposureOrder(t *testing.T) {
	leaves := slices.Concat(modelOwner, modelLeave)
	all := slices.Concat(ownerOrder, coherence, readerOrder)
	for _, buffers := range []bool{false, true} {
		if bad := explore(leaves, all, false, buffers, "withdraw"); bad != "" {
			t.Errorf("an owner that leaves, buffers %v: %s", buffers, bad)
		}
		if bad := explore(modelOwner, all, true, buffers, "withdraw"); bad != "" {
			t.Errorf("an owner that stays, buffers %v: %s", buffers, bad)
		}
	}
	for _, o := range slices.Concat(ownerOrder, readerOrder) {
		without := slices.DeleteFunc(slices.Clone(all), func(p order) bool { return p == o })
		if explore(leaves, without, false, false, "") == "" && explore(modelOwner, without, true, false, "") == "" {
			t.Errorf("without %s before %s nothing goes wrong: the model does not see it", o[0], o[1])
		}
	}
}
