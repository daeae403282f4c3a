package flight

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// job builds snapshots by hand.
type job []Rank

var noon = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

// ranks are n of them that compute, having finished operation #4 a tenth of a second ago.
func ranks(n int) job {
	j := make(job, n)
	for r := range j {
		j[r] = Rank{Rank: r, Presence: Present, Snapshot: &Snapshot{Version: 1, Rank: r, Size: n, Time: noon,
			Joined: true, View: View{Epoch: 1},
			Groups: []Group{{ID: 1, Slot: r, Size: n, Epoch: 1}}}}
		j.finished(r, 4, 100*time.Millisecond)
	}
	return j
}

func (j job) world(r int) *Group { return &j[r].Snapshot.Groups[0] }

func op(number uint64, call string, ago time.Duration, waits ...int) *Operation {
	return &Operation{Group: 1, Number: number, Kind: call, Call: fmt.Sprintf("%s #%d (float32)", call, number),
		Started: noon.Add(-ago), Outcome: "running", WaitsFor: waits}
}

// in puts a rank into allreduce #number, for so long, waiting for these.
func (j job) in(r int, number uint64, ago time.Duration, waits ...int) job {
	j.world(r).Running, j.world(r).Number = op(number, "allreduce", ago, waits...), number
	return j
}

// gaveUp is finished for an operation that has timed out.
func (j job) gaveUp(r int, number uint64, ago time.Duration, why string) job {
	g := j.finished(r, number, ago).world(r)
	g.Last.Outcome, g.LastError = "timed out", why
	return j
}

func (j job) finished(r int, number uint64, ago time.Duration) job {
	g := j.world(r)
	g.Running, g.Number, g.Finished = nil, number, number
	g.Last = op(number, "allreduce", ago+time.Millisecond)
	end := noon.Add(-ago)
	g.Last.Ended, g.Last.Outcome = &end, "ok"
	return j
}

// entering has a rank enter an epoch, for so long, waiting for these.
func (j job) entering(r int, epoch uint64, ago time.Duration, waits ...int) job {
	o := op(epoch, Entering, ago, waits...)
	o.Call, o.Root = fmt.Sprintf("entering epoch %d", epoch), -1
	j.world(r).Running = o
	return j
}

// agreeing has a rank vote in an agreement and wait, for so long, for the votes of these.
func (j job) agreeing(r int, number uint64, ago time.Duration, waits ...int) job {
	o := op(number, Agreeing, ago, waits...)
	o.Call, o.Root = fmt.Sprintf("agree #%d", number), -1
	j.world(r).Running, j.world(r).Agreed = o, number
	return j
}

// message has a rank wait in a receive from another.
func (j job) message(r, from int, ago time.Duration) job {
	o := op(7, "recv", ago)
	o.Call = fmt.Sprintf("recv from rank %d (float32, 4 elements, tag 7)", from)
	if o.Root = from; from >= 0 {
		o.WaitsFor = []int{from}
	}
	j[r].Snapshot.Messages = append(j[r].Snapshot.Messages, *o)
	return j
}

// without leaves a rank's snapshot out.
func (j job) without(r int, p Presence, detail string) job {
	j[r] = Rank{Rank: r, Presence: p, Where: fmt.Sprintf("pid %d on node", 100+r), Detail: detail}
	return j
}

// end has a rank's process have ended so, that long ago.
func (j job) end(r int, how string, ago time.Duration) job {
	j[r].End, j[r].Where = how, fmt.Sprintf("pid %d on node", 100+r)
	j[r].Snapshot.Reason, j[r].Snapshot.Time = how, noon.Add(-ago)
	return j
}

func (j job) with(r int, f func(*Snapshot)) job { f(j[r].Snapshot); return j }

// beside has a rank's process be a rank of the job "pair", in an operation there (nil: in none),
// whose awaited ranks are those of that job, or past #16.
func (j job) beside(r, rank int, running *Operation) job {
	g := Group{ID: 1, Slot: rank, Size: 2, Epoch: 1, Number: 16, Finished: 16, Running: running}
	return j.with(r, func(s *Snapshot) {
		s.Others = append(s.Others, Other{Job: "pair", Rank: rank, Joined: true, Groups: []Group{g}})
	})
}

