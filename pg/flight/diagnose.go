package flight

import (
	"cmp"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"time"
)

// Presence says whether a rank answers.
type Presence string

// Values of Presence. Only a rank that is Present has a snapshot.
const (
	Present Presence = "present"
	Silent  Presence = "silent"  // it does not answer, or its lease has ended: it is stopped, or dead
	Absent  Presence = "absent"  // it has not joined yet
	Vacant  Presence = "vacant"  // the view has no rank in this slot
	Unknown Presence = "unknown" // it cannot be known
	// Unreadable: it is of another build, whose state this one cannot read.
	Unreadable Presence = "unreadable"
)

// Rank is what a client that asked all ranks knows of one of them.
type Rank struct {
	Rank     int       `json:"rank"`
	Presence Presence  `json:"presence"`
	Where    string    `json:"where,omitempty"`     // "pid 4711 on node3"
	Addrs    []string  `json:"addresses,omitempty"` // at which it was asked and has not answered
	Detail   string    `json:"detail,omitempty"`    // why there is no snapshot
	Snapshot *Snapshot `json:"snapshot,omitempty"`
	// End is how its process ended, if a flight record says so; see Snapshot.End.
	End string `json:"end,omitempty"`
}

// Kinds of findings.
const (
	FindingStuck     = "stuck"     // Waiters wait for Rank
	FindingMismatch  = "mismatch"  // ranks have called different things
	FindingCycle     = "cycle"     // ranks wait for each other
	FindingGone      = "gone"      // a rank is dead, silent or has not come
	FindingEnded     = "ended"     // a rank's process has ended badly, as a flight record says
	FindingFailed    = "failed"    // a group has failed, or the latest operation before a flight record
	FindingViews     = "views"     // ranks are in different epochs
	FindingLink      = "link"      // two ranks that answer have no link to each other
	FindingStraggler = "straggler" // see Stragglers
)

// Finding is one fault of a job.
type Finding struct {
	Kind    string  `json:"kind"`
	Rank    int     `json:"rank"`            // the rank at fault, -1: no single one
	Ranks   []int   `json:"ranks,omitempty"` // the ranks at fault, if these are several that are not there
	Waiters []int   `json:"waiters,omitempty"`
	Group   uint32  `json:"group,omitempty"`
	Job     string  `json:"job,omitempty"`     // that the group is of, if it is another one
	Number  uint64  `json:"number,omitempty"`  // of the operation
	Seconds float64 `json:"seconds,omitempty"` // how long the fault has lasted
	Text    string  `json:"text"`
}

// stuckAfter is how long an operation runs before its rank may be reported as stuck, or another
// rank that is past it as a fault. Snapshots of different ranks are not taken at the same moment.
const stuckAfter = time.Second

// maxText bounds how many ranks are listed in a sentence.
const maxText = 8

// Diagnose returns the faults of a job that the snapshots show: first different calls, then ranks
// that have ended by themselves, the rank that others wait for, missing ranks, those that were told
// to end, and the rest. If ranks wait for each other in a chain, it names the one
// at the end. It follows a rank into the other jobs of its process: see Beside. It cannot name the
// rank there if that does not answer.
func Diagnose(ranks []Rank) []Finding {
	ranks = Beside(ranks)
	d := &diagnosis{ranks: map[int]*Rank{}, culprits: map[culprit]*Finding{}, missed: map[*Finding]missed{},
		known: map[*Operation][]*Finding{}, blamed: map[int]bool{}, sights: map[sight]string{}}
	for i := range ranks {
		d.ranks[ranks[i].Rank] = &ranks[i]
		d.order = append(d.order, ranks[i].Rank)
	}
	slices.Sort(d.order)
	d.mismatches()
	own, told := d.ended()
	d.found = append(d.found, own...)
	d.stuck()
	d.gone()
	d.found = append(d.found, told...)
	d.failed()
	d.links()
	d.views()
	return d.found
}

// culprit is the key by which findings about different waiters are merged.
type culprit struct {
	rank       int
	kind       string
	group, job string
}

// missed is what is known of a rank that is waited for and not there. Findings about several that
// have it alike are merged.
type missed struct {
	absence
	group   uint32
	job     string
	seen    string // the operation in which the others have last seen it
	awaited string // the operation
}

// absence is why a rank has no snapshot.
type absence struct {
	presence Presence
	detail   string
}

