package collectives

import (
	"fmt"
	"strings"
)

// String returns the verb's name in printed plans.
func (v Verb) String() string {
	switch v {
	case Send:
		return "send"
	case Recv:
		return "recv"
	case Copy:
		return "copy"
	case ReduceInto:
		return "reduce"
	case Put:
		return "put"
	case Signal:
		return "signal"
	case WaitSignal:
		return "waitsignal"
	}
	return fmt.Sprintf("verb(%d)", uint8(v))
}

// String returns the memory's name in printed plans.
func (b Buf) String() string {
	if b > PeerTmp {
		return fmt.Sprintf("buf(%d)", uint8(b))
	}
	return [...]string{"in", "out", "tmp", "in", "out", "tmp"}[b]
}

// String returns for example "out[0:64]", "out.2[0:64]" in part 2, "in@3.2[0:64]" at peer 3.
func (r Ref) String() string {
	var s strings.Builder
	s.WriteString(r.Buf.String())
	if r.Buf.Remote() {
		fmt.Fprintf(&s, "@%d", r.Peer)
	}
	if r.Part != 0 {
		fmt.Fprintf(&s, ".%d", r.Part)
	}
	fmt.Fprintf(&s, "[%d:%d]", r.Off, r.Off+r.Len)
	return s.String()
}

func join(refs []Ref, sep string) string {
	all := make([]string, len(refs))
	for i, r := range refs {
		all[i] = r.String()
	}
	return strings.Join(all, sep)
}

// String returns the step on one line.
func (s Step) String() string {
	var w strings.Builder
	switch s.Verb {
	case Send:
		if s.Src.Len == 0 {
			fmt.Fprintf(&w, "signal -> %d", s.Peer)
		} else {
			fmt.Fprintf(&w, "send %v -> %d", s.Src, s.Peer)
		}
	case Recv:
		if s.Dst.Len == 0 {
			fmt.Fprintf(&w, "await <- %d", s.Peer)
		} else {
			fmt.Fprintf(&w, "recv %v <- %d", s.Dst, s.Peer)
		}
	case Copy:
		fmt.Fprintf(&w, "copy %v = %v", s.Dst, s.Src)
	case ReduceInto:
		fmt.Fprintf(&w, "reduce %s = %s", s.Dst, join(s.Srcs, " + "))
	case Put:
		fmt.Fprintf(&w, "put %v = %v", s.Dst, s.Src)
	case Signal:
		fmt.Fprintf(&w, "notify -> %d", s.Peer)
	case WaitSignal:
		fmt.Fprintf(&w, "expect <- %d", s.Peer)
	default:
		w.WriteString(s.Verb.String())
	}
	if s.Final {
		w.WriteString(" final")
	}
	if s.Once {
		w.WriteString(" once")
	}
	if len(s.Needs) > 0 {
		fmt.Fprintf(&w, " needs %s", strings.Trim(fmt.Sprint(s.Needs), "[]"))
	}
	return w.String()
}

// String prints the plan: a summary line, then a numbered line for each step.
func (p *Plan) String() string {
	var w strings.Builder
	s := &p.Shape
	fmt.Fprintf(&w, "%s %s, rank %d of %v in %d slots", s.Kind, p.Algo, s.Rank, s.Active, s.Size)
	if s.Kind.rooted() {
		fmt.Fprintf(&w, ", root %d", s.Root)
	}
	switch s.Kind {
	case Barrier:
	case AllGatherV:
		fmt.Fprintf(&w, ", %v x %d B", s.Counts, s.Elem)
	case AllToAllV:
		fmt.Fprintf(&w, ", %v -> %v x %d B", s.Counts, s.RecvCounts, s.Elem)
	default:
		fmt.Fprintf(&w, ", %d x %d B", s.Count, s.Elem)
	}
	if p.Tmp > 0 {
		fmt.Fprintf(&w, ", tmp %d B", p.Tmp)
	}
	if p.LoadStore {
		w.WriteString(", loadstore")
	}
	if p.OneSided {
		w.WriteString(", onesided")
	}
	w.WriteByte('\n')
	for i, st := range p.Steps {
		fmt.Fprintf(&w, "%4d  %v\n", i, st)
	}
	return w.String()
}
