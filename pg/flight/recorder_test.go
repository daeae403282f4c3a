package flight

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sync/errgroup"
	"pgregory.net/rapid"

	"tutti/collectives"
	"tutti/internal/leaktest"
	"tutti/internal/plain"
	"tutti/internal/proctest"
	"tutti/kernels"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

var me = Identity{Job: "train", Rank: 3, Size: 8, Incarnation: 0xabc, Host: "node1"}

func open(t testing.TB, dir string) *Recorder {
	t.Helper()
	r, err := Open(dir, me)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close(false) })
	return r
}

var sum = Pack(collectives.AllReduce, kernels.Float32, kernels.Sum, collectives.Auto, 0)

func TestRecordIsOneLine(t *testing.T) {
	if n := unsafe.Sizeof(Record{}); n != recordSize {
		t.Errorf("a record has %d bytes", n)
	}
	if n := unsafe.Sizeof(liveHeader{}); n > groupsAt {
		t.Errorf("the header has %d bytes", n)
	}
}

// However many started messages are running, operations find a record soon, and no record of a
// running one is overwritten.
func TestStartedMessagesLeaveRoom(t *testing.T) {
	r := open(t, "")
	tpl := Template(1, 1, sum, 8, 32)
	message := Template(1, 1, Pack(Recv, kernels.Float32, 0, collectives.Auto, 1), 1, 4)
	message.Flags = Async
	inRing := func() (n int) {
		for i := range r.ring {
			if s := &r.ring[i]; s.State == Running && s.Flags&Async != 0 {
				n++
			}
		}
		return n
	}
	for range 3 {
		var all []*Record
		for i := range 3 * Records {
			all = append(all, r.Begin(&message, uint64(i)))
		}
		if n := inRing(); n != Records/2 {
			t.Errorf("%d of %d records are of started messages", n, Records)
		}
		for i := range 2 * Records {
			r.End(r.Begin(&tpl, uint64(i)), OK)
		}
		for i, s := range all {
			if s.State != Running || s.Number != uint64(i) {
				t.Fatalf("the record of message %d is %+v", i, *s)
			}
			r.End(s, OK)
		}
		if n := inRing(); n != 0 || r.async != 0 {
			t.Errorf("%d and %d messages are left", n, r.async)
		}
	}
	if n := r.head.Totals[Recv%kinds].Operations; n != 9*Records {
		t.Errorf("%d messages are counted, want %d", n, 9*Records)
	}
}

func TestCallPacks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		kind, dtype := collectives.Kind(rapid.IntRange(1, 31).Draw(t, "kind")),
			kernels.DType(rapid.IntRange(0, 255).Draw(t, "dtype"))
		op, algo, root := kernels.Op(rapid.IntRange(0, 255).Draw(t, "op")),
			collectives.Algo(rapid.IntRange(0, 255).Draw(t, "algo")), rapid.IntRange(-1, 1<<20).Draw(t, "root")
		c := Pack(kind, dtype, op, algo, root)
		if c.Kind() != kind || c.DType() != dtype || c.Reduction() != op || c.Algorithm() != algo || c.Root() != root ||
			c.With(7) != Pack(kind, dtype, op, 7, root) {
			t.Fatalf("%x: %v %v %v %v %d", uint64(c), c.Kind(), c.DType(), c.Reduction(), c.Algorithm(), c.Root())
		}
	})
}

// The kinds of a group's own operations have names, and no data.
func TestCallsWithoutData(t *testing.T) {
	for kind, name := range map[collectives.Kind]string{collectives.Barrier: "barrier", Admit: "admit",
		Window: "window", Split: "split"} {
		r := Record{Number: 7, Call: Call(kind), State: OK}
		if o := r.Operation(); o.Call != name+" #7" || o.Kind != name || o.DType != "" ||
			Describe(Call(kind), 0) != name {
			t.Errorf("%+v", o)
		}
	}
}