func TestDiagnose(t *testing.T) {
	s := time.Second
	pair := Group{ID: 5, Size: 2, Ranks: []int{2, 3}, Epoch: 1}
	sub := func(j job, r int, running *Operation, finished uint64) job {
		g := pair
		g.Slot = r - 2
		if g.Finished = finished; running != nil {
			running.Group, g.Running = 5, running
		}
		return j.with(r, func(s *Snapshot) { s.Groups = append(s.Groups, g) })
	}
	grown := func(s *Snapshot) { s.Groups[0].Size++ }
	timedOut := func(s *Snapshot) { s.Reason = "timeout" }
	const lapsed = "its lease has ended (stopped, or dead)"
	const alive = "no answer within 1s, yet the store takes it for alive"
	for _, c := range []struct {
		name string
		job  job
		want []string // all findings
	}{
		{"nothing wrong", ranks(4), nil},
		{"busy", ranks(4).in(0, 5, s/2, 3).in(1, 5, s/2, 3), nil},
		{"one has not come", ranks(4).in(0, 1234, 40*s, 3).in(1, 1234, 40*s, 3).in(2, 1234, 39*s, 3).finished(3, 1230,
			41*s),
			[]string{"rank 3 has not entered allreduce #1234 (last finished #1230, 41 s ago); ranks 0-2 wait for " +
				"it, 40 s so far"}},
		{"a chain", ranks(4).in(0, 9, 5*s, 2).in(1, 9, 5*s, 0).in(2, 9, 4*s, 3).finished(3, 8, 6*s),
			[]string{"rank 3 has not entered allreduce #9 (last finished #8, 6.0 s ago); ranks 0-2 wait for it, " +
				"5.0 s so far"}},
		{"a chain from the last to the first", ranks(4).finished(0, 8, 6*s).in(1, 9, 5*s, 0).in(2, 9, 5*s, 1).in(3, 9,
			5*s, 2),
			[]string{"rank 0 has not entered allreduce #9 (last finished #8, 6.0 s ago); ranks 1-3 wait for it, " +
				"5.0 s so far"}},
		{"two have not come", ranks(4).in(0, 9, 5*s, 2, 3).in(1, 9, 5*s, 2, 3).finished(2, 8, 6*s).finished(3, 7, 9*s),
			[]string{"rank 2 has not entered allreduce #9 (last finished #8, 6.0 s ago); ranks 0 and 1 wait for " +
				"it, 5.0 s so far",
				"rank 3 has not entered allreduce #9 (last finished #7, 9.0 s ago); ranks 0 and 1 wait for it, " +
					"5.0 s so far"}},
		{"nothing finished yet", ranks(2).in(0, 1, 5*s, 1).with(1, func(s *Snapshot) {
			s.Groups[0].Finished,
				s.Groups[0].Last = 0, nil
		}),
			[]string{"rank 1 has not entered allreduce #1 (has finished nothing yet); rank 0 waits for it, " +
				"5.0 s so far"}},
		{"behind", ranks(3).in(0, 9, 5*s, 1).in(1, 8, 6*s, 2).finished(2, 7, 7*s),
			[]string{"rank 2 has not entered allreduce #8 (last finished #7, 7.0 s ago); ranks 0 and 1 wait for " +
				"it, 6.0 s so far"}},
		{"silent", ranks(3).in(0, 9, 5*s, 2).in(1, 9, 5*s, 0).without(2, Silent, "no answer within 1s").with(0,
			func(s *Snapshot) {
				s.Groups[0].Peers = []Peer{{Rank: 2, Seen: "allreduce #8 (float32)", Number: 8}}
			}), []string{"rank 2 does not answer (pid 102 on node): no answer within 1s; it was last seen in " +
			"allreduce #8 (float32); it is waited for in allreduce #9; ranks 0 and 1 wait for it, 5.0 s so far"}},
		{"silent without a reason", ranks(2).in(0, 9, 5*s, 1).without(1, Silent, ""),
			[]string{"rank 1 does not answer (pid 101 on node); it is waited for in allreduce #9; rank 0 waits " +
				"for it, 5.0 s so far"}},
		{"without a lease, and no operation has failed yet", ranks(4).without(1, Silent, lapsed),
			[]string{"rank 1 does not answer (pid 101 on node): its lease has ended (stopped, or dead)"}},
		{"several are silent", func() job {
			j := ranks(4)
			for _, r := range []int{1, 3} {
				j[r] = Rank{Rank: r, Presence: Silent}
			}
			return j
		}(), []string{"ranks 1 and 3 do not answer"}},
		{"several are without a lease", func() job {
			j := ranks(4)
			for _, r := range []int{1, 3} {
				j[r] = Rank{Rank: r, Presence: Silent, Detail: lapsed}
			}
			return j
		}(), []string{"ranks 1 and 3 do not answer: their leases have ended (stopped, or dead)"}},
		{"several are silent, each at its place", ranks(6).without(1, Silent, alive).without(2, Silent,
			alive).without(3, Silent, alive).without(5, Silent, "it has another secret"),
			[]string{"ranks 1-3 do not answer: no answer within 1s, yet the store takes them for alive",
				"rank 5 does not answer (pid 105 on node): it has another secret"}},
		{"several are silent, and waited for", ranks(6).in(0, 9, 5*s, 3, 4).in(1, 9, 4*s, 5).in(2, 9, 5*s, 0).without(3,
			Silent, "late").without(4, Silent, "late").without(5, Silent, "late"),
			[]string{"ranks 3-5 do not answer: late; they are waited for in allreduce #9; ranks 0-2 wait for them, " +
				"5.0 s so far"}},
		{"several are silent in different operations", ranks(5).in(0, 9, 5*s, 2, 3, 4).with(0, func(s *Snapshot) {
			s.Groups[0].Peers = []Peer{{Rank: 2, Seen: "allreduce #8", Number: 8}, {Rank: 3, Seen: "allreduce #8",
				Number: 8}, {Rank: 4, Seen: "allreduce #7", Number: 7}}
		}).message(1, 3, 5*s).without(2, Silent, "").without(3, Silent, "").without(4, Silent, ""),
			[]string{"ranks 2 and 3 do not answer; they were last seen in allreduce #8; they are waited for in " +
				"allreduce #9; rank 0 waits for them, 5.0 s so far",
				"rank 3 does not answer (pid 103 on node); it is waited for in recv from rank 3 (float32, 4 " +
					"elements, tag 7); rank 1 waits for it, 5.0 s so far",
				"rank 4 does not answer (pid 104 on node); it was last seen in allreduce #7; it is waited for in " +
					"allreduce #9; rank 0 waits for it, 5.0 s so far"}},
		{"a hole is no news", ranks(4).without(1, Vacant, ""), nil},
		{"not there yet", ranks(2).in(0, 1, 20*s, 1).without(1, Absent, ""),
			[]string{"rank 1 has not joined yet (pid 101 on node); it is waited for in allreduce #1; rank 0 " +
				"waits for it, 20 s so far"}},
		{"mismatch", ranks(3).in(0, 9, 5*s, 1).in(1, 9, 5*s, 0).in(2, 9, 5*s, 0).with(1,
			func(s *Snapshot) { s.Groups[0].Running = op(9, "broadcast", 5*time.Second, 0) }),
			[]string{"ranks disagree: rank 0 called allreduce #9 (float32), rank 1 called broadcast #9 (float32)"}},
		{"mismatch of counts", ranks(2).in(0, 9, s/10, 1).in(1, 9, s/10, 0).with(1,
			func(s *Snapshot) { s.Groups[0].Running.Elements = 5 }),
			[]string{"ranks disagree: rank 0 called allreduce #9 (float32), rank 1 called allreduce #9 (float32)"}},
		{"mismatch of a call in packets", ranks(2).in(0, 9, s/10, 1).in(1, 9, s/10, 0).with(1,
			func(s *Snapshot) { s.Groups[0].Running.Packets = true }),
			[]string{"ranks disagree: rank 0 called allreduce #9 (float32), rank 1 called allreduce #9 (float32)"}},
		{"computes inside", ranks(2).in(0, 9, 5*s, 1).in(1, 9, 5*s),
			[]string{"rank 1 has been in allreduce #9 for 5.0 s and waits for no rank: it moves or combines data, " +
				"or is held up in the kernel; rank 0 waits for it, 5.0 s so far"}},
		{"a cycle", ranks(3).in(0, 9, 5*s, 1).in(1, 9, 5*s, 2).in(2, 9, 5*s, 0),
			[]string{"ranks 0-2 wait for each other in allreduce #9, 5.0 s so far: each is there, and what was " +
				"sent has not arrived"}},
		{"it has just come", ranks(2).in(0, 9, 5*s, 1).in(1, 9, s/10, 0), nil},
		{"it has just gone on", ranks(2).in(0, 9, 5*s, 1).finished(1, 9, s/10), nil},
		{"it went on long ago", ranks(2).in(0, 9, 5*s, 1).finished(1, 9, 5*s),
			[]string{"rank 0 waits in allreduce #9 for rank 1, which has finished it: what that sent has not arrived"}},
		{"a message", ranks(3).message(0, 2, 5*s),
			[]string{"rank 2 has not sent what rank 0 waits for: recv from rank 2 (float32, 4 elements, tag 7); " +
				"rank 0 waits for it, 5.0 s so far"}},
		{"a message from any rank", ranks(2).message(0, -1, 5*s), nil},
		{"a message without a receiver", ranks(2).message(0, 1, 5*s).with(0,
			func(s *Snapshot) { s.Messages[0].Async = true }), nil},
		{"a message behind an allreduce", ranks(3).in(0, 9, 5*s, 1).message(1, 2, 4*s).finished(1, 8, 6*s),
			[]string{"rank 2 has not sent what rank 1 waits for: recv from rank 2 (float32, 4 elements, tag 7); " +
				"ranks 0 and 1 wait for it, 5.0 s so far"}},
		{"a deadlock of both", ranks(2).in(0, 9, 5*s, 1).message(1, 0, 4*s).finished(1, 8, 6*s),
			[]string{"rank 1 has not entered allreduce #9 (last finished #8, 6.0 s ago); it has been in recv " +
				"from rank 0 (float32, 4 elements, tag 7) for 4.0 s, and waits for rank 0; rank 0 waits for it, " +
				"5.0 s so far"}},
		{"a subgroup behind", sub(sub(ranks(4).in(0, 9, 5*s, 2).in(1, 9, 5*s, 2).finished(2, 8, 6*s), 2,
			op(3, "allgather", 5*s, 3), 2), 3, nil, 2),
			[]string{"rank 3 has not entered allgather #3 of group 5 (last finished #2); ranks 0-2 wait for it, " +
				"5.0 s so far"}},
		{"the job grows", ranks(3).in(0, 9, 5*s, 1).in(2, 9, 5*s, 1).finished(1, 8, 6*s).with(0, grown).with(2, grown),
			[]string{"rank 1 has not entered allreduce #9 (last finished #8, 6.0 s ago); ranks 0 and 2 wait for it, " +
				"5.0 s so far"}},
		{"mismatch while the job grows", ranks(2).in(0, 9, s/10, 1).in(1, 9, s/10, 0).with(0, grown).with(1,
			func(s *Snapshot) { s.Groups[0].Running.Elements = 5 }),
			[]string{"ranks disagree: rank 0 called allreduce #9 (float32), rank 1 called allreduce #9 (float32)"}},
		{"the group is gone", ranks(2).in(0, 9, 5*s, 1).with(1, func(s *Snapshot) { s.Groups = nil }),
			[]string{"rank 1 has closed the group of allreduce #9, or has not made it yet; rank 0 waits for it, " +
				"5.0 s so far"}},
		{"it has given up", ranks(2).in(0, 9, 5*s, 1).with(1, func(s *Snapshot) { s.Groups[0].Error = "no more" }),
			[]string{"rank 1 has given up and will not enter allreduce #9: no more; rank 0 waits for it, 5.0 s so far",
				"the group has failed at rank 1: no more"}},
		{"the group has failed", ranks(3).with(0, func(s *Snapshot) { s.Groups[0].Error = "rank 9 failed" }).with(2,
			func(s *Snapshot) { s.Groups[0].Error = "rank 9 failed" }),
			[]string{"the group has failed at ranks 0 and 2: rank 9 failed"}},
		{"an operation had failed, and the ranks have recovered", ranks(2).gaveUp(0, 5, 5*s, "timed out"), nil},
		{"an operation has failed", ranks(3).gaveUp(0, 5, s/10, "timed out").gaveUp(1, 5, s/10, "timed out").with(0,
			timedOut).with(1, timedOut),
			[]string{"the latest operation of the group has failed at ranks 0 and 1: timed out"}},
		{"an operation has failed, says the file of a dead process", ranks(2).gaveUp(0, 5, s/10, "").with(0,
			func(s *Snapshot) { one := 1; s.Reason, s.Groups[0].Last.Awaited = FromFile, &one }),
			[]string{"the latest operation of the group has failed at rank 0: allreduce #5 (float32): timed out, " +
				"waiting for rank 1"}},
		{"another has begun since", ranks(2).gaveUp(0, 5, s/2, "timed out").in(0, 6, s/10, 1).with(0, timedOut), nil},
		{"it agrees since", ranks(3).gaveUp(0, 5, 6*s, "timed out").agreeing(0, 3, s/10, 2).with(0, timedOut),
			[]string{"the latest operation of the group has failed at rank 0: timed out"}},
		{"it was given up at one rank", ranks(3).in(0, 9, 5*s, 1).gaveUp(1, 9, 4*s, "it timed out"),
			[]string{"rank 1 has given up allreduce #9: it timed out; rank 0 waits for it, 5.0 s so far"}},
		{"it was given up at one rank, which agrees", ranks(3).in(0, 9, 5*s, 1).gaveUp(1, 9, 4*s, "it timed out").
			agreeing(1, 3, s/10, 2),
			[]string{"rank 1 has given up allreduce #9: it timed out; rank 0 waits for it, 5.0 s so far"}},
		{"a later one was given up", ranks(2).in(0, 8, 5*s, 1).gaveUp(1, 9, 4*s, "it timed out"),
			[]string{"rank 0 waits in allreduce #8 for rank 1, which has finished it: what that sent has not arrived"}},
		{"the one before was given up", ranks(2).in(0, 9, 5*s, 1).gaveUp(1, 8, 6*s, "it timed out"),
			[]string{"rank 1 has not entered allreduce #9 (last gave up #8, 6.0 s ago); rank 0 waits for it, " +
				"5.0 s so far"}},
		{"entering a view", ranks(4).without(3, Vacant, "").entering(0, 2, 5*s, 2).entering(1, 2, 5*s, 2).with(2,
			func(s *Snapshot) { s.Groups[0].Error = "rank 3 failed" }),
			[]string{"rank 2 has not begun to enter epoch 2, it is in epoch 1, where it has not called Recover " +
				"since this failed: rank 3 failed; ranks 0 and 1 wait for it, 5.0 s so far",
				"the group has failed at rank 2: rank 3 failed"}},
		{"entering a view behind a message", ranks(3).entering(0, 2, 5*s, 1).entering(1, 2, 5*s, 2).message(2, 0,
			9*s).finished(2, 4, 9*s),
			[]string{"rank 2 has not begun to enter epoch 2, it is in epoch 1; it has been in recv from rank 0 " +
				"(float32, 4 elements, tag 7) for 9.0 s, and waits for rank 0; ranks 0 and 1 wait for it, " +
				"9.0 s so far"}},
		{"an operation waits for one that enters a view", ranks(3).in(0, 9, 5*s, 1).entering(1, 2, 4*s, 2).without(2,
			Silent, ""),
			[]string{"rank 2 does not answer (pid 102 on node); it is waited for in entering epoch 2; ranks 0 " +
				"and 1 wait for it, 5.0 s so far"}},
		{"agreeing", ranks(3).agreeing(0, 3, 5*s, 2).agreeing(1, 3, 5*s, 2).finished(2, 4, 6*s),
			[]string{"rank 2 has not called agree #3; ranks 0 and 1 wait for it, 5.0 s so far"}},
		{"it has just voted",
			ranks(2).agreeing(0, 3, 5*s, 1).with(1, func(s *Snapshot) { s.Groups[0].Agreed = 3 }), nil},
		{"all have voted", ranks(2).agreeing(0, 3, 5*s), []string{"rank 0 has been in agree #3 for 5.0 s and waits " +
			"for no rank: it has all votes, and asks the store"}},
		{"one agrees, and the other does not", ranks(2).agreeing(0, 3, 5*s, 1).in(1, 5, 4*s, 0),
			[]string{"rank 1 has not called agree #3; it has been in allreduce #5 for 4.0 s, and waits for rank 0; " +
				"rank 0 waits for it, 5.0 s so far"}},
		{"an operation waits for one that agrees", ranks(3).in(0, 5, 5*s, 1).agreeing(1, 3, 4*s, 2),
			[]string{"rank 2 has not called agree #3; ranks 0 and 1 wait for it, 5.0 s so far"}},
		{"they enter a view", ranks(3).entering(0, 2, s/2, 1).in(1, 9, s/2, 0), nil},
		{"views", ranks(4).with(1, func(s *Snapshot) { s.View.Epoch = 2 }),
			[]string{"the ranks have different views: rank 1 is in epoch 2, ranks 0, 2 and 3 are in epoch 1"}},
		{"no link", ranks(2).with(0, func(s *Snapshot) { s.Links = []Link{{Rank: 1, Error: "reset"}} }),
			[]string{"rank 0 has no link to rank 1 any more: reset"}},
		{"a hang in another job only", ranks(6).beside(3, 0, op(17, "allreduce", 5*s, 1)).beside(5, 1, nil),
			[]string{"rank 5 has not entered allreduce #17 of job pair (last finished #16); rank 3 waits for it, " +
				"5.0 s so far"}},
		{"a hang in another job, behind which others wait", ranks(6).in(0, 9, 5*s, 3).in(1, 9, 5*s, 0).finished(3, 8,
			6*s).beside(3, 0, op(17, "allreduce", 4*s, 1)).beside(5, 1, nil),
			[]string{"rank 5 has not entered allreduce #17 of job pair (last finished #16); ranks 0, 1 and 3 wait " +
				"for it, 5.0 s so far"}},
		{"a deadlock of two jobs", ranks(6).in(0, 9, 5*s, 3).in(5, 9, 4*s, 3).finished(3, 8, 6*s).beside(3, 0,
			op(17, "allreduce", 4*s, 1)).beside(5, 1, nil),
			[]string{"rank 5 has not entered allreduce #17 of job pair (last finished #16); it has been in allreduce " +
				"#9 for 4.0 s, and waits for rank 3; ranks 0 and 3 wait for it, 5.0 s so far"}},
		{"a message of another job", ranks(6).beside(3, 0, nil).beside(5, 1, nil).with(3, func(s *Snapshot) {
			o := op(7, "recv", 5*time.Second, 1)
			o.Call = "recv from rank 1 (int8)"
			s.Others[0].Messages = []Operation{*o}
		}), []string{"rank 5 has not sent what rank 3 waits for: recv from rank 1 (int8) of job pair; rank 3 waits " +
			"for it, 5.0 s so far"}},
		{"a rank of another job that is none of this one", ranks(4).in(0, 9, 5*s, 3).finished(3, 8, 6*s).beside(3, 0,
			op(17, "allreduce", 4*s, 1)),
			[]string{"rank 1 of job pair, which is none of the ranks here that answer, is waited for in allreduce " +
				"#17 of job pair; ranks 0 and 3 wait for it, 5.0 s so far"}},
		{"two are the same rank of another job", ranks(4).beside(0, 0, op(17, "allreduce", 4*s, 1)).beside(1, 1,
			nil).beside(2, 1, nil),
			[]string{"rank 1 of job pair, which is none of the ranks here that answer, is waited for in allreduce " +
				"#17 of job pair; rank 0 waits for it, 4.0 s so far"}},
		{"a rank of another job that does not answer", ranks(6).beside(3, 0, op(17, "allreduce", 4*s, 1)).without(5,
			Silent, ""),
			[]string{"rank 1 of job pair, which is none of the ranks here that answer (rank 5 does not), is waited " +
				"for in allreduce #17 of job pair; rank 3 waits for it, 4.0 s so far",
				"rank 5 does not answer (pid 105 on node)"}},
		{"two jobs of one name in different calls", ranks(4).beside(0, 0, op(17, "allreduce", s/10, 1)).beside(1, 1,
			op(17, "allreduce", s/10, 0)).beside(2, 0, op(17, "broadcast", s/10, 1)).beside(3, 1, nil), nil},
		{"a rank of two jobs of one name does not answer", ranks(4).beside(0, 0, nil).beside(1, 1, nil).beside(2, 0,
			op(17, "allreduce", 4*s, 1)).without(3, Silent, ""),
			[]string{"rank 1 of job pair, which is none of the ranks here that answer (rank 3 does not), is waited " +
				"for in allreduce #17 of job pair; rank 2 waits for it, 4.0 s so far",
				"rank 3 does not answer (pid 103 on node)"}},
		{"a rank does not tell its state in another job", ranks(4).in(0, 9, 5*s, 2).finished(2, 8, 6*s).beside(1, 0,
			op(17, "allreduce", 4*s, 1)).beside(2, 1, nil).with(2, func(s *Snapshot) {
			s.Others[0] = Other{Job: "pair", Rank: 1, Silent: true}
		}), []string{
			"rank 2 has not entered allreduce #9 (last finished #8, 6.0 s ago); it may be in job pair, whose state " +
				"is not to be had; rank 0 waits for it, 5.0 s so far",
			"rank 2's state in job pair is not to be had; it is waited for in allreduce #17 of job pair; rank 1 " +
				"waits for it, 4.0 s so far"}},
		{"different calls in different jobs", ranks(2).in(0, 17, s/10, 1).beside(1, 0, op(17, "broadcast", s/10, 1)),
			nil},
		{"mismatch in another job", ranks(4).beside(1, 0, op(17, "allreduce", 5*s, 1)).beside(2, 1,
			op(17, "broadcast", 5*s, 0)),
			[]string{"ranks disagree in job pair: rank 1 called allreduce #17 (float32), rank 2 called broadcast #17 " +
				"(float32)"}},
		{"a group of another job has failed", ranks(2).beside(1, 0, nil).with(1,
			func(s *Snapshot) { s.Others[0].Groups[0].Error = "rank 1 failed" }),
			[]string{"the group of job pair has failed at rank 1: rank 1 failed"}},
		{"it has only groups of another job", ranks(2).beside(1, 0, nil).with(1, func(s *Snapshot) { s.Groups = nil }).
			with(0, func(s *Snapshot) { s.Links = []Link{{Rank: 1, Error: "reset"}} }), nil},
		{"one has exited", ranks(3).end(1, "exited with code 7", 0).with(0,
			func(s *Snapshot) { s.Links = []Link{{Rank: 1, Error: "reset"}} }),
			[]string{"rank 1 exited with code 7 (pid 101 on node)"}},
		{"one has exited, then the others", ranks(4).end(0, "exited with code 1", 0).end(1, "exited with code 1", s/4).
			end(2, "exited with code 1", s).end(3, "exited with code 1", s/3),
			[]string{"rank 2 exited with code 1 (pid 102 on node)", "ranks 0, 1 and 3 exited with code 1"}},
		{"one was killed, and the launcher ended the others", ranks(4).end(0, terminated, s/2).end(1, terminated, s).
			end(2, "was killed by signal 9 (SIGKILL)", s/3).end(3, "was killed by signal 9 (SIGKILL)", 0),
			[]string{"rank 2 was killed by signal 9 (SIGKILL) (pid 102 on node)",
				"rank 3 was killed by signal 9 (SIGKILL) (pid 103 on node)",
				"ranks 0 and 1 were killed by signal 15 (SIGTERM)"}},
		{"a stuck job was told to end", ranks(2).in(0, 9, 5*s, 1).finished(1, 8, 6*s).end(0, terminated, 0).
			end(1, terminated, 0),
			[]string{"rank 1 has not entered allreduce #9 (last finished #8, 6.0 s ago); rank 0 waits for it, " +
				"5.0 s so far", "ranks 0 and 1 were killed by signal 15 (SIGTERM)"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var got []string
			for _, f := range Diagnose(c.job) {
				got = append(got, f.Text)
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("got\n  %s\nwant\n  %s", strings.Join(got, "\n  "), strings.Join(c.want, "\n  "))
			}
			mixed := slices.Clone(c.job) // in whichever order they come
			slices.Reverse(mixed)
			var again []string
			for _, f := range Diagnose(mixed) {
				again = append(again, f.Text)
			}
			if !slices.Equal(got, again) {
				t.Errorf("in the other order\n  %s", strings.Join(again, "\n  "))
			}
		})
	}
}

