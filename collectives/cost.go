package collectives

import "fmt"

// Net is a simple model of links and ranks, after LogGP (A. Alexandrov et al., SPAA 1995), in
// seconds. Each rank is one processor that runs its steps one after the other; sending and
// receiving a byte take its time, too.
type Net struct {
	Overhead float64 // of the processor per message, at each end
	Latency  float64 // from the end of a Send to the earliest moment at which the message can be received
	Byte     float64 // to send a byte, and again to receive it
	Memory   float64 // to read or write a byte in a Copy or ReduceInto
}

// Cost returns the time of a call in the model: all ranks start at once, and it ends when the last
// rank is done. A message is received when a step first needs it, or at the end. Cost runs no data
// and is quick. It does not model shared wires, caches, or Sends that wait for their Recv. Plans
// that would deadlock are an error.
func Cost(plans []*Plan, net Net) (float64, error) {
	type state struct {
		now   float64
		pc    int
		taken []bool
	}
	type pair struct {
		from, to int
		word     bool // signals
	}
	sent := map[pair][]float64{} // when the n-th message can be received
	ranks := make([]state, len(plans))
	nth := make([][]int, len(plans)) // by Recv step: its number among those from its peer
	for i, p := range plans {
		ranks[i].taken = make([]bool, len(p.Steps))
		nth[i] = make([]int, len(p.Steps))
		from, words := map[int32]int{}, map[int32]int{}
		for j := range p.Steps {
			switch s := &p.Steps[j]; s.Verb {
			case Recv:
				nth[i][j] = from[s.Peer]
				from[s.Peer]++
			case WaitSignal:
				nth[i][j] = words[s.Peer]
				words[s.Peer]++
			}
		}
	}
	placed := make([]map[int]float64, len(plans)) // when Puts complete
	take := func(i, j int) bool {                 // rank i waits for its step j
		r, s := &ranks[i], &plans[i].Steps[j]
		if s.Verb == Put {
			r.now = max(r.now, placed[i][j])
			return true
		}
		if !s.Verb.Late() || r.taken[j] {
			return true
		}
		msgs := sent[pair{plans[i].Shape.index(int(s.Peer)), i, s.Verb == WaitSignal}]
		if len(msgs) <= nth[i][j] {
			return false
		}
		r.taken[j] = true
		r.now = max(r.now, msgs[nth[i][j]]) + net.Overhead + float64(s.Dst.Len)*net.Byte
		return true
	}
	for progress := true; progress; {
		progress = false
	next:
		for i, p := range plans {
			r := &ranks[i]
			for ; r.pc < len(p.Steps); r.pc++ {
				s := &p.Steps[r.pc]
				for _, n := range s.Needs {
					if s.Verb == Signal && p.Steps[n].Verb == Put {
						continue
					}
					if !take(i, int(n)) {
						continue next
					}
				}
				switch s.Verb {
				case Send:
					r.now += net.Overhead + float64(s.Src.Len)*net.Byte
					k := pair{i, p.Shape.index(int(s.Peer)), false}
					sent[k] = append(sent[k], r.now+net.Latency)
				case Put: // the bytes cost the target nothing
					r.now += net.Overhead + float64(s.Src.Len)*net.Byte
					if placed[i] == nil {
						placed[i] = map[int]float64{}
					}
					placed[i][r.pc] = r.now + net.Latency
				case Signal: // follows the Puts on the same path, without waiting for their completion
					r.now += net.Overhead
					k := pair{i, p.Shape.index(int(s.Peer)), true}
					sent[k] = append(sent[k], r.now+net.Latency)
				case Copy:
					r.now += 2 * float64(s.Src.Len) * net.Memory
				case ReduceInto:
					r.now += float64(len(s.Srcs)+1) * float64(s.Dst.Len) * net.Memory
				}
				progress = true
			}
		}
	}
	end := 0.0
	for i, p := range plans {
		for j := range p.Steps {
			if ranks[i].pc < len(p.Steps) || !take(i, j) {
				return 0, fmt.Errorf("collectives: %s %s: rank %d waits for ever", p.Algo, p.Shape.Kind, p.Shape.Rank)
			}
		}
		end = max(end, ranks[i].now)
	}
	return end, nil
}
