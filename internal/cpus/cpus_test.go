package cpus

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"

	"pgregory.net/rapid"
)

// sys makes a directory like /sys/devices/system: the processors of each node, and those of each
// core. Both may be empty, as in containers that hide them.
func sys(nodes, cores string) fstest.MapFS {
	files := fstest.MapFS{"node/possible": {Data: []byte("0-63\n")}}
	for i, list := range strings.Fields(nodes) {
		if list != "-" {
			files[fmt.Sprintf("node/node%d/cpulist", i)] = &fstest.MapFile{Data: []byte(list + "\n")}
		} else { // memory without processors
			files[fmt.Sprintf("node/node%d/cpulist", i)] = &fstest.MapFile{Data: []byte("\n")}
		}
	}
	for _, list := range strings.Fields(cores) {
		threads, err := Parse(list)
		if err != nil {
			panic(err)
		}
		for _, cpu := range threads {
			files[fmt.Sprintf("cpu/cpu%d/topology/thread_siblings_list", cpu)] =
				&fstest.MapFile{Data: []byte(list + "\n")}
		}
	}
	return files
}

var machines = map[string]fstest.MapFS{
	// Two sockets of four cores with two threads each, in the order of most servers.
	"xeon": sys("0-3,8-11 4-7,12-15", "0,8 1,9 2,10 3,11 4,12 5,13 6,14 7,15"),
	// One socket of four cores, whose threads are neighbours, as in virtual machines.
	"guest": sys("0-7", "0-1 2-3 4-5 6-7"),
	// One socket in four nodes, and a fifth of memory alone.
	"nps4": sys("0-3 4-7 8-11 12-15 -", "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15"),
	// Nodes of 2, 8 and 6 cores.
	"odd": sys("0-1 2-9 10-15", "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15"),
	// Two cores, and nothing about them.
	"bare": sys("", ""),
}

func TestShareOfProcessors(t *testing.T) {
	for _, c := range []struct {
		machine, allowed string
		n                int
		want             string
	}{
		{"xeon", "0-15", 1, "0-15"},
		{"xeon", "0-15", 2, "0-3,8-11 4-7,12-15"},
		{"xeon", "0-15", 3, "0-1,8-9 2-3,10-11 4-7,12-15"}, // no share is of both sockets
		{"xeon", "0-15", 4, "0-1,8-9 2-3,10-11 4-5,12-13 6-7,14-15"},
		{"xeon", "0-15", 6, "0-1,8-9 2,10 3,11 4-5,12-13 6,14 7,15"},
		{"xeon", "0-15", 8, "0,8 1,9 2,10 3,11 4,12 5,13 6,14 7,15"},
		{"xeon", "0-15", 9, "0,8 1,9 2,10 3 11 4,12 5,13 6,14 7,15"},  // a core is divided only if it must be
		{"xeon", "0-15", 16, "0 8 1 9 2 10 3 11 4 12 5 13 6 14 7 15"}, // threads
		{"xeon", "0-15", 20, "0-1,8-9 0-1,8-9 0-1,8-9 0-1,8-9 0-1,8-9 2-3,10-11 2-3,10-11 2-3,10-11 2-3,10-11 " +
			"2-3,10-11 4-5,12-13 4-5,12-13 4-5,12-13 4-5,12-13 4-5,12-13 6-7,14-15 6-7,14-15 6-7,14-15 6-7,14-15 " +
			"6-7,14-15"},
		{"guest", "0-7", 2, "0-3 4-7"},
		{"guest", "0-7", 3, "0-3 4-5 6-7"},
		{"nps4", "0-15", 1, "0-15"},
		{"nps4", "0-15", 2, "0-7 8-15"},
		{"nps4", "0-15", 3, "0-3 4-7 8-15"},
		{"nps4", "0-15", 5, "0-1 2-3 4-7 8-11 12-15"},
		{"odd", "0-15", 2, "0-9 10-15"},
		{"odd", "0-15", 3, "2-5 6-9 10-15"}, // node 0 alone would be half of the next share
		{"odd", "0-15", 8, "0-1 2-3 4-5 6-7 8-9 10-11 12-13 14-15"},
		// A cpuset with holes, among them threads of cores.
		{"xeon", "1-2,5,9-11,13-14", 2, "1-2,9-11 5,13-14"},
		{"xeon", "1-2,5,9-11,13-14", 3, "1-2,9-10 11 5,13-14"},
		{"xeon", "1-2,5,9-11,13-14", 5, "1,9 2,10 11 5,13 14"},
		{"xeon", "0-3,8-11,15", 2, "0-1,8-9 2-3,10-11"}, // the processor of the other socket is too little
		{"bare", "1", 1, "1"},
		{"bare", "1", 3, "1 1 1"},
		{"bare", "0-1", 2, "0 1"},
		{"bare", "0-1", 3, "0-1 0-1 0-1"}, // 3 ranks and 2 processors have no common divisor
		{"bare", "0-1", 4, "0 0 1 1"},
		{"bare", "0-5", 9, "0-1 0-1 0-1 2-3 2-3 2-3 4-5 4-5 4-5"},
	} {
		allowed, err := Parse(c.allowed)
		if err != nil {
			t.Fatal(err)
		}
		machine, err := Read(machines[c.machine], allowed)
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Trim(fmt.Sprint(Share(machine, c.n)), "[]"); got != c.want {
			t.Errorf("%s, processors %s, %d ranks:\n %s, want\n %s", c.machine, c.allowed, c.n, got, c.want)
		}
	}
}