func TestEndOfSnapshot(t *testing.T) {
	for reason, ends := range map[string]bool{"": false, "timeout": false, "signal": false, FromFile: false,
		"exited with code 7": true, "was killed by signal 9 (SIGKILL)": true} {
		if s := (&Snapshot{Reason: reason}); (s.End() != "") != ends || ends && s.End() != reason {
			t.Errorf("%q: %q", reason, s.End())
		}
	}
}

// Beside leaves what it is given as it was, and changes nothing the second time.
func TestBesideAgain(t *testing.T) {
	j := ranks(3).beside(0, 1, op(17, "allreduce", time.Second, 0, 5)).beside(2, 0, nil)
	once := Beside(j)
	if len(j[0].Snapshot.Groups) != 1 || len(j[0].Snapshot.Others[0].Groups) != 1 {
		t.Errorf("%+v", j[0].Snapshot)
	}
	if g := once[0].Snapshot.Groups; len(g) != 2 || g[1].Job != "pair" || g[1].Running.Job != "pair" ||
		!slices.Equal(g[1].Running.WaitsFor, []int{2}) || !slices.Equal(g[1].Running.Strangers, []int{5}) {
		t.Errorf("%+v", g)
	}
	if twice := Beside(once); !reflect.DeepEqual(once, twice) {
		t.Errorf("%+v", twice)
	}
}