type diagnosis struct {
	ranks      map[int]*Rank
	order      []int
	culprits   map[culprit]*Finding
	missed     map[*Finding]missed
	mismatched []*Group
	known      map[*Operation][]*Finding // findings in which earlier walks from these ended
	sights     map[sight]string
	blamed     map[int]bool // ranks that have a finding
	found      []Finding
}

// same reports whether g and o are the same group: the IDs of subgroups are hashes, and the group
// of all ranks does not grow at all of them at once.
func (g *Group) same(o *Group) bool {
	return g.Job == o.Job && g.ID == o.ID && (g.ID == 1 || g.Size == o.Size && slices.Equal(g.Ranks, o.Ranks))
}

// Failure returns why the latest operation of the group failed, if no other has begun since; else
// "". The group may have gone on without the operation: see Error.
func (g *Group) Failure() string {
	switch {
	case g.operating() || !g.Last.failed():
		return ""
	case g.LastError != "":
		return g.LastError
	case g.Last.Awaited != nil:
		return fmt.Sprintf("%s: %s, waiting for rank %d", g.Last.Call, g.Last.Outcome, *g.Last.Awaited)
	}
	return g.Last.Call + ": " + g.Last.Outcome
}

// operating reports whether the rank is in an operation of the group, or enters a view.
func (g *Group) operating() bool { return g.Running != nil && g.Running.Kind != Agreeing }

// failed reports whether o, which may be nil, has ended without a result, and not because this rank
// has closed the group.
func (o *Operation) failed() bool {
	return o != nil && o.Ended != nil && o.Outcome != OK.String() && o.Outcome != Closed.String()
}

// group returns the rank's own part of the group of, or nil.
func (s *Snapshot) group(of *Group) *Group {
	for i := range s.Groups {
		if s.Groups[i].same(of) {
			return &s.Groups[i]
		}
	}
	return nil
}

// same reports whether a and b, of the same number, are the same call.
func same(a, b *Operation) bool {
	return a.Kind == b.Kind && a.DType == b.DType && a.Reduction == b.Reduction && a.Root == b.Root &&
		a.Elements == b.Elements && a.CountsHash == b.CountsHash && a.Packets == b.Packets
}

// Short names an operation by kind and number, by its group if that is not the group of all ranks,
// and by its job if that is another one.
func (o *Operation) Short() string {
	s := o.Call
	if !o.message() && o.Kind != Entering {
		s = fmt.Sprintf("%s #%d", o.Kind, o.Number)
		if o.Group != 1 {
			s += fmt.Sprintf(" of group %d", o.Group)
		}
	}
	return s + of(o.Job)
}

// of names a job if it is another one than that of the ranks.
func of(job string) string {
	if job == "" {
		return ""
	}
	return " of job " + job
}

// Awaits lists the ranks that the operation waits for: "rank 3", "rank 1 of that job"; "": none.
func (o *Operation) Awaits() string {
	var parts []string
	if len(o.WaitsFor) > 0 {
		parts = append(parts, RankList(o.WaitsFor))
	}
	if len(o.Strangers) > 0 {
		parts = append(parts, RankList(o.Strangers)+" of that job")
	}
	return strings.Join(parts, ", and ")
}

// Seconds formats a duration: "41 s", "3.2 s", "4m10s".
func Seconds(d time.Duration) string {
	switch d = max(d, 0); {
	case d < 10*time.Second:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d < 2*time.Minute:
		return fmt.Sprintf("%.0f s", d.Seconds())
	}
	return d.Round(time.Second).String()
}

// RankList formats a list of ranks: "rank 3", "ranks 0-2 and 5".
func RankList(ranks []int) string {
	ranks = slices.Compact(slices.Sorted(slices.Values(ranks)))
	if len(ranks) == 1 {
		return fmt.Sprint("rank ", ranks[0])
	}
	var parts []string
	for i := 0; i < len(ranks); {
		j := i
		for j+1 < len(ranks) && ranks[j+1] == ranks[j]+1 {
			j++
		}
		switch {
		case len(parts) == maxText:
			parts = append(parts, fmt.Sprintf("%d more", len(ranks)-i))
			j = len(ranks) - 1
		case j == i:
			parts = append(parts, fmt.Sprint(ranks[i]))
		case j == i+1:
			parts = append(parts, fmt.Sprint(ranks[i]))
			j = i
		default:
			parts = append(parts, fmt.Sprintf("%d-%d", ranks[i], ranks[j]))
		}
		i = j + 1
	}
	if n := len(parts); n > 1 {
		return "ranks " + strings.Join(parts[:n-1], ", ") + " and " + parts[n-1]
	}
	return "ranks " + strings.Join(parts, "")
}

