package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"tutti/cmd/tutti/internal/doctor"
	"tutti/cmd/tutti/internal/launch"
)

func newDoctor() *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use:   "doctor [--json]",
		Short: "Say what this machine can do for a job, and why not more",
		Long: `Examine this machine and the environment. What can be tried is tried: shared memory, loopback, the
store.

The exit code is 0 unless something that every job needs is broken.`,
		Args: noArgs, DisableFlagsInUseLine: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			report := findingPrinter(os.Stdout, launch.Colour(os.Stdout), terminalWidth(os.Stdout))
			if asJSON {
				enc := json.NewEncoder(os.Stdout)
				enc.SetEscapeHTML(false)
				report = func(f doctor.Finding) { enc.Encode(f) }
			}
			if !doctor.Local().Run(cmd.Context(), report) {
				return exit(1)
			}
			return nil
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "one JSON object for each check")
	return c
}

// terminalWidth returns the columns of the terminal f, 0 if it is none.
func terminalWidth(f *os.File) int {
	w, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0
	}
	return int(w.Col)
}

// findingPrinter prints findings for a person, in lines of at most width columns (0: any).
func findingPrinter(w io.Writer, colour bool, width int) func(doctor.Finding) {
	paint := func(code int, s string) string {
		if !colour || code == 0 {
			return s
		}
		return fmt.Sprintf("\x1b[%dm%s\x1b[0m", code, s)
	}
	colours := map[doctor.State]int{doctor.Found: 32, doctor.Warning: 33, doctor.Broken: 31, doctor.Missing: 90}
	const indent = 26
	group := ""
	return func(f doctor.Finding) {
		if f.Group != group {
			if group != "" {
				fmt.Fprintln(w)
			}
			group = f.Group
			fmt.Fprintln(w, paint(1, group))
		}
		fmt.Fprintf(w, "  %s %-14s %s\n", paint(colours[f.State], fmt.Sprintf("%-8s", f.State)), f.Check, wrap(f.Detail, indent, width))
		if f.Advice != "" {
			fmt.Fprintf(w, "%s%s %s\n", strings.Repeat(" ", indent), paint(36, "→"), wrap(f.Advice, indent+2, width))
		}
	}
}

// wrap breaks s between words so that it fits behind indent columns in width; continuation lines are indented too.
func wrap(s string, indent, width int) string {
	room := width - indent
	if width == 0 || room < 20 {
		return s
	}
	var b strings.Builder
	used := 0
	for i, word := range strings.Fields(s) {
		n := len([]rune(word))
		switch {
		case i == 0:
		case used+1+n > room:
			b.WriteString("\n" + strings.Repeat(" ", indent))
			used = 0
		default:
			b.WriteByte(' ')
			used++
		}
		b.WriteString(word)
		used += n
	}
	return b.String()
}
