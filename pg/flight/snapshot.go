package flight

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unsafe"

	"tutti/collectives"
	"tutti/endpoint/stats"
	"tutti/internal/files"
	"tutti/internal/plain"
)

// Version is the version of Snapshot's JSON.
const Version = 1

// Snapshot is the state of one rank at one moment, from the rank or from its file.
type Snapshot struct {
	Version     int       `json:"version"`
	Job         string    `json:"job"`
	Rank        int       `json:"rank"`
	Size        int       `json:"size"`
	Incarnation string    `json:"incarnation"` // 16 hexadecimal digits
	PID         int       `json:"pid"`
	Host        string    `json:"host"`
	Time        time.Time `json:"time"`  // of the snapshot; from a file, when the process last ticked
	Since       time.Time `json:"since"` // when this rank began to join
	// Reason is why the snapshot was made: "timeout", "signal", …, FromFile, or how the process
	// ended; empty for a status request.
	Reason  string `json:"reason,omitempty"`
	Joined  bool   `json:"joined"` // all ranks have met
	View    View   `json:"view"`
	Metrics string `json:"metrics,omitempty"` // address of the metrics, HOST:PORT

	Groups     []Group          `json:"groups"`
	Messages   []Operation      `json:"messages,omitempty"` // sends and receives under way
	Links      []Link           `json:"links,omitempty"`
	Totals     map[string]Total `json:"totals,omitempty"`   // by kind, since the rank joined
	Failures   map[string]int   `json:"failures,omitempty"` // by outcome
	Recorded   uint64           `json:"recorded"`           // operations that began since the rank joined
	Operations []Operation      `json:"operations,omitempty"`

	Endpoints []stats.Endpoint `json:"endpoints,omitempty"` // of the rank's process

	Others []Other `json:"others,omitempty"` // what the rank's process is in other jobs
}

// Other is what the process of a rank is in another job that it has joined. All ranks in it are
// numbers in that job.
type Other struct {
	Job      string      `json:"job"`
	Rank     int         `json:"rank"`
	Joined   bool        `json:"joined"`           // all ranks of that job have met
	Silent   bool        `json:"silent,omitempty"` // its state was not to be had in time
	Groups   []Group     `json:"groups,omitempty"` // without Peers
	Messages []Operation `json:"messages,omitempty"`
}

// End returns how the snapshot's process ended, "exited with code 7" or "was killed by signal 9
// (SIGKILL)", as a launcher that turns the files of ranks into JSON has put it into Reason; "" if
// Reason is another one.
func (s *Snapshot) End() string {
	if strings.HasPrefix(s.Reason, "exited with ") || strings.HasPrefix(s.Reason, "was killed by ") {
		return s.Reason
	}
	return ""
}

// FromFile is the Reason of a snapshot of a recorder's file.
const FromFile = "recorder's file"

// View lists the active ranks.
type View struct {
	Epoch  uint64 `json:"epoch"`
	Active []int  `json:"active,omitempty"`
}

// Group is one group of the rank.
type Group struct {
	ID        uint32     `json:"id"` // 1: the group of all ranks; else a hash
	Slot      int        `json:"slot"`
	Size      int        `json:"size"`
	Ranks     []int      `json:"ranks,omitempty"`  // in the job, by slot; omitted if they are 0..Size-1
	Epoch     uint64     `json:"epoch"`            // of the view it runs in
	Active    []int      `json:"active,omitempty"` // ranks; omitted if all are active
	Number    uint64     `json:"number"`           // of the running operation, or of the last one
	Running   *Operation `json:"running,omitempty"`
	Last      *Operation `json:"last,omitempty"` // the last that ended, if it is still recorded
	Queued    int        `json:"queued,omitempty"`
	Error     string     `json:"error,omitempty"`      // why the group has failed; a call's root in it is a slot
	LastError string     `json:"last_error,omitempty"` // of the operation that failed last; as Error
	Devices   string     `json:"devices,omitempty"`    // how operations get at GPUs' memory; omitted if none asked
	Peers     []Peer     `json:"peers,omitempty"`
	Finished  uint64     `json:"finished"`         // number of the last operation that ended
	Agreed    uint64     `json:"agreed,omitempty"` // number of the last agreement that the rank has voted in

	Job       string `json:"-"` // set by Beside: the other job that the group is of
	ambiguous bool   // there are several jobs of that name
}

