package membership

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
)

// TestGolden tells stories. A life is written SLOT.N, the N-th of its slot; a bare SLOT is its latest. Every command prints what the machines want done, by rank
// and incarnation, and nothing else happens by itself: notifications, answers and time move when the script says so.
//
//	new ranks=N window=W [retry=R] [max=M] [proposers=P] [auto]     a job of N ranks
//	tell RANK EVENT [LIFE] [...]       one event: linkup LIFE, linkdown LIFE, dead LIFE, alive LIFE, gone LIFE, unknown LIFE (answers to a probe), view EPOCH,
//	                                   report LIFE SEQ [LIFE...], ask LIFE EPOCH, unask LIFE, missed LIFE, evict SLOT, admit, close
//	cut A B [blind=A]                  the link breaks; the blind one does not notice
//	heal A B   kill A   restart A [seen=EPOCH]   rejoin A   away A   back A
//	cas A [mute|lost|late]             A's proposal reaches the store and is answered, or not; late: "late" brings it there
//	flush                              everything under way arrives, again and again, until nothing is
//	tick [N] [at=A]                    time passes
//	views                              the store's view, with incarnations, and each machine's epoch
func TestGolden(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		var w *sim
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			var b strings.Builder
			g := script{t: t, d: d}
			if d.Cmd == "new" {
				cfg := Config{Window: g.num("window", 0), Retry: g.num("retry", 0), MaxSize: g.num("max", 0), Proposers: g.num("proposers", 0), AutoAdmit: d.HasArg("auto")}
				w = newSim(g.num("ranks", 0), cfg, nil)
				for _, p := range w.procs {
					p.mail = nil
				}
			}
			g.w = w
			w.log = func(who Peer, what string) { fmt.Fprintf(&b, "%d.%d> %s\n", who.Slot, who.Incarnation%16, what) }
			g.run(&b)
			if w.err != nil {
				d.Fatalf(t, "%v", w.err)
			}
			if b.Len() == 0 {
				return "-\n"
			}
			return b.String()
		})
	})
}

type script struct {
	t *testing.T
	d *datadriven.TestData
	w *sim
}

func (g script) num(key string, otherwise int) int {
	for _, a := range g.d.CmdArgs {
		if a.Key == key {
			return g.int(a.Vals[0])
		}
	}
	return otherwise
}

func (g script) int(s string) int {
	n, err := strconv.Atoi(s)
	if err != nil {
		g.d.Fatalf(g.t, "%v", err)
	}
	return n
}

func (g script) arg(i int) string {
	if i >= len(g.d.CmdArgs) {
		return ""
	}
	return g.d.CmdArgs[i].Key
}

// peer reads "1.2" or "1".
func (g script) peer(s string) Peer {
	slot, n, ok := strings.Cut(s, ".")
	if ok {
		return Peer{g.int(slot), incarnation(g.int(slot), g.int(n))}
	}
	for _, p := range slices.Backward(g.w.procs) {
		if p.me.Slot == g.int(slot) {
			return p.me
		}
	}
	g.d.Fatalf(g.t, "no such rank: %s", s)
	return Peer{}
}

func (g script) proc(s string) *proc { return g.w.life(g.peer(s)) }

// lives counts how many a slot has had.
func (g script) lives(slot int) int {
	n := 0
	for _, p := range g.w.procs {
		if p.me.Slot == slot {
			n++
		}
	}
	return n
}

func (g script) run(b *strings.Builder) {
	w, d := g.w, g.d
	switch d.Cmd {
	case "new":
	case "tell":
		g.tell(g.proc(g.arg(0)), g.arg(1))
	case "cut":
		blind := ""
		if d.HasArg("blind") {
			d.ScanArgs(g.t, "blind", &blind)
		}
		w.sever(g.proc(g.arg(0)), g.proc(g.arg(1)), blind != g.arg(0), blind != g.arg(1))
	case "heal":
		w.heal(g.proc(g.arg(0)), g.proc(g.arg(1)))
	case "kill":
		w.kill(g.proc(g.arg(0)))
	case "restart":
		slot := g.int(g.arg(0))
		w.start(Peer{slot, incarnation(slot, g.lives(slot)+1)}, w.history[g.num("seen", len(w.history))-1])
	case "rejoin":
		p := g.proc(g.arg(0))
		w.rejoin(p, g.lives(p.me.Slot)+1)
	case "away":
		w.storeAway(g.proc(g.arg(0)))
	case "back":
		w.storeBack(g.proc(g.arg(0)))
	case "cas":
		fate, p := slices.Index([]string{"", "mute", "lost", "late"}, g.arg(1)), g.proc(g.arg(0))
		if p.cas == nil {
			d.Fatalf(g.t, "rank %s has proposed nothing", g.arg(0))
		}
		w.cas(p, fate)
		w.deliver(p, len(p.mail)-1, false)
	case "late":
		for _, c := range w.limbo {
			fmt.Fprintf(b, "store> %s: %v\n", c, w.write(c))
		}
		w.limbo = nil
	case "flush":
		w.flush()
	case "tick":
		n := 1
		if a := g.arg(0); a != "" && a != "at" {
			n = g.int(a)
		}
		for range n {
			for _, p := range w.procs {
				if p.alive && (!d.HasArg("at") || p.me.Slot == g.num("at", 0)) {
					w.step(p, Tick{})
				}
			}
		}
	case "views":
		fmt.Fprintf(b, "%v:", w.current())
		for i, s := range w.current().Slots {
			fmt.Fprintf(b, " [%d.%d since %d left %d]", i, s.Incarnation%16, s.Since, s.Left)
		}
		for _, p := range w.procs {
			if p.alive {
				fmt.Fprintf(b, "\n%d.%d has epoch %d, member %v, pending %v", p.me.Slot, p.me.Incarnation%16, p.m.View().Epoch, p.m.Member(), p.m.Pending())
			}
		}
		b.WriteByte('\n')
	default:
		d.Fatalf(g.t, "unknown command")
	}
}

func (g script) tell(p *proc, what string) {
	var who Peer
	if g.arg(2) != "" && what != "view" {
		who = g.peer(g.arg(2))
	}
	var ev Event
	switch what {
	case "linkup":
		ev = LinkUp{who}
	case "linkdown":
		ev = LinkDown{who, "connection lost"}
	case "dead":
		ev = Dead{who, "lease expired"}
	case "alive", "gone", "unknown":
		ev = Probed{who, map[string]Verdict{"alive": VerdictAlive, "gone": VerdictDead, "unknown": VerdictUnknown}[what]}
		p.probes = nil
	case "view":
		ev = ViewSeen{g.w.history[g.int(g.arg(2))-1]}
	case "report":
		r := Report{Epoch: p.m.View().Epoch, Seq: uint64(g.int(g.arg(3)))}
		for _, a := range g.d.CmdArgs[4:] {
			r.Unreachable = append(r.Unreachable, g.peer(a.Key))
		}
		ev = Reported{who, r}
	case "ask":
		ev = JoinAsked{who, uint64(g.int(g.arg(3)))}
	case "unask":
		ev = JoinGone{who}
	case "missed":
		g.w.life(who).condemned = true
		ev = Missed{who}
	case "evict":
		g.w.life(who).condemned = true
		ev = Evict{who.Slot}
	case "admit":
		ev = Admit{}
	case "close":
		ev = Close{}
	default:
		g.d.Fatalf(g.t, "unknown event %s", what)
	}
	g.w.step(p, ev)
}
