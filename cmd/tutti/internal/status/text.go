package status

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"sort"
	"strings"
	"time"
	"unicode/utf8"

	"tutti/cmd/tutti/internal/term"
	"tutti/pg/flight"
)

// Style is the style of text: with colour, in lines of at most Width columns (0: any) where they
// can be broken, and with at most Rows ranks (0: all), the remarkable ones first. If Lines is not
// 0, Rows does not count, and the text has at most so many lines if one finding and one rank have
// room.
type Style struct {
	Colour bool
	Width  int
	Rows   int
	Lines  int
}

// room is how much of a report is shown.
type room struct {
	findings, hints int
	rows            int  // of each table; 0: all
	endpoints       bool // they have a table, else only their number is shown
}

// Bounds of what is shown if there is room.
const (
	maxFindings   = 10
	maxStragglers = 3
)

func (s Style) paint(code, text string) string {
	if !s.Colour {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

// Text writes the report as text: what is wrong first, then the ranks.
func (r *Report) Text(w io.Writer, st Style) {
	all := room{len(r.Findings), len(r.hints()), st.Rows, true}
	if all.findings > maxFindings+1 {
		all.findings = maxFindings
	}
	if st.Lines > 0 {
		all = r.fit(all, st)
	}
	r.write(w, st, all)
}

// fit returns how much of the report has room in the lines of a style. The tables give way first,
// down to a few lines, then hints, the table of endpoints, and findings.
func (r *Report) fit(all room, st Style) room {
	fits := func(rm room) bool {
		var b bytes.Buffer
		r.write(&b, st, rm)
		return bytes.Count(b.Bytes(), []byte("\n")) <= st.Lines
	}
	rows := max(len(r.Ranks), r.countEndpoints())
	if all.rows = 0; fits(all) {
		return all
	}
	const few = 3
	for all.rows = max(min(rows, few), 1); !fits(all); {
		switch {
		case all.hints > 0:
			all.hints--
		case all.endpoints:
			all.endpoints = false
		case all.findings > 1:
			all.findings--
		case all.rows > 1:
			all.rows--
		default:
			return all // the terminal cuts it
		}
	}
	all.rows += sort.Search(max(rows-all.rows, 0), func(more int) bool {
		larger := all
		larger.rows += more + 1
		return !fits(larger)
	})
	return all
}

// write writes as much of the report as there is room for.
func (r *Report) write(w io.Writer, st Style, rm room) {
	head := fmt.Sprintf("job %s: %s", r.Job, count(len(r.Ranks), "rank"))
	switch {
	case r.Epoch == 0:
	case len(r.Active) > 0 && len(r.Active) < len(r.Ranks):
		head += fmt.Sprintf(", %d active in epoch %d", len(r.Active), r.Epoch)
	default:
		head += fmt.Sprintf(", epoch %d", r.Epoch)
	}
	var ops, bytes float64
	n := 0
	for _, x := range r.Ranks {
		if x.Snapshot != nil {
			ops, bytes, n = ops+x.Operations, bytes+x.Bytes, n+1
		}
	}
	if r.Interval > 0 && n > 0 {
		head += fmt.Sprintf(", %s operations and %s a second and rank", quantity(ops/float64(n)),
			Size(bytes/float64(n)))
	}
	fmt.Fprintln(w, st.paint("1", term.Wrap(head, 0, st.Width)))
	note := func(mark, colour, text string) {
		fmt.Fprintf(w, "%s %s\n", st.paint(colour, mark), term.Wrap(text, 2, st.Width))
	}
	switch {
	case len(r.Findings) > 0:
	case n == 0 && len(r.Ranks) > 0:
		note("~", "33", "no rank can be read: whether one is stuck is not known")
	default:
		fmt.Fprintln(w, st.paint("32", "nothing is stuck"))
	}
	for _, f := range r.Findings[:rm.findings] {
		note("!", "31", f.Text)
	}
	if more := len(r.Findings) - rm.findings; more > 0 {
		note("!", "31", fmt.Sprintf("and %d more", more))
	}
	hints := r.hints()
	for _, text := range hints[:rm.hints] {
		note("~", "33", text)
	}
	if more := len(hints) - rm.hints; more > 0 {
		note("~", "33", fmt.Sprintf("and %d more", more))
	}
	fmt.Fprintln(w)
	st.Rows = rm.rows
	r.table(w, st)
	if n := r.countEndpoints(); rm.endpoints {
		r.endpoints(w, st)
	} else if n > 0 {
		fmt.Fprintf(w, "and %s\n", count(n, "endpoint"))
	}
}

func (r *Report) countEndpoints() (n int) {
	for _, x := range r.Ranks {
		if x.Snapshot != nil {
			n += len(x.Snapshot.Endpoints)
		}
	}
	return n
}

// hints lists what is no fault, yet worth knowing: the worst stragglers, and how groups get at the
// memory of GPUs.
func (r *Report) hints() (all []string) {
	for _, s := range r.Stragglers[:min(len(r.Stragglers), maxStragglers)] {
		all = append(all, fmt.Sprintf("rank %d keeps others waiting: they have waited %s for it, it %s for others",
			s.Rank, secs(s.Kept), secs(s.Waited)))
	}
	return append(all, r.devices()...)
}

// table writes a line for each rank.
func (r *Report) table(w io.Writer, st Style) {
	rows := slices.Clone(r.Ranks)
	var rest []Rank
	if st.Rows > 0 && len(rows) > st.Rows {
		slices.SortStableFunc(rows, func(a, b Rank) int {
			if a.Plain != b.Plain {
				return map[bool]int{false: -1, true: 1}[a.Plain]
			}
			return a.Rank.Rank - b.Rank.Rank
		})
		rows, rest = rows[:st.Rows], rows[st.Rows:]
		slices.SortFunc(rows, func(a, b Rank) int { return a.Rank.Rank - b.Rank.Rank })
	}
	cells := [][]string{{"rank", "pid", "host", "epoch", "op/s", "B/s", "state"}}
	hosts := map[string]bool{}
	for _, x := range rows {
		line := []string{fmt.Sprint(x.Rank.Rank), "", "", "", "", "", x.State}
		if s := x.Snapshot; s != nil {
			line[1], line[2], line[3] = fmt.Sprint(s.PID), s.Host, fmt.Sprint(s.View.Epoch)
			if r.Interval > 0 {
				line[4], line[5] = quantity(x.Operations), Size(x.Bytes)
			}
		} else if _, err := fmt.Sscanf(x.Where, "pid %s on %s", &line[1], &line[2]); err != nil {
			line[1], line[2] = "", ""
		}
		hosts[line[2]] = hosts[line[2]] || line[2] != ""
		cells = append(cells, line)
	}
	columns(w, st, cells, 2, []int{2, 1, 4, 5, 3}, func(i int, text string) string {
		switch x := rows[i]; {
		case x.Snapshot == nil && !x.Plain || x.End != "" || strings.HasPrefix(text, "failed"):
			return st.paint("31", text)
		case !x.Plain:
			return st.paint("33", text)
		}
		return text
	})
	if len(rest) > 0 {
		kinds := map[string]int{}
		for _, x := range rest {
			kind, _, _ := strings.Cut(x.State, " for ")
			kind, _, _ = strings.Cut(kind, ";")
			if x.Snapshot == nil || strings.HasPrefix(kind, "failed:") {
				kind, _, _ = strings.Cut(kind, ":")
			}
			kinds[kind]++
		}
		names := slices.SortedFunc(maps.Keys(kinds),
			func(a, b string) int { return cmp.Or(kinds[b]-kinds[a], strings.Compare(a, b)) })
		var parts []string
		for i, k := range names {
			if i == 4 {
				parts = append(parts, "…")
				break
			}
			parts = append(parts, fmt.Sprintf("%d %s", kinds[k], k))
		}
		fmt.Fprintln(w, term.Wrap(fmt.Sprintf("and %s more: %s", count(len(rest), "rank"), strings.Join(parts, ", ")),
			0, st.Width))
	}
}

// endpoints writes a line for each endpoint of the ranks that table shows.
func (r *Report) endpoints(w io.Writer, st Style) {
	cells := [][]string{append([]string{"rank"}, endpointHead...)}
	for _, x := range r.Ranks {
		if x.Snapshot == nil {
			continue
		}
		for i := range x.Snapshot.Endpoints {
			var rate *Rate
			if i < len(x.Endpoints) {
				rate = &x.Endpoints[i]
			}
			cells = append(cells, append([]string{fmt.Sprint(x.Rank.Rank)}, endpointLine(&x.Snapshot.Endpoints[i],
				rate)...))
		}
	}
	if len(cells) == 1 {
		return
	}
	more := 0
	if st.Rows > 0 && len(cells)-1 > st.Rows {
		more = len(cells) - 1 - st.Rows
		cells = cells[:1+st.Rows]
	}
	fmt.Fprintln(w)
	columns(w, st, cells, 1, []int{2, 3, 5, 6, 4}, func(_ int, text string) string { return text })
	if more > 0 {
		fmt.Fprintf(w, "and %s more\n", count(more, "endpoint"))
	}
}

// minState is the width of the last column that is worth more than another column.
const minState = 30

// columns writes a table whose last column is wrapped, and painted by a function of the number of
// the line. The first line is the head. Column left is aligned to the left, the others to the
// right. If the last one would be narrow, the columns of spare are left out, as many as needed, the
// last one first.
func columns(w io.Writer, st Style, cells [][]string, left int, spare []int, paint func(i int, text string) string) {
	widths := make([]int, len(cells[0])-1)
	for _, line := range cells {
		for i := range widths {
			widths[i] = max(widths[i], utf8.RuneCountInString(line[i]))
		}
	}
	indent := 2 * len(widths)
	for _, n := range widths {
		indent += n
	}
	for st.Width > 0 && len(spare) > 0 && st.Width-indent < max(st.Width/3, minState) {
		last := spare[len(spare)-1]
		spare, indent = spare[:len(spare)-1], indent-widths[last]-2
		widths[last] = -1
	}
	for i, line := range cells {
		var b strings.Builder
		for j, n := range widths {
			switch {
			case n < 0:
			case j == left:
				fmt.Fprintf(&b, "%-*s  ", n, line[j])
			default:
				fmt.Fprintf(&b, "%*s  ", n, line[j])
			}
		}
		text := term.Wrap(line[len(widths)], indent, st.Width)
		if i == 0 {
			fmt.Fprintln(w, st.paint("90", b.String()+text))
			continue
		}
		fmt.Fprintln(w, b.String()+paint(i-1, text))
	}
}

// Operations writes the last n operations of each rank from flight records.
func (r *Report) Operations(w io.Writer, n int, st Style) {
	for _, x := range r.Ranks {
		s := x.Snapshot
		if s == nil {
			continue
		}
		why := ""
		if s.Reason != "" {
			why = ", " + s.Reason
		}
		fmt.Fprintf(w, "\n%s\n", st.paint("1", fmt.Sprintf("rank %d (pid %d on %s%s) at %s", s.Rank, s.PID, s.Host, why,
			s.Time.Local().Format("2006-01-02 15:04:05.000"))))
		for _, o := range s.Operations[max(0, len(s.Operations)-n):] {
			took := ""
			end := s.Time
			if o.Ended != nil {
				end = *o.Ended
			}
			if d := end.Sub(o.Started); d >= 10*time.Millisecond {
				took = " after " + secs(d.Seconds())
			}
			if o.Ended == nil {
				took = strings.Replace(took, "after", "for", 1)
			}
			if o.Awaited != nil && o.Outcome != "ok" {
				took += fmt.Sprintf(", waiting for rank %d", *o.Awaited)
			}
			group := ""
			if o.Group != 1 {
				group = fmt.Sprintf(" of group %d", o.Group)
			}
			fmt.Fprintf(w, "  %10s before  %s%s: %s%s\n", secs(s.Time.Sub(o.Started).Seconds()), o.Call, group,
				o.Outcome, took)
		}
	}
}

func secs(s float64) string { return flight.Seconds(time.Duration(s * float64(time.Second))) }

func count[N int | uint64](n N, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// quantity formats a number with at least two digits, and a unit for thousands.
func quantity(x float64) string { return scaled(x, 1000, []string{"", "k", "M", "G", "T"}, "") }

// Size formats a number of bytes.
func Size(x float64) string { return scaled(x, 1000, []string{"", "k", "M", "G", "T", "P"}, "B") }

func scaled(x, step float64, units []string, what string) string {
	i := 0
	for x >= 999.5 && i < len(units)-1 {
		x /= step
		i++
	}
	unit := units[i] + what
	if unit != "" {
		unit = " " + unit
	}
	if x >= 10 || x == 0 || x == float64(int(x)) && i == 0 {
		return fmt.Sprintf("%.0f%s", x, unit)
	}
	return fmt.Sprintf("%.1f%s", x, unit)
}

// devices says how the groups get at the memory of GPUs, each with the ranks that say so.
func (r *Report) devices() (all []string) {
	ranks := map[string][]int{}
	for _, x := range r.Ranks {
		if x.Snapshot == nil {
			continue
		}
		for _, g := range x.Snapshot.Groups {
			if text := g.Devices; text != "" && !slices.Contains(ranks[text], x.Rank.Rank) {
				ranks[text] = append(ranks[text], x.Rank.Rank)
			}
		}
	}
	for _, text := range slices.Sorted(maps.Keys(ranks)) {
		all = append(all, flight.RankList(ranks[text])+": "+text)
	}
	return all
}
