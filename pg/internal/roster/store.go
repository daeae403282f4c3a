package roster

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"tutti/bootstrap"
	"tutti/pg/membership"
)

// Keys of the membership in the job's store, besides the view's. They end in a slot, and exist
// while the lease of the rank that wrote them is valid. Each value begins with the rank's
// incarnation, eight bytes, big-endian.
const (
	reportKey = membership.StoreKeys + "report/" // the rank's report on others
	joinKey   = membership.StoreKeys + "join/"   // the rank waits for admission: an epoch
	knockKey  = membership.StoreKeys + "knock/"  // a new incarnation asks whether the one in its slot is alive
)

// signed puts this rank's incarnation before a value.
func (ro *Roster) signed(value []byte) []byte {
	return append(binary.BigEndian.AppendUint64(nil, ro.self.Incarnation), value...)
}

func encodeEpoch(epoch uint64) []byte { return binary.BigEndian.AppendUint64(nil, epoch) }

// publish sets this rank's key of a kind to value, or deletes it. The latest value counts.
func (ro *Roster) publish(kind string, value []byte) {
	key := kind + strconv.Itoa(ro.self.Slot)
	ro.mu.Lock()
	ro.want[key], ro.kept[key] = value, value
	ro.mu.Unlock()
	nudge(ro.dirty)
}

