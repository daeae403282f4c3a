package bootstrap

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"tutti/internal/ident"
	"tutti/internal/plain"
)

// Record is what a rank publishes about itself in the store.
type Record struct {
	Rank        int
	Size        int      // the job's, as this rank knows it: what it may grow to
	First       int      // ranks that the job begins with; 0: Size
	Incarnation uint64   // never 0
	Addrs       []string // of its handshake RPC, IP:PORT, in the order of the publisher's preference; at most MaxAddrs
	Host        string   // host name, for display
	Machine     string   // equal for processes under one kernel
	Network     string   // network namespace: equal for processes that share loopback
	Processes   string   // PID namespace: equal for processes of a machine that share PIDs; "" if unknown
	PID         int
	Terms       Terms
}

// Terms are what all ranks of a job need alike, beside its size.
type Terms struct {
	Version  string            `json:"version,omitempty"` // of what ranks send each other
	Settings map[string]string `json:"settings,omitzero"` // by name; one that only a rank has does not count
}

// Compare returns a *TermsError if who, whose Terms are o, cannot be in a job with a process of t.
func (t Terms) Compare(o Terms, who string) error {
	if t.Version != o.Version {
		return &TermsError{Peer: who, Own: t.Version, Other: o.Version}
	}
	for _, name := range slices.Sorted(maps.Keys(t.Settings)) {
		if other, known := o.Settings[name]; known && other != t.Settings[name] {
			return &TermsError{Peer: who, Setting: name, Own: t.Settings[name], Other: other}
		}
	}
	return nil
}

// TermsError says that a process of the job has other Terms than this one.
type TermsError struct {
	Peer       string // names the process
	Setting    string // name; "": the versions differ
	Own, Other string // the values
}

func (e *TermsError) Error() string {
	if e.Setting == "" {
		return fmt.Sprintf("this process has another build of the library than %s (its plans are of version %q, there "+
			"%q): run the same build at all ranks of a job", e.Peer, e.Own, e.Other)
	}
	return fmt.Sprintf("this process has %s=%s, but %s has %s: give all ranks of a job the same", e.Setting, e.Own,
		e.Peer, e.Other)
}

// Limits of a Record.
const (
	MaxAddrs  = 16
	maxRecord = 4096
	maxName   = 255
)

// recordJSON is the stored form of a Record. 64-bit numbers are hexadecimal strings, because some
// JSON readers would round them.
type recordJSON struct {
	Rank        int      `json:"rank"`
	Size        int      `json:"size"`
	First       int      `json:"first,omitempty"`
	Incarnation string   `json:"incarnation"`
	Addrs       []string `json:"addrs"`
	Host        string   `json:"host"`
	Machine     string   `json:"machine"`
	Network     string   `json:"network"`
	Processes   string   `json:"processes,omitempty"`
	PID         int      `json:"pid"`
	Terms
}

// Encode returns the stored form of the record, JSON.
func (r Record) Encode() ([]byte, error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	b, err := json.Marshal(recordJSON{r.Rank, r.Size, r.First, fmt.Sprintf("%016x", r.Incarnation), r.Addrs, r.Host,
		r.Machine, r.Network, r.Processes, r.PID, r.Terms})
	if err == nil && len(b) > maxRecord {
		err = fmt.Errorf("record of rank %d: %d bytes, at most %d", r.Rank, len(b), maxRecord)
	}
	return b, err
}

// DecodeRecord reads and validates the result of Encode. Unknown fields are ignored, for later
// versions.
func DecodeRecord(b []byte) (Record, error) {
	if len(b) > maxRecord {
		return Record{}, fmt.Errorf("record of %d bytes, at most %d", len(b), maxRecord)
	}
	var j recordJSON
	if err := json.NewDecoder(bytes.NewReader(b)).Decode(&j); err != nil {
		return Record{}, fmt.Errorf("record: %w", err)
	}
	inc, err := strconv.ParseUint(j.Incarnation, 16, 64)
	if err != nil {
		return Record{}, fmt.Errorf("record: incarnation %q: expected hexadecimal digits", clip(j.Incarnation))
	}
	r := Record{j.Rank, j.Size, j.First, inc, j.Addrs, j.Host, j.Machine, j.Network, j.Processes, j.PID, j.Terms}
	return r, r.check()
}