func verb(n int, one, many string) string {
	if n == 1 {
		return one
	}
	return many
}

// mismatches finds ranks that are in different calls of the same number.
func (d *diagnosis) mismatches() {
	type at struct {
		id, size uint32
		job      string
		ranks    string
		number   uint64
	}
	type first struct {
		rank int
		op   *Operation
	}
	seen := map[at]first{}
	for r, g := range d.groups() {
		if g.Running == nil || g.Running.between() || g.ambiguous {
			continue
		}
		k := at{id: g.ID, job: g.Job, number: g.Running.Number}
		if g.ID != 1 { // see same
			k.size, k.ranks = uint32(g.Size), fmt.Sprint(g.Ranks)
		}
		f, ok := seen[k]
		switch {
		case !ok:
			seen[k] = first{r, g.Running}
		case !same(f.op, g.Running) && !d.mismatch(g):
			d.mismatched = append(d.mismatched, g)
			in := ""
			if g.Job != "" {
				in = " in job " + g.Job
			}
			d.found = append(d.found, Finding{Kind: FindingMismatch, Rank: -1, Waiters: []int{f.rank, r}, Group: g.ID,
				Job: g.Job, Number: k.number,
				Text: fmt.Sprintf("ranks disagree%s: rank %d called %s, rank %d called %s", in, f.rank, f.op.Call, r,
					g.Running.Call)})
		}
	}
}

// mismatch reports whether the ranks of a group disagree.
func (d *diagnosis) mismatch(g *Group) bool { return slices.ContainsFunc(d.mismatched, g.same) }

// groups yields the groups of all ranks that have a snapshot.
func (d *diagnosis) groups() iter.Seq2[int, *Group] {
	return func(yield func(int, *Group) bool) {
		for _, r := range d.order {
			if s := d.ranks[r].Snapshot; s != nil {
				for i := range s.Groups {
					if !yield(r, &s.Groups[i]) {
						return
					}
				}
			}
		}
	}
}

// silent lists the ranks that have no snapshot.
func (d *diagnosis) silent() (all []int) {
	for _, r := range d.order {
		if d.ranks[r].Snapshot == nil {
			all = append(all, r)
		}
	}
	return all
}

// open reports whether the rank has groups of its own job.
func (s *Snapshot) open() bool {
	return slices.ContainsFunc(s.Groups, func(g Group) bool { return g.Job == "" })
}

// silent lists the other jobs of the rank's process that did not tell their states.
func (s *Snapshot) silent() (jobs []string) {
	for i := range s.Others {
		if s.Others[i].Silent {
			jobs = append(jobs, s.Others[i].Job)
		}
	}
	return jobs
}

// running lists the operations that a rank has been in for long, and that its program waits for.
func running(s *Snapshot) (ops []*Operation) {
	long := func(o *Operation) bool { return o != nil && !o.Async && s.Time.Sub(o.Started) >= stuckAfter }
	for i := range s.Groups {
		if o := s.Groups[i].Running; long(o) {
			ops = append(ops, o)
		}
	}
	for i := range s.Messages {
		if o := &s.Messages[i]; long(o) {
			ops = append(ops, o)
		}
	}
	return ops
}

