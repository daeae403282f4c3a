package main

import (
	"fmt"
	"go/ast"
	"go/format"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// A mutant is a bug that is planted in the library, which the torture test has to find.
type mutant struct {
	name      string
	what      string // is wrong
	transport string // of the run that has to find it
	flags     []string
	edits     []edit
}

// An edit replaces a text that occurs once in a function. It names the function, so that it
// survives changes around it.
type edit struct {
	dir string // of the package, from the module's root
	fn  string // "name" or "Type.name"
	old string // its white space matches any
	new string
}

// mutants are the bugs. The flag -run selects them by name.
var mutants = []mutant{
	{
		name:      "none",
		what:      "nothing: for comparison",
		transport: "shm",
	},
	{
		name:      "word",
		what:      "readers do not look at the word of the exposure (Ticket.Valid)",
		transport: "shm",
		edits:     []edit{{"p2p", "Ticket.Valid", "return t.word.Load() == t.value", "return true"}},
	},
	{
		name:      "verify",
		what:      "readers do not look at the words before they tell others that they are done",
		transport: "shm",
		edits:     []edit{{"pg/internal/exec", "Runner.send", "if prog.sure[r.next] {", "if false {"}},
	},
	{
		name:      "last-wait",
		what:      "owners return from load-store collectives without a root before their peers have read",
		transport: "shm",
		edits: []edit{
			{"collectives", "loadStoreAllReduce", "b.meet(b.all)() }", "}"},
			{"collectives", "loadStoreReduceScatter", "leave := b.meet(b.all)", "leave := func() {}"},
			{"collectives", "loadStoreAllGather", "leave := b.meet(b.all)", "leave := func() {}"},
			{"collectives", "loadStoreAllToAll", "leave := b.meet(b.all)", "leave := func() {}"},
		},
	},
	{
		name:      "last-wait-of-root",
		what:      "the root of a load-store broadcast or scatter returns before the others have read",
		transport: "shm",
		edits: []edit{
			{"collectives", "builder.release", "b.await(b.Active[b.all.at(d)])", ""},
			{"collectives", "builder.release", "b.signal(b.Root)", ""},
		},
	},
	{
		name:      "middle-wait",
		what:      "ranks read the results of others in a load-store allreduce before these are folded",
		transport: "shm",
		edits: []edit{
			{"collectives", "loadStoreAllReduce", "folded := b.meet(b.all)", "folded := func() {}"},
		},
	},
	{
		name:      "begin-late",
		what:      "the owner stores the ticket after it has told it (Exposure.Begin)",
		transport: "shm",
		edits:     []edit{{"p2p", "Exposure.Begin", "e.word.Store(ticket)", "go e.word.Store(ticket)"}},
	},
	{
		name:      "withdraw-late",
		what:      "the owner returns before it has withdrawn its buffers (Exposure.Withdraw)",
		transport: "shm",
		edits: []edit{
			{"pg/internal/exec", "Runner.leave", "r.mapped.exposure.Withdraw()", "go r.mapped.exposure.Withdraw()"},
		},
	},
	{
		name:      "withdraw-never",
		what:      "the owner leaves its buffers exposed until the next operation",
		transport: "shm",
		edits:     []edit{{"pg/internal/exec", "Runner.leave", "r.mapped.exposure.Withdraw()", ""}},
	},
	{
		name:      "key-hosts",
		what:      "plans of another topology: topology.equal without the hosts",
		transport: "hosts",
		flags:     []string{"-torture.faults", "0.6"},
		edits:     []edit{{"pg/internal/exec", "Topology.equal", "&& slices.Equal(t.Hosts, o.Hosts)", ""}},
	},
	{
		name:      "key-element",
		what:      "plans of another element size: planKey without it",
		transport: "shm",
		edits:     []edit{{"pg/internal/exec", "Runner.program", "r.cur.Root, elem, count}", "r.cur.Root, 0, count}"}},
	},
	{
		name:      "key-root",
		what:      "plans of another root: planKey without it",
		transport: "shm",
		edits:     []edit{{"pg/internal/exec", "Runner.program", "r.cur.Root, elem, count}", "0, elem, count}"}},
	},
	{
		name:      "key-counts",
		what:      "plans of an allgatherv or alltoallv with other counts",
		transport: "shm",
		edits:     []edit{{"pg/internal/exec", "Runner.varying", "slices.Equal(v.counts, c.Counts) &&", ""}},
	},
	{
		name:      "key-again",
		what:      "a call is taken for one that is bound although its root is another",
		transport: "shm",
		edits: []edit{
			{"pg/internal/exec", "Runner.Recall", "dtype, q.Root, dst.Count)]", "dtype, 0, dst.Count)]"},
			{"pg/internal/exec", "Runner.Recall", "|| b.key.root != q.Root", ""},
			{"pg/internal/exec", "Runner.remember", "c.DType, c.Root, dst)] = b", "c.DType, 0, dst)] = b"},
		},
	},
	{
		name:      "number",
		what:      "a call that fails does not take its operation's number, which is used again",
		transport: "shm",
		edits: []edit{
			{"pg", "Group.concluded", "g.run.Call().Forget() g.track.End(outcome(err))",
				"g.run.Call().Forget(); g.track.End(outcome(err)); if err != nil { g.seq-- }"},
			{"pg", "Group.Recover", "g.seq = g.sync.Recovered(g.seq)", ""},
		},
	},
	{
		name:      "part",
		what:      "a message whose sending was interrupted is sent from its beginning again",
		transport: "tcp",
		edits:     []edit{{"p2p", "Channel.SendSome", "st.part = off", "st.part = 0"}},
	},
	{
		name:      "dirty",
		what:      "an input in place that is partly overwritten counts as intact for a retry",
		transport: "shm",
		flags:     []string{"-torture.faults", "1"},
		edits:     []edit{{"pg/internal/exec", "Runner.step", "r.dirty = true", "r.dirty = false"}},
	},
	{
		name:      "piece-used",
		what:      "blocks of a long vector are used before a device's stream has brought them",
		transport: "inproc",
		edits: []edit{{"pg", "feed.Need", "if err := g.arrive(f.v, n); err != nil || f.v.has(n) {",
			"if err := g.arrive(f.v, min(n, 64)); err != nil || f.v.has(min(n, 64)) {"}},
	},
	{
		name:      "piece-released",
		what:      "a device's stream gets a piece of a message that has not arrived",
		transport: "inproc",
		edits:     []edit{{"pg", "deviceMessage.more", "c.v.release(n)", "c.v.release(n + 4<<10)"}},
	},
	{
		name:      "stream-ahead",
		what:      "peers load from a GPU before its stream has come to the operation",
		transport: "shm",
		edits:     []edit{{"pg", "visit.has", "return v.direct.come.Done()", "return true"}},
	},
	{
		name:      "stream-done",
		what:      "a rank says that it is done before the stream of its GPU is",
		transport: "shm",
		edits: []edit{
			{"pg/internal/exec", "Runner.settle", "err := r.direct.call.Settle(false)", "err := error(nil)"},
		},
	},
	{
		name:      "packets-order",
		what:      "the kernels of short vectors on different streams of a GPU are in no order",
		transport: "shm",
		edits: []edit{
			{"device/cuda", "exchange.orderedLocked", "x.latest != nil && x.latest != s", "false"},
		},
	},
	{
		name:      "graph-silent",
		what:      "a launch of a graph that has no result is not the error of the next operation",
		transport: "shm",
		flags:     []string{"-torture.faults", "1"},
		edits: []edit{{"pg", "Group.launch", "if err := g.repeated(); err != nil {",
			"if err := error(nil); err != nil {"}},
	},
	{
		name:      "graph-parts",
		what:      "kernels take the parts of the ranks that are left for those of the first ranks",
		transport: "shm",
		flags:     []string{"-torture.faults", "1"},
		edits:     []edit{{"kernels/cuda", "Packets.Do", "p.part[r] = uint32(c.Parts[r])", "p.part[r] = uint32(r)"}},
	},
}

// apply returns the files that the mutant changes, with their new contents.
func (m *mutant) apply(root string) (map[string][]byte, error) {
	files := map[string][]byte{}
	for _, e := range m.edits {
		path, text, err := e.apply(root, files)
		if err != nil {
			return nil, fmt.Errorf("mutant %s: %w", m.name, err)
		}
		files[path] = text
	}
	return files, nil
}

// apply returns the file that the edit changes. done has the files that are changed already.
func (e *edit) apply(root string, done map[string][]byte) (path string, text []byte, err error) {
	paths, err := filepath.Glob(filepath.Join(root, e.dir, "*.go"))
	if err != nil {
		return "", nil, err
	}
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		text, ok := done[path]
		if !ok {
			if text, err = os.ReadFile(path); err != nil {
				return "", nil, err
			}
		}
		fset := token.NewFileSet()
		file, err := parser.ParseFile(fset, path, text, parser.SkipObjectResolution)
		if err != nil {
			return "", nil, err
		}
		for _, d := range file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && name(f) == e.fn {
				text, err = e.replace(text, fset.Position(f.Pos()).Offset, fset.Position(f.End()).Offset)
				return path, text, err
			}
		}
	}
	return "", nil, fmt.Errorf("package %s has no function %s", e.dir, e.fn)
}

// name returns the name of a function, after its receiver's type if it has one.
func name(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return f.Name.Name
	}
	t := f.Recv.List[0].Type
	if p, ok := t.(*ast.StarExpr); ok {
		t = p.X
	}
	if id, ok := t.(*ast.Ident); ok {
		return id.Name + "." + f.Name.Name
	}
	return f.Name.Name
}

// replace replaces the text within the function, which is at [from, to).
func (e *edit) replace(text []byte, from, to int) ([]byte, error) {
	var words []string
	for _, w := range strings.Fields(e.old) {
		words = append(words, regexp.QuoteMeta(w))
	}
	all := regexp.MustCompile(strings.Join(words, `\s+`)).FindAllIndex(text[from:to], -1)
	if len(all) != 1 {
		return nil, fmt.Errorf("function %s of package %s has %q %d times, want once", e.fn, e.dir, e.old, len(all))
	}
	out := slices.Concat(text[:from+all[0][0]], []byte(e.new), text[from+all[0][1]:])
	if _, err := format.Source(out); err != nil {
		return nil, fmt.Errorf("after the edit of function %s of package %s: %w", e.fn, e.dir, err)
	}
	return out, nil
}