// A call in packets and those that prepare it are said to be that, of whatever kind and root, and
// the algorithm of what prepares it is not recorded.
func TestCallsInPackets(t *testing.T) {
	for _, root := range []int{0, 1, 5} {
		plain := Pack(collectives.AllReduce, kernels.Float32, kernels.Sum, collectives.Auto, root)
		for kind, what := range map[collectives.Kind]string{
			collectives.AllReduce: "allreduce #7 (float32 sum, 64 elements",
			collectives.AllGather: "allgather #7 (float32 sum, 64 elements a rank",
			collectives.Broadcast: fmt.Sprintf("broadcast #7 (float32 sum, 64 elements, root %d", root),
		} {
			c := plain&^0xff | Call(kind)
			for text, call := range map[string]Call{
				")":                         c,
				", on devices, in packets)": c.InPackets(),
				", on devices, in packets, being prepared: step 1)": c.PreparesPackets(0),
				", on devices, in packets, being prepared: step 2)": c.PreparesPackets(1),
			} {
				if got := Spell(7, call, 64); got != what+text || call.Root() != root || call.Packets() == (call == c) {
					t.Errorf("%q with root %d, want %q with %d", got, call.Root(), what+text, root)
				}
				if got, want := Describe(call, 64), strings.Replace(what, " #7", "", 1)+text; got != want {
					t.Errorf("%q, want %q", got, want)
				}
				tpl := Template(1, 1, call, 64, 256)
				if tpl.Chosen(collectives.Ring); tpl.Call.Packets() != call.Packets() {
					t.Errorf("recorded: %q", tpl.Operation().Call)
				}
				if o := tpl.Operation(); o.Packets != (call != c) || (o.Algorithm == "") != (call != c) {
					t.Errorf("%+v", o)
				}
			}
		}
	}
}

// TestRing compares the ring with a list, for any order of beginnings and ends.
func TestRing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r, err := Open("", me)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close(false)
		type op struct {
			rec    *Record
			number uint64
		}
		var running []op
		var ended []uint64
		n := rapid.IntRange(0, 4*Records).Draw(t, "steps")
		for i := uint64(1); i <= uint64(n); i++ {
			tpl := Template(1, 7, sum, 16, 64)
			running = append(running, op{r.Begin(&tpl, i), i})
			for len(running) > 0 && (len(running) > 40 || rapid.IntRange(0, 9).Draw(t, "end") > 0) {
				at := rapid.IntRange(0, len(running)-1).Draw(t, "which")
				o := OK
				if running[at].number%5 == 0 {
					o = TimedOut
				}
				if running[at].rec.Number != running[at].number {
					t.Fatalf("operation %d, still running, was overwritten by %d", running[at].number,
						running[at].rec.Number)
				}
				r.End(running[at].rec, o)
				ended = append(ended, running[at].number)
				running = slices.Delete(running, at, at+1)
			}
		}
		var s Snapshot
		r.Copy(-1).Fill(&s)
		got := map[string][]uint64{}
		for _, o := range s.Operations {
			k := "ended"
			if o.Outcome == "running" {
				k = "running"
			}
			got[k] = append(got[k], o.Number)
		}
		var want []uint64
		for _, o := range running {
			want = append(want, o.number)
		}
		slices.Sort(want)
		if slices.Sort(got["running"]); !slices.Equal(got["running"], want) {
			t.Fatalf("running: %v, want %v", got["running"], want)
		}
		good, bad := uint64(0), 0
		for _, e := range ended {
			if e%5 == 0 {
				bad++
			} else {
				good++
			}
		}
		if s.Recorded < uint64(n) || s.Totals["allreduce"] != (Total{good, 64 * good}) ||
			s.Failures["timed out"] != bad {
			t.Fatalf("%d recorded, totals %v, failures %v; want %d, %d and %d", s.Recorded, s.Totals, s.Failures, n,
				good, bad)
		}
		// Of those that ended the last ones are there, but for what those that run take up, each
		// perhaps several times.
		if n := len(got["ended"]); n > len(ended) || n < min(len(ended), Records/2) {
			t.Fatalf("%d of %d are there", n, len(ended))
		}
		all := slices.Sorted(slices.Values(ended))
		for _, e := range got["ended"] {
			if _, ok := slices.BinarySearch(all, e); !ok {
				t.Fatalf("operation %d never ended", e)
			}
		}
		if few := r.Copy(3); len(few.records) != len(running)+min(3, len(got["ended"])) {
			t.Fatalf("%d records, %d running and 3 more wanted", len(few.records), len(running))
		}
	})
}

// TestRingFull fills the ring with operations that never end.
func TestRingFull(t *testing.T) {
	r := open(t, "")
	tpl := Template(1, 1, sum, 1, 4)
	for i := range uint64(3 * Records) {
		r.Begin(&tpl, i)
	}
	if n := len(r.Copy(0).records); n != Records {
		t.Errorf("%d records", n)
	}
}