// Peer is a rank's knowledge of another one's progress in a group.
type Peer struct {
	Rank     int    `json:"rank"`
	Seen     string `json:"seen,omitempty"` // the operation that its last message belongs to
	Number   uint64 `json:"number,omitempty"`
	Waits    string `json:"waits,omitempty"` // the operation in which it announced a long wait
	WaitsFor []int  `json:"waits_for,omitempty"`
}

// Operation is a collective or a message on one rank.
type Operation struct {
	Group      uint32     `json:"group"`
	Number     uint64     `json:"number"` // in its group; of a message, its tag
	Call       string     `json:"call"`   // the whole call in words
	Kind       string     `json:"kind"`   // "allreduce", …, "split", "window", "send", Entering, Agreeing …
	DType      string     `json:"dtype,omitempty"`
	Reduction  string     `json:"reduction,omitempty"`
	Algorithm  string     `json:"algorithm,omitempty"`
	Packets    bool       `json:"packets,omitempty"` // see Call.Packets
	Root       int        `json:"root"`              // or a message's peer, -1: any
	Elements   uint64     `json:"elements,omitempty"`
	CountsHash string     `json:"counts_hash,omitempty"` // of an allgatherv, instead of elements
	Bytes      uint64     `json:"bytes"`
	Epoch      uint64     `json:"epoch"`
	Queued     float64    `json:"queued_seconds,omitempty"`
	Started    time.Time  `json:"started"`
	Ended      *time.Time `json:"ended,omitempty"`
	Outcome    string     `json:"outcome"`
	Async      bool       `json:"async,omitempty"`     // started by Start: the program may not be waiting for it
	Awaited    *int       `json:"awaited,omitempty"`   // the rank that the operation last waited for
	WaitsFor   []int      `json:"waits_for,omitempty"` // ranks, while it runs

	Job       string `json:"-"` // set by Beside: the other job that the operation is of
	Strangers []int  `json:"-"` // set by Beside: ranks of Job, as WaitsFor, that no answer is from
}

// Entering is the kind of an exchange between two views. Its number is the epoch.
const Entering = "entering"

// Agreeing is the kind of an agreement. Its number counts the agreements of the group.
const Agreeing = "agree"

// Link is the state of a rank's link to another one.
type Link struct {
	Rank           int    `json:"rank"`
	Up             bool   `json:"up"`
	Transport      string `json:"transport,omitempty"`
	Error          string `json:"error,omitempty"` // why it is down for good
	BytesSent      uint64 `json:"bytes_sent"`
	BytesReceived  uint64 `json:"bytes_received"`
	FramesSent     uint64 `json:"frames_sent"`
	FramesReceived uint64 `json:"frames_received"`
	// Puts and Gets are operations on windows that this rank began and that ended well. Their bytes
	// are not in BytesSent and BytesReceived.
	Puts     uint64 `json:"puts"`
	BytesPut uint64 `json:"bytes_put"`
	Gets     uint64 `json:"gets"`
	BytesGot uint64 `json:"bytes_got"`
	// Waited is how long this rank has waited for the other one, in waits that were long enough to
	// read the clock.
	Waited float64 `json:"waited_seconds"`
}

// MarshalJSON and UnmarshalJSON use the documented names of Total's fields.
func (t Total) MarshalJSON() ([]byte, error) {
	return fmt.Appendf(nil, `{"operations":%d,"bytes":%d}`, t.Operations, t.Bytes), nil
}

func (t *Total) UnmarshalJSON(b []byte) error {
	var v struct{ Operations, Bytes uint64 }
	err := json.Unmarshal(b, &v)
	*t = Total{v.Operations, v.Bytes}
	return err
}

// Image is a copy of a recorder's contents.
type Image struct {
	header
	groups  []Group
	records []Record // newest first
	alive   int64    // when it was copied; of a file, when the process last ticked
}

func at(ns int64) time.Time { return time.Unix(0, ns).Round(time.Millisecond).UTC() }

