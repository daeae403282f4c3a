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

// watch follows the store. When the lease is lost it takes another one for the same incarnation,
// unless that was evicted.
func (ro *Roster) watch() {
	defer ro.wg.Done()
	for ro.ctx.Err() == nil && !ro.out() {
		store := ro.dir.Store()
		for e := range store.Watch(ro.ctx, membership.StoreKeys) {
			if e.Err != nil {
				ro.Tell(membership.StoreAway{Cause: storeCause(e.Err)})
				break
			}
			ro.seen(e)
		}
		ro.lapsed.Store(true)
		ro.mu.Lock()
		ro.leaseless = true
		ro.mu.Unlock()
		for ro.ctx.Err() == nil && !ro.out() {
			err := ro.dir.Reconnect(ro.ctx, store)
			if err == nil {
				ro.back()
				break
			}
			ro.log.Debug("the store stays away", "err", err)
			if ro.begun.Load() { // or another job has the name
				ro.over()
			}
			select {
			case <-ro.ctx.Done():
			case <-time.After(200 * time.Millisecond):
			}
		}
	}
}

// back takes up the state of the store after another lease was taken. The watch that follows tells
// the rest of it.
func (ro *Roster) back() {
	regained := time.Now().Add(ro.regain())
	ro.mu.Lock()
	maps.Copy(ro.want, ro.kept) // the values ended with the lease
	ro.leaseless, ro.unproven = false, regained
	ro.mu.Unlock()
	nudge(ro.dirty)
	if ro.out() { // meanwhile: the new record may be later than the removal of the old one
		ro.clear(ro.self.Slot, ro.self.Incarnation)
	}
	if ro.begun.Load() {
		ro.over()
	}
	ctx, cancel := context.WithTimeout(ro.ctx, StoreWait)
	defer cancel()
	if asks, err := ro.dir.Store().List(ctx, joinKey); err == nil {
		ro.mu.Lock()
		joiners := slices.Collect(maps.Keys(ro.joiners))
		ro.mu.Unlock()
		for _, slot := range joiners { // no watch reports what is gone
			if key := joinKey + strconv.Itoa(slot); asks[key] == nil {
				ro.seen(bootstrap.Event{Key: key})
			}
		}
	}
	ro.Tell(membership.StoreBack{})
}