// stuck walks from every waiting rank to the rank that it waits for.
func (d *diagnosis) stuck() {
	for _, r := range d.order {
		s := d.ranks[r].Snapshot
		if s == nil {
			continue
		}
		for _, o := range running(s) {
			w := walk{d: d, first: r, seen: map[*Operation]bool{}, age: s.Time.Sub(o.Started)}
			w.follow(r, o)
			d.known[o] = w.ends
		}
	}
	keys := slices.SortedFunc(maps.Keys(d.culprits), func(a, b culprit) int {
		return cmp.Or(len(d.culprits[b].Waiters)-len(d.culprits[a].Waiters), a.rank-b.rank, cmp.Compare(a.kind, b.kind),
			cmp.Compare(a.group, b.group), cmp.Compare(a.job, b.job))
	})
	first := map[missed]*Finding{} // of several that are alike
	var all []*Finding
	for _, k := range keys {
		f := d.culprits[k]
		if f.Kind == FindingStuck {
			d.blamed[k.rank] = true
		}
		if m, ok := d.missed[f]; ok {
			if to := first[m]; to != nil {
				to.merge(f)
				continue
			}
			first[m] = f
		}
		all = append(all, f)
	}
	for _, f := range all {
		slices.Sort(f.Ranks)
		f.Waiters = slices.Compact(slices.Sorted(slices.Values(f.Waiters)))
		if m, ok := d.missed[f]; ok {
			f.Text = d.absent(f.faulty(), m.absence)
			n := len(f.faulty())
			if m.seen != "" {
				f.Text += fmt.Sprintf("; %s last seen in %s", verb(n, "it was", "they were"), m.seen)
			}
			f.Text += fmt.Sprintf("; %s waited for in %s", verb(n, "it is", "they are"), m.awaited)
		}
		if f.Kind == FindingStuck {
			if others := slices.DeleteFunc(slices.Clone(f.Waiters),
				func(r int) bool { return r == f.Rank }); len(others) > 0 {
				f.Text += fmt.Sprintf("; %s %s for %s, %s so far", RankList(others), verb(len(others), "waits", "wait"),
					verb(len(f.faulty()), "it", "them"), Seconds(time.Duration(f.Seconds*float64(time.Second))))
			}
		}
		d.found = append(d.found, *f)
	}
}

// faulty lists the ranks at fault.
func (f *Finding) faulty() []int {
	if f.Ranks != nil {
		return f.Ranks
	}
	return []int{f.Rank}
}

// merge adds what is known of another rank, which is at fault in the same way.
func (f *Finding) merge(o *Finding) {
	f.Rank, f.Ranks = -1, append(f.faulty(), o.Rank)
	f.Waiters, f.Seconds = append(f.Waiters, o.Waiters...), max(f.Seconds, o.Seconds)
}

// walk is one walk from a waiting rank along the ranks that are waited for.
type walk struct {
	d     *diagnosis
	first int
	age   time.Duration
	seen  map[*Operation]bool
	path  []int
	ends  []*Finding
}

// blame ends a walk with a finding.
func (w *walk) blame(rank int, kind string, o *Operation, text string) bool {
	w.fault(rank, kind, o, text)
	return true
}

// fault is blame. It returns the finding if it is the first one, or takes the place of the first.
func (w *walk) fault(rank int, kind string, o *Operation, text string) *Finding {
	k := culprit{rank, kind, fmt.Sprint(o.Group), o.Job}
	switch {
	case rank < 0: // strangers, whom the text names
		k.group = text
	case o.message():
		k.group = o.Call
	}
	f := w.d.culprits[k]
	anew := f == nil || o.Number < f.Number // the earliest operation that the rank has not begun
	if f == nil {
		f = &Finding{Kind: kind, Rank: rank, Group: o.Group, Job: o.Job}
		w.d.culprits[k] = f
	}
	w.end(f)
	if !anew {
		return nil
	}
	f.Number, f.Text = o.Number, text
	return f
}

func (w *walk) end(f *Finding) {
	f.Waiters = append(f.Waiters, w.first)
	f.Seconds = max(f.Seconds, w.age.Seconds())
	w.ends = append(w.ends, f)
}

func (o *Operation) message() bool { return o.Kind == "send" || o.Kind == "recv" }

// between reports whether o is none of the operations that the group's ranks count.
func (o *Operation) between() bool { return o.Kind == Entering || o.Kind == Agreeing }

