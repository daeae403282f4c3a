package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"tutti/bootstrap"
)

func newSecret() *cobra.Command {
	var client, secretFile, file string
	c := &cobra.Command{
		Use:   "secret [--client NAME] [flags]",
		Short: "Make a secret for a job, or a client's credential",
		Long: `Print a fresh secret, 256 random bits as hex digits, or write it to a new file that only you can read.

All processes of a job have the same secret, and every connection proves to know it. tutti run makes
one for a job on one node by itself. For several nodes pass it in the environment (TUTTI_SECRET) or
as a file that all of them can read (TUTTI_SECRET_FILE, or tutti run --secret-file), never as an
argument: every user of the machine can read those.

With --client, derive from the job's secret the credential of a client, a program that is no rank.
Its holder can prove to endpoints of the job that it is this client, and nothing else: it cannot act
as a rank or as another client. To other holders of the same credential it can also prove to be any
endpoint: give each program its own, and share one only among processes that may trust each other.
The same secret and name always give the same credential. The job's secret comes from TUTTI_SECRET,
TUTTI_SECRET_FILE or --secret-file.`,
		Example: `  export TUTTI_SECRET=$(tutti secret)     in a batch script; srun passes it on, mpirun with -x
  tutti secret --file ~/job.secret        on a file system that all nodes share
  tutti secret | kubectl create secret generic train --from-file=secret=/dev/stdin
  tutti secret --client web-1 --secret-file ~/job.secret --file ~/web-1.credential`,
		Args: noArgs, DisableFlagsInUseLine: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			text := bootstrap.NewSecret()
			if cmd.Flags().Changed("client") {
				var err error
				if text, err = credential(cmd, client, secretFile); err != nil {
					return err
				}
			} else if cmd.Flags().Changed("secret-file") {
				return usagef(cmd, "--secret-file is for --client NAME; --file writes a new secret")
			}
			if file == "" {
				fmt.Fprintln(stdout, text)
				return nil
			}
			f, err := os.OpenFile(file, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
			if err != nil {
				return usagef(cmd, "--file: %v", err)
			}
			_, err = fmt.Fprintln(f, text)
			if cerr := f.Close(); err == nil {
				err = cerr
			}
			if err != nil {
				os.Remove(file)
			}
			return err
		},
	}
	fl := c.Flags()
	fl.StringVar(&client, "client", "", "derive the credential of the client `NAME` from the job's secret")
	fl.StringVar(&secretFile, "secret-file", "", "`file` with the job's secret, for --client (default: TUTTI_SECRET)")
	fl.StringVar(&file, "file", "", "write to this new `file`, with mode 0600, and print nothing")
	return c
}

// credential derives a client's credential from the job's secret.
func credential(cmd *cobra.Command, client, secretFile string) (string, error) {
	secret, err := (&runFlags{secretFile: secretFile}).secret(os.Getenv)
	if err != nil {
		return "", usagef(cmd, "%v", err)
	}
	if secret == "" {
		return "", usagef(cmd, "--client needs the job's secret: set TUTTI_SECRET or give --secret-file FILE")
	}
	raw, err := bootstrap.ParseSecret(secret)
	if err != nil {
		return "", err
	}
	text, err := bootstrap.NewCredential(raw, client)
	if err != nil {
		return "", usagef(cmd, "--client: %v", err)
	}
	return text, nil
}