// Operation describes a record.
func (s *Record) Operation() Operation {
	o := Operation{Group: s.Group, Number: s.Number, Kind: s.Call.Name(), Bytes: s.Bytes, Epoch: uint64(s.Epoch),
		Root:   s.Call.Root(),
		Queued: float64(s.Queued) * tick.Seconds(), Started: at(s.Started), Outcome: s.State.String(),
		Async: s.Flags&(Async|Waited) == Async, Packets: s.Call.Packets()}
	c := s.Call
	o.Call = Spell(s.Number, c, s.Count)
	if !c.bare() {
		o.DType = c.DType().String()
	}
	if c.Reduction() != 0 {
		o.Reduction = c.Reduction().String()
	}
	if c.Algorithm() != collectives.Auto && !o.Packets {
		o.Algorithm = c.Algorithm().String()
	}
	if c.Kind() == collectives.AllGatherV {
		o.CountsHash = fmt.Sprintf("%016x", s.Count)
	} else {
		o.Elements = s.Count
	}
	if s.State != Running {
		t := at(max(s.Ended, s.Started))
		o.Ended = &t
	}
	if s.Awaited > 0 {
		r := int(s.Awaited) - 1
		o.Awaited = &r
	}
	return o
}

// Fill sets the fields of s that the image has: times, totals, failures, operations, and the
// messages under way.
func (im *Image) Fill(s *Snapshot) {
	s.Version, s.Recorded, s.Since, s.Time = Version, im.Next, at(im.Opened), at(im.alive)
	s.Totals, s.Failures = map[string]Total{}, map[string]int{}
	for k, t := range im.Totals {
		if t.Operations > 0 {
			s.Totals[Call(k).Name()] = t
		}
	}
	for _, o := range Failures() {
		if n := im.Failures[o]; n > 0 {
			s.Failures[o.String()] = int(n)
		}
	}
	slices.Reverse(im.records)
	slices.SortStableFunc(im.records, func(a, b Record) int { return int(min(max(a.Started-b.Started, -1), 1)) })
	for i := range im.records {
		rec := &im.records[i]
		o := rec.Operation()
		if kind := rec.Call.Kind(); rec.State == Running && (kind == Send || kind == Recv) {
			if o.Root >= 0 {
				o.WaitsFor = []int{o.Root}
			}
			s.Messages = append(s.Messages, o)
			continue
		}
		s.Operations = append(s.Operations, o)
	}
}

// Decode reads an image from the bytes of a recorder's file. It validates all of them: it skips
// invalid records, and returns an error if the file as a whole is invalid.
func Decode(b []byte) (*Image, error) {
	if len(b) != FileSize {
		return nil, fmt.Errorf("%d bytes are no flight recorder, which has %d", len(b), FileSize)
	}
	words := make([]uint64, FileSize/8)
	mem := unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), FileSize)
	copy(mem, b)
	h := (*liveHeader)(unsafe.Pointer(&mem[0]))
	switch {
	case string(h.Magic[:]) != magic:
		return nil, fmt.Errorf("no flight recorder: it begins with %q", h.Magic[:])
	case h.Version != version || h.RecordSize != recordSize || h.Records != Records:
		return nil, fmt.Errorf("flight recorder of version %d (records of %d bytes), this is version %d: read it "+
			"with the version that wrote it, on a machine of its byte order", h.Version, h.RecordSize, version)
	case h.Size == 0 || h.Rank >= h.Size || h.JobLen > uint32(len(h.Job)) || h.HostLen > uint32(len(h.Host)):
		return nil, fmt.Errorf("damaged flight recorder: rank %d of %d", h.Rank, h.Size)
	}
	im := &Image{header: h.header, alive: max(h.Alive, h.Opened)}
	area := mem[groupsAt:ringAt]
	area = area[:min(int(h.GroupBytes), len(area))]
	const fixed = int(unsafe.Sizeof(groupHead{}))
	for len(area) >= fixed {
		var g groupHead
		binary.Decode(area, binary.NativeEndian, &g)
		area = area[fixed:]
		n := int(g.Listed)
		if n > len(area)/4 || g.Slot >= g.Size || n != 0 && n != int(g.Size) {
			break
		}
		out := Group{ID: g.ID, Slot: int(g.Slot), Size: int(g.Size)}
		for i := range n {
			rank := binary.NativeEndian.Uint32(area[4*i:])
			if rank >= h.Size {
				n = -1
				break
			}
			out.Ranks = append(out.Ranks, int(rank))
		}
		if n < 0 {
			break
		}
		area = area[4*n:]
		im.groups = append(im.groups, out)
	}
	ring := (*[Records]Record)(unsafe.Pointer(&mem[ringAt]))
	for back := uint64(1); back <= min(h.Next, Records); back++ {
		if s := ring[(h.Next-back)%Records]; s.State > none && s.State < outcomes {
			im.records = append(im.records, s)
		}
	}
	return im, nil
}

