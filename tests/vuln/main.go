// Command vuln runs govulncheck and interprets its exit code: 0 means no finding, 3 a
// vulnerability. Anything else is a failure too, with one exception: if govulncheck ends with 1,
// its last words are that it cannot fetch vulnerabilities, and their database indeed cannot be
// reached, then the program reports that and exits with 0.
//
//	go run ./tests/vuln govulncheck ./...
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"time"
)

const (
	// found is govulncheck's exit code if it has found a vulnerability.
	found = 3
	// unfetched begins what govulncheck writes last to stderr if the database does not answer.
	unfetched = "govulncheck: fetching vulnerabilities: "
)

// reachable returns nil if the database answers with its index.
func reachable(ctx context.Context, database string) error {
	if strings.HasPrefix(database, "file:") {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(database, "/")+"/index/db.json", nil)
	if err != nil {
		return err
	}
	a, err := http.DefaultClient.Do(r)
	if err != nil {
		return err
	}
	defer a.Body.Close()
	if a.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", r.URL, a.Status)
	}
	return nil
}

// run runs the command and returns the exit code to end with.
func run(ctx context.Context, out io.Writer, database string, command ...string) int {
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	var words strings.Builder
	cmd.Stdout, cmd.Stderr = out, io.MultiWriter(out, &words)
	err := cmd.Run()
	if err == nil {
		return 0
	}
	code := -1 // it was not started, or a signal ended it
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		code = exit.ExitCode()
	}
	if code == found {
		return found
	}
	lines := strings.Split(strings.TrimSpace(words.String()), "\n")
	if code != 1 || !strings.HasPrefix(lines[len(lines)-1], unfetched) {
		fmt.Fprintf(out, "%s: %v, and not for want of a database of vulnerabilities\n", command[0], err)
		return 1
	}
	away := reachable(ctx, database)
	if away == nil {
		fmt.Fprintf(out, "%s: %v, although the database of vulnerabilities can be reached\n", command[0], err)
		return 1
	}
	fmt.Fprintf(out, "skip  vulnerabilities: the database cannot be reached: %v\n", away)
	return 0
}

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "vuln: want a govulncheck command")
		os.Exit(2)
	}
	os.Exit(run(context.Background(), os.Stdout, cmp.Or(os.Getenv("GOVULNDB"), "https://vuln.go.dev"), os.Args[1:]...))
}