func TestOneProcessorForEach(t *testing.T) {
	for _, c := range []struct {
		machine, allowed string
		n                int
		want             string
	}{
		{"xeon", "0-15", 3, "0 1 2"},
		{"xeon", "0-15", 9, "0 1 2 3 4 5 6 7 8"},
		{"guest", "0-7", 4, "0 2 4 6"},
		{"guest", "1-6", 5, "1 2 4 6 3"},
		{"bare", "1", 2, ""},
	} {
		allowed, _ := Parse(c.allowed)
		machine, err := Read(machines[c.machine], allowed)
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Trim(fmt.Sprint(Single(machine, c.n)), "[]"); got != c.want {
			t.Errorf("%s, processors %s, %d ranks: %s, want %s", c.machine, c.allowed, c.n, got, c.want)
		}
	}
}

// What Share promises holds for every machine, cpuset and number of ranks.
func TestShareOfAnyMachine(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var machine []CPU
		nodes := rapid.SliceOfN(rapid.IntRange(0, 9), 1, 5).Draw(t, "cores of each node")
		threads := rapid.IntRange(1, 4).Draw(t, "threads of a core")
		for node, cores := range nodes {
			for range cores {
				first := len(machine)
				for range threads {
					machine = append(machine, CPU{ID: len(machine), Core: first, Node: node})
				}
			}
		}
		machine = slices.DeleteFunc(machine, func(c CPU) bool {
			return rapid.IntRange(0, 3).Draw(t, "forbidden") == 0
		})
		if len(machine) == 0 {
			return
		}
		n := rapid.IntRange(1, 3*len(machine)).Draw(t, "ranks")
		of := map[int]CPU{}
		cores, populated := map[int]bool{}, map[int]bool{}
		for _, c := range machine {
			of[c.ID], cores[c.Core], populated[c.Node] = c, true, true
		}
		shares := Share(machine, n)
		if len(shares) != n {
			t.Fatalf("%d shares of %d ranks", len(shares), n)
		}
		ranks, owner := map[string]int{}, map[int]string{}
		for _, s := range shares {
			ranks[s.String()]++
			if len(s) == 0 || !slices.IsSorted(s) {
				t.Fatalf("share %v", []int(s))
			}
			for _, id := range s {
				if _, exists := of[id]; !exists {
					t.Fatalf("processor %d is not allowed", id)
				}
				if o := owner[id]; o != "" && o != s.String() {
					t.Fatalf("processor %d is in %s and in %v", id, o, s)
				}
				owner[id] = s.String()
				if n >= len(populated) && of[id].Node != of[s[0]].Node {
					t.Fatalf("share %v is of two nodes", s)
				}
			}
		}
		for text, count := range ranks {
			s, _ := Parse(text)
			switch {
			case n <= len(machine) && count > 1:
				t.Fatalf("%d ranks share %s, and there are %d processors", count, text, len(machine))
			case n > len(machine) && len(s) > count:
				t.Fatalf("%d ranks have %s", count, text)
			}
			for _, c := range machine { // no core is divided without need
				if n <= len(cores) && slices.Contains(s, c.Core) && !slices.Contains(s, c.ID) && owner[c.ID] != "" {
					t.Fatalf("share %s has a part of the core of processor %d", text, c.ID)
				}
			}
		}
		if single := Single(machine, n); (single == nil) != (n > len(machine)) {
			t.Fatalf("%d ranks: %v", n, single)
		}
	})
}