func (r *Record) check() error {
	switch {
	case r.Size < 1 || r.Rank < 0 || r.Rank >= r.Size:
		return fmt.Errorf("record: rank %d of %d: ranks are 0..size-1", r.Rank, r.Size)
	case r.First < 0 || r.First > r.Size:
		return fmt.Errorf("record of rank %d: the job begins with %d ranks of %d", r.Rank, r.First, r.Size)
	case r.Incarnation == 0:
		return fmt.Errorf("record of rank %d: incarnation 0", r.Rank)
	case len(r.Addrs) > MaxAddrs:
		return fmt.Errorf("record of rank %d: %d addresses, at most %d", r.Rank, len(r.Addrs), MaxAddrs)
	case r.PID < 0:
		return fmt.Errorf("record of rank %d: pid %d", r.Rank, r.PID)
	}
	for _, a := range r.Addrs {
		if ap, err := netip.ParseAddrPort(a); err != nil || ap.Port() == 0 || ap.Addr().Zone() != "" ||
			ap.Addr().IsUnspecified() || ap.Addr().IsMulticast() {
			return fmt.Errorf("record of rank %d: address %q: expected IP:PORT", r.Rank, clip(a))
		}
	}
	texts := []string{r.Host, r.Machine, r.Network, r.Processes, r.Terms.Version}
	for name, value := range r.Terms.Settings {
		texts = append(texts, name, value)
	}
	for _, s := range texts {
		if len(s) > maxName || strings.ContainsFunc(s, plain.Controls) {
			return fmt.Errorf("record of rank %d: %q: expected at most %d printable bytes", r.Rank, clip(s), maxName)
		}
	}
	return nil
}

// holder describes the process of r.
func (r *Record) holder() string {
	return fmt.Sprintf("incarnation %016x, pid %d on %s", r.Incarnation, r.PID, r.Host)
}

// name describes the rank of r.
func (r *Record) name() string { return fmt.Sprintf("rank %d (%s)", r.Rank, r.holder()) }

// NewRecord returns a record with what a process knows of itself: host, machine, network, PID
// namespace and PID.
func NewRecord(rank, size int, incarnation uint64, addrs []string) Record {
	p := here()
	return Record{Rank: rank, Size: size, Incarnation: incarnation, Addrs: addrs, Host: p[0], Machine: p[1],
		Network: p[2], Processes: processes(), PID: os.Getpid()}
}

// processes returns the PID namespace of this process.
var processes = sync.OnceValue(func() string {
	ns, err := os.Readlink("/proc/self/ns/pid")
	if err != nil || len(ns) > maxName {
		return ""
	}
	return ns
})

// here returns host name, machine and network of this process. The machine is its kernel's boot id,
// which containers share; a network is a network namespace.
var here = sync.OnceValue(func() [3]string {
	host, err := os.Hostname()
	if host = plain.Text(host); err != nil || len(host) > maxName {
		host = "unknown"
	}
	place, err := ident.Here()
	if err != nil {
		return [3]string{host, host, host}
	}
	return [3]string{host, place.Boot, place.Boot + "/" + place.Network}
})

// RankKey is the key of a slot's Record, SizeKey that of the job's size.
func RankKey(slot int) string { return RankKeys + strconv.Itoa(slot) }

// RankKeys is the prefix of the keys of all Records.
const RankKeys = "ranks/"

// The keys of what the ranks have alike: their largest number, and their Terms.
const (
	SizeKey  = "size"
	TermsKey = "terms"
)

// SlotError says that another live process holds the slot.
type SlotError struct{ Holder Record }

func (e *SlotError) Error() string {
	return fmt.Sprintf("rank %d is taken by %s: end that process, give this one another rank, or use another TUTTI_JOB",
		e.Holder.Rank, e.Holder.holder())
}

// SizeError says that the job was started with another number of ranks, or may grow to another
// one.
type SizeError struct{ Own, Job int }

func (e *SizeError) Error() string {
	return fmt.Sprintf("this rank was told that the job has %d ranks, but others of it were told %d: launch all "+
		"with the same size and TUTTI_MAX_SIZE, or use another TUTTI_JOB", e.Own, e.Job)
}

// VacantKeys is the prefix of the keys by which a launcher says that a rank is gone for good before
// all ranks have met, so that a process on standby may take its place.
const VacantKeys = "vacant/"

// Register publishes r under the lease of s. If another incarnation holds the slot, Register waits
// for it to go, at most a lease's TTL and a second, since the holder may be dead; then it returns a
// *SlotError. It waits until ctx ends while dead, which may be nil, says that the holder is dead:
// an etcd that has elected a leader keeps all leases for another TTL, or longer. If other ranks of
// the job have another size, it returns a *SizeError, and if they have other Terms, a *TermsError;
// it then publishes nothing. When the store cannot be reached, or ctx ends, r may be published.
func Register(ctx context.Context, s Store, r Record, dead func(context.Context, Record) bool) error {
	value, err := r.Encode()
	if err != nil {
		return err
	}
	if err := takeSlot(ctx, s, r, value, dead); err != nil {
		return err
	}
	// The record comes first: a rank that finds another size or other Terms in the store is then
	// sure to find the record of the rank that wrote them, if that is alive.
	err = agree(ctx, s, r, SizeKey, []byte(strconv.Itoa(r.Size)), dead)
	if err == nil {
		var terms []byte
		if terms, err = json.Marshal(r.Terms); err == nil {
			err = agree(ctx, s, r, TermsKey, terms, dead)
		}
	}
	// A write without an answer may come late: the lease ends it. So it does the record of a caller
	// that gives up, which may have been there before.
	if err == nil || errors.Is(err, ErrStoreAway) || ctx.Err() != nil {
		return err
	}
	dctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	return errors.Join(err, s.Delete(dctx, RankKey(r.Rank)))
}