// follow visits the ranks that rank waits for in o, and reports whether that explains the wait.
func (w *walk) follow(rank int, o *Operation) (explained bool) {
	if w.seen[o] {
		return true // explained by then
	}
	if ends := w.d.known[o]; ends != nil { // an earlier walk passed here
		for _, f := range ends {
			if f.Kind != FindingCycle {
				w.end(f)
			}
		}
		return true
	}
	w.seen[o] = true
	w.path = append(w.path, rank)
	defer func() { w.path = w.path[:len(w.path)-1] }()
	s := w.d.ranks[rank].Snapshot
	if len(o.WaitsFor)+len(o.Strangers) == 0 {
		if o.Kind == "recv" { // a receive from any rank blames no rank
			return false
		}
		why := "it moves or combines data, or is held up in the kernel"
		if o.Kind == Agreeing {
			why = "it has all votes, and asks the store"
		}
		return w.blame(rank, FindingStuck, o, fmt.Sprintf("rank %d has been in %s for %s and waits for no rank: %s",
			rank, o.Short(), Seconds(s.Time.Sub(o.Started)), why))
	}
	for _, to := range o.WaitsFor {
		if i := slices.Index(w.path, to); i < 0 {
			explained = w.visit(rank, o, to) || explained
		} else if w.inside(rank, o, to) {
			explained = w.cycle(w.path[i:], o) || explained
		}
	}
	if n := len(o.Strangers); n > 0 && !explained {
		here := ""
		if silent := w.d.silent(); len(silent) > 0 {
			here = fmt.Sprintf(" (%s %s not)", RankList(silent), verb(len(silent), "does", "do"))
		}
		return w.blame(-1, FindingStuck, o, fmt.Sprintf("%s of job %s, %s none of the ranks here that answer%s, %s "+
			"waited for in %s", RankList(o.Strangers), o.Job, verb(n, "which is", "which are"), here,
			verb(n, "is", "are"), o.Short()))
	}
	return explained
}

// inside reports whether rank to is in operation o of another rank, or in an earlier one.
func (w *walk) inside(rank int, o *Operation, to int) bool {
	t := w.d.ranks[to]
	if t == nil || t.Snapshot == nil {
		return false
	}
	g := groupOf(w.d.ranks[rank].Snapshot, o)
	if g == nil {
		return false
	}
	theirs := t.Snapshot.group(g)
	switch {
	case theirs == nil || theirs.Running == nil:
		return false
	case theirs.Running.Kind == Entering:
		return true
	}
	return (theirs.Running.Kind == Agreeing) == (o.Kind == Agreeing) && theirs.Running.Number <= o.Number
}

// groupOf returns the group that o runs in, nil for a message.
func groupOf(s *Snapshot, o *Operation) *Group {
	for i := range s.Groups {
		if s.Groups[i].Running == o {
			return &s.Groups[i]
		}
	}
	return nil
}

// cycle reports ranks that wait for each other.
func (w *walk) cycle(path []int, o *Operation) bool {
	ring := slices.Sorted(slices.Values(path))
	if g := groupOf(w.d.ranks[path[len(path)-1]].Snapshot, o); g != nil && w.d.mismatch(g) {
		return true // explained
	}
	k := culprit{ring[0], FindingCycle, fmt.Sprint(ring), ""}
	if w.d.culprits[k] == nil {
		f := &Finding{Kind: FindingCycle, Rank: -1, Group: o.Group, Job: o.Job, Number: o.Number, Waiters: ring,
			Seconds: w.age.Seconds(),
			Text: fmt.Sprintf("%s wait for each other in %s, %s so far: each is there, and what was sent has "+
				"not arrived", RankList(ring), o.Short(), Seconds(w.age))}
		w.d.culprits[k], w.ends = f, append(w.ends, f)
	}
	return true
}