func TestRecordsSurviveInFile(t *testing.T) {
	dir := t.TempDir()
	r := open(t, dir)
	r.AddGroup(1, 3, []int{0, 1, 2, 3, 4, 5, 6, 7})
	r.AddGroup(9, 1, []int{2, 3, 6})
	tpl := Template(9, 5, Pack(collectives.Broadcast, kernels.Float32, 0, collectives.Auto, 6), 100, 400)
	done := r.Begin(&tpl, 41)
	done.Chosen(collectives.Tree)
	r.End(done, OK)
	hangs := r.Begin(&tpl, 42)
	hangs.Awaited = 6 + 1
	msg := Template(1, 5, Pack(Recv, kernels.Int64, 0, 0, 4), 3, 24)
	msg.Flags = Async
	r.Begin(&msg, 77)
	if filepath.Base(r.Path()) != "flight-rank3-0000000000000abc.bin" {
		t.Error(r.Path())
	}
	if info, err := os.Stat(r.Path()); err != nil || info.Size() != FileSize || info.Mode().Perm() != 0o600 {
		t.Error(info, err)
	}
	s, err := ReadFile(r.Path()) // as after a crash
	if err != nil {
		t.Fatal(err)
	}
	if s.Job != me.Job || s.Rank != 3 || s.Size != 8 || s.Incarnation != "0000000000000abc" || s.PID != os.Getpid() ||
		s.Host != "node1" || s.View.Epoch != 5 || !s.Joined {
		t.Errorf("%+v", s)
	}
	if len(s.Groups) != 2 {
		t.Fatalf("groups %+v", s.Groups)
	}
	if g := s.Groups[0]; g.ID != 1 || g.Size != 8 || g.Ranks != nil || g.Running != nil {
		t.Errorf("%+v", g)
	}
	g := s.Groups[1]
	if g.ID != 9 || g.Slot != 1 || !slices.Equal(g.Ranks, []int{2, 3, 6}) || g.Finished != 41 || g.Last == nil ||
		g.Last.Call != "broadcast #41 (float32, 100 elements, root 6, tree)" || g.Last.Outcome != "ok" {
		t.Errorf("%+v %+v", g, g.Last)
	}
	if o := g.Running; o == nil || o.Number != 42 || o.Outcome != "running" || o.Ended != nil ||
		!slices.Equal(o.WaitsFor, []int{6}) {
		t.Errorf("%+v", o)
	}
	if len(s.Messages) != 1 || s.Messages[0].Call != "recv from rank 4 (int64, 3 elements, tag 77)" ||
		!s.Messages[0].Async {
		t.Errorf("%+v", s.Messages)
	}
	if age := time.Since(s.Time); age < 0 && age > time.Minute {
		t.Errorf("the file says it is from %v", s.Time)
	}
	again, err := Open(dir, me)
	if err == nil {
		again.Close(false)
		t.Error("two recorders of one life share a file")
	}
	if err := r.Close(true); err != nil {
		t.Error(err)
	}
	if _, err := ReadFile(r.Path()); err != nil {
		t.Error(err)
	}
	// Operations under way may end later.
	r.End(hangs, Closed)
	r.Close(false)
	other := me
	other.Incarnation++
	gone, err := Open(dir, other)
	if err != nil {
		t.Fatal(err)
	}
	gone.Close(false)
	gone.Close(false)
	if files, _ := filepath.Glob(filepath.Join(dir, "*")); len(files) != 1 {
		t.Errorf("left in the directory: %v", files)
	}
}

func TestGroupsAreBounded(t *testing.T) {
	r := open(t, t.TempDir())
	ranks := make([]int, 5000)
	for i := range ranks {
		ranks[i] = (i + 1) % 8
	}
	for id := range uint32(6000) {
		r.AddGroup(id+1, 0, ranks[:max(1, 5000>>id)])
	}
	s, err := ReadFile(r.Path())
	if err != nil {
		t.Fatal(err)
	}
	if n := len(s.Groups); n < 1000 || len(s.Groups[0].Ranks) != 5000 {
		t.Errorf("%d groups", n)
	}
	if s.Recorded != 0 || len(s.Operations) != 0 {
		t.Errorf("groups have run into the ring: %+v", s.Operations)
	}
}