// The flight records of a process complete each other, if they are of one moment.
func TestGather(t *testing.T) {
	of := func(job string, pid int, ago time.Duration) *Snapshot {
		return &Snapshot{Job: job, Rank: pid, Host: "node", PID: pid, Time: noon.Add(-ago),
			Groups: []Group{{ID: 1, Number: uint64(ago), Peers: []Peer{{}}}}}
	}
	told := of("all", 2, 0)
	told.Others = []Other{{Job: "told"}}
	snaps := []*Snapshot{of("all", 1, 0), of("pair", 1, 2), of("all", 3, 0), of("pair", 1, 1), of("late", 1,
		time.Second), told, of("pair", 2, 0)}
	Gather(snaps)
	if got := snaps[0].Others; len(got) != 1 || got[0].Job != "pair" || got[0].Rank != 1 ||
		got[0].Groups[0].Number != 1 || got[0].Groups[0].Peers != nil || snaps[3].Groups[0].Peers == nil {
		t.Errorf("%+v", got)
	}
	if got := snaps[1].Others; len(got) != 2 || got[0].Job != "all" || got[1].Job != "late" {
		t.Errorf("%+v", got)
	}
	if snaps[2].Others != nil || len(told.Others) != 1 || told.Others[0].Job != "told" {
		t.Errorf("%+v, %+v", snaps[2].Others, told.Others)
	}

	// A process that is several ranks of a job.
	two := of("all", 1, 0)
	two.Rank = 2
	snaps = []*Snapshot{of("all", 1, 0), of("pair", 1, 0), two, of("third", 1, 0)}
	Gather(snaps)
	if snaps[0].Others != nil || two.Others != nil || len(snaps[1].Others) != 1 || snaps[1].Others[0].Job != "third" {
		t.Errorf("%+v, %+v, %+v", snaps[0].Others, two.Others, snaps[1].Others)
	}
}