// visit examines a rank that is waited for, and reports whether that explains the wait.
func (w *walk) visit(from int, o *Operation, to int) bool {
	t := w.d.ranks[to]
	mine := groupOf(w.d.ranks[from].Snapshot, o) // nil: o is a message
	if t == nil || t.Snapshot == nil {
		m := missed{group: o.Group, job: o.Job, awaited: o.Short()}
		if t != nil {
			m.absence = absence{t.Presence, t.Detail}
		}
		if mine != nil {
			m.seen = w.d.seen(mine, to)
		}
		if f := w.fault(to, FindingStuck, o, ""); f != nil { // see stuck for its text
			w.d.missed[f] = m
		}
		return true
	}
	s := t.Snapshot
	if mine == nil {
		text := fmt.Sprintf("rank %d has not sent what rank %d waits for: %s", to, from, o.Short())
		if o.Kind == "send" {
			text = fmt.Sprintf("rank %d has not taken what rank %d sends: %s", to, from, o.Short())
		}
		return w.elsewhere(o, to, text)
	}
	g := s.group(mine)
	switch {
	case g == nil && slices.Contains(s.silent(), mine.Job):
		return w.blame(to, FindingStuck, o, fmt.Sprintf("rank %d's state in job %s is not to be had; it is waited for "+
			"in %s", to, mine.Job, o.Short()))
	case g == nil:
		return w.elsewhere(o, to, fmt.Sprintf("rank %d has closed the group of %s, or has not made it yet", to,
			o.Short()))
	case g.Running != nil && g.Running.Kind == Entering:
		return s.Time.Sub(g.Running.Started) >= stuckAfter && w.follow(to, g.Running)
	case o.Kind == Entering && g.Epoch >= o.Number:
		return false // it has just left the operation
	case o.Kind == Entering:
		text := fmt.Sprintf("rank %d has not begun to enter epoch %d, it is in epoch %d", to, o.Number, g.Epoch)
		if g.Error != "" {
			text += ", where it has not called Recover since this failed: " + g.Error
		}
		return w.elsewhere(o, to, text)
	case o.Kind == Agreeing && g.Running != nil && g.Running.Kind == Agreeing:
		return s.Time.Sub(g.Running.Started) >= stuckAfter && w.follow(to, g.Running)
	case o.Kind == Agreeing && g.Agreed >= o.Number:
		return false // it has just voted
	case o.Kind == Agreeing:
		return w.elsewhere(o, to, fmt.Sprintf("rank %d has not called %s", to, o.Short()))
	case g.Error != "":
		return w.blame(to, FindingStuck, o, fmt.Sprintf("rank %d has given up and will not enter %s: %s", to, o.Short(),
			g.Error))
	case g.operating() && g.Running.Number <= o.Number:
		if g.Running.Number == o.Number && !same(g.Running, o) {
			return true // a mismatch, which is a finding already
		}
		return s.Time.Sub(g.Running.Started) >= stuckAfter && w.follow(to, g.Running)
	case !g.operating() && g.Last.failed() && g.Last.Number == o.Number:
		return w.blame(to, FindingStuck, o, fmt.Sprintf("rank %d has given up %s: %s", to, o.Short(), g.Failure()))
	case g.operating() || g.Finished >= o.Number: // it has just left, or a message is lost
		since := s.Time
		if g.operating() {
			since = g.Running.Started
		} else if g.Last != nil && g.Last.Ended != nil {
			since = *g.Last.Ended
		}
		return s.Time.Sub(since) >= 2*stuckAfter &&
			w.blame(to, FindingLink, o, fmt.Sprintf("rank %d waits in %s for rank %d, which has finished it: "+
				"what that sent has not arrived", from, o.Short(), to))
	}
	done := "has finished nothing yet"
	if g.Finished > 0 {
		done = fmt.Sprintf("last finished #%d", g.Finished)
		if g.Last.failed() {
			done = fmt.Sprintf("last gave up #%d", g.Finished)
		}
		if g.Last != nil && g.Last.Ended != nil {
			done += fmt.Sprintf(", %s ago", Seconds(s.Time.Sub(*g.Last.Ended)))
		}
	}
	return w.elsewhere(o, to, fmt.Sprintf("rank %d has not entered %s (%s)", to, o.Short(), done))
}

// seen names the operation of a group in which the other ranks have last seen a rank; "": none.
func (d *diagnosis) seen(group *Group, rank int) string {
	k := sight{rank, group.ID, group.Job}
	if text, ok := d.sights[k]; ok {
		return text
	}
	var last *Peer
	for _, g := range d.groups() {
		if !g.same(group) {
			continue
		}
		for i := range g.Peers {
			if p := &g.Peers[i]; p.Rank == rank && p.Seen != "" && (last == nil || p.Number > last.Number) {
				last = p
			}
		}
	}
	if last != nil {
		d.sights[k] = last.Seen
	} else {
		d.sights[k] = ""
	}
	return d.sights[k]
}

type sight struct {
	rank  int
	group uint32
	job   string
}