// TestClosedGroupsMakeRoom: a group of thousands is listed, and its running operation with it.
func TestClosedGroupsMakeRoom(t *testing.T) {
	r, err := Open(t.TempDir(), Identity{Job: "long", Rank: 13, Size: 64})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close(false)
	ranks := []int{5, 13, 21, 29, 37, 45, 53, 61}
	var last *GroupEntry
	const groups = 5000
	for id := range uint32(groups) {
		if last != nil {
			last.Close()
		}
		last = r.AddGroup(id+1, 1, ranks)
	}
	tpl := Template(groups, 1, sum, 16, 64)
	r.Begin(&tpl, 7)
	s, err := ReadFile(r.Path())
	if err != nil {
		t.Fatal(err)
	}
	n := len(s.Groups)
	if n < (ringAt-groupsAt)/(16+4*len(ranks)) {
		t.Fatalf("%d groups are listed", n)
	}
	for i, g := range s.Groups {
		if g.ID != uint32(groups-n+1+i) || g.Slot != 1 || !slices.Equal(g.Ranks, ranks) {
			t.Fatalf("group %d of %d is %+v", i, n, g)
		}
	}
	if o := s.Groups[n-1].Running; o == nil || o.Number != 7 {
		t.Errorf("the last group runs %+v", o)
	}
}

// TestGroups compares the listed groups with a list, for any order of additions and ends.
func TestGroups(t *testing.T) {
	type group struct {
		Group
		entry  *GroupEntry
		bytes  int
		closed bool
	}
	rapid.Check(t, func(t *rapid.T) {
		r, err := Open("", me)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close(false)
		var listed []*group
		var open []*group // some are not listed
		add := func(t *rapid.T) {
			g := &group{Group: Group{ID: rapid.Uint32().Draw(t, "id")}, bytes: 16}
			g.Size = rapid.SampledFrom([]int{1, 7, 2000, 7000}).Draw(t, "size")
			g.Slot = rapid.IntRange(0, g.Size-1).Draw(t, "slot")
			ranks := make([]int, g.Size)
			shift := rapid.IntRange(0, me.Size-1).Draw(t, "shift")
			for i := range ranks {
				ranks[i] = (i + shift) % me.Size
			}
			if shift > 0 || g.Size > me.Size {
				g.Ranks, g.bytes = ranks, 16+4*g.Size
			}
			g.entry = r.AddGroup(g.ID, g.Slot, ranks)
			open = append(open, g)
			fits := func(gs []*group) bool {
				n := g.bytes
				for _, o := range gs {
					n += o.bytes
				}
				return n <= ringAt-groupsAt
			}
			left := slices.Clone(listed)
			for !fits(left) {
				i := slices.IndexFunc(left, func(o *group) bool { return o.closed })
				if i < 0 {
					return
				}
				left = slices.Delete(left, i, i+1)
			}
			listed = append(left, g)
		}
		t.Repeat(map[string]func(*rapid.T){
			"add":   add,
			"again": add,
			"close": func(t *rapid.T) {
				if len(open) == 0 {
					t.Skip("none is open")
				}
				i := rapid.IntRange(0, len(open)-1).Draw(t, "which")
				open[i].closed = true
				open[i].entry.Close()
				open = slices.Delete(open, i, i+1)
			},
			"": func(t *rapid.T) {
				coarse.mu.Lock() // it sets r.head.Alive
				im, err := Decode(r.mem)
				coarse.mu.Unlock()
				if err != nil {
					t.Fatal(err)
				}
				if len(im.groups) != len(listed) {
					t.Fatalf("%d groups are listed, want %d", len(im.groups), len(listed))
				}
				for i, g := range im.groups {
					if want := listed[i]; !g.same(&want.Group) || g.Slot != want.Slot {
						t.Fatalf("group %d is %+v, want %+v", i, g, want.Group)
					}
				}
			},
		})
	})
}

// oddRanks are the members of group id in TestGroupsOfKilledProcess: entries differ in length.
func oddRanks(id uint32) (ranks []int) {
	for i := range 1 + id%7 {
		ranks = append(ranks, int(id+i)%7+1)
	}
	return ranks
}