func takeSlot(ctx context.Context, s Store, r Record, value []byte, dead func(context.Context, Record) bool) error {
	key := RankKey(r.Rank)
	for {
		err := s.Create(ctx, key, value, true)
		var c *ConflictError
		if !errors.As(err, &c) {
			return err
		}
		if c.Current == nil {
			continue
		}
		holder, err := DecodeRecord(c.Current)
		if err != nil {
			switch gone, err2 := outlast(ctx, s, key, c.Current, Record{}, nil); {
			case err2 != nil:
				return err2
			case gone:
				continue
			}
			return fmt.Errorf("rank %d is taken by something that is no rank of this build of the library: key %s: %w",
				r.Rank, key, err)
		}
		// The key is under an earlier lease, and would go with it, or an earlier attempt succeeded
		// without an answer.
		if holder.Incarnation == r.Incarnation && bytes.Equal(c.Current, value) {
			if err := s.Adopt(ctx, key, value); !errors.Is(err, ErrConflict) {
				return err
			}
			continue
		}
		gone, err := outlast(ctx, s, key, c.Current, holder, dead)
		switch {
		case err != nil:
			return err
		case !gone && ctx.Err() != nil:
			return fmt.Errorf("%w (%w)", &SlotError{holder}, context.Cause(ctx))
		case !gone:
			return &SlotError{holder}
		}
	}
}

// outlast waits until key has another value than the record of holder, or none, as long as Register
// says. A store without leases keeps the records of the dead.
func outlast(ctx context.Context, s Store, key string, value []byte, holder Record,
	dead func(context.Context, Record) bool) (gone bool, err error) {
	once := func() (bool, error) {
		wctx, cancel := context.WithTimeout(ctx, s.TTL()+time.Second)
		defer cancel()
		gone, err := waitGone(wctx, s, key, value)
		if wctx.Err() != nil {
			err = nil
		}
		return gone, err
	}
	for {
		gone, err = once()
		if gone || err != nil || ctx.Err() != nil || s.TTL() == 0 || dead == nil || !dead(ctx, holder) {
			return gone, err
		}
	}
}

// waitGone waits until key has another value than old or none.
func waitGone(ctx context.Context, s Store, key string, old []byte) (bool, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for e := range s.Watch(ctx, key) {
		if e.Err != nil {
			return false, e.Err
		}
		if !e.Exists || !bytes.Equal(e.Value, old) {
			return true, nil
		}
	}
	return false, nil
}

// agree writes what r and the job's other ranks have alike to key, or compares it. The key may
// outlive the ranks: a value of which no live rank differs from r is replaced. A rank that differs
// may be one of an earlier job that is about to end, or whose lease is: agree waits for that as
// long as takeSlot does.
func agree(ctx context.Context, s Store, r Record, key string, own []byte,
	dead func(context.Context, Record) bool) error {
	err := s.Create(ctx, key, own, false)
	for {
		var c *ConflictError
		if !errors.As(err, &c) {
			return err
		}
		if bytes.Equal(c.Current, own) {
			return nil
		}
		ranks, err2 := s.List(ctx, RankKeys)
		if err2 != nil {
			return err2
		}
		other, holder, differs := r.differing(ranks)
		if differs == nil {
			err = s.CompareAndSwap(ctx, key, c.Current, own)
			continue
		}
		gone, err2 := outlast(ctx, s, other, ranks[other], holder, dead)
		switch {
		case err2 != nil:
			return err2
		case !gone:
			return differs
		}
	}
}

// differing returns a record that cannot be in one job with r, its key, and why, nil if there is
// none.
func (r *Record) differing(records map[string][]byte) (key string, other Record, why error) {
	for key, b := range records {
		if o, err := DecodeRecord(b); err == nil {
			if err := r.Compare(&o); err != nil {
				return key, o, err
			}
		}
	}
	return "", Record{}, nil
}

// Compare returns a *SizeError or a *TermsError if the ranks of r and o cannot be in one job.
func (r *Record) Compare(o *Record) error {
	if r.Size != o.Size {
		return &SizeError{Own: r.Size, Job: o.Size}
	}
	return r.Terms.Compare(o.Terms, o.name())
}

// Lookup returns the record of slot as soon as it is registered. If ctx ends before, the error
// names the rank and wraps ctx's error.
func Lookup(ctx context.Context, s Store, slot int) (Record, error) {
	t0 := time.Now()
	b, err := s.Wait(ctx, RankKey(slot))
	if err != nil {
		if ctx.Err() != nil && !errors.Is(err, ErrStoreAway) {
			return Record{}, fmt.Errorf("rank %d never registered (waited %v): was it started, for the same job "+
				"and store? %w", slot, time.Since(t0).Round(time.Millisecond), context.Cause(ctx))
		}
		return Record{}, fmt.Errorf("look up rank %d: %w", slot, err)
	}
	r, err := DecodeRecord(b)
	if err == nil && r.Rank != slot {
		err = fmt.Errorf("record of rank %d", r.Rank)
	}
	if err != nil {
		return Record{}, fmt.Errorf("look up rank %d: key %s: %w", slot, RankKey(slot), err)
	}
	return r, nil
}