func TestParse(t *testing.T) {
	for text, want := range map[string]string{"0": "0", "0-3\n": "0-3", "0-3,8,10-11": "0-3,8,10-11", "": "",
		"5,1-2,2": "1-2,5", "0,1,2": "0-2"} {
		if s, err := Parse(text); err != nil || s.String() != want {
			t.Errorf("Parse(%q) = %v, %v, want %s", text, s, err, want)
		}
	}
	for _, text := range []string{"x", "3-1", "1-", "-1", "1,,2", "0-8192", "99999999999"} {
		if s, err := Parse(text); err == nil || !strings.Contains(err.Error(), "no list of processors") {
			t.Errorf("Parse(%q) = %v, %v", text, s, err)
		}
	}
}

func TestNodes(t *testing.T) {
	got := Nodes([]CPU{{ID: 0, Node: 2}, {ID: 1}, {ID: 2, Node: 2}})
	if want := []int{0, 2}; !slices.Equal(got, want) || Nodes(nil) != nil {
		t.Errorf("%v, want %v", got, want)
	}
}

func TestReadNamesTheFileThatIsWrong(t *testing.T) {
	machine := sys("0-1", "0-1")
	machine["node/node0/cpulist"] = &fstest.MapFile{Data: []byte("none\n")}
	if _, err := Read(machine, Set{0}); err == nil || !strings.Contains(err.Error(), "node/node0/cpulist") {
		t.Errorf("%v", err)
	}
	if all, err := Read(os.DirFS("/sys/devices/system"), Set{0}); err != nil || len(all) != 1 {
		t.Errorf("this machine: %v, %v", all, err)
	}
}

// Every thread of every process of a group is bound, and no other.
func TestBindGroup(t *testing.T) {
	allowed, err := Allowed()
	if err != nil {
		t.Fatal(err)
	}
	last := allowed[len(allowed)-1:]
	c := exec.Command("sh", "-c", "sleep 600 & echo there; exec cat")
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		syscall.Kill(-c.Process.Pid, syscall.SIGKILL)
		in.Close()
		c.Wait()
	}()
	if _, err := out.Read(make([]byte, 1)); err != nil { // sleep has been forked; cat would end there, without input
		t.Fatal(err)
	}
	if err := BindGroup(c.Process.Pid, last); err != nil {
		t.Fatal(err)
	}
	all := threads(c.Process.Pid)
	if len(all) == 0 {
		t.Fatal("the group has no threads")
	}
	for _, thread := range all {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", thread))
		if err != nil || !strings.Contains(string(status), "Cpus_allowed_list:\t"+last.String()+"\n") {
			t.Errorf("thread %d: %v\n%s", thread, err, status)
		}
	}
	if now, err := Allowed(); err != nil || !slices.Equal(now, allowed) {
		t.Errorf("this process: %v, %v, before %v", now, err, allowed)
	}
}

// A thread that was moved is on another processor, and may run where it could before.
func TestMovedThreadKeepsItsBinding(t *testing.T) {
	runtime.LockOSThread() // its binding ends with it
	before, err := Allowed()
	if err != nil {
		t.Fatal(err)
	}
	if ok := Move(); ok != (len(before) > 1) {
		t.Errorf("moved: %v, with the processors %v", ok, before)
	}
	if after, err := Allowed(); err != nil || !slices.Equal(after, before) {
		t.Errorf("bound to %v afterwards (%v), want %v", after, err, before)
	}
	if err := Bind(0, before[:1]); err != nil {
		t.Fatal(err)
	}
	if Move() {
		t.Error("moved to the same processor")
	}
}