// TestGroupsOfKilledProcess: wherever a process ends that adds and closes groups, its file lists
// groups as they were added. A stopped process leaves its file as a killed one does.
func TestGroupsOfKilledProcess(t *testing.T) {
	const variable = "FLIGHT_DIRECTORY"
	if dir := os.Getenv(variable); dir != "" {
		r := open(t, dir)
		r.AddGroup(1, 3, []int{0, 1, 2, 3, 4, 5, 6, 7})
		for id := uint32(2); ; id++ { // until it is killed
			r.AddGroup(id, 0, oddRanks(id)).Close()
			if id == 3000 {
				fmt.Println("entries have been dropped")
			}
		}
	}
	dir := t.TempDir()
	c := proctest.Run(t, proctest.Again([]string{variable + "=" + dir}, "-test.run=^TestGroupsOfKilledProcess$"))
	c.Hear()
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(files) != 1 {
		t.Fatal(files, err)
	}
	partly := 0
	for range 100 {
		c.Stop()
		s, err := ReadFile(files[0])
		if err != nil {
			t.Fatal(err)
		}
		c.Signal(syscall.SIGCONT)
		if g := s.Groups; len(g) == 0 || g[0].ID != 1 || g[0].Ranks != nil {
			t.Fatalf("the open group is not listed first: %+v", g)
		}
		if len(s.Groups) < 1000 {
			partly++
		}
		last := uint32(1)
		for _, g := range s.Groups[1:] {
			if g.ID <= last || !slices.Equal(g.Ranks, oddRanks(g.ID)) {
				t.Fatalf("after group %d: %+v, want %v", last, g, oddRanks(g.ID))
			}
			last = g.ID
		}
	}
	t.Logf("%d times groups were being moved", partly)
}

func TestOpenFails(t *testing.T) {
	if _, err := Open(filepath.Join(t.TempDir(), "no", "such"), me); err == nil ||
		!strings.Contains(err.Error(), "flight recorder") {
		t.Error(err)
	}
}

func TestCoarseClockTicks(t *testing.T) {
	open(t, "")
	for before, until := Now(), time.Now().Add(30*time.Second); Now() == before; time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatal("it stands still")
		}
	}
}

// The wall clock is set back by an hour after the process has begun. Ages of operations are right.
func TestAgesOutlastSettingsOfTheClock(t *testing.T) {
	origin.wall += int64(time.Hour) // as if it had been ahead
	t.Cleanup(func() { origin.wall -= int64(time.Hour) })
	r := open(t, t.TempDir())
	began := time.Now().Add(time.Hour)
	rec := Template(1, 1, Pack(collectives.Barrier, 0, 0, collectives.Auto, -1), 0, 0)
	r.Begin(&rec, 1)
	var s Snapshot
	r.Copy(-1).Fill(&s)
	file, err := ReadFile(r.Path())
	if err != nil {
		t.Fatal(err)
	}
	for what, s := range map[string]*Snapshot{"the rank": &s, "its file": file} {
		if len(s.Operations) != 1 {
			t.Fatalf("%s: %+v", what, s.Operations)
		}
		started := s.Operations[0].Started
		for _, d := range []time.Duration{s.Time.Sub(started), started.Sub(s.Since), s.Since.Sub(began)} {
			if d.Abs() > time.Minute {
				t.Errorf("%s began %v and its operation %v; now it is %v", what, s.Since, started, s.Time)
				break
			}
		}
	}
}

// Records are their owner's alone, and a link in the place of a file is not followed.
func TestFilesAreReadableByOwnerOnly(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0))
	dir := t.TempDir()
	victim := filepath.Join(dir, "victim")
	if err := os.WriteFile(victim, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := open(t, dir)
	s, err := ReadFile(r.Path())
	if err != nil {
		t.Fatal(err)
	}
	base := filepath.Join(dir, "flight-rank3-timeout")
	if err := os.Symlink(victim, base+".json"); err != nil {
		t.Fatal(err)
	}
	json, err := s.Write(base)
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{r.Path(), json} {
		if info, err := os.Lstat(path); err != nil || info.Mode() != 0o600 {
			t.Errorf("%s: %v, %v", path, info.Mode(), err)
		}
	}
	if err := os.Symlink(victim, filepath.Join(dir, FileName(5, 7))); err != nil {
		t.Fatal(err)
	}
	if r, err := Open(dir, Identity{Job: "j", Rank: 5, Size: 8, Incarnation: 7}); err == nil {
		r.Close(false)
		t.Error("a recorder follows a link")
	}
	if _, err := ReadFile(filepath.Join(dir, FileName(5, 7))); err == nil {
		t.Error("ReadFile follows a link")
	}
	if b, err := os.ReadFile(victim); err != nil || string(b) != "precious" {
		t.Errorf("the file that links lead to has %q, %v", b, err)
	}
}