// elsewhere follows other operations that the rank is stuck in, and blames it with text if that
// explains nothing.
func (w *walk) elsewhere(o *Operation, to int, text string) bool {
	s := w.d.ranks[to].Snapshot
	others := running(s)
	for _, other := range others {
		if !w.seen[other] && other.Awaits() != "" && w.follow(to, other) {
			return true
		}
	}
	if len(others) > 0 {
		text += fmt.Sprintf("; it has been in %s for %s", others[0].Short(), Seconds(s.Time.Sub(others[0].Started)))
		if waits := others[0].Awaits(); waits != "" {
			text += ", and waits for " + waits
		}
	} else if jobs := s.silent(); jobs != nil {
		text += "; it may be in job " + strings.Join(jobs, " or ") + ", whose state is not to be had"
	}
	return w.blame(to, FindingStuck, o, text)
}

// absent describes ranks that have no snapshot for the same reason, and where it is if that is one.
func (d *diagnosis) absent(ranks []int, a absence) string {
	n := len(ranks)
	what := verb(n, "is ", "are ") + string(a.presence)
	switch a.presence {
	case "":
		what = verb(n, "is", "are") + " not there"
	case Silent:
		what = verb(n, "does", "do") + " not answer"
	case Absent:
		what = verb(n, "has", "have") + " not joined yet"
	case Vacant:
		what = verb(n, "is", "are") + " not in the view"
	}
	if r := d.ranks[ranks[0]]; n == 1 && r != nil && r.Where != "" {
		what += " (" + r.Where + ")"
	}
	if a.detail != "" && n == 1 {
		what += ": " + a.detail
	} else if a.detail != "" {
		what += ": " + plural.Replace(a.detail)
	}
	return RankList(ranks) + " " + what
}

// plural has details that are said of one rank, and how they are said of several.
var plural = strings.NewReplacer(
	"its lease has ended", "their leases have ended",
	"takes it for alive", "takes them for alive",
	"it has another secret", "they have another secret",
	"another process has taken its place", "other processes have taken their places",
	"its record in the store", "their records in the store",
	"there is no flight record of it", "there is no flight record of them")

// gone reports ranks that are not there, or seem not to be, and that no walk has ended at.
func (d *diagnosis) gone() {
	like := map[absence]*Finding{}
	var order []absence
	for _, n := range d.order {
		r := d.ranks[n]
		if r.Snapshot != nil || r.Presence == Vacant || r.Presence == Unknown || r.Presence == Unreadable ||
			d.blamed[n] {
			continue
		}
		a, f := absence{r.Presence, r.Detail}, &Finding{Kind: FindingGone, Rank: n}
		if first := like[a]; first != nil {
			first.merge(f)
			continue
		}
		like[a], order = f, append(order, a)
	}
	for _, a := range order {
		f := like[a]
		f.Text = d.absent(f.faulty(), a)
		d.found = append(d.found, *f)
	}
}

// terminated is how a process ended that was told to, as a launcher tells those that are left.
const terminated = "was killed by signal 15 (SIGTERM)"

// ended reports ranks whose processes have ended badly: those that ended by themselves, the
// earliest one first, and those that were told to. Ranks that have ended alike are merged, but for
// the first.
func (d *diagnosis) ended() (own, told []Finding) {
	var order []int
	for _, n := range d.order {
		if r := d.ranks[n]; r.End != "" && r.Snapshot != nil {
			order = append(order, n)
		}
	}
	slices.SortStableFunc(order, func(a, b int) int {
		return d.ranks[a].Snapshot.Time.Compare(d.ranks[b].Snapshot.Time)
	})
	like := map[string]*Finding{}
	var all []*Finding
	alone := true
	for _, n := range order {
		end, f := d.ranks[n].End, &Finding{Kind: FindingEnded, Rank: n}
		if first := like[end]; first != nil {
			first.merge(f)
			continue
		}
		all = append(all, f)
		if end != terminated && alone {
			alone = false // the next that has ended alike begins another finding
			continue
		}
		like[end] = f
	}
	for _, f := range all {
		ranks := f.faulty()
		r := d.ranks[ranks[0]]
		f.Text = RankList(ranks) + " " + r.End
		if len(ranks) > 1 {
			f.Text = RankList(ranks) + " " + strings.Replace(r.End, "was ", "were ", 1)
		} else if r.Where != "" {
			f.Text += " (" + r.Where + ")"
		}
		if r.End == terminated {
			told = append(told, *f)
		} else {
			own = append(own, *f)
		}
	}
	return own, told
}

