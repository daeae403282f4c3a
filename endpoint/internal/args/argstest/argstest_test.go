package argstest

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestTakersOfContexts(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"a.go": `package p
import ("context"; other "tutti/endpoint"; "net")
func A(ctx context.Context) {}
func B(n int, c ...*other.Context) {}
func C(f func(context.Context), x net.Context) context.Context { return nil }
func d(ctx context.Context) {}
func (t *T) E(ctx context.Context) {}
func (t *T) f(ctx context.Context) {}
func (g[X]) G(m map[int]context.Context) {}
type T struct { ctx context.Context; H, I context.Context; J func(context.Context) }
`,
		"b.go":      "package p\nfunc K(c *Context) {}\nfunc (c *Context) L() {}\n",
		"a_test.go": "package p\nfunc M(c *Context) {}\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for pkg, want := range map[string][]string{
		"tutti/p":        {"A", "B", "T.E", "g.G", "T.H", "T.I"},
		"tutti/endpoint": {"A", "B", "T.E", "g.G", "T.H", "T.I", "K"},
	} {
		if got, err := takers(dir, pkg); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: %q, %v; want %q", pkg, got, err, want)
		}
	}
	if _, err := takers(filepath.Join(dir, "none"), "p"); err == nil {
		t.Error("a directory without sources is a package")
	}
}
