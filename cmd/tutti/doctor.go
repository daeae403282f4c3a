package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"tutti/cmd/tutti/internal/doctor"
	"tutti/cmd/tutti/internal/launch"
	"tutti/cmd/tutti/internal/term"
)

func newDoctor() *cobra.Command {
	var asJSON bool
	var plot string
	c := &cobra.Command{
		Use:   "doctor [--json] [--plot FILE]",
		Short: "Check what this machine can do for a job",
		Long: `Examine this machine and the environment. Shared memory, loopback and the store are tried.

If there are NVIDIA GPUs, tables show the paths between them and how near they are to the RDMA
devices. With --plot they are drawn instead: GPUs, NVLinks, NVSwitches and cards, as SVG.

The exit code is 0 unless something that every job needs is broken, or there is nothing to draw.`,
		Args: noArgs, DisableFlagsInUseLine: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if asJSON && plot != "" {
				return usagef(cmd, "--json and --plot exclude each other")
			}
			if plot != "" {
				return drawTopology(doctor.Local(), plot)
			}
			report := findingPrinter(stdout, launch.Colour(os.Stdout), term.Width(os.Stdout))
			if asJSON {
				enc := json.NewEncoder(stdout)
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
	c.Flags().StringVar(&plot, "plot", "",
		"`FILE` for a picture (SVG) of how GPUs and cards are connected; -: standard output")
	return c
}

// drawTopology writes a picture of a machine's GPUs and cards to a file, "-" for standard output.
func drawTopology(h *doctor.Host, path string) error {
	v, err := h.View()
	if err != nil {
		return fmt.Errorf("nothing to draw: %w", err)
	}
	if len(v.GPUs) == 0 {
		return errors.New("nothing to draw: this machine has no NVIDIA GPU")
	}
	if path == "-" {
		_, err := stdout.Write(v.SVG())
		return err
	}
	return os.WriteFile(path, v.SVG(), 0o644)
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
		fmt.Fprintf(w, "  %s %-14s %s\n", paint(colours[f.State], fmt.Sprintf("%-8s", f.State)), f.Check,
			term.Wrap(f.Detail, indent, width))
		if f.Advice != "" {
			fmt.Fprintf(w, "%s%s %s\n", strings.Repeat(" ", indent), paint(36, "→"),
				term.Wrap(f.Advice, indent+2, width))
		}
		for i, line := range f.Table {
			if i == 0 {
				fmt.Fprintln(w)
			}
			fmt.Fprintln(w, strings.TrimRight("    "+line, " "))
		}
	}
}