// failed reports groups that have failed, each error once. It reports a failed latest operation of
// a flight record, too: a rank that answers may have recovered since.
func (d *diagnosis) failed() {
	type fault struct {
		id   uint32
		job  string
		all  bool // the group has failed
		text string
	}
	at := map[fault][]int{}
	var faults []fault
	for n, g := range d.groups() {
		f := fault{g.ID, g.Job, true, g.Error}
		if g.Error == "" && d.ranks[n].Snapshot.Reason != "" {
			f.all, f.text = false, g.Failure()
		}
		if f.text == "" {
			continue
		}
		if at[f] == nil {
			faults = append(faults, f)
		}
		at[f] = append(at[f], n)
	}
	for _, f := range faults {
		which := "the group"
		if f.id != 1 {
			which = fmt.Sprint("group ", f.id)
		}
		which += of(f.job)
		if !f.all {
			which = "the latest operation of " + which
		}
		d.found = append(d.found, Finding{Kind: FindingFailed, Rank: -1, Waiters: at[f], Group: f.id, Job: f.job,
			Text: fmt.Sprintf("%s has failed at %s: %s", which, RankList(at[f]), f.text)})
	}
}

// links reports pairs of present ranks that have lost their link.
func (d *diagnosis) links() {
	for _, n := range d.order {
		s := d.ranks[n].Snapshot
		if s == nil {
			continue
		}
		for i := range s.Links {
			l := &s.Links[i]
			if to := d.ranks[l.Rank]; l.Error != "" && !l.Up && to != nil && to.Snapshot != nil &&
				to.Snapshot.open() && to.End == "" {
				d.found = append(d.found, Finding{Kind: FindingLink, Rank: l.Rank, Waiters: []int{n},
					Text: fmt.Sprintf("rank %d has no link to rank %d any more: %s", n, l.Rank, l.Error)})
			}
		}
	}
}

// views reports ranks in different epochs.
func (d *diagnosis) views() {
	at := map[uint64][]int{}
	for _, n := range d.order {
		if s := d.ranks[n].Snapshot; s != nil && s.Joined {
			at[s.View.Epoch] = append(at[s.View.Epoch], n)
		}
	}
	if len(at) < 2 {
		return
	}
	var parts []string
	for _, e := range slices.Backward(slices.Sorted(maps.Keys(at))) {
		parts = append(parts, fmt.Sprintf("%s %s in epoch %d", RankList(at[e]), verb(len(at[e]), "is", "are"), e))
	}
	d.found = append(d.found, Finding{Kind: FindingViews, Rank: -1,
		Text: "the ranks have different views: " + strings.Join(parts, ", ")})
}

// Straggler is a rank that others have waited for.
type Straggler struct {
	Rank   int     `json:"rank"`
	Kept   float64 `json:"kept_seconds"`   // how long others have waited for it, in total
	Waited float64 `json:"waited_seconds"` // how long it has waited for others
}

// Stragglers lists the ranks that others have waited for longer than they have waited themselves
// since the snapshots in before (nil: since they joined), the worst first. A rank that only passes
// on a delay does not count: in a ring every rank waits for its neighbour, and only the late one
// waits for none.
func Stragglers(ranks, before []Rank) []Straggler {
	type incarnation struct {
		rank        int
		incarnation string
	}
	type pair struct {
		incarnation
		peer int
	}
	base := map[pair]float64{}
	for _, r := range before {
		if r.Snapshot != nil {
			for _, l := range r.Snapshot.Links {
				base[pair{incarnation{r.Rank, r.Snapshot.Incarnation}, l.Rank}] = l.Waited
			}
		}
	}
	by := map[int]*Straggler{}
	of := func(r int) *Straggler {
		if by[r] == nil {
			by[r] = &Straggler{Rank: r}
		}
		return by[r]
	}
	for _, r := range ranks {
		if r.Snapshot == nil {
			continue
		}
		for _, l := range r.Snapshot.Links {
			d := max(0, l.Waited-base[pair{incarnation{r.Rank, r.Snapshot.Incarnation}, l.Rank}])
			of(r.Rank).Waited += d
			of(l.Rank).Kept += d
		}
	}
	var all []Straggler
	for _, s := range by {
		if s.Kept > s.Waited {
			all = append(all, *s)
		}
	}
	slices.SortFunc(all, func(a, b Straggler) int {
		return cmp.Or(cmp.Compare(b.Kept-b.Waited, a.Kept-a.Waited),
			a.Rank-b.Rank)
	})
	return all
}
