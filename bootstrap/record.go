package bootstrap

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"tutti/internal/ident"
)

// Record is what a rank publishes about itself in the store.
type Record struct {
	Rank        int
	Size        int      // the job's, as this rank knows it
	Incarnation uint64   // never 0
	Addrs       []string // of its handshake RPC, IP:PORT, in the order of the publisher's preference; at most MaxAddrs
	Host        string   // host name, for display
	Machine     string   // equal for processes under one kernel
	Network     string   // network namespace: equal for processes that share loopback
	PID         int
	Version     string // of the library
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
	Incarnation string   `json:"incarnation"`
	Addrs       []string `json:"addrs"`
	Host        string   `json:"host"`
	Machine     string   `json:"machine"`
	Network     string   `json:"network"`
	PID         int      `json:"pid"`
	Version     string   `json:"version,omitempty"`
}

// Encode returns the stored form of the record, JSON.
func (r Record) Encode() ([]byte, error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	b, err := json.Marshal(recordJSON{r.Rank, r.Size, fmt.Sprintf("%016x", r.Incarnation), r.Addrs, r.Host, r.Machine,
		r.Network, r.PID, r.Version})
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
	r := Record{j.Rank, j.Size, inc, j.Addrs, j.Host, j.Machine, j.Network, j.PID, j.Version}
	return r, r.check()
}

func (r *Record) check() error {
	switch {
	case r.Size < 1 || r.Rank < 0 || r.Rank >= r.Size:
		return fmt.Errorf("record: rank %d of %d: ranks are 0..size-1", r.Rank, r.Size)
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
	for _, s := range []string{r.Host, r.Machine, r.Network, r.Version} {
		if len(s) > maxName || strings.ContainsFunc(s, func(c rune) bool { return c < ' ' || c == 0x7f }) {
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

// NewRecord returns a record with what a process knows of itself: host, machine, network and pid.
func NewRecord(rank, size int, incarnation uint64, addrs []string) Record {
	p := here()
	return Record{Rank: rank, Size: size, Incarnation: incarnation, Addrs: addrs, Host: p[0], Machine: p[1],
		Network: p[2], PID: os.Getpid()}
}

// here returns host name, machine and network of this process. The machine is its kernel's boot id,
// which containers share; a network is a network namespace.
var here = sync.OnceValue(func() [3]string {
	host, err := os.Hostname()
	if err != nil || len(host) > maxName {
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

// SizeKey is the key of the number of ranks.
const SizeKey = "size"

// SlotError says that another live process holds the slot.
type SlotError struct{ Holder Record }

func (e *SlotError) Error() string {
	return fmt.Sprintf("rank %d is taken by %s: end that process, give this one another rank, or use another TUTTI_JOB",
		e.Holder.Rank, e.Holder.holder())
}

// SizeError says that the job was started with another number of ranks.
type SizeError struct{ Own, Job int }

func (e *SizeError) Error() string {
	return fmt.Sprintf("this rank was told that the job has %d ranks, but others of it were told %d: launch all "+
		"with the same size, or use another TUTTI_JOB", e.Own, e.Job)
}

// VacantKeys is the prefix of the keys by which a launcher says that a rank is gone for good before
// all ranks have met, so that a process on standby may take its place.
const VacantKeys = "vacant/"

// Register publishes r under the lease of s. If another incarnation holds the slot, Register waits
// for it to go, at most a lease's TTL and a second, since the holder may be dead; then it returns a
// *SlotError. If other ranks of the job have another size, it returns a *SizeError and publishes
// nothing.
func Register(ctx context.Context, s Store, r Record) error {
	value, err := r.Encode()
	if err != nil {
		return err
	}
	if err := takeSlot(ctx, s, r, value); err != nil {
		return err
	}
	// The record comes first: a rank that finds another size in the store is then sure to find the
	// record of the rank that wrote it, if that is alive.
	if err := agreeSize(ctx, s, r); err != nil {
		dctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		return errors.Join(err, s.Delete(dctx, RankKey(r.Rank)))
	}
	return nil
}

func takeSlot(ctx context.Context, s Store, r Record, value []byte) error {
	key := RankKey(r.Rank)
	wctx, cancel := context.WithTimeout(ctx, s.TTL()+time.Second)
	defer cancel()
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
			return fmt.Errorf("rank %d is taken by something that is no rank of this library: key %s: %w", r.Rank, key,
				err)
		}
		// The key is under an earlier lease, and would go with it, or an earlier attempt succeeded
		// without an answer.
		if holder.Incarnation == r.Incarnation {
			if err := s.CompareAndSwap(ctx, key, c.Current, nil); err != nil && !errors.Is(err, ErrConflict) {
				return err
			}
			continue
		}
		gone, err := waitGone(wctx, s, key, c.Current)
		switch {
		case err != nil && wctx.Err() == nil:
			return err
		case !gone && ctx.Err() != nil:
			return fmt.Errorf("%w (%w)", &SlotError{holder}, context.Cause(ctx))
		case !gone:
			return &SlotError{holder}
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

// agreeSize writes the job's size or compares it. The key may outlive the ranks: a size without a
// live rank is replaced.
func agreeSize(ctx context.Context, s Store, r Record) error {
	own := []byte(strconv.Itoa(r.Size))
	err := s.Create(ctx, SizeKey, own, false)
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
		for _, b := range ranks {
			if o, err := DecodeRecord(b); err == nil && o.Size != r.Size {
				return &SizeError{Own: r.Size, Job: o.Size}
			}
		}
		err = s.CompareAndSwap(ctx, SizeKey, c.Current, own)
	}
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
