package tuning

import (
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"syscall"
	"testing"

	"tutti/collectives"
)

var rules = map[collectives.Kind][]collectives.Rule{collectives.AllReduce: {{When: collectives.IfMemory, MinRanks: 2,
	MaxRanks: 2, Algo: collectives.Ring}}}

func saved(t *testing.T, m Machine) (string, *collectives.Table) {
	t.Helper()
	table, err := collectives.NewTable(rules)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "a", "b", "tune.json")
	if err := New(m, table).Save(path); err != nil {
		t.Fatal(err)
	}
	return path, table
}

func TestSaveAndLoad(t *testing.T) {
	here := Here(2, "shm")
	if here.CPU == "" || here.Cores < 1 || here.Transport != "shm" {
		t.Errorf("%+v", here)
	}
	path, table := saved(t, here)
	got, err := Load(path, here)
	if err != nil || got.Hash() != table.Hash() {
		t.Fatalf("%v, hash %x, want %x", err, got.Hash(), table.Hash())
	}
	if err := New(here, nil).Save(path); err != nil { // over what is there; no table is the default one
		t.Fatal(err)
	}
	if all, err := os.ReadDir(filepath.Dir(path)); err != nil || len(all) != 1 {
		t.Errorf("beside the table: %v, %v", all, err)
	}
	if err := New(here, table).Save(filepath.Join(path, "below a file")); err == nil {
		t.Error("saved below a file")
	}
	for p, good := range map[string]bool{path: true, filepath.Join(filepath.Dir(path), "c", "new"): true,
		filepath.Dir(path): false, filepath.Join(path, "below a file"): false} {
		if err := CheckWritable(p); (err == nil) != good {
			t.Errorf("%s: %v", p, err)
		}
	}
}

func TestLoadRefuses(t *testing.T) {
	here := Here(2, "shm")
	path, _ := saved(t, here)
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	const ours = `"max_ranks": 2,
    "algo": `
	for _, c := range []struct{ name, from, to, want string }{
		{"format", `"format": 6`, `"format": 5`, "stale: it has format 5"},
		{"library", `"library": "`, `"library": "v0.0.9`, "stale: measured by version"},
		{"defaults", `"defaults": "`, `"defaults": "0`, "stale: measured by version"},
		{"cpu", `"cpu": "`, `"cpu": "Another `, "foreign: measured on"},
		{"cores", `"cores": `, `"cores": 9`, "foreign: measured on"},
		{"ranks", `"local_ranks": 2`, `"local_ranks": 3`, "foreign: measured with 3 ranks"},
		{"transport", `"shm"`, `"tcp"`, "foreign: measured over"},
		{"cut", string(good[len(good)/2:]), "", "malformed"},
		{"empty", string(good), "", "malformed"},
		{"no table", `"table"`, `"tables"`, "malformed"},
		{"null", `"table": {`, `"table": null, "x": {`, "malformed"},
		{"field", `"max_ranks"`, `"max_rank"`, "malformed"},
		{"condition", `"when": "memory",`, ``, "malformed"},
		{"algorithm", `"ring"`, `"rings"`, "malformed"},
		{"plan", ours + `"ring"`, ours + `"bruck"`, "malformed"},
		{"loadstore", ours + `"ring"`, ours + `"loadstore"`, "malformed"},
		{"long", `"cpu": "`, `"cpu": "` + strings.Repeat("x", maxFile), "malformed: longer"},
	} {
		b := strings.Replace(string(good), c.from, c.to, 1)
		if b == string(good) {
			t.Fatalf("%s: %q is not in\n%s", c.name, c.from, good)
		}
		if err := os.WriteFile(path, []byte(b), 0o600); err != nil {
			t.Fatal(err)
		}
		table, err := Find(path, here)
		if table != nil || err == nil || !strings.Contains(err.Error(), c.want) ||
			!strings.Contains(err.Error(), path) || len(err.Error()) > 1000 {
			t.Errorf("%s: %v, %.1000v; want %q", c.name, table, err, c.want)
		}
	}
}

