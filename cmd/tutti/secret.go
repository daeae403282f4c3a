package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"tutti/bootstrap"
)

func newSecret() *cobra.Command {
	var file string
	c := &cobra.Command{
		Use:   "secret [flags]",
		Short: "Make a secret for a job",
		Long: `Print a fresh secret, 256 random bits as hex digits, or write it to a new file that only you can read.

All processes of a job have the same secret, and every connection proves to know it. tutti run makes
one for a job on one node by itself. For several nodes pass it in the environment (TUTTI_SECRET) or
as a file that all of them can read (TUTTI_SECRET_FILE, or tutti run --secret-file), never as an
argument: everybody on the machine can read those.`,
		Example: `  export TUTTI_SECRET=$(tutti secret)     in a batch script; srun and mpirun pass it on
  tutti secret --file ~/job.secret        on a file system that all nodes share
  tutti secret | kubectl create secret generic train --from-file=secret=/dev/stdin`,
		Args: noArgs, DisableFlagsInUseLine: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if file == "" {
				fmt.Fprintln(cmd.OutOrStdout(), bootstrap.NewSecret())
				return nil
			}
			f, err := os.OpenFile(file, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
			if err != nil {
				return usagef(cmd, "--file: %v", err)
			}
			_, err = fmt.Fprintln(f, bootstrap.NewSecret())
			if cerr := f.Close(); err == nil {
				err = cerr
			}
			if err != nil {
				os.Remove(file)
			}
			return err
		},
	}
	c.Flags().StringVar(&file, "file", "", "write the secret to this new `file`, with mode 0600, and print nothing")
	return c
}