// out reports whether this rank was evicted.
func (ro *Roster) out() bool {
	ro.proxy.Lock()
	defer ro.proxy.Unlock()
	return ro.evicted
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

// begin sees to it that the job's first view comes into the store. The lowest rank writes it, and
// tries again until it is there. A rank that has had no lease cannot tell whether the job has
// begun, continued without it, and ended: the job has yet to begin if another rank of it is
// registered, and is over if none is for longer than a loss of all leases, or if another job has
// its place.
func (ro *Roster) begin(v membership.View) {
	active := v.Active()
	lowest := active[0] == ro.self.Slot
	const pause = 100 * time.Millisecond
	// Looks of a rank that has had no lease, in a row, that find no other. Their number is the time
	// for which this process has looked: it does not look while it is stopped.
	alone := 0
	for try, over := lowest && !ro.lapsed.Load(), false; ; {
		if try && ro.publishFirst(ro.ctx, v) == nil || over && ro.over() {
			return
		}
		select {
		case <-ro.ctx.Done():
			return
		case <-time.After(pause):
		}
		if ro.begun.Load() && !over || ro.out() {
			return
		}
		if over || !lowest && !ro.lapsed.Load() {
			continue
		}
		now, err := ro.present(v)
		found := now.others || now.self && len(active) == 1
		switch {
		case err != nil:
			try, alone = false, 0
		case !ro.lapsed.Load():
			try = now.self
		case now.another || now.taken || !found && time.Duration(alone)*pause > ro.regain():
			ro.begun.Store(true)
			try, over = false, true
		case found:
			try, alone = now.self, 0
		default:
			try = false
			alone++
		}
	}
}

// presence is who is registered: this rank, another one of its job, another process in this rank's
// slot, a member of another job's view, which is in the store.
type presence struct{ self, others, taken, another bool }

// present looks who is registered; v is the first view of the job.
func (ro *Roster) present(v membership.View) (p presence, err error) {
	ctx, cancel := context.WithTimeout(ro.ctx, StoreWait)
	defer cancel()
	b, err := ro.dir.Store().Get(ctx, membership.ViewKey)
	if err != nil && !errors.Is(err, bootstrap.ErrNoKey) {
		return p, err
	}
	first, stored, bad := membership.DecodeStored(b)
	foreign := err == nil && bad == nil && first != ro.cfg.First
	records, err := ro.dir.Store().List(ctx, bootstrap.RankKeys)
	for _, b := range records {
		rec, bad := bootstrap.DecodeRecord(b)
		switch {
		case bad != nil:
		case rec.Rank == ro.self.Slot && rec.Incarnation == ro.self.Incarnation:
			p.self = true
		case rec.Rank == ro.self.Slot:
			p.taken = true
		default:
			p.others = p.others || v.Has(rec.Rank, rec.Incarnation)
		}
		p.another = p.another || bad == nil && foreign && stored.Has(rec.Rank, rec.Incarnation)
	}
	return p, err
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

// propose does the compare-and-swap of a proposal. If it prefers ranks to others that they cannot
// reach, these need their records: the link to a host that fell silent may have been missing for a
// window when its lease ends, before a probe has noticed that.
func (ro *Roster) propose(a membership.Propose) {
	ctx, cancel := context.WithTimeout(ro.ctx, StoreWait)
	defer cancel()
	answer := membership.Proposed{Epoch: a.New.Epoch}
	gone, err := ro.allUnregistered(ctx, a.Stay)
	if err != nil {
		answer.Cause = storeCause(err)
		ro.Tell(answer)
		return
	}
	if len(gone) > 0 {
		if ro.proves() {
			for _, p := range gone {
				ro.Tell(membership.Dead{Peer: p, Cause: "it cannot be reached, and its lease has ended"})
			}
		}
		answer.Outcome = membership.OutcomeHeld
		ro.Tell(answer)
		return
	}
	swap := func() error {
		return ro.dir.Store().CompareAndSwap(ctx, membership.ViewKey, membership.EncodeStored(ro.cfg.First, a.Old),
			membership.EncodeStored(ro.cfg.First, a.New))
	}
	err = swap()
	var c *bootstrap.ConflictError
	if errors.As(err, &c) && a.Old.Epoch == 1 && !ro.begun.Load() && !ro.lapsed.Load() {
		// The first view may not have been written yet.
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
			ro.begun.Store(true)
			if v.Epoch > a.Old.Epoch {
				answer.Outcome, answer.Current = membership.OutcomeLost, v
			} else {
				answer.Cause = fmt.Sprintf("the store has a view of epoch %d that does not follow the view of epoch "+
					"%d, in which this rank is: it was restored from a backup; start the job again", v.Epoch,
					a.Old.Epoch)
				ro.log.Debug("a view was proposed in vain", "why", answer.Cause)
			}
		} else if ro.begun.Load() {
			ro.over()
		}
	default:
		answer.Cause = storeCause(err)
		ro.log.Debug("a view was proposed in vain", "err", err)
	}
	ro.Tell(answer)
}

// over handles the end of the job without this rank: the job's view has been in the store, and now
// it is gone, or another job's is there. That happens when all others have left and this rank has
// lost its lease: it was evicted, or may have been. It also happens when the store was emptied, or
// no rank reached it for longer than it keeps a job, which this rank cannot tell from the former.
// The store is asked, because the events of a watch may be older than what this rank has written.
// It reports whether the store has answered.
func (ro *Roster) over() bool {
	ctx, cancel := context.WithTimeout(ro.ctx, StoreWait)
	defer cancel()
	b, err := ro.dir.Store().Get(ctx, membership.ViewKey)
	first, _, bad := membership.DecodeStored(b)
	why := "the store has the view of another job of this name"
	switch {
	case errors.Is(err, bootstrap.ErrNoKey):
		why = "the store has no view of the job any more: the other ranks have left, no rank has reached the store " +
			"for longer than it keeps a job, or it was emptied"
	case err != nil:
		return false
	case bad != nil || first == ro.cfg.First:
		return true
	}
	ro.inspect(func(m *membership.Machine) {
		if m.Member() { // otherwise the rank waits for admission, or knows
			ro.state(func() { ro.why[ro.self.Slot] = why })
			ro.Tell(membership.ViewSeen{View: m.View().Remove(ro.self.Slot)})
		}
	})
	return true
}

// storeCause says why the store did not carry out a request of this rank, for example because it
// cannot be reached.
func storeCause(err error) string {
	if errors.Is(err, bootstrap.ErrStoreAway) {
		return fmt.Sprintf("%v: this rank may be on the minority side of a partition", err)
	}
	return err.Error()
}

// clear removes the record of an incarnation that has ended or was removed.
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
