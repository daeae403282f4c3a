//go:build linux

package faults

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"tutti/internal/proctest"
	"tutti/tests/internal/rig"
)

var (
	chaosSeed = flag.Uint64("chaos.seed", 0, "of TestChaos, to have the same faults again; 0: by chance")
	chaosLog  = flag.String("chaos.log", "error",
		"how much the ranks of TestChaos log, which is shown if it fails: a level")
	chaosEvents = flag.Int("chaos.events", 10, "faults that TestChaos injects, for each transport")
)

const chaosRanks = 8

// chaos is a job of ranks that are killed, stopped, cut off and started again.
type chaos struct {
	t            *testing.T
	s            *rig.Stage
	rnd          *rand.Rand
	net          *rig.Switch // nil: one host
	env          []string
	ranks        [chaosRanks]*rig.Rank // nil: it is down
	incarnations uint64
	did          map[string]int
}

// TestChaos runs verified collectives on eight ranks while they are killed, stopped, evicted and
// started again at random, and cut off from each other and from the store if each has its own host.
// No result may be wrong, no rank may hang, and in the end the oldest rank may not hold more
// resources than a new one.
//
//	go test ./tests/faults -run TestChaos -v -timeout 30m -chaos.events 200
func TestChaos(t *testing.T) {
	seed := *chaosSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	for _, transport := range []string{"shm", "tcp"} {
		t.Run(transport, func(t *testing.T) {
			t.Logf("to have the same faults again: -chaos.seed %#x -chaos.events %d", seed, *chaosEvents)
			c := &chaos{t: t, s: rig.New(t), rnd: rand.New(rand.NewPCG(seed, 0)), did: map[string]int{}}
			var enter []string
			host := ""
			if transport == "tcp" {
				c.net = rig.NewSwitch(t, chaosRanks+1) // the last is the store's
				enter = c.net.Hosts[chaosRanks].Enter()
				host = c.net.Address(chaosRanks)
			}
			c.env = append(c.env, "TUTTI_SECRET="+secret, "TUTTI_JOB=chaos", "TUTTI_TRANSPORT="+transport,
				"WORLD_SIZE="+strconv.Itoa(chaosRanks), "TUTTI_ON_FAILURE=shrink", "TUTTI_LEASE=2s",
				"TUTTI_TIMEOUT=20s", "TUTTI_LOG="+*chaosLog)
			store, address := c.s.Store(enter, rig.Embedded, secret, host)
			c.env = append(c.env, "TUTTI_STORE="+address)
			for r := range chaosRanks {
				c.launch(r)
			}
			for _, r := range c.s.Arrive(chaosRanks) {
				c.begin(r)
			}
			c.settle("at first", true)
			for i := range *chaosEvents {
				what := c.event()
				c.t.Logf("%d: %s", i, what)
				c.settle(what, i%5 == 4)
			}
			c.restart()
			c.settle("in the end", true)
			c.usage()
			c.s.Sockets()
			c.end()
			store.Signal(syscall.SIGTERM)
			store.End(0)
			c.s.Clean()
			t.Logf("%v, %d incarnations", c.did, c.incarnations)
		})
	}
}

// launch starts a rank's process.
func (c *chaos) launch(rank int) {
	var enter []string
	if c.net != nil {
		enter = c.net.Hosts[rank].Enter()
	}
	c.s.StartIn(enter, append(slices.Clone(c.env), "RANK="+strconv.Itoa(rank)), proctest.Self())
}

// begin has a process that has come go.
func (c *chaos) begin(r *rig.Rank) {
	c.incarnations++
	c.ranks[r.Number] = r
	if reply := r.Do(rig.Command{Verb: "chaos", Seed: c.incarnations,
		Counts: []int{0, 3, 300, 20_000}}); reply.Fault != nil {
		c.t.Fatal(reply.Fault)
	}
}

// restart starts all that are down.
func (c *chaos) restart() {
	for rank, r := range c.ranks {
		if r == nil {
			c.launch(rank)
			c.begin(c.s.Next())
		}
	}
}

// up lists the ranks that are up, in random order.
func (c *chaos) up() (up []int) {
	for rank, r := range c.ranks {
		if r != nil {
			up = append(up, rank)
		}
	}
	c.rnd.Shuffle(len(up), func(i, j int) { up[i], up[j] = up[j], up[i] })
	return up
}

// while is the time that a fault lasts: most are short, some last longer than a lease.
func (c *chaos) while() time.Duration {
	d := time.Duration(c.rnd.IntN(300)) * time.Millisecond
	if c.rnd.IntN(4) == 0 {
		d += time.Duration(c.rnd.IntN(3500)) * time.Millisecond
	}
	return d
}

