package main

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"tutti/bootstrap"
)

var update = flag.Bool("update", false, "write README.md's tables anew")

// README.md's tables of commands and of variables are what the code says. `make generate` writes
// them.
func TestReadmeTables(t *testing.T) {
	const path = "../../README.md"
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	cell := strings.NewReplacer("|", `\|`)
	var commands, variables strings.Builder
	commands.WriteString("| command | what it does |\n| --- | --- |\n")
	var list func(*cobra.Command)
	list = func(c *cobra.Command) {
		switch {
		case c.HasAvailableSubCommands():
			for _, sub := range c.Commands() {
				list(sub)
			}
		case c.IsAvailableCommand():
			fmt.Fprintf(&commands, "| `%s` | %s |\n", cell.Replace(c.UseLine()), cell.Replace(c.Short))
		}
	}
	list(newRoot())
	variables.WriteString("| variable | meaning | default |\n| --- | --- | --- |\n")
	for _, v := range bootstrap.Variables() {
		fmt.Fprintf(&variables, "| `%s` | %s | %s |\n", v.Name, cell.Replace(v.Meaning), cell.Replace(v.Default))
	}
	now := string(b)
	for name, table := range map[string]string{"commands": commands.String(), "variables": variables.String()} {
		begin, end := "<!-- "+name+": written by make generate -->\n", "<!-- end of "+name+" -->"
		before, rest, found := strings.Cut(now, begin)
		_, after, closed := strings.Cut(rest, end)
		if !found || !closed {
			t.Fatalf("README.md has no place for the table of %s: a line %q, and one %q", name, begin, end)
		}
		now = before + begin + table + end + after
	}
	switch {
	case now == string(b):
	case *update:
		if err := os.WriteFile(path, []byte(now), 0o644); err != nil {
			t.Fatal(err)
		}
	default:
		t.Error("README.md's tables are not what the code says: run make generate")
	}
}