// TestDiagnoseMany is a ring of thousands of ranks behind one: it must not take forever.
func TestDiagnoseMany(t *testing.T) {
	const n = 4096
	j := ranks(n)
	for r := range n {
		if r != 77 {
			j.in(r, 5, 5*time.Second, (r+n-1)%n)
		}
	}
	f := Diagnose(j)
	if len(f) != 1 || f[0].Rank != 77 || len(f[0].Waiters) != n-1 || f[0].Number != 5 {
		t.Errorf("%d findings, %+v", len(f), f[0].Text)
	}
}

// Many ranks that do not answer are one finding, whether they are waited for or not.
func TestDiagnoseManySilent(t *testing.T) {
	const n = 256
	var silent []int
	for r := n / 2; r < n; r++ {
		silent = append(silent, r)
	}
	for _, waiting := range []bool{false, true} {
		j := ranks(n)
		for _, r := range silent {
			j.without(r, Silent, "late")
		}
		kind := FindingGone
		if waiting {
			kind = FindingStuck
			for r := range n / 2 {
				j.in(r, 5, 5*time.Second, silent...)
			}
		}
		f := Diagnose(j)
		if len(f) != 1 || f[0].Kind != kind || f[0].Rank != -1 || !slices.Equal(f[0].Ranks, silent) ||
			waiting && len(f[0].Waiters) != n/2 || !strings.HasPrefix(f[0].Text, "ranks 128-255 do not answer: late") {
			t.Errorf("%d findings, %.200s", len(f), f[0].Text)
		}
	}
}