// Snapshot returns the snapshot of a file's image. It has no links, and only those fields of the
// groups that follow from the operations.
func (im *Image) Snapshot() *Snapshot {
	s := &Snapshot{Job: plain.Text(string(im.Job[:im.JobLen])), Rank: int(im.Rank), Size: int(im.Size),
		Incarnation: fmt.Sprintf("%016x", im.Incarnation), PID: int(int32(im.PID)),
		Host: plain.Text(string(im.Host[:im.HostLen])), Reason: FromFile}
	im.Fill(s)
	for i := range s.Operations {
		s.View.Epoch = max(s.View.Epoch, s.Operations[i].Epoch)
	}
	s.Groups = slices.Clone(im.groups)
	for i := range s.Groups {
		g := &s.Groups[i]
		g.Epoch = s.View.Epoch
		for j := range s.Operations {
			o := &s.Operations[j]
			if o.Group != g.ID || o.Kind == "send" || o.Kind == "recv" {
				continue
			}
			g.Number = max(g.Number, o.Number)
			if o.Ended != nil {
				g.Last, g.Finished = o, o.Number
			} else if g.Running = o; o.Awaited != nil {
				o.WaitsFor = []int{*o.Awaited}
			}
		}
	}
	s.Joined = slices.ContainsFunc(s.Operations,
		func(o Operation) bool { return o.Ended != nil && o.Outcome == OK.String() })
	return s
}

// maxDump bounds the size of a JSON snapshot for ReadFile.
const maxDump = 16 << 20

// ReadFile reads a snapshot from a regular file, not through a symbolic link: a recorder's file, or
// JSON of Write.
func ReadFile(path string) (*Snapshot, error) {
	f, err := files.Read(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxDump+1))
	if err != nil {
		return nil, err
	}
	if len(b) > maxDump {
		return nil, fmt.Errorf("%s: more than %d bytes are no snapshot", path, maxDump)
	}
	if len(b) > 0 && b[0] == '{' {
		s, err := Parse(b)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		return s, nil
	}
	im, err := Decode(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return im.Snapshot(), nil
}

// Limits of a snapshot for Parse, which bound the memory that its JSON becomes.
const (
	maxObjects = 1 << 17
	maxValues  = 1 << 20
)

// tooMuch returns an error if JSON stands for more than Parse takes. An element of a list that is
// null counts as an object, since it takes as much memory.
func tooMuch(b []byte) error {
	objects, values, quoted := 0, 0, false
	for i := 0; i < len(b); i++ {
		switch c := b[i]; {
		case c == '"':
			quoted = !quoted
		case quoted && c == '\\':
			i++
		case quoted:
		case c == '{' || c == 'n':
			objects++
			values++
		case c == ',' || c == '[':
			values++
		}
	}
	if objects > maxObjects || values > maxValues {
		return fmt.Errorf("no snapshot: %d objects and %d values, at most %d and %d", objects, values, maxObjects,
			maxValues)
	}
	return nil
}

// ErrVersion says that a snapshot is of a version that this build cannot read.
var ErrVersion = errors.New("snapshot of another version")

