package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"

	"tutti/cmd/tutti/internal/term"
)

// Printer shows events: in the table format of nccl-tests, or as one JSON object for each row.
// Except for Out, the zero value of a field is a default.
type Printer struct {
	Out      io.Writer
	Notes    io.Writer // with JSON, what is not measured, and why; nil: nowhere
	Progress *os.File  // a terminal, for a line that is overwritten; nil: none
	JSON     bool
	Colour   bool

	Wrong int64 // elements until now

	header    Header
	op        string
	pending   *Row // out of place, waiting for its in-place twin
	rows      int
	busbw     float64
	lines     int
	unchecked bool
}

// Show shows an event.
func (p *Printer) Show(e Event) {
	switch {
	case e.Header != nil:
		p.header = *e.Header
		if !p.JSON {
			p.head()
		}
	case e.Skip != "":
		if !p.JSON {
			p.print(p.dim("# skipped: " + e.Skip))
		} else if p.Notes != nil {
			fmt.Fprintf(p.Notes, "skipped: %s\n", e.Skip)
		}
	case e.Next != "":
		if p.Progress != nil {
			term.Progress(p.Progress, fmt.Sprintf("%3d%%  %s", 100*p.lines/max(1, p.header.Rows), e.Next))
		}
	case e.Row != nil:
		p.row(e.Row)
	}
}

func (p *Printer) row(r *Row) {
	p.Wrong += max(0, r.Wrong)
	p.unchecked = p.unchecked || r.Wrong < 0
	if r.Op != "barrier" {
		p.rows++
		p.busbw += r.BusBW
	}
	if p.JSON {
		p.lines++
		text, err := json.Marshal(r)
		if err == nil {
			p.print(string(text))
		}
		return
	}
	if p.pending != nil && r.InPlace {
		out := p.pending
		p.pending = nil
		p.line(out, r)
		return
	}
	p.flush()
	if o := find(r.Op); !r.InPlace && o != nil && o.in {
		p.pending = r
		return
	}
	if r.InPlace {
		p.line(nil, r)
	} else {
		p.line(r, nil)
	}
}

func (p *Printer) flush() {
	if p.pending != nil {
		out := p.pending
		p.pending = nil
		p.line(out, nil)
	}
}

// Close prints the end of the output.
func (p *Printer) Close() {
	p.flush()
	if p.Progress != nil {
		term.Progress(p.Progress, "")
	}
	if p.JSON || p.lines == 0 {
		return
	}
	p.print("#")
	if p.rows > 0 {
		p.print(fmt.Sprintf("# average bus bandwidth  %.3f GB/s", p.busbw/float64(p.rows)))
	}
	switch {
	case p.Wrong > 0:
		p.print("# wrong elements         " + p.red(fmt.Sprint(p.Wrong)))
	case p.unchecked:
		p.print("# wrong elements         not checked")
	default:
		p.print("# wrong elements         0")
	}
}

func (p *Printer) print(line string) {
	if p.Progress != nil {
		term.Progress(p.Progress, "")
	}
	fmt.Fprintln(p.Out, line)
}

func (p *Printer) paint(code, s string) string {
	if !p.Colour {
		return s
	}
	return "\x1b[" + code + "m" + s + "\x1b[0m"
}
func (p *Printer) dim(s string) string { return p.paint("2", s) }
func (p *Printer) red(s string) string { return p.paint("1;31", s) }

const (
	leftWidth  = 10 + 1 + 11 + 1 + 11 + 1 + 7 + 1 + 4
	rightWidth = 2 + 10 + 1 + 7 + 1 + 7 + 1 + 6
)

func (p *Printer) head() {
	h := p.header
	memory := "plain"
	if h.Registered {
		memory = "registered"
	}
	loop := "calls back to back"
	if h.Touch {
		loop = "inputs written before and results read after each call"
	}
	if h.Queue > 0 {
		loop += fmt.Sprintf("; %d started at a time, time of one", h.Queue)
	}
	p.print(p.dim(fmt.Sprintf("# %s on %s of %s, transport %s: %s; %s memory; %s; best of %s, slowest rank",
		term.Count(h.Ranks, "rank"), term.Count(h.Cores, "core"), h.Host, h.Transport, h.Topology, memory, loop,
		term.Count(h.Rounds, "round"))))
}

func (p *Printer) heading(op string) {
	p.print("#")
	centre := func(s string) string {
		pad := rightWidth - 2 - len(s)
		return "  " + strings.Repeat(" ", pad/2) + s + strings.Repeat(" ", pad-pad/2)
	}
	title := fmt.Sprintf("# %-*s", leftWidth-2, op)
	p.print(p.paint("1", title) + p.dim(strings.TrimRight(centre("out of place")+centre("in place"), " ")))
	right := fmt.Sprintf("  %10s %7s %7s %6s", "time", "algbw", "busbw", "#wrong")
	units := fmt.Sprintf("  %10s %7s %7s %6s", "us", "GB/s", "GB/s", "")
	p.print(p.dim(fmt.Sprintf("#%9s %11s %11s %7s %4s", "size", "count", "type", "redop", "root") + right + right))
	p.print(p.dim(strings.TrimRight(fmt.Sprintf("#%9s %11s %11s %7s %4s", "B", "elements", "", "", "")+units+units,
		" ")))
}

func (p *Printer) line(out, in *Row) {
	r := out
	if r == nil {
		r = in
	}
	if r.Op != p.op {
		p.op = r.Op
		p.heading(r.Op)
	}
	p.lines++
	p.print(fmt.Sprintf("%10d %11d %11s %7s %4d", r.Bytes, r.Count, r.DType, r.RedOp,
		r.Root) + p.half(out) + p.half(in))
}

func (p *Printer) half(r *Row) string {
	if r == nil {
		return p.dim(fmt.Sprintf("  %10s %7s %7s %6s", "-", "-", "-", "-"))
	}
	wrong := fmt.Sprintf("%6d", r.Wrong)
	switch {
	case r.Wrong < 0:
		wrong = fmt.Sprintf("%6s", "n/a")
	case r.Wrong > 0:
		wrong = p.red(wrong)
	}
	return fmt.Sprintf("  %10s %7s %7s ", short(r.Time), gb(r.AlgBW), gb(r.BusBW)) + wrong
}

// short formats microseconds with about four digits.
func short(us float64) string {
	switch {
	case us < 10:
		return fmt.Sprintf("%.3f", us)
	case us < 100:
		return fmt.Sprintf("%.2f", us)
	case us < 10000:
		return fmt.Sprintf("%.1f", us)
	}
	return fmt.Sprintf("%.0f", us)
}

func gb(x float64) string {
	switch {
	case x == 0:
		return "0"
	case x >= 100:
		return fmt.Sprintf("%.1f", x)
	case x < 0.01:
		return fmt.Sprintf("%.4f", x)
	}
	return fmt.Sprintf("%.2f", x)
}
