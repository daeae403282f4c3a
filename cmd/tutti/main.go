// Command tutti starts the ranks of a job, measures collectives between them, examines machines,
// and serves, reads and writes regions of endpoints.
package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"tutti/bootstrap"
	"tutti/cmd/tutti/internal/cluster"
	"tutti/cmd/tutti/internal/launch"
	"tutti/cmd/tutti/internal/term"
)

func main() {
	if launch.IsGuard() {
		os.Exit(launch.GuardMain())
	}
	if code, is := cluster.MemberMain(); is {
		os.Exit(code)
	}
	os.Exit(execute(os.Args[1:]))
}

// codeUsage is the exit code for invalid flags and arguments.
const codeUsage = 2

// exit is an error that only sets the exit code; all messages have been printed.
type exit int

func (e exit) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

// usageError is a user's error in the arguments of a command.
type usageError struct {
	cmd *cobra.Command
	err error
}

func (e *usageError) Error() string { return e.err.Error() }

func usagef(cmd *cobra.Command, format string, args ...any) error {
	return &usageError{cmd, fmt.Errorf(format, args...)}
}

func execute(args []string) int {
	root := newRoot()
	root.SetArgs(args)
	cmd, err := root.ExecuteC()
	var code exit
	over := err == nil || errors.As(err, &code)
	switch lost := stdout.lost(); {
	case errors.Is(lost, syscall.EPIPE): // while a command catches SIGPIPE
		return 128 + int(syscall.SIGPIPE)
	case over && lost == nil:
		return int(code)
	case over:
		err = fmt.Errorf("%w: what was printed is incomplete", lost)
	}
	fmt.Fprintln(os.Stderr, launch.Tag(os.Stderr)+err.Error())
	var usage *usageError
	var failed *launch.Error
	switch {
	case errors.As(err, &usage):
		if usage.cmd != nil {
			cmd = usage.cmd
		}
		fmt.Fprintf(os.Stderr, "       %s --help tells more\n", cmd.CommandPath())
		return codeUsage
	case errors.As(err, &failed):
		return failed.Code
	}
	return launch.CodeLaunch
}

// standardOutput keeps the first error. A command that could not print fails, whether it looks at
// the error or not.
type standardOutput struct {
	mu  sync.Mutex
	err error
}

var stdout = &standardOutput{}

func (o *standardOutput) Write(b []byte) (int, error) {
	n, err := os.Stdout.Write(b)
	o.mu.Lock()
	defer o.mu.Unlock()
	o.err = cmp.Or(o.err, err)
	return n, err
}

// lost returns the first error.
func (o *standardOutput) lost() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.err
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:           "tutti",
		Short:         "Collective communication between the ranks of a job",
		SilenceUsage:  true,
		SilenceErrors: true,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return nil
			}
			text := fmt.Sprintf("there is no command %q", args[0])
			if s := cmd.SuggestionsFor(args[0]); len(s) > 0 {
				text += "; did you mean " + strings.Join(s, " or ") + "?"
			}
			return usagef(cmd, "%s", text)
		},
		RunE:                       func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		SuggestionsMinimumDistance: 2,
		CompletionOptions:          cobra.CompletionOptions{HiddenDefaultCmd: true},
		Version:                    version(),
	}
	root.SetVersionTemplate("tutti {{.Version}}\n")
	root.Flags().Bool("version", false, "print the version") // without -v, which is --verbose of commands
	root.SetOut(stdout)
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		known := func(word string) bool {
			return slices.ContainsFunc(cmd.Commands(), func(c *cobra.Command) bool { return c.Name() == word })
		}
		if words := cmd.Flags().Args(); cmd.HasSubCommands() && len(words) > 0 && !known(words[0]) {
			return cmd.Args(cmd, words) // it is the unknown command's flag
		}
		var bad *pflag.InvalidValueError
		if errors.As(err, &bad) {
			flag := bad.GetFlag()
			want := map[string]string{"int": "whole number", "duration": "duration, such as 90s",
				"bool": "truth value"}[flag.Value.Type()]
			switch {
			case flag.Name == "ranks" && bad.GetValue() == "p": // as mpirun has it
				err = errors.New("unknown flag: -np: give -n N")
			case want != "":
				err = fmt.Errorf("--%s: %q is no %s", flag.Name, bad.GetValue(), want)
			}
		}
		return &usageError{cmd, err}
	})
	root.SetHelpCommand(&cobra.Command{Use: "help [COMMAND]", Hidden: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			about, rest, err := root.Find(args)
			switch {
			case err != nil:
				return &usageError{cmd, err}
			case about == root && len(rest) > 0:
				return root.Args(root, rest)
			}
			return about.Help()
		}})
	help := root.HelpFunc()
	root.SetHelpFunc(func(cmd *cobra.Command, args []string) {
		var text bytes.Buffer
		cmd.SetOut(&text)
		help(cmd, args)
		stdout.Write(text.Bytes()) // execute tells of the error
	})
	root.AddCommand(newRun(), newBench(), newTune(), newStatus(), newDoctor(), newSecret(), newEndpoint(), newEnv(),
		newVersion())
	root.SetUsageTemplate(usageTemplate)
	root.SetHelpTemplate("{{with (or .Long .Short)}}{{. | trimTrailingWhitespaces}}\n\n{{end}}{{.UsageString}}")
	for _, c := range root.Commands() {
		c.Flags().SortFlags = false
	}
	return root
}

const usageTemplate = `Usage:
  {{if .HasAvailableSubCommands}}{{.CommandPath}} COMMAND{{else}}{{.UseLine}}{{end}}
{{if .HasExample}}
Examples:
{{.Example}}
{{end}}{{if .HasAvailableSubCommands}}
Commands:{{range .Commands}}{{if .IsAvailableCommand}}
  {{rpad .Name .NamePadding}} {{.Short}}{{end}}{{end}}

{{.CommandPath}} COMMAND --help tells more.
{{end}}{{if and .HasAvailableLocalFlags (not .HasAvailableSubCommands)}}
Flags:
{{.LocalFlags.FlagUsages | trimTrailingWhitespaces}}
{{end}}`

// noArgs refuses arguments.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usagef(cmd, "%s takes no arguments, got %q", cmd.CommandPath(), args[0])
	}
	return nil
}

func newVersion() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version", Args: noArgs, DisableFlagsInUseLine: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			fmt.Fprintln(stdout, "tutti "+version())
			return nil
		},
	}
}

// version returns the version that the Go toolchain recorded at build time.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "(devel)"
	}
	v, extra := info.Main.Version, ""
	for _, s := range info.Settings {
		if s.Key == "CGO_ENABLED" && s.Value == "0" {
			extra = ", without cgo"
		}
	}
	if v == "" {
		v = "(devel)"
	}
	return fmt.Sprintf("%s (%s%s)", v, info.GoVersion, extra)
}

func newEnv() *cobra.Command {
	return &cobra.Command{
		Use: "env", Short: "List the environment variables that a job understands", Args: noArgs,
		DisableFlagsInUseLine: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			const indent = 22
			width := term.Width(os.Stdout)
			for _, v := range bootstrap.Variables() {
				fmt.Fprintf(stdout, "%-*s%s\n", indent, v.Name,
					term.Wrap(fmt.Sprintf("%s (default: %s)", v.Meaning, v.Default), indent, width))
			}
			return nil
		},
	}
}