// event injects a fault, and ends it.
func (c *chaos) event() string {
	up := c.up()
	kinds := []string{"kill", "kill", "stop", "leave"}
	if len(up) < chaosRanks {
		kinds = append(kinds, "restart")
	}
	if c.net != nil {
		kinds = append(kinds, "partition", "partition", "one way", "store")
	}
	kind := kinds[c.rnd.IntN(len(kinds))]
	if len(up) <= 4 {
		kind = "restart"
	}
	c.did[kind]++
	switch kind {
	case "kill":
		victims := up[:1+c.rnd.IntN(2)]
		for _, r := range victims {
			c.ranks[r].Signal(syscall.SIGKILL)
		}
		for _, r := range victims {
			c.ranks[r].Gone()
			c.ranks[r] = nil
		}
		if c.rnd.IntN(2) == 0 {
			c.restart()
		}
		return fmt.Sprintf("kill %v", victims)
	case "stop":
		victims, d := up[:1+c.rnd.IntN(2)], c.while()
		for _, r := range victims {
			c.ranks[r].Signal(syscall.SIGSTOP)
		}
		<-time.After(d)
		for _, r := range victims {
			c.ranks[r].Signal(syscall.SIGCONT)
		}
		return fmt.Sprintf("stop %v for %v", victims, d)
	case "leave":
		r := up[0]
		c.leave(r)
		return fmt.Sprintf("rank %d leaves", r)
	case "partition":
		far, d := up[:1+c.rnd.IntN(len(up)-1)], c.while()
		c.must(c.net.Part(far...))
		<-time.After(d)
		c.must(c.net.Part())
		return fmt.Sprintf("%v cut off from the store and the rest for %v", far, d)
	case "store":
		d := c.while()
		c.must(c.net.Part(chaosRanks))
		<-time.After(d)
		c.must(c.net.Part())
		return fmt.Sprintf("all cut off from the store for %v", d)
	case "one way":
		from, to, d := up[0], up[1], c.while()
		c.must(c.net.Deafen(from, to))
		<-time.After(d)
		c.must(c.net.Mend(from, to))
		return fmt.Sprintf("rank %d does not hear rank %d for %v", to, from, d)
	}
	c.restart()
	return kind
}

// must ends the test if the network could not be changed.
func (c *chaos) must(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

// leave has a rank close its group and end.
func (c *chaos) leave(rank int) {
	r := c.ranks[rank]
	rig.Well([]*rig.Rank{r}, rig.Command{Verb: "stop"})
	rig.Well([]*rig.Rank{r}, rig.Command{Verb: "ended"})
	rig.Exit([]*rig.Rank{r}, 0)
	r.Gone()
	c.ranks[rank] = nil
}

// settle waits until every rank that is up has done another round, and with all those that are; all
// has those come back first that are down.
func (c *chaos) settle(after string, all bool) {
	c.t.Helper()
	if all {
		c.restart()
	}
	up := slices.Sorted(slices.Values(c.up()))
	var ranks []*rig.Rank
	for _, r := range up {
		ranks = append(ranks, c.ranks[r])
	}
	var before, now []rig.Reply
	rig.Eventually(c.t, func() bool {
		now = rig.Well(ranks, rig.Command{Verb: "look"})
		for _, a := range now {
			if !slices.Equal(a.Chaos.Active, up) || a.Chaos.Epoch != now[0].Chaos.Epoch {
				before = nil
				return false
			}
		}
		if before == nil {
			before = now
		}
		for i, a := range now {
			if a.Steps <= before[i].Steps {
				return false
			}
		}
		return true
	}, func() string {
		var text strings.Builder
		fmt.Fprintf(&text, "%s: the ranks %v do not go on together", after, up)
		for i, a := range now {
			fmt.Fprintf(&text, "\nrank %d: round %d, %+v", up[i], a.Steps, *a.Chaos)
		}
		return text.String()
	})
	if c.t.Failed() { // they print their stacks
		for _, r := range ranks {
			r.Signal(syscall.SIGQUIT)
		}
		for _, r := range ranks {
			r.Gone()
		}
		c.t.FailNow()
	}
}

// usage compares what the ranks hold with what one holds that has just begun.
func (c *chaos) usage() {
	young := c.up()[0]
	c.ranks[young].Signal(syscall.SIGKILL)
	c.ranks[young].Gone()
	c.ranks[young] = nil
	c.settle("a last one is killed", true)
	var least []rig.Usage // of several samples of each: they are taken in the middle of a round
	var text strings.Builder
	rig.Eventually(c.t, func() bool {
		for rank, a := range rig.Well(c.ranks[:], rig.Command{Verb: "usage"}) {
			u := *a.Usage
			if rank == len(least) {
				least = append(least, u)
			}
			l := &least[rank]
			*l = rig.Usage{Files: min(l.Files, u.Files), Maps: min(l.Maps, u.Maps),
				Goroutines: min(l.Goroutines, u.Goroutines), Heap: min(l.Heap, u.Heap)}
		}
		want := least[young]
		text.Reset()
		for rank, u := range least {
			if u.Files > want.Files+8 || u.Maps > want.Maps+8 || u.Goroutines > want.Goroutines+16 ||
				u.Heap > want.Heap+8<<20 {
				fmt.Fprintf(&text, "rank %d holds %+v at least, and rank %d, which has just begun, %+v\n", rank, u,
					young, want)
			}
		}
		return text.Len() == 0
	}, text.String)
}

// end has all ranks leave, each when it likes.
func (c *chaos) end() {
	ranks := c.ranks[:]
	rig.Well(ranks, rig.Command{Verb: "stop"})
	rig.Well(ranks, rig.Command{Verb: "ended"})
	rig.Exit(ranks, 0)
	for _, r := range ranks {
		r.Gone()
	}
}
