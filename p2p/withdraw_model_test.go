package p2p

import (
	"fmt"
	"maps"
	"slices"
	"testing"
)

// The model of Withdraw over shared memory (p2p/shm/onesided_linux.go): a storer that puts two
// chunks, each after it has announced it and asked for the grant, and an owner that withdraws the
// grant and then uses the memory itself. As in the model of Exposure a thread is a list of accesses
// and of pairs that the processor keeps in order; all others may happen in any order, and with
// buffers stores reach the memory late, but for those that wait until the buffer is empty.
type guarded struct {
	access
	// when says whether the access takes place, after what its thread has loaded; nil: always
	when func(got map[string]int) bool
	// ready says whether the access may happen yet: a loop that looks until it may; nil: always
	ready func(memory, got map[string]int) bool
}

const (
	granted = 5
	put     = 9
	own     = 2
)

func load(name, cell string) guarded { return guarded{access: access{name, false, cell, 0}} }
func store(name, cell string, v int) guarded {
	return guarded{access: access{name, true, cell, v}}
}

func putIf(name, look, cell string) guarded {
	return guarded{access: access{name, true, cell, put}, when: func(got map[string]int) bool {
		return got[look] == granted
	}}
}

var (
	storer = []guarded{
		store("raise1", "busy", 1), load("look1", "grant"), putIf("put1", "look1", "data1"), store("lower1", "busy", 2),
		store("raise2", "busy", 3), load("look2", "grant"), putIf("put2", "look2", "data2"), store("lower2", "busy", 4),
	}
	withdrawer = []guarded{
		store("clear", "grant", 0), load("see", "busy"),
		{access: access{"wait", false, "busy", 0}, ready: func(memory, got map[string]int) bool {
			seen, looked := got["see"]
			return looked && (seen%2 == 0 || memory["busy"] != seen)
		}},
		store("use1", "data1", own), store("use2", "data2", own),
	}
	withdrawOrder = []order{
		{"raise1", "look1"}, {"look1", "put1"}, {"put1", "lower1"},
		{"raise2", "look2"}, {"look2", "put2"}, {"put2", "lower2"},
		{"clear", "see"}, {"wait", "use1"}, {"wait", "use2"},
	}
	// All threads see one thread's stores to one cell in order, and later loads of a cell return no
	// older values than earlier ones.
	withdrawCoherence = []order{{"raise1", "lower1"}, {"lower1", "raise2"}, {"raise2", "lower2"}, {"see", "wait"},
		{"look1", "look2"}}
	// The stores that wait until the buffer is empty: those of words.
	words = []string{"raise1", "lower1", "raise2", "lower2", "clear"}
)

// withdraws runs both threads in every way that the orders allow and returns what is wrong with one
// of them: a put that reaches the memory after the owner has begun to use it, or an owner that
// waits for ever.
func withdraws(orders []order, buffers bool, drains []string) string {
	threads := [2][]guarded{storer, withdrawer}
	type state struct {
		memory map[string]int
		queue  [2][]access
		done   [2]map[string]bool
		got    [2]map[string]int
	}
	clone := func(s state) state {
		c := state{memory: maps.Clone(s.memory)}
		for i := range threads {
			c.queue[i], c.done[i], c.got[i] = slices.Clone(s.queue[i]), maps.Clone(s.done[i]), maps.Clone(s.got[i])
		}
		return c
	}
	seen := map[string]bool{}
	var run func(s state) string
	run = func(s state) string {
		key := fmt.Sprint(s)
		if seen[key] {
			return ""
		}
		seen[key] = true
		stuck := true
		for i, thread := range threads {
			if len(s.queue[i]) > 0 {
				stuck = false
				c := clone(s)
				c.memory[c.queue[i][0].cell] = c.queue[i][0].value
				c.queue[i] = c.queue[i][1:]
				if bad := run(c); bad != "" {
					return bad
				}
			}
		next:
			for _, a := range thread {
				if s.done[i][a.name] || a.ready != nil && !a.ready(s.memory, s.got[i]) {
					continue
				}
				for _, o := range orders {
					if o[1] == a.name && !s.done[i][o[0]] && slices.ContainsFunc(thread,
						func(b guarded) bool { return b.name == o[0] }) {
						continue next
					}
				}
				if a.when != nil { // it depends on what was loaded, whatever the order of the accesses
					look := "look" + a.name[len(a.name)-1:]
					if _, known := s.got[i][look]; !known {
						// without an order it is done in advance, as if the look would allow it
						if slices.Contains(orders, order{look, a.name}) {
							continue
						}
					} else if !a.when(s.got[i]) {
						c := clone(s)
						c.done[i][a.name] = true
						stuck = false
						if bad := run(c); bad != "" {
							return bad
						}
						continue
					}
				}
				drain := slices.Contains(drains, a.name)
				if drain && len(s.queue[i]) > 0 {
					continue
				}
				stuck = false
				c := clone(s)
				c.done[i][a.name] = true
				switch {
				case !a.store:
					c.got[i][a.name] = c.memory[a.cell]
				case buffers && !drain:
					c.queue[i] = append(c.queue[i], a.access)
				default:
					c.memory[a.cell] = a.value
				}
				if bad := run(c); bad != "" {
					return bad
				}
			}
		}
		switch {
		case !stuck:
		case len(s.done[1]) < len(withdrawer):
			return fmt.Sprintf("the owner waits for ever: %v", s.memory)
		case s.memory["data1"] != own || s.memory["data2"] != own:
			return fmt.Sprintf("the memory has changed after Withdraw: %v", s.memory)
		}
		return ""
	}
	return run(state{memory: map[string]int{"grant": granted, "busy": 0}, done: [2]map[string]bool{{}, {}},
		got: [2]map[string]int{{}, {}}})
}

// TestWithdrawOrder: with the orders that package shm documents nothing changes after Withdraw, on
// a processor that keeps no others, with and without store buffers; without any one of them
// something does. Nor does it hold if the stores of the words may stay in a buffer.
func TestWithdrawOrder(t *testing.T) {
	all := slices.Concat(withdrawOrder, withdrawCoherence)
	for _, buffers := range []bool{false, true} {
		if bad := withdraws(all, buffers, words); bad != "" {
			t.Errorf("buffers %v: %s", buffers, bad)
		}
	}
	late := []string{"raise1", "raise2", "clear"} // what says that an access is over may stay in a buffer
	if bad := withdraws(all, true, late); bad != "" {
		t.Errorf("lowering late: %s", bad)
	}
	for _, o := range withdrawOrder {
		without := slices.DeleteFunc(slices.Clone(all), func(p order) bool { return p == o })
		if withdraws(without, false, nil) == "" {
			t.Errorf("without %s before %s nothing goes wrong: the model does not see it", o[0], o[1])
		}
	}
	for _, w := range []string{"raise1", "raise2", "clear"} {
		weaker := slices.DeleteFunc(slices.Clone(words), func(s string) bool { return s == w })
		if withdraws(all, true, weaker) == "" {
			t.Errorf("with %s in a store buffer nothing goes wrong: the model does not see it", w)
		}
	}
}