func TestDiagnosisNamesStragglers(t *testing.T) {
	waited := func(pairs ...[3]float64) job { // waiting rank, awaited rank, seconds
		j := ranks(4)
		for _, p := range pairs {
			j.with(int(p[0]), func(s *Snapshot) { s.Links = append(s.Links, Link{Rank: int(p[1]), Waited: p[2]}) })
		}
		return j
	}
	// all behind rank 3
	ring := waited([3]float64{0, 3, 2}, [3]float64{1, 0, 2}, [3]float64{2, 1, 2}, [3]float64{3, 2, 0.1})
	got := Stragglers(ring, nil)
	if len(got) != 1 || got[0].Rank != 3 || got[0].Kept != 2 || got[0].Waited != 0.1 {
		t.Errorf("%+v", got)
	}
	flat := waited([3]float64{0, 1, 5}, [3]float64{2, 1, 5}, [3]float64{3, 1, 5}, [3]float64{1, 2, 1},
		[3]float64{0, 2, 6}, [3]float64{3, 2, 7})
	if got := Stragglers(flat, nil); len(got) != 2 || got[0].Rank != 1 || got[1].Rank != 2 || got[1].Kept != 14 {
		t.Errorf("%+v", got)
	}
	if got := Stragglers(flat, flat); len(got) != 0 {
		t.Errorf("nothing happened since, yet %+v", got)
	}
	again := ranks(4) // other incarnations begin at zero
	again.with(0, func(s *Snapshot) { s.Incarnation, s.Links = "b", []Link{{Rank: 1, Waited: 1}} })
	if got := Stragglers(again, flat); len(got) != 1 || got[0].Kept != 1 {
		t.Errorf("%+v", got)
	}
}

func TestRankListAndSeconds(t *testing.T) {
	for _, c := range []struct {
		ranks []int
		want  string
	}{{[]int{3}, "rank 3"}, {[]int{1, 0}, "ranks 0 and 1"}, {[]int{0, 1, 2}, "ranks 0-2"},
		{[]int{5, 0, 1, 2, 9, 9}, "ranks 0-2, 5 and 9"},
		{[]int{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20}, "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 3 more"}} {
		if got := RankList(c.ranks); got != c.want {
			t.Errorf("%v: %q, want %q", c.ranks, got, c.want)
		}
	}
	for d, want := range map[time.Duration]string{0: "0.0 s", -time.Second: "0.0 s", 3210 * time.Millisecond: "3.2 s",
		41400 * time.Millisecond: "41 s", 250 * time.Second: "4m10s"} {
		if got := Seconds(d); got != want {
			t.Errorf("%v: %q, want %q", d, got, want)
		}
	}
}