// Parse reads a snapshot from untrusted JSON. It checks everything that Diagnose relies on, and
// limits the memory that it takes. Unknown fields are ignored.
func Parse(b []byte) (*Snapshot, error) {
	if err := tooMuch(b); err != nil {
		return nil, err
	}
	var s Snapshot
	if err := json.Unmarshal(b, &s); err != nil {
		var head struct{ Version int } // the rest may be of another one
		if json.Unmarshal(b, &head) != nil || head.Version == Version {
			return nil, fmt.Errorf("no snapshot: %w", err)
		}
		s.Version = head.Version
	}
	switch {
	case s.Version != Version:
		return nil, fmt.Errorf("%w: %d, expected %d: use the tutti of the job's build", ErrVersion, s.Version, Version)
	case s.Size < 1 || s.Rank < 0 || s.Rank >= s.Size:
		return nil, fmt.Errorf("snapshot of rank %d of %d", s.Rank, s.Size)
	}
	s.tidy()
	s.Others = slices.DeleteFunc(s.Others, func(o Other) bool { return o.Rank < 0 || o.Job == "" })
	return &s, nil
}

// Other describes the rank in the snapshots of the other jobs of its process.
func (s *Snapshot) Other() Other {
	o := Other{Job: s.Job, Rank: s.Rank, Joined: s.Joined, Groups: slices.Clone(s.Groups), Messages: s.Messages}
	for i := range o.Groups {
		o.Groups[i].Peers = nil
	}
	return o
}

// tidy makes the texts plain.
func (s *Snapshot) tidy() {
	clean := func(t *string) { *t = plain.Text(*t) }
	op := func(o *Operation) {
		if o != nil {
			for _, t := range []*string{&o.Call, &o.Kind, &o.DType, &o.Reduction, &o.Algorithm, &o.Outcome,
				&o.CountsHash} {
				clean(t)
			}
		}
	}
	all := func(groups []Group, messages []Operation) {
		for i := range groups {
			g := &groups[i]
			clean(&g.Error)
			clean(&g.LastError)
			clean(&g.Devices)
			op(g.Running)
			op(g.Last)
			for j := range g.Peers {
				clean(&g.Peers[j].Seen)
				clean(&g.Peers[j].Waits)
			}
		}
		for i := range messages {
			op(&messages[i])
		}
	}
	for _, t := range []*string{&s.Job, &s.Host, &s.Reason, &s.Incarnation, &s.Metrics} {
		clean(t)
	}
	all(s.Groups, s.Messages)
	for i := range s.Others {
		clean(&s.Others[i].Job)
		all(s.Others[i].Groups, s.Others[i].Messages)
	}
	for i := range s.Operations {
		op(&s.Operations[i])
	}
	for i := range s.Links {
		clean(&s.Links[i].Error)
		clean(&s.Links[i].Transport)
	}
	tidyKeys(s.Totals)
	tidyKeys(s.Failures)
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		clean(&e.Name)
		clean(&e.ID)
		for _, counts := range []map[string]stats.Count{e.Done, e.Served, e.Direct} {
			tidyKeys(counts)
		}
		for _, numbers := range []map[string]int{e.Pending, e.Modes, e.Paths} {
			tidyKeys(numbers)
		}
		tidyKeys(e.Failed)
		tidyKeys(e.Refused)
	}
}

// tidyKeys removes the entries whose keys are not plain.
func tidyKeys[T any](m map[string]T) {
	maps.DeleteFunc(m, func(k string, _ T) bool { return k != plain.Text(k) })
}

// JSON returns the snapshot as JSON, indented if indent is set.
func (s *Snapshot) JSON(indent bool) ([]byte, error) {
	if indent {
		return json.MarshalIndent(s, "", " ")
	}
	return json.Marshal(s)
}

// Write writes the snapshot to base.json, or if that exists to the first of base-2.json,
// base-3.json and so on that does not, and returns the path. It does so atomically; the file is
// readable by its owner only.
func (s *Snapshot) Write(base string) (path string, err error) {
	b, err := s.JSON(true)
	if err != nil {
		return "", err
	}
	f, err := os.CreateTemp(filepath.Dir(base), "."+filepath.Base(base)+"-*")
	if err != nil {
		return "", err
	}
	defer os.Remove(f.Name())         // fails after a renaming
	_, err = f.Write(append(b, '\n')) // the file's mode is 0600
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return "", err
	}
	path = base + ".json"
	for n := 2; ; n++ {
		switch err = os.Link(f.Name(), path); {
		case err == nil:
			return path, nil
		case !errors.Is(err, fs.ErrExist): // the file system may have no links; nothing has this name
			return path, os.Rename(f.Name(), path)
		}
		path = fmt.Sprintf("%s-%d.json", base, n)
	}
}
