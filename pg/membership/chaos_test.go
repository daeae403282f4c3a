package membership

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// chaos lets everything happen that can, as pick (a number below n) says, and after each round of
// faults has the world converge.
func chaos(pick func(n int) int, log func(Peer, string), say func(string, ...any)) error {
	n := 2 + pick(4)
	cfg := Config{Window: []int{0, 1, 2, 4}[pick(4)], Retry: 1 + pick(2), AutoAdmit: pick(2) == 0, Proposers: pick(3),
		MaxSize: n + pick(2)}
	say("%d ranks, %+v", n, cfg)
	w := newSim(n, cfg, log)
	w.pick = pick
	w.settle(1)
	incarnations := make([]int, cfg.MaxSize) // of each slot, how many there were
	for i := range n {
		incarnations[i] = 1
	}
	for range 1 + pick(3) {
		faults := pick(12)
		for steps := 40 + pick(120); steps > 0 && w.err == nil; steps-- {
			var alive []*proc
			for _, p := range w.procs {
				if p.alive {
					alive = append(alive, p)
				}
			}
			if len(alive) == 0 {
				break
			}
			p, q := alive[pick(len(alive))], alive[pick(len(alive))]
			kind := pick(16)
			if kind >= 13 && faults == 0 {
				kind = pick(13)
			}
			switch {
			case kind < 7:
				if ds := p.deliverable(); len(ds) > 0 {
					i := ds[pick(len(ds))]
					m := p.mail[i]
					_, once := m.ev.(Proposed)
					if _, ok := m.ev.(Probed); ok {
						once = true
					}
					w.deliver(p, i, !once && pick(4) == 0)
				}
			case kind < 9:
				if p.cas != nil && p.away {
					w.cas(p, []int{casLost, casLate}[pick(2)])
				} else if p.cas != nil {
					fate := casAnswer
					if faults > 0 && pick(3) == 0 {
						fate = pick(casFates)
					}
					w.cas(p, fate)
				} else if len(w.limbo) > 0 {
					i := pick(len(w.limbo))
					c := w.limbo[i]
					w.limbo = slices.Delete(slices.Clone(w.limbo), i, i+1)
					w.write(c, nil)
				}
			case kind < 10:
				if len(p.probes) > 0 {
					w.answer(p, []Verdict{w.truth(p), VerdictUnknown}[pick(2)])
				}
			case kind < 12:
				w.tick(p)
			case kind == 12:
				switch pick(3) {
				case 0:
					w.step(p, Admit{})
				case 1:
					if p.out && p.alive {
						say("%v rejoins", p.me)
						incarnations[p.me.Slot]++
						w.rejoin(p, incarnations[p.me.Slot])
					}
				case 2:
					w.storeBack(p, pick(2) == 0)
				}
			default:
				faults--
				switch f := pick(10); {
				case f < 2:
					if pick(2) == 0 {
						say("kill %v", p.me)
						w.kill(p)
					} else {
						say("silence %v", p.me)
						w.silence(p)
					}
				case f < 5: // a new incarnation, after a dead one or beside a live one: launchers can be wrong
					slot := pick(cfg.MaxSize)
					if incarnations[slot] < 6 {
						incarnations[slot]++
						say("start %d/%x", slot, incarnation(slot, incarnations[slot]))
						w.start(Peer{slot, incarnation(slot, incarnations[slot])},
							w.history[len(w.history)-1-pick(min(len(w.history), 3))])
					}
				case f < 7:
					if p != q && !w.cut[w.pair(p, q)] {
						side := pick(3)
						say("cut %v %v, side %d", p.me, q.me, side)
						w.sever(p, q, side != 1, side != 0)
					}
				case f < 8:
					if p != q {
						say("heal %v %v", p.me, q.me)
						w.heal(p, q)
					}
				case f < 9:
					say("store away from %v", p.me)
					w.storeAway(p)
				default:
					if p == q {
						say("lease of %v expires", p.me)
						w.expire(p)
					} else if pick(2) == 0 {
						say("%v finds %v stuck", p.me, q.me)
						q.condemned = true
						if pick(2) == 0 {
							w.step(p, Missed{q.me})
						} else if w.step(p, Late{q.me}); pick(2) == 0 {
							w.step(p, OnTime{q.me})
						}
					} else if s := q.me.Slot; p.m.View().Has(s, q.me.Incarnation) {
						say("%v evicts %v", p.me, q.me)
						q.condemned = true
						w.step(p, Evict{s})
					}
				}
			}
		}
		say("converge")
		w.converge()
		w.missed = maps.Clone(w.cut) // a rank with all links is not suspected
	}
	return w.err
}

// TestChaosFound has rapid look for a history that breaks an invariant, and shrink it.
func TestChaosFound(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		if err := chaos(func(n int) int { return rapid.IntRange(0, n-1).Draw(t, "pick") }, nil,
			func(string, ...any) {}); err != nil {
			t.Fatal(err)
		}
	})
}

func few() bool { return testing.Short() || raceEnabled }

// TestChaosSeeds runs many histories, and prints one that went wrong.
func TestChaosSeeds(t *testing.T) {
	runs := uint64(20000)
	if few() {
		runs = 3000
	}
	for seed := range runs {
		run := func(log func(Peer, string), say func(string, ...any)) error {
			return chaos(rand.New(rand.NewPCG(seed, 7)).IntN, log, say)
		}
		if err := run(nil, func(string, ...any) {}); err != nil {
			var b strings.Builder
			_ = run(func(who Peer, what string) { fmt.Fprintf(&b, "    %v: %s\n", who, what) },
				func(f string, a ...any) { fmt.Fprintf(&b, f+"\n", a...) })
			t.Fatalf("seed %d: %v\n%s", seed, err, b.String())
		}
	}
}