func TestFindTuningFile(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("XDG_CONFIG_HOME", dir)
	here := Here(2, "shm")
	for _, path := range []string{"", Off} {
		if table, err := Find(path, here); table != nil || err != nil {
			t.Errorf("%q: %v, %v", path, table, err)
		}
	}
	own, table := saved(t, here)
	b, _ := os.ReadFile(own)
	if want := filepath.Join(dir, "tutti", "tune.json"); DefaultPath() != want {
		t.Fatalf("default %s, want %s", DefaultPath(), want)
	}
	os.Mkdir(filepath.Join(dir, "tutti"), 0o755)
	if err := os.WriteFile(DefaultPath(), b, 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := Find("", here); err != nil || got.Hash() != table.Hash() {
		t.Errorf("the default place: %v, %v", got, err)
	}
	if got, err := Find(Off, here); got != nil || err != nil {
		t.Errorf("off: %v, %v", got, err)
	}
	pipe := filepath.Join(dir, "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{filepath.Join(dir, "none"), dir, pipe} {
		if got, err := Find(path, here); got != nil || err == nil || !strings.Contains(err.Error(), "unreadable") ||
			strings.Count(err.Error(), path) != 1 {
			t.Errorf("%s: %v, %v", path, got, err)
		}
	}
	t.Setenv("XDG_CONFIG_HOME", "")
	t.Setenv("HOME", "")
	if got, err := Find("", here); got != nil || err != nil || DefaultPath() != "" {
		t.Errorf("no home: %v, %v", got, err)
	}
}

func TestLibrary(t *testing.T) {
	for _, c := range []struct {
		info debug.BuildInfo
		want string
	}{
		{debug.BuildInfo{Main: debug.Module{Path: "tutti", Version: "v1.2.3"}}, "v1.2.3"},
		{debug.BuildInfo{Main: debug.Module{Path: "tutti", Version: "v1.2.3+dirty"}}, "devel"},
		{debug.BuildInfo{Main: debug.Module{Path: "tutti", Version: "v0.0.0-20250101010101-0123456789ab"}}, "devel"},
		{debug.BuildInfo{Main: debug.Module{Path: "tutti", Version: "(devel)"}}, "devel"},
		{debug.BuildInfo{Main: debug.Module{Path: "x", Version: "v9.0.0"},
			Deps: []*debug.Module{{Path: "y", Version: "v8.0.0"}, {Path: "tutti", Version: "v1.3.0-rc.1"}}},
			"v1.3.0-rc.1"},
		{debug.BuildInfo{Main: debug.Module{Path: "x"},
			Deps: []*debug.Module{{Path: "tutti", Version: "v1.3.0", Replace: &debug.Module{Path: "../tutti"}}}},
			"devel"},
	} {
		if got := libraryIn(&c.info); got != c.want {
			t.Errorf("%+v: %s", c, got)
		}
	}
}

func TestCPUModel(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cpuinfo")
	for text, want := range map[string]string{
		"processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n":                   "Some CPU @ 2 GHz",
		"processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\nx: y\n": "implementer 0x41 part 0xd40",
		"": "unknown",
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := cpuModel(path); got != want {
			t.Errorf("%q: %q", text, got)
		}
	}
	if got := cpuModel(path + "no"); got != "unknown" {
		t.Error(got)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte(`{"format":6,"table":{"allreduce":[{"when":"always","algo":"ring"}]}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		file, err := decode(b)
		if err != nil {
			return
		}
		_ = file.fits(Here(2, "tcp")) // must not panic
		if s := (collectives.Shape{Kind: collectives.AllReduce, Size: 2, Active: []int{0, 1}, Elem: 1,
			Count: 5}); file.Table.Choose(s, collectives.Caps{}) == collectives.LoadStore {
			t.Fatal("loadstore without mapped memory")
		}
	})
}