// write writes the wanted values to the store.
func (ro *Roster) write() {
	defer ro.wg.Done()
	for {
		ro.mu.Lock()
		var key string
		var value []byte
		for key, value = range ro.want {
			break
		}
		ro.mu.Unlock()
		if key == "" {
			select {
			case <-ro.dirty:
				continue
			case <-ro.ctx.Done():
				return
			}
		}
		ctx, cancel := context.WithTimeout(ro.ctx, StoreWait)
		store := ro.dir.Store()
		var err error
		if value == nil {
			err = store.Delete(ctx, key)
		} else {
			err = store.Put(ctx, key, value, true)
		}
		cancel()
		if err == nil {
			ro.mu.Lock()
			// What was put under a lease that has been replaced is put again.
			if now, ok := ro.want[key]; ok && slices.Equal(now, value) && ro.dir.Store() == store {
				delete(ro.want, key)
			}
			ro.mu.Unlock()
			continue
		}
		select {
		case <-ro.ctx.Done():
			return
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// watch follows the store. When the lease is lost it takes another one for the same incarnation.
func (ro *Roster) watch() {
	defer ro.wg.Done()
	for ro.ctx.Err() == nil {
		store := ro.dir.Store()
		for e := range store.Watch(ro.ctx, membership.StoreKeys) {
			if e.Err != nil {
				ro.Tell(membership.StoreAway{Cause: storeCause(e.Err)})
				break
			}
			ro.seen(e)
		}
		for ro.ctx.Err() == nil {
			err := ro.dir.Reconnect(ro.ctx, store)
			if err == nil {
				ro.mu.Lock()
				maps.Copy(ro.want, ro.kept) // the values ended with the lease
				ro.mu.Unlock()
				nudge(ro.dirty)
				// While this rank had no lease the job may have begun, continued without it, and
				// ended.
				ro.begun.Store(true)
				ctx, cancel := context.WithTimeout(ro.ctx, StoreWait)
				if _, err := ro.dir.Store().Get(ctx, membership.ViewKey); errors.Is(err, bootstrap.ErrNoKey) {
					ro.over()
				}
				cancel()
				ro.Tell(membership.StoreBack{})
				break
			}
			ro.log.Debug("the store stays away", "err", err)
			select {
			case <-ro.ctx.Done():
			case <-time.After(200 * time.Millisecond):
			}
		}
	}
}

// seen handles one key of the store, which may have any content.
func (ro *Roster) seen(e bootstrap.Event) {
	if e.Key == membership.ViewKey {
		first, v, err := membership.DecodeStored(e.Value)
		switch {
		case e.Exists && err != nil:
			ro.log.Warn("the view in the store is not one", "err", err)
		case e.Exists && first == ro.cfg.First:
			ro.begun.Store(true)
			ro.Tell(membership.ViewSeen{View: v})
		case ro.begun.Load():
			ro.over()
		}
		return
	}
	at := strings.LastIndexByte(e.Key, '/') + 1
	slot, err := strconv.Atoi(e.Key[at:])
	if err != nil || slot < 0 || slot >= ro.cfg.MaxSize || slot == ro.self.Slot {
		return
	}
	p := membership.Peer{Slot: slot}
	if e.Exists {
		if len(e.Value) < 8 {
			return
		}
		p.Incarnation = binary.BigEndian.Uint64(e.Value)
	}
	switch e.Key[:at] {
	case reportKey:
		if e.Exists {
			if r, err := membership.DecodeReport(e.Value[8:]); err == nil {
				ro.Tell(membership.Reported{Peer: p, Report: r})
			}
		}
	case joinKey:
		ro.mu.Lock()
		before := ro.joiners[slot]
		delete(ro.joiners, slot)
		if e.Exists && len(e.Value) == 16 {
			ro.joiners[slot] = p.Incarnation
		}
		ro.mu.Unlock()
		if before != 0 && before != p.Incarnation {
			ro.Tell(membership.JoinGone{Peer: membership.Peer{Slot: slot, Incarnation: before}})
		}
		if e.Exists && len(e.Value) == 16 {
			ro.Tell(membership.JoinAsked{Peer: p, Epoch: binary.BigEndian.Uint64(e.Value[8:])})
		}
	case knockKey:
		v := ro.View()
		if e.Exists && slot < len(v.Slots) && v.Slots[slot].Incarnation != 0 &&
			v.Slots[slot].Incarnation != p.Incarnation {
			old := membership.Peer{Slot: slot, Incarnation: v.Slots[slot].Incarnation}
			ro.aside(func() {
				if ro.probe(old) == membership.VerdictDead {
					ro.Tell(membership.Dead{Peer: old, Cause: "its process has ended, and another has its place"})
				}
			})
		}
	}
}

// begin writes the job's first view, and tries again while the store is away and this rank is
// registered: the view of a rank that was silent for long, and comes back, may be that of a job
// that is over. Then it is up to watch.
func (ro *Roster) begin(v membership.View) {
	for try := true; ; {
		if try {
			if err := ro.publishFirst(ro.ctx, v); !errors.Is(err, bootstrap.ErrStoreAway) {
				return
			}
		}
		select {
		case <-ro.ctx.Done():
			return
		case <-time.After(100 * time.Millisecond):
		}
		ctx, cancel := context.WithTimeout(ro.ctx, StoreWait)
		b, err := ro.dir.Store().Get(ctx, bootstrap.RankKey(ro.self.Slot))
		cancel()
		if try = err == nil; !try && errors.Is(err, bootstrap.ErrStoreAway) {
			continue
		}
		if rec, bad := bootstrap.DecodeRecord(b); err != nil || bad != nil || rec.Incarnation != ro.self.Incarnation ||
			ro.begun.Load() {
			return
		}
	}
}

// publishFirst writes the job's first view. It replaces the view of an earlier job of the same
// name.
func (ro *Roster) publishFirst(ctx context.Context, v membership.View) error {
	var old []byte
	for {
		cctx, cancel := context.WithTimeout(ctx, StoreWait)
		err := ro.dir.Store().CompareAndSwap(cctx, membership.ViewKey, old, membership.EncodeStored(ro.cfg.First, v))
		cancel()
		var c *bootstrap.ConflictError
		switch {
		case err == nil:
			ro.begun.Store(true)
			return nil
		case !errors.As(err, &c):
			ro.log.Debug("the first view is not in the store", "err", err)
			return err
		}
		if first, _, err := membership.DecodeStored(c.Current); err == nil && first == ro.cfg.First {
			ro.begun.Store(true)
			return nil
		}
		old = c.Current
	}
}

// propose does the compare-and-swap of a proposal.
func (ro *Roster) propose(a membership.Propose) {
	ctx, cancel := context.WithTimeout(ro.ctx, StoreWait)
	defer cancel()
	answer := membership.Proposed{Epoch: a.New.Epoch}
	swap := func() error {
		return ro.dir.Store().CompareAndSwap(ctx, membership.ViewKey, membership.EncodeStored(ro.cfg.First, a.Old),
			membership.EncodeStored(ro.cfg.First, a.New))
	}
	err := swap()
	var c *bootstrap.ConflictError
	if errors.As(err, &c) && a.Old.Epoch == 1 && !ro.begun.Load() { // the first view may not have been written yet
		if first, _, bad := membership.DecodeStored(c.Current); bad != nil || first != ro.cfg.First {
			if err = ro.publishFirst(ctx, a.Old); err == nil {
				err = swap()
			}
		}
	}
	switch {
	case err == nil:
		answer.Outcome = membership.OutcomeWon
	case errors.As(err, &c):
		if first, v, bad := membership.DecodeStored(c.Current); bad == nil && first == ro.cfg.First {
			answer.Outcome, answer.Current = membership.OutcomeLost, v
		} else if ro.begun.Load() {
			ro.over()
		}
	default:
		answer.Cause = storeCause(err)
		ro.log.Debug("a view was proposed in vain", "err", err)
	}
	ro.Tell(answer)
}

// over handles the end of the job without this rank: the job's keys are gone from the store, or
// belong to another job. That happens only when all others have left and this rank has lost its
// lease: it was evicted, or may have been.
func (ro *Roster) over() {
	v := ro.View()
	if !v.Has(ro.self.Slot, ro.self.Incarnation) { // the rank waits for admission
		return
	}
	v.Epoch++
	v.Slots = slices.Clone(v.Slots)
	v.Slots[ro.self.Slot].Incarnation, v.Slots[ro.self.Slot].Left = 0, v.Epoch
	ro.Tell(membership.ViewSeen{View: v})
}

// storeCause says why the store did not carry out a request of this rank, for example because it
// cannot be reached.
func storeCause(err error) string {
	if errors.Is(err, bootstrap.ErrStoreAway) {
		return fmt.Sprintf("%v: this rank may be on the minority side of a partition", err)
	}
	return err.Error()
}

// clear removes the record of an incarnation that has ended.
func (ro *Roster) clear(slot int, incarnation uint64) {
	ctx, cancel := context.WithTimeout(ro.ctx, StoreWait)
	defer cancel()
	key := bootstrap.RankKey(slot)
	b, err := ro.dir.Store().Get(ctx, key)
	if err != nil {
		return
	}
	if rec, err := bootstrap.DecodeRecord(b); err == nil && rec.Incarnation == incarnation {
		if err := ro.dir.Store().CompareAndSwap(ctx, key, b, nil); err != nil &&
			!errors.Is(err, bootstrap.ErrConflict) {
			ro.log.Debug("a lost rank's record stays until its lease ends", "err", err)
		}
	}
}