// Ranks of several groups that write at the same time, as after the loss of a rank of all, have the
// same name in mind. Each gets a file of its own.
func TestWriteReplacesNoFile(t *testing.T) {
	const writers = 20
	base := filepath.Join(t.TempDir(), "flight-rank0-failure")
	var all errgroup.Group
	for i := range writers {
		all.Go(func() error {
			_, err := (&Snapshot{Version: Version, Size: 1, PID: i}).Write(base)
			return err
		})
	}
	if err := all.Wait(); err != nil {
		t.Fatal(err)
	}
	there := map[int]bool{}
	for n := range writers {
		path := base + ".json"
		if n > 0 {
			path = fmt.Sprintf("%s-%d.json", base, n+1)
		}
		s, err := ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		there[s.PID] = true
	}
	if len(there) != writers {
		t.Errorf("of %d snapshots, %d are there", writers, len(there))
	}
}

func TestJSONRoundTrip(t *testing.T) {
	r := open(t, t.TempDir())
	r.AddGroup(1, 3, []int{0, 1, 2, 3, 4, 5, 6, 7})
	for i := range uint64(2000) {
		tpl := Template(1, 1, sum, i, 4*i)
		rec := r.Begin(&tpl, i)
		if i < 1999 {
			r.End(rec, OK)
		}
	}
	s, err := ReadFile(r.Path())
	if err != nil {
		t.Fatal(err)
	}
	path, err := s.Write(filepath.Join(t.TempDir(), "x"))
	if err != nil {
		t.Fatal(err)
	}
	back, err := ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	one, _ := s.JSON(false)
	if two, _ := back.JSON(false); !bytes.Equal(one, two) {
		t.Errorf("it has come back as something else, of %d and %d bytes", len(one), len(two))
	}
	if len(back.Operations) != Records {
		t.Errorf("%d operations", len(back.Operations))
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(path), ".*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// TestFieldNames fixes what the JSON is called.
func TestFieldNames(t *testing.T) {
	one := 1
	now := time.Unix(0, 0)
	op := Operation{Elements: 1, CountsHash: "x", DType: "x", Reduction: "x", Algorithm: "x", Queued: 1, Ended: &now,
		Async: true, Awaited: &one, WaitsFor: []int{1}, Packets: true}
	s := Snapshot{Reason: "x", Metrics: "x", Messages: []Operation{op}, Operations: []Operation{op},
		Links: []Link{{Transport: "x", Error: "x"}}, Totals: map[string]Total{"x": {}},
		Failures: map[string]int{"x": 1},
		View:     View{Active: []int{1}}, Groups: []Group{{Ranks: []int{1}, Active: []int{1}, Running: &op, Last: &op,
			Agreed: 1, Queued: 1, Error: "x", LastError: "x", Devices: "x",
			Peers: []Peer{{Seen: "x", Number: 1, Waits: "x", WaitsFor: []int{1}}}}},
		Others: []Other{{Silent: true, Groups: []Group{{}}, Messages: []Operation{op}}}}
	b, err := s.JSON(false)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	d := json.NewDecoder(bytes.NewReader(b))
	depth, key := []bool{}, false // of objects: true
	for {
		tok, err := d.Token()
		if err != nil {
			break
		}
		inObject := len(depth) > 0 && depth[len(depth)-1]
		if text, ok := tok.(string); ok && inObject && key {
			if key = false; !slices.Contains(names, text) {
				names = append(names, text)
			}
			continue
		}
		switch tok {
		case json.Delim('{'):
			depth = append(depth, true)
		case json.Delim('['):
			depth = append(depth, false)
		case json.Delim('}'), json.Delim(']'):
			depth = depth[:len(depth)-1]
		}
		key = len(depth) > 0 && depth[len(depth)-1]
	}
	slices.Sort(names)
	want := "active agreed algorithm async awaited bytes bytes_got bytes_put bytes_received bytes_sent call " +
		"counts_hash devices dtype elements ended epoch error failures finished frames_received frames_sent " +
		"gets group groups host id incarnation job joined kind last last_error links messages metrics number " +
		"operations others outcome packets peers pid puts queued queued_seconds rank ranks reason recorded reduction " +
		"root running seen silent since size slot started time totals transport up version view waited_seconds waits " +
		"waits_for x"
	if got := strings.Join(names, " "); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestDecodeRefuses(t *testing.T) {
	r := open(t, t.TempDir())
	good, err := os.ReadFile(r.Path())
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		damage func(b []byte) []byte
		says   string
	}{
		"empty":   {func(b []byte) []byte { return nil }, "0 bytes"},
		"short":   {func(b []byte) []byte { return b[:len(b)-1] }, "bytes are no flight recorder"},
		"magic":   {func(b []byte) []byte { b[0] = 'x'; return b }, "no flight recorder"},
		"version": {func(b []byte) []byte { b[8] = 9; return b }, "version 9"},
		"rank": {func(b []byte) []byte {
			binary.NativeEndian.PutUint32(b[unsafe.Offsetof(header{}.Rank):],
				8)
			return b
		}, "rank 8 of 8"},
		"no ranks": {func(b []byte) []byte {
			binary.NativeEndian.PutUint32(b[unsafe.Offsetof(header{}.Size):],
				0)
			return b
		}, "of 0"},
		"long name": {func(b []byte) []byte {
			binary.NativeEndian.PutUint32(b[unsafe.Offsetof(header{}.JobLen):], 1<<31)
			return b
		}, "damaged"},
	} {
		if _, err := Decode(c.damage(slices.Clone(good))); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzDecode(f *testing.F) {
	r, err := Open(f.TempDir(), me)
	if err != nil {
		f.Fatal(err)
	}
	defer r.Close(false)
	r.AddGroup(2, 1, []int{1, 3, 5})
	tpl := Template(2, 1, sum, 4, 16)
	r.End(r.Begin(&tpl, 1), OK)
	r.Begin(&tpl, 2)
	good, err := os.ReadFile(r.Path())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good[:1200], good[groupsAt:groupsAt+64], good[ringAt:ringAt+256])
	f.Add(good[:64], bytes.Repeat([]byte{0xff}, 64), bytes.Repeat([]byte{0xff}, 256))
	f.Add(bytes.Repeat([]byte{0xff}, 1200), []byte{}, []byte{})
	f.Fuzz(func(t *testing.T, head, groups, ring []byte) {
		b := slices.Clone(good)
		copy(b[24:groupsAt], head[min(24, len(head)):]) // what follows the magic and the sizes
		copy(b[groupsAt:ringAt], groups)
		copy(b[ringAt:], ring)
		im, err := Decode(b)
		if err != nil {
			return
		}
		s := im.Snapshot()
		text, err := s.JSON(false)
		if err != nil {
			t.Fatal(err)
		}
		back, err := Parse(text)
		if err != nil {
			t.Fatalf("%v: %s", err, text)
		}
		Diagnose([]Rank{{Rank: 3, Presence: Present, Snapshot: back}, {Rank: 1, Presence: Silent}})
	})
}

// Ranks and jobs that there cannot be are left out of what a process is in other jobs, and the
// texts are printable.
func TestParseOthers(t *testing.T) {
	s, err := Parse([]byte(`{"version":1,"size":4,"others":[{"job":"","rank":1},{"job":"a","rank":-1},` +
		`{"job":"b\n","rank":7,"groups":[{"error":"x\ty","last":{"call":"\u001b"}}],"messages":[{"call":"\r"}]}]}`))
	if err != nil {
		t.Fatal(err)
	}
	if len(s.Others) != 1 || s.Others[0].Job != "b " || s.Others[0].Rank != 7 || s.Others[0].Groups[0].Error != "x y" ||
		s.Others[0].Groups[0].Last.Call != " " || s.Others[0].Messages[0].Call != " " {
		t.Errorf("%+v", s.Others)
	}
}

// A snapshot that would take much memory is refused before it does; that of a large job is not.
func TestParseBounds(t *testing.T) {
	with := func(fields string) []byte { return []byte(`{"version":1,"size":1,` + fields + `}`) }
	list := func(field, element string, n int) []byte {
		return with(`"` + field + `":[` + strings.Repeat(element+",", n-1) + element + "]")
	}
	for name, b := range map[string][]byte{
		"objects": list("groups", "{}", maxObjects),
		"nulls":   list("operations", "null", maxObjects),
		"numbers": with(`"view":{"active":[` + strings.Repeat("0,", maxValues) + "0]}"),
		"keys":    with(`"failures":{` + strings.Repeat(`"a":1,`, maxValues) + `"a":1}`),
	} {
		if s, err := Parse(b); err == nil || !strings.Contains(err.Error(), "at most") {
			t.Errorf("%s: %v, %v", name, s != nil, err)
		}
	}
	text := strings.Repeat(`{[n,\"`, maxValues)
	if s, err := Parse(with(`"reason":"` + text + `","groups":[{},null]`)); err != nil || len(s.Groups) != 2 ||
		s.Reason != strings.ReplaceAll(text, `\"`, `"`) {
		t.Errorf("what is in a text counts: %v", err)
	}
	const ranks = 8192
	large := Snapshot{Version: Version, Size: ranks, Groups: make([]Group, 16)}
	for r := range ranks {
		large.View.Active = append(large.View.Active, r)
		large.Links = append(large.Links, Link{Rank: r, Transport: "tcp", Error: "gone"})
		large.Groups[0].Peers = append(large.Groups[0].Peers, Peer{Rank: r, Seen: "allreduce #1", Number: 1,
			Waits: "x"})
	}
	for range Records {
		large.Operations = append(large.Operations, Operation{Call: "allreduce #1", DType: "float32", Awaited: new(int),
			Ended: new(time.Time), WaitsFor: []int{1, 2, 3}})
	}
	b, err := large.JSON(true)
	if err == nil {
		_, err = Parse(b)
	}
	if err != nil {
		t.Error(err)
	}
}

// The texts of a snapshot do not control a terminal, whether they come from JSON or from a
// recorder's file.
func TestTextsArePlain(t *testing.T) {
	r, err := Open(t.TempDir(), Identity{Job: "a\u009b31mX\xff", Rank: 0, Size: 1, Incarnation: 7,
		Host: "h\x1b\u202ex"})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close(false)
	s, err := ReadFile(r.Path())
	if err != nil || s.Job != "a 31mX\ufffd" || s.Host != "h  x" {
		t.Errorf("%+v, %v", s, err)
	}
	s, err = Parse([]byte(`{"version":1,"size":1,"job":"a\u009b31mX","host":"h\u001b\u202ex","totals":{"\u009b":{}},` +
		`"failures":{"\u202e":1,"lost":2},"links":[{"error":"\u2028"}],"endpoints":[{"name":"\u009b","id":"\u202e",` +
		`"done":{"\u009b":{}},"pending":{"\u009b":1},"failed":{"\u009b":1,"late":1}}]}`))
	if err != nil {
		t.Fatal(err)
	}
	b, err := s.JSON(false)
	if err != nil || strings.ContainsFunc(string(b), plain.Controls) || s.Job != "a 31mX" || s.Failures["lost"] != 2 ||
		s.Endpoints[0].Failed["late"] != 1 {
		t.Errorf("%+q, %v", b, err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"version":1,"rank":1,"size":4,"groups":[{"id":1,"running":{"number":3,"waits_for":[0,1,7,-1]}}],` +
		`"messages":[{"kind":"recv","waits_for":[0]}],"links":[{"rank":9}]}`))
	f.Add([]byte(`{"version":1,"size":4,"others":[{"job":"a\n","groups":[{"id":1,"running":{"number":3,` +
		`"waits_for":[0,-1]}},{"id":1}],"messages":[{"kind":"send\n","call":"\n","waits_for":[0]}]},` +
		`{"job":"b","silent":true}]}`))
	f.Add([]byte(`{"version":1,"size":1,"job":"\u009b","failures":{"\u202e":1},"endpoints":[{"modes":{"\n":1}}]}`))
	f.Add([]byte(`{"version":1,"size":1,"groups":[` + strings.Repeat("null,", maxObjects) + `{}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := Parse(b)
		if err != nil {
			return
		}
		other := *s
		ranks := []Rank{{Rank: s.Rank, Presence: Present, Snapshot: s},
			{Rank: (s.Rank + 1) % s.Size, Presence: Present, Snapshot: &other}}
		for _, x := range Diagnose(ranks) {
			if strings.ContainsFunc(x.Text, plain.Controls) {
				t.Errorf("%q", x.Text)
			}
		}
		Stragglers(ranks, nil)
	})
}

// BenchmarkRecord is what a recorded operation pays: see Begin and End.
func BenchmarkRecord(b *testing.B) {
	for name, dir := range map[string]string{"memory": "", "file": b.TempDir()} {
		b.Run(name, func(b *testing.B) {
			r := open(b, dir)
			tpl := Template(1, 1, sum, 16, 64)
			for i := uint64(0); b.Loop(); i++ {
				r.End(r.Begin(&tpl, i), OK)
			}
			r.Close(false)
		})
	}
}
